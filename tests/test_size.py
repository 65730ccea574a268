"""Files of at most 700 lines, functions of at most 60 besides their docstring.

A file is split where a job ends; the limit is for files that have grown several.

Bodies of GPU kernels are exempt: they are one straight line of phases.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("repro", "kernels", "figures", "benchmarks", "tests")
FILE_LINES = 700
FUNCTION_LINES = 60
KERNEL_DECORATORS = ("jit", "autotune", "heuristics")


def sources() -> list[Path]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*files, ROOT / "noxfile.py"]


def decorator_name(node: ast.expr) -> str:
    target = node.func if isinstance(node, ast.Call) else node
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(decorator_name(item) in KERNEL_DECORATORS for item in node.decorator_list):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
        if lines > FUNCTION_LINES:
            yield f"{path.name}:{node.lineno} {node.name} has {lines} lines"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES, f"{path.name} has {lines} lines"
    assert not list(long_functions(path))


def test_a_long_function_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    body = "    x = 1\n" * FUNCTION_LINES
    path.write_text(f"def small():\n    pass\n\n\ndef large():\n{body}", encoding="utf-8")
    assert [line.split()[1] for line in long_functions(path)] == ["large"]
