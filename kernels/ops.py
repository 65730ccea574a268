"""One row per operation: its reference, its kernel, its inputs, and its bytes and operations.

There is a row for every kernel that a run calls (the engine, the trainer, loading), and none else.
The parity test and the benchmark are loops over `OPS`; adding an operation is one file and one row.
"""

from __future__ import annotations

import torch

from kernels import reference
from kernels.op import Arguments, Op, Shape, normal, triton_row
from kernels.ops_linear import LINEAR_OPS
from kernels.ops_step import STEP_OPS
from kernels.ops_train import TRAIN_OPS


def _norm_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    H = shape[-1]
    gain = normal(H, dtype=dtype, device=device, seed=seed + 1)
    noise = normal(H, dtype=torch.float32, device=device, seed=seed + 2) * 0.01
    return normal(*shape, dtype=dtype, device=device, seed=seed), gain, 1e-6, noise


def _swiglu_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    return (normal(shape[0], 2 * shape[1], dtype=dtype, device=device, seed=seed),)


def _logprob_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    T, H, V = shape
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (T,), generator=generator).to(device)
    hidden = normal(T, H, dtype=dtype, device=device, seed=seed + 1)
    head = normal(V, H, dtype=torch.float32, device=device, seed=seed + 2) * H**-0.5 * 3
    return hidden, head.to(dtype), ids, 0.7


def named_op(name: str) -> Op:
    """Return a row by its name; `ValueError` lists the names otherwise."""
    for op in OPS:
        if op.name == name:
            return op
    names = ", ".join(op.name for op in OPS)
    raise ValueError(f"there is no operation {name!r}; the rows are {names}")


OPS: tuple[Op, ...] = (
    *LINEAR_OPS,
    triton_row(
        reference.rms_norm,
        "rms_norm",
        inputs=_norm_inputs,
        shapes=((1, 64), (7, 100), (3, 2, 896)),
        large=(8192, 3584),
        nbytes=lambda s: 4 * s[0] * s[1],
        flops=lambda s: 4 * s[0] * s[1],
    ),
    triton_row(
        reference.swiglu,
        "swiglu",
        inputs=_swiglu_inputs,
        shapes=((1, 64), (5, 1100)),
        large=(4096, 18944),
        nbytes=lambda s: 6 * s[0] * s[1],
        flops=lambda s: 5 * s[0] * s[1],
    ),
    triton_row(
        reference.token_logprobs,
        "logprobs",
        inputs=_logprob_inputs,
        shapes=((5, 64, 5000), (17, 32, 300)),
        large=(2048, 3584, 152064),
        nbytes=lambda s: 2 * (s[0] * s[1] + s[1] * s[2]) + 8 * s[0] * s[2],
        flops=lambda s: 2 * s[0] * s[1] * s[2],
        captured=False,
    ),
    *STEP_OPS,
    *TRAIN_OPS,
)
