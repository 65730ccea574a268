"""A brief run of the tiny policy with every measurement that a scale may ask for."""

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

DATA = DataConfig(source="generated", train_problems=40, test_problems=8, development_problems=4)
SCALE = TrainScale(
    checkpoint="tiny",
    data=DATA,
    steps=3,
    prompts_per_rollout=4,
    group_size=4,
    max_prompt_tokens=1280,
    rollout=SamplingConfig(max_new_tokens=20),
    optimizer=OptimizerConfig(
        learning_rates=LearningRates(lora_16bit=1e-3, lora_4bit=1e-3, full=3e-4)
    ),
    evaluation=EvaluationConfig(
        every=2,
        samples=2,
        sampling=SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=20),
        token_budget=600,
        at=(1, 2),
        threshold=20.0,
    ),
    prompt_template="tiny",
    checkpoint_every=2,
    test_sets=(
        ProblemSet(name="small", data=dataclasses.replace(DATA, levels=(1,), test_problems=4)),
    ),
)
