"""What may be asserted of a kernel, and how tightly.

`assert_bitwise`       where the format leaves no freedom: codes, scales, dequantised values.
`assert_within_twice`  everywhere else: the error against an exact result (computed in float64 or
                       float32) may be at most twice the error of plain PyTorch in the same type.
"""

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(actual, expected, what="result"):
    """Require the same type, shape and bits; minus zero differs from zero, NaN equals itself."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    bits = _BITS[actual.element_size()]
    left, right = actual.contiguous().view(bits), expected.contiguous().view(bits)
    different = left != right
    if bool(different.any()):
        where = [int(i) for i in different.nonzero()[0]]
        index = tuple(where)
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ; first at "
            f"{where}: {actual[index]} against {expected[index]}"
        )


def assert_same_weight(actual, expected, what="weight"):
    """Require the same tensors of two quantised weights, to the bit."""
    assert actual.tensors().keys() == expected.tensors().keys(), what
    for name, tensor in expected.tensors().items():
        assert_bitwise(actual.tensors()[name], tensor, f"{what}: {name}")


# Elements that are compared at once: in double precision they would fill a device else.
_AT_ONCE = 1 << 24


def assert_within_twice(actual, plain, exact, what="result"):
    """Require largest and root-mean-square error at most twice those of plain PyTorch.

    Plain PyTorch may hit the exact result by luck, so half a unit in the last place of the
    largest exact value is granted on top.
    """
    assert actual.dtype == plain.dtype, f"{what}: {actual.dtype}, plain PyTorch {plain.dtype}"
    assert actual.shape == exact.shape, f"{what}: {actual.shape}, expected {exact.shape}"
    for name, tensor in (("result", actual), ("plain PyTorch", plain), ("exact result", exact)):
        assert bool(torch.isfinite(tensor).all()), f"{what}: {name} holds NaN or infinity"
    parts = [tensor.reshape(-1).split(_AT_ONCE) for tensor in (actual, plain, exact)]
    largest, squares, bound = [0.0, 0.0], [0.0, 0.0], 0.0
    for *both, right in zip(*parts, strict=True):
        right = right.double()
        bound = max(bound, float(right.abs().max()))
        for index, part in enumerate(both):
            error = part.double().sub_(right).abs_()
            largest[index] = max(largest[index], float(error.max()))
            squares[index] += float(error.square_().sum())
    rms = [(total / exact.numel()) ** 0.5 for total in squares]
    floor = bound * torch.finfo(actual.dtype).eps / 2
    for name, (ours, plain_error) in (("largest", largest), ("rms", rms)):
        assert ours <= 2 * plain_error + floor, (
            f"{what}: {name} error {ours:.3e} is above twice plain PyTorch's, "
            f"{2 * plain_error + floor:.3e}"
        )
