"""How large the way of real weights is: written, quantised, loaded, stepped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScale:
    """A checkpoint to write and use, and the step to make on it.

    Attributes
    ----------
    model
        A size of `repro.spec.shapes`.
    layers
        Decoder blocks; 0 takes the model's own.
    group, prompt_tokens, completion_tokens
        Of the step: one prompt with `group` completions of full length.
    """

    model: str = "7b"
    layers: int = 0
    group: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 256
    seeds: tuple[int, ...] = (0,)
