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

`series_left_out` lists the series dropped at blessing, `not_kept` the observations that records of
long ago never held; a raw run has neither.

Of what is timed: `timing`: `method` (`device_events` or `synchronized_clock`), `seconds`, `bytes`
and `flops` of the work, and the device's own measured `bytes_per_second` and `flops_per_second`;
`timed_retries`, `timed_slowed`; and at the systems tier `device`, its state before and after
(`repro.measure.device_state`). A power cap and idling lower the clocks, too, and are normal on
these cards: neither is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from repro.evidence.receipts import answers, device, noise, training, weights
from repro.evidence.record import Record

Check = Callable[[Record], Iterable[str]]

_OF_POLICIES: tuple[Check, ...] = (
    weights.weights,
    weights.precision,
    weights.counts,
    weights.weight_noise,
    weights.rounding,
)
_OF_ANSWERS: tuple[Check, ...] = (answers.answers, answers.grades)
_OF_TRAINING: tuple[Check, ...] = (
    training.training,
    training.advantages,
    training.rewards,
    training.rows,
    noise.noise,
    noise.touched,
)
_OF_TIMES: tuple[Check, ...] = (device.timed, device.own_device)
CHECKS = {
    "train": (*_OF_POLICIES, *_OF_TRAINING, *_OF_ANSWERS, *_OF_TIMES),
    "evaluate": (*_OF_POLICIES, *_OF_ANSWERS, *_OF_TIMES),
    "dose": (*_OF_POLICIES, noise.at_start, *_OF_TIMES),
}


def violations(record: Record) -> list[str]:
    """Return why the record cannot be evidence, one sentence each; empty when it can."""
    if not record.ok:
        return [f"the run failed: {record.outcome['reason'].splitlines()[0]}"]
    checks = CHECKS.get(record.procedure, _OF_TIMES)
    return [sentence for check in checks for sentence in check(record)]
