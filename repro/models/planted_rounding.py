r"""A rounding's error on 16-bit weights, at any multiple of its size: the dose of a dose-response.

    W' = W + factor (Q(W) - W)

with Q a storage format. At factor 1 the policy is the format's own, but for one rounding to the
compute dtype; at 0 it is the 16-bit one. Read through a source, so that the dense model is never
changed in place and loads as every other does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from repro.models.decoder import is_projection
from repro.models.files.tensor_files import SourceAround, TensorFile
from repro.models.loading import SharedScales, quantize_projection, read_rounded
from repro.spec.arm import PlantedRounding


class RoundedSource(SourceAround):
    """A checkpoint's tensors, its projections with a multiple of a format's rounding error.

    Tensors are in 16 or 32 bits; projections are rounded on `device`; `recipe` is the arithmetic of
    NVFP4's scales.
    """

    def __init__(
        self,
        source: TensorFile,
        rounding: PlantedRounding,
        device: torch.device | str = "cpu",
        recipe: str = "float32",
    ) -> None:
        super().__init__(source)
        self._rounding, self._device = rounding, device
        self._scales = SharedScales(source, recipe)
        self._changes: dict[str, float] = {}

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; a projection's (N, K) weight in bfloat16, with its error."""
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not is_projection(module):
            return self._source.read(name)
        dense = read_rounded(self._source, name).to(self._device)
        weight = dense.float()
        codes = quantize_projection(dense, module, self._rounding.format, self._scales)
        rounded = dispatch.dequantize(codes, torch.float32)
        changed = (weight + self._rounding.factor * (rounded - weight)).to(torch.bfloat16)
        if torch.equal(changed, dense):
            raise ValueError(f"{self.where(name)}: {self._rounding} left it as it was")
        norm = torch.linalg.vector_norm
        self._changes[module] = float(norm(changed.float() - weight) / norm(weight))
        return changed.cpu()

    def receipt(self) -> dict[str, Any]:
        """Return the receipt: rounding, number of projections, and mean relative change."""
        changes = self._changes.values()
        return dataclasses.asdict(self._rounding) | {
            "projections": len(changes),
            "relative_change_mean": sum(changes) / max(1, len(changes)),
        }
