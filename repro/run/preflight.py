"""Whether a run can work here, said in a sentence before anything large is downloaded or loaded.

A run on a published checkpoint takes hours, and most of what stops one can be known beforehand: a
package that is not installed, a step that no card of this size holds, a data set without the split
that the scale asks for, a prompt longer than the scale allows, a hub that does not answer. Each is
looked at here from the run's own configuration, the cheapest first. `plan` looks at what is on this
machine; `run` also fetches the small files (config, tokenizer, problems) that the rest needs.

Easy to get wrong: a limit of prompts counts the chat template and the suffix, too, and belongs to
the tokenizer; so prompts are rendered here as the run will render them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.data.load import is_local, require_declared
from repro.data.problem import Problem
from repro.models.training_memory import training_memory
from repro.run.data_check import problems_of, reads_of
from repro.run.disk import free_bytes, size
from repro.run.run_disk import disk_bytes
from repro.spec.arm import Arm
from repro.spec.config import RunConfig, TrainScale
from repro.spec.hub import hub_cache, is_hub_name, local_folders
from repro.spec.needs import Needs
from repro.spec.schedule import sigma_of_stage, stage_of_step
from repro.spec.tier import cuda_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What can be said of a run beforehand.

    Attributes
    ----------
    refusal
        Why it cannot work here; None where nothing speaks against it.
    unchecked
        What could not be looked at yet, since it is not on this machine.
    """

    refusal: str | None
    unchecked: tuple[str, ...] = ()


def preflight(run: RunConfig, *, fetch: bool = False) -> Preflight:
    """Return what can be said of a run before it starts.

    Parameters
    ----------
    fetch
        Whether config, tokenizer and problems are fetched where they are not here.
    """
    scale = run.scale
    refusals = [missing_package(run)]
    if not isinstance(scale, TrainScale):
        return Preflight(refusal=refusals[0])
    common, published = dataclasses.replace(scale, seeds=()), is_published(scale)
    try:
        too_large = memory_of(run.arm, scale)[1] if published else None
    except ValueError as error:  # a config.json without a decoder's sizes
        too_large = str(error)
    refusals += [_noise_refusal(run), *_data_refusals(common), too_large]
    unchecked: tuple[str, ...] = ()
    if published and not any(refusals):  # the rest reads files and imports torch
        refusal, unchecked = _checkpoint_and_prompts(common, fetch)
        refusals += [refusal, _format_refusal(common, run.arm.weight_format)]
    reasons = "; ".join(dict.fromkeys(filter(None, refusals)))
    return Preflight(refusal=reasons or None, unchecked=unchecked)


def startable(runs: Iterable[RunConfig]) -> list[RunConfig]:
    """Return the runs against which nothing speaks: of the others no disk is taken."""
    return [run for run in runs if preflight(run).refusal is None]


def is_published(scale: TrainScale) -> bool:
    """Whether a scale loads a checkpoint that this suite did not make."""
    return is_hub_name(scale.checkpoint) or Path(scale.checkpoint).expanduser().exists()


def missing_package(run: RunConfig) -> str | None:
    """Return a sentence naming an optional package that `run` needs and this machine lacks."""
    arm, scale = run.arm, run.scale
    needed = arm.name in getattr(scale, "bitsandbytes", ())
    needed |= getattr(arm, "linears", "") == "bitsandbytes"
    if needed and importlib.util.find_spec("bitsandbytes") is None:
        return f"{arm.name} needs bitsandbytes (the extra `bitsandbytes`); it is not installed"
    trains = isinstance(scale, TrainScale) and arm.training != "none"
    if trains and scale.optimizer.name == "adamw_8bit":
        if importlib.util.find_spec("bitsandbytes") is None:
            return (
                "optimizer adamw_8bit needs bitsandbytes, which is not installed: pip install "
                "'qerl-repro[bitsandbytes]', or --set optimizer.name=adamw"
            )
        if not cuda_devices():
            return "optimizer adamw_8bit needs a CUDA device; there is none (adamw needs none)"
    return None


def _noise_refusal(run: RunConfig) -> str | None:
    """Return why a run with added noise would end without having drawn any, or None."""
    noise, scale = run.arm.noise, run.scale
    if noise is None or run.arm.training == "none" or run.procedure != "train":
        return None
    every = scale.updates_per_rollout
    drawn_at = range(0, scale.steps, every)
    if any(sigma_of_stage(noise, stage_of_step(noise, step, scale.steps)) for step in drawn_at):
        return None
    way = "more steps are needed" + ", or --set updates_per_rollout=1" * (every > 1)
    return (
        f"{run.arm.name} would add no noise: the first of {noise.num_stages} stages has none, and "
        f"all {len(drawn_at)} rollouts of {scale.steps} steps lie in it (updates per rollout: "
        f"{every}); {way}"
    )


