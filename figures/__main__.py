"""Draw every picture that the records allow, as PNG and SVG.

`python -m figures --records runs --out figures_out [--target table1]`
`python -m figures --blessed --kinds svg --out docs/figures --renew`
`python -m figures paper [figure4 ...]`: the paper's own tables and figures, as PDF and CSV, too
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from figures import bars, curves, intervals, paper_pictures
from figures.panels import PICTURES
from figures.paper_pictures import Found
from repro.door.command_parser import SentenceParser
from repro.judge.blessed import blessed_checks, blessed_of
from repro.judge.check import Checked, check_selection
from repro.judge.recorded import recorded_selections
from repro.report.run_report import reported
from repro.report.tables import by_device
from repro.run.disk import sentence_of
from repro.run.places import expected_folder, runs_folder
from repro.spec.checks import require, unknown
from repro.spec.tier import Tier
from repro.spec.whole_files import replace_files

DPI = 150
_Drawing = Callable[[Sequence[Checked], Path, str], Figure | None]
_TABLES_5_TO_8 = ("table5", "table6", "table7", "table8")
_MEMORY = ("memory", "memory_dense", "memory_formats", "memory_budgets")
# The pictures of the systems tier: what draws them, a title, and the targets in them. Those without
# are the paper's, by their first word.
SYSTEMS_PICTURES: dict[str, tuple[_Drawing | None, str, tuple[str, ...]]] = {
    "tables_5_to_8_throughput": (curves.by_batch, "Rollouts of Tables 5 to 8", _TABLES_5_TO_8),
    "table9_ranks": (None, "", ("table9",)),
    "figure11_ranks": (None, "", ("figure11",)),
    "rollout_throughput": (curves.by_batch, "Rollout of up to 256 rows", ("rollout",)),
    "table3_steps": (None, "", ("table3_3b", "table3", "table3_14b", "table3_32b")),
    "memory": (bars.memory, "Memory of a GRPO step", _MEMORY),
}
# Without dates and versions: the same records give the same bytes.
_METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
_PAPERS_KINDS = (*_METADATA, "csv")
# Of one target, by its procedure.
_TRAINING = {
    "reward_curves": ("Right answers during training", "accuracy", "share of sampled completions"),
    "entropy_curves": ("Entropy during training", "entropy", "mean token entropy, nats"),
    "length_curves": ("Completion length during training", "completion_tokens", "tokens"),
}
# None where the records have nothing to draw.
_Named = tuple[str, Figure | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the pictures; return 0, or 2 where nothing was drawn or the line is bad."""
    try:
        args = parsed(arguments)
        kinds = _kinds(args)
        out, expected = Path(args.out), expected_folder(args.expected)
        if args.paper:
            word, *names = args.paper
            require(word == "paper", f"{word}: the only word here is `paper`; flags begin with --")
            own = [] if args.blessed else list(_checks(args, expected))
            found = paper_pictures.by_target(own, blessed_checks(expected))
            draw_paper(names, found, expected, out, kinds, every_panel=args.every_panel)
            return 0
        drawn = draw(list(_checks(args, expected)), expected, out, kinds, renew=args.renew)
    except (ValueError, OSError) as error:
        said = sentence_of(error) if isinstance(error, OSError) else error
        print(f"figures: {said}", file=sys.stderr)  # noqa: T201
        return 2
    if not drawn:
        where = f"{expected} has no blessed" if args.blessed else f"{args.records} has no"
        of = f" of {args.target}" if args.target else ""
        print(f"figures: {where} records{of} to draw", file=sys.stderr)  # noqa: T201
    return 0 if drawn else 2


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's flags and, as `paper`, its words, wherever among them they stand.

    Raises `ValueError` if a flag is unknown.
    """
    parser = build_parser()
    args, words = argparse.ArgumentParser.parse_known_args(parser, arguments)
    if any(word.startswith("-") for word in words):
        parser.parse_args(arguments)  # which says which
    args.paper = words
    return args


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = SentenceParser(
        prog="python -m figures",
        usage="python -m figures [paper [NAME ...]] [flags]",
        description=(__doc__ or "").splitlines()[0],
        epilog="`paper` draws the paper's tables and figures, or those named after it.",
    )
    parser.add_argument("--records", default="runs", help="folder of records")
    parser.add_argument("--blessed", action="store_true", help="the records behind expectations")
    parser.add_argument("--kinds", help="kinds of file: png, svg, pdf; of the paper's csv, too")
    parser.add_argument("--out", default="figures_out", help="folder for the pictures")
    parser.add_argument("--renew", action="store_true", help="only what is in --out already")
    parser.add_argument(
        "--every-panel", action="store_true", help="of the paper's, those without measurements too"
    )
    parser.add_argument("--target", help="only this target's records")
    parser.add_argument("--expected", help="folder of the paper's numbers")
    return parser


def _kinds(args: argparse.Namespace) -> tuple[str, ...]:
    known = _PAPERS_KINDS if args.paper else tuple(_METADATA)
    kinds = tuple(args.kinds.split(",")) if args.kinds else known if args.paper else ("png", "svg")
    require(set(kinds) <= set(known), f"--kinds {args.kinds}: needs some of {','.join(known)}")
    return kinds


def draw_paper(
    names: Sequence[str],
    found: Found,
    expected: Path,
    out: Path,
    kinds: Sequence[str],
    *,
    every_panel: bool = False,
) -> None:
    """Draw the tables and figures of the paper that are named, or all; `ValueError` for others."""
    for name in names:
        require(name in PICTURES, unknown("table or figure", [*PICTURES], name))
    for name in names or PICTURES:
        figure, marks = paper_pictures.draw(name, found, expected, every_panel=every_panel)
        save(figure, out, name, [kind for kind in kinds if kind != "csv"])
        if "csv" in kinds:
            paper_pictures.write_csv(marks, out / f"{name}.csv")
        for kind in kinds:
            print(f"wrote {out / name}.{kind}")  # noqa: T201


def _checks(args: argparse.Namespace, expected: Path) -> Iterator[Checked]:
    if args.blessed:
        yield from blessed_of(expected, [args.target] if args.target else [], None)
        return
    runs = Path(args.records)
    for selection in recorded_selections(None, runs):
        if args.target in (None, selection.source.name, selection.target.name):
            yield check_selection(selection, runs, expected)


def draw_reported(args: argparse.Namespace) -> None:
    """Draw the pictures for the report that the same command line writes, the paper's apart."""
    runs = runs_folder(args.runs)
    expected = expected_folder(args.expected)
    out = Path(args.out) if args.out else runs / "report.md"
    folder = out.parent / "figures"
    checks = reported(args, runs, expected)
    draw(checks, expected, folder)
    if names := [name for name in args.targets if name in PICTURES]:
        found = paper_pictures.by_target(checks, blessed_checks(expected))
        draw_paper(names, found, expected, folder / "paper", _PAPERS_KINDS)


