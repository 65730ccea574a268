"""On a real device: an arm after one that used up all memory measures what it does alone."""

import os
from statistics import median

import pytest
from rich.console import Console

from repro.evidence.receipts import violations
from repro.evidence.record import find_record, read_record
from repro.run.execute import execute
from repro.run.several_ranks.room import Room
from repro.spec.config import RunConfig
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale
from repro.spec.tier import cuda_devices
from repro.targets.table1 import BF16_LORA, NVFP4_LORA
from tests.planted import planted

DEVICES = cuda_devices()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(
        not DEVICES or DEVICES[0].capability < (8, 0),
        reason="needs a CUDA device of compute capability 8.0 or newer",
    ),
]
POINT = ThroughputPoint(
    name="3b", shape="qwen2.5-3b", prompt_tokens=64, new_tokens=256, batches=(64,)
)
RATE = "tokens_per_second_3b_64"
# Keys and values of a row of 320 tokens: 36 blocks, 256 channels each, two bytes.
ROW_BYTES = 320 * 36 * 2 * 256 * 2
# Of the 16-bit arm: all memory used up and kept, or no plan, so that it tries too many rows.
FAKE = """
import torch
from repro.run import carry_out as recording
from repro.measure import throughput

HELD = []

def use_up(runs, *how):
    while runs[0].arm.name == "bf16_lora":
        HELD.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    return recording.carry_out(runs, *how)

def without_plan(runs, *how):
    throughput.not_fitting = lambda scale, arm, total_bytes: {}
    return recording.carry_out(runs, *how)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return planted("exhausting", FAKE, tmp_path, monkeypatch)


def runs_of(arm, batches=(64,)):
    point = ThroughputPoint(
        name="3b", shape="qwen2.5-3b", prompt_tokens=64, new_tokens=256, batches=batches
    )
    return [
        RunConfig(
            target="rollout", target_version=2, tier="systems", procedure="throughput", arm=arm,
            scale=ThroughputScale(points=(point,)), seed=seed,
        )
        for seed in range(3)
    ]  # fmt: skip


def go(runs, folder, carry_out=None):
    return execute(
        runs,
        folder,
        room=Room(threads=2),
        console=Console(file=open(os.devnull, "w"), width=200),
        carry_out=carry_out,  # type: ignore[arg-type]
    )


def records(runs, folder):
    return [read_record(find_record(run, folder) or folder) for run in runs]


def rate(runs, folder):
    return median(record.value(RATE) or 0.0 for record in records(runs, folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a folder with what both arms measure where nothing goes wrong."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert go([*runs_of(BF16_LORA), *runs_of(NVFP4_LORA)], folder).failed == 0
    return folder


def test_an_arm_after_one_that_used_up_all_memory_measures_what_it_measures_alone(
    tmp_path, fake, undisturbed
):
    runs = runs_of(NVFP4_LORA)
    outcome = go([*runs_of(BF16_LORA)[:1], *runs], tmp_path / "after", fake.use_up)
    assert (outcome.finished, outcome.failed) == (3, 1)
    alone, after = rate(runs, undisturbed), rate(runs, tmp_path / "after")
    assert after == pytest.approx(alone, rel=0.1)
    for record in records(runs, tmp_path / "after"):
        # Whoever runs the tests may have a context of its own on the device.
        assert [why for why in violations(record) if "other processes" not in why] == []
        assert record.facts["device"]["before"]["memory"]["free_bytes"] > 0
        assert record.facts["timed_retries"] == {"3b_64": 0}


def test_a_batch_too_large_for_the_device_costs_itself_alone(tmp_path, fake, undisturbed):
    rows = round(1.2 * DEVICES[0].memory_bytes / ROW_BYTES)
    large, after = runs_of(BF16_LORA, (64, rows)), runs_of(NVFP4_LORA)
    assert go([*large, *after], tmp_path / "runs", fake.without_plan).failed == 0
    for record in records(large, tmp_path / "runs"):
        sentence = record.facts["not_run"][f"3b_{rows}"]
        assert sentence.startswith("needs ")
        assert sentence.endswith(" GiB by the allocator, at least")
        assert not any(name.endswith(f"_3b_{rows}") for name in record.metrics)
    small = rate(runs_of(BF16_LORA), undisturbed)
    assert rate(large, tmp_path / "runs") == pytest.approx(small, rel=0.1)
    alone = rate(after, undisturbed)
    assert rate(after, tmp_path / "runs") == pytest.approx(alone, rel=0.1)


def test_the_plan_is_near_what_a_rollout_takes(undisturbed):
    from repro.measure.rollout_plan import planned_bytes

    (record,) = records(runs_of(BF16_LORA)[:1], undisturbed)
    memory = record.facts["device"]["after"]["memory"]
    beside = memory["total_bytes"] - memory["free_bytes"] - memory["reserved_bytes"]
    # Of the allocator's reserve a part is what building the engine freed: not needed at once.
    needed = memory["peak_allocated_bytes"] + beside
    assert planned_bytes(POINT, 64, BF16_LORA) == pytest.approx(needed, rel=0.1)
