"""The engine against the plain sampler, and against itself under pressure."""

import pytest
import torch

from repro.models.lora import adapter_layers
from repro.rl.noise import perturbed
from repro.rollout.engine import Engine
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.arm import NoiseConfig
from repro.spec.config import SamplingConfig
from tests.repro.rollout.conftest import prompts_of, require_alike, small, tokens_of

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=32)


@pytest.mark.parametrize(
    ("architecture", "weight_format", "sampling"),
    [
        *(("qwen2", weight_format, GREEDY) for weight_format in ("bf16", "mxfp4", "nf4")),
        ("qwen3", "nvfp4", GREEDY),
        ("llama", "bf16", GREEDY),
        ("qwen2", "nvfp4", SamplingConfig(temperature=1.0, max_new_tokens=40)),
        ("qwen2", "nvfp4", SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=40)),
    ],
)
def test_rows_draw_what_the_plain_sampler_draws_from_the_same_seeds(
    make_policy, architecture, weight_format, sampling
):
    # With another seed a token may lie on the very edge of a filter, and fall to either side.
    policy = make_policy(architecture, weight_format, seed=1)
    prompts, seeds = prompts_of([9, 1, 23]), list(range(12))
    engine = Engine(policy, small()).sample(prompts, sampling, group_size=4, seeds=seeds)
    plain = TorchSampler(policy).sample(prompts, sampling, group_size=4, seeds=seeds)
    require_alike(engine, plain)


def test_preempted_rows_lose_nothing(make_policy):
    policy = make_policy()
    prompts, seeds = prompts_of([11, 6, 14, 9, 3, 20]), list(range(12))
    sampling = SamplingConfig(max_new_tokens=48)
    roomy = Engine(policy, small()).sample(prompts, sampling, group_size=2, seeds=seeds)
    # 1 + 20 blocks of 4: one row at full length takes 17.
    tight = Engine(policy, small(cache_blocks=21))
    batch = tight.sample(prompts, sampling, group_size=2, seeds=seeds)
    assert tight.statistics.preemptions > 0
    require_alike(batch, roomy)
    assert tight.pool.free == tight.pool.capacity


@pytest.mark.parametrize(
    "changes",
    [{"slots": 1}, {"slots": 13, "round_steps": 1}, {"block_size": 7, "prefill_tokens": 256}],
)
def test_tokens_depend_on_the_seed_alone_not_on_how_rows_are_batched(make_policy, changes):
    policy = make_policy("llama")
    prompts, seeds = prompts_of([9, 4, 4, 17, 1]), list(range(20))
    sampling = SamplingConfig(max_new_tokens=24)
    limits = [1 + (7 * i) % 24 for i in range(20)]
    ask = {"group_size": 4, "seeds": seeds, "limits": limits}
    usual = Engine(policy, small()).sample(prompts, sampling, **ask)
    engine = Engine(policy, small(**changes))
    batch = engine.sample(prompts, sampling, **ask)
    assert tokens_of(batch) == tokens_of(usual)
    assert [len(tokens) for tokens in tokens_of(batch)] == limits
    assert engine.pool.free == engine.pool.capacity


def test_a_cache_that_is_given_back_holds_no_memory_and_changes_no_token(make_policy):
    policy, prompts = make_policy(), prompts_of([9, 5])
    sampling = SamplingConfig(max_new_tokens=12)
    keeping, giving = Engine(policy, small()), Engine(policy, small(keeps_cache=False))
    for seeds in (list(range(8)), list(range(8, 16))):
        usual, batch = (
            engine.sample(prompts, sampling, group_size=4, seeds=seeds)
            for engine in (keeping, giving)
        )
        assert tokens_of(batch) == tokens_of(usual)
        cache = giving.forward.blocks[0].cache
        assert [t.untyped_storage().nbytes() for t in (cache.keys, cache.values)] == [0, 0]


def test_a_groups_prompt_is_prefilled_once_and_its_blocks_shared(make_policy):
    policy, prompt = make_policy(), prompts_of([33])[0]
    sampling = SamplingConfig(max_new_tokens=8)
    engine = Engine(policy, small(slots=8))
    engine.sample([prompt], sampling, group_size=8, seeds=range(8))
    assert engine.statistics.prefill_tokens == 32


def test_end_tokens_stop_a_row_and_are_part_of_it(make_policy):
    policy, prompts = make_policy("qwen2", "bf16"), prompts_of([6, 7])
    sampling = SamplingConfig(max_new_tokens=64)
    engine = Engine(policy, small())
    free = engine.sample(prompts, sampling, group_size=2, seeds=range(4))
    end = free[0].token_ids[10]
    engine.end_token_ids = frozenset({end})
    for completion, unstopped in zip(
        engine.sample(prompts, sampling, group_size=2, seeds=range(4)), free, strict=True
    ):
        token_ids = unstopped.token_ids
        length = token_ids.index(end) + 1 if end in token_ids else len(token_ids)
        assert completion.token_ids == token_ids[:length]
        assert completion.finish_reason == ("stop" if end in token_ids else "length")


def test_an_adapter_changed_in_place_is_seen_without_a_copy(make_policy):
    policy, prompts = make_policy("qwen3", "nf4", seed=11), prompts_of([6])
    engine = Engine(policy, small())
    ask = {"group_size": 1, "seeds": [3]}
    before = engine.sample(prompts, GREEDY, **ask)
    for _, layer in adapter_layers(policy.model):
        with torch.no_grad():
            layer.adapter()[1].mul_(-3.0)
    engine.refresh()
    after = engine.sample(prompts, GREEDY, **ask)
    assert tokens_of(after) != tokens_of(before)
    plain = TorchSampler(policy).sample(prompts, GREEDY, **ask)
    assert tokens_of(after) == tokens_of(plain)


def test_noise_on_the_norms_is_live_and_leaves_no_trace(make_policy):
    policy, prompts = make_policy(), prompts_of([6, 12])
    engine = Engine(policy, small())
    sampling = SamplingConfig(max_new_tokens=32)
    ask = {"group_size": 2, "seeds": range(4)}
    before = engine.sample(prompts, sampling, **ask)
    noise = NoiseConfig(sigma_start=0.3, sigma_end=0.2)
    with perturbed(policy, noise, seed=1, step=5, total_steps=10) as receipt:
        noisy = engine.sample(prompts, sampling, **ask)
        plain = TorchSampler(policy).sample(prompts, sampling, **ask)
    assert len(receipt.modules) == 4
    assert tokens_of(noisy) == tokens_of(plain)
    assert tokens_of(noisy) != tokens_of(before)
    assert engine.sample(prompts, sampling, **ask) == before
