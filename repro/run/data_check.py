"""The problems of a plan, opened once before anything starts.

A broken line stops the plan, not each run. Gold answers that no completion can match are named, and
so are those that only a copy of their own words matches; if none can be matched, that is an error.
Where a user's reward pays, they are counted alone, and are needed only if the reward asks for them.
Problems of the package's own generators are not opened. Public sets are opened only if a user named
them: those of a target's own scale may have to be downloaded first. `repro.run.preflight` checks
the lengths of prompts on the same lists.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repro.data.load import is_generated, load_problems
from repro.data.own import Split
from repro.data.problem import DataError, Problem, columns_of, require_answers
from repro.reward.answers import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    claims_within,
    extract_answer,
    require_readable,
)
from repro.reward.custom import asks_for_answers, try_reward
from repro.reward.grader import GraderPool
from repro.spec.arm import RewardFunction
from repro.spec.checks import require, shown
from repro.spec.config import DataConfig, RunConfig, TrainScale
from repro.spec.hub import local_folders

# Only so many are named; the rest are counted.
_NAMED = 5
_GRADED: tuple[Split, ...] = ("train", "test")
# Splits in memory: those of one scale of training, development, test and five test sets.
_IN_MEMORY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Problems that a scale reads, called `name` in messages; prompts' limit is in tokens."""

    name: str
    data: DataConfig
    split: Split
    max_prompt_tokens: int


def reads_of(scale: TrainScale) -> Iterator[Read]:
    """Yield the problems that a scale reads."""
    own = functools.partial(Read, data=scale.data, max_prompt_tokens=scale.max_prompt_tokens)
    yield own(name="training", split="train")
    if scale.evaluation.every:
        yield own(name="development", split="development")
    if scale.accuracy_over == "split":
        yield own(name="test", split="test")
    for item in scale.test_sets:
        limit = item.max_prompt_tokens or scale.max_prompt_tokens
        name = f"test set {item.name}"
        yield Read(name=name, data=item.data, split="test", max_prompt_tokens=limit)


@functools.lru_cache(maxsize=_IN_MEMORY)
def problems_of(data: DataConfig, split: Split) -> tuple[Problem, ...]:
    """Return the problems of a split, read once however many checks look at them."""
    return tuple(load_problems(data, split))


def data_lines(plan: Sequence[RunConfig], named: bool) -> list[str]:
    """Open the problems of a plan and return what there is to say of them, a line each.

    Where a user `named` the data, public sets are opened as well as folders. Raises `DataError` if
    they are missing or broken, or no gold of a split can be paid; it names file and line. Raises
    `ValueError` if a user's reward asks for a column that they lack, or fails on two of them, and
    if a checkpoint that is here makes no prompts.
    """
    scales = [run.scale for run in plan if isinstance(run.scale, TrainScale)]
    for scale in scales:
        if Path(scale.checkpoint).expanduser().exists():
            for folder in local_folders(scale.checkpoint):
                require_prompts(folder, scale.prompt_template)
    every = {(read.data, read.split) for scale in scales for read in reads_of(scale)}
    graded = {
        read.data
        for run in plan
        if isinstance(run.scale, TrainScale) and _is_graded(run)
        for read in reads_of(run.scale)
    }
    trained = {data for data, split in every if split == "train"}
    rewarded = [
        (run.arm.reward_function, run.scale.data) for run in plan if run.arm.reward_function
    ]
    _try_rewards(rewarded, named)
    lines: list[str] = []
    with GraderPool() as pool:
        # Data that are trained on come first.
        for data in sorted({data for data, _ in every}, key=lambda d: (d not in trained, repr(d))):
            if _is_opened(data, named):
                splits = {s: problems_of(data, s) for s in _GRADED if (data, s) in every}
                lines += _lines(data.source, splits, pool, graded=data in graded)
    return lines


def _is_graded(run: RunConfig) -> bool:
    """Whether grades of golds pay, or decide over a run as it goes."""
    tests = run.scale.evaluation
    return run.arm.reward_function is None or bool(tests.every or tests.until or tests.test_at)


