"""The update as a user of transformers and peft makes it, on the rows of `step_rows`.

    peft         transformers + peft; logits of the completions' positions, log-probabilities by row
    peft_liger   with Liger's rotation, RMSNorm and SwiGLU, and its fused linear GRPO loss
    peft_trl     with the fused head of TRL's GRPOTrainer, which sees only tokens that count
    qlora        as `peft`, on NF4 weights with double quantisation (bitsandbytes)

All train LoRA on the seven projections of every block in bfloat16 autocast, adapters in float32
(under `qlora` in bfloat16, as TRL has them), with sdpa attention, gradient checkpointing, clipping
and AdamW. Micro-batches are padded: prompts on the left, completions on the right. The loss is
-ratio * advantage averaged over the step's tokens, the ratio's denominator being the pass's own
log-probabilities.

Kinder to the peers than TRL: padding goes to the longest row of a micro-batch, where TRL pads to
the longest of the whole step; batches lie on the device before the clock starts; and a micro-batch
has the largest power of two of rows that fits, or half as many, and so on, while that is faster.

Easy mistakes
-------------
* A handler that tries again inside `except` holds, through the exception, the frames and so the
  tensors that did not fit.
* Adapters in float32 without autocast multiply in float32, which nobody trains with.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers import harness
from benchmarks.peers.step_rows import (
    ALPHA,
    MODELS,
    PROJECTIONS,
    RANK,
    SPREAD,
    StepRows,
    draw_step,
    sizes_of,
)

WAYS = ("peft", "peft_liger", "peft_trl", "qlora")
PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "liger-kernel", "bitsandbytes")
# Rows over which sizes of a micro-batch are compared, or those of the largest that fits.
_COMPARED_ROWS = 32
# A comparison that took less is made twice: its shapes were new.
_REPEATED_SECONDS = 5.0
_LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A padded micro-batch of b rows with T completion tokens at most.

    Attributes
    ----------
    input_ids, attention_mask
        (b, S + T) int64.
    mask
        (b, T) int64, 1 where a completion's token counts.
    advantages
        (b,) float32.
    tokens
        Counting tokens of the whole step.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    advantages: Tensor
    tokens: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        tensors = ("input_ids", "attention_mask", "mask", "advantages")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    @property
    def completions(self) -> Tensor:
        """(b, T) int64."""
        return self.input_ids[:, -self.mask.shape[1] :]


# The loss of a micro-batch, and the sum of its tokens' log-probabilities where it is known.
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor | None]]


def pad_rows(rows: StepRows, micro: int, device: torch.device) -> list[Batch]:
    """Return a step's rows in micro-batches of `micro` rows."""
    batches = []
    prompts = rows.prompts.repeat_interleave(rows.group, dim=0)  # (B, S)
    for start in range(0, len(rows.completions), micro):
        own = rows.completions[start : start + micro]
        completions = nn.utils.rnn.pad_sequence(own, batch_first=True)  # (b, T)
        lengths = torch.tensor([len(completion) for completion in own])
        mask = (torch.arange(completions.shape[1]) < lengths[:, None]).long()  # (b, T)
        before = prompts[start : start + micro]
        batches.append(
            Batch(
                input_ids=torch.cat([before, completions], dim=1),
                attention_mask=torch.cat([torch.ones_like(before), mask], dim=1),
                mask=mask,
                advantages=rows.advantages[start : start + micro],
                tokens=rows.completion_tokens,
            ).to(device)
        )
    return batches


def policy_loss(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the micro-batch's share of the step's loss, and the sum of its log-probabilities."""
    ratio = (logprobs - logprobs.detach()).exp()
    gain = ratio * batch.advantages[:, None] * batch.mask  # (b, T)
    return -gain.sum() / batch.tokens, (logprobs.detach() * batch.mask).sum()


def plain_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the loss by logits of the completions' positions, rows taken one by one."""
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        logits_to_keep=batch.mask.shape[1] + 1,
    ).logits[:, :-1]  # (b, T, V)
    logprobs = [
        -cross_entropy(row.float(), tokens, reduction="none")
        for row, tokens in zip(logits, batch.completions, strict=True)
    ]
    return policy_loss(torch.stack(logprobs), batch)


