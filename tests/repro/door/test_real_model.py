"""A small real model, trained for two steps; it is nobody's to download here."""

import os
from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM

import repro

FOLDER = "REPRO_SMALL_MODEL"


@pytest.mark.nightly
@pytest.mark.skipif(FOLDER not in os.environ, reason=f"{FOLDER} names no folder of a model")
def test_a_real_model_is_trained_and_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"What is {a} + {b}?,{a + b}" for a in range(1, 8) for b in range(1, 8)]
    Path("sums.csv").write_text("\n".join(["prompt,gold", *rows]) + "\n")
    done = repro.train(
        os.environ[FOLDER],
        "sums.csv",
        columns={"question": "prompt", "answer": "gold"},
        steps=2,
        out="adapter",
        settings={"data.test_problems": 4, "rollout.max_new_tokens": 64},
    )
    assert done.steps == 2
    assert AutoPeftModelForCausalLM.from_pretrained("adapter") is not None
