"""Pre-training a proxy policy: the right function, one result from a seed, whole checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from repro.data.human_working import worked_problems
from repro.data.problem import Problem, write_problems
from repro.data.proxy_corpus import WORKING_PREFIX, ProxyCorpusConfig, shard_documents
from repro.data.proxy_tokenizer import build_proxy_tokenizer
from repro.models.checkpoint import resolve, verify
from repro.models.policy import load_policy
from repro.procedures import Stopped, procedure_named, proxy_quality, proxy_run
from repro.procedures.pretrain import new_model
from repro.procedures.pretrain_proxy import begin, train_until
from repro.procedures.proxy_batches import iterate_batches, shard_batches, source_of
from repro.procedures.proxy_forward import logits_of, weighted_loss
from repro.procedures.proxy_quality import answers_to, same_number
from repro.procedures.proxy_recipe import RECIPES, HumanData, ProxyRecipe, read_human_data
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find

SMALL = ProxyRecipe(
    hidden_size=64,
    layers=2,
    heads=2,
    key_value_heads=1,
    intermediate_size=64,
    steps=6,
    tokens_per_batch=1500,
    parts=2,
    warmup_steps=2,
    checkpoint_every=100,
    quality_problems=5,
    quality_samples=2,
    threads=1,
    corpus=ProxyCorpusConfig(shard_documents=64),
)


def batches_of(recipe, tokenizer, human, seed, shard):
    source = source_of(recipe, tokenizer, human, seed)
    return shard_batches(source, Tokenizer.from_str(source.tokenizer), shard)


def human_problems(count):
    return [
        Problem(
            id=str(n),
            question=f"Bo has {n} kites, then 2 more?",
            answer=str(n + 2),
            solution=f"x={n}+2",
        )
        for n in range(3, 3 + count)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return build_proxy_tokenizer(SMALL.corpus)


def write_humans(folder):
    for name in ("mawps", "svamp"):
        (folder / name).mkdir(parents=True)
        write_problems(folder / name / "test.jsonl", human_problems(3))
    write_problems(folder / "mawps" / "train.jsonl", human_problems(8))
    return folder


def fresh(tmp_path, seed=0, recipe=SMALL):
    path = tmp_path / "state.safetensors"
    return begin(recipe, path, seed=seed, human=HumanData(), device="cpu")


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def equal(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_the_lean_forward_is_transformers_own_function(tokenizer):
    recipe = dataclasses.replace(SMALL, heads=4, key_value_heads=2, initializer_range=0.2)
    model = new_model(recipe, tokenizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    ids = torch.randint(3, len(tokenizer), (3, 40), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids).logits
    torch.testing.assert_close(logits_of(model, ids, torch.float32), expected)
    in_sixteen = logits_of(model, ids, torch.bfloat16)
    assert in_sixteen.dtype == torch.bfloat16
    error = (in_sixteen.float() - expected).norm() / expected.norm()
    assert error < 0.03


def test_the_loss_weighs_prompt_and_completion_and_leaves_padding_out(tokenizer):
    model = new_model(SMALL, tokenizer, 0)
    (batch, *_) = batches_of(SMALL, tokenizer, (), 0, 0)
    part = batch[0]
    weight = part.weights(0.25)
    loss = weighted_loss(
        model, torch.from_numpy(part.ids).long(), torch.from_numpy(weight), torch.float32
    )
    total = 0.0
    for row, prompt, length in zip(part.ids, part.prompts, part.lengths, strict=True):
        ids = torch.from_numpy(row[:length]).long()[None]
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        losses = -logprobs[torch.arange(length - 1), ids[0, 1:]]
        total += 0.25 * losses[: prompt - 1].sum() + losses[prompt - 1 :].sum()
    torch.testing.assert_close(loss, total)
    assert weight.sum() == pytest.approx(
        float((0.25 * (part.prompts - 1) + part.lengths - part.prompts).sum())
    )


def test_a_shard_s_batches_hold_each_document_once_and_every_length_in_each(tokenizer):
    recipe = dataclasses.replace(
        SMALL, parts=4, tokens_per_batch=6000, corpus=ProxyCorpusConfig(shard_documents=600)
    )
    batches = batches_of(recipe, tokenizer, (), 3, 5)
    assert all(len(batch) == 4 for batch in batches)
    found, real, padded = [], 0, 0
    for part in itertools.chain(*batches):
        for row, length in zip(part.ids, part.lengths, strict=True):
            assert row[length - 1] == tokenizer.eos_token_id
            assert set(row[length:].tolist()) <= {tokenizer.pad_token_id}
            found.append(tokenizer.decode(row[: length - 1].tolist()))
        real, padded = real + int(part.lengths.sum()), padded + part.ids.size
    documents = shard_documents(3, 5, recipe.corpus)
    assert sorted(found) == sorted(d.prompt + d.completion for d in documents)
    assert real / padded > 0.9
    sizes = [sum(int(part.lengths.sum()) for part in batch) for batch in batches]
    assert max(sizes) < 1.1 * min(sizes)
    means = [[part.lengths.mean() for part in batch] for batch in batches]
    assert all(mean[-1] > 1.5 * mean[0] for mean in np.sort(means, axis=1))


def test_batches_do_not_depend_on_who_makes_them(tokenizer):
    human = worked_problems(human_problems(4))
    tokenizer = build_proxy_tokenizer(SMALL.corpus, human)

    def first(workers):
        batches = iterate_batches(source_of(SMALL, tokenizer, human, 9), workers=workers)
        taken = list(itertools.islice(batches, 12))
        batches.close()
        return taken

    alone, helped = first(0), first(2)
    for one, other in zip(alone, helped, strict=True):
        for part, same in zip(one, other, strict=True):
            assert np.array_equal(part.ids, same.ids)
            assert np.array_equal(part.prompts, same.prompts)


def test_a_stopped_policy_goes_on_to_the_same_bits_and_the_loss_falls(tmp_path):
    recipe = dataclasses.replace(SMALL, steps=12, learning_rate=5e-3)
    whole = fresh(tmp_path / "a", recipe=recipe)
    assert train_until(whole, 6, workers=0)
    assert train_until(whole, 12, workers=0)
    assert whole.finished
    assert whole.progress.losses[-1] < 0.95 * whole.progress.losses[0]
    assert whole.progress.losses[0] == pytest.approx(math.log(len(whole.tokenizer)), rel=0.1)
    calls = iter([False] * 4 + [True])
    stopped = fresh(tmp_path / "b", recipe=recipe)
    assert not train_until(stopped, 12, workers=0, should_stop=lambda: next(calls))
    assert stopped.progress.step == 5
    going_on = fresh(tmp_path / "b", recipe=recipe)
    assert going_on.progress.step == 5
    assert train_until(going_on, 12, workers=0)
    assert equal(weights(going_on.model), weights(whole.model))
    assert going_on.progress.losses == whole.progress.losses
    assert going_on.progress.tokens == whole.progress.tokens
    with pytest.raises(ValueError, match="another configuration or seed"):
        fresh(tmp_path / "b", seed=1, recipe=recipe)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    training = fresh(tmp_path)
    with torch.no_grad():
        training.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 0 is nan"):
        train_until(training, 2, workers=0)


def test_recipes_have_the_sizes_they_are_named_for(tokenizer):
    counts = {}
    for name, recipe in RECIPES.items():
        with torch.device("meta"):
            model = new_model(recipe, tokenizer, 0)
        rest = sum(p.numel() for p in model.parameters()) - len(tokenizer) * recipe.hidden_size
        counts[name] = rest + 3072 * recipe.hidden_size
        assert recipe.hidden_size == 64 * recipe.heads
        assert recipe.intermediate_size % 128 == 0
    assert 25e6 < counts["30m"] < 30e6
    assert 110e6 < counts["120m"] < 125e6
    assert 2 * counts["30m"] < 60e6


def test_every_size_is_predicted_to_fit_its_eight_minutes():
    # What one H200 took: for the smaller policy 128 477 512 tokens in 363.3 s, 445 s in all; for
    # the larger 28 462 609 in 132.1 s, 245 s in all.
    smaller = 6 * 28_721_408 * 128_477_512 / 363.3
    larger = 6 * 115_904_512 * 28_462_609 / 132.1
    cost = find("pretrain_proxy").costs[Tier.PROXY]
    parameters = {"30m": 28.7e6, "30m-early": 28.7e6, "120m": 115.9e6}
    for name, recipe in RECIPES.items():
        tokens = recipe.steps * recipe.tokens_per_batch
        measured, beside = (larger, 113) if name == "120m" else (smaller, 82)
        steps = 6 * parameters[name] * tokens / measured
        arm = f"proxy_{name.replace('-', '_')}"
        stated = cost.seconds_of_arm.get(arm, cost.train_seconds)
        assert stated == pytest.approx(steps + beside, rel=0.03)
        assert steps + beside < 480


def test_numbers_are_compared_exactly():
    assert same_number("1,250", "1250")
    assert same_number("0.50", "1/2")
    assert not same_number("12", "13")
    assert not same_number("twelve", "12")
    assert not same_number(None, "12")


def test_quality_reads_what_the_model_writes(tmp_path, monkeypatch):
    training = fresh(tmp_path)
    tokenizer = training.tokenizer
    answers = {"2+2?": "<think>\n2 + 2 = 4.\n</think>\n<answer>4</answer>", "3+3?": "\n#### 6"}
    problems = [Problem(id=q, question=q, answer=str(2 * int(q[0]))) for q in answers]

    def generate(input_ids, attention_mask, **options):
        assert not options["do_sample"]
        rows = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            text = tokenizer.decode(row[mask.bool()])
            question = text.split("\n")[0]
            done = text.removeprefix(question + "\n")
            new = tokenizer(answers[question].removeprefix(done))["input_ids"]
            new = [*new, tokenizer.eos_token_id]
            rows.append(row.tolist() + new + [tokenizer.pad_token_id] * (40 - len(new)))
        return torch.tensor(rows)

    monkeypatch.setattr(training.model, "generate", generate)
    (first,), (second,) = answers_to(training.model, tokenizer, problems)
    assert (first.correct, first.works, first.lenient, first.truncated) == (True, True, True, False)
    assert (second.correct, second.works, second.lenient) == (False, False, True)
    (forced,) = answers_to(training.model, tokenizer, problems[:1], openings=[WORKING_PREFIX])[0]
    assert forced.correct
    assert forced.tokens < first.tokens


def test_generation_stops_at_the_end_token_and_pads_on_the_left(tmp_path):
    training = fresh(tmp_path)
    model, tokenizer = training.model.eval(), training.tokenizer
    prompts = tokenizer(["Ada has 3 eggs.\n", "Ben owns 12 books. How many now?\n"])["input_ids"]
    together = proxy_quality._generate(model, tokenizer, prompts, sampled=False, seed=0)
    for prompt, ids in zip(prompts, together, strict=True):
        alone = proxy_quality._generate(model, tokenizer, [prompt], sampled=False, seed=0)[0]
        assert alone == ids
    before = torch.get_rng_state()
    drawn = [
        proxy_quality._generate(model, tokenizer, prompts, sampled=True, seed=s) for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_human_data_are_read_by_set_and_a_missing_one_is_named(tmp_path):
    human = read_human_data(str(write_humans(tmp_path / "human")))
    assert (len(human.worked), human.left_out) == (8, 0)
    assert {name: len(of) for name, of in human.asked.items()} == {"mawps": 3, "svamp": 3}
    with pytest.raises(ValueError, match="give --human-data, or set REPRO_DATA"):
        read_human_data(None)
    with pytest.raises(ValueError, match=r"train.jsonl is missing"):
        read_human_data(str(tmp_path))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Carry out a run of a small recipe under a real one's name; return what it measured."""
    root = tmp_path_factory.mktemp("proxy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "30m", SMALL)
        patch.setenv("REPRO_DATA", str(write_humans(root / "human")))
        patch.setenv("REPRO_POLICIES", str(root / "policies"))
        patch.setattr(proxy_quality, "MAX_NEW_TOKENS", 12)
        patch.setattr(proxy_run, "_CALIBRATION_ROWS", 2)
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        run = plan(find("pretrain_proxy"), Tier.PROXY)[0]
        scale = dataclasses.replace(run.scale, quality_problems=5, threads=1, human_data=True)
        run = dataclasses.replace(run, scale=scale)
        phases, asked = [], itertools.count()

        def start(should_stop):
            return procedure_named(run.procedure)(
                run,
                folder=root / "run",
                progress=lambda *at: phases.append(at[0]),
                should_stop=should_stop,
                threads=1,
            )

        with pytest.raises(Stopped):
            start(lambda: next(asked) >= 1)
        assert not (root / "policies").exists()
        yield start(lambda: False), phases, root / "policies"


def test_a_run_leaves_policies_in_every_variant_and_measures_them(made):
    measured, phases, policies = made
    assert {"pre-training", "measuring", "writing 4-bit policies"} <= set(phases)
    assert measured.effects["human_problems_trained"] == 8
    assert set(measured.metrics) >= {"accuracy_greedy", "accuracy_mawps", "accuracy_svamp"}
    assert {"recipe", "tokenizer", "human_problems", "svamp_test_problems"} <= set(measured.inputs)
    variants = ("", "-nvfp4", "-mxfp4", "-nf4", "-calibrated", "-nvfp4-awq")
    assert {path.name for path in policies.iterdir()} == {f"proxy-30m{name}" for name in variants}
    summary = json.loads((resolve("proxy-30m") / "pretraining.json").read_text())
    assert summary["weights_sha256"] == measured.effects["checkpoint_sha256"]
    rounded = {"nf4", "mxfp4", "nvfp4"}
    stored = {*(f"{name} stored" for name in rounded), "nvfp4-awq"}
    assert set(summary["four_bit"]) == rounded | stored | {"calibrated bf16"}
    assert summary["quality"]["human_problems"] == {"mawps": 3, "svamp": 3}
    assert summary["halfway"]["step"] == 3
    assert verify(resolve("proxy-30m-nvfp4-awq")) is not None


def test_the_variants_reload_as_what_they_were(made):
    def logits(name, weight_format):
        policy = load_policy(
            name, weight_format=weight_format, training="none", lora_rank=1, lora_alpha=1.0, seed=0
        )
        ids = policy.tokenizer("Ada has 3 eggs. Ada finds 12 eggs.\n", return_tensors="pt")
        with torch.no_grad():
            return policy.model(input_ids=ids["input_ids"]).logits

    dtypes = {t.dtype for t in load_file(resolve("proxy-30m") / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert torch.equal(logits("proxy-30m-nvfp4", "nvfp4"), logits("proxy-30m", "nvfp4"))
    assert torch.equal(logits("proxy-30m-mxfp4", "mxfp4"), logits("proxy-30m", "mxfp4"))
    assert torch.equal(logits("proxy-30m-nf4", "nf4"), logits("proxy-30m", "nf4"))
    scaled = logits("proxy-30m-calibrated", "nvfp4")
    assert torch.equal(logits("proxy-30m-nvfp4-awq", "nvfp4"), scaled)
    exact, same = logits("proxy-30m", "bf16"), logits("proxy-30m-calibrated", "bf16")
    assert (same - exact).norm() / exact.norm() < 0.02


def test_sixteen_bit_arithmetic_gives_nearly_the_same_gradient_on_float32_masters(tokenizer):
    model = new_model(SMALL, tokenizer, 0)
    (batch, *_) = batches_of(SMALL, tokenizer, (), 0, 0)
    ids = torch.from_numpy(batch[0].ids).long()[:4]
    weight = torch.from_numpy(batch[0].weights(0.25))[:4]

    def gradient(dtype):
        model.zero_grad()
        weighted_loss(model, ids, weight, dtype).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact, rounded = gradient(torch.float32), gradient(torch.bfloat16)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.995
