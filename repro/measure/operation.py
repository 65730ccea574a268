"""Time single operations on real shapes: the bars of the target `kernels`.

Device time by events over CUDA graphs, weights rotated over several times the L2
(`kernels.timing`), the bfloat16 layer in the same process on the same activations. Before an
operation is timed its result is compared with plain PyTorch's, and the largest difference is an
effect of the record: a fast kernel that computes something else would show there.

Arm `operations` times the operations around the linear layers, and the portable layer. Shares are
of the copy rate that the same process measures: bytes that must move (each input read once, each
output written once) over time, over that rate.

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

from kernels import dispatch, timing, tuning
from kernels.cuda import hopper, linear
from kernels.cuda.hopper import Adapter
from kernels.op import Shape, rotated
from kernels.ops import named_op
from kernels.packing import PackedWeight
from kernels.triton import logprobs, quantize
from kernels.tune import ENDS, LAYERS, random_packed
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.models.random_policy import random_weight
from repro.spec.config import OperationScale, RunConfig, derive_seed
from repro.spec.facts import Facts, Timing
from repro.targets.kernel_speed import (
    FORMATS,
    PORTABLE_ROWS,
    adapter_name,
    backward_name,
    portable_name,
    ratio_name,
)

# Metric to the row of `kernels.ops.OPS` and the shape that it is timed at: rows of a decode step
# for its attention and its draw, tokens of a prefill or of training for the others.
_BETWEEN_THE_PRODUCTS: dict[str, tuple[str, Shape]] = {
    "attend_step_share_7b": ("attend_step", (64, 2048, 28, 4, 128)),
    "attend_step_share_32b": ("attend_step", (64, 2048, 40, 8, 128)),
    "choose_share": ("choose", (256, 152064)),
    "add_norm_share": ("add_norm", (8192, 3584)),
    "norm_share": ("rms_norm", (8192, 3584)),
    "add_adapter_share": ("add_adapter", (8192, 4608)),
    "adapted_swiglu_share": ("adapted_swiglu", (4096, 18944)),
    "swiglu_share": ("swiglu", (4096, 18944)),
}
# Tokens, channels and vocabulary of a policy of 7B.
_LOGPROBS_SHAPE = (8192, 3584, 152064)


@dataclasses.dataclass(slots=True)
class Totals:
    """What was timed in all, for the receipt."""

    seconds: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0
    difference: float = 0.0

    def add(self, microseconds: float, nbytes: float, flops: float) -> None:
        """Add one timed call."""
        self.seconds += microseconds * 1e-6
        self.nbytes += nbytes
        self.flops += flops

    def compare(self, ours: Tensor, plain: Tensor) -> None:
        """Keep the largest relative difference, in the Frobenius norm."""
        gap = (ours.float() - plain.float()).norm() / plain.float().norm()
        self.difference = max(self.difference, float(gap))


def ratio(value: float, unit: str, n: int) -> Estimate:
    """Return what was timed as an estimate of `n` replays."""
    return Estimate(
        value=value, unit=unit, n=n, method="medians of graph replays, device events, cold caches"
    )


def measure_operations(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Time the arm's operations, on a Hopper GPU."""
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
    facts = Facts(
        largest_relative_difference=totals.difference,
        tuned_table=tuning.device_slug(torch.cuda.get_device_name()),
        **Timing(
            seconds=totals.seconds,
            bytes=totals.nbytes,
            flops=totals.flops,
            bytes_per_second=measured_copy_rate,
            flops_per_second=timing.matmul_rate(),
        ).fact(),
    )
    return Measured(metrics=metrics, facts=facts)


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
        self.totals.compare(_grad_input(grad, self.base), grad @ self.dense)
        ours = timing.time_calls(
            [partial(_grad_input, grad, w) for w in self.packed[:4]], self.replays
        ).median
        plain = timing.time_calls(
            [partial(torch.matmul, grad, w) for w in self.copies[:4]], self.replays
        ).median
        N, K = self.base.shape
        self.totals.add(ours, self.base.packs.nbytes + 2 * M * (N + K), 2 * M * N * K)
        return ours, plain


def _grad_input(grad: Tensor, weight: PackedWeight) -> Tensor:
    """Return dy W, (M, K), as a backward pass does."""
    return grad @ hopper.dequantize_packs(weight, dtype=grad.dtype)


def around_the_layers(
    scale: OperationScale, totals: Totals, progress: Progress
) -> dict[str, Estimate]:
    """Time every operation of `kernels.ops` that is no packed linear layer."""
    timed = _Shares(timing.copy_rate(), scale.replays, totals, {})
    progress("between the products", {})
    for metric, (name, shape) in _BETWEEN_THE_PRODUCTS.items():
        _share_of(metric, name, shape, timed)
    _prefill_attention(timed)
    progress("conversions", {})
    for format in FORMATS:
        _conversions(format, timed)
    torch.cuda.empty_cache()
    estimates = timed.estimates
    for format in FORMATS:
        progress(f"portable linear layer, {format}", {})
        counts = PORTABLE_ROWS if format == "nvfp4" else (16,)
        estimates |= _portable(format, counts, scale.replays, totals)
    progress("logprobs", {})
    return estimates | _logprobs(scale.replays)


