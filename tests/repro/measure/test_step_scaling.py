"""A step that several ranks share is measured beside that of one, run and recorded as any other."""

import dataclasses

import pytest

from repro.evidence.record import read_record, record_path
from repro.judge.check import check_selection
from repro.run.execute import execute
from repro.run.select import Selection
from repro.run.several_ranks.room import Room
from repro.spec.step_scale import StepPoint, StepScale, alone_twin
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets.step_targets import step_metrics
from repro.targets.steps import SCALING, SCALING_4, SCALING_4_POINTS, SCALING_POINTS, TABLE3
from tests.planted import planted
from tests.repro.run.test_execute import quiet

ALONE = StepPoint(
    name="a_small", model="0.5b", prompts=2, group=4, prompt_tokens=5, completion_tokens=40,
    lengths="spread", mean_tokens=12,
)  # fmt: skip
POINTS = (
    ALONE,
    dataclasses.replace(ALONE, name="a_small_2", prompts=4, ranks=2),
    dataclasses.replace(ALONE, name="a_small_halved", ranks=2),
    dataclasses.replace(ALONE, name="equal_2", prompts=4, ranks=2, lengths="equal"),
)
SMALL = StepScale(points=POINTS, warm_up_tokens=4, steps=2)
TARGET = dataclasses.replace(
    SCALING,
    scales={Tier.SYSTEMS: SMALL},
    metrics=step_metrics(SMALL),
    headline="efficiency_a_small_2",
)
BARS = """
[[scaling]]
because = "planted"
statistic = "every_seed"
bars = [
  { arm = "nvfp4_lora_aqn", metric = "efficiency_a_small_2", at_least = 0.0001 },
  { arm = "nvfp4_lora_aqn", metric = "exchange_share_a_small_2", at_most = 0.9999 },
]
"""
# What a rank takes in place of a device, and of a policy of 0.5B.
RANK = """
import contextlib, time, types
import torch
from repro.measure import device_state, step_measure, step_metrics, step_time
from repro.run.carry_out import carry_out
from tests.repro.conftest import graders_kept
from tests.repro.measure import conftest as small

@contextlib.contextmanager
def budget(point):
    yield 10**10

def body(*run):
    torch.cuda.Event = small.HostEvent
    torch.cuda.synchronize = lambda *a: None
    there = types.SimpleNamespace(is_available=lambda: True)
    step_time.torch = types.SimpleNamespace(cuda=there, set_num_threads=torch.set_num_threads)
    step_time.matmul_rate = step_metrics.copy_rate = lambda: 1e12
    device_state.gc = types.SimpleNamespace(collect=lambda: 0)
    device_state._memory = lambda: dict.fromkeys(("total_bytes", "free_bytes", "peak_bytes"), 0)
    step_measure.require_clean, step_measure._budget = (lambda: None), budget
    step_measure.build_policy = lambda *a: small.small_policy()
    with graders_kept([]):  # from point to point
        return carry_out(*run)
"""


def test_a_point_of_several_gpus_is_compared_with_one_of_as_many_rows_on_each_or_in_all():
    twins = {p.name: alone_twin(p, SCALING_POINTS) for p in SCALING_POINTS}
    assert {name: twin and twin.name for name, twin in twins.items()} == {
        "7b_spread": None, "7b_equal": None, "7b_spread_2": "7b_spread", "7b_equal_2": "7b_equal",
        "7b_spread_halved": "7b_spread", "0_5b_spread": None, "0_5b_spread_halved": "0_5b_spread",
    }  # fmt: skip
    assert alone_twin(POINTS[3], POINTS) is None
    four = [p for p in SCALING_4_POINTS if p.ranks == 4]
    assert {p.name: alone_twin(p, SCALING_4_POINTS).name for p in four} == {
        "7b_spread_4": "7b_spread", "7b_equal_4": "7b_equal", "7b_spread_quartered": "7b_spread",
    }  # fmt: skip
    assert [p.rows for p in four] == [512, 512, 128]


def test_two_ranks_are_measured_and_judged(tmp_path, monkeypatch, warm_workers):
    del warm_workers
    body = planted("scaling_rank", RANK, tmp_path, monkeypatch).body
    (run,) = plan(TARGET, Tier.SYSTEMS)
    runs, expected = tmp_path / "runs", tmp_path / "expected"
    outcome = execute([run], runs, room=Room(), console=quiet(), carry_out=body)
    assert outcome.finished == 1, (runs / "workers.log").read_text()
    record = read_record(record_path(run, runs))
    assert record.facts["ranks"] == 2
    entry = {name: ways["nvfp4"] for name, ways in record.facts["points"].items()}
    # All rows of a step have the tokens that its rollout drew, whoever samples them.
    rows = {name: facts["generated_tokens"] for name, facts in entry.items()}
    assert rows["a_small_halved"] == rows["a_small"]
    assert rows["a_small_2"] > rows["a_small"]
    assert abs(rows["equal_2"] - rows["a_small_2"]) <= 8
    # The same rows on two ranks: half as many a second and rank where the step takes as long.
    alone, shared = (record.series[f"step_seconds_{p.name}"] for p in (ALONE, POINTS[2]))
    assert len(shared) == 2
    assert record.value("efficiency_a_small_halved") == pytest.approx(sum(alone) / sum(shared) / 2)
    assert 0 < record.value("exchange_share_a_small_2") < 1
    (expected / "bars").mkdir(parents=True)
    (expected / "bars/systems.toml").write_text(BARS)
    checked = check_selection(Selection(target=TARGET, tier=Tier.SYSTEMS), runs, expected)
    assert checked.evidence.refused == []
    assert [verdict.status for verdict in checked.verdicts] == ["reproduced"] * 2


def test_a_run_of_two_gpus_is_not_begun_with_one(monkeypatch):
    monkeypatch.setattr("repro.spec.target.cuda_devices", lambda: ("one",))
    monkeypatch.setattr(Tier, "missing", lambda tier: None)
    assert TABLE3.not_runnable(Tier.SYSTEMS) is None
    assert SCALING.not_runnable(Tier.SYSTEMS) == "needs 2 CUDA devices; found 1"
    assert SCALING_4.not_runnable(Tier.SYSTEMS) == "needs 4 CUDA devices; found 1"
