"""The mini tier: the paper's contrast on Qwen2.5-0.5B and 1.5B-Instruct, on one card of 24 GB.

GSM8K as in Table 1, 300 steps of 16 prompts with 8 completions of up to 768 tokens, one update a
rollout. What is held out of the training split serves the curve during training and the sweep of
rates; the test split is looked at once, at the end. Five paired seeds, of which the sweep has none.

What others measured, as anchors and no expectations, for their settings differ: verl's table of
GSM8K with LoRA has 54.3 % (0.5B) and 77.9 % (1.5B); a fork of the released code, at 1.5B, 71.3 %
for BF16, 68.2 % for NVFP4 and 70.6 % for NVFP4 with added noise.

Rates are Table 4's; `run learning_rates_0_5b --tier mini` (or `_1_5b`) tries a third and three
times of each on seeds of its own, and `--set optimizer.learning_rates.lora_4bit=...` takes another.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm
from repro.spec.config import DataConfig, SamplingConfig, TrainScale
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import paper_effects, table1
from repro.targets.paper_tier import GSM8K_7B, evaluated, pinned
from repro.targets.table_rows import FORMAT_NOISE_RATE, FORMAT_RATE, Statement, gains, variant

TUNING_SEEDS = (100, 101)
_NEW_TOKENS = 768
_TRAINED = (table1.BF16_LORA, table1.NF4_LORA, table1.NVFP4_LORA, table1.NVFP4_LORA_AQN)
_ARMS = (table1.BF16, table1.NF4, table1.NVFP4, *_TRAINED)
# What a sweep multiplies an arm's rate by.
FACTORS = {"low": 1 / 3, "middle": 1.0, "high": 3.0}


def at_rate(arm: Arm, name: str) -> Arm:
    """Return an arm at one of a sweep's rates."""
    return variant(arm, name, f", {name} rate", learning_rate_factor=FACTORS[name])


_SWEPT = tuple(at_rate(arm, name) for arm in _TRAINED[:-1] for name in FACTORS)
SOURCE = "Table 1, on a smaller checkpoint"
SWEEP_SOURCE = "not in the paper; Table 4 gives 1e-5 to four-bit weights and 5e-6 to BF16 LoRA"
NVFP4_MORE_ENTROPY = Statement(
    "nvfp4_more_entropy",
    "NVFP4 weights have a higher entropy than BF16 early in training",
    "Fig. 5, on a smaller checkpoint",
)
_NVFP4_OR_LORA = (table1.NVFP4_LORA, table1.BF16_LORA, FORMAT_RATE)
_CLAIMS = (
    *gains(*_TRAINED),
    table1.QERL_BEATS_LORA(SOURCE).above(
        table1.NVFP4_LORA_AQN, table1.BF16_LORA, FORMAT_NOISE_RATE, paper_effects.QERL_OVER_LORA
    ),
    table1.QERL_BEATS_QLORA(SOURCE).above(
        table1.NVFP4_LORA_AQN, table1.NF4_LORA, FORMAT_NOISE_RATE, paper_effects.QERL_OVER_QLORA
    ),
    table1.AQN_HELPS(SOURCE).above(
        table1.NVFP4_LORA_AQN, table1.NVFP4_LORA, "noise", paper_effects.AQN_GAIN
    ),
    NVFP4_MORE_ENTROPY.above(*_NVFP4_OR_LORA, paper_effects.ENTROPY["nvfp4"], "entropy_first"),
    Statement(
        "nvfp4_grows_faster",
        "NVFP4 LoRA has a larger area under the held-out accuracy than 16-bit LoRA",
        "Fig. 4, on a smaller checkpoint",
    ).above(*_NVFP4_OR_LORA, paper_effects.FORMAT_SPEED, "heldout_area"),
)
SWEEP_1_5B = dataclasses.replace(
    GSM8K_7B,
    **pinned("Qwen/Qwen2.5-1.5B-Instruct"),
    # The sweep chooses on the development split; its few test problems are read by no rule.
    data=DataConfig(source="gsm8k", development_problems=200, test_problems=100),
    steps=300,
    prompts_per_rollout=16,
    updates_per_rollout=1,
    micro_batch_rows=16,
    rollout=SamplingConfig(temperature=1.0, max_new_tokens=_NEW_TOKENS),
    optimizer=dataclasses.replace(GSM8K_7B.optimizer, name="adamw", warmup_steps=30),
    # The budget is two thirds of what 300 steps sample at 250 tokens per completion.
    evaluation=evaluated(_NEW_TOKENS, every=50, samples=2, token_budget=6_400_000),
    checkpoint_every=25,
    seeds=TUNING_SEEDS,
)
SWEEP_0_5B = dataclasses.replace(SWEEP_1_5B, **pinned("Qwen/Qwen2.5-0.5B-Instruct"))


def tested(sweep: TrainScale) -> TrainScale:
    """Return the scale that a sweep serves: all test problems, seeds of its own."""
    return dataclasses.replace(
        sweep, data=dataclasses.replace(sweep.data, test_problems=0), seeds=(0, 1, 2, 3, 4)
    )


def _sweep(size: str, scale: TrainScale) -> Target:
    return Target(
        name=f"learning_rates_{size}",
        title=f"The learning rates at which the mini tier's arms are compared, {spoken(size)}",
        statement="of three rates, each format gets the one that serves it best",
        source=SWEEP_SOURCE,
        arms=_SWEPT,
        metrics=table1.METRICS,
        scales={Tier.MINI: scale},
        headline="heldout_last",
    )


def _table(size: str, scale: TrainScale) -> Target:
    return Target(
        name=f"table1_{size}",
        title=f"Table 1's contrast on Qwen2.5-{spoken(size)}-Instruct",
        statement="NVFP4 weights with LoRA and AQN end above 16-bit LoRA and QLoRA, on a "
        "checkpoint small enough for a card of 24 GB",
        source="Table 1; the size is this suite's",
        arms=_ARMS,
        metrics=table1.METRICS,
        scales={Tier.MINI: scale},
        headline="accuracy",
        claims=_CLAIMS,
    )


def spoken(size: str) -> str:
    """Return a size in a target's name as titles have it: `0_5b` as `0.5B`."""
    return size.replace("_", ".").upper()


MINI_TARGETS = (
    _table("0_5b", tested(SWEEP_0_5B)),
    _table("1_5b", tested(SWEEP_1_5B)),
    _sweep("0_5b", SWEEP_0_5B),
    _sweep("1_5b", SWEEP_1_5B),
)
