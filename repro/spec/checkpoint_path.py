"""How large the way of real weights is: written, quantised, loaded, stepped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScale:
    """A checkpoint to write and use, and the step to make on it.

    Attributes
    ----------
    model
        A size of `repro.spec.shapes`.
    group, prompt_tokens, completion_tokens
        Of the step: one prompt with `group` completions of full length.
    """

    model: str = "7b"
    group: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 256
    seeds: tuple[int, ...] = (0,)

    RETIRED: ClassVar = {"layers": 0}
