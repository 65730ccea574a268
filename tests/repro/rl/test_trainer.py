"""The training loop on a tiny random policy: what it draws, updates, logs, and how it resumes."""

import dataclasses
import math
from contextlib import suppress
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from repro.distributed import ALONE, BatchError
from repro.evidence.procedure import Stopped
from repro.models.norms import block_norms
from repro.models.policy import trainable_parameters
from repro.rl.collect import PromptSource
from repro.rollout.torch_sampler import TorchSampler
from repro.runlog.completions import keep_batch
from repro.spec.arm import DAPO, LossConfig, NoiseConfig, RewardFunction
from repro.spec.config import EvaluationConfig, SamplingConfig
from tests.repro.rl.conftest import score_by_text
from tests.repro.small_runs import equal, train_alone, weights

NOISE = NoiseConfig(sigma_start=0.3, sigma_end=0.1, num_stages=3)


def test_a_run_logs_every_series_once_a_step_and_changes_the_weights(go):
    start = {}
    result, policy, _ = go(prepare=lambda p, s: start.update(weights(p)))
    assert result.step == 6
    assert set(map(len, result.series.values())) == {6}
    assert {"format", "loss", "sigma_realised"} <= result.series.keys()
    assert not equal(start, weights(policy))
    assert all(value > 0 for value in result.series["grad_norm"])
    assert result.series["learning_rate"] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2])
    assert result.facts["rows"]["trained_on"] == 6 * 12
    # One update a rollout: the ratio is one to the bit, and no bound acts.
    assert set(result.series["ratio"]) == {1.0}
    assert set(result.series["clip_fraction_low"]) == {0.0}
    assert set(result.series["clip_fraction_high"]) == {0.0}


def test_sampler_and_trainer_agree_and_a_sampler_that_was_not_refreshed_shows(go):
    def forget(policy, sampler):
        sampler.refresh = lambda: None

    result, _, _ = go(weight_format="nvfp4")
    assert max(result.series["sampler_trainer_abs_diff_max"]) < 1e-4
    assert 0 <= max(result.series["sampler_trainer_kl"]) < 1e-8
    stale, _, _ = go(folder="b", prepare=forget)
    assert stale.series["sampler_trainer_abs_diff_max"][0] < 1e-4
    assert stale.series["sampler_trainer_abs_diff_max"][-1] > 1e-3


def test_several_updates_move_the_ratio_after_the_first(go):
    def in_turns(requests):
        # No update is of rows without advantage.
        scored = enumerate(score_by_text(requests))
        return [dataclasses.replace(one, unshaped=float(i % 2)) for i, one in scored]

    result, _, sampler = go(updates_per_rollout=3, micro_batch_rows=3, score=in_turns)
    assert sampler.calls == 2
    ratio = result.series["ratio"]
    assert [value == 1.0 for value in ratio] == [True, False, False] * 2
    assert result.series["sigma"] == [0.0] * 6


def test_ratio_against_the_sampler_differs_from_one_under_noise(go):
    result, _, _ = go(noise=NOISE, loss=LossConfig(old_policy="sampler"))
    noisy = [sigma > 0 for sigma in result.series["sigma"]]
    assert noisy == [False, False, True, True, True, True]
    assert [abs(ratio - 1) > 1e-4 for ratio in result.series["ratio"]] == noisy


def test_noise_reaches_the_sampler_only_beside_a_kl_term_and_importance_weights(go):
    seen = []

    def watch(policy, sampler):
        norms = block_norms(policy.model).values()
        sampler.before = lambda: seen.append(all(norm.noise is not None for norm in norms))

    loss = LossConfig(beta=0.05, importance_cap=2.0)
    result, policy, _ = go(noise=NOISE, loss=loss, prepare=watch)
    assert seen == [False, False, True, True, True, True]
    assert all(norm.noise is None for norm in block_norms(policy.model).values())
    mismatch = result.series["sampler_trainer_abs_diff_mean"]
    assert max(mismatch[:2]) < 1e-4
    assert min(mismatch[2:]) > 1e-3
    receipt = result.facts["noise"]
    assert (receipt["rollouts_asked"], receipt["rollouts_perturbed"]) == (4, 4)
    assert receipt["modules"] == 4
    assert len(receipt["digest"]) == 64
    assert result.series["kl"][0] == pytest.approx(0, abs=1e-12)
    assert min(result.series["kl"][1:]) > 0
    assert result.series["importance_weight"][0] == pytest.approx(1.0, abs=1e-4)
    assert any(abs(w - 1) > 1e-3 for w in result.series["importance_weight"][2:])


def test_shared_noise_is_seen_by_the_trainer_too(go):
    shared = dataclasses.replace(NOISE, reach="shared")
    result, _, _ = go(noise=shared, updates_per_rollout=2)
    assert max(result.series["sigma"]) > 0
    assert max(result.series["sampler_trainer_abs_diff_max"]) < 1e-4


