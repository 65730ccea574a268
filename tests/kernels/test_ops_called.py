"""`OPS` has a row for every kernel that a run calls, and none else, by the callers' sources.

Callers are `kernels.dispatch` and everything of `repro` but the procedure that times kernels and
calls them for that.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from kernels.ops import OPS

ROOT = Path(__file__).parents[2]
# Modules whose functions are no kernels.
PLAIN = {
    "dispatch": "chooses kernels; walked itself",
    "formats": "tables of the formats",
    "packing": "rearranges a weight once, in plain PyTorch; exact, see test_packing",
    "reference": "the specification",
    "reference_step": "the specification",
    "reference_train": "the specification",
    "segments": "bounds of rows, made on the host",
    "timing": "runs a clock around the calls of others",
    "tune": "times candidates for the linear layers, which have rows",
    "tuning": "tables of what was chosen",
}
# Functions beside kernels that launch nothing.
NO_KERNELS = {
    "kernels.cuda.linear:fuses_adapter": "tells which launch serves",
    "kernels.cuda.linear:goes_dense": "tells which launch serves",
    "kernels.triton.decode_adapter:counters": "counts counters",
    "kernels.triton.decode_step:StepWorkspace": "memory",
    "kernels.cuda.hopper:Adapter": "holds LoRA factors",
    "kernels.cuda.driver:architecture": "names what to compile for",
    "kernels.cuda.driver:load": "tries whether kernels compile; dequantize_packs has a row",
}


def callers() -> list[Path]:
    timing = set((ROOT / "repro" / "measure").glob("operation*.py"))
    sources = [path for path in (ROOT / "repro").rglob("*.py") if path not in timing]
    return [*sources, ROOT / "kernels" / "dispatch.py"]


def imported(node: ast.AST) -> dict[str, str]:
    """Return what names stand for by the imports of a scope: "module" or "module:name"."""
    names = {}
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.ImportFrom) and (part.module or "").split(".")[0] == "kernels":
            for alias in part.names:
                whole = f"{part.module}.{alias.name}"
                path = ROOT / Path(*whole.split("."))
                is_module = path.with_suffix(".py").is_file() or path.is_dir()
                meaning = whole if is_module else f"{part.module}:{alias.name}"
                names[alias.asname or alias.name] = meaning
        elif not isinstance(part, ast.FunctionDef | ast.ClassDef):
            names |= imported(part)
    return names


def calls(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """Yield "module:function" of each call into `kernels`, each scope by its own imports.

    A function that is handed on by keyword counts: whoever takes it calls it.
    """
    names = names | imported(node)
    for part in ast.iter_child_nodes(node):
        handed = [keyword.value for keyword in getattr(part, "keywords", ())]
        for function in [part.func, *handed] if isinstance(part, ast.Call) else []:
            if isinstance(function, ast.Name) and ":" in names.get(function.id, ""):
                yield names[function.id]
            elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                module = names.get(function.value.id, ":")
                if ":" not in module:
                    yield f"{module}:{function.attr}"
        # An import inside a branch serves that function alone.
        yield from calls(part, names)


@functools.cache
def called() -> dict[str, str]:
    """Return every kernel called and the file that calls it."""
    return {
        name: str(path.relative_to(ROOT))
        for path in callers()
        for name in calls(ast.parse(path.read_text(encoding="utf-8")), {})
        if name.split(":")[0].removeprefix("kernels.") not in PLAIN
    }


def test_every_kernel_that_a_run_calls_has_a_row() -> None:
    rows = {op.kernel for op in OPS}
    missing = {name: at for name, at in called().items() if name not in rows | set(NO_KERNELS)}
    assert not missing, f"no row of OPS for {missing}"


def test_every_row_is_of_a_kernel_that_a_run_calls() -> None:
    idle = sorted({op.kernel for op in OPS} - set(called()))
    assert not idle, f"no run calls {idle}"


def test_every_exception_is_needed() -> None:
    assert set(NO_KERNELS) <= set(called())
