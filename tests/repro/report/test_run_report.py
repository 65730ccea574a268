"""The report of a run: what a reader finds in it, from records alone."""

import dataclasses
import shutil

import pytest

from figures.__main__ import draw_reported
from repro.__main__ import build_parser, main
from repro.evidence.record import failed_record
from repro.judge.recorded import recorded_selections
from repro.run.select import Changes, select, selections_of
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import with_accuracy


def report(runs):
    assert main(["report", "table1", "--tier", "smoke", "--runs", str(runs)]) == 0
    return (runs / "report.md").read_text(encoding="utf-8")


def row_of(text, label):
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_report_has_the_papers_cells_and_the_verdict_of_every_claim(table1_records, tmp_path):
    def fixed(record):
        return with_accuracy(record, accuracy=80.0 + record.seed)

    table1_records(tmp_path, lambda r: fixed(r) if r.arm == "nvfp4_lora_aqn" else r)
    text = report(tmp_path)
    # Mean of 80 to 84; 2.776 * 1.5811 / sqrt(5) is 1.96.
    cells = row_of(text, "NVFP4, LoRA + AQN (QeRL)")
    assert cells[1:] == ["83.7", "90.8", "82.0 ± 2.0 (n = 5)"]
    assert f"`{'0' * 40}`" in text
    assert all(f"## {figure}" in text for figure in ("Fig. 4", "Fig. 5", "Fig. 8"))
    for claim in find("table1").claims:
        line = next(line for line in text.splitlines() if claim.statement in line)
        expected = "holds" if claim.mechanism else "not tested: needs a larger model"
        assert f"**{expected}**" in line


def test_refused_and_failed_records_are_named(table1_records, tmp_path):
    table1_records(tmp_path, lambda r: dataclasses.replace(r, facts={}) if r.arm == "nf4" else r)
    (tmp_path / "smoke/table1/bf16_full/seed-1.json").unlink()
    run = plan(find("table1"), Tier.SMOKE, [1], ["bf16_full"])[0]
    failed_record(run, "OutOfMemoryError: 3 GiB", {}).write(tmp_path)
    text = report(tmp_path)
    assert "refused: `seed-0.json`: facts.linears is missing" in text
    assert "failed: `bf16_full/seed-1.failed-1.json`" in text
    assert row_of(text, "NF4, untrained")[-1] == "-"


