"""`quantize`: a folder appears when it says what the quantised source says, or not at all."""

import pytest
import torch

from kernels.formats import FORMATS
from repro.__main__ import main
from repro.export import quantising
from repro.export.comparing import (
    DifferentError,
    distance,
    logits_of,
    probes_of,
    require_same,
    rounding_of,
)
from repro.models.loading import read_description
from repro.models.policy import load_policy


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_checkpoint_is_quantised_and_read_back(weight_format, tmp_path, capsys):
    assert main(["quantize", "tiny", str(tmp_path / "out"), "--format", weight_format]) == 0
    assert read_description(tmp_path / "out").stored_format == weight_format
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    printed, noise = capsys.readouterr()
    assert "it/s" not in noise  # bars of libraries
    assert f"28 projections in {weight_format}" in printed
    assert "mean KL" in printed


def test_codes_are_read_back_here_and_are_no_source(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(quantising.READERS, "nvfp4", "no-such-package")
    assert main(["quantize", "tiny", str(tmp_path / "one")]) == 0
    assert "pip install no-such-package" in capsys.readouterr().out
    assert main(["quantize", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert "nvfp4" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()


def test_what_does_not_say_the_same_leaves_nothing(tmp_path, capsys, monkeypatch):
    def spoiled(*arguments):
        logits, reader = read(*arguments)
        return logits.roll(1, dims=-1), reader

    read = quantising.read_logits
    monkeypatch.setattr(quantising, "read_logits", spoiled)
    assert main(["quantize", "tiny", str(tmp_path / "out")]) == 2
    assert "at most" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_distance_is_the_divergence_of_the_next_token():
    reference = torch.tensor([[[0.0, 0.0], [2.0, 0.0]]])
    other = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
    difference = distance(reference, other)
    p = torch.tensor([2.0, 0.0]).double().softmax(-1)
    exact = float((p * (p / 0.5).log()).sum())
    assert (difference.mean, difference.largest) == pytest.approx((exact / 2, exact))
    assert difference.positions == 2


def test_a_distance_above_its_bound_or_without_a_number_is_refused():
    one, other = torch.zeros(1, 2, 4), torch.tensor([3.0, 0, 0, 0]).expand(1, 2, 4)
    with pytest.raises(DifferentError, match=r"mean KL .*1\.00e-06"):
        require_same("a folder", distance(one, other), torch.float32)
    require_same("a folder", distance(one, other), torch.float32, effect=100.0)
    require_same("a folder", distance(one, other), torch.float32, rounding=1.0)
    with pytest.raises(DifferentError, match="not finite"):
        distance(one, one / 0)
    with pytest.raises(DifferentError, match="shapes"):
        distance(one, one[:, :1])


def test_the_cost_of_roundings_is_measured_on_the_model_and_leaves_it_as_it_was(monkeypatch):
    monkeypatch.setattr("repro.export.comparing._PROBES", 8)  # two rows give a factor of 4.7
    exact, rounded = (
        load_policy("tiny", weight_format="nvfp4", compute_dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    rows = probes_of(exact)
    ours, reference = (logits_of(policy.model, rows) for policy in (rounded, exact))
    own = distance(reference, ours).mean  # what bfloat16's roundings cost: one reader's share
    assert own / 4 < rounding_of(rounded, rows, ours) < 4 * own
    assert rounding_of(exact, rows, reference) < 1e-9
    assert torch.equal(logits_of(rounded.model, rows), ours)
