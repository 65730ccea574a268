r"""Adaptive quantisation noise (AQN): when, how much, on what, and proof that it was there.

Stages and standard deviations by step are those of `repro.spec.schedule`.

The noise of one norm is z = sigma * N(0, I) drawn in float32 from a generator seeded by (seed,
step, module name): it does not depend on the order of modules, on other random streams, or on what
ran before a resume. It is carried beside the gain, which is never written (`PerturbableRMSNorm`).

Easy mistakes, all of them in published code:

* Looking for the norms by a class that the running model does not use: nothing is touched and
  nothing fails. Here a perturbation that touches nothing raises, except in the form `as_published`,
  whose point it is.
* Adding z to a bfloat16 gain. A change below half the spacing of bfloat16 at w is rounded away: at
  w = 1 and sigma = 1e-3 nearly all of it. `as_released` reproduces exactly that, by handing over
  what bfloat16 keeps, and the receipt tells sigma asked from sigma realised.
* Drawing from the global generator, so that switching noise on moves every later random number.
* Adding in place without restoring, so that the final norm takes a random walk. Not reproduced.

Sources: arXiv 2510.11696 sections 3.3, 4.1, Algorithm 1, Eq. 8 and 10, Fig. 9 and 15.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repro.models.norms import PerturbableRMSNorm, block_norms, final_norm
from repro.models.policy import Policy
from repro.spec.arm import NoiseConfig
from repro.spec.config import derive_seed
from repro.spec.schedule import sigma_of_stage, stage_of_step


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReceipt:
    """What one perturbation really did.

    Attributes
    ----------
    form, stage
        The form, and the stage of the step (0 has no added noise).
    sigma
        Standard deviation asked for.
    sigma_realised
        Root mean square of the added noise over all channels of all that was touched.
    channels_changed
        Channels of those that really moved.
    digest
        SHA-256 of the noise added, module by module; empty when nothing was touched.
    """

    form: str
    stage: int
    sigma: float
    sigma_realised: float
    modules: tuple[str, ...]
    channels_changed: int
    digest: str


def draw_noise(
    weight: Tensor, sigma: float, *, seed: int, step: int, name: str, form: str
) -> Tensor:
    """Return the noise that one norm really gets, (H,) float32 on the weight's device.

    The draw depends on seed, step and name, and nothing else. The gain `weight`, (H,), is read by
    `as_released` only, which rounds to bfloat16 as an in-place addition to a bfloat16 gain does.
    """
    # Drawn on the CPU, so that every device sees the same numbers.
    generator = torch.Generator().manual_seed(derive_seed(seed, "noise", step, name))
    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32) * sigma
    if form == "as_released":
        gain = weight.detach().to("cpu", torch.bfloat16)
        noise = (gain + noise.to(torch.bfloat16)).to(torch.float32) - gain.to(torch.float32)
    return noise.to(weight.device)


def perturbable_norms(model: nn.Module, form: str) -> dict[str, PerturbableRMSNorm]:
    """Return the norms that a form perturbs, by name.

    `as_described` takes the two norms of every block (Fig. 6); `as_released` the final norm too;
    `as_published` none, because its class test never matches the engine's own norm.
    """
    if form == "as_published":
        return {}
    norms = dict(block_norms(model))
    if form == "as_released":
        norms["model.norm"] = final_norm(model)
    return norms


@contextmanager
def perturbed(
    policy: Policy, config: NoiseConfig | None, *, seed: int, step: int, total_steps: int
) -> Iterator[NoiseReceipt]:
    """Add the step's noise to the policy's norms for the length of the block.

    Raises `ValueError` when noise was asked for and no norm was touched (but for `as_published`),
    or when a norm already carries noise.

    Parameters
    ----------
    policy
        Its norms are perturbable: sampler and trainer, which share them, see the noise.
    config
        None adds nothing and touches nothing.
    seed, step, total_steps
        The run's seed and the position in training, counted from 0.

    Yields
    ------
    NoiseReceipt
    """
    stage = 0 if config is None else stage_of_step(config, step, total_steps)
    sigma = 0.0 if config is None else sigma_of_stage(config, stage)
    form = "none" if config is None else config.form
    norms = perturbable_norms(policy.model, form) if sigma > 0 else {}
    if sigma > 0 and not norms and form != "as_published":
        raise ValueError(f"noise of sigma {sigma} touched no norm of {type(policy.model).__name__}")
    for name, norm in norms.items():
        if norm.noise is not None:
            raise ValueError(f"{name} carries noise already; perturbations do not nest")
    drawn = {
        name: draw_noise(norm.weight, sigma, seed=seed, step=step, name=name, form=form)
        for name, norm in norms.items()
    }
    try:
        for name, norm in norms.items():
            norm.noise = drawn[name]
        yield receipt_of(drawn, form=form, stage=stage, sigma=sigma)
    finally:
        for norm in norms.values():
            norm.noise = None


def receipt_of(drawn: dict[str, Tensor], *, form: str, stage: int, sigma: float) -> NoiseReceipt:
    """Describe the noise `drawn`, by module name."""
    digest = hashlib.sha256()
    squares, channels, changed = 0.0, 0, 0
    for name, noise in drawn.items():
        values = noise.cpu()
        digest.update(name.encode())
        digest.update(values.numpy().tobytes())
        squares += float(values.double().square().sum())
        channels += values.numel()
        changed += int(torch.count_nonzero(values))
    return NoiseReceipt(
        form=form,
        stage=stage,
        sigma=sigma,
        sigma_realised=math.sqrt(squares / channels) if channels else 0.0,
        modules=tuple(drawn),
        channels_changed=changed,
        digest=digest.hexdigest() if drawn else "",
    )
