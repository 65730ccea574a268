"""The store: a line per run and the whole records beside it, which must agree."""

import csv
import dataclasses
import json
import lzma

import pytest

from repro.evidence.provenance import PACKAGE, _git, checkout_folder, digest_of_commit
from repro.evidence.receipts import violations
from repro.evidence.record import Estimate, RecordError, failed_record, read_record
from repro.evidence.store import (
    HEAD,
    Blessed,
    Joined,
    RunsFolder,
    blessed_sources,
    read_stored,
    table_text,
    write_stored,
)
from repro.judge.blessing import compact
from repro.judge.check import check_selection, checked_json
from repro.judge.gathering import gather
from repro.run.places import expected_folder
from repro.run.select import Selection, select
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.recorded_smoke import place

TABLE1 = find("table1")
SELECTION = Selection(target=TABLE1, tier=Tier.SMOKE)
METRICS = [metric.name for metric in TABLE1.metrics]


@pytest.fixture
def records(made_up_record):
    (selection,) = select(["table1"], tier="smoke")
    return [made_up_record(run) for run in selection.plan(2, ["bf16_lora", "nvfp4_lora"])]


def stored(records, expected):
    path = Blessed(expected, "smoke", None).place("smoke", "table1")
    write_stored(path, METRICS, records)
    return path


def test_what_is_written_is_read_back_and_gives_the_same_bytes_in_any_order(records, tmp_path):
    path, other = stored(records, tmp_path / "a"), stored(records[::-1], tmp_path / "b")
    assert list(read_stored(path)) == sorted(records, key=lambda r: (r.arm, r.seed))
    for end in (".csv", ".jsonl.xz"):
        assert path.with_suffix(end).read_bytes() == other.with_suffix(end).read_bytes()


def test_the_lines_have_six_digits_and_the_whole_records_all(records, tmp_path):
    value = 100 / 3
    more = {"accuracy": Estimate(value=value, unit="percent")}
    gone = {"accuracy": Estimate(value=None, unit="percent")}
    changed = [
        dataclasses.replace(record, metrics=record.metrics | item)
        for record, item in zip(records[:2], (more, gone), strict=True)
    ]
    path = stored(changed, tmp_path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["accuracy"] for row in rows] == ["33.3333", "nan"]
    assert [record.value("accuracy") for record in read_stored(path)] == [value, None]


def test_series_stand_behind_the_runs_and_come_back(records, tmp_path):
    first = dataclasses.replace(records[0], series=records[0].series | {"only_here": [1.0, None]})
    path = stored([first, *records[1:]], tmp_path)
    lines = lzma.decompress(path.with_suffix(".jsonl.xz").read_bytes()).decode().splitlines()
    runs = lines[: len(records)]
    assert not any("series" in json.loads(line) for line in runs)
    names = [json.loads(line)["series"] for line in lines[len(records) :]]
    assert names == sorted({name for record in (first, *records) for name in record.series})
    read = {(record.arm, record.seed): record.series for record in read_stored(path)}
    for record in (first, *records[1:]):
        assert read[record.arm, record.seed] == record.series


def test_a_damaged_or_missing_archive_is_refused(records, tmp_path):
    path = stored(records, tmp_path)
    path.with_suffix(".jsonl.xz").write_bytes(b"no archive")
    with pytest.raises(RecordError, match=r"table1\.jsonl\.xz: not readable"):
        read_stored(path)
    path.with_suffix(".jsonl.xz").unlink()
    with pytest.raises(RecordError, match="missing"):
        read_stored(path)


