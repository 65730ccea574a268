"""Supervised fine-tuning: the loss falls, the noise is there and only where it should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.data.generator import generate_problems
from repro.models.norms import block_norms
from repro.models.policy import Policy
from repro.rl.lessons import SFTExample, lessons_of, mean_loss, rows_of
from repro.rl.single_run import policy as single
from repro.spec.arm import Exploration, LossConfig, NoiseConfig
from repro.spec.config import EvaluationConfig, RunConfig, SamplingConfig
from tests.repro.small_runs import equal, tune_alone, weights

NOISE = NoiseConfig(sigma_start=0.3, sigma_end=0.1, num_stages=3, reach="shared")
BUDGET = 1200


@pytest.fixture
def tune(make_run: Any, make_policy: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that fine-tunes a fresh random policy; result, policy, run and lessons."""

    def start(*, folder: str = "a", call: dict[str, Any] | None = None, **changes: Any) -> Any:
        settings: dict[str, Any] = {
            "rollout": SamplingConfig(max_new_tokens=48),
            "max_prompt_tokens": 128,
            "evaluation": EvaluationConfig(every=2, token_budget=BUDGET),
        }
        run: RunConfig = make_run(**(settings | changes))
        policy: Policy = make_policy(weight_format=run.arm.weight_format)
        lessons = lessons_of(generate_problems("train", 30, (1, 2)), policy, run)
        result = tune_alone(run, policy, lessons, folder=tmp_path / folder, **(call or {}))
        return result, policy, run, lessons

    return start


def test_rows_count_the_completion_and_nothing_else() -> None:
    lessons = [
        SFTExample(prompt=(1, 2), completion=(3, 9)),
        SFTExample(prompt=(4,), completion=(5, 6, 9)),
    ]
    rows = rows_of(lessons)
    assert rows.prompts == ((1, 2), (4,))
    assert rows.token_ids.tolist() == [[3, 9, 0], [5, 6, 9]]
    assert rows.mask.tolist() == [[True, True, False], [True] * 3]


