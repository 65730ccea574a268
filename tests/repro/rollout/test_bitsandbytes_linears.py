"""NF4 weights handed to bitsandbytes stay the weights they were."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch

bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra `bitsandbytes` is absent")


def test_its_weights_and_products_are_ours_to_the_bit() -> None:
    from repro.rollout.bitsandbytes_linears import foreign_weight

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 192, generator=generator).bfloat16()
    ours = dispatch.quantize(weight, "nf4")
    codes, state = foreign_weight(ours)
    dense = dispatch.dequantize(ours, torch.bfloat16)
    assert torch.equal(bitsandbytes.functional.dequantize_4bit(codes, state), dense)
    x = torch.randn(3, 192, generator=generator).bfloat16()
    with torch.no_grad():
        theirs = bitsandbytes.matmul_4bit(x, codes.t(), state)
    assert (theirs - x @ dense.t()).abs().max() <= 2**-8 * theirs.abs().max()


def test_other_weights_are_refused() -> None:
    from repro.rollout.bitsandbytes_linears import BitsandbytesGroup, foreign_weight

    with pytest.raises(ValueError, match="need NF4 codes; found Parameter"):
        BitsandbytesGroup([torch.nn.Linear(64, 64, bias=False)])
    weight = torch.randn(64, 64).bfloat16()
    with pytest.raises(ValueError, match="need float32 block scales"):
        foreign_weight(dispatch.quantize(weight, "nf4", double_quant=True))
