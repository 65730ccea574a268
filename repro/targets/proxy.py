"""The proxy tier's scale: one for all targets, so that arms that coincide are run once.

Policies pre-trained here on generated problems (`proxy-30m`, `proxy-120m`) stand in for the
paper's checkpoints: no contamination, no hidden habit of a format, any number of seeds. What the
paper fixes stands in the arms; what stands here is size, chosen before any test seed ran:

* 120 steps of 8 prompts with 8 completions, one update a rollout. The paper's 128 prompts and four
  updates would be 64 times the work of one run, and need not change a contrast's direction.
* Held-out accuracy before training and every 20 steps on a development split; the claims on growth
  are about the area under it over a budget of *sampled tokens*, the same for every arm, because a
  policy that answers at greater length gets more of everything a step.
* Test seeds 5 to 14 where an order of arms is claimed, 5 to 9 elsewhere; the learning-rate sweep
  has seeds of its own (100, 101), and chooses on the development split alone.
* Human-written problems (MAWPS, SVAMP, GSM8K) are measured where `$REPRO_DATA` names their folder;
  the policies were not trained on their test splits.

This is the tier's second protocol. The first had 60 steps and test seeds 0 to 4 (75 runs, commit
2d2f26c). There a run's accuracy hung on when it took off: within an arm final accuracies lay up to
28 points apart, because some runs rose between steps 40 and 60 and some had yet to rise, while
those that had risen stood at 94 to 99 % of the development problems. An interval of 20 points tells
nothing about differences of 2 or 3. Its sweep, too, chose between rates whose means differed by
less than the error of the evaluation, so that MXFP4 got another rate than the other formats by
chance. Steps, budget and the sweep's rule for ties were therefore changed for every arm alike,
before any run of 120 steps, and the test seeds are ones that no run has had. The first protocol's
figures are superseded: no verdict counts them.
"""

from __future__ import annotations

import dataclasses

from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    ProblemSet,
    SamplingConfig,
    TrainScale,
)
from repro.spec.needs import Needs
from repro.spec.target import Metric
from repro.spec.tier import GIB
from repro.targets.chosen_rates import chosen_rates

# Seeds 0 to 4 were those of the first protocol.
TEST_SEEDS = tuple(range(5, 10))
ORDER_SEEDS = tuple(range(5, 15))
TUNING_SEEDS = (100, 101)

SOURCE = "generated_steps"
# `proxy-30m` answers 71 % of all five levels greedily and 53 % of the upper two (seed 0): the
# intended start, 35 to 60 %, is there.
LEVELS = (4, 5)
HARD_LEVELS = (5,)
HUMAN_SETS = ("mawps", "svamp", "gsm8k")
_NEW_TOKENS = 128
# The grid's middle; full training takes a tenth of LoRA's rate, as is usual.
_BASE_RATES = LearningRates(lora_16bit=1e-3, lora_4bit=1e-3, full=1e-4)
# Where runs take off lies inside: by 60 steps those of the first protocol had sampled 147 000 to
# 249 000 tokens, and who has risen samples 4600 more per step (72 tokens per completion). Arms that
# learn to work thus come to 420 000 and more by step 120 and reach the budget between steps 70 and
# 95. A larger one would add what all have in common, the plateau; arms that never work sample
# 180 000 to 250 000 and hold their last value.
_TOKEN_BUDGET = 300_000

_HUMAN = tuple(
    ProblemSet(name=name, data=DataConfig(source=f"human:{name}", test_problems=200))
    for name in HUMAN_SETS
)
HARD_DATA = DataConfig(
    source=SOURCE,
    levels=HARD_LEVELS,
    train_problems=4000,
    development_problems=200,
    test_problems=500,
)
_HARD = ProblemSet(
    name="hard", data=DataConfig(source=SOURCE, levels=HARD_LEVELS, test_problems=200)
)

