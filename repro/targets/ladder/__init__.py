"""The ladder of exploration: environments in which entropy can decide, each with its own assay.

The tier's other targets train a policy that shows its working two times in five, at a third of the
rate that is best for it. There exploration does not bind, and what a format or added noise does to
it cannot be seen, whatever its size. The rungs here are the same policy with that habit made rare
(`proxy-30m-needle4`: one completion in 25; `proxy-30m-needle05`: one in 200), so that a run is flat
until it has happened on it, and then jumps: the shape of the paper's Figures 7 and 12.

==========================  =======================================================================
`needle`                    the rungs: formats and QeRL, exploration controls, the sweep; what the
                            first left open, asked again of fresh seeds (`AGAIN`)
`doses`                     multiples of a rounding, stronger noise; noise shared or drawn by weight
`dose_start`                the same arms before training: KL and entropy over rounding draws
`rates`                     five absolute rates, who collapses; ranks with alpha fixed and growing
`skill`                     a policy that still has arithmetic to learn, and a sweep of the rates
                            on it; the earlier task with DAPO; untrained policies over rounding
                            draws
`needle_policies`           the key contrasts of the needle at 4 % over four pre-training seeds:
                            apart from the ladder (`OVER_POLICIES`), a deeper look
==========================  =======================================================================

What is compared is `take_off_steps`, the steps until the training accuracy reaches the scale's
threshold, as a quotient of two arms: the axis of Figures 4, 7, 8, 12 and 13. A run that does not
get there counts with all of its steps: less than it would have needed, so that a quotient errs
towards one. Where more than half of an arm's runs do not get there, the statement is not testable
(an assay of each). Tokens sampled until then (`take_off_tokens`) are recorded beside it. They were
compared first, and a pilot showed why they cannot decide: a right completion here is eight times as
long as a careless one, so that arms that learn sooner spend more of them.

Each environment has a positive control: the same policy, the same gradient, but the decision alone
drawn colder. If that does not put the take-off off by 15 %, the environment cannot test the
mechanism, and no statement about formats or noise is judged there.

Seeds are pairs: the order of the problems, the adapter's start and the order of channels, which
draws every rounding again. No other run of the tier has had them.
"""

from __future__ import annotations

from repro.spec.target import Target
from repro.targets.ladder.dose_start import DOSE_START
from repro.targets.ladder.doses import NEEDLE_DOSE, NEEDLE_SHARING, NEEDLE_SHARING_FRESH
from repro.targets.ladder.needle import (
    DIFFICULTY,
    NEEDLE_05,
    NEEDLE_05_FRESH,
    NEEDLE_4,
    NEEDLE_4_FRESH,
    NEEDLE_40,
    NEEDLE_SWEEP,
)
from repro.targets.ladder.policies import OVER_POLICIES
from repro.targets.ladder.rates import NEEDLE_RANKS, NEEDLE_RANKS_GROWN, NEEDLE_RATES
from repro.targets.ladder.skill import ANCHOR_DAPO, SKILL, SKILL_SWEEP, UNTRAINED_DRAWS

__all__ = ["AGAIN", "LADDER", "OVER_POLICIES"]

LADDER: tuple[Target, ...] = (
    NEEDLE_SWEEP,
    NEEDLE_40,
    NEEDLE_4,
    NEEDLE_05,
    DIFFICULTY,
    NEEDLE_DOSE,
    NEEDLE_SHARING,
    DOSE_START,
    NEEDLE_RATES,
    NEEDLE_RANKS,
    NEEDLE_RANKS_GROWN,
    SKILL_SWEEP,
    SKILL,
    ANCHOR_DAPO,
    UNTRAINED_DRAWS,
)
# Apart from the ladder and its two hours: fifty minutes for what its rungs left open.
AGAIN: tuple[Target, ...] = (NEEDLE_4_FRESH, NEEDLE_SHARING_FRESH, NEEDLE_05_FRESH)
