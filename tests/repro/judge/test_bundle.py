"""Bundles: judged elsewhere they say the same; nothing in one is obeyed, or reaches a disk."""

import dataclasses
import lzma
import tracemalloc
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.derived import share_of
from repro.evidence.record import Estimate
from repro.evidence.store import Blessed, stored_text
from repro.judge import bundle
from repro.report.one_page import REPORTED, page_text, reported_rows, reports
from repro.run.places import expected_folder
from repro.run.select import select
from repro.spec.config import digest_of
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import honest_record, on_device

EXPECTED = expected_folder(None)
MARKUP = "<script>alert(1)</script>![x](http://x.test/y)\x1b[2J|"


@pytest.fixture
def packed(tmp_path, capsys):
    """Return a bundle of Table 1's two arms with two seeds each, whose runs lie beside it."""
    for run in plan(find("table1"), Tier.SMOKE, 2, ["bf16_lora", "nvfp4_lora_aqn"]):
        honest_record(run).write(tmp_path / "runs")
    file = tmp_path / "reported" / "somebody" / "table1.jsonl.xz"
    line = ["bundle", str(file), "table1", "--tier", "smoke", "--runs", str(tmp_path / "runs")]
    assert main(line) == 0
    assert main(line) == 2, "a bundle is never overwritten"
    capsys.readouterr()
    return file


def text_of(file):
    return lzma.decompress(file.read_bytes()).decode()


def replace(file, *records):
    """Put other records, each with its own seal, into a bundle."""
    head = text_of(file).splitlines(keepends=True)[0]
    file.write_bytes(lzma.compress((head + stored_text(records)).encode()))


def first(file):
    return bundle.read_bundle(file).records[0]


def test_a_bundle_is_judged_as_the_runs_are(packed, tmp_path, capsys):
    main(["check", "table1", "--tier", "smoke", "--runs", str(tmp_path / "runs")])
    said = capsys.readouterr().out
    for place in (packed, tmp_path / "reported"):
        assert main(["bundle", "--verify", str(place)]) == 0
        assert capsys.readouterr().out == said
    assert "4 records" in said


def test_blessed_records_are_packed_and_judged_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, file = ["table1_coder_0_5b", "--tier", "mini"], Path("theirs.jsonl.xz")
    stored = Blessed(EXPECTED, "mini", "nvidia_h100_80gb_hbm3")
    (selection,) = select(name[:1], tier="mini")
    assert "56 records of table1_coder_0_5b" in bundle.pack(selection, stored, file)
    assert file.stat().st_size < 200_000  # 49 runs of 200 steps
    assert main(["check", *name, "--blessed"]) == 0
    blessed = capsys.readouterr().out
    assert main(["bundle", "--verify", str(file)]) == 0
    judged = capsys.readouterr().out.splitlines(keepends=True)
    (as_before,) = (line for line in judged if "since blessed" in line)
    assert as_before.split()[1:3] == ["values", "unchanged"]
    assert "".join(line for line in judged if line != as_before) == blessed
    assert "H100" in blessed
    assert [path.name for path in tmp_path.rglob("*")] == [file.name]


HEAD = '{"target": "table1", "tier": "smoke"}\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "first line"),
        ("[" * 100_000, ""),
        ("[]", "first line is []; needed"),
        (HEAD + "7", "line is 7; needed"),
        ('{"target": "../../etc", "tier": "smoke"}', ""),
        ('{"target": ["table1"], "tier": {}}', "first line is {'target': ['table1'], 'tier': {}}"),
        (HEAD + '{"schema": 1e999}', ""),
        (HEAD + '{"series": "reward", "values": [[1]]}', ""),
        (HEAD + '{"schema": NaN}', ""),
        (HEAD + '{"schema": ' + "9" * 4000 + "}", ""),
        # Small files that grow when they are read are refused early.
        (HEAD + "x" * (bundle.MOST_BYTES + 1), "larger than"),
        (HEAD + "[" + "[]," * 1_000_000 + "[]]", "values"),
        (HEAD + "{}\n" * 100_000, "lines"),
        (HEAD + "[" * 1_000_000, "RecursionError"),
    ],
    ids=lambda text: text[-20:],
)
def test_what_is_no_bundle_is_a_sentence(packed, text, why, capsys):
    packed.write_bytes(lzma.compress(text.encode()))
    tracemalloc.start()
    assert main(["bundle", "--verify", str(packed)]) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1
    assert len(said) < 1_000
    assert peak < 100e6


def test_damaged_linked_and_bloated_files_are_a_sentence(packed, monkeypatch):
    whole = packed.read_bytes()
    wide = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 2**28}]
    for damaged in [b"", whole[:-9], whole + whole, lzma.compress(b"x", filters=wide)]:
        packed.write_bytes(damaged)
        assert main(["bundle", "--verify", str(packed)]) == 2
    packed.unlink()
    beside = packed.with_name("another")
    beside.write_bytes(whole)
    packed.symlink_to(beside)
    assert main(["bundle", "--verify", str(packed)]) == 2
    monkeypatch.setattr(bundle, "MOST_BYTES", 1_000)
    beside.replace(packed)
    assert main(["bundle", "--verify", str(packed)]) == 2


def test_tallies_of_more_problems_than_there_are_are_refused_at_once():
    with pytest.raises(ValueError, match="problems"):
        share_of((10**12, 1))
    with pytest.raises(ValueError, match="problems"):
        share_of((-(10**9), 10**9))


