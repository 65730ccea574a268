"""Whether a run can work here, found out before anything large is downloaded or loaded.

A run on a published checkpoint takes hours, and most of what stops one can be known beforehand.
`RunConfig` refuses settings that train nothing. What else a run requires is one list, which `plan`,
`run` and `train` ask alike: `unfit` looks at what the settings name, as far as it is here, and
`lacking` at this machine: a package that is not installed, a step that no card of this size holds.
A command ends in an error where no run is fit.
`files_refusal` and `fetch_files` are for `run` alone, since they fetch what runs read: first the
small files (config, tokenizer, problems), then the weights. So a hub that does not answer refuses a
run, as a prompt longer than the scale allows does, and one that has begun needs no network.

Easy to get wrong: a limit of prompts counts the chat template and the suffix, too, and belongs to
the tokenizer; so prompts are rendered here as the run will render them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, cast

from repro.data.load import is_generated, require_declared
from repro.data.prompts import template_named
from repro.evidence.origins import grouped_by
from repro.models.decoder import require_supported
from repro.models.memory_plan import training_memory
from repro.reward.custom import in_a_copy, load_reward
from repro.run.data_check import problems_of, reads_of, require_prompts
from repro.run.disk import free_bytes, size
from repro.run.present_card import kernels_refusal, measured_parts, points_left_out, torch_refusal
from repro.run.unchanged import digest_now, files_now
from repro.spec.arm import Arm
from repro.spec.checks import require, tried
from repro.spec.config import RunConfig, TrainScale
from repro.spec.hub import hub_cache, is_hub_name, local_folders
from repro.spec.needs import Needs
from repro.spec.schedule import stage_of_step
from repro.spec.shapes import shape_by_name, shape_of_checkpoint
from repro.spec.target import Target
from repro.spec.throughput_scale import ThroughputScale
from repro.spec.tier import CudaDevice, Tier, cuda_devices, host_bytes
from repro.targets import TARGETS

# Returns why a run does not have what it requires, or None.
Requirement = Callable[[RunConfig], str | None]
# A run's record and its metrics.jsonl of some hundred steps.
_RECORD_BYTES = 500_000


def machine_refusal(source: Target, tier: Tier) -> str | None:
    """Return why this machine can carry out no run of a target at a tier, or None."""
    return source.not_runnable(tier) or (None if tier is Tier.SMOKE else torch_refusal())


def refusal(run: RunConfig, ranks: int = 1) -> str | None:
    """Return why a run by so many ranks cannot work here, or None; fetches nothing."""
    return unfit(run) or lacking(run, ranks)


def fit_runs(runs: Iterable[RunConfig], why: Requirement) -> tuple[list[RunConfig], list[str]]:
    """Return the runs that can work, and of the others arms and reasons, a sentence each.

    Of runs that differ only in their seed one is asked; where all are of one arm, none is named.
    """
    runs, why_not = list(runs), functools.cache(why)
    by_reason = grouped_by(runs, lambda run: why_not(dataclasses.replace(run, seed=0)))
    fit, several = by_reason.pop(None, []), len({run.arm.name for run in runs}) > 1
    arms = {reason: dict.fromkeys(run.arm.name for run in of) for reason, of in by_reason.items()}
    return fit, [f"{', '.join(arms[why])}: " * several + f"{why}" for why in arms]


def _asked(run: RunConfig, *requirements: Requirement) -> str | None:
    reasons = (requirement(run) for requirement in requirements)
    return "; ".join(dict.fromkeys(filter(None, reasons))) or None


def unfit(run: RunConfig) -> str | None:
    """Return why no machine can carry a run out, by its settings and the files here, or None."""
    if not isinstance(run.scale, TrainScale):
        return None
    return _asked(
        run, _noise_refusal, _sampler_refusal, _optimizer_refusal, _data_refusal, _named_refusal
    )


def lacking(run: RunConfig, ranks: int = 1) -> str | None:
    """Return what this machine lacks for a run by so many ranks, or None."""
    return _asked(run, missing_package, _card_refusal, partial(memory_refusal, ranks=ranks))


def _named_refusal(run: RunConfig) -> str | None:
    """Return what is wrong with what a run's settings name, as far as it is here, or None."""
    scale = run.scale
    bare = dataclasses.replace(scale, seeds=())
    try:
        require(
            scale.checkpoint == "tiny" or is_published(scale),
            f"checkpoint is {scale.checkpoint!r}; it must be a folder that is here, or a hub name "
            "(owner/model)",
        )
        shape_of_checkpoint(scale.checkpoint)  # its config has a decoder's sizes
        configs = (folder / "config.json" for folder in local_folders(scale.checkpoint))
        path = next(filter(Path.is_file, configs), None)
        values = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        if "model_type" in values:
            require_supported(values, path)
        if run.arm.reward_function is not None:
            in_a_copy(run.arm.reward_function.module, partial(load_reward, run.arm.reward_function))
        if _is_here(bare) and _prompts_of(bare) not in _own_prompts():
            checked_folder(bare)
        template_named(scale.prompt_template)
        if Path(scale.checkpoint).expanduser().exists():
            from repro.models.loading import require_weights

            (folder,) = local_folders(scale.checkpoint)
            require_weights(folder)
            return _format_refusal(folder, run)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def require_fit(runs: Sequence[RunConfig]) -> None:
    """Raise `ValueError`, with arms and reasons, where no machine can carry out any of the runs."""
    fit, sentences = fit_runs({run.arm: run for run in runs}.values(), unfit)
    require(bool(fit) or not sentences, "; ".join(sentences))


