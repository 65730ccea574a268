"""Whether two models say the same: the distance of their next-token distributions on probe texts.

    KL(p || q) = sum_v p(v) ln(p(v) / q(v)),    nats, per position, float64

Two bounds decide. Readers of the same weights differ by the order of sums alone. How far that moves
a model's logits depends on its depth, its width and its weights, so it is measured on the model:
each layer's output is moved by at most half a unit in its last place, at random, which costs what a
reader's own roundings cost (0.4 to 1.3 times the distance from float32, on random decoders of 4 to
48 layers). The mean KL must stay below a few times that, or below a floor of the compute dtype. A
checkpoint whose weights were rounded differs by more, and what is asked then is relative: rounding
may take away no more than a small share of what training changed, which is the distance from the
trained policy to the one without its adapter.
"""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from repro.data.generator import generate_problems
from repro.models.policy import Policy
from repro.spec.checks import require
from repro.spec.config import derive_seed

# Mean KL, nats, that two readers of the same weights may always have.
SAME_NATS = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 1e-3}
# Share of the adapter's own distance that a rounding of the merged weights may cost.
MERGED_SHARE = 0.05
# Mean KL of two readers, as a multiple of what rounding every layer's output once more costs.
ROUNDINGS = 4.0
_PROBES, _PROBE_TOKENS = 8, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far a model is from a reference: KL(reference || model) over positions, nats.

    `agreement` is the share of positions at which both hold the same token most likely.
    """

    mean: float
    largest: float
    agreement: float
    positions: int

    def __str__(self) -> str:
        return (
            f"mean KL {self.mean:.2e} nats, largest {self.largest:.2e}, same first token at "
            f"{100 * self.agreement:.1f} % of {self.positions} positions"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Said:
    """What a policy says on probe texts: rows (B, T), int64, and logits (B, T, V), float32.

    `rounding` is the mean KL, nats, that one more rounding of each layer's output costs it; NaN
    where nobody asked.
    """

    rows: Tensor
    logits: Tensor
    rounding: float


class DifferentError(ValueError):
    """A folder that was written does not say what it should; the message holds the numbers."""


def probes_of(policy: Policy) -> Tensor:
    """Return rows of token ids on which models are compared, (8, T), int64.

    Questions and worked solutions as the policy's tokenizer reads them, cut to one length; without
    a tokenizer, seeded random ids.
    """
    decoder: Any = policy.decoder
    length = min(_PROBE_TOKENS, decoder.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(derive_seed("probe"))
    rows = torch.randint(0, decoder.config.vocab_size, (_PROBES, length), generator=generator)
    if policy.tokenizer is None:
        return rows
    for row, problem in zip(rows, generate_problems("test", _PROBES, (), 0), strict=True):
        text = f"{problem.question}\n{problem.solution or problem.answer}"
        ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"][:length]
        row[: len(ids)] = torch.tensor(ids)
    return rows


def said_by(policy: Policy, of: Path, rows: Tensor | None = None, *, rounded: bool = True) -> Said:
    """Return what a policy, which a folder gave, says on its own probe texts or on rows given.

    `rounded` asks what rounding costs it, which takes another pass.
    """
    rows = probes_of(policy) if rows is None else rows
    logits = logits_of(policy.model, rows, of=of)
    rounding = rounding_of(policy, rows, logits) if rounded else math.nan
    return Said(rows=rows, logits=logits, rounding=rounding)


@torch.no_grad()
def logits_of(model: nn.Module, rows: Tensor, of: Path | None = None) -> Tensor:
    """Return a model's logits, (B, T, V), float32, on the CPU; one row at a time.

    With `of`, the folder that gave the model, they must be numbers, or `ValueError` names it.
    """
    device = next(model.parameters()).device
    logits = torch.cat([model(input_ids=r[None].to(device)).logits.float().cpu() for r in rows])
    is_finite = of is None or bool(torch.isfinite(logits).all())
    require(is_finite, f"{of} gives a logit that is not finite; needed are numbers")
    return logits


def rounding_of(policy: Policy, rows: Tensor, logits: Tensor) -> float:
    """Return the mean KL, nats, that rounding each layer's output once more costs a policy.

    h <- round(h (1 + u eps)), u uniform in [-1/2, 1/2), eps the spacing of the dtype at 1. Rows are
    (B, T), and what the policy says on them (B, T, V).
    """
    generator = torch.Generator(policy.device).manual_seed(derive_seed("rounding"))

    def round_again(_layer: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        u = torch.rand(hidden.shape, generator=generator, device=hidden.device) - 0.5
        moved = (hidden.float() * (1 + u * torch.finfo(hidden.dtype).eps)).to(hidden.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    decoder: Any = policy.decoder
    hooks = [layer.register_forward_hook(round_again) for layer in decoder.model.layers]
    try:
        return distance(logits, logits_of(policy.model, rows)).mean
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def distance(reference: Tensor, other: Tensor) -> Distance:
    """Return the distance of finite logits from the reference's, both (B, T, V)."""
    if reference.shape != other.shape:
        raise DifferentError(
            f"logits have shapes {tuple(reference.shape)} and {tuple(other.shape)}"
        )
    divergences, agreeing = [], []
    for ours, theirs in zip(reference, other, strict=True):  # a row at a time: V is large
        if not all(bool(torch.isfinite(row).all()) for row in (ours, theirs)):
            raise DifferentError("a logit is not finite")
        p, q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1).clamp(min=0.0))  # (T,)
        agreeing.append(ours.argmax(-1) == theirs.argmax(-1))
    nats = torch.cat(divergences)
    return Distance(
        mean=float(nats.mean()),
        largest=float(nats.max()),
        agreement=float(torch.cat(agreeing).double().mean()),
        positions=len(nats),
    )


def require_same(
    what: str,
    observed: Distance,
    dtype: torch.dtype,
    *,
    rounding: float = 0.0,
    effect: float | None = None,
) -> None:
    """Raise unless a model is its reference, up to the order of sums or a small share of `effect`.

    Raises `DifferentError` with both numbers and with `what` was compared. `rounding` and `effect`
    are mean KL in nats: what one more rounding of each layer's output costs (`rounding_of`), and,
    where the weights were rounded, what training changed.
    """
    bound = max(SAME_NATS[dtype], ROUNDINGS * rounding, MERGED_SHARE * (effect or 0.0))
    trained = "" if effect is None else f", and training moved it by {effect:.2e}"
    if not observed.mean <= bound:
        raise DifferentError(f"{what}: {observed}; the mean may be at most {bound:.2e}{trained}")


def stock_logits(
    folder: Path,
    rows: Tensor,
    dtype: torch.dtype,
    device: str,
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained,
) -> Tensor:
    """Return the logits of a folder as transformers (or peft, by `load`) reads it, (B, T, V).

    Raises `DifferentError` when it cannot read the folder.
    """
    disable_progress_bar()
    # compressed-tensors has bars that no setting turns off, at loading and at the first pass.
    with released(), redirect_stderr(io.StringIO()):
        try:
            model = load(str(folder), dtype=dtype, device_map=device).eval()
        except (ImportError, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise DifferentError(f"transformers does not read {folder}: {said}") from error
        logits = logits_of(model, rows)
        del model
    return logits


@contextmanager
def released() -> Iterator[None]:
    """Free a model's memory at the end: two copies of a large model do not fit."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
