"""Every way of training makes a whole measured step: on a CUDA device where there is one.

On a CPU the clock's events are the host's and numbers are float32; on a GPU this takes the kernels,
the engine's captured steps and the 16-bit copy of a fully trained policy through the same code.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.models.other_products import take_products
from repro.models.policy import Policy, trainable_parameters
from repro.models.shapes import random_policy
from repro.procedures import checkpoint_stage, step_measure, step_time
from repro.procedures.checkpoint_path import carry_through
from repro.procedures.step_ledger import StepLedger, way_of
from repro.procedures.step_measure import Bench
from repro.procedures.step_phases import Stepper, parameter_image
from repro.reward.grader import GraderPool
from repro.rl.optimizer import gradient_step, optimizer_tensors, restore_optimizer
from repro.rollout.engine import Engine
from repro.spec.checkpoint_path import CheckpointScale
from repro.spec.step import StepArm, StepPoint, StepScale
from repro.targets.steps import BF16, BITSANDBYTES, FULL, MXFP4, NF4, NVFP4, RELEASED

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
POINT = StepPoint(
    name="small", model="0.5b", prompts=2, group=4, prompt_tokens=20, completion_tokens=40,
)  # fmt: skip
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; found none"
)
WAYS = (NVFP4, BF16, MXFP4, NF4, RELEASED, BITSANDBYTES, FULL)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if torch.cuda.is_available():
        return "cuda"
    request.getfixturevalue("host_clock")
    return "cpu"


def build(arm: StepArm, device: str) -> Policy:
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


@pytest.mark.parametrize("arm", WAYS, ids=way_of)
@pytest.mark.parametrize("checkpointing", [True, False], ids=["again", "kept"])
def test_a_step_of_every_way_is_measured_and_moves_the_policy(
    arm: StepArm, checkpointing: bool, device: str, tmp_path: Path
) -> None:
    point = dataclasses.replace(POINT, checkpointing=checkpointing, micro_tokens=150)
    scale = StepScale(points=(point,), warm_up_tokens=4, steps=2)
    with GraderPool(workers=1) as pool:
        ledger = StepLedger(tmp_path / "steps.json", scale)
        bench = Bench(scale=scale, seed=0, pool=pool, ledger=ledger, should_stop=lambda: False)
        assert step_measure._measure(bench, arm, point, build(arm, device), 10**11)
    entry = ledger.entry(arm, point)
    facts = entry["facts"]
    assert len(entry["repeats"]) == 2
    assert facts["linears"] == {arm.weight_format: 14}
    assert facts["moved"] > 0
    assert facts["generated_tokens"] == 8 * 40
    assert facts["adapter_modules"] == (0 if arm.training == "full" else 14)
    for repeat in entry["repeats"]:
        assert repeat["grad_norm"] > 0
        assert repeat["rollout"] > 0
        assert repeat["update"] > 0
        # Engine and trainer compute the same policy; bfloat16 rounds differently in each.
        assert repeat["sampler_trainer_abs_diff_mean"] < 0.05
    found = step_time.measured_steps(arm, [arm], scale, ledger) if device == "cuda" else None
    assert found is None or found.metrics["peak_bytes_small"].value


def test_ways_of_one_format_give_the_same_gradient(device: str, tmp_path: Path) -> None:
    norms: dict[str, list[float]] = {}
    for arm in (NVFP4, RELEASED):
        scale = StepScale(points=(POINT,), warm_up_tokens=4)
        with GraderPool(workers=1) as pool:
            ledger = StepLedger(tmp_path / f"{arm.name}.json", scale)
            bench = Bench(scale=scale, seed=0, pool=pool, ledger=ledger, should_stop=lambda: False)
            step_measure._measure(bench, arm, POINT, build(arm, device), 10**11)
        norms[arm.name] = [item["grad_norm"] for item in ledger.entry(arm, POINT)["repeats"]]
    assert norms[RELEASED.name] == pytest.approx(
        norms[NVFP4.name], rel=0.05 if device == "cuda" else 1e-4
    )


@needs_gpu
@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed here"
)
def test_moments_in_eight_bits_train_float32_factors_of_a_4_bit_policy(tmp_path: Path) -> None:
    point = dataclasses.replace(POINT, micro_tokens=150)
    scale = StepScale(points=(point,), warm_up_tokens=4, optimizer="adamw_8bit")
    policy = build(NVFP4, "cuda")
    planned = step_measure.step_shape(point, "nvfp4", 16, scale, 10**11)
    with GraderPool(workers=1) as pool:
        engine = Engine(policy, step_measure.engine_config(point, planned))
        stepper = Stepper.build(policy, engine, pool, point, scale, seed=0, micro_tokens=150)
        before = parameter_image(policy)
        for number in range(1, 3):
            assert stepper.step(number)["sampler_trainer_abs_diff_mean"] < 0.05
        engine.close()
    parameters = trainable_parameters(policy)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert float((parameter_image(policy) - before).norm()) > 0
    held = {name: stepper.optimizer.state[p]["state1"] for name, p in parameters.items()}
    # Tensors of fewer than 4,096 values keep float32 moments: bitsandbytes' own rule.
    assert {name: state.dtype for name, state in held.items()} == {
        name: torch.uint8 if p.numel() >= 4096 else torch.float32 for name, p in parameters.items()
    }
    assert torch.uint8 in {state.dtype for state in held.values()}
    kept = optimizer_tensors(stepper.optimizer, parameters)
    fresh = Stepper.build(policy, engine, pool, point, scale, seed=0, micro_tokens=150).optimizer
    restore_optimizer(fresh, parameters, *kept)
    for name, parameter in parameters.items():
        assert torch.equal(fresh.state[parameter]["state1"], held[name])
        parameter.grad = torch.ones_like(parameter)
    assert gradient_step(fresh, parameters, max_grad_norm=1.0) > 0


@needs_gpu
@pytest.mark.gpu
def test_a_checkpoint_goes_its_way_on_a_gpu(tmp_path: Path) -> None:
    def stage(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        return checkpoint_stage.STAGES[name](**settings)

    scale = CheckpointScale(model="0.5b", group=4, prompt_tokens=20, completion_tokens=40)
    found = carry_through(stage, tmp_path, SHAPE, scale, 0, "cuda")
    assert found.effects["linears"] == {"nvfp4": 14}
    assert found.effects["trained_change_l2"] > 0
    assert (found.metrics["load_seconds"].value or 0) > 0
