r"""How strong AQN is against a format's own rounding, from a checkpoint's gains and weights.

Noise of standard deviation sigma on the gain w of an RMSNorm reaches the projections that read the
norm as noise on their weights, the same for all rows of one input channel (Eq. 11 and 12):

    y      = (w * h) W^T                h: the normalised hidden state, (K,)
    noise:   (z * h) W^T                z ~ sigma N(0, I), (K,)
    rounding: (w * h) (Q(W) - W)^T

With h of independent channels of variance 1, the expected squares over all outputs are

    signal   sum_ij w_j^2 W_ij^2
    noise    sigma^2 sum_ij W_ij^2
    rounding sum_ij w_j^2 (Q(W) - W)_ij^2

and the two doses are the square roots of noise and rounding over signal. The ratio of the two needs
no data; a divergence on tokens (`divergences`) does, and a device worth the time.

Easy mistakes
-------------
* Comparing sigma with the relative error of W: a gain of 5 makes noise of 0.01 a change of 0.2 %.
* Looking at q, k, v, gate and up alone and forgetting that rounding also falls on o and down, which
  AQN does not reach: their error is left out of both sides here, but not of `divergences`.
* Prompt tokens: a policy never samples them, and its distributions there are not those of its own
  completions, which alone count here.

`python -m repro dose` prints both, layer by layer (`main_dose`).

Source: arXiv 2510.11696 section 3.3, Eq. 8 to 12.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from kernels import dispatch
from repro.data.generator import generate_problems
from repro.data.prompts import render
from repro.models import checkpoint as checkpoints
from repro.models.decoder import READERS
from repro.models.divergence import compared
from repro.models.files.tensor_files import CheckpointError, TensorFolder
from repro.models.loading import (
    ModelDescription,
    SharedScales,
    default_recipe,
    quantize_projection,
    read_description,
    read_rounded,
)
from repro.models.policy import Policy, device_named, load_policy
from repro.rl.noise import perturbed
from repro.rl.packed import packed_hidden
from repro.rl.rows import Rows, make_rows
from repro.rollout.for_policy import sampler_for
from repro.rollout.sampler import Completion
from repro.spec.arm import NoiseConfig, WeightFormat
from repro.spec.checks import require
from repro.spec.config import SamplingConfig, derive_seed

_DRAWS = 8
# Rows of one pass.
_ROWS = 128
_SHORT = {"input_layernorm": "q, k, v", "post_attention_layernorm": "gate, up"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormDose:
    """The doses behind one norm of one block.

    Attributes
    ----------
    layer, norm
        Block, counted from 0, and the norm's name within it.
    gain
        Median of |w| over the norm's channels.
    noise_per_sigma
        AQN's dose at sigma = 1; the dose at any other sigma is proportional.
    rounding
        Dose of rounding the norm's readers, by format.
    """

    layer: int
    norm: str
    gain: float
    noise_per_sigma: float
    rounding: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """Completions of each prompt, and the same as rows, in parts of whole prompts."""

    completions: list[Completion]
    parts: tuple[Rows, ...]


def norm_doses(
    checkpoint: str | Path, formats: Sequence[str], device: torch.device | str
) -> Iterator[NormDose]:
    """Yield the doses of a checkpoint's norms, block by block.

    Parameters
    ----------
    checkpoint
        A 16- or 32-bit checkpoint: a folder, or a name that `load_policy` takes. One projection is
        held at a time.
    device
        Where projections are rounded.

    Raises
    ------
    CheckpointError
        If the checkpoint holds codes already: what was rounded off is not in it.
    ValueError
        If a format is unknown, or a gain or weight is zero throughout.
    """
    folder = checkpoints.resolve(checkpoint)
    description = _description_of_16_bits(folder)
    source = TensorFolder(folder)
    scales = {kind: SharedScales(source, default_recipe(folder, kind)) for kind in formats}
    config: Any = description.config
    for layer in range(config.num_hidden_layers):
        # The norms that AQN perturbs, and who reads them (Fig. 6)
        for norm, readers in READERS.items():
            parent = f"model.layers.{layer}"
            gain = read_rounded(source, f"{parent}.{norm}.weight").to(device, torch.float32)
            # Sums of squares over the norm's readers, as in the module's table.
            signal = plain = 0.0
            rounding = dict.fromkeys(formats, 0.0)
            for reader in readers:
                name = f"{parent}.{reader}"
                dense = read_rounded(source, f"{name}.weight").to(device)  # (N, K)
                weight = dense.float()
                plain += _squares(weight)
                signal += _squares(weight * gain)
                for kind in formats:
                    codes = quantize_projection(dense, name, kind, scales[kind])
                    error = dispatch.dequantize(codes, torch.float32).sub_(weight)
                    rounding[kind] += _squares(error.mul_(gain))
            require(signal > 0, f"{source.where(f'{parent}.{norm}.weight')}: nothing passes")
            yield NormDose(
                layer=layer,
                norm=norm,
                gain=float(gain.abs().median()),
                noise_per_sigma=math.sqrt(plain / signal),
                rounding={kind: math.sqrt(square / signal) for kind, square in rounding.items()},
            )


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


def _description_of_16_bits(folder: Path) -> ModelDescription:
    """Return a checkpoint's description; `CheckpointError` if it holds codes."""
    description = read_description(folder)
    if description.stored_format is not None:
        raise CheckpointError(
            f"{folder} holds {description.stored_format} codes; the dose of rounding needs the "
            "16-bit weights that were rounded"
        )
    return description


