"""The dose that each arm is before any training, over six rounding draws.

`needle_dose` says what a dose does to the take-off; here the dose itself is measured, on the same
policy and with the same arms, untrained: KL(BF16 policy || arm's policy) per token of the BF16
policy's own completions, and the entropy, which the paper shows (Fig. 5). Where the paper's dose
lies among them follows from its entropy.

An adapter that has not been trained adds nothing, so an arm here is the trained one before its
first step, by the same name; the seeds are the first of `needle_dose`, with the same order
of channels and so the same rounding. A statement about a format is one about six roundings of
one checkpoint.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm
from repro.spec.needs import Needs
from repro.spec.target import Metric, Target
from repro.spec.tier import GIB, Tier
from repro.targets import paper_effects, proxy
from repro.targets.claims import difference
from repro.targets.entropy_start import ENTROPY_START
from repro.targets.ladder.common import SEEDS, TIERS, WHY_NOT
from repro.targets.ladder.doses import NEEDLE_DOSE
from repro.targets.ladder.needle import MXFP4, NEEDLE_4, NF4, QERL

# Of 8 completions each, some 35,000 tokens: draws differ by their rounding, not by their sample.
# Six are one more than a statement about draws needs, and what two hours for the ladder leave.
_PROMPTS = 64
_DRAWS = SEEDS[:6]
_TRAINED = NEEDLE_4.scales[Tier.PROXY]
SCALE = dataclasses.replace(
    _TRAINED,
    data=dataclasses.replace(_TRAINED.data, development_problems=_PROMPTS),
    evaluation=dataclasses.replace(
        _TRAINED.evaluation, threshold=0.0, token_classes=False, kl_to_start=False, dose=True
    ),
    seeds=_DRAWS,
)


def _untrained(arm: Arm) -> Arm:
    """Return the arm before its first step, which no learning rate has touched."""
    return dataclasses.replace(arm, label=f"{arm.label}, before training", learning_rate=None)


_BF16, _NVFP4, *_DOSES = map(_untrained, NEEDLE_DOSE.arms)
_NF4, _MXFP4, _QERL = map(_untrained, (NF4, MXFP4, QERL))
DOSE_START = Target(
    name="dose_start",
    title="The needle at 4 % before training: how large each dose is",
    statement="rounding to four bits raises the entropy, on the same tokens, whichever the draw",
    source="Fig. 5, first step; section 3.2",
    procedure="entropy",
    arms=(_BF16, _NF4, _MXFP4, _NVFP4, _QERL, *_DOSES),
    metrics=(
        Metric(
            name="kl_completions",
            unit="nats",
            title="KL from BF16 on its completions, per token",
            better="neither",
        ),
        *ENTROPY_START.metrics,
        Metric(
            name="accuracy_sampled_start",
            unit="percent",
            title="accuracy at T = 1 before training",
            better="higher",
        ),
    ),
    claims=tuple(
        difference(
            f"{arm.weight_format}_more_entropy",
            f"{arm.weight_format.upper()} weights have more entropy than BF16, on the same tokens",
            "Fig. 5",
            arm,
            _BF16,
            "weight_format",
            effect=paper_effects.ENTROPY[arm.weight_format],
            metric="entropy_forced",
            unit="rounding draw",
            draws=len(_DRAWS),
            tiers=TIERS,
        )
        for arm in (_NF4, _MXFP4, _NVFP4)
    ),
    headline="kl_completions",
    scales={Tier.PROXY: SCALE},
    needs={
        Tier.PROXY: Needs(
            # The cache of 512 rows, and the BF16 policy's distributions along its completions.
            memory_bytes=16 * GIB,
            disk_bytes=proxy.NEEDS.disk_bytes,
            policies=(SCALE.checkpoint,),
        )
    },
    why_not=WHY_NOT,
)