def trl_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the loss by TRL's fused head, which computes entropies as well."""
    labels = batch.completions.masked_fill(batch.mask == 0, -100)  # (b, T)
    prompt = batch.input_ids.shape[1] - labels.shape[1]
    labels = nn.functional.pad(labels, (prompt, 0), value=-100)  # (b, S + T)
    out = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=labels,
        fused_lm_head=True,
    )
    return policy_loss(out.log_probs[:, -batch.mask.shape[1] :], batch)


def liger_loss() -> Loss:
    """Return Liger's loss of hidden states, which never holds the logits."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    # Compiled, it fails on lengths that change (liger-kernel 0.8.5, torch 2.11).
    fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False)

    def loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        base = model.get_base_model()
        hidden = base.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        ).last_hidden_state[:, -batch.mask.shape[1] - 1 : -1]  # (b, T, H)
        value, *_ = fused(
            hidden.to(base.lm_head.weight.dtype),
            base.lm_head.weight,
            batch.completions,
            batch.mask,
            batch.advantages,
            num_items_in_batch=batch.tokens,
        )
        return value, None

    return loss


def load_base(values: dict[str, Any], asked: argparse.Namespace) -> Any:
    """Return the model without an adapter, from its folder or with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, asked.dtype)
    if asked.way == "peft_liger":
        from liger_kernel import transformers as liger

        patch = getattr(liger, f"apply_liger_kernel_to_{values['model_type']}")
        patch(fused_linear_cross_entropy=False)
    if asked.folder:
        model = AutoModelForCausalLM.from_pretrained(
            asked.folder, dtype=dtype, attn_implementation="sdpa"
        )
        return model.to(asked.device)
    torch.manual_seed(asked.seed)
    with torch.device(asked.device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**values, initializer_range=SPREAD),
            dtype=dtype,
            attn_implementation="sdpa",
        )


def quantise(model: Any, dtype: torch.dtype, device: str) -> None:
    """Replace the projections by bitsandbytes' NF4 layers with doubly quantised scales."""
    import bitsandbytes

    if not any(name.rpartition(".")[2] in PROJECTIONS for name, _ in model.named_modules()):
        raise ValueError(f"the model has none of {', '.join(PROJECTIONS)}; nothing is quantised")
    for name, layer in list(model.named_modules()):
        if name.rpartition(".")[2] not in PROJECTIONS:
            continue
        replacement = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=dtype,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        replacement.weight = bitsandbytes.nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
        )
        replacement.bias = layer.bias
        model.set_submodule(name, replacement.to(device))
    # What peft asks to choose its layer.
    model.is_loaded_in_4bit = True


def build(asked: argparse.Namespace) -> tuple[Any, Loss]:
    """Return a way's model with its adapter, in training mode, and its loss."""
    from peft import LoraConfig, get_peft_model

    dtype, loss = getattr(torch, asked.dtype), cast(Loss, plain_loss)
    model = load_base(MODELS[asked.model], asked)
    if asked.way == "qlora":
        quantise(model, dtype, asked.device)
    elif asked.way == "peft_liger":
        if not any("liger_kernel" in type(module).__module__ for module in model.modules()):
            raise ValueError("no module of the model is Liger's; it was patched in vain")
        loss = liger_loss()
    elif asked.way == "peft_trl":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        loss = trl_loss
    settings = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if asked.way == "qlora" and parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
        # Zeros would run faster: the card draws less power. A checkpoint's adapter starts as usual.
        if "lora_B" in name and not asked.folder:
            nn.init.normal_(parameter, std=SPREAD)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    return model.train(), loss


