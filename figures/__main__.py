"""Draw every figure that the records allow, as PNG and SVG.

`python -m figures --records runs --out figures_out [--target table1] [--tier smoke]`
`python -m figures --blessed --tier proxy --kinds svg --out docs/figures`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import matplotlib
from matplotlib.figure import Figure

from figures import accuracy, entropy, heldout, operations, reward, roofline
from repro.evidence.expectation import load_expectations
from repro.evidence.paper import PaperCell, paper_cells
from repro.evidence.record import (
    Record,
    RecordError,
    iterate_records,
    parse_record,
    read_record,
    record_folder,
)
from repro.targets import TARGETS

DPI = 150
Row = TypeVar("Row")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figures; return the exit status (1 when there was nothing to draw)."""
    parser = argparse.ArgumentParser(prog="figures", description=__doc__.splitlines()[0])
    parser.add_argument("--records", default="runs", help="folder of records")
    parser.add_argument(
        "--blessed", action="store_true", help="the records behind the expectations, of one tier"
    )
    parser.add_argument("--kinds", default="png,svg", help="kinds of file: png, svg or both")
    parser.add_argument("--out", default="figures_out", help="folder for the pictures")
    parser.add_argument("--target", help="only this target's records")
    parser.add_argument("--tier", help="only this tier's records")
    parser.add_argument("--expected", default="expected", help="folder of the paper's numbers")
    args = parser.parse_args(arguments)
    kinds = tuple(args.kinds.split(","))
    if not set(kinds) <= {"png", "svg"}:
        parser.error(f"--kinds {args.kinds}: needs png, svg or png,svg")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.records)
        if args.blessed:
            folder = Path(temporary)
            for path in sorted(Path(args.expected).glob(f"{args.tier or '*'}/**/*.records.json")):
                for item in json.loads(path.read_text(encoding="utf-8"))["records"]:
                    parse_record(item, str(path)).write(folder)
        drawn = draw_found(folder, args, kinds)
    for path in drawn:
        print(f"wrote {path}")  # noqa: T201
    if not drawn:
        print(f"figures: {args.records} has no records to draw", file=sys.stderr)  # noqa: T201
    return 0 if drawn else 1


def draw_found(folder: Path, args: argparse.Namespace, kinds: Sequence[str]) -> list[Path]:
    """Draw every figure of the targets that were asked for; return the files' paths."""
    drawn = []
    for tier, target in found_targets(folder):
        if args.target in (None, target) and args.tier in (None, tier):
            records = load(folder, tier, target)
            cells = paper_cells(Path(args.expected), target.split("_")[0])
            where = f"; {target.replace('_', ' ')}, {tier} tier"
            figures = figures_of(records, cells, where)
            bounds = {
                (item.arm, item.metric): item.accept
                for item in load_expectations(Path(args.expected), tier, target)
            }
            around = operations.rows(records, bounds)
            if around:
                figures[operations.NAME] = operations.draw(around, where)
            for name, figure in figures.items():
                drawn += save(figure, Path(args.out), f"{tier}_{target}_{name}", kinds)
    return drawn


def found_targets(runs: Path) -> list[tuple[str, str]]:
    """Return (tier, target) for each folder of records."""
    return [
        (folder.parent.name, folder.name)
        for folder in sorted(runs.glob("*/*"))
        if folder.is_dir() and next(folder.glob("*/seed-*.json"), None) is not None
    ]


def load(runs: Path, tier: str, target: str) -> list[Record]:
    """Return the readable records of finished runs; the others are named on standard error.

    Arms that are recorded as another target's have the names that they have in this one.
    """
    records = []
    for path, arm in places(runs, tier, target):
        try:
            record = read_record(path)
        except RecordError as error:
            print(f"figures: left out: {error}", file=sys.stderr)  # noqa: T201
            continue
        if record.ok:
            records.append(dataclasses.replace(record, arm=arm))
    return records


def places(runs: Path, tier: str, name: str) -> list[tuple[Path, str]]:
    """Return the paths of a target's records, those that it shares included, and their arms."""
    found = [(path, path.parent.name) for path in iterate_records(runs, tier, name)]
    for target in TARGETS:
        if target.name == name:
            for arm, (home, recorded) in target.shared.items():
                folder = record_folder(tier, home.name, recorded, runs)
                found += [(path, arm) for path in sorted(folder.glob("seed-*.json"))]
    return found


def figures_of(
    records: Sequence[Record], cells: Sequence[PaperCell], where: str = ""
) -> dict[str, Figure]:
    """Return each figure for which there are rows, by its name."""
    curves = [
        (reward.NAME, _figure(reward.draw, reward.rows(records), where)),
        (entropy.NAME, _figure(entropy.draw, entropy.rows(records), where)),
        (accuracy.NAME, _figure(accuracy.draw, accuracy.rows(records, cells), where)),
        (heldout.NAME, _figure(heldout.draw, heldout.rows(records), where)),
    ]
    rows = roofline.rows(records)
    drawn = {name: figure for name, figure in curves if figure is not None}
    return drawn | ({roofline.NAME: roofline.draw(rows)} if rows else {})


def _figure(
    draw: Callable[[Sequence[Row], str], Figure], rows: Sequence[Row], where: str
) -> Figure | None:
    return draw(rows, where) if rows else None


def save(figure: Figure, out: Path, name: str, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write PNG and SVG, renamed when whole; the same records give the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    # Laid out once: each kind would move things a little, and by which were drawn before.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        for kind in kinds:
            path = out / f"{name}.{kind}"
            temporary = out / f".{name}.part.{kind}"
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(temporary, dpi=DPI, metadata=metadata)
            os.replace(temporary, path)
            paths.append(path)
    return paths


if __name__ == "__main__":
    sys.exit(main())
