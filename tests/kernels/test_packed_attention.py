"""Packed attention: its parts joined, its gradients, and that lengths cost nothing."""

import time

import pytest
import torch

from kernels import reference_train
from kernels.ops import named_op
from kernels.segments import segments
from tests.interpreted import needs_interpreter
from tests.kernels.conftest import assert_within_twice

QUERY, KEY, D = 6, 2, 16
SCALE = D**-0.5
# Tokens of prompts, of completions, and whose they are; a completion without tokens among them.
CASES = {
    "shared": ([3, 5], [4, 1, 0, 7], [0, 0, 1, 1]),
    "alone": ([4, 2], [3, 6], [0, 1]),
    "a prompt that nobody follows": ([2, 6, 3], [5, 2, 0, 0], [0, 1, 2, 2]),
    "prompts alone": ([3, 4], [0, 0], [0, 1]),
}


def segments_of(lengths, device="cpu"):
    return segments(*(torch.tensor(part) for part in lengths), device)


def inputs(lengths, device="cpu", dtype=torch.float32):
    """Return qkv, cos and sin of a pass, whose positions begin at each prompt."""
    prompts, completions, of_prompt = lengths
    positions = [torch.arange(n) for n in prompts]
    positions += [prompts[p] + torch.arange(n) for n, p in zip(completions, of_prompt, strict=True)]
    place = torch.cat(positions).unsqueeze(1)
    angles = (place * 100.0 ** (-torch.arange(0, D, 2) / D)).repeat(1, 2)  # (M, D)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(len(place), (QUERY + 2 * KEY) * D, generator=generator)
    return tuple(part.to(device, dtype) for part in (qkv, angles.cos(), angles.sin()))


def test_completions_out_of_their_prompts_order_are_refused():
    with pytest.raises(ValueError, match="order"):
        segments_of(([3, 5], [4, 1, 7], [0, 1, 0]))
    with pytest.raises(ValueError, match="last"):
        segments_of(([3, 5], [0, 4], [0, 1]))


def plain_flash(q, k, v, bounds, causal, scale):
    """Do what flash attention does, by its formula: outputs and log-sums."""
    scores, k, v = _scores(q, k, v, bounds[:2], causal, scale)
    log_sums = scores.logsumexp(-1)  # (H, M)
    out = torch.einsum("hqk,khd->qhd", (scores - log_sums[..., None]).exp(), v)
    return out.contiguous(), log_sums


def plain_flash_backward(given, bounds, causal, scale):
    """Do what flash attention's backward does: probabilities from the log-sums it is given."""
    grad, q, k, v, out, log_sums = given
    heads = k.shape[1]
    scores, k, v = _scores(q, k, v, bounds[:2], causal, scale)
    p = (scores - log_sums[..., None]).exp()
    dp = torch.einsum("qhd,khd->hqk", grad, v)
    ds = p * (dp - (grad * out).sum(-1).t()[..., None]) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, k)
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, grad)
    return dq.contiguous(), *(x.reshape(len(x), heads, -1, D).sum(2) for x in (dk, dv))


def _scores(q, k, v, ends, causal, scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    rows, seen = (
        torch.bucketize(torch.arange(len(x)), of, right=True)
        for x, of in zip((q, k), ends, strict=True)
    )
    visible = rows[:, None] == seen
    if causal:
        visible &= torch.arange(len(q))[:, None] >= torch.arange(len(k))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return scores.masked_fill(~visible, -torch.inf), k, v


@needs_interpreter
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_interpreted_parts_joined_are_the_whole(lengths, monkeypatch):
    from kernels.triton import packed_attention

    monkeypatch.setattr(packed_attention, "_flash", plain_flash)
    monkeypatch.setattr(packed_attention, "_flash_backward", plain_flash_backward)
    both = (packed_attention.packed_attention, reference_train.packed_attention)
    own, plain = (with_gradient(function, lengths) for function in both)
    for actual, expected in zip(own, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def with_gradient(function, lengths, device="cpu", dtype=torch.float32):
    """Return the output and the gradient of qkv."""
    qkv, cos, sin = inputs(lengths, device, dtype)
    leaf = qkv.clone().requires_grad_()
    # A product's output, which may be rotated in place.
    out = function(leaf * 1, cos, sin, segments_of(lengths, device), query_heads=QUERY, scale=SCALE)
    weights = torch.linspace(-1, 1, out.numel(), device=device).view_as(out).to(dtype)
    (out * weights).sum().backward()
    return out.detach(), leaf.grad


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_on_a_gpu_both_are_at_most_twice_as_far_off_as_plain_pytorch(lengths):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; found none")
    from kernels.triton import packed_attention

    ours = with_gradient(packed_attention.packed_attention, lengths, "cuda", torch.bfloat16)
    plain = with_gradient(reference_train.packed_attention, lengths, "cuda", torch.bfloat16)
    rounded = [part.to("cuda", torch.bfloat16).float() for part in inputs(lengths)]
    leaf = rounded[0].clone().requires_grad_()
    out = reference_train.packed_attention(
        leaf, *rounded[1:], segments_of(lengths, "cuda"), query_heads=QUERY, scale=SCALE
    )
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).bfloat16().float()
    (out * weights).sum().backward()
    assert leaf.grad is not None
    for actual, expected, exact in zip(ours, plain, (out.detach(), leaf.grad), strict=True):
        assert_within_twice(actual, expected, exact, "packed attention")


@pytest.mark.gpu
@pytest.mark.alone
def test_a_hundred_new_lengths_cost_nothing():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; found none")
    from kernels.triton import packed_attention

    op = named_op("packed_attention")
    made = {
        longest: op.inputs((3, longest, 14, 2, 64), torch.bfloat16, "cuda", longest)
        for longest in range(100, 201)
    }

    def go(longest):
        qkv, cos, sin, where, heads, scale = made[longest]
        out = packed_attention.packed_attention(
            qkv.requires_grad_() * 1, cos, sin, where, query_heads=heads, scale=scale
        )
        out.sum().backward()

    go(100)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for longest in range(101, 201):
        go(longest)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 0.3
