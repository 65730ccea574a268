"""What training leaves behind while it goes on, in its folder and in trackers."""

import sys
from collections.abc import Mapping
from unittest import mock

import pytest

from repro.__main__ import build_parser, main
from repro.evidence.procedure import Stopped
from repro.evidence.record import read_record, record_path, run_folder
from repro.judge.blessed import blessed_checks
from repro.models.checkpoint import TINY_FOLDER
from repro.models.policy import load_tokenizer
from repro.run.carry_out import carry_out
from repro.run.places import expected_folder
from repro.runlog.run_logger import VARIABLE, LogOptions, RunLogger, read_lines
from repro.runlog.trackers import TRACKERS, name_of
from repro.spec.variants import with_steps
from repro.targets import find
from tests.repro.runlog.conftest import small_of
from tests.repro.small_runs import context_of

TARGET = with_steps(find("table1"), 3)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")


def carried_out(run, records, stop_at=99):
    """Carry out a run, stopping after so many steps; return what it says."""
    said = []

    def progress(text, values):
        said.append(text)

    watched = {"progress": progress, "should_stop": lambda: said.count("training") >= stop_at}
    carry_out([run], records, context_of(run_folder(run, records), **watched))
    return said


class Notebook:
    """A tracker that keeps what it is given, by run."""

    logged: dict[str, list[tuple[int, Mapping[str, float]]]] = {}  # noqa: RUF012 - a fake's memory

    def __init__(self, name, digest, config, folder):
        self.name = name
        self.logged.setdefault(self.name, [])

    def log(self, step, values):
        """Note a step."""
        self.logged[self.name].append((step, values))

    def close(self):
        """Note the end as step -1."""
        self.logged[self.name].append((-1, {}))


@pytest.fixture
def notebook(monkeypatch):
    """Return what was logged, by run, to a tracker of this name."""
    monkeypatch.setitem(TRACKERS, "json", Notebook)  # a package that is installed
    monkeypatch.setattr(Notebook, "logged", {})
    monkeypatch.setenv(VARIABLE, '{"trackers": "json"}')
    return Notebook.logged


def test_a_run_leaves_its_steps_and_completions(tmp_path, monkeypatch):
    from pyarrow import parquet

    run = small_of(TARGET, "nvfp4_lora_aqn")
    carried_out(run, tmp_path)
    folder, record = run_folder(run, tmp_path), read_record(record_path(run, tmp_path))
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for name in ("reward", "entropy", "grad_norm", "sigma"):
        assert [line[name] for line in lines] == record.series[name]
    assert all(line["seconds_rollout"] > 0 < line["seconds_update"] for line in lines)
    assert not any(name.startswith("seconds") for name in record.series)
    (evaluation,) = read_lines(folder / "evaluations.jsonl")
    assert evaluation["step"] == 2
    assert [evaluation["evaluation_accuracy"]] == record.series["evaluation_accuracy"]
    assert not (folder / "completions").exists()

    monkeypatch.setenv(VARIABLE, '{"completions": true}')
    carried_out(run, tmp_path / "with")
    again = read_record(record_path(run, tmp_path / "with"))
    assert (again.series, again.digest) == (record.series, record.digest)
    kept = run_folder(run, tmp_path / "with") / "completions"
    table = parquet.read_table(kept).to_pydict()
    rows, group = run.scale.prompts_per_rollout * run.scale.group_size, run.scale.group_size
    assert len(table["text"]) == 3 * rows
    assert set(table["step"][:rows]) == {1}
    assert table["run"][0] == name_of(run)
    assert table["sample"][:group] == list(range(group))
    assert sum(table["reward"][:rows]) / rows == pytest.approx(record.series["reward"][0])
    names = ("reward", "accuracy", "format", "accuracy_lenient")
    for reward, accuracy, form, lenient in zip(*map(table.get, names), strict=True):
        assert reward == pytest.approx(accuracy + run.scale.format_reward * form)
        assert accuracy <= lenient
    (gold,) = set(table["gold"][:group])
    assert gold
    assert sum(table["advantage"][:group]) == pytest.approx(0.0, abs=1e-9)
    assert set(table["finish_reason"]) <= {"stop", "length"}
    tokenizer = load_tokenizer(TINY_FOLDER)
    counted = len(tokenizer(table["text"][0], add_special_tokens=False)["input_ids"])
    assert table["tokens"][0] - counted in (0, 1)  # the end token, unless truncated


