"""Records of several commits: whole seeds may stand together, arms of one seed may not."""

import contextlib
import dataclasses
import functools
import shutil
from unittest import mock

import pytest

from repro.__main__ import main
from repro.evidence import origins
from repro.evidence.environment import device_of
from repro.evidence.origins import commits_of, seeds_text
from repro.evidence.record import RecordError
from repro.evidence.store import blessed_records
from repro.judge.blessed import blessed_checks
from repro.judge.blessing import BlessError
from repro.judge.check import check_selection
from repro.run.analysis_plan import plan_inputs
from repro.run.select import select
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.judge.test_bless_planned import go
from tests.repro.made_up import at_commit, on_device, planned_record, source_of
from tests.repro.planned import FIRST, SECOND
from tests.repro.run.test_analysis_plan import selected

OLD, NEW = "a" * 40, "b" * 40
pytestmark = pytest.mark.usefixtures("planned_targets")


def at(record, commit):
    return on_device(at_commit(record, commit, dirty=None), "NVIDIA H200")


def write(target, runs, seeds, commit, change=None):
    """Write the records that `runs` lacks."""
    with mock.patch("os.fsync"):
        for run in selected(target).plan(seeds):
            record = at(_honest(run, str(plan_inputs(run))), commit)
            record = change(record) if change else record
            with contextlib.suppress(FileExistsError):
                record.write(runs)


@functools.cache
def _honest(run, planned):
    """Return a run's record under its plan as it is now, made once."""
    return planned_record(run)


def test_a_seed_whose_arms_ran_on_different_devices_is_not_compared(tmp_path, expected):
    write("study", tmp_path, FIRST, NEW)
    write("study_rates", tmp_path, FIRST, NEW, lambda record: on_device(record, "NVIDIA H100"))
    checked = check_selection(selected("study_rates"), tmp_path, expected)
    assert [verdict.status for verdict in checked.verdicts] == ["not run"]
    assert "seed 5" in (checked.verdicts[0].sentence)
    assert checked.faulty


def test_another_template_of_the_checkpoint_is_refused(tmp_path, expected):
    def with_files(digest, arm=""):
        def changed(record):
            own = digest if arm in ("", record.arm) else "a"
            return other_input("checkpoint_files", own)(record)

        return changed

    selection = selected("study")
    write("study", tmp_path / "a", FIRST, NEW, with_files("a"))
    write("study", tmp_path / "a", SECOND[:2], NEW, with_files("b"))
    refused = check_selection(selection, tmp_path / "a", expected).evidence.refused
    assert {path.stem for path, _ in refused} == {f"seed-{seed}" for seed in SECOND[:2]}
    assert all("checkpoint_files" in sentence for _, sentence in refused)
    write("study", tmp_path / "b", FIRST, NEW, with_files("b", "nvfp4_lora"))
    checked = check_selection(selection, tmp_path / "b", expected)
    assert checked.faulty
    said = [verdict.sentence for _, verdict in checked.statements()]
    assert any("checkpoint files" in sentence for sentence in said)


def test_more_seeds_of_another_commit_join_the_blessed_ones(tmp_path, expected):
    write("study", tmp_path / "old", FIRST, OLD)
    go("study", tmp_path / "old", expected, "--unfinished")
    write("study", tmp_path / "new", SECOND, NEW)
    go("study", tmp_path / "new", expected, "--add")
    records = blessed_records(expected, Tier.MINI, "study")
    assert commits_of(records) == {OLD: FIRST, NEW: SECOND}
    assert seeds_text([9, 0, 1, 5, 6, 7, 0]) == "seeds 0, 1, 5 to 7, 9"
    assert len(records) == 10 * len(find("study").arms)
    assert len(list((tmp_path / "new" / "mini" / "study" / "bf16_lora").iterdir())) == 5
    # Blessing the same again changes nothing: what is there already is met, not doubled.
    go("study", tmp_path / "new", expected, "--add")
    assert blessed_records(expected, Tier.MINI, "study") == records
    assert [item.sound for item in blessed_checks(expected, "study")] == [True]
    runs = ["compare", "blessed", str(tmp_path / "old"), "study", "--expected", str(expected)]
    assert main(runs) == 0


