"""`evaluate`: a checkpoint with an adapter or without, asked from the command line."""

import json
import re
from unittest.mock import Mock

import pytest
import torch

from repro.__main__ import main
from repro.data.generator import generate_problems
from repro.evaluation import evaluate_command
from repro.models.files.adapter_files import save_adapter
from repro.models.policy import load_policy, trainable_parameters
from tests.repro.problem_files import write_problems

HOW = ["--device", "cpu", "--template", "tiny", "--tokens", "48"]
LINE = ["evaluate", "tiny", *HOW]
GENERATED = ["--data", "generated", "--limit", "12"]


def evaluated(tmp_path, *more, base=("tiny",)):
    (tmp_path / "record.json").unlink(missing_ok=True)
    assert main(["evaluate", *base, *HOW, *more, "--out", str(tmp_path / "record.json")]) == 0
    return json.loads((tmp_path / "record.json").read_text())


def test_sets_are_asked_k_times_and_read_strictly_and_leniently(tmp_path, capsys):
    own = tmp_path / "own"
    own.mkdir()
    write_problems(own / "test.jsonl", generate_problems("test", 5))
    record = evaluated(
        tmp_path, "--data", f"generated,{own}", "--limit", "12", "--samples", "3", "--at", "1,3"
    )
    assert set(record["sets"]) == {"generated", str(own)}
    assert record["sets"][str(own)]["problems"] == 5
    metrics = record["sets"]["generated"]["metrics"]
    assert metrics["mean_at_3"]["value"] == pytest.approx(metrics["accuracy"]["value"])
    assert metrics["pass_at_1"]["value"] == pytest.approx(metrics["accuracy"]["value"])
    assert metrics["accuracy"]["value"] <= metrics["pass_at_3"]["value"]
    assert metrics["accuracy"]["value"] <= metrics["accuracy_lenient"]["value"]
    assert {"maj_at_3", "maj_at_3_lenient", "truncation_rate"} <= metrics.keys()
    said = capsys.readouterr()
    heading, row, *_, last = (line.split() for line in said.out.splitlines())
    for name in ("mean_at_3", "pass_at_1", "maj_at_1", "pass_at_3", "maj_at_3"):
        place = 5 + 2 * heading[5:].index(name)
        both = [metrics[key]["value"] for key in (name, f"{name}_lenient")]
        assert row[place : place + 2] == [f"{both[0]:.1f}", f"({both[1]:.1f})"]
    assert "under way have" not in said.err
    assert last[-4:] == [f"{record['seconds']:.1f}", "s", "once", "loaded"]
    assert heading[:5] == ["data", "problems", "strict", "lenient", "truncated"]


def test_of_undivided_data_what_train_holds_out_can_be_asked_alone(tmp_path):
    own = tmp_path / "own.jsonl"
    write_problems(own, generate_problems("test", 30))
    for flags, count in (((), 30), (("--held-out",), 3)):
        asked = evaluated(tmp_path, "--data", str(own), *flags)["sets"]
        assert asked[str(own)]["problems"] == count


def test_sampling_on_a_cpu_says_how_far_it_has_come(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_command, "_SILENT_SECONDS", 0.0)
    evaluated(tmp_path, "--data", "generated", "--limit", "3", "--samples", "2")
    lines = capsys.readouterr().err.splitlines()
    assert re.findall(r"\d+", lines[0])[:3] == ["6", "6", "1"]  # completions, under way, tokens
    assert len(lines) > 5


def test_an_adapter_is_asked_on_its_own_base_in_the_format_it_was_trained_on(tmp_path):
    policy = load_policy(
        "tiny", weight_format="nvfp4", training="lora", lora_rank=4, lora_alpha=8.0, seed=0
    )
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.fill_(0.05)
    save_adapter(policy, tmp_path / "run" / "adapter")
    greedy = [*GENERATED, "--temperature", "0"]
    record = evaluated(tmp_path, *greedy, base=["--adapter", str(tmp_path / "run")])
    assert record["weight_format"] == "nvfp4"
    assert record["adapter"]["folder"] == str(tmp_path / "run" / "adapter")
    # An adapter so large leaves nothing of the policy: it is really applied.
    bare = evaluated(tmp_path, *greedy, "--format", "nvfp4")
    accuracy = [r["sets"]["generated"]["metrics"]["accuracy"]["value"] for r in (record, bare)]
    assert accuracy[0] < accuracy[1]


def test_the_same_line_gives_the_same_record(tmp_path):
    one, other = (evaluated(tmp_path, *GENERATED, "--samples", "2") for _ in range(2))
    assert one["sets"] == other["sets"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data", ","], "--data "),
        ([*GENERATED, "--samples", "2", "--at", "1,4"], "--at 4: "),
        ([*GENERATED, "--samples", "2", "--at", "x"], "--at x: needs numbers"),
        ([*GENERATED, "--samples", "2", "--temperature", "0"], "greedy"),
        ([*GENERATED, "--temperature", "inf"], "temperature is inf"),
        ([*GENERATED, "--tokens", "4096"], "positions; needs 19"),
        ([*GENERATED, "--seed", "-1"], "--seed -1: needs 0"),
        ([*GENERATED, "--prompt-tokens", "3"], "at most 3"),
        ([*GENERATED, "--out", "no/such/folder/x.json"], "folder"),
        ([*GENERATED, "--out", __file__], "exists; name a new file"),
        (["--data", "generated", "--limit", "0"], "--limit 0: "),
    ],
)
def test_a_bad_line_is_a_sentence_before_weights_are_read(flags, sentence, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_command, "load_policy", None)
    assert main([*LINE, *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_more_samples_than_memory_holds_are_a_sentence(monkeypatch, capsys):
    errors = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: …")]
    monkeypatch.setattr(evaluate_command.Evaluator, "ask", Mock(side_effect=errors))
    for _ in errors:
        assert main([*LINE, *GENERATED, "--samples", "3"]) == 2
        assert "--samples 3 with --tokens 48" in capsys.readouterr().err
