"""Pre-training: a function of its seed, resumable to the bit, whole or absent on disk."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file

from repro.data.tiny_corpus import CorpusConfig, iterate_documents
from repro.data.tiny_tokenizer import build_tokenizer
from repro.models.checkpoint import TINY_FOLDER
from repro.models.policy import load_policy
from repro.procedures.pretrain import (
    PretrainConfig,
    batch_loss,
    iterate_batches,
    new_model,
    pretrain,
)
from repro.procedures.pretrain_quality import measure_quality
from repro.spec.config import derive_seed

SMALL = PretrainConfig(
    hidden_size=64,
    layers=2,
    heads=2,
    key_value_heads=1,
    intermediate_size=64,
    steps=12,
    tokens_per_batch=600,
    warmup_steps=2,
    checkpoint_every=100,
    quality_problems=5,
    threads=1,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder and result of one uninterrupted run."""
    folder = tmp_path_factory.mktemp("pretrain") / "policy"
    return folder, pretrain(SMALL, folder, seed=3)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(SMALL.corpus.generator)


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_the_same_seed_gives_the_same_bits_and_another_gives_others(whole, tmp_path):
    torch.manual_seed(99)
    again = pretrain(SMALL, tmp_path / "again", seed=3)
    other = pretrain(SMALL, tmp_path / "other", seed=4)
    assert equal(weights(whole[0]), weights(tmp_path / "again"))
    assert again.loss == whole[1].loss != other.loss
    assert not equal(weights(whole[0]), weights(tmp_path / "other"))


def test_an_interrupted_run_goes_on_to_the_same_bits(whole, tmp_path):
    calls = iter([False, False, False, False, True])
    folder = tmp_path / "policy"
    first = pretrain(SMALL, folder, seed=3, should_stop=lambda: next(calls))
    assert (first.finished, first.step) == (False, 5)
    assert not folder.exists()
    second = pretrain(SMALL, folder, seed=3)
    assert second.finished
    assert second.loss == whole[1].loss
    assert second.tokens == whole[1].tokens
    assert equal(weights(folder), weights(whole[0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy"]


def test_a_state_of_another_seed_is_refused(tmp_path):
    folder = tmp_path / "policy"
    pretrain(SMALL, folder, seed=3, should_stop=lambda: True)
    with pytest.raises(ValueError, match="belongs to another configuration or seed"):
        pretrain(SMALL, folder, seed=4)


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        pretrain(SMALL, tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_loss_falls_and_progress_is_told(tmp_path):
    told = []
    config = dataclasses.replace(SMALL, steps=100)
    result = pretrain(config, tmp_path / "p", seed=0, on_progress=lambda *at: told.append(at))
    assert [at[:2] for at in told] == [(step, 100) for step in range(1, 101)]
    first, last = result.loss
    assert told[0][2] == pytest.approx(math.log(333), rel=0.2)
    assert last < 0.8 * first


def test_a_checkpoint_holds_bfloat16_a_summary_and_what_loading_needs(whole):
    folder, result = whole
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights(folder)
    policy = load_policy(
        folder, weight_format="nvfp4", training="lora", lora_rank=4, lora_alpha=4.0, seed=0
    )
    assert policy.effects["linears"] == {"nvfp4": 14}
    summary = json.loads((folder / "pretraining.json").read_text())
    assert summary["seed"] == 3
    assert summary["config"]["corpus"]["careless_share"] == [0.1, 0.3, 0.5, 0.6, 0.65]
    assert summary["result"]["tokens"] == result.tokens
    assert summary["result"]["quality"]["greedy"] == result.quality.greedy


def test_batches_hold_whole_documents_of_like_length_and_the_end_token(tokenizer):
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    real = padded = 0
    for batch in islice(iterate_batches(SMALL, tokenizer, 0), 200):
        assert batch.numel() <= SMALL.tokens_per_batch
        for row in batch.tolist():
            text = row[: row.index(end) + 1]
            assert pad not in text
            assert set(row[len(text) :]) <= {pad}
            real += len(text)
        padded += batch.numel()
    assert real / padded > 0.95


def test_every_document_of_the_corpus_is_seen_once(tokenizer):
    seen = []
    for batch in iterate_batches(SMALL, tokenizer, 7):
        seen += [tokenizer.decode(row, skip_special_tokens=True) for row in batch.tolist()]
        if len(seen) >= 4096:
            break
    documents = islice(iterate_documents(derive_seed(7, "corpus"), CorpusConfig()), 4096)
    assert sorted(seen) == sorted(d.prompt + d.completion for d in documents)


def test_padding_has_neither_loss_nor_influence(tokenizer):
    model = new_model(SMALL, tokenizer, 0)
    pad = tokenizer.pad_token_id
    rows = [[9, 30, 270, 271, 40, 1], [50, 60, 1]]
    padded = torch.tensor([rows[0], rows[1] + [pad] * 3])
    loss, count = batch_loss(model, padded, pad)
    assert count == 5 + 2
    total = 0.0
    for row in rows:
        logprobs = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        total -= logprobs[torch.arange(len(row) - 1), row[1:]].sum()
    torch.testing.assert_close(loss, total / count)


def test_the_learning_rate_warms_up_stays_and_falls():
    config = PretrainConfig(steps=1000, learning_rate=1.0, warmup_steps=100, final_share=0.02)
    rates = [config.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == rates[600] == 1.0
    assert rates[800] == pytest.approx(0.51)
    assert rates[999] == pytest.approx(0.02, abs=0.003)
    assert max(rates) == 1.0


def test_sizes_that_the_formats_cannot_block_are_refused():
    with pytest.raises(ValueError, match="hidden_size is 96"):
        PretrainConfig(hidden_size=96)
    with pytest.raises(ValueError, match="steps is 0"):
        PretrainConfig(steps=0)


def test_the_packaged_policy_shows_half_of_what_it_knows():
    assert sum(path.stat().st_size for path in TINY_FOLDER.iterdir()) < 3_000_000
    quality = measure_quality("tiny", CorpusConfig(), seed=0, problems=200, samples=2, split="test")
    assert 30 <= quality.greedy <= 60
    assert quality.forced_working >= 85
    assert quality.given_working >= 4 * quality.given_careless
    assert 10 <= quality.sampled_mean <= 35


def test_the_packaged_policy_is_what_its_summary_says():
    summary = json.loads((TINY_FOLDER / "pretraining.json").read_text())
    config = PretrainConfig()
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
