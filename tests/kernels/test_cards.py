"""Every Triton launch compiles for each card, into its shared memory; only three kernels spill."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Compute capability: a card, and the KiB of shared memory that it gives a program.
CARDS = {
    80: ("A100", 163),
    86: ("RTX 3090, A10", 99),
    89: ("RTX 4090, L4", 99),
    90: ("H100, H200", 227),
    100: ("B200", 227),
    120: ("RTX 5090", 99),
}
# Bytes of a thread that ptxas lays on its stack at most, on some cards, with registers free.
SPILLING = ("decode_adapter:_add", "packed_attention:_rotate", "rms_norm:_backward")
SPILT = {f"kernels.triton.{name}_kernel": 16 for name in SPILLING}
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def compiled(capability, which, seconds):
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiled"]
    done = subprocess.run(
        [*command, str(capability), which],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_fitting(launches, capability):
    _, most = CARDS[capability]
    assert not [row for row in launches if row["shared"] > most * 1024]
    assert not [row for row in launches if row["stack"] > SPILT.get(row["kernel"], 0)]
    assert all(row["fused"] for row in launches)


def test_the_largest_launches_fit_a_card_of_99_kib():
    launches = compiled(86, "few", 300)
    assert len({row["kernel"] for row in launches}) == 6
    require_fitting(launches, 86)


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CARDS)
def test_every_launch_fits_the_card(capability):
    launches = compiled(capability, "all", 1800)
    assert len({row["kernel"] for row in launches}) == 23
    require_fitting(launches, capability)
