"""What a plan says of runs that are recorded already, here or among the blessed."""

import dataclasses
import os
import shutil
from datetime import datetime, timedelta

import pytest

from repro.__main__ import main
from repro.evidence.record import Estimate
from repro.evidence.store import Blessed, write_stored
from repro.models.checkpoint import TINY_FOLDER
from repro.run.preflight import unfit
from repro.spec.arm import RewardFunction
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.changed_settings import with_value
from tests.repro.made_up import planned_record
from tests.repro.models.conftest import edit_config
from tests.repro.planned import STUDY
from tests.said import unsaid


def having_taken(record, seconds, peak_bytes):
    begun = datetime.fromisoformat(record.started)
    peak = Estimate(value=peak_bytes, unit="bytes")
    return dataclasses.replace(
        record,
        finished=(begun + timedelta(seconds=seconds)).isoformat(),
        metrics={**record.metrics, "peak_bytes": peak},
    )


def arm_lines(capsys, *line):
    """Return what a plan says behind each first word."""
    assert main(["plan", *line]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    return {words[0]: words[1] for text in lines if len(words := text.split(maxsplit=1)) == 2}


@pytest.mark.usefixtures("planned_targets")
def test_a_plan_quotes_blessed_records_of_an_arm_or_says_that_it_is_not_timed(
    tmp_path, expected, capsys
):
    records = []
    for seconds, run in enumerate(plan(STUDY, Tier.MINI, None, ["bf16", "nvfp4_lora_aqn"])):
        record = having_taken(planned_record(run), 40.0 + seconds, 1.0)
        facts = record.facts | {"repeats_together": 20}
        records.append(dataclasses.replace(record, facts=facts))
    names = [metric.name for metric in STUDY.metrics]
    write_stored(Blessed(expected, "mini", "nvidia_h200").place("mini", STUDY.name), names, records)
    folders = ["--tier", "mini", "--expected", str(expected), "--runs", str(tmp_path / "new")]
    said = arm_lines(capsys, "study", *folders)
    assert said["bf16"].endswith(" s for 20 at once")
    assert said["bf16_lora"].endswith(" not timed")
    assert unsaid(said["timed"], f"median|20|nvidia_h200|{records[0].commit[:7]}") == []
    said = arm_lines(capsys, "study_schedules", *folders)
    # Run and recorded as the study's.
    assert said["nvfp4_lora_aqn"].endswith(" at once")
    assert said["aqn_linear"].endswith(" not timed")
    said = arm_lines(capsys, "study_rates", *folders)
    assert said["lora_3e5"].endswith(" not timed")
    assert "median" not in said["timed"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, "own: |0.8312 million|4 blocks|128"),
        ("{", "config.json cannot be read"),
        ("[]", "no decoder's sizes"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "a_moe", "hidden_size": None}, "model_type is 'a_moe'|qwen2, qwen3, llama"),
        ({"intermediate_size": 380}, "has shape (384, 128); the model needs (380, 128)"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "field rope_parameters"),
    ],
)
def test_a_plan_says_how_large_a_folders_model_is_or_what_is_wrong(tmp_path, capsys, change, named):
    folder = shutil.copytree(TINY_FOLDER, tmp_path / "own")
    if isinstance(change, str):
        (folder / "config.json").write_text(change)
    else:
        edit_config(folder, lambda values: values.update(change))
    line = ["plan", "table1", "--tier", "smoke", "--arms", "nvfp4_lora", "--model", str(folder)]
    assert main(line) == (2 if change else 0)
    said = capsys.readouterr()
    assert unsaid(said.err if change else said.out, named) == []
    assert len(said.err.splitlines()) == bool(change)
    assert "refused" not in said.out


@pytest.mark.parametrize("below", ["", "smoke", "smoke/table1/bf16", "smoke/table1/bf16/seed-0"])
@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_a_plan_refuses_a_place_of_records_that_is_no_folder(tmp_path, capsys, kind, below):
    runs = tmp_path / "runs"
    odd = runs / below
    odd.parent.mkdir(parents=True, exist_ok=True)
    {"file": odd.touch, "pipe": lambda: os.mkfifo(odd)}.get(kind, lambda: odd.symlink_to(odd))()
    assert main(["plan", "table1", "--tier", "smoke", "--runs", str(runs)]) == 2
    assert f"{odd} is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arms", "words"), [("bf16", ""), ("bf16,nvfp4", "(0 recorded, 1 to do)|refused   ")]
)
def test_a_plan_names_an_unreadable_record_and_is_refused_without_other_runs(
    tmp_path, capsys, arms, words
):
    path = tmp_path / "smoke/table1/bf16/seed-0.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    line = ["plan", "table1", "--tier", "smoke", "--seeds", "1", "--arms", arms]
    assert main([*line, "--runs", str(tmp_path)]) == (0 if words else 2)
    said = capsys.readouterr()
    assert unsaid(said.out if words else said.err, f"{words}{path}") == []


def test_a_run_whose_reward_has_gone_since_is_fit_nowhere():
    (run,) = plan(find("table1"), Tier.SMOKE, 1, ["bf16_lora"])
    gone = RewardFunction(module="gone_since", function="f", source_sha256="0")
    said = unfit(with_value(run, "arm.reward_function", gone))
    assert "gone_since" in str(said)
