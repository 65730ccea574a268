"""The projections of a block as the engine multiplies by them: q, k, v at once; gate, up at once.

A `ProjectionGroup` stands for the projections that share an input. It holds no weights of its own
if it can help it: `ModuleGroup` calls the policy's own modules, so it is the trainer's forward pass
to the bit, and runs anywhere. The groups for a GPU (`fused_linears.py`) make one matrix of a group
and give the policy's modules views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """A group's output, the adapter's share perhaps still to be added.

    Attributes
    ----------
    base : Tensor, (M, N1 + N2 + ...)
    z : Tensor or None, (M, rank of each)
        x A^T, where whatever reads the output next must add `scaling * z B^T`.
    b : Tensor or None, (N1 + N2 + ..., rank)
    ends
        First column after each projection but the last.
    joined
        Whether z comes from another branch of the step, so that what reads it must be launched
        after both have ended.
    """

    base: Tensor
    z: Tensor | None = None
    b: Tensor | None = None
    ends: tuple[int, ...] = ()
    scaling: float = 1.0
    joined: bool = False


class ProjectionGroup(Protocol):
    """y = [x W1^T + b1 + adapter1, x W2^T + ...] for projections that share x.

    `road` is which way the products go, as records name it.
    """

    road: str

    def __call__(self, x: Tensor) -> Product:
        """Return (M, N1 + N2 + ...), for x (M, K)."""
        ...

    def refresh(self) -> None:
        """Take up the adapters as they are now, in place."""
        ...


class ModuleGroup:
    """Calls the policy's modules one after another."""

    road = "modules"

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)

    def __call__(self, x: Tensor) -> Product:
        """Return (M, N1 + N2 + ...)."""
        parts = [module(x) for module in self.modules]
        return Product(base=parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))

    def refresh(self) -> None:
        """Nothing to do: the modules are the policy's."""
