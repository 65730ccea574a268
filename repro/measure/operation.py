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
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kernels import dispatch, reference_step, timing, tuning
from kernels.cuda import hopper, linear
from kernels.cuda.hopper import Adapter
from kernels.formats import format_named, random_weight
from kernels.op import Shape, rotated
from kernels.ops import named_op
from kernels.packing import PackedWeight
from kernels.triton import decode_adapter, logprobs, quantize
from kernels.tune import ENDS, LAYERS, random_adapter, random_packed
from repro.evidence.procedure import Measured, Progress, RunContext, Stopped
from repro.evidence.record import Estimate
from repro.spec.config import OperationScale, RunConfig, derive_seed
from repro.spec.facts import Facts, Timing
from repro.targets.kernel_speed import FORMATS, PORTABLE_ROWS, name_of

Calls = Sequence[Callable[[], object]]

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


@dataclasses.dataclass(slots=True, kw_only=True)
class Timed:
    """Times calls, and keeps their metrics and what was timed in all, for the receipt.

    `rate` is the device's copy rate, bytes per second; `difference` the largest relative difference
    from plain PyTorch, in the Frobenius norm.
    """

    replays: int
    rate: float
    seconds: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0
    difference: float = 0.0
    metrics: dict[str, Estimate] = dataclasses.field(default_factory=dict)

    def median(self, calls: Calls) -> float:
        """Return the microseconds of a call."""
        return timing.time_calls(calls, self.replays)

    def counted(self, calls: Calls, nbytes: float, flops: float = 0.0) -> float:
        """Return the microseconds of a call, which is added to what was timed in all."""
        taken = self.median(calls)
        self.seconds += taken * 1e-6
        self.nbytes += nbytes
        self.flops += flops
        return taken

    def compare(self, ours: Tensor, plain: Tensor) -> None:
        """Keep the largest difference."""
        gap = (ours.float() - plain.float()).norm() / plain.float().norm()
        self.difference = max(self.difference, float(gap))

    def note(self, name: str, value: float, unit: str = "ratio", n: int = 0) -> None:
        """Keep a metric, of all replays unless `n` says of how many."""
        method = "medians of graph replays, device events, cold caches"
        self.metrics[name] = Estimate(value=value, unit=unit, n=n or self.replays, method=method)

    def share(self, name: str, nbytes: float, calls: Calls) -> None:
        """Time calls that move so many bytes, and keep their share of the copy rate."""
        taken = self.counted(calls, nbytes)
        self.note(name, nbytes / (taken * 1e-6) / self.rate)


