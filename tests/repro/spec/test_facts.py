"""A misspelt fact is refused where it is written, where it is read, and in a record's file."""

import dataclasses
import json
import pickle

import pytest

from repro.evidence.procedure import Measured
from repro.evidence.record import RecordError, read_record
from repro.measure.step_metrics import PointFacts
from repro.rl.training_state import TrainState
from repro.spec.facts import FactNameError, Facts
from tests.repro.made_up import resealed

WRITES = {
    "made": lambda facts: Facts(optimiser_steps=3),
    "set": lambda facts: facts.__setitem__("optimiser_steps", 3),
    "updated": lambda facts: facts.update(optimiser_steps=3),
    "defaulted": lambda facts: facts.setdefault("optimiser_steps", 3),
    "joined": lambda facts: facts | {"optimiser_steps": 3},
    "joined in place": lambda facts: facts.__ior__({"optimiser_steps": 3}),
    "part of a fact": lambda facts: facts.update(rows={"trained": 3}),
    "part set": lambda facts: facts["rows"].__setitem__("trained", 3),
    "part of a time": lambda facts: facts.update(timing={"second": 3}),
    "measured": lambda facts: Measured(metrics={}, facts={"optimiser_steps": 3}),
    "state of a training": lambda facts: TrainState(
        digest="d", step=1, draws=1, series={}, facts={"optimiser_steps": 3}
    ),
    "of a point": lambda facts: PointFacts(peak_byte=3),
}
READS = {
    "taken": lambda facts: facts["optimiser_steps"],
    "with a default": lambda facts: facts.get("optimiser_steps", 0),
    "looked for": lambda facts: "optimiser_steps" in facts,
    "taken out": lambda facts: facts.pop("optimiser_steps", None),
    "part": lambda facts: facts["rows"].get("trained", 0),
}


@pytest.mark.parametrize("act", [*WRITES.values(), *READS.values()], ids=[*WRITES, *READS])
def test_a_misspelt_name_is_refused_with_the_one_that_was_meant(act):
    facts = Facts(optimizer_steps=3, rows={"trained_on": 12})
    before = json.dumps(facts)
    with pytest.raises(FactNameError, match=r"did you mean \w+\?"):
        act(facts)
    assert json.dumps(facts) == before


def test_a_record_of_a_misspelt_fact_is_neither_made_nor_read(run, made_up_record, tmp_path):
    record = made_up_record(run)
    with pytest.raises(FactNameError, match="did you mean grades"):
        dataclasses.replace(record, facts={"gradse": {}})
    misspelt = {"trained\x1b": 3}
    path = resealed(record.write(tmp_path), lambda raw: raw["facts"]["rows"].update(misspelt))
    with pytest.raises(RecordError, match=r"rows: 'trained.* is no name of a fact") as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def test_facts_are_the_dictionary_that_they_hold():
    values = {"linears": {"bf16": 3}, "noise": {"modules": 2}}
    facts = Facts(values)
    assert facts == values == json.loads(json.dumps(facts))
    assert pickle.loads(pickle.dumps(facts)) == facts
    assert type(facts | {"order": 3}) is Facts
    facts.setdefault("rows", {"trained_on": 1})["trained_on"] += 2
    assert facts.pop("rows") == {"trained_on": 3}
    assert facts == values
