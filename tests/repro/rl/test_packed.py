"""Packed rows: equal to padded ones, whatever the cut, and not stopped by running out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from repro.models.policy import Policy, trainable_parameters
from repro.rl.logprobs import completion_logprobs
from repro.rl.loss import StepCounts, policy_loss
from repro.rl.packed import packed_logprobs
from repro.rl.packed_step import accumulate_packed, evaluate_packed, split_rows
from repro.rl.rows import Rows, make_rows
from repro.rollout.sampler import Completion
from repro.spec.config import DAPO, GRPO, RELEASED_BNPO

LENGTHS = (7, 3, 12, 1, 9, 5)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, 2.0, -1.5, 0.75], dtype=torch.float64)


@pytest.fixture
def rows() -> Rows:
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 40, (count,), generator=generator).tolist())

    completions = [
        Completion(token_ids=tokens(n), sampled_logprobs=(-1.0,) * n, finish_reason="length")
        for n in LENGTHS
    ]
    return make_rows([tokens(4), tokens(9), tokens(6)], completions, group_size=2)


@pytest.fixture
def policy(make_policy: Callable[..., Policy], nudge: Callable[[Policy, float], None]) -> Policy:
    policy = make_policy()
    nudge(policy, 0.1)
    return policy


def exact_head(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what `token_logprobs` returns, in the input's own precision."""
    assert bias is None
    logp = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    chosen = logp.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return chosen, -(logp.exp() * logp).sum(-1)


def gradients(policy: Policy) -> dict[str, Tensor]:
    found = {}
    for name, parameter in trainable_parameters_of_any_type(policy).items():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
        parameter.grad = None
    return found


def trainable_parameters_of_any_type(policy: Policy) -> dict[str, Tensor]:
    return {n: p for n, p in policy.model.named_parameters() if p.requires_grad}


def largest_gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    scale = max(float(value.abs().max()) for value in second.values())
    return max(float((first[n] - second[n]).abs().max()) for n in first) / scale


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_packed_rows_give_the_padded_rows_values_and_gradients(
    rows: Rows,
    make_policy: Callable[..., Policy],
    nudge: Callable[[Policy, float], None],
    weight_format: str,
    checkpointing: bool,
) -> None:
    policy = make_policy(weight_format=weight_format)
    nudge(policy, 0.1)
    weights = torch.rand(rows.mask.shape, generator=torch.Generator().manual_seed(1))
    plain, plain_entropy = completion_logprobs(policy, rows, 0.7, layout="padded")
    (plain * weights).sum().backward()
    expected = gradients(policy)
    packed, entropy = packed_logprobs(policy, rows, 0.7, checkpointing=checkpointing)
    (packed * weights).sum().backward()
    torch.testing.assert_close(packed, plain, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy, plain_entropy, rtol=0, atol=2e-5)
    assert largest_gap(gradients(policy), expected) < 1e-5


def test_a_row_does_not_see_its_neighbours(rows: Rows, policy: Policy) -> None:
    together = packed_logprobs(policy, rows, 1.0)[0]
    for row, length in enumerate(LENGTHS):
        alone = packed_logprobs(policy, rows.select(torch.tensor([row])), 1.0)[0]
        torch.testing.assert_close(together[row, :length], alone[0, :length], rtol=0, atol=2e-5)


def test_attention_is_as_it_was_after_a_packed_pass(rows: Rows, policy: Policy) -> None:
    config: Any = policy.decoder.config
    before = config._attn_implementation
    packed_logprobs(policy, rows, 1.0)[0].sum().backward()
    assert config._attn_implementation == before


