"""The flags by which training keeps more than its metrics."""

from __future__ import annotations

import argparse

from repro.runlog.run_logger import (
    LogOptions,
)
from repro.runlog.trackers import parse_trackers
from repro.spec.checks import require


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags by which training keeps more than metrics.jsonl."""
    group = parser.add_argument_group("what training keeps beside metrics.jsonl")
    group.add_argument("--log", metavar="A,B", help="send metrics to trackers: tensorboard, wandb")
    group.add_argument(
        "--completions",
        action="store_true",
        help="keep the completions, one Parquet file per rollout",
    )
    group.add_argument(
        "--stop-idle",
        type=int,
        metavar="N",
        help="end a run after N steps in a row in which no reward differs in a group",
    )


def log_options_of(args: argparse.Namespace) -> LogOptions:
    """Return the options of a command line, else those of the environment."""
    idle, log = getattr(args, "stop_idle", None), getattr(args, "log", None)
    require(idle is None or idle >= 1, f"--stop-idle {idle}: needs 1 or more")
    own = LogOptions.from_environment()
    return LogOptions(
        trackers=own.trackers if log is None else parse_trackers(log),
        completions=own.completions or getattr(args, "completions", False),
        stop_idle=idle or own.stop_idle,
        example=own.example or getattr(args, "example", False),
    )
