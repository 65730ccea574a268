"""What runs of one scale are asked: the same for each, the ceiling for untrained arms alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from repro.evaluate.scale_evaluator import ScaleEvaluator, final_tallies, mean_tokens
from repro.reward.grader import GraderPool
from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    SamplingConfig,
    TrainScale,
)
from tests.repro.evaluate.small import Writer, problem
from tests.repro.small_runs import small_run

SCALE = TrainScale(
    checkpoint="tiny",
    data=DataConfig(source="generated"),
    steps=1,
    prompts_per_rollout=1,
    group_size=2,
    optimizer=OptimizerConfig(
        learning_rates=LearningRates(lora_16bit=1e-3, lora_4bit=1e-3, full=1e-3)
    ),
    rollout=SamplingConfig(max_new_tokens=48),
    prompt_template="tiny",
    max_prompt_tokens=99,
    evaluation=EvaluationConfig(samples=2, sampling=SamplingConfig(max_new_tokens=48)),
)
TEST = [problem("1+2?", "3"), problem("2+2?", "4")]
FURTHER = {"hard": [problem("3+2?", "5")]}
TEXTS = {
    "1+2?": "<think>\n1 + 2 = 3.\n</think>\n<answer>3</answer>",
    "2+2?": "<think></think>\n<answer>5</answer>",
    "3+2?": "<think></think>\n<answer>5</answer>",
}


def evaluation(tokenizer: Any, pool: GraderPool, *trainings: str) -> ScaleEvaluator:
    runs = [small_run(SCALE, seed=n, training=kind) for n, kind in enumerate(trainings)]
    return ScaleEvaluator(runs, Writer(tokenizer, TEXTS, len(runs)), tokenizer, pool)


def test_untrained_arms_are_asked_for_their_ceiling_too(tokenizer: Any, pool: GraderPool) -> None:
    asked = evaluation(tokenizer, pool, "none").final(TEST, FURTHER)
    assert set(asked) == {
        "accuracy", "accuracy_greedy", "accuracy_hard", "accuracy_forced_working",
    }  # fmt: skip
    assert set(evaluation(tokenizer, pool, "lora").final(TEST, FURTHER)) == {
        "accuracy", "accuracy_greedy", "accuracy_hard",
    }  # fmt: skip


def test_final_answers_are_each_run_s_own(tokenizer: Any, pool: GraderPool) -> None:
    pair = evaluation(tokenizer, pool, "lora", "lora")
    asked = pair.final(TEST, FURTHER, [True, False])
    tallies = final_tallies(asked, 0)
    assert tallies["accuracy"]["right"] == [1, 0, 1]
    assert tallies["accuracy_greedy"]["right"] == [1, 1]
    assert tallies["accuracy_hard"]["right"] == [0, 0, 1]
    assert final_tallies(asked, 1) == mean_tokens(asked, 1) == {}


def test_the_length_of_answers_is_the_mean_over_the_sets_where_there_is_no_split(
    tokenizer: Any, pool: GraderPool
) -> None:
    answers = evaluation(tokenizer, pool, "lora").final(TEST, FURTHER)
    own, hard = (
        answers[name][0].estimates()["completion_tokens_mean"].value  # type: ignore[union-attr]
        for name in ("accuracy", "accuracy_hard")
    )
    assert mean_tokens(answers)["completion_tokens_mean"].value == own
    sets = {"accuracy_easy": answers.pop("accuracy"), **answers}
    assert mean_tokens(sets)["completion_tokens_mean"].value == pytest.approx((own + hard) / 2)


def test_greedy_and_sampled_questions_have_the_scale_s_limits(
    tokenizer: Any, pool: GraderPool
) -> None:
    one = evaluation(tokenizer, pool, "lora")
    one.greedy(TEST)
    one.sampled(TEST)
    writer = one.evaluator.asker
    assert isinstance(writer, Writer)
    assert [sampling for _, _, sampling in writer.requests] == [
        SamplingConfig(temperature=0.0, max_new_tokens=48),
        SCALE.evaluation.sampling,
    ]


def test_rewards_are_of_each_run_s_own_arm_and_counted_for_it(
    tokenizer: Any, pool: GraderPool
) -> None:
    pair = evaluation(tokenizer, pool, "lora", "lora")
    pair.runs = [
        pair.runs[0],
        dataclasses.replace(
            pair.runs[1], arm=dataclasses.replace(pair.runs[1].arm, reward="random")
        ),
    ]
    texts = [TEXTS["1+2?"]] * 8
    answer, chance = pair.score([(texts, ["3"] * 8, range(8), [False] * 8)] * 2)
    assert answer is not None
    assert chance is not None
    assert len(set(answer.total)) == 1
    assert len(set(chance.total)) > 1
    assert pair.score([None, (texts, ["3"] * 8, range(8), [False] * 8)])[0] is None
    assert pair.grades(0)["ok"] < pair.grades(1)["ok"]


def test_a_policy_without_a_tokenizer_cannot_be_asked(tokenizer: Any, pool: GraderPool) -> None:
    with pytest.raises(ValueError, match="tiny has no tokenizer; asking questions needs one"):
        ScaleEvaluator([small_run(SCALE)], Writer(tokenizer, TEXTS), None, pool)


def test_an_evaluation_names_no_k_beyond_its_samples() -> None:
    with pytest.raises(ValueError, match="names k = 4; with 2 samples per problem"):
        EvaluationConfig(samples=2, at=(1, 4))


@pytest.mark.parametrize("threshold", [-1.0, 101.0])
def test_a_threshold_is_a_percentage(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"evaluation\.threshold is"):
        EvaluationConfig(threshold=threshold)
