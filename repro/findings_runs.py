"""What the page of findings says of the runs themselves: sizes, limits, each seed's end, rates.

All of it from records: where the policies start and could end, who had not finished, at which
learning rate. `repro.findings` puts it beside the verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from repro.check import Checked
from repro.evidence.environment import device_of
from repro.evidence.origins import commits_of
from repro.evidence.record import Record
from repro.report_tables import cell_text
from repro.targets import find
from repro.targets.chosen_rates import TIE_ERRORS

# A run that rose by more than this between its last two evaluations had not finished.
RISING_POINTS = 5.0
# A run that ended further than this below the ceiling had not learnt all that there was.
SHORT_POINTS = 10.0

Runs = dict[tuple[str, str], dict[int, Record]]


def runs_of_checks(checks: Sequence[Checked]) -> Runs:
    """Return the usable records by (target that recorded them, arm), then seed; each once."""
    found: Runs = {}
    for checked in checks:
        for records in checked.evidence.records.values():
            for record in records.values():
                found.setdefault((record.target, record.arm), {})[record.seed] = record
    return found


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
    seeds = listed(sorted({record.seed for record in every}))
    return [
        f"{len(every)} runs ({len(trained)} trained), seeds {seeds}, on "
        f"{listed([device_of(record.environment) for record in every])}, source "
        f"commit{plural} {commits}{several}: "
        f"policy `{listed([scale['checkpoint'] for scale in scales])}`, "
        f"{listed([scale['steps'] for scale in scales])} steps of "
        f"{listed([scale.get('prompts_per_rollout') for scale in scales])} prompts with "
        f"{listed([scale.get('group_size') for scale in scales])} completions, problems of levels "
        f"{listed([' and '.join(map(str, scale['data']['levels'])) for scale in scales])}.",
        "",
    ]


def limits(runs: Runs) -> list[str]:
    """Return what limits the findings, as a list, with the numbers that show it."""
    every = [record for records in runs.values() for record in records.values()]
    trained = [record for record in every if _is_compared(record)]
    starts = [v for r in every if (v := r.value("accuracy_greedy_start")) is not None]
    ceilings = [v for r in every if (v := r.value("accuracy_forced_working")) is not None]
    lines = ["## What limits these findings", ""]
    if starts and ceilings:
        ceiling = fmean(ceilings)
        before = _lengths([r for r in every if r.value("accuracy_forced_working") is not None])
        lines.append(
            f"- **What is learnt is mostly a habit.** The policies start at {fmean(starts):.0f} % "
            f"(greedy); made to begin with their working, untrained, they reach {ceiling:.0f} %. "
            f"What training teaches is mostly to write the working out (completions grow from "
            f"{before} to {_lengths(trained)} tokens), so all arms have one ceiling, and differ in "
            "how soon they come near it."
        )
        short = [r for r in trained if (r.value("accuracy_greedy") or 0.0) < ceiling - SHORT_POINTS]
        rising = [r for r in trained if _last_rise(r) > RISING_POINTS]
        lines.append(
            f"- **Who had not finished.** {len(rising)} of {len(trained)} trained runs rose by "
            f"more than {RISING_POINTS:.0f} points between their last two held-out evaluations, "
            f"and {len(short)} ended more than {SHORT_POINTS:.0f} points below the ceiling. Where "
            "some runs of an arm have taken off and others have not, its final accuracies lie far "
            "apart, and the intervals are wide."
        )
    lines += [
        "- **One small policy, few seeds.** All seeds share one pre-trained policy and one set of "
        "test problems: intervals are over the chance of training and sampling, not over policies "
        "or problems; of an untrained arm over sampling alone. Nothing here is about the paper's "
        "models or its percentages; with more seeds or steps a verdict can change (the column says "
        "how many seeds would decide, were the effect as measured).",
        "",
    ]
    return lines if trained else []


def ends(runs: Runs) -> list[str]:
    """Return the table of every seed's final accuracy, beside its arm's learning rate."""
    lines = ["## Every seed's end", "", "Accuracy in percent on the generated test problems,"]
    lines[-1] += " sampled as the claims have it; means ± half of the 95 % t interval."
    seeds = sorted({seed for records in runs.values() for seed in records})
    heads = ["arm", "learning rate", *(f"seed {seed}" for seed in seeds), "mean"]
    heads += ["held-out, mean over the tokens", "level 5", "human-written"]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (target, arm), records in sorted(runs.items(), key=_place):
        values = {seed: record.value("accuracy") for seed, record in records.items()}
        if all(value is None for value in values.values()):
            continue
        cells = [find(target).arm(arm).label, rate_text(records.values())]
        cells += ["-" if (v := values.get(seed)) is None else f"{v:.1f}" for seed in seeds]
        for name in ("accuracy", "heldout_area", "accuracy_hard", "accuracy_human"):
            found = [v for record in records.values() if (v := record.value(name)) is not None]
            cells.append(cell_text(found, n=False))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 6 else []


def _place(item: tuple[tuple[str, str], object]) -> tuple[bool, str, int]:
    """Return where an arm's row stands: Table 1's first, in their target's order."""
    target, arm = item[0]
    return target != "table1", target, [each.name for each in find(target).arms].index(arm)


def rate_text(records: Any) -> str:
    """Return the learning rate that the runs of an arm had, as their own series have it."""
    found = {
        f"{max(present):.2g}"
        for record in records
        if (present := [v for v in record.series.get("learning_rate", []) if v is not None])
    }
    return ", ".join(sorted(found))


def rates(choice: Mapping[str, Any] | None) -> list[str]:
    """Return how the learning rates were chosen, and what follows for comparisons."""
    lines = ["## Learning rates", ""]
    if choice is None:
        return [*lines, "No sweep has been made at this scale.", ""]
    lines += [
        f"Chosen by a sweep on tuning seeds of its own ({choice['records']} runs, source commit "
        f"{', '.join(f'`{commit[:12]}`' for commit in choice['commits'])}); rule: "
        f"{choice['rule']}. Where the sweep gave compared arms different rates, a statement "
        "carries a † : it then compares formats *and* rates.",
        "",
        "| what is trained | chosen | held-out accuracy at the end, by rate | its error, points |",
        "|---|---|---|---|",
    ]
    tied, lowest = [], []
    for key, rate in choice["chosen"].items():
        by_rate = sorted(choice["means"][key].items(), key=lambda item: float(item[0]))
        means = ", ".join(f"{float(name):.2g}: {mean:.1f}" for name, mean in by_rate)
        error = choice["errors"][key]
        lines.append(f"| {key} | {rate:.2g} | {means} | {error:.2g} |")
        least = max(mean for _, mean in by_rate) - TIE_ERRORS * error
        tied += [key] * (sum(mean >= least for _, mean in by_rate) > 1)
        lowest += [key] * (by_rate[0][0] == f"{rate:g}")
    lines.append("")
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
    found = [v for record in records if (v := record.value("completion_tokens_mean")) is not None]
    return f"{fmean(found):.0f}" if found else "?"