def measure_operations(run: RunConfig, context: RunContext) -> Measured:
    """Time the arm's operations, on a Hopper GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise RuntimeError("the kernels target needs a Hopper GPU (compute capability 9.0)")
    torch.manual_seed(derive_seed(run.seed, "operation") % 2**31)
    scale: OperationScale = run.scale
    timed = Timed(replays=scale.replays, rate=timing.copy_rate())
    if run.arm.name == "operations":
        around_the_layers(timed, context.progress)
    else:
        for block in scale.blocks:
            _block(block, run.arm.weight_format, scale, timed, context)
    facts = Facts(
        largest_relative_difference=timed.difference,
        tuned_table=tuning.device_slug(torch.cuda.get_device_name()),
        **Timing(
            seconds=timed.seconds,
            bytes=timed.nbytes,
            flops=timed.flops,
            bytes_per_second=timed.rate,
            flops_per_second=timing.matmul_rate(),
        ).fact(),
    )
    return Measured(metrics=timed.metrics, facts=facts)


def _block(
    block: str, format: str, scale: OperationScale, timed: Timed, context: RunContext
) -> None:
    """Time the four linear layers of one block: forward, backward, with an adapter."""
    taken: dict[tuple[str, int], float] = defaultdict(float)
    for name, (N, K) in LAYERS[block].items():
        if context.should_stop():
            raise Stopped
        context.progress(f"{block} {name}", {})
        base = random_packed(N, K, format, 0)
        layer = _Layer(base, ENDS.get((block, name), ()), scale.adapter_rank, timed)
        for M in scale.rows:
            ours, plain = layer.forward(M)
            taken["ours", M] += ours
            taken["bf16", M] += plain
        for M in scale.adapter_rows:
            taken["adapter", M] += layer.with_adapter(M)
        for M in scale.backward_rows:
            ours, plain = layer.backward(M)
            taken["backward", M] += ours
            taken["backward in bf16", M] += plain
        del layer, base
        torch.cuda.empty_cache()
    for M in scale.rows:
        timed.note(name_of("ratio", block, M), taken["bf16", M] / taken["ours", M])
        for who in ("ours", "bf16"):
            timed.note(f"seconds_{who}_{block}_{M}", taken[who, M] * 1e-6, "seconds")
    for M in scale.backward_rows:
        over = taken["backward in bf16", M] / taken["backward", M]
        timed.note(name_of("ratio_backward", block, M), over)
    for M in scale.adapter_rows:
        timed.note(name_of("adapter_factor", block, M), taken["adapter", M] / taken["ours", M])


def _rows(M: int, width: int) -> Tensor:
    """Return random activations, (M, width), bfloat16."""
    return torch.randn(M, width, device="cuda").bfloat16()


class _Layer:
    """One layer in both forms, copied often enough to outgrow the caches, and an adapter of it."""

    def __init__(self, base: PackedWeight, ends: tuple[int, ...], rank: int, timed: Timed) -> None:
        self.base, self.timed, self.dense = base, timed, hopper.dequantize_packs(base)
        self.packed = [packed for (packed,) in rotated((base,))]
        self.copies = [dense for (dense,) in rotated((self.dense,))]
        self.adapter = random_adapter(*base.shape, rank, ends)

    def _both(self, M: int, ours: Calls, plain: Calls) -> tuple[float, float]:
        N, K = self.base.shape
        nbytes = self.base.packs.nbytes + 2 * M * (N + K)
        return self.timed.counted(ours, nbytes, 2 * M * N * K), self.timed.median(plain)

    def forward(self, M: int) -> tuple[float, float]:
        """Return the microseconds of ours and of bfloat16's."""
        N, K = self.base.shape
        x = _rows(M, K)
        out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda").fill_(float("nan"))
        linear.packed_linear(x, self.base, out=out)
        self.timed.compare(out, functional.linear(x, self.dense))
        ours = [partial(linear.packed_linear, x, w, out=out) for w in self.packed]
        return self._both(M, ours, [partial(functional.linear, x, w) for w in self.copies])

    def with_adapter(self, M: int) -> float:
        x = _rows(M, self.base.shape[1])
        adapter = self.adapter
        ours = _adapted(x, self.base, adapter)
        plain, z = functional.linear(x, self.dense), functional.linear(x, adapter.a)
        reference_step.add_adapter(plain, z, adapter.b, adapter.ends, adapter.scaling)
        self.timed.compare(ours, plain)
        return self.timed.median([partial(_adapted, x, w, adapter) for w in self.packed])

    def backward(self, M: int) -> tuple[float, float]:
        """Return the microseconds of ours and of bfloat16's."""
        grad = _rows(M, self.base.shape[0])
        self.timed.compare(_grad_input(grad, self.base), grad @ self.dense)
        ours = [partial(_grad_input, grad, w) for w in self.packed[:4]]
        return self._both(M, ours, [partial(torch.matmul, grad, w) for w in self.copies[:4]])


def _adapted(x: Tensor, weight: PackedWeight, adapter: Adapter) -> Tensor:
    """Return the layer with its adapter, (M, N), by the launches of a rollout, in turn."""
    if linear.fuses_adapter(weight, len(x)):
        return linear.packed_linear(x, weight, adapter=adapter)
    z = decode_adapter.project(x, adapter.a, overlap=True)
    y = linear.packed_linear(x, weight)
    return decode_adapter.add_adapter(y, z, adapter.b, adapter.ends, adapter.scaling, overlap=True)


def _grad_input(grad: Tensor, weight: PackedWeight) -> Tensor:
    """Return dy W, (M, K), as a backward pass does."""
    return grad @ hopper.dequantize_packs(weight, dtype=grad.dtype)


