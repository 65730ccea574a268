"""Stored runs of `benchmarks/`, and which rows of one have lost against another.

A row has lost if its median is more than 10 % above the earlier run's, and above it by more than
the larger of both runs' interquartile ranges: of rounds that scatter by 15 %, a loss of 12 % says
nothing. Rows that wait for the host (their `extra_info` says so) are not compared: between two
machines with H100s two of the three that quantise differed by 18 and 53 %, unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOSS_PERCENT = 10.0


def loss_percent(now: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    """Return the loss in percent of the earlier median; 0 for one within the noise.

    Parameters
    ----------
    now, before
        pytest-benchmark's statistics of a row: `median` and `iqr`, seconds.
    """
    earlier, later = float(before["median"]), float(now["median"])
    noise = max(float(now["iqr"]), float(before["iqr"]))
    if later - earlier <= noise:
        return 0.0
    return 100 * (later / earlier - 1) if earlier > 0 else float("inf")


def latest_run(folder: Path) -> Path | None:
    """Return the file of the last stored run below a folder of pytest-benchmark's, or None.

    Runs of several versions of Python lie in folders of their own, each numbered from 1: the time
    of the run says which is the last.
    """
    return max(folder.glob("**/*.json"), key=_age, default=None)


def _age(path: Path) -> tuple[str, str]:
    """Return when a run was stored, and its name, in which runs of one folder are numbered."""
    return json.loads(path.read_text(encoding="utf-8")).get("datetime", ""), path.name


def compared_timings(now: Path, before: Path) -> tuple[dict[str, str], list[str]]:
    """Compare two stored runs, row by row.

    Parameters
    ----------
    now, before
        pytest-benchmark's JSON files.

    Returns
    -------
    rows
        Of each row that both have, the sentence that says what it has lost; empty for no loss.
    missing
        The rows that only the earlier run has.
    """
    earlier, later = _device_rows(before), _device_rows(now)
    rows = {}
    for name in [name for name in later if name in earlier]:
        loss = loss_percent(later[name], earlier[name])
        medians = (1e6 * earlier[name]["median"], 1e6 * later[name]["median"])
        sentence = f"{name}: {medians[0]:.1f} to {medians[1]:.1f} us (+{loss:.0f} %)"
        rows[name] = sentence if loss > LOSS_PERCENT else ""
    return rows, [name for name in earlier if name not in later]


def _device_rows(path: Path) -> dict[str, Any]:
    """Return the statistics of the rows that are the device's time alone, by name."""
    rows = json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
    return {
        row["fullname"]: row["stats"] for row in rows if not row["extra_info"].get("waits_for_host")
    }
