"""README's rows: each value from the records, each word that of the statements that decide it."""

import dataclasses
import re

import pytest

from repro.evidence.paper import paper_cells
from repro.evidence.verdicts.verdict import SHOWN
from repro.report.doses import paper_rises
from repro.report.numbers import span
from repro.report.readme import answer_lines, answer_rows, answers, short_word
from repro.report.systems_rates import comparisons
from repro.report.tidy import statements
from repro.run.places import PACKAGE, expected_folder
from repro.run.select import Selection
from repro.spec.tier import Tier
from repro.targets import find, paper_effects

EXPECTED = expected_folder(None)
H100 = "nvidia_h100_80gb_hbm3"


def rows(checks):
    lines = [line for line in answer_rows(checks, EXPECTED) if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[2] != "-"]


def word(cell):
    """Return the word of a cell that links to the exact verdicts, without the mark of timings."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).replace(", within one process", "")


def test_verdicts_that_differ_between_devices_are_named_by_device(blessed_of):
    checked, other = blessed_of("table6"), blessed_of("table6", device=H100)
    worse = [dataclasses.replace(item, status="contradicted") for item in other.verdicts]
    checks = [checked, dataclasses.replace(other, verdicts=worse)]
    assert word(rows(checks)[1][3]) == "H200: holds<br>H100: does not hold"
    found = answers(checks, EXPECTED)
    assert answer_lines(found) == {
        "mixed, within one process": [f"{found[0].asked['text']}."],
        "not tested": [f"{item.asked['text']}." for item in found[1:]],
    }


def test_the_rollouts_span_and_statements_are_those_of_the_tables(checks_of, blessed_of):
    pairs = [p for n in "5678" for p in comparisons(blessed_of(f"table{n}"), EXPECTED)]
    ratios = [pair.ratio.value for pair in pairs]
    span_text = f"{min(ratios):.2f} to {max(ratios):.2f}x"
    assert rows(checks_of())[1][2].partition(";")[0] == f"3B to 32B<br>H200: {span_text}"
    (decided,) = answers(checks_of(), EXPECTED)[0].verdicts.values()
    assert decided == [pair.verdict for pair in pairs if pair.verdict is not None]


def test_a_folded_adapter_stands_beside_the_papers_baseline_and_decides_nothing(blessed_of):
    checked, target = blessed_of("table6"), find("table6_folded")
    as_if = dataclasses.replace(
        checked.verdicts[0],
        name="faster_than_bf16_lora_folded_7b_1",
        source=target.source,
        status="contradicted",
        effect=0.9,
    )
    folded = dataclasses.replace(
        checked,
        selection=dataclasses.replace(checked.selection, target=target),
        verdicts=[as_if, dataclasses.replace(as_if, effect=1.4)],
    )
    row = rows([checked, folded])[1]
    assert row[2].endswith("x; over merged LoRA, 7B: 0.90 to 1.40x")
    assert word(row[3]) == "holds"


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        (["reproduced", "reproduced", "not run"], "holds"),
        (["contradicted", "excluded"], "does not hold"),
        (["reproduced", "contradicted", "inconclusive"], "mixed"),
        (["reproduced", "inconclusive"], "undecided"),
        (["below a tenth"], "mixed"),
        (["no difference"], "does not hold"),
        (["not run"], "not tested"),
        ([], "not tested"),
    ],
)
def test_one_word_says_what_all_deciding_statements_say(blessed_of, statuses, said):
    verdict = dataclasses.replace(blessed_of("table6").verdicts[0], marks={})
    assert short_word([dataclasses.replace(verdict, status=item) for item in statuses]) == said
    marked = [
        dataclasses.replace(verdict, status=item, marks={"post hoc": "late"}, q=0.14)
        for item in statuses
    ]
    shown = ", q >= 5 %" if set(statuses) & set(SHOWN) else ""
    assert short_word(marked) == (said if said == "not tested" else f"{said}, post hoc{shown}")


def test_what_reviewers_should_expect_is_what_was_measured(every_blessed):
    page = PACKAGE.parent / "docs" / "reproduce.md"
    if not page.is_file():
        pytest.skip("docs/ is not part of an installed package")
    text = page.read_text(encoding="utf-8")
    found = answers(every_blessed, EXPECTED)
    spans = [next(iter(item.measured.values()), "").partition("; ")[0] for item in found]
    ratios = [measured for measured in spans if re.fullmatch(r"[\d.]+ to [\d.]+x", measured)]
    assert len(ratios) == 3
    assert all(measured in text for measured in ratios)


def test_a_row_names_the_models_of_its_statements(every_blessed):
    by_text = {(row.name, row.because): row for row in statements(every_blessed, EXPECTED)}
    for item in answers(every_blessed, EXPECTED):
        verdicts = [verdict for of_device in item.verdicts.values() for verdict in of_device]
        decided = [by_text[verdict.name, verdict.sentence] for verdict in verdicts]
        models = {re.findall(r"\d[\d.]*B", row.model)[-1] for row in decided}
        ends = sorted(models, key=lambda size: float(size[:-1]))
        named = re.findall(r"\d[\d.]*B", item.asked["models"])
        assert named in ([], ends, [*ends[:1], *ends[-1:]])
        assert bool(named) == bool(ends)
        assert all("this project's" in row.kernels for row in decided if "nvfp4" in row.arms)


def test_what_no_real_model_was_asked_says_so(checks_of, blessed_of):
    for row in rows(checks_of(tier=Tier.SYSTEMS))[5:]:
        assert (row[2], word(row[3])) == ("", "not tested")
    smoke = blessed_of("table1", Tier.SMOKE)
    shown = [
        dataclasses.replace(item, status="excluded", effect=1.5, low=-1.0, high=4.0)
        for item in smoke.verdicts
        if item.name in ("aqn_helps", "qerl_beats_lora")
    ]
    targets = map(find, ("table1_coder_0_5b", "learning_coder_1_5b_details"))
    selections = [Selection(target=target, tier=Tier.MINI) for target in targets]
    row, other = (
        rows([dataclasses.replace(smoke, selection=one, verdicts=shown)])[8] for one in selections
    )
    assert row[1] == other[1] == "QeRL +2.7, AQN +2.3 points (7B)"
    assert row[2].endswith("QeRL +1.5 points (-1.0 to +4.0), AQN +1.5 points (-1.0 to +4.0)")
    assert (word(row[3]), other[2], word(other[3])) == ("does not hold", "", "not tested")


def test_a_row_that_waits_is_shown_once_its_claims_have_intervals(blessed_of):
    checked = blessed_of("rates_coder_0_5b", Tier.MINI)
    few = [dataclasses.replace(item, low=None, high=None) for item in checked.verdicts]
    many = [
        dataclasses.replace(item, status="reproduced", effect=2, low=1.5, high=3, marks={}, q=None)
        for item in few
    ]
    before, after = (rows([dataclasses.replace(checked, verdicts=of)]) for of in (few, many))
    assert before == [*after[:9], *after[10:]]
    _, paper, measured, verdict = after[9]
    rates = find("table1").scales[Tier.PAPER].optimizer.learning_rates
    assert f"at {rates.lora_4bit / rates.lora_16bit:g}x LoRA's" in paper
    said = "2.00x (1.50 to 3.00)"
    assert measured.endswith(f"H200: at half the rate {said}, at a tenth at least {said}")
    assert word(verdict) == "holds"


def test_the_papers_values_are_those_of_its_cells(every_blessed):
    small, _, _, _, entropy, worth, sooner, accuracy, *_, last = (
        item.asked["paper"] for item in answers(every_blessed, EXPECTED)
    )
    ratios = [p.paper for c in every_blessed if c.selection.target.name in "table5 table6 table7 "
              "table8" for p in comparisons(c, EXPECTED)]  # fmt: skip
    assert small == span(ratios)
    assert entropy == f"{paper_rises(EXPECTED)['nvfp4_lora']:+.3f} nats (7B)"
    of = {cell.arm: cell.value for cell in paper_cells(EXPECTED, "table1")
          if (cell.column, cell.quantity) == ("7B", "accuracy")}  # fmt: skip
    qerl = of["nvfp4_lora_aqn"]
    steps = paper_effects.FORMAT_TAKE_OFF.paper
    assert worth == f"{steps:.2f}x, {qerl - of['bf16_lora']:+.1f} points (7B)"
    assert sooner == f"NVFP4 {steps:.2f}x, QeRL {paper_effects.QERL_TAKE_OFF.paper:.2f}x (7B)"
    gains = f"QeRL {qerl - of['bf16_lora']:+.1f}, AQN {qerl - of['nvfp4_lora']:+.1f} points (7B)"
    assert (accuracy, last) == (gains, f"{qerl:g} %")


def test_without_records_there_is_no_table():
    assert answer_rows([], EXPECTED) == ["No records are blessed yet."]