def test_micro_batches_hold_every_row_once_and_no_more_tokens_than_asked(rows: Rows) -> None:
    batches = split_rows(rows, 20)
    assert torch.cat(batches).tolist() == list(range(6))
    sizes = [len(rows.prompts[i // 2]) + LENGTHS[i] - 1 for i in range(6)]
    for batch in batches:
        assert sum(sizes[i] for i in batch.tolist()) <= 20 or len(batch) == 1
    assert len(batches) > 2


def double(policy: Policy) -> Policy:
    policy.model.double()
    return policy


@pytest.mark.parametrize("config", [GRPO, DAPO], ids=["grpo", "dapo"])
def test_any_cut_gives_the_whole_steps_gradient_in_float64(
    rows: Rows, policy: Policy, config: Any
) -> None:
    double(policy)
    old = torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(2)).double() - 2

    def run(micro_tokens: int) -> dict[str, Tensor]:
        accumulate_packed(
            policy, rows, ADVANTAGES, config, 1.0,
            length_limit=12, micro_tokens=micro_tokens, old_logprobs=old, head=exact_head,
        )  # fmt: skip
        return gradients(policy)

    whole = run(1000)
    for micro_tokens in (40, 20, 1):
        assert largest_gap(run(micro_tokens), whole) < 1e-10


class ShortMemory:
    """A head that runs out of memory beyond a number of predicted tokens, after some use."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.failures = 0

    def __call__(self, hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Fail or pass on."""
        if hidden.requires_grad and len(hidden) > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError("planted")
        return exact_head(hidden, *rest)


class FailsInBackward(torch.autograd.Function):
    """Passes values through; runs out of memory in backward until told otherwise."""

    armed = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Fail once."""
        if FailsInBackward.armed:
            FailsInBackward.armed = False
            raise torch.OutOfMemoryError("planted")
        return grads[0]


def test_running_out_of_memory_halves_the_micro_batch_and_keeps_the_gradient(
    rows: Rows, policy: Policy
) -> None:
    double(policy)
    settings: dict[str, Any] = {"length_limit": 12}
    accumulate_packed(
        policy, rows, ADVANTAGES, GRPO, 1.0, micro_tokens=1000, head=exact_head, **settings
    )
    whole = gradients(policy)
    head = ShortMemory(most=14)
    done = accumulate_packed(
        policy, rows, ADVANTAGES, GRPO, 1.0, micro_tokens=160, head=head, **settings
    )
    assert head.failures >= 2
    assert done.fallbacks == [160 // 2**i for i in range(len(done.fallbacks))]
    assert done.micro_tokens == 160 // 2 ** len(done.fallbacks)
    assert largest_gap(gradients(policy), whole) < 1e-10


def test_running_out_of_memory_in_backward_counts_no_gradient_twice(
    rows: Rows, policy: Policy
) -> None:
    double(policy)
    settings: dict[str, Any] = {"length_limit": 12, "head": exact_head}
    accumulate_packed(policy, rows, ADVANTAGES, GRPO, 1.0, micro_tokens=1000, **settings)
    whole = gradients(policy)
    calls = 0

    def head(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        # The second micro-batch fails half-way: the first one's gradients are there by then, and
        # those of the last block's output side of the second.
        return exact_head(FailsInBackward.apply(hidden) if calls == 2 else hidden, *rest)

    FailsInBackward.armed = True
    done = accumulate_packed(
        policy, rows, ADVANTAGES, GRPO, 1.0, micro_tokens=40, length_limit=12, head=head
    )
    assert done.fallbacks == [40]
    assert largest_gap(gradients(policy), whole) < 1e-10


def test_a_single_row_that_does_not_fit_is_the_end(rows: Rows, policy: Policy) -> None:
    double(policy)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        accumulate_packed(
            policy, rows, ADVANTAGES, GRPO, 1.0,
            length_limit=12, micro_tokens=100, head=ShortMemory(most=2),
        )  # fmt: skip
    assert all(p.grad is None for p in trainable_parameters_of_any_type(policy).values())


def test_the_packed_steps_loss_is_the_padded_ones(rows: Rows, policy: Policy) -> None:
    old = completion_logprobs(policy, rows, 1.0, layout="padded")[0].detach() - 0.01
    new = completion_logprobs(policy, rows, 1.0, layout="padded")[0]
    counts = StepCounts(rows=6, tokens=sum(LENGTHS), length_limit=12)
    whole = policy_loss(new, ADVANTAGES.float(), rows.mask, GRPO, counts, old_logprobs=old)
    done = accumulate_packed(
        policy, rows, ADVANTAGES, GRPO, 1.0, length_limit=12, micro_tokens=25, old_logprobs=old
    )
    assert done.loss == pytest.approx(float(whole.loss.detach()), abs=1e-6)
    evaluated = evaluate_packed(policy, rows, 1.0, micro_tokens=25)
    torch.testing.assert_close(done.logprobs, evaluated, rtol=0, atol=2e-5)


def test_an_objective_that_depends_on_the_cut_is_refused(rows: Rows, policy: Policy) -> None:
    with pytest.raises(ValueError, match="normalisers of the whole step"):
        accumulate_packed(
            policy, rows, ADVANTAGES, RELEASED_BNPO, 1.0, length_limit=12, micro_tokens=25
        )


def test_gradients_that_are_there_already_are_refused(rows: Rows, policy: Policy) -> None:
    first = next(iter(trainable_parameters(policy).values()))
    first.grad = torch.zeros_like(first)
    with pytest.raises(ValueError, match="has a gradient already"):
        accumulate_packed(policy, rows, ADVANTAGES, GRPO, 1.0, length_limit=12, micro_tokens=25)


def test_the_dispatched_head_is_the_default() -> None:
    assert packed_logprobs.__kwdefaults__["head"] is dispatch.token_logprobs


@pytest.mark.parametrize("empty", [[], [0]])
def test_what_cannot_be_evaluated_is_refused(
    rows: Rows, policy: Policy, empty: Sequence[int]
) -> None:
    part = rows.select(torch.tensor(empty, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one" if not empty else "positive one"):
        packed_logprobs(policy, part, 1.0 if not empty else 0.0)
