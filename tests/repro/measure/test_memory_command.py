"""`plan memory` on the command line: quick, without torch, and honest about what does not fit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from repro.__main__ import main
from repro.measure.memory_command import parse_bytes

COMMAND = ["plan", "memory", "--model", "32b", "--format", "nvfp4", "--rank", "32"]
BATCH = ["--prompts", "16", "--group", "8", "--prompt-tokens", "256", "--completion-tokens", "2048"]


def test_the_issues_command_answers_with_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *BATCH, "--budget", "80GB"]) == 0
    said = capsys.readouterr().out
    for part in ("weights", "embeddings", "adapter", "optimiser", "gradients", "cache",
                 "activations", "logits", "graphs", "workspace", "context"):  # fmt: skip
        assert part in said
    assert "checkpoint 20.67 GB" in said
    assert "of 128 rows sampled at once" in said
    assert "keys and values in float8: 128 rows at once" in said


def test_a_budget_too_small_says_what_to_change_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "memory", "--model", "72b", "--budget", "24GB"]) == 1
    said = capsys.readouterr().out
    assert "does not fit 24.00 GB" in said
    assert "AdamW's moments in 8 bits" in said
    assert "the largest part: weights" in said


def test_json_holds_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    main([*COMMAND, *BATCH, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["peak"] == max(sum(content["rollout"].values()), sum(content["update"].values()))
    assert content["fits"]
    assert content["step"]["shape"] == "32b"


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from repro.__main__ import main; "
        "main(['plan', 'memory', '--model', '7b']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GB", 80 * 10**9), ("40 GiB", 40 * 2**30), ("1.5gb", 1_500_000_000)]
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["much", "8 TBs", "0GB", "1.2.3GB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--budget"):
        parse_bytes(text)
