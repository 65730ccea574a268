"""Analysis plans as they were first written down: the lines of `expected/plans.jsonl.xz`.

One JSON object per plan that blessed records carry; compressed, since they repeat each other. A
plan's digest is in each record that was made under it (`repro.run.analysis_plan`), so a plan that
was edited is nobody's, and refused.

Plans made before 2026-11-28 were spelled in another way, and their records carry the digests of
that spelling. They were translated once, from that of commit d912b161. They hold the outcomes that
the code of their runs gave (`repro.evidence.verdicts.rules`), but for those of arms left out: such
claims count with p = 1 since, which makes no verdict stronger.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.evidence.store import PRESET
from repro.spec.config import digest_of
from repro.spec.whole_files import replace_files, stamp_of

FILE = "plans.jsonl.xz"
# The digest that records carry of a plan that was translated, and that of its spelling now.
_TRANSLATED = {
    "a38e2783d76e": "e1b0368b286f",  # dose_coder_0_5b
    "3546705b504a": "60a295501558",  # dose_response_coder_0_5b
    "01e686006f6d": "c1828e491c46",  # pass_at_k_coder_0_5b
    "cde673631810": "e1f1bedcb032",  # table1_coder_0_5b
    "126e06d49b0b": "9b089d181b12",  # table1_coder_0_5b_tags
    "2d586a0ddd42": "b6e496f76238",  # untrained_coder_0_5b_tags
    "7f42b1d8ff37": "c86f72a641a1",  # baseline_coder_0_5b
    "5edd6e66e11a": "54bd16ccc991",  # dose_coder_1_5b
    "e9ce0c820d14": "68d0073d2d2c",  # untrained_coder_0_5b
    "34b31d3b3b78": "8284b4260341",  # untrained_coder_1_5b
    "8016ff11d597": "c97db8f905f5",  # untrained_coder_1_5b_tags
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """A plan as JSON values, and when and by which source it was first written down.

    `made` is an ISO 8601 time, UTC; `commit` and `dirty` are as in a record. The digest is what its
    records carry: of plans spelled as today that of `plan`.
    """

    made: str
    commit: str
    dirty: bool | None
    digest: str
    plan: dict[str, Any]

    def to_text(self, indent: int | None = None) -> str:
        """Return it as JSON text, on one line without an indent."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=indent) + "\n"


def parse_plan(text: str) -> KeptPlan:
    """Return the plan of a JSON text; one with another digest than it says raises `ValueError`."""
    raw = json.loads(text)
    item = KeptPlan(**{field.name: raw[field.name] for field in dataclasses.fields(KeptPlan)})
    found = digest_of(item.plan)
    if item.digest != found and _TRANSLATED.get(item.digest[:12]) != found[:12]:
        raise ValueError(f"a plan has another digest than it says, {item.digest[:12]}")
    return item


def read_plans(expected: Path) -> dict[str, KeptPlan]:
    """Return the kept plans by digest, none without the file; `ValueError` where it is broken."""
    path = expected / FILE
    try:
        return dict(_read(path, stamp_of(path))) if path.is_file() else {}
    except (OSError, KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise ValueError(f"{path}: not readable: {error}") from error


# Every check asks for the same plans; the stamp tells when they were changed.
@functools.lru_cache(maxsize=8)
def _read(path: Path, stamp: str) -> dict[str, KeptPlan]:
    plans = map(parse_plan, lzma.decompress(path.read_bytes()).decode().splitlines())
    return {item.digest: item for item in plans}


def keep_plans(plans: Mapping[str, KeptPlan], expected: Path) -> Path:
    """Write plans by digest in place of those that are there; return the file."""
    kept = sorted(plans.values(), key=lambda one: (one.plan["tier"], one.plan["target"], one.made))
    text = "".join(item.to_text() for item in kept)
    replace_files({expected / FILE: lzma.compress(text.encode(), preset=PRESET)})
    return expected / FILE
