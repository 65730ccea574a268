"""Receipts of what ran and on what: the states of the source, the machine, the inputs."""

from __future__ import annotations

from collections.abc import Iterator

from repro.evidence.receipts.required import TRAINED
from repro.evidence.record import Record

_INPUTS = {
    "train": ("checkpoint", "test_problems", "train_problems", "prompt_template"),
    "evaluate": ("checkpoint", "test_problems", "prompt_template"),
    "dose": ("checkpoint", "development_problems", "prompt_template"),
}
ENVIRONMENT = ("python", "platform", "packages", "torch", "cpu", "gpu")


def inputs(record: Record) -> Iterator[str]:
    """Yield which digests of what went in are missing."""
    needed = list(_INPUTS.get(record.procedure, ()))
    left_out = record.effects.get("test_sets_left_out") or ()
    if record.procedure in (*TRAINED, "evaluate"):
        sets = record.config["scale"].get("test_sets", ())
        needed += [f"test_problems_{s['name']}" for s in sets if s["name"] not in left_out]
    for name in needed:
        if name not in record.inputs:
            yield f"inputs.{name} is missing"


def sources(record: Record) -> Iterator[str]:
    """Yield why commit, cleanness and digest are not those of a state that the run was in."""
    if not record.sources:
        yield "sources is empty: nothing shows what ran"
        return
    digest = record.environment.get("source_sha256")
    own = [state for state in record.sources if digest in (None, state["sha256"])]
    if not own:
        yield f"environment.source_sha256 is {str(digest)[:12]}; no state of sources has it"
        return
    for name in ("commit", "dirty"):
        if getattr(record, name) not in [state[name] for state in own]:
            yield f"{name} is {getattr(record, name)}; its source has {own[0][name]}"


def environment(record: Record) -> Iterator[str]:
    """Yield which parts of the environment are missing."""
    for name in ENVIRONMENT:
        if name not in record.environment:
            yield f"environment.{name} is missing"
