"""Receipts of timing and device: that the clock waited, and that no other work used the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from repro.evidence.record import Record
from repro.spec.tier import GIB

# Shares of the device's own measured rates above which a time cannot be true. A card that
# multiplies is at its power limit, and its rate is one of the moment: twenty readings of one H100
# 80GB lay between .62 and .78 PFLOP/s (1fc623c). A timer that does not wait is off by far more.
MOST_OF_RATE = {"bytes": 1.05, "flops": 1.25}
# Memory in use before a measurement: a context, workspaces, the driver's own.
BUSY_BYTES_MOST = 2 * GIB
# Share of a run's time in which heat or a power brake may have lowered the clocks.
SLOWED_MOST = 0.01
SPOILING = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
TIMING_METHODS = ("device_events", "synchronized_clock")


def timed(record: Record) -> Iterator[str]:
    """Yield why what was timed cannot be true."""
    if "timing" in record.facts:
        yield from _timing(record.facts["timing"])
    retried = {name: n for name, n in record.facts.get("timed_retries", {}).items() if n}
    if retried:
        yield f"the allocator had to retry under the clock: {retried}; needs none"


def own_device(record: Record) -> Iterator[str]:
    """Yield why a measurement had not the device to itself, as far as the record says.

    A procedure that reads the driver's counts around each repeat is judged by its worst repeat:
    heat while weights are made does no harm, nor does what an earlier process did.
    """
    if "device" not in record.facts:
        return
    device = record.facts["device"]
    yield from _device(device)
    slowed, what = record.facts.get("timed_slowed"), "worst timed repeat"
    if slowed is None:
        before, after, what = device["before"], device["after"], "measurement"
        seconds = after["at"] - before["at"]
        slowed = slowed_shares(before["slowed_us"], after["slowed_us"], seconds)
    for name, share in slowed.items():
        if share > SLOWED_MOST:
            yield (
                f"{name} lowered the clocks for {share:.1%} of the {what}; at most "
                f"{SLOWED_MOST:.0%} may be"
            )


def slowed_shares(
    before_us: Mapping[str, Any], after_us: Mapping[str, Any], seconds: float
) -> dict[str, float]:
    """Return by reason in which share of a time heat or a power brake lowered the clocks.

    Given are the driver's counts before and after `seconds`, by reason, in microseconds; a reason
    that it does not count is absent.
    """
    return {
        name: (after_us[name] - before_us[name]) / (1e6 * seconds)
        for name in SPOILING
        if name in before_us and name in after_us
    }


def _timing(timing: Mapping[str, Any]) -> Iterator[str]:
    method = timing.get("method")
    if method not in TIMING_METHODS:
        yield f"timed by {method!r}; needs one of {', '.join(TIMING_METHODS)}"
        return
    seconds = timing.get("seconds")
    if not seconds or seconds <= 0:
        yield f"timing.seconds is {seconds}"
        return
    for amount, most in MOST_OF_RATE.items():
        limit = f"{amount}_per_second"
        if timing.get(amount) and not timing.get(limit):
            yield f"timing.{limit} is missing: the device's own rate is not shown"
        elif timing.get(amount) and timing[amount] / seconds > most * timing[limit]:
            rate = timing[amount] / seconds
            yield (
                f"{rate:.3g} {amount} per second is more than the device can do "
                f"({timing[limit]:.3g}); the timer did not wait for the work"
            )


def _device(device: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a measurement had not the device to itself, or not at its usual clocks."""
    before, after = device["before"], device["after"]
    memory = before["memory"]
    if "failed" in memory:
        yield f"facts.device: the free memory before is not known ({memory['failed']})"
        return
    busy = memory["total_bytes"] - memory["free_bytes"]
    if busy > BUSY_BYTES_MOST:
        yield (
            f"{busy / GIB:.1f} of {memory['total_bytes'] / GIB:.1f} GiB of the device were in use "
            f"before the measurement; at most {BUSY_BYTES_MOST / GIB:.0f} may be"
        )
    for when, state in (("before", before), ("after", after)):
        others = state["processes"].get("others")
        if others:
            yield f"{when} the measurement other processes were on the device: {others}"
        # The driver also reports a slowdown by hardware while an idle card raises its clocks: what
        # is seen before counts by its cause alone.
        names = SPOILING if state is before else ("hw_slowdown", *SPOILING)
        active = [name for name in names if state["card"].get(name) == "Active"]
        if active:
            yield f"{when} the measurement the clocks were lowered: {', '.join(active)}"
