"""The rewards beside the task's, which test_adversarial holds: controls, finished answers."""

from repro.reward.score import RANDOM_PROBABILITY, score
from repro.spec.config import derive_seed

RIGHT = "<think>a</think><answer>18</answer>"
WRONG = "<think>a</think><answer>19</answer>"
RIGHT_UNFORMATTED = "<answer>18</answer>"


def test_format_reward_ignores_the_answer_and_still_measures_accuracy(pool):
    texts, golds = [RIGHT, WRONG, RIGHT_UNFORMATTED, RIGHT], ["18"] * 3 + ["\\frac{1}{"]
    rewards = score(texts, golds, "format", 0.2, pool)
    # A gold that cannot be read drops nothing that this reward can give.
    assert [one.unshaped for one in rewards] == [1, 1, 0, 1]
    assert [one.accuracy for one in rewards] == [1, 0, 1, None]


def test_random_reward_depends_on_seeds_alone_and_has_its_probability(pool):
    seeds = [derive_seed(7, "row", i) for i in range(4000)]
    first = score([RIGHT] * 4000, ["18"] * 4000, "random", 0.2, pool, seeds)
    second = score([WRONG] * 4000, ["18"] * 4000, "random", 0.2, pool, seeds)
    paid = [one.reward for one in first]
    assert paid == [one.reward for one in second]
    assert set(paid) == {0.0, 1.0}
    mean = sum(paid) / 4000
    # Four standard errors of a Bernoulli mean.
    assert abs(mean - RANDOM_PROBABILITY) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    assert {one.accuracy for one in first} == {1.0}


def test_a_right_answer_in_a_completion_that_was_cut_is_not_paid_as_finished(pool):
    cut = [False, True, False]
    rewards = score([RIGHT, RIGHT, WRONG], ["18"] * 3, "finished", 0.2, pool, truncated=cut)
    assert [one.unshaped for one in rewards] == [1, 0, 0]
    assert [one.accuracy for one in rewards] == [1, 1, 0]