def memory_of(arm: Arm, scale: TrainScale) -> tuple[int, str | None]:
    """Return the planned peak of a run, and why it does not fit this machine's device, or None.

    With a device the cache is as large as it will be made there, else it holds all rows at once.

    What must fit is one row: more wait for a place, and micro-batches are cut to what there is.
    """
    memory = training_memory(arm, scale)
    if memory is None:
        return 0, None
    devices = cuda_devices()
    if not devices:
        return memory.peak(None), None
    device = devices[0]
    if memory.least <= device.memory_bytes:
        return memory.peak(device.memory_bytes), None
    return memory.least, (
        f"{arm.label} of {memory.step.shape.name} needs {memory.least / 1e9:.1f} GB of device "
        f"memory for one row of {memory.step.row_tokens} tokens; {device.name} has "
        f"{device.memory_bytes / 1e9:.1f} GB"
    )


def disk_refusal(needs: Needs, runs: Sequence[RunConfig], workers: int, folder: Path) -> str | None:
    """Return why downloads, or what runs write, do not fit the disks, or None."""
    absent = sum(item.nbytes for item in needs.downloads if not item.present())
    written = disk_bytes(runs, needs, workers)
    for what, place, needed in (
        ("the downloads", hub_cache(), absent),
        ("the records and checkpoints", folder, written),
    ):
        free = free_bytes(place)
        if free is not None and needed > free:
            return f"{what} need {size(needed)} in {place}; {size(free)} are free"
    return None


def _data_refusals(scale: TrainScale) -> Iterator[str]:
    """Yield what is wrong with a scale's data by their description alone."""
    for read in reads_of(scale):
        try:
            require_declared(read.data, read.split)
        except ValueError as error:
            yield f"{read.name} problems: {error}"


@functools.lru_cache(maxsize=64)
def _checkpoint_and_prompts(scale: TrainScale, fetch: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return why checkpoint or prompts do not serve, or None; and what could not be looked at."""
    folder = _small_files(scale)
    try:
        if folder is None and fetch:
            from repro.models.checkpoint import resolve

            folder = resolve(scale.checkpoint, scale.revision, weights=False)
        if folder is None:
            return None, (f"{scale.checkpoint}: config, tokenizer and prompt lengths",)
        return None, _check_prompts(scale, folder, fetch)
    except ValueError as error:
        return str(error), ()


def _small_files(scale: TrainScale) -> Path | None:
    """Return the folder of a checkpoint's config and tokenizer where it is on this machine."""
    folder = Path(scale.checkpoint).expanduser()
    if folder.is_dir():
        return folder
    folders = local_folders(scale.checkpoint)
    named = [item for item in folders if item.name == scale.revision] or folders
    return next((item for item in named if (item / "tokenizer_config.json").is_file()), None)


def _format_refusal(scale: TrainScale, weight_format: str) -> str | None:
    """Return why a checkpoint that is here cannot be loaded in a format, or None."""
    from repro.models.loading import read_description

    folder = _small_files(scale)
    if folder is None:
        return None
    try:
        stored = read_description(folder).stored_format
    except ValueError as error:
        return str(error)
    if stored in (None, weight_format):
        return None
    return f"{folder} stores {stored} codes; {weight_format} weights need the 16-bit checkpoint"


def _check_prompts(scale: TrainScale, folder: Path, fetch: bool) -> tuple[str, ...]:
    """Return what is not here; raise `ValueError` for prompts too long and problems too few."""
    unchecked = []
    for read in reads_of(scale):
        where = f"{read.name} problems of {read.data.source}"
        if not fetch and not is_local(read.data, read.split):
            unchecked.append(where)
            continue
        problems = problems_of(read.data, read.split)
        if read.split == "train" and len(problems) < scale.prompts_per_rollout:
            raise ValueError(
                f"there are {len(problems)} training problems; a rollout takes "
                f"{scale.prompts_per_rollout} (prompts_per_rollout)"
            )
        longest = _longest(problems, scale.prompt_template, folder)
        if longest > read.max_prompt_tokens:
            raise ValueError(
                f"{where}: the longest prompt has {longest} tokens with the tokenizer of {folder}; "
                f"max_prompt_tokens there is {read.max_prompt_tokens}"
            )
    return tuple(unchecked)


def _longest(problems: Sequence[Problem], template: str, folder: Path) -> int:
    """Return the tokens of the longest prompt."""
    from repro.data.prompts import render

    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} holds no tokenizer")
    return max(len(render(problem, template, tokenizer)) for problem in problems)


@functools.lru_cache(maxsize=4)
def _tokenizer(folder: Path) -> Any:
    from repro.models.policy import load_tokenizer

    return load_tokenizer(folder)
