"""The kernels' own claims: time of a decoder block's linear layers against 16-bit ones.

Not a table of the paper: the paper's kernel (Marlin) gains below 32 rows of activations and loses
to bfloat16 above 64, where reinforcement learning samples and trains. The bars here are this
suite's: the `must` of each cell is the accepted interval, the `goal` stands beside it
(`expected/bars/systems.toml`).

A ratio is time of `F.linear` in bfloat16 over ours, both summed over the four linear layers of one
decoder block (fused q/k/v and gate/up), in one process on one device, with cold caches.
"""

from __future__ import annotations

from collections.abc import Callable

from repro.spec.arm import Arm, WeightFormat
from repro.spec.config import OperationScale
from repro.spec.needs import Needs
from repro.spec.target import Claim, Metric, Target
from repro.spec.tier import GIB, Tier

SCALE = OperationScale()
FORMATS: tuple[WeightFormat, ...] = ("nvfp4", "mxfp4", "nf4")


# What names a metric by block and rows of x.
Naming = Callable[[str, int], str]


def ratio_name(block: str, rows: int) -> str:
    """Return the name of the forward ratio's metric."""
    return f"ratio_{block}_{rows}"


def backward_name(block: str, rows: int) -> str:
    """Return the name of the backward ratio's metric."""
    return f"ratio_backward_{block}_{rows}"


def adapter_name(block: str, rows: int) -> str:
    """Return the name of the fused adapter's metric."""
    return f"adapter_factor_{block}_{rows}"


# Rows of x at which the portable layer is timed: each of its launches, and the way by a dense W.
PORTABLE_ROWS = (1, 8, 16, 64, 256, 1024, 4096)


def portable_name(format: str, rows: int) -> str:
    """Return the name of the portable layer's ratio at the 7B block."""
    return f"portable_ratio_{format}_{rows}"


_RATIOS = tuple(
    Metric(
        name=ratio_name(block, rows), unit="ratio", title=f"{block}, M = {rows}", better="higher"
    )
    for block in SCALE.blocks
    for rows in SCALE.rows
)
_BACKWARD = tuple(
    Metric(
        name=backward_name(block, rows),
        unit="ratio",
        title=f"{block} dX, M = {rows}",
        better="higher",
    )
    for block in SCALE.blocks
    for rows in SCALE.backward_rows
)
_ADAPTER = tuple(
    Metric(
        name=adapter_name(block, rows),
        unit="ratio",
        title=f"{block} with LoRA over without, M = {rows}",
        better="lower",
    )
    for block in SCALE.blocks
    for rows in SCALE.adapter_rows
)
_OTHERS = (
    *(
        Metric(
            name=f"{name}_share{block}",
            unit="ratio",
            title=f"{title}, of the copy rate",
            better="higher",
        )
        for name, block, title in (
            ("attend_step", "_7b", "decode step's attention, 7B heads"),
            ("attend_step", "_32b", "decode step's attention, 32B heads"),
            ("choose", "", "draw of a token"),
            ("add_norm", "", "RMSNorm with residual and noise"),
            ("norm", "", "RMSNorm with noise, as trained"),
            ("add_adapter", "", "adapter's share added"),
            ("adapted_swiglu", "", "SwiGLU with an adapter"),
        )
    ),
    Metric(
        name="prefill_attention_ratio",
        unit="ratio",
        title="prefill's attention against torch's over dense rows",
        better="higher",
    ),
    *(
        Metric(
            name=f"{name}_share_{format}",
            unit="ratio",
            title=f"{name}, {format.upper()}, of the copy rate",
            better="higher",
        )
        for name in ("dequantize", "quantize")
        for format in FORMATS
    ),
    *(
        Metric(
            name=portable_name(format, rows),
            unit="ratio",
            title=f"portable linear, {format.upper()}, 7b, M = {rows}",
            better="higher",
        )
        for format in FORMATS
        for rows in (PORTABLE_ROWS if format == "nvfp4" else (16,))
    ),
    Metric(name="swiglu_share", unit="ratio", title="SwiGLU, of the copy rate", better="higher"),
    Metric(
        name="logprobs_ratio",
        unit="ratio",
        title="logprobs against matmul and softmax",
        better="higher",
    ),
    Metric(name="logprobs_bytes", unit="bytes", title="extra memory of logprobs"),
)

_CLAIMS = tuple(
    Claim(
        name=f"mxfp4_{block}_{rows}",
        statement=f"MXFP4 is within 5 % of NVFP4's speed, {block} block, M = {rows}",
        source="this suite's bar",
        kind="ratio",
        arms=("mxfp4", "nvfp4"),
        metric=ratio_name(block, rows),
        factor=("weight_format",),
        margin=0.95,
        because="the same codes through the same kernels, half as many block scales",
    )
    for block in SCALE.blocks
    for rows in SCALE.rows
)

KERNELS = Target(
    name="kernels",
    version=2,
    title="Kernels: linear layers on 4-bit weights, and the operations around them",
    statement="weight-only 4-bit linear layers are faster than bfloat16 at every number of rows "
    "where weights are what is read, and cost nothing where arithmetic is",
    source="not in the paper; its kernel is compared in Tables 5 to 8",
    procedure="operation",
    arms=(
        *(
            Arm(name=name, label=name.upper(), weight_format=name, training="none")
            for name in FORMATS
        ),
        Arm(name="operations", label="other operations", training="none"),
    ),
    scales={Tier.SYSTEMS: SCALE},
    needs={Tier.SYSTEMS: Needs(memory_bytes=16 * GIB, disk_bytes=10_000_000)},
    claims=_CLAIMS,
    metrics=(*_RATIOS, *_BACKWARD, *_ADAPTER, *_OTHERS),
    headline=ratio_name("7b", 8),
)
