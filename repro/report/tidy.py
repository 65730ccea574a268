"""One tidy table of the results of checks, which pages, pictures and other readers use.

`statements` has a row per target, tier, device and claim or bar; `values` one per target, tier,
device, arm, seed and metric. `python -m repro check --table` writes both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from repro.evidence.store import csv_text
from repro.evidence.verdicts.expectation import Expectation
from repro.evidence.verdicts.verdict import Status, Verdict
from repro.judge.check import Checked
from repro.report.doses import ENTROPY, doses, treatment
from repro.report.numbers import bar_text, quantity
from repro.report.systems_rates import comparisons, printed_speedup
from repro.report.tables import in_cell, plain
from repro.report.verdict_words import kind_of, labelled, stated_bars
from repro.run.listing import title_of
from repro.spec.config import TrainScale
from repro.spec.target import Target
from repro.spec.throughput_scale import ThroughputScale
from repro.spec.whole_files import replace_files
from repro.targets import TARGETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claim or bar with its verdict.

    Attributes
    ----------
    device
        As folders spell it; `cpu` where records name no GPU.
    kind
        What the statement is about, in the words of `repro.report.verdict_words.Kind`.
    verdict
        The status in the words of its kind, marks and q with it.
    treatment
        For targets that measure a dose: whether the paper's was delivered. Else empty.
    effect, low, high, unit, n, p, q, matters
        As in `repro.evidence.verdicts.verdict.Verdict`.
    marks
        Why the verdict has the marks that follow its word, such as *post hoc*; most have none.
    paper
        The paper's value in the same unit; None where it prints none.
    model, kernels
        The checkpoint with its data, or the size; and whose products multiplied, arm by arm.
    """

    target: str
    title: str
    tier: str
    device: str
    kind: str
    name: str
    statement: str
    source: str
    status: Status
    verdict: str
    treatment: str
    effect: float | None
    low: float | None
    high: float | None
    unit: str
    n: int
    p: float | None
    q: float | None
    paper: float | None
    matters: float | None
    marks: str
    model: str
    kernels: str
    arms: str
    metric: str
    because: str
    command: str


_VALUE = ("target", "tier", "device", "arm", "seed", "repeat", "metric", "value", "unit")
_FORMS = {"points": "+.1f", "nats": "+.3f", "share": "+.3f"}


def _with_unit(number: str, unit: str) -> str:
    short = {"ratio": "x", "percent": "%", "seconds": "s"}.get(unit, unit)
    return f"{number}x" if short == "x" else f"{number} {short}".strip()


def effect_text(row: Row | Verdict) -> str:
    """Return `1.79x (1.78 to 1.79)`, without an interval where there is none."""
    if row.effect is None:
        return ""
    if row.unit == "bytes":
        return quantity(row.effect, row.unit)
    ratio = row.unit in ("ratio", "x")
    form = ".2f" if ratio else _FORMS.get(row.unit, ".4g")
    text = _with_unit(f"{row.effect:{form}}", row.unit)
    if row.low is None or row.high is None:
        return text
    return f"{text} ({row.low:{form}} to {row.high:{form}})"


def paper_text(row: Row | Verdict) -> str:
    """Return the paper's value with its unit, empty where it prints none."""
    return "" if row.paper is None else _with_unit(f"{row.paper:.3g}", row.unit)


def statements(checks: Sequence[Checked], expected: Path) -> list[Row]:
    """Return a row per claim or bar of the checks."""
    return [row for checked in checks for row in _of_check(checked, expected)]


def _of_check(checked: Checked, expected: Path) -> list[Row]:
    target = checked.selection.target
    claims = {claim.name: claim for claim in target.claims}
    bars = {
        (v.name, v.source): _bar_statement(bar, target) for bar, v in stated_bars(checked, expected)
    }
    pairs = {i.verdict.name: i for i in comparisons(checked, expected) if i.verdict is not None}
    dosed = doses(checked) if checked.evidence.values(ENTROPY) else {}
    given = {arm: treatment(of.rise, expected) for arm, of in dosed.items() if of.is_plain}
    source, tier = checked.selection.source.name, checked.selection.tier.value
    known = any(one.name == source for one in TARGETS)
    command = f"python -m repro reproduce {source} --tier {tier}" if known else ""
    every = product(target.arms, target.metrics)
    of_bars = {f"{arm.name}.{metric.name}": ((arm.name,), metric.name) for arm, metric in every}
    rows = []
    for verdict in checked.verdicts:
        claim = claims.get(verdict.name) if verdict.about in ("claim", "mechanism") else None
        arms, metric = (claim.arms, claim.metric) if claim else of_bars[verdict.name]
        paper = verdict.paper
        if paper is None and verdict.about == "claim" and verdict.name in pairs:
            paper = pairs[verdict.name].paper
        elif paper is None:
            paper = printed_speedup(target.metric(metric), arms[0], target.paper_file, expected)
        rows.append(
            Row(
                **_place(checked),
                title=title_of(target),
                kind=kind_of(verdict).value,
                statement=bars.get((verdict.name, verdict.source), verdict.statement),
                verdict=labelled(verdict),
                treatment=given.get(arms[0], ""),
                **{name: getattr(verdict, name) for name in _ALIKE},
                marks=". ".join(verdict.marks.values()),
                paper=paper,
                model=_model(checked, metric),
                kernels=_kernels(checked, arms),
                arms=" ".join(arms),
                metric=metric,
                because=verdict.sentence,
                command=command,
            )
        )
    return rows