class Update:
    """A model, its optimiser and the passes of a step."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.device = torch.device(asked.device)
        self.dtype = getattr(torch, asked.dtype)
        self.model, self.loss = build(asked)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        fused = self.device.type == "cuda"
        # Nothing moves before the warm-up.
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0, fused=fused)

    def passes(self, batches: list[Batch]) -> Tensor | None:
        """Run forward and backward over micro-batches; return the sum of log-probabilities."""
        total: Tensor | None = None
        for batch in batches:
            with self._autocast():
                loss, logprobs = self.loss(self.model, batch)
            loss.backward()
            if logprobs is not None:
                total = logprobs if total is None else total + logprobs
        return total

    def step(self, batches: list[Batch]) -> Tensor | None:
        """Make an optimiser step; see `passes`."""
        total = self.passes(batches)
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.forget()
        return total

    def forget(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def within_memory(work: Callable[[], Any], update: Update) -> tuple[bool, Any]:
    """Return whether a work fits into memory, and its result."""
    try:
        return True, work()
    except torch.OutOfMemoryError:
        pass
    # Outside the handler: its exception holds the frames, and so the tensors, that failed.
    update.forget()
    harness.free_memory()
    return False, None


def choose_rows(update: Update, steps: list[StepRows]) -> tuple[int, dict[int, float | None]]:
    """Return the rows of a micro-batch: the most that fit, or fewer while that is faster.

    Parameters
    ----------
    steps
        The warm-up's rows, on which sizes are compared, then those of the timed steps: the widest
        micro-batch of all must fit.

    Returns
    -------
    rows
        Chosen.
    tried
        Seconds over the compared rows by rows of a micro-batch; None where memory did not suffice.

    Raises
    ------
    RuntimeError
        When a single row does not fit.
    """
    every = len(steps[0].completions)
    # Libraries take their own memory first.
    update.step(pad_rows(steps[0], 1, update.device)[:1])
    rows, compared = 1 << (every.bit_length() - 1), 0
    tried: dict[int, float | None] = {}
    best: tuple[float, int] | None = None
    while rows >= 1:
        batches = [batch for step in steps for batch in pad_rows(step, rows, torch.device("cpu"))]
        widest = max(batches, key=lambda batch: batch.input_ids.numel()).to(update.device)
        compared = compared or max(rows, min(every, _COMPARED_ROWS))
        trial = pad_rows(steps[0], rows, update.device)[: compared // rows]
        fits, seconds = within_memory(lambda: _try(update, widest, trial), update)  # noqa: B023
        tried[rows] = seconds
        harness.say(f"micro-batches of {rows} rows: {seconds if fits else 'out of memory'}")
        if not fits:
            compared = 0
        elif best is not None and seconds >= best[0]:
            break
        else:
            best = seconds, rows
        rows //= 2
    if best is None:
        raise RuntimeError("out of memory with a single row")
    return best[1], tried


def _try(update: Update, widest: Batch, trial: list[Batch]) -> float:
    """Return the seconds of a trial's passes, after a step on the widest micro-batch."""
    # The optimiser's moments are there from its first step on.
    update.step([widest])

    def once() -> float:
        seconds = harness.seconds_of(lambda: update.passes(trial), update.device)
        update.forget()
        return seconds

    first = once()
    return min(first, once()) if first < _REPEATED_SECONDS else first


def measure(update: Update, asked: argparse.Namespace, lengths: str) -> dict[str, Any]:
    """Return a way's entry on one kind of lengths."""
    sizes = sizes_of(lengths, harness.sizes_asked(asked))
    vocabulary = update.model.config.vocab_size
    steps = [
        draw_step(lengths, step, asked.seed, sizes, vocabulary) for step in range(asked.steps + 1)
    ]
    rows, tried = choose_rows(update, steps)

    def batches(step: int) -> list[Batch]:
        return pad_rows(steps[step], rows, update.device)

    def once(step: int) -> float:
        own = batches(step)
        return harness.seconds_of(lambda: update.step(own), update.device)

    def whole() -> dict[str, Any]:
        update.optimizer.param_groups[0]["lr"] = _LEARNING_RATE
        # Long rows have one width, which was met when sizes were compared.
        warm = batches(0)[: max(1, _COMPARED_ROWS // rows) if lengths == "long" else None]
        total = update.passes(warm)
        update.forget()
        tokens = sum(int(batch.mask.sum()) for batch in warm)
        mean = None if total is None else float(total) / tokens
        return {"logprob": mean} | harness.time_steps(once, asked)

    while True:
        fits, entry = within_memory(whole, update)
        if fits:
            break
        rows //= 2
        if rows < 1:
            raise RuntimeError("out of memory with a single row")
    tokens = [step.completion_tokens for step in steps[1:]][: len(entry["seconds"])]
    padded = [sum(b.input_ids.numel() for b in batches(n + 1)) for n in range(len(tokens))]
    return entry | {
        "micro_batch_rows": rows,
        "micro_batches_tried": {str(count): value for count, value in tried.items()},
        "completion_tokens": tokens,
        "computed_tokens": padded,
    }


def main() -> None:
    """Measure one way of one model on each kind of lengths asked for."""
    asked = harness.arguments(__doc__.partition("\n")[0], WAYS).parse_args()
    update = Update(asked)
    for lengths in asked.lengths.split(","):
        harness.free_memory()
        harness.append_entry(asked, lengths, PACKAGES, measure(update, asked, lengths))


if __name__ == "__main__":
    main()
