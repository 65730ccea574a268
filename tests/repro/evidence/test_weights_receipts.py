"""How many parameters a policy has, by what its record can know."""

from __future__ import annotations

import dataclasses

import pytest

from repro.evidence.receipts.weights import counts
from repro.evidence.record import Record
from repro.spec.shapes import OWN_SHAPES
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import honest_record


def _full(trained: int) -> Record:
    (run,) = plan(find("skill"), Tier.PROXY, seeds=1, arms=["bf16_full"])
    record = honest_record(run)
    return dataclasses.replace(record, effects=record.effects | {"parameters_trainable": trained})


@pytest.mark.parametrize("vocabulary", [3072, 896])
def test_a_policy_may_have_been_pretrained_without_human_problems(vocabulary: int) -> None:
    shape = dataclasses.replace(OWN_SHAPES["proxy-30m-early"], vocabulary=vocabulary)
    assert not list(counts(_full(shape.parameters())))


def test_no_other_number_of_parameters_passes() -> None:
    shape = dataclasses.replace(OWN_SHAPES["proxy-30m-early"], vocabulary=1024)
    (fault,) = counts(_full(shape.parameters()))
    assert fault.endswith("the model has 28721408 or 27607296")
