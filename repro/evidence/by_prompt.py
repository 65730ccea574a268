"""Values by prompt, for comparisons that are paired by prompt and not by seed."""

from __future__ import annotations

from collections.abc import Sequence

from repro.evidence.record import Record


def means_by_prompt(records: Sequence[Record], metric: str) -> dict[int, float]:
    """Return {prompt: mean over the records} of the series `<metric>_by_prompt`.

    A prompt counts where every record has a value of it.
    """
    columns = [record.series.get(f"{metric}_by_prompt", []) for record in records]
    means = {}
    for prompt, values in enumerate(zip(*columns, strict=False)):
        present = [value for value in values if value is not None]
        if present and len(present) == len(columns):
            means[prompt] = sum(present) / len(present)
    return means
