"""At the paper's tier, measured accuracies are held against the printed ones."""

import pytest
from scipy import stats

from repro.judge.check import check_selection
from repro.run.places import expected_folder
from repro.run.select import Selection
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import with_accuracy


def checked(runs, name):
    target = find(name)
    selection = Selection(target=target, tier=Tier.PAPER)
    return check_selection(selection, runs, expected_folder(None))


def write_accuracies(make, runs, name, arm, values):
    for run, value in zip(plan(find(name), Tier.PAPER, len(values), [arm]), values, strict=True):
        with_accuracy(make(run), accuracy=value).write(runs)


@pytest.mark.parametrize(
    ("name", "values", "status"),
    [
        ("table1", [90.6, 90.8, 91.0, 90.7, 90.9], "reproduced"),
        ("table1_3b", [90.6, 90.8, 91.0, 90.7, 90.9], "contradicted"),
        ("table1", [66.1, 66.5, 66.9, 66.4, 66.6], "contradicted"),
        ("table1", [85.0, 91.0, 95.0, 88.0, 92.0], "inconclusive"),
    ],
)
def test_a_printed_value_is_judged(name, values, status, made_up_record, tmp_path):
    write_accuracies(made_up_record, tmp_path, name, "nvfp4_lora_aqn", values)
    outcome = checked(tmp_path, name)
    verdict = next(v for v in outcome.verdicts if v.name == "nvfp4_lora_aqn.accuracy")
    assert verdict.status == status
    assert verdict.about == "paper value"
    assert outcome.sound, "what the paper printed is never this suite's fault"
    if name == "table1":
        wilson = stats.binomtest(round(0.908 * 1319), 1319).proportion_ci(method="wilson")
        low, high = (float(word) for word in verdict.statement.split(": ")[1].split()[0:3:2])
        assert low == pytest.approx(100 * wilson.low, abs=0.05)
        assert high == pytest.approx(100 * wilson.high, abs=0.05)
        assert "Table 1: 90.8" in verdict.source


def test_arms_with_learning_rates_of_their_own_are_compared_with_a_caveat(made_up_record, tmp_path):
    for arm, value in (("nvfp4_lora", 88.5), ("bf16_lora", 88.1)):
        values = [value + 0.1 * seed for seed in range(5)]
        write_accuracies(made_up_record, tmp_path, "table1", arm, values)
    verdict = next(v for v in checked(tmp_path, "table1").verdicts if v.name == "nvfp4_beats_lora")
    assert "nvfp4_lora 1e-05, bf16_lora 5e-06" in verdict.sentence
