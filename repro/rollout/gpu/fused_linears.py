"""Projections that share an input as one matrix, whose parts the policy's own modules then read.

    q, k, v   ->  one product of (Nq + Nk + Nv) rows       gate, up  ->  one product

There is one copy of the weights. 4-bit ones are fused (and on Hopper packed) at loading, and the
policy's modules keep views of them (`repro.models.fused_weights`); of 16-bit ones the engine makes
the fused matrix here, and the modules are given views of it.

The adapter is applied unmerged. Its 16-bit image, which the kernels read, lies at fixed addresses
and is refreshed in place from the float32 masters, so captured steps see every update. Kernels take
ranks that are powers of two from 16 on: zeros fill an image of another rank, and change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import dispatch
from kernels.cuda import fused_adapter
from kernels.cuda import linear as packed
from kernels.cuda.hopper import Adapter
from kernels.packing import PackedWeight
from kernels.triton import decode_adapter, portable_linear
from repro.models.fused_weights import fused_bias, fused_weight
from repro.models.lora import AdapterLinear, base_linear
from repro.models.quantized_linear import QuantizedLinear
from repro.rollout.linears import Product


class QuantizedGroup:
    """4-bit projections as one weight, with the adapter in the same launch or another one.

    On Hopper, whose weights are packed, the adapter rides in the weight's own launch up to 16 rows
    and rank 128 (`kernels.cuda.linear`). Beyond, and on every other card
    (`kernels.triton.portable_linear`), its two products stand beside the launch. On Hopper they
    take less there: decode step of a 7B in microseconds, 16 rows 2619 within and 2775 beside, 64
    rows 4072 and 3672 (kernels/README.md). A captured step keeps the way that its own row count
    takes. Where the layer goes by a dense scratch, A's rows stand below it and one product gives
    both.

    Parameters
    ----------
    dtype
        Of x and of the adapter's image.
    overlap
        Launch the adapter's own kernels before the kernel ahead has ended.
    beside
        In a captured step of up to `decode_adapter.FEW_ROWS` rows, make x A^T in a branch of its
        own, beside the base product, which hides most or all of its time.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        overlap: bool,
        beside: torch.cuda.Stream | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        bases = [cast(QuantizedLinear, base_linear(module)) for module in modules]
        self._factors = Factors(modules, dtype)
        self._overlap = overlap
        self._beside = beside
        weight = fused_weight(bases)
        if weight is None:
            raise ValueError(
                "the projections are not views of one weight; "
                "repro.models.fused_weights.fuse_projections makes them so at loading"
            )
        self.weight = weight
        self.road = "packed" if isinstance(weight, PackedWeight) else "codes"
        self.bias = fused_bias([base.bias for base in bases])
        factors = self._factors
        self._riding: Adapter | None = None
        self._bias_of_both: Tensor | None = None
        if factors.a is not None and factors.b is not None:
            if self.road == "packed" and factors.b.shape[1] <= fused_adapter.MOST_RANK:
                self._riding = Adapter(
                    a=factors.a, b=factors.b, ends=factors.ends, scaling=factors.scaling
                )
            self._bias_of_both = fused_bias([base.bias for base in bases], len(factors.a))

    def __call__(self, x: Tensor) -> Product:
        """Return (M, N1 + N2 + ...), beyond 16 rows with the adapter's share still to be added."""
        weight, a = self.weight, self._factors.a
        if a is None:
            return Product(base=self._base(x))
        if isinstance(weight, PackedWeight):
            if self._riding is not None and packed.fuses_adapter(weight, len(x)):
                return Product(base=packed.packed_linear(x, weight, self.bias, self._riding))
            if packed.goes_dense(weight, len(x)):
                both = packed.dense_with_columns(x, weight, self._bias_of_both, a)
                return self._factors.product(*both)
        elif portable_linear.goes_dense(weight, len(x)):
            both = portable_linear.dense_with_columns(x, weight, self._bias_of_both, a)
            return self._factors.product(*both)
        arrived = self._factors.arrived
        few = len(x) <= decode_adapter.FEW_ROWS
        branch = few and self._beside is not None and torch.cuda.is_current_stream_capturing()
        if branch and self._beside is not None:
            main = torch.cuda.current_stream()
            self._beside.wait_stream(main)
            with torch.cuda.stream(self._beside):
                z = decode_adapter.project(x, a, overlap=False, arrived=arrived)
            base = self._base(x)
            main.wait_stream(self._beside)
        else:
            z = decode_adapter.project(x, a, overlap=self._overlap, arrived=arrived)
            base = self._base(x)
        return self._factors.product(base, z, joined=branch)

    def _base(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, PackedWeight):
            return packed.packed_linear(x, self.weight, self.bias)
        return dispatch.linear(x, self.weight, self.bias)

    def refresh(self) -> None:
        """Take up the adapters as they are now, in place."""
        self._factors.refresh()


