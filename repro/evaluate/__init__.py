"""Evaluation: prompts, sampled completions, and their grades.

The package itself can be called: `repro.evaluate(...)` is `repro.door.front_door.evaluate`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Evaluate(ModuleType):
    """The package, which is also a function of the front door."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Evaluate a checkpoint; see `repro.door.front_door.evaluate`."""
        return import_module("repro.door.front_door").evaluate(*args, **named)


sys.modules[__name__].__class__ = _Evaluate
