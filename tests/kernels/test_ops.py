"""Every row of `kernels.ops.OPS` against its reference: interpreted on a CPU, and on a GPU."""

import inspect

import pytest
import torch
from torch import Tensor

from kernels.op import copied
from kernels.ops import OPS
from tests.interpreted import needs_interpreter
from tests.kernels.conftest import assert_bitwise, assert_within_twice

# Rows whose kernels have a backward of their own in Triton.
TRAINED = (
    "rms_norm", "swiglu", "token_logprobs", "projected_plain", "projected_norm", "projected_swiglu",
)  # fmt: skip
CASES = [pytest.param(op, shape, id=f"{op.name}-{shape}") for op in OPS for shape in op.shapes]


def _widened(arguments):
    """Return the same rounded values in float32."""
    sixteen = (torch.bfloat16, torch.float16)
    return copied(arguments, lambda x: x.float() if x.dtype in sixteen else x)


def _compare(op, ours, plain, exact):
    if op.exact or not ours.is_floating_point():
        assert_bitwise(ours, plain, op.name)
        return
    missing = ours.isnan()  # in all of them: nobody's memory
    assert all(torch.equal(other.isnan(), missing) for other in (plain, exact))
    ours, plain, exact = (result.masked_fill(missing, 0.0) for result in (ours, plain, exact))
    # In float32 both are sums in some order; 1e-5 of the largest is a dozen roundings.
    bound = 1e-5 if op.bound is None else op.bound
    if ours.is_cuda and op.bound is None:
        assert_within_twice(ours, plain, exact, op.name)
        return
    assert ours.dtype == plain.dtype, f"{op.name}: {ours.dtype}, expected {plain.dtype}"
    error, largest = float((ours - plain).abs().max()), float(plain.abs().max())
    assert error <= bound * largest, f"{op.name}: error {error:.3e} of {largest:.3e}"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_kernel_loads_without_a_gpu_and_takes_what_its_reference_takes(op):
    kernel = op.load()
    assert kernel.__module__ == op.kernel.split(":")[0]
    arguments = op.inputs(op.shapes[0], torch.float32, "cpu", 0)
    for function, given in ((op.reference, arguments), (kernel, op.prepare(arguments))):
        positional = len(given) - len(op.named)
        inspect.signature(function).bind(*given[:positional], **dict.fromkeys(op.named))


@pytest.mark.parametrize("op", [op for op in OPS if op.dense is not None], ids=lambda op: op.name)
def test_the_dense_form_of_a_row_runs(op):
    function, arguments = op.dense(op.inputs(op.shapes[-1], torch.bfloat16, "cpu", 0))
    first = function(*arguments)
    assert (first[0] if isinstance(first, tuple) else first).dtype in (
        torch.bfloat16,
        torch.float32,
    )


@needs_interpreter
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(("op", "shape"), CASES)
def test_a_kernel_interpreted_agrees_with_its_reference(op, shape):
    if not op.interpretable:
        pytest.skip(f"{op.name} is CUDA C++: it needs a Hopper GPU")
    arguments = op.inputs(shape, torch.float32, "cpu", 0)
    ours = op.outputs(op.load(), op.prepare(arguments))
    plain = op.outputs(op.reference, arguments)
    for actual, expected in zip(ours, plain, strict=True):
        _compare(op, actual, expected, expected)


DIFFERENTIABLE = [case for case in CASES if case.id.split("-")[0] in TRAINED]


def _gradients(op, function, arguments):
    """Return the gradients of all floating arguments but the noise."""
    own = [
        value.clone().requires_grad_()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and (op.name, place) != ("rms_norm", 3)
        else value
        for place, value in enumerate(arguments)
    ]
    made = op.call(function, tuple(own))
    results = made if isinstance(made, tuple) else (made,)
    weights = [torch.linspace(-1, 1, x.numel(), device=x.device).view_as(x) for x in results]
    parts = [(x.float() * weight).sum() for x, weight in zip(results, weights, strict=True)]
    torch.stack(parts).sum().backward()
    return [value.grad for value in own if isinstance(value, Tensor) and value.grad is not None]


@needs_interpreter
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(("op", "shape"), DIFFERENTIABLE)
def test_gradients_interpreted_are_those_of_the_reference(op, shape):
    arguments = op.inputs(shape, torch.float32, "cpu", 0)
    ours = _gradients(op, op.load(), arguments)
    plain = _gradients(op, op.reference, arguments)
    assert ours
    for actual, expected in zip(ours, plain, strict=True):
        assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


# The reference of token_logprobs keeps its gradient in float32, so it is no measure in 16 bits.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "shape"), [case for case in DIFFERENTIABLE if not case.id.startswith("token_logprobs")]
)
def test_gradients_on_a_gpu_are_at_most_twice_as_far_off_as_plain_pytorchs(op, shape):
    _need_gpu(op)
    arguments = op.inputs(shape, torch.bfloat16, "cuda", 0)
    ours = _gradients(op, op.load(), arguments)
    plain = _gradients(op, op.reference, arguments)
    exact = _gradients(op, op.reference, _widened(arguments))
    for actual, *expected in zip(ours, plain, exact, strict=True):
        assert_within_twice(actual, expected[0], expected[1], f"gradient of {op.name}")


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "shape"), CASES)
def test_a_kernel_on_a_gpu_is_at_most_twice_as_far_off_as_plain_pytorch(op, shape):
    _need_gpu(op)
    arguments = op.inputs(shape, torch.bfloat16, "cuda", 0)
    kernel, prepared = op.load(), op.prepare(arguments)
    ours = op.outputs(kernel, prepared)
    again = op.outputs(kernel, prepared)
    plain, exact = (op.outputs(op.reference, own) for own in (arguments, _widened(arguments)))
    for actual, repeat, *expected in zip(ours, again, plain, exact, strict=True):
        assert_bitwise(actual, repeat, f"{op.name}, second run")
        _compare(op, actual, expected[0], expected[1])


def _need_gpu(op):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    major, _ = torch.cuda.get_device_capability()
    if major < 8:
        pytest.skip(f"{op.name} needs compute capability 8.0 or newer")
    if op.hopper and major != 9:
        pytest.skip(f"{op.name} needs a Hopper GPU (compute capability 9.0)")
