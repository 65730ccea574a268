"""Our codes, scales and dequantised values against other people's implementations, bit for bit.

NVFP4: compressed-tensors, which writes the released checkpoints. MXFP4: torchao, whose FLOOR mode
is the OCP standard's conversion. NF4: bitsandbytes on the CPU.
"""

import pytest
import torch

from kernels.formats import FORMATS, swap_nibbles
from kernels.reference import dequantize, quantize, shared_global_scale
from tests.kernels.conftest import assert_bitwise


def _at_the_edges_of_e4m3(generator):
    """Blocks whose scale falls within 4 units in the last place of a tie between two E4M3 values.

    Only there does the order of g * (amax / 6) show: (g * amax) / 6 rounds otherwise.
    """
    highest = torch.tensor(3.7)
    scales = torch.arange(8, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    ties = (scales[1:] + scales[:-1]) / 2 * 6 / (2688.0 / highest).double()
    bits = ties.float().view(torch.int32).view(-1, 1) + torch.arange(-4, 5, dtype=torch.int32)
    amax = bits.view(torch.float32).view(-1, 1)
    blocks = amax * (2 * torch.rand(len(amax), 16, generator=generator) - 1)
    blocks[:, :1] = amax
    blocks = torch.cat((blocks, torch.full((-len(blocks) % 8, 16), float(highest))))
    return blocks.view(-1, 128)


def _weights():
    """Matrices that reach every branch: (N, K) float32, K a multiple of 64."""
    generator = torch.Generator().manual_seed(20251013)
    normal = torch.randn(96, 512, generator=generator)
    grid = torch.tensor(FORMATS["nvfp4"].values)
    spread = normal * torch.exp2(torch.randint(-30, 30, (96, 1), generator=generator))
    blocks = normal * torch.exp2(torch.randint(-14, 1, (96, 8, 1), generator=generator)).expand(
        96, 8, 64
    ).reshape(96, 512)
    ties = torch.randint(-24, 25, (96, 512), generator=generator) * 0.25
    zeros = torch.where(torch.rand(96, 512, generator=generator) < 0.9, 0.0, normal)
    zeros[:8] = 0.0
    zeros[8:16] = -0.0
    return {
        "normal": normal,
        "weights of a network": normal * 0.02,
        "sixteen-bit values": (normal * 0.02).bfloat16().float(),
        "rows of many magnitudes": spread,
        "blocks of many magnitudes": blocks,
        "ties and grid points": ties,
        "grid": grid[torch.randint(0, 16, (96, 512), generator=generator)],
        "mostly zero": zeros,
        "all zero": torch.zeros(4, 64),
        "one block far above the rest": torch.cat((normal[:1] * 1e4, normal[1:] * 1e-4)),
        "float32 subnormal": normal * 1e-40,
        "block scales at ties": _at_the_edges_of_e4m3(generator),
        "largest": normal / normal.abs().max() * torch.finfo(torch.float32).max,
    }


WEIGHTS = _weights()
every_weight = pytest.mark.parametrize("name", WEIGHTS)


def _compressed_tensors(weight, encode_scale=None):
    """Compress and decompress with compressed-tensors: its state dict and its dense weight."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    if encode_scale is None:
        encode_scale = generate_gparam(weight.amin(), weight.amax())
    state = {"weight": weight, "weight_global_scale": encode_scale}
    state["weight_scale"], _ = compute_dynamic_scales_and_zp(
        weight, scheme.weights, torch.nn.Identity(), global_scale=encode_scale
    )
    compressed = NVFP4PackedCompressor.compress(state, scheme)
    return compressed, NVFP4PackedCompressor.decompress(compressed, scheme)["weight"]


def _require_theirs(ours, written, dense):
    """Check a weight against what compressed-tensors wrote and made of it, bit for bit."""
    assert_bitwise(ours.encode_scale.reshape(1), written["weight_global_scale"], "g")
    assert_bitwise(ours.block_scales, written["weight_scale"], "block scales")
    assert_bitwise(ours.codes, written["weight_packed"], "codes")
    assert_bitwise(dequantize(ours, dense.dtype), dense, "dequantised")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_weight
def test_nvfp4_in_the_recipe_of_its_dtype_equals_compressed_tensors(name, dtype):
    weight = WEIGHTS[name].to(dtype)
    if not bool(torch.isfinite(weight).all()):
        pytest.skip("overflows in bfloat16")
    written, dense = _compressed_tensors(weight.clone())
    recipe = str(dtype).removeprefix("torch.")
    _require_theirs(quantize(weight, "nvfp4", recipe=recipe), written, dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_fused_linears_share_the_smallest_encode_scale(dtype):
    from compressed_tensors.quantization.utils import generate_gparam

    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(n, 128, generator=generator) * s for n, s in ((64, 1), (16, 3), (16, 0.2))]
    parts = [part.to(dtype) for part in parts]
    smallest = torch.stack([generate_gparam(w.amin(), w.amax()) for w in parts]).amin(0)
    recipe = str(dtype).removeprefix("torch.")
    shared = shared_global_scale(parts, recipe)
    for part in parts:
        written, dense = _compressed_tensors(part, smallest)
        ours = quantize(part, "nvfp4", global_scale=shared, recipe=recipe)
        assert torch.equal(written["weight_global_scale"], smallest)
        _require_theirs(ours, written, dense)


@every_weight
def test_mxfp4_equals_torchao(name):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    weight = WEIGHTS[name]
    written = MXTensor.to_mx(
        weight, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode.FLOOR
    )
    ours = quantize(weight, "mxfp4")
    exponents = written.scale.view(torch.uint8).view(ours.block_scales.shape)
    assert_bitwise(ours.block_scales, exponents, "block scales")
    # torchao divides by at least 2**-126, so in blocks with the smallest scale, 2**-127, its
    # codes are half of what its own dequantisation expects; ours follow the standard there.
    normal = exponents > 0
    packed = written.qdata.view(torch.uint8).view(*normal.shape, 16)
    assert_bitwise(ours.codes.view(*normal.shape, 16)[normal], packed[normal], "codes")
    dense = written.dequantize(torch.float32).view(*normal.shape, 32)
    own_dense = dequantize(ours).view(*normal.shape, 32)
    assert_bitwise(own_dense[normal], dense[normal], "dequantised")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in WEIGHTS]
    + [("normal", dtype) for dtype in (torch.bfloat16, torch.float16)],
)
def test_nf4_equals_bitsandbytes(name, dtype):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = WEIGHTS[name].to(dtype)
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    ours = quantize(weight, "nf4")
    assert_bitwise(swap_nibbles(ours.codes).view(-1, 1), codes, "codes")
    assert_bitwise(ours.block_scales.flatten(), state.absmax, "absmax")
    assert_bitwise(dequantize(ours, dtype), dequantize_4bit(codes, state), "dequantised")
