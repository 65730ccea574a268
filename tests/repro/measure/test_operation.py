"""What the target `kernels` times between the products: what a run calls, at shapes of the row."""

import pytest
import torch

from kernels.op import rotated, tensor_bytes
from kernels.ops import named_op
from kernels.timing import ROTATED_BYTES
from repro.measure.operation import _BETWEEN_THE_PRODUCTS
from repro.targets.kernel_speed import KERNELS


@pytest.mark.parametrize("metric", sorted(_BETWEEN_THE_PRODUCTS))
def test_a_timed_share_is_a_declared_metric_of_a_captured_row(metric):
    name, shape = _BETWEEN_THE_PRODUCTS[metric]
    op = named_op(name)
    assert metric in {declared.name for declared in KERNELS.metrics}
    assert op.captured
    assert len(shape) == len(op.large)
    assert op.nbytes(shape) > 50e6, "a share of the copy rate needs more bytes than the L2 holds"
    with pytest.raises(ValueError, match=rf"'{name}s'; .*{name}"):
        named_op(f"{name}s")


def test_rotated_arguments_outgrow_the_caches_at_other_addresses():
    op = named_op("linear_nvfp4")
    arguments = op.prepare(op.inputs((64, 1536, 1536), torch.bfloat16, "cpu", 0))
    sets = rotated(arguments)
    assert len({own[0].data_ptr() for own in sets}) == len(sets)
    assert len(sets) == min(128, -(-ROTATED_BYTES // tensor_bytes(arguments)))
