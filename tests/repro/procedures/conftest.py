"""A brief run of the tiny policy with every measurement that a scale may ask for."""

import dataclasses

from repro.spec.config import DataConfig, EvaluationConfig, ProblemSet, SamplingConfig
from repro.targets.table1 import SMOKE

DATA = DataConfig(source="generated", train_problems=40, test_problems=8, development_problems=4)
SCALE = dataclasses.replace(
    SMOKE,
    data=DATA,
    steps=3,
    prompts_per_rollout=4,
    group_size=4,
    format_reward=0.2,
    rollout=SamplingConfig(max_new_tokens=20),
    optimizer=dataclasses.replace(SMOKE.optimizer, warmup_steps=0),
    evaluation=EvaluationConfig(
        every=2,
        samples=2,
        sampling=SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=20),
        token_budget=600,
        at=(1, 2),
        threshold=20.0,
    ),
    checkpoint_every=2,
    test_sets=(
        ProblemSet(name="small", data=dataclasses.replace(DATA, levels=(1,), test_problems=4)),
    ),
)
