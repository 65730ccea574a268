"""Pre-train the tiny policy from scratch, in minutes on two cores: `run pretrain-tiny`.

Next-token prediction over whole documents (`repro.data.tiny_corpus`). The number of steps is fixed
and the schedule depends only on the step, so that the policy is a function of recipe, seed and
number of threads. An interrupted run starts over.

The folder `policy` next to the record has the policy in bfloat16 and its tokenizer; the policy of
this package was made so. `python -m repro evaluate FOLDER --template tiny` measures it: a policy
that is worth training solves some problems, most of them with its working written out.

Easy to get wrong: judging by the loss, which is flat for a long time while greedy accuracy rises
from zero to its final value; taking the float32 master weights for the policy.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from repro.data.tiny_corpus import CorpusConfig, iterate_documents
from repro.data.tiny_tokenizer import build_tokenizer
from repro.evidence.procedure import Measured, RunContext, Stopped
from repro.evidence.record import Estimate
from repro.measure.device_state import peak_bytes, reset_peak
from repro.models.checkpoint import digest_of_files
from repro.models.loading import SUMMARY_FILE
from repro.spec.config import PretrainScale, RunConfig, derive_seed, digest_of
from repro.spec.facts import Facts
from repro.spec.whole_files import appearing, replace_text

# Documents that are sorted by length together, and steps per recorded mean loss.
_POOL_DOCUMENTS, _STRETCH = 4096, 50
_IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A Qwen2 shape with tied embeddings, its corpus, the optimiser and the schedule.

    AdamW with decay on matrices only and the gradient clipped by its global norm; a linear warm-up,
    a flat stretch, and from the share `flat_until` of the steps a linear fall to the share
    `final_share` of the rate. Hidden and intermediate sizes are multiples of 64, the largest block
    of the 4-bit formats. A batch has at most `tokens_per_batch` tokens, padding included.
    """

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 384
    initializer_range: float = 0.05
    rope_theta: float = 10_000.0
    steps: int = 3000
    tokens_per_batch: int = 2560
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    flat_until: float = 0.6
    final_share: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    corpus: CorpusConfig = field(default_factory=CorpusConfig)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        fall_from = self.flat_until * self.steps
        fallen = max(0.0, (step - fall_from) / (self.steps - fall_from))
        return self.learning_rate * warm * (1.0 - (1.0 - self.final_share) * fallen)


RECIPE = Recipe()


def pretrain_policy(run: RunConfig, context: RunContext) -> Measured:
    """Pre-train the policy and write it; see `repro.evidence.procedure.Procedure`.

    The scale's own number of threads is used, since it is part of the result; the context's is not.
    """
    scale: PretrainScale = run.scale
    reset_peak()
    began = time.perf_counter()
    tokenizer = build_tokenizer()
    model = new_model(RECIPE, tokenizer, run.seed)
    torch.set_num_threads(scale.threads)
    losses, tokens = train(model, tokenizer, RECIPE, run.seed, context)
    seconds = time.perf_counter() - began
    policy = context.folder / "policy"
    write_policy(policy, model, tokenizer)
    stretches = [losses[at : at + _STRETCH] for at in range(0, len(losses), _STRETCH)]
    loss = [sum(part) / len(part) for part in stretches]
    weights = digest_of_files(sorted(policy.glob("*.safetensors")))
    recipe = dataclasses.asdict(RECIPE)
    summary = {
        "name": "tiny",
        "seed": run.seed,
        "config": recipe | {"threads": scale.threads},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": tokens,
        "train_seconds": seconds,
        "weights_sha256": weights,
        "loss": loss,
    }
    replace_text(policy / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")
    costs = {
        "train_seconds": Estimate(
            value=seconds, unit="seconds", method="steps with the making of their batches"
        ),
        "peak_bytes": Estimate(
            value=float(peak_bytes()), unit="bytes", method="peak of the process during the run"
        ),
    }
    kept = ("parameters", "tokens", "weights_sha256")
    facts = Facts({name: summary[name] for name in kept}, checkpoint_folder=str(policy))
    inputs = {"recipe": digest_of(recipe), "tokenizer": digest_of(tokenizer.get_vocab())}
    return Measured(metrics=costs, series={"loss": [*loss]}, facts=facts, inputs=inputs)


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return a new float32 model for the tokenizer's vocabulary."""
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # transformers initialises with the global generator; isolate and restore its state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init"))
        return Qwen2ForCausalLM(shape).float()


def batches_of(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[list[list[int]]]:
    """Yield endless batches of documents' token ids, each with its end token.

    Documents of similar length share a batch, so that there is little padding.
    """
    documents = iterate_documents(derive_seed(seed, "corpus"), recipe.corpus)
    rng = random.Random(derive_seed(seed, "batches"))
    while True:
        pool = list(islice(documents, _POOL_DOCUMENTS))
        texts = [prompt + completion for prompt, completion in pool]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        rows = sorted(([*ids, tokenizer.eos_token_id] for ids in encoded["input_ids"]), key=len)
        batches: list[list[list[int]]] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * len(row) > recipe.tokens_per_batch:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from batches


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    seed: int,
    context: RunContext,
) -> tuple[list[float], int]:
    """Train a model in place; return each step's loss, nats per token, and the tokens read.

    Raises `Stopped` if `should_stop` returned true; `FloatingPointError` when a loss is not finite.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(recipe.beta1, recipe.beta2),
        fused=True,
    )
    losses, tokens = list[float](), 0
    for step, rows in enumerate(islice(batches_of(recipe, tokenizer, seed), recipe.steps)):
        if context.should_stop():
            raise Stopped
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model, rows)
        loss.backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss of pre-training step {step} is {losses[-1]}")
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        tokens += sum(map(len, rows))
        recent = losses[-_STRETCH:]
        shown = {"step": step + 1.0, "steps": float(recipe.steps)}
        context.progress("pre-training", shown | {"loss": sum(recent) / len(recent)})
    return losses, tokens


def mean_loss(model: Qwen2ForCausalLM, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean next-token loss of documents, (), float32, nats, by transformers' pass."""
    # Padding is on the right, where causal attention does not see it, and needs no mask.
    targets = pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=_IGNORED
    )  # (B, T)
    logits = model(input_ids=targets.clamp(min=0), use_cache=False).logits[:, :-1]  # (B, T - 1, V)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=_IGNORED
    )


def write_policy(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the model in bfloat16 with its tokenizer, replacing an existing folder."""
    shutil.rmtree(folder, ignore_errors=True)
    with appearing(folder) as partial:
        rounded: Any = copy.deepcopy(model).eval()
        nn.Module.to(rounded, torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            path.chmod(0o644)