def test_arms_of_a_seed_share_problems_and_random_numbers(go):
    _, _, plain = go()
    _, _, noisy = go(noise=NOISE, folder="b")
    _, _, other = go(folder="c", seed=1)
    assert plain.seeds == noisy.seeds
    assert len(set(plain.seeds)) == len(plain.seeds) == 6 * 12
    assert not set(plain.seeds) & set(other.seeds)


def test_problems_are_drawn_without_repetition_within_an_epoch(make_policy, make_run, problems):
    source = PromptSource(problems, make_policy().tokenizer, make_run())
    ids = [[p.id for p in source.draw(batch)] for batch in range(4)]
    assert len({*ids[0], *ids[1]}) == 6
    assert len({*ids[2], *ids[3]}) == 6
    assert ids[:2] != ids[2:]
    again = PromptSource(problems, make_policy().tokenizer, make_run())
    assert [[p.id for p in again.draw(batch)] for batch in (3, 0)] == [ids[3], ids[0]]


def test_equal_rewards_and_rows_without_one_leave_the_weights_alone(go):
    def constant(requests):
        scored = enumerate(score_by_text(requests))
        return [dataclasses.replace(one, unshaped=0.2 if i % 4 else None) for i, one in scored]

    start = {}
    result, policy, _ = go(score=constant, prepare=lambda p, s: start.update(weights(p)))
    assert equal(start, weights(policy))
    assert set(result.series["grad_norm"]) == {0.0}
    assert set(result.series["zero_variance_groups"]) == {1.0}
    assert min(result.series["entropy"]) > 0
    assert result.facts["rows"]["without_reward"] == 6 * 3


def test_dynamic_sampling_refills_counts_prompts_and_goes_on_with_fewer(go):
    calls = []

    def rarely(requests):
        """One informative group a batch, the second; format alone varies elsewhere."""
        calls.append(len(requests))
        scored = score_by_text(requests)
        pairs = zip(scored, [float(i in (4, 5)) for i in range(len(requests))], strict=True)
        return [
            dataclasses.replace(one, accuracy=a, unshaped=a + 0.2 * one.format) for one, a in pairs
        ]

    loss = dataclasses.replace(DAPO, dynamic_sampling=2, mask_truncated=False, overlong_buffer=0.0)
    result, _, sampler = go(loss=loss, score=rarely, steps=2)
    assert len(calls) == sampler.calls == 4
    assert result.series["prompts_consumed"] == [6, 12]
    assert result.series["informative_groups"] == pytest.approx([1 / 3, 1 / 3])
    # Two groups of four were kept each step, and both carry a gradient.
    assert result.facts["rows"]["trained_on"] == 2 * 2 * 4
    assert result.series["zero_variance_groups"] == [0.0, 0.0]
    assert len(set(sampler.seeds)) == len(sampler.seeds)
    # Groups that were thrown away cost tokens too.
    rollout_tokens = round(sum(2 * 4 * tokens for tokens in result.series["completion_tokens"]))
    assert result.facts["rows"]["tokens_sampled"] > rollout_tokens


def test_dynamic_sampling_with_nothing_informative_still_steps(go):
    def never(requests):
        scored = score_by_text(requests)
        return [dataclasses.replace(one, accuracy=0.0) for one in scored]

    result, _, _ = go(loss=DAPO, score=never, steps=2)
    assert result.step == 2
    assert result.series["reward"] == [None, None]
    assert result.series["prompts_consumed"] == [9, 18]


@pytest.mark.parametrize(
    "paid_by",
    [
        {"reward_function": RewardFunction(module="m", function="f", source_sha256="0" * 64)},
        *({"reward": reward} for reward in ("random", "format", "finished")),
    ],
    ids=str,
)
def test_dynamic_sampling_under_another_reward_keeps_the_groups_that_it_tells_apart(go, paid_by):
    def other(requests):
        # The second group differs in what is paid, the third in accuracy alone.
        scored = enumerate(score_by_text(requests))
        return [
            dataclasses.replace(one, accuracy=float(i == 8), unshaped=float(i == 4))
            for i, one in scored
        ]

    # Shaping alone makes no group informative.
    loss = dataclasses.replace(DAPO, dynamic_sampling=1, mask_truncated=False, overlong_buffer=0.9)
    result, _, _ = go(loss=loss, score=other, steps=1, **paid_by)
    assert result.series["informative_groups"] == pytest.approx([1 / 3])
    assert result.series["accuracy"] == [0.0]
    assert result.series["grad_norm"][0] > 0


def test_overlong_filtering_gives_truncated_rows_no_loss(go):
    result, _, _ = go(loss=LossConfig(mask_truncated=True))
    assert max(result.series["truncation_rate"]) > 0.5
    plain, _, _ = go(folder="b")
    assert result.series["grad_norm"][0] != plain.series["grad_norm"][0]


