"""`python -m repro dose`: how far rounding and AQN move a checkpoint's policy before any training.

Each format and each strength of noise is measured as an arm of the dose targets is
(`repro.procedures.dose`), on problems of the package's generator.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import track
from rich.table import Table

from repro.evaluation.flags import dosing_of
from repro.evidence.procedure import RunContext
from repro.models.checkpoint import resolve
from repro.models.loading import read_description
from repro.models.policy import device_named
from repro.run.carry_out import procedure_named
from repro.spec.arm import Arm, NoiseConfig, WeightFormat
from repro.spec.checks import require
from repro.spec.config import RunConfig, TrainScale
from repro.spec.tier import Tier
from repro.targets.presets import preset

_ON_GPU, _ON_CPU = 16, 4
_GROUP = 4
_SHOWN = {"kl_completions": "KL, nats", "entropy_own": "entropy, nats", "accuracy": "right, %"}


def main_dose(args: argparse.Namespace) -> int:
    """Print the doses of formats and strengths of noise beside the 16-bit policy; return 0."""
    formats, sigmas = dosing_of(args)
    on_gpu, revision = device_named(args.device) != "cpu", args.revision or ""
    # The config first: what is not 16 bits is refused before its weights are fetched.
    folder = resolve(args.model, revision, weights=False)
    stored = read_description(folder).stored_format
    require(
        stored is None,
        f"{folder} holds {stored} codes; the dose of rounding needs the 16-bit weights that were "
        "rounded",
    )
    model = "tiny" if args.model == "tiny" else str(resolve(args.model, revision))
    scale = _scale(model, args.prompts or (_ON_GPU if on_gpu else _ON_CPU), args.new_tokens, on_gpu)
    arms = [Arm(name="bf16", label="16 bits")]
    for sigma in sigmas:
        # Of three stages the second is the first with noise, and has the first sigma.
        noise = NoiseConfig(sigma_start=sigma, sigma_end=sigma, num_stages=3)
        arms.append(Arm(name="aqn", label=f"AQN {sigma:g}", noise=noise))
    arms += [
        Arm(name=kind, label=kind.upper(), weight_format=cast(WeightFormat, kind))
        for kind in formats
    ]
    table = Table(title="doses before training", title_justify="left")
    table.add_column("policy")
    for title in _SHOWN.values():
        table.add_column(title, justify="right")
    tier = Tier.PAPER if on_gpu else Tier.SMOKE
    context = RunContext(folder=Path(), threads=len(os.sched_getaffinity(0)))
    for arm in track(arms, "doses", transient=True):
        run = RunConfig(
            target="dose",
            target_version=1,
            tier=tier.value,
            procedure="dose",
            arm=arm,
            scale=scale,
            seed=0,
        )
        measured = procedure_named("dose")(run, context)
        values = [measured.metrics[name].value for name in _SHOWN]
        table.add_row(arm.label, *("-" if v is None else f"{v:.3g}" for v in values))
    Console().print(table)
    return 0


def _scale(model: str, prompts: int, new_tokens: int, on_gpu: bool) -> TrainScale:
    """Return a scale that asks `prompts` problems, each for a group of completions."""
    scale = preset(model, "generated", "", on_gpu=on_gpu)
    return replace(
        scale,
        data=replace(scale.data, development_problems=prompts),
        group_size=_GROUP,
        rollout=replace(scale.rollout, max_new_tokens=new_tokens),
    )
