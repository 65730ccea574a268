"""The state of a device, told from a made-up driver's tool and allocator."""

import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from repro.measure import device_state as states
from repro.measure.device_state import (
    DeviceBusyError,
    between,
    device_state,
    is_out_of_memory,
    needs_by_allocator,
    require_clean,
)
from repro.spec.tier import GIB


@pytest.fixture
def driver(monkeypatch):
    """Return what lets a made-up driver's tool answer: who computes, and what lowers the clocks."""

    def install(pids=("own",), active=()):
        def asked(fields, *, device, about="gpu"):
            assert device == "GPU-6a2f"
            if about == "compute-apps":
                own = str(os.getpid())
                named = [own if pid == "own" else pid for pid in pids]
                return [{"pid": pid, "used_memory": "1024 MiB"} for pid in named]
            return [{field: answer(field) for field in fields}]

        def answer(field):
            family, _, name = field.partition(".")
            if family.endswith("counters"):
                return "1500 us"
            if family.endswith("reasons"):
                return "Active" if name in active else "Not Active"
            return f"{field}!"

        monkeypatch.setattr(states, "ask_driver_tool", asked)

    return install


@pytest.fixture
def memory(monkeypatch):
    """Return what a made-up device of 80 GiB and this process's allocator hold."""
    held = SimpleNamespace(reserved=0, beside=GIB, stats={"num_alloc_retries": 0, "num_ooms": 0})

    def free_and_total(*device):
        return 80 * GIB - held.reserved - held.beside, 80 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held.reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *device: held.stats)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(uuid="6a2f")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return held


def test_a_state_holds_memory_clocks_reasons_and_the_others_on_the_card(driver, memory):
    driver(pids=("own", "4711"), active=("sw_power_cap",))
    state = device_state()
    assert state["memory"]["free_bytes"] == 79 * GIB
    assert state["memory"]["total_bytes"] == 80 * GIB
    assert state["card"]["clocks.sm"] == "clocks.sm!"
    assert state["card"]["sw_power_cap"] == "Active"
    assert state["card"]["hw_slowdown"] == "Not Active"
    assert state["slowed_us"]["sw_thermal_slowdown"] == 1500
    assert state["processes"] == {"others": [{"pid": "4711", "used_memory": "1024 MiB"}]}


def test_the_other_ranks_of_a_run_are_no_strangers_on_the_card(driver, memory, monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as child:
        gone = str(2**22 + 1)  # above what Linux numbers processes by: of no process here
        driver(pids=("own", str(child.pid), gone))
        monkeypatch.setattr("os.getppid", os.getpid)  # the child is a rank beside this process
        for world, others in (("1", 2), ("2", 1)):
            monkeypatch.setenv("WORLD_SIZE", world)
            assert len(device_state()["processes"]["others"]) == others
        child.kill()


def test_a_container_that_hides_process_numbers_is_said_and_not_guessed(driver, memory):
    driver(pids=("4711",))
    processes = device_state()["processes"]
    assert "others" not in processes
    assert "not among" in processes["unknown"]
    assert processes["listed"] == [{"pid": "4711", "used_memory": "1024 MiB"}]


def test_without_the_drivers_tool_the_memory_is_known_all_the_same(memory, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    state = device_state()
    assert state["memory"]["free_bytes"] == 79 * GIB
    assert all("FileNotFoundError" in state[name]["failed"] for name in ("card", "processes"))


def test_retries_of_the_run_and_its_peak_stand_beside_both_states(driver, memory):
    driver()
    memory.stats["num_alloc_retries"] = 2
    before = device_state()
    memory.stats["num_alloc_retries"] = 5
    span = between(before, device_state())
    assert (span["retries"], span["peak_bytes"]) == (3, 7)


@pytest.mark.parametrize(("reserved", "beside"), [(60, 1), (0, 30)])
def test_memory_in_use_is_told_with_its_processes(driver, memory, monkeypatch, reserved, beside):
    driver(pids=("own", "4711"))
    monkeypatch.setattr(states, "_PATIENCE_SECONDS", 0.0)
    memory.reserved, memory.beside = reserved * GIB, beside * GIB
    said = (
        f"{reserved * GIB} bytes are reserved by this process.* {beside * GIB} are in use be.*4711"
    )
    with pytest.raises(DeviceBusyError, match=said):
        require_clean()


def test_memory_of_a_process_that_has_just_ended_is_waited_for(memory, monkeypatch):
    memory.beside = 30 * GIB

    def passes(seconds):
        memory.beside = GIB

    monkeypatch.setattr(states.time, "sleep", passes)
    require_clean()
    assert memory.beside == GIB
    memory.reserved = GIB // 4  # what is free need not be given back whole
    require_clean()


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_failures(error, is_memory):
    assert is_out_of_memory(error) is is_memory


def test_memory_that_ran_out_is_found_under_what_was_raised_on_the_way_out(memory):
    memory.reserved = 78 * GIB
    error = RuntimeError("the capture was invalidated")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.50 GiB.")
    assert is_out_of_memory(error)
    assert "85.5 of 80.0 GiB" in needs_by_allocator(error)
