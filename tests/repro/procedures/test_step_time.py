"""A measured step does what training does: on a small shape, with the clock's events replaced."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from repro.models.memory_plan import plan_memory
from repro.models.policy import Policy, trainable_parameters
from repro.models.shapes import random_policy
from repro.procedures import procedure_named, step_time
from repro.procedures.step_phases import PHASES, Stepper, parameter_image
from repro.reward.grader import GraderPool
from repro.rollout.engine import Engine
from repro.spec.config import RunConfig
from repro.spec.step import StepPoint, StepScale
from repro.targets.steps import MEMORY, MEMORY_POINTS, TABLE3, TABLE3_POINTS

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
POINT = StepPoint(
    name="small", model="0.5b", prompts=2, group=2, prompt_tokens=20, completion_tokens=24,
    sampled_tokens=10,
)  # fmt: skip


class HostEvent:
    """A device event's stand-in that reads the host's clock."""

    def __init__(self, **settings: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Take the time."""
        self.at = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        """Return milliseconds."""
        return (later.at - self.at) * 1e3


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def policy() -> Policy:
    return random_policy(
        SHAPE, weight_format="nvfp4", lora_rank=16, compute_dtype="float32", seed=0, device="cpu"
    )


@pytest.fixture
def pool() -> Any:
    with GraderPool(workers=1) as pool:
        yield pool


def make_stepper(policy: Policy, pool: GraderPool, point: StepPoint = POINT) -> Stepper:
    scale = StepScale(points=(point,), warm_up=1, warm_up_tokens=4)
    planned = step_time.step_shape(point, "nvfp4", 16, scale, 10**10)
    engine = Engine(policy, step_time._engine_config(point, planned))
    return Stepper.build(
        policy, engine, pool, point, scale, seed=0, micro_tokens=planned.micro_tokens
    )


@pytest.mark.usefixtures("host_clock")
def test_a_step_samples_grades_and_moves_every_trained_tensor(
    policy: Policy, pool: GraderPool
) -> None:
    stepper = make_stepper(policy, pool)
    before = {name: p.detach().clone() for name, p in trainable_parameters(policy).items()}
    image = parameter_image(policy)
    found = [stepper.step(number) for number in range(3)]
    assert stepper.engine.statistics.generated_tokens == 4 * 10
    assert max(step["grad_norm"] for step in found) > 0
    for name, parameter in trainable_parameters(policy).items():
        assert not torch.equal(parameter.detach(), before[name]), name
    assert not torch.equal(parameter_image(policy), image)


@pytest.mark.usefixtures("host_clock")
def test_the_sampler_and_the_packed_pass_agree_after_updates(
    policy: Policy, pool: GraderPool
) -> None:
    stepper = make_stepper(policy, pool)
    for number in range(3):
        assert stepper.step(number)["sampler_trainer_abs_diff_mean"] < 1e-5


@pytest.mark.usefixtures("host_clock")
@pytest.mark.parametrize(("prompt", "completion"), [(32, 96), (33, 70), (64, 64), (5, 27)])
def test_the_planned_cache_holds_every_row_without_preemption(
    policy: Policy, pool: GraderPool, prompt: int, completion: int
) -> None:
    point = dataclasses.replace(
        POINT, prompt_tokens=prompt, completion_tokens=completion, sampled_tokens=0, group=4
    )
    stepper = make_stepper(policy, pool, point)
    stepper.step(1)
    assert stepper.engine.statistics.generated_tokens == 8 * completion
    assert stepper.engine.statistics.preemptions == 0


@pytest.mark.usefixtures("host_clock")
def test_phases_fill_the_whole_step(policy: Policy, pool: GraderPool) -> None:
    found = make_stepper(policy, pool).step(0)
    assert sum(found[name] for name in PHASES) == pytest.approx(found["total"], rel=1e-6)
    assert found["rollout"] > 0
    assert found["update"] > 0


@pytest.mark.usefixtures("host_clock")
def test_a_warm_up_step_samples_few_tokens_and_updates_on_full_rows(
    policy: Policy, pool: GraderPool
) -> None:
    stepper = make_stepper(policy, pool)
    stepper.step(0)
    assert stepper.engine.statistics.generated_tokens == 4 * 4


def test_metrics_are_those_that_the_target_names() -> None:
    for target, points in ((TABLE3, TABLE3_POINTS), (MEMORY, MEMORY_POINTS)):
        (scale,) = target.scales.values()
        named = {metric.name: metric.unit for metric in target.metrics}
        for point in points:
            measured = {
                "seconds": dict.fromkeys((*PHASES, "reward", "total"), 2.0),
                "generated_tokens": 100,
                "peak_bytes": 100,
                "predicted_bytes": 97,
            }
            found = step_time._metrics(point, {"nvfp4": measured, "bf16": measured}, "nvfp4", scale)
            assert {name: e.unit for name, e in found.items()}.items() <= named.items()
            assert found[f"prediction_error_{point.name}"].value == pytest.approx(3.0)
            if scale.baseline:
                assert found[f"speedup_{point.name}"].value == 1.0


def test_a_point_that_does_not_fit_has_no_metrics() -> None:
    scale = StepScale(points=(POINT,))
    assert step_time._metrics(POINT, {}, "nvfp4", scale) == {}


def test_the_planned_step_is_the_points(policy: Policy) -> None:
    scale = StepScale(points=(POINT,))
    planned = step_time.step_shape(POINT, "nvfp4", 16, scale, 10**10)
    assert (planned.slots, planned.row_tokens, planned.rank) == (4, 44, 16)
    assert planned.micro_tokens == 4 * 44
    assert plan_memory(planned).peak < 10**10
    few = dataclasses.replace(POINT, slots=2, cache="float8")
    config = step_time._engine_config(few, step_time.step_shape(few, "nvfp4", 16, scale, 10**10))
    assert (config.slots, config.cache_format) == (2, "float8")


def test_a_point_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="small letters"):
        dataclasses.replace(POINT, name="7B b8")
    with pytest.raises(ValueError, match="must lie in 0 to 24"):
        dataclasses.replace(POINT, sampled_tokens=25)
    with pytest.raises(ValueError, match="no model size"):
        dataclasses.replace(POINT, model="8b")
    with pytest.raises(ValueError, match="share a name"):
        StepScale(points=(POINT, POINT))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, so it would measure")
def test_without_a_device_the_procedure_says_so(tmp_path: Any) -> None:
    run = RunConfig(
        target="memory", target_version=1, tier="systems", procedure="step_time",
        arm=MEMORY.arms[0], scale=StepScale(points=(POINT,)), seed=0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no CUDA device"):
        procedure_named("step_time")(
            run, folder=tmp_path, progress=lambda *a: None, should_stop=lambda: False, threads=1
        )
