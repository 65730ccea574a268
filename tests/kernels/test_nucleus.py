"""The kernel that keeps the tokens of a share of the mass, where its sums meet a boundary."""

import pytest
import torch

from kernels.reference_step import keep_nucleus as specified
from tests.interpreted import needs_interpreter


def kept(keep, logits, share, temperature=1.0):
    logits = logits.clone()
    keep(logits, torch.tensor(temperature, device=logits.device), share, overlap=False)
    return ~logits.isneginf()


ROWS = {
    "ties at the cut": (torch.zeros(1, 97), 0.5, 49),
    "one token has it all": (torch.tensor([[0.0, 90.0, 3.0]]), 0.95, 1),
    "both zeros are ties": (torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 0.5, 2),
    "signs on both sides of the cut": (torch.tensor([[2.0, -1.0, 1.0, -2.0]]), 0.97, 3),
    "all but the last": (torch.zeros(1, 5), 0.79, 4),
}


def check(keep, device):
    for logits, share, count in ROWS.values():
        expected = kept(specified, logits, share)
        assert expected.sum() == count
        assert torch.equal(kept(keep, logits.to(device), share).cpu(), expected)
    generator = torch.Generator().manual_seed(0)
    for share in (0.05, 0.5, 0.95, 0.999):
        logits = (4 * torch.randn(3, 4500, generator=generator)).bfloat16().float()
        expected = kept(specified, logits, share, 0.6)
        assert torch.equal(kept(keep, logits.to(device), share, 0.6).cpu(), expected)


@needs_interpreter
def test_the_interpreted_kernel_keeps_what_the_specification_keeps():
    from kernels.triton.nucleus import keep_nucleus

    check(keep_nucleus, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_keeps_what_the_specification_keeps():
    from kernels.triton.nucleus import keep_nucleus

    check(keep_nucleus, "cuda")
