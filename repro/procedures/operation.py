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

from kernels import attention, hopper, linear, logprobs, quantize, rms_norm, timing, tuning
from kernels.hopper import Adapter
from kernels.packing import PackedWeight
from kernels.tune import LAYERS, random_packed
from repro.evidence.record import Estimate
from repro.procedures import Measured, Progress, Stopped
from repro.spec.config import OperationScale, RunConfig, derive_seed
from repro.targets.kernels import adapter_name, backward_name, ratio_name

_ENDS = {
    "7b": {"qkv": (3584, 4096), "gate_up": (18944,)},
    "32b": {"qkv": (5120, 6144), "gate_up": (27648,)},
}
_COPY_BYTES = 4 << 30


@dataclasses.dataclass(slots=True)
class _Totals:
    """What was timed in all, for the receipt."""

    seconds: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0
    difference: float = 0.0

    def add(self, microseconds: float, nbytes: float, flops: float) -> None:
        self.seconds += microseconds * 1e-6
        self.nbytes += nbytes
        self.flops += flops

    def compare(self, ours: Tensor, plain: Tensor) -> None:
        """Keep the largest relative difference, in the Frobenius norm."""
        gap = (ours.float() - plain.float()).norm() / plain.float().norm()
        self.difference = max(self.difference, float(gap))


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
    totals = _Totals()
    if run.arm.name == "operations":
        metrics = _operations(scale, totals, progress)
    else:
        metrics = {}
        for block in scale.blocks:
            metrics |= _block(block, run.arm.weight_format, scale, totals, progress, should_stop)
    copy_rate = _copy_rate()
    effects = {
        "largest_relative_difference": totals.difference,
        "tuned_table": tuning.device_slug(torch.cuda.get_device_name()),
        "timing": {
            "method": "device_events",
            "seconds": totals.seconds,
            "bytes": totals.nbytes,
            "flops": totals.flops,
            "bytes_per_second": copy_rate,
            "flops_per_second": _matmul_rate(),
        },
    }
    return Measured(metrics=metrics, effects=effects)


def _ratio(value: float, unit: str, n: int) -> Estimate:
    return Estimate(
        value=value, unit=unit, n=n, method="medians of graph replays, device events, cold caches"
    )


def _block(
    block: str,
    format: str,
    scale: OperationScale,
    totals: _Totals,
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
        ends = _ENDS[block].get(name, ())
        adapter = _adapter(N, K, scale.adapter_rank, ends)
        layer = _Layer(base, packed, dense, copies, adapter, scale.replays, totals)
        for M in scale.rows:
            ours["forward", M] = ours.get(("forward", M), 0.0) + layer.forward(M)
            plain["forward", M] = plain.get(("forward", M), 0.0) + layer.plain(M)
        for M in scale.adapter_rows:
            ours["adapter", M] = ours.get(("adapter", M), 0.0) + layer.with_adapter(M)
        for M in scale.backward_rows:
            mine, theirs = layer.backward(M)
            ours["backward", M] = ours.get(("backward", M), 0.0) + mine
            plain["backward", M] = plain.get(("backward", M), 0.0) + theirs
        del layer, packed, copies, dense
        torch.cuda.empty_cache()
    n = scale.replays
    found = {}
    for M in scale.rows:
        found[ratio_name(block, M)] = _ratio(plain["forward", M] / ours["forward", M], "ratio", n)
        for who, taken in (("ours", ours), ("bf16", plain)):
            found[f"seconds_{who}_{block}_{M}"] = _ratio(taken["forward", M] * 1e-6, "seconds", n)
    for M in scale.backward_rows:
        found[backward_name(block, M)] = _ratio(
            plain["backward", M] / ours["backward", M], "ratio", n
        )
    for M in scale.adapter_rows:
        slower = ours["adapter", M] / ours["forward", M]
        found[adapter_name(block, M)] = _ratio(slower, "ratio", n)
    return found


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
    totals: _Totals

    def _x(self, M: int, width: int) -> Tensor:
        return torch.randn(M, width, device="cuda").bfloat16()

    def forward(self, M: int) -> float:
        N, K = self.base.shape
        x = self._x(M, K)
        out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda").fill_(float("nan"))
        linear.packed_linear(x, self.base, out=out)
        if M <= 512:
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


def _operations(scale: OperationScale, totals: _Totals, progress: Progress) -> dict[str, Estimate]:
    """Time what is around the linear layers."""
    n = scale.replays
    rate = _copy_rate()
    found = {}

    def share(name: str, nbytes: float, calls: Sequence[Callable[[], object]]) -> None:
        taken = timing.time_calls(calls, n).median
        totals.add(taken, nbytes, 0.0)
        found[name] = _ratio(nbytes / (taken * 1e-6) / rate, "ratio", n)

    for block, query_heads, key_heads in (("7b", 28, 4), ("32b", 40, 8)):
        progress(f"decode attention {block}", {})
        inputs = _attention_inputs(query_heads, key_heads)
        attend = partial(attention.decode_attention, *inputs)
        share(f"attention_share_{block}", inputs[1].nbytes + inputs[2].nbytes, [attend] * 3)
    progress("conversions and norms", {})
    base = random_packed(37888, 3584, "nvfp4", 0)
    scratch = [torch.empty(37888, 3584, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    share(
        "dequantize_share",
        base.packs.nbytes + scratch[0].nbytes,
        [partial(hopper.dequantize_packs, base, out) for out in scratch],
    )
    weight = scratch[0].clone()
    share(
        "quantize_share",
        weight.nbytes + weight.numel() * 9 / 16,
        [partial(quantize.quantize_blocks, weight, "nvfp4", base.kept["encode_scale"])] * 2,
    )
    rows = [torch.randn(8192, 3584, device="cuda").bfloat16() for _ in range(8)]
    gain, noise = rows[0][0].clone(), torch.randn(3584, device="cuda") * 0.01
    share(
        "rms_norm_share",
        4 * rows[0].nbytes,
        [
            partial(rms_norm.add_rms_norm, x, residual, gain, 1e-6, noise)
            for x, residual in zip(rows[::2], rows[1::2], strict=True)
        ],
    )
    progress("logprobs", {})
    found |= _logprobs(n)
    return found


def _attention_inputs(
    query_heads: int, key_heads: int, B: int = 64, S: int = 2048, D: int = 128
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    blocks = B * S // 16
    keys, values = (
        torch.randn(blocks, 16, key_heads, D, device="cuda").bfloat16() for _ in range(2)
    )
    table = torch.randperm(blocks, device="cuda").view(B, -1).int()
    q = torch.randn(B, query_heads, D, device="cuda").bfloat16()
    return q, keys, values, table, torch.full((B,), S, dtype=torch.int32, device="cuda")


def _logprobs(n: int, T: int = 8192, H: int = 3584, V: int = 152064) -> dict[str, Estimate]:
    """Time logprobs and entropy against the full product and its softmax, and their memory."""
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
        "logprobs_ratio": _ratio(plain / ours, "ratio", n),
        "logprobs_bytes": _ratio(float(extra), "bytes", 1),
    }


def _copy_rate() -> float:
    """Return bytes a second of a device copy, read and written both counted."""
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = timing.time_eager(lambda: target.copy_(source), 9).low
    return 2 * _COPY_BYTES / (taken * 1e-6)


def _matmul_rate() -> float:
    """Return FLOP a second of a large bfloat16 product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    taken = timing.time_eager(lambda: a @ b, 9).low
    return 2 * 8192**3 / (taken * 1e-6)
