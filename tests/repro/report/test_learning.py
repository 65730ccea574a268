"""The page of learning: twelve claims in one table, all numbers from records and claims."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.record import Estimate, Record
from repro.evidence.store import blessed_records
from repro.judge.check import Checked
from repro.report import learning, twelve
from repro.report.learning import (
    blessed_learning,
    learning_checks,
    learning_selections,
    learning_text,
)
from repro.report.learning_runs import (
    ends,
    limits,
    policies,
    rate_text,
    rates,
    rates_of_skill,
    runs_of_checks,
)
from repro.report.twelve import TWELVE, decided, statements
from repro.report.verdicts import CLAIM_WORDS, NO_DIFFERENCE
from repro.run.places import PACKAGE, expected_folder
from repro.run.select import select
from repro.spec.effect import Effect
from repro.spec.tier import Tier
from repro.targets.chosen_rates import read_choice
from repro.targets.proxy import PROXY_SWEEP
from tests.repro.made_up import dose_checks, needle_check

Maker = Callable[..., Record]
EXPECTED = expected_folder(None)


def page(runs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", "--learning", str(out), "--runs", str(runs)]) == 0
    assert "wrote" in capsys.readouterr().out
    return out.read_text(encoding="utf-8")


@pytest.fixture
def undecided_page(tmp_path: Path, proxy_record: Maker, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the page of all of Figure 9's runs, whose arms differ by chance alone."""
    (selection,) = select(["figure9"], tier="proxy")
    for run in selection.plan():
        proxy_record(run).write(tmp_path / "runs")
    return page(tmp_path / "runs", tmp_path / "learning.md", capsys)


def with_metrics(record: Record, given: dict[str, float]) -> Record:
    """Return the record with these percentages and no other metrics."""
    metrics = {name: Estimate(value=value, unit="percent", n=500) for name, value in given.items()}
    return dataclasses.replace(record, metrics=metrics)


@pytest.fixture(scope="module")
def checks() -> list[Checked]:
    """Return the checks behind the page, which take seconds to read."""
    return blessed_learning(EXPECTED)


def section(text: str, heading: str) -> str:
    """Return what stands below a folded heading, or a heading of the page itself."""
    return re.split(rf"\n##+ {re.escape(heading)}\n", text, maxsplit=1)[1].split("\n##", 1)[0]


