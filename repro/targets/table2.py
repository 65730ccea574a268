"""Table 2: BigMath with DAPO, mean pass@1 on MATH-500, AIME 24, AIME 25 and AMC 23.

122 000 problems of levels 3 to 5 (levels 4 and 5 for 32B), 16 completions per prompt, one update
per rollout, up to 8192 tokens (section 4.1; Table 4). With 30 to 40 items per benchmark, one
point of the average is well inside the sampling error; the paper gives neither deviations nor the
number of runs. What the released scripts call DAPO is a local token mean without dynamic sampling;
the arms here take DAPO as the paper describes it.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import DAPO
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import paper_effects, paper_tier, table1
from repro.targets.table_rows import FORMAT_NOISE_RATE, Statement, metric

ARMS = (
    table1.BF16,
    table1.NVFP4,
    *(
        dataclasses.replace(arm, loss=DAPO)
        for arm in (table1.BF16_FULL, table1.BF16_LORA, table1.NVFP4_LORA, table1.NVFP4_LORA_AQN)
    ),
)

BENCHMARK_METRICS = tuple(
    metric(
        f"accuracy_{item.name}", "percent", f"pass@1, {item.name}", "higher", tiers=(Tier.PAPER,)
    )
    for item in paper_tier.BENCHMARKS
)
CLAIMS = (
    Statement(
        "qerl_beats_lora",
        "QeRL consistently ends more accurate than 16-bit LoRA",
        "Table 2 and its text",
    ).above(
        table1.NVFP4_LORA_AQN,
        table1.BF16_LORA,
        FORMAT_NOISE_RATE,
        paper_effects.QERL_OVER_LORA_BIGMATH,
    ),
    Statement("aqn_helps", "AQN raises the final accuracy", "Table 2 and its text").above(
        table1.NVFP4_LORA_AQN, table1.NVFP4_LORA, "noise", paper_effects.AQN_GAIN_BIGMATH
    ),
    dataclasses.replace(
        table1.NO_WORSE_THAN_FULL,
        source="Table 2",
        bound=-3.0,
        because="the sampling error of one pass over the four benchmarks' average",
    ),
    table1.AQN_RAISES_REWARD("Fig. 8 (7B, BigMath)").above(
        table1.NVFP4_LORA_AQN,
        table1.NVFP4_LORA,
        "noise",
        paper_effects.AQN_LATE_BIGMATH,
        "train_reward_mean",
    ),
)
TABLE2 = Target(
    name="table2",
    title="Table 2: BigMath with DAPO on four benchmarks, 7B to 32B",
    statement="trained on BigMath, QeRL keeps up with 16-bit LoRA and full training",
    source="Table 2",
    arms=ARMS,
    metrics=(
        metric("accuracy", "percent", "pass@1", "higher"),
        *(item for item in table1.METRICS if item.name != "accuracy"),
        *BENCHMARK_METRICS,
    ),
    scales={Tier.PAPER: paper_tier.BIGMATH_7B},
    headline="accuracy",
    claims=CLAIMS,
    paper_file="table2",
    paper_column="7B",
)
TABLE2_14B = dataclasses.replace(
    TABLE2,
    name="table2_14b",
    title="Table 2: BigMath with DAPO on four benchmarks, 14B",
    scales={Tier.PAPER: paper_tier.BIGMATH_14B},
    paper_column="14B",
)
