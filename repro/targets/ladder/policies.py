"""The needle at 4 % over four pre-training seeds: do the verdicts hold for policies, or for one.

Every other verdict of the ladder rests on networks of one pre-training seed, however many training
seeds and roundings it counts. `needle_policies` asks its key contrasts (NVFP4 against BF16, AQN
against none, QeRL against BF16) of four `proxy-30m-needle4`, each from a pre-training of its own:
other initial weights and other documents in another order, the same in all else. Seed 0's runs are
the rung's own (`needle_4`); those of the other three are recorded as `needle_4_seed1` to
`needle_4_seed3`, which state nothing by themselves.

The unit of replication is the pre-training seed. The logarithms of the quotients of eight training
seeds make one value per policy, and Student's t has four of them, three degrees of freedom: what
policies differ by is counted, and more training seeds would not buy more certainty than that. The
verdict's sentence has the effect in each policy. The training seeds are the same eight for every
policy, so what an order of the problems adds to a contrast on all policies alike is not counted;
what an order of the channels adds is, since it rounds other weights.

What four can show. The deviation of paired log take-off was .11 between training seeds in the
pilot, NVFP4 against BF16; of the mean of eight it is .039. Corrected for four statements, at 80 %
power, a factor of 1.14 shows if the effect is the same in all policies, of 1.24 if it deviates by 5
% from policy to policy, of 1.45 at 10 %; the paper's 2.3 and 2.2 show at up to a fifth. Four cannot
show that there is *no* difference within 10 %: the simultaneous interval is 11 % to either side
even if the effect is the same in all. And they say nothing of another recipe, size or task.

It is a deeper look, apart from the ladder: three more pre-trainings of both recipes, and 128 runs,
of which 32 are the rung's own.
"""

from __future__ import annotations

import dataclasses

from repro.spec.effect import Assay
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets.ladder.common import METRICS_OF_LADDER, SEEDS, WHY_NOT, needs_of
from repro.targets.ladder.needle import BF16, NEEDLE_4, NVFP4, OPENING_COLDER, QERL

# Of seed 0 are the ladder's own policies.
_POLICY_SEEDS = (0, 1, 2, 3)
_ARMS = (BF16, NVFP4, QERL, OPENING_COLDER)
_KEY = ("nvfp4_sooner", "aqn_sooner", "qerl_sooner", "opening_colder_later")
# Eight training seeds average their own deviation to a third; sixteen would narrow an interval over
# policies that differ by 5 % by a tenth, for twice the runs.
_SCALE = dataclasses.replace(NEEDLE_4.scales[Tier.PROXY], seeds=SEEDS[:8])


def _runs_on(policy: int) -> Target:
    """Return the target that records the runs on the policy of a pre-training seed."""
    if policy == 0:
        return NEEDLE_4
    scale = dataclasses.replace(_SCALE, checkpoint=f"{_SCALE.checkpoint}-seed{policy}")
    return Target(
        name=f"needle_4_seed{policy}",
        title=f"The needle at 4 % on the policy of pre-training seed {policy}: runs alone",
        statement="nothing by itself; its runs are a fourth of `needle_policies`",
        source="not in the paper",
        arms=_ARMS,
        metrics=METRICS_OF_LADDER,
        scales={Tier.PROXY: scale},
        needs={Tier.PROXY: needs_of(scale)},
        headline="take_off_steps",
        why_not=WHY_NOT,
    )


_HOMES = {policy: _runs_on(policy) for policy in _POLICY_SEEDS}


def _on(policy: int, arm: str) -> str:
    return f"{arm}_seed{policy}"


def _over_policies(claim: Claim) -> Claim:
    """Return a statement of the rung as one about policies, its assays asked of each."""
    assays: list[Assay] = []
    for assay in claim.assays:
        each = [dataclasses.replace(assay, arm=_on(seed, assay.arm)) for seed in _POLICY_SEEDS]
        assays += each if assay.kind == "range" else [assay]
    return dataclasses.replace(
        claim,
        statement=f"over policies of four pre-training seeds: {claim.statement}",
        kind="pooled",
        arms=tuple(_on(policy, arm) for policy in _POLICY_SEEDS for arm in claim.arms),
        factor=("checkpoint", *claim.factor),
        margin=None,
        because="",
        paired_by="pre-training seed",
        assays=tuple(assays),
    )


NEEDLE_POLICIES = Target(
    name="needle_policies",
    title="The needle at 4 % over four pre-training seeds",
    statement="what a format, AQN or QeRL does to the take-off, it does to policies of other "
    "pre-training seeds, too; four of them can show a factor of 1.25 where their effects differ by "
    "5 %, and cannot show that there is no difference",
    source="Figs. 4, 8 and 12",
    arms=tuple(
        dataclasses.replace(
            arm, name=_on(policy, arm.name), label=f"{arm.label}, pre-training seed {policy}"
        )
        for policy in _POLICY_SEEDS
        for arm in _ARMS
    ),
    metrics=METRICS_OF_LADDER,
    claims=tuple(_over_policies(claim) for claim in NEEDLE_4.claims if claim.name in _KEY),
    scales={Tier.PROXY: _SCALE},
    needs={Tier.PROXY: needs_of(*(home.scales[Tier.PROXY] for home in _HOMES.values()))},
    headline="take_off_steps",
    shared={
        _on(policy, arm.name): (home, arm.name) for policy, home in _HOMES.items() for arm in _ARMS
    },
    across=("checkpoint",),
    why_not=WHY_NOT,
)
# Apart from the ladder, and beside its policies three more of both recipes.
OVER_POLICIES = (*(home for policy, home in _HOMES.items() if policy), NEEDLE_POLICIES)