def test_a_check_does_not_depend_on_where_the_records_come_from(table1_records, tmp_path):
    runs = tmp_path / "runs"
    table1_records(runs)
    (run,) = SELECTION.plan([3], ["nvfp4_lora"])
    failed_record(run, "out of memory\nlater lines", {}).write(runs)
    (runs / "smoke" / "table1" / "bf16" / "seed-2.json").unlink()
    (run,) = SELECTION.plan([2], ["bf16"])
    failed_record(run, "the device was lost", {}).write(runs)
    evidence = gather(SELECTION, runs, expected_folder(None))
    finished = [r for by_seed in evidence.records.values() for r in by_seed.values()]
    stored([*finished, *evidence.failed_records], tmp_path / "expected")
    blessed = Blessed(tmp_path / "expected", "smoke", None)
    again = gather(SELECTION, blessed, expected_folder(None))
    assert again.records == evidence.records
    orders = [{arm: list(by) for arm, by in one.records.items()} for one in (again, evidence)]
    assert orders[0] == orders[1]
    assert again.failed.keys() == evidence.failed.keys() == {("bf16", 2)}
    ((path, _),) = again.failed.values()
    assert path.parts[-2:] == ("bf16", "seed-2.failed-1.json")
    empty = tmp_path / "nothing"
    sides = [checked_json(check_selection(SELECTION, source, empty)) for source in (runs, blessed)]
    assert sides[0]["verdicts"] == sides[1]["verdicts"]
    assert sides[0]["records"] == sides[1]["records"] == 5 * len(TABLE1.arms) - 1


def test_two_sources_give_each_run_once_and_name_a_conflict(records, tmp_path):
    records = sorted(records, key=lambda record: (record.arm, record.seed))
    stored(records[:3], tmp_path)
    for record in records[2:]:
        record.write(tmp_path / "runs")
    joined = Joined([RunsFolder(tmp_path / "runs"), Blessed(tmp_path, "smoke", None)])
    entries = joined.entries("smoke", "table1")
    assert [(e.arm, e.stem) for e in entries] == [(r.arm, f"seed-{r.seed}") for r in records]
    stored([dataclasses.replace(records[2], commit="f" * 40)], tmp_path)
    with pytest.raises(RecordError, match=f"seed-{records[2].seed}.json: .*commit fff"):
        joined.entries("smoke", "table1")


def test_what_is_stored_has_fewer_digits_and_series_and_the_metrics_as_they_were(smoke_runs):
    whole = read_record(place(smoke_runs))
    stored = compact(whole, ["kl"])
    assert stored.series["kl"] == whole.series["kl"]
    assert stored.series["entropy"] == pytest.approx(whole.series["entropy"], rel=0.05)
    assert stored.series["entropy"] != whole.series["entropy"]
    assert "loss" in whole.series.keys() - stored.series.keys()
    assert stored.metrics == whole.metrics
    assert violations(stored) == []
    # Once more, as when later seeds join.
    assert compact(stored, ["kl"]) == stored


def test_the_committed_records_lie_where_they_belong_and_their_tables_are_theirs():
    expected = expected_folder(None)
    tiers = {source.tier for source in blessed_sources(expected)}
    assert tiers == {"smoke", "systems", "mini"}
    tables = sorted((expected / "records").rglob("*.csv"))
    for path in tables:
        arms = {arm.name for arm in find(path.stem).arms}
        assert {record.arm for record in read_stored(path)} <= arms, path
        text = path.read_text(encoding="utf-8")
        columns = text.partition("\n")[0].split(",")[len(HEAD) :]
        assert table_text(columns, read_stored(path)) == text, path
    names = {path.name.split(".")[0] for path in (expected / "records").rglob("*.xz")}
    assert names == {path.stem for path in tables}


def test_the_committed_records_are_of_sources_that_this_checkout_has():
    whole = _git(PACKAGE.parent, "rev-parse", "--is-shallow-repository")
    if checkout_folder() is None or whole != b"false\n":
        pytest.skip("needs a checkout with its whole history")
    named = {
        (record.commit, record.environment.get("source_sha256"))
        for path in (expected_folder(None) / "records").rglob("*.csv")
        for record in read_stored(path)
    }
    for commit, digest in sorted(named, key=str):
        known = digest_of_commit(commit)
        assert known is not None, commit
        assert digest in (None, known), commit
