"""The reproducibility suite of QeRL (arXiv 2510.11696): a command and a verdict for each claim.

`repro.train`, `repro.quantize` and `repro.evaluate` are for models of one's own; each is imported
when it is first named (`repro.door.front_door`), and torch when it has checked its arguments.
Importing this package is free of side effects and of torch: `python -m repro list` answers at once.
It refuses where `import kernels` would find another distribution's package of that name.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a function of the front door."""
    if name in ("train", "quantize", "evaluate"):
        return getattr(import_module("repro.door.front_door"), name)
    raise AttributeError(f"module 'repro' has no attribute {name!r}")


def _require_own_kernels() -> None:
    """Raise `ImportError` where another distribution's `kernels` lies before, or over, ours."""
    own = Path(__file__).resolve().parent.parent / "kernels"
    spec = find_spec("kernels")
    found = Path(spec.origin).resolve().parent if spec and spec.origin else None
    # Ours imports nothing and defines nothing; a later installation overwrites it.
    overwritten = found == own and b"import" in (own / "__init__.py").read_bytes().split(b'"""')[-1]
    if found != own or overwritten:
        raise ImportError(
            f"`import kernels` finds {found or 'nothing'}, of another distribution; needed is "
            f"{own}: pip uninstall kernels, then install qerl-repro again"
        )


_require_own_kernels()