class DenseGroup:
    """16-bit projections as one matrix, with A's rows below it: one product gives y and x A^T."""

    road = "dense"

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        bases = [cast(nn.Linear, base_linear(module)) for module in modules]
        self._factors = Factors(modules, bases[0].weight.dtype)
        rows = sum(base.out_features for base in bases)
        below = 0 if self._factors.a is None else len(self._factors.a)
        first = bases[0].weight
        self.weight = torch.empty(
            rows + below, first.shape[1], dtype=first.dtype, device=first.device
        )
        at = 0
        for base in bases:
            part = self.weight[at : at + base.out_features]
            part.copy_(base.weight.detach())
            base.weight.data = part
            at += base.out_features
        self.rows = rows
        self._biases = [base.bias for base in bases]
        self._below = below
        self.bias = fused_bias(self._biases, below)
        if below:
            self._factors.move_a(self.weight[rows:])

    def __call__(self, x: Tensor) -> Product:
        """Return (M, N1 + N2 + ...), rows strided and the adapter's share still to be added."""
        both = functional.linear(x, self.weight, self.bias)
        factors = self._factors
        if factors.a is None:
            return Product(base=both)
        return factors.product(both[:, : self.rows], both[:, self.rows :])

    def refresh(self) -> None:
        """Take up the adapters and biases as they are now, in place."""
        self._factors.refresh()
        bias = fused_bias(self._biases, self._below)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)


class Factors:
    """The 16-bit image of a group's LoRA factors, of a rank that the kernels take."""

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self.masters = [_adapter(module) for module in modules]
        self.scaling = 1.0
        self.a: Tensor | None = None
        self.b: Tensor | None = None
        self.arrived: Tensor | None = None
        self.ends: tuple[int, ...] = ()
        present = [pair for pair in self.masters if pair is not None]
        if not present:
            return
        if len(present) != len(modules) or len({scaling for _, _, scaling in present}) != 1:
            raise ValueError("fused projections must all have an adapter, of one scaling")
        self.scaling = present[0][2]
        rank = decode_adapter.padded_rank(present[0][0].shape[0])
        self._ends = [0]
        for _, B, _ in present:
            self._ends.append(self._ends[-1] + B.shape[0])
        self.ends = tuple(self._ends[1:-1])
        K, device = present[0][0].shape[1], present[0][0].device
        self.a = torch.zeros(len(present) * rank, K, dtype=dtype, device=device)
        self.b = torch.zeros(self._ends[-1], rank, dtype=dtype, device=device)
        self.arrived = torch.zeros(
            decode_adapter.counters(len(self.a)), dtype=torch.int32, device=device
        )
        self.refresh()

    def product(self, base: Tensor, z: Tensor, *, joined: bool = False) -> Product:
        """Return a product whose adapter's share is still to be added."""
        return Product(
            base=base, z=z, b=self.b, ends=self.ends, scaling=self.scaling, joined=joined
        )

    def move_a(self, rows: Tensor) -> None:
        """Keep A in `rows` from now on."""
        self.a = rows.zero_()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take up the adapters as they are now, in place."""
        if self.a is None:
            return
        rank = self.a.shape[0] // len(self.masters)
        for i, pair in enumerate(self.masters):
            assert pair is not None
            A, B, _ = pair
            start, end = self._ends[i], self._ends[i + 1]
            self.a[i * rank : i * rank + len(A)].copy_(A)
            if self.b is not None:
                self.b[start:end, : len(A)].copy_(B)


def takes_fused(modules: Sequence[nn.Module]) -> bool:
    """Tell whether the engine multiplies by these projections as one 4-bit weight.

    They must be views of one (`repro.models.fused_weights`), which those that gave up their codes
    are not, and have adapters of one rank, or none.
    """
    bases = [base_linear(module) for module in modules]
    if not all(isinstance(base, QuantizedLinear) for base in bases):
        return False
    layers = [cast(QuantizedLinear, base) for base in bases]
    adapters = [_adapter(module) for module in modules]
    if len({len(adapter[0]) for adapter in adapters if adapter is not None}) > 1:
        return False
    return fused_weight(layers) is not None


def _adapter(module: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    return module.factors() if isinstance(module, AdapterLinear) else None
