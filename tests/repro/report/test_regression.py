"""`compare`, `check` without records and `regress`, by their exit status."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.judge import blessing
from repro.judge.blessing import bless
from repro.judge.gathering import Evidence, gather
from repro.report import regression as command
from repro.run.execute import INTERRUPTED
from repro.run.select import Selection
from repro.spec.config import digest_of
from repro.spec.tier import Tier
from repro.targets.steps import TABLE3
from tests.repro.made_up import on_device
from tests.repro.recorded_steps import step_records, times, unchanged, write_steps
from tests.said import unsaid

STEP = "step_seconds_7b_b2"
SLOWER = times(1.06, STEP)
SELECTION = Selection(target=TABLE3, tier=Tier.SYSTEMS)


def on_arm(name, **changes):
    def spoil(record):
        return dataclasses.replace(record, **changes) if record.arm == name else record

    return spoil


def impossible_timing(record):
    """Spoil a record: its timer did not wait for the work, as receipts see."""
    timing = {"method": "device_events", "seconds": 1.0, "bytes": 1e15, "bytes_per_second": 4e12}
    return dataclasses.replace(record, facts={"timing": timing})


@pytest.fixture
def expected(tmp_path, expected):
    """Return a folder of expectations in which Table 3 is blessed on an H200."""
    evidence = gather(SELECTION, write_steps(tmp_path / "baseline"), expected)
    bless(SELECTION, evidence, expected, runs=tmp_path)
    return expected


def compare(tmp_path, new="new", *more):
    return main(["compare", str(tmp_path / "old"), str(tmp_path / new), *more])


def test_two_folders_compare_as_fine_regressed_or_not_to_be_judged(tmp_path, capsys):
    for name, change in (("old", unchanged), ("new", unchanged), ("slow", SLOWER)):
        write_steps(tmp_path / name, change)
    assert compare(tmp_path) == 0
    assert capsys.readouterr().out.startswith("fine: ")
    assert compare(tmp_path, "slow", "table3") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("regressed: ")
    assert ", 1 worse" in lines[0]
    assert lines[2].startswith(f"regressed: table3 nvfp4_lora {STEP} 10.0 s -> 10.6 s, +6.0 %")
    (tmp_path / "empty").mkdir()
    assert compare(tmp_path, "empty", "table3") == 2
    assert "there is no record" in capsys.readouterr().out
    assert compare(tmp_path, "emty") == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'emty'} does not exist" in said
    assert "mean empty?" in said


def test_software_that_differs_is_named_beside_the_devices(tmp_path, capsys):
    for name, version in (("old", "2.11.0"), ("new", "2.13.0")):
        packages = {"packages": {"torch": version}}
        write_steps(
            tmp_path / name,
            spoil=lambda record, more=packages: dataclasses.replace(
                record, environment=record.environment | more
            ),
        )
    assert compare(tmp_path) == 0
    old, new = capsys.readouterr().out.splitlines()[-1].split(" -> ")
    assert "nvidia_h200" in old
    assert old.endswith("torch 2.11.0)")
    assert new.endswith("torch 2.13.0)")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (impossible_timing, "is refused"),
        (on_arm("nvfp4_lora", facts={"timed_retries": {"7b_b2": 1}}), "had to retry"),
        (
            on_arm("bf16_lora", outcome={"status": "failed", "reason": "out of \x1b[31mmemory"}),
            "failed",
        ),
    ],
    ids=["impossible rate", "only work", "failed"],
)
def test_spoilt_and_failed_records_are_not_judged(tmp_path, capsys, spoil, words):
    write_steps(tmp_path / "old")
    write_steps(tmp_path / "new", SLOWER, spoil)
    assert compare(tmp_path) == 2
    said = capsys.readouterr().out
    assert words in said
    assert not any(sign in said for sign in "\x1b\x00")


def test_blessed_stands_for_the_blessed_records_of_the_device(tmp_path, expected, capsys):
    where = ["--expected", str(expected)]
    write_steps(tmp_path / "slow", SLOWER)
    assert main(["compare", "blessed", str(tmp_path / "baseline"), *where]) == 0
    assert main(["compare", "blessed", str(tmp_path / "slow"), *where]) == 1
    capsys.readouterr()
    write_steps(tmp_path / "other", spoil=lambda record: on_device(record, "NVIDIA H100"))
    assert main(["compare", "blessed", str(tmp_path / "other"), *where]) == 2
    said = capsys.readouterr().out
    assert "nvidia_h100 (but on nvidia_h200)" in said
    assert f"python -m repro bless --device --tier systems --runs {tmp_path / 'other'}" in said


def test_a_baseline_of_a_configuration_since_changed_is_to_be_replaced(tmp_path, expected, capsys):
    def earlier(record):
        version = record.target_version - 1
        config = record.config | {"target_version": version}
        return dataclasses.replace(
            record, config=config, digest=digest_of(config), target_version=version
        )

    records = step_records()
    for by_seed in records.values():
        by_seed |= {seed: earlier(record) for seed, record in by_seed.items()}
    bless(SELECTION, Evidence(records=records, timed=True), expected, runs=tmp_path)
    where = ["--expected", str(expected)]
    assert main(["compare", "blessed", str(tmp_path / "baseline"), *where]) == 2
    said = capsys.readouterr().out
    difference = f"target_version is {TABLE3.version - 1}, needed {TABLE3.version}"
    assert f"is of another configuration ({difference})" in said
    assert f"python -m repro bless --device --tier systems --runs {tmp_path / 'baseline'}" in said


@pytest.mark.parametrize("target", ["table4", "table6"])
def test_a_target_without_records_is_named_even_if_nothing_runs_for_it(target, tmp_path, capsys):
    assert main(["compare", "blessed", str(tmp_path), target]) == 2
    assert unsaid(capsys.readouterr().out, f"{target} at the |{tmp_path}: there is no record") == []


def test_check_of_an_empty_folder_is_unsound_and_names_what_there_is(tmp_path, capsys):
    write_steps(tmp_path / "runs")
    for name, beside in (("runs", "holds table3"), ("rnus", "holds runs")):
        line = ["check", "table5", "--tier", "systems", "--json", "--runs", str(tmp_path / name)]
        assert main(line) == 2
        (item,) = json.loads(capsys.readouterr().out)
        assert (item["sound"], beside in item["reason"]) == (False, True)


# What follows runs `regress` with made-up records in place of a GPU.


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Let this machine have an H200; return the command lines of runs that would start."""
    started = []
    measured(monkeypatch, started)
    monkeypatch.setattr(Tier, "missing", lambda tier: None)
    monkeypatch.setenv("REPRO_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv(command.SUMMARY_VARIABLE, raising=False)
    return started


def measured(monkeypatch, started, change=unchanged, status=0):
    """Put made-up records in place of what a GPU would measure."""

    def run(args):
        started.append(args.targets)
        if "table3" in args.targets and not status:
            write_steps(Path(args.runs), change)
        return status

    monkeypatch.setattr("repro.run.execute.main_run", run)


def only_folder(tmp_path):
    (folder,) = (tmp_path / "runs" / "regress").iterdir()
    return folder


def test_regress_keeps_its_records(tmp_path, expected, gpu, monkeypatch, capsys):
    monkeypatch.setenv(command.SUMMARY_VARIABLE, str(tmp_path / "summary.md"))
    assert main(["regress", "table3", "--expected", str(expected)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("fine: ") for line in said) == 1
    folder = only_folder(tmp_path)
    assert str(folder) in said[-1]
    assert (folder / "systems" / "table3" / "nvfp4_lora" / "seed-0.json").is_file()
    assert (tmp_path / "summary.md").read_text().startswith("## Regression: fine")
    assert (folder / "regress.md").read_text() == (tmp_path / "summary.md").read_text()
    measured(monkeypatch, gpu, SLOWER)
    again = ["regress", "table3", "--expected", str(expected), "--runs", str(tmp_path / "again")]
    assert main(again) == 1
    assert f"regressed: table3 nvfp4_lora {STEP}" in capsys.readouterr().out


def test_a_card_without_a_baseline_is_measured_and_blessed(
    tmp_path, expected, gpu, monkeypatch, capsys
):
    shutil.rmtree(expected / "records" / "systems")
    where = ["--expected", str(expected)]
    assert main(["regress", "table3", *where]) == 2
    folder = only_folder(tmp_path)
    words = ["bless", "--device", "--tier", "systems", "--runs", str(folder)]
    assert f"python -m repro {' '.join(words)}" in capsys.readouterr().out
    assert "could not judge" in (folder / "regress.md").read_text()
    blessed = expected / "records" / "systems" / "nvidia_h200"
    for cards, status, line in (
        (["NVIDIA H100"], 2, "left out: table3: records of nvidia_h200"),
        ([], 0, f"blessed: table3 ({blessed})"),
    ):
        here = {"gpu": [{"name": name} for name in cards]}
        monkeypatch.setattr(blessing, "capture_environment", lambda here=here: here)
        assert main([*words, *where]) == status
        said = capsys.readouterr().out.splitlines()
        assert any(text.startswith(line) for text in said)
        assert any(text.startswith("left out: memory at the systems tier") for text in said)
        assert blessed.exists() == (status == 0)
    assert said[-1].startswith("1 of ")
    assert main(["compare", "blessed", str(folder), *where]) == 0


def test_regress_goes_on_where_it_was_interrupted(tmp_path, expected, gpu, monkeypatch, capsys):
    measured(monkeypatch, gpu, status=INTERRUPTED)
    assert main(["regress", "table3", "--expected", str(expected)]) == 2
    folder = only_folder(tmp_path)
    assert f"python -m repro regress table3 --runs {folder}" in capsys.readouterr().out
    measured(monkeypatch, gpu)
    again = ["regress", "table3", "--runs", str(folder), "--expected", str(expected)]
    assert main(again) == 0
    assert only_folder(tmp_path) == folder


def test_regress_measures_its_own_choice(expected, gpu, monkeypatch, capsys):
    measured(monkeypatch, gpu, status=1)
    assert main(["regress", "--expected", str(expected)]) == 2
    assert gpu == [["table6", "table3", "step_lengths", "memory_budgets", "kernels"]]
    assert "table6 at" in capsys.readouterr().out


def test_regress_without_a_gpu_is_2_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(Tier, "missing", lambda tier: "needs a CUDA device; found none")
    assert main(["regress"]) == 2
    assert "CUDA device" in capsys.readouterr().err
