"""A record of peers as Markdown: seconds by way, ratios to this project's, bars, and what loses."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = {"ours_bf16": "this project, BF16", "ours_nvfp4": "this project, NVFP4"}
LABELS = OURS | {
    "peft": "transformers + peft",
    "peft_liger": "transformers + peft + Liger",
    "peft_trl": "transformers + peft + TRL's fused head",
    "qlora": "bitsandbytes QLoRA",
    "trl": "TRL's GRPOTrainer, own generation",
}
MODEL_LABELS = {"135m": "SmolLM2-135M", "0.5b": "Qwen2.5-0.5B", "7b": "Qwen2.5-7B"}
LENGTH_LABELS = {
    "spread": "spread, mean 300",
    "equal": "equal, 300",
    "long": "equal, 256 + 2,048",
    "sampled": "sampled",
}
# How many times as long transformers + peft must take as this project with 16-bit weights.
BARS = {
    **{(model, lengths): 2.0 for model in ("135m", "0.5b") for lengths in ("spread", "equal")},
    ("7b", "spread"): 2.0,
    ("7b", "equal"): 1.6,
    ("7b", "long"): 1.6,
}
_BLOCK = re.compile(r"(<!-- peers: begin [^\n]*-->\n)(.*?)(<!-- peers: end -->)", re.DOTALL)

Entry = Mapping[str, Any]


def is_measured(entry: Entry) -> bool:
    """Whether a way was run."""
    return "failed" not in entry


def cost(entry: Entry) -> float:
    """Return the seconds of an update, or of a thousand sampled tokens in a whole step.

    Ways that sample draw completions of their own, and not as many tokens.
    """
    if entry["lengths"] != "sampled":
        return float(entry["median"])
    return 1e3 * sum(entry["seconds"]) / sum(entry["completion_tokens"])


def ratios(entry: Entry, entries: Sequence[Entry]) -> dict[str, float]:
    """Return how many times as long a way takes as each of this project's on the same rows."""
    return {
        other["way"]: cost(entry) / cost(other)
        for other in entries
        if other["way"] in OURS and is_measured(other) and is_measured(entry)
        if (other["model"], other["lengths"]) == (entry["model"], entry["lengths"])
    }


