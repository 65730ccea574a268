"""Receipts: what a record must show was really done, before its numbers count for anything.

The published code carries the reason: its added noise tests for a class that the sampler never
builds, touches nothing, prints nothing and raises nothing. So every record carries **effects**, the
traces of what was done, and `refusals` says in sentences what is missing or impossible.

What procedures write
---------------------
`effects`, for every run of a policy (`train`, `finetune`, `evaluate`):

==============================  ===================================================================
`linears`                       {format: count} of the projections as they really are
`relative_weight_error_mean`    ||W - dequantize(quantize(W))|| / ||W||, mean; None for stored codes
==============================  ===================================================================

and, for an arm with `weight_noise`, `weight_noise`: `matched_to`, `sigma`, `kl_format`, `kl_noise`
and `projections` (how many carry it); and for `train` and `finetune`:

==============================  ===================================================================
`adapter_modules`               LoRA modules attached (0 without LoRA)
`parameters_trainable`          how many parameters the optimiser holds
`trained_change_l2`             L2 norm of (trained parameters at the end - at the start)
`optimizer_steps`               updates really made
`advantage_group_mean_max`      largest |mean of a group's advantages| over the run (`train`)
`rows`                          of `finetune`: `tokens_trained`, of worked solutions
`noise`                         what the added noise did, see below
==============================  ===================================================================

`noise` holds `modules` (most norms perturbed at once), `channels_changed` (channels whose gain
really moved, summed over rollouts), `rollouts_asked` and `rollouts_perturbed` (rollouts for which
sigma was above 0, and those in which something moved; of `finetune`, which has none, optimiser
steps instead). Beside them stand the series `sigma` and `sigma_realised`, one value a step; of
`train`, `zero_variance_groups` (the share of groups whose rewards were all equal); of `finetune`,
`loss` and `tokens`; and `inputs` with the digests `checkpoint`, `test_problems`, `prompt_template`
and, when training, `train_problems`.

For whatever is timed on a device, `effects["timing"]`: `method` (`device_events` or
`synchronized_clock`), `seconds`, `bytes` and `flops` of the work, and the device's own measured
`bytes_per_second` and `flops_per_second`. A timer that did not wait for the device shows rates that
the device cannot reach.

At the systems tier, `effects["device"]` (`repro.measure.device_state` lists it): the device before
and after. A record that has it is refused when the measurement was not the device's only work:
memory that was not free before, other processes on the card, the allocator retrying under the clock
(`effects["timed_retries"]`, counted by procedures around what they time: not while engines are
built, nor at points that measure memory alone or under a budget, which make it retry on purpose);
or when heat or a power brake lowered the clocks. A power cap and idling lower them, too, and are
normal on these cards: neither is refused. Records from before this rule have none and stay valid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from repro.evidence.record import Record
from repro.spec.tier import GIB

# Relative weight error of a 4-bit format on bell-shaped weights is 0.09 to 0.12; random signs
# would give 1 or more. A wide gate: it tells "quantised" from "not", no more.
WEIGHT_ERROR = (0.02, 0.4)
# Centred advantages average to float32's rounding of values of order 1.
ADVANTAGE_MEAN_MOST = 1e-3
# Realised sigma over hundreds of channels; five standard errors at 400 channels are 18 %.
SIGMA_RATIO = (0.75, 1.25)
# The matching stops within 1 %.
KL_RATIO_MOST = 0.02
# A share of the device's own measured rate above which a time cannot be true.
RATE_MOST = 1.05
# In use on the device before a measurement: a context, workspaces, what the driver keeps.
BUSY_BYTES_MOST = 2 * GIB
# Share of a run's time in which heat or a power brake may have lowered the clocks.
SLOWED_MOST = 0.01
SPOILING = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
TIMING_METHODS = ("device_events", "synchronized_clock")


def refusals(record: Record, changes: Collection[str] = ()) -> list[str]:
    """Return why the record cannot be evidence, one sentence each; empty when it can.

    Parameters
    ----------
    changes
        Metrics whose percents are changes (`Metric.change`) and may be negative.
    """
    if not record.ok:
        return [f"the run failed: {record.outcome.get('reason', '').splitlines()[0]}"]
    found = _units(record, changes)
    if record.procedure in ("train", "finetune", "evaluate", "entropy"):
        found += _weights(record) + _weight_noise(record)
    if record.procedure == "train":
        found += _training(record) + _advantages(record) + _rewards(record) + _noise(record)
    if record.procedure == "finetune":
        found += _training(record) + _lessons(record) + _noise(record)
    if record.procedure == "entropy" and record.config["arm"]["noise"]:
        done = _effect(record, "noise_at_start") or {}
        if not done.get("channels_changed"):
            found.append("the added noise touched nothing (effects.noise_at_start)")
    if "timing" in record.effects:
        found += _timing(record.effects["timing"])
    if "device" in record.effects:
        found += _device(record.effects["device"])
    retried = {name: n for name, n in record.effects.get("timed_retries", {}).items() if n}
    if retried:
        found.append(f"the allocator had to retry under the clock: {retried}; needs none")
    return found


def _effect(record: Record, name: str) -> Any:
    return record.effects.get(name)


def _units(record: Record, changes: Collection[str]) -> list[str]:
    found = []
    for name, estimate in record.metrics.items():
        value, low = estimate.value, -100 if name in changes else 0
        if value is None:
            found.append(f"metric {name} is not a finite number")
        elif estimate.unit == "percent" and not low - 1e-9 <= value <= 100 + 1e-9:
            found.append(f"metric {name} is {value} percent; it must lie between {low} and 100")
    return found


def _weights(record: Record) -> list[str]:
    wanted = record.config["arm"]["weight_format"]
    linears = _effect(record, "linears")
    if not isinstance(linears, Mapping) or not linears:
        return ["effects.linears is missing: nothing shows which format the projections had"]
    others = {name: count for name, count in linears.items() if name != wanted and count}
    found = []
    if not linears.get(wanted):
        found.append(f"no projection was {wanted}; found {dict(linears)}")
    elif others:
        found.append(f"some projections were not {wanted}: {others}")
    error = _effect(record, "relative_weight_error_mean")
    low, high = WEIGHT_ERROR
    if wanted != "bf16" and error is not None and not low <= error <= high:
        found.append(
            f"weights called {wanted} differ from the originals by {error:.3g} of their size; "
            f"a 4-bit format gives {low} to {high}"
        )
    return found


def _weight_noise(record: Record) -> list[str]:
    wanted = record.config["arm"].get("weight_noise")
    done = _effect(record, "weight_noise")
    if not wanted:
        return [f"an arm without weight noise carries it: {done}"] if done else []
    if not isinstance(done, Mapping) or not done.get("projections"):
        return ["effects.weight_noise is missing: nothing shows that the weights carried noise"]
    if done.get("matched_to") != wanted["matched_to"]:
        return [f"weight noise was matched to {done.get('matched_to')}, not {wanted['matched_to']}"]
    there, here = done.get("kl_format") or 0.0, done.get("kl_noise") or 0.0
    if not there or abs(here / there - 1) > KL_RATIO_MOST:
        return [
            f"weight noise of KL {here:.3g} stands for {wanted['matched_to']}, whose rounding has "
            f"{there:.3g}"
        ]
    return []


def _training(record: Record) -> list[str]:
    arm, scale = record.config["arm"], record.config["scale"]
    found = []
    adapters = _effect(record, "adapter_modules")
    if arm["training"] == "lora" and not adapters:
        found.append(f"no adapter was attached (effects.adapter_modules is {adapters})")
    if arm["training"] == "full" and adapters:
        found.append(f"a fully trained arm carries {adapters} adapter modules")
    if not _effect(record, "parameters_trainable"):
        found.append("effects.parameters_trainable is 0 or missing: nothing could be trained")
    if not _effect(record, "trained_change_l2"):
        found.append("effects.trained_change_l2 is 0 or missing: training changed no parameter")
    steps = _effect(record, "optimizer_steps")
    if steps != scale["steps"]:
        found.append(f"{steps} optimiser steps were made; the scale has {scale['steps']}")
    return found


def _advantages(record: Record) -> list[str]:
    offset = _effect(record, "advantage_group_mean_max")
    if offset is None or offset > ADVANTAGE_MEAN_MOST:
        return [
            "advantages were not centred within their groups (effects.advantage_group_mean_max is "
            f"{offset}; at most {ADVANTAGE_MEAN_MOST})"
        ]
    return []


def _lessons(record: Record) -> list[str]:
    """Return why a run of supervised fine-tuning did not train on what its scale says."""
    scale = record.config["scale"]
    losses, tokens = record.series.get("loss", []), record.series.get("tokens", [])
    if len(losses) != scale["steps"] or not all(losses):
        return ["series loss does not show a loss at every step"]
    trained = (_effect(record, "rows") or {}).get("tokens_trained")
    budget = scale["evaluation"].get("token_budget", 0)
    # The last worked solution of a step may pass the step's share, by less than itself.
    most = budget + scale["rollout"]["max_new_tokens"]
    if sum(value or 0 for value in tokens) != trained or not budget <= trained <= most:
        return [
            f"{trained} tokens of worked solutions were trained on; the scale's budget is {budget}"
        ]
    return []


def _rewards(record: Record) -> list[str]:
    equal = record.series.get("zero_variance_groups")
    if not equal:
        return ["series zero_variance_groups is missing: nothing shows that rewards differed"]
    if all(value is not None and value >= 1 for value in equal):
        return ["all rewards of every group were equal in every step: there was nothing to learn"]
    return []


def _noise(record: Record) -> list[str]:
    noise = record.config["arm"]["noise"]
    asked = [value or 0.0 for value in record.series.get("sigma", [])]
    realised = [value or 0.0 for value in record.series.get("sigma_realised", [])]
    done = _effect(record, "noise") or {}
    touched = done.get("modules", 0)
    if noise is None or noise["form"] == "as_published":
        what = "without added noise" if noise is None else "of the published, inert code"
        return [f"an arm {what} perturbed {touched} norms"] if touched or any(realised) else []
    if not touched or not done.get("channels_changed"):
        return [
            f"the added noise touched nothing ({touched} norms, "
            f"{done.get('channels_changed', 0)} channels)"
        ]
    if not any(asked) or len(asked) != len(realised):
        return ["series sigma and sigma_realised do not show the added noise step by step"]
    if noise["form"] != "as_described":
        return []
    if done.get("rollouts_perturbed") != done.get("rollouts_asked"):
        return [
            f"{done.get('rollouts_perturbed')} of {done.get('rollouts_asked')} noisy rollouts were "
            "really perturbed"
        ]
    low, high = SIGMA_RATIO
    for step, (wanted, found) in enumerate(zip(asked, realised, strict=True)):
        if wanted and not low <= found / wanted <= high:
            return [
                f"step {step}: added noise had a deviation of {found:.3g}; asked for {wanted:.3g}"
            ]
    return []


def _timing(timing: Mapping[str, Any]) -> list[str]:
    method = timing.get("method")
    if method not in TIMING_METHODS:
        return [f"timed by {method!r}; needs one of {', '.join(TIMING_METHODS)}"]
    seconds = timing.get("seconds")
    if not seconds or seconds <= 0:
        return [f"timing.seconds is {seconds}"]
    found = []
    for amount, limit in (("bytes", "bytes_per_second"), ("flops", "flops_per_second")):
        if timing.get(amount) and not timing.get(limit):
            found.append(f"timing.{limit} is missing: the device's own rate is not shown")
        elif timing.get(amount) and timing[amount] / seconds > RATE_MOST * timing[limit]:
            rate = timing[amount] / seconds
            found.append(
                f"{rate:.3g} {amount} a second is more than the device can do "
                f"({timing[limit]:.3g}); the timer did not wait for the work"
            )
    return found


def _device(device: Mapping[str, Any]) -> list[str]:
    """Return why a measurement had not the device to itself, or not at its usual clocks."""
    before, after = device["before"], device["after"]
    memory = before["memory"]
    if "failed" in memory:
        return [f"effects.device: the free memory before is not known ({memory['failed']})"]
    found = []
    busy = memory["total_bytes"] - memory["free_bytes"]
    if busy > BUSY_BYTES_MOST:
        found.append(
            f"{busy / GIB:.1f} of {memory['total_bytes'] / GIB:.1f} GiB of the device were in use "
            f"before the measurement; at most {BUSY_BYTES_MOST / GIB:.0f} may be"
        )
    for when, state in (("before", before), ("after", after)):
        others = state["processes"].get("others")
        if others:
            found.append(f"{when} the measurement other processes were on the device: {others}")
        # The driver also reports a slowdown by hardware while an idle card raises its clocks: what
        # is seen before counts by its cause alone.
        names = SPOILING if state is before else ("hw_slowdown", *SPOILING)
        active = [name for name in names if state["card"].get(name) == "Active"]
        if active:
            found.append(f"{when} the measurement the clocks were lowered: {', '.join(active)}")
    return found + _slowed(before, after)


def _slowed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return for how long heat or a power brake lowered the clocks, where the driver counts it."""
    elapsed = 1e6 * (after["at"] - before["at"])
    found = []
    for name in SPOILING:
        if name in before["slowed_us"] and name in after["slowed_us"]:
            spent = after["slowed_us"][name] - before["slowed_us"][name]
            if spent > SLOWED_MOST * elapsed:
                found.append(
                    f"{name} lowered the clocks for {spent / elapsed:.1%} of the measurement; at "
                    f"most {SLOWED_MOST:.0%} may be"
                )
    return found
