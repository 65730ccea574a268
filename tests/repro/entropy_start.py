"""A target paired by prompt: the entropy of rounded weights before anything is learned.

Paired by prompt, so no training and no seeds are needed. But a rounding or a noise is drawn once
here, and prompts do not repeat it: they say how well *this* rounding is measured, not what rounding
does. So no statement is judged; the effects are shown. Along training the question is Fig. 5's and
Fig. 14's own.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm, NoiseConfig, WeightNoise
from repro.spec.effect import Assay, Effect
from repro.spec.target import Claim, Metric, Target
from repro.targets import paper_effects
from repro.targets.table1 import BF16, MXFP4, NF4, NVFP4

_FORMATS = (NF4, MXFP4, NVFP4)
# An adapter that has not been trained adds nothing; only adapted arms may carry added noise.
_NOISY = tuple(
    dataclasses.replace(
        arm,
        name=f"{arm.name}_noisy",
        label=f"{arm.weight_format.upper()} with AQN of the first noisy stage",
        training="lora",
        noise=NoiseConfig(),
    )
    for arm in (BF16, NVFP4)
)
_MATCHED = tuple(
    dataclasses.replace(
        BF16,
        name=f"bf16_noise_as_{arm.name}",
        label=f"BF16 + Gaussian noise as strong as {arm.weight_format.upper()}, untrained",
        weight_noise=WeightNoise(matched_to=arm.weight_format),
    )
    for arm in _FORMATS
)
_WORDS = {"own": "on its own samples", "forced": "on the same tokens"}
_NOISE_DRAWN_ONCE = Assay(
    kind="design",
    because="the noise is drawn once, and prompts under one draw of it say nothing of another",
)


def _more(
    name: str, statement: str, source: str, first: Arm, second: Arm, how: str, effect: Effect
) -> Claim:
    rounds = first.weight_format != second.weight_format
    return Claim(
        name=f"{name}_{how}",
        statement=f"{statement}, {_WORDS[how]}",
        source=source,
        kind="difference",
        arms=(first.name, second.name),
        metric=f"entropy_{how}",
        factor=("weight_format", "weight_noise", "noise", "training"),
        effect=effect,
        paired_by="prompt",
        assays=() if rounds else (_NOISE_DRAWN_ONCE,),
        unit="rounding draw" if rounds else None,
        draws=1 if rounds else None,
    )


ENTROPY_START = Target(
    name="entropy_start",
    title="Fig. 5 and 14 at step 0: entropy by weight format, prompt by prompt",
    statement="quantised weights have more entropy than BF16 before any training",
    source="Fig. 5, first step; section 3.2",
    procedure="dose",
    arms=(BF16, *_FORMATS, *_NOISY, *_MATCHED),
    metrics=(
        Metric(name="entropy_own", unit="nats", title="entropy, own samples", better="neither"),
        Metric(name="entropy_forced", unit="nats", title="entropy, same tokens", better="neither"),
    ),
    claims=tuple(
        claim
        for how in _WORDS
        for claim in (
            *(
                _more(
                    f"{arm.name}_more_entropy",
                    f"{arm.weight_format.upper()} weights have more entropy than BF16",
                    "Fig. 5",
                    arm,
                    BF16,
                    how,
                    paper_effects.ENTROPY[arm.weight_format],
                )
                for arm in _FORMATS
            ),
            _more(
                "aqn_more_entropy",
                "AQN at its start raises the entropy of NVFP4 weights",
                "section 3.3",
                _NOISY[1],
                NVFP4,
                how,
                paper_effects.OPEN_SHARE,
            ),
            _more(
                "aqn_more_entropy_bf16",
                "AQN at its start raises the entropy of BF16 weights",
                "not in the paper; a control",
                _NOISY[0],
                BF16,
                how,
                paper_effects.OPEN_SHARE,
            ),
            *(
                _more(
                    f"noise_as_{arm.name}_more_entropy",
                    f"Gaussian weight noise as strong as {arm.weight_format.upper()} raises the "
                    "entropy of BF16 weights",
                    "not in the paper; a control",
                    matched,
                    BF16,
                    how,
                    paper_effects.OPEN_SHARE,
                )
                for arm, matched in zip(_FORMATS, _MATCHED, strict=True)
            ),
        )
    ),
    headline="entropy_own",
    why_not="its scale is that of a real checkpoint, and none has been measured yet",
)
