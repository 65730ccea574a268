"""Records of measurements whose device was not their own, or was slowed, are refused."""

import copy
import dataclasses
import re
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest

from repro.evidence.procedure import Measured
from repro.evidence.receipts import violations
from repro.evidence.record import Estimate, read_record, record_of
from repro.measure import device_state
from repro.run import carry_out as recording
from repro.run.carry_out import carry_out
from repro.spec.target import plan
from repro.spec.tier import GIB, Tier
from repro.targets import TARGETS
from repro.targets.rollout_speed import ROLLOUT
from tests.repro.small_runs import context_of

STATE = {
    "at": 1000.0,
    "memory": {
        "free_bytes": 79 * GIB,
        "total_bytes": 80 * GIB,
        "reserved_bytes": 0,
        "peak_bytes": 0,
    },
    "allocator": {"retries": 0, "out_of_memory": 0},
    "card": {"clocks.sm": "1980 MHz", "sw_power_cap": "Active", "gpu_idle": "Active"},
    "slowed_us": {"sw_power_cap": 0, "sw_thermal_slowdown": 7000},
    "processes": {"others": []},
}
LATER = STATE | {
    "at": 1100.0,
    "memory": STATE["memory"] | {"free_bytes": 2 * GIB},
    # A power cap all the time; heat for half a second of a hundred.
    "slowed_us": {"sw_power_cap": 100_000_000, "sw_thermal_slowdown": 507_000},
}


def record_with(**facts):
    run = plan(ROLLOUT, Tier.SYSTEMS, 1)[0]
    metrics = {"tokens_per_second_7b_1": Estimate(value=1.0, unit="tokens per second")}
    measured = Measured(metrics=metrics, facts=facts)
    return record_of(run, measured, environment={}, started=datetime.now(UTC))


def between(when="before", **changes):
    """Return both states, one of them with other values."""
    device = copy.deepcopy({"before": STATE, "after": LATER})
    for name, value in changes.items():
        device[when][name] = device[when][name] | value
    return device


FAILED = {"failed": "FileNotFoundError: nvidia-smi"}
UNKNOWN = {"card": FAILED, "slowed_us": FAILED, "processes": {"unknown": "a container"}}


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"device": between(), "timed_retries": {"7b_1": 0}},
        {"device": between(card={"hw_slowdown": "Active"})},
        {"device": {"before": STATE | UNKNOWN, "after": LATER | UNKNOWN}},
    ],
    ids=["from before the rule", "power cap", "idle card", "not to be asked"],
)
def test_what_is_no_fault_of_a_device_of_its_own_spoils_nothing(facts):
    assert violations(record_with(**facts)) == []


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (between(memory={"free_bytes": 60 * GIB}), "20.0 of 80.0 GiB"),
        (
            {**between(), "before": STATE | {"memory": {"failed": "RuntimeError: no device"}}},
            "free memory before",
        ),
        (between(processes={"others": [{"pid": "4711", "used_memory": "9 MiB"}]}), "before .*4711"),
        (
            between("after", processes={"others": [{"pid": "4711", "used_memory": "9 MiB"}]}),
            "after .* other processes",
        ),
        (between("after", card={"sw_thermal_slowdown": "Active"}), "after .*sw_thermal_slowdown"),
        (between("after", card={"hw_slowdown": "Active"}), "lowered: hw_slowdown"),
        (between(card={"hw_power_brake_slowdown": "Active"}), "lowered: hw_power_brake_slowdown"),
        (
            between("after", slowed_us={"sw_thermal_slowdown": 3_007_000}),
            r"sw_thermal_slowdown .*3.0%",
        ),
    ],
)
def test_a_spoilt_measurement_is_refused_for_its_reason(device, words):
    (reason,) = violations(record_with(device=device))
    assert re.search(words, reason)


def test_timed_repeats_that_counted_for_themselves_are_held_to_their_own_clocks():
    # Heat while weights were made; and repeats of an earlier process, outside this one's span.
    hot = between("after", slowed_us={"sw_thermal_slowdown": 3_007_000})
    assert violations(record_with(device=hot, timed_slowed={"sw_thermal_slowdown": 0.009})) == []
    shares = {"hw_thermal_slowdown": 0.0, "sw_thermal_slowdown": 0.034}
    (reason,) = violations(record_with(device=between(), timed_slowed=shares))
    assert "3.4% of the worst" in reason


@pytest.mark.parametrize(
    ("timing", "words"),
    [
        # A card at its power limit multiplies at another rate in every reading; it copies at one.
        ({"bytes": 1.04e12, "bytes_per_second": 1e12}, None),
        ({"bytes": 1.06e12, "bytes_per_second": 1e12}, "the timer did not wait"),
        ({"flops": 1.2e12, "flops_per_second": 1e12}, None),
        ({"flops": 1.3e12, "flops_per_second": 1e12}, "the timer did not wait"),
        ({"method": "clock"}, "timed by 'clock'"),
        ({"bytes": 1e9}, "own rate"),
    ],
)
def test_a_time_without_method_or_rate_or_that_the_rate_rules_out_is_refused(timing, words):
    timing = {"method": "device_events", "seconds": 1.0} | timing
    said = violations(record_with(timing=timing))
    assert len(said) == (words is not None)
    assert all(words in reason for reason in said)


def test_an_allocator_that_retried_under_the_clock_is_refused_and_otherwise_not():
    built = between("after", allocator={"retries": 3})
    assert violations(record_with(device=built, timed_retries={"7b_1": 0})) == []
    (reason,) = violations(record_with(device=built, timed_retries={"7b_1": 0, "7b_8": 2}))
    assert "{'7b_8': 2}" in reason


def systems_runs():
    runs = [plan(target, Tier.SYSTEMS, 1)[0] for target in TARGETS if Tier.SYSTEMS in target.scales]
    return list({run.procedure: run for run in runs}.values())


@pytest.mark.parametrize("tier", ["systems", "paper"])
@pytest.mark.parametrize("run", systems_runs(), ids=lambda run: run.procedure)
def test_every_new_record_of_the_systems_tier_has_its_device(run, tier, tmp_path, monkeypatch):
    states = iter([STATE, LATER])
    metrics = {"x": Estimate(value=1.0, unit="ratio")}
    run = dataclasses.replace(run, tier=tier)
    monkeypatch.setattr(device_state, "device_state", lambda: next(states))
    monkeypatch.setattr(recording, "_measure", lambda runs, context: [Measured(metrics=metrics)])
    (path,) = carry_out([run], tmp_path, context_of(tmp_path / "work"))
    device = read_record(path).facts.get("device")
    if tier == "systems":
        assert (device["before"], device["after"], device["retries"]) == (STATE, LATER, 0)
    else:
        assert device is None


def test_a_device_that_is_not_clean_is_not_measured(tmp_path, monkeypatch):
    busy, measure = Mock(side_effect=device_state.DeviceBusyError("others hold 30 GiB")), Mock()
    monkeypatch.setattr(recording, "cuda_devices", lambda: ("one",))
    monkeypatch.setattr(device_state, "require_clean", busy)
    monkeypatch.setattr(recording, "_measure", measure)
    with pytest.raises(device_state.DeviceBusyError, match="others hold 30 GiB"):
        carry_out(systems_runs()[:1], tmp_path, context_of(tmp_path))
    measure.assert_not_called()
