"""mean@n, pass@k and maj@k of graded completions, by both readings."""

import pytest

from repro.evaluation.grades import Answers, Graded
from repro.evidence.derived import at_k_metrics
from tests.repro.evaluation.small import problem


def graded(answer, *, right, leniently=None):
    return Graded(
        accuracy=float(right),
        lenient=float(right or leniently is not None),
        format_ok=True,
        works=True,
        truncated=False,
        surprisal=1.0,
        tokens=3,
        answer=answer,
        lenient_answer=answer if leniently is None else leniently,
    )


def answers(*groups):
    problems = [problem(str(n), "7") for n in range(len(groups))]
    return Answers(problems=problems, groups=list(groups), dropped=0)


RIGHT, WRONG = graded("7", right=True), graded("8", right=False)
BOXED = graded(None, right=False, leniently="7")
SPELT = [graded("70,000", right=True), graded("70000", right=True), WRONG]


@pytest.mark.parametrize(
    ("groups", "at", "percents"),
    [
        # Without replacement: 1 - C(3, 2) / C(4, 2) = 1/2 for the first problem, 0 for the second.
        ([[RIGHT, *[WRONG] * 3], [WRONG] * 4], [1, 2], {"mean_at_4": 12.5, "pass_at_2": 25.0}),
        # Two spellings of a right answer are two candidates, and both right.
        ([SPELT], [3], {"maj_at_3": 200 / 3}),
        ([[BOXED, BOXED]], [2], {"mean_at_2": 0, "mean_at_2_lenient": 100,
                                 "maj_at_2": 0, "maj_at_2_lenient": 100}),
    ],
)  # fmt: skip
def test_samples_are_estimated_together_by_both_readings(groups, at, percents):
    metrics = at_k_metrics(answers(*groups).tallies(), at)
    assert {name: metrics[name].value for name in percents} == pytest.approx(percents)
    assert {metric.n for metric in metrics.values()} == {len(groups)}
    assert all(f"{len(groups[0])} samples" in metric.method for metric in metrics.values())


def test_votes_are_tallied_by_the_ways_in_which_samples_voted():
    spelt, none = graded("7.0", right=True), graded(None, right=False)
    tallies = answers([RIGHT, RIGHT, spelt, none], [none, spelt, RIGHT, RIGHT], [WRONG] * 4)
    assert tallies.tallies()["votes"] == [
        {"problems": 1, "right": [], "wrong": [4]},
        {"problems": 2, "right": [2, 1], "wrong": []},
    ]


def test_of_one_sample_or_very_many_no_majority_is_formed_and_no_votes_are_kept():
    assert not answers([RIGHT]).tallies().keys() & {"votes", "votes_lenient"}
    many = answers([RIGHT, *[WRONG] * 255], [WRONG] * 256)
    assert not many.tallies().keys() & {"votes", "votes_lenient"}
    metrics = many.estimates([64, 256])
    assert metrics["pass_at_64"].value == pytest.approx(12.5)
    assert metrics["pass_at_256"].value == pytest.approx(50.0)
    assert not any(name.startswith("maj") for name in metrics)
