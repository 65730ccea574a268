"""One step's passes: any cut by tokens gives its gradient, and memory's end is not the end."""

import dataclasses
import itertools

import pytest
import torch

from kernels import dispatch
from repro.rl.loss import StepCounts, policy_loss
from repro.rl.micro_batches import split_by_tokens
from repro.rl.step import accumulate_step, evaluate_rows
from repro.spec.arm import DAPO, GRPO, LossConfig
from tests.repro.rl.uneven_rows import (
    ADVANTAGES,
    BNPO,
    LENGTHS,
    PROMPTS,
    exact_head,
    largest_gap,
    plain_logprobs,
    rollout_of,
    step_on,
    take_gradients,
    trained_of_any_type,
)

EVERY_ROW = torch.arange(6)


@pytest.fixture
def run_of(make_run):
    def make(loss=GRPO, **changes):
        rollout = dataclasses.replace(make_run().scale.rollout, max_new_tokens=12)
        return make_run(loss=loss, rollout=rollout, **changes)

    return make


@pytest.fixture
def in_double(policy, monkeypatch):
    policy.model.double()
    use_head(monkeypatch, exact_head)
    return policy


def use_head(monkeypatch, head):
    """Let passes end in a head of the caller's."""
    monkeypatch.setattr(dispatch, "token_logprobs", head)


def go(policy, rows, run, micro_tokens, **settings):
    rollout = rollout_of(rows, settings.pop("advantages", ADVANTAGES))
    return accumulate_step(
        policy,
        step_on(rollout, **settings),
        run,
        parameters=trained_of_any_type(policy),
        micro_tokens=micro_tokens,
    )


def test_micro_batches_hold_every_row_once_and_no_more_tokens_than_asked(rows):
    def tokens(batch):
        return sum(PROMPTS[i] for i in {r // 2 for r in batch}) + sum(LENGTHS[r] - 1 for r in batch)

    assert rows.packed_tokens().tolist() == [tokens([row]) for row in range(6)]
    batches = [batch.tolist() for batch in split_by_tokens(rows, EVERY_ROW, 20)]
    assert list(itertools.chain.from_iterable(batches)) == list(range(6))
    assert all(tokens(batch) <= 20 or len(batch) == 1 for batch in batches)
    assert len(batches) > 2
    # No cut into as many passes has a smaller largest pass.
    cuts = itertools.combinations(range(1, 6), len(batches) - 1)
    best = min(
        max(tokens(range(a, b)) for a, b in itertools.pairwise((0, *cut, 6))) for cut in cuts
    )
    assert max(map(tokens, batches)) == best
    some = torch.tensor([4, 1])
    assert [piece.tolist() for piece in split_by_tokens(rows, some, 100)] == [[4, 1]]


@pytest.mark.parametrize(
    "loss",
    [GRPO, DAPO, BNPO, LossConfig(beta=0.1), LossConfig(aggregation="constant")],
    ids=["grpo", "dapo", "bnpo", "kl", "constant"],
)
def test_any_cut_gives_the_whole_steps_gradient_in_float64(rows, in_double, run_of, loss):
    generator = torch.Generator().manual_seed(2)
    old, ref = (torch.randn(rows.mask.shape, generator=generator).double() - 2 for _ in range(2))
    # A local mean is over so many rows, however many of them go in one pass.
    run = run_of(dataclasses.replace(loss, mask_truncated=False), micro_batch_rows=4)
    advantages = (1.0, -0.5, 0.0, 2.0, 0.0, 0.75)

    def gradient(micro_tokens):
        go(in_double, rows, run, micro_tokens, old=old, reference=ref, advantages=advantages)
        return take_gradients(in_double)

    whole = gradient(1000)
    for micro_tokens in (40, 20, 1):
        assert largest_gap(gradient(micro_tokens), whole) < 1e-10


def short_of_memory(most):
    """Return a head that runs out of memory beyond a number of predicted tokens."""

    def head(hidden, *rest):
        if len(hidden) > most:
            raise torch.OutOfMemoryError("planted")
        return exact_head(hidden, *rest)

    return head


def test_out_of_memory_halves_the_micro_batch(rows, in_double, run_of, monkeypatch):
    whole, unchanged = go(in_double, rows, run_of(), 1000)
    gradient = take_gradients(in_double)
    assert unchanged == 1000
    use_head(monkeypatch, short_of_memory(14))
    output, micro_tokens = go(in_double, rows, run_of(), 160)
    assert micro_tokens in {160 // 2**i for i in range(2, 8)}
    assert output.loss == pytest.approx(whole.loss)
    assert largest_gap(take_gradients(in_double), gradient) < 1e-10


def test_out_of_memory_counts_no_gradient_twice(rows, in_double, run_of, monkeypatch):
    go(in_double, rows, run_of(), 1000)
    whole = take_gradients(in_double)
    calls = itertools.count(1)

    def fail(gradient):
        raise torch.OutOfMemoryError("planted")

    def head(hidden, *rest):
        # The second micro-batch fails half-way, when gradients of its last block are there, too.
        if next(calls) == 2:
            hidden.register_hook(fail)
        return exact_head(hidden, *rest)

    use_head(monkeypatch, head)
    assert go(in_double, rows, run_of(), 40)[1] == 20
    assert largest_gap(take_gradients(in_double), whole) < 1e-10


def test_a_single_row_that_does_not_fit_is_the_end(rows, in_double, run_of, monkeypatch):
    use_head(monkeypatch, short_of_memory(2))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        go(in_double, rows, run_of(), 100)
    assert all(p.grad is None for p in trained_of_any_type(in_double).values())
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        evaluate_rows(in_double, rows, EVERY_ROW, 1.0, micro_tokens=100)


def test_the_steps_loss_and_log_probabilities_are_those_of_each_row_alone(rows, policy, run_of):
    new = plain_logprobs(policy, rows, 1.0)[0]
    old = new.detach() - 0.01
    counts = StepCounts(rows=6, tokens=sum(LENGTHS), length_limit=12)
    whole = policy_loss(new, torch.tensor(ADVANTAGES), rows.mask, GRPO, counts, old_logprobs=old)
    output, _ = go(policy, rows, run_of(), 25, old=old)
    assert output.loss == pytest.approx(float(whole.loss.detach()), abs=1e-6)
    torch.testing.assert_close(output.logprobs, new.detach(), rtol=0, atol=2e-5)
    evaluated, fitting = evaluate_rows(policy, rows, EVERY_ROW, 1.0, micro_tokens=25)
    assert fitting == 25
    torch.testing.assert_close(output.logprobs, evaluated, rtol=0, atol=2e-5)


def test_idle_rows_go_forward_alone_but_for_a_kl_term_and_are_measured(rows, policy, run_of):
    advantages, with_kl = (0.0, 0.0, 1.0, -1.0, 0.0, 0.0), run_of(LossConfig(beta=0.1))
    reference = torch.zeros(rows.mask.shape)
    output, _ = go(policy, rows, with_kl, 25, advantages=advantages, reference=reference)
    assert output.plan.idle == []
    output, _ = go(policy, rows, run_of(), 25, advantages=advantages)
    assert torch.cat([piece for piece, _ in output.plan.micro_batches]).tolist() == [2, 3]
    assert torch.cat(output.plan.idle).tolist() == [0, 1, 4, 5]
    expected = plain_logprobs(policy, rows, 1.0)[0].detach()
    torch.testing.assert_close(output.logprobs, expected, rtol=0, atol=2e-5)
