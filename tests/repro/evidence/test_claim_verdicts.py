"""Claims and expectations judged: the statuses, and what must lead to each."""

import dataclasses
import itertools
import math
from statistics import stdev

import pytest

from repro.evidence.verdicts.claim_verdicts import judge, undecided
from repro.evidence.verdicts.expectation import Expectation
from repro.evidence.verdicts.verdict import Verdict, judge_expectation, with_discovery_rate
from repro.spec.claim import Claim, Dose, Effect, Metric, slope

ACCURACY = Metric(name="accuracy", unit="percent", title="accuracy")
GAIN = Metric(name="gain_greedy", unit="points", title="gain")
METRICS = {"accuracy": ACCURACY, "gain_greedy": GAIN}
# Effects of the paper of half a point and of 8 points: a tenth of it matters.
HALF = Effect(paper=0.5, measure="units", place="Table 1")
EIGHT = Effect(paper=8.0, measure="units", place="Table 1")


def claim(*arms, **more):
    """Return a claim about one arm, about a above b, or by a contrast of one's own."""
    signs = (1, -1, -1, 1)[: len(arms)]
    stated = {"name": "c", "statement": "s", "source": "p", "metric": "accuracy"}
    stated["contrast"] = dict(zip(arms, signs, strict=True))
    if not {"bound", "log", "effect", "mechanism", "side"} & more.keys():
        stated["effect"] = HALF
    return Claim(**(stated | more))


A_OVER_B = claim("a", "b")


def values(**arms):
    return {"accuracy": {arm: dict(enumerate(numbers)) for arm, numbers in arms.items()}}


def verdict_of(a_claim, lost=None, **arms):
    return judge([a_claim], METRICS, values(**arms), {}, lost or {})[0]


HIGH = [80.0, 82.0, 81.0, 83.0, 80.5]
LOW = [70.0, 71.0, 70.5, 72.5, 71.0]
NEAR = [80.5, 81.2, 81.4, 82.1, 81.3]


# Seeds differ by far more than their pairs.
APART = [-20.0, -10.0, 0.0, 10.0, 20.0]
NO_WORSE = claim("a", "b", bound=-1.5, because="stated in advance")
EQUAL = claim("a", "b", side="within", bound=1.0, because="stated in advance")
CONTROL = claim("a", mechanism=True, side="below", bound=15.0, because="drift")
CONFOUNDED = claim("a", "b", confounded="alpha grows, too")


@pytest.mark.parametrize(
    ("stated", "a", "b", "status"),
    [
        (A_OVER_B, HIGH, LOW, "reproduced"),
        (A_OVER_B, LOW, HIGH, "contradicted"),
        (A_OVER_B, HIGH, NEAR, "inconclusive"),
        (A_OVER_B, [v + 1 + 0.1 * i for i, v in enumerate(APART)], APART, "reproduced"),
        (NO_WORSE, NEAR, HIGH, "reproduced"),
        (NO_WORSE, LOW, HIGH, "contradicted"),
        (EQUAL, [0.1, -0.2, 0.3, -0.1, 0.0], [0.0] * 5, "reproduced"),
        (EQUAL, [1.0, -1.5, 2.0, -1.0, 0.5], [0.0] * 5, "inconclusive"),
        (EQUAL, [2.0, 2.5, 2.2, 2.1, 2.4], [0.0] * 5, "contradicted"),
        (EQUAL, [-2.0, -2.5, -2.2, -2.1, -2.4], [0.0] * 5, "contradicted"),
        (CONTROL, [1.0, -2.0, 3.0, 0.0, 1.0], LOW, "reproduced"),
        (CONTROL, [40.0, 42.0, 39.0, 41.0, 40.0], LOW, "contradicted"),
    ],
)
def test_a_claim_is_judged_by_its_interval_and_its_bound(stated, a, b, status):
    verdict = verdict_of(stated, a=a, b=b)
    assert (verdict.status, verdict.n) == (status, 5)
    # A contradicted claim of the paper's is a finding.
    assert verdict.own_fault == (stated is CONTROL and status == "contradicted")
    assert ("would have shown" in verdict.sentence) == (status == "inconclusive")


