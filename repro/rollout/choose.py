"""The end of a decode step: a token from each row's logits, and the row's state moved on by it.

`choose` is the plain form, for any device and any filter; it neither waits for the device nor
branches on values, so it can be captured; `kernels.reference_step.choose`, which specifies the
kernel, has no filters and waits for the device to refuse bad logits. A row whose largest logit is
not finite draws nothing, in all three: NaN and infinity are such, a token ruled out by -inf is not.
A filter takes few rows at a time, since a capture keeps the memory that one draw needs.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.reference_step import uniforms_at
from repro.models.memory_plan import FILTERED_ROWS
from repro.rollout.draw import draw
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig


def choose(logits: Tensor, state: RowState, sampling: SamplingConfig) -> None:
    """Draw for slots 0 to M - 1 and advance them.

    Parameters
    ----------
    logits : Tensor, (M, V), float32
    state
        Its `temperature` is used, so that one captured step serves every temperature above 0.
    sampling
        Filters, and whether the temperature is 0.
    """
    M = logits.shape[0]
    numbers = uniforms_at(state.uniforms[:M], state.counts[:M])  # (M,)
    temperature = None
    if sampling.temperature > 0:
        temperature = state.temperature
        sampling = dataclasses.replace(sampling, temperature=1.0)
    rows = FILTERED_ROWS if sampling.filtered else M
    parts = [
        _drawn(some, uniform, temperature, sampling)
        for some, uniform in zip(logits.split(rows), numbers.split(rows), strict=True)
    ]
    state.advance(*(torch.cat(values) for values in zip(*parts, strict=True)))  # (M,) each


def _drawn(
    logits: Tensor, uniform: Tensor, temperature: Tensor | None, sampling: SamplingConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, log-probabilities and which rows are faulty, of some rows."""
    faulty = ~torch.isfinite(logits.amax(dim=-1))  # (m,)
    sound = logits.masked_fill(faulty.unsqueeze(1), 0.0)
    if temperature is not None:
        sound = sound / temperature
    return (*draw(sound, uniform, sampling), faulty)