@dataclasses.dataclass(slots=True)
class _Shares:
    """Times calls and keeps their share of the copy rate (bytes per second)."""

    rate: float
    replays: int
    totals: Totals
    estimates: dict[str, Estimate]

    def share(self, name: str, nbytes: float, calls: Sequence[Callable[[], object]]) -> None:
        taken = timing.time_calls(calls, self.replays).median
        self.totals.add(taken, nbytes, 0.0)
        share = nbytes / (taken * 1e-6) / self.rate
        self.estimates[name] = ratio(share, "ratio", self.replays)


def _conversions(format: str, timed: _Shares) -> None:
    """Time both directions at gate_up of the 7B."""
    N, K = LAYERS["7b"]["gate_up"]
    base = random_packed(N, K, format, 0)
    scratch = [torch.empty(N, K, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    timed.share(
        f"dequantize_share_{format}",
        base.packs.nbytes + scratch[0].nbytes,
        [partial(hopper.dequantize_packs, base, out) for out in scratch],
    )
    weight = torch.randn(N, K, device="cuda").mul_(0.02).bfloat16()
    encode = base.extras["encode_scale"] if format == "nvfp4" else None
    codes, scales = quantize.quantize_blocks(weight, format, encode)
    timed.share(
        f"quantize_share_{format}",
        weight.nbytes + codes.nbytes + scales.nbytes,
        [partial(quantize.quantize_blocks, weight, format, encode)] * 2,
    )


def _share_of(metric: str, name: str, shape: Shape, timed: _Shares) -> None:
    """Time a row of `kernels.ops.OPS` at a shape, as the engine and the trainer call it."""
    op = named_op(name)
    arguments = op.prepare(op.inputs(shape, torch.bfloat16, "cuda", 0))
    kernel = op.load()
    calls = [partial(op.call, kernel, own) for own in rotated(arguments)]
    timed.share(metric, op.nbytes(shape), calls)


def _prefill_attention(timed: _Shares) -> None:
    """Time the prefill's attention, whose time is arithmetic, against torch's over dense rows."""
    op = named_op("prefill_attention")
    arguments = op.inputs(op.large, torch.bfloat16, "cuda", 0)
    assert op.dense is not None
    function, dense = op.dense(arguments)
    ours = timing.time_calls([partial(op.load(), *arguments)] * 2, timed.replays).median
    plain = timing.time_calls([partial(function, *dense)] * 2, timed.replays).median
    timed.totals.add(ours, op.nbytes(op.large), op.flops(op.large))
    timed.estimates["prefill_attention_ratio"] = ratio(plain / ours, "ratio", timed.replays)


def _portable(
    format: str, counts: Sequence[int], replays: int, totals: Totals
) -> dict[str, Estimate]:
    """Time the 7B block's linear layers from the checkpoint's layout, as dispatched, in Triton."""
    generator = torch.Generator("cuda").manual_seed(torch.initial_seed())
    ours = dict.fromkeys(counts, 0.0)
    plain = dict.fromkeys(counts, 0.0)
    for N, K in LAYERS["7b"].values():
        count = timing.copies(N * K * 9 // 16)
        weights = [random_weight(format, N, K, generator) for _ in range(count)]
        dense = [
            torch.randn(N, K, device="cuda").bfloat16() for _ in range(timing.copies(2 * N * K))
        ]
        for M in counts:
            x = torch.randn(M, K, device="cuda").bfloat16()
            exact = functional.linear(x, dispatch.dequantize(weights[0], x.dtype))
            totals.compare(dispatch.linear(x, weights[0]), exact)
            calls = [partial(dispatch.linear, x, weight) for weight in weights]
            ours[M] += timing.time_calls(calls, replays).median
            calls = [partial(functional.linear, x, weight) for weight in dense]
            plain[M] += timing.time_calls(calls, replays).median
        del weights, dense
        torch.cuda.empty_cache()
    return {portable_name(format, M): ratio(plain[M] / ours[M], "ratio", replays) for M in counts}


def _logprobs(n: int) -> dict[str, Estimate]:
    """Time logprobs and entropy against the full product and its softmax, and their memory."""
    T, H, V = _LOGPROBS_SHAPE
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    head = (torch.randn(V, H, device="cuda") * 0.02).bfloat16()
    ids = torch.randint(0, V, (T,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs.token_logprobs(hidden, head, ids, 1.0)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    ours = timing.time_eager(lambda: logprobs.token_logprobs(hidden, head, ids, 1.0), n).median
    plain = timing.time_eager(lambda: torch.softmax(hidden @ head.t(), -1), n).median
    return {
        "logprobs_ratio": ratio(plain / ours, "ratio", n),
        "logprobs_bytes": ratio(float(extra), "bytes", 1),
    }
