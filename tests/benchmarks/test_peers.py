"""The race: its plan, what a record may hold, the tables, and both sides on a CPU."""

import itertools
import json
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.peers import __main__ as peers
from benchmarks.peers import grpo, harness, peer_update, sweep, table, workloads
from benchmarks.peers import ours as own
from benchmarks.peers.sweep import EQUAL, SHIPPED
from repro.data.problem import Problem
from repro.data.prompts import render
from repro.rl.collect import PromptSource
from tests.repro.qwen_checkpoint import write_small

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a checkpoint of a tiny model with random weights, a tokenizer and a chat template."""
    return write_small(tmp_path_factory.mktemp("tiny"), vocab_size=2048)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a file of sixty questions."""
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"question": f"What is {n} plus {n + 1}?", "answer": str(2 * n + 1)} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_every_setting_is_tried_once_and_the_fastest_by_token_counts_in_both_terms():
    tried = sweep.trials("trl", "16x8_real", "0.5b", 9)
    assert {(row.lengths, row.terms, row.trial) for row in tried} == {("16x8", EQUAL, True)}
    assert tried == sweep.trials("trl", "16x8", "0.5b", 9)
    entries = [
        asdict(row) | {"seconds": [seconds], "completion_tokens": [tokens]}
        for row, seconds, tokens in zip(
            tried, (9.0, 5.0, 6.0, 7.0, 8.0), (900, 400, 800, 7, 9), strict=True
        )
    ]
    counting = sweep.counting("trl", "16x8_real", "0.5b", 9, entries)
    assert [(row.terms, row.settings) for row in counting] == [
        (SHIPPED, tried[2].settings),
        (EQUAL, tried[2].settings),
    ]
    assert all(row.lengths == "16x8_real" and row.steps == 20 for row in counting)
    assert counting[0].settings["threads"] == 4  # as few as this project's own rows have


def test_what_needs_no_choice_has_no_trial():
    for way in (*sweep.OURS, "trl_alone"):
        assert sweep.trials(way, "16x8", "0.5b", 9) == []
        assert len(sweep.counting(way, "16x8", "0.5b", 9, [])) == 1
    assert [row.terms for row in sweep.counting("unsloth", "7b_16x8", "7b", 9, [])] == [SHIPPED]
    # Micro-batches divide a step's rows.
    for lengths, way in itertools.product(("16x8", "64x8", "7b_16x8"), ("trl", "unsloth")):
        whole = workloads.STEPS[lengths]
        settings = sweep.sweep_of(way, whole.model, lengths)
        assert not any(whole.prompts * whole.group % own["rows"] for own in settings)
    assert not sweep.applies("trl", "7b_16x8", "0.5b")
    assert not sweep.applies("trl_alone", "64x8", "0.5b")


def test_the_page_is_written_from_the_blessed_records():
    page = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    assert table.renewed(page, ROOT / "benchmarks") == page


def test_a_peer_is_held_against_our_row_or_what_that_row_cost_when_it_has_gone():
    row = {"model": "0.5b", "lengths": "16x8_real", "completion_tokens": [2000]}
    ours, peer = row | {"way": "ours_bf16", "seconds": [1]}, row | {"way": "trl", "seconds": [4]}
    for base, shown in (({}, "(4.00x)"), ({"base_cost": 0.25}, "(8.00x)")):
        assert shown in "".join(table._matrix("seconds", [ours, peer | base]))


def test_memory_is_the_most_that_the_driver_named_while_steps_were_timed():
    lines = [f"2026/11/28 17:55:0{n}.500, {mib}" for n, mib in enumerate((9000, 70, 80, 60, 9000))]
    middle = [f"2026/11/28 17:55:0{n}.000" for n in (1, 4)]
    began, ended = (
        peers.datetime.datetime.strptime(text, "%Y/%m/%d %H:%M:%S.%f").timestamp()
        for text in middle
    )
    assert peers.most_bytes(["nonsense", *lines], began, ended) == 80 * 2**20
    assert peers.most_bytes([], began, ended) is None


def race(monkeypatch, out, *flags):
    """Run the command on the CPU; return the record's entries."""
    monkeypatch.setattr(sys, "argv", ["peers", *flags, "--device", "cpu", "--out", str(out)])
    status, entries = peers.main(), json.loads(out.read_text())["entries"]
    assert status == all("failed" in entry for entry in entries)
    return list(entries)


