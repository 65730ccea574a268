"""Values as text: a number, a mean with its interval, a bar, a device's name, what made records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from repro.evidence.estimate import mean_interval
from repro.evidence.origins import CHANGED, commits_of, is_changed, seeds_text
from repro.evidence.record import Record
from repro.evidence.verdicts.expectation import Expectation

# A unit's sign as it follows a number; bytes are printed in 2^30 of them.
_SIGNS = {"bytes": " GiB", "seconds": " s", "tokens per second": " tokens/s", "ratio": "x"}
# Units that a table's head names once, and that a table of mixed units writes in each cell.
_NAMED_ONCE = {"percent": " %", "nats": " nats", "rows": " rows"}


def number(value: float) -> str:
    """Return a number with three digits or one decimal place, whichever is more."""
    if value == 0 or abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit: `32.9 GiB (35.3 GB)`, `9.81 s`, `412 ms`.

    Units that a table's head names once (percent, points, nats, reward) are left out.
    """
    if unit == "seconds" and 0 < abs(value) < 0.1:
        return f"{number(value * 1e3)} ms"
    if unit == "bytes" and abs(value) < 2**20:
        return f"{value:.0f} B"
    if unit == "bytes":
        return f"{number(value / 2**30)} GiB ({number(value / 1e9)} GB)"
    if unit == "tokens per second":
        return f"{value:,.0f} tokens/s"
    return f"{number(value)}{_SIGNS.get(unit, '')}"


def cell_text(values: Sequence[float], *, n: bool = True, unit: str = "") -> str:
    """Return mean, half-width of the 95 % interval and number of seeds; a dash without values."""
    if not values:
        return "-"
    interval = mean_interval(values)
    count = f" (n = {interval.n})" if n else ""
    if interval.high is None:
        return f"{quantity(interval.value, unit)}{count}"
    size = 2.0**30 if unit == "bytes" else 1.0
    mean, half = interval.value / size, (interval.high - interval.value) / size
    digits = f"{half:.1f}" if abs(mean) >= 10 or mean == 0 else f"{half:.2g}"
    return f"{number(mean)} ± {digits}{_SIGNS.get(unit, '')}{count}"


def span(values: Iterable[float | None]) -> str:
    """Return `1.59 to 2.54x`, one number where all are the same, empty without any."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return f"{low}x" if low == high else f"{low} to {high}x"


def bar_text(bar: Expectation, unit: str) -> str:
    """Return the accepted interval of a bar as text: `at least 1.5x`."""
    named = _NAMED_ONCE.get(unit)
    low, high = (
        None if end is None else f"{end:.4g}{named}" if named else quantity(end, unit)
        for end in bar.accept
    )
    if low is None:
        return f"at most {high}"
    if high is None:
        return f"at least {low}"
    return f"exactly {low}" if low == high else f"{low} to {high}"


def device_title(device: str) -> str:
    """Return a device's name as people write it: `NVIDIA H200` for `nvidia_h200`, else `CPU`."""
    return device.replace("_", " ").upper().replace(" PORTABLE", ", portable kernels") or "CPU"


# Parts of a device's name besides its model: vendor, memory, form.
_BESIDE_MODEL = re.compile(r"nvidia|\d+gb|hbm\d?e?|sxm\d?|pcie|nvl")


def device_heads(devices: Iterable[str]) -> dict[str, str]:
    """Return devices' names for heads of columns: the models alone where these differ (`H200`)."""
    every = list(devices)
    models = {}
    for device in every:
        model = [part for part in device.split("_") if not _BESIDE_MODEL.fullmatch(part)]
        models[device] = device_title("_".join(model) or device)
    differ = len(set(models.values())) == len(every)
    return models if differ else {device: device_title(device) for device in every}


def environment_lines(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return title and text of what made these records: commits, seeds, time, machine, packages."""
    sources = commits_of(records)
    dirty = {r.commit for r in records if is_changed(r)}
    commits = [
        f"`{commit}`{f', {CHANGED}' if commit in dirty else ''}"
        f"{f' ({seeds_text(of_commit)})' if len(sources) > 1 else ''}"
        for commit, of_commit in sources.items()
    ]
    return [
        ("Source commit", ", ".join(commits)),
        ("Seeds", ", ".join(map(str, sorted({r.seed for r in records})))),
        ("UTC", f"{min(r.started for r in records)} to {max(r.finished for r in records)}"),
        *((title, _environment_texts(key, records)) for title, key in _ENVIRONMENT.items()),
    ]


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


def _environment_texts(key: str, records: Sequence[Record]) -> str:
    texts = {_environment_text(key, record.environment.get(key)) for record in records}
    return "; ".join(sorted(texts))


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
