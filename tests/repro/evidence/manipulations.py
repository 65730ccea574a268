"""Manipulations of a real record that change what it says and leave it a record in form.

Each edits the JSON of a trained or an untrained smoke run. What a careful hand would also mend is
mended (`forged`): the digest of the configuration and the seal. So a check of contents must find
it, and the words are those of that check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Raw = dict[str, Any]
Edit = Callable[[Raw], None]


ARM = "nvfp4_lora_aqn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manipulation:
    """One edit of a record.

    Attributes
    ----------
    edit
        Changes the record's JSON in place.
    words
        Of the refusal.
    arm
        Whose record of seed 1 is edited.
    """

    edit: Edit
    words: str
    arm: str = ARM


def put(path: str, value: Any) -> Edit:
    """Return an edit that puts a value at a dotted path."""

    def edit(raw: Raw) -> None:
        *parents, last = path.split(".")
        place = raw
        for name in parents:
            place = place[name]
        place[last] = value

    return edit


def change(path: str, how: Callable[[Any], Any]) -> Edit:
    """Return an edit that replaces the value at a dotted path by what `how` makes of it."""

    def edit(raw: Raw) -> None:
        value: Any = raw
        for name in path.split("."):
            value = value[name]
        put(path, how(value))(raw)

    return edit


def drop(path: str) -> Edit:
    """Return an edit that removes a dotted path."""

    def edit(raw: Raw) -> None:
        *parents, last = path.split(".")
        place = raw
        for name in parents:
            place = place[name]
        del place[last]

    return edit


def every(*edits: Edit) -> Edit:
    """Return an edit that does several."""

    def edit(raw: Raw) -> None:
        for one in edits:
            one(raw)

    return edit


def all_series(how: Callable[[list[Any]], list[Any]]) -> Edit:
    """Return an edit of every series."""

    def edit(raw: Raw) -> None:
        raw["series"] = {name: how(values) for name, values in raw["series"].items()}

    return edit


def stated(path: str, value: Any, *, words: str = "", arm: str = ARM) -> Manipulation:
    """Return that another value stands at a path; the refusal names it unless `words` say more."""
    return Manipulation(edit=put(path, value), words=words or path, arm=arm)


def changed(path: str, how: Callable[[Any], Any], *, words: str = "") -> Manipulation:
    """Return that the value at a path is what `how` makes of it; `words` as in `stated`."""
    return Manipulation(edit=change(path, how), words=words or path)


def left_out(path: str, *, words: str = "") -> Manipulation:
    """Return that a path is not there."""
    return Manipulation(edit=drop(path), words=words or f"{path} is missing")


def better_rewards(raw: Raw) -> None:
    """Raise the rewards, and the mean that follows from them."""
    raw["series"]["reward"] = [value + 0.3 for value in raw["series"]["reward"]]
    raw["metrics"]["train_reward_mean"]["value"] = fmean(raw["series"]["reward"])


def better_end(raw: Raw) -> None:
    """Raise the accuracy at the end and the gain with it."""
    for name in ("accuracy_greedy", "gain_greedy"):
        raw["metrics"][name]["value"] += 10.0


def later_learning_rate(values: list[float]) -> list[float]:
    """Return a learning rate that rises tenfold at the last step."""
    return [*values[:-1], 10 * values[-1]]


def longer(values: list[Any]) -> list[Any]:
    """Return a series with its last value once more."""
    return [*values, values[-1]]


def half(values: list[Any]) -> list[Any]:
    """Return the first half of a series."""
    return values[: len(values) // 2]


SERIES: Mapping[str, Manipulation] = {
    "every series cut in half": Manipulation(edit=all_series(half), words="3 values; 6 steps"),
    "one series longer": changed(
        "series.entropy", longer, words="series.entropy has 7 values; 6 steps"
    ),
    "rewards left out": left_out("series.reward"),
    "losses left out": left_out("series.loss"),
    "all series left out": stated("series", {}, words="is missing"),
    "another learning rate": changed(
        "series.learning_rate", later_learning_rate, words="series.learning_rate at step 5"
    ),
    "a constant learning rate": changed(
        "series.learning_rate",
        lambda values: [values[-1]] * len(values),
        words="series.learning_rate at step 0",
    ),
    "another sigma": Manipulation(
        edit=every(
            change("series.sigma", lambda values: [2 * value for value in values]),
            change("series.sigma_realised", lambda values: [2 * value for value in values]),
        ),
        words="series.sigma at step 1",
    ),
    "noise from the first step on": Manipulation(
        edit=every(
            change("series.sigma", lambda values: [values[1], *values[1:]]),
            change("series.sigma_realised", lambda values: [values[1], *values[1:]]),
        ),
        words="series.sigma at step 0",
    ),
    "another stage": changed(
        "series.noise_stage", lambda values: [0] * len(values), words="series.noise_stage at step 1"
    ),
    "a share above one": changed(
        "series.accuracy",
        lambda values: [1.7, *values[1:]],
        words="series.accuracy at step 0 is 1.7",
    ),
    "a negative entropy": changed(
        "series.entropy",
        lambda values: [-value for value in values],
        words="series.entropy at step 0",
    ),
    "rewards that answers do not earn": Manipulation(
        edit=better_rewards, words="series.reward at step 0"
    ),
    "rewards of some steps withheld": Manipulation(
        edit=every(
            change("series.reward", lambda values: [None, *values[1:]]),
            lambda raw: put("metrics.train_reward_mean.value", fmean(raw["series"]["reward"][1:]))(
                raw
            ),
            put("metrics.train_reward_mean.n", 5),
        ),
        words="series.reward at step 0 is None",
    ),
    "a ratio that moved": changed(
        "series.ratio", lambda values: [1.1] * len(values), words="series.ratio at step 0"
    ),
    "clipping where none can act": changed(
        "series.clip_fraction_low",
        lambda values: [0.2] * len(values),
        words="series.clip_fraction_low at step 0",
    ),
    "fewer prompts": changed(
        "series.prompts_consumed", lambda values: [value / 2 for value in values]
    ),
    "shorter completions": changed(
        "series.completion_tokens", lambda values: [value / 2 for value in values]
    ),
    "no gradient": changed("series.grad_norm", lambda values: [0.0] * len(values)),
}

NUMBERS: Mapping[str, Manipulation] = {
    "a better mean reward": changed(
        "metrics.train_reward_mean.value",
        lambda value: value + 0.1,
        words="metrics.train_reward_mean",
    ),
    "a mean reward of more steps": stated(
        "metrics.train_reward_mean.n", 60, words="metrics.train_reward_mean"
    ),
    "another first entropy": stated(
        "metrics.entropy_first.value", 2.0, words="metrics.entropy_first"
    ),
    "another last entropy": stated(
        "metrics.entropy_last.value", 0.001, words="metrics.entropy_last"
    ),
    "a better gain": changed(
        "metrics.gain_greedy.value", lambda value: value + 10, words="metrics.gain_greedy"
    ),
    "a worse start": changed(
        "metrics.accuracy_greedy_start.value",
        lambda value: value - 10,
        words="metrics.accuracy_greedy_start",
    ),
    "a better end, and the gain with it": Manipulation(
        edit=better_end, words="metrics.accuracy_greedy"
    ),
    "a better accuracy": stated("metrics.accuracy.value", 99.0, words="metrics.accuracy"),
    "a better accuracy of an untrained arm": stated(
        "metrics.accuracy.value", 99.0, words="metrics.accuracy", arm="bf16"
    ),
    "a narrower interval": changed("metrics.accuracy.low", lambda low: low + 1),
    "an accuracy of more problems": stated("metrics.accuracy.n", 4000, words="metrics.accuracy"),
    "a better format": stated("metrics.format_rate.value", 12.5, words="metrics.format_rate"),
    "an accuracy left out": left_out("metrics.accuracy_greedy"),
    "a gain left out": left_out("metrics.gain_greedy"),
    "less time": changed(
        "metrics.train_seconds.value", lambda value: value / 10, words="metrics.train_seconds"
    ),
    "more time than passed": Manipulation(
        edit=every(
            put("effects.seconds.rollout_seconds", 9e4),
            lambda raw: put(
                "metrics.train_seconds.value",
                9e4 + raw["effects"]["seconds"]["update_seconds"],
            )(raw),
        ),
        words="effects.seconds",
    ),
    "another unit": stated("metrics.gain_greedy.unit", "percent"),
    "a share in nats": stated("metrics.accuracy.unit", "nats"),
}

COUNTS: Mapping[str, Manipulation] = {
    "one linear of 28": stated("effects.linears", {"nvfp4": 1}),
    "27 linears of 28": stated("effects.linears", {"nvfp4": 27}),
    "a rounding that the arm has not": stated(
        "effects.rounding",
        {"format": "int3", "factor": 1.0, "projections": 28, "relative_change_mean": 0.2},
    ),
    "exploration that the arm has not": stated(
        "effects.exploration",
        {"tokens_asked": 9, "tokens_explored": 9, "tokens_changed": 1},
        words="without exploration explored",
    ),
    "another order of channels": stated("effects.order", 3),
    "one adapter": stated("effects.adapter_modules", 1),
    "ten parameters": stated("effects.parameters_trainable", 10),
    "no weight error": stated("effects.relative_weight_error_mean", None),
    "another precision": stated("effects.compute", "float16"),
    "one norm wrapped": stated("effects.norms_wrapped", 1),
    "norms trained in an arm that trains none": stated("effects.norms_trained", 8),
    "one norm perturbed": stated("effects.noise.modules", 1),
    "five channels perturbed": stated("effects.noise.channels_changed", 5),
    "one noisy rollout": Manipulation(
        edit=every(
            put("effects.noise.rollouts_asked", 1), put("effects.noise.rollouts_perturbed", 1)
        ),
        words="effects.noise.rollouts_asked",
    ),
    "a larger greatest sigma": stated("effects.noise.sigma_max", 0.5),
    "noise of another form": stated("effects.noise.form", "as_released"),
    "every grade dropped": changed(
        "effects.grades", lambda grades: {"unparsable_gold": sum(grades.values())}
    ),
    "a tenth of the grades late": changed(
        "effects.grades", lambda grades: grades | {"timeout": 1 + sum(grades.values()) // 10}
    ),
    "half of the grades": changed(
        "effects.grades", lambda grades: {name: count // 2 for name, count in grades.items()}
    ),
    "more right grades than answers": changed(
        "effects.grades", lambda grades: {"wrong": sum(grades.values())}
    ),
    "no grades": left_out("effects.grades"),
    "no answers": left_out("effects.answers"),
    "trained on no rows": stated("effects.rows.trained_on", 0),
    "rows without a reward": stated("effects.rows.without_reward", 100),
    "sampled nothing": stated("effects.rows.tokens_sampled", 7),
    "the sampler compared on nothing": stated(
        "effects.sampler_trainer_by_quarter.tokens",
        [0, 0, 0, 0],
        words="effects.sampler_trainer_by_quarter",
    ),
    "advantages below zero on average": stated("effects.advantage_group_mean_max", -0.4),
}


IDENTITY: Mapping[str, Manipulation] = {
    "another procedure": stated("procedure", "operation", words="procedure is"),
    "another version of the target": stated("target_version", 7, words="target_version is"),
    "another tier": stated("tier", "paper", words="tier is"),
    "no inputs": stated("inputs", {}, words="inputs.checkpoint is missing"),
    "no test problems": left_out("inputs.test_problems"),
    "no training problems": left_out("inputs.train_problems"),
    "another checkpoint": stated("inputs.checkpoint", "0" * 64, words="another checkpoint"),
    "other problems": stated("inputs.test_problems", "0" * 64, words="another test problems"),
    "finished before it started": stated(
        "finished", "2020-01-01T00:00:00+00:00", words="finished is"
    ),
    "another commit": stated("commit", "0" * 40, words="commit is"),
    "a clean tree": changed("dirty", lambda dirty: not dirty, words="dirty is"),
    "another source": stated(
        "environment.source_sha256", "0" * 64, words="environment.source_sha256 is"
    ),
    "no source": stated("sources", []),
    "no environment": stated("environment", {}, words="environment."),
    "a version from before": Manipulation(
        edit=every(put("schema", 1), drop("sources"), drop("seal")), words="schema is 1"
    ),
}


def other_value(name: str) -> Edit:
    """Return an edit of a metric's value."""
    return change(f"metrics.{name}.value", lambda value: 0.9 * value + 0.01)


