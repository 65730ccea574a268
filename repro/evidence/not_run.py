"""Points of a recorded arm that were not run, and the sentence that says why.

An arm is measured at several points, of which some may not fit the device. Its record has the
metrics of the others, and

    facts["not_run"]          {part: sentence}; a part is a point, a point and batch (`32b_256`),
                                or a check, and begins or ends the names of its metrics
    facts["out_of_memory"]    of measured steps: sentences "<point> <way>: why"

A claim or a bar on an absent metric is then `not run`, with that sentence: neither an error nor
silence.
"""

from __future__ import annotations

from repro.evidence.record import Record
from repro.spec.tier import GIB


def needs(needed_bytes: float, total_bytes: float, source: str) -> str:
    """Return the sentence on what does not fit; `source` says who states it."""
    return f"needs {needed_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB {source}"


def reason(record: Record, metric: str) -> str | None:
    """Return why a record has no such metric, or None where it does not say."""
    for part, sentence in record.facts.get("not_run", {}).items():
        if metric == part or metric.endswith(f"_{part}") or metric.startswith(f"{part}_"):
            return f"{part}: {sentence}"
    lines = [
        line
        for line in record.facts.get("out_of_memory", ())
        if metric.endswith(f"_{line.split(' ', 1)[0]}")
    ]
    return "; ".join(lines) or None
