"""What `train` begins from for a model and data of a user's own: settings that targets use.

On a GPU these are the settings with which Qwen2.5-Coder-0.5B learns (`second_round.BASELINE`):
64 prompts with 8 completions of at most 512 tokens, a rate of 1e-4 that falls to 0, ten steps of
warm-up, the reward for a right answer alone. A CPU makes few steps of few completions, to try the
way there. The tiny policy keeps the settings of Table 1's smoke tier.
"""

from __future__ import annotations

import dataclasses

from repro.spec.config import DataConfig, SamplingConfig, TrainScale
from repro.targets import table1
from repro.targets.coder import second_round
from repro.targets.paper_tier import evaluated

# Problems of the test split that are answered at most, before and after.
_TESTED, _TESTED_ON_CPU = 1500, 16
# The generator's problems have no end.
_GENERATED = 2000
_PROMPT = 1024

ON_GPU: TrainScale = dataclasses.replace(
    second_round.BASELINE,
    revision="",
    data=DataConfig(source="gsm8k", test_problems=_TESTED),
    max_prompt_tokens=_PROMPT,
    evaluation=evaluated(second_round.BASELINE.rollout.max_new_tokens),
    checkpoint_every=10,
    permuted=False,
    seeds=(0,),
)
ON_CPU: TrainScale = dataclasses.replace(
    ON_GPU,
    data=DataConfig(source="gsm8k", test_problems=_TESTED_ON_CPU),
    steps=8,
    prompts_per_rollout=4,
    group_size=4,
    rollout=SamplingConfig(temperature=1.0, max_new_tokens=128),
    optimizer=dataclasses.replace(ON_GPU.optimizer, warmup_steps=1),
    evaluation=evaluated(128),
    compute_dtype="float32",
    checkpoint_every=1,
)
TINY: TrainScale = dataclasses.replace(
    table1.SMOKE,
    data=DataConfig(source="generated", test_problems=100),
    checkpoint_every=5,
    seeds=(0,),
)


def preset(checkpoint: str, source: str, columns: str, *, on_gpu: bool) -> TrainScale:
    """Return the settings with which a checkpoint is trained on problems, before any change.

    They are those of a CUDA device with `on_gpu`; the rest is as in `TrainScale` and `DataConfig`.
    """
    base = TINY if checkpoint == "tiny" else ON_GPU if on_gpu else ON_CPU
    trained = _GENERATED if source.partition(":")[0] == "generated" else 0
    data = dataclasses.replace(base.data, source=source, columns=columns, train_problems=trained)
    return dataclasses.replace(base, checkpoint=checkpoint, data=data)
