"""The engine on its kernels: Triton's interpreter in place of a GPU, float32, few short prompts."""

import pytest
import torch

from kernels.triton import decode_step
from repro.rollout.backend import Backend
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.gpu.cuda_backend import KERNELS
from repro.spec.config import SamplingConfig
from tests.interpreted import needs_interpreter
from tests.repro.rollout.conftest import require_alike

CONFIG = EngineConfig(
    slots=4, max_positions=96, max_new_tokens=9, block_size=8, prefill_tokens=66, round_steps=4
)
# The third fills more than a tile of 64 tokens, new and cached, and more than one chunk.
PROMPTS = [[(7 * i + j) % 97 for j in range(n)] for i, n in enumerate((3, 1, 70, 9))]
# Temperature, prompts, limits. Temperature matters in the draw alone: greedy rows are short. What
# Llama has of its own is in the products, for which those rows do. Qwen3's is in rotations and
# attention, in prefills of both sizes and in decoding: the third token after 70 begins a block. Of
# Qwen2's rows one decodes for two rounds and ends alone; rows that wait begin beside it.
WAYS = {
    "qwen2": (0.8, [*PROMPTS[:2], PROMPTS[2][:20], PROMPTS[3]], [1, 3, 5, 2, 1, 6, 3, 2]),
    "qwen3": (0.8, PROMPTS[2:], [3, 1, 1, 2]),
    "llama": (0.0, [PROMPTS[0], PROMPTS[3]], [3, 1, 2, 3]),
}


@needs_interpreter
@pytest.mark.parametrize("architecture", WAYS)
def test_interpreted_kernels_draw_the_tokens_of_torch(architecture, make_policy, monkeypatch):
    policy = make_policy(architecture, "nvfp4")
    temperature, prompts, limits = WAYS[architecture]
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=9)
    asked = {"group_size": 2, "limits": limits, "seeds": range(2 * len(prompts))}
    plain = Engine(policy, CONFIG).sample(prompts, sampling, **asked)
    engine = engine_on_kernels(policy, monkeypatch)
    kernels = engine.sample(prompts, sampling, **asked)
    require_alike(kernels, plain)
    assert [c.finish_reason for c in kernels] == [c.finish_reason for c in plain]
    if architecture == "llama":  # it takes the fewest rows, and ties no embedding to lm_head
        with torch.no_grad():
            policy.decoder.get_parameter("model.embed_tokens.weight")[50] = torch.nan
        one = SamplingConfig(max_new_tokens=1)
        with pytest.raises(FloatingPointError, match="row 1 at new token 0"):
            engine.sample([[1], [50]], one, group_size=1, seeds=[0, 1])


def engine_on_kernels(policy, monkeypatch):
    layer = policy.decoder.model.layers[0].self_attn
    workspace = decode_step.StepWorkspace(4, 4, 2, layer.head_dim, policy.device)
    workspace.splits = {m: 1 + 3 * (m % 2) for m in range(1, 5)}
    made = Backend(KERNELS, workspace=workspace, live_noise=True)
    monkeypatch.setattr("repro.rollout.engine.backend_for", lambda policy, config: made)
    return Engine(policy, CONFIG)