def test_more_seeds_of_another_card_join_where_the_target_is_stored(tmp_path, expected):
    write("study", tmp_path / "old", FIRST, OLD)
    go("study", tmp_path / "old", expected, "--unfinished")
    added = SECOND[:2]
    write("study", tmp_path / "new", added, NEW, lambda record: on_device(record, "NVIDIA H100"))
    go("study", tmp_path / "new", expected, "--add", "--unfinished")
    records = blessed_records(expected, Tier.MINI, "study")
    cards = {record.seed: device_of(record.environment) for record in records}
    assert cards == dict.fromkeys(FIRST, "nvidia_h200") | dict.fromkeys(added, "nvidia_h100")
    (checked,) = blessed_checks(expected, "study")
    assert checked.evidence.device == "nvidia_h200"
    assert checked.sound


def of_one(change):
    """Return a change of one arm of one seed."""

    def changed(record):
        return change(record) if (record.arm, record.seed) == ("nvfp4_lora", 8) else record

    return changed


def with_sources(*earlier, digest=None):
    """Return a change to records of a run that saw other states of the source."""

    def changed(record):
        states = [*earlier, *record.sources]
        states[-1] = states[-1] | ({"sha256": digest} if digest else {})
        return dataclasses.replace(record, sources=states)

    return changed


def other_input(key, digit="0"):
    def change(record):
        return dataclasses.replace(record, inputs=record.inputs | {key: digit * 64})

    return change


EARLIER = {"commit": OLD, "dirty": None, "sha256": source_of(OLD)}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (of_one(lambda record: at(record, NEW)), None, r"2 commits, .*seed 8"),
        (of_one(lambda record: on_device(record, "NVIDIA H100")), None, r"seed 8 .*device"),
        (None, with_sources(digest="0" * 64), r"with changes"),
        (None, with_sources(EARLIER), r"changed"),
        (None, other_input("checkpoint"), r"another checkpoint"),
        (None, other_input("plan:study"), r"another analysis plan"),
    ],
)
def test_seeds_that_were_not_run_alike_are_refused(old, new, words, tmp_path, expected):
    runs = tmp_path / "runs"
    write("study", runs, FIRST, OLD, old)
    write("study", runs, SECOND, NEW, new)
    with pytest.raises(BlessError, match=words):
        go("study", runs, expected)
    assert not (expected / "records").exists()


def test_an_arm_shared_with_another_target_counts(tmp_path, expected):
    runs = tmp_path / "runs"
    write("study", runs, FIRST, OLD)
    write("study_rates", runs, FIRST, NEW)
    with pytest.raises(BlessError, match="seed 5"):
        go("study_rates", runs, expected)
    # Made at one commit, the same runs qualify; more seeds of the shared arm do not disturb.
    fresh = tmp_path / "fresh"
    write("study_rates", fresh, FIRST, NEW)
    write("study", fresh, SECOND, OLD)
    go("study_rates", fresh, expected)
    assert check_selection(selected("study_rates"), fresh, expected).sound


def test_a_run_that_is_blessed_and_made_anew_is_left_to_the_reader(tmp_path, expected):
    write("study", tmp_path / "old", FIRST, OLD)
    go("study", tmp_path / "old", expected, "--unfinished")
    write("study", tmp_path / "new", [9, 10], NEW)
    with pytest.raises(RecordError, match=r"seed-9.json: recorded at commit a.* again at commit b"):
        go("study", tmp_path / "new", expected, "--add")


def test_shared_arms_come_from_the_blessed_records_too(tmp_path, expected):
    write("study", tmp_path / "old", FIRST, OLD)
    go("study", tmp_path / "old", expected, "--unfinished")
    write("study_rates", tmp_path / "new", FIRST, OLD)
    shutil.rmtree(tmp_path / "new" / "mini" / "study")
    go("study_rates", tmp_path / "new", expected, "--add")
    records = blessed_records(expected, Tier.MINI, "study_rates")
    assert {record.arm for record in records} == {"lora_3e5"}


def test_timings_stay_with_one_state_of_the_source_and_so_do_the_arms_of_a_seed(made_up_record):
    (selection,) = select(["table1"], tier="smoke")
    made = [made_up_record(run) for run in selection.plan(5)]
    by_seed = [at(record, OLD if record.seed < 3 else NEW) for record in made]
    assert origins.mixed_sources(by_seed, several=True) is None
    assert "timings" in str(origins.mixed_sources(by_seed, several=False))
    by_arm = [at(record, OLD if record.arm < "nf4" else NEW) for record in made]
    state = {"dirty": None, "sha256": source_of(OLD)}
    alike = [
        dataclasses.replace(record, sources=[{"commit": record.commit, **state}])
        for record in by_arm
    ]
    for several in (True, False):
        assert origins.mixed_sources(by_arm, several=several) is not None
        assert origins.mixed_sources(alike, several=several) is None