def test_a_trend_is_pages_and_can_be_reversed():
    arms = {"a": LOW, "b": [v + 2 for v in LOW], "c": [v + 4 for v in LOW]}
    for order, status in (("abc", "reproduced"), ("cba", "contradicted")):
        verdict = verdict_of(claim(contrast=slope(tuple(order)), test="page"), **arms)
        assert verdict.status == status
        assert abs(verdict.effect or 0) == pytest.approx(2.0)
        assert verdict.sentence.startswith("slope per place ")
        # An effect of the paper's is spread over the steps from the lowest to the highest.
        assert verdict.paper == pytest.approx(0.25)


def test_leaving_arms_out_makes_no_verdict_stronger():
    columns = {"a": HIGH, "b": LOW, "c": [v + 0.4 for v in NEAR], "d": [82.0, 84.1, 81.5, 85.3, 81]}
    pairs = [*itertools.combinations(columns, 2), ("b", "a")]
    claims = [claim(*pair, name="".join(pair), effect=EIGHT) for pair in pairs]
    claims.append(claim("d", "c", name="flip", test="sign_flip", effect=EIGHT))
    whole = judge(claims, METRICS, values(**columns), {}, {})
    strength = {"not run": 0, "inconclusive": 1}
    for count in range(2, len(columns)):
        for arms in itertools.combinations(columns, count):
            absent = {arm: "not sent" for arm in columns if arm not in arms}
            sent = values(**{arm: columns[arm] for arm in arms})
            for part, full in zip(judge(claims, METRICS, sent, absent, {}), whole, strict=True):
                assert part.status in ("not run", full.status, "inconclusive")
                assert strength.get(part.status, 2) <= strength.get(full.status, 2)
                if part.p is not None:
                    assert part.p >= full.p


def test_a_claim_without_a_test_counts_in_its_family_with_p_of_1():
    pair = values(**beside(1.0, -1.5, 2.0, -1.0, 0.5))
    others = [claim("c", "b", name="absent"), claim("a", "b", name="design", draws=1)]
    others.append(claim("a", "b", name="refused"))
    refused = {"refused": undecided(others[-1], ACCURACY, "not run", "why")}
    first = judge([difference(), *others], METRICS, pair, {"c": "not sent"}, {}, settled=refused)
    # Three of four: no records could decide the one on a single draw.
    assert "(simultaneous over 3)" in first[0].sentence
    alone = judge([difference()], METRICS, pair, {}, {})[0]
    assert first[0].p == pytest.approx(min(1.0, 3 * alone.p))
    assert [item.status for item in first[1:]] == ["not run", "not testable", "not run"]
    assert first[1].sentence == "not sent"


@pytest.mark.parametrize(
    ("stated", "a", "b", "lost", "status", "words"),
    [
        (A_OVER_B, HIGH[:4], LOW[:4], "", "inconclusive", "a verdict needs 5"),
        (A_OVER_B, [1.0] * 5, [1.0] * 5, "", "inconclusive", "last digit"),
        (A_OVER_B, HIGH, LOW, "1 run of a failed", "inconclusive", "1 run of a failed"),
        (A_OVER_B, LOW, HIGH, "1 run of a failed", "inconclusive", "1 run of a failed"),
        (CONFOUNDED, HIGH, LOW, "", "not testable", "by its design: alpha grows"),
    ],
)
def test_what_cannot_be_decided_says_why(stated, a, b, lost, status, words):
    verdict = verdict_of(stated, {"a": lost} if lost else {"c": "-"}, a=a, b=b)
    assert (verdict.status, verdict.n) == (status, len(a))
    assert words in verdict.sentence


def test_an_interaction_is_the_difference_of_two_differences():
    four = claim("a", "b", "c", "d")
    verdict = verdict_of(four, a=HIGH, b=LOW, c=LOW, d=LOW)
    assert verdict.status == "reproduced"
    plain = verdict_of(A_OVER_B, a=HIGH, b=LOW)
    assert verdict.effect == pytest.approx(plain.effect)
    assert verdict.sentence.startswith("a - b - c + d: +10")
    assert verdict_of(four, a=HIGH, b=LOW, c=HIGH, d=LOW).status == "inconclusive"
    assert verdict_of(four, a=LOW, b=LOW, c=HIGH, d=LOW).status == "contradicted"