def draw(
    checks: Sequence[Checked],
    expected: Path,
    out: Path,
    kinds: Sequence[str] = ("png", "svg"),
    renew: bool = False,
) -> list[Path]:
    """Draw every picture of these checks, or those whose files are there; return the files' paths.

    The device is part of the names at the systems tier, whose numbers are one device's, and of
    what another device has a picture of already.
    """
    drawn = []
    for name, figure in pictures(checks, expected):
        kept = [kind for kind in kinds if not renew or (out / f"{name}.{kind}").is_file()]
        drawn += save(figure, out, name, kept)
    for path in drawn:
        print(f"wrote {path}")  # noqa: T201
    return drawn


def pictures(checks: Sequence[Checked], expected: Path) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure of each picture that the records allow."""
    drawn: set[str] = set()
    for tier in Tier:
        devices = by_device(checked for checked in checks if checked.selection.tier is tier)
        for device, of_device in sorted(devices.items()):
            of_tier = _of_systems if tier is Tier.SYSTEMS else _of_targets
            for name, figure in of_tier(of_device, expected):
                if figure is None:
                    continue
                apart = device and (tier is Tier.SYSTEMS or f"{tier.value}_{name}" in drawn)
                whole = f"{tier.value}_{device}_{name}" if apart else f"{tier.value}_{name}"
                drawn.add(whole)
                yield whole, figure


def _of_targets(checks: Sequence[Checked], expected: Path) -> Iterator[_Named]:
    """Yield the pictures of single targets whose runs are their own."""
    for checked in checks:
        target = checked.selection.target
        if target.records_of is not None:
            continue
        spoken = re.sub(r"(\d)_(\d)b\b", r"\1.\2B", target.name).replace("_", " ")
        where = f"; {spoken}, {checked.selection.tier.value} tier"
        if target.procedure == "train":
            for name, (title, series, ylabel) in _TRAINING.items():
                figure = curves.training(checked, series, f"{title}{where}", ylabel)
                yield f"{target.name}_{name}", figure
            yield f"{target.name}_tests", curves.tested(checked, f"Accuracy along training{where}")
        elif target.procedure == "dose":
            title = f"How large each treatment is{where}"
            yield f"{target.name}_doses", intervals.dose(checked, expected, title)


def _of_systems(checks: Sequence[Checked], expected: Path) -> Iterator[_Named]:
    """Yield the pictures of the systems page."""
    behind, found = f"; {Tier.SYSTEMS.value} tier", paper_pictures.by_target(checks, ())
    for picture, (drawing, title, targets) in SYSTEMS_PICTURES.items():
        shown = [one for one in checks if one.selection.target.name in targets]
        if shown and drawing is None:
            yield picture, paper_pictures.draw(picture.split("_")[0], found, expected)[0]
        elif shown and drawing:
            yield picture, drawing(shown, expected, f"{title}{behind}")
    for checked in checks:
        if checked.selection.target.procedure == "operation":
            title = f"Linear layers over the rows of x{behind}"
            yield "kernels_roofline", curves.linear_layers(checked, title)


def save(figure: Figure, out: Path, name: str, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write the kinds asked for, renamed when whole; the same records give the same bytes."""
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
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "pdf.fonttype": 42}):
        for kind in kinds:
            path = out / f"{name}.{kind}"
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind, dpi=DPI, metadata=_METADATA[kind])
            replace_files({path: drawn.getvalue()})
            paths.append(path)
    return paths


if __name__ == "__main__":
    sys.exit(main())
