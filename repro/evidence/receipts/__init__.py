"""Receipts: what a record must show was really done, before its numbers count for anything.

The published code carries the reason: its added noise tests for a class that the sampler never
builds, touches nothing, prints nothing and raises nothing. So every record carries **effects**, the
traces of what was done, and `violations` says in sentences what is missing or impossible.

It is one walk over declared checks (`CHECKS`), most basic first, each of them about a part: that
inputs and source are named, that modules and parameters are as many as the model has, that series
are as long as training was and follow the schedules, that all questions were asked and graded.
Metrics need no receipt: they are formed of the record as it is read (`repro.evidence.derived`).
What several records say of each other is `together`'s.

What procedures write
---------------------
`effects`, for every run of a policy (`train`, `evaluate`):

==============================  ===================================================================
`linears`                       {format: count} of the projections as they really are
`relative_weight_error_mean`    ||W - dequantize(quantize(W))|| / ||W||, mean; None for stored codes
==============================  ===================================================================

and, for an arm with `weight_noise`, `weight_noise`: `matched_to`, `sigma`, `kl_format`, `kl_noise`
and `projections` (how many carry it); for an arm with `rounding`, its `format` and `factor`, with
`projections` and `relative_change_mean`; where the scale permutes channels, `order`; and for
`train`:

==============================  ===================================================================
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

An arm with `exploration` has `exploration`, of the tokens sampled for training: `tokens_asked` (for
how many another temperature was asked), `tokens_explored` (how many were drawn at it) and
`tokens_changed` (how many of these the policy's own temperature would have chosen otherwise by the
same number); a run that changed none is refused.

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
"""

from __future__ import annotations

from collections.abc import Iterable

from repro.evidence.receipts import (
    answers,
    device,
    exploration,
    identity,
    noise,
    schedule,
    training,
    weights,
)
from repro.evidence.receipts.required import ASKED, POLICY, TRAINED, Check
from repro.evidence.record import Record
from repro.spec.claim import Metric

CHECKS: tuple[Check, ...] = (
    Check(find=identity.environment, procedures=POLICY),
    Check(find=identity.sources),
    Check(find=identity.inputs, procedures=POLICY),
    Check(find=weights.weights, procedures=POLICY),
    Check(find=weights.precision, procedures=POLICY),
    Check(find=weights.counts, procedures=POLICY),
    Check(find=weights.weight_noise, procedures=POLICY),
    Check(find=weights.rounding, procedures=POLICY),
    Check(find=training.training, procedures=TRAINED),
    Check(find=schedule.lengths, procedures=TRAINED),
    Check(find=schedule.rates, procedures=TRAINED),
    Check(find=schedule.sigmas, procedures=TRAINED),
    Check(find=training.advantages, procedures=TRAINED),
    Check(find=training.rewards, procedures=TRAINED),
    Check(find=training.rows, procedures=TRAINED),
    Check(find=noise.noise, procedures=TRAINED),
    Check(find=noise.noise_counts, procedures=TRAINED),
    Check(find=exploration.exploration, procedures=ASKED),
    Check(find=noise.at_start, procedures=("dose",)),
    Check(find=answers.answers, procedures=ASKED),
    Check(find=answers.grades, procedures=ASKED),
    Check(find=device.timed),
    Check(find=device.own_device),
)


def violations(record: Record, metrics: Iterable[Metric] = ()) -> list[str]:
    """Return why the record cannot be evidence, one sentence each; empty when it can.

    Parameters
    ----------
    metrics
        The target's: units are held against theirs, and percents that are changes
        (`Metric.change`) may be negative.
    """
    if not record.ok:
        return [f"the run failed: {record.outcome['reason'].splitlines()[0]}"]
    faults = list(answers.units(record, {metric.name: metric for metric in metrics}))
    for check in CHECKS:
        if check.applies(record):
            faults += check.find(record)
    return faults
