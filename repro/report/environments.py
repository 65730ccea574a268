"""What made records, in words: commits, seeds, time, machine, packages."""

from __future__ import annotations

from collections.abc import Sequence

from repro.evidence.origins import commits_of, seeds_text
from repro.evidence.record import Record


def environment_lines(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return title and text of what made these records: commits, seeds, time, machine, packages."""
    sources = commits_of(records)
    dirty = {r.commit for r in records if r.dirty}
    commits = [
        f"`{commit}`{' with local changes' if commit in dirty else ''}"
        f"{f' ({seeds_text(of_commit)})' if len(sources) > 1 else ''}"
        for commit, of_commit in sources.items()
    ]
    return [
        ("Source commit", ", ".join(commits)),
        ("Seeds", ", ".join(map(str, sorted({r.seed for r in records})))),
        ("UTC", f"{min(r.started for r in records)} to {max(r.finished for r in records)}"),
        *(
            (title, "; ".join(sorted({_environment_text(key, r.environment.get(key))
                                      for r in records})))
            for title, key in _ENVIRONMENT.items()
        ),
    ]  # fmt: skip


_ENVIRONMENT = {
    "Python": "python",
    "Platform": "platform",
    "Processor": "cpu",
    "Memory": "memory_bytes",
    "GPU": "gpu",
    "Packages": "packages",
    "Torch": "torch",
    "Variables": "variables",
}


def _environment_text(key: str, value: object) -> str:
    if isinstance(value, dict) and "failed" in value:
        return f"could not be asked ({value['failed']})"
    if key == "memory_bytes" and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    if key == "gpu" and isinstance(value, list):
        return ", ".join(gpu.get("name", "unnamed") for gpu in value) or "none"
    if isinstance(value, dict):
        shown = [f"{name} {item}" for name, item in value.items() if item is not None]
        return ", ".join(shown) or "none"
    return str(value)