def test_a_contrast_of_other_weights_is_told_by_them():
    pooled = claim(contrast={"a": 0.5, "b": 0.5, "c": -1})
    verdict = verdict_of(pooled, a=HIGH, b=[v - 4 for v in HIGH], c=LOW)
    plain = verdict_of(A_OVER_B, a=[v - 2 for v in HIGH], b=LOW)
    assert (verdict.status, verdict.effect) == (plain.status, pytest.approx(plain.effect))
    assert verdict.sentence.startswith("0.5 a + 0.5 b - c: +8.3")


def difference(**more):
    """Return a claim that a lies above b; the paper's effect is 8 points."""
    return claim("a", "b", **({"effect": EIGHT} | more))


def beside(*differences):
    """Return values of a and b that differ by these."""
    base = [70.0, 71.0, 70.5, 72.5, 71.0, 69.0, 70.2, 71.7]
    return {"a": [b + d for b, d in zip(base, differences, strict=False)],
            "b": base[: len(differences)]}  # fmt: skip


# What matters is the same, but the paper has no size.
OWN_SIZE = Effect(smallest=0.8, measure="units", because="stated in advance")


@pytest.mark.parametrize(
    ("effect", "differences", "status"),
    [
        (EIGHT, (6.0, 7.0, 6.5, 7.5, 6.0), "reproduced"),
        (EIGHT, (0.8, 0.9, 0.85, 0.9, 0.8), "reproduced"),
        (EIGHT, (0.4, 0.5, 0.45, 0.5, 0.4), "below a tenth"),
        (EIGHT, (0.3, 0.9, 0.6, 0.7, 0.5), "excluded"),  # shown, and perhaps a tenth
        (EIGHT, (-0.9, -1.0, -0.95, -0.9, -1.0), "contradicted"),
        # Shown, too small to matter, and on the other side.
        (EIGHT, (-0.4, -0.5, -0.45, -0.5, -0.4), "no difference"),
        (EIGHT, (0.1, -0.2, 0.3, -0.1, 0.0), "no difference"),
        (EIGHT, (1.0, -1.5, 2.0, -1.0, 0.5), "excluded"),
        (EIGHT, (9.0, -8.0, 12.0, -6.0, 5.0), "inconclusive"),
        (OWN_SIZE, (0.4, 0.5, 0.45, 0.5, 0.4), "no difference"),
        (OWN_SIZE, (0.9, 1.0, 0.95, 0.9, 1.0), "reproduced"),
        (OWN_SIZE, (1.0, -1.5, 2.0, -1.0, 0.5), "inconclusive"),
    ],
)
def test_a_size_is_shown_excluded_or_left_open(effect, differences, status):
    verdict = verdict_of(difference(effect=effect), **beside(*differences))
    assert (verdict.status, verdict.matters) == (status, pytest.approx(0.8))
    assert verdict.paper == effect.paper
    assert (" 8 points" in verdict.sentence) == (effect is EIGHT)


def test_tests_and_intervals_are_simultaneous_over_the_claims_of_a_target():
    numbers = values(**beside(1.0, -1.5, 2.0, -1.0, 0.5))
    many = [dataclasses.replace(difference(), name=f"c{i}") for i in range(4)]
    wide = judge(many, METRICS, numbers, {}, {})[0]
    t = 4.315  # Student's t at .99375 and 4 degrees of freedom.
    deviation = stdev([1.0, -1.5, 2.0, -1.0, 0.5])
    assert wide.low == pytest.approx(0.2 - t * deviation / math.sqrt(5), abs=2e-3)
    assert "95 % interval (simultaneous over 4)" in wide.sentence
    # A weak claim among many is not shown.
    weak = values(a=[51.0, 52.2, 50.3, 51.9, 50.9], b=[50.0] * 5)
    for count, status in ((1, "reproduced"), (5, "inconclusive")):
        family = [claim("a", "b", name=f"c{i}", effect=HALF) for i in range(count)]
        assert {v.status for v in judge(family, METRICS, weak, {}, {})} == {status}


