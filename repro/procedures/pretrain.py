"""Pre-training of the tiny policy: a small Qwen2 learns the mixed corpus from scratch.

Next-token prediction over whole documents (prompt and completion), AdamW, a linear warm-up, a flat
stretch, and a linear fall to a small rest. The number of steps is fixed and the schedule depends on
the step alone, so a run is a function of its configuration and seed; a clock decides nothing.

Speed on a CPU comes from the batches: documents of like length share a batch, and a batch holds
about a fixed number of tokens rather than of documents, so little is padded and each token weighs
the same. Padding stands on the right, where causal attention cannot see it, and needs no mask.

Easy to get wrong: judging by the loss (it is flat for a long time while greedy accuracy rises from
nothing to its end value; `repro.procedures.pretrain_quality` measures what counts), and measuring
the float32 weights of training instead of the bfloat16 ones that were written.

The recipe follows a probe with other code: "AdamW (.9, .98), weight decay .05 on matrices, clip 1,
warm-up 100, flat to 60 %, then linear to 2 %".
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from repro.data.tiny_corpus import CorpusConfig, Document, iterate_documents
from repro.data.tiny_tokenizer import build_tokenizer
from repro.procedures.pretrain_quality import Quality, measure_quality
from repro.procedures.pretrain_recipe import Recipe
from repro.procedures.pretrain_state import Progress, load_state, save_state
from repro.spec.config import derive_seed, digest_of, require

_POOL_DOCUMENTS = 4096
_IGNORED = -100
# Beside the weights: configuration, seed, loss and quality.
SUMMARY_FILE = "pretraining.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig(Recipe):
    """The tiny policy's recipe with its corpus."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainResult:
    """What pre-training did.

    Attributes
    ----------
    finished
        False when `should_stop` ended it; the state for going on lies beside the folder.
    loss
        Mean loss of each stretch of 50 steps, nats a token.
    tokens, seconds
        Tokens trained on (padding excluded) and seconds, those before an interruption included.
    quality
        Of the checkpoint as written; None when unfinished.
    """

    finished: bool
    step: int
    loss: tuple[float, ...]
    tokens: int
    seconds: float
    quality: Quality | None = None


