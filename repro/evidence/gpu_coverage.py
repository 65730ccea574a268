"""Which files a run of the GPU tests covers: those that can change how it ends.

* everything in `kernels/`: code, CUDA, tuned choices;
* each room (folder) of `repro/` in which any module imports torch, triton or `kernels`, as a whole,
  and a loose module that does; so a room that starts to use the device counts from then on, and
  nobody keeps a list;
* `repro/spec`, whose values they all are configured by;
* the modules of `benchmarks/`, the tests marked `gpu`, their `conftest.py`, and the modules of this
  repository that those tests import themselves, wherever they are.

Documentation, and what judges, reports or draws records, is not covered.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_KINDS = (".py", ".cu", ".cuh", ".json")
_DIGITS = 12
_USES_DEVICE = re.compile(r"^\s*(?:import|from)\s+(?:torch|triton|kernels)\b", re.MULTILINE)


def gpu_test_files(root: Path) -> list[str]:
    """Return the test files with a test marked `gpu`, as paths from the checkout `root`."""
    return sorted(
        path.relative_to(root).as_posix()
        for path in (root / "tests").rglob("*.py")
        if _marks_gpu(path.read_text(encoding="utf-8"))
    )


def is_test_file(name: str) -> bool:
    """Whether a path is that of a module of tests, which pytest collects and nothing imports."""
    path = PurePosixPath(name)
    return path.parts[0] == "tests" and path.name.startswith("test_")


def _marks_gpu(text: str) -> bool:
    """Whether a module uses `mark.gpu` (in its code; a string that holds the words is none)."""
    return "mark.gpu" in text and any(
        isinstance(node, ast.Attribute)
        and node.attr == "gpu"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
        for node in ast.walk(ast.parse(text))
    )


def covered_files(root: Path) -> dict[str, str]:
    """Return {path: digest} of the files of a checkout that its GPU tests cover.

    Raises
    ------
    ValueError
        If `root` has no tests: an installed package, whose files nobody changes.
    """
    if not (root / "tests").is_dir():
        raise ValueError(f"{root} has no tests; GPU tests are run in a checkout")
    tests = gpu_test_files(root)
    paths = {root / name for name in tests}
    for folder in ("kernels", "repro/spec", *_rooms_on_device(root)):
        paths |= set((root / folder).rglob("*"))
    paths |= set((root / "benchmarks").rglob("*.py"))
    paths |= {path for path in (root / "repro").glob("*.py") if _uses_device(path)}
    for name in tests:
        paths |= set(_conftests(root, root / name)) | set(_imported(root, root / name))
    return {
        path.relative_to(root).as_posix(): digest_of_content(path.read_bytes())
        for path in sorted(paths)
        if path.suffix in _KINDS and path.is_file()
    }


def _rooms_on_device(root: Path) -> list[str]:
    return sorted(
        room.relative_to(root).as_posix()
        for room in (root / "repro").iterdir()
        if room.is_dir() and any(_uses_device(path) for path in room.rglob("*.py"))
    )


def _uses_device(path: Path) -> bool:
    return _USES_DEVICE.search(path.read_text(encoding="utf-8")) is not None


def _conftests(root: Path, test: Path) -> Iterator[Path]:
    for folder in test.relative_to(root).parents:
        path = root / folder / "conftest.py"
        if path.is_file():
            yield path


def _imported(root: Path, test: Path) -> Iterator[Path]:
    """Yield the files of this repository that a module imports itself."""
    for name in imported_modules(test):
        place = root.joinpath(*name.split("."))
        yield from (
            path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()
        )


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the names that a module's imports may mean: `from package import name` may be two."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def digest_of_content(content: bytes) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
