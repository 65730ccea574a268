"""The way of real weights: a checkpoint written, quantised, loaded and stepped.

Each stage has a process of its own, so that a peak of the host's memory is the stage's. Files that
were just written lie in the host's page cache: loading starts from a warm one.
"""

import multiprocessing
import shutil
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from repro.measure.device_state import (
    context_bytes,
    driver_bytes,
    host_peak_bytes,
    release,
    reset_peak,
)
from repro.measure.step_training import parameter_image, timed_step, training_of, warm_up
from repro.models.checkpoint import write_quantized
from repro.models.loading import linears_of
from repro.models.policy import load_policy
from repro.models.random_policy import shape_config
from repro.reward.grader import GraderPool
from repro.rl.training_state import fresh_state
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.spec.config import SamplingConfig
from repro.spec.step_scale import StepPoint, StepScale
from repro.targets.steps import NVFP4

POINT = StepPoint(name="step", model="7b", completion_tokens=256)
# 16 bits of 7.6 billion parameters beside their NVFP4 form.
DISK_BYTES, DEVICE_BYTES = 22e9, 20e9


def build(folder):
    """Write a 16-bit checkpoint of random weights, cut as the published 7B one is."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = AutoConfig.for_model(**shape_config("qwen2.5-7b"))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")


def quantise(source, folder, held):
    """Quantise as a user would; `held` bytes of the device were in use before."""
    reset_peak()
    write_quantized(source, folder, device="cuda")
    used = int(torch.cuda.max_memory_reserved()) + context_bytes() - held
    return {"host_bytes": host_peak_bytes(), "device_bytes": used}


def load(folder):
    """Load a quantised folder, sample a token and make one whole step."""
    began = time.perf_counter()
    policy = load_policy(
        folder,
        weight_format="nvfp4",
        training="lora",
        lora_rank=32,
        lora_alpha=32.0,
        compute_dtype="bfloat16",
        seed=0,
        device="cuda",
    )
    config = EngineConfig(
        slots=POINT.group,
        max_positions=POINT.row_tokens,
        max_new_tokens=POINT.completion_tokens,
        ignore_end=True,
    )
    engine = Engine(policy, config)
    prompt = [list(range(1, POINT.prompt_tokens + 1))]
    engine.sample(prompt, SamplingConfig(max_new_tokens=1), group_size=1, seeds=[0])
    found = {"seconds": time.perf_counter() - began, "linears": linears_of(policy.decoder)}
    steps, micro_tokens = StepScale(points=(POINT,)), 4 * POINT.row_tokens
    with GraderPool() as pool:
        t = training_of(
            policy, engine, pool, NVFP4, POINT, steps, seed=0, micro_tokens=micro_tokens
        )
        state = fresh_state(t.learner.run)
        before = parameter_image(policy)
        warm_up(t, state, steps.warm_up_tokens)
        timed_step(t, state)
        found["moved"] = float((parameter_image(policy) - before).norm())
    engine.close()
    return found


def in_own_process(work, *settings):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *settings).result()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none")
def test_a_7b_checkpoint_is_quantised_in_little_memory_and_loaded_in_seconds(tmp_path):
    if torch.cuda.get_device_properties(0).total_memory < DEVICE_BYTES:
        pytest.skip("needs 20 GB of device memory")
    if shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip(f"needs 22 GB of disk at {tmp_path}")
    source, folder = str(tmp_path / "source"), str(tmp_path / "quantised")
    try:
        in_own_process(build, source)
        release()
        made = in_own_process(quantise, source, folder, driver_bytes())
        shutil.rmtree(source)
        assert made["host_bytes"] < 4 * 2**30  # Python and torch among it
        assert made["device_bytes"] < 3 * 2**30  # the driver's context among it
        in_own_process(load, folder)  # compiles the kernels
        loaded = min((in_own_process(load, folder) for _ in "ab"), key=lambda run: run["seconds"])
        assert loaded["seconds"] < 15
        assert loaded["linears"] == {"nvfp4": 7 * 28}
        assert loaded["moved"] > 0
    finally:
        shutil.rmtree(tmp_path)
