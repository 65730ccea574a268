"""What a record says, others of its numbers must bear out: no manipulation counts as evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repro.evidence.record import SEAL, seal_of
from repro.judge.check import gather
from repro.spec.config import digest_of
from tests.repro.evidence.manipulations import MANIPULATIONS
from tests.repro.recorded_smoke import SELECTION, place


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
