"""Full fine-tuning of 7B over two devices takes what `plan` says: Table 1's row on 80 GB."""

import importlib.util
import json

import pytest
import torch

from repro.run.several_ranks.rank_processes import Ranked
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.planted import planted
from tests.repro.small_runs import context_of

DEVICES = torch.cuda.device_count()
LARGE = DEVICES > 1 and torch.cuda.get_device_properties(1).total_memory > 79e9
STEPS = 20
RANK = f"""
import dataclasses, json, time
import torch
import repro.rl.step as packed
from repro.measure.device_state import release
from repro.measure.step_measure import engine_config
from repro.measure.step_training import PointSampler, training_of
from repro.rl.training_state import fresh_state
from repro.models.memory_plan import CONTEXT_BYTES, StepShape, padded, plan_memory
from repro.models.random_policy import random_policy
from repro.reward.grader import GraderPool
from repro.rl.divide import shard
from repro.rollout.for_policy import CopySampler
from repro.rollout.sampler import SharedSampler
from repro.distributed import Ranks
from repro.rl.trainer import iterate
from repro.rollout.engine import Engine
from repro.spec.shapes import shape_named
from repro.spec.step_scale import StepPoint, StepScale, step_arm
from repro.targets.table1 import BF16_FULL

def body(runs, records, context):
    ranks, moments = Ranks.joined(), "adamw_8bit"
    point = StepPoint(name="full", model="7b", prompts=16, group=8, prompt_tokens=150,
                      completion_tokens=640, mean_tokens=200, lengths="spread")
    own = dataclasses.replace(point, prompts=point.prompts // ranks.world)
    scale = StepScale(points=(point,), steps=200, warm_up=0, optimizer=moments)
    shape = StepShape(shape=shape_named("7b"), weight_format="bf16", rank=1, prompts=own.prompts,
                      group=own.group, prompt_tokens=150, slots=own.rows, micro_tokens=8192,
                      completion_tokens=640, optimizer=moments, full_over=ranks.world)
    policy = random_policy("qwen2.5-7b", weight_format="bf16", lora_rank=0, seed=0, full=True,
                           device="cuda", compute_dtype="bfloat16")
    shard(policy, ranks.devices, moments)
    release()
    sampler = CopySampler(policy, lambda copied: Engine(copied, engine_config(own, shape)))
    torch.cuda.reset_peak_memory_stats()
    largest, plain = [0], packed.packed_logprobs

    def counted(policy, rows, *args, **more):
        largest[0] = max(largest[0], padded(int(rows.packed_tokens().sum())))
        return plain(policy, rows, *args, **more)

    packed.packed_logprobs = counted
    seconds = []
    with GraderPool(among=ranks) as pool:
        t = training_of(policy, sampler, pool, step_arm(BF16_FULL), point, scale, seed=0,
                        micro_tokens=shape.micro_tokens)
        shared = SharedSampler(PointSampler(inner=sampler, point=own), ranks)
        abreast = dataclasses.replace(ranks, abreast=True)
        learner = dataclasses.replace(t.learner, sampler=shared, ranks=abreast)
        t = dataclasses.replace(t, learner=learner)
        state = fresh_state(t.learner.run)
        while len(seconds) < {STEPS}:
            began = time.perf_counter()
            iterate(t, state)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    tokens = max(shape.row_tokens, *ranks.objects(largest[0]))
    planned = plan_memory(dataclasses.replace(shape, micro_tokens=tokens)).peak - CONTEXT_BYTES
    reserved = ranks.objects(torch.cuda.max_memory_reserved())
    if ranks.first:
        found = {{"device": torch.cuda.get_device_name(0), "torch": torch.__version__,
                 "seconds": seconds, "reserved_bytes": reserved, "planned_bytes": planned,
                 "largest_pass_tokens": tokens,
                 "grad_norm": list(state.series["grad_norm"])}}
        (records / "full.json").write_text(json.dumps(found))
"""


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not LARGE, reason="needs two CUDA devices of 80 GB")
@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="needs bitsandbytes")
def test_full_fine_tuning_of_7b_takes_the_memory_of_its_plan(tmp_path, monkeypatch, request):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (run,) = plan(find("table1"), Tier.PAPER, 1, ["bf16_full"])
    body = planted("full_rank", RANK, tmp_path, monkeypatch).body
    Ranked(ranks=2, stall=120.0, body=body)([run], tmp_path, context_of(tmp_path, threads=4))
    found = json.loads((tmp_path / "full.json").read_text())
    request.node.user_properties += found.items()
    assert len(found["seconds"]) == STEPS
    assert min(found["grad_norm"]) > 0
    assert 0.95 < max(found["reserved_bytes"]) / found["planned_bytes"] < 1.05
