"""One run: how its policy is made ready to train, what it reads, and what its record shows."""

import dataclasses
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import torch

from repro.data.problem_sets import ProblemSets
from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Stopped
from repro.evidence.receipts import violations
from repro.evidence.record import read_record
from repro.models.memory_plan import training_memory
from repro.procedures.train import evaluate_untrained, fitting_update, train_and_evaluate
from repro.run.carry_out import keep, procedure_named
from repro.runlog.run_logger import read_lines
from repro.spec.arm import NoiseConfig, PlantedRounding
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.procedures.conftest import SCALE
from tests.repro.small_runs import context_of, small_run

H100_BYTES = 85_000_000_000


@pytest.mark.parametrize(
    ("tier", "device"), [(Tier.PAPER, "cuda"), (Tier.PAPER, "cpu"), (Tier.SMOKE, "cuda")]
)
def test_a_published_model_has_planned_micro_batches(tier, device, monkeypatch):
    properties = SimpleNamespace(total_memory=H100_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (run,) = plan(find("table1"), tier, 1, ["nvfp4_lora"])
    fitting = fitting_update(run, torch.device(device))
    if (tier, device) != (Tier.PAPER, "cuda"):
        assert not fitting
        return
    step = training_memory(run.arm, run.scale).fitting(H100_BYTES)
    assert fitting == {"micro_tokens": step.micro_tokens, "kept_blocks": step.kept_blocks}
    assert step.micro_tokens > run.scale.micro_batch_rows


@pytest.mark.parametrize(
    "arm",
    [
        {"training": "none", "weight_format": "nf4"},
        {
            "weight_format": "nvfp4",
            "noise": NoiseConfig(sigma_start=0.1, sigma_end=0.05, num_stages=3),
            "reward": "random",
        },
        {"training": "full"},
        {"rounding": PlantedRounding(format="nvfp4")},
    ],
    ids=["untrained", "noise", "full", "planted"],
)
def test_the_record_of_a_run_shows_that_nothing_was_skipped(tmp_path, arm):
    trains = arm.get("training") != "none"
    run = small_run(SCALE, seed=1, procedure="train" if trains else "evaluate", **arm)
    measured = procedure_named(run.procedure)(run, context_of(tmp_path / "work"))
    path = keep(run, measured, datetime.now(UTC), tmp_path, capture_environment())
    record = read_record(path)
    assert violations(record) == []
    assert len(record.series.get("reward", [])) == (3 if trains else 0)
    assert record.value("accuracy_small") is not None


def test_an_evaluation_tells_how_far_it_is_and_stops_between_its_parts(tmp_path):
    told = []
    answers = iter([False, False, True])

    def progress(text, values):
        told.append(values.get("percent"))

    run = small_run(SCALE, procedure="evaluate", training="none", weight_format="nf4")
    how = {"progress": progress, "should_stop": lambda: next(answers)}
    with pytest.raises(Stopped):
        evaluate_untrained(run, context_of(tmp_path, **how))
    assert told == [None, 0.0, 100.0]


def test_only_what_is_trained_has_problems_to_train_on():
    trained, asked = (ProblemSets.of(SCALE, trains=trains) for trains in (True, False))
    assert (len(trained.train), len(trained.development)) == (40, 4)
    assert (asked.train, asked.development) == ([], [])
    assert asked.test == trained.test
    over_sets = ProblemSets.of(dataclasses.replace(SCALE, accuracy_over="sets"), trains=False)
    assert over_sets.test == over_sets.further["small"]


def asked(scale=SCALE, **evaluation):
    """Return a scale without further sets or a development split, evaluated in another way."""
    how = {"every": 0, "token_budget": 0} | evaluation
    evaluated = dataclasses.replace(scale.evaluation, **how)
    return dataclasses.replace(scale, test_sets=(), evaluation=evaluated)


def test_the_test_split_is_answered_along_a_run_as_at_its_end(tmp_path):
    last = asked(dataclasses.replace(SCALE, steps=2))
    whole, ended = (
        train_and_evaluate(small_run(scale), context_of(tmp_path / str(scale.steps)))
        for scale in (asked(test_at=(1, 2)), last)
    )
    series = whole.series
    assert series["test_steps"] == [1, 2]
    assert len(series["reward"]) == 3
    # What is tested after two steps is what a run that ends there is tested by.
    for name in ("accuracy", "accuracy_greedy"):
        right = ended.facts["answers"][name]["right"]
        samples = len(right) - 1
        percent = 100 * sum(hits * count for hits, count in enumerate(right)) / samples / sum(right)
        assert series[f"test_{name}"][1] == pytest.approx(percent)
    lines = read_lines(tmp_path / "3" / "evaluations.jsonl")
    assert [line["test_accuracy"] for line in lines] == series["test_accuracy"]


def test_an_untrained_arm_samples_the_prompts_and_seeds_of_the_first_steps(tmp_path):
    scale = asked(prompts_of_steps=2, explored_samples=4, explored_problems=3)
    trained = train_and_evaluate(small_run(scale), context_of(tmp_path / "trained"))
    untrained = evaluate_untrained(
        small_run(scale, training="none", procedure="evaluate"), context_of(tmp_path / "untrained")
    )
    # Before the first update the two policies are one.
    for series in ("reward", "accuracy_sampled", "informative_groups"):
        assert len(untrained.series[series]) == 2
        assert untrained.series[series][0] == pytest.approx(trained.series[series][0])
    for name in ("train_problems", "order_of_problems"):
        assert untrained.inputs[name] == trained.inputs[name]
    for measured in (trained, untrained):
        assert sum(measured.facts["answers"]["accuracy_explored"]["right"]) == 3
        assert len(measured.facts["answers"]["accuracy_explored"]["right"]) == 5
        explored = measured.facts["explored"]
        assert 0 < explored["entropy_sum"] / explored["tokens"] < 10