def test_what_holm_shows_has_an_interval_that_does_not_reach_the_bound():
    # Both are shown; the second at its own level, which Bonferroni's interval does not have.
    first, second = beside(6.0, 7.0, 6.5, 7.5, 6.0), beside(0.9, 2.4, 0.1, 1.9, 0.9)
    numbers = {"accuracy": {arm: dict(enumerate(column)) for arm, column in (
        ("a", first["a"]), ("b", first["b"]), ("c", second["a"]))}}  # fmt: skip
    pair = [difference(), claim("c", "b", name="d", effect=HALF)]
    shown = judge(pair, METRICS, numbers, {}, {})
    assert [item.status for item in shown] == ["reproduced", "reproduced"]
    assert shown[1].low == 0.0


def test_a_share_of_the_gain_becomes_points_of_this_policy():
    share = Effect(paper=0.2, measure="of gain", place="Table 1")
    numbers = values(**beside(6.0, 7.0, 6.5, 7.5, 6.0))
    numbers["gain_greedy"] = {"b": dict.fromkeys(range(5), 50.0)}
    verdict = judge([difference(effect=share)], METRICS, numbers, {}, {})[0]
    assert verdict.paper == pytest.approx(10.0)
    assert "20 % of the gain" in verdict.sentence
    shortfall = Effect(paper=0.2, measure="of shortfall", place="Fig. 4")
    verdict = judge([difference(effect=shortfall)], METRICS, numbers, {}, {})[0]
    assert verdict.paper == pytest.approx(0.2 * (100 - 71.0))


def test_under_a_ceiling_nothing_is_judged():
    near = {"a": [97.0, 97.5, 98.0, 97.2, 97.9], "b": [97.1, 97.4, 98.1, 97.0, 97.8]}
    verdict = verdict_of(difference(headroom=True), **near)
    assert verdict.status == "not testable"
    assert verdict.sentence.startswith("b at 97.5 leaves 2.52 below 100")
    assert verdict_of(difference(headroom=True), **beside(1, 2, 1, 2, 1)).status != "not testable"
    tolerant = claim("a", "b", bound=-1.5, because="stated", headroom=True)
    assert verdict_of(tolerant, **near).status == "not testable"


def test_one_draw_of_what_a_statement_speaks_of_is_no_evidence():
    verdict = verdict_of(difference(draws=1), **beside(6.0, 7.0, 6.5, 7.5, 6.0))
    assert verdict.status == "not testable"
    assert "a verdict needs 5" in verdict.sentence
    assert (verdict.paper, verdict.matters) == (EIGHT.paper, pytest.approx(EIGHT.matters))
    often = difference(draws=5)
    assert verdict_of(often, **beside(6.0, 7.0, 6.5, 7.5, 6.0)).status == "reproduced"


def test_an_exact_test_sees_a_collapse_that_the_t_interval_hides():
    fallen = {"a": [98.0, 98.4, 97.8, 97.8, 97.8], "b": [0.0, 71.6, 76.4, 61.0, 79.0]}
    assert verdict_of(difference(), **fallen).status == "inconclusive"
    verdict = verdict_of(difference(test="sign_flip"), **fallen)
    assert verdict.status == "reproduced"
    assert (verdict.p, verdict.effect) == (pytest.approx(1 / 32), pytest.approx(26.8))
    assert "median +26.8 points, 93.8 % interval +18.8 to +98" in verdict.sentence
    risen = {"a": fallen["b"], "b": fallen["a"]}
    assert verdict_of(difference(test="sign_flip"), **risen).status != "contradicted"


def test_a_seed_without_the_metric_in_one_arm_takes_decisions_away():
    numbers = values(**beside(6.0, 7.0, 6.5, 7.5, 6.0, 6.5))
    del numbers["accuracy"]["a"][5]
    verdict = judge([difference()], METRICS, numbers, {}, {})[0]
    assert verdict.status == "inconclusive"
    assert "accuracy is missing in an arm of seed(s) 5" in verdict.sentence


