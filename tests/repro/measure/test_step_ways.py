"""Every way of training makes a whole measured step: on a CUDA device where there is one."""

import dataclasses
import importlib.util

import pytest
import torch

from repro.measure import step_measure
from repro.measure.step_metrics import metrics_of, way_of
from repro.measure.step_training import parameter_image, timed_step, training_of
from repro.models.other_products import take_products
from repro.models.policy import trainable_parameters
from repro.models.random_policy import random_policy
from repro.reward.grader import GraderPool
from repro.rl.optimizers import gradient_step, optimizer_tensors, restore_optimizer
from repro.rl.rows import make_rows
from repro.rl.step import accumulate_step
from repro.rl.training_state import fresh_state
from repro.rollout.engine import Engine
from repro.rollout.sampler import Completion
from repro.spec.step_scale import StepPoint, StepScale
from repro.targets.steps import BF16, BITSANDBYTES, FOLDED, FULL, MXFP4, NF4, NVFP4, RELEASED
from tests.repro.measure import conftest as small
from tests.repro.rl.uneven_rows import rollout_of, step_on

SHAPE = small.SHAPE | {"hidden_size": 256, "intermediate_size": 512}
POINT = StepPoint(
    name="small", model="0.5b", prompts=2, group=4, prompt_tokens=20, completion_tokens=16,
)  # fmt: skip
# Rows of 36 tokens at most: two or more to a pass, and several passes.
MICRO_TOKENS = 90
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; found none"
)
WAYS = (NVFP4, BF16, MXFP4, NF4, RELEASED, BITSANDBYTES, FULL, FOLDED)


@pytest.fixture
def device(request):
    if torch.cuda.is_available():
        return "cuda"
    request.getfixturevalue("host_clock")
    return "cpu"


def build(arm, device):
    if arm.linears == "bitsandbytes" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed here")
    full = arm.training == "full"
    policy = random_policy(
        SHAPE, weight_format=arm.weight_format, lora_rank=0 if full else 16,
        compute_dtype="bfloat16" if device == "cuda" or full else "float32", seed=0,
        device=device, full=full,
    )  # fmt: skip
    take_products(policy.model, arm.linears, policy.compute_dtype)
    return policy


@pytest.mark.gpu
@pytest.mark.parametrize("arm", WAYS, ids=way_of)
def test_a_step_of_every_way_is_measured_and_moves_the_policy(arm, device):
    point = dataclasses.replace(POINT, micro_tokens=MICRO_TOKENS)
    scale = StepScale(points=(point,), warm_up_tokens=4, steps=2)
    entry = small.measured_at(small.bench_of(scale), arm, point, build(arm, device))
    facts = entry.facts
    assert len(entry.repeats) == 2
    assert facts["linears"] == {arm.weight_format: 14}
    assert facts["moved"] > 0
    assert facts["generated_tokens"] == 8 * POINT.completion_tokens
    assert facts["adapter_modules"] == (0 if arm.training == "full" else 14)
    # The warm-up and two steps.
    assert facts["sampler_trainer_kl"] == entry.repeats[-1]["sampler_trainer_kl"] >= 0
    assert facts.get("folded", {}).get("rollouts", 0) == (3 if arm is FOLDED else 0)
    for repeat in entry.repeats:
        assert repeat["grad_norm"] > 0
        assert repeat["rollout"] > 0
        assert repeat["update"] > 0
        # Engine and trainer compute the same policy; bfloat16 rounds differently in each.
        assert repeat["sampler_trainer_abs_diff_mean"] < 0.05
    assert device == "cpu" or metrics_of(point, entry, {})["peak_bytes_small"].value


def gradients_of(arm, rows, device):
    policy = build(arm, device)
    with GraderPool() as pool:
        # An engine rearranges the codes that the trainer's kernels read.
        t, _, engine = small.prepared(policy, pool, POINT, arm)
    accumulate_step(
        policy, step_on(rollout_of(rows, (1.0, -0.5, 0.25, -1.0, 2.0, -1.5, 0.5, -0.75))),
        t.learner.run, parameters=t.learner.parameters, micro_tokens=MICRO_TOKENS,
    )  # fmt: skip
    engine.close()
    return {
        name: parameter.grad.cpu()
        for name, parameter in trainable_parameters(policy).items()
        if parameter.grad is not None
    }


@pytest.mark.gpu
@pytest.mark.parametrize("arm", [RELEASED, BITSANDBYTES], ids=way_of)
def test_ways_of_one_format_give_the_same_gradient_of_the_same_tokens(arm, device):
    generator = torch.Generator().manual_seed(0)
    prompts, tokens = (
        torch.randint(0, 2048, shape, generator=generator).tolist() for shape in ((2, 20), (8, 16))
    )
    completions = [
        Completion(token_ids=tuple(row), sampled_logprobs=(-7.0,) * 16, finish_reason="length")
        for row in tokens
    ]
    rows = make_rows(prompts, completions, group_size=4)
    kernels = {"nvfp4": NVFP4, "nf4": NF4}[arm.weight_format]
    own, other = (gradients_of(way, rows, device) for way in (kernels, arm))
    assert len(own) == len(other) == 2 * 14
    # On a GPU activations and the dense weights are rounded to bfloat16, each way in its own place.
    most = 0.05 if device == "cuda" or arm is BITSANDBYTES else 1e-4
    errors = {name: float((own[name] - other[name]).norm() / own[name].norm()) for name in own}
    assert {name: error for name, error in errors.items() if error > most} == {}


@needs_gpu
@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed here"
)
def test_moments_in_eight_bits_train_float32_factors_of_a_4_bit_policy(tmp_path):
    point = dataclasses.replace(POINT, micro_tokens=MICRO_TOKENS)
    scale = StepScale(points=(point,), warm_up_tokens=4, optimizer="adamw_8bit")
    policy = build(NVFP4, "cuda")
    planned = step_measure.step_shape(point, NVFP4, scale, 10**11)
    with GraderPool() as pool:
        engine = Engine(policy, step_measure.engine_config(point, planned))
        t, fresh = (
            training_of(
                policy, engine, pool, NVFP4, point, scale, seed=0, micro_tokens=MICRO_TOKENS
            )
            for _ in range(2)
        )
        state = fresh_state(t.learner.run)
        before = parameter_image(policy)
        for _ in range(2):
            assert timed_step(t, state)["sampler_trainer_abs_diff_mean"] < 0.05
        engine.close()
    parameters = trainable_parameters(policy)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert float((parameter_image(policy) - before).norm()) > 0
    moments = {name: t.learner.optimizer.state[p]["state1"] for name, p in parameters.items()}
    # Tensors of fewer than 4,096 values keep float32 moments: bitsandbytes' own rule.
    assert {name: moment.dtype for name, moment in moments.items()} == {
        name: torch.uint8 if p.numel() >= 4096 else torch.float32 for name, p in parameters.items()
    }
    assert torch.uint8 in {moment.dtype for moment in moments.values()}
    restore_optimizer(
        fresh.learner.optimizer, parameters, *optimizer_tensors(t.learner.optimizer, parameters)
    )
    for name, parameter in parameters.items():
        assert torch.equal(fresh.learner.optimizer.state[parameter]["state1"], moments[name])
        parameter.grad = torch.ones_like(parameter)
    assert gradient_step(fresh.learner.optimizer, parameters, rate=1e-5, max_grad_norm=1.0) > 0
