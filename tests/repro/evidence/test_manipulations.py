"""A record that shows that something was not done is refused; metrics are what it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repro.__main__ import main
from repro.evidence.record import SEAL, read_record, seal_of
from repro.judge.check import check_selection
from repro.judge.gathering import gather
from repro.run.select import Selection
from repro.spec.config import digest_of
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.evidence.edits import Edit, change, drop, put
from tests.repro.recorded_smoke import SELECTION, SMALL, place

TABLE1 = Selection(target=find("table1"), source=find("table1"), tier=Tier.SMOKE)
ARM = "nvfp4_lora_aqn"


def edited(path: Path, edit: Callable[[Any], None]) -> None:
    """Edit a record, its digest and seal made again."""
    raw = json.loads(path.read_text())
    edit(raw)
    raw["digest"] = digest_of(raw["config"])
    if SEAL in raw:
        raw[SEAL] = seal_of({key: value for key, value in raw.items() if key != SEAL})
    path.write_text(json.dumps(raw))


# The edit of a record of the QeRL arm, and words of the refusal.
NOT_DONE: dict[str, tuple[Edit, str]] = {
    "a series cut in half": (
        change("series.entropy", lambda values: values[:3]),
        "3 values; 6 steps",
    ),
    "no series": (put("series", {}), "series.loss is missing"),
    "a constant learning rate": (
        change("series.learning_rate", lambda values: [values[-1]] * len(values)),
        "series.learning_rate at step 0",
    ),
    "another sigma": (
        change("series.sigma", lambda values: [2 * value for value in values]),
        "series.sigma at step 1",
    ),
    "another stage": (
        change("series.noise_stage", lambda values: [0] * len(values)),
        "series.noise_stage at step 1",
    ),
    "27 linears of 28": (put("effects.linears", {"nvfp4": 27}), "effects.linears"),
    "a rounding that the arm has not": (
        put(
            "effects.rounding",
            {"format": "int3", "factor": 1.0, "projections": 28, "relative_change_mean": 0.2},
        ),
        "effects.rounding",
    ),
    "another order of channels": (put("effects.order", 3), "effects.order"),
    "one adapter": (put("effects.adapter_modules", 1), "effects.adapter_modules"),
    "ten parameters": (put("effects.parameters_trainable", 10), "effects.parameters_trainable"),
    "no weight error": (
        put("effects.relative_weight_error_mean", None),
        "effects.relative_weight_error_mean",
    ),
    "another precision": (put("effects.compute", "float16"), "effects.compute"),
    "one norm perturbed": (put("effects.noise.modules", 1), "effects.noise.modules"),
    "five channels perturbed": (
        put("effects.noise.channels_changed", 5),
        "effects.noise.channels_changed",
    ),
    "noise of another form": (put("effects.noise.form", "as_released"), "effects.noise.form"),
    "every grade dropped": (
        change("effects.grades", lambda grades: {"unparsable_gold": sum(grades.values())}),
        "effects.grades",
    ),
    "a tenth of the grades late": (
        change(
            "effects.grades", lambda grades: grades | {"timeout": 1 + sum(grades.values()) // 10}
        ),
        "over the time limit",
    ),
    "no grades": (drop("effects.grades"), "effects.grades is missing"),
    "no answers": (drop("effects.answers"), "effects.answers is missing"),
    "a question not asked": (
        drop("effects.answers.accuracy_greedy"),
        "effects.answers.accuracy_greedy is missing",
    ),
    "half of the problems": (
        change(
            "effects.answers.accuracy_greedy",
            lambda tally: (
                tally
                | {
                    part: [12, 0]
                    for part in ("right", "right_lenient", "format", "working", "truncated")
                }
            ),
        ),
        "has 12 problems; the scale asks 24",
    ),
    "trained on no rows": (put("effects.rows.trained_on", 0), "effects.rows.trained_on"),
    "rows without a reward": (put("effects.rows.without_reward", 100), "without_reward"),
    "no inputs": (put("inputs", {}), "inputs.checkpoint is missing"),
    "another checkpoint": (put("inputs.checkpoint", "0" * 64), "another checkpoint"),
    "another tier": (put("tier", "paper"), "tier is"),
    "another commit": (put("commit", "0" * 40), "commit is"),
    "another source": (put("environment.source_sha256", "0" * 64), "source_sha256 is"),
    "no source": (put("sources", []), "sources is empty"),
    "no environment": (put("environment", {}), "environment."),
    "series said to be left out": (put("effects.series_left_out", ["loss"]), "series_left_out"),
    "a curve that falls": (
        change("series.tokens_sampled", lambda values: [values[1], values[0], *values[2:]]),
        "series.tokens_sampled falls",
    ),
    "no curve": (drop("series.accuracy_sampled"), "no metrics follow"),
    "no votes": (drop("effects.answers.accuracy.votes"), "no metrics follow"),
}


@pytest.mark.parametrize("name", sorted(NOT_DONE))
def test_a_record_of_what_was_not_done_is_refused(
    name: str, smoke_runs: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(smoke_runs, tmp_path / "runs")
    edit, words = NOT_DONE[name]
    edited(place(runs, ARM, 1), edit)
    refused = gather(SELECTION, runs).refused
    assert {path for path, _ in refused} == {place(runs, ARM, 1)}
    assert any(words in why for _, why in refused), refused


def test_metrics_are_formed_of_what_a_record_holds_whatever_it_says(
    smoke_runs: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(smoke_runs, tmp_path / "runs")
    path = place(runs, ARM, 1)
    honest = read_record(path)
    names = ("accuracy", "gain_greedy", "pass_at_2", "take_off_steps", "train_reward_mean")
    assert not {*names, "entropy_last"} & json.loads(path.read_text())["metrics"].keys()
    said = {name: {"value": 99.0, "unit": honest.metrics[name].unit} for name in names}
    edited(path, change("metrics", lambda metrics: metrics | said))
    assert read_record(path).metrics == honest.metrics
    edited(path, change("series.reward", lambda values: [value + 0.3 for value in values]))
    raised = read_record(path).value("train_reward_mean")
    assert raised == pytest.approx((honest.value("train_reward_mean") or 0.0) + 0.3)


def _copied_to_seed(runs: Path, target: str, arm: str, seed: int, other: int) -> Path:
    """Put an arm's record of a seed in the place of another seed's."""
    path = place(runs, arm, other, target)
    shutil.copyfile(place(runs, arm, seed, target), path)

    def rename(raw: Any) -> None:
        raw["seed"] = raw["config"]["seed"] = other

    edited(path, rename)
    return path


def test_two_seeds_of_one_run_are_refused_each_with_the_other(
    smoke_runs: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(smoke_runs, tmp_path / "runs")
    copy = _copied_to_seed(runs, SMALL.name, ARM, 0, 1)
    reasons = dict(gather(SELECTION, runs).refused)
    assert set(reasons) == {copy, place(runs, ARM, 0)}
    assert f"equals that of {ARM}, seed 0" in reasons[copy]


@pytest.mark.parametrize("arm", [ARM, "bf16"])
def test_a_seed_copied_to_another_is_refused_by_check_and_by_bless(
    arm: str, table1_records: Callable[..., None], tmp_path: Path
) -> None:
    runs, expected = tmp_path / "runs", tmp_path / "expected"
    table1_records(runs)
    _copied_to_seed(runs, "table1", arm, 3, 4)
    checked = check_selection(TABLE1, runs, expected)
    refused_at = {path for path, _ in checked.evidence.refused}
    assert refused_at == {place(runs, arm, seed, "table1") for seed in (3, 4)}
    line = ["table1", "--tier", "smoke", "--runs", str(runs), "--expected", str(expected)]
    assert main(["bless", *line]) == 2
    assert not expected.exists()
