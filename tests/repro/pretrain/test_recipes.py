"""Recipes: sizes that the formats can block, a schedule of the step alone, and what was shipped."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from repro.models.checkpoint import TINY_FOLDER
from repro.pretrain.recipes import PROXIES, TinyRecipe
from repro.pretrain.training import new_model


def test_the_learning_rate_warms_up_stays_and_falls():
    config = TinyRecipe(steps=1000, learning_rate=1.0, warmup_steps=100, final_share=0.02)
    rates = [config.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == rates[600] == 1.0
    assert rates[800] == pytest.approx(0.51)
    assert rates[999] == pytest.approx(0.02, abs=0.003)
    assert max(rates) == 1.0


def test_sizes_that_the_formats_cannot_block_are_refused():
    with pytest.raises(ValueError, match="hidden_size is 96"):
        TinyRecipe(hidden_size=96)
    with pytest.raises(ValueError, match="steps is 0"):
        TinyRecipe(steps=0)


def test_recipes_have_the_sizes_they_are_named_for(proxy_tokenizer):
    counts = {}
    for name, recipe in PROXIES.items():
        with torch.device("meta"):
            model = new_model(recipe, proxy_tokenizer, 0)
        rest = (
            sum(p.numel() for p in model.parameters()) - len(proxy_tokenizer) * recipe.hidden_size
        )
        counts[name] = rest + 3072 * recipe.hidden_size
        assert recipe.hidden_size == 64 * recipe.heads
        assert recipe.intermediate_size % 128 == 0
    assert 25e6 < counts["proxy-30m"] < 30e6
    assert 110e6 < counts["proxy-120m"] < 125e6
    assert 2 * counts["proxy-30m"] < 60e6
    assert all(counts[name] == counts["proxy-30m"] for name in counts if "30m" in name)


def test_the_packaged_policy_is_what_its_summary_says():
    summary = json.loads((TINY_FOLDER / "pretraining.json").read_text())
    config = TinyRecipe()
    stated = summary["config"]
    # Threads change rounding, not the recipe.
    ours = json.loads(json.dumps(dataclasses.asdict(config))) | {"threads": stated["threads"]}
    # What the generator can do since then is off in this recipe.
    ours_of, stated_of = ours["corpus"]["generator"], stated["corpus"]["generator"]
    later = [name for name in ours_of if name not in stated_of]
    assert all(not ours_of.pop(name) for name in later)
    assert stated == ours
    shape = json.loads((TINY_FOLDER / "config.json").read_text())
    assert shape["num_hidden_layers"] == config.layers
    assert shape["intermediate_size"] == config.intermediate_size