def around_the_layers(timed: Timed, progress: Progress) -> None:
    """Time every operation of `kernels.ops` that is no packed linear layer."""
    progress("between the products", {})
    for metric, (name, shape) in _BETWEEN_THE_PRODUCTS.items():
        _share_of(metric, name, shape, timed)
    _prefill_attention(timed)
    progress("conversions", {})
    for format in FORMATS:
        _conversions(format, timed)
    torch.cuda.empty_cache()
    for format in FORMATS:
        progress(f"portable linear layer, {format}", {})
        _portable(format, PORTABLE_ROWS if format == "nvfp4" else (16,), timed)
    progress("logprobs", {})
    _logprobs(timed)


def _conversions(format: str, timed: Timed) -> None:
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
    encode = base.extras["encode_scale"] if format_named(format).has_global_scale else None
    codes, scales = quantize.quantize_blocks(weight, format, encode)
    timed.share(
        f"quantize_share_{format}",
        weight.nbytes + codes.nbytes + scales.nbytes,
        [partial(quantize.quantize_blocks, weight, format, encode)] * 2,
    )


def _share_of(metric: str, name: str, shape: Shape, timed: Timed) -> None:
    """Time a row of `kernels.ops.OPS` at a shape, as the engine and the trainer call it."""
    op = named_op(name)
    arguments = op.prepare(op.inputs(shape, torch.bfloat16, "cuda", 0))
    kernel = op.load()
    calls = [partial(op.call, kernel, own) for own in rotated(arguments)]
    timed.share(metric, op.nbytes(shape), calls)


def _prefill_attention(timed: Timed) -> None:
    """Time the prefill's attention, whose time is arithmetic, against torch's over dense rows."""
    op = named_op("prefill_attention")
    arguments = op.inputs(op.large, torch.bfloat16, "cuda", 0)
    assert op.dense is not None
    function, dense = op.dense(arguments)
    work = op.nbytes(op.large), op.flops(op.large)
    ours = timed.counted([partial(op.load(), *arguments)] * 2, *work)
    plain = timed.median([partial(function, *dense)] * 2)
    timed.note("prefill_attention_ratio", plain / ours)


def _portable(format: str, counts: Sequence[int], timed: Timed) -> None:
    """Time the 7B block's linear layers from the checkpoint's layout, as dispatched, in Triton."""
    generator = torch.Generator("cuda").manual_seed(torch.initial_seed())
    ours, plain = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0.0)
    for N, K in LAYERS["7b"].values():
        count = timing.copies(N * K * 9 // 16)
        weights = [random_weight(format, N, K, generator) for _ in range(count)]
        dense = [_rows(N, K) for _ in range(timing.copies(2 * N * K))]
        for M in counts:
            x = _rows(M, K)
            exact = functional.linear(x, dispatch.dequantize(weights[0], x.dtype))
            timed.compare(dispatch.linear(x, weights[0]), exact)
            ours[M] += timed.median([partial(dispatch.linear, x, weight) for weight in weights])
            plain[M] += timed.median([partial(functional.linear, x, weight) for weight in dense])
        del weights, dense
        torch.cuda.empty_cache()
    for M in counts:
        timed.note(name_of("portable_ratio", format, M), plain[M] / ours[M])


def _logprobs(timed: Timed) -> None:
    """Time logprobs and entropy against the full product and its softmax, and their memory."""
    T, H, V = _LOGPROBS_SHAPE
    hidden = _rows(T, H)
    head = (torch.randn(V, H, device="cuda") * 0.02).bfloat16()
    ids = torch.randint(0, V, (T,), device="cuda")
    work = partial(logprobs.token_logprobs, hidden, head, ids, 1.0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    ours = timing.time_eager(work, timed.replays)
    plain = timing.time_eager(lambda: torch.softmax(hidden @ head.t(), -1), timed.replays)
    timed.note("logprobs_ratio", plain / ours)
    timed.note("logprobs_bytes", float(extra), "bytes", 1)
