"""The adapter beside a linear layer, in Triton's interpreter, against float64 products.

The interpreter has to be chosen before Triton is imported, so a process of its own does the work.
"""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import require_equal

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
from kernels import decode_adapter

torch.set_num_threads(1)
# As many rows as fill one tile and begin another.
decode_adapter.FEW_ROWS = 70


def check(M):
    torch.manual_seed(0)
    x, a = torch.randn(M, 700), torch.randn(96, 700)
    b, y = torch.randn(512, 32), torch.randn(M, 512)
    counters = torch.zeros(decode_adapter.counters(96), dtype=torch.int32)
    exact = x.double() @ a.double().T
    for _ in range(2):
        z = decode_adapter.project(x, a, overlap=False, arrived=counters)
        assert (z - exact).abs().max() < 1e-5 * exact.abs().max()
        assert not counters.any()
    wanted = y.double()
    for i, (start, end) in enumerate(((0, 256), (256, 384), (384, 512))):
        part = exact[:, i * 32 : i * 32 + 32]
        wanted[:, start:end] += 0.5 * part @ b[start:end].double().T
    found = decode_adapter.add_adapter(y.clone(), z, b, (256, 384), 0.5, overlap=False)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    gate_up, two = torch.randn(M, 400), torch.randn(400, 32)
    gate = gate_up[:, :200] + 0.5 * exact[:, :32] @ two[:200].double().T
    up = gate_up[:, 200:] + 0.5 * exact[:, 32:64] @ two[200:].double().T
    wanted = torch.nn.functional.silu(gate) * up
    found = decode_adapter.adapted_swiglu(gate_up, z[:, :64], two, 0.5, overlap=False)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    narrow, parts = b[:, :24], (256, 384)
    for wrong in (lambda: decode_adapter.project(x, a[:90], overlap=False),
                  lambda: decode_adapter.add_adapter(y, z, narrow, parts, 1.0, overlap=False)):
        try:
            wrong()
        except ValueError as error:
            assert "shape" in str(error)
        else:
            raise SystemExit("a wrong shape was taken")


for rows in map(int, sys.argv[1:]):
    print(rows, "rows", file=sys.stderr)  # for whoever reads what failed
    check(rows)
print("equal")
"""


def test_the_adapters_share_is_that_of_exact_products() -> None:
    # In one process, whose imports take as long: the kernel's three sizes of tile, the last at the
    # most rows that it takes; and rows beyond them.
    require_equal(PROGRAM, *map(str, (1, 17, 70, 74)))
