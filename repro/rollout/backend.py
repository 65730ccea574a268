"""What the machine decides for the engine: operations, projections, captured steps.

The one place of the engine that asks about hardware. On a CPU: plain torch, which computes with
`kernels.reference_step` in the policy's compute dtype, and the policy's own modules. On a GPU
(`gpu/cuda_backend.py`): this project's kernels, which that module specifies, fused projections, and
captured steps.

Positions of -1 mark rows that do not run: they write nothing, and attend to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import reference_step
from repro.models.norms import PerturbableRMSNorm
from repro.rollout.linears import ModuleGroup, Product, ProjectionGroup
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig

# Tokens of one row that a program of the prefill's attention takes.
TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """A norm of the policy and the engine's buffer for its noise."""

    module: PerturbableRMSNorm
    noise: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewTokens:
    """Tokens of a prefill chunk, rows one after another.

    Attributes
    ----------
    positions, slots : Tensor, (M,), int32
        Where each token stands in its sequence, and where its key goes in the cache, counted in
        positions of the cache.
    table : Tensor, (rows, max_blocks), int32
    tiles : Tensor, (tiles, 4), int32
        Runs of at most `TILE` tokens of one row: row, first token, tokens, first position. Every
        token is in one.
    """

    positions: Tensor
    slots: Tensor
    table: Tensor
    tiles: Tensor


@dataclass(slots=True)
class Backend:
    """Operations by some functions, projections, and how steps run; by default those of a CPU.

    Attributes
    ----------
    functions
        Has the names, with the arguments, of `kernels.reference_step`.
    overlap
        Use programmatic dependent launch (kernels on Hopper and newer).
    workspace
        That of `kernels.triton.decode_step.attend_step`; plain torch needs none.
    live_noise
        Keep noise in buffers that are always added, for captured steps.
    captures
        The `repro.rollout.gpu.cuda_backend.Captures` of steps; None runs them as they come.
    """

    functions: Any = reference_step
    overlap: bool = False
    workspace: Any = None
    live_noise: bool = False
    captures: Any = None

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return a projection group of modules that share an input."""
        return ModuleGroup(modules)

    def norm(self, residual: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the stream with `update` added, and its norm: `reference_step.add_norm`."""
        module = norm.module
        noise = module.noise if norm.noise is None else norm.noise
        pair: tuple[Tensor, Tensor] = self.functions.add_norm(
            residual, update, module.weight, noise, module.variance_epsilon, overlap=self.overlap
        )
        return pair

    def whole(self, product: Product) -> Tensor:
        """Return a product with its adapter's share added, (M, N)."""
        if product.z is None or product.b is None:
            return product.base
        whole: Tensor = self.functions.add_adapter(
            product.base,
            product.z,
            product.b,
            product.ends,
            product.scaling,
            overlap=self.overlap and not product.joined,
        )
        return whole

    def swiglu(self, gate_up: Product) -> Tensor:
        """Return silu(gate) * up, (M, I), of (M, 2 I)."""
        if gate_up.z is None or gate_up.b is None:
            plain: Tensor = self.functions.swiglu(gate_up.base, overlap=self.overlap)
            return plain
        gated: Tensor = self.functions.adapted_swiglu(
            gate_up.base,
            gate_up.z,
            gate_up.b,
            gate_up.scaling,
            overlap=self.overlap and not gate_up.joined,
        )
        return gated

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """Return (M, V) float32 logits; on a GPU accumulated and kept in float32."""
        if hidden.dtype == torch.float32 or hidden.device.type != "cuda":
            return functional.linear(hidden, lm_head).float()
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32)

    def choose(self, logits: Tensor, state: RowState, sampling: SamplingConfig) -> None:
        """Draw a token for each of the first M slots and move their state on."""
        greedy = sampling.temperature == 0
        if sampling.filtered and not greedy:
            self.functions.keep_nucleus(
                logits, state.temperature, sampling.top_p, overlap=self.overlap
            )
        self.functions.choose(logits, state, greedy=greedy, overlap=self.overlap)
