"""Which sampler a policy gets, and that it follows what is trained."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from repro.evidence.procedure import Stopped
from repro.models.lora import adapter_layers, fold_adapter
from repro.models.norms import block_norms
from repro.models.policy import load_policy
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.for_policy import CopySampler, FoldedSampler, sampler_for
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.config import SamplingConfig
from tests.repro.rl.conftest import nudge, score_by_text
from tests.repro.rollout.conftest import require_alike, tokens_of
from tests.repro.small_runs import equal, train_alone, weights

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; found none"
)


def test_on_a_cpu_a_policy_is_sampled_by_plain_torch(make_policy, go):
    policy = make_policy()
    sizes = {"rows": 4, "max_new_tokens": 8, "max_positions": 64}
    assert isinstance(sampler_for(policy, **sizes), TorchSampler)
    assert isinstance(sampler_for(policy, folded=True, **sizes), FoldedSampler)
    result, _, _ = go(steps=1)
    assert "micro_tokens" not in result.facts


def test_a_copy_for_the_engine_follows_masters_biases_and_noise(make_policy):
    policy = make_policy(training="full", compute_dtype="float32")
    sampler = CopySampler(policy, small_engine)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.2).add_(0.01)
    before = sampled(sampler)
    sampler.refresh()
    refreshed = sampled(sampler)
    require_alike(refreshed, sampled(TorchSampler(policy)))
    for norm in block_norms(policy.decoder).values():
        norm.noise = torch.full(norm.weight.shape, 0.5)
    noisy = sampled(sampler)
    require_alike(noisy, sampled(TorchSampler(policy)))
    assert len({tuple(tokens_of(batch)) for batch in (before, refreshed, noisy)}) == 3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("weight_format", "training"), [("nvfp4", "lora"), ("bf16", "lora"), ("bf16", "full")]
)
def test_the_tiny_policy_trains_on_a_gpu_with_the_engine_and_both_agree(
    make_run, problems, tmp_path, weight_format, training
):
    run = make_run(
        weight_format=weight_format, training=training, compute_dtype="bfloat16",
        updates_per_rollout=2, lora_rank=16, max_prompt_tokens=256,
    )  # fmt: skip
    policy = load_policy(
        "tiny", weight_format=weight_format, training=training, lora_rank=16, lora_alpha=32.0,
        compute_dtype="bfloat16", seed=0, device="cuda",
    )  # fmt: skip
    sampler = sampler_for(policy, rows=12, max_new_tokens=6, max_positions=300)
    assert isinstance(sampler, CopySampler if training == "full" else Engine)
    result = train_alone(run, policy, sampler, problems, score_by_text, folder=tmp_path)
    assert result.step == 6
    # bfloat16 activations round; a stale adapter or a wrong position is off by far more.
    assert max(result.series["sampler_trainer_abs_diff_mean"]) < 0.05
    assert all(value > 0 for value in result.series["grad_norm"])


SAMPLING = SamplingConfig(max_new_tokens=8)


def sampled(source):
    return source.sample([[5, 6, 7], [8, 9]], SAMPLING, group_size=2, seeds=[1, 2, 3, 4])


def bits(policy):
    """Return copies of all of a policy's tensors."""
    return {name: value.clone() for name, value in policy.model.state_dict().items()}


def small_engine(policy):
    return Engine(policy, EngineConfig(slots=4, max_positions=64, max_new_tokens=8))


@pytest.mark.parametrize("around", [TorchSampler, small_engine])
def test_a_folded_adapter_is_in_the_rollout_alone_and_leaves_no_bit(make_policy, around):
    policy, merged = make_policy(), make_policy()
    sampler = FoldedSampler(policy, around)
    for one in (policy, merged):
        nudge(one)
    before = bits(policy)
    sampler.refresh()
    found = sampled(sampler)
    assert equal(bits(policy), before)
    fold_adapter(merged.model)
    assert found == sampled(around(merged))
    assert found != sampled(TorchSampler(policy))
    assert sampler.receipt()["folded"]["rollouts"] == 1
    assert 0 < sampler.receipt()["folded"]["update_lost"] < 1


@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_a_base_is_restored_after_a_rollout_that_fails(make_policy, error):
    policy = make_policy()
    nudge(policy)
    before, moved = bits(policy), []

    def fail(*request, **of_rows):
        moved.append(not equal(bits(policy), before))
        raise error

    sampler = FoldedSampler(policy, lambda policy: SimpleNamespace(sample=fail, road="none"))
    with pytest.raises(error):
        sampled(sampler)
    assert moved == [True]
    assert equal(bits(policy), before)
    assert not any(layer.merged for _, layer in adapter_layers(policy.model))
    assert sampler.receipt()["folded"]["rollouts"] == 0


def test_a_folded_run_resumes_to_the_bit(make_policy, make_run, problems, tmp_path):
    run = make_run(rollout_adapter="folded", updates_per_rollout=2)
    assert make_run().digest() == make_run(rollout_adapter="apart").digest() != run.digest()
    answers = iter([False, True, *[False] * 8])
    trained, results = {}, {}
    for folder, stops in (("cut", answers), ("cut", answers), ("whole", iter([False] * 9))):
        policy = make_policy()
        base = {name: value for name, value in bits(policy).items() if "base_layer" in name}
        assert base
        with suppress(Stopped):
            results[folder] = train_alone(
                run, policy, FoldedSampler(policy, TorchSampler), problems, score_by_text,
                folder=tmp_path / folder, should_stop=lambda stops=stops: next(stops),
            )  # fmt: skip
        assert equal(base, {name: bits(policy)[name] for name in base})
        trained[folder] = weights(policy)
    assert results["cut"].series == results["whole"].series
    assert equal(trained["cut"], trained["whole"])
    # B is zero in the first rollout: nothing is folded, and what differs is the order of sums.
    first, *later = results["whole"].series["sampler_trainer_abs_diff_mean"][::2]
    assert first < 1e-5
    assert min(later) > 10 * first
    assert all(value > 0 for value in results["whole"].series["grad_norm"])


@pytest.mark.gpu
@needs_gpu
def test_captured_steps_read_the_folded_base_which_has_its_bits_again():
    policy, merged = (
        load_policy(
            "tiny", weight_format="bf16", training="lora", lora_rank=16, lora_alpha=32.0,
            compute_dtype="bfloat16", seed=0, device="cuda",
        )
        for _ in range(2)
    )  # fmt: skip
    sampler = FoldedSampler(policy, small_engine)
    assert "dense" in sampler.engine.road
    before = sampled(sampler)  # captures the steps, with B zero
    for _ in range(2):  # each replays them, over weights of another adapter
        for one in (policy, merged):
            nudge(one)
        kept = bits(policy)
        sampler.refresh()
        found = sampled(sampler)
        assert equal(bits(policy), kept)
        assert found != before
        restored = bits(merged)
        fold_adapter(merged.model)
        assert found == sampled(small_engine(merged))
        for _, layer in adapter_layers(merged.model):
            layer.merged_adapters.clear()
        merged.model.load_state_dict(restored)
        before = found
