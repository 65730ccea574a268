"""The command line: `python -m repro list | plan | run | check | compare | regress | bless | ...`.

The flags are in `repro.door.command_line`. Each command imports what it needs when it is called, so
that `list` answers at once and checking needs no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from repro.door.command_line import build_parser

FINE, CONTRADICTED, USAGE, INTERRUPTED = 0, 1, 2, 130
# torchrun ends all ranks with the first that ends, so the others leave that one time to speak.
_SAYING_SECONDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None where it was closed
    status = FINE
    try:
        args = build_parser().parse_args(arguments)
        status = carried_out(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) left early; let the interpreter flush into nothing.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends
    except (ValueError, OSError, FloatingPointError) as error:
        from repro.evidence.printable import one_line
        from repro.run.disk import sentence_of

        _drop_unprinted()
        said = sentence_of(error) if isinstance(error, OSError) else str(error)
        # What is refused is said by the first of torchrun's ranks on a host, a disk by whose it is.
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, OSError):
            print(f"repro: {one_line(said)}", file=sys.stderr)
        else:
            time.sleep(_SAYING_SECONDS)
        return USAGE
    except (KeyboardInterrupt, Exception):
        if "\nKeyboardInterrupt" in "\n" + traceback.format_exc():  # perhaps replaced by a library
            print("repro: interrupted", file=sys.stderr)
            return INTERRUPTED
        if args.command not in ("compare", "regress"):
            raise
        traceback.print_exc()  # nothing was judged: Python's own 1 would say that it was
        return USAGE
    return status


def _drop_unprinted() -> None:
    """Drop what standard output does not take: the interpreter would fail on it once more."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # a full disk; a stream that somebody closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends


def carried_out(args: argparse.Namespace) -> int:
    """Carry out the command of a parsed line; return its exit status."""
    status = 0
    for step in _COMMANDS[args.command]:
        if isinstance(step, str):
            module, name = step.split(":")
            step = getattr(import_module(module), name)
        status = step(args)
    return status


def _run(args: argparse.Namespace) -> int:
    from repro.run.execute import main_run
    from repro.run.places import runs_folder
    from repro.run.select import check_line

    status = main_run(args)
    if status != INTERRUPTED and os.environ.get("RANK", "0") == "0":  # torchrun's first alone
        print(f"The records are in {runs_folder(args.runs)}. Next: {check_line(args)}")
    return status


def _report(args: argparse.Namespace) -> int:
    from repro.report.run_report import main_report, require_read, stored_or_own

    require_read(args)
    if not args.log:
        return main_report(args)
    from repro.run.places import runs_folder
    from repro.runlog.trackers import parse_trackers, send

    trackers = parse_trackers(args.log)
    records = [r for checked in stored_or_own(args) for r in checked.evidence.every_record()]
    folder = runs_folder(args.runs) / "logged"
    print(f"sent {send(records, trackers, folder)} runs to {', '.join(trackers)}; see {folder}")
    return FINE


def _bundle(args: argparse.Namespace) -> int:
    from repro.evidence.store import RunsFolder
    from repro.judge.bundle import pack
    from repro.report.console import main_verify
    from repro.run.places import expected_folder, runs_folder
    from repro.run.select import select

    if bool(args.target) == args.verify:
        raise ValueError("bundle: FILE TARGET packs, --verify FILE judges")
    if args.verify:
        return main_verify(Path(args.file), expected_folder(None))
    (selection,) = select([args.target], tier=args.tier)
    print(pack(selection, RunsFolder(runs_folder(args.runs)), Path(args.file)))
    return FINE


def _reproduce(args: argparse.Namespace) -> int:
    from repro.report.run_report import main_report
    from repro.run.execute import main_run

    status: int = main_run(args)
    if status not in (FINE, CONTRADICTED):
        return status
    _draw(_as_for("report", args))
    main_report(_as_for("report", args))
    return max(status, carried_out(_as_for("check", args)))


def _draw(args: argparse.Namespace) -> None:
    """Draw the pictures that a report links; the drawing code is the checkout's, not installed."""
    from repro.run.places import PACKAGE

    if (PACKAGE.parent / "figures" / "__main__.py").is_file():
        import_module("figures.__main__").draw_reported(args)
    else:
        print("figures are drawn from the checkout; this installation has none")


def _as_for(command: str, args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of `command` for the same targets: what is given, else its defaults."""
    alone = build_parser().parse_args([command, *args.targets])
    return argparse.Namespace(**(vars(alone) | vars(args) | {"command": command}))


# What carries out a command: functions of the parsed line, one after another; the last one's result
# is the exit status. What a line alone has wrong is said before torch is imported (5 to 25 s).
_COMMANDS: dict[str, Sequence[str | Callable[[argparse.Namespace], int]]] = {
    "list": ["repro.run.listing:main_list"],
    "train": ["repro.door.front_door:main_train"],
    "plan": ["repro.run.plan:main_plan"],
    "memory": ["repro.door.memory_command:main_memory"],
    "run": [_run],
    "reproduce": [_reproduce],
    "check": ["repro.report.console:main_check"],
    "compare": ["repro.report.regression:main_compare"],
    "regress": ["repro.report.regression:main_regress"],
    "report": [_report],
    "bless": ["repro.judge.blessing:main_bless"],
    "bundle": [_bundle],
    "quantize": ["repro.evaluation.flags:require_writing", "repro.export.quantising:main_quantize"],
    "evaluate": [
        "repro.evaluation.flags:require_asking",
        "repro.evaluation.evaluate_command:main_evaluate",
    ],
    "export": ["repro.evaluation.flags:require_writing", "repro.export.exporting:main_export"],
    "environment": ["repro.evidence.environment:main_environment"],
    "dose": ["repro.evaluation.flags:dosing_of", "repro.door.dose_command:main_dose"],
}


if __name__ == "__main__":
    ended = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a thread now and then aborts an orderly exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)
    sys.exit(ended)
