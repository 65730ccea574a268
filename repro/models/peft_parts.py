"""What is taken of peft, imported without the quantised layers of other libraries.

peft imports bitsandbytes and torchao where they are installed, to put adapters on their layers.
Adapters here stand on this project's own; those two would be two fifths of the time that peft takes
to import, in each worker process. They are hidden from it while it is imported, and from nobody
afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

__all__ = ["AutoPeftModelForCausalLM", "LoraConfig", "PeftLinear", "PeftModel", "get_peft_model"]


@contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """Let packages that are not imported yet look as if they were not installed."""
    chosen = [name for name in names if name not in sys.modules]
    # What `import` and `importlib.util.find_spec` take for a package that is not there.
    sys.modules.update(dict.fromkeys(chosen, cast(ModuleType, None)))
    try:
        yield
    finally:
        for name in chosen:
            sys.modules.pop(name, None)


with _hidden("bitsandbytes", "torchao"):
    from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
    from peft.tuners.lora.layer import Linear as PeftLinear
