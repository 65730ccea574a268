"""One look, one label and one place in the order per arm, the same in every figure.

A look is a colour and a kind of line. Arms that are a variant of one in Table 1 keep its colour
and have another line; broken lines have added noise, but for the sweep of learning rates, where
the line says the rate. Of two arms in one picture, those with lines of one kind have colours that
are told apart by people with the common kinds of colour blindness, too (a test says so for every
target).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from repro.targets.ladder.needle import RATES
from repro.targets.ladder.rates import GRID
from repro.targets.ladder.skill import FULL_RATES, LORA_RATES

Line = str | tuple[float, tuple[float, ...]]

_DOTS: Line = ":"
_DASHES: Line = "--"
_DASH_DOT: Line = "-."
_DASH_DOTS: Line = (0.0, (5.0, 1.5, 1.0, 1.5, 1.0, 1.5))

_BF16, _NF4, _MXFP4, _NVFP4, _AQN = "#5a5a5a", "#b8860b", "#2f7fb5", "#c0392b", "#6c3483"
_FULL, _TEAL, _SIENNA, _PINK = "#000000", "#17807e", "#a0522d", "#b04a8f"
# Formats without training: lighter.
_PALE = {"bf16": "#7f7f7f", "nf4": "#c9a227", "mxfp4": "#66a3c7", "nvfp4": "#d98880"}


@dataclass(frozen=True, slots=True)
class Look:
    """How an arm is drawn and what it is called: label, colour, kind of line."""

    label: str
    colour: str
    line: Line = "-"


_UNTRAINED = {name: Look(name.upper(), tone) for name, tone in _PALE.items()}
_TABLE1 = {
    "bf16_full": Look("BF16 full", _FULL),
    "bf16_lora": Look("BF16 LoRA", _BF16),
    "bf16_lora_aqn": Look("BF16 LoRA + AQN", _BF16, _DASHES),
    "nf4_lora": Look("NF4 LoRA", _NF4),
    "nf4_lora_aqn": Look("NF4 LoRA + AQN", _NF4, _DASHES),
    "mxfp4_lora": Look("MXFP4 LoRA", _MXFP4),
    "mxfp4_lora_aqn": Look("MXFP4 LoRA + AQN", _MXFP4, _DASHES),
    "nvfp4_lora": Look("NVFP4 LoRA", _NVFP4),
    "nvfp4_lora_aqn": Look("NVFP4 LoRA + AQN", _AQN, _DASHES),
}
_PRODUCTS = {
    "nf4_lora_bitsandbytes": Look("NF4 LoRA, bitsandbytes", _TEAL),
    "nvfp4_lora_released": Look("NVFP4 LoRA, released code", _SIENNA),
}
_REWARDS = {
    "bf16_lora_random_reward": Look("random reward", "#8c8c8c"),
    "bf16_lora_format_reward": Look("format reward only", "#6fbf8f"),
    "bf16_lora_answer": Look("BF16 LoRA, answer alone", _BF16),
    "nvfp4_lora_answer": Look("NVFP4 LoRA, answer alone", _NVFP4),
    "nvfp4_lora_aqn_answer": Look("NVFP4 LoRA + AQN, answer alone", _AQN, _DASHES),
}
_SCHEDULES = {
    "aqn_exponential": Look("AQN, exponential", _AQN, _DASHES),
    "aqn_linear": Look("AQN, linear", _TEAL, _DASH_DOT),
    "aqn_cosine": Look("AQN, cosine", _SIENNA, _DOTS),
    "aqn_logarithmic": Look("AQN, logarithmic", _PINK, _DASH_DOTS),
}
_RANKS = {
    "rank_16": Look("rank 16", _TEAL, _DOTS),
    "rank_32": Look("rank 32", _AQN, _DASHES),
    "rank_64": Look("rank 64", _SIENNA, _DASH_DOT),
    "rank_128": Look("rank 128", _PINK, _DASH_DOTS),
}
_RATES = {
    "qerl_5e6": Look("QeRL, 0.5 x rate", _AQN, _DASHES),
    "qerl_3e5": Look("QeRL, 3 x rate", _TEAL, _DASH_DOT),
    "lora_5e6": Look("BF16 LoRA, 1 x rate", _BF16),
    "lora_3e5": Look("BF16 LoRA, 6 x rate", _PINK, _DASH_DOT),
}
_SWEEP = {
    f"{name}_{rate}": Look(f"{look.label}, {rate} rate", look.colour, line)
    for name, look in _TABLE1.items()
    for rate, line in (("low", _DOTS), ("middle", _DASH_DOT), ("high", "-"))
}
_NORMS = {
    "bf16_lora_norms": Look("BF16 LoRA, norms too", _BF16, _DOTS),
    "nvfp4_lora_norms": Look("NVFP4 LoRA, norms too", _NVFP4, _DOTS),
    "nvfp4_lora_aqn_norms": Look("NVFP4 LoRA + AQN, norms too", _AQN, _DASH_DOT),
}
_REACH = {
    "aqn_shared": Look("AQN, shared with trainer", _TEAL, _DASH_DOT),
    "aqn_corrected": Look("AQN, corrected", _NF4, _DOTS),
    "aqn_sampler_ratio": Look("AQN, ratio to sampler", _PINK, _DASH_DOTS),
}
_MATCHED = {
    f"bf16_lora_noise_as_{name}": Look(f"BF16 LoRA, noise as {name.upper()}", tone, _DOTS)
    for name, tone in (("nf4", _NF4), ("mxfp4", _MXFP4), ("nvfp4", _NVFP4))
}
_START = {
    "bf16_noisy": Look("BF16 + AQN", _BF16, _DASHES),
    "nvfp4_noisy": Look("NVFP4 + AQN", _AQN, _DASHES),
    "bf16_noise_as_nf4": Look("BF16, noise as NF4", _PALE["nf4"], _DOTS),
    "bf16_noise_as_mxfp4": Look("BF16, noise as MXFP4", _PALE["mxfp4"], _DOTS),
    "bf16_noise_as_nvfp4": Look("BF16, noise as NVFP4", _PALE["nvfp4"], _DOTS),
}
_RELEASED = {
    "as_published_bf16": Look("as published, BF16", _BF16),
    "as_published": Look("as published, inert noise", _NVFP4),
    "as_released": Look("as published, acting noise", _AQN, _DASHES),
}
_SUPERVISED = {
    "bf16_sft": Look("BF16 SFT", _BF16),
    "bf16_sft_aqn": Look("BF16 SFT + AQN", _BF16, _DASHES),
    "nvfp4_sft": Look("NVFP4 SFT", _NVFP4),
    "nvfp4_sft_aqn": Look("NVFP4 SFT + AQN", _AQN, _DASHES),
    "nvfp4_x4_sft": Look("NVFP4 x4 SFT", _NVFP4, _DASH_DOTS),
    "int2_sft": Look("INT2 SFT", _TEAL, _DOTS),
}
# The ladder: at its chosen rate an arm is Table 1's, at another the line says the rate.
_LONG: Line = (0.0, (9.0, 2.0))
_SHORT: Line = (0.0, (2.0, 2.0))
_WIDE_DOTS: Line = (0.0, (1.0, 3.5))
# Of the sweeps and of the grid on which runs collapse, which share rates.
_OTHER_RATES = {
    "88e6": _DASH_DOTS,
    "175e6": _DASH_DOT,
    "35e5": _SHORT,
    "7e4": _DOTS,
    "1e3": _DASH_DOT,
    "17e4": _DOTS,
    "2e3": _DASH_DOTS,
    "24e4": _DASH_DOT,
    "28e4": _WIDE_DOTS,
}
_LADDER_RATES = {
    f"{name}_{rate}": Look(
        f"{_TABLE1[name].label}, {value:g}",
        _TABLE1[name].colour,
        _OTHER_RATES.get(rate, _TABLE1[name].line),
    )
    for name in ("bf16_lora", "nvfp4_lora", "nvfp4_lora_aqn")
    for rate, value in (LORA_RATES | RATES | GRID).items()
}
_FULL_RATES = {
    f"bf16_full_{name}": Look(f"{_TABLE1['bf16_full'].label}, {rate:g}", _FULL, line)
    for (name, rate), line in zip(
        FULL_RATES.items(), (_LONG, _DASH_DOT, "-", _WIDE_DOTS), strict=True
    )
}
_EXPLORATION = {
    "opening_warmer": Look("BF16 LoRA, decision warmer", _TEAL, _DOTS),
    "opening_colder": Look("BF16 LoRA, decision colder", _SIENNA, _DASH_DOT),
    "rollout_colder": Look("BF16 LoRA, rollouts colder", _PINK, _DASH_DOTS),
}
_RARE = {
    f"{name}_rare": Look(f"{one.label}, rare habit", one.colour, one.line)
    for name, one in (_TABLE1 | _EXPLORATION).items()
}
_COMMON = {
    f"{name}_common": Look(
        f"{one.label}, common habit", one.colour, _WIDE_DOTS if name in _EXPLORATION else _SHORT
    )
    for name, one in (_TABLE1 | _EXPLORATION).items()
}
# One policy per kind of line: the arm has the colour. Lines with noise are broken, as everywhere.
_OF_POLICIES = {
    "bf16_lora": ("-", _DASHES, _DOTS, _DASH_DOT),
    "nvfp4_lora": ("-", _DASHES, _DOTS, _DASH_DOT),
    "nvfp4_lora_aqn": (_LONG, _SHORT, _WIDE_DOTS, _DASH_DOTS),
    "opening_colder": (_WIDE_DOTS, _LONG, _SHORT, _DASH_DOTS),
}
_PRETRAINED = {
    f"{name}_seed{seed}": Look(f"{one.label}, policy {seed}", one.colour, line)
    for name, one in (_TABLE1 | _EXPLORATION).items()
    for seed, line in enumerate(_OF_POLICIES.get(name, ()))
}
_LADDER_RANKS = {
    f"rank_{rank}_{alpha}": Look(
        f"rank {rank}, alpha {'32' if alpha == 'fixed' else rank}", tone, line
    )
    for rank, tone in (("16", _TEAL), ("128", _NF4))
    for alpha, line in (("fixed", _DASHES), ("grown", _DASH_DOT))
}
_DOSES = {
    "nvfp4_x2": Look("NVFP4 x2 LoRA", _NVFP4, _DOTS),
    "nvfp4_x3": Look("NVFP4 x3 LoRA", _NVFP4, _DASH_DOT),
    "nvfp4_x4": Look("NVFP4 x4 LoRA", _NVFP4, _DASH_DOTS),
    "int3_lora": Look("INT3 LoRA", _TEAL, _LONG),
    "int2_lora": Look("INT2 LoRA", _TEAL, _SHORT),
    "aqn_01": Look("NVFP4 LoRA + AQN from 0.1", _AQN, _LONG),
    "aqn_03": Look("NVFP4 LoRA + AQN from 0.3", _AQN, _SHORT),
    "noise_as_nvfp4": Look("BF16 LoRA, noise as NVFP4 on completions", _BF16, _DOTS),
    "nvfp4_lora_aqn_apart": Look("NVFP4 LoRA + AQN, a draw per projection", _PINK, _DASHES),
    "aqn_01_apart": Look("NVFP4 LoRA + AQN from 0.1, a draw per projection", _PINK, _LONG),
}
# In the order of the paper's table, then of its figures, then the controls.
LOOKS: dict[str, Look] = (
    _UNTRAINED | _TABLE1 | _PRODUCTS | _REWARDS | _SCHEDULES | _RANKS | _RATES | _SWEEP
    | _NORMS | _REACH | _MATCHED | _START | _RELEASED | _SUPERVISED
    | _LADDER_RATES | _FULL_RATES | _EXPLORATION | _RARE | _COMMON | _PRETRAINED | _DOSES
    | _LADDER_RANKS
)  # fmt: skip
CONTROLS = ("bf16_lora_random_reward", "bf16_lora_format_reward")
_WORDS = {name: name.upper() for name in ("bf16", "nf4", "mxfp4", "nvfp4", "aqn")} | {
    "lora": "LoRA"
}


def look(arm: str) -> Look:
    """Return the arm's look; one that no target declares any more is pale and dotted."""
    words = " ".join(_WORDS.get(word, word) for word in arm.split("_"))
    return LOOKS.get(arm, Look(words, "#9a9a9a", _DOTS))


def colour(arm: str) -> str:
    """Return the arm's colour."""
    return look(arm).colour


def dash(arm: str) -> Line:
    """Return the arm's kind of line."""
    return look(arm).line


def short(arm: str) -> str:
    """Return the arm's short label."""
    return look(arm).label


def order(arms: Sequence[str]) -> list[str]:
    """Return the arms in the order of the looks, unknown ones last."""
    known = list(LOOKS)
    return sorted(arms, key=lambda arm: (known.index(arm) if arm in known else len(known), arm))
