"""What every benchmark shares: the device, its limits, and where its timings are stored.

`pytest benchmarks/ --benchmark-only` prints a table for each claim of the paper, and one for the
kernels; with `--benchmark-verbose` pytest-benchmark's own, too. It stores what it timed as
pytest-benchmark's JSON under `benchmarks/<device>/`. With `--benchmark-compare` it stores nothing,
and what is stored stands beside: a run that lost must not become what the next one is compared
with. Options of pytest-benchmark given by hand have their way.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.utils import get_current_time

from benchmarks.claim_tables import CPU_LINE, claim_table
from benchmarks.device_time import Limits, device_slug, device_type
from kernels import timing
from repro.evidence.provenance import source_commit

HERE = Path(__file__).resolve().parent
_PLUGINS_STORAGE = "file://./.benchmarks"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Store by device, before pytest-benchmark opens its storage."""
    option = config.option
    option.benchmark_quiet = True  # the tables below say it by claim
    if getattr(option, "benchmark_storage", None) == _PLUGINS_STORAGE:
        option.benchmark_storage = f"file://{HERE / device_slug()}"
    if getattr(option, "benchmark_only", False) and not option.benchmark_compare and _whole(config):
        option.benchmark_autosave = option.benchmark_autosave or _tag()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the timed rows, a table for each group."""
    session = getattr(config, "_benchmarksession", None)
    rows = [row for row in getattr(session, "benchmarks", ()) if row.stats.rounds]
    compared = getattr(session, "compared_mapping", None) or {}
    stored = {name: row for run in compared.values() for name, row in run.items()}
    if rows and device_type() == "cpu":
        terminalreporter.write_line(CPU_LINE)
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        terminalreporter.write(claim_table(str(group or "Timings"), own, stored))


def _tag() -> str:
    """Return the name of a stored run: commit, time, and whether the tree was clean."""
    commit, dirty = source_commit()
    return "_".join([commit, get_current_time(), *(["uncommitted-changes"] if dirty else [])])


def _whole(config: pytest.Config) -> bool:
    """Return whether every row is run: a selection must not become the device's last run."""
    option = config.option
    marked = option.markexpr not in ("", *config.getini("addopts"))
    selected = option.keyword or marked or option.collectonly
    return not selected and all(Path(path).resolve() == HERE for path in config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Say what the device and its software are; a host's name says nothing to a reader."""
    machine_info["node"] = machine_info["device"] = device_slug()
    machine_info["packages"] = {name: version(name) for name in ("torch", "triton")}


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    """Name the commit as records do: a copy of the tree may lack git."""
    commit, dirty = source_commit()
    if commit != commit_info["id"]:
        commit_info |= {"time": None, "author_time": None, "branch": None}
    commit_info |= {"id": commit, "dirty": dirty}


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Write a row's parameter as its name has it: its own text holds addresses of this process."""
    for row in output_json["benchmarks"]:
        row["params"] = dict.fromkeys(row["params"] or (), row["param"])


@pytest.fixture(scope="session")
def device() -> str:
    """Return "cuda" where there is a device that the kernels serve, else "cpu"."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("nothing is timed under Triton's interpreter")
    return device_type()


@pytest.fixture(scope="session")
def limits(device: str) -> Limits | None:
    """Return the device's measured rates; None on a CPU, whose rates nothing here is held to."""
    if device != "cuda":
        return None
    rates = Limits(copy_rate=timing.copy_rate(), matmul_rate=timing.matmul_rate())
    torch.cuda.empty_cache()
    return rates


@pytest.fixture(autouse=True)
def room(device: str) -> None:
    """Give back what the benchmark before has left in the allocator."""
    if device == "cuda":
        torch.cuda.empty_cache()