def _prompts_of(scale: TrainScale) -> tuple[Any, ...]:
    """Return the settings that decide whether prompts and completions find room."""
    limits = scale.rollout.max_new_tokens, scale.evaluation.sampling.max_new_tokens
    reads = tuple(reads_of(scale))
    return scale.checkpoint, scale.prompt_template, scale.prompts_per_rollout, limits, reads


@functools.cache
def _own_prompts() -> frozenset[tuple[Any, ...]]:
    """Return those of the package's targets as they stand, which its tests check."""
    scales = [scale for target in TARGETS for scale in target.scales.values()]
    return frozenset(_prompts_of(scale) for scale in scales if isinstance(scale, TrainScale))


def _is_here(scale: TrainScale) -> bool:
    """Whether nothing that a scale reads would have to be fetched."""
    sources = {read.data.source for read in reads_of(scale)}
    own = ("folder:", "file:")
    local = all(is_generated(source) or source.startswith(own) for source in sources)
    return local and (scale.checkpoint == "tiny" or Path(scale.checkpoint).expanduser().exists())


def files_refusal(run: RunConfig) -> str | None:
    """Return why a published checkpoint or the prompts do not serve, or None; may fetch them."""
    if not is_published(run.scale):
        return None
    try:
        return _format_refusal(checked_folder(dataclasses.replace(run.scale, seeds=())), run)
    except ValueError as error:
        return str(error)


def fetch_files(runs: Iterable[RunConfig], ranks: int = 1) -> None:
    """Fetch what runs read, last the weights of those that fit this machine's memory.

    `ValueError` says what cannot be had or read.
    """
    from repro.models.checkpoint import resolve

    published = [run for run in runs if is_published(run.scale)]
    by_scale = grouped_by(published, lambda run: dataclasses.replace(run.scale, seeds=()))
    for scale, of_scale in by_scale.items():
        folder = checked_folder(scale)
        fit = [run for run in of_scale if memory_refusal(run, ranks) is None]
        if any(_format_refusal(folder, run) is None for run in fit):
            resolve(scale.checkpoint, scale.revision)


