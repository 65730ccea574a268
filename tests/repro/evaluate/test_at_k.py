"""mean@n, pass@k and maj@k of graded completions, by both readings."""

import pytest

from repro.evaluate.grades import Answers, Graded
from tests.repro.evaluate.small import problem


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


def test_pass_at_k_is_the_estimator_without_replacement():
    right, wrong = graded("7", right=True), graded("8", right=False)
    metrics = answers([right, wrong, wrong, wrong], [wrong] * 4).at_k([1, 2])
    assert metrics["mean_at_4"].value == pytest.approx(12.5)
    # 1 - C(3, 2) / C(4, 2) = 1/2 for the first problem, 0 for the second.
    assert metrics["pass_at_2"].value == pytest.approx(25.0)
    assert metrics["pass_at_2"].n == 2
    assert "4 samples" in metrics["pass_at_2"].method


def test_two_spellings_of_a_right_answer_are_two_candidates_and_both_right():
    votes = [graded("70,000", right=True), graded("70000", right=True), graded("8", right=False)]
    assert answers(votes).at_k([3])["maj_at_3"].value == pytest.approx(200 / 3)


def test_the_lenient_reading_stands_beside_the_strict_one():
    boxed = graded(None, right=False, leniently="7")
    metrics = answers([boxed, boxed]).at_k([2])
    assert (metrics["mean_at_2"].value, metrics["mean_at_2_lenient"].value) == (0.0, 100.0)
    assert (metrics["maj_at_2"].value, metrics["maj_at_2_lenient"].value) == (0.0, 100.0)


def test_votes_are_tallied_by_the_ways_in_which_samples_voted():
    right, wrong = graded("7", right=True), graded("8", right=False)
    spelt, none = graded("7.0", right=True), graded(None, right=False)
    tallies = answers([right, right, spelt, none], [none, spelt, right, right], [wrong] * 4)
    assert tallies.tallies()["votes"] == [
        {"problems": 1, "right": [], "wrong": [4]},
        {"problems": 2, "right": [2, 1], "wrong": []},
    ]


def test_of_one_sample_or_very_many_no_majority_is_formed_and_no_votes_are_kept():
    one = answers([graded("7", right=True)]).tallies()
    assert not one.keys() & {"votes", "votes_lenient"}
    right, wrong = graded("7", right=True), graded("8", right=False)
    many = answers([right, *[wrong] * 255], [wrong] * 256)
    assert not many.tallies().keys() & {"votes", "votes_lenient"}
    metrics = many.at_k([64, 256])
    assert metrics["pass_at_64"].value == pytest.approx(12.5)
    assert metrics["pass_at_256"].value == pytest.approx(50.0)
    assert not any(name.startswith("maj") for name in metrics)
