"""The update as a user of transformers and peft makes it, on drawn rows.

    peft     transformers + peft; logits of the completions' positions, log-probabilities by row
    qlora    the same on NF4 weights with double quantisation (bitsandbytes)

Both train LoRA on the seven projections of every block in bfloat16 autocast, adapters in float32
(under `qlora` in bfloat16, as TRL has them), with sdpa attention, gradient checkpointing, clipping
and AdamW. Micro-batches are padded: prompts on the left, completions on the right. The loss is
-ratio * advantage averaged over the step's tokens, the ratio's denominator being the pass's own
log-probabilities.

Kinder to the peers than TRL: padding goes to the longest row of a micro-batch, where TRL pads to
the longest of the whole step, and batches lie on the device before the clock starts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers import harness

PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes")
_LEARNING_RATE = 1e-5


# Of a padded micro-batch of b rows with T completion tokens at most: `input_ids` and
# `attention_mask`, (b, S + T) int64; `mask`, (b, T) int64, 1 where a completion's token counts;
# `advantages`, (b,) float32.
Batch = dict[str, Tensor]


def pad_rows(rows: dict[str, Any], micro: int, device: torch.device) -> list[Batch]:
    """Return a step's rows in micro-batches of `micro` rows on a device."""
    completions = [torch.tensor(ids) for ids in rows["completions"]]
    prompts = torch.tensor(rows["prompts"])  # (P, S)
    prompts = prompts.repeat_interleave(len(completions) // len(prompts), dim=0)  # (B, S)
    advantages = harness.by_turns(len(completions))
    batches = []
    for start in range(0, len(completions), micro):
        own = completions[start : start + micro]
        padded = nn.utils.rnn.pad_sequence(own, batch_first=True)  # (b, T)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in own], batch_first=True)
        before = prompts[start : start + micro]
        batch = {
            "input_ids": torch.cat([before, padded], dim=1),
            "attention_mask": torch.cat([torch.ones_like(before), mask], dim=1),
            "mask": mask,
            "advantages": advantages[start : start + micro],
        }
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches


def policy_gain(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sums over a micro-batch's tokens of what is gained, and of log-probabilities."""
    width = batch["mask"].shape[1]
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        use_cache=False,
        logits_to_keep=width + 1,
    ).logits[:, :-1]  # (b, T, V)
    rows = zip(logits, batch["input_ids"][:, -width:], strict=True)
    each = [-cross_entropy(row.float(), tokens, reduction="none") for row, tokens in rows]
    logprobs = torch.stack(each)  # (b, T)
    gain = (logprobs - logprobs.detach()).exp() * batch["advantages"][:, None] * batch["mask"]
    return gain.sum(), (logprobs.detach() * batch["mask"]).sum()


class Update:
    """A model with its adapter, its optimiser and the passes of a step."""

    def __init__(self, asked: Namespace) -> None:
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        self.device, self.dtype = torch.device(asked.device), getattr(torch, asked.dtype)
        in_4_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
        )
        base: Any = AutoModelForCausalLM.from_pretrained(
            asked.folder,
            dtype=self.dtype,
            attn_implementation="sdpa",
            device_map=asked.device,
            quantization_config=in_4_bits if asked.way == "qlora" else None,
        )
        self.model: Any = get_peft_model(base, harness.adapter_settings())
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.enable_input_require_grads()
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in self.trained if asked.way == "qlora" else ():
            parameter.data = parameter.data.to(self.dtype)
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.trained, lr=_LEARNING_RATE, fused=fused)

    def step(self, batches: Sequence[Batch]) -> float:
        """Make an optimiser step over micro-batches; return the mean of their log-probabilities."""
        tokens = sum(batch["mask"].sum() for batch in batches)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            mixed = self.dtype != torch.float32
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=mixed):
                gain, logprobs = policy_gain(self.model, batch)
            (-gain / tokens).backward()
            total += logprobs
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total / tokens)


def measure(update: Update, asked: Namespace) -> dict[str, Any]:
    """Return a way's entry, with the rows of a micro-batch that its settings name."""
    steps = harness.json_lines(asked.rows)
    rows = min(asked.settings["rows"], asked.prompts * asked.group)
    first = pad_rows(steps[0], rows, update.device)
    # Long rows have one width: a few of them meet every shape.
    logprob = update.step(first[:2] if asked.lengths == "long" else first)

    def prepared(step: int) -> Callable[[], object]:
        return partial(update.step, pad_rows(steps[step], rows, update.device))

    timed = harness.time_steps(prepared, asked, steps)
    return timed | {"logprob": logprob, "micro_batch_rows": rows}


def main() -> None:
    """Measure one way of one model on one kind of lengths."""
    asked = harness.requested()
    harness.write_entry(asked, PACKAGES, measure(Update(asked), asked))


if __name__ == "__main__":
    main()
