"""Draw how the timings of this device moved: `python -m benchmarks.history JSON PICTURE`.

Each stored run (`benchmarks/<device>/`) and then the one in JSON is a point, each row a line: its
median over that of the first run that has it. A panel is a claim; rows that moved by more than a
tenth since are named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.device_time import device_slug
from figures.style import new_figure, tidy

HERE = Path(__file__).resolve().parent
_NAMED = 0.1
# Of runs that were stored before their rows had groups.
_UNGROUPED = "Kernels at the shapes of 7B"

Run = Mapping[str, Any]


def lines_of(runs: Sequence[Run]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return, by group and row, (place of the run, median over that of the row's first run)."""
    groups: dict[str, dict[str, list[tuple[int, float]]]] = {}
    first: dict[str, float] = {}
    for place, run in enumerate(runs):
        for row in run["benchmarks"]:
            name, middle = row["name"], row["stats"]["median"]
            over = middle / first.setdefault(name, middle)
            group = groups.setdefault(row["group"] or _UNGROUPED, {})
            group.setdefault(name, []).append((place, over))
    return groups


def draw(runs: Sequence[Run], out: Path) -> None:
    """Write the picture of the runs; a format that matplotlib writes, by the name's end."""
    groups = lines_of(runs)
    figure = new_figure(8.0, 2.4 * len(groups))
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, (group, rows) in zip(panels, groups.items(), strict=True):
        for name, points in rows.items():
            places, heights = zip(*points, strict=True)
            axes.plot(places, heights, marker="o", markersize=3, linewidth=1)
            if abs(heights[-1] - 1) > _NAMED:
                axes.annotate(name, (places[-1], heights[-1]), fontsize=6)
        axes.set_title(group, loc="left", fontsize=9)
        axes.set_xticks(range(len(runs)), [run["commit_info"]["id"][:7] for run in runs])
        axes.set_ylabel("time, over the first")
        tidy(axes)
    figure.savefig(out)


def main() -> None:
    """Draw the stored runs of this device, and the one in the file."""
    paths = [*sorted((HERE / device_slug()).glob("*/*.json")), Path(sys.argv[1])]
    draw([json.loads(path.read_text(encoding="utf-8")) for path in paths], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
