"""Recipes: sizes that the formats can block, a schedule of the step alone, and what was shipped."""

from __future__ import annotations

import dataclasses
import json

import pytest

from repro.models.checkpoint import TINY_FOLDER
from repro.pretrain.recipes import Recipe


def test_the_learning_rate_warms_up_stays_and_falls():
    config = Recipe(steps=1000, learning_rate=1.0, warmup_steps=100, final_share=0.02)
    rates = [config.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == rates[600] == 1.0
    assert rates[800] == pytest.approx(0.51)
    assert rates[999] == pytest.approx(0.02, abs=0.003)
    assert max(rates) == 1.0


def test_sizes_that_the_formats_cannot_block_are_refused():
    with pytest.raises(ValueError, match="hidden_size is 96"):
        Recipe(hidden_size=96)
    with pytest.raises(ValueError, match="steps is 0"):
        Recipe(steps=0)


def test_the_packaged_policy_is_what_its_summary_says():
    summary = json.loads((TINY_FOLDER / "pretraining.json").read_text())
    config = Recipe()
    stated = summary["config"]
    # Threads change rounding, not the recipe.
    ours = json.loads(json.dumps(dataclasses.asdict(config))) | {"threads": stated["threads"]}
    assert stated == ours
    shape = json.loads((TINY_FOLDER / "config.json").read_text())
    assert shape["num_hidden_layers"] == config.layers
    assert shape["intermediate_size"] == config.intermediate_size