def is_published(scale: Any) -> TypeGuard[TrainScale]:
    """Whether a scale trains or evaluates a checkpoint that this suite did not make."""
    if not isinstance(scale, TrainScale):
        return False
    return is_hub_name(scale.checkpoint) or Path(scale.checkpoint).expanduser().exists()


def missing_package(run: RunConfig) -> str | None:
    """Return a sentence naming an optional package that `run` needs and this machine lacks."""
    arm, scale = run.arm, run.scale
    timed = isinstance(scale, ThroughputScale)
    needed = scale.products(arm.name) if timed else getattr(arm, "linears", "")
    if needed in ("bitsandbytes", "vllm") and importlib.util.find_spec(needed) is None:
        return f"{arm.name} needs {needed} (the extra `{needed}`); it is not installed"
    trains = isinstance(scale, TrainScale) and arm.training != "none"
    in_8_bits = trains and scale.optimizer.name == "adamw_8bit"
    if in_8_bits and importlib.util.find_spec("bitsandbytes") is None:
        return (
            "optimizer adamw_8bit needs bitsandbytes, which is not installed: pip install "
            "'qerl-repro[bitsandbytes]', or --set optimizer.name=adamw"
        )
    by_vllm = isinstance(scale, TrainScale) and scale.sampler == "vllm"
    if by_vllm and importlib.util.find_spec("vllm") is None:
        return "sampler is vllm, which is not installed: pip install 'qerl-repro[vllm]'"
    return None


def _optimizer_refusal(run: RunConfig) -> str | None:
    """Return why a run's optimiser does not serve its tier, or None."""
    trains = run.arm.training != "none" and run.tier == "smoke"
    if not trains or run.scale.optimizer.name != "adamw_8bit":
        return None
    return "optimizer.name is adamw_8bit, which needs a CUDA device; the smoke tier needs adamw"


def _noise_refusal(run: RunConfig) -> str | None:
    """Return why a run with added noise would end without having drawn any, or None."""
    noise, scale = run.arm.noise, run.scale
    if noise is None or run.arm.training == "none" or run.procedure != "train":
        return None
    every = scale.updates_per_rollout
    drawn_at = range(0, scale.steps, every)
    if stage_of_step(noise, drawn_at[-1], scale.steps) > 0:  # later stages all have noise
        return None
    way = "more steps are needed" + ", or --set updates_per_rollout=1" * (every > 1)
    return (
        f"{run.arm.name} would add no noise: the first of {noise.num_stages} stages has none, and "
        f"all {len(drawn_at)} rollouts of {scale.steps} steps lie in it (updates per rollout: "
        f"{every}); {way}"
    )


def _sampler_refusal(run: RunConfig) -> str | None:
    """Return why a run's sampler cannot do what the run asks of it, or None."""
    arm, scale = run.arm, run.scale
    if arm.rollout_adapter == "folded" and (run.procedure, scale.sampler) != ("train", "own"):
        return (
            f"{arm.name} folds its adapter, in procedure {run.procedure} by sampler "
            f"{scale.sampler}; rollout_adapter folded needs train and own"
        )
    if scale.sampler == "own":
        return None
    if run.procedure not in ("train", "evaluate"):
        return (
            f"{arm.name} is a {run.procedure}, by this project's own sampler; sampler is vllm, "
            "needed is own"
        )
    if arm.training == "full":
        return f"{arm.name} trains the base, of which vLLM keeps a copy as it was; it needs own"
    if arm.rounding or scale.permuted:
        return f"{arm.name} changes the weights on loading, vLLM's copy has them not; it needs own"
    if arm.training == "lora" and arm.loss.importance_cap is None:
        return (
            f"{arm.name}: what vLLM samples from differs from what is trained by rounding, and "
            "loss.importance_cap is None; needed is a number: --set arm.loss.importance_cap=2"
        )
    return None


def smallest_device() -> CudaDevice | None:
    """Return the CUDA device of the least memory, which any run or rank may get; None without."""
    return min(cuda_devices(), key=lambda device: device.memory_bytes, default=None)


