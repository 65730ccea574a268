"""Full training that ranks divide: steps, memory, tie and checkpoints are those of one process."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels import dispatch, reference
from repro.distributed import ALONE, Ranks
from repro.rl import learner
from repro.rl.divide import shard
from repro.run.several_ranks.rank_processes import Ranked
from repro.targets import find
from tests.planted import planted
from tests.repro.rl.test_ranks import rollout_step, tiny
from tests.repro.small_runs import context_of

# What each rank, or one process alone, does with a rollout that lies in the folder of records:
# optimiser steps, one on two rows and so with passes for the other ranks' sake alone.
STEPS = """
import json, os
from pathlib import Path
import torch
from repro.models.policy import load_policy, trainable_parameters
from repro.rl.divide import shard
from repro.rl.training_state import fresh_state
from repro.rl.learner import learner_of
from repro.rl.step import StepInputs
from repro.distributed import Ranks
from tests.repro.rl.uneven_rows import exact_head, exact_norm

def body(runs, records, context):
    import kernels.dispatch, kernels.reference
    import repro.rl.learner as module

    asked = json.loads((records / "asked.json").read_text())
    rollout, run = torch.load(records / "step.pt", weights_only=False)
    ranks = Ranks.joined()
    policy = load_policy(
        "tiny", weight_format="bf16", training="full", device="cpu", compute_dtype=asked["dtype"]
    )
    if asked["wide"]:
        kernels.reference.rms_norm = kernels.dispatch.rms_norm = exact_norm
        kernels.dispatch.token_logprobs = exact_head
        policy.model.double()
    counted = sum(p.numel() for p in policy.model.parameters())
    if ranks.world > 1:
        shard(policy, None, asked["optimizer"])  # by gloo, where there are GPUs, too
    else:
        module.trainable_parameters = lambda policy: dict(policy.model.named_parameters())
    learner = learner_of(run, policy, None, micro_tokens=60, ranks=ranks)
    if asked["optimizer"] == "adamw_8bit":
        import dataclasses, bitsandbytes
        by_blocks = bitsandbytes.optim.AdamW8bit(learner.parameters.values(), betas=(0.9, 0.95))
        learner = dataclasses.replace(learner, optimizer=by_blocks)
    state = learner.load(context.folder) or fresh_state(run)
    values = []
    for step in range(state.step, asked["until"]):
        rows = torch.tensor([[*range(15)], [7, 13]][step])
        output = learner.backward(StepInputs(step=step, rollout=rollout, index=rows), state)
        values.append([output.loss, learner.step(step)["grad_norm"]])
        state.step += 1
    moments = learner.optimizer.state
    for kept in moments.values():  # on a CPU all share one table of codes, as on no GPU
        kept.update({key: value.clone() for key, value in kept.items() if key.startswith("qmap")})
    learner.save(context.folder, state)
    (records / f"rank{ranks.rank}.json").write_text(json.dumps({
        "values": values,
        "in_all": counted,
        "trained": sum(p.numel() for p in trainable_parameters(policy).values())
        if ranks.world > 1 else counted,
        "moments": sum(v.numel() for s in moments.values() for k, v in s.items()
                       if k in ("exp_avg", "state1")),
        "tied": policy.decoder.lm_head.weight is policy.decoder.model.embed_tokens.weight,
    }))
