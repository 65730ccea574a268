"""One style, one label and one place in the order per arm, the same in every figure.

A style is a colour and a kind of line. Arms that are a variant of one in Table 1 keep its colour
and have another line; broken lines have added noise, but for the sweep of learning rates, where
the line says the rate. Of two arms in one picture, those with lines of one kind have colours that
are told apart by people with the common kinds of colour blindness, too (a test says so for every
target).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
class Style:
    """How an arm is drawn and what it is called: label, colour, kind of line."""

    label: str
    colour: str
    line: Line = "-"


_UNTRAINED = {name: Style(name.upper(), tone) for name, tone in _PALE.items()}
_TABLE1 = {
    "bf16_full": Style("BF16 full", _FULL),
    "bf16_lora": Style("BF16 LoRA", _BF16),
    "nf4_lora": Style("NF4 LoRA", _NF4),
    "mxfp4_lora": Style("MXFP4 LoRA", _MXFP4),
    "nvfp4_lora": Style("NVFP4 LoRA", _NVFP4),
    "nvfp4_lora_aqn": Style("NVFP4 LoRA + AQN", _AQN, _DASHES),
}
_PRODUCTS = {
    "nf4_lora_bitsandbytes": Style("NF4 LoRA, bitsandbytes", _TEAL),
    "nvfp4_lora_released": Style("NVFP4 LoRA, released code", _SIENNA),
}
_REWARDS = {
    "bf16_lora_random_reward": Style("random reward", "#8c8c8c"),
    "bf16_lora_format_reward": Style("format reward only", "#6fbf8f"),
}
_SCHEDULES = {
    "aqn_exponential": Style("AQN, exponential", _AQN, _DASHES),
    "aqn_linear": Style("AQN, linear", _TEAL, _DASH_DOT),
    "aqn_cosine": Style("AQN, cosine", _SIENNA, _DOTS),
    "aqn_logarithmic": Style("AQN, logarithmic", _PINK, _DASH_DOTS),
}
_RANKS = {
    "rank_16": Style("rank 16", _TEAL, _DOTS),
    "rank_32": Style("rank 32", _AQN, _DASHES),
    "rank_64": Style("rank 64", _SIENNA, _DASH_DOT),
    "rank_128": Style("rank 128", _PINK, _DASH_DOTS),
}
_RATES = {
    "qerl_5e6": Style("QeRL, 0.5 x rate", _AQN, _DASHES),
    "qerl_3e5": Style("QeRL, 3 x rate", _TEAL, _DASH_DOT),
    "lora_5e6": Style("BF16 LoRA, 1 x rate", _BF16),
    "lora_3e5": Style("BF16 LoRA, 6 x rate", _PINK, _DASH_DOT),
}
_SWEEP = {
    f"{name}_{rate}": Style(f"{style.label}, {rate} rate", style.colour, line)
    for name in ("bf16_lora", "nf4_lora", "nvfp4_lora")
    for style in (_TABLE1[name],)
    for rate, line in (("low", _DOTS), ("middle", _DASH_DOT), ("high", "-"))
}
_DOSES = {
    "nvfp4_half": Style("half of NVFP4's error", _NVFP4, _DOTS),
    "nvfp4_x2": Style("twice NVFP4's error", _NVFP4, _DASH_DOT),
    "nvfp4_lora_aqn_x5": Style("NVFP4 LoRA + 5 x AQN", _AQN, _DASH_DOTS),
    "bf16_lora_twice_rate": Style("BF16 LoRA, 2 x rate", _BF16, _DASH_DOT),
    "bf16_lora_t90": Style("BF16 LoRA, T 0.9", _TEAL, _DOTS),
    "bf16_lora_t110": Style("BF16 LoRA, T 1.1", _TEAL, _DASHES),
    "bf16_t90": Style("BF16, T 0.9", _BF16, _DOTS),
    "bf16_t110": Style("BF16, T 1.1", _TEAL, _DOTS),
    "bf16_t120": Style("BF16, T 1.2", _PINK, _DOTS),
}
# In the order of the paper's table, then of its figures, then the controls.
STYLES: dict[str, Style] = (
    _UNTRAINED | _TABLE1 | _PRODUCTS | _REWARDS | _SCHEDULES | _RANKS | _RATES | _SWEEP | _DOSES
)
CONTROLS = ("bf16_lora_random_reward", "bf16_lora_format_reward")
_WORDS = {name: name.upper() for name in ("bf16", "nf4", "mxfp4", "nvfp4", "aqn")} | {
    "lora": "LoRA"
}


def style(arm: str) -> Style:
    """Return the arm's style; one that no target declares any more is pale and dotted."""
    words = " ".join(_WORDS.get(word, word) for word in arm.split("_"))
    return STYLES.get(arm, Style(words, "#9a9a9a", _DOTS))


def colour(arm: str) -> str:
    """Return the arm's colour."""
    return style(arm).colour


def dash(arm: str) -> Line:
    """Return the arm's kind of line."""
    return style(arm).line


def short(arm: str) -> str:
    """Return the arm's short label."""
    return style(arm).label


def order(arms: Sequence[str]) -> list[str]:
    """Return the arms in the order of the styles, unknown ones last."""
    known = list(STYLES)
    return sorted(arms, key=lambda arm: (known.index(arm) if arm in known else len(known), arm))
