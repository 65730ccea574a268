"""The page of findings: drawn from records alone, each verdict under its heading."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.record import Estimate, Record
from repro.judge.check import Checked
from repro.report import learning
from repro.report.learning import blessed_findings, findings_text
from repro.report.learning_runs import ends, limits, rate_text, rates, runs_of_checks
from repro.run.places import PACKAGE, expected_folder
from repro.run.select import select
from repro.targets.chosen_rates import read_choice
from repro.targets.proxy import PROXY_SWEEP

Maker = Callable[..., Record]
EXPECTED = expected_folder(None)


def page(runs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", "--findings", str(out), "--runs", str(runs)]) == 0
    assert "wrote" in capsys.readouterr().out
    return out.read_text(encoding="utf-8")


@pytest.fixture
def undecided_page(tmp_path: Path, proxy_record: Maker, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the page of all of Figure 9's runs, whose arms differ by chance alone."""
    (selection,) = select(["figure9"], tier="proxy")
    for run in selection.plan():
        proxy_record(run).write(tmp_path / "runs")
    return page(tmp_path / "runs", tmp_path / "findings.md", capsys)


def with_metrics(record: Record, given: dict[str, float]) -> Record:
    """Return the record with these percentages and no other metrics."""
    metrics = {name: Estimate(value=value, unit="percent", n=500) for name, value in given.items()}
    return dataclasses.replace(record, metrics=metrics)


@pytest.fixture(scope="module")
def findings() -> list[Checked]:
    """Return the checks behind the page, which take seconds to read."""
    return blessed_findings(EXPECTED)