def test_evaluation_runs_at_its_interval_without_noise_by_steps_and_sampled_tokens(go):
    norms = []
    called = []

    def evaluate(step):
        called.append((step, all(norm.noise is None for norm in norms)))
        return 10.0 * step

    result, _, _ = go(
        noise=dataclasses.replace(NOISE, reach="shared"),
        evaluation=EvaluationConfig(every=2, token_budget=100),
        prepare=lambda p, s: norms.extend(block_norms(p.model).values()),
        call={"evaluate": evaluate},
    )
    assert called == [(0, True), (2, True), (4, True), (6, True)]
    assert result.series["evaluation_step"] == [0, 2, 4, 6]
    assert result.series["evaluation_accuracy"] == [0.0, 20.0, 40.0, 60.0]
    sampled = [12 * tokens for tokens in result.series["completion_tokens"]]
    assert result.series["evaluation_tokens"] == [round(sum(sampled[:n])) for n in (0, 2, 4, 6)]


@pytest.mark.parametrize("fault", ["weight", "reward", "sampler"])
def test_the_batch_on_which_a_run_had_to_stop_is_kept(go, tmp_path, fault):
    held = {}

    def plant(due):
        if due and held["sampler"].calls == 2:
            next(iter(trainable_parameters(held["policy"]).values())).data.view(-1)[0] = torch.nan

    def prepare(policy, sampler):
        held.update(policy=policy, sampler=sampler)
        sampler.before = lambda: plant(fault == "sampler")

    def score(requests):
        plant(fault == "weight")
        rewards = score_by_text(requests)
        if fault == "reward" and held["sampler"].calls == 2:
            rewards[0] = dataclasses.replace(rewards[0], unshaped=math.nan)
        return rewards

    call = {"on_fault": partial(keep_batch, tmp_path / "run", ALONE)}
    with pytest.raises(BatchError, match=r"finite.*step 2, kept in "):
        go(prepare=prepare, score=score, call=call)
    (path,) = (tmp_path / "run").iterdir()
    batch, count = load_file(path), len(load_file(path)["seeds"])
    assert batch["seeds"].tolist() == held["sampler"].seeds[-count:]
    assert int(batch["prompt_tokens"].sum()) == len(batch["prompts"]) > 0
    assert len(batch["completion_tokens"]) == (0 if fault == "sampler" else count)
    assert len(batch["completions"]) == len(batch["sampled_logprobs"])
    assert bool(batch["rewards"].isnan().any()) == (fault == "reward")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": SamplingConfig(max_new_tokens=6, top_p=0.9)}, "top_p 0.9"),
        ({"rollout": SamplingConfig(max_new_tokens=6, temperature=0.0)}, "temperature is 0"),
        ({"prompts_per_rollout": 9}, r"\b9\b"),
        ({"max_prompt_tokens": 3}, r"\b3\b"),
        (
            {"prepare": lambda policy, _: policy.model.add_module("drop", torch.nn.Dropout(0.1))},
            "drops out",
        ),
    ],
)
def test_what_cannot_be_trained_raises(go, changes, message):
    with pytest.raises(ValueError, match=message):
        go(**changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none")
@pytest.mark.parametrize(
    ("weight_format", "training", "optimizer"),
    [
        ("nvfp4", "lora", "adamw"),
        ("bf16", "lora", "adamw"),
        ("bf16", "full", "adamw"),
        ("nvfp4", "lora", "adamw_8bit"),
        ("bf16", "full", "adamw_8bit"),
    ],
)
def test_a_run_on_a_gpu_resumes_and_its_sampler_agrees(
    make_policy, make_run, problems, tmp_path, weight_format, training, optimizer
):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="8-bit moments are bitsandbytes'")
    run = make_run(
        weight_format=weight_format, training=training, compute_dtype="bfloat16",
        updates_per_rollout=2, noise=NOISE, loss=LossConfig(beta=0.01),
    )  # fmt: skip
    chosen = dataclasses.replace(run.scale.optimizer, name=optimizer)
    run = dataclasses.replace(run, scale=dataclasses.replace(run.scale, optimizer=chosen))
    answers = iter([False, True, False, False])
    for _ in range(2):
        policy = make_policy(
            weight_format=weight_format, training=training, compute_dtype="bfloat16", device="cuda"
        )
        with suppress(Stopped):
            result = train_alone(
                run, policy, TorchSampler(policy), problems, score_by_text,
                folder=tmp_path, should_stop=lambda: next(answers),
            )  # fmt: skip
    assert len(result.series["reward"]) == 6
    # bfloat16 activations round; a wrong position or mask is off by whole nats.
    assert result.series["sampler_trainer_abs_diff_mean"][0] < 0.1