def test_edited_foreign_and_repeated_records_count_for_nothing(packed, capsys):
    good = first(packed)
    elsewhere = dataclasses.replace(good, arm="../../../../tmp/arm", seed=1)
    config = good.config | {"target": "table9"}
    foreign = dataclasses.replace(good, config=config, digest=digest_of(config), seed=1)
    replace(packed, good, elsewhere, foreign)
    assert main(["bundle", "--verify", str(packed)]) == 1
    assert capsys.readouterr().out.count("\nrefused ") == 2
    # Records of many commits are refused before git is asked.
    many = [dataclasses.replace(good, seed=n, commit=f"{n:040x}") for n in range(30)]
    for records, why in (([good, good], "twice"), (many, "commits")):
        replace(packed, *records)
        assert main(["bundle", "--verify", str(packed)]) == 2
        assert why in capsys.readouterr().err
    replace(packed, good)
    packed.write_bytes(lzma.compress(text_of(packed).replace('"arm":"bf16', '"arm":"nf4').encode()))
    assert main(["bundle", "--verify", str(packed)]) == 2
    assert "seal" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [
        {"environment": {"gpu": [{"name": ["a"]}, 7]}},
        {"environment": {"gpu": [7]}},
        {"facts": {"optimizer_steps": "many"}},
        {"metrics": {"accuracy": Estimate(value=10**19, unit="percent")}},
        {"outcome": {}},
        {"seed": 10**18},
    ],
    ids=str,
)
def test_values_that_no_run_leaves_are_refused_or_a_sentence_and_never_more(packed, values):
    replace(packed, dataclasses.replace(first(packed), **values))
    assert main(["bundle", "--verify", str(packed)]) in (0, 1, 2)
    page_text([], EXPECTED, reports(packed.parents[1], EXPECTED))
    assert [line[:12] for line in reported_rows(packed.parents[1], EXPECTED)[2:]] == [
        "| somebody |",
        "",
    ]


def test_a_record_that_names_code_imports_none(packed, tmp_path, monkeypatch):
    (tmp_path / "planted_reward.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w')\ndef pay(completions, answers): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    good = first(packed)
    config = good.config | {"reward": "planted_reward:pay"}
    config["scale"] = config["scale"] | {"reward": "planted_reward:pay"}
    replace(packed, dataclasses.replace(good, config=config, digest=digest_of(config)))
    before = sorted(tmp_path.rglob("*"))
    assert main(["bundle", "--verify", str(packed)]) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_pages_show_what_others_report_as_theirs_and_obey_none_of_it(packed, capsys):
    good = first(packed)
    failed = {"status": "failed", "reason": MARKUP}
    loud = on_device(dataclasses.replace(good, outcome=failed, seed=1), MARKUP)
    replace(packed, on_device(good, MARKUP), loud)
    main(["bundle", "--verify", str(packed)])
    assert "\x1b" not in capsys.readouterr().out
    found = reports(packed.parents[1], EXPECTED)
    page = page_text([], EXPECTED, found)
    assert page.count("<script>") == 1
    assert "somebody: table1, smoke tier" in page
    assert good.commit[:12] in page
    row = reported_rows(packed.parents[1], EXPECTED)[2]
    assert "<script" not in row.lower()
    assert "![" not in row
    assert row.count("|") - row.count("\\|") == 4
    assert row.startswith("| somebody | table1, smoke tier")


def test_one_broken_file_costs_itself_alone(packed, capsys):
    place = packed.parents[1]
    other = place / "other"
    other.mkdir()
    (other / "notes.txt").write_text("no bundle")
    (other / "half.jsonl.xz").write_bytes(packed.read_bytes()[:-9])
    (other / "\udcff.jsonl.xz").write_bytes(b"")
    (place / "link").symlink_to(packed.parent)
    found = {(one.who, one.title): one for one in reports(place, EXPECTED)}
    assert len(found) == 4
    assert sum(one.checked is not None for one in found.values()) == 1
    assert "link" in found["link", packed.name].summary
    page_text([], EXPECTED, list(found.values())).encode()
    rows = reported_rows(place, EXPECTED)
    assert sum(row.startswith("|") for row in rows) == 2 + len(found)
    assert str(place) not in "".join([*rows, *(one.summary for one in found.values())])
    assert main(["bundle", "--verify", str(place)]) == 2
    printed = capsys.readouterr()
    assert "4 records" in printed.out
    assert "half.jsonl.xz" in printed.err
    packed.unlink()
    (place / "link").unlink()
    (other / "half.jsonl.xz").unlink()
    (other / "\udcff.jsonl.xz").unlink()
    assert reports(place, EXPECTED) == []


def test_runs_that_two_sent_or_that_are_blessed_here_are_said_to_be(packed, capsys):
    place = packed.parents[1]
    assert main(["bundle", "--verify", str(place)]) == 0
    (place / "other").mkdir()
    (place / "other" / "mine.jsonl.xz").write_bytes(packed.read_bytes())
    capsys.readouterr()
    assert main(["bundle", "--verify", str(place)]) == 1
    printed = capsys.readouterr().out
    assert "elsewhere, too: other/mine.jsonl.xz" in printed
    assert "elsewhere, too: somebody/table1.jsonl.xz" in printed
    for one in reports(place, EXPECTED):
        assert "elsewhere, too" in one.summary
    (selection,) = select(["table1"], tier="smoke")
    packed.unlink()
    (place / "other" / "mine.jsonl.xz").unlink()
    bundle.pack(selection, Blessed(EXPECTED, "smoke", None), packed)
    (one,) = reports(place, EXPECTED)
    assert "blessed here" in one.summary


def test_every_bundle_that_others_sent_can_be_judged():
    if not REPORTED.is_dir():
        pytest.skip("reported/ is part of a checkout alone")
    for one in reports(REPORTED, EXPECTED):
        assert one.checked is not None, one.summary
        assert not one.checked.evidence.refused
