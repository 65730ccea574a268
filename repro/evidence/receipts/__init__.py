"""Receipts: what a record must show was really done, before its numbers count for anything.

The published code carries the reason: its added noise tests for a class that the sampler never
builds, touches nothing, prints nothing and raises nothing. So every record carries **effects**, the
traces of what was done, and `violations` says in sentences what is missing or impossible. Metrics
need no receipt: they are formed of the record as it is read (`repro.evidence.derived`).

What procedures write
---------------------
Of every policy: `linears` ({format: count} of the projections as they really are),
`relative_weight_error_mean` (||W - dequantize(quantize(W))|| / ||W||; None for stored codes),
`norms_wrapped`, `norms_trained`, `compute`; where the arm asks for them `weight_noise`, `rounding`
and `order`.

Of training: `adapter_modules`, `parameters_trainable`, `optimizer_steps`, `trained_change_l2` (L2
norm of trained parameters at the end - at the start), `advantage_group_mean_max` (largest |mean of
a group's advantages|), `rows`; and `noise`: `modules` (most norms perturbed at once),
`channels_changed` (channels whose gain really moved, summed over rollouts), `rollouts_asked` and
`rollouts_perturbed` (rollouts for which sigma was above 0, and those in which something moved),
beside the series `sigma` and `sigma_realised`, one value per step.

Of answers: `answers`, the tallies of each set by the name of its accuracy, and `grades`, how many
had each status.

`adapter_modules`               LoRA modules attached (0 without LoRA)
`parameters_trainable`          how many parameters the optimiser holds
`trained_change_l2`             L2 norm of (trained parameters at the end - at the start)
`optimizer_steps`               updates really made
`advantage_group_mean_max`      largest |mean of a group's advantages| over the run
`noise`                         what the added noise did, see below
==============================  ===================================================================

`noise` holds `modules` (most norms perturbed at once, or projections behind them where each has
noise of its own), `channels_changed` (channels whose gain really moved, summed over rollouts),
`rollouts_asked` and `rollouts_perturbed` (rollouts for which sigma was above 0, and those in which
something moved). Beside them stand the series `sigma` and `sigma_realised`, one value per step;
`zero_variance_groups` (the share of groups whose rewards were all equal), and where the scale asks
for them `accuracy_sampled` and `tokens_sampled` (so far), and for each class of tokens its entropy
and its share of the tokens; and `inputs` with the digests `checkpoint`, `test_problems`,
`prompt_template` and, when training, `train_problems`.

`series_left_out` lists the series dropped at blessing, `not_kept` the observations that records of
long ago never held; a raw run has neither.

For whatever is timed on a device, `effects["timing"]`: `method` (`device_events` or
`synchronized_clock`), `seconds`, `bytes` and `flops` of the work, and the device's own measured
`bytes_per_second` and `flops_per_second`. A timer that did not wait for the device shows rates that
the device cannot reach.

At the systems tier, `effects["device"]` (`repro.measure.device_state` lists it): the device before
and after. A record that has it is refused when the measurement was not the device's only work:
memory that was not free before, other processes on the card, the allocator retrying under the clock
(`effects["timed_retries"]`, counted by procedures around what they time: not while engines are
built, nor at points that measure memory alone or under a budget, which make it retry on purpose);
or when heat or a power brake lowered the clocks for more than a hundredth of the time: of the worst
timed repeat where the procedure reads the driver's counts around each (`effects["timed_slowed"]`,
shares by reason), else of the whole measurement. A power cap and idling lower the clocks, too, and
are normal on these cards: neither is refused. Records from before this rule have none and stay
valid.
=======
Of what is timed: `timing`: `method` (`device_events` or `synchronized_clock`), `seconds`, `bytes`
and `flops` of the work, and the device's own measured `bytes_per_second` and `flops_per_second`;
`timed_retries`, `timed_slowed`; and at the systems tier `device`, its state before and after
(`repro.measure.device_state`). A power cap and idling lower the clocks, too, and are normal on
these cards: neither is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from repro.evidence.receipts import added_noise, device, grading, training, weights
from repro.evidence.record import Record

Check = Callable[[Record], Iterable[str]]

_OF_POLICIES: tuple[Check, ...] = (
    weights.weights,
    weights.precision,
    weights.counts,
    weights.weight_noise,
    weights.rounding,
)
_OF_ANSWERS: tuple[Check, ...] = (grading.answers, grading.grades)
_OF_TRAINING: tuple[Check, ...] = (
    training.training,
    training.advantages,
    training.rewards,
    training.rows,
    added_noise.noise,
    added_noise.touched,
)
_OF_TIMES: tuple[Check, ...] = (device.timed, device.own_device)
CHECKS = {
    "train": (*_OF_POLICIES, *_OF_TRAINING, *_OF_ANSWERS, *_OF_TIMES),
    "evaluate": (*_OF_POLICIES, *_OF_ANSWERS, *_OF_TIMES),
    "dose": (*_OF_POLICIES, added_noise.at_start, *_OF_TIMES),
}


def violations(record: Record) -> list[str]:
    """Return why the record cannot be evidence, one sentence each; empty when it can."""
    if not record.ok:
        return [f"the run failed: {record.outcome['reason'].splitlines()[0]}"]
    checks = CHECKS.get(record.procedure, _OF_TIMES)
    return [sentence for check in checks for sentence in check(record)]
