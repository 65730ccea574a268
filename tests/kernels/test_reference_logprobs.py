"""Chunked logprobs and entropies against plain autograd, and their memory."""

import pytest
import torch
from torch import Tensor

from kernels import reference_logprobs
from kernels.reference import token_logprobs
from kernels.triton.logprobs import chunk_rows
from tests.kernels.conftest import assert_within_twice
from tests.repro.rl.uneven_rows import exact_head

T, H, V = 23, 32, 211


def _inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(19)
    hidden = torch.randn(T, H, generator=generator).to(dtype)
    weight = (torch.randn(V, H, generator=generator) * 0.5).to(dtype)
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


def _values_and_gradients(function, dtype, temperature, given=torch.float32):
    """Return values and gradients in a type, on inputs rounded to the type in which they come."""
    hidden, weight, ids = _inputs(given)
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
    logprobs, entropy = function(*leaves, ids, temperature)
    generator = torch.Generator().manual_seed(12)
    a, b = torch.randn(2, T, generator=generator).to(logprobs.dtype)
    gradients = torch.autograd.grad((logprobs * a + entropy * b).sum(), leaves)
    return [logprobs.detach(), entropy.detach(), *gradients]


NAMES = ["logprobs", "entropy", "gradient of hidden", "gradient of weight"]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("rows", [1, 5, T, 1000])
def test_values_and_gradients_agree_with_autograd_in_float64(temperature, rows, monkeypatch):
    monkeypatch.setattr(reference_logprobs, "_CHUNK_BYTES", rows * V * 4)
    ours = _values_and_gradients(token_logprobs, torch.float32, temperature)
    plain = _values_and_gradients(exact_head, torch.float32, temperature)
    exact = _values_and_gradients(exact_head, torch.float64, temperature)
    for name, actual, expected, truth in zip(NAMES, ours, plain, exact, strict=True):
        assert_within_twice(actual, expected, truth, name)


def test_bfloat16_inputs_have_logits_in_float32_and_gradients_as_exact_as_autograds(monkeypatch):
    monkeypatch.setattr(reference_logprobs, "_VOCABULARY_ROWS", 64)
    ours, plain, unrounded, exact = (
        _values_and_gradients(function, dtype, 0.9, torch.bfloat16)
        for function, dtype in (
            (token_logprobs, torch.bfloat16),
            (exact_head, torch.bfloat16),
            (exact_head, torch.float32),
            (exact_head, torch.float64),
        )
    )
    # The values against plain PyTorch in float32, the gradients against it in bfloat16.
    others = [*unrounded[:2], *plain[2:]]
    for name, actual, expected, truth in zip(NAMES, ours, others, exact, strict=True):
        assert_within_twice(actual, expected, truth, name)


def test_an_output_that_is_not_used_adds_nothing_to_the_gradient():
    hidden, weight, ids = _inputs()
    hidden.requires_grad_()
    for used in (0, 1):
        (ours,) = torch.autograd.grad(token_logprobs(hidden, weight, ids, 0.8)[used].sum(), hidden)
        (plain,) = torch.autograd.grad(exact_head(hidden, weight, ids, 0.8)[used].sum(), hidden)
        wide = hidden.detach().double().requires_grad_()
        loss = exact_head(wide, weight.double(), ids, 0.8)[used].sum()
        (exact,) = torch.autograd.grad(loss, wide)
        assert_within_twice(ours, plain, exact, f"output {used}")


def test_no_allocation_exceeds_the_chunk_and_no_logits_are_saved_for_backward(monkeypatch):
    monkeypatch.setattr(reference_logprobs, "_CHUNK_BYTES", 50 * V * 4)
    largest, saved = 0, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.nbytes)
            return out

    def pack(tensor):
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    hidden, weight, ids = _inputs()
    hidden, ids = hidden.repeat(40, 1).requires_grad_(), ids.repeat(40)
    with Watch(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, entropy = token_logprobs(hidden, weight, ids, 0.7)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest <= max(50 * V * 4, hidden.nbytes)
    # Beside the arguments three numbers a row.
    assert saved <= hidden.nbytes + weight.nbytes + ids.nbytes + 3 * len(ids) * 4 + 16


def test_bad_arguments_are_refused():
    hidden, weight, ids = _inputs()
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(hidden, weight, ids, 0.0)
    with pytest.raises(ValueError, match=r"must be \(T, H\), \(V, H\) and \(T,\)"):
        token_logprobs(hidden, weight, ids[:-1], 1.0)


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(152_064, 1024), (896, 186_368), (32_000, 5120), (200_000, 838)]
)
def test_chunks_of_a_small_vocabulary_are_long(vocabulary, rows):
    chosen = chunk_rows(vocabulary)
    assert chosen == rows
    assert chosen * vocabulary * 4 <= 640 << 20
