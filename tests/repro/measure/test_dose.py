"""AQN's dose beside a format's rounding: what the formulas say is what happens."""

import shutil

import pytest
import torch

from kernels import dispatch
from repro.__main__ import main
from repro.measure.noise_dose import divergences, norm_doses
from repro.models.checkpoint import resolve, write_quantized
from repro.models.decoder import READERS
from repro.models.files.tensor_files import CheckpointError, TensorFolder, write_tensors
from repro.models.loading import SharedScales, quantize_projection

DRAWS = 4096


def relative(change, signal):
    return float(change.norm() / signal.norm())


def test_the_doses_are_those_of_random_hidden_states_and_noise():
    doses = {(dose.layer, dose.norm): dose for dose in norm_doses("tiny", ["nvfp4"], "cpu")}
    source = TensorFolder(resolve("tiny"))
    scales = SharedScales(source, "float32")
    generator = torch.Generator().manual_seed(0)
    for norm, readers in READERS.items():
        gain = source.read(f"model.layers.1.{norm}.weight").float()
        hidden = torch.randn(DRAWS, len(gain), generator=generator)
        noise = 0.01 * torch.randn(DRAWS, len(gain), generator=generator)
        names = [f"model.layers.1.{reader}" for reader in readers]
        dense = [source.read(f"{name}.weight").bfloat16() for name in names]
        rounded = [
            dispatch.dequantize(quantize_projection(weight, name, "nvfp4", scales))
            for weight, name in zip(dense, names, strict=True)
        ]
        weight = torch.cat(dense).float()
        error = torch.cat(rounded) - weight
        signal = hidden * gain @ weight.T
        dose = doses[1, norm]
        assert 0.01 * dose.noise_per_sigma == pytest.approx(
            relative(hidden * noise @ weight.T, signal), rel=0.05
        )
        assert dose.rounding["nvfp4"] == pytest.approx(
            relative(hidden * gain @ error.T, signal), rel=0.05
        )


def with_gains_doubled(folder):
    shutil.copytree(resolve("tiny"), folder)
    source = TensorFolder(folder)
    tensors = {name: source.read(name) for name in source.names()}
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name] = 2 * tensors[name]
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def test_twice_the_gain_is_half_the_dose_of_aqn_and_the_same_of_rounding(tmp_path):
    before = list(norm_doses("tiny", ["nf4"], "cpu"))
    after = list(norm_doses(with_gains_doubled(tmp_path / "doubled"), ["nf4"], "cpu"))
    assert len(before) == len(after) == 8
    for old, new in zip(before, after, strict=True):
        assert new.gain == pytest.approx(2 * old.gain)
        assert new.noise_per_sigma == pytest.approx(old.noise_per_sigma / 2)
        assert new.rounding["nf4"] == pytest.approx(old.rounding["nf4"])


def test_more_noise_diverges_further_and_rounding_further_than_little_noise():
    kls = dict(
        divergences("tiny", ["nvfp4", "mxfp4"], [0.01, 0.1], prompts=4, new_tokens=12, device="cpu")
    )
    assert list(kls) == ["aqn 0.01", "aqn 0.1", "nvfp4", "mxfp4"]
    assert 0 < kls["aqn 0.01"] < kls["aqn 0.1"]
    assert kls["aqn 0.01"] < min(kls["nvfp4"], kls["mxfp4"])


def test_the_norms_carry_no_noise_afterwards_and_the_policy_is_as_before():
    first = list(divergences("tiny", [], [0.1], prompts=2, new_tokens=4, device="cpu"))
    again = list(divergences("tiny", [], [0.05, 0.1], prompts=2, new_tokens=4, device="cpu"))
    assert again[1] == first[0]


def test_a_checkpoint_of_codes_is_refused(tmp_path):
    write_quantized(resolve("tiny"), tmp_path / "codes", weight_format="nvfp4")
    with pytest.raises(CheckpointError, match="holds nvfp4 codes"):
        next(norm_doses(tmp_path / "codes", ["nvfp4"], "cpu"))


def test_the_command_prints_how_strong_the_noise_is(capsys):
    flags = ["--sigmas", "0.01", "--formats", "nvfp4", "--device", "cpu"]
    assert main(["dose", "--model", "tiny", *flags]) == 0
    assert "sigma 0.01 is 0.12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--formats", "int3"], "--formats int3: needs nvfp4, mxfp4 or nf4"),
        (["--sigmas", "0"], "--sigmas 0: "),
        (["--prompts", "-1"], "--prompts -1: "),
        (["--new-tokens", "0"], "--new-tokens 0: "),
    ],
)
def test_a_bad_flag_is_a_sentence(flags, sentence, capsys):
    assert main(["dose", "--model", "tiny", *flags]) == 2
    assert sentence in capsys.readouterr().err
