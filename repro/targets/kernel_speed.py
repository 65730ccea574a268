"""The kernels' own claims: time of a decoder block's linear layers against 16-bit ones.

Not a table of the paper: the paper's kernel (Marlin) gains below 32 rows of activations and loses
to bfloat16 above 64, where reinforcement learning samples and trains. The bars here are this
suite's: the `must` of each cell is the accepted interval, the `goal` stands beside it
(`expected/bars/systems.toml`).

A ratio is time of `F.linear` in bfloat16 over ours, both summed over the four linear layers of one
decoder block (fused q/k/v and gate/up), in one process on one device, with cold caches.
"""

from __future__ import annotations

from repro.spec.arm import Arm, WeightFormat
from repro.spec.claim import OWN_BAR, Better, Metric
from repro.spec.config import OperationScale
from repro.spec.target import Target
from repro.spec.tier import GIB
from repro.targets.table_rows import Statement, metric, timed

SCALE = OperationScale()
FORMATS: tuple[WeightFormat, ...] = ("nvfp4", "mxfp4", "nf4")


def name_of(kind: str, layer: str, rows: int) -> str:
    """Return the name of a metric at a block, or the 7B block in a format, and rows of x."""
    return f"{kind}_{layer}_{rows}"


# Rows of x at which the portable layer is timed: not each of its launches, 32 and 128 are left out.
PORTABLE_ROWS = (1, 8, 16, 64, 256, 1024, 4096)


_ARMS = {
    name: Arm(name=name, label=name.upper(), weight_format=name, training="none")
    for name in FORMATS
}


def _by_rows(kind: str, what: str, every: tuple[int, ...], better: Better) -> list[Metric]:
    return [
        metric(
            name_of(kind, block, rows),
            "ratio",
            f"{block}{what}, M = {rows}",
            better,
            quantity=kind,
            model=block,
            batch=rows,
        )
        for block in SCALE.blocks
        for rows in every
    ]


_LINEARS = (
    *_by_rows("ratio", "", SCALE.rows, "higher"),
    *_by_rows("ratio_backward", " dX", SCALE.backward_rows, "higher"),
    *_by_rows("adapter_factor", " with LoRA over without", SCALE.adapter_rows, "lower"),
)
_OTHERS = (
    *(
        metric(
            f"attend_step_share_{block}",
            "ratio",
            f"decode step's attention, {block.upper()} heads, of the copy rate",
            "higher",
            model=block,
        )
        for block in SCALE.blocks
    ),
    *(
        metric(name, "ratio", title, "higher")
        for name, title in (
            ("choose_share", "draw of a token, of the copy rate"),
            ("add_norm_share", "RMSNorm with residual and noise, of the copy rate"),
            ("norm_share", "RMSNorm with noise, as trained, of the copy rate"),
            ("add_adapter_share", "adapter's share added, of the copy rate"),
            ("adapted_swiglu_share", "SwiGLU with an adapter, of the copy rate"),
            ("prefill_attention_ratio", "prefill's attention against torch's over dense rows"),
            *(
                (f"{name}_share_{format}", f"{name}, {format.upper()}, of the copy rate")
                for name in ("dequantize", "quantize")
                for format in FORMATS
            ),
            *(
                (
                    name_of("portable_ratio", format, rows),
                    f"portable linear, {format.upper()}, 7b, M = {rows}",
                )
                for format in FORMATS
                for rows in (PORTABLE_ROWS if format == "nvfp4" else (16,))
            ),
            ("swiglu_share", "SwiGLU, of the copy rate"),
            ("logprobs_ratio", "logprobs against matmul and softmax"),
        )
    ),
    metric("logprobs_bytes", "bytes", "extra memory of logprobs"),
)

_CLAIMS = tuple(
    Statement(
        f"mxfp4_{block}_{rows}",
        f"MXFP4 is within 5 % of NVFP4's speed, {block} block, M = {rows}",
        OWN_BAR,
    ).times(
        _ARMS["mxfp4"],
        _ARMS["nvfp4"],
        "weight_format",
        name_of("ratio", block, rows),
        bound=0.95,
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
    arms=(*_ARMS.values(), Arm(name="operations", label="other operations", training="none")),
    **timed("operation", SCALE, 16 * GIB, 10_000_000),
    claims=_CLAIMS,
    metrics=(*_LINEARS, *_OTHERS),
    headline=name_of("ratio", "7b", 8),
)
