"""The vLLM sampler against vLLM itself: tokens, log-probabilities, adapters, noise, seeds, ends.

Needs vLLM; its CPU build will do (`nox -s vllm`). The policy is the package's trained one, in
float32, so that the plain sampler's greedy tokens must be vLLM's own.
"""

import dataclasses
import importlib.util
import json
import shutil

import pytest
import torch

from repro.measure.rollout_cells import Cell, Repeat
from repro.measure.vllm_rollout import VllmEngine
from repro.models.checkpoint import TINY_FOLDER
from repro.models.lora import adapter_layers
from repro.models.norms import block_norms
from repro.models.policy import load_policy
from repro.models.random_policy import random_policy
from repro.rl.noise import perturbed
from repro.rollout.draw import sampling_logprobs
from repro.rollout.torch_sampler import TorchSampler
from repro.rollout.vllm_sampler import VllmSampler
from repro.spec.arm import NoiseConfig
from repro.spec.config import SamplingConfig
from repro.spec.throughput_scale import ThroughputPoint
from tests.repro.architectures import CLASSES
from tests.repro.measure import conftest as small
from tests.repro.rollout.parity import distances, errors, float32_logprobs, trainer_logprobs
from tests.repro.rollout.test_vllm_sampler import CAPPED, run_of, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="needs vLLM, which is not installed; its CPU build will do (nox -s vllm)",
    ),
]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=48)
WARM = SamplingConfig(temperature=1.0, max_new_tokens=32)
NOISE = NoiseConfig(sigma_start=0.05, sigma_end=0.04)
POSITIONS = 512
# Numbers of the tiny policy's vocabulary that it writes often; its own end token is 1.
OTHER_ENDS = list(range(5, 60))
# Rounding in float32 leaves about 1e-6; another adapter or other noise, 1e-2 and more.
ROUNDING, MOVED = 1 + 2e-5, 1.01


@pytest.fixture(scope="module", autouse=True)
def settings():
    """Keep vLLM in this process, on its threads, and its own small functions uncompiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


def with_adapter(policy, size=0.02):
    """Give every B of a policy random values, and return the policy."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, layer in adapter_layers(policy.model):
            B = layer.adapter()[1]
            B.copy_(torch.randn(B.shape, generator=generator) * size)
    return policy


def load(folder, **changes):
    ask = {"weight_format": "bf16", "training": "lora", "seed": 3} | changes
    return with_adapter(load_policy(folder, lora_rank=8, lora_alpha=16, **ask))


def engine_of(policy, folder):
    """Return a sampler to be used in a `with`, whose engine loads a folder of the same weights."""
    policy.folder = folder
    return VllmSampler(policy, max_positions=POSITIONS)


def noise_on(policy):
    """Return a `with` that adds noise to a policy's norms, always the same."""
    return perturbed(policy, NOISE, seed=1, step=5, total_steps=10)


