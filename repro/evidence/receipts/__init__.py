"""Receipts: facts that a record must contain before its metrics count as evidence.

The reason is in the published code: it adds noise only to modules of a class that the sampler never
builds, so it changes nothing, and nothing reports this. Therefore every record has **facts**
about what the run did, and `violations` returns a sentence for each that is missing or impossible.
Metrics need no receipt: they are computed from the record when it is read
(`repro.evidence.derived`).

Facts written by procedures
---------------------------
For every policy: `linears` ({format: number of projections}), `relative_weight_error_mean`
(||W - dequantize(quantize(W))|| / ||W||; None for stored codes), `norms_wrapped`, `norms_trained`
and `compute`; for arms with these options `rounding`, `order` and `folded`.

For training: `adapter_modules` (LoRA modules attached), `parameters_trainable`, `optimizer_steps`,
`trained_change_l2` (L2 norm of the change of the trained parameters), `advantage_group_mean_max`
(largest |mean of a group's advantages|), `rows`; and `noise` with `modules` (largest number of
norms perturbed at once), `channels_changed` (channels whose gain changed, summed over rollouts),
`rollouts_asked` and `rollouts_perturbed` (rollouts with sigma above 0, and those in which a gain
changed). The series `sigma` and `sigma_realised` have one value per step.

For evaluation: `answers`, the tallies of each test set by the name of its accuracy, and `grades`,
the number of completions by grading status.

For timing: `timing` with `method` (`device_events` or `synchronized_clock`), the `seconds`, `bytes`
and `flops` of the work, and the device's measured `bytes_per_second` and `flops_per_second`: a
timer that did not wait for the device shows higher rates than these. Also `timed_retries`,
`timed_slowed` and, at the systems tier, `device`, the state of the device before and after
(`repro.measure.device_state`). Power caps and idling also lower the clocks, and are allowed because
they are normal on these cards.

Blessed records also have `series_left_out`, the series dropped at blessing, and `not_kept`,
observations that old records never had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from repro.evidence.receipts import device, plausible, training, weights
from repro.evidence.record import Record
from repro.spec.config import RunConfig

Check = Callable[[Record], Iterator[str]]

_OF_POLICIES: tuple[Check, ...] = (
    weights.weights,
    weights.precision,
    weights.counts,
    weights.rounding,
)
_OF_ANSWERS: tuple[Check, ...] = (training.answers, training.grades)
_OF_TRAINING: tuple[Check, ...] = (
    training.training,
    training.advantages,
    training.rewards,
    training.rows,
    training.noise,
)
_OF_TIMES: tuple[Check, ...] = (device.timed, device.own_device)
_OF_NUMBERS: tuple[Check, ...] = (plausible.inputs, plausible.nats, plausible.formed)
CHECKS = {
    "train": (*_OF_POLICIES, *_OF_TRAINING, *_OF_ANSWERS, *_OF_NUMBERS, *_OF_TIMES),
    "evaluate": (*_OF_POLICIES, *_OF_ANSWERS, *_OF_NUMBERS, *_OF_TIMES),
    "dose": (*_OF_POLICIES, training.at_start, *_OF_NUMBERS, *_OF_TIMES),
    "step_time": (plausible.steps, plausible.memory, *_OF_TIMES),
    "operation": (plausible.ratios, *_OF_TIMES),
    "throughput": (plausible.rates, *_OF_TIMES),
}


def violations(record: Record, run: RunConfig | None = None) -> list[str]:
    """Return the reasons why a record is not evidence, a sentence each; empty if it is.

    `run` is what was to be run, of the same digest; None leaves out what needs it.
    """
    if not record.ok:
        return [f"the run failed: {record.outcome['reason'].splitlines()[0]}"]
    checks = CHECKS.get(record.procedure, _OF_TIMES)
    faults = [sentence for check in checks for sentence in check(record)]
    return faults if run is None else [*faults, *plausible.schedules(record, run)]