def section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_each_claim_stands_under_its_verdict(
    tmp_path: Path, proxy_record: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    (selection,) = select(["figure9"], tier="proxy")
    shifts = {"nvfp4_lora_aqn": 10.0, "aqn_linear": 20.0, "aqn_cosine": 0.0}
    for run in selection.plan():
        if run.arm.name != "aqn_logarithmic":
            proxy_record(run, shifts[run.arm.name]).write(tmp_path / "runs")
    text = page(tmp_path / "runs", tmp_path / "findings.md", capsys)
    assert "more accurate than the cosine one" in section(text, "Reproduced")
    assert "more accurate than the linear one" in section(text, "Contradicted")
    assert "more accurate than the logarithmic one" in section(text, "Not run")
    lines = section(text, "Contradicted").splitlines()
    row = next(line for line in lines if "than the linear one" in line)
    effect = float(row.split("|")[3].split()[0])
    assert -14 < effect < -6
    assert "15 runs (15 trained)" in text
    assert ("Chosen by a sweep on tuning seeds" in text) == (read_choice(PROXY_SWEEP) is not None)


def test_a_page_without_a_sweep_says_so(
    tmp_path: Path,
    proxy_record: Maker,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (selection,) = select(["figure9"], tier="proxy")
    proxy_record(selection.plan()[0], 0.0).write(tmp_path / "runs")
    monkeypatch.setattr(learning, "read_choice", lambda _: None)
    text = page(tmp_path / "runs", tmp_path / "findings.md", capsys)
    assert "No sweep has been made" in text


def test_an_undecided_claim_says_how_many_pairs_would_decide(undecided_page: str) -> None:
    lines = section(undecided_page, "Inconclusive").splitlines()
    row = next(line for line in lines if "figure9" in line)
    needed = row.split("|")[-2].strip()
    assert needed == "more than 1000" or int(needed) > 5


def test_intervals_near_zero_are_counted_against_the_papers_gain(undecided_page: str) -> None:
    rows = [
        line.split("|")
        for line in undecided_page.splitlines()
        if "`figure9`" in line and "points" in line
    ]
    reach = [max(abs(float(end)) for end in cells[4].split(" to ")) for cells in rows]
    near = sum(far < 2.7 for far in reach)
    assert len(reach) > 0
    assert f"of {len(reach)} inconclusive differences, {near} show no difference" in undecided_page


def test_without_records_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    text = page(tmp_path / "runs", tmp_path / "findings.md", capsys)
    assert "## Reproduced" not in text
    assert re.search(r"different statements .*: \d+ not run\.", text)
    assert "What limits" not in text
    shutil.rmtree(tmp_path / "runs")


def test_the_page_in_the_repository_is_that_of_the_blessed_records(findings: list[Checked]) -> None:
    kept = PACKAGE.parent / "docs" / "findings.md"
    if not kept.is_file():
        pytest.skip("docs/ is not part of an installed package")
    text = findings_text(findings, EXPECTED, kept)
    stale = "stale: python -m repro report --findings docs/findings.md renews it"
    assert text == kept.read_text(encoding="utf-8"), stale
    in_short = section(text, "In short").splitlines()
    named = [line for line in in_short if line.startswith("- Inconclusive: ")]
    rows = section(text, "Inconclusive").splitlines()
    tables = [row for row in rows if "`table1`" in row or "`table2`" in row]
    assert len(named) == sum("before training" not in row for row in tables) > 0
    for line in named:
        (row,) = [row for row in tables if row.split("|")[1].strip(" †") in line]
        effect, interval = (cell.strip() for cell in row.split("|")[4:6])
        assert f", {effect}, {interval}" in line


def test_statements_on_arms_at_different_rates_are_marked_and_said_once(
    tmp_path: Path, findings: list[Checked]
) -> None:
    text = findings_text(findings, EXPECTED, tmp_path / "findings.md")
    marked = [line for line in text.splitlines() if line.startswith("|") and "†" in line]
    runs = runs_of_checks(findings)
    qerl, lora, full = (
        rate_text(runs["table1", name].values())
        for name in ("nvfp4_lora", "bf16_lora", "bf16_full")
    )
    assert any("is no worse than full fine-tuning" in line for line in marked) == (qerl != full)
    assert any("NVFP4 LoRA has a higher mean" in line for line in marked) == (qerl != lora)
    rows = [line for line in text.splitlines() if "AQN" in line and "final accuracy" in line]
    # Table 1's own statement; the factorial asks the same of the same runs.
    assert sum("on NVFP4 weights" in line for line in rows) == 0
    assert sum("adding AQN to NVFP4 LoRA raises the final accuracy |" in line for line in rows) == 1


def test_the_ends_and_limits_are_those_of_the_records(findings: list[Checked]) -> None:
    runs = runs_of_checks(findings)
    kept = runs["table1", "bf16_lora"]
    row = next(line for line in ends(runs) if line.startswith("| BF16, LoRA |"))
    shown = sorted({seed for records in runs.values() for seed in records})
    printed = {
        f"seed {seed}": f"{kept[seed].value('accuracy'):.1f}" if seed in kept else "-"
        for seed in shown
    }
    heads = next(line for line in ends(runs) if line.startswith("| arm |")).split(" | ")
    cells = dict(zip(heads, row.split(" | "), strict=True))
    assert {name: cells[name] for name in printed} == printed
    last = [
        values[-1] - values[-2]
        for (_, arm), records in runs.items()
        if arm not in ("bf16_lora_random_reward", "bf16_lora_format_reward")
        for record in records.values()
        if len(values := [v or 0.0 for v in record.series.get("evaluation_accuracy", [])]) > 1
    ]
    assert len(last) >= 25
    rising = f"{sum(rise > 5 for rise in last)} of {len(last)} trained runs rose by more than 5"
    assert rising in "\n".join(limits(runs))
    flat = {
        key: {
            seed: dataclasses.replace(
                record, series=record.series | {"evaluation_accuracy": [50.0, 50.0]}
            )
            for seed, record in records.items()
        }
        for key, records in runs.items()
    }
    assert f"** 0 of {len(last)} trained runs rose" in "\n".join(limits(flat))


def test_a_ceiling_holds_for_its_own_policy_and_problems_alone(
    tmp_path: Path, proxy_record: Maker
) -> None:
    (selection,) = select(["table1"], tier="proxy")
    start, end = (
        with_metrics(proxy_record(run), given)
        for run, given in zip(
            selection.plan([5], ["bf16", "bf16_lora"]),
            (
                {"accuracy_forced_working": 90.0},
                {"accuracy_greedy": 70.0, "accuracy_greedy_start": 60.0, "gain_greedy": 10.0},
            ),
            strict=True,
        )
    )
    scale = end.config["scale"] | {"checkpoint": "proxy-120m"}
    other = dataclasses.replace(end, config=end.config | {"scale": scale})
    runs = {("table1", "bf16"): {5: start}, ("table1", "bf16_lora"): {5: end}}
    text = "\n".join(limits(runs))
    assert "60 and 90 % (`proxy-30m` on levels 4 and 5)" in text
    assert "1 of 1 ended more than 10 points below" in text
    assert "not measured" not in text
    assert "another policy" not in text
    text = "\n".join(limits(runs | {("figure13", "bf16_lora"): {5: other}}))
    assert "1 of 1 ended more than 10 points below" in text
    assert "`proxy-120m` on levels 4 and 5, greedy from 60 to 70 %" in text
    assert "`proxy-120m` trained at the rates that the sweep chose for `proxy-30m`" in text


def test_tied_rates_are_said_to_be_ties() -> None:
    choice = {
        "records": 4,
        "commits": ["0" * 40],
        "rule": "the best",
        "chosen": {"bf16_lora": 1e-3, "nvfp4_lora": 1e-3},
        "errors": {"bf16_lora": 0.75, "nvfp4_lora": 0.75},
        "means": {
            "bf16_lora": {"0.001": 89.0, "0.003": 90.0},
            "nvfp4_lora": {"0.001": 90.0, "0.003": 88.0},
        },
    }
    text = "\n".join(rates(choice))
    assert "For bf16_lora the sweep cannot tell the best rate from another" in text
    assert "| bf16_lora | 0.001 | 0.001: 89.0, 0.003: 90.0 | 0.75 |" in text
    assert "For bf16_lora, nvfp4_lora the chosen rate is the smallest that was tried" in text
    higher = choice | {"chosen": {"bf16_lora": 3e-3, "nvfp4_lora": 3e-3}}
    assert "smallest that was tried" not in "\n".join(rates(higher))
    assert "No sweep" in "\n".join(rates(None))


def test_two_devices_stand_side_by_side_and_where_they_differ_the_page_says_so(
    findings: list[Checked], on_other_device: Callable[..., Checked], tmp_path: Path
) -> None:
    table1 = next(item for item in findings if item.selection.target.name == "table1")
    other = on_other_device(table1)
    flipped = [
        dataclasses.replace(item, status="reproduced", effect=3.0, low=2.0, high=4.0)
        if item.name == "aqn_helps"
        else item
        for item in other.verdicts
    ]
    checks = [table1, dataclasses.replace(other, verdicts=flipped)]
    text = findings_text(checks, EXPECTED, tmp_path / "findings.md")
    assert text.count("different statements of the paper") == 2
    (row,) = [line for line in section(text, "Devices differ").splitlines() if "AQN" in line]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells.index("inconclusive") < cells.index("reproduced")
    assert "+3 points" in cells
    heads = next(
        line for line in section(text, "Inconclusive").splitlines() if line.startswith("|")
    )
    assert heads.count("NVIDIA H100") == heads.count("NVIDIA H200") > 0
    for device in ("NVIDIA H200", "NVIDIA H100"):
        assert f"\n## Every seed's end: {device}\n" in text
    runs = [line for line in text.splitlines() if line.startswith("| table1 | `")]
    assert [line.split("|")[3].strip() for line in runs] == ["NVIDIA H200", "NVIDIA H100"]


def test_a_papers_difference_that_the_interval_does_not_reach_is_excluded(
    findings: list[Checked], tmp_path: Path
) -> None:
    text = findings_text(findings, EXPECTED, tmp_path / "findings.md")
    rows = [line for line in section(text, "Inconclusive").splitlines() if "`table1`" in line]
    (row,) = [line for line in rows if "adding AQN to NVFP4 LoRA" in line]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[3] == "+0.4 (3B), +2.3 (7B)"
    high = float(cells[5].split(" to ")[1])
    names = ", ".join(name for name, size in (("3B", 0.4), ("7B", 2.3)) if high < size)
    assert cells[6] == f"excluded at the paper's size ({names})"
