"""`python -m repro dose`: AQN's strength beside the formats' rounding, layer by layer."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from repro.measure.dose import Divergence, NormDose, divergences, norm_doses
from repro.models import checkpoint as checkpoints
from repro.models.decoder import READERS
from repro.models.loading import read_description
from repro.models.policy import device_named
from repro.spec.whole_files import replace_text

_SHORT = {"input_layernorm": "q, k, v", "post_attention_layernorm": "gate, up"}


def main_dose(args: argparse.Namespace, formats: list[str], sigmas: list[float]) -> int:
    """Print the doses of formats and strengths of noise; return 0.

    Raises
    ------
    ValueError
        If a flag or the checkpoint cannot be used; nothing is written then.
    """
    device = device_named(args.device)
    prompts = args.prompts if args.prompts is not None else 16 * (device != "cpu")
    console = Console()
    total = read_description(checkpoints.resolve(args.model)).config.num_hidden_layers * len(
        READERS
    )
    doses = list(
        track(norm_doses(args.model, formats, device), "norms", total=total, transient=True)
    )
    console.print(_layers(doses, sigmas))
    console.print(summary(doses, sigmas[0]), highlight=False)
    kls: list[Divergence] = []
    if prompts:
        changes = divergences(
            args.model, formats, sigmas,
            prompts=prompts, new_tokens=args.new_tokens, device=device,
        )  # fmt: skip
        total = len(formats) + len(sigmas)
        kls = list(track(changes, "divergences", total=total, transient=True))
        console.print(_kls(kls))
    else:
        console.print("No KL: --prompts 16 measures it (minutes on a CPU).", highlight=False)
    if args.out:
        replace_text(Path(args.out), json.dumps(as_json(args.model, doses, kls), indent=1))
    return 0


def summary(doses: Sequence[NormDose], sigma: float) -> str:
    """Return a sentence per format: the median ratio of AQN's dose to the rounding's."""
    lines = []
    for kind in doses[0].rounding:
        ratios = [sigma * dose.noise_per_sigma / dose.rounding[kind] for dose in doses]
        lines.append(
            f"AQN at sigma {sigma:g} is {median(ratios):.2g} of {kind}'s own rounding "
            f"({min(ratios):.2g} to {max(ratios):.2g} over {len(ratios)} norms)."
        )
    return "\n".join(lines)


def as_json(model: str, doses: Sequence[NormDose], kls: Sequence[Divergence]) -> dict[str, Any]:
    """Return everything as JSON values."""
    return {
        "model": str(model),
        "norms": [dataclasses.asdict(dose) for dose in doses],
        "nats_per_token": [dataclasses.asdict(kl) for kl in kls],
    }


def _layers(doses: Sequence[NormDose], sigmas: Sequence[float]) -> Table:
    table = Table(title="relative change of what the projections return, %", title_justify="left")
    for name in ("layer", "into", "median |gain|"):
        table.add_column(name, justify="right")
    for sigma in sigmas:
        table.add_column(f"AQN {sigma:g}", justify="right")
    for kind in doses[0].rounding:
        table.add_column(kind, justify="right")
    for dose in doses:
        noise = [sigma * dose.noise_per_sigma for sigma in sigmas]
        table.add_row(
            str(dose.layer),
            _SHORT[dose.norm],
            f"{dose.gain:.3g}",
            *(f"{100 * value:.3g}" for value in [*noise, *dose.rounding.values()]),
        )
    return table


def _kls(kls: Sequence[Divergence]) -> Table:
    table = Table(title="KL from the 16-bit policy, nats per token", title_justify="left")
    table.add_column("change")
    table.add_column("prompts", justify="right")
    table.add_column("own completions", justify="right")
    for kl in kls:
        table.add_row(kl.change, f"{kl.prompt:.3g}", f"{kl.completion:.3g}")
    return table
