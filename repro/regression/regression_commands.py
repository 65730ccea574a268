"""The commands `compare` and `regress`; exit status 0, 1 or 2.

0: nothing is shown to be worse. 1: something regressed. 2: could not judge: no GPU, nothing blessed
on this kind of device, no records, or records that are refused, failed or of another configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from repro.evidence.provenance import source_commit
from repro.regression.judgement import BLESSED, EXIT_STATUS, judgement_of
from repro.run.execute import INTERRUPTED
from repro.run.places import expected_folder, runs_folder
from repro.spec.checks import require
from repro.spec.tier import Tier
from repro.spec.whole_files import replace_text
from repro.targets import find

COULD_NOT_JUDGE = EXIT_STATUS["could not judge"]
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# What `regress` measures when no target is named.
TARGETS_BY_DEFAULT = ("table6", "table3", "step_lengths", "scaling", "memory_budgets", "kernels")


def judged_or_not(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Return the exit status of a command, 2 if it breaks: Python's own 1 would say `regressed`."""
    try:
        return command(args)
    except (ValueError, OSError):
        raise
    except Exception:  # noqa: BLE001 - whatever went wrong, nothing was judged
        traceback.print_exc()
        return COULD_NOT_JUDGE


def main_compare(args: argparse.Namespace) -> int:
    """Carry out `repro compare A B`; return the exit status."""
    expected = expected_folder(args.expected)
    judgement = judgement_of(args.old, Path(args.new), args.targets, args.tier, expected)
    sys.stdout.write(judgement.text())
    return EXIT_STATUS[judgement.status]


def main_regress(args: argparse.Namespace, run: Callable[[Sequence[str]], int]) -> int:
    """Carry out `repro regress`: measure, compare with what is blessed, keep everything.

    `run` carries out a command line of `repro run` and returns its exit status.

    Raises `ValueError` without a GPU, or for a target that has no systems tier.
    """
    missing = Tier.SYSTEMS.missing()
    require(missing is None, f"regress measures on a GPU: {missing}")
    names = args.targets or _runnable_here()
    tier, expected = Tier.SYSTEMS.value, expected_folder(args.expected)
    folder = Path(args.runs) if args.runs else _new_folder()
    folder.mkdir(parents=True, exist_ok=True)
    line = [*names, "--tier", tier, "--runs", str(folder), "--expected", str(expected)]
    if run(line) == INTERRUPTED:
        again = " ".join(["python -m repro regress", *args.targets, "--runs", str(folder)])
        sys.stdout.write(f"interrupted; go on with: {again}\n")
        return COULD_NOT_JUDGE
    judgement = judgement_of(BLESSED, folder, names, tier, expected)
    text = f"{judgement.text()}records, regress.md: {folder}\n"
    markdown = f"## Regression: {judgement.status}\n\n```\n{text}```\n"
    replace_text(folder / "regress.md", markdown)
    if os.environ.get(SUMMARY_VARIABLE):
        with Path(os.environ[SUMMARY_VARIABLE]).open("a", encoding="utf-8") as summary:
            summary.write(markdown)
    sys.stdout.write(text)
    return EXIT_STATUS[judgement.status]


def _runnable_here() -> list[str]:
    """Return the targets measured by default that this machine has the devices for."""
    lacks = {name: find(name).not_runnable(Tier.SYSTEMS) for name in TARGETS_BY_DEFAULT}
    for name, sentence in lacks.items():
        if sentence:
            sys.stdout.write(f"{name}: not run: {sentence}\n")
    return [name for name, sentence in lacks.items() if sentence is None]


def _new_folder() -> Path:
    """Return the folder of a new start: two on one day and commit must not share records."""
    commit, dirty = source_commit()
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    return runs_folder(None) / "regress" / f"{now}-{commit[:12]}{'-dirty' if dirty else ''}"