def test_a_stopped_run_goes_on_in_its_files_and_says_nothing_twice(tmp_path, notebook):
    run = small_of(TARGET)
    with pytest.raises(Stopped):
        carried_out(run, tmp_path, stop_at=2)
    assert "goes on after step 2 of 3" in carried_out(run, tmp_path)
    lines = read_lines(run_folder(run, tmp_path) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    logged = notebook[name_of(run)]
    steps = [step for step, values in logged if "reward" in values]
    assert steps == [1, 2, 3]
    assert [step for step, _ in logged].count(-1) == 2


def test_tensorboard_gets_every_number_of_every_step(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = small_of(TARGET)
    with RunLogger(run, tmp_path, LogOptions(trackers=("tensorboard",))) as logger:
        for step in (1, 2):
            logger.step(step, {"reward": step / 4, "kl": None})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward"]
    scalars = [(event.step, event.value) for event in events.Scalars("reward")]
    assert scalars == [(1, 0.25), (2, 0.5)]


def test_wandb_is_opened_and_its_failure_is_a_warning(tmp_path, monkeypatch):
    library = mock.Mock()
    library.init.return_value.finish.side_effect = RuntimeError("the network is gone")
    monkeypatch.setitem(sys.modules, "wandb", library)
    run = small_of(TARGET)
    with RunLogger(run, tmp_path, LogOptions(trackers=("wandb",))) as logger:
        logger.step(1, {"reward": 0.5})
    ((_, how),) = library.init.call_args_list
    assert how["name"].startswith("table1_in_3_steps/nvfp4_lora/seed-0")
    assert how["config"] == run.resolved()
    assert (how["project"], how["resume"]) == ("qerl-repro", "allow")
    opened = library.init.return_value
    opened.log.assert_called_once_with({"reward": 0.5}, step=1)
    opened.finish.assert_called_once_with()
    assert "RuntimeError: the network is gone" in (tmp_path / "warnings.txt").read_text()


def test_a_tracker_that_is_not_installed_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(TRACKERS, "no_such_package", Notebook)
    line = ["run", "table1", "--tier", "smoke", "--runs", str(tmp_path / "runs")]
    assert main([*line, "--log", "no_such_package"]) == 2
    assert "pip install no_such_package" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_curves_of_blessed_runs_go_to_a_tracker_step_by_step(notebook, capsys):
    assert main(["report", "table1_coder_0_5b", "dose_coder_0_5b", "--log", "json"]) == 0
    (checked,) = blessed_checks(expected_folder(None), "table1_coder_0_5b")
    assert f"sent {checked.evidence.count} runs to json" in capsys.readouterr().out
    entropy = checked.evidence.records["nvfp4_lora"][3].series["entropy"]
    steps = notebook["table1_coder_0_5b/nvfp4_lora/seed-3"]
    assert [(step, of.get("entropy")) for step, of in steps] == [*enumerate(entropy, 1), (-1, None)]


def test_flags_reach_worker_processes(monkeypatch):
    monkeypatch.setitem(TRACKERS, "csv", Notebook)
    line = ["run", "table1", "--log", "csv", "--completions"]
    asked = LogOptions.of_line(build_parser().parse_args(line))
    assert asked == LogOptions(trackers=("csv",), completions=True)
    with asked.passed_on():
        assert LogOptions.from_environment() == asked
        with LogOptions().passed_on():
            assert LogOptions.from_environment() == LogOptions()
        assert LogOptions.from_environment() == asked
    assert LogOptions.from_environment() == LogOptions()
