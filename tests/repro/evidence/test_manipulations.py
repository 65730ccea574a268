"""What a record says, others of its numbers must bear out: no manipulation counts as evidence.

A record that is another's under a new name bears itself out. What gives it away is the other: runs
of two seeds, or of two arms, do not agree in every digit.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repro.__main__ import main
from repro.evidence.record import SEAL, Record, seal_of
from repro.judge.check import check_selection
from repro.judge.gathering import gather
from repro.run.places import expected_folder
from repro.run.select import Selection
from repro.spec.config import digest_of
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.evidence.manipulations import MANIPULATIONS
from tests.repro.recorded_smoke import SELECTION, SMALL, place

TABLE1 = Selection(target=find("table1"), source=find("table1"), tier=Tier.SMOKE)


def forged(path: Path, edit: Callable[[Any], None]) -> None:
    """Edit a record, with the digests that a careful hand would make again."""
    raw = json.loads(path.read_text())
    edit(raw)
    raw["digest"] = digest_of(raw["config"])
    if SEAL in raw:
        raw[SEAL] = seal_of({key: value for key, value in raw.items() if key != SEAL})
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("name", sorted(MANIPULATIONS))
def test_a_manipulated_record_is_refused_by_what_it_says_elsewhere(
    name: str, smoke_runs: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(smoke_runs, tmp_path / "runs")
    one = MANIPULATIONS[name]
    forged(place(runs, one.arm, 1), one.edit)
    evidence = gather(SELECTION, runs)
    reasons = [why for path, why in evidence.refused]
    assert {path for path, _ in evidence.refused} == {place(runs, one.arm, 1)}
    assert any(one.words in why for why in reasons), reasons


def copied_to_seed(runs: Path, target: str, arm: str, seed: int, other: int) -> Path:
    """Put an arm's record of a seed in the place of another seed's, digests and seal made again."""
    path = place(runs, arm, other, target)
    shutil.copyfile(place(runs, arm, seed, target), path)

    def rename(raw: Any) -> None:
        raw["seed"] = raw["config"]["seed"] = other

    forged(path, rename)
    return path


# What an arm's configuration decides; the rest of a record is what came out.
_CONFIGURED_SERIES = ("sigma", "sigma_realised", "noise_stage", "learning_rate")
_CONFIGURED_EFFECTS = (
    "linears",
    "relative_weight_error_mean",
    "noise",
    "norms_trained",
    "adapter_modules",
    "parameters_trainable",
)


def copied_to_arm(runs: Path, arm: str, other: str, seed: int) -> Path:
    """Put what came out of an arm in the place of another arm's results, of the same seed.

    The other arm's record stays as far as its configuration decides it: whoever forges it with care
    leaves formats, noise and schedule as they must be, and takes numbers that look better.
    """
    path = place(runs, other, seed, "table1")
    source = json.loads(place(runs, arm, seed, "table1").read_text())

    def results_of_arm(raw: Any) -> None:
        for part, names in (("series", _CONFIGURED_SERIES), ("effects", _CONFIGURED_EFFECTS)):
            own = {name: raw[part][name] for name in names if name in raw[part]}
            raw[part] = source[part] | own
        raw["metrics"] = source["metrics"]

    forged(path, results_of_arm)
    return path


def test_a_real_record_copied_to_another_seed_is_refused_with_the_record_that_it_is(
    smoke_runs: Path, tmp_path: Path
) -> None:
    arm = "nvfp4_lora_aqn"
    runs = shutil.copytree(smoke_runs, tmp_path / "runs")
    copy = copied_to_seed(runs, SMALL.name, arm, 0, 1)
    reasons = dict(gather(SELECTION, runs).refused)
    assert set(reasons) == {copy, place(runs, arm, 0)}
    assert f"equals that of {arm}, seed 0" in reasons[copy]


@pytest.mark.parametrize(
    ("arm", "other"),
    [
        ("bf16_lora", "nvfp4_lora"),
        ("bf16_lora", "nvfp4_lora_aqn"),
        ("nvfp4_lora", "nvfp4_lora_aqn"),
        ("nvfp4_lora", "mxfp4_lora"),
        ("bf16_lora", "bf16_full"),
        ("bf16", "nvfp4"),
    ],
)
def test_results_copied_to_another_arm_are_refused_by_check_and_by_bless(
    arm: str, other: str, table1_records: Callable[..., None], tmp_path: Path
) -> None:
    runs, expected = tmp_path / "runs", tmp_path / "expected"
    table1_records(runs)
    copied_to_arm(runs, arm, other, 2)
    _refused_by_both(runs, expected, {(arm, 2), (other, 2)})


@pytest.mark.parametrize("arm", ["nvfp4_lora_aqn", "bf16"])
def test_a_seed_copied_to_another_is_refused_by_check_and_by_bless(
    arm: str, table1_records: Callable[..., None], tmp_path: Path
) -> None:
    runs, expected = tmp_path / "runs", tmp_path / "expected"
    table1_records(runs)
    copied_to_seed(runs, "table1", arm, 3, 4)
    _refused_by_both(runs, expected, {(arm, 3), (arm, 4)})


def _refused_by_both(runs: Path, expected: Path, places: set[tuple[str, int]]) -> None:
    """Hold that `check` refuses these records and no other, and that `bless` keeps nothing."""
    checked = check_selection(TABLE1, runs, expected)
    refused_at = {path for path, _ in checked.evidence.refused}
    assert refused_at == {place(runs, arm, seed, "table1") for arm, seed in places}
    assert checked.faulty
    line = ["table1", "--tier", "smoke", "--runs", str(runs), "--expected", str(expected)]
    assert main(["bless", *line]) == 2
    assert not expected.exists()


def test_a_verdict_says_that_the_source_was_written_to_while_its_runs_ran(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    def written_to(record: Record) -> Record:
        if record.seed:
            return record
        state = record.sources[0] | {"written": ["repro/rl/loss.py"]}
        return dataclasses.replace(record, sources=[state])

    table1_records(tmp_path / "runs", written_to)
    checked = check_selection(TABLE1, tmp_path / "runs", expected_folder(None))
    assert not checked.evidence.refused
    (gain,) = [item for item in checked.verdicts if item.name == "bf16_lora_gains"]
    assert "The source was written to while 1 of the runs ran" in gain.sentence