def among_unlike_devices() -> str:
    """Return in brackets of how many cards the smallest is one; nothing where all are alike."""
    devices = cuda_devices()
    if len({device.memory_bytes for device in devices}) <= 1:
        return ""
    return f" (smallest of {len(devices)} cards; CUDA_VISIBLE_DEVICES chooses)"


def _card_refusal(run: RunConfig) -> str | None:
    """Return why this machine's card cannot measure what a run measures, or None."""
    device = smallest_device()
    if device is None or run.tier != Tier.SYSTEMS.value:
        return None
    left_out = points_left_out(run, device.memory_bytes)
    if not left_out or len(left_out) < measured_parts(run):
        return kernels_refusal(run, device)
    least = min(left_out.values(), key=lambda sentence: float(sentence.split()[1]))
    return (
        f"{run.arm.label} of {run.target}: the smallest of {len(left_out)} points {least}"
        f"{among_unlike_devices()}"
    )


def memory_of(arm: Arm, scale: TrainScale, ranks: int = 1) -> tuple[int | None, str | None]:
    """Return the planned peak of a run, and why it does not fit this machine's device, or None.

    The peak of a model whose shape is not known is None.

    Of unlike devices the smallest counts. On a device the cache has the size that it will have
    there; without one it holds all rows at once. Only one row must fit: other rows wait for a
    slot, and micro-batches are made smaller.
    """
    memory = training_memory(arm, scale, ranks)
    if memory is None:
        return None, None
    device = smallest_device()
    if device is None:
        return memory.peak(None), None
    if memory.least <= device.memory_bytes:
        return memory.peak(device.memory_bytes), None
    return memory.least, (
        f"{arm.label} of {memory.step.shape.name} needs {memory.least / 1e9:.1f} GB of device "
        f"memory for one row of {memory.step.row_tokens} tokens; {device.name} has "
        f"{device.memory_bytes / 1e9:.1f} GB{among_unlike_devices()}"
    )


def memory_refusal(run: RunConfig, ranks: int = 1) -> str | None:
    """Return why a run of a published checkpoint does not fit the GPU, or a CPU's RAM, or None."""
    if not is_published(run.scale):
        return None
    if run.tier != Tier.SMOKE.value:
        return memory_of(run.arm, run.scale, ranks)[1]
    memory = training_memory(run.arm, run.scale, ranks, on_cpu=True)
    if memory is None or memory.least <= host_bytes():
        return None
    return (
        f"{run.arm.label} of {memory.step.shape.name} needs at least {memory.least / 1e9:.1f} GB "
        f"of RAM for one row of {memory.step.row_tokens} tokens on a CPU; this machine has "
        f"{host_bytes() / 1e9:.1f} GB"
    )


def disk_bytes(runs: Iterable[RunConfig], needs: Needs, workers: int) -> int:
    """Return at most what runs write, `workers` of them at a time, completions aside.

    A run leaves what it trained in float32, 4 bytes a parameter. Meanwhile it keeps three
    checkpoints of it (the third last goes when the newest is whole) with two moments each, 36.
    """
    trained = [_trained_parameters(run) for run in runs]
    left = [needs.disk_bytes if count is None else _RECORD_BYTES + 4 * count for count in trained]
    working = sorted((36 * (count or 0) for count in trained), reverse=True)
    return sum(left) + sum(working[:workers])


def _trained_parameters(run: RunConfig) -> int | None:
    """Return how many parameters a run trains; None where its model's shape is not known."""
    if not isinstance(run.scale, TrainScale):
        return None
    shape = shape_of_checkpoint(run.scale.checkpoint) or shape_by_name(run.scale.checkpoint)
    if shape is None:
        return None
    of_kind = {"none": 0, "full": shape.parameters()}
    return of_kind.get(run.arm.training, shape.adapter_parameters(run.arm.lora_rank))


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


