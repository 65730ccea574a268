"""Going on from checkpoints: one run by its own policy, and many as one ensemble."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from repro.reward.score import Rewards
from repro.spec.arm import LossConfig, NoiseConfig
from repro.spec.config import RunConfig
from tests.repro.rl.stacked import conftest as small
from tests.repro.small_runs import equal

FOLDER = "together"
STEPS = small.SCALE.steps
ARM: dict[str, Any] = {
    "noise": NoiseConfig(sigma_start=0.1, sigma_end=0.05, num_stages=3),
    "loss": LossConfig(beta=0.01),
}
CASES: dict[str, list[RunConfig]] = {
    "lora": [small.make_run(seed=0, weight_format="nvfp4", **ARM)],
    "full": [small.make_run(seed=0, training="full", **ARM)],
    "stacked": [
        small.make_run(seed=0),
        small.make_run(seed=1, weight_format="nvfp4", noise=ARM["noise"]),
        small.make_run(seed=2, weight_format="nf4", loss=ARM["loss"]),
    ],
}
Start = Callable[..., list[small.Trained]]


@pytest.fixture(params=CASES)
def runs(request: pytest.FixtureRequest) -> list[RunConfig]:
    return CASES[request.param]


@pytest.fixture
def start(runs: list[RunConfig], together: Start, alone: Callable[..., Any]) -> Start:
    """Return what trains runs: one by itself, several as one ensemble."""

    def by_itself(
        asked: Sequence[RunConfig], *, folder: str = FOLDER, **more: Any
    ) -> list[small.Trained]:
        (run,) = asked
        return [alone(run, folder=folder, **more)]

    return together if len(runs) > 1 else by_itself


def at_every_step(runs: Sequence[RunConfig]) -> list[RunConfig]:
    scale = small.with_steps(small.SCALE, checkpoint_every=1)
    return [dataclasses.replace(run, scale=scale) for run in runs]


def never(*asked: Any) -> list[Rewards | None]:
    raise AssertionError("nothing is left to sample")


def test_what_was_stopped_and_resumed_equals_what_was_not_to_the_bit(
    start: Start, runs: list[RunConfig]
) -> None:
    whole = start(runs, folder="whole")
    answers = iter([False, False, True])
    half = start(runs, should_stop=lambda: next(answers))
    assert {(one.result.finished, one.result.step) for one in half} == {(False, 2)}
    for one, rest in zip(whole, start(runs), strict=True):
        assert (rest.result.finished, rest.result.step) == (True, STEPS)
        assert equal(one.parameters, rest.parameters)
        assert rest.result.series == one.result.series
        for result in (one.result, rest.result):
            result.facts.pop("seconds")
        assert rest.result.facts == one.result.facts


CHILD = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from repro.data.load import load_problems
from repro.rl.single_run.torch_sampler import TorchSampler
from tests.repro.rl.stacked import conftest as small
from tests.repro.rl.stacked.test_going_on import CASES, at_every_step
from tests.repro.small_runs import train_alone

(run,) = at_every_step(CASES["lora"])
policy, calls = small.load(run), []

def killing(*asked):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return small.score(*asked)

problems = load_problems(small.DATA, "train")
train_alone(run, policy, TorchSampler(policy), problems, killing, folder=Path(sys.argv[1]))
"""


@pytest.mark.parametrize("runs", [CASES["lora"]], ids=["lora"])
def test_a_killed_process_goes_on_from_its_last_checkpoint(
    start: Start, runs: list[RunConfig], tmp_path: Path
) -> None:
    runs = at_every_step(runs)
    (whole,) = start(runs, folder="whole")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / FOLDER)],
        cwd=Path(__file__).parents[4], env=os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert left == ["step-00000001", "step-00000002"]
    (rest,) = start(runs)
    assert rest.result.series == whole.result.series
    assert equal(rest.parameters, whole.parameters)


def test_what_has_finished_returns_at_once(start: Start, runs: list[RunConfig]) -> None:
    whole = start(runs)
    for one, again in zip(whole, start(runs, score=never), strict=True):
        assert again.result.series == one.result.series
        assert equal(one.parameters, again.parameters)


def test_a_checkpoint_of_another_configuration_is_refused(
    start: Start, runs: list[RunConfig]
) -> None:
    start(runs)
    others = [dataclasses.replace(run, seed=run.seed + 1) for run in runs]
    with pytest.raises(ValueError, match="belongs to configurations"):
        start(others)


def flip_a_bit(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    stored = bytearray(path.read_bytes())
    stored[-1] ^= 1
    path.write_bytes(stored)


def put_a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("nothing")


# By what is done to a checkpoint, what is said of it.
DAMAGE: dict[Callable[[Path], Any], str] = {
    flip_a_bit: "has SHA-256",
    lambda folder: (folder / "notes.txt").write_text("mine"): "notes.txt has",
    lambda folder: (folder / "optimizer.safetensors").unlink(): "optimizer.safetensors has",
    lambda folder: (folder / "SHA256SUMS").unlink(): "SHA256SUMS",
    put_a_file_in_its_place: "Not a directory",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=list(DAMAGE.values()))
def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(
    start: Start, runs: list[RunConfig], tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    runs = at_every_step(runs)
    whole = start(runs)
    newest, before = (tmp_path / FOLDER / f"step-{step:08d}" for step in (STEPS, STEPS - 1))
    damage(newest)
    for one, again in zip(whole, start(runs), strict=True):
        assert equal(one.parameters, again.parameters)
        assert again.result.series == one.result.series
        (sentence,) = again.result.facts["checkpoints_refused"]
        assert sentence.startswith(f"checkpoint {newest.name} was refused (")
        assert DAMAGE[damage] in sentence
        assert sentence.endswith(f"training went on from {before.name}")
    for folder in (newest, before):
        flip_a_bit(folder)
    named = f"{newest.name}: .*{before.name}: .* to start again"
    with pytest.raises(ValueError, match=re.compile(named, re.DOTALL)):
        start(runs)
