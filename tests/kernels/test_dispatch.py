"""Which kernels a device gets, by its capability and by `REPRO_KERNELS`."""

import pytest
import torch

from kernels import dispatch
from kernels.reference import quantize
from kernels.triton import portable_linear

HERE = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """Make the device a Hopper GPU whose kernels compile."""
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    monkeypatch.setattr("kernels.cuda.driver.load", lambda *arguments: None)
    dispatch._hopper.cache_clear()
    yield
    dispatch._hopper.cache_clear()


def chosen():
    """Return whether weights are packed, codes fused, and launches overlap."""
    packed = dispatch.reads_packed(HERE, torch.bfloat16)
    return packed, dispatch.fuses_codes(HERE, torch.bfloat16), dispatch.launches_overlap(HERE)


@pytest.mark.usefixtures("hopper")
def test_a_hopper_gpu_packs_unless_it_takes_the_road_of_other_cards(monkeypatch):
    assert chosen() == (True, False, True)
    dispatch._hopper.cache_clear()
    monkeypatch.setenv("REPRO_KERNELS", "portable")
    assert chosen() == (False, True, False)
    dispatch._hopper.cache_clear()
    monkeypatch.setenv("REPRO_KERNELS", "own")
    with pytest.raises(ValueError, match="REPRO_KERNELS is 'own'"):
        chosen()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), (False, False, False)),
        ((8, 6), (False, True, False)),
        ((12, 0), (False, True, True)),
    ],
)
def test_other_cards_fuse_codes_from_8_0_on(capability, expected, monkeypatch):
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    assert chosen() == expected


def test_the_portable_layer_refuses_a_format_that_goes_dense():
    with pytest.raises(ValueError, match="nf4"):
        portable_linear.linear(torch.ones(1, 64), quantize(torch.ones(8, 64), "nf4"))


def test_a_cpu_keeps_the_codes_as_they_are():
    assert not dispatch.fuses_codes(torch.device("cpu"), torch.bfloat16)
    assert not dispatch.reads_packed(torch.device("cpu"), torch.bfloat16)
