"""The one token of a completion that decides whether the working is shown.

Completions with and without working begin alike (`<think>`); the first token at which they differ
decides. It is counted from the completion's first token, and depends on the tokenizer's merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from repro.data.prompts import PromptTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a completion turns to working or to carelessness.

    Attributes
    ----------
    offset
        The deciding token's place in the completion.
    working, careless
        The two tokens.
    """

    offset: int
    working: int
    careless: int


def decision_of(template: PromptTemplate, tokenizer: Any) -> Decision | None:
    """Return the first token at which working and careless completions differ.

    None where the habits of the template's policies are not known.

    Parameters
    ----------
    tokenizer
        Transformers' own.
    """
    if template.working_prefix is None or template.careless_prefix is None:
        return None
    working, careless = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (template.working_prefix, template.careless_prefix)
    )
    pairs = enumerate(zip(working, careless, strict=False))
    offset = next(at for at, (one, other) in pairs if one != other)
    return Decision(offset=offset, working=working[offset], careless=careless[offset])