TENTH = Effect(smallest=1.1, measure="ratio", because="chosen")
# Tokens to a threshold, whose deviation from pair to pair is a tenth.
TOKENS = [100.0, 112.0, 94.0, 105.0, 89.0, 101.0, 97.0, 108.0]


def scaled(factor, wobble=0.01):
    return [factor * t * (1 + wobble * (-1) ** i) for i, t in enumerate(TOKENS)]


FASTER = claim("a", "b", log=True, bound=1.0, effect=Effect(paper=2.0, measure="ratio"))
MORE = claim("a", "b", log=True, bound=1.0, effect=TENTH)
MUCH_MORE = claim("a", "b", log=True, bound=1.5, because="the headline")
ALIKE = claim("a", "b", log=True, side="within", bound=1.1, because="chosen", effect=TENTH)


@pytest.mark.parametrize(
    ("stated", "factor", "wobble", "status"),
    [
        (MUCH_MORE, 2.0, 0.01, "reproduced"),
        (MUCH_MORE, 1.2, 0.01, "contradicted"),
        (FASTER, 1.5, 0.01, "reproduced"),
        (FASTER, 1.05, 0.002, "below a tenth"),
        (FASTER, 1.02, 0.08, "excluded"),
        (FASTER, 0.9, 0.01, "contradicted"),
        (MORE, 1.3, 0.01, "reproduced"),
        (MORE, 1.0, 0.01, "no difference"),
        (MORE, 0.8, 0.01, "contradicted"),
        (MORE, 1.09, 0.05, "inconclusive"),
        # A point of difference is no ratio: as differences these are far outside 1.1.
        (ALIKE, 1.02, 0.01, "reproduced"),
        (ALIKE, 1.3, 0.01, "contradicted"),
        (ALIKE, 1.09, 0.05, "inconclusive"),
    ],
)
def test_a_quotient_is_tested_by_its_logarithm_and_told_as_a_ratio(stated, factor, wobble, status):
    verdict = verdict_of(stated, a=scaled(factor, wobble), b=TOKENS)
    assert (verdict.status, verdict.unit) == (status, "x")
    # The geometric mean: half of the pairs are above the factor, half below.
    assert verdict.effect == pytest.approx(factor * math.sqrt(1 - wobble**2), rel=1e-9)
    assert verdict.paper == (pytest.approx(2.0) if stated is FASTER else None)
    if stated in (MORE, ALIKE):
        assert verdict.matters == pytest.approx(1.1)


def test_an_interaction_of_quotients_does_not_depend_on_the_scale_of_either_pair():
    grows = claim("a", "b", "c", "d", log=True, bound=1.0, effect=TENTH)
    more = [1000.0 * value for value in TOKENS]
    verdict = verdict_of(grows, a=[1.5 * v for v in more], b=more, c=scaled(1.2), d=TOKENS)
    assert verdict.status == "reproduced"
    assert verdict.effect == pytest.approx(1.25, rel=0.01)
    assert verdict.sentence.startswith("a / b / c * d: 1.25 x")
    same = verdict_of(grows, a=[1.2 * v for v in more], b=more, c=scaled(1.2), d=TOKENS)
    assert same.status == "no difference"


DOSED = ("a", "b", "c", "d")
DOSES = [0.20, 0.24, 0.30, 0.45]
TIMES = Effect(paper=2.0, smallest=1.1, measure="ratio", place="p", because="b")


def _graded(height, **more):
    """Return a slope claim, and values of four arms by five seeds; `height` is a function."""
    stated = {"effect": HALF, "dose": Dose("entropy", 0.1)} | more
    starts = [[0.3, 0.1, 0.25, 0.2], [0.1, 0.3, 0.2, 0.35]]
    a_claim = claim(*DOSED, contrast=dict.fromkeys(DOSED, 0), **stated)
    by_metric = {"accuracy": {}, "entropy": {}, "start": {}}
    for place, arm in enumerate(DOSED):
        for seed in range(5):
            dose, start = DOSES[place] + 0.01 * seed, starts[seed % 2][place]
            by_metric["entropy"].setdefault(arm, {})[seed] = dose
            by_metric["start"].setdefault(arm, {})[seed] = start
            by_metric["accuracy"].setdefault(arm, {})[seed] = height(dose, start, seed)
    return a_claim, by_metric


