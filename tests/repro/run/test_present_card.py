"""What a plan and a start say of this machine's card, torch and system, before any loading."""

import dataclasses

import pytest
import torch

from repro.__main__ import main
from repro.run import preflight, present_card
from repro.spec import tier as tiers
from repro.spec.tier import CudaDevice
from tests.said import unsaid

RTX4090 = CudaDevice(name="NVIDIA GeForce RTX 4090", capability=(8, 9), memory_bytes=25_757_220_864)
H100 = CudaDevice(name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory_bytes=85_000_000_000)


@pytest.fixture
def card(monkeypatch, request):
    device = getattr(request, "param", RTX4090)
    if not isinstance(device, CudaDevice):  # gigabytes
        device = dataclasses.replace(RTX4090, memory_bytes=int(device * 10**9))
    for module in (tiers, preflight):
        monkeypatch.setattr(module, "cuda_devices", lambda: (device,))
    return device


@pytest.fixture
def fitting_torch(monkeypatch):
    monkeypatch.setattr(present_card, "_torch_fault", lambda: None)


def planned(capsys, *line, status=0):
    assert main(["plan", *line]) == status
    return capsys.readouterr().out


@pytest.mark.usefixtures("card")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_a_torch_without_cuda_is_named_before_a_record_is_made(tmp_path, capsys):
    line = ["table6", "--tier", "systems", "--runs", str(tmp_path)]
    assert main(["run", *line]) == 2
    assert unsaid(capsys.readouterr().err, "RTX 4090|without CUDA") == []
    assert not list(tmp_path.iterdir())
    assert unsaid(planned(capsys, *line, status=2), "cannot run|torch") == []


@pytest.mark.usefixtures("card")
def test_the_reason_is_the_last_line_that_torch_leaves(monkeypatch):
    program = "raise RuntimeError('The driver is too old (11040).')"
    monkeypatch.setattr(present_card, "_COMPUTE", program)
    present_card._torch_fault.cache_clear()
    said = present_card.torch_refusal()
    present_card._torch_fault.cache_clear()
    assert "is too old (11040)" in said


@pytest.mark.usefixtures("fitting_torch")
@pytest.mark.parametrize(("card", "status"), [(6, 2), (16, 0)], indirect=["card"])
def test_a_plan_ends_with_2_where_the_card_can_make_no_run(card, status, tmp_path, capsys):
    at = ["--tier", "paper", "--runs", str(tmp_path)]
    planned(capsys, "table2_32b", *at, status=2)
    planned(capsys, "table1", "table2_32b", *at, status=status)


@pytest.mark.usefixtures("card", "fitting_torch")
def test_kernels_that_do_not_exist_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("REPRO_KERNELS", "triton")
    assert main(["plan", "table6", "--tier", "systems"]) == 2
    assert unsaid(capsys.readouterr().err, "REPRO_KERNELS|'triton'|portable") == []


@pytest.mark.usefixtures("card", "fitting_torch")
def test_a_small_card_learns_what_it_cannot_hold_and_is_lent_no_times_unmarked(tmp_path, capsys):
    at = ["--tier", "systems", "--runs", str(tmp_path)]
    said = planned(capsys, "table8", *at)
    assert unsaid(said, "RTX 4090, 25.8 GB|portable|refused   bf16_lora|another card") == []
    said = planned(capsys, "rollout", *at)
    assert "left out  bf16_lora" in said
    assert "refused   " in planned(capsys, "kernels", *at, status=2)


@pytest.mark.usefixtures("card", "fitting_torch")
@pytest.mark.parametrize("card", [H100], indirect=True)
def test_a_card_that_was_measured_has_its_own_times_and_kernels(tmp_path, capsys, monkeypatch):
    line = ["kernels", "--tier", "systems", "--runs", str(tmp_path)]
    said = planned(capsys, *line)
    assert "kernels for Hopper" in said
    assert "refused   " not in said
    assert "another card" not in said
    monkeypatch.setenv("REPRO_KERNELS", "portable")
    assert "refused   " in planned(capsys, *line, status=2)


@pytest.mark.usefixtures("fitting_torch")
@pytest.mark.parametrize(("card", "left_out"), [(12, False), (9.5, True)], indirect=["card"])
def test_a_card_of_12_gb_has_points_to_measure(card, left_out, tmp_path, capsys, monkeypatch):
    assert tiers.Tier.SYSTEMS.missing() is None
    said = planned(capsys, "memory_cards", "--tier", "systems", "--runs", str(tmp_path))
    assert ("left out" in said, "7b_16x8_12gb" in said) == (left_out, left_out)
    nearly = dataclasses.replace(card, memory_bytes=7 * tiers.GIB - 1)
    monkeypatch.setattr(tiers, "cuda_devices", lambda: (nearly,))
    assert unsaid(tiers.Tier.SYSTEMS.missing(), "needs 7 GiB|has 6.9 GiB") == []
