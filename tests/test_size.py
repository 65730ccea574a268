"""Files of at most 700 lines, functions of at most 60 besides their docstring; a budget for all.

What is cut of the whole is taken off its budget, which never passes the bounds; what is added shows
in the diff. Bodies of GPU kernels are exempt: they are one straight line of phases.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ("repro", "kernels", "figures", "benchmarks")
FILE_LINES = 700
FUNCTION_LINES = 60
BLOCK = re.compile(r"<!-- (\w+): ?begin.*?<!-- \1: ?end -->", re.DOTALL)
KERNEL_DECORATORS = ("jit", "autotune", "heuristics")
BUDGET = {
    "lines of source": 54_000,
    "lines of tests": 28_000,
    "hand-written words of docs": 14_000,
    "hand-written words of README": 720,
    "generated words of docs": 6_000,
    "pictures in docs": 16,
    "bytes of expected/": 1_283_000,
    "bytes of CHANGELOG": 16_500,
}
MOST = (54_000, 28_000, 14_000, 750, 6_000, 30, 1_500_000, 16_500)
BOUNDS = dict(zip(BUDGET, MOST, strict=True))
# A budget this far above what there is has to be lowered.
SLACK = 0.03
FOLDER_MODULES = 18


def modules_of(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def sources():
    return [*modules_of(*SOURCE, "tests"), ROOT / "noxfile.py"]


def decorator_name(node):
    target = node.func if isinstance(node, ast.Call) else node
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def docstring_lines(node):
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def long_functions(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(decorator_name(item) in KERNEL_DECORATORS for item in node.decorator_list):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
        if lines > FUNCTION_LINES:
            yield f"{path.name}:{node.lineno} {node.name} has {lines} lines"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_stay_small(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES, f"{path.name} has {lines} lines"
    assert not list(long_functions(path))


def sizes():
    """Return how large the checkout is, by the names of the budget."""
    source = [ROOT / "noxfile.py"]
    for folder in SOURCE:
        source += [p for kind in ("py", "cu", "cuh") for p in (ROOT / folder).rglob(f"*.{kind}")]
    hand, face, generated = words_of_pages()
    expected = [path for path in (ROOT / "expected").rglob("*") if path.is_file()]
    return {
        "lines of source": sum(map(lines_of, source)),
        "lines of tests": sum(map(lines_of, (ROOT / "tests").rglob("*.py"))),
        "hand-written words of docs": hand,
        "hand-written words of README": face,
        "generated words of docs": generated,
        "pictures in docs": len(list((ROOT / "docs").rglob("*.svg"))),
        "bytes of expected/": sum(path.stat().st_size for path in expected),
        "bytes of CHANGELOG": (ROOT / "CHANGELOG.md").stat().st_size,
    }


def words_of_pages():
    """Return the words that people wrote in all pages, those in README, and those of blocks."""
    pages = [ROOT / "README.md", ROOT / "kernels" / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    blocks = [match[0] for text in texts for match in BLOCK.finditer(text)]
    return (
        sum(words_in(BLOCK.sub("", text)) for text in texts),
        words_in(BLOCK.sub("", texts[0])),
        sum(words_in(block) for block in blocks),
    )


def words_in(text):
    """Return how many words a text has; the bars of its tables are none."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="docs/ is not part of a package")
@pytest.mark.parametrize("name", BUDGET)
def test_the_whole_stays_within_its_budget_and_that_within_its_bounds(name):
    size, most = sizes()[name], BUDGET[name]
    assert most <= BOUNDS[name]
    assert size <= most, f"{name}: {size}, over a budget of {most}"
    assert size >= (1 - SLACK) * most, f"{name}: {size}; lower the budget of {most} to it"


def test_a_folder_has_few_modules():
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules_of(*SOURCE))
    assert not {folder: n for folder, n in counts.items() if n > FOLDER_MODULES}


def test_no_two_modules_or_folders_have_the_same_name():
    modules = {path for path in modules_of(*SOURCE) if not path.stem.startswith("__")}
    names = Counter(path.stem for path in modules | {path.parent for path in modules})
    assert not {name: n for name, n in names.items() if n > 1}
