"""Classes of a completion's tokens, by which entropies are shown.

`decision`
    The token that decides whether the working is shown (`repro.data.decision`): the exploration
    that the reward pays for. Where a template's habits are not known, the completion's first token.
`digits`
    Tokens whose text is made of digits, spaces aside: the arithmetic.
`template`
    All others.

Classes are disjoint, and every token of a completion has one. A mean over all tokens mixes them:
careless completions are short and have more of the first two, so it moves with their share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from repro.data.decision import decision_of
from repro.data.prompts import template_named
from repro.rl.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClasses:
    """What sorts the tokens of completions.

    Attributes
    ----------
    decision
        Place of the deciding token in a completion, from 0.
    digits
        Ids of the tokens made of digits.
    """

    decision: int
    digits: frozenset[int]

    def masks(self, rows: Rows) -> Mapping[str, Tensor]:
        """Return (B, T) bool for each class; together they are the rows' mask."""
        decision = torch.zeros_like(rows.mask)
        decision[:, self.decision : self.decision + 1] = True
        decision &= rows.mask
        digits = torch.isin(rows.token_ids, torch.tensor(sorted(self.digits))) & rows.mask
        digits &= ~decision
        return {
            "decision": decision,
            "digits": digits,
            "template": rows.mask & ~decision & ~digits,
        }


def token_classes(tokenizer: PreTrainedTokenizerBase, template: str) -> TokenClasses:
    """Return the classes of a tokenizer's tokens in completions of a template's prompts."""
    decision = decision_of(template_named(template), tokenizer)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return TokenClasses(
        decision=0 if decision is None else decision.offset,
        digits=frozenset(token for token, text in enumerate(texts) if text.strip().isdecimal()),
    )
