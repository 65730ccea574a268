"""The paper's effects as the claims carry them, each with its place and its arithmetic.

Of accuracies: shares of what the other arm gains by training. Of curves, of which the paper says
*faster*: the share of the time that is saved, which is the share of the shortfall below the ceiling
that an area under the curve loses. Read from the cells under `expected/paper/`, to which a test
holds those of tables; *plot* was read off a curve.
"""

from __future__ import annotations

from functools import partial

from repro.spec.claim import Effect, Measure

_LORA_GAINS = "of 88.1 - 76.3, what 16-bit LoRA gains"


def _of(measure: Measure, paper: float, place: str) -> Effect:
    return Effect(paper=paper, measure=measure, place=place)


_of_gain, _of_shortfall = partial(_of, "of gain"), partial(_of, "of shortfall")
_of_baseline = partial(_of, "of baseline")


# Table 1, 7B. "no training" rows: BF16 76.3.
UNTRAINED_LOSS = {
    "nf4": _of_baseline(0.082, "Table 1, 7B: 76.3 - 70.5, of 70.5"),
    "mxfp4": _of_baseline(0.070, "Table 1, 7B: 76.3 - 71.3, of 71.3"),
    "nvfp4": _of_baseline(0.040, "Table 1, 7B: 76.3 - 73.4, of 73.4"),
}
QERL_OVER_LORA = _of_gain(0.229, f"Table 1, 7B: 90.8 - 88.1, {_LORA_GAINS}")
NVFP4_OVER_LORA = _of_gain(0.034, f"Table 1, 7B: 88.5 - 88.1, {_LORA_GAINS}")
QERL_OVER_QLORA = _of_gain(0.400, "Table 1, 7B: 90.8 - 85.0, of 85.0 - 70.5, what QLoRA gains")
AQN_GAIN = _of_gain(0.152, "Table 1, 7B: 90.8 - 88.5, of 88.5 - 73.4, what NVFP4 LoRA gains")

# Table 2, averages of four benchmarks, summed over the three sizes that have all rows.
QERL_OVER_LORA_BIGMATH = _of_gain(
    0.437, "Table 2, 7B, 14B and 32B: (.7 + 1.8 + 3.4) of 6.8 + 4.2 + 2.5, what LoRA gains"
)
AQN_GAIN_BIGMATH = _of_gain(
    0.227, "Table 2, 7B, 14B and 32B: (-.6 + 1.5 + 4.2) of 11.3 + 6.5 + 4.7, what NVFP4 LoRA gains"
)

# Curves.
FORMAT_SPEED = _of_shortfall(
    0.567, "Fig. 4, DAPO (plot): a reward of .9 at step 32.5 with NVFP4, at 75 with BF16"
)
QERL_SPEED = _of_shortfall(
    0.537, "Fig. 12 (plot): a reward of about .42 at step 250 with QeRL, at 540 with LoRA"
)
QERL_SPEED_7B = _of_shortfall(
    0.283, "Fig. 7 (plot): QeRL's jump at step 215, none of LoRA's by step 300: this at least"
)
QERL_SPEED_32B = _of_shortfall(
    0.070, "Fig. 13 (plot): mean reward to step 254 .428 against .385, of what is left below 1"
)
AQN_LATE = _of_shortfall(
    0.083, "Fig. 8, 3B (plot): .015 late in training, of the .18 left below 1 at .82"
)
AQN_LATE_BIGMATH = _of("units", 0.035, "Fig. 8, 7B (plot): reward after step 210, .02 to .05")
ENTROPY = {
    "nf4": _of_baseline(0.083, "Fig. 5, step 0 (plot): .262 - .242, of .242"),
    "mxfp4": _of_baseline(0.277, "Fig. 5, step 0 (plot): .309 - .242, of .242"),
    "nvfp4": _of_baseline(0.227, "Fig. 5, step 0 (plot): .297 - .242, of .242"),
}
ENTROPY_LATE = _of_baseline(0.053, "Fig. 14, step 600 (plot): .436 - .414, of .414")
SCHEDULES = {
    "linear": _of_gain(0.021, "Fig. 9 (plot): .835 - .83, of the .236 above NVFP4's 59.4 (3B)"),
    "cosine": _of_gain(0.021, "Fig. 9 (plot): .835 - .83, of the .236 above NVFP4's 59.4 (3B)"),
    "logarithmic": _of_gain(
        0.142, "Fig. 9 (plot): .835 - .805, of the .211 above NVFP4's 59.4 (3B)"
    ),
}
RANK_SPEED = _of_shortfall(
    0.217, "Fig. 10, step 45 (plot): .53 at rank 16, .40 at rank 128, of the .60 left below 1"
)
RATE_SPEED = _of_shortfall(
    0.411, "Fig. 16 (plot): mean reward to step 100 .785 against .635, of the .365 left below 1"
)
COLLAPSE = _of("units", 58.5, "Fig. 17, step 75 (plot): a reward of .915 against .33")

