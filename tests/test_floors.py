"""Imports go down a floor or stay: the floor table of the house, walked over the syntax trees."""

import ast
import functools
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

STANDARD_ONLY = ("repro/spec", "repro/evidence", "repro/targets")
FIRST_PARTY = ("repro", "kernels", "figures", "benchmarks", "tests", "noxfile")
_LEARNING = ("repro.spec", "repro.data", "repro.reward", "repro.models", "kernels")
_RUNS = (*_LEARNING, "repro.evidence", "repro.distributed", "repro.rollout", "repro.rl")
_VERDICTS = ("repro.spec", "repro.evidence", "repro.targets", "repro.run")
# Folder -> first-party packages that it may import, besides itself; lower floors first.
ALLOWED = {
    "kernels": (),
    "repro/spec": (),
    "repro/evidence": ("repro.spec",),
    "repro/targets": ("repro.spec",),
    "repro/data": ("repro.spec",),
    # Of data, the problem that a completion is graded against.
    "repro/reward": ("repro.spec", "repro.data"),
    "repro/models": ("repro.spec", "kernels"),
    # The ranks of a run, which evidence names where one is lost.
    "repro/distributed": ("repro.evidence",),
    "repro/rollout": (*_LEARNING, "repro.distributed"),
    # Of evidence, which source a process runs: a checkpoint carries it.
    "repro/rl": (*_LEARNING, "repro.evidence", "repro.distributed", "repro.rollout"),
    "repro/evaluation": _RUNS,
    "repro/runlog": _RUNS,
    "repro/export": (*_RUNS, "repro.evaluation"),
    # Of targets, the names of what the kernels are timed for.
    "repro/measure": (*_RUNS, "repro.targets"),
    "repro/procedures": (*_RUNS, "repro.evaluation", "repro.runlog", "repro.measure"),
    "repro/run": (*_RUNS, "repro.targets", "repro.runlog", "repro.measure", "repro.procedures"),
    "repro/door": (*_RUNS, "repro.targets", "repro.evaluation", "repro.export", "repro.run"),
    "repro/judge": _VERDICTS,
    # Of the door, the parsers, of which the reference of commands is written.
    "repro/report": (*_VERDICTS, "repro.judge", "repro.door.command_line"),
    # Of models, what checkpoints weigh, which needs no torch; of the door, its parser.
    "figures": (
        *_VERDICTS,
        "repro.judge",
        "repro.report",
        "repro.models.memory_plan",
        "repro.door.command_parser",
    ),
}
FORBIDDEN = {"kernels": ("transformers",), "figures": ("torch", "transformers")}
# Nested folders that their own folder imports, and that import it: ways of doing what it declares.
BOTH_WAYS = {
    "kernels/cuda",
    "kernels/triton",
    "repro/models/files",
    "repro/rollout/gpu",
    "repro/run/several_ranks",
    "repro/targets/coder",
}
# Heavy packages, and the folders in which one file each may import them at module level or inside.
ONE_FILE = {
    "math_verify": "repro/reward",
    "datasets": "repro/data",
    "vllm": "repro/rollout",
    "peft": "repro/models",
}


@functools.cache
def imports_of(path):
    modules = []
    # `from package import name` may mean two modules.
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(modules)


def python_files(folder):
    module = ROOT / f"{folder}.py"
    return [module] if module.is_file() else sorted((ROOT / folder).rglob("*.py"))


def is_inside(module, package):
    return module == package or module.startswith(package + ".")


def wrong_imports(folder, is_allowed):
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in python_files(folder)
        for module in imports_of(path)
        if not is_allowed(module)
    ]


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_floor_imports_only_floors_below_it(folder):
    own = folder.replace("/", ".")
    allowed = (own, *ALLOWED[folder])

    def is_allowed(module):
        if module.split(".")[0] not in FIRST_PARTY or module == "repro":
            return True
        return any(is_inside(module, package) for package in allowed)

    assert not wrong_imports(folder, is_allowed)


def test_no_record_or_measurement_reaches_a_verdict():
    judging = ("evidence/verdicts", "judge", "report", "run", "__main__.py")
    for path in python_files("repro"):
        verdicts = [name for name in imports_of(path) if is_inside(name, "repro.evidence.verdicts")]
        assert not verdicts or str(path.relative_to(ROOT / "repro")).startswith(judging), path


def test_every_module_lies_in_a_room_and_rooms_import_in_one_direction():
    loose = {path.name for path in (ROOT / "repro").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "distributed.py"}
    rooms = {path.parent for path in (ROOT / "repro").glob("*/__init__.py")}
    rooms |= {path.parent for path in (ROOT / "repro").glob("*/*.py")} - {ROOT / "repro"}
    assert {str(room.relative_to(ROOT)) for room in rooms} <= set(ALLOWED)
    order = [folder.replace("/", ".") for folder in ALLOWED]
    for place, folder in enumerate(ALLOWED):
        later = set(order[place + 1 :]) & set(ALLOWED[folder])
        assert not later, f"{folder} may import {later}, which stand above it"


@pytest.mark.parametrize("folder", STANDARD_ONLY)
def test_the_lowest_floors_need_the_standard_library_and_scipy_with_its_numpy_alone(folder):
    computing = ["scipy", "numpy"] if folder == "repro/evidence" else []
    known = {*sys.stdlib_module_names, "repro", *computing}
    assert not wrong_imports(folder, lambda module: module.split(".")[0] in known)


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_a_floor_leaves_heavy_packages_alone(folder):
    assert not wrong_imports(folder, lambda name: name.split(".")[0] not in FORBIDDEN[folder])


@pytest.mark.parametrize("package", sorted(ONE_FILE))
def test_a_heavy_package_is_imported_by_one_file(package):
    files = {
        str(path.relative_to(ROOT))
        for path in [*python_files("repro"), *python_files("kernels")]
        if any(is_inside(module, package) for module in imports_of(path))
    }
    assert len(files) <= 1
    assert all(name.startswith(ONE_FILE[package]) for name in files)


@functools.cache
def modules():
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for room in ("kernels", "repro", "figures")
        for path in python_files(room)
    }


def place_of(module):
    """Return a module's folder; itself, where it lies in no room."""
    path = modules()[module]
    return str((path if path.parent == ROOT / "repro" else path.parent).relative_to(ROOT))


def test_folders_import_one_another_in_one_direction_nested_ones_too():
    used = {place_of(module): set() for module in modules()}
    for module, path in modules().items():
        used[place_of(module)] |= {place_of(m) for m in imports_of(path) if m in modules()}
    both = {one for one in used if any(one in used[other] for other in used[one] - {one})}
    assert {one for one in both if str(Path(one).parent) in both} == BOTH_WAYS
    # As parts of their own folder these leave no circle.
    whole = {one: str(Path(one).parent) if one in BOTH_WAYS else one for one in used}
    graph = {}
    for one, others in used.items():
        graph.setdefault(whole[one], set()).update({whole[o] for o in others} - {whole[one]})
    graphlib.TopologicalSorter(graph).prepare()


def test_modules_import_one_another_in_no_circle():
    imports = {name: {*imports_of(path)} & modules().keys() for name, path in modules().items()}
    graphlib.TopologicalSorter(imports).prepare()  # names the circle where there is one
