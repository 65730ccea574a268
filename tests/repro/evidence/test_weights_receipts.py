"""A policy that is trained whole has the parameters of its checkpoint, no more and no fewer."""

from __future__ import annotations

import dataclasses

from repro.evidence.receipts.weights import counts
from repro.evidence.record import Record
from repro.spec.shapes import TINY
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import honest_record


def _full(trained: int) -> Record:
    (run,) = plan(find("table1"), Tier.SMOKE, seeds=1, arms=["bf16_full"])
    record = honest_record(run)
    return dataclasses.replace(record, effects=record.effects | {"parameters_trainable": trained})


def test_no_other_number_of_parameters_passes() -> None:
    own = TINY.parameters()
    assert not list(counts(_full(own)))
    larger = dataclasses.replace(TINY, vocabulary=1024).parameters()
    (fault,) = counts(_full(larger))
    assert fault.endswith(f"the model has {own}")
