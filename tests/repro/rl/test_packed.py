"""Packed rows: equal to each row by itself."""

import dataclasses
from functools import partial

import pytest
import torch

from kernels import dispatch
from repro.models.fused_weights import side_by_side
from repro.models.lora import adapter_layers
from repro.models.norms import block_norms
from repro.models.policy import load_policy
from repro.rl.packed import packed_logprobs
from repro.rl.rows import make_rows
from tests.repro.rl.conftest import make_completion, nudge
from tests.repro.rl.uneven_rows import exact_head, largest_gap, plain_logprobs, take_gradients
from tests.repro.rollout.conftest import random_policy


@pytest.mark.parametrize("kind", ["bf16", "nvfp4", "norms trained", "qwen3", "llama"])
@pytest.mark.parametrize("kept_blocks", [0, 1, None])
def test_packed_rows_give_each_rows_own_values(rows, make_policy, kind, kept_blocks):
    policy = make_policy(**GPU_KINDS[kind]) if kind in GPU_KINDS else random_policy(kind)
    nudge(policy, 0.1)
    weights = torch.rand(rows.mask.shape, generator=torch.Generator().manual_seed(1))
    plain, plain_entropy = exact_logprobs(policy, rows, 0.7)
    (plain * weights).sum().backward()
    expected = take_gradients(policy)
    packed, entropy = packed_logprobs(policy, rows, 0.7, kept_blocks=kept_blocks)
    (packed * weights).sum().backward()
    torch.testing.assert_close(packed, plain, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy, plain_entropy, rtol=0, atol=2e-5)
    assert largest_gap(take_gradients(policy), expected) < 1e-5


@pytest.mark.parametrize("state", ["noisy", "merged", "disabled"])
def test_noise_and_an_adapters_state_act_as_in_the_modules(rows, policy, state):
    still = packed_logprobs(policy, rows, 1.0)[0]
    for norm in block_norms(policy.model).values():
        norm.noise = torch.full(norm.weight.shape, 0.3) if state == "noisy" else None
    for _, layer in adapter_layers(policy.model):
        if state == "merged":
            layer.merge()
        layer.enable_adapters(state != "disabled")
    with torch.no_grad():
        alone = plain_logprobs(policy, rows, 1.0)[0]
        packed = packed_logprobs(policy, rows, 1.0)[0]
    assert state == "merged" or float((packed - still).abs().max()) > 1e-3
    torch.testing.assert_close(packed, alone, rtol=0, atol=2e-5)


def test_end_tokens_count_and_nothing_after_them_although_padding_is_the_same_token():
    end = 0  # also what rows are padded with
    completions = [
        make_completion([5, 6, end]),
        make_completion([5, 6, 7, 8], "length"),
        make_completion([end]),
    ]
    rows = make_rows([[1], [2], [3]], completions, group_size=1)
    assert rows.mask.sum(1).tolist() == rows.lengths().tolist() == [3, 4, 1]
    assert rows.truncated.tolist() == [False, True, False]


def test_broken_completions_are_refused():
    bad = dataclasses.replace(make_completion([5]), sampled_logprobs=(float("nan"),))
    for prompt, completion, group_size, message in (
        ([1], make_completion([]), 1, "a completion is empty"),
        ([], make_completion([5]), 1, "a prompt or a completion is empty"),
        ([1], make_completion([5]), 2, "need 2"),
        ([1], bad, 1, "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            make_rows([prompt], [completion], group_size=group_size)


def test_weights_that_lie_one_after_another_are_one_matrix():
    whole = torch.arange(28.0).view(7, 4)
    parts = [whole[:3], whole[3:4], whole[4:6]]
    (fused,) = side_by_side(parts)
    assert torch.equal(fused, whole[:6])
    assert fused.data_ptr() == whole.data_ptr()
    for apart in ([parts[1], parts[0]], [parts[0], parts[1].clone()], [parts[0], parts[2]]):
        assert all(a is b for a, b in zip(side_by_side(apart), apart, strict=True))


GPU_KINDS = {
    "bf16": {},
    "nvfp4": {"weight_format": "nvfp4"},
    "mxfp4": {"weight_format": "mxfp4"},
    "norms trained": {"norms_trained": True},
    "full": {"weight_format": "bf16", "training": "full"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_KINDS)
@pytest.mark.parametrize("kept_blocks", [0, None])
def test_on_a_gpu_gradients_are_as_near_float64_as_the_policys_own_modules(
    rows, make_policy, checkpoint_folder, kind, kept_blocks
):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; found none")
    if kind == "full":
        # Loaded anew: a copy's forward pass under autocast is that of the one it was copied from.
        make_policy = partial(load_policy, checkpoint_folder)
    policy = make_policy(**GPU_KINDS[kind], compute_dtype="bfloat16", device="cuda")
    nudge(policy, 0.1)
    weights = torch.rand(rows.mask.shape, generator=torch.Generator().manual_seed(1)).cuda()

    def gradient(function, **settings):
        (function(policy, rows, 0.7, **settings)[0] * weights).sum().backward()
        return {name: grad.double().cpu() for name, grad in take_gradients(policy).items()}

    packed = gradient(packed_logprobs, kept_blocks=kept_blocks)
    modules = gradient(plain_logprobs)
    exact = make_policy(**GPU_KINDS[kind])
    nudge(exact, 0.1)
    exact.model.double()
    weights = weights.cpu()
    (exact_logprobs(exact, rows, 0.7)[0] * weights).sum().backward()
    for name, true in take_gradients(exact).items():
        ours, theirs = (float((of[name] - true).norm() / true.norm()) for of in (packed, modules))
        # Some roundings of bfloat16, where the modules happen to be nearer.
        assert ours <= 2 * theirs + 0.03, f"{name}: {ours}, the modules {theirs}"


def exact_logprobs(policy, rows, temperature):
    """Return each row's own log-probabilities and entropies, by a head written out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "token_logprobs", exact_head)
        return plain_logprobs(policy, rows, temperature)
