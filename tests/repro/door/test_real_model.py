"""A small real model learns on a CPU by a reward of its user's, in ten minutes.

`REPRO_SMALL_MODEL` names it: a folder or a GGUF file, such as SmolLM2-135M-Instruct's.
"""

import json
import os
import time
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

import repro
from repro.models.checkpoint import resolve

MODEL = "REPRO_SMALL_MODEL"
THINGS = (
    *("animal that lives in the sea", "bird that can fly", "fruit that is yellow", "planet"),
    *("country in Europe", "city in Italy", "river in Africa", "tool for cutting wood"),
    *("vegetable", "colour of the rainbow", "insect with wings", "sport with a ball", "month"),
    *("shape with three sides", "day of the week", "flower that is red", "piece of furniture"),
    *("kind of pasta", "mountain in Asia", "ocean", "farm animal", "season", "school subject"),
)
# Five words at most: a policy that answers in sentences earns nothing at first.
REWARD = """
def reward(completions, answers):
    return [float(0 < len(text.split()) <= 5) for text in completions]
"""
SETTINGS = {
    "prompts_per_rollout": 8,
    "group_size": 4,
    "rollout.max_new_tokens": 24,
    "evaluation.sampling.max_new_tokens": 24,
    "optimizer.learning_rates.lora_4bit": 1e-3,
    "data.test_problems": 8,
}


@pytest.mark.nightly
@pytest.mark.skipif(MODEL not in os.environ, reason=f"{MODEL} names no model")
def test_a_real_model_learns_to_answer_shortly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("short_answers.py").write_text(REWARD)
    Path("question.txt").write_text("{question}")
    rows = [{"question": f"Name one {thing}.", "answer": "any"} for thing in THINGS]
    Path("things.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    began = time.monotonic()
    done = repro.train(
        os.environ[MODEL],
        "things.jsonl",
        reward="short_answers:reward",
        template="question.txt",
        steps=6,
        out="adapter",
        settings=SETTINGS,
    )
    assert time.monotonic() - began < 600
    lines = (done.folder / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.3
    base = AutoModelForCausalLM.from_pretrained(resolve(os.environ[MODEL]))
    model = PeftModel.from_pretrained(base, "adapter")
    assert any("lora" in name for name, _ in model.named_parameters())
