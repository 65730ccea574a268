"""`memory` on the command line: quick, without torch, and honest about what does not fit."""

import pytest

from repro.__main__ import main
from repro.spec.tier import MEMORY_VARIABLE, cuda_devices, parse_bytes, usable_bytes


def test_the_issues_command_answers_with_every_part(capsys):
    line = "memory --model 32b --format nvfp4 --rank 32 --budget 80GB --prompts 16 --group 8"
    assert main([*line.split(), "--prompt-tokens", "256", "--completion-tokens", "2048"]) == 0
    said = capsys.readouterr().out
    for part in ("weights", "embeddings", "adapter", "optimiser", "gradients", "cache",
                 "activations", "logits", "graphs", "workspace", "context"):  # fmt: skip
        assert part in said
    assert "checkpoint 20.67 GB" in said
    assert "of 128 rows sampled at once" in said


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GB", 80 * 10**9), ("40 GiB", 40 * 2**30), ("1.5gb", 1_500_000_000)]
)
def test_sizes_are_read(text, nbytes):
    assert parse_bytes(text, "--budget") == nbytes


@pytest.mark.parametrize("text", ["much", "8 TBs", "0GB", "1.2.3GB", "24"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="--budget"):
        parse_bytes(text, "--budget")


def test_a_process_uses_no_more_of_a_device_than_the_variable_says(monkeypatch):
    assert usable_bytes(80) == 80
    monkeypatch.setenv(MEMORY_VARIABLE, "24GB")
    assert usable_bytes(80 * 10**9) == 24 * 10**9
    assert usable_bytes(16 * 10**9) == 16 * 10**9
    monkeypatch.setenv(MEMORY_VARIABLE, "most")
    with pytest.raises(ValueError, match=f"{MEMORY_VARIABLE} most"):
        cuda_devices.__wrapped__()  # with a GPU or without
