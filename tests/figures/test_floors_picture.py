"""The picture of the floors is drawn from the imports, and the one in docs/ is of this source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from figures import floors

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_room_stands_above_what_it_imports() -> None:
    rooms = floors.rows(ROOT)
    level = floors.floors(rooms)
    assert level["spec"] == level["kernels"] == 0
    assert all(level[room] > level[other] for room in rooms for other in rooms[room])


def test_an_arrow_that_another_way_implies_is_left_out() -> None:
    rooms = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset()}
    assert floors.arrows(rooms) == [("a", "b"), ("b", "c")]


def test_a_circle_is_named() -> None:
    rooms = {"a": frozenset("b"), "b": frozenset("a")}
    with pytest.raises(ValueError, match="cycle"):
        floors.floors(rooms)


def test_the_picture_in_docs_has_the_arrows_of_this_source() -> None:
    text = (ROOT / "docs" / "figures" / "floors.svg").read_text(encoding="utf-8")
    drawn = re.findall(r'id="(\w+) imports (\w+)"', text)
    assert sorted(drawn) == sorted(floors.arrows(floors.rows(ROOT)))
