"""A run of a user's own: what was requested, as the one run of a target that nobody judges.

The target is made from the settings of `repro.targets.presets`. Its name has a digest of the whole
configuration, so that a request with any other setting has a record of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from repro.data.load import is_own, source_named
from repro.data.own import parse_columns
from repro.data.prompts import template_named, template_source
from repro.evaluation.flags import require_hub_name
from repro.models.memory_plan import TrainingMemory, training_memory
from repro.reward.answers import READINGS
from repro.reward.custom import reward_named
from repro.run.disk import size
from repro.run.preflight import memory_of, memory_refusal, smallest_device, unfit
from repro.run.select import Selection, model_source, revision_of
from repro.spec.arm import DAPO, GRPO, GSPO, Arm, NoiseConfig
from repro.spec.checks import all_of, require, tried
from repro.spec.config import RunConfig, TrainScale
from repro.spec.needs import needs_of_checkpoint
from repro.spec.settings import parse_settings
from repro.spec.shapes import SHAPES
from repro.spec.target import Target
from repro.spec.tier import Tier, host_bytes
from repro.spec.variants import in_steps, shortened, slug_of, with_overrides
from repro.targets.presets import preset

_LOSSES = {"grpo": GRPO, "dapo": DAPO, "gspo": GSPO}
# Tests along a run that is to end at an accuracy.
_TESTS = 10
_LENGTHS = ("rollout.max_new_tokens", "evaluation.sampling.max_new_tokens")
# What is tried in turn where a run needs too much memory.
_SMALLER = (
    {"arm.training": "lora"},
    {"arm.weight_format": "nvfp4"},
    {"arm.lora_rank": "8"},
    *(dict.fromkeys(_LENGTHS, tokens) for tokens in ("256", "128")),
)


def selection_of(args: argparse.Namespace) -> Selection:
    """Return the selection of a `train` line's one run; `ValueError` names all that does not fit.

    Nothing is downloaded. A card that cannot train is no reason to take the CPU unasked.
    """
    lacking = Tier.PAPER.missing()
    require(
        lacking is None or smallest_device() is None,
        f"{lacking}; CUDA_VISIBLE_DEVICES= before the command trains on the CPU",
    )
    tier = Tier.SMOKE if lacking else Tier.PAPER
    arm, scale = _parts(args, on_gpu=tier is Tier.PAPER)
    model, data = Path(args.model).name, Path(args.data).name
    title = f"your run: {model} on {data}"
    own = Target(
        name=shortened(f"your_{slug_of(model)}_on_{slug_of(data)}"),
        title=title,
        statement=title,
        source="not in the paper",
        arms=(arm,),
        scales={tier: scale},
        needs={tier: needs_of_checkpoint(scale)},
    )
    changed = with_overrides(own, tier, parse_settings(args.set or []))
    scales = {tier: _ending(changed.scales[tier], args.until)}
    own = dataclasses.replace(own, arms=changed.arms, scales=scales)
    try:
        (run,) = Selection(target=own, tier=tier).plan()
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"arm {own.arms[0].name}: ")) from None
    require((why := unfit(run)) is None, str(why))
    _require_memory(own, run, args.ranks)
    own = dataclasses.replace(own, name=f"{own.name}_{run.digest()[:6]}")
    return Selection(target=own, tier=tier)


def _parts(args: argparse.Namespace, *, on_gpu: bool) -> tuple[Arm, TrainScale]:
    """Return the arm and the scale before `--set`."""
    steps, until, columns = args.steps, args.until, args.columns or ""
    checkpoint, source, reward, template, *_ = all_of(
        partial(model_source, args.model),
        partial(source_named, args.data),
        lambda: args.reward and reward_named(args.reward),
        lambda: args.template and template_source(args.template),
        partial(parse_columns, columns),
        partial(require_hub_name, args.model, args.revision),
        lambda: require(steps is None or steps >= 1, f"steps is {steps}; needs 1 or more"),
        lambda: require(args.seed >= 0, f"seed is {args.seed}; needs 0 or more"),
        lambda: require(
            until is None or 0 < until <= 100,
            f"until is {until}; needs a percentage above 0 and at most 100",
        ),
    )
    require(
        is_own(source) or not columns,
        f"columns is {columns!r}; those of {source} are known, leave it out",
    )
    scale = preset(checkpoint, source, columns, on_gpu=on_gpu)
    scale = dataclasses.replace(
        scale,
        revision=args.revision or revision_of(checkpoint),
        prompt_template=template or scale.prompt_template,
        seeds=(args.seed,),
    )
    parts = (args.format, "lora", *(["aqn"] if args.aqn else []), args.algorithm)
    arm = Arm(
        name="_".join(parts),
        label=f"{args.format.upper()}, LoRA{' + AQN' if args.aqn else ''}",
        weight_format=args.format,
        noise=NoiseConfig() if args.aqn else None,
        loss=_LOSSES[args.algorithm],
        reward="task" if reward else "finished",
        reward_function=reward,
    )
    return arm, scale if steps is None else in_steps(scale, steps)


def _ending(scale: TrainScale, until: float | None) -> TrainScale:
    """Return the scale with tests along the run, where it is to end at an accuracy."""
    if until is None:
        return scale
    every = max(1, scale.steps // _TESTS)
    at = scale.evaluation.test_at or tuple(range(every, scale.steps, every))
    require(bool(at), f"until is {until}; needs 2 steps or more, and steps is 1")
    ending = dataclasses.replace(scale.evaluation, until=float(until), test_at=at)
    return dataclasses.replace(scale, evaluation=ending)


def _require_memory(own: Target, run: RunConfig, ranks: int) -> None:
    """Raise `ValueError` where no row fits the GPU, or a CPU's RAM, with what would fit.

    Settings are tried in their order, each beside those before it that helped; those that the arm
    refuses are left out. Fewer rows need no less: one must fit, others wait.
    """
    on_cpu, tier, device = run.tier == Tier.SMOKE.value, Tier(run.tier), smallest_device()
    refused = memory_refusal(run, ranks)
    memory = training_memory(run.arm, run.scale, ranks, on_cpu=on_cpu)
    if refused is None or memory is None:
        return
    room = device.memory_bytes if device and not on_cpu else host_bytes()
    taken: dict[str, str] = {}
    for settings in _SMALLER:
        every = taken | settings
        texts = [f"{key}={value}" for key, value in every.items()]
        (changed,), _ = tried(partial(with_overrides, own, tier, parse_settings(texts)))
        if changed is None:  # such as 4 bits of an arm with a planted rounding
            continue
        less = training_memory(changed.arms[0], changed.scales[tier], ranks, on_cpu=on_cpu)
        if less and less.least < memory.least:
            memory, taken = less, every
        if memory.least <= room:
            break
    words = " ".join(f"--set {k}={v}" for k, v in taken.items()) or "its smallest setting"
    raise ValueError(f"{refused}; {words} needs {size(memory.least)}{_fitting_model(memory, room)}")


def _fitting_model(memory: TrainingMemory, room: int) -> str:
    """Return which size of model would fit where a run, by the smallest settings, does not."""
    if memory.least <= room:
        return ", which fits"
    steps = (dataclasses.replace(memory.step, shape=shape) for shape in reversed(SHAPES.values()))
    for smaller in (dataclasses.replace(memory, step=step) for step in steps):
        if smaller.least <= room:
            return f"; a model of {smaller.step.shape.name} would fit ({size(smaller.least)})"
    return f"; no size of {', '.join(SHAPES)} fits"


def request_text(selection: Selection, folder: Path, ranks: int) -> str:
    """Return the settings and the planned memory of a user's own run, as a few lines."""
    (run,) = selection.plan()
    arm, scale = run.arm, run.scale
    device = smallest_device()
    where, memory = "a CPU, as no GPU was found", training_memory(arm, scale, ranks, on_cpu=True)
    if memory is not None:
        where += f"; at least {size(memory.least)} of {size(host_bytes())} of RAM"
    if run.tier != Tier.SMOKE.value and device is not None:
        peak = memory_of(arm, scale, ranks)[0]
        known = "not known before the model's config is here" if peak is None else size(peak)
        where = f"{ranks} x {device.name}; {known} of {size(device.memory_bytes)} each"
    own = arm.reward_function
    reward = f"{own.module}:{own.function}" if own else "1 for a right answer that ended, else 0"
    reads = READINGS[template_named(scale.prompt_template).reads].example
    rate = scale.optimizer.learning_rates.of(arm)
    tested = scale.data.test_problems or "all"
    until = scale.evaluation.until
    return "\n".join(
        (
            selection.target.title,
            f"  model     {arm.label} of rank {arm.lora_rank}, {arm.loss.name.upper()}",
            f"  steps     {scale.steps} of {scale.prompts_per_rollout} prompts x "
            f"{scale.group_size} completions of at most {scale.rollout.max_new_tokens} tokens",
            f"  rate      {rate:g} at its peak, {scale.optimizer.schedule}; seed {run.seed}",
            f"  reward    {reward}",
            f"  prompt    template {scale.prompt_template.splitlines()[0]}; answers as {reads}",
            f"  tests     {tested} held-out problems at most, greedily, before and after"
            + (f"; training ends at {until:g} %" if until else ""),
            f"  device    {where}",
            f"  records   {folder}; the same command resumes and never trains twice",
        )
    )
