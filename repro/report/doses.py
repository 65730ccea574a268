"""A real checkpoint before training: the dose of each treatment.

The paper: NVFP4 raises the entropy of a 7B model by .055 nats at step 0 (Fig. 5), and so it
explores. A format's treatment is *delivered* where the 95 % interval of its rise, over draws of the
rounding and on finished completions, lies above half of that; *not delivered* where it lies below;
else *unclear*. For noise and multiples of the error only the values are reported.

Rounding also does harm, which is reported separately: BF16's accuracy, at the temperature at which
it has the arm's entropy, minus the arm's accuracy is the *damage*.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from repro.evidence.estimate import Interval, mean_interval
from repro.evidence.paper import paper_cells
from repro.judge.check import Checked
from repro.spec.arm import Arm

BASE = "bf16_lora"
_SHARE = 0.5
ENTROPY, ACCURACY = "entropy_finished", "accuracy_lenient"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDose:
    """An arm before training, compared with BF16 of the same draw.

    `rise` is that of the entropy on own finished completions, nats, over draws; its interval is the
    verdict's where a claim is about it. At `temperature` BF16 has the arm's entropy, mean over
    draws; None beyond the measured ones, as then is the `damage`: BF16's accuracy there less the
    arm's, points.
    """

    arm: Arm
    rise: Interval
    temperature: float | None
    damage: Interval | None

    @property
    def is_plain(self) -> bool:
        """Whether it is a format's own rounding, without noise."""
        return self.arm.weight_format != "bf16" and self.arm.noise is None


def paper_rises(expected: Path) -> dict[str, float]:
    """Return by how much formats raise the entropy at step 0 of the paper's Fig. 5, in nats."""
    start = {
        cell.arm: cell.value
        for cell in paper_cells(expected, "figure5")
        if cell.column == "step 0" and cell.arm
    }
    base = start.pop(BASE, None)
    return {} if base is None else {arm: value - base for arm, value in start.items()}


def treatment(rise: Interval, expected: Path) -> str:
    """Return whether a rise of the entropy is the paper's treatment."""
    least = _SHARE * paper_rises(expected)["nvfp4_lora"]
    if rise.low is None or rise.high is None:
        return "unclear"
    return "delivered" if rise.low >= least else "not delivered" if rise.high < least else "unclear"


def treatment_given(checks: Iterable[Checked], expected: Path) -> str:
    """Return whether NVFP4's treatment was given to the 0.5B, the size that was trained."""
    for checked in checks:
        if checked.selection.target.name == "dose_coder_0_5b" and checked.evidence.count:
            return treatment(doses(checked)["nvfp4_lora"].rise, expected)
    return "not measured"


def doses(checked: Checked) -> dict[str, ArmDose]:
    """Return the dose of each arm that a check of a `dose` target has records of, but BF16's."""
    import numpy as np

    target = checked.selection.target
    entropy, accuracy = (checked.evidence.values(name) for name in (ENTROPY, ACCURACY))
    judged = {
        claim.arms: Interval(value=verdict.effect, low=verdict.low, high=verdict.high, n=verdict.n)
        for claim, verdict in checked.statements()
        if claim.metric == ENTROPY and verdict.effect is not None and verdict.low is not None
    }
    base = entropy.get(BASE, {})
    tempered = [a for a in target.arms if a.temperature_factor != 1 and a.name in entropy]
    temperatures = {BASE: 1.0} | {arm.name: arm.temperature_factor for arm in tempered}
    by_arm = {}
    for arm in target.arms:
        own = entropy.get(arm.name, {})
        draws = [draw for draw in own if draw in base and arm.name != BASE]
        if not draws:
            continue
        alike: list[tuple[float, float]] = []
        for draw in draws:
            # By entropy: BF16's, the temperature, the accuracy there.
            points = sorted(
                (entropy[name][draw], temperature, accuracy[name][draw])
                for name, temperature in temperatures.items()
                if draw in entropy[name]
            )
            if points[0][0] <= own[draw] <= points[-1][0]:
                places, *columns = zip(*points, strict=True)
                warm, right = (float(np.interp(own[draw], places, of)) for of in columns)
                alike.append((warm, right - accuracy[arm.name][draw]))
        whole = len(alike) == len(draws) and arm.temperature_factor == 1
        rise = mean_interval([own[draw] - base[draw] for draw in draws])
        by_arm[arm.name] = ArmDose(
            arm=arm,
            rise=judged.get((arm.name, BASE), rise),
            temperature=mean_interval([t for t, _ in alike]).value if whole else None,
            damage=mean_interval([harm for _, harm in alike]) if whole else None,
        )
    return by_arm
