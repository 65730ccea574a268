"""A run of a user's own: what was requested, as the one run of a target that nobody judges.

The target is made from the settings of `repro.targets.presets`. Its name has a digest of the whole
configuration, so that a request with any other setting has a record of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from repro.data.load import is_own, source_named
from repro.data.own import parse_columns
from repro.data.prompts import template_source
from repro.models.memory_plan import training_memory
from repro.reward.custom import reward_named
from repro.run.disk import size
from repro.run.preflight import memory_of, require_fit, smallest_device
from repro.run.select import Selection, model_source, revision_of
from repro.spec.arm import (
    DAPO,
    GRPO,
    GSPO,
    Arm,
    NoiseConfig,
    RewardFunction,
    WeightFormat,
)
from repro.spec.checks import all_of, require, require_choice
from repro.spec.config import RunConfig, TrainScale
from repro.spec.needs import needs_of_checkpoint
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.spec.variants import in_steps, shortened, slug_of, with_overrides
from repro.targets.presets import preset

Algorithm = Literal["grpo", "dapo", "gspo"]
_LOSSES = {"grpo": GRPO, "dapo": DAPO, "gspo": GSPO}
# Tests along a run that is to end at an accuracy.
_TESTS = 10
# Tokens of a completion that are proposed where more do not fit.
_SHORTER = (256, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What a user requests to be trained: the parameters of `repro.train` of the same names.

    Attributes
    ----------
    reward
        `module:function`, or None for 1 where an answer is right.
    settings
        Nested values, as `repro.spec.settings.parse_settings` returns them.
    """

    model: str
    data: str
    columns: str = ""
    reward: str | None = None
    format: str = "nvfp4"
    aqn: bool = False
    algorithm: str = "grpo"
    template: str | None = None
    steps: int | None = None
    until: float | None = None
    seed: int = 0
    ranks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def selection(self) -> Selection:
        """Return the selection of the one run; `ValueError` names all that does not fit.

        Nothing is downloaded.
        """
        tier = Tier.SMOKE if Tier.PAPER.missing() else Tier.PAPER
        arm, scale = self._parts(on_gpu=tier is Tier.PAPER)
        title = f"your run: {Path(self.model).name} on {Path(self.data).name}"
        own = Target(
            name=shortened(
                f"your_{slug_of(Path(self.model).name)}_on_{slug_of(Path(self.data).name)}"
            ),
            title=title,
            statement=title,
            source="not in the paper",
            arms=(arm,),
            scales={tier: scale},
            needs={tier: needs_of_checkpoint(scale)},
        )
        changed = with_overrides(own, tier, self.settings)
        scales = {tier: self._ending(changed.scales[tier])}
        own = dataclasses.replace(own, arms=changed.arms, scales=scales)
        (run,) = Selection(target=own, source=own, tier=tier).plan()
        require_fit([run])
        _require_memory(run, self.ranks)
        own = dataclasses.replace(own, name=f"{own.name}_{run.digest()[:6]}")
        return Selection(target=own, source=own, tier=tier)

    def _parts(self, *, on_gpu: bool) -> tuple[Arm, TrainScale]:
        """Return the arm and the scale before `settings`."""
        checkpoint, source, reward, template, *_ = all_of(
            partial(model_source, self.model),
            partial(source_named, self.data),
            lambda: self.reward and reward_named(self.reward),
            lambda: self.template and template_source(self.template),
            partial(parse_columns, self.columns),
            partial(require_choice, "format", self.format, WeightFormat),
            partial(require_choice, "algorithm", self.algorithm, Algorithm),
            lambda: require(self.seed >= 0, f"seed is {self.seed}; it must be 0 or more"),
            lambda: require(
                self.steps is None or self.steps >= 1, f"steps is {self.steps}; needs 1 or more"
            ),
            lambda: require(
                self.until is None or 0 < self.until <= 100,
                f"until is {self.until}; needs a percentage above 0 and at most 100",
            ),
        )
        require(
            is_own(source) or not self.columns,
            f"columns is {self.columns!r}; those of {source} are known, leave it out",
        )
        scale = preset(checkpoint, source, self.columns, on_gpu=on_gpu)
        scale = dataclasses.replace(
            scale,
            revision=revision_of(checkpoint),
            prompt_template=template or scale.prompt_template,
            seeds=(self.seed,),
        )
        return self._arm(reward), scale if self.steps is None else in_steps(scale, self.steps)

    def _arm(self, reward: RewardFunction | None) -> Arm:
        parts = (self.format, "lora", *(["aqn"] if self.aqn else []))
        return Arm(
            name="_".join((*parts, self.algorithm)),
            label=f"{self.format.upper()}, LoRA{' + AQN' if self.aqn else ''}",
            weight_format=self.format,  # type: ignore[arg-type]  # checked above
            noise=NoiseConfig() if self.aqn else None,
            loss=_LOSSES[self.algorithm],
            reward="task" if reward else "finished",
            reward_function=reward,
        )

    def _ending(self, scale: TrainScale) -> TrainScale:
        """Return the scale with tests along the run, where it is to end at an accuracy."""
        if self.until is None:
            return scale
        every = max(1, scale.steps // _TESTS)
        at = scale.evaluation.test_at or tuple(range(every, scale.steps, every))
        require(bool(at), f"until is {self.until}; needs 2 steps or more, and steps is 1")
        ending = dataclasses.replace(scale.evaluation, until=float(self.until), test_at=at)
        return dataclasses.replace(scale, evaluation=ending)


def _require_memory(run: RunConfig, ranks: int) -> None:
    """Raise `ValueError` where no row fits the device, with the settings that would."""
    if run.tier == Tier.SMOKE.value:
        return
    _, refused = memory_of(run.arm, run.scale, ranks)
    if refused is None:
        return
    device = smallest_device()
    fitting = [
        f"{words} ({size(memory.least)})"
        for words, arm, scale in _smaller(run)
        if (memory := training_memory(arm, scale, ranks))
        and (device is None or memory.least <= device.memory_bytes)
    ]
    proposed = f"what fits: {'; or '.join(fitting)}" if fitting else "no smaller setting fits"
    raise ValueError(f"{refused}; {proposed}")


def _smaller(run: RunConfig) -> list[tuple[str, Arm, TrainScale]]:
    """Return settings that need less memory than a run's, in words and as arm and scale."""
    arm, scale = run.arm, run.scale
    nvfp4 = dataclasses.replace(arm, weight_format="nvfp4", training="lora", rounding=None)
    shorter = [(tokens, _with_tokens(scale, tokens)) for tokens in _SHORTER]
    formats = [] if arm.weight_format == "nvfp4" else [("--format nvfp4", nvfp4, scale)]
    return formats + [
        (
            f"--format nvfp4 --set rollout.max_new_tokens={tokens} "
            f"--set evaluation.sampling.max_new_tokens={tokens}",
            nvfp4,
            smaller,
        )
        for tokens, smaller in shorter
        if tokens < scale.longest_completion
    ]


def _with_tokens(scale: TrainScale, tokens: int) -> TrainScale:
    sampling = dataclasses.replace(scale.evaluation.sampling, max_new_tokens=tokens)
    return dataclasses.replace(
        scale,
        rollout=dataclasses.replace(scale.rollout, max_new_tokens=tokens),
        evaluation=dataclasses.replace(scale.evaluation, sampling=sampling),
    )


def request_text(selection: Selection, folder: Path, ranks: int) -> str:
    """Return the settings and the planned memory of a user's own run, as a few lines."""
    (run,) = selection.plan()
    arm, scale = run.arm, run.scale
    device = smallest_device()
    where = "a CPU; memory is not planned"
    if run.tier != Tier.SMOKE.value and device is not None:
        peak = memory_of(arm, scale, ranks)[0]
        known = "not known before the model's config is here" if peak is None else size(peak)
        where = f"{ranks} x {device.name}; {known} of {size(device.memory_bytes)} each"
    own = arm.reward_function
    reward = f"{own.module}:{own.function}" if own else "1 for a right answer that ended, else 0"
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
            f"  reward    {reward}; prompt template {scale.prompt_template.splitlines()[0]}",
            f"  tests     {tested} held-out problems at most, greedily, before and after"
            + (f"; training ends at {until:g} %" if until else ""),
            f"  device    {where}",
            f"  records   {folder}; the same command resumes and never trains twice",
        )
    )
