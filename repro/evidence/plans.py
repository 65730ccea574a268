"""Analysis plans as they were first written down: the lines of `expected/plans.tsv`.

One line per target, tier, device and plan that blessed records carry, with the plan as JSON on the
line. A plan's digest is in each record that was made under it (`repro.run.analysis_plan`), so a
line whose plan does not have the digest beside it was edited, and is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from repro.spec.config import digest_of
from repro.spec.whole_files import replace_text

FILE = "plans.tsv"


class PlanError(ValueError):
    """A line of the plans that cannot be used; the message names file, line and column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """The plan of one target, and when it was made.

    Attributes
    ----------
    target, tier, device
        Whose records carry it, and where they were made.
    made
        ISO 8601 time, UTC, of the first time that it was written down.
    commit, dirty
        The source that wrote it, as in a record: `dirty` is `true`, `false` or `null`.
    digest
        SHA-256 of the plan.
    plan
        `repro.run.analysis_plan.analysis_plan` as JSON text on one line.
    """

    target: str
    tier: str
    device: str
    made: str
    commit: str
    dirty: str
    digest: str
    plan: str

    @property
    def time(self) -> datetime:
        """When it was made."""
        return datetime.fromisoformat(self.made)


COLUMNS = tuple(item.name for item in dataclasses.fields(KeptPlan))


def plan_line(value: Any) -> str:
    """Return a plan as JSON text on one line."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def read_plans(expected: Path) -> list[KeptPlan]:
    """Return the plans that are kept among the expectations; none without the file.

    Raises
    ------
    PlanError
        If a line has other columns, or its plan not its digest.
    """
    path = expected / FILE
    if not path.is_file():
        return []
    state = path.stat()
    return list(_read(path, (state.st_ino, state.st_mtime_ns, state.st_size)))


# Every check asks for the same plans; the stamp tells when they were changed.
@functools.lru_cache(maxsize=8)
def _read(path: Path, stamp: tuple[int, ...]) -> tuple[KeptPlan, ...]:
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    if tuple(head.split("\t")) != COLUMNS:
        raise PlanError(f"{path}:1: the columns are {head.split(chr(9))}; needs {list(COLUMNS)}")
    return tuple(_parse(row, f"{path}:{number}") for number, row in enumerate(rows, 2))


def _parse(row: str, where: str) -> KeptPlan:
    cells = row.split("\t")
    if len(cells) != len(COLUMNS):
        raise PlanError(f"{where}: has {len(cells)} cells; needs {len(COLUMNS)}")
    recorded = KeptPlan(**dict(zip(COLUMNS, cells, strict=True)))
    try:
        digest = digest_of(json.loads(recorded.plan))
    except json.JSONDecodeError as error:
        raise PlanError(f"{where}: plan is not JSON: {error}") from error
    if digest != recorded.digest:
        raise PlanError(
            f"{where}: digest is {recorded.digest[:12]}; the plan's own is {digest[:12]}"
        )
    return recorded


def keep_plans(items: Iterable[KeptPlan], expected: Path, replaced: str = "") -> Path:
    """Write plans to their lines.

    Parameters
    ----------
    replaced
        A target of which no other plan stays on the devices and tiers of `items`.
    """
    new = {_key(item): item for item in items}
    places = {(item.tier, item.device) for item in new.values()}
    others = {
        _key(item): item
        for item in read_plans(expected)
        if item.target != replaced or (item.tier, item.device) not in places
    }
    rows = [dataclasses.astuple(item) for _, item in sorted((others | new).items())]
    text = "".join("\t".join(row) + "\n" for row in [COLUMNS, *rows])
    replace_text(expected / FILE, text)
    return expected / FILE


def _key(item: KeptPlan) -> tuple[str, str, str, str]:
    return item.tier, item.device, item.target, item.digest
