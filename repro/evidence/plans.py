"""Analysis plans as they were first written down: the lines of `expected/plans.tsv`.

One line per target, tier, device and plan that blessed records carry. The plans themselves, which
repeat each other, lie beside it (`plans.jsonl.xz`), one JSON object per line, and are found by
their digests. A plan's digest is in each record that was made under it (`repro.run.analysis_plan`),
so a plan that was edited is nobody's, and the line that names the one of before is refused.

Plans made before 2026-11-28 were spelled in another way. Their records carry the digest of that
spelling; the line names as `kept` the digest of the same plan as it is spelled now. They were
translated once, from the spelling of commit d912b161; they hold the outcomes
that the code of their runs gave (`repro.evidence.verdicts.rules`), but for those of arms left out:
such claims count with p = 1 since, which makes no verdict stronger.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from repro.evidence.store import PRESET
from repro.spec.config import digest_of
from repro.spec.whole_files import replace_files, stamp_of

FILE = "plans.tsv"
WHOLE = "plans.jsonl.xz"
# When the spelling changed, ISO 8601.
_TRANSLATED = "2026-11-28T12:00:00+00:00"


class PlanError(ValueError):
    """Plans that cannot be used; the message names the file."""


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

    @property
    def kept(self) -> str:
        """The digest of the plan as it is spelled here."""
        return digest_of(json.loads(self.plan))

    def to_text(self) -> str:
        """Return the plan as the text of a file among records; `plan_of_text` reads it."""
        values = dataclasses.asdict(self) | {"plan": json.loads(self.plan)}
        return json.dumps(values, indent=1, sort_keys=True) + "\n"


COLUMNS = (*(item.name for item in dataclasses.fields(KeptPlan) if item.name != "plan"), "kept")


def plan_of_text(text: str, device: str) -> KeptPlan:
    """Return the plan that a file among records holds, as one of records of a device."""
    values = json.loads(text)
    return KeptPlan(**values | {"device": device, "plan": plan_line(values["plan"])})


def plan_line(value: Any) -> str:
    """Return a plan as JSON text on one line."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def read_plans(expected: Path) -> list[KeptPlan]:
    """Return the kept plans, none without the file; `PlanError` where a file is broken."""
    path, whole = expected / FILE, expected / WHOLE
    if not path.is_file():
        return []
    try:
        return list(_read(path, whole, stamp_of(path, whole)))
    except KeyError as error:
        raise PlanError(f"{path}: {WHOLE} has no plan with the digest {error}") from error
    except (OSError, ValueError, TypeError, lzma.LZMAError) as error:
        raise PlanError(f"{path} and {WHOLE}: not readable: {error}") from error


# Every check asks for the same plans; the stamp tells when they were changed.
@functools.lru_cache(maxsize=8)
def _read(path: Path, whole: Path, stamps: str) -> tuple[KeptPlan, ...]:
    lines = lzma.decompress(whole.read_bytes()).decode().splitlines()
    plans = {digest_of(json.loads(line)): line for line in lines}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    for row in rows:
        if row["digest"] != row["kept"] and row["made"] >= _TRANSLATED:
            raise ValueError(f"{row['digest'][:12]} is not the digest of {row['kept'][:12]}")
    return tuple(KeptPlan(plan=plans[row.pop("kept")], **row) for row in rows)


def keep_plans(items: Iterable[KeptPlan], expected: Path, replaced: str = "") -> list[Path]:
    """Write the lines of plans and the file of complete plans; return both paths.

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
    kept = [item for _, item in sorted((others | new).items())]
    rows = [[getattr(item, name) for name in COLUMNS] for item in kept]
    text = "".join("\t".join(row) + "\n" for row in [COLUMNS, *rows])
    plans = "".join(plan + "\n" for plan in dict.fromkeys(item.plan for item in kept))
    path, whole = expected / FILE, expected / WHOLE
    replace_files({whole: lzma.compress(plans.encode(), preset=PRESET), path: text.encode()})
    return [path, whole]


def _key(item: KeptPlan) -> tuple[str, str, str, str]:
    return item.tier, item.device, item.target, item.digest