@functools.lru_cache(maxsize=64)
def require_prompts(folder: Path, template: str) -> None:
    """Raise `ValueError` where a folder's tokenizer serves no prompt of a template, or no answer.

    What a folder lacks is left to its loading.
    """
    from repro.data.prompts import render, respelled, template_named
    from repro.models.policy import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is not None:
        asked = Problem(id="example", question="2 + 2?", answer="4")
        kept = str(tokenizer.decode(render(asked, template, tokenizer)))
        require(
            "2+2?" in "".join(kept.split()),
            f"the tokenizer loses text of a prompt: {asked.question!r} is not in {kept[:300]!r}",
        )
        require_readable(template_named(template).reads, lambda text: respelled(text, tokenizer))


def _try_rewards(scales: Sequence[tuple[RewardFunction, DataConfig]], named: bool) -> None:
    """Try each user's reward on two problems of the data that it is for; raise `ValueError`."""
    for stated, data in dict.fromkeys(scales):
        if is_generated(data.source):
            try_reward(stated, columns_of(problems_of(replace(data, train_problems=2), "train")))
        elif _is_opened(data, named):
            problems = problems_of(data, "train")
            require_answers(problems if asks_for_answers(stated) else ())
            try_reward(stated, columns_of(problems[:2]))


def _is_opened(data: DataConfig, named: bool) -> bool:
    """Whether problems are opened before the start."""
    return not is_generated(data.source) and (named or ":" in data.source)


def _lines(
    source: str, splits: Mapping[Split, Sequence[Problem]], pool: GraderPool, *, graded: bool
) -> list[str]:
    """Return lines on a test split held out, and on golds that can never be paid.

    Raises `DataError` if none of a split can; of golds that are not `graded` one line has a count.
    """
    lines = []
    if len(splits) > len({problems[0].where.rpartition(", ")[0] for problems in splits.values()}):
        test, every = len(splits["test"]), sum(map(len, splits.values()))
        lines.append(f"  {source}: {test} of {every} problems are held out as its test split")
    if not graded:
        golds = [problem for problems in splits.values() for problem in problems]
        lacking = len(_unpayable(golds, pool))
        said = f"  {source}: {lacking} of {len(golds)} problems have no answer that can be graded; "
        said += "your reward pays them, and accuracy leaves them out"
        return [*lines, said] if lacking else lines
    for split, problems in splits.items():
        unpayable = _unpayable(require_answers(problems), pool)
        if len(unpayable) == len(problems):
            raise DataError(
                f"{source}: no gold of its {len(problems)} {split} problems can be paid; the first "
                f"is {shown(problems[0].answer)} ({problems[0].where}), and numbers or formulas "
                "are needed (docs/grading.md)"
            )
        words = "is paid for these words alone, and its number alone is not; leave the words out"
        for found, why, of_all in (
            (unpayable, "can never be paid; its problem is dropped", "can never be paid"),
            (_wordy(problems, pool), words, "are paid for their words alone"),
        ):
            lines += [f"  {one.where}: gold {shown(one.answer)} {why}" for one in found[:_NAMED]]
            if len(found) > _NAMED:
                lines.append(f"  {source}: {len(found)} of {len(problems)} {split} golds {of_all}")
    return lines


def _wordy(problems: Sequence[Problem], pool: GraderPool) -> list[Problem]:
    """Return the problems whose gold has words around its answer that a completion must repeat."""
    asked = [(problem, claims_within(problem.answer)) for problem in problems]
    pairs = [(problem.answer, claim) for problem, claims in asked for claim in claims]
    paid = {
        gold
        for (gold, _), grade in zip(pairs, pool.grade_answers(pairs), strict=True)
        if grade.status != "wrong"  # a gold at fault is named as such
    }
    return [problem for problem, claims in asked if claims and problem.answer not in paid]


def _unpayable(problems: Sequence[Problem], pool: GraderPool) -> list[Problem]:
    """Return the problems whose gold, written as the answer, is not paid."""
    golds = [problem.answer for problem in problems]
    answers = [extract_answer(f"{ANSWER_OPEN}{gold}{ANSWER_CLOSE}") for gold in golds]
    grades = pool.grade_answers(list(zip(golds, answers, strict=True)))
    graded = zip(problems, grades, strict=True)
    return [problem for problem, grade in graded if grade.status != "ok"]
