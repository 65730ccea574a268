"""The floors of the house, drawn from the imports of the source: rooms by how far up they stand.

A room stands one floor above the highest room that it imports. An arrow leads from a room to each
room that it imports and could not reach by way of another (the transitive reduction), so a missing
arrow means a way round, not independence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

from matplotlib.figure import Figure

from figures.style import new_figure

Rooms = Mapping[str, frozenset[str]]

_WIDTH, _STEP = 9.0, 0.72
_BOX = {"boxstyle": "round,pad=0.35", "facecolor": "#f3f1ec", "edgecolor": "#8c8c8c"}


def rows(root: Path) -> Rooms:
    """Return {room: the rooms that its modules import} of a checkout.

    Rooms are the folders of `repro/`, and `kernels`.
    """
    homes = {path.name: path for path in sorted((root / "repro").iterdir()) if _is_room(path)}
    homes["kernels"] = root / "kernels"
    return {name: frozenset(_imports(home) & homes.keys() - {name}) for name, home in homes.items()}


def _is_room(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.py"))


def _imports(home: Path) -> set[str]:
    """Return the names of the rooms that any module below `home` imports, itself among them."""
    modules = (name for path in home.rglob("*.py") for name in imported_modules(path))
    parts = [name.split(".") for name in modules]
    inside = {part[1] for part in parts if part[0] == "repro" and len(part) > 1}
    return inside | {part[0] for part in parts if part[0] == "kernels"}


def floors(rooms: Rooms) -> dict[str, int]:
    """Return each room's floor, the lowest being 0.

    Raises
    ------
    ValueError
        When rooms import one another in a circle.
    """
    levels: dict[str, int] = {}
    sorter = TopologicalSorter(rooms)
    sorter.prepare()
    while sorter:
        level = 1 + max(levels.values(), default=-1)
        ready = sorter.get_ready()
        levels |= dict.fromkeys(ready, level)
        sorter.done(*ready)
    return levels


def arrows(rooms: Rooms) -> list[tuple[str, str]]:
    """Return (room, imported room) without those that another way already implies."""

    def reached(room: str) -> set[str]:
        return {room}.union(*(reached(other) for other in rooms[room]))

    return [
        (room, other)
        for room in sorted(rooms)
        for other in sorted(rooms[room])
        if not any(other in reached(between) for between in rooms[room] - {other})
    ]


def draw(rooms: Rooms) -> Figure:
    """Draw the rooms floor by floor, what imports above what is imported."""
    level = floors(rooms)
    height = 1 + max(level.values())
    figure = new_figure(_WIDTH, _STEP * height + 0.6)
    axes = figure.add_subplot()
    places: dict[str, tuple[float, float]] = {}
    for floor in range(height):
        here = sorted(room for room in rooms if level[room] == floor)
        places |= {room: ((i + 1) / (len(here) + 1), floor) for i, room in enumerate(here)}
    for start, end in arrows(rooms):
        arrow = axes.annotate(
            "", xy=places[end], xytext=places[start],
            arrowprops={"arrowstyle": "-|>", "color": "#b0b0b0", "shrinkA": 14, "shrinkB": 14},
        )  # fmt: skip
        assert arrow.arrow_patch is not None
        arrow.arrow_patch.set_gid(f"{start} imports {end}")
    for room, (x, y) in places.items():
        name = room if room == "kernels" else f"repro/{room}"
        axes.text(x, y, name, ha="center", va="center", fontsize=10, bbox=_BOX)
    axes.set(xlim=(0, 1), ylim=(-0.5, height - 0.5))
    axes.set_axis_off()
    figure.suptitle("Rooms by floor: each stands above what it imports", fontsize=12)
    return figure


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the names that a module's imports may mean: `from package import name` may be two."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
