"""The same noise under supervised fine-tuning: the other side of the paper's contrast.

The paper's finding is that noise from quantisation helps reinforcement learning, "in contrast with"
what is known of supervised fine-tuning (section 1, citing others; it has no experiment of its own).
Two formats with and without AQN are trained on worked solutions, with the steps, tokens and
learning rates of the proxy tier's reinforcement learning. There is no rollout, so the noise lies on
each step's forward and backward pass (`reach` is `shared`). What the same noise does under
reinforcement learning is read from `aqn_factorial` (noise in the rollout) and `noise_reach` (noise
shared).

The problems are of level 6, not of the levels 4 and 5 that reinforcement learning has. On those the
policy was pre-trained: solutions of its own generator cost it 0.03 nats per token untrained (a
probe of 60 problems), only the habit of working remains to learn, and noise could harm nothing.
Every second problem of level 6 reaches numbers above 999, which it has never seen: 1.7 nats per
token in the same probe. The choice was made before any run of this target. It makes this a control
of its own: beside reinforcement learning it stands with other problems.

The learning rates are those chosen for reinforcement learning, the same with and without noise.

One checkpoint has one rounding, and before any training its loss lies above or below BF16's by that
rounding's luck; so of rounding `noise_in_sft` can say nothing. `noise_in_sft_draws` asks of twelve:
each seed has its own order of channels, the same function under another draw of every rounding.
Four times NVFP4's error and rounding to two bits stand beside it, which must be seen to harm where
harm can be seen at all.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm, NoiseConfig, PlantedRounding
from repro.spec.effect import Assay, Unit
from repro.spec.target import Claim, Metric, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects, proxy
from repro.targets.table1 import metrics_named

_CONTROL = "not in the paper; a control"
_CONTRAST = "section 1 (of quantisation noise, citing results of others)"


def _noisy(arm: Arm) -> Arm:
    noise = NoiseConfig(reach="shared")
    return dataclasses.replace(arm, name=f"{arm.name}_aqn", label=f"{arm.label} + AQN", noise=noise)


_BF16 = Arm(name="bf16_sft", label="BF16, LoRA, supervised", weight_format="bf16")
_NVFP4 = Arm(name="nvfp4_sft", label="NVFP4, LoRA, supervised", weight_format="nvfp4")
_PLAIN = (_BF16, _NVFP4)


def _harm(
    name: str,
    what: str,
    harmed: Arm,
    other: Arm,
    source: str,
    *factor: str,
    unit: Unit | None = None,
    draws: int | None = None,
    assays: tuple[Assay, ...] = (),
) -> list[Claim]:
    """Return the claims that `harmed` ends less accurate, and with a higher loss, than `other`."""
    return [
        Claim(
            name=f"{name}_lowers_accuracy",
            statement=f"under supervised fine-tuning, {what} lowers the held-out accuracy",
            source=source,
            kind="difference",
            arms=(other.name, harmed.name),
            metric="accuracy",
            factor=factor,
            effect=paper_effects.OPEN_SHARE,
            unit=unit,
            draws=draws,
            assays=assays,
        ),
        Claim(
            name=f"{name}_raises_loss",
            statement=f"under supervised fine-tuning, {what} raises the held-out loss",
            source=source,
            kind="difference",
            arms=(harmed.name, other.name),
            metric="solution_loss",
            factor=factor,
            effect=paper_effects.OPEN_SHARE,
            unit=unit,
            draws=draws,
            assays=assays,
        ),
    ]


_METRICS = (
    *metrics_named(
        "accuracy", "accuracy_greedy", "accuracy_greedy_start", "gain_greedy", "format_rate",
        "working_rate", "completion_tokens_mean",
    ),
    Metric(
        name="solution_loss_start", unit="nats",
        title="held-out loss before training", better="neither",
    ),
    Metric(name="solution_loss", unit="nats", title="held-out loss", better="lower"),
    Metric(
        name="train_loss_first", unit="nats",
        title="training loss, first steps", better="neither",
    ),
    Metric(
        name="train_loss_last", unit="nats", title="training loss, last steps", better="lower"
    ),
    *metrics_named("train_seconds", "peak_bytes"),
    *proxy.METRICS,
)  # fmt: skip

NOISE_IN_SFT = Target(
    name="noise_in_sft",
    title="The same noise under supervised fine-tuning, on numbers never seen",
    statement="noise that may help reinforcement learning harms supervised fine-tuning",
    source=_CONTRAST,
    procedure="finetune",
    arms=(_BF16, _noisy(_BF16), _NVFP4, _noisy(_NVFP4)),
    metrics=_METRICS,
    claims=(
        *_harm(
            "rounding", "NVFP4's rounding", _NVFP4, _BF16, _CONTRAST,
            "weight_format", "learning_rate",
            # The loss differs by more before any training: one rounding's luck.
            unit="rounding draw", draws=1,
        ),
        *(
            claim
            for arm in _PLAIN
            for claim in _harm(
                f"aqn_on_{arm.weight_format}", f"AQN on {arm.weight_format.upper()} weights",
                _noisy(arm), arm, _CONTROL, "noise",
            )
        ),
        *(
            Claim(
                name=f"{arm.name}_learns",
                statement=f"training on worked solutions lifts the accuracy of {arm.label}",
                source=_CONTROL,
                kind="gain",
                arms=(arm.name,),
                metric="gain_greedy",
                mechanism=True,
            )
            for arm in _PLAIN
        ),
    ),
    scales={Tier.PROXY: proxy.PROXY_UNSEEN},
    needs={Tier.PROXY: proxy.NEEDS},
    headline="accuracy",
    why_not="a control at the proxy tier alone",
)  # fmt: skip


_DRAWS = 12
# No other run has had these seeds.
_SCALE = dataclasses.replace(
    proxy.PROXY_UNSEEN, test_sets=(), permuted=True, seeds=tuple(range(280, 280 + _DRAWS))
)


def _planted(name: str, label: str, rounding: PlantedRounding) -> Arm:
    return dataclasses.replace(
        _BF16, name=f"{name}_sft", label=f"{label}, LoRA, supervised", rounding=rounding
    )


_X4 = _planted("nvfp4_x4", "4 times NVFP4's rounding", PlantedRounding(format="nvfp4", factor=4.0))
_INT2 = _planted("int2", "INT2 rounding", PlantedRounding(format="int2"))
_HARM_SHOWS = Assay(
    kind="control",
    claim="two_bits_raises_loss",
    because="where rounding to two bits does not raise the loss, no rounding can be seen to",
)
NOISE_IN_SFT_DRAWS = Target(
    name="noise_in_sft_draws",
    title="Rounding under supervised fine-tuning, twelve draws of it",
    statement=NOISE_IN_SFT.statement,
    source=_CONTRAST,
    procedure="finetune",
    arms=(_BF16, _NVFP4, _X4, _INT2),
    metrics=_METRICS,
    claims=(
        *_harm(
            "rounding", "NVFP4's rounding", _NVFP4, _BF16, _CONTRAST,
            "weight_format", "learning_rate",
            unit="rounding draw", draws=_DRAWS, assays=(_HARM_SHOWS,),
        ),
        *_harm(
            "four_times", "four times NVFP4's rounding", _X4, _BF16, _CONTROL, "rounding",
            unit="rounding draw", draws=_DRAWS, assays=(_HARM_SHOWS,),
        ),
        *_harm(
            "two_bits", "rounding to two bits", _INT2, _BF16, _CONTROL, "rounding",
            unit="rounding draw", draws=_DRAWS,
        ),
    ),
    scales={Tier.PROXY: _SCALE},
    needs={Tier.PROXY: proxy.NEEDS},
    headline="solution_loss",
    why_not=NOISE_IN_SFT.why_not,
)  # fmt: skip