def test_what_cannot_be_run_is_a_row_with_its_reason(folder, data, tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_COMMIT", "c0ffee")
    out, flags = tmp_path / "p.json", ("--models", "tiny", "--workloads", "tiny_2x2")
    (lacking,) = race(monkeypatch, out, *flags, "--ways", "trl_alone")
    assert lacking["failed"] == "not run: it needs a checkpoint (--folder tiny=FOLDER)"
    flags += ("--folder", f"tiny={folder}", "--data", str(data), "--ways", "trl_alone")
    (entry,) = race(monkeypatch, out, *flags)
    # What this commit has tried stays, until it is requested again.
    assert race(monkeypatch, out, *flags) == [entry]
    assert entry["failed"] == "failed: ModuleNotFoundError: No module named 'trl'"

    def cut_off(command, place, environment, seconds):
        step = {"total": 2.0, "tokens": 8, "reward": 1.0, **dict.fromkeys(harness.PHASES, 0.5)}
        asked = Namespace(**json.loads(Path(command[-1]).read_text()))
        harness.write_entry(asked, (), harness.whole_steps([step] * 4, 1.0, [2.0, 3.0, 4.0, 5.0]))

    monkeypatch.setattr(peers, "followed", cut_off)
    (entry,) = race(monkeypatch, out, *flags, "--again")
    assert (entry["seconds"], entry["note"]) == ([2.0], "cut off after step 4 of 5")


def test_a_process_that_takes_too_long_ends_with_what_it_has_started(tmp_path):
    lingering = "import subprocess as s, sys; s.Popen(['sleep', '60']); s.run(['sleep', '60'])"
    began = time.monotonic()
    assert peers.followed([sys.executable, "-c", lingering], tmp_path, {}, 1.0) is None
    assert time.monotonic() - began < 30


def test_a_race_tries_then_counts_and_goes_on_where_it_was_stopped(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_COMMIT", "c0ffee")
    ran: list[tuple[bool, int, int]] = []

    def process(self, row, request, place):
        rows, steps = row.settings["rows"], len(harness.json_lines(request["rows"]))
        asked = request["settings"]["rows"]
        if asked > 32:
            return {"failed": "failed: torch.OutOfMemoryError: CUDA out of memory."}
        ran.append((row.trial, rows, steps))
        if len(ran) == 2 and stopped:
            raise KeyboardInterrupt
        made = {"completion_tokens": [100], "micro_batch_rows": asked}
        return made | {"seconds": [rows / 10], "median": rows / 10}

    monkeypatch.setattr(peers.Race, "_process", process)
    flags = ("--models", "tiny", "--workloads", "equal", "--ways", "peft")
    flags += ("--folder", f"tiny={folder}")
    stopped = True
    with pytest.raises(KeyboardInterrupt):
        race(monkeypatch, tmp_path / "p.json", *flags)
    stopped = False
    entries = race(monkeypatch, tmp_path / "p.json", *flags)
    # Trials have one timed step after the warm-up; the smaller micro-batch was faster.
    assert ran == [(True, 128, 2), (True, 32, 2), (True, 32, 2), (False, 32, 6)]
    tried = [(e["trial"], e["settings"]["rows"], e["micro_batch_rows"]) for e in entries]
    # Memory that does not suffice halves the rows of a micro-batch; the page names what ran.
    assert tried == [(True, 128, 32), (True, 32, 32), (False, 32, 32)]
    assert table._choice(entries[2], entries).endswith(": rows 32.")
    race(monkeypatch, tmp_path / "p.json", *flags)
    assert len(ran) == 4


@pytest.mark.parametrize("way", ["ours_nvfp4_aqn", "ours_bf16_folded"])
def test_own_steps_are_timed_on_a_peers_questions(way, folder, data, tmp_path, monkeypatch):
    request = {"folder": str(folder), "ignore_end": False, "seed": 0, "prompts": 2, "steps": 5}
    files = workloads.write_questions(request, str(data), tmp_path)
    lines = Path(files["questions"]).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 10
    asked_of_peers = [json.loads(line)["prompt"][0]["content"] for line in lines]
    assert "\\boxed{}" in asked_of_peers[0]
    met: list[str] = []
    inner = own.train_run

    def watched(made, learner, hooks, place):
        assert (made.run.arm.rollout_adapter == "folded") == way.endswith("folded")
        source = PromptSource(made.problems.train, made.evaluation.evaluator.tokenizer, made.run)
        met.extend(problem.question for step in range(5) for problem in source.draw(step))
        return inner(made, learner, hooks, place)

    monkeypatch.setattr(own, "train_run", watched)
    request |= {"device": "cpu", "dtype": "float32", "reward": "in_turn", "way": way, "group": 2}
    request |= {"data": files["data"], "prompt_tokens": 256, "new_tokens": 6, "sampled": True}
    out = tmp_path / "entry.json"
    measured = own.measure_steps(Namespace(**request, out=str(out)))
    # What it has done so far is there whenever it is cut off.
    assert json.loads(out.read_text(encoding="utf-8"))["seconds"] == measured["seconds"]
    assert [text.partition("\n")[0] for text in asked_of_peers] == met
    assert len(measured["completion_tokens"]) == 2
    assert 4 <= max(measured["completion_tokens"]) <= 24
    assert measured["rewards"] == [0.5] * 5
    for place, total in enumerate(measured["seconds"]):
        parts = [measured[f"{part}_seconds"][place] for part in ("rollout", "score", "update")]
        assert sum(parts) == pytest.approx(total)


def test_prompts_of_a_7b_step_have_exactly_its_tokens(folder, tmp_path):
    request = {"folder": str(folder), "ignore_end": True, "seed": 0, "prompts": 2, "steps": 2}
    files = workloads.write_questions(request | {"prompt_tokens": 300}, "", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = (tmp_path / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    texts = {json.loads(row)["question"] for row in rows}
    assert len(texts) == len(rows) >= 4
    problems = [Problem(id="0", question=text, answer="0") for text in texts]
    assert {len(render(problem, "boxed", tokenizer)) for problem in problems} == {300}
    assert files["data"].startswith("file:")


def test_both_sides_see_the_same_log_probabilities_of_the_same_rows(folder, tmp_path):
    request = {
        "model": "tiny", "lengths": "spread", "folder": str(folder), "device": "cpu",
        "dtype": "float32", "seed": 0, "sampled": False, "settings": {"rows": 4},
    }  # fmt: skip
    request |= workloads.write_rows("tiny", "spread", 3, folder, tmp_path)
    packed = own.measure_update(Namespace(**request, way="ours_bf16"))
    asked = Namespace(**request, way="peft")
    padded = peer_update.measure(peer_update.Update(asked), asked)
    assert packed["completion_tokens"] == padded["completion_tokens"]
    assert len(packed["seconds"]) == len(padded["seconds"]) == 2
    assert packed["logprob"] == pytest.approx(padded["logprob"], abs=1e-5)


def test_a_peers_step_is_cut_into_parts_that_add_up(tmp_path, monkeypatch):
    class Trainer:
        """A trainer that takes known times."""

        def __init__(self):
            self.vllm_generation = SimpleNamespace(
                sync_weights=lambda: spend(1.0), generate=lambda: spend(4.0)
            )
            self.hands = None
            self.args = SimpleNamespace(use_vllm=True, per_device_train_batch_size=2)
            self.args.vllm_importance_sampling_correction = True

        def add_callback(self, hand):
            self.hands = hand

        def _generate_and_score_completions(self, inputs):
            self.vllm_generation.sync_weights()
            self.vllm_generation.generate()
            spend(2.0)
            clock.reward(["\\boxed{7}", "7"], answers=["7", "7"])
            return {"completion_mask": torch.ones(2, 3)}

    clock_hand = [0.0]

    def spend(seconds):
        clock_hand[0] += seconds

    monkeypatch.setattr(harness, "now", lambda device: clock_hand[0])
    out, asked = tmp_path / "entry.json", {"device": "cpu", "reward": "boxed", "way": "trl"}
    asked |= {"out": str(out), "folder": "weights", "dtype": "bfloat16", "seed": 0}
    clock, trainer = grpo.StepClock(Namespace(**asked)), Trainer()
    clock.watch(trainer)
    for _ in range(5):
        trainer.hands.on_step_begin()
        trainer._generate_and_score_completions(None)
        spend(3.0)
        trainer.hands.on_step_end()
        # What it has done so far is there whenever it is cut off.
        assert out.exists() == (len(clock.steps) > harness.WARM_UP)
    entry = json.loads(out.read_text(encoding="utf-8"))
    assert (entry["micro_batch_rows"], entry["correction"]) == (2, True)
    parts = [entry[f"{part}_seconds"] for part in harness.PHASES]
    assert parts == [[5.0] * 2, [1.0] * 2, [2.0] * 2, [3.0] * 2]
    assert (entry["seconds"], entry["completion_tokens"]) == ([10.0] * 2, [6] * 2)
    assert entry["rewards"] == [0.5] * 5
    assert entry["timed_between"] == [clock.ended[2], clock.ended[4]]


def test_as_shipped_leaves_the_correction_to_the_tool():
    asked = Namespace(
        prompts=16, group=8, new_tokens=512, steps=10, seed=0, dtype="bfloat16", device="cuda",
        ignore_end=True, way="trl", terms=SHIPPED, settings={"rows": 32, "memory": 0.3},
    )  # fmt: skip
    shipped = grpo.grpo_settings(asked)
    asked.terms = EQUAL
    equal = grpo.grpo_settings(asked)
    assert "vllm_importance_sampling_correction" not in shipped
    assert equal["vllm_importance_sampling_correction"] is False
    assert shipped["gradient_accumulation_steps"] == 4
    assert shipped["generation_kwargs"] == {"ignore_eos": True}


def test_rewards_are_the_same_for_texts_and_messages():
    said = ["so \\boxed{1,200}", "\\boxed{3} no, \\boxed{4}", "nothing"]
    golds = ["#### 1200", "3", "5"]
    assert harness.boxed(said, golds) == [1.0, 0.0, 0.0]
    assert harness.boxed([[{"content": text}] for text in said], golds) == [1.0, 0.0, 0.0]
    assert harness.in_turn(said) == [0.0, 1.0, 0.0]
