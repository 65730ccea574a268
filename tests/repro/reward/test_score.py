"""The rewards beside the task's, which test_adversarial holds: controls, finished answers."""

from repro.reward.score import RANDOM_PROBABILITY, score
from repro.spec.config import derive_seed
from tests.repro.small_runs import request_of

RIGHT = "<think>a</think><answer>18</answer>"
WRONG = "<think>a</think><answer>19</answer>"
RIGHT_UNFORMATTED = "<answer>18</answer>"


def test_format_reward_ignores_the_answer_and_still_measures_accuracy(pool):
    texts, golds = [RIGHT, WRONG, RIGHT_UNFORMATTED, RIGHT], ["18"] * 3 + ["\\frac{1}{"]
    rewards = score([*map(request_of, texts, golds)], "format", 0.2, pool)
    # A gold that cannot be read drops nothing that this reward can give.
    assert [one.unshaped for one in rewards] == [1, 1, 0, 1]
    assert [one.accuracy for one in rewards] == [1, 0, 1, None]


def test_random_reward_depends_on_seeds_alone_and_has_its_probability(pool):
    seeds = [derive_seed(7, "row", i) for i in range(4000)]
    first = score([request_of(RIGHT, "18", seed) for seed in seeds], "random", 0.2, pool)
    second = score([request_of(WRONG, "18", seed) for seed in seeds], "random", 0.2, pool)
    paid = [one.reward for one in first]
    assert paid == [one.reward for one in second]
    assert set(paid) == {0.0, 1.0}
    mean = sum(paid) / 4000
    # Four standard errors of a Bernoulli mean.
    assert abs(mean - RANDOM_PROBABILITY) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    assert {one.accuracy for one in first} == {1.0}


def test_a_right_answer_in_a_completion_that_was_cut_is_not_paid_as_finished(pool):
    rows = [(RIGHT, False), (RIGHT, True), (WRONG, False)]
    rewards = score([request_of(text, "18", cut=cut) for text, cut in rows], "finished", 0.2, pool)
    assert [one.unshaped for one in rewards] == [1, 0, 0]
    assert [one.accuracy for one in rewards] == [1, 1, 0]
