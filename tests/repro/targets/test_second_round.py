"""The second round's plans: what its claims make of made-up runs, and what its scales hold."""

import dataclasses
import random
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from repro.evidence.derived import LATE
from repro.evidence.verdicts.claim_verdicts import judge
from repro.judge import check
from repro.run.select import Selection
from repro.spec.claim import Metric
from repro.spec.tier import Tier
from repro.targets import find

EARLY = "train_accuracy_sampled_to_100"
SIZES = ("0_5b", "1_5b")
# An arm's mean over the first steps and at its late tests, in percent.
Arms = Mapping[str, tuple[float, float]]
ALIKE: Arms = {
    "bf16": (16, 0),
    "nvfp4": (13, 0),
    "bf16_lora": (30, 40),
    "nvfp4_lora": (27, 40),
    "nvfp4_lora_aqn": (27, 40),
}


def verdicts(name, arms):
    """Return what eight seeds say whose values are the arms', a draw of the seed, and noise."""
    target, draw = find(name), random.Random(1)
    metrics: dict[str, Metric] = {metric.name: metric for metric in target.metrics}
    seeds = {seed: draw.gauss(0, 2) for seed in range(8)}
    values: dict[str, dict[str, dict[int, float]]] = {EARLY: {}, "test_late": {}, "gain_greedy": {}}
    for arm, (early, late) in arms.items():
        values[EARLY][arm] = {
            seed: (early + shift + draw.gauss(0, 0.5)) / 100 for seed, shift in seeds.items()
        }
        if late:
            values["test_late"][arm] = {
                seed: late + shift + draw.gauss(0, 0.5) for seed, shift in seeds.items()
            }
            values["gain_greedy"][arm] = {seed: 12 + draw.gauss(0, 1) for seed in seeds}
    absent = {arm.name: "not sent" for arm in target.arms if arm.name not in arms}
    return {one.name: one.status for one in judge(target.claims, metrics, values, absent, {})}


@pytest.mark.parametrize("size", SIZES)
def test_a_lower_start_alone_is_not_slower_learning(size):
    said = verdicts(f"learning_coder_{size}", ALIKE)
    assert said["nvfp4_faster"] == "excluded"
    assert said["qerl_ends_higher"] == "no difference"
    assert said["qerl_ends_equal"] == "reproduced"


def test_faster_learning_and_a_higher_end_are_seen():
    said = verdicts(
        "learning_coder_1_5b", {**ALIKE, "nvfp4_lora": (30, 42.7), "nvfp4_lora_aqn": (30, 42.7)}
    )
    assert said["nvfp4_faster"] == "reproduced"
    assert said["qerl_ends_higher"] == "reproduced"
    assert said["qerl_ends_equal"] == "contradicted"


@pytest.mark.parametrize("size", SIZES)
def test_five_tests_are_late_and_the_control_rolls_out_what_claims_read(size):
    scale = find(f"learning_coder_{size}").scales[Tier.MINI]
    late = [step for step in (*scale.evaluation.test_at, scale.steps) if step >= LATE * scale.steps]
    assert len(late) == 5
    assert scale.evaluation.prompts_of_steps == 100 <= scale.steps
    assert scale.seeds == tuple(range(8))


def test_the_rates_differ_in_the_rate_alone_and_are_compared_for_it():
    target = find("rates_coder_0_5b")
    rates = [target.scales[Tier.MINI].optimizer.learning_rates.of(arm) for arm in target.arms]
    assert rates == pytest.approx([1e-4, 5e-5, 1e-5])
    assert {claim.factor for claim in target.claims} == {("learning_rate_factor",)}
    selection = Selection(target=target, tier=Tier.MINI)
    evidence = SimpleNamespace(records={arm.name: {} for arm in target.arms})
    aside = [dataclasses.replace(claim, factor=("training",)) for claim in target.claims]
    said = [check._mismatch(selection, claim, evidence) for claim in (*target.claims, *aside)]
    assert said[:4] == [None] * 4
    assert all("learning rates" in text for text in said[4:])