def _bar_statement(bar: Expectation, target: Target) -> str:
    """Return `BF16, LoRA: peak memory: at most 32.0 GiB (34.4 GB)`; a lone arm is not named."""
    metric, label = target.metric(bar.metric), target.arm(bar.arm).label
    arm = f"{label}: " if len(target.arms) > 1 else ""
    return f"{arm}{metric.title}: {bar_text(bar, metric.unit)}"


_ALIKE = ("name", "source", "status", "effect", "low", "high", "unit", "n", "p", "q", "matters")


def _place(checked: Checked) -> dict[str, Any]:
    selection = checked.selection
    device = checked.evidence.device or ("cpu" if checked.evidence.count else "")
    return {"target": selection.target.name, "tier": selection.tier.value, "device": device}


def _model(checked: Checked, metric: str) -> str:
    scale = checked.selection.source.scales.get(checked.selection.tier)
    if isinstance(scale, TrainScale):
        return f"{scale.checkpoint} on {scale.data.source}"
    return checked.selection.target.metric(metric).model.upper()


def _kernels(checked: Checked, arms: Sequence[str]) -> str:
    """Return whose matrix products the arms used, in their order, said once where alike."""
    target, tier = checked.selection.target, checked.selection.tier
    scale: Any = checked.selection.source.scales.get(tier)
    own = "this project's" if checked.evidence.device else "torch, dequantised"
    whose = {"own": own, "kernels": own, "dequantised": "torch, dequantised"}
    by_name = {arm.name: arm for arm in target.arms}
    names = []
    for arm in (by_name[name] for name in arms if name in by_name):
        timed = isinstance(scale, ThroughputScale)
        linears = scale.products(arm.name) if timed else getattr(arm, "linears", "own")
        names.append("torch" if arm.weight_format == "bf16" else whose.get(linears, linears))
    return " over ".join(dict.fromkeys(names))


def values(checks: Sequence[Checked]) -> list[dict[str, Any]]:
    """Return a row (`_VALUE`) per arm, seed, timed repeat (else None) and metric of records."""
    rows: list[dict[str, Any]] = []
    for checked in checks:
        target, tier = checked.selection.target, checked.selection.tier
        for metric in target.metrics_at(tier):
            for arm, by_pair in checked.evidence.values(metric.name).items():
                for pair, value in by_pair.items():
                    seed, repeat = pair if isinstance(pair, tuple) else (pair, None)
                    rows.append(
                        _place(checked)
                        | {"arm": arm, "seed": seed, "repeat": repeat, "metric": metric.name}
                        | {"value": value, "unit": metric.unit}
                    )
    return rows


def write_table(checks: Sequence[Checked], expected: Path, name: str) -> None:
    """Write the statements to FILE.csv, the values to FILE.values.csv; `-` prints the former."""
    rows = map(dataclasses.astuple, statements(checks, expected))
    first = csv_text([field.name for field in dataclasses.fields(Row)], rows)
    if name == "-":
        print(first, end="")  # noqa: T201
        return
    path = Path(name)
    second = csv_text(_VALUE, ([row[name] for name in _VALUE] for row in values(checks)))
    both = {path: first, path.with_suffix(".values.csv"): second}
    replace_files({file: text.encode() for file, text in both.items()})
    print(f"wrote {path}")  # noqa: T201


@cache
def templates() -> Environment:
    """Return the templates of pages; those of HTML escape their values."""
    environment = Environment(
        loader=PackageLoader("repro.report"),
        autoescape=lambda name: bool(name and name.endswith(".html")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(cell=in_cell, plain=plain, effect=effect_text, labelled=labelled)
    environment.filters["paper"] = paper_text
    return environment


def rendered(template: str, **given: Any) -> list[str]:
    """Return the lines of a Markdown template filled with the given values."""
    text = templates().get_template(template).render(**given)
    return text.strip("\n").split("\n")
