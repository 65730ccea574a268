"""Pre-training: a function of recipe and seed, and a whole checkpoint with its measures."""

import dataclasses
import json
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repro.__main__ import main
from repro.data.tiny_corpus import iterate_documents
from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Stopped
from repro.evidence.record import read_record
from repro.models.checkpoint import TINY_FOLDER
from repro.models.policy import load_policy
from repro.procedures import pretrain
from repro.procedures.pretrain import Recipe, batches_of, mean_loss, new_model, train
from repro.run.carry_out import keep, procedure_named
from repro.spec.config import derive_seed
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.small_runs import context_of

SMALL = Recipe(
    hidden_size=64,
    layers=2,
    heads=2,
    key_value_heads=1,
    intermediate_size=64,
    steps=12,
    tokens_per_batch=600,
    warmup_steps=2,
)


def small_run():
    (run,) = plan(find("pretrain_tiny"), Tier.SMOKE)
    return dataclasses.replace(run, scale=dataclasses.replace(run.scale, threads=1))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Carry out the run by a small recipe; yield its result and its policy."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "RECIPE", SMALL)
        measured = procedure_named("pretrain")(small_run(), context_of(folder, threads=3))
        yield measured, folder / "policy"


def test_a_run_leaves_a_checkpoint_and_its_record(small, tmp_path):
    measured, folder = small
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored
    policy = load_policy(
        folder, weight_format="nvfp4", training="lora", lora_rank=4, lora_alpha=4.0, seed=0
    )
    assert policy.facts["linears"] == {"nvfp4": 14}
    assert set(measured.metrics) == {metric.name for metric in find("pretrain_tiny").metrics}
    path = keep(small_run(), measured, datetime.now(UTC), tmp_path, capture_environment())
    record = read_record(path)
    summary = json.loads((folder / "pretraining.json").read_text())
    assert summary["weights_sha256"] == record.facts["weights_sha256"]
    assert summary["loss"] == record.series["loss"]


def trained(tokenizer, seed, recipe=SMALL):
    model = new_model(recipe, tokenizer, seed)
    losses, _ = train(model, tokenizer, recipe, seed, context_of(Path()))
    return losses, model.state_dict()


def test_the_same_seed_gives_the_same_bits_and_another_gives_others(tokenizer):
    first = trained(tokenizer, 3)
    torch.manual_seed(99)
    again, other = trained(tokenizer, 3), trained(tokenizer, 4)
    assert first[0] == again[0] != other[0]
    assert all(torch.equal(value, again[1][name]) for name, value in first[1].items())


def test_the_loss_falls_and_one_that_is_not_finite_ends_the_run(tokenizer):
    losses, _ = trained(tokenizer, 0, dataclasses.replace(SMALL, steps=60))
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    with pytest.raises(FloatingPointError, match="step 1 is nan"):
        trained(tokenizer, 0, dataclasses.replace(SMALL, learning_rate=float("nan")))


def test_a_run_that_is_stopped_leaves_no_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "RECIPE", SMALL)
    with pytest.raises(Stopped):
        pretrain.pretrain_policy(small_run(), context_of(tmp_path, should_stop=lambda: True))
    assert not list(tmp_path.iterdir())


def test_every_document_is_in_a_batch_once_whole_and_with_its_end(tokenizer):
    seen = []
    for batch in batches_of(SMALL, tokenizer, 7):
        assert len(batch) * max(map(len, batch)) <= SMALL.tokens_per_batch
        assert {row.index(tokenizer.eos_token_id) - len(row) for row in batch} == {-1}
        seen += [tokenizer.decode(row, skip_special_tokens=True) for row in batch]
        if len(seen) >= 4096:
            break
    documents = islice(iterate_documents(derive_seed(7, "corpus"), SMALL.corpus), 4096)
    assert sorted(seen) == sorted(map("".join, documents))


def test_padding_has_neither_loss_nor_influence(tokenizer):
    model = new_model(SMALL, tokenizer, 0)
    rows = [[9, 30, 270, 271, 40, 1], [50, 60, 1]]
    total = torch.zeros(())
    for row in rows:
        logprobs = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        total = total - logprobs[torch.arange(len(row) - 1), row[1:]].sum()
    torch.testing.assert_close(mean_loss(model, rows), total / (5 + 2))


def test_the_packaged_policy_is_of_this_recipe():
    stated = json.loads((TINY_FOLDER / "pretraining.json").read_text())["config"]
    ours = json.loads(json.dumps(dataclasses.asdict(Recipe())))
    assert {name: stated[name] for name in ours} == ours


@pytest.mark.nightly
def test_the_packaged_policy_solves_some_problems_greedily(tmp_path):
    line = ["evaluate", "tiny", "--template", "tiny", "--data", "generated", "--limit", "200"]
    out = tmp_path / "record.json"
    assert main([*line, "--temperature", "0", "--tokens", "64", "--out", str(out)]) == 0
    accuracy = json.loads(out.read_text())["sets"]["generated"]["metrics"]["accuracy"]
    assert 30 <= accuracy["value"] <= 60
