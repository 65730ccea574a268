"""What runs of one scale are asked: the same for each, the ceiling for untrained arms alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from repro.evaluate.scale_evaluator import ScaleEvaluator, final_metrics
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


def test_final_metrics_are_each_run_s_own(tokenizer: Any, pool: GraderPool) -> None:
    pair = evaluation(tokenizer, pool, "lora", "lora")
    asked = pair.final(TEST, FURTHER, [True, False])
    metrics = final_metrics(asked, 0)
    assert metrics["accuracy"].value == metrics["accuracy_greedy"].value == 50.0
    assert metrics["accuracy_hard"].value == 100.0
    assert metrics["working_rate"].value == 50.0
    assert final_metrics(asked, 1) == {}


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


def test_several_samples_show_how_many_right_completions_differ(
    tokenizer: Any, pool: GraderPool
) -> None:
    metrics = final_metrics(evaluation(tokenizer, pool, "lora").final(TEST, FURTHER))
    # The writer writes the same twice, and is right on one problem of two.
    assert metrics["distinct_correct"].value == 0.5
    assert metrics["distinct_correct_hard"].value == 1.0


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


def test_a_further_set_has_lenient_accuracy_and_truncation_beside_the_strict_one(
    tokenizer: Any, pool: GraderPool
) -> None:
    metrics = final_metrics(evaluation(tokenizer, pool, "lora").final(TEST, FURTHER))
    assert metrics["accuracy_lenient_hard"].value == 100.0
    assert metrics["truncation_rate_hard"].value == 0.0
    assert not any("_at_" in name for name in metrics)


def test_estimates_at_k_are_of_sampled_answers_of_every_set(
    tokenizer: Any, pool: GraderPool
) -> None:
    metrics = final_metrics(evaluation(tokenizer, pool, "lora").final(TEST, FURTHER), at=(1, 2))
    assert metrics["mean_at_2"].value == metrics["pass_at_1"].value == 50.0
    assert metrics["maj_at_2_lenient_hard"].value == 100.0
    assert not any("greedy" in name and "_at_" in name for name in metrics)


def test_where_no_test_split_is_asked_estimates_at_k_are_means_over_the_sets_too(
    tokenizer: Any, pool: GraderPool
) -> None:
    answers = evaluation(tokenizer, pool, "lora").final(TEST, FURTHER)
    sets = {"accuracy_easy": answers.pop("accuracy"), **answers}
    metrics = final_metrics(sets, at=(2,))
    assert metrics["accuracy"].value == 75.0
    assert metrics["pass_at_2"].value == 75.0
    assert metrics["pass_at_2_easy"].value == 50.0
    assert metrics["accuracy_lenient_hard"].value == 100.0


def test_an_evaluation_names_no_k_beyond_its_samples() -> None:
    with pytest.raises(ValueError, match="names k = 4; with 2 samples per problem"):
        EvaluationConfig(samples=2, at=(1, 4))


@pytest.mark.parametrize("threshold", [-1.0, 101.0])
def test_a_threshold_is_a_percentage(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"evaluation\.threshold is"):
        EvaluationConfig(threshold=threshold)
