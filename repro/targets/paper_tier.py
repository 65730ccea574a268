"""The paper tier's scales: the protocol of Table 4 and section 4.1 on the published checkpoints.

Where the paper is silent (warm-up, decay, betas, clipping of the gradient) the released scripts'
values stand; the rate of full training is in neither. Prompts' limits are those of each set's
longest prompt with Qwen2.5's tokenizer, its chat template and the paper's suffix (99 tokens):
311 tokens for GSM8K, 890 for MATH-500, 492 for AIME, 314 for AMC. Big-Math's questions have at most
1024 characters, and an ASCII character is a token at most.

Nothing is held out of the training splits, as in the paper, so no accuracy is measured during
training; `--set data.development_problems=200 --set evaluation.every=50` does both.

The hub's commits of the checkpoints are not in the paper. Pinned are those that public repositories
name for these checkpoints (ten or more each, looked up on 2026-11-23); every record names the
commit that was loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    ProblemSet,
    SamplingConfig,
    TrainScale,
)

GSM8K_PROMPT = 320
BIGMATH_PROMPT = 1152
BENCHMARKS = (
    ProblemSet(name="math500", data=DataConfig(source="math500"), max_prompt_tokens=896),
    ProblemSet(name="aime24", data=DataConfig(source="aime24"), max_prompt_tokens=512),
    ProblemSet(name="aime25", data=DataConfig(source="aime25"), max_prompt_tokens=512),
    ProblemSet(name="amc23", data=DataConfig(source="amc23"), max_prompt_tokens=320),
)

REVISIONS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "7ae557604adf67be50417f59c2c2f167def9a775",
    "Qwen/Qwen2.5-1.5B-Instruct": "989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
    "Qwen/Qwen2.5-3B-Instruct": "aa8e72537993ba99e69dfaafa59ed015b17504d1",
    "Qwen/Qwen2.5-7B-Instruct": "a09a35458c702b33eeacc393d103063234e8bc28",
    "Qwen/Qwen2.5-14B-Instruct": "cf98f3b3bbb457ad9e2bb7baf9a0125b6b88caa8",
    "Qwen/Qwen2.5-32B-Instruct": "5ede1c97bbab6ce5cda5812749b4c0bdf79b18dd",
}


def pinned(checkpoint: str) -> dict[str, Any]:
    """Return a published checkpoint with its commit, as fields of a scale."""
    return {"checkpoint": checkpoint, "revision": REVISIONS[checkpoint]}


def evaluated(new_tokens: int, **more: Any) -> EvaluationConfig:
    """Return how answers are drawn in section 4.1, with at most so many tokens each.

    `more` are further fields of `EvaluationConfig`.
    """
    sampling = SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=new_tokens)
    return EvaluationConfig(sampling=sampling, **more)


GSM8K_7B = TrainScale(
    **pinned("Qwen/Qwen2.5-7B-Instruct"),
    # "7,500 samples" (section 4.1): the training split as it is.
    data=DataConfig(source="gsm8k"),
    steps=600,
    prompts_per_rollout=128,
    group_size=8,
    updates_per_rollout=4,
    # About 18 000 tokens at full length: more make no product faster.
    micro_batch_rows=4,
    max_prompt_tokens=GSM8K_PROMPT,
    # "Max response length 4096", "Rollout temperature 1.0" (Table 4).
    rollout=SamplingConfig(temperature=1.0, max_new_tokens=4096),
    optimizer=OptimizerConfig(
        name="adamw_8bit",
        # "1e-5 (QeRL, QLoRA); 5e-6 (LoRA)" (Table 4). Full training: not stated; a tenth of the
        # four-bit rate is usual at this size.
        learning_rates=LearningRates(lora_16bit=5e-6, lora_4bit=1e-5, full=1e-6),
        # From here on the released scripts: weight_decay 0.1, warmup_ratio 0.1, cosine, 0.2.
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.1,
        warmup_steps=60,
        schedule="cosine",
        max_grad_norm=0.2,
    ),
    # "evaluated multiple times": the number is not stated.
    evaluation=evaluated(4096, samples=4),
    compute_dtype="bfloat16",
)
GSM8K_3B = dataclasses.replace(GSM8K_7B, **pinned("Qwen/Qwen2.5-3B-Instruct"))

BIGMATH_7B = dataclasses.replace(
    GSM8K_7B,
    # "BigMath (7B, 14B: levels 3-5, 122,000 samples; 32B: levels 4-5)" (section 4.1).
    data=DataConfig(source="bigmath", levels=(3, 4, 5)),
    # 128 prompts, 16 completions, one update a rollout, 8192 tokens (Table 4).
    group_size=16,
    updates_per_rollout=1,
    micro_batch_rows=2,
    max_prompt_tokens=BIGMATH_PROMPT,
    rollout=SamplingConfig(temperature=1.0, max_new_tokens=8192),
    # The limit of evaluation is stated as 4096 (section 4.1); here, that of training.
    evaluation=evaluated(8192, samples=4),
    test_sets=BENCHMARKS,
    accuracy_over="sets",
)
BIGMATH_14B = dataclasses.replace(
    BIGMATH_7B, **pinned("Qwen/Qwen2.5-14B-Instruct"), micro_batch_rows=1
)
BIGMATH_32B = dataclasses.replace(
    BIGMATH_14B,
    **pinned("Qwen/Qwen2.5-32B-Instruct"),
    data=DataConfig(source="bigmath", levels=(4, 5)),
)
