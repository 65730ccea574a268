"""Which rows are run: ways, terms, and the settings that each peer is tried with.

A peer is taken at its best: every setting of its sweep makes a short trial, and the one with the
fewest seconds per sampled token makes the row that counts, once for each of the peer's terms.

    as shipped    what the tool does where nobody changes it
    equal work    without its correction for the sampler's log-probabilities, which costs a forward
                  pass a step, and which this project's step has not

Unsloth's correction is off as shipped (2026.10.9), so that its two terms are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.harness import THREADS
from benchmarks.peers.workloads import STEPS, TRIAL_STEPS, UPDATES, WholeStep

SHIPPED, EQUAL = "as shipped", "equal work"
OURS = ("ours_bf16", "ours_nvfp4", "ours_nvfp4_aqn", "ours_bf16_folded")
UPDATE_WAYS = (*OURS[:2], "peft", "qlora")
TERMS = {
    **dict.fromkeys(OURS, (EQUAL,)),
    "trl": (SHIPPED, EQUAL),
    "unsloth": (SHIPPED,),
    "unsloth_nf4": (SHIPPED,),
    "trl_alone": (EQUAL,),
}
WAYS = tuple(dict.fromkeys((*UPDATE_WAYS, *TERMS)))
WORKLOADS = (*UPDATES, *STEPS)

Settings = Mapping[str, Any]
# Rows of a micro-batch (halved where memory does not suffice), vLLM's share of the card, whether it
# sleeps during the update, checkpointing, and the host's threads where they are not the tool's own
# choice; by tool, and whether the model is the 7B.
_SWEEPS: Mapping[tuple[str, bool], tuple[Settings, ...]] = {
    ("trl", False): (
        {"rows": 32, "memory": 0.3},
        {"rows": 32, "memory": 0.15},
        {"rows": 32, "memory": 0.3, "threads": THREADS},
        {"rows": 128, "memory": 0.3, "checkpointing": True},
        {"rows": 64, "memory": 0.3, "sleep": True},
    ),
    ("trl", True): (
        {"rows": 64, "memory": 0.35, "checkpointing": True},
        {"rows": 32, "memory": 0.35, "checkpointing": True},
        {"rows": 64, "memory": 0.6, "sleep": True, "checkpointing": True},
        {"rows": 8, "memory": 0.35},
    ),
    ("unsloth", False): (
        {"rows": 32, "memory": 0.3, "checkpointing": "unsloth"},
        {"rows": 32, "memory": 0.3, "checkpointing": False},
        {"rows": 32, "memory": 0.3, "checkpointing": "unsloth", "threads": THREADS},
        {"rows": 128, "memory": 0.3, "checkpointing": "unsloth"},
        {"rows": 64, "memory": 0.6, "sleep": True, "checkpointing": "unsloth"},
    ),
    ("unsloth", True): (
        {"rows": 32, "memory": 0.6, "checkpointing": "unsloth"},
        {"rows": 64, "memory": 0.6, "checkpointing": "unsloth"},
        {"rows": 64, "memory": 0.85, "sleep": True, "checkpointing": "unsloth"},
        {"rows": 8, "memory": 0.6, "checkpointing": False},
    ),
}


def sweep_of(way: str, model: str, lengths: str) -> tuple[Settings, ...]:
    """Return the settings that a way is tried with; one means that there is nothing to choose."""
    if way in ("peft", "qlora"):
        most = 32 if lengths == "long" else 128
        return tuple({"rows": rows} for rows in (most, most // 4))
    alone: tuple[Settings, ...] = ({"rows": 128},) if way == "trl_alone" else ({},)
    return _SWEEPS.get((way.removesuffix("_nf4"), model == "7b"), alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One process, and what it is to measure; a trial only helps to choose settings.

    `lengths` names the workload, a kind of lengths or a whole step; an update has no terms.
    """

    model: str
    lengths: str
    way: str
    terms: str = ""
    trial: bool = False
    settings: Settings = field(default_factory=dict)

    @property
    def whole(self) -> WholeStep | None:
        """What a step samples; None for an update on drawn rows."""
        return STEPS.get(self.lengths)

    @property
    def steps(self) -> int:
        """Whole steps, those of the warm-up among them; timed steps of an update."""
        if self.whole is None:
            return 1 if self.trial else 5
        return min(TRIAL_STEPS, self.whole.steps) if self.trial else self.whole.steps

    @property
    def module(self) -> str:
        """The module of this folder that measures the row."""
        if self.way in OURS:
            return "ours"
        return "peer_update" if self.whole is None else "grpo"


def key_of(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what an entry, or a row as a dict, is found by: of a trial, its settings too."""
    tried = tuple(sorted(entry["settings"].items())) if entry.get("trial") else ()
    return (entry["model"], entry["lengths"], entry["way"], entry.get("terms", ""), tried)


def applies(way: str, lengths: str, model: str) -> bool:
    """Whether a way is measured on a workload of a model; the long rows are the largest's."""
    whole = STEPS.get(lengths)
    if whole is None:
        return way in UPDATE_WAYS and (lengths != "long" or model == "7b")
    if model != whole.model or way not in TERMS:
        return False
    return way != "trl_alone" or lengths in ("16x8", "tiny_2x2")


def trials(way: str, lengths: str, model: str, most: int) -> list[Row]:
    """Return the trials that choose a way's settings on a workload, `most` of them at most."""
    whole, settings = STEPS.get(lengths), sweep_of(way, model, lengths)[:most]
    if len(settings) < 2:
        return []
    own = lengths if whole is None or not whole.swept_as else whole.swept_as
    terms = _terms(way, lengths)[-1]
    return [
        Row(model=model, lengths=own, way=way, terms=terms, trial=True, settings=each)
        for each in settings
    ]


def counting(
    way: str, lengths: str, model: str, most: int, entries: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """Return the rows that count, of the settings whose trial took the fewest seconds a token."""
    tried = {key_of(asdict(row)) for row in trials(way, lengths, model, most)}
    fitting = [e for e in entries if key_of(e) in tried and "failed" not in e]
    # Where every trial failed, the row that counts says why.
    settings = sweep_of(way, model, lengths)[0]
    if fitting:
        settings = min(fitting, key=seconds_per_token)["settings"]
    return [
        Row(model=model, lengths=lengths, way=way, terms=terms, settings=settings)
        for terms in _terms(way, lengths)
    ]


def _terms(way: str, lengths: str) -> tuple[str, ...]:
    return ("",) if lengths in UPDATES else TERMS[way]


def seconds_per_token(entry: Mapping[str, Any]) -> float:
    """Return the seconds by token: in whole steps ways draw completions of their own."""
    return float(sum(entry["seconds"]) / sum(entry["completion_tokens"]))
