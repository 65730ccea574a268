"""Expectations are read strictly; blessing is refused unless the records deserve it."""

import dataclasses
import subprocess
import tomllib
from datetime import UTC, datetime, timedelta

import pytest

from repro.evidence.origins import commits_of
from repro.evidence.store import blessed_records
from repro.evidence.verdicts.expectation import Expectation, ExpectationError, load_bars
from repro.judge.blessed import blessed_checks
from repro.judge.blessing import BlessError, bless
from repro.judge.check import check_selection, exit_status
from repro.judge.gathering import gather
from repro.run.places import expected_folder
from repro.run.select import Selection, select
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import at_commit, with_accuracy

TABLE1 = find("table1")
SELECTION = Selection(target=TABLE1, tier=Tier.SMOKE)


def blessed(runs, expected, tier=Tier.SMOKE):
    selection = dataclasses.replace(SELECTION, tier=tier)
    return bless(selection, gather(SELECTION, runs, expected), expected, runs=runs)


def test_records_are_as_before_beside_themselves_blessed(table1_records, tmp_path, expected):
    runs = tmp_path / "runs"
    table1_records(runs)
    paths = blessed(runs, expected)
    assert [path.name for path in paths] == ["table1.csv", "table1.jsonl.xz"]
    records = blessed_records(expected, Tier.SMOKE, "table1")
    assert commits_of(records) == {"0" * 40: [0, 1, 2, 3, 4]}
    checked = check_selection(SELECTION, runs, expected)
    assert checked.as_before.counts() == {"unchanged": len(checked.as_before.rows)}
    # What belongs to a machine is not compared where no device is named.
    metrics = {row.metric for row in checked.as_before.rows}
    assert metrics.isdisjoint({"train_seconds", "peak_bytes"})
    assert len(metrics) > 5
    (stored,) = blessed_checks(expected, "table1")
    assert stored.evidence.count == 5 * len(TABLE1.arms)
    assert stored.as_before is None


def test_a_result_that_is_not_as_before_is_worse(table1_records, tmp_path, expected):
    table1_records(tmp_path / "runs")
    blessed(tmp_path / "runs", expected)

    for name, points in (("worse", -20.0), ("better", 5.0)):

        def changed(record, points=points):
            value = record.metrics["accuracy"].value + points
            return with_accuracy(record, accuracy=value) if record.arm == "nf4_lora" else record

        table1_records(tmp_path / name, changed, 3)
    worse = check_selection(SELECTION, tmp_path / "worse", expected)
    lost = {(row.arm, row.metric, row.verdict) for row in worse.as_before.worse}
    assert lost == {("nf4_lora", name, "regressed") for name in ("accuracy", "working_rate")}
    assert exit_status([worse]) == 1
    better = check_selection(SELECTION, tmp_path / "better", expected)
    assert better.as_before.counts()["improved"] >= 1
    assert exit_status([better]) == 0


def same(record):
    return record


@pytest.mark.parametrize(
    ("spoil", "seeds", "tier", "words"),
    [
        (lambda r: at_commit(r, dirty=True), 5, Tier.SMOKE, "with changes"),
        (lambda r: at_commit(r, "no-such-commit"), 5, Tier.SMOKE, "commit"),
        (lambda r: at_commit(r, str(len(r.arm) % 2) * 40), 5, Tier.SMOKE, "2 commits, .*seed 0"),
        (lambda r: dataclasses.replace(r, facts={}), 5, Tier.SMOKE, "such records"),
        (same, 4, Tier.SMOKE, "fewer than 5 seeds"),
        (same, 5, Tier.PAPER, "paper's own numbers"),
        (same, 5, Tier.SYSTEMS, "needs one"),
    ],
)
def test_bad_records_are_not_blessed(spoil, seeds, tier, words, table1_records, tmp_path, expected):
    table1_records(tmp_path / "runs", spoil, seeds)
    with pytest.raises(BlessError, match=words):
        blessed(tmp_path / "runs", expected, tier)
    assert not (expected / "records").exists()


BAR = '{ arm = "a", metric = "m", at_least = 1, goal = 2.0 }'