def test_each_claim_stands_under_its_verdict(
    tmp_path: Path, proxy_record: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    (selection,) = select(["figure9"], tier="proxy")
    shifts = {"nvfp4_lora_aqn": 10.0, "aqn_linear": 20.0, "aqn_cosine": 0.0}
    for run in selection.plan():
        if run.arm.name != "aqn_logarithmic":
            proxy_record(run, shifts[run.arm.name]).write(tmp_path / "runs")
    text = page(tmp_path / "runs", tmp_path / "learning.md", capsys)
    assert "more accurate than the cosine one" in section(text, "Reproduced")
    assert "more accurate than the linear one" in section(text, "Contradicted")
    assert "more accurate than the logarithmic one" in section(text, "Not run")
    lines = section(text, "Contradicted").splitlines()
    row = next(line for line in lines if "than the linear one" in line)
    effect = float(row.split("|")[3].split()[0])
    assert -14 < effect < -6
    assert "15 runs (15 trained)" in text
    schedule = claim_rows(text)[6]
    assert schedule["verdict"].startswith("contradicted")
    assert float(schedule["here"].split()[0]) < -15
    assert ("Chosen by a sweep on tuning seeds" in text) == (read_choice(PROXY_SWEEP) is not None)


def test_a_page_without_a_sweep_says_so(
    tmp_path: Path,
    proxy_record: Maker,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (selection,) = select(["figure9"], tier="proxy")
    proxy_record(selection.plan()[0], 0.0).write(tmp_path / "runs")
    monkeypatch.setattr(learning, "read_choice", lambda *_: None)
    text = page(tmp_path / "runs", tmp_path / "learning.md", capsys)
    assert "No sweep has been made" in text


def test_an_undecided_claim_says_how_many_pairs_would_decide(undecided_page: str) -> None:
    lines = section(undecided_page, "Inconclusive").splitlines()
    row = next(line for line in lines if "figure9" in line)
    needed = row.split("|")[-2].strip()
    assert needed == "more than 1000" or int(needed) > 5


def test_without_records_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    text = page(tmp_path / "runs", tmp_path / "learning.md", capsys)
    assert "### Reproduced" not in text
    assert "claims about learning, on small policies: 12 not run." in text
    assert {row["verdict"] for row in claim_rows(text)} == {"not run"}
    assert "can and cannot show" not in text
    shutil.rmtree(tmp_path / "runs")


def test_the_page_in_the_repository_is_that_of_the_blessed_records(checks: list[Checked]) -> None:
    committed = PACKAGE.parent / "docs" / "learning.md"
    if not committed.is_file():
        pytest.skip("docs/ is not part of an installed package")
    stale = "stale: python -m repro report --learning docs/learning.md renews it"
    assert learning_text(checks, EXPECTED, committed) == committed.read_text(encoding="utf-8"), (
        stale
    )


def test_the_dose_stands_below_the_claims_where_there_are_records_of_it(
    checks: list[Checked], tmp_path: Path
) -> None:
    trained = {"needle_40", "needle_4", "needle_05", "needle_dose"}
    without = [one for one in checks if one.selection.target.name not in trained]
    bare = learning_text(without, EXPECTED, tmp_path / "learning.md")
    assert "How much noise it takes" not in bare
    assert "Where exploration decides" not in bare
    assert "What entropy is worth" not in bare
    needle = needle_check(slope=-4.0, shift=0.03)
    made = {one.selection.target.name: one for one in (*dose_checks()[:2], needle)}
    names = {one.selection.target.name for one in checks}
    assert set(made) <= names
    merged = [made.get(one.selection.target.name, one) for one in checks]
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "proxy_dose_response.svg").touch()
    text = learning_text(merged, EXPECTED, tmp_path / "learning.md")
    top = above_the_fold(text)
    assert top.index("## The twelve claims") < top.index("## How much noise it takes")
    assert "](figures/proxy_dose_response.svg)" in top
    assert "take off after fewer steps than BF16" in top
    assert "Where exploration decides" in learning_text(checks, EXPECTED, tmp_path / "learning.md")
    assert "NVFP4 would take 0.88" in top
    assert "| `needle_4` | NVFP4 |" in text.split("What entropy is worth", 1)[1]
    words = [word for word in re.split(r"[\s|]+", top) if re.search(r"\w", word)]
    assert len(words) <= 1500


def above_the_fold(text: str) -> str:
    return text.split("<details>", 1)[0]


def claim_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of the table of the twelve, by their heads."""
    lines = [line for line in section(text, "The twelve claims").splitlines() if line[:1] == "|"]
    lines = lines[: lines.index(next(line for line in lines if line.startswith("| 12. "))) + 1]
    heads, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def known_word(verdict: str) -> bool:
    plain = re.sub(r"(, post hoc)?(, q = [\d.]+)?$", "", verdict)
    return plain in CLAIM_WORDS.values() or plain.startswith(f"{NO_DIFFERENCE} ")


def test_the_table_has_twelve_rows_each_with_one_of_the_words(
    checks: list[Checked], tmp_path: Path
) -> None:
    rows = claim_rows(learning_text(checks, EXPECTED, tmp_path / "learning.md"))
    assert [row["claim"].split(".")[0] for row in rows] == [f"{n}" for n in range(1, 13)]
    assert all(known_word(row["verdict"]) for row in rows)
    assert all(row["the paper"] and row["can this show it?"] for row in rows)
    by_verdict = {row["claim"]: re.split("[:;]", row["can this show it?"])[0] for row in rows}
    for row in rows:
        absent, grey = row["verdict"] == "not run", row["verdict"].startswith("not testable")
        assert by_verdict[row["claim"]] == ("not yet" if absent else "no" if grey else "yes")
        assert (row["here"] == "") == absent


def test_what_is_not_folded_takes_two_minutes_and_limits_come_before_verdicts(
    checks: list[Checked], tmp_path: Path
) -> None:
    text = above_the_fold(learning_text(checks, EXPECTED, tmp_path / "learning.md"))
    words = [word for word in re.split(r"[\s|]+", text) if re.search(r"\w", word)]
    assert 300 < len(words) <= 1500
    assert text.index("## What these policies can and cannot show") < text.index("## The twelve")


def test_every_statement_behind_the_twelve_is_declared_and_stands_once() -> None:
    declared = {
        f"{selection.target.name}.{claim.name}"
        for selection in learning_selections()
        for claim in selection.target.claims
    }
    named = [name for claim in TWELVE for name in claim.statements]
    assert len(TWELVE) == 12
    assert set(named) <= declared
    assert len(set(named)) == len(named)
    assert all(claim.decided_by for claim in TWELVE)


def test_the_table_follows_the_verdicts(checks: list[Checked], tmp_path: Path) -> None:
    name = "nvfp4_sooner"
    changed = [
        dataclasses.replace(
            item,
            verdicts=[
                dataclasses.replace(
                    v, status="reproduced", effect=v.paper, low=1.0, high=30.0, q=0, all_seeds=None
                )
                if (item.selection.target.name, v.name) == ("needle_4", name)
                else v
                for v in item.verdicts
            ],
        )
        for item in checks
    ]
    text = learning_text(changed, EXPECTED, tmp_path / "learning.md")
    first = claim_rows(text)[0]
    paper = first["the paper"].split()[0]
    measured = float(first["here"].split()[0])
    assert measured == pytest.approx(float(paper), rel=0.02)
    assert first["verdict"] == "reproduced"
    count = sum(row["verdict"].split(",")[0] == "reproduced" for row in claim_rows(text))
    assert f"{count} reproduced" in text.splitlines()[2]


def test_a_share_is_the_effect_in_units_of_what_the_paper_has(checks: list[Checked]) -> None:
    for row in decided(checks):
        if row.verdict is None or row.verdict.paper is None or row.measured is None:
            continue
        assert row.statement is not None
        assert row.statement.effect is not None
        assert row.statement.effect.paper is not None
        if row.statement.effect.measure == "ratio":
            continue
        paper = 100 * row.statement.effect.paper
        assert row.paper == pytest.approx(paper)
        assert row.verdict.effect is not None
        share = row.at_look or row.measured
        assert share.value == pytest.approx(paper * row.verdict.effect / row.verdict.paper)


def test_a_share_of_a_ratio_is_what_it_differs_from_one_by(checks: list[Checked]) -> None:
    checked = next(item for item in checks if item.selection.target.name == "figure4_dapo")
    at = [claim.name for claim in checked.selection.target.claims].index("nvfp4_grows_faster")
    claim = dataclasses.replace(
        checked.selection.target.claims[at],
        kind="ratio",
        margin=1.0,
        because="no difference",
        effect=Effect(paper=1.5, measure="ratio", place="made up"),
    )
    target = dataclasses.replace(checked.selection.target, claims=(claim,))
    verdict = dataclasses.replace(
        next(v for v in checked.verdicts if v.name == claim.name),
        effect=1.2, low=1.1, high=1.3, paper=1.5, matters=1.04, unit="x",
    )  # fmt: skip
    selection = dataclasses.replace(checked.selection, target=target)
    made = dataclasses.replace(checked, selection=selection, verdicts=[verdict])
    row = decided([made])[0]
    assert row.measured is not None
    ends = (row.measured.value, row.measured.low, row.measured.high)
    assert ends == pytest.approx((20.0, 10.0, 30.0))
    assert row.at_look is None
    assert row.paper == pytest.approx(50.0)
    assert row.half == pytest.approx(10.0)


def test_of_an_early_look_the_page_has_the_estimate_of_all_seeds_and_the_looks_verdict(
    checks: list[Checked], tmp_path: Path
) -> None:
    row = decided(checks)[0]
    assert row.verdict is not None
    every = row.verdict.all_seeds
    assert every is not None
    assert every.low is not None
    assert every.high is not None
    assert row.measured is not None
    assert row.at_look is not None
    assert row.measured.value == pytest.approx(100 * (every.effect - 1))
    assert row.at_look.value == pytest.approx(100 * ((row.verdict.effect or 0.0) - 1))
    assert (row.measured.pairs, row.at_look.pairs) == (every.n, row.verdict.n)
    assert row.half == pytest.approx(50 * (every.high - every.low))
    text = learning_text(checks, EXPECTED, tmp_path / "learning.md")
    first = claim_rows(text)[0]
    assert first["verdict"] == "excluded at the paper's size"
    assert f"all {every.n} seeds" in first["here"]
    assert f"({row.at_look.low:+.2g} to {row.at_look.high:+.2g})" in first["here"]
    statement = next(
        line
        for line in section(text, "Excluded at the paper's size").splitlines()
        if line.startswith(f"| {row.verdict.statement} |") and "`needle_4`" in line
    )
    # A quotient has no sign.
    assert f"all {every.n} seeds: {every.effect:.3g} x" in statement
    assert f"{row.verdict.low:.3g} to {row.verdict.high:.3g}" in statement
    assert f"{every.low:.3g} to {every.high:.3g}" in statement


def test_one_draw_of_a_rounding_or_a_noise_decides_nothing_about_entropy(
    checks: list[Checked],
) -> None:
    (start,) = [one for one in checks if one.selection.target.name == "entropy_start"]
    judged = [verdict for _, verdict in start.statements()]
    assert len(judged) == 16
    assert {verdict.status for verdict in judged} == {"not testable"}
    # The effects stay on the page.
    assert all(verdict.effect is not None for verdict in judged)
    reasons = {claim.name: verdict.sentence for claim, verdict in start.statements()}
    assert "of which there is 1" in reasons["nvfp4_more_entropy_forced"]
    assert "drawn once" in reasons["aqn_more_entropy_forced"]


def test_a_claim_without_records_is_not_run_whatever_its_statement(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    rows = decided(learning_checks(tmp_path / "runs", EXPECTED))
    assert len(rows) == 12
    assert not any(row.is_run for row in rows)


def test_statements_on_arms_at_different_rates_are_marked_and_said_once(
    tmp_path: Path, checks: list[Checked]
) -> None:
    text = learning_text(checks, EXPECTED, tmp_path / "learning.md")
    marked = [line for line in text.splitlines() if line.startswith("|") and "†" in line]
    runs = runs_of_checks(checks)
    qerl, lora, full = (
        rate_text(runs["table1", name].values())
        for name in ("nvfp4_lora", "bf16_lora", "bf16_full")
    )
    assert any("is no worse than full fine-tuning" in line for line in marked) == (qerl != full)
    assert any("NVFP4 LoRA has a higher mean" in line for line in marked) == (qerl != lora)
    rows = [line for line in text.splitlines() if "AQN" in line and "final accuracy" in line]
    # Table 1's own statement; the factorial asks the same of the same runs.
    assert sum("on NVFP4 weights" in line for line in rows) == 0
    own = "adding AQN to NVFP4 LoRA raises the final accuracy | Table 1, `table1` |"
    assert sum(own in line for line in rows) == 1


def test_the_ends_and_limits_are_those_of_the_records(checks: list[Checked]) -> None:
    runs = runs_of_checks(checks)
    by_seed = runs["table1", "bf16_lora"]
    row = next(line for line in ends(runs) if line.startswith("| BF16, LoRA |"))
    shown = sorted({seed for records in runs.values() for seed in records})
    printed = {
        f"seed {seed}": f"{by_seed[seed].value('accuracy'):.1f}" if seed in by_seed else "-"
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
    habit = next(line for line in text.splitlines() if "habit" in line)
    assert all(part in habit for part in ("60 %", "90 %", "`proxy-30m` on levels 4 and 5"))
    assert "1 of 1 ended more than 10 points below" in text
    assert "ceiling is not known" not in text
    assert "another policy" not in text
    text = "\n".join(limits(runs | {("figure13", "bf16_lora"): {5: other}}))
    assert "1 of 1 ended more than 10 points below" in text
    unknown = next(line for line in text.splitlines() if "ceiling is not known" in line)
    assert "60 to 70 % (`proxy-120m` on levels 4 and 5)" in unknown
    assert "`proxy-120m` trained at the rates that the sweep chose for `proxy-30m`" in text


def test_runs_that_round_once_per_seed_are_named(proxy_record: Maker) -> None:
    (selection,) = select(["table1"], tier="proxy")
    run = selection.plan([5], ["bf16_lora"])[0]
    once = with_metrics(proxy_record(run), {"accuracy_greedy": 70.0, "gain_greedy": 10.0})
    scale = once.config["scale"] | {"checkpoint": "proxy-30m-needle4", "permuted": True}
    often = dataclasses.replace(once, config=once.config | {"scale": scale})
    for records, named in (({5: once}, False), ({5: often}, True)):
        text = "\n".join(limits({("table1", "bf16_lora"): records}))
        assert ("`proxy-30m-needle4` one per seed" in text) == named


def test_the_policies_have_a_row_each_of_what_they_show_and_know() -> None:
    records = blessed_records(EXPECTED, Tier.PROXY, "pretrain_proxy")
    lines = policies(records)
    for record in records:
        (row,) = [line for line in lines if line.startswith(f"| `{record.effects['name']}` |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        quality = record.effects["quality"]
        shown = [quality[name] for name in ("greedy", "forced_working", "sampled_pass")]
        assert [float(cells[at]) for at in (1, 3, 5)] == pytest.approx(shown, rel=5e-3)
    assert policies([]) == []


def test_the_rates_of_a_sweep_are_said_once_it_was_made() -> None:
    choice = {
        "records": 8,
        "commits": ["0" * 40],
        "rule": "the best",
        "chosen": {"bf16_full": 5e-5},
        "means": {"bf16_full": {"2.5e-05": 60.0, "5e-05": 64.0, "0.0001": 61.0, "0.0002": 3.0}},
    }
    text = "\n".join(rates_of_skill(choice))
    assert "5e-05" in text
    assert "0.0001: 61" in text
    assert "LoRA" not in text
    both = choice | {
        "chosen": {"bf16_full": 5e-5, "every_arm": 3e-4},
        "means": choice["means"] | {"every_arm": {"0.0003": 71.0}},
    }
    lines = rates_of_skill(both)
    assert lines[0] == rates_of_skill(choice)[0]
    assert any("LoRA" in line and "0.0003: 71" in line for line in lines)
    assert rates_of_skill(None) == []


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
    checks: list[Checked], on_other_device: Callable[..., Checked], tmp_path: Path
) -> None:
    table1 = next(item for item in checks if item.selection.target.name == "table1")
    other = on_other_device(table1)
    flipped = [
        dataclasses.replace(item, status="reproduced", effect=3.0, low=2.0, high=4.0)
        if item.name == "aqn_helps"
        else item
        for item in other.verdicts
    ]
    checks = [table1, dataclasses.replace(other, verdicts=flipped)]
    text = learning_text(checks, EXPECTED, tmp_path / "learning.md")
    assert text.count("claims about learning, on small policies") == 2
    lines = section(text, "Devices differ").splitlines()
    one, two = [line for line in lines if "adding AQN" in line]
    assert "| H200 |" in one
    assert "| not testable here, post hoc |" in one
    assert "| H100 |" in two
    assert "| reproduced, post hoc |" in two
    assert "| +3 points |" in two
    rows = section(text, "Not testable here")
    assert rows.count("| H100 |") > 0
    for device in ("NVIDIA H200", "NVIDIA H100"):
        assert text.count(f"\n**{device}**\n") > 2
    runs = [line for line in text.splitlines() if line.startswith("| table1 | `")]
    assert [line.split("|")[5].strip() for line in runs] == ["NVIDIA H200", "NVIDIA H100"]


def test_a_row_has_the_papers_size_here_beside_the_interval(
    checks: list[Checked], tmp_path: Path
) -> None:
    text = learning_text(checks, EXPECTED, tmp_path / "learning.md")
    lines = section(text, "Excluded at the paper's size").splitlines()
    (row,) = [line for line in lines if "NVFP4 LoRA without added noise" in line]
    cells = [cell.strip() for cell in row.split("|")]
    heads = [cell.strip() for cell in lines[1].split("|")]
    by_head = dict(zip(heads, cells, strict=True))
    high = float(by_head["interval"].split(" to ")[1])
    assert high < float(by_head["the paper's size here"].split()[0])
    assert by_head["the paper's difference"] == "+7.2 (3B), +0.4 (7B)"


def test_what_is_not_testable_has_its_reason(checks: list[Checked], tmp_path: Path) -> None:
    text = learning_text(checks, EXPECTED, tmp_path / "learning.md")
    rows = [row for row in section(text, "Not testable here").splitlines() if "`" in row]
    reasons = (
        *("below 100", "unit of replication", "by its design", "its positive control"),
        *("no quotient is left", "accuracy no longer rises"),
    )
    assert len(rows) > 10
    assert all(any(reason in row for reason in reasons) for row in rows)


def test_the_statement_that_takes_over_decides_once_its_planned_runs_are_there(
    checks: list[Checked],
) -> None:
    by_name = statements(checks)
    for claim in TWELVE:
        if claim.then and claim.decided_by in by_name:
            checked, statement, verdict = by_name[claim.decided_by]
            for status, name in (("not run", claim.decided_by), ("excluded", claim.then)):
                later = dataclasses.replace(verdict, status=status, effect=None)
                row = twelve._decided(claim, by_name | {claim.then: (checked, statement, later)})
                assert row.name == name
                assert row.remark == (claim.remark if name != claim.then else claim.then_remark)
            # A seed more was planned than there is: what is there decides nothing yet.
            planned = (*checked.evidence.planned, 10**6)
            evidence = dataclasses.replace(checked.evidence, planned=planned)
            later = dataclasses.replace(verdict, status="excluded", effect=None)
            partial = dataclasses.replace(checked, evidence=evidence), statement, later
            row = twelve._decided(claim, by_name | {claim.then: partial})
            assert row.name == (claim.then if checked.selection.target.looks else claim.decided_by)


def test_a_folder_that_does_not_exist_is_refused_and_no_page_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert main(["report", "--learning", str(page), "--runs", str(tmp_path / "rnus")]) == 2
    assert "rnus does not exist" in capsys.readouterr().err
    assert not page.exists()