def divergences(
    checkpoint: str | Path,
    formats: Sequence[str],
    sigmas: Sequence[float],
    *,
    prompts: int,
    new_tokens: int,
    device: torch.device | str,
) -> Iterator[tuple[str, float]]:
    """Yield KL(16-bit policy || changed policy), nats per token, by sigma of AQN and by format.

    Word problems of the project's generator are rendered as the paper's prompt with the
    checkpoint's chat template (the project's own policies with their own), and the 16-bit policy
    completes each once at temperature 1. A sigma's KL is the mean of 8 draws of its noise. A change
    without effect on any token raises.
    """
    policy = _load(checkpoint, "bf16", device)
    seeds = [derive_seed(0, "dose", row) for row in range(prompts)]
    sampling = SamplingConfig(max_new_tokens=new_tokens)
    with torch.no_grad():
        own = sampled(policy, _rendered(checkpoint, policy, prompts), sampling, seeds)
        clean = [packed_hidden(policy, rows) for rows in own.parts]

    @torch.no_grad()
    def mean_kl(changed: Policy) -> float:
        tokens = [
            compared(policy, first, changed, packed_hidden(changed, rows))[0]
            for first, rows in zip(clean, own.parts, strict=True)
        ]
        return float(torch.cat(tokens).double().mean())

    for sigma in sigmas:
        # Stage 1 of three: its sigma is the first one.
        noise = NoiseConfig(sigma_start=sigma, sigma_end=sigma, num_stages=3)
        draws = []
        for draw in range(_DRAWS):
            with perturbed(policy, noise, seed=draw, step=1, total_steps=3):
                draws.append(mean_kl(policy))
        yield _effective(f"aqn {sigma:g}", fmean(draws))
    for kind in formats:
        yield _effective(kind, mean_kl(_load(checkpoint, cast(WeightFormat, kind), device)))


def _effective(change: str, kl: float) -> tuple[str, float]:
    require(kl > 0, f"{change} left every token's distribution as it was")
    return change, kl


def _load(checkpoint: str | Path, kind: WeightFormat, device: torch.device | str) -> Policy:
    cuda = torch.device(device).type == "cuda"
    return load_policy(
        checkpoint,
        weight_format=kind,
        compute_dtype="bfloat16" if cuda else "float32",
        device=device,
    )


def _rendered(checkpoint: str | Path, policy: Policy, count: int) -> list[list[int]]:
    tokenizer: Any = policy.tokenizer
    require(tokenizer is not None, "the checkpoint has no tokenizer; prompts need one")
    template = "tiny" if checkpoint == "tiny" else "paper"
    problems = generate_problems("train", count, seed=0)
    return [render(problem, template, tokenizer) for problem in problems]


def sampled(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    seeds: Sequence[int],
    *,
    group_size: int = 1,
) -> Sampled:
    """Return a group of completions of each prompt, drawn as rollouts are."""
    limit = sampling.max_new_tokens
    sampler = sampler_for(
        policy,
        rows=group_size * len(prompts),
        max_new_tokens=limit,
        max_positions=max(map(len, prompts)) + limit,
    )
    batch = sampler.sample(prompts, sampling, group_size=group_size, seeds=seeds)
    close = getattr(sampler, "close", None)
    if close is not None:
        close()
    completions = list(batch.completions)
    at_once = max(1, _ROWS // group_size)
    parts = tuple(
        make_rows(
            prompts[first : first + at_once],
            completions[first * group_size : (first + at_once) * group_size],
            group_size=group_size,
        )
        for first in range(0, len(prompts), at_once)
    )
    return Sampled(completions=completions, parts=parts)


def main_dose(args: argparse.Namespace, formats: list[str], sigmas: list[float]) -> int:
    """Print the doses of formats and strengths of noise; return 0."""
    device = device_named(args.device)
    prompts = args.prompts if args.prompts is not None else 16 * (device != "cpu")
    console = Console()
    # The config first: what is not 16 bits is refused before its weights are fetched.
    revision = args.revision or ""
    described = _description_of_16_bits(checkpoints.resolve(args.model, revision, weights=False))
    folder = checkpoints.resolve(args.model, revision)
    model = args.model if args.model == "tiny" else folder
    total = described.config.num_hidden_layers * len(READERS)
    doses = list(track(norm_doses(model, formats, device), "norms", total=total, transient=True))
    console.print(_layers(doses, sigmas))
    console.print(summary(doses, sigmas[0]), highlight=False)
    if prompts:
        changes = divergences(
            model, formats, sigmas,
            prompts=prompts, new_tokens=args.new_tokens, device=device,
        )  # fmt: skip
        total = len(formats) + len(sigmas)
        console.print(_kls(track(changes, "divergences", total=total, transient=True)))
    else:
        console.print("No KL: --prompts 16 measures it (minutes on a CPU).", highlight=False)
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


def _kls(kls: Iterable[tuple[str, float]]) -> Table:
    table = Table(title="KL from the 16-bit policy, nats per token", title_justify="left")
    table.add_column("change")
    table.add_column("own completions", justify="right")
    for change, kl in kls:
        table.add_row(change, f"{kl:.3g}")
    return table
