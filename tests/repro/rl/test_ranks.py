"""What ranks divide and exchange: shares, the gradient of a step, rewards; ranks play in turns."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from repro import distributed as ranks_module
from repro.data.load import load_problems
from repro.distributed import ALONE, EXCHANGE, MEETING, Ranks
from repro.evaluation.asking import Evaluator
from repro.procedures.train import _alike_on_ranks
from repro.reward.score import Graded
from repro.rl.clock import Clock
from repro.rl.collect import GrowingRollout, PromptSource, collect
from repro.rl.step import accumulate_step, step_metrics
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.config import DataConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.rl.uneven_rows import exact_head, exact_norm, step_on, trained_of_any_type
from tests.repro.small_runs import fresh_policy, request_of, rewards_of

WORLDS = (2, 3, 4)
AGGREGATIONS = ("sequence_mean", "token_mean", "token_mean_local", "constant")


class Played(Ranks):
    """A rank whose exchanges leave what it has: the test adds up what all have."""

    def _exchange(self, of, act):
        del of, act


def test_every_item_is_one_ranks_and_the_largest_are_spread():
    sizes = [5, 90, 7, 88, 3, 1, 40]
    for world in WORLDS:
        shares = [Played(rank, world).mine(sizes) for rank in range(world)]
        assert sorted(itertools.chain(*shares)) == list(range(len(sizes)))
        loads = [sum(sizes[item] for item in share) for share in shares]
        assert max(loads) <= 4 / 3 * max(*sizes, sum(sizes) / world)  # as largest-first gives
    assert Played(2, 3).mine([4, 4]) == []


def tiny(weight_format):
    """Return the packaged policy in a format, with an adapter."""
    adapter = {"training": "lora", "lora_rank": 8, "lora_alpha": 8}
    return fresh_policy("tiny", weight_format=weight_format, **adapter)


@pytest.fixture(scope="module")
def step():
    return rollout_step()


def rollout_step():
    """Return a policy in float64, a rollout of three prompts by five, one of them idle, its run."""
    (run,) = plan(find("table1"), Tier.SMOKE, [3], ["nvfp4_lora"])
    data = DataConfig(source="generated", train_problems=50, test_problems=4)
    scale = dataclasses.replace(
        run.scale, prompts_per_rollout=3, group_size=5, micro_batch_rows=4, data=data
    )
    policy, run = tiny("nvfp4"), dataclasses.replace(run, scale=scale)
    source = PromptSource(load_problems(data, "train"), policy.tokenizer, run)
    growing = GrowingRollout(run, source, step=0, draws=0)
    noise = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (15,), generator=noise).double()
    values[:5] = 1.0  # a group without advantage
    graded = [Graded(accuracy=v, reward=v, unshaped=v, lenient=v) for v in values.tolist()]
    rollout = collect(growing, TorchSampler(policy), lambda requests: graded, Clock())
    policy.model.double()
    for parameter in trained_of_any_type(policy).values():
        # B starts at zero: A gets a gradient, too.
        extra = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
        parameter.data += 0.02 * extra
    return policy, rollout, run


def passed(step, ranks, index, old, tokens):
    policy, rollout, run = step
    parameters = trained_of_any_type(policy)
    for parameter in parameters.values():
        parameter.grad = None
    part = step_on(rollout, index, old=old, reference=old if run.arm.loss.beta else None)
    output, _ = accumulate_step(
        policy, part, run, parameters=parameters, micro_tokens=tokens, ranks=ranks
    )
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in parameters.items()
    }
    return gradients, output


@pytest.mark.parametrize(
    ("aggregation", "masked", "beta", "off"),
    # With a KL term no row is idle.
    [("token_mean", False, 0, False), *((name, True, 0.1, True) for name in AGGREGATIONS)],
)
def test_shares_of_a_gradient_add_up(step, monkeypatch, aggregation, masked, beta, off):
    # Norms and the head compute in what comes in; the references of both take float32.
    for module in ("reference", "dispatch"):
        monkeypatch.setattr(f"kernels.{module}.rms_norm", exact_norm)
    monkeypatch.setattr("kernels.dispatch.token_logprobs", exact_head)
    policy, rollout, run = step
    loss = dataclasses.replace(
        run.arm.loss, aggregation=aggregation, mask_truncated=masked, beta=beta
    )
    own = policy, rollout, dataclasses.replace(run, arm=dataclasses.replace(run.arm, loss=loss))
    behind = torch.where(rollout.rows.mask, rollout.rows.sampled_logprobs - 0.1, 0)
    old = behind if off else None
    # Of four ranks one has none of three rows.
    for index, worlds in ((torch.arange(15), (2, 3)), (torch.tensor([7, 2, 13]), (4,))):
        alone, whole = passed(own, ALONE, index, old, 400)
        largest = max(float(g.abs().max()) for g in alone.values())
        for world in worlds:
            shares = [passed(own, Played(rank, world), index, old, 150) for rank in range(world)]
            for name, gradient in alone.items():
                added = sum(gradients[name] for gradients, _ in shares)
                assert float((added - gradient).abs().max()) <= 1e-12 * largest
            together = sum(output.logprobs for _, output in shares)
            torch.testing.assert_close(together, whole.logprobs)
            losses = sum(output.loss for _, output in shares)
            assert losses == pytest.approx(whole.loss, abs=1e-7)
            outputs = [whole, *(output for _, output in shares)]
            metrics = [step_metrics(rollout, index, output) for output in outputs]
            assert len({own["completion_tokens"] for own in metrics}) == 1


def test_passes_of_a_step_are_spread_evenly_over_ranks(step):
    loads = []
    for rank in range(2):
        _, output = passed(step, Played(rank, 2), torch.arange(15), None, 100_000)
        made = [bool(output.logprobs[row].any()) for row in range(15)]
        loads.append(int(step[1].rows.packed_tokens()[torch.tensor(made)].sum()))
    assert min(loads) > 0.3 * sum(loads)


def test_what_an_exchange_takes_is_counted_from_when_all_have_come_and_without_grades(monkeypatch):
    now = [0.0]

    def passes(seconds):
        return lambda *args, **more: now.__setitem__(0, now[0] + seconds)

    there = SimpleNamespace(monitored_barrier=passes(5.0), all_reduce=passes(1.0))
    monkeypatch.setattr(ranks_module, "dist", there)
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    ranks = Ranks(0, 2)
    ranks.any(False)
    assert ranks.spent == {MEETING: 5.0, EXCHANGE: 1.0}
    ranks.add(torch.zeros(2), torch.zeros(3), of="gradients")
    ranks.add_numbers([1, 2])
    assert ranks.spent == {MEETING: 10.0, EXCHANGE: 3.0}
    assert dataclasses.replace(ranks, abreast=True).spent is ranks.spent
    ALONE.any(False)
    assert ALONE.spent == {}


def test_rewards_that_differ_between_ranks_are_refused():
    class OtherPays(Ranks):
        def objects(self, own):
            return [own, own if same else "another digest"]

        any = staticmethod(bool)

    def score(requests):
        return rewards_of(requests, [1.0])

    requests = [request_of("1", "1")]
    same = True
    assert _alike_on_ranks(score, OtherPays(0, 2))(requests) == score(requests)
    same = False
    with pytest.raises(ValueError, match="rank 1 rewards"):
        _alike_on_ranks(score, OtherPays(0, 2))(requests)


def test_each_rank_is_asked_as_many_rows_at_once_as_one_process(step):
    sampler, how = TorchSampler(step[0]), (step[0].tokenizer, None, 0)
    alone, of_four = Evaluator(sampler, *how), Evaluator(sampler, *how, ranks=Ranks(0, 4))
    assert (alone.rows_at_once, of_four.rows_at_once) == (256, 4 * 256)
