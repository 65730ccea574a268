"""What a run is asked by its scale: the ceiling for untrained arms alone."""

import pytest

from repro.evaluation.scale_evaluator import ScaleEvaluator, mean_tokens
from repro.spec.config import SamplingConfig
from tests.repro.evaluation.small import Writer, problem
from tests.repro.procedures.conftest import SCALE
from tests.repro.small_runs import request_of, small_run

TEST = [problem("1+2?", "3"), problem("2+2?", "4")]
FURTHER = {"hard": [problem("3+2?", "5")]}
TEXTS = {
    "1+2?": "<think>\n1 + 2 = 3.\n</think>\n<answer>3</answer>",
    "2+2?": "<think></think>\n<answer>5</answer>",
    "3+2?": "<think></think>\n<answer>5</answer>",
}


def evaluation(tokenizer, pool, training="lora", **arm):
    procedure = "evaluate" if training == "none" else "train"
    run = small_run(SCALE, training=training, procedure=procedure, **arm)
    return ScaleEvaluator(run, Writer(tokenizer, TEXTS), tokenizer, pool)


def test_untrained_arms_are_asked_for_their_ceiling_too(tokenizer, pool):
    untrained, trained = (
        set(evaluation(tokenizer, pool, training).final(TEST, FURTHER))
        for training in ("none", "lora")
    )
    assert trained == {"accuracy", "accuracy_greedy", "accuracy_hard"}
    assert untrained - trained == {"accuracy_forced_working"}


def test_final_answers_are_tallied_by_set(tokenizer, pool):
    answers = evaluation(tokenizer, pool).final(TEST, FURTHER)
    tallies = {name: own.tallies() for name, own in answers.items()}
    assert tallies["accuracy"]["right"] == [1, 0, 1]
    assert tallies["accuracy_greedy"]["right"] == [1, 1]
    assert tallies["accuracy_hard"]["right"] == [0, 0, 1]


def test_the_length_of_answers_is_the_mean_over_the_sets_where_there_is_no_split(tokenizer, pool):
    answers = evaluation(tokenizer, pool).final(TEST, FURTHER)
    own, hard = (
        answers[name].estimates()["completion_tokens_mean"].value
        for name in ("accuracy", "accuracy_hard")
    )
    assert mean_tokens(answers)["completion_tokens_mean"].value == own
    sets = {"accuracy_easy": answers.pop("accuracy"), **answers}
    assert mean_tokens(sets)["completion_tokens_mean"].value == pytest.approx((own + hard) / 2)


def test_greedy_and_sampled_questions_have_the_scale_s_limits(tokenizer, pool, monkeypatch):
    one = evaluation(tokenizer, pool)
    one.greedy(TEST)
    monkeypatch.delattr("repro.evaluation.scale_evaluator.questions")  # each is rendered once
    one.sampled(TEST)
    asked = [SamplingConfig(temperature=0.0, max_new_tokens=20), SCALE.evaluation.sampling]
    assert [sampling for _, _, sampling in one.evaluator.sampler.requests] == asked


def test_rewards_are_by_the_arm_s_reward(tokenizer, pool):
    answered, drawn = evaluation(tokenizer, pool), evaluation(tokenizer, pool, reward="random")
    requests = [request_of(TEXTS["1+2?"], "3", seed) for seed in range(8)]
    assert len({one.unshaped for one in answered.score(requests)}) == 1
    assert len({one.unshaped for one in drawn.score(requests)}) > 1


def test_a_policy_without_a_tokenizer_cannot_be_asked(tokenizer, pool):
    with pytest.raises(ValueError, match=r"tiny .*tokenizer"):
        ScaleEvaluator(small_run(SCALE), Writer(tokenizer, TEXTS), None, pool)
