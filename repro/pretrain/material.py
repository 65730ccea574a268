"""What a recipe means for one seed: tokenizer, batches, loss, and how the policy is examined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from repro.data.decision import Decision, decision_of
from repro.data.generator import generate_problems
from repro.data.problem import Problem
from repro.data.prompts import template_named
from repro.data.proxy_problems import generate_leveled_problems
from repro.data.proxy_tokenizer import build_proxy_tokenizer
from repro.data.tiny_tokenizer import build_tokenizer
from repro.evaluate.quality import Manner
from repro.pretrain.batches import Batch, Part, proxy_batches, source_of, tiny_batches
from repro.pretrain.human_data import HumanData
from repro.pretrain.next_token import Alternatives, mean_loss, weighted_loss
from repro.pretrain.recipes import ProxyRecipe, TinyRecipe
from repro.spec.arm import require
from repro.spec.config import derive_seed, digest_of

AnyRecipe = TinyRecipe | ProxyRecipe

# Limits of prompts and completions are those of the tiers that train these policies.
_TINY_MANNER = Manner(template="tiny", max_prompt_tokens=1280, max_new_tokens=64, samples=8)
_PROXY = "proxy"
_PROXY_PROMPT_TOKENS, _PROXY_NEW_TOKENS = 448, 144


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Material:
    """What a policy is pre-trained on and examined with.

    Attributes
    ----------
    batches
        Yields batches without end, given the number of worker processes that make them; the number
        changes nothing but the time.
    shares
        `shares(model, batch)` yields the batch's loss as terms of one sum, (), float32, nats, so
        that each can be run backward before the next is computed.
    manner
        How the policy is asked.
    problems
        `problems(count)` returns generated problems of the development split, which no corpus has.
    human
        Human-written problems, trained on and asked.
    digest
        SHA-256 of recipe, seed and human-written problems: of all that decides the weights.
    """

    tokenizer: PreTrainedTokenizerFast
    batches: Callable[[int], Generator[Batch]]
    shares: Callable[[Any, Batch], Iterator[Tensor]]
    manner: Manner
    problems: Callable[[int], list[Problem]]
    human: HumanData = field(default_factory=HumanData)
    digest: str


def material_of(recipe: AnyRecipe, seed: int, human: HumanData) -> Material:
    """Return what a recipe reads for one seed; human-written problems are for proxies only."""
    if isinstance(recipe, ProxyRecipe):
        return _proxy_material(recipe, seed, human)
    return _tiny_material(recipe, seed)


def _tiny_material(recipe: TinyRecipe, seed: int) -> Material:
    tokenizer = build_tokenizer(recipe.corpus.generator)

    def shares(model: Any, batch: Batch) -> Iterator[Tensor]:
        (part,) = batch
        yield mean_loss(model, part)

    return Material(
        tokenizer=tokenizer,
        batches=lambda workers: tiny_batches(recipe, tokenizer, seed),
        shares=shares,
        manner=_TINY_MANNER,
        problems=lambda count: generate_problems(
            "development", count, seed=seed, config=recipe.corpus.generator
        ),
        digest=digest_of([dataclasses.asdict(recipe), seed]),
    )


def _proxy_material(recipe: ProxyRecipe, seed: int, human: HumanData) -> Material:
    tokenizer = build_proxy_tokenizer(recipe.corpus, human.worked)
    source = source_of(recipe, tokenizer, human.worked, derive_seed(seed, "proxy corpus"))
    decision = decision_of(template_named(_PROXY), tokenizer)
    assert decision is not None  # the template names both habits
    return Material(
        tokenizer=tokenizer,
        batches=lambda workers: proxy_batches(source, workers=workers),
        shares=lambda model, batch: _weighted_shares(model, batch, recipe, decision),
        manner=Manner(
            template=_PROXY,
            max_prompt_tokens=_PROXY_PROMPT_TOKENS,
            max_new_tokens=_PROXY_NEW_TOKENS,
            samples=recipe.quality_samples,
        ),
        # The same for every seed.
        problems=lambda count: generate_leveled_problems("development", count, seed=0),
        human=human,
        digest=digest_of([dataclasses.asdict(recipe), seed, human.digest()]),
    )


def alternatives_at(part: Part, decision: Decision, working_share: float) -> Alternatives:
    """Return both tokens' shares at each document's decision; elsewhere its own token has all."""
    others = part.ids[:, 1:].astype("int64")
    shares = np.ones(others.shape, dtype=np.float32)
    rows = np.arange(len(others))
    # The prediction of token t stands at t - 1.
    at = part.prompts + decision.offset - 1
    works = others[rows, at] == decision.working
    require(
        bool(np.all(works | (others[rows, at] == decision.careless))),
        "a document begins neither with working nor carelessly; its habit is not known",
    )
    others[rows, at] = np.where(works, decision.careless, decision.working)
    shares[rows, at] = np.where(works, working_share, 1 - working_share)
    return Alternatives(ids=torch.from_numpy(others), shares=torch.from_numpy(shares))


def _weighted_shares(
    model: Any, batch: Batch, recipe: ProxyRecipe, decision: Decision
) -> Iterator[Tensor]:
    """Yield each part's weighted sum of losses over the weight of all parts."""
    weights = [part.weights(recipe.prompt_weight) for part in batch]
    total = float(sum(of.sum(dtype="float64") for of in weights))
    # Bfloat16 arithmetic upon float32 masters on a GPU; float32 on a CPU.
    dtype = torch.float32 if model.device.type == "cpu" else torch.bfloat16
    for part, of in zip(batch, weights, strict=True):
        ids = torch.from_numpy(part.ids).to(model.device, torch.long, non_blocking=True)
        weight = torch.from_numpy(of).to(model.device, non_blocking=True)
        alternatives = None
        if recipe.working_share is not None:
            alternatives = alternatives_at(part, decision, recipe.working_share).to(model.device)
        yield weighted_loss(model, ids, weight, dtype, alternatives) / total
