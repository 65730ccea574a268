"""Two real processes: the gradient of a step does not depend on how its rows are spread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

# Eight rows of a policy whose log-probabilities are a linear map of features, in float64: the same
# script computes the step alone and as one of two processes, and prints the gradient.
SCRIPT = """
import json, sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from torch import nn
from repro.rl.single_run.distributed import share_counts, sum_gradients
from repro.rl.loss import StepCounts, policy_loss
from repro.spec.arm import LossConfig

rank, world, rendezvous, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
if world > 1:
    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=world)
g = torch.Generator().manual_seed(0)
lengths = torch.tensor([1, 9, 4, 9, 2, 7, 5, 3])
features = torch.randn(8, 9, 6, generator=g, dtype=torch.float64)
advantages = torch.randn(8, generator=g, dtype=torch.float64)
out = []
for case in json.loads(cases):
    mask = torch.arange(9) < lengths[:, None]
    if case["mask_truncated"]:
        mask &= (lengths < 9)[:, None]
    weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    rows = torch.arange(8)[rank * 8 // world:(rank + 1) * 8 // world]
    config = LossConfig(aggregation=case["aggregation"])
    own = mask[rows]
    chunks = [c for c in rows.split(case["micro_batch"]) if bool(mask[c].any())]
    counts = StepCounts(rows=int(own.any(1).sum()), tokens=int(own.sum()), length_limit=9,
                        micro_batches=len(chunks))
    if world > 1 and not case["own_counts"]:
        counts = share_counts(counts)
    for chunk in chunks:
        logprobs = features[chunk] @ weight
        policy_loss(logprobs, advantages[chunk], mask[chunk], config, counts).loss.backward()
    if world > 1:
        sum_gradients({{"weight": weight}})
        if case["own_counts"]:
            weight.grad /= world
    out.append(weight.grad.tolist())
if rank == 0:
    print(json.dumps(out))
if world > 1:
    dist.destroy_process_group()
"""


def gradients(world: int, cases: list[dict[str, Any]], folder: Path) -> list[torch.Tensor]:
    script = SCRIPT.format(root=str(Path(__file__).parents[3]))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script, str(rank), str(world),
             str(folder / f"rendezvous-{world}"), json.dumps(cases)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip
    done = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * world, done
    return [torch.tensor(g, dtype=torch.float64) for g in json.loads(done[0][0])]


def test_two_processes_give_the_gradient_of_one(tmp_path: Path) -> None:
    base = [
        {"aggregation": aggregation, "mask_truncated": masked, "own_counts": False}
        for aggregation in ("sequence_mean", "token_mean", "constant")
        for masked in (False, True)
    ]
    # (micro-batch, accumulation, processes): (8,1,1) (1,8,1) against (4,1,2) (2,2,2).
    alone = gradients(1, [case | {"micro_batch": n} for n in (8, 1) for case in base], tmp_path)
    cases = [case | {"micro_batch": n} for n in (4, 2) for case in base]
    fault = {"aggregation": "token_mean", "mask_truncated": False, "own_counts": True}
    spread = gradients(2, [*cases, fault | {"micro_batch": 4}], tmp_path)
    for number in range(len(base)):
        for gradient_sum in (alone[number + len(base)], spread[number], spread[number + len(base)]):
            torch.testing.assert_close(gradient_sum, alone[number], rtol=0, atol=1e-10)
    # The planted fault, each process's own count and averaged gradients, is another gradient.
    assert not torch.allclose(
        spread[-1], alone[base.index(fault | {"own_counts": False})], atol=1e-3
    )
