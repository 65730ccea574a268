"""Time single operations on real shapes: the bars of the target `kernels`.

Device time by events over CUDA graphs, weights rotated over several times the L2
(`kernels.timing`), the bfloat16 layer in the same process on the same activations. Before an
operation is timed its result is compared with plain PyTorch's, and the largest difference is an
effect of the record: a fast kernel that computes something else would show there.

Easy to get wrong: a ratio of sums is not a mean of ratios; the small layers weigh little in it, as
they do in a model. `F.linear` reaches another speed on zeros than on data, so everything is random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kernels import hopper, linear, timing, tuning
from kernels.hopper import Adapter
from kernels.packing import PackedWeight
from kernels.tune import ENDS, LAYERS, random_packed
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.measure.operation_around import Totals, around_the_layers, ratio
from repro.spec.config import OperationScale, RunConfig, derive_seed
from repro.targets.kernels import adapter_name, backward_name, ratio_name


def measure_operations(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Time the arm's operations.

    Raises
    ------
    RuntimeError
        Without a Hopper GPU.
    Stopped
        When asked to stop; nothing is kept, a run takes a minute.
    """
    del folder, threads
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise RuntimeError("the kernels target needs a Hopper GPU (compute capability 9.0)")
    torch.manual_seed(derive_seed(run.seed, "operation") % 2**31)
    scale: OperationScale = run.scale
    totals = Totals()
    if run.arm.name == "operations":
        metrics = around_the_layers(scale, totals, progress)
    else:
        metrics = {}
        for block in scale.blocks:
            metrics |= _block(block, run.arm.weight_format, scale, totals, progress, should_stop)
    measured_copy_rate = timing.copy_rate()
    effects = {
        "largest_relative_difference": totals.difference,
        "tuned_table": tuning.device_slug(torch.cuda.get_device_name()),
        "timing": {
            "method": "device_events",
            "seconds": totals.seconds,
            "bytes": totals.nbytes,
            "flops": totals.flops,
            "bytes_per_second": measured_copy_rate,
            "flops_per_second": timing.matmul_rate(),
        },
    }
    return Measured(metrics=metrics, effects=effects)


def _block(
    block: str,
    format: str,
    scale: OperationScale,
    totals: Totals,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> dict[str, Estimate]:
    """Time the four linear layers of one block: forward, backward, with an adapter."""
    ours: dict[tuple[str, int], float] = {}
    plain: dict[tuple[str, int], float] = {}
    for name, (N, K) in LAYERS[block].items():
        if should_stop():
            raise Stopped
        progress(f"{block} {name}", {})
        base = random_packed(N, K, format, 0)
        packed = [
            dataclasses.replace(base, packs=base.packs.clone())
            for _ in range(timing.copies(base.packs.nbytes))
        ]
        dense = hopper.dequantize_packs(base)
        copies = [dense.clone() for _ in range(timing.copies(dense.nbytes))]
        ends = ENDS.get((block, name), ())
        adapter = _adapter(N, K, scale.adapter_rank, ends)
        layer = _Layer(base, packed, dense, copies, adapter, scale.replays, totals)
        for M in scale.rows:
            ours["forward", M] = ours.get(("forward", M), 0.0) + layer.forward(M)
            plain["forward", M] = plain.get(("forward", M), 0.0) + layer.plain(M)
        for M in scale.adapter_rows:
            ours["adapter", M] = ours.get(("adapter", M), 0.0) + layer.with_adapter(M)
        for M in scale.backward_rows:
            packed_time, dense_time = layer.backward(M)
            ours["backward", M] = ours.get(("backward", M), 0.0) + packed_time
            plain["backward", M] = plain.get(("backward", M), 0.0) + dense_time
        del layer, packed, copies, dense
        torch.cuda.empty_cache()
    n = scale.replays
    estimates = {}
    for M in scale.rows:
        estimates[ratio_name(block, M)] = ratio(
            plain["forward", M] / ours["forward", M], "ratio", n
        )
        for who, taken in (("ours", ours), ("bf16", plain)):
            estimates[f"seconds_{who}_{block}_{M}"] = ratio(
                taken["forward", M] * 1e-6, "seconds", n
            )
    for M in scale.backward_rows:
        estimates[backward_name(block, M)] = ratio(
            plain["backward", M] / ours["backward", M], "ratio", n
        )
    for M in scale.adapter_rows:
        slower = ours["adapter", M] / ours["forward", M]
        estimates[adapter_name(block, M)] = ratio(slower, "ratio", n)
    return estimates


def _adapter(N: int, K: int, rank: int, ends: tuple[int, ...]) -> Adapter:
    a = torch.randn(rank * (len(ends) + 1), K, device="cuda") * 0.02
    b = torch.randn(N, rank, device="cuda") * 0.02
    return Adapter(a=a.bfloat16(), b=b.bfloat16(), ends=ends, scaling=1.0)


@dataclasses.dataclass(slots=True)
class _Layer:
    """One layer in both forms, copied often enough to outgrow the caches."""

    base: PackedWeight
    packed: Sequence[PackedWeight]
    dense: Tensor
    copies: Sequence[Tensor]
    adapter: Adapter
    replays: int
    totals: Totals

    def _x(self, M: int, width: int) -> Tensor:
        return torch.randn(M, width, device="cuda").bfloat16()

    def forward(self, M: int) -> float:
        N, K = self.base.shape
        x = self._x(M, K)
        out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda").fill_(float("nan"))
        linear.packed_linear(x, self.base, out=out)
        self.totals.compare(out, functional.linear(x, self.dense))
        taken = timing.time_calls(
            [partial(linear.packed_linear, x, w, out=out) for w in self.packed], self.replays
        ).median
        self.totals.add(taken, self.base.packs.nbytes + 2 * M * (N + K), 2 * M * N * K)
        return taken

    def plain(self, M: int) -> float:
        x = self._x(M, self.base.shape[1])
        return timing.time_calls(
            [partial(functional.linear, x, w) for w in self.copies], self.replays
        ).median

    def with_adapter(self, M: int) -> float:
        x = self._x(M, self.base.shape[1])
        ours = linear.packed_linear(x, self.base, adapter=self.adapter)
        plain = functional.linear(x, self.dense)
        linear.add_adapter(x, self.adapter, plain)
        self.totals.compare(ours, plain)
        calls = [partial(linear.packed_linear, x, w, adapter=self.adapter) for w in self.packed]
        return timing.time_calls(calls, self.replays).median

    def backward(self, M: int) -> tuple[float, float]:
        grad = self._x(M, self.base.shape[0])
        self.totals.compare(linear.grad_input(grad, self.base), grad @ self.dense)
        ours = timing.time_calls(
            [partial(linear.grad_input, grad, w) for w in self.packed[:4]], self.replays
        ).median
        plain = timing.time_calls(
            [partial(torch.matmul, grad, w) for w in self.copies[:4]], self.replays
        ).median
        N, K = self.base.shape
        self.totals.add(ours, self.base.packs.nbytes + 2 * M * (N + K), 2 * M * N * K)
        return ours, plain
