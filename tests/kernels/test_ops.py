"""Every row of `kernels.ops.OPS` against its reference: interpreted on a CPU, and on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.ops import OPS, Op

ROOT = Path(__file__).parents[2]
NO_TRITON = importlib.util.find_spec("triton") is None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASES = [pytest.param(op, shape, id=f"{op.name}-{shape}") for op in OPS for shape in op.shapes]


def _plain(op: Op, arguments: tuple[Any, ...]) -> Any:
    return op.reference(*arguments)


def _exact(op: Op, arguments: tuple[Any, ...]) -> Any:
    """Return the reference in float32 on the same rounded values."""
    wide = [
        a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments
    ]
    return op.reference(*wide)


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _interpreter_is_broken() -> bool:
    """Tell whether loops fail: before 3.7, bounds are arrays of one, which NumPy 2.4 refuses."""
    major, minor = (int(part) for part in version("triton").split(".")[:2])
    try:
        int(np.zeros(1, dtype=np.int32))
    except TypeError:
        return (major, minor) < (3, 7)
    return False


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.skipif(NO_TRITON, reason="Triton is not installed")
def test_interpretable_kernels_agree_with_their_references_on_a_cpu() -> None:
    """In a process of its own: the flag must be set before Triton is first imported."""
    if INTERPRETED:
        pytest.skip("already interpreted: the cases below run here")
    if _interpreter_is_broken():
        pytest.skip("this Triton's interpreter cannot take loop bounds under this NumPy (>= 2.4)")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "interpreted", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(("op", "shape"), CASES)
def test_a_kernel_interpreted_agrees_with_its_reference(
    op: Op, shape: tuple[int, ...], assertions: SimpleNamespace
) -> None:
    if not INTERPRETED:
        pytest.skip("run by the test above in a process with TRITON_INTERPRET=1")
    if not op.interpretable:
        pytest.skip(f"{op.name} is CUDA C++: it needs a Hopper GPU")
    arguments = op.inputs(shape, torch.float32, "cpu", 0)
    ours = _tuple(op.load()(*op.prepare(arguments)))
    theirs = _tuple(_plain(op, arguments))
    for mine, plain in zip(ours, theirs, strict=True):
        if op.exact:
            assertions.bitwise(mine, plain, op.name)
        else:
            # Both are float32 sums in some order; 1e-5 of the largest is a dozen roundings.
            limit = 1e-5 * float(plain.abs().max())
            assert float((mine - plain).abs().max()) <= limit, op.name


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "shape"), CASES)
def test_a_kernel_on_a_gpu_is_at_most_twice_as_far_off_as_plain_pytorch(
    op: Op, shape: tuple[int, ...], assertions: SimpleNamespace
) -> None:
    _need_gpu(op)
    arguments = op.inputs(shape, torch.bfloat16, "cuda", 0)
    kernel = op.load()
    prepared = op.prepare(arguments)
    ours = _tuple(kernel(*prepared))
    again = _tuple(kernel(*prepared))
    for mine, repeat, plain, exact in zip(
        ours, again, _tuple(_plain(op, arguments)), _tuple(_exact(op, arguments)), strict=True
    ):
        assertions.bitwise(mine, repeat, f"{op.name}, second run")
        if op.exact:
            assertions.bitwise(mine, plain, op.name)
        else:
            assertions.within_twice(mine, plain, exact, op.name)


def _need_gpu(op: Op) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    major, _ = torch.cuda.get_device_capability()
    if major < 8:
        pytest.skip(f"{op.name} needs compute capability 8.0 or newer")
    if op.hopper and major != 9:
        pytest.skip(f"{op.name} needs a Hopper GPU (compute capability 9.0)")