def test_what_a_failed_run_says_is_shown_as_text(table1_records, tmp_path, capsys):
    table1_records(tmp_path)
    for seed in range(5):
        (tmp_path / f"smoke/table1/bf16_full/seed-{seed}.json").unlink()
        run = plan(find("table1"), Tier.SMOKE, [seed], ["bf16_full"])[0]
        failed_record(run, "E: [/INST] <script>x</script> \x1b[2J\x9b2J", {}).write(tmp_path)
    text = report(tmp_path)
    main(["check", "table1", "--tier", "smoke", "--runs", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "[/INST] &lt;script>x&lt;/script> ?[2J?2J" in text
    assert "<script" not in text
    assert "[/INST]" in shown
    assert not any(sign in f"{text}{shown}" for sign in "\x1b\x9b")


@pytest.mark.parametrize(
    "flags",
    [
        "--set arm.lora_rank=8",
        "--set arm.noise.sigma_start=0.02 --limit 8",
        "--steps 9 --set prompt_template=boxed --set optimizer.max_grad_norm=0.5",
    ],
)
def test_runs_with_other_settings_are_reported(flags, made_up_record, tmp_path):
    line = ["table1", "--tier", "smoke", *flags.split()]
    (selection,) = selections_of(build_parser().parse_args(["plan", *line]))
    for run in selection.plan([0], ["bf16", "nvfp4_lora_aqn"]):
        made_up_record(run).write(tmp_path)
    runs, name = ["--runs", str(tmp_path)], selection.target.name
    (known,) = recorded_selections(None, tmp_path)
    assert known.target.arms == selection.target.arms
    assert known.target.claims == selection.target.claims
    assert known.target.scales[Tier.SMOKE] == selection.target.scales[Tier.SMOKE]
    texts = []
    for words in ([], line):
        assert main(["report", *words, *runs]) == 0
        texts.append((tmp_path / "report.md").read_text())
        row = next(line for line in texts[-1].splitlines() if line.startswith(f"| {name} "))
        assert row.split("|")[2:4] == [" smoke ", " 2 records "]
    assert texts[0].split("\n## ")[0] == texts[1].split("\n## ")[0]
    assert "is not the target's" not in texts[0]
    assert main(["check", *runs]) == main(["check", *line, *runs])
    for run in plan(find("table1"), Tier.SMOKE, [0], ["bf16"]):
        made_up_record(run).write(tmp_path)
    names = [item.target.name for item in recorded_selections(None, tmp_path)]
    assert (names[0], names[-1]) == ("table1", name)


def test_a_report_without_records_says_how_to_see_some(made_up_record, tmp_path, capsys):
    assert main(["report", "--runs", str(tmp_path)]) == 2
    assert "python -m repro run table1" in capsys.readouterr().err
    (selection,) = select(["table1"], tier="smoke", changes=Changes(steps=4))
    for run in selection.plan([0], ["bf16_lora"]):
        made_up_record(run).write(tmp_path)
    assert main(["report", "table1", "--tier", "smoke", "--runs", str(tmp_path)]) == 2
    assert f"python -m repro check --runs {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()


def test_runs_whose_settings_cannot_be_read_back_are_named(table1_records, tmp_path, capsys):
    table1_records(tmp_path)
    for name in ("table1_in_4_steps", "nobody_s"):
        shutil.copytree(tmp_path / "smoke/table1", tmp_path / "smoke" / name)
    for path in (tmp_path / "smoke/table1_in_4_steps").glob("*/*.json"):
        path.write_text("[]")
    report(tmp_path)
    assert main(["report", "--runs", str(tmp_path)]) == 0
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == [
        str(tmp_path / "smoke" / name) for name in ("nobody_s", "table1_in_4_steps")
    ]


def test_pictures_are_drawn_beside_the_report(made_up_record, tmp_path, monkeypatch, every_blessed):
    monkeypatch.setattr("figures.__main__.blessed_checks", lambda expected: every_blessed)
    for run in plan(find("table1"), Tier.SMOKE, 2, ["bf16_lora", "nvfp4_lora_aqn"]):
        made_up_record(run).write(tmp_path)
    draw_reported(build_parser().parse_args(["report", "--runs", str(tmp_path)]))
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {name for name in drawn if name.endswith("png")} == {
        f"smoke_table1_{name}_curves.png" for name in ("entropy", "length", "reward")
    }
    assert "paper" not in drawn, "no target is named"
    text = report(tmp_path)
    assert all(f"(figures/{name})" in text for name in drawn if name.endswith("png"))
    draw_reported(build_parser().parse_args(["report", "table1", "--runs", str(tmp_path)]))
    drawn = {path.name for path in (tmp_path / "figures" / "paper").iterdir()}
    assert drawn == {f"table1.{kind}" for kind in ("png", "svg", "pdf", "csv")}
    assert "figures/paper" not in report(tmp_path), "stored runs are in them, too"


def test_reproduce_goes_through_to_report_and_verdicts(tmp_path, monkeypatch, capsys):
    drawn: list[str] = []
    monkeypatch.setattr("repro.run.execute.main_run", lambda args: 0)
    monkeypatch.setattr("figures.__main__.draw_reported", lambda args: drawn.extend(args.targets))
    options = ["--tier", "smoke", "--seeds", "1", "--runs", str(tmp_path)]
    status = main(["reproduce", "table1", *options])
    assert "no record of table1" in capsys.readouterr().err
    assert drawn == ["table1"]
    assert not (tmp_path / "report.md").exists()
    assert status == main(["check", "table1", "--tier", "smoke", "--runs", str(tmp_path)])
    capsys.readouterr()
