"""What ran is what the record says: the source from before a run's first step to after its last."""

import subprocess

import pytest
import torch
from torch import nn

from repro.evidence import origins, provenance
from repro.evidence.origins import is_clean
from repro.evidence.procedure import Measured
from repro.evidence.record import read_record
from repro.rl.training_state import TrainState, load_checkpoint, save_checkpoint
from repro.run import carry_out as recording
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.small_runs import context_of

RIGHT, WRONG = "LOSS = -1\n", "LOSS = +1\n"


class Checkout:
    """A git checkout that stands for the one that holds this package."""

    def __init__(self, root):
        self.root = root
        self.loss = root / "repro" / "loss.py"
        self.loss.parent.mkdir()
        (root / "kernels").mkdir()
        (root / "kernels" / "kernel.py").write_text("")
        self.loss.write_text(RIGHT)
        self.git("init", "-q")
        self.commit()

    def git(self, *words):
        """Return what git says."""
        name = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        done = subprocess.run(
            ["git", "-C", str(self.root), *name, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self):
        """Commit everything; return the commit."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "one more")
        return self.git("rev-parse", "HEAD")


def forget():
    """Do as a fresh process would: nothing is known of the source yet."""
    for asked in (provenance.source_commit, provenance.source_digest, origins._committed):
        getattr(asked, "cache_clear", lambda: None)()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    tree = Checkout(tmp_path)
    monkeypatch.delenv("REPRO_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "repro")
    forget()
    yield tree
    forget()


@pytest.fixture
def run():
    return plan(find("table1"), Tier.SMOKE, 1, ["bf16_lora"])[0]


@pytest.fixture
def carried(run, tmp_path, monkeypatch):
    """Return what carries out the run by a procedure that is given, and reads its record."""

    def carry(procedure):
        def measure(run, context):
            return Measured(metrics={}, facts=procedure())

        monkeypatch.setattr(recording, "procedure_named", lambda name: measure)
        (path,) = recording.carry_out([run], tmp_path / "runs", context_of(tmp_path))
        return read_record(path)

    return carry


def test_a_source_that_stays_is_one_state_and_clean(checkout, carried):
    record = carried(dict)
    assert [state["commit"] for state in record.sources] == [checkout.git("rev-parse", "HEAD")]
    assert (record.commit, record.dirty) == (record.sources[0]["commit"], False)
    assert is_clean(record)


def test_a_wrong_loss_that_was_reverted_while_it_trained_is_not_of_head(checkout, carried):
    checkout.loss.write_text(WRONG)

    def reverting():
        checkout.loss.write_text(RIGHT)
        return {}

    record = carried(reverting)
    assert [state["dirty"] for state in record.sources] == [True, False]
    assert record.dirty
    assert not is_clean(record)


def test_steps_at_one_commit_and_at_another_are_recorded_as_both(checkout, carried, tmp_path):
    first = checkout.git("rev-parse", "HEAD")
    parameters = {"a": nn.Parameter(torch.zeros(2))}
    optimizer = torch.optim.AdamW(parameters.values())
    parameters["a"].grad = torch.ones(2)
    optimizer.step()
    state = TrainState(digest="a", step=1, draws=1, series={}, facts={})
    save_checkpoint(tmp_path / "steps", state, parameters, optimizer)
    checkout.loss.write_text(WRONG)
    second = checkout.commit()
    forget()

    def going_on():
        state = load_checkpoint(tmp_path / "steps", "a", parameters, optimizer)
        return state.facts

    record = carried(going_on)
    assert [state["commit"] for state in record.sources] == [first, second]
    assert record.commit == second
    assert "sources" not in record.facts
    assert not is_clean(record)