# What the sweep runs: nothing chosen yet, and no further test sets, which it must not look at.
PROXY_SWEEP = TrainScale(
    checkpoint="proxy-30m",
    data=DataConfig(
        source=SOURCE,
        levels=LEVELS,
        train_problems=4000,
        development_problems=200,
        # Few: the sweep chooses on the development split.
        test_problems=100,
    ),
    steps=120,
    prompts_per_rollout=8,
    group_size=8,
    # Human-written questions are up to 418 tokens long.
    max_prompt_tokens=448,
    rollout=SamplingConfig(temperature=1.0, max_new_tokens=_NEW_TOKENS),
    optimizer=OptimizerConfig(learning_rates=_BASE_RATES, beta1=0.9, beta2=0.95, warmup_steps=5),
    evaluation=EvaluationConfig(
        every=20,
        sampling=SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=_NEW_TOKENS),
        token_budget=_TOKEN_BUDGET,
    ),
    prompt_template="proxy",
    compute_dtype="bfloat16",
    checkpoint_every=60,
    seeds=TUNING_SEEDS,
)
PROXY_ORDER = dataclasses.replace(
    PROXY_SWEEP,
    data=dataclasses.replace(PROXY_SWEEP.data, test_problems=500),
    optimizer=dataclasses.replace(
        PROXY_SWEEP.optimizer,
        learning_rates=dataclasses.replace(_BASE_RATES, chosen=chosen_rates(PROXY_SWEEP)),
    ),
    test_sets=(_HARD, *_HUMAN),
    seeds=ORDER_SEEDS,
)
PROXY = dataclasses.replace(PROXY_ORDER, seeds=TEST_SEEDS)
# Numbers that pre-training never showed: worked solutions of these have something to teach.
PROXY_UNSEEN = dataclasses.replace(PROXY, data=dataclasses.replace(PROXY.data, levels=(6,)))
PROXY_HARD = dataclasses.replace(PROXY, data=HARD_DATA, test_sets=_HUMAN)
# Where the paper goes to a larger model and harder problems (32B on levels 4 and 5 of its own).
PROXY_LARGE_HARD = dataclasses.replace(PROXY_HARD, checkpoint="proxy-120m")

NEEDS = Needs(memory_bytes=100 * GIB, disk_bytes=2_000_000, policies=(PROXY.checkpoint,))
# An evaluation's cache of 8192 rows and what it reads at once take 93 GB; 10 runs fit beside.
NEEDS_LARGE = dataclasses.replace(
    NEEDS, memory_bytes=130 * GIB, policies=(PROXY_LARGE_HARD.checkpoint,)
)

METRICS = (
    Metric(
        name="heldout_area",
        unit="percent",
        title="held-out accuracy, mean over the budget",
        better="higher",
    ),
    Metric(name="heldout_last", unit="percent", title="held-out accuracy, last", better="higher"),
    Metric(name="accuracy_hard", unit="percent", title="accuracy, level 5", better="higher"),
    *(
        Metric(
            name=f"accuracy_{name}",
            unit="percent",
            title=f"accuracy, {name.upper()}",
            better="higher",
        )
        for name in HUMAN_SETS
    ),
    Metric(
        name="accuracy_human",
        unit="percent",
        title="accuracy, mean of human-written sets",
        better="higher",
    ),
)

# How runs explore and what they reach; `repro.evidence.derived` says how each number is formed.
LADDER_METRICS = (
    Metric(name="take_off_steps", unit="steps", title="steps to the threshold", better="lower"),
    Metric(
        name="take_off_tokens",
        unit="tokens",
        title="sampled tokens to the threshold",
        better="lower",
    ),
    Metric(name="took_off", unit="share", title="reached the threshold", better="higher"),
    Metric(
        name="train_area",
        unit="percent",
        title="training accuracy at T = 1, mean over the budget",
        better="higher",
    ),
    Metric(
        name="heldout_rise",
        unit="points",
        title="rise of the held-out accuracy over the second half",
        better="neither",
    ),
    Metric(
        name="informative_first",
        unit="percent",
        title="informative groups, first steps",
        better="neither",
    ),
    Metric(name="collapsed", unit="share", title="collapsed", better="lower"),
    Metric(name="kl_to_start", unit="nats", title="KL to the start, per token", better="neither"),
    Metric(
        name="entropy_decision_first",
        unit="nats",
        title="entropy of the deciding token, first steps",
        better="neither",
    ),
    Metric(
        name="distinct_correct",
        unit="completions",
        title="distinct right completions per problem",
        better="higher",
    ),
    Metric(name="pass_at_1", unit="percent", title="pass@1", better="higher"),
    Metric(name="pass_at_16", unit="percent", title="pass@16", better="higher"),
)
