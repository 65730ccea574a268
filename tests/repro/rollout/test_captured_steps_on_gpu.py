"""Noise, faults, bytes and exactness under captured steps: needs a GPU with room for a 7B."""

import pytest
import torch

from repro.measure.device_state import release
from repro.models.norms import block_norms
from repro.models.random_policy import random_policy
from repro.rl.noise import perturbed
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.gpu.cuda_backend import Captures
from repro.spec.arm import NoiseConfig
from repro.spec.config import SamplingConfig
from tests.repro.rollout.conftest import interrupt_after
from tests.repro.rollout.parity import distances, errors, float32_logprobs, trainer_logprobs

ROWS, TOKENS = 8, 64

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("policy_7b"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]


@pytest.fixture(scope="module")
def policy():
    return random_policy(
        "qwen2.5-7b", weight_format="nvfp4", lora_rank=32, seed=0, device="cuda"
    )  # fmt: skip


def engine_of(policy, **changes):
    sizes = {"slots": ROWS, "max_positions": 2 * TOKENS, "max_new_tokens": TOKENS}
    return Engine(policy, EngineConfig(**({"ignore_end": True} | sizes | changes)))


def rollout(engine):
    prompts = [[1 + 97 * row + i for i in range(TOKENS)] for row in range(ROWS)]
    sampling = SamplingConfig(max_new_tokens=TOKENS)
    return engine.sample(prompts, sampling, group_size=1, seeds=range(ROWS))


def test_noise_is_live_and_leaves_no_bit_behind(policy):
    engine = engine_of(policy)
    before = rollout(engine)
    assert rollout(engine) == before
    # "Noise range 1e-2 to 5e-4" (Table 4); a step in the first stage with noise.
    noise = NoiseConfig(sigma_start=1e-2, sigma_end=5e-4)
    with perturbed(policy, noise, seed=0, step=15, total_steps=100) as receipt:
        under = rollout(engine)
    assert rollout(engine) == before
    assert len(receipt.modules) == len(block_norms(policy.decoder))
    assert receipt.sigma_realised == pytest.approx(receipt.sigma, rel=0.02)
    assert all(one != other for one, other in zip(before, under, strict=True))
    engine.close()


def through_faults(policy):
    """Let an engine meet bad requests, an interrupt and logits that are not finite."""
    engine = engine_of(policy)
    expected = rollout(engine)
    for prompt in ([], [1] * (2 * TOKENS)):
        with pytest.raises(ValueError, match="prompt 0"):
            engine.sample([prompt], SamplingConfig(max_new_tokens=TOKENS), group_size=1, seeds=[0])
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(engine, TOKENS // 2, patch)
        with pytest.raises(KeyboardInterrupt):
            rollout(engine)
    assert rollout(engine) == expected
    gain = block_norms(policy.decoder)["model.layers.14.post_attention_layernorm"].weight
    original = gain.detach().clone()
    with torch.no_grad():
        gain[0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"model\.layers\.14's"):
        rollout(engine)
    with torch.no_grad():
        gain.copy_(original)
    assert rollout(engine) == expected
    assert engine.pool.free == engine.pool.capacity
    engine.close()


def test_a_fault_changes_no_later_rollout_and_keeps_no_byte(policy):
    # The first engine of a process leaves workspaces, which every later one uses.
    through_faults(policy)
    release()
    held = torch.cuda.memory_allocated()
    through_faults(policy)
    release()
    assert torch.cuda.memory_allocated() == held


def test_the_engine_is_as_near_to_a_float32_pass_as_the_trainer():
    policy = random_policy(
        "qwen2.5-3b", weight_format="nvfp4", lora_rank=32, seed=0, device="cuda"
    )  # fmt: skip
    engine = engine_of(policy, max_positions=TOKENS + 512, max_new_tokens=512)
    prompts = [[1 + 97 * row + i for i in range(TOKENS)] for row in range(4)]
    batch = engine.sample(
        prompts, SamplingConfig(max_new_tokens=512), group_size=1, seeds=range(4)
    )  # fmt: skip
    engine.close()
    trainer = trainer_logprobs(policy, prompts, batch, 1.0)
    own, trainers = errors(batch, trainer, float32_logprobs(policy, prompts, batch, 1.0))
    assert own <= 1.1 * trainers
    # Two passes that round differently; what they must not do is drift with the position.
    apart = torch.stack(distances(batch, trainer))  # (4, 512)
    assert apart[:, 256:].mean() <= 1.2 * apart[:, :256].mean()


def test_a_cache_that_is_given_back_leaves_its_memory_and_comes_back_with_its_steps(policy):
    prompts = [[11, 12, 13, 14], [21, 22, 23]]
    sampling = SamplingConfig(max_new_tokens=40)

    def engine(*, keeps):
        return Engine(
            policy,
            EngineConfig(slots=8, max_positions=4096, max_new_tokens=40, ignore_end=True,
                         keeps_cache=keeps),
        )  # fmt: skip

    keeping, giving = engine(keeps=True), engine(keeps=False)
    try:
        cache = giving.forward.blocks[0].cache.keys
        held = torch.cuda.memory_allocated()
        for seeds in (list(range(8)), list(range(8, 16))):
            usual, batch = (
                one.sample(prompts, sampling, group_size=4, seeds=seeds)
                for one in (keeping, giving)
            )
            assert batch == usual
            # 28 blocks' keys and values.
            assert held - torch.cuda.memory_allocated() > 0.9 * 2 * 28 * cache.nbytes
    finally:
        keeping.close()
        giving.close()


def test_captures_are_made_anew_while_memory_of_dropped_ones_is_held():
    device = torch.device("cuda", 0)
    captures = Captures(device)
    x = torch.arange(1 << 20, device=device, dtype=torch.float32)
    outputs = []

    def work():
        outputs.append(x + 1)

    for made in (1, 2, 3):
        captures.run("work", work)
        x += 1
        captures.run("work", work)
        torch.cuda.synchronize()
        # The capture's own result, which lies in the captures' pool, is kept from here on.
        assert torch.equal(outputs[-1], x + 1)
        captures.clear()
        # Twice done and once replayed, for each capture.
        assert len(outputs) == 2 * made