def _data_refusal(run: RunConfig) -> str | None:
    """Return what is wrong with a run's data, from their description only, or None."""
    faults = []
    for read in reads_of(run.scale):
        try:
            require_declared(read.data, read.split)
        except ValueError as error:
            faults.append(f"{read.name} problems: {error}")
    return "; ".join(dict.fromkeys(faults)) or None


def _format_refusal(folder: Path, run: RunConfig) -> str | None:
    """Return why a checkpoint does not load as a run's arm, or None; reads its config alone.

    Raises `ValueError` when the config is not one of a checkpoint that is built here.
    """
    from repro.models.loading import read_description

    stored, kind = read_description(folder).stored_format, run.arm.weight_format
    if stored is None or (stored == kind and not run.scale.permuted):
        return None
    what = "another order of channels (permuted)" if stored == kind else f"{kind} weights"
    return f"{folder} stores {stored} codes; {what} need the 16-bit checkpoint"


def look_again() -> None:
    """Forget what earlier calls in this process found: files may have been mended since."""
    for found in (_checked, problems_of, require_prompts, files_now, digest_now):
        found.cache_clear()


def checked_folder(scale: TrainScale) -> Path:
    """Return a checkpoint's folder, whose tokenizer fits it and the problems.

    Raises `ValueError` when tokenizer or problems cannot be read, prompts are too long, alone or
    with their completions, or problems too few.
    """
    (folder,), refused = _checked(scale)
    require(not refused, "; ".join(refused))
    return cast(Path, folder)


@functools.lru_cache(maxsize=64)
def _checked(scale: TrainScale) -> tuple[list[Any], list[str]]:
    """Return what `checked_folder` does, or why not, found once for all arms."""
    return tried(partial(_checked_files, scale))


def _checked_files(scale: TrainScale) -> Path:
    from repro.data.prompts import render
    from repro.models.checkpoint import resolve
    from repro.models.loading import read_description
    from repro.models.policy import load_tokenizer

    folder = resolve(scale.checkpoint, scale.revision, weights=False)
    # Before the tokenizer, which transformers reads with the config and blames for its faults.
    description = read_description(folder)
    positions = description.config.max_position_embeddings
    tokenizer: Any = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} holds no tokenizer")
    ends = description.config.eos_token_id, description.end_token_ids, tokenizer.eos_token_id
    require(
        any(end not in (None, []) for end in ends),
        f"{folder}: its configs and its tokenizer name no end token, so that no completion would "
        "end by itself; needed is an eos_token_id",
    )
    require_prompts(folder, scale.prompt_template)
    for read in reads_of(scale):
        problems = problems_of(read.data, read.split)
        if read.split == "train" and len(problems) < scale.prompts_per_rollout:
            raise ValueError(
                f"there are {len(problems)} training problems; a rollout takes "
                f"{scale.prompts_per_rollout} (prompts_per_rollout)"
            )
        lengths = [len(render(one, scale.prompt_template, tokenizer)) for one in problems]
        longest = max(lengths)
        where = problems[lengths.index(longest)].where or read.data.source
        if longest > read.max_prompt_tokens:
            raise ValueError(
                f"{read.name} problems: the longest prompt ({where}) has {longest} tokens with the "
                f"tokenizer of {folder}; max_prompt_tokens there is {read.max_prompt_tokens}"
            )
        sampled, name = scale.evaluation.sampling, "evaluation.sampling.max_new_tokens"
        if read.split == "train":
            sampled, name = scale.rollout, "rollout.max_new_tokens"
        if sampled.max_new_tokens > positions - longest:
            raise ValueError(
                f"{name} is {sampled.max_new_tokens}; the longest prompt of {read.name} problems "
                f"({where}) has {longest} tokens and the model {positions} positions, so it must "
                f"be {positions - longest} or less"
            )
    return folder
