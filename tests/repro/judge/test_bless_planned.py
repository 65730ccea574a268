"""Blessing what was planned: failures kept, shared arms at home, sweeps without expectations."""

import json
import lzma

import pytest

from repro.door.command_line import build_parser
from repro.evidence import origins
from repro.evidence.plans import keep_plans, read_plans
from repro.evidence.record import failed_record
from repro.evidence.store import blessed_records
from repro.judge.blessed import blessed_checks
from repro.judge.blessing import BlessError, main_bless
from repro.run.analysis_plan import write_plans
from repro.spec.tier import Tier
from tests.repro.made_up import at_commit, on_device, planned_record, source_of
from tests.repro.run.test_analysis_plan import selected, write

pytestmark = pytest.mark.usefixtures("planned_targets")


def go(target, runs, expected, *flags):
    """Bless a target of the mini tier as a command line does."""
    where = ["--tier", "mini", "--runs", str(runs), "--expected", str(expected)]
    assert main_bless(build_parser().parse_args(["bless", target, *where, *flags])) == 0


def test_failed_runs_are_kept_and_shared_arms_stay_at_home(tmp_path, expected):
    runs = tmp_path / "runs"
    write("study_schedules", runs)
    (runs / "mini" / "study_schedules" / "aqn_linear" / "seed-8.json").unlink()
    (run,) = selected("study_schedules").plan([8], ["aqn_linear"])
    failed = failed_record(run, "the gradient norm is nan", {})
    on_device(at_commit(failed), "NVIDIA H200").write(runs)
    go("study_schedules", runs, expected)
    records = blessed_records(expected, Tier.MINI, "study_schedules")
    assert {record.target for record in records} == {"study_schedules"}
    assert [record.seed for record in records if not record.ok] == [8]
    assert len(records) == 15
    (plan,) = of_schedules(expected)
    assert plan.plan["tier"] == "mini"
    (checked,) = [
        c for c in blessed_checks(expected) if c.selection.target.name == "study_schedules"
    ]
    assert checked.evidence.failed.keys() == {("aqn_linear", 8)}
    assert checked.sound


def test_seeds_can_be_kept_before_the_rest_is_run(tmp_path, expected):
    runs, rest = tmp_path / "runs", tmp_path / "rest"
    write("study", runs)
    whole = len(list((runs / "mini" / "study").glob("*/seed-*.json")))
    arm = runs / "mini" / "study" / "nvfp4_lora"
    later = rest / arm.relative_to(runs)
    later.mkdir(parents=True)
    for path in sorted(arm.glob("seed-*.json"))[2:]:
        path.rename(later / path.name)
    words = r"8 of 10 planned seeds of nvfp4_lora have no record \(5, 6, 7, 8, 9, 12, "
    with pytest.raises(BlessError, match=words):
        go("study", runs, expected)
    assert not (expected / "records").exists()
    go("study", runs, expected, "--unfinished")
    (checked,) = [c for c in blessed_checks(expected) if c.selection.target.name == "study"]
    touched = [v for v in checked.verdicts if "of nvfp4_lora" in v.sentence]
    assert touched
    assert {v.status for v in touched} == {"inconclusive"}
    go("study", rest, expected, "--add")
    assert len(blessed_records(expected, Tier.MINI, "study")) == whole


def test_the_blessed_plan_is_the_one_made_before_the_runs(tmp_path, expected):
    runs = tmp_path / "runs"
    write_plans(selected("study_schedules").plan(), runs)
    (before,) = (runs / "mini" / "plans").glob("study_schedules-*.json")
    made = json.loads(before.read_text()) | {"made": "2026-01-02T03:04:05+00:00"}
    before.write_text(json.dumps(made))
    write("study_schedules", runs)
    go("study_schedules", runs, expected)
    (plan,) = of_schedules(expected)
    assert plan.made == made["made"]
    # Blessed again where nobody kept it: the first stays.
    before.unlink()
    go("study_schedules", runs, expected)
    (plan,) = of_schedules(expected)
    assert plan.made == made["made"]


def of_schedules(expected):
    every = read_plans(expected).values()
    return [one for one in every if one.plan["target"] == "study_schedules"]


def test_plans_of_figures_are_kept_with_their_table(tmp_path, expected):
    write_plans(selected("study").plan(), tmp_path / "runs")
    write("study", tmp_path / "runs")
    go("study", tmp_path / "runs", expected)
    readers = {"study", "study_rewards", "study_schedules", "study_rates"}
    assert {one.plan["target"] for one in read_plans(expected).values()} == readers


def test_a_plan_that_was_edited_is_refused(tmp_path, expected):
    for name in ("study_schedules", "study_rates"):
        write(name, tmp_path / "runs")
        go(name, tmp_path / "runs", expected)
    plans = read_plans(expected)
    path = keep_plans(plans, tmp_path)
    assert read_plans(tmp_path) == plans
    assert len(plans) == 2
    # A line may be taken out by hand; its plan is then nobody's.
    first, second = lzma.decompress(path.read_bytes()).decode().splitlines(keepends=True)

    def rewrite(text):
        path.write_bytes(lzma.compress(text.encode()))

    rewrite(second)
    (digest,) = read_plans(tmp_path)
    assert digest in second
    for line in (
        first.replace('"tier": "mini", "version"', '"tier": "paper", "version"', 1),
        first.replace(next(iter(plans)), "0" * 64, 1),
    ):
        assert line != first
        rewrite(line + second)
        with pytest.raises(ValueError, match="another digest"):
            read_plans(tmp_path)
    for content in ("no plan", "[]", '{"target": "study"}', None):
        if content is None:
            path.write_bytes(b"no archive")
        else:
            rewrite(content)
        with pytest.raises(ValueError, match=r"plans.jsonl.xz: not readable"):
            read_plans(tmp_path)


@pytest.mark.parametrize("digest", [source_of("0" * 40), "0" * 64, None])
def test_a_copy_without_git_is_clean(digest, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(origins, "_committed", lambda commit: digest)
    write("study_rates", tmp_path, lambda run: at_commit(planned_record(run), dirty=None))
    if digest == source_of("0" * 40):
        go("study_rates", tmp_path, expected)
    else:
        with pytest.raises(BlessError, match="with changes"):
            go("study_rates", tmp_path, expected)