def test_the_mean_loss_is_that_of_a_plain_forward_pass(tune: Any) -> None:
    _, policy, _, lessons = tune(steps=1)
    total, tokens = 0.0, 0
    for lesson in lessons[:5]:
        ids = torch.tensor([[*lesson.prompt, *lesson.completion]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0].double()
        predicted = torch.log_softmax(logits, -1)[len(lesson.prompt) - 1 : -1]
        expected = torch.tensor(lesson.completion)
        total -= float(predicted.gather(1, expected[:, None]).sum())
        tokens += len(lesson.completion)
    assert mean_loss(policy, lessons[:5], 2) == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
def test_the_loss_falls(tune: Any, make_policy: Any, weight_format: str) -> None:
    result, policy, run, lessons = tune(weight_format=weight_format, steps=20, evaluation=
                                        EvaluationConfig(token_budget=20 * 200))  # fmt: skip
    fresh = make_policy(weight_format=weight_format)
    assert result.finished
    assert mean_loss(policy, lessons, 8) < 0.9 * mean_loss(fresh, lessons, 8)
    assert result.series["loss"][-1] < 0.9 * result.series["loss"][0]
    assert run.scale.steps == len(result.series["loss"]) == result.step


def test_a_step_takes_its_share_of_the_tokens(tune: Any) -> None:
    result, _, run, lessons = tune()
    longest = max(len(lesson.completion) for lesson in lessons)
    done = 0
    for step, tokens in enumerate(result.series["tokens"], start=1):
        done += tokens
        assert 0 <= done - BUDGET * step / run.scale.steps < longest
    rows = result.effects["rows"]
    assert rows["tokens_trained"] == done
    assert rows["trained_on"] > len(lessons)  # a second epoch has begun


def test_noise_lies_on_every_noisy_step_and_is_gone_afterwards(
    tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[bool] = []
    plain = single.row_logprobs

    def watched(policy: Policy, *arguments: Any, **settings: Any) -> Any:
        carried.append(all(norm.noise is not None for norm in block_norms(policy.model).values()))
        return plain(policy, *arguments, **settings)

    monkeypatch.setattr(single, "row_logprobs", watched)
    evaluated: dict[str, Any] = {"evaluate": lambda step: 1.0}
    result, policy, _, _ = tune(noise=NOISE, call=evaluated)
    assert carried == [False, False, True, True, True, True]
    assert all(norm.noise is None for norm in block_norms(policy.model).values())
    noise = result.effects["noise"]
    assert noise["rollouts_asked"] == noise["rollouts_perturbed"] == 4
    assert noise["modules"] == 4
    assert noise["channels_changed"] == 4 * 4 * 32
    for asked, realised in zip(
        result.series["sigma"], result.series["sigma_realised"], strict=True
    ):
        assert (asked > 0) == (realised > 0)
    assert result.series["evaluation_step"] == [0, 2, 4, 6]
    tokens = result.series["evaluation_tokens"]
    assert tokens[0] == 0
    assert tokens[-1] == result.effects["rows"]["tokens_trained"]


def test_noise_changes_the_loss_of_noisy_steps_alone(tune: Any) -> None:
    clean, first, _, _ = tune()
    noisy, second, _, _ = tune(noise=NOISE, folder="b")
    assert noisy.series["loss"][:2] == clean.series["loss"][:2]
    assert noisy.series["loss"][2] != clean.series["loss"][2]
    assert noisy.series["tokens"] == clean.series["tokens"]
    assert not equal(weights(first), weights(second))


def test_running_out_of_memory_halves_the_micro_batch_and_is_noted(
    tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, _, _ = tune(steps=2)
    plain = single.row_logprobs

    def scarce(policy: Policy, rows: Any, *arguments: Any, **settings: Any) -> Any:
        if len(rows) > 2:
            raise torch.OutOfMemoryError("planted")
        return plain(policy, rows, *arguments, **settings)

    monkeypatch.setattr(single, "row_logprobs", scarce)
    parts, _, _, _ = tune(steps=2, folder="b")
    assert parts.effects["micro_batch_fallbacks"]
    assert parts.series["loss"] == pytest.approx(whole.series["loss"], rel=1e-4)
    assert parts.series["grad_norm"] == pytest.approx(whole.series["grad_norm"], rel=1e-3)


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tune: Any) -> None:
    whole, first, _, _ = tune(noise=NOISE)
    answers = iter([False, False, False, True])
    half, _, _, _ = tune(noise=NOISE, folder="b", call={"should_stop": lambda: next(answers)})
    assert (half.finished, half.step) == (False, 3)
    rest, second, _, _ = tune(noise=NOISE, folder="b")
    assert (rest.finished, rest.step) == (True, 6)
    assert equal(weights(first), weights(second))
    assert rest.series == whole.series
    for effects in (whole.effects, rest.effects):
        effects.pop("seconds")
    assert rest.effects == whole.effects


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": NoiseConfig()}, "has no rollout; it must be shared"),
        ({"loss": LossConfig(beta=0.1)}, "has neither"),
        ({"reward": "random"}, "has neither"),
        ({"exploration": Exploration(temperature=2.0)}, "samples no rollouts"),
        ({"evaluation": EvaluationConfig()}, "token_budget is 0"),
        ({"max_prompt_tokens": 4}, "takes at most 4"),
    ],
)
def test_what_cannot_act_is_refused(tune: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tune(**changes)


def test_no_lessons_are_refused(make_run: Any, make_policy: Any, tmp_path: Path) -> None:
    run = make_run(evaluation=EvaluationConfig(token_budget=BUDGET))
    with pytest.raises(ValueError, match="no worked solutions"):
        tune_alone(run, make_policy(), [], folder=tmp_path)
