"""Pre-training of a proxy policy: a Qwen2 of 30 or 120 million parameters, on one GPU, in minutes.

As the tiny policy's pre-training (`repro.procedures.pretrain`), with what a GPU asks for: documents
drawn and tokenised by worker processes, bfloat16 arithmetic upon float32 masters, a lean forward,
and no waiting for the device but every few steps. It stops and goes on in the same way.

On a CUDA device deterministic algorithms are asked for, so that one seed gives one policy on one
kind of device; another kind, or another release of its libraries, adds in another order.

Easy to get wrong: reading each step's loss (the device then idles), and forgetting that the loss of
a part is a sum: the step divides by the weight of all its parts.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from repro.data.proxy_tokenizer import build_proxy_tokenizer
from repro.procedures.pretrain import new_model, new_optimizer
from repro.procedures.pretrain_state import Progress, load_state, save_state
from repro.procedures.proxy_batches import Batch, iterate_batches, source_of
from repro.procedures.proxy_forward import weighted_loss
from repro.procedures.proxy_recipe import HumanData, ProxyRecipe
from repro.spec.config import derive_seed, digest_of

_READ_EVERY = 20
ProgressCall = Callable[[int, int, float], None]


@dataclass(slots=True)
class Pretraining:
    """A policy in training.

    Attributes
    ----------
    model
        Float32 masters on the device.
    progress
        Steps, tokens, seconds and losses so far.
    batches
        Open while training; `close` ends its worker processes.
    digest
        Of recipe, seed and human-written problems; a state of another is refused.
    """

    recipe: ProxyRecipe
    seed: int
    human: HumanData
    model: Qwen2ForCausalLM
    tokenizer: PreTrainedTokenizerFast
    optimizer: torch.optim.AdamW
    state_path: Path
    digest: str
    progress: Progress = field(default_factory=Progress)
    batches: Generator[Batch] | None = None
    unread: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.progress.step >= self.recipe.steps

    def close(self) -> None:
        """End the processes that make batches."""
        if self.batches is not None:
            self.batches.close()
            self.batches = None


def begin(
    recipe: ProxyRecipe,
    state_path: Path,
    *,
    seed: int,
    human: HumanData,
    device: str | torch.device,
) -> Pretraining:
    """Return a fresh policy, or the interrupted one whose state lies at `state_path`.

    Raises
    ------
    ValueError
        When the state belongs to another recipe, seed or human-written problems.
    """
    state_path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = build_proxy_tokenizer(recipe.corpus, human.worked)
    model = new_model(recipe, tokenizer, seed)
    nn.Module.to(model, device)
    training = Pretraining(
        recipe=recipe,
        seed=seed,
        human=human,
        model=model,
        tokenizer=tokenizer,
        optimizer=new_optimizer(model, recipe),
        state_path=state_path,
        digest=digest_of([dataclasses.asdict(recipe), seed, human_digest(human)]),
    )
    if state_path.exists():
        training.progress = load_state(state_path, model, training.optimizer, training.digest)
    return training


def human_digest(human: HumanData) -> str:
    """Return the SHA-256 hex digest of the human-written problems that are trained on."""
    return digest_of([[w.problem.question, *w.steps, w.answer] for w in human.worked])


def train_until(
    training: Pretraining,
    step: int,
    *,
    workers: int,
    on_progress: ProgressCall | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Train up to a step; return False if stopped before it, with the state saved.

    Parameters
    ----------
    step
        Steps done in the end, counted from the very beginning; at most the recipe's.
    workers
        Processes that make batches; 0 makes them in this one. Changes nothing but the time.

    Raises
    ------
    FloatingPointError
        When a loss is not finite.
    """
    recipe, progress = training.recipe, training.progress
    batches = _batches(training, workers)
    with _reproducible(training):
        began = time.perf_counter()
        while progress.step < step:
            _one_step(training, next(batches))
            stopping = should_stop is not None and should_stop()
            saving = stopping or progress.step % recipe.checkpoint_every == 0
            if saving or progress.step % _READ_EVERY == 0 or progress.step == step:
                _read_losses(training)
                progress.seconds += time.perf_counter() - began
                began = time.perf_counter()
                if on_progress is not None:
                    recent = progress.losses[-50:]
                    on_progress(progress.step, recipe.steps, sum(recent) / len(recent))
            if saving or training.finished:
                save_state(
                    training.state_path,
                    training.model,
                    training.optimizer,
                    progress,
                    training.digest,
                )
            if stopping and progress.step < step:
                return False
    return True


def _batches(training: Pretraining, workers: int) -> Iterator[Batch]:
    """Return the batches from the step on at which the policy stands."""
    if training.batches is None:
        seed = derive_seed(training.seed, "proxy corpus")
        source = source_of(training.recipe, training.tokenizer, training.human.worked, seed)
        training.batches = iterate_batches(source, workers=workers)
        for _ in islice(training.batches, training.progress.step):
            pass
    return training.batches


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of activations on a device: bfloat16, or float32 on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _one_step(training: Pretraining, batch: Batch) -> None:
    recipe, progress, device = training.recipe, training.progress, training.device
    for group in training.optimizer.param_groups:
        group["lr"] = recipe.learning_rate_at(progress.step)
    weights = [part.weights(recipe.prompt_weight) for part in batch]
    total = float(sum(of.sum(dtype="float64") for of in weights))
    training.optimizer.zero_grad(set_to_none=True)
    loss = torch.zeros((), device=device)
    for part, of in zip(batch, weights, strict=True):
        ids = torch.from_numpy(part.ids).to(device, torch.long, non_blocking=True)
        weight = torch.from_numpy(of).to(device, non_blocking=True)
        share = weighted_loss(training.model, ids, weight, compute_dtype(device)) / total
        share.backward()
        loss += share.detach()
    nn.utils.clip_grad_norm_(training.model.parameters(), recipe.max_grad_norm)
    training.optimizer.step()
    training.unread.append(loss)
    progress.step += 1
    progress.tokens += sum(int(part.lengths.sum()) for part in batch)


def _read_losses(training: Pretraining) -> None:
    """Move the losses of the last steps off the device; raise if one is not finite."""
    first = len(training.progress.losses)
    for index, loss in enumerate(torch.stack(training.unread).tolist()):
        if not abs(loss) < float("inf"):
            raise FloatingPointError(f"the loss of pre-training step {first + index} is {loss}")
        training.progress.losses.append(loss)
    training.unread.clear()


@contextmanager
def _reproducible(training: Pretraining) -> Iterator[None]:
    """Ask for deterministic algorithms on a GPU, and for the recipe's threads on a CPU."""
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled()
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    on_gpu = training.device.type == "cuda"
    torch.set_num_threads(threads if on_gpu else training.recipe.threads)
    if on_gpu:
        # cuBLAS needs a fixed workspace for it; read when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before)
        deterministic.fill_uninitialized_memory = fills


def in_bfloat16(model: Qwen2ForCausalLM) -> Any:
    """Return a bfloat16 copy of the model, in evaluation mode."""
    made = copy.deepcopy(model).eval()
    return nn.Module.to(made, torch.bfloat16)