@pytest.mark.parametrize(
    ("because", "bars", "words"),
    [
        ('"so"', '{ arm = "a", metric = "m" }', "needs bounds"),
        ('"so"', '{ arm = "a", metric = "m", at_least = 2, at_most = 1 }', "needs bounds"),
        ('"so"', '{ arm = "a", at_least = 1 }', "'metric'"),
        ('"so"\nsurprise = 1', BAR, "'surprise'"),
        ('"so"', BAR.replace("goal", "surprise"), "'surprise'"),
        ("so", BAR, "Invalid value"),
        (None, BAR, "'because'"),
    ],
)
def test_a_spoiled_bar_names_file_and_field(because, bars, words, tmp_path):
    (tmp_path / "bars").mkdir()
    reason = "" if because is None else f"because = {because}\n"
    (tmp_path / "bars" / "smoke.toml").write_text(f"[[table1]]\n{reason}bars = [{bars}]\n")
    with pytest.raises(ExpectationError, match=f"smoke.toml: .*{words}"):
        load_bars(tmp_path, "smoke", "table1")


def test_bars_of_a_device_are_read_for_that_device_alone(tmp_path):
    (tmp_path / "bars").mkdir()
    (tmp_path / "bars" / "systems.toml").write_text(
        f'[[kernels]]\ndevice = "nvidia_h200"\nbecause = "must"\nbars = [{BAR}]\n'
    )
    assert load_bars(tmp_path, "systems", "kernels", "nvidia_h200") == [
        Expectation(arm="a", metric="m", accept=(1, None), source="derived", because="must", goal=2)
    ]
    assert load_bars(tmp_path, "systems", "kernels", "nvidia_a100") == []


def test_every_committed_bar_is_of_an_arm_and_a_metric_that_exist():
    folder = expected_folder(None)
    for path in sorted((folder / "bars").glob("*.toml")):
        for name in tomllib.loads(path.read_text()):
            arms = {arm.name for arm in find(name).arms}
            metrics = {metric.name for metric in find(name).metrics}
            bars = load_bars(folder, path.stem, name)
            assert bars, name
            assert {bar.arm for bar in bars} <= arms, name
            assert {bar.metric for bar in bars} <= metrics, name


def test_a_bar_that_is_younger_than_a_run_is_met_post_hoc(table1_records, tmp_path):
    table1_records(tmp_path / "runs")
    expected = tmp_path / "expected"
    (expected / "bars").mkdir(parents=True)
    bar = '{ arm = "bf16_lora", metric = "gain_greedy", at_least = 1.0, stated = %s }'
    for stated, marks in (
        ("2020-01-01T00:00:00Z", set()),
        ("2100-01-01T00:00:00+02:00", {"post hoc"}),
    ):
        text = f'[[table1]]\nbecause = "must"\nbars = [{bar % stated}]\n'
        (expected / "bars" / "smoke.toml").write_text(text)
        (selection,) = select(["table1"], tier="smoke")
        checked = check_selection(selection, tmp_path / "runs", expected)
        (verdict,) = [item for item in checked.verdicts if item.about == "expectation"]
        assert (verdict.status, set(verdict.marks)) == ("reproduced", marks)
    (expected / "bars" / "smoke.toml").write_text(text.replace("+02:00", ""))
    with pytest.raises(ExpectationError, match="needs an offset"):
        load_bars(expected, "smoke", "table1")


def test_no_bar_says_that_it_is_older_than_its_commit():
    """Bars of the file's first day, before which no blessed run began, need not say it."""
    root = expected_folder(None).parent
    path = "expected/bars/systems.toml"

    def git(*arguments):
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    log = git("log", "--reverse", "--format=%H %aI", "--", path)
    commits = [line.split() for line in log.splitlines()]
    oldest = datetime(2026, 11, 22, 16, 5, tzinfo=UTC)
    if len(commits) < 2 or datetime.fromisoformat(commits[0][1]) > oldest:
        pytest.skip("the history of the bars is not here")
    first = {}
    for commit, at in commits:
        for key, _ in bars_of(git("show", f"{commit}:{path}")):
            first.setdefault(key, datetime.fromisoformat(at))
    for key, stated in bars_of((root / path).read_text()):
        if key in first and first[key] > oldest:
            assert stated is not None, key
            assert stated >= first[key] - timedelta(hours=1), key


def bars_of(text):
    """Return (what a bar asks, when it was stated) of each bar of a file."""
    return [
        (
            (target, bar["arm"], bar["metric"], bar.get("at_least"), bar.get("at_most")),
            bar.get("stated", group.get("stated")),
        )
        for target, groups in tomllib.loads(text).items()
        for group in groups
        for bar in group["bars"]
    ]
