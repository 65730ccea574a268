"""What the page of learning says of the runs themselves: sizes, limits, each seed's end, rates.

All of it from records: where the policies start and could end, which runs had not finished, at
which learning rate. `repro.report.learning` puts it beside the verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from repro.evidence.environment import device_of
from repro.evidence.origins import commits_of, seeds_text
from repro.evidence.record import Record
from repro.judge.check import Checked
from repro.report.numbers import cell_text, device_title, number
from repro.report.tables import table
from repro.spec.config import LearningRates
from repro.targets import TARGETS, find
from repro.targets.chosen_rates import EVERY_ARM, TIE_ERRORS
from repro.targets.proxy import PROXY_SWEEP
from repro.targets.table1 import BF16_FULL

# A run that rose by more than this between its last two evaluations had not finished.
RISING_POINTS = 5.0
# Of a policy's quality (`repro.evaluate.quality`), in the order of the table's heads.
_SHOWN_AND_KNOWN = (
    "forced_working",
    "sampled_mean",
    "sampled_pass",
    "working",
    "given_working",
    "given_careless",
)
# A run that ended further than this below the ceiling had not learnt all that there was.
SHORT_POINTS = 10.0

Runs = dict[tuple[str, str], dict[int, Record]]


def runs_of_checks(checks: Sequence[Checked]) -> Runs:
    """Return the usable records by (target that recorded them, arm), then seed; each once."""
    by_arm: Runs = {}
    for checked in checks:
        for records in checked.evidence.records.values():
            for record in records.values():
                by_arm.setdefault((record.target, record.arm), {})[record.seed] = record
    return by_arm


def what_was_run(runs: Runs) -> list[str]:
    """Return a sentence on policies, sizes and seeds, from the records' own configurations."""
    every = [record for records in runs.values() for record in records.values()]
    trained = [record for record in every if record.value("gain_greedy") is not None]
    if not trained:
        return []
    scales = [record.config["scale"] for record in trained]

    def listed(values: Sequence[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values))

    commits = listed([f"`{commit[:12]}`" for commit in commits_of(every)])
    plural, several = ("s", " (which seeds from which: below)") if "," in commits else ("", "")
    seeds = seeds_text(record.seed for record in every)
    policies = [scale["checkpoint"] for scale in scales]
    return [
        f"{len(every)} runs ({len(trained)} trained), {seeds}, on "
        f"{listed([device_title(device_of(r.environment) or '') for r in every])}, source "
        f"commit{plural} {commits}{several}: "
        f"{listed([f'`{name}`' for name in policies])}, "
        f"{listed([scale['steps'] for scale in scales])} steps of "
        f"{listed([scale.get('prompts_per_rollout') for scale in scales])} prompts with "
        f"{listed([scale.get('group_size') for scale in scales])} completions, problems of "
        f"{listed([_levels(scale) for scale in scales])}.",
        "",
    ]


@dataclass(frozen=True, slots=True)
class Setting:
    """Runs of one policy on problems of the same levels, trained or not: what may share a ceiling.

    Attributes
    ----------
    name
        Policy and levels, in words.
    every
        All of its records.
    trained
        Those trained on the task's reward, or on worked solutions.
    """

    name: str
    every: list[Record]
    trained: list[Record]

    def mean(self, metric: str) -> float | None:
        """Return the mean of a metric over the records that have it."""
        values = [v for record in self.every if (v := record.value(metric)) is not None]
        return fmean(values) if values else None

    @property
    def ceiling(self) -> float | None:
        """Greedy accuracy of the untrained policy when it is made to begin with its working."""
        return self.mean("accuracy_forced_working")


