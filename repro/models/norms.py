"""RMSNorm that can carry added noise on its gain, and is transformers' own when it carries none.

    y = (w + z) * x / sqrt(mean(x^2) + eps),    z ~ N(0, sigma^2) drawn elsewhere (`repro.rl.noise`)

QeRL adds its noise here (its Eq. 10): the input norm's z reaches q, k and v, the post-attention
norm's z reaches gate and up, as multiplicative noise of relative size sigma / |w_j| on the input
channels of their weights.

Easy mistakes
-------------
* Adding z to a bfloat16 gain loses most of it: at |w| in [4, 8) and sigma 3e-3 no channel moves at
  all (docs/background.md, row 5). Here `weight` is never written: z stays a float32 attribute
  beside it and the sum is taken in float32 inside the norm.
* Finding the norms by a foreign class finds none, silently; that is how the released code's noise
  did nothing (docs/background.md, row 1). `wrap_norms` looks by name, and raises on an
  empty result.
* With noise off the output must be bit-equal to transformers' module, or a run "without noise"
  differs from the plain model by rounding. The test compares all three architectures' classes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from kernels import dispatch
from repro.models.decoder import BLOCK_NORMS, causal_lm

_FINAL = "model.norm"


class PerturbableRMSNorm(nn.Module):
    """RMSNorm sharing another's gain, with an optional additive perturbation of that gain.

    Parameters
    ----------
    norm
        A transformers RMSNorm: `weight` (H,) and `variance_epsilon`. The Parameter is shared, not
        copied, and keeps its name in the state dictionary.

    Attributes
    ----------
    weight : Parameter, (H,)
        The gain. Never perturbed in place.
    noise : Tensor or None, (H,), float32
        Added to the gain in float32 inside the norm; None switches it off.
    """

    weight: nn.Parameter

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, norm.weight)
        self.variance_epsilon = cast(float, norm.variance_epsilon)
        self.noise: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normed `hidden`, (..., H), in its own dtype."""
        out = dispatch.rms_norm(hidden, self.weight, self.variance_epsilon, self.noise)
        # A float32 master gain under 16-bit activations must not turn the stream to float32.
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    def gain(self) -> Tensor:
        """Return the effective gain w + z, (H,) float32, detached."""
        gain = self.weight.detach().to(torch.float32)
        return gain if self.noise is None else gain + self.noise


def wrap_norms(model: nn.Module) -> list[str]:
    """Replace both norms of every block and the final norm by `PerturbableRMSNorm`; return names.

    Raises `AttributeError` when a norm is missing.
    """
    decoder = causal_lm(model)
    names = [*_block_norm_names(decoder), _FINAL]
    for name in names:
        decoder.set_submodule(name, PerturbableRMSNorm(decoder.get_submodule(name)))
    return names


def block_norms(model: nn.Module) -> dict[str, PerturbableRMSNorm]:
    """Return the two norms of every block by name, in the order of the layers."""
    decoder = causal_lm(model)
    return {name: _perturbable(decoder, name) for name in _block_norm_names(decoder)}


def final_norm(model: nn.Module) -> PerturbableRMSNorm:
    """Return the norm before `lm_head`, which QeRL's method as described leaves alone."""
    return _perturbable(causal_lm(model), _FINAL)


def _block_norm_names(decoder: nn.Module) -> list[str]:
    layers = cast(nn.ModuleList, decoder.get_submodule("model.layers"))
    return [f"model.layers.{i}.{norm}" for i in range(len(layers)) for norm in BLOCK_NORMS]


def _perturbable(decoder: nn.Module, name: str) -> PerturbableRMSNorm:
    norm = decoder.get_submodule(name)
    if not isinstance(norm, PerturbableRMSNorm):
        raise TypeError(
            f"{name} is a {type(norm).__name__}; call wrap_norms first to make it perturbable"
        )
    return norm