"""


@pytest.fixture(scope="module")
def step():
    """Return a rollout of three prompts by five, one of them idle, and its run."""
    _, rollout, run = rollout_step()
    (arm,) = (arm for arm in find("table1").arms if arm.name == "bf16_full")
    return rollout, dataclasses.replace(run, arm=arm)


@pytest.fixture(scope="module")
def made_alone():
    """Return what one process has made, by how it was asked."""
    return {}


@pytest.fixture
def go(step, made_alone, tmp_path, monkeypatch, warm_workers):
    """Return what makes steps by some ranks and returns what each says, and the checkpoint."""
    body = planted("sharded_steps", STEPS, tmp_path, monkeypatch).body
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    # One process alone is this one: what its body replaces has to come back.
    replaced = (
        (reference, "rms_norm"),
        (dispatch, "rms_norm"),
        (dispatch, "token_logprobs"),
        (learner, "trainable_parameters"),
    )
    for module, name in replaced:
        monkeypatch.setattr(module, name, getattr(module, name))

    def steps(ranks, folder, until=2, wide=True, **changes):
        asked = {"until": until, "wide": wide, "optimizer": "adamw", "dtype": "float32"} | changes
        key = str(asked)
        if folder == "alone" and key in made_alone:
            return made_alone[key]
        (tmp_path / "asked.json").write_text(json.dumps(asked))
        torch.save(step, tmp_path / "step.pt")
        carry_out = Ranked(ranks=ranks, stall=60, body=body)
        carry_out([step[1]], tmp_path, context_of(tmp_path / folder))
        said = [json.loads((tmp_path / f"rank{n}.json").read_text()) for n in range(ranks)]
        tensors = {}
        for path in (tmp_path / folder / f"step-{until:08d}").glob("*.safetensors"):
            tensors |= load_file(path)
        if folder == "alone":
            made_alone[key] = said, tensors
        return said, tensors

    return steps


def test_steps_by_ranks_are_those_of_one_process(go):
    (alone,), whole = go(1, "alone")
    for ranks in (2, 3):
        every, tensors = go(ranks, f"of {ranks}")
        for said in every:
            assert said["values"] == [pytest.approx(v, rel=1e-9, abs=1e-9) for v in alone["values"]]
            # Each has its part of the weights and moments, and the vectors: hardly more.
            assert said["tied"]
            assert said["in_all"] == alone["trained"]
            assert said["trained"] == said["moments"] < 1.03 * said["in_all"] / ranks
        assert tensors.keys() == whole.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-9, atol=1e-9)


def test_masters_gathered_in_16_bits_are_those_that_autocast_makes(go):
    (alone,), whole = go(1, "alone", until=1, wide=False, dtype="bfloat16")
    every, tensors = go(2, "two", until=1, wide=False, dtype="bfloat16")
    # Passes are cut otherwise, and a gradient is rounded once a pass.
    assert every[0]["values"][0] == pytest.approx(alone["values"][0], rel=2e-3, abs=1e-4)
    for name in (name for name in whole if name.endswith("//exp_avg")):
        assert float((tensors[name] - whole[name]).norm() / whole[name].norm()) < 0.02, name


def test_a_checkpoint_of_two_goes_on_on_one_and_on_three(go, tmp_path):
    (alone,), whole = go(1, "alone")
    go(2, "two", until=1)
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "two", tmp_path / f"then {ranks}")
        every, tensors = go(ranks, f"then {ranks}")
        assert every[0]["values"] == [pytest.approx(alone["values"][1], rel=1e-9, abs=1e-9)]
        for name, tensor in whole.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-9, atol=1e-9)


def test_eight_bit_moments_keep_the_format_of_one_process(go):
    pytest.importorskip("bitsandbytes")
    eight = {"wide": False, "optimizer": "adamw_8bit"}
    _, whole = go(1, "alone", until=1, **eight)
    (said, _), tensors = go(2, "two", until=1, **eight)
    assert said["moments"] == said["trained"] < 0.8 * said["in_all"]
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in whole.items()
    }
    assert sum(t.dtype == torch.uint8 for t in tensors.values()) > 20
    for name, tensor in whole.items():
        if tensor.dtype == torch.uint8:
            # A code's neighbour where rounding falls otherwise.
            assert float((tensors[name].int() - tensor.int()).abs().gt(1).double().mean()) < 1e-3
    for ranks in (3, 1):  # nothing moves where it is read and written again
        _, again = go(ranks, "two", until=1, **eight)
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_a_frozen_base_is_not_divided():
    with pytest.raises(ValueError, match="'lora' on nvfp4"):
        shard(tiny("nvfp4"), None, "adamw")


def test_ranks_that_pass_abreast_make_as_many_passes():
    sizes = [5, 90, 7, 88, 3, 1, 40]
    every = [Ranks(rank, 3, abreast=True) for rank in range(3)]
    shares = [ranks.mine(sizes) for ranks in every]
    assert sorted(item for share in shares for item in share) == list(range(7))
    assert {len(s) + r.beside(7) for s, r in zip(shares, every, strict=True)} == {3}
    assert [sizes[share[0]] for share in shares] == [90, 88, 40]
    assert ALONE.beside(7) == 0