def _judged(a_claim, by_metric):
    return judge([a_claim], METRICS, by_metric, {}, {})[0]


def test_a_slope_is_what_the_metric_gains_by_a_dose_within_each_seed():
    # 40 a unit, and a seed's own level, which is no slope.
    a_claim, by_metric = _graded(lambda dose, start, seed: 40 * dose + 3 * seed + 0.01 * (seed % 2))
    verdict = _judged(a_claim, by_metric)
    assert verdict.n == 5
    assert verdict.effect == pytest.approx(4.0)
    for unit in (1e-10, 1e10):
        doses = {
            arm: {n: v * unit for n, v in of.items()} for arm, of in by_metric["entropy"].items()
        }
        in_unit = dataclasses.replace(a_claim, dose=Dose("entropy", 0.1 * unit))
        assert _judged(in_unit, by_metric | {"entropy": doses}).effect == pytest.approx(4.0)


def test_what_is_held_fixed_takes_nothing_from_a_slope():
    def height(dose, start, seed):
        return 40 * dose + 100 * start + seed

    plain, given = (
        _judged(*_graded(height, **more))
        for more in ({}, {"dose": Dose("entropy", 0.1, ("start",))})
    )
    assert plain.effect != pytest.approx(4.0, abs=0.5)
    assert given.effect == pytest.approx(4.0)


def test_a_slope_of_logarithms_is_a_quotient_and_a_dose_may_be_negative():
    a_claim, by_metric = _graded(
        lambda dose, start, seed: 100 * 3 ** (-10 * dose) * (1 + 0.01 * seed),
        effect=TIMES,
        log=True,
        bound=1.0,
        dose=Dose("entropy", -0.1),
    )
    verdict = _judged(a_claim, by_metric)
    assert (verdict.unit, verdict.effect) == ("x", pytest.approx(3.0))


def test_arms_of_one_dose_give_no_slope():
    a_claim, by_metric = _graded(lambda dose, start, seed: dose)
    flat = {arm: dict.fromkeys(range(5), 0.3) for arm in DOSED}
    with pytest.raises(ValueError, match="differ"):
        _judged(a_claim, by_metric | {"entropy": flat})


BAR = Expectation(arm="a", metric="accuracy", accept=(70.0, None), source="derived", because="b")


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ((78.0, 85.0), "reproduced"),
        ((90.0, None), "contradicted"),
        ((None, 60.0), "contradicted"),
        ((81.0, 90.0), "inconclusive"),
    ],
)
def test_an_expectation_is_judged_by_the_means_interval(accept, status):
    expectation = dataclasses.replace(BAR, accept=accept)
    assert judge_expectation(expectation, ACCURACY, dict(enumerate(HIGH)), None).status == status


def test_a_bar_does_not_hold_while_planned_seeds_are_missing():
    values, missing = dict(enumerate(HIGH)), "1 of 6 planned seeds of a have no record (5)"
    assert judge_expectation(BAR, ACCURACY, values, None).status == "reproduced"
    verdict = judge_expectation(BAR, ACCURACY, values, None, lost=missing)
    assert verdict.status == "inconclusive"
    assert verdict.sentence.endswith(missing)
    missed = dataclasses.replace(BAR, accept=(90.0, None))
    verdict = judge_expectation(missed, ACCURACY, values, None, lost=missing)
    assert verdict.status == "contradicted"


def shown(p, about="claim"):
    return Verdict(
        name="c", statement="s", source="Table 1", about=about, status="reproduced",
        sentence="because", p=p, p_alone=p,
    )  # fmt: skip


def test_a_small_p_among_many_statements_is_not_shown_over_the_study():
    study = [shown(0.03), *[shown(0.5)] * 9, shown(0.0001, about="mechanism")]
    first, *_, machinery = with_discovery_rate(study)
    assert first.q == pytest.approx(0.3)
    assert "Over the study's 10 statements q = 0.3" in first.sentence
    assert (machinery.q, machinery.sentence) == (None, "because")
    (alone,) = with_discovery_rate([shown(0.03)])
    assert (alone.q, alone.sentence) == (0.03, "because")
