"""The loop of pre-training: next-token prediction over whole documents.

One step: the learning rate of the step, the batch's loss backward part by part, the gradient
clipped, AdamW. Weights are float32 masters on the device; the recipe's material
(`repro.pretrain.material`) knows the batches and the loss.

On a CUDA device deterministic algorithms are asked for, so that one seed gives one policy on one
kind of device; another kind, or another release of its libraries, adds in another order. On a CPU
the recipe's number of threads is used, for it decides the order too.

Easy to get wrong: reading each step's loss on a GPU (the device then idles); forgetting that the
loss of a part is a sum, which the step divides by the weight of all its parts; judging by the loss
(it is flat for a long time while greedy accuracy rises from nothing to its end value;
`repro.evaluate.quality` measures what counts); taking the float32 masters for the policy, which is
the bfloat16 checkpoint that is written.
"""

from __future__ import annotations

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
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from repro.measure.memory_use import peak_bytes
from repro.models.proxy_names import proxy_folder, seeded, size_of
from repro.models.tensor_files import TensorFolder
from repro.pretrain.batches import Batch
from repro.pretrain.human_data import HumanData
from repro.pretrain.material import AnyRecipe, Material, material_of
from repro.pretrain.recipes import ProxyRecipe, Recipe
from repro.pretrain.saved_state import Progress, load_state, save_state
from repro.spec.arm import require
from repro.spec.config import derive_seed

# Steps between looks at the losses on a GPU.
_READ_EVERY = 20
_STRETCH = 50
ProgressCall = Callable[[int, int, float], None]


@dataclass(slots=True, kw_only=True)
class Pretraining:
    """A policy in training.

    Attributes
    ----------
    model
        Float32 masters on the device.
    state_folder
        Of the resumable states.
    progress
        Steps, tokens, seconds and losses so far.
    batches
        Open while training; `close` ends its worker processes.
    unread
        Losses that are still on the device.
    """

    recipe: AnyRecipe
    seed: int
    material: Material
    model: Qwen2ForCausalLM
    optimizer: torch.optim.AdamW
    state_folder: Path
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

    @property
    def stretches(self) -> list[float]:
        """Mean loss of each stretch of 50 steps, nats per token."""
        losses = self.progress.losses
        parts = [losses[at : at + _STRETCH] for at in range(0, len(losses), _STRETCH)]
        return [sum(part) / len(part) for part in parts]

    def close(self) -> None:
        """End the processes that make batches."""
        if self.batches is not None:
            self.batches.close()
            self.batches = None

    def save(self) -> None:
        """Write the resumable state."""
        self.progress.peak_bytes = max(self.progress.peak_bytes, peak_bytes())
        digest = self.material.digest
        save_state(self.state_folder, self.model, self.optimizer, self.progress, digest)


def begin(
    recipe: AnyRecipe,
    state_folder: Path,
    *,
    seed: int,
    human: HumanData | None = None,
    device: str | torch.device = "cpu",
) -> Pretraining:
    """Return a fresh policy, or the interrupted one whose states lie in `state_folder`.

    Parameters
    ----------
    seed
        Decides the initial weights (or whose trained ones are gone on from), the corpus and the
        order.

    Raises
    ------
    ValueError
        When the states belong to another recipe, seed or human-written problems, or are damaged.
    """
    material = material_of(recipe, seed, human or HumanData())
    model = new_model(recipe, material.tokenizer, seed)
    if isinstance(recipe, ProxyRecipe) and recipe.start is not None:
        load_start(model, seeded(recipe.start, seed))
    nn.Module.to(model, device)
    training = Pretraining(
        recipe=recipe,
        seed=seed,
        material=material,
        model=model,
        optimizer=new_optimizer(model, recipe),
        state_folder=state_folder,
    )
    begun = load_state(state_folder, model, training.optimizer, material.digest)
    if begun is not None:
        training.progress = begun
    return training


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return a freshly initialised float32 model for the tokenizer's vocabulary."""
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
    # transformers initialises from the global generator; keep that from leaking either way.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init"))
        return Qwen2ForCausalLM(shape).float()


def load_start(model: Qwen2ForCausalLM, name: str) -> None:
    """Give a float32 model the weights of a policy that was pre-trained before.

    Raises
    ------
    ValueError
        If that policy is not there, or has another shape or vocabulary.
    """
    folder = proxy_folder(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds no policy; make it first: python -m repro run pretrain-proxy --size "
            f"{size_of(name)}"
        )
    source = TensorFolder(folder)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            require(
                source.spec(key).shape == tuple(parameter.shape),
                f"{source.where(key)} has shape {source.spec(key).shape}; this recipe has "
                f"{tuple(parameter.shape)}",
            )
            parameter.copy_(source.read(key))


def new_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW over the model's parameters, with decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        fused=True,
    )


def train_until(
    training: Pretraining,
    step: int,
    *,
    workers: int = 0,
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
    on_progress
        Called with (steps done, steps in all, mean recent loss) whenever losses were read: after
        each step on a CPU.
    should_stop
        Asked after each step.

    Raises
    ------
    FloatingPointError
        When a loss is not finite.
    """
    recipe, progress = training.recipe, training.progress
    every = 1 if training.device.type == "cpu" else _READ_EVERY
    batches = _batches(training, workers)
    with _reproducible(training):
        began = time.perf_counter()
        while progress.step < step:
            _one_step(training, next(batches))
            stopping = should_stop is not None and should_stop()
            saving = stopping or training.finished or progress.step % recipe.checkpoint_every == 0
            if saving or progress.step % every == 0 or progress.step == step:
                _read_losses(training)
                progress.seconds += time.perf_counter() - began
                began = time.perf_counter()
                if on_progress is not None:
                    recent = progress.losses[-_STRETCH:]
                    on_progress(progress.step, recipe.steps, sum(recent) / len(recent))
            if saving:
                training.save()
            if stopping and progress.step < step:
                return False
    return True


def _batches(training: Pretraining, workers: int) -> Iterator[Batch]:
    """Return the batches from the step on at which the policy stands."""
    if training.batches is None:
        training.batches = training.material.batches(workers)
        for _ in islice(training.batches, training.progress.step):
            pass
    return training.batches


def _one_step(training: Pretraining, batch: Batch) -> None:
    recipe, progress = training.recipe, training.progress
    for group in training.optimizer.param_groups:
        group["lr"] = recipe.learning_rate_at(progress.step)
    training.optimizer.zero_grad(set_to_none=True)
    loss = torch.zeros((), device=training.device)
    for share in training.material.shares(training.model, batch):
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
