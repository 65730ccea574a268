"""Warnings during training if a run does not learn.

A step teaches nothing when no reward differs from the others of its group: then every advantage
is 0. That happens when the policy never earns a reward, when it always does, or when a user's
reward is constant.

The other trap pays: format is learnt and reasoning is thrown away. Format rises, completions shrink
to half of their length, and the answers are right no more often than before. Accuracy is taken
by the lenient reading here, since the strict one rises with the format alone.

Each is said once per run, the first at the end of a run that is shorter than five steps.
`--stop-idle N` ends a run at the N-th step in a row that teaches nothing; what was counted before a
resumed run stopped is read from its metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.rl.collect import Rollout

# Steps in a row without a lesson before a warning, and steps at each end that are compared.
IDLE_STEPS, WINDOW = 5, 3
# By how much format must rise and accuracy must not, as fractions.
FORMAT_RISE, ACCURACY_RISE = 0.2, 0.02
# What a step's line in metrics.jsonl holds for this, beside the values of the run's series.
MIXED, LENIENT = "mixed_groups", "accuracy_lenient"
_COMPARED = ("format", LENIENT, "completion_tokens")
_SHOWN_CHARACTERS = 200
_ADVICE = (
    "If the lenient accuracy is above 0, the policy answers in another form than the prompt asks "
    "for: --template boxed or gsm8k, or a file of your own"
)


class Watch:
    """Follows one run of `whole` steps.

    The run ends after `stop_idle` steps in a row without a lesson; 0 never ends it. `earlier` are
    the lines of its metrics.jsonl up to the step that it goes on from.
    """

    def __init__(
        self, stop_idle: int = 0, earlier: Sequence[Mapping[str, Any]] = (), whole: int = IDLE_STEPS
    ) -> None:
        self.stop_idle, self.idle = stop_idle, 0
        self._due = min(IDLE_STEPS, whole)
        self._steps: list[tuple[float, ...]] = []
        self._said: set[str] = set()
        for line in earlier:
            self.idle = self.idle + 1 if line.get(MIXED) == 0 else 0
            self._said |= {"idle"} if self.idle >= self._due else set()
            if self.step(line) is not None:
                self._said.add("format")

    def rollout(self, rollout: Rollout, steps: int, texts: Sequence[str]) -> str | None:
        """Take a rollout of `steps` steps and its examples' texts; return a warning if one is due.

        Raises `ValueError` when the run is to end here.
        """
        self.idle = 0 if rollout.mixed else self.idle + steps
        if self.stop_idle and self.idle >= self.stop_idle:
            raise ValueError(f"{_idle_sentence(self.idle, rollout)} (--stop-idle {self.stop_idle})")
        if self.idle < self._due or "idle" in self._said:
            return None
        self._said.add("idle")
        shown = "".join(f"\n  {number}. {_cut(text)}" for number, text in enumerate(texts, start=1))
        advice = "" if any(one.reward for one in rollout.graded) else f"{_ADVICE}. "
        return f"{_idle_sentence(self.idle, rollout)}. {advice}Some completions:{shown}"

    def step(self, values: Mapping[str, Any]) -> str | None:
        """Take a step's values; return a warning if one is due."""
        known = [values.get(name) for name in _COMPARED]
        if "format" in self._said or None in known:
            return None
        self._steps.append(tuple(float(value) for value in known if value is not None))
        if len(self._steps) < 2 * WINDOW:
            return None
        ends = self._steps[:WINDOW], self._steps[-WINDOW:]
        (form, right, tokens), (now_form, now_right, now_tokens) = (
            tuple(map(fmean, zip(*end, strict=True))) for end in ends
        )
        learns = now_form - form < FORMAT_RISE or now_right - right >= ACCURACY_RISE
        if learns or now_tokens > tokens / 2:
            return None
        self._said.add("format")
        return (
            f"format rose from {form:.0%} to {now_form:.0%} and completions shrank from "
            f"{tokens:.0f} to {now_tokens:.0f} tokens, while accuracy by the lenient reading went "
            f"from {right:.1%} to {now_right:.1%}: the format is learnt and reasoning is lost. "
            "Take a template whose answers the policy gives anyway (--template boxed), or "
            "--set format_reward=0"
        )


def _idle_sentence(steps: int, rollout: Rollout) -> str:
    rewards = [one.reward for one in rollout.graded]
    if not rewards:
        why = "dynamic sampling kept no group"
    elif set(rewards) == {None}:
        why = "no completion has a reward"
    elif rollout.all_cut_off:
        why = "every completion is cut at the length limit, and overlong filtering leaves those out"
    elif any(rewards):
        why = "no reward differs from the others of its group"
    else:
        why = "every reward is 0"
    right = rollout.lenient_sampled
    lenient = "not known" if right is None else f"{right:.1%}"
    return (
        f"training has taught nothing for {steps} steps: {why}; accuracy by the lenient reading is "
        f"{lenient}"
    )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