def new_model(config: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return a freshly initialised float32 model for the tokenizer's vocabulary."""
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_value_heads,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # transformers initialises from the global generator; keep that from leaking either way.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init"))
        return Qwen2ForCausalLM(shape).float()


def iterate_batches(
    config: PretrainConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[Tensor]:
    """Yield batches of right-padded token ids, (documents, length), int64, without end."""
    documents = iterate_documents(derive_seed(seed, "corpus"), config.corpus)
    rng = random.Random(derive_seed(seed, "batches"))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    while True:
        pool = list(islice(documents, _POOL_DOCUMENTS))
        rows = [[*ids, end] for ids in _encode(pool, tokenizer)]
        rows.sort(key=len)
        batches: list[list[list[int]]] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * len(row) > config.tokens_per_batch:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        for batch in batches:
            filled = np.full((len(batch), max(map(len, batch))), pad, dtype=np.int64)
            for index, row in enumerate(batch):
                filled[index, : len(row)] = row
            yield torch.from_numpy(filled)


def _encode(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    texts = [document.prompt + document.completion for document in documents]
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]


def batch_loss(model: nn.Module, batch: Tensor, pad_token_id: int) -> tuple[Tensor, int]:
    """Return the mean next-token loss of a batch, (), float32, nats, and its token count."""
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
    targets = batch[:, 1:].masked_fill(batch[:, 1:] == pad_token_id, _IGNORED)
    count = int((targets != _IGNORED).sum())
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED
    )
    return loss, count


def new_optimizer(model: nn.Module, config: Recipe) -> torch.optim.AdamW:
    """Return AdamW over the model's parameters, with decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def write_checkpoint(
    folder: Path,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    finish: Callable[[Path], None],
) -> None:
    """Write a bfloat16 checkpoint with its tokenizer; the folder appears whole or not at all.

    `finish` is called with the folder under its temporary name, to measure it and to add to it.
    """
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.part-"))
    try:
        nn.Module.to(model, torch.bfloat16)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        finish(partial)
        partial.chmod(0o755)
        for path in partial.iterdir():
            path.chmod(0o644)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def pretrain(
    config: PretrainConfig,
    folder: str | Path,
    *,
    seed: int,
    on_progress: Callable[[int, int, float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> PretrainResult:
    """Pre-train the tiny policy and write its checkpoint to `folder`.

    Parameters
    ----------
    folder
        Must not exist yet, or be empty. While training, `<folder>.state.safetensors` beside it
        holds what a second call needs to go on.
    seed
        Decides the initial weights, the corpus and the order.
    on_progress
        Called after each step with (steps done, steps in all, mean recent loss).
    should_stop
        Asked after each step; when true the state is saved and an unfinished result returned.

    Raises
    ------
    ValueError
        When the folder holds something, or a saved state belongs to another configuration.
    FloatingPointError
        When the loss is not finite.
    """
    folder = Path(folder)
    require(
        not folder.exists() or not any(folder.iterdir()),
        f"{folder} is not empty; pre-training needs a new folder",
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(config.corpus.generator)
    model = new_model(config, tokenizer, seed)
    optimizer = new_optimizer(model, config)
    digest = digest_of([dataclasses.asdict(config), seed])
    state_path = folder.with_name(folder.name + ".state.safetensors")
    progress = Progress()
    if state_path.exists():
        progress = load_state(state_path, model, optimizer, digest)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        batches = islice(iterate_batches(config, tokenizer, seed), progress.step, None)
        while progress.step < config.steps:
            _one_step(model, optimizer, next(batches), config, progress)
            if on_progress is not None:
                recent = progress.losses[-50:]
                on_progress(progress.step, config.steps, sum(recent) / len(recent))
            stopping = should_stop is not None and should_stop()
            if stopping or progress.step % config.checkpoint_every == 0:
                save_state(state_path, model, optimizer, progress, digest)
            if stopping and progress.step < config.steps:
                return _result(progress, finished=False)
    finally:
        torch.set_num_threads(threads_before)
    result = _result(progress, finished=True)

    def finish(partial: Path) -> None:
        nonlocal result
        quality = measure_quality(
            partial, config.corpus, seed=seed, problems=config.quality_problems
        )
        result = dataclasses.replace(result, quality=quality)
        text = json.dumps(summary_of(config, result, seed), indent=1)
        (partial / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")

    write_checkpoint(folder, model, tokenizer, finish)
    state_path.unlink(missing_ok=True)
    return result


def _one_step(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.AdamW,
    batch: Tensor,
    config: PretrainConfig,
    progress: Progress,
) -> None:
    began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(progress.step)
    loss, count = batch_loss(model, batch, cast(int, model.config.pad_token_id))
    if not bool(torch.isfinite(loss)):
        raise FloatingPointError(f"the loss of pre-training step {progress.step} is {loss.item()}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    progress.step += 1
    progress.tokens += count
    progress.losses.append(loss.item())
    progress.seconds += time.perf_counter() - began


def _result(progress: Progress, *, finished: bool) -> PretrainResult:
    losses = progress.losses
    stretches = [losses[at : at + 50] for at in range(0, len(losses), 50)]
    return PretrainResult(
        finished=finished,
        step=progress.step,
        loss=tuple(sum(stretch) / len(stretch) for stretch in stretches),
        tokens=progress.tokens,
        seconds=progress.seconds,
    )


def summary_of(config: PretrainConfig, result: PretrainResult, seed: int) -> dict[str, Any]:
    """Return configuration and result as JSON values."""
    return {
        "config": dataclasses.asdict(config),
        "seed": seed,
        "result": dataclasses.asdict(result),
    }
