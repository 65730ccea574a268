"""A record of peers, shown as tables of one screen each.

A cell of an update is its seconds, of a whole step its seconds per 1,000 sampled tokens, since ways
draw completions of their own; in brackets over this project's row of as many bits, or its other one
where that was not timed: above 1 the way takes longer. The parts of whole steps follow, a row each,
and an entry's `note`. A person writes it, and the `base_cost` of a row of ours that has gone.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.harness import PHASES
from benchmarks.peers.sweep import OURS, TERMS, key_of, trials
from repro.report.tables import table

LABELS = {
    "ours_bf16": "this project, BF16",
    "ours_bf16_folded": "this project, BF16, folded",
    "ours_nvfp4": "this project, NVFP4",
    "ours_nvfp4_aqn": "this project, NVFP4 + AQN",
    "unsloth": "Unsloth + vLLM, 16 bits",
    "unsloth_nf4": "Unsloth + vLLM, NF4",
    "peft": "transformers + peft",
    "peft_liger": "transformers + peft + Liger",
    "qlora": "bitsandbytes QLoRA",
    "trl": "TRL + vLLM",
    "trl_alone": "TRL without vLLM (no fair opponent)",
}
MODEL_LABELS = {"135m": "135M", "0.5b": "0.5B", "7b": "7B", "tiny": "tiny"}
UPDATE_LABELS = {"spread": "spread, 300", "equal": "equal, 300", "long": "256 + 2,048"}
LENGTH_LABELS = UPDATE_LABELS | {
    "sampled": "16x8, earlier",  # 400 tokens
    "16x8": "16x8, paid in turn",
    "16x8_real": "16x8, real rewards",
    "64x8": "64x8, paid in turn",
    "64x8_real": "64x8, real rewards",
    "7b_16x8": "16x8, 256 + 512",
    "tiny_2x2": "2x2, paid in turn",
    "tiny_2x2_real": "2x2, real rewards",
}
_FOUR_BITS = ("qlora", "unsloth_nf4")
# In which order entries are shown.
_PLACES = {"model": list(MODEL_LABELS), "lengths": list(LENGTH_LABELS), "way": list(LABELS)}
_BLOCK = re.compile(r"(<!-- peers: begin [^\n]*-->\n)(.*?)(<!-- peers: end -->)", re.DOTALL)

Entry = Mapping[str, Any]


def cost(entry: Entry) -> float:
    """Return the seconds of an update, or of a thousand sampled tokens in a whole step."""
    if entry["lengths"] in UPDATE_LABELS:
        return float(entry["median"])
    return 1e3 * sum(entry["seconds"]) / sum(entry["completion_tokens"])


def record_lines(record: Mapping[str, Any]) -> list[str]:
    """Return a record's part of the page: tables of updates, of whole steps, of their parts."""
    entries = sorted(
        (entry for entry in record["entries"] if not entry.get("trial")),
        key=lambda e: [*(order.index(e[name]) for name, order in _PLACES.items()), _way(e)],
    )
    commits = ", ".join(dict.fromkeys(f"`{entry['commit'][:7]}`" for entry in entries))
    dates = ", ".join(sorted({entry["date"] for entry in entries}))
    where = f"One {record['device']}, driver {record.get('driver')}, {dates}, commit {commits}"
    updates = [entry for entry in entries if entry["lengths"] in UPDATE_LABELS]
    steps = [entry for entry in entries if entry["lengths"] not in UPDATE_LABELS]
    return [
        f"**{where}.**",
        "",
        *_matrix("seconds of an update", updates),
        *_matrix("seconds per 1,000 tokens", steps),
        *table(_HEAD, [_step_cells(entry) for entry in steps if "failed" not in entry]),
        *(f"- {_way(e)}, {_workload(e)}: {e['failed']}." for e in entries if "failed" in e),
        *(f"- {_way(e)}, {_workload(e)}: {e['note']}." for e in entries if "note" in e),
        *dict.fromkeys(_choice(e, record["entries"]) for e in entries if e.get("settings")),
        "",
        _versions(entries),
        "",
    ]