def ordered(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries by model, lengths and way, in the order of the labels."""
    places = [list(labels) for labels in (MODEL_LABELS, LENGTH_LABELS, LABELS)]

    def place(entry: Entry) -> list[int]:
        names = (entry["model"], entry["lengths"], entry["way"])
        return [
            own.index(name) if name in own else -1 for own, name in zip(places, names, strict=True)
        ]

    return sorted(entries, key=place)


def cells(entry: Entry, entries: Sequence[Entry]) -> list[str]:
    """Return a way's row: names, seconds, ratios, bar, micro-batch, memory."""
    named = [_model(entry), LENGTH_LABELS[entry["lengths"]], LABELS[entry["way"]]]
    if not is_measured(entry):
        return [*named, str(entry["failed"]), "", "", "", "", ""]
    over = ratios(entry, entries)
    beside = [
        "" if entry["way"] in OURS or way not in over else f"{over[way]:.2f} x" for way in OURS
    ]
    peak = entry.get("peak_bytes")
    return [
        *named,
        _seconds_text(entry),
        *beside,
        _bar_text(entry, over),
        _micro_batch_text(entry),
        f"{peak / 2**30:.1f} GiB" if peak else "",
    ]


HEAD = (
    "model",
    "completions",
    "way",
    "s per update",
    "over BF16 here",
    "over NVFP4 here",
    "bar, over BF16",
    "micro-batch",
    "peak",
)


def record_lines(record: Mapping[str, Any]) -> list[str]:
    """Return a record's part of the page."""
    entries = ordered(record["entries"])
    updates = [entry for entry in entries if entry["lengths"] != "sampled"]
    steps = [entry for entry in entries if entry["lengths"] == "sampled"]
    lines = [_heading(record, entries), ""]
    if updates:
        lines += _table(HEAD, [cells(entry, entries) for entry in updates])
    if steps:
        head = (
            "model", "way", "s per step", "rollout", "update", "tokens sampled",
            "s per 1,000 tokens", "over BF16 here", "over NVFP4 here",
        )  # fmt: skip
        lines += _table(head, [_step_cells(entry, entries) for entry in steps])
    return [*lines, *_losses(entries), "", _versions(entries), ""]


def page_lines(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the block of the page."""
    if not records:
        return ["Not measured yet on any device.", ""]
    return [line for record in records for line in record_lines(record)]


def written_into(text: str, lines: Sequence[str]) -> str:
    """Return a page's text with the block of peers, which it must have, replaced."""
    renewed, count = _BLOCK.subn(lambda m: "\n".join([m[1], *lines, m[3]]), text)
    if count != 1:
        raise ValueError(f"the page has {count} blocks of peers; it needs one")
    return renewed


def blessed_files(benchmarks: Path) -> list[Path]:
    """Return the blessed records of all devices."""
    return sorted(benchmarks.glob("*/peers.json"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _model(entry: Entry) -> str:
    return str(MODEL_LABELS.get(entry["model"], entry["model"]))


def _seconds_text(entry: Entry) -> str:
    seconds = entry["seconds"]
    return f"{entry['median']:.3g} ({min(seconds):.3g} to {max(seconds):.3g})"


def _bar_text(entry: Entry, over: Mapping[str, float]) -> str:
    bar = BARS.get((entry["model"], entry["lengths"]))
    if entry["way"] != "peft" or bar is None or "ours_bf16" not in over:
        return ""
    return f"at least {bar:g} x: {'met' if over['ours_bf16'] >= bar else 'missed'}"


def _micro_batch_text(entry: Entry) -> str:
    if entry.get("micro_batch_rows"):
        return f"{entry['micro_batch_rows']} rows"
    tokens = entry.get("micro_batch_tokens")
    return f"{tokens:,} tokens" if tokens else ""


def _step_cells(entry: Entry, entries: Sequence[Entry]) -> list[str]:
    named = [_model(entry), LABELS[entry["way"]]]
    if not is_measured(entry):
        return [*named, str(entry["failed"]), "", "", "", "", "", ""]
    over = ratios(entry, entries)
    return [
        *named,
        _seconds_text(entry),
        f"{statistics.median(entry['rollout_seconds']):.3g}",
        f"{statistics.median(entry['update_seconds']):.3g}",
        f"{statistics.fmean(entry['completion_tokens']):,.0f}",
        f"{cost(entry):.3g}",
        *("" if entry["way"] in OURS or way not in over else f"{over[way]:.2f} x" for way in OURS),
    ]


def _losses(entries: Sequence[Entry]) -> list[str]:
    """Return sentences on bars that are missed and on peers that are faster."""
    faster = [
        f"{LABELS[entry['way']]}, {_model(entry)}, {LENGTH_LABELS[entry['lengths']]}: "
        f"{over:.2f} times the time of {LABELS[way]}"
        for entry in entries
        if entry["way"] not in OURS
        for way, over in ratios(entry, entries).items()
        if over < 1
    ]
    missed = [
        f"{_model(entry)}, {LENGTH_LABELS[entry['lengths']]}"
        for entry in entries
        if is_measured(entry) and _bar_text(entry, ratios(entry, entries)).endswith("missed")
    ]
    lines = []
    if missed:
        lines += [f"Bars missed: {'; '.join(missed)}.", ""]
    if faster:
        return [*lines, f"Faster than this project: {'; '.join(faster)}."]
    return [*lines, "No peer that was run is faster than this project."]


def _heading(record: Mapping[str, Any], entries: Sequence[Entry]) -> str:
    measured = [entry for entry in entries if is_measured(entry)]
    counts = sorted({len(entry["seconds"]) for entry in measured})
    commits = dict.fromkeys(f"`{entry['commit'][:7]}`" for entry in entries)
    dates = sorted({entry["date"] for entry in entries})
    weights = dict.fromkeys(str(entry["weights"]) for entry in measured)
    return (
        f"**One {record['device']}, driver {record.get('driver') or 'none'}, {', '.join(dates)}, "
        f"commit {', '.join(commits)}.** Medians (smallest to largest) of "
        f"{' or '.join(map(str, counts)) or 'no'} steps; weights: {'; '.join(weights) or 'none'}."
    )


def _versions(entries: Sequence[Entry]) -> str:
    sides = []
    for side, here in (("this project", True), ("peers", False)):
        versions: dict[str, set[str]] = {}
        for entry in entries:
            if (entry["way"] in OURS) is here:
                for name, value in entry.get("packages", {}).items():
                    versions.setdefault(name, set()).add(value or "none")
        if versions:
            said = ", ".join(f"{name} {' or '.join(sorted(v))}" for name, v in versions.items())
            sides.append(f"{side}: {said}")
    return f"Versions: {'; '.join(sides)}." if sides else "Versions: none."
