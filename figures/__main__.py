"""Draw every figure that the records allow, as PNG and SVG.

`python -m figures --records runs --out figures_out [--target table1] [--tier smoke]`
`python -m figures --blessed --tier systems --kinds svg --out docs/figures`
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import matplotlib
from matplotlib.figure import Figure

from figures import accuracy, contrasts, curves, doses, floors, paired
from figures.protocol import origin
from figures.timings import operations, roofline, systems
from repro.evidence import printed
from repro.evidence.paper import PaperCell, paper_cells
from repro.evidence.record import Record, RecordError
from repro.evidence.store import Entry, RunsFolder, Source, blessed_sources
from repro.evidence.verdicts.expectation import load_bars
from repro.evidence.verdicts.verdict import Verdict
from repro.report.doses import paper_rises
from repro.report.tidy import claim_verdicts
from repro.spec.arm import require
from repro.spec.command_parser import SentenceParser
from repro.spec.target import Target
from repro.spec.tier import Tier, parse_tier
from repro.targets import TARGETS

DPI = 150
Row = TypeVar("Row")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figures; return the exit status.

    0 when something was drawn, 1 when there was nothing to draw, 2 for a bad command line.
    """
    try:
        args = build_parser().parse_args(arguments)
        kinds = tuple(args.kinds.split(","))
        require(set(kinds) <= {"png", "svg"}, f"--kinds {args.kinds}: needs png, svg or png,svg")
        args.tier = args.tier and parse_tier(args.tier).value
    except ValueError as error:
        print(f"figures: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if args.floors:
        figure = floors.draw(floors.rows(Path(__file__).resolve().parent.parent))
        drawn = save(figure, Path(args.out), "floors", kinds)
    elif args.blessed:
        drawn = draw_blessed(args, kinds)
    else:
        drawn = draw_recorded(RunsFolder(Path(args.records)), args, kinds)
    for path in drawn:
        print(f"wrote {path}")  # noqa: T201
    if not drawn:
        where = f"{args.expected} has no blessed" if args.blessed else f"{args.records} has no"
        of = f" of {args.target}" if args.target else ""
        tier = f" of the {args.tier} tier" if args.tier else ""
        print(f"figures: {where} records{of} to draw{tier}", file=sys.stderr)  # noqa: T201
    return 0 if drawn else 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = SentenceParser(prog="figures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", default="runs", help="folder of records")
    parser.add_argument(
        "--blessed", action="store_true", help="the records behind the expectations, of one tier"
    )
    parser.add_argument(
        "--floors", action="store_true", help="the rooms of the source instead, by their imports"
    )
    parser.add_argument("--kinds", default="png,svg", help="kinds of file: png, svg or both")
    parser.add_argument("--out", default="figures_out", help="folder for the pictures")
    parser.add_argument("--target", help="only this target's records")
    parser.add_argument("--tier", help="only this tier's records")
    parser.add_argument("--expected", default="expected", help="folder of the paper's numbers")
    return parser


def draw_blessed(args: argparse.Namespace, kinds: Sequence[str]) -> list[Path]:
    """Draw the records behind the expectations, those of each device apart.

    The device is part of the files' names where a tier has records of several, and at the systems
    tier always: its numbers are one device's.
    """
    tier = None if args.tier is None else Tier(args.tier)
    sources = blessed_sources(Path(args.expected), tier)
    devices = Counter(source.tier for source in sources)
    drawn = []
    for source in sources:
        apart = source.tier == Tier.SYSTEMS.value or devices[source.tier] > 1
        drawn += draw_recorded(source, args, kinds, source.device or "", apart=apart)
    return drawn


def draw_recorded(
    source: Source,
    args: argparse.Namespace,
    kinds: Sequence[str],
    device: str = "",
    *,
    apart: bool = False,
) -> list[Path]:
    """Draw every figure of the targets that were asked for; return the files' paths.

    Parameters
    ----------
    device
        Whose bars are drawn, as folders spell it; empty where records may be of any.
    apart
        Whether the device is part of the files' names, behind the tier.
    """
    expected, out = Path(args.expected), Path(args.out)
    behind = f"{device}_" if apart and device else ""
    asked = [
        (tier, target)
        for tier, target in source.targets()
        if _is_asked(target, args.target) and args.tier in (None, tier)
    ]
    records = {(tier, target): load(source, tier, target) for tier, target in asked}
    drawn = []
    for (tier, target), own_records in records.items():
        judged = verdicts_of(source, expected, tier, target)
        figures = target_figures(own_records, expected, tier, target, device, judged)
        for name, figure in figures.items():
            drawn += save(figure, out, f"{tier}_{behind}{target}_{name}", kinds)
    for tier, home, target in readers(source, args):
        own_records = load(source, tier, home)
        differences = paired_figure(
            own_records,
            expected,
            tier,
            target,
            _behind_title(tier, target),
            verdicts_of(source, expected, tier, target),
        )
        if differences is not None:
            drawn += save(differences, out, f"{tier}_{behind}{target}_{paired.NAME}", kinds)
    for name, figure in systems_figures(records, expected, device):
        drawn += save(figure, out, f"{Tier.SYSTEMS.value}_{behind}{name}", kinds)
    return drawn


def _is_asked(target: str, named: str | None) -> bool:
    """Whether a target is to be drawn: a sweep of rates only by its name."""
    return target == named or (named is None and not target.startswith("learning_rates"))


def _behind_title(tier: str, target: str) -> str:
    spoken = re.sub(r"(\d)_(\d)b\b", r"\1.\2B", target).replace("_", " ")
    return f"; {spoken}, {tier} tier"


def readers(source: Source, args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield (tier, home, target) where a target reads the home's records and either is asked for.

    Curves would be the home's once more; what is the target's own are the contrasts that it makes
    claims about.
    """
    for tier, home in source.targets():
        for target in TARGETS:
            asked = args.target in (None, home, target.name) and args.tier in (None, tier)
            if target.records_of == home and asked:
                yield tier, home, target.name


def target_figures(
    records: Sequence[Record],
    expected: Path,
    tier: str,
    target: str,
    device: str = "",
    verdicts: Mapping[str, Verdict] | None = None,
) -> dict[str, Figure]:
    """Return each figure of one target, by its name."""
    where = _behind_title(tier, target)
    figures = figures_of(records, paper_cells(expected, target.split("_")[0]), where)
    around = operations.rows(records, bounds(expected, tier, target, device))
    if around:
        figures[operations.NAME] = operations.draw(around, where, origin(records))
    differences = paired_figure(records, expected, tier, target, where, verdicts)
    if differences is not None:
        figures[paired.NAME] = differences
    measured = doses.draw(records, paper_rises(expected), where)
    return figures if measured is None else figures | {doses.NAME: measured}


def bounds(expected: Path, tier: str, target: str, device: str = "") -> operations.Bounds:
    """Return what is accepted of each arm and metric of a target, as stated before measuring."""
    bars = load_bars(expected, tier, target, device or None)
    return {(item.arm, item.metric): item.accept for item in bars}


def _learning_target(name: str) -> Target | None:
    """Return the target of this name whose claims are about learning; None where none is."""
    named = (target for target in TARGETS if target.name == name)
    return next((one for one in named if one.procedure in contrasts.PROCEDURES), None)


def verdicts_of(source: Source, expected: Path, tier: str, name: str) -> dict[str, Verdict]:
    """Return the verdicts on a target's claims by their names, as `repro check` has them."""
    target = _learning_target(name)
    if target is None:
        return {}
    return claim_verdicts(source, expected, target, Tier(tier))


def paired_figure(
    records: Sequence[Record],
    expected: Path,
    tier: str,
    name: str,
    where: str,
    verdicts: Mapping[str, Verdict] | None = None,
) -> Figure | None:
    """Return the picture of a target's paired differences, None where there are none to draw."""
    target = _learning_target(name)
    if target is None:
        return None
    cells = contrasts.cells(records, target, Tier(tier), verdicts)
    if not cells:
        return None
    paper = printed.differences(expected, name, list(dict.fromkeys(cell.arms for cell in cells)))
    stated = f"stated: {target.statement} ({target.source})"
    return paired.draw(cells, paper, records, stated, where)


def systems_figures(
    records: Mapping[tuple[str, str], Sequence[Record]], expected: Path, device: str = ""
) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure of each picture of the systems tier that the records allow."""
    tier = Tier.SYSTEMS.value
    for picture in systems.PICTURES:
        names = [name for name in picture.targets if (tier, name) in records]
        stated = [
            item for name in names for item in load_bars(expected, tier, name, device or None)
        ]
        figure = picture.draw(
            systems.Inputs(
                records=[record for name in names for record in records[tier, name]],
                cells=[cell for name in names for cell in paper_cells(expected, paper_file(name))],
                bars={(item.arm, item.metric): item for item in stated},
            ),
            f"{picture.title}; {tier} tier",
        )
        if figure is not None:
            yield picture.name, figure


def paper_file(name: str) -> str:
    """Return the name of the file with the paper's numbers for a target, empty without one."""
    return next((target.paper_file for target in TARGETS if target.name == name), "")


def load(source: Source, tier: str, target: str) -> list[Record]:
    """Return the readable records of finished runs; the others are named on standard error.

    Arms that are recorded as another target's have the names that they have in this one.
    """
    records = []
    for entry, arm in places(source, tier, target):
        try:
            record = entry.read()
        except RecordError as error:
            print(f"figures: left out: {error}", file=sys.stderr)  # noqa: T201
            continue
        if record.ok:
            records.append(dataclasses.replace(record, arm=arm))
    return records


def places(source: Source, tier: str, name: str) -> list[tuple[Entry, str]]:
    """Return a target's records, those that it shares included, with their arms.

    Of arms that it shares, the seeds of its own: their home may have more, and a picture should
    show what is compared.
    """
    own = source.entries(tier, name)
    entries = [(entry, entry.arm) for entry in own]
    seeds = {entry.stem for entry in own}
    for target in TARGETS:
        if target.name == name:
            for arm, (home, recorded) in target.shared.items():
                shared = [e for e in source.entries(tier, home.name) if e.arm == recorded]
                entries += [(e, arm) for e in shared if not seeds or e.stem in seeds]
    return entries


def figures_of(
    records: Sequence[Record], cells: Sequence[PaperCell], where: str = ""
) -> dict[str, Figure]:
    """Return each figure for which there are rows, by its name."""
    series = (curves.REWARD, curves.ENTROPY)
    learning = [
        *((one.name, _figure(one.draw, one.rows(records), where)) for one in series),
        (accuracy.NAME, _figure(accuracy.draw, accuracy.rows(records, cells), where)),
        (curves.HELDOUT, _figure(curves.draw_heldout, curves.heldout_rows(records), where)),
    ]
    rows = roofline.rows(records)
    drawn = {name: figure for name, figure in learning if figure is not None}
    return drawn | (
        {roofline.NAME: roofline.draw(rows, where, _roofline_note(records))} if rows else {}
    )


def _roofline_note(records: Sequence[Record]) -> str:
    timed = [record for record in records if record.arm != operations.NAME]
    return f"{origin(timed)}; medians; floor: 4-bit weights at the measured copy or matmul rate"


def _figure(
    draw: Callable[[Sequence[Row], str], Figure], rows: Sequence[Row], where: str
) -> Figure | None:
    return draw(rows, where) if rows else None


def save(figure: Figure, out: Path, name: str, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write PNG and SVG, renamed when whole; the same records give the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    # Laid out once: each kind would move things a little, and by which were drawn before.
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    # With "none" an empty engine stays, for which saving draws everything once more before.
    figure.set_layout_engine(None)
    # The layout's solver differs in the last digits from run to run, and names are made of them.
    for axes in figure.axes:
        box = axes.get_position().bounds
        axes.set_position((round(box[0], 6), round(box[1], 6), round(box[2], 6), round(box[3], 6)))
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