def settings_of(runs: Runs) -> list[Setting]:
    """Return the settings in which runs were trained, the one with the most runs first."""
    by_name: dict[str, list[Record]] = {}
    for records in runs.values():
        for record in records.values():
            scale = record.config["scale"]
            by_name.setdefault(f"`{scale['checkpoint']}` on {_levels(scale)}", []).append(record)
    settings = [
        Setting(name=name, every=every, trained=[r for r in every if _is_compared(r)])
        for name, every in sorted(by_name.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return [setting for setting in settings if setting.trained]


def limits(runs: Runs) -> list[str]:
    """Return what limits the verdicts, as a list, with the numbers that show it."""
    settings = settings_of(runs)
    if not settings:
        return []
    known = [setting for setting in settings if setting.ceiling is not None]
    lines = _habit(known)
    lines += _no_ceiling([setting for setting in settings if setting.ceiling is None])
    lines += _unfinished(settings, known)
    return [*lines, *_few(settings)]


def _habit(known: Sequence[Setting]) -> list[str]:
    said = [
        f"{start:.0f} % as it is and {setting.ceiling:.0f} % if made to begin with its working "
        f"({setting.name})"
        for setting in known
        if (start := setting.mean("accuracy_greedy_start")) is not None
    ]
    if not said:
        return []
    before = _lengths(
        [r for s in known for r in s.every if r.value("accuracy_forced_working") is not None]
    )
    after = _lengths([record for setting in known for record in setting.trained])
    return [
        "- **What is learnt is mostly a habit.** Before training, a policy's greedy accuracy is "
        f"{', '.join(said)}. Training mostly teaches it to write the working out (completions grow "
        f"from {before} to {after} tokens), so all arms have the same ceiling and differ in how "
        "soon they come near it."
    ]


def _no_ceiling(settings: Sequence[Setting]) -> list[str]:
    said = [
        f"{start:.0f} to {end:.0f} % ({setting.name})"
        for setting in settings
        if (start := setting.mean("accuracy_greedy_start")) is not None
        and (end := setting.mean("accuracy_greedy")) is not None
    ]
    if not said:
        return []
    return [
        "- **Where the ceiling is not known.** Greedy accuracy rose from "
        f"{', from '.join(said)}; no untrained policy was made to begin with its working there."
    ]


def _unfinished(settings: Sequence[Setting], known: Sequence[Setting]) -> list[str]:
    trained = [record for setting in settings for record in setting.trained]
    rising = sum(_last_rise(record) > RISING_POINTS for record in trained)
    measured = [(s.ceiling or 0.0, r) for s in known for r in s.trained]
    short = sum(
        (record.value("accuracy_greedy") or 0.0) < ceiling - SHORT_POINTS
        for ceiling, record in measured
    )
    return [
        f"- **Who had not finished.** {rising} of {len(trained)} trained runs rose by more than "
        f"{RISING_POINTS:.0f} points between their last two held-out evaluations, and {short} of "
        f"{len(measured)} ended more than {SHORT_POINTS:.0f} points below a known ceiling. Where "
        "only some runs of an arm have taken off, its final accuracies lie far apart and the "
        "intervals are wide."
    ]


def _few(settings: Sequence[Setting]) -> list[str]:
    swept = PROXY_SWEEP.checkpoint
    # An arm with a rate of its own has it from a sweep of its own.
    policies = dict.fromkeys(
        record.config["scale"]["checkpoint"]
        for setting in settings
        for record in setting.trained
        if record.config["arm"].get("learning_rate") is None
    )
    lines = [
        "- **Small policies, few seeds.** All seeds of a comparison share one pre-trained policy"
        f"{_several(settings)}, one set of test problems and {_roundings(settings)}: intervals are "
        "over the chance of "
        "training and sampling, of an untrained policy over sampling alone. Nothing here is about "
        "the paper's models or its percentages; more seeds or steps can change a verdict."
    ]
    others = [f"`{name}`" for name in policies if name != swept]
    if others:
        lines.append(
            f"- **Rates of another policy.** {', '.join(others)} trained at the rates that the "
            f"sweep chose for `{swept}` (below)."
        )
    return lines


def _several(settings: Sequence[Setting]) -> str:
    """Return which comparisons were made on policies of several pre-training seeds, in brackets."""
    recorded = {record.target for setting in settings for record in setting.trained}
    exceptions = []
    for target in TARGETS:
        homes = {target.home(arm.name)[0].name for arm in target.arms}
        over_policies = any(claim.paired_by == "pre-training seed" for claim in target.claims)
        if over_policies and homes <= recorded:
            exceptions.append(f"`{target.name}`, which has {len(homes)}")
    return f" (but for {', '.join(exceptions)})" if exceptions else ""


def _roundings(settings: Sequence[Setting]) -> str:
    """Return how often the runs have drawn each format's rounding, in words."""
    scales = [record.config["scale"] for setting in settings for record in setting.trained]
    drawn = dict.fromkeys(f"`{s['checkpoint']}`" for s in scales if s.get("permuted"))
    where = f" (on {', '.join(drawn)} one per seed)" if drawn else ""
    return f"one rounding per format{where}"


def ends(runs: Runs) -> list[str]:
    """Return the table of every seed's final accuracy, beside its arm's learning rate."""
    seeds = sorted({seed for records in runs.values() for seed in records})
    rows = []
    for (target, arm), records in sorted(runs.items(), key=_place):
        values = {seed: record.value("accuracy") for seed, record in records.items()}
        if all(value is None for value in values.values()):
            continue
        cells = [find(target).arm(arm).label, f"`{target}`", rate_text(records.values())]
        cells += ["-" if (v := values.get(seed)) is None else f"{v:.1f}" for seed in seeds]
        for name in ("accuracy", "heldout_area", "accuracy_hard", "accuracy_human"):
            known = [v for record in records.values() if (v := record.value(name)) is not None]
            cells.append(cell_text(known, n=False))
        rows.append(cells)
    heads = ["arm", "runs of", "learning rate", *(f"seed {seed}" for seed in seeds), "mean"]
    heads += ["held-out, mean over the tokens", "level 5", "human-written"]
    caption = (
        "Accuracy in percent on the generated test problems, sampled as the claims have it; means "
        "± half of the 95 % t interval."
    )
    return [caption, "", *table(heads, rows)] if rows else []


def _place(item: tuple[tuple[str, str], object]) -> tuple[bool, str, int]:
    """Return where an arm's row stands: Table 1's first, in their target's order."""
    target, arm = item[0]
    return target != "table1", target, [each.name for each in find(target).arms].index(arm)


def rate_text(records: Any) -> str:
    """Return the learning rate that the runs of an arm had, as their own series have it."""
    rates_shown = {
        f"{max(present):.2g}"
        for record in records
        if (present := [v for v in record.series.get("learning_rate", []) if v is not None])
    }
    return ", ".join(sorted(rates_shown))


def rates(choice: Mapping[str, Any] | None) -> list[str]:
    """Return how the learning rates were chosen, and what follows for comparisons."""
    if choice is None:
        return ["No sweep has been made at this scale.", ""]
    lines = [
        f"Chosen by a sweep on tuning seeds of its own ({choice['records']} runs, source commit "
        f"{', '.join(f'`{commit[:12]}`' for commit in choice['commits'])}); rule: "
        f"{choice['rule']}. Where the sweep gave compared arms different rates, a statement "
        "carries a † : it then compares formats *and* rates.",
        "",
    ]
    rows: list[list[str]] = []
    tied, lowest = [], []
    for key, rate in choice["chosen"].items():
        by_rate = sorted(choice["means"][key].items(), key=lambda item: float(item[0]))
        means = ", ".join(f"{float(name):.2g}: {mean:.1f}" for name, mean in by_rate)
        error = choice["errors"][key]
        rows.append([key, f"{rate:.2g}", means, f"{error:.2g}"])
        least = max(mean for _, mean in by_rate) - TIE_ERRORS * error
        tied += [key] * (sum(mean >= least for _, mean in by_rate) > 1)
        lowest += [key] * (by_rate[0][0] == f"{rate:g}")
    heads = ["what is trained", "chosen", "held-out accuracy at the end, by rate"]
    lines += table([*heads, "its error, points"], rows)
    if tied:
        lines += [
            f"For {', '.join(tied)} the sweep cannot tell the best rate from another: a tie, and "
            "the smallest of them was taken.",
            "",
        ]
    if lowest:
        lines += [
            f"For {', '.join(lowest)} the chosen rate is the smallest that was tried: a smaller "
            "one may serve as well or better.",
            "",
        ]
    return lines


def policies(records: Sequence[Record]) -> list[str]:
    """Return the table of what pre-trained policies show and know; nothing without records."""
    rows = []
    for record in records:
        if not record.ok:
            continue
        quality = record.effects["quality"]
        values = [
            quality["greedy"],
            quality["greedy_by_level"].get("5"),
            *(quality[name] for name in _SHOWN_AND_KNOWN),
        ]
        cells = ["" if value is None else number(value) for value in values]
        rows.append([f"`{record.effects['name']}`", *cells, f"`{record.commit[:12]}`"])
    if not rows:
        return []
    heads = ["policy", "greedy", "greedy, level 5", "working forced"]
    heads += ["mean of 4 samples", "pass@4", "works", "right where it works"]
    heads += ["right where it does not", "source commit"]
    return [
        "In percent, on 1000 generated problems of levels 1 to 5 that no policy was trained on, "
        "before any reinforcement learning. *Working forced*: greedy, made to begin with its "
        "working, which is what a policy knows; *greedy* is what it shows. Samples are drawn at "
        "temperature 1. How far each format moves a policy (KL) is in the picture of doses above.",
        "",
        *table(heads, rows),
    ]


def rate_of_the_ladder(choice: Mapping[str, Any] | None) -> list[str]:
    """Return at which rate the ladder's arms train and why; nothing before it was chosen."""
    whose = {EVERY_ARM: "The ladder's arms all have"}
    where = "by a sweep of their own on the rung of 4 %"
    return _rates_of_sweep(choice, whose, where, "training reward, mean over the steps")


def rates_of_skill(choice: Mapping[str, Any] | None) -> list[str]:
    """Return the rates of `skill` and why; nothing before they were chosen."""
    whose = {
        LearningRates.key(BF16_FULL): "Full fine-tuning in `skill` has",
        EVERY_ARM: "The arms with LoRA in `skill` all have",
    }
    return _rates_of_sweep(
        choice, whose, "by a sweep at that scale", "accuracy of sampled answers at the end"
    )


def _rates_of_sweep(
    choice: Mapping[str, Any] | None, whose: Mapping[str, str], by: str, measured: str
) -> list[str]:
    """Return the rates that a sweep chose, of each key in `whose`; nothing before it did."""
    if choice is None:
        return []
    commits = ", ".join(f"`{commit[:12]}`" for commit in choice["commits"])
    lines = [
        f"{words} {choice['chosen'][key]:.2g}, {by}; {measured}, by rate: "
        + ", ".join(f"{float(rate):.2g}: {mean:.3g}" for rate, mean in choice["means"][key].items())
        + "."
        for key, words in whose.items()
        if key in choice["chosen"]
    ]
    made = f"Of {choice['records']} runs, source commit {commits}; rule: {choice['rule']}."
    return [*(item for line in lines for item in (line, "")), made, ""]


def _levels(scale: Mapping[str, Any]) -> str:
    """Return the levels of a scale's problems in words, such as `levels 3, 4 and 5`."""
    *first, last = map(str, scale["data"]["levels"])
    return f"levels {', '.join(first)} and {last}" if first else f"level {last}"


def _is_compared(record: Record) -> bool:
    """Whether a run was trained on the task's reward: no control of the reward."""
    return record.value("gain_greedy") is not None and record.config["arm"]["reward"] in (
        "task",
        "answer",
    )


def _last_rise(record: Record) -> float:
    """Return the points that the held-out accuracy rose by between the last two evaluations."""
    values = [value for value in record.series.get("evaluation_accuracy", []) if value is not None]
    return values[-1] - values[-2] if len(values) > 1 else 0.0


def _lengths(records: Sequence[Record]) -> str:
    lengths = [v for record in records if (v := record.value("completion_tokens_mean")) is not None]
    return f"{fmean(lengths):.0f}" if lengths else "?"
