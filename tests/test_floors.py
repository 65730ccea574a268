"""Imports go down a floor or stay: the floor table of the house, walked over the syntax trees."""

from __future__ import annotations

import functools
import graphlib
from pathlib import Path

import pytest

from figures.floors import imported_modules

ROOT = Path(__file__).resolve().parent.parent

STANDARD_ONLY = ("repro/spec", "repro/evidence", "repro/targets")
# The distributions behind verdicts, imported where they are used.
EXCEPTED = {"repro/evidence/verdicts/statistics.py": "scipy"}
_LEARNING = ("repro.spec", "repro.data", "repro.reward", "repro.models", "kernels")
_RUNS = (*_LEARNING, "repro.evidence", "repro.rollout", "repro.rl")
_VERDICTS = ("repro.spec", "repro.evidence", "repro.targets", "repro.run")
# Folder -> first-party packages that it may import, besides itself; lower floors first.
ALLOWED: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "repro/spec": (),
    "repro/evidence": ("repro.spec",),
    "repro/targets": ("repro.spec",),
    "repro/data": ("repro.spec",),
    "repro/reward": ("repro.spec",),
    "repro/models": ("repro.spec", "kernels"),
    "repro/rollout": _LEARNING,
    # Of evidence, which source a process runs: a checkpoint carries it.
    "repro/rl": (*_LEARNING, "repro.evidence", "repro.rollout"),
    "repro/evaluate": _RUNS,
    "repro/runlog": _RUNS,
    "repro/export": (*_RUNS, "repro.evaluate"),
    # Of targets, the names of what the kernels are timed for.
    "repro/measure": (*_RUNS, "repro.targets"),
    "repro/procedures": (*_RUNS, "repro.evaluate", "repro.runlog", "repro.export", "repro.measure"),
    "repro/run": (*_RUNS, "repro.targets", "repro.runlog", "repro.measure", "repro.procedures"),
    "repro/judge": _VERDICTS,
    "repro/report": (*_VERDICTS, "repro.judge"),
    "repro/regression": (*_VERDICTS, "repro.judge", "repro.report"),
    # Of models, what checkpoints weigh, which needs no torch.
    "figures": (*_VERDICTS, "repro.judge", "repro.report", "repro.models.memory_plan"),
}
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "kernels": ("transformers", "peft", "vllm"),
    "repro/models": ("vllm",),
    "figures": ("torch", "transformers"),
}
# Heavy packages, and the folders in which one file each may import them at module level or inside.
ONE_FILE = {
    "math_verify": "repro/reward",
    "datasets": "repro/data",
    "vllm": "repro/rollout",
    "peft": "repro/models",
}


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(imported_modules(path))


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_floor_imports_only_floors_below_it(folder: str) -> None:
    own = folder.replace("/", ".")
    allowed = (own, *ALLOWED[folder])
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in python_files(folder)
        for module in imports_of(path)
        if is_inside(module, "repro") or is_inside(module, "kernels")
        if module != "repro" and not any(is_inside(module, package) for package in allowed)
    ]
    assert not wrong


def test_every_module_lies_in_a_room_and_rooms_import_in_one_direction() -> None:
    loose = {path.name for path in (ROOT / "repro").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py"}
    rooms = {path.parent for path in (ROOT / "repro").glob("*/__init__.py")}
    rooms |= {path.parent for path in (ROOT / "repro").glob("*/*.py")} - {ROOT / "repro"}
    assert {str(room.relative_to(ROOT)) for room in rooms} <= set(ALLOWED)
    order = [folder.replace("/", ".") for folder in ALLOWED]
    for place, folder in enumerate(ALLOWED):
        later = set(order[place + 1 :]) & set(ALLOWED[folder])
        assert not later, f"{folder} may import {later}, which stand above it"


@pytest.mark.parametrize("folder", STANDARD_ONLY)
def test_the_lowest_floors_need_the_standard_library_alone(folder: str) -> None:
    import sys

    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in python_files(folder)
        for module in imports_of(path)
        if module.split(".")[0] not in {*sys.stdlib_module_names, "repro"}
        and module.split(".")[0] != EXCEPTED.get(str(path.relative_to(ROOT)))
    ]
    assert not wrong


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_a_floor_leaves_heavy_packages_alone(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in python_files(folder)
        for module in imports_of(path)
        if module.split(".")[0] in FORBIDDEN[folder]
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(ONE_FILE))
def test_a_heavy_package_is_imported_by_one_file(package: str) -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in [*python_files("repro"), *python_files("kernels")]
        if any(is_inside(module, package) for module in imports_of(path))
    }
    assert len(files) <= 1
    assert all(name.startswith(ONE_FILE[package]) for name in files)


def test_modules_import_one_another_in_no_circle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for room in ("repro", "figures")
        for path in python_files(room)
    }
    imports = {name: {*imports_of(path)} & modules.keys() for name, path in modules.items()}
    graphlib.TopologicalSorter(imports).prepare()  # names the circle where there is one


def test_procedures_and_commands_import_no_figures() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in [*python_files("repro"), *python_files("kernels")]
        for module in imports_of(path)
        if module.split(".")[0] in ("figures", "benchmarks", "tests", "noxfile")
    ]
    assert not wrong


def test_the_walk_sees_an_import_that_goes_up(tmp_path: Path) -> None:
    path = tmp_path / "climbing.py"
    path.write_text("def late():\n    from repro.rl import trainer\n", encoding="utf-8")
    assert "repro.rl" in list(imports_of(path))
