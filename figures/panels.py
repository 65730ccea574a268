"""The paper's tables and figures as panels: their order, axes, names and what is drawn in them.

Axes and names are those of arXiv 2510.11696v1. Its numbers are not here: panels name cells of
`expected/paper/`. Nor are measurements: panels name targets, the best first. Where the paper's
model was not trained, a panel shows the largest pretrained one that was, if any, by its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A curve: its name in the paper's legend, this suite's arm, names in the paper's file."""

    name: str
    arm: str
    rows: tuple[str, ...]
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves or, without `series`, bars: a bar for each cell of the paper.

    Attributes
    ----------
    model
        The paper's; empty in a panel that the paper does not have.
    runs
        Names of targets, several that go together between blanks; the first with records count.
    metric, point
        Of bars metrics' names or quantities, of which the first that an arm has, and their point
        where columns do not say it. Curves are of a series. `size` and `sigma` are computed.
    files, cells, quantity
        Which cells of the paper: their files (else the picture's), how their rows (of bars:
        columns) or columns begin, and what they are of (bars).
    x, y
        Where the paper's axes begin and end.
    """

    title: str
    model: str
    unit: str
    runs: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()
    metric: str = "accuracy"
    point: str = ""
    files: tuple[str, ...] = ()
    cells: str = ""
    quantity: str = ""
    x: tuple[float, float] = (0.0, 1.0)
    y: tuple[float, float] = (0.0, 0.0)


_MINI = (
    "table1_1_5b",
    "table1_0_5b",
    "learning_coder_1_5b untrained_coder_1_5b",
    "learning_coder_0_5b untrained_coder_0_5b",
    "table1_coder_1_5b untrained_coder_1_5b",
    "table1_coder_0_5b untrained_coder_0_5b",
)
_3B, _7B, _14B, _32B = (f"Qwen2.5-{size}-Instruct" for size in ("3B", "7B", "14B", "32B"))
_FULL, _LORA, _NF4, _MXFP4, _NVFP4, _QERL = (
    Series(name=name, arm=arm, rows=tuple(rows), colour=colour)
    for name, arm, colour, *rows in (
        ("Float16-Full", "bf16_full", "full", "BF16 Full", "Full"),
        ("Float16-LoRA(r32)", "bf16_lora", "bf16", "BF16 LoRA", "BF16", "LoRA"),
        ("NF4-LoRA(r32)", "nf4_lora", "nf4", "NF4 LoRA", "NF4"),
        ("MXFP4-LoRA(r32)", "mxfp4_lora", "mxfp4", "MXFP4 LoRA", "MXFP4"),
        ("NVFP4-LoRA(r32)", "nvfp4_lora", "nvfp4", "NVFP4 LoRA", "NVFP4"),
        ("QeRL", "nvfp4_lora_aqn", "noise", "QeRL"),
    )
)
_PLAIN = replace(_LORA, name="LoRA")
_AQN = (replace(_QERL, name="w AQN"), replace(_NVFP4, name="w/o AQN"))


def _others(names: str, arms: str, rows: str, *values: str) -> tuple[Series, ...]:
    """Return a series for each value, which the templates have in braces."""
    return tuple(
        Series(
            name=names.format(value),
            arm=arms.format(value.replace("-", "")),
            rows=(rows.format(value),),
            colour=colour,
        )
        for value, colour in zip(values, ("nvfp4", "mxfp4", "nf4", "bf16"), strict=False)
    )


_SCHEDULES = _others("{} decay", "aqn_{}", "{}", "linear", "exponential", "cosine", "logarithmic")
_RANKS = _others("rank={}", "rank_{}", "rank {}", "16", "32", "64", "128")
_QERL_RATES = _others("QeRL(lr={})", "qerl_{}", "lr {}", "3e-5", "5e-6")
_LORA_RATES = _others("LoRA(lr={})", "lora_{}", "lr {}", "3e-5", "5e-6")
_UNITS = {"accuracy": "accuracy reward", "entropy": "entropy, nats", "sigma": "noise scale σ"}


def _curves(
    title: str,
    model: str,
    series: tuple[Series, ...],
    end: float,
    y: tuple[float, float],
    *runs: str,
    metric: str = "accuracy",
    cells: str = "",
) -> Panel:
    return Panel(
        title=title,
        model=model,
        unit=_UNITS[metric],
        runs=runs,
        series=series,
        metric=metric,
        cells=cells,
        x=(1.0 if metric == "sigma" else 0.0, end),
        y=y,
    )


def _bars(
    title: str, model: str, unit: str, metric: str, of: str, quantity: str, *runs: str, at: str = ""
) -> Panel:
    return Panel(
        title=title,
        model=model,
        unit=unit,
        runs=runs,
        metric=metric,
        point=at,
        cells=of,
        quantity=quantity,
    )


# As Fig. 11 names the arms.
METHODS = {"bf16_lora": "LoRA", "nf4_lora": "QLoRA", "nvfp4_lora": "QeRL"}
_RIGHT, _GSM8K, _RATE, _TIMES = "% right", "GSM8K, % right", "tokens/s", "times LoRA's speed"
_SIZES = (("3B", _3B), ("7B", _7B), ("14B", _14B), ("32B", _32B))
_ALL = "Qwen2.5-Instruct, 3B to 32B"
_BIGMATH = (("7B", _7B, "table2"), ("14B", _14B, "table2_14b"), ("32B", _32B, "table2_32b"))
_SETS = ("MATH500", "AIME24", "AIME25", "AMC23")
_SCORES = (*((name, f"accuracy_{name.lower()}") for name in _SETS), ("Avg", "accuracy"))
_TIMED = (("7B", _7B, "table3 table3_arms"), ("14B", _14B, "table3_14b"))
_SPEEDUPS = (
    ("model size", "GB", "size", "size", ""),
    ("speedup, batch 2", _TIMES, "speedup", "speedup_batch_2", "batch 2"),
    ("speedup, batch 4", _TIMES, "speedup", "speedup_batch_4", "batch 4"),
    ("speedup, batch 8", _TIMES, "speedup", "speedup_batch_8", "batch 8"),
)
# The suite's steps recompute activations, as the paper's "w/ GC" do.
_SPEED_TABLE = (
    ("Model size", "GB", "size", "size"),
    ("Throughput, rollout phase", _RATE, "rollout", "rollout"),
    ("Throughput, speedup", _TIMES, "rollout", "rollout_ratio_printed"),
    ("E2E RL speedup, w/o GC", _TIMES, "", "e2e_speedup"),
    ("E2E RL speedup, w/ GC", _TIMES, "speedup", "e2e_speedup_checkpointed"),
    ("E2E RL, w/ GC", "seconds per step", "step_seconds", "e2e_seconds_checkpointed"),
)
_STEPS = {"table5": "table3_3b", "table6": "table3", "table7": "table3_14b", "table8": "table3_32b"}
_ARMS, _TOKENS, _BATCH_8 = "table3_arms", "tokens_per_second", "batch 8"
_SMALLER, _E2E = "Not in the paper: a smaller model", "End-to-end speed"
_HIGH, _WIDE, _LOW, _WHOLE = (0.25, 0.85), (0.0, 0.6), (0.05, 0.5), (0.15, 0.95)
_FLAT = (0.1, 0.3)
_FORMATS, _THREE, _BOTH = (_NVFP4, _NF4, _MXFP4, _LORA), (_FULL, _QERL, _PLAIN), (_QERL, _PLAIN)
_COMPARED = (
    ("NVFP4", (_NVFP4, _LORA, _FULL)),
    ("MXFP4", (_MXFP4, _LORA, _FULL)),
    ("NF4", (_NVFP4, _MXFP4, _NF4)),
)
_RANKED = replace(
    _bars("", "", _RATE, "rollout", "", "rollout", "figure11 table9"), files=("figure11", "table9")
)
# A target and a panel of its picture.
_PANELS = (
    ("table1", _bars(f"(a) {_3B}", _3B, _GSM8K, "accuracy", "3B", "accuracy", "table1_3b")),
    ("table1", _bars(f"(b) {_7B}", _7B, _GSM8K, "accuracy", "7B", "accuracy", "table1")),
    ("table1", _bars(_SMALLER, "", _GSM8K, "test_late accuracy", "7B", "accuracy", *_MINI)),
    *(
        ("table2", _bars(f"{size}: {name}", model, _RIGHT, metric, size, name, runs))
        for size, model, runs in _BIGMATH
        for name, metric in _SCORES
    ),
    *(
        ("table3", _bars(f"{size}: {title}", model, unit, metric, size, quantity, runs, at=at))
        for size, model, runs in _TIMED
        for title, unit, metric, quantity, at in _SPEEDUPS
    ),
    *(
        (name, _bars(title, model, unit, metric, size, quantity, f"{name} {steps}"))
        for (size, model), (name, steps) in zip(_SIZES, _STEPS.items(), strict=True)
        for title, unit, metric, quantity in _SPEED_TABLE
    ),
    ("table9", _bars("BF16 (Tokens/s)", _ALL, _RATE, "rollout", "BF16", "rollout", "table9")),
    ("table9", _bars("NVFP4 (Tokens/s)", _ALL, _RATE, "rollout", "NVFP4", "rollout", "table9")),
    ("figure1", _bars("Rollout", _7B, _RATE, _TOKENS, "7B", "rollout", _ARMS, at=_BATCH_8)),
    ("figure1", _bars(_E2E, _7B, _TIMES, "speedup", "7B", "e2e_speedup", _ARMS, at=_BATCH_8)),
    ("figure1", _bars("GSM8K", _7B, _RIGHT, "accuracy", "7B", "GSM8K", "table1")),
    ("figure1", _bars("MATH 500", _7B, _RIGHT, "accuracy_math500", "7B", "MATH500", "table2")),
    *(
        ("figure4", _curves(f"{loss}: {title}", _7B, series, 200, _WHOLE, *runs, cells=loss))
        for loss, *runs in (("DAPO", "figure4_bigmath"), ("GRPO", "figure4", *_MINI))
        for title, series in _COMPARED
    ),
    ("figure5", _curves("Entropy", _7B, _FORMATS, 200, _FLAT, "figure5", *_MINI, metric="entropy")),
    ("figure7", _curves("Qwen2.5 7B", _7B, _THREE, 300, _WIDE, "table2", *_MINI, cells="7B")),
    ("figure7", _curves("Qwen2.5 14B", _14B, _THREE, 300, _WIDE, "table2_14b", cells="14B")),
    ("figure8", _curves("Qwen2.5 3B", _3B, _AQN, 100, _HIGH, "figure8_3b", *_MINI, cells="3B")),
    ("figure8", _curves("Qwen2.5 7B", _7B, _AQN, 300, _LOW, "table2", cells="7B")),
    ("figure9", _curves("Noise schedulers", _3B, _SCHEDULES, 150, _HIGH, "figure9_3b")),
    ("figure10", _curves("LoRA rank", _3B, _RANKS, 150, _HIGH, "figure10_3b")),
    ("figure11", replace(_RANKED, title=_14B, model=_14B, cells="14B")),
    ("figure11", replace(_RANKED, title=_32B, model=_32B, cells="32B")),
    ("figure12", _curves("Problem level: 3~5", _7B, _BOTH, 600, _WIDE, "figure12")),
    ("figure13", _curves("Problem level: 4~5", _32B, _BOTH, 250, _WIDE, "figure13")),
    ("figure14", _curves("Entropy", _14B, _BOTH, 600, (0.2, 0.5), "figure14", metric="entropy")),
    ("figure15", _curves("Noise schedulers", "", _SCHEDULES, 10, (0, 0.06), metric="sigma")),
    ("figure16", _curves("Learning rate in QeRL", _7B, _QERL_RATES, 200, (0.35, 0.95), "figure16")),
    ("figure17", _curves("Learning rate in LoRA", _7B, _LORA_RATES, 200, (0.2, 1.0), "figure17")),
)
# The panels of each target's picture.
PICTURES = {
    name: tuple(panel for of, panel in _PANELS if of == name)
    for name in dict.fromkeys(of for of, _ in _PANELS)
}