def more_right_votes(raw: Raw) -> None:
    """Let a wrong vote of an answer be a right one, and raise maj@2 by it."""
    votes = raw["effects"]["answers"]["accuracy"]["votes"]
    one = next(one for one in votes if one["wrong"])
    one["right"].append(one["wrong"].pop())


def one_shifted(values: list[float]) -> list[float]:
    """Return a series with a larger value at its second step."""
    return [values[0], 1.5 * values[1] + 0.01, *values[2:]]


# What a scale asks for beside: curves, several samples.
ASKED: Mapping[str, Manipulation] = {
    **{
        f"another {name}": Manipulation(edit=other_value(name), words=f"metrics.{name}")
        for name in (
            "take_off_steps",
            "take_off_tokens",
            "took_off",
            "train_area",
            "collapsed",
            "train_rise",
            "informative_first",
            "distinct_correct",
            "mean_at_3",
            "pass_at_1",
            "pass_at_2",
            "maj_at_2",
            "pass_at_2_lenient",
            "maj_at_2_lenient",
        )
    },
    **{
        f"no {name}": Manipulation(edit=drop(f"metrics.{name}"), words=f"metrics.{name} is missing")
        for name in ("take_off_steps", "distinct_correct", "pass_at_2")
    },
    "another accuracy of what was sampled": Manipulation(
        edit=change("series.accuracy_sampled", one_shifted),
        words="series.accuracy_sampled at step 1",
    ),
    "more tokens sampled": Manipulation(
        edit=change("series.tokens_sampled", lambda values: [2 * value for value in values]),
        words="series.tokens_sampled",
    ),
    "tokens that were sampled back": Manipulation(
        edit=change("series.tokens_sampled", lambda values: [values[1], values[0], *values[2:]]),
        words="series.tokens_sampled falls",
    ),
    "no curve": Manipulation(
        edit=drop("series.accuracy_sampled"), words="series.accuracy_sampled is missing"
    ),
    "another vote": Manipulation(
        edit=more_right_votes, words="effects.answers.accuracy.votes", arm="bf16"
    ),
    "no votes": Manipulation(
        edit=drop("effects.answers.accuracy.votes"),
        words="effects.answers.accuracy gives no estimate",
    ),
    "more votes than samples": Manipulation(
        edit=put("effects.answers.accuracy.votes", [{"problems": 24, "right": [4], "wrong": []}]),
        words="effects.answers.accuracy.votes has 4 votes",
    ),
    "more distinct completions than right ones": Manipulation(
        edit=put("effects.answers.accuracy.distinct_right", [0, 0, 0, 24]),
        words="effects.answers.accuracy.distinct_right",
    ),
    "no distinct completions": Manipulation(
        edit=drop("effects.answers.accuracy.distinct_right"), words="metrics.distinct_correct"
    ),
}

MANIPULATIONS: Mapping[str, Manipulation] = {**SERIES, **NUMBERS, **COUNTS, **IDENTITY, **ASKED}