# Quotients of the steps to a threshold, the slower arm's above.
_SMALLEST = "chosen: a tenth of the steps, which the planned seeds resolve"


def _take_off(paper: float, place: str) -> Effect:
    return Effect(paper=paper, smallest=1.1, measure="ratio", place=place, because=_SMALLEST)


FORMAT_TAKE_OFF = _take_off(
    75 / 32.5, "Fig. 4, DAPO (plot): a reward of .9 at step 75 with BF16, 32.5 with NVFP4"
)
QERL_TAKE_OFF = _take_off(
    540 / 250, "Fig. 12 (plot): a reward of about .42 at step 250 with QeRL, at 540 with LoRA"
)
# Of questions that the paper leaves open: what would matter.
OPEN_SHARE = Effect(
    smallest=0.02, measure="of baseline", because="a fiftieth: a tenth of Fig. 5's entropy"
)
OPEN_UNSOLVED = Effect(
    smallest=0.1, measure="of shortfall", because="chosen: a tenth of what BF16 leaves unsolved"
)

# Quotients of two arms' tokens per second, 16-bit LoRA below: Tables 5 to 8 by batch, Table 9 by
# rank at batch 1; Fig. 11 over NF4.
ROLLOUT, ROLLOUT_BY_RANK, ROLLOUT_OVER_NF4 = (
    {(size, at): fast / slow for size, rates in by_size.items() for at, fast, slow in rates}
    for by_size in (
        {
            "3b": ((2, 157.0, 151.2), (8, 2271.4, 2226.3)),
            "7b": ((2, 151.6, 115.4), (8, 2091.8, 1641.1)),
            "14b": ((2, 95.3, 65.4), (8, 1091.1, 737.2)),
            "32b": ((2, 60.0, 34.0), (8, 688.2, 344.3)),
        },
        {
            "3b": ((16, 157.0, 151.2), (32, 153.1, 148.8), (64, 140.0, 138.6)),
            "7b": ((16, 151.6, 115.4), (32, 149.9, 113.2), (64, 137.7, 108.3)),
            "14b": ((16, 95.3, 65.4), (32, 92.9, 63.1), (64, 86.0, 61.2)),
            "32b": ((16, 58.0, 34.0), (32, 56.0, 33.3), (64, 51.3, 31.9)),
        },
        {
            "14b": ((16, 95.3, 45.1), (32, 92.9, 44.2), (64, 86.0, 42.8)),
            "32b": ((16, 58.0, 25.2), (32, 56.0, 25.6), (64, 51.3, 23.0)),
        },
    )
)
# Table 3 (7B, 14B) and Table 5 (3B, its first column): seconds of a step, 16-bit LoRA over QeRL.
# Of 32B the paper has no step of 16-bit LoRA.
STEPS = {
    f"{size}_b{batch}": ratio
    for size, ratios in (
        ("7b", {2: 1.5, 4: 1.4, 8: 1.2}),
        ("14b", {2: 1.4, 4: 1.2, 8: 1.2}),
        ("3b", {2: 1.1, 8: 1.1}),
    )
    for batch, ratio in ratios.items()
}


def ratio(size: float | None, place: str) -> Effect | None:
    """Return the paper's quotient as an effect; None where it prints none, or none above one."""
    return None if size is None or size <= 1 else _of("ratio", size, place)