def renewed(text: str, benchmarks: Path) -> str:
    """Return a page's text with its block of peers written from the blessed records."""
    paths = sorted(benchmarks.glob("*/peers.json"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    lines = [line for record in records for line in record_lines(record)]
    written, count = _BLOCK.subn(lambda m: "\n".join([m[1], *lines, m[3]]), text)
    if count != 1:
        raise ValueError(f"the page has {count} blocks of peers; it needs one")
    return written


def _matrix(title: str, entries: Sequence[Entry]) -> list[str]:
    """Return a table of ways by workloads."""
    columns = list(dict.fromkeys(map(_workload, entries)))
    costs = {(e["way"], _workload(e)): cost(e) for e in entries if "failed" not in e}
    rows: dict[str, dict[str, str]] = {}
    for entry in sorted(entries, key=lambda e: _PLACES["way"].index(e["way"])):
        way, workload, shown = entry["way"], _workload(entry), "failed"
        if "failed" not in entry:
            own = [costs.get((ours, workload)) for ours in ("ours_bf16", "ours_nvfp4")]
            # As many bits, else the other.
            base = own[1] or own[0] if way in _FOUR_BITS else own[0] or own[1]
            base = entry.get("base_cost", base)
            beside = "" if base is None or way in OURS else f" ({cost(entry) / base:.2f}x)"
            shown = f"{cost(entry):.3g}{beside}"
        rows.setdefault(_way(entry), {})[workload] = shown
    lines = [[way, *(own.get(column, "") for column in columns)] for way, own in rows.items()]
    return table([title, *columns], lines)


_REWARDS = ("reward of 1 to 5", "16 to 20")
_HEAD = ("whole step", "way", "seconds", *PHASES, "tokens", "peak, GiB", "start, s", *_REWARDS)


def _step_cells(entry: Entry) -> list[str]:
    seconds, peak, start = entry["seconds"], entry.get("driver_bytes"), entry.get("start_seconds")
    paid = entry.get("rewards", []) if entry["lengths"].endswith("_real") else []
    timed = {part: entry.get(f"{part}_seconds") or () for part in PHASES}
    parts = {part: statistics.median(values) for part, values in timed.items() if any(values)}
    return [
        _workload(entry),
        _way(entry),
        f"{entry['median']:.3g} ({min(seconds):.3g} to {max(seconds):.3g})",
        *(f"{parts[part]:.3g}" if part in parts else "" for part in PHASES),
        f"{statistics.fmean(entry['completion_tokens']):,.0f}",
        f"{peak / 2**30:.1f}" if peak else "",
        f"{start:.0f}" if start else "",
        *(f"{statistics.fmean(own):.3f}" if own else "" for own in (paid[:5], paid[15:20])),
    ]


def _workload(entry: Entry) -> str:
    return f"{MODEL_LABELS[entry['model']]}, {LENGTH_LABELS[entry['lengths']]}"


def _way(entry: Entry) -> str:
    terms = entry.get("terms", "") if len(TERMS.get(entry["way"], ())) > 1 else ""
    return ", ".join(filter(None, (LABELS[entry["way"]], terms)))


def _choice(entry: Entry, entries: Sequence[Entry]) -> str:
    """Return the line of a peer's settings as they ran, and of the others that its sweep tried."""
    sweep = {key_of(asdict(r)) for r in trials(entry["way"], entry["lengths"], entry["model"], 9)}
    both = [entry, *(e for e in entries if key_of(e) in sweep)]
    # Where memory did not suffice, micro-batches had fewer rows.
    ran = [e["settings"] | {"rows": e.get("micro_batch_rows", "none")} for e in both]
    named = [", ".join(f"{k} {v}" for k, v in settings.items()) for settings in ran]
    choice = "; chosen over ".join(dict.fromkeys(named))
    return f"- {LABELS[entry['way']]}, {_workload(entry)}: {choice}."


def _versions(entries: Sequence[Entry]) -> str:
    known = [entry for entry in entries if "packages" in entry]
    held = [{f"{name} {v}" for name, v in e["packages"].items() if v} for e in known]
    shared = set.intersection(*held) if held else set()
    said: dict[str, list[str]] = {", ".join(sorted(shared)): ["all"]}
    for entry, own in zip(known, held, strict=True):
        way = "this project" if entry["way"] in OURS else LABELS[entry["way"]]
        said.setdefault(", ".join(sorted(own - shared)), []).append(way)
    rows = [f"{' and '.join(dict.fromkeys(ways))}: {text}" for text, ways in said.items()]
    return f"Versions: {'; '.join(rows)}."
