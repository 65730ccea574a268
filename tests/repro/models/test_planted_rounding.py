"""Other orders of channels are the same function; planted roundings say what they are."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels import reference
from repro.models.files.tensor_files import TensorFolder
from repro.models.loading import read_description
from repro.models.permuted_source import PermutedSource
from repro.models.policy import load_policy
from repro.spec.arm import PlantedRounding
from tests.repro.models.conftest import quantized_linears


def policy(weight_format="bf16", order=None, rounding=None, checkpoint="tiny"):
    return load_policy(checkpoint, weight_format=weight_format, order=order, rounding=rounding)


def test_another_order_of_channels_is_the_same_function(architecture, make_checkpoint):
    # All that a decoder may have: biases everywhere, norms on heads, a head of its own.
    more = {"mlp_bias": True} if architecture == "llama" else {}
    folder = make_checkpoint(architecture, **more)
    description = read_description(folder)
    source = PermutedSource(TensorFolder(folder), description.config, draw=3)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    permuted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    permuted.load_state_dict(
        {name: source.read(name).double() for name in source.names()}, strict=False
    )
    ids = torch.tensor([[5, 9, 40, 7, 21, 3]])
    with torch.no_grad():
        torch.testing.assert_close(
            permuted(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=1e-5
        )
    for name in source.names():
        leaf = name.split(".")[-2]
        same = torch.equal(source.read(name), TensorFolder(folder).read(name))
        # Queries' and keys' own channels stay: their biases, and the gains on them.
        unchanged = leaf in ("q_norm", "k_norm") or name.endswith(("q_proj.bias", "k_proj.bias"))
        assert same == unchanged
    other = PermutedSource(TensorFolder(folder), description.config, draw=4)
    assert not torch.equal(other.read("model.norm.weight"), source.read("model.norm.weight"))


def test_once_a_format_s_error_is_the_format():
    once = policy(rounding=PlantedRounding(format="nvfp4", factor=1)).decoder
    for name, linear in quantized_linears(policy("nvfp4")).items():
        rounded = reference.dequantize(linear.weight)
        # bfloat16 rounds the sum.
        torch.testing.assert_close(
            once.get_submodule(name).weight, rounded, rtol=2**-8, atol=1e-30, check_dtype=False
        )


def test_a_policy_says_its_rounding_and_order_and_what_cannot_be_rounded_is_named():
    rounded = policy(order=5, rounding=PlantedRounding(format="nvfp4", factor=2)).facts
    assert rounded["order"] == 5
    assert rounded["rounding"]["projections"] == rounded["linears"]["bf16"] == 28
    assert rounded["rounding"]["relative_change_mean"] == pytest.approx(2 * 0.095, rel=0.05)
    assert {"order", "rounding"} & set(policy().facts) == set()
    with pytest.raises(ValueError, match=r"rounding\.factor is 0"):
        PlantedRounding(format="nvfp4", factor=0)
    with pytest.raises(ValueError, match=r"rounding\.format"):
        PlantedRounding(format="int5")