def against_trainer(policy, batch, prompts=None):
    """Return the mean exp|d| of a rollout and the trainer's pass over its tokens; 1 is alike."""
    trainer = trainer_logprobs(policy, prompts or PROMPTS, batch, 1.0)
    return float(torch.cat(distances(batch, trainer)).exp().mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the tiny policy's folder without a tokenizer, naming other end tokens."""
    copy = tmp_path_factory.mktemp("tiny")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copyfile(TINY_FOLDER / name, copy / name)
    values = json.loads((copy / "generation_config.json").read_text())
    values["eos_token_id"] = [1, *OTHER_ENDS]
    (copy / "generation_config.json").write_text(json.dumps(values))
    return copy


@pytest.fixture(scope="module")
def sampler(folder):
    with engine_of(load(TINY_FOLDER), folder) as made:
        yield made


def random_prompts(lengths, vocabulary=333):
    """Return a prompt of each length, of token ids from 2 to `vocabulary`, itself left out."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in lengths]


# The longest fills blocks of the prefix cache.
PROMPTS = random_prompts((3, 9, 17, 33, 300))


def sample(sampler, sampling, prompts=PROMPTS, group=2):
    """Sample `group` completions of each prompt at the seeds 0, 1, and so on, one a row."""
    return sampler.sample(
        prompts, sampling, group_size=group, seeds=list(range(len(prompts) * group))
    )


def written(batch):
    """Return what a batch says without its log-probabilities, which two samplers round apart."""
    return [(c.token_ids, c.finish_reason) for c in batch]


def test_greedy_tokens_are_the_plain_samplers(sampler):
    ours = sample(sampler, GREEDY, group=1)
    assert written(ours) == written(sample(TorchSampler(sampler.policy), GREEDY, group=1))
    assert {c.finish_reason for c in ours} == {"stop", "length"}
    assert {c.sampled_logprobs[0] for c in ours} == {0.0}


def test_it_stops_at_the_policys_end_tokens_alone(sampler):
    ended = [c for c in sample(sampler, GREEDY, group=1) if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == {1}
    assert any(set(c.token_ids[:-1]) & set(OTHER_ENDS) for c in ended)


def test_an_adapter_is_taken_up_at_the_refresh_and_not_before(sampler):
    policy, version = sampler.policy, sampler.version
    before = sample(sampler, WARM)
    with_adapter(policy, 0.0)
    try:
        assert sample(sampler, WARM) == before
        assert against_trainer(policy, before) > MOVED
        sampler.refresh()
        after = sample(sampler, WARM)
        assert sampler.version == version + 1
        assert after != before
        assert against_trainer(policy, after) < ROUNDING
        greedy = written(sample(sampler, GREEDY, group=1))
        with policy.model.disable_adapter():
            assert greedy == written(sample(TorchSampler(policy), GREEDY, group=1))
    finally:
        with_adapter(policy)
        sampler.refresh()
    assert sample(sampler, WARM) == before


def test_sampled_logprobs_are_the_trainers(sampler):
    batch = sample(sampler, WARM)
    apart = torch.cat(distances(batch, trainer_logprobs(sampler.policy, PROMPTS, batch, 1.0)))
    assert len(apart) > 200
    assert apart.exp().mean() < ROUNDING
    assert apart.max() < 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=32),
        SamplingConfig(temperature=0.7, top_p=0.8, max_new_tokens=32),
    ],
)
def test_under_filters_they_are_of_what_was_drawn_from(sampler, sampling):
    batch = sample(sampler, sampling)
    decoder = sampler.policy.decoder
    off = []
    for row, completion in enumerate(batch):
        prompt = PROMPTS[row // 2]
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = decoder(input_ids=tokens[:, :-1]).logits[0, len(prompt) - 1 :]
        expected = sampling_logprobs(logits, sampling).gather(-1, tokens[0, len(prompt) :, None])
        off += (expected[:, 0] - torch.tensor(completion.sampled_logprobs)).abs().tolist()
    # A token on the very edge of a filter may fall to either side by rounding.
    assert sum(not distance < 1e-3 for distance in off) < 0.01 * len(off)


def test_noise_on_the_norms_is_in_the_logprobs_and_leaves_no_trace(sampler):
    policy, before = sampler.policy, sample(sampler, WARM)
    assert sampler.channels_changed == 0
    with noise_on(policy) as receipt:
        noisy = sample(sampler, WARM)
        assert sampler.channels_changed == receipt.channels_changed > 0
        assert against_trainer(policy, noisy) < ROUNDING
    assert against_trainer(policy, noisy) > MOVED
    assert sample(sampler, WARM) == before
    assert sampler.channels_changed == 0


def test_gains_that_were_trained_are_vllms_too(sampler):
    plain = sampler.policy
    original = {name: norm.weight.clone() for name, norm in block_norms(plain.decoder).items()}
    sampler.policy = dataclasses.replace(plain, facts=plain.facts | {"norms_trained": 8})
    before = sample(sampler, WARM)
    try:
        with torch.no_grad():
            for norm in block_norms(plain.decoder).values():
                norm.weight.mul_(1.1)
        sampler.refresh()
        batch = sample(sampler, WARM)
        assert against_trainer(plain, batch) < ROUNDING
        assert sampler.channels_changed == 0
    finally:
        with torch.no_grad():
            for name, norm in block_norms(plain.decoder).items():
                norm.weight.copy_(original[name])
        sampler.policy = plain
        sampler.refresh()
    assert against_trainer(plain, batch) > MOVED
    assert sample(sampler, WARM) == before


def test_a_row_follows_its_seed_whatever_stands_beside_it(sampler):
    seeds = [11, 2**63 - 1, 5, 11]
    batch = sampler.sample(PROMPTS[:2], WARM, group_size=2, seeds=seeds)
    turned = sampler.sample(PROMPTS[1::-1], WARM, group_size=2, seeds=seeds[2:] + seeds[:2])
    alone = sampler.sample(PROMPTS[:1], WARM, group_size=1, seeds=seeds[1:2])
    assert written(turned) == written(batch)[2:] + written(batch)[:2]
    assert written(alone) == written(batch)[1:2]
    assert len(set(written(batch))) == 4


def test_a_frozen_policy_is_served_and_the_global_generator_left_alone(folder):
    before = torch.random.get_rng_state()
    with engine_of(load(TINY_FOLDER, training="none"), folder) as frozen:
        assert torch.equal(torch.random.get_rng_state(), before)
        ours = sample(frozen, GREEDY, group=1)
        assert written(ours) == written(sample(TorchSampler(frozen.policy), GREEDY, group=1))


def test_in_bfloat16_it_is_about_as_exact_as_the_trainer(folder):
    policy = load(TINY_FOLDER, compute_dtype="bfloat16")
    with engine_of(policy, folder) as sampler:
        batch = sample(sampler, WARM)
        asked = policy, PROMPTS, batch, 1.0
        own, trainers = errors(batch, trainer_logprobs(*asked), float32_logprobs(*asked))
        with noise_on(policy) as receipt:
            sample(sampler, WARM)
    # Logits rounded to bfloat16 would make it 1.6.
    assert own < 1.35 * trainers
    assert 0 < sampler.channels_changed < receipt.channels_changed


def write_random(folder, architecture):
    """Write a random checkpoint whose logits are sharp enough for an argmax."""
    config_class, model_class = CLASSES[architecture]
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    special = {"eos_token_id": 100, "bos_token_id": None, "pad_token_id": 0}
    config = config_class(
        vocab_size=101, max_position_embeddings=POSITIONS, **sizes, **heads, **special
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = 0.3 if "lm_head" in name or "embed" in name else 0.12
                parameter.add_(torch.randn_like(parameter) * spread)
    model.to(torch.bfloat16).save_pretrained(folder)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_other_architectures_agree_too(tmp_path, architecture):
    write_random(tmp_path, architecture)
    prompts = random_prompts((3, 20), 100)
    with engine_of(load(tmp_path), tmp_path) as sampler:
        policy, plain = sampler.policy, TorchSampler(sampler.policy)
        assert written(sample(sampler, GREEDY, prompts)) == written(sample(plain, GREEDY, prompts))
        with noise_on(policy):
            noisy = sample(sampler, WARM, prompts)
            assert against_trainer(policy, noisy, prompts) < ROUNDING


@pytest.mark.parametrize("noise", [None, NOISE], ids=["plain", "noisy"])
def test_a_run_trains_on_its_rollouts(tmp_path, noise):
    run = run_of("bf16_lora", arm=CAPPED, sampler="vllm")
    run = dataclasses.replace(run, arm=dataclasses.replace(run.arm, noise=noise))
    measured = trained(run, tmp_path)
    assert measured.facts["optimizer_steps"] == 4
    assert measured.facts["sampler"] == "VllmSampler"
    receipt, clean = measured.facts["vllm"], measured.series["sampler_trainer_abs_diff_mean"]
    assert receipt["abs_diff_mean_clean"] < 1e-4
    assert clean[0] < 1e-4
    if noise is None:
        assert max(clean) < 1e-4
    else:
        assert receipt["channels_changed"] > 0
        assert receipt["abs_diff_mean_noisy"] < 1e-4 < max(clean)


def test_its_rollouts_of_a_random_policy_are_timed(monkeypatch):
    shape = {**small.SHAPE, "num_attention_heads": 1, "num_key_value_heads": 1}
    policy = random_policy(shape, weight_format="bf16", lora_rank=8, seed=5, device="cpu")
    point = ThroughputPoint(name="tiny", shape="", prompt_tokens=16, new_tokens=12, batches=(1, 4))
    served = VllmEngine(policy, point, point.batches)
    # vLLM's CPU build puts its own in their places.
    monkeypatch.setattr(torch.cuda, "Event", small.HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    assert served.receipt["abs_diff_mean_clean"] < 0.02
    assert served.receipt["adapted_layers"] == 8
    repeat = Repeat(seed=1)
    for batch in point.batches:
        prompts = [prompt[:16] for prompt in random_prompts([16] * batch)]
        Cell(point, batch, served, repeat, prompts).time_whole(0.0)
        assert repeat.metrics[f"tokens_per_second_tiny_{batch}"].value
    served.close()
