"""The loop of pre-training: next-token prediction over whole documents, on a CPU.

One step: the learning rate of the step, the batch's loss backward, the gradient clipped, AdamW. The
recipe's number of threads is used, for it decides the order of sums.

Easy to get wrong: judging by the loss (it is flat for a long time while greedy accuracy rises from
nothing to its end value; `recorded_run.accuracies` measures what counts); taking the float32
masters for the policy, which is the bfloat16 checkpoint that is written.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from repro.data.tiny_tokenizer import build_tokenizer
from repro.measure.memory_use import peak_bytes
from repro.pretrain.batches import Batch, batches_of
from repro.pretrain.recipes import Recipe
from repro.pretrain.saved_state import Progress, load_state, save_state
from repro.spec.config import derive_seed, digest_of

_STRETCH = 50
_IGNORED = -100
ProgressCall = Callable[[int, int, float], None]


@dataclass(slots=True, kw_only=True)
class Pretraining:
    """A policy in training.

    Attributes
    ----------
    model
        Float32 masters.
    state_folder
        Of the resumable states.
    progress
        Steps, tokens, seconds and losses so far.
    batches
        From the step on at which the policy stands; None before the first.
    """

    recipe: Recipe
    seed: int
    tokenizer: PreTrainedTokenizerFast
    model: Qwen2ForCausalLM
    optimizer: torch.optim.AdamW
    state_folder: Path
    progress: Progress = field(default_factory=Progress)
    batches: Generator[Batch] | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of recipe and seed: of all that decides the weights."""
        return digest_of([dataclasses.asdict(self.recipe), self.seed])

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

    def save(self) -> None:
        """Write the resumable state."""
        self.progress.peak_bytes = max(self.progress.peak_bytes, peak_bytes())
        save_state(self.state_folder, self.model, self.optimizer, self.progress, self.digest)


def begin(recipe: Recipe, state_folder: Path, *, seed: int) -> Pretraining:
    """Return a fresh policy, or the interrupted one whose states lie in `state_folder`.

    Parameters
    ----------
    seed
        Decides the initial weights, the corpus and the order.

    Raises
    ------
    ValueError
        When the states belong to another recipe or seed, or are damaged.
    """
    tokenizer = build_tokenizer(recipe.corpus.generator)
    model = new_model(recipe, tokenizer, seed)
    training = Pretraining(
        recipe=recipe,
        seed=seed,
        tokenizer=tokenizer,
        model=model,
        optimizer=new_optimizer(model, recipe),
        state_folder=state_folder,
    )
    begun = load_state(state_folder, model, training.optimizer, training.digest)
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


def mean_loss(model: Qwen2ForCausalLM, batch: Batch) -> Tensor:
    """Return the mean next-token loss of documents, (), float32, nats, by transformers' pass."""
    ids, lengths = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.lengths)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # (B, T - 1, V)
    padding = torch.arange(1, ids.shape[1]) >= lengths[:, None]  # (B, T - 1)
    targets = ids[:, 1:].masked_fill(padding, _IGNORED)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED
    )


def train_until(
    training: Pretraining,
    step: int,
    *,
    on_progress: ProgressCall | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Train up to a step; return False if stopped before it, with the state saved.

    Parameters
    ----------
    step
        Steps done in the end, counted from the very beginning; at most the recipe's.
    on_progress
        Called with (steps done, steps in all, mean recent loss) after each step.
    should_stop
        Asked after each step.

    Raises
    ------
    FloatingPointError
        When a loss is not finite.
    """
    recipe, progress = training.recipe, training.progress
    if training.batches is None:
        training.batches = batches_of(recipe, training.tokenizer, training.seed)
        for _ in islice(training.batches, progress.step):
            pass
    with _threads(recipe.threads):
        began = time.perf_counter()
        while progress.step < step:
            _one_step(training, next(training.batches))
            stopping = should_stop is not None and should_stop()
            progress.seconds += time.perf_counter() - began
            began = time.perf_counter()
            if on_progress is not None:
                recent = progress.losses[-_STRETCH:]
                on_progress(progress.step, recipe.steps, sum(recent) / len(recent))
            if stopping or training.finished or progress.step % recipe.checkpoint_every == 0:
                training.save()
            if stopping and progress.step < step:
                return False
    return True


def _one_step(training: Pretraining, batch: Batch) -> None:
    recipe, progress = training.recipe, training.progress
    for group in training.optimizer.param_groups:
        group["lr"] = recipe.learning_rate_at(progress.step)
    training.optimizer.zero_grad(set_to_none=True)
    loss = mean_loss(training.model, batch)
    loss.backward()
    value = loss.item()
    if not abs(value) < float("inf"):
        raise FloatingPointError(f"the loss of pre-training step {progress.step} is {value}")
    nn.utils.clip_grad_norm_(training.model.parameters(), recipe.max_grad_norm)
    training.optimizer.step()
    progress.losses.append(value)
    progress.step += 1
    progress.tokens += int(batch.lengths.sum())


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use so many threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
