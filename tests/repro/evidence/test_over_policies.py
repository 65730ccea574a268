"""Statements about policies: the pre-training seed is what varies, whatever the training seeds."""

from __future__ import annotations

import dataclasses
import math
import random
from statistics import fmean
from typing import Any

import pytest
from scipy import stats

from repro.evidence.claim_verdicts import judge
from repro.evidence.receipts.together import refusals_together
from repro.evidence.statistics import power
from repro.evidence.verdict import Verdict
from repro.spec.claim import Claim, Metric
from repro.spec.effect import Effect
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import honest_proxy_record

TOKENS = Metric(name="tokens", unit="tokens", title="tokens")
POLICIES = 4
PAPER = Effect(paper=2.3, smallest=1.1, measure="ratio", place="Fig. 4", because="stated before")


def claim(**more: Any) -> Claim:
    stated: dict[str, Any] = {
        "name": "sooner",
        "statement": "s",
        "source": "p",
        "kind": "pooled",
        "arms": tuple(f"{arm}{policy}" for policy in range(POLICIES) for arm in ("slow", "fast")),
        "metric": "tokens",
        "effect": PAPER,
        "paired_by": "pre-training seed",
    }
    return Claim(**(stated | more))


def tokens(quotients: list[float], seeds: int, noise: float = 0.0) -> dict[str, dict[int, float]]:
    """Return tokens by arm and seed: slow over fast is each policy's quotient, times noise."""
    draw = random.Random(1)
    collected: dict[str, dict[int, float]] = {}
    for policy, quotient in enumerate(quotients):
        slow = {seed: 1e5 * math.exp(draw.gauss(0, 0.3)) for seed in range(seeds)}
        errors = [draw.gauss(0, noise) for _ in range(seeds)]
        middle = fmean(errors)
        collected[f"slow{policy}"] = slow
        collected[f"fast{policy}"] = {
            seed: slow[seed] / quotient / math.exp(errors[seed] - middle) for seed in slow
        }
    return collected


def verdict_of(values: dict[str, dict[int, float]], lost: dict[str, str] | None = None) -> Verdict:
    return judge([claim()], {"tokens": TOKENS}, {"tokens": values}, {}, lost or {})[0]


def test_four_policies_are_four_values_with_three_degrees_of_freedom() -> None:
    quotients = [2.0, 2.6, 2.2, 2.4]
    verdict = verdict_of(tokens(quotients, seeds=8, noise=0.1))
    logarithms = [math.log(quotient) for quotient in quotients]
    expected = stats.ttest_1samp(logarithms, 0.0)
    low, high = (math.exp(end) for end in expected.confidence_interval(0.95))
    assert expected.df == POLICIES - 1
    assert verdict.n == POLICIES
    assert verdict.effect == pytest.approx(math.exp(fmean(logarithms)))
    assert (verdict.low, verdict.high) == pytest.approx((low, high))
    assert verdict.p == pytest.approx(expected.pvalue)
    assert verdict.status == "reproduced"
    assert "n = 4 pre-training seeds" in verdict.sentence
    assert "by pre-training seed 2, 2.6, 2.2, 2.4" in verdict.sentence
    assert "the paper's size here is 2.3 x" in verdict.sentence


def test_policies_that_disagree_are_not_outvoted_by_training_seeds() -> None:
    # Of 8 and of 200 seeds each: one policy of four shows the whole effect.
    few, many = (verdict_of(tokens([2.3, 1.0, 1.0, 1.0], seeds)) for seeds in (8, 200))
    assert few.status == many.status == "inconclusive"
    assert few.p == pytest.approx(many.p)
    assert "4 pre-training seeds would have shown a factor of" in few.sentence
    by_seed = dataclasses.replace(
        claim(), kind="ratio", margin=1.0, because="x", paired_by="seed", arms=("slow0", "fast0")
    )
    values = {"tokens": tokens([2.3, 1.0, 1.0, 1.0], 8, noise=0.1)}
    assert judge([by_seed], {"tokens": TOKENS}, values, {}, {})[0].status == "reproduced"


def test_agreeing_policies_exclude_the_papers_size() -> None:
    verdict = verdict_of(tokens([1.03, 0.9, 1.1, 0.98], seeds=8))
    assert verdict.status == "excluded"


def test_fewer_policies_or_lost_runs_decide_nothing() -> None:
    values = tokens([2.0, 2.6, 2.2, 2.4], seeds=8)
    assert verdict_of(values, {"fast2": "1 run(s) of fast2 failed"}).status == "inconclusive"
    del values["fast3"][5]
    missing = verdict_of(values)
    assert missing.status == "inconclusive"
    assert "tokens is missing in an arm of seed(s) 5" in missing.sentence
    three = {arm: of_arm for arm, of_arm in values.items() if not arm.endswith("3")}
    verdict = verdict_of(three)
    assert verdict.status == "inconclusive"
    assert verdict.sentence.startswith("3 paired pre-training seed(s); a verdict needs 4. ")


def test_what_the_target_says_that_four_can_show() -> None:
    """The figures of `repro/targets/ladder/policies.py`: four statements, 80 % power."""
    of_mean = 0.11 / math.sqrt(8)

    def factor(between: float) -> float:
        deviation = math.hypot(between, of_mean)
        sizes = [step / 1000 for step in range(1, 5000)]
        return math.exp(next(s for s in sizes if power(s / deviation, 4, 0.05 / 4) >= 0.8))

    assert [round(factor(between), 2) for between in (0.0, 0.05, 0.1)] == [1.14, 1.24, 1.45]
    assert factor(0.2) < 2.16
    assert factor(0.25) > 2.16
    reach = stats.t.ppf(1 - 0.05 / 8, 3) * of_mean / 2
    assert math.exp(reach) == pytest.approx(1.11, abs=0.005)


def test_only_pairs_of_arms_are_policies() -> None:
    with pytest.raises(ValueError, match="needs kind pooled, a pair of arms per policy"):
        claim(kind="ratio", arms=("slow0", "fast0"), margin=1.0, because="x")
    with pytest.raises(ValueError, match="the test sign_flip is paired by pre-training seed"):
        claim(test="sign_flip", effect=Effect(smallest=1.0, measure="units", because="x"))


def test_a_needles_start_is_that_of_its_seed() -> None:
    (target, arm) = find("table1"), "bf16_lora"
    records = {
        run.seed: honest_proxy_record(run) for run in plan(target, Tier.PROXY, [5, 6, 7], [arm])
    }

    def differing(name: str) -> dict[tuple[str, int], str]:
        changed = {
            seed: dataclasses.replace(record, inputs=record.inputs | {name: f"{seed}" * 64})
            for seed, record in records.items()
        }
        return refusals_together({arm: changed})

    assert differing("start") == {}
    assert "another recipe than most seeds" in differing("recipe")[arm, 6]
