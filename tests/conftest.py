"""Fixtures of every test: uninitialised memory is poisoned, and torch runs on one thread."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

from repro.spec.tier import cuda_devices

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Commands take every core for each of their processes. Beside another test process such threads
# wait for one another most of the time, and all that runs then is many times slower.
if "PYTEST_XDIST_WORKER" in os.environ and not cuda_devices():
    os.environ.setdefault("OMP_THREAD_LIMIT", "1")

import pytest
import torch

from repro.judge.blessed import blessed_checks
from repro.judge.check import Checked
from repro.run.places import expected_folder
from repro.spec.tier import Tier
from tests.groups import pytest_xdist_make_scheduler

__all__ = ["pytest_xdist_make_scheduler"]  # a hook: pytest finds it by its name


# The order of floating-point sums depends on it.
torch.set_num_threads(1)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with the value least likely to pass for a result: NaN, or the largest integer."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        # Quantised and sub-byte types have no fill_; nobody reads memory on the meta device.
        if tensor.is_quantized or tensor.device.type == "meta" or tensor.layout != torch.strided:
            return tensor
        if tensor.dtype in _UNFILLABLE:
            return tensor
        with torch.no_grad():
            return _poison(tensor)

    return wrapper


_UNFILLABLE = {
    getattr(torch, name)
    for name in ("float4_e2m1fn_x2", "float8_e8m0fnu", "bits8", "bits16")
    if hasattr(torch, name)
}


# `with torch.device("meta")` knows the functions that allocate by what they were when it was first
# used: were that under poison, models would be built in memory, all of their size, from then on.
with torch.device("meta"):
    assert torch.empty(0).device.type == "meta"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that need the device to themselves first, before this process takes of it."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is None)


def pytest_collection_finish() -> None:
    """Keep what was imported, a million objects of torch's, out of later searches for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every element that a kernel forgets to write fail its test instead of passing by luck.

    `torch.empty` may return the zeros, or the right result, of an earlier tensor.
    """
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))


@pytest.fixture(autouse=True)
def device_memory_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give back what a GPU test's allocator keeps: several processes share the device."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Take back the threads that a command took for itself in this process."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def planned_targets() -> Iterator[None]:
    """Let the suite know the made-up targets with an analysis plan."""
    from tests.repro.planned import PLANNED, registered

    with registered(*PLANNED):
        yield


@pytest.fixture(scope="session")
def every_blessed() -> list[Checked]:
    """Return the checks of all blessed records, read once."""
    return blessed_checks(expected_folder(None))


@pytest.fixture(scope="session")
def checks_of(every_blessed: list[Checked]) -> Callable[..., list[Checked]]:
    """Return what gives the checks of blessed records, of one device where they name one."""

    def of(*names: str, tier: Tier | None = None, device: str = "nvidia_h200") -> list[Checked]:
        return [
            checked
            for checked in every_blessed
            if (not names or checked.selection.target.name in names)
            and tier in (None, checked.selection.tier)
            and checked.evidence.device in ("", device)
        ]

    return of


@pytest.fixture(scope="session")
def blessed_of(checks_of: Callable[..., list[Checked]]) -> Callable[..., Checked]:
    """Return what gives the one check of a target at a tier and on a device."""

    def of(name: str, tier: Tier = Tier.SYSTEMS, **more: str) -> Checked:
        (checked,) = checks_of(name, tier=tier, **more)
        return checked

    return of
