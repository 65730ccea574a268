"""Draw every figure that the records allow, as PNG and SVG.

`python -m figures --records runs --out figures_out [--target table1] [--tier smoke]`
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import matplotlib
from matplotlib.figure import Figure

from figures import accuracy, entropy, heldout, reward, roofline
from repro.evidence.paper import PaperCell, paper_cells
from repro.evidence.record import Record, RecordError, iterate_records, read_record

DPI = 150
Row = TypeVar("Row")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figures; return the exit status (1 when there was nothing to draw)."""
    parser = argparse.ArgumentParser(prog="figures", description=__doc__.splitlines()[0])
    parser.add_argument("--records", default="runs", help="folder of records")
    parser.add_argument("--out", default="figures_out", help="folder for the pictures")
    parser.add_argument("--target", help="only this target's records")
    parser.add_argument("--tier", help="only this tier's records")
    parser.add_argument("--expected", default="expected", help="folder of the paper's numbers")
    args = parser.parse_args(arguments)
    drawn = []
    for tier, target in found_targets(Path(args.records)):
        if args.target in (None, target) and args.tier in (None, tier):
            records = load(Path(args.records), tier, target)
            cells = paper_cells(Path(args.expected), target.split("_")[0])
            drawn += draw_all(records, cells, Path(args.out), f"{tier}_{target}")
    for path in drawn:
        print(f"wrote {path}")  # noqa: T201
    if not drawn:
        print(f"figures: {args.records} has no records to draw", file=sys.stderr)  # noqa: T201
    return 0 if drawn else 1


def found_targets(runs: Path) -> list[tuple[str, str]]:
    """Return (tier, target) for each folder of records."""
    return [
        (folder.parent.name, folder.name)
        for folder in sorted(runs.glob("*/*"))
        if folder.is_dir() and next(folder.glob("*/seed-*.json"), None) is not None
    ]


def load(runs: Path, tier: str, target: str) -> list[Record]:
    """Return the readable records of finished runs; the others are named on standard error."""
    records = []
    for path in iterate_records(runs, tier, target):
        try:
            record = read_record(path)
        except RecordError as error:
            print(f"figures: left out: {error}", file=sys.stderr)  # noqa: T201
            continue
        if record.ok:
            records.append(record)
    return records


def draw_all(
    records: Sequence[Record], cells: Sequence[PaperCell], out: Path, prefix: str
) -> list[Path]:
    """Draw each figure for which there are rows; return the paths of PNG and SVG files."""
    drawn: list[Path] = []
    jobs: list[tuple[str, Callable[[], Figure | None]]] = [
        (accuracy.NAME, lambda: _figure(accuracy.draw, accuracy.rows(records, cells))),
        (reward.NAME, lambda: _figure(reward.draw, reward.rows(records))),
        (entropy.NAME, lambda: _figure(entropy.draw, entropy.rows(records))),
        (heldout.NAME, lambda: _figure(heldout.draw, heldout.rows(records))),
        (roofline.NAME, lambda: _figure(roofline.draw, roofline.rows(records))),
    ]
    for name, job in jobs:
        figure = job()
        if figure is not None:
            drawn += save(figure, out, f"{prefix}_{name}")
    return drawn


def _figure(draw: Callable[[Sequence[Row]], Figure], rows: Sequence[Row]) -> Figure | None:
    return draw(rows) if rows else None


def save(figure: Figure, out: Path, name: str) -> list[Path]:
    """Write PNG and SVG, renamed when whole; the same records give the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        for kind in ("png", "svg"):
            path = out / f"{name}.{kind}"
            temporary = out / f".{name}.part.{kind}"
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(temporary, dpi=DPI, metadata=metadata)
            os.replace(temporary, path)
            paths.append(path)
    return paths


if __name__ == "__main__":
    sys.exit(main())
