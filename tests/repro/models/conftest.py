"""Tiny random checkpoints of all three architectures, written by transformers itself."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from repro.models.checkpoint import MANIFEST
from repro.models.policy import load_policy
from repro.models.quantized_linear import QuantizedLinear
from tests.kernels.conftest import assert_same_weight
from tests.repro.architectures import CLASSES, small_model

ARCHITECTURES = tuple(CLASSES)


def load(folder, weight_format="nvfp4", training="none", **more):
    """Return a policy; one that trains has an adapter of rank 8, whose scaling is 1."""
    adapter = {"lora_rank": 8, "lora_alpha": 8.0, "seed": 0}
    return load_policy(folder, weight_format=weight_format, training=training, **(adapter | more))


def quantized_linears(policy):
    """Return the quantised projections of a policy by name."""
    modules = policy.decoder.named_modules()
    return {name: m for name, m in modules if isinstance(m, QuantizedLinear)}


def require_same_weights(one, other):
    """Check that two policies have the same quantised projections, to the bit."""
    ours, theirs = quantized_linears(one), quantized_linears(other)
    assert ours.keys() == theirs.keys()
    for name, linear in ours.items():
        assert_same_weight(linear.weight.to("cpu"), theirs[name].weight.to("cpu"), name)


def edit_config(folder, change):
    """Let `change` edit the values of a folder's config.json; the manifest, which tells, goes."""
    (folder / MANIFEST).unlink(missing_ok=True)
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def edit_tensors(folder, change):
    """Let `change` edit the tensors of a folder's one file; the manifest, which tells, goes."""
    (folder / MANIFEST).unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def random_model(architecture, **changes):
    """Return a random bfloat16 model: norms and biases off their trivial values, 2 layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = small_model(architecture, **changes)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.mul_(4.0)
    return model


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """Return a function that writes a random checkpoint of an architecture, once per argument."""

    @functools.cache
    def make(architecture, *, max_shard_size="1GB", **changes):
        folder = tmp_path_factory.mktemp(architecture)
        model = random_model(architecture, **changes)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return make


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    """Return each architecture's name in turn."""
    return str(request.param)


@pytest.fixture
def folder(architecture, make_checkpoint):
    """Return a checkpoint folder of the architecture in turn."""
    return make_checkpoint(architecture)


@pytest.fixture
def token_ids():
    """Return three rows of 24 token ids."""
    return torch.randint(0, 97, (3, 24), generator=torch.Generator().manual_seed(3))
