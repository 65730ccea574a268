"""The engine on its kernels: Triton's interpreter in place of a GPU, float32 throughout.

The interpreter has to be chosen before Triton is imported, so a process of its own does the work,
one for all architectures, since its imports take as long as one of them. The interpreter takes
milliseconds a program (a token and head of a rotation), so prompts are as few and as short as reach
every path.
"""

from pathlib import Path

from tests.interpreted import require_equal

PROGRAM = """
import importlib.util, sys
from unittest import mock
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("builder", sys.argv[1])
builder = importlib.util.module_from_spec(spec); spec.loader.exec_module(builder)
from repro.rollout import backend
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.gpu.cuda_backend import kernel_operations
from repro.spec.config import SamplingConfig

config = EngineConfig(slots=4, max_positions=96, max_new_tokens=9, block_size=8,
                      prefill_tokens=66, round_steps=4)
# The third fills more than a tile of 64 tokens, new and cached, and more than one chunk.
prompts = [[(7 * i + j) % 97 for j in range(n)] for i, n in enumerate((3, 1, 70, 9))]
# Temperature matters in the draw alone, so greedy rows need no long prompts and few tokens. What
# Llama has of its own is in the products, so it needs no more than those rows; and Qwen3's is in
# rotations and attention, in prefills of both sizes and in decoding: it needs a long prompt and a
# short, and the third token after 70 begins a block. Of Qwen2's rows one decodes for two rounds;
# the others end sooner, so that rows that wait begin beside it, and it ends alone.
greedy = (0.0, [prompts[0], prompts[3]], [3, 1, 2, 3])
drawn = (0.8, prompts, [1, 3, 5, 2, 1, 6, 3, 2])
WAYS = {"qwen2": [drawn], "qwen3": [(0.8, prompts[2:], [3, 1, 1, 2])], "llama": [greedy]}

def answers_of(engine, architecture):
    "Return batches by temperature."
    answers = {}
    for temperature, asked, limits in WAYS[architecture]:
        sampling = SamplingConfig(temperature=temperature, max_new_tokens=9)
        answers[temperature] = engine.sample(asked, sampling, group_size=2, limits=limits,
                                             seeds=range(2 * len(asked)))
    return answers

def check(architecture):
    policy = builder.random_policy(architecture, "nvfp4")
    by_torch = answers_of(Engine(policy, config), architecture)
    layer = policy.decoder.model.layers[0].self_attn
    operations = kernel_operations(4, (4, 2, layer.head_dim), policy.device, overlap=False)
    operations.workspace.splits = {m: 1 + 3 * (m % 2) for m in range(1, 5)}
    made = backend.Backend(cache_dtype=torch.float32, operations=operations, live_noise=True)
    with mock.patch("repro.rollout.engine.backend_for", lambda policy, config: made):
        engine = Engine(policy, config)
        by_kernels = answers_of(engine, architecture)
    for temperature, asked, _ in WAYS[architecture]:
        plain, kernels = by_torch[temperature], by_kernels[temperature]
        assert len(plain.completions) == len(kernels.completions) == 2 * len(asked)
        for a, b in zip(plain.completions, kernels.completions, strict=True):
            assert a.token_ids == b.token_ids, (temperature, a.token_ids, b.token_ids)
            assert a.finish_reason == b.finish_reason
            assert max(abs(x - y) for x, y in zip(a.sampled_logprobs, b.sampled_logprobs)) < 2e-4
    if architecture != "llama":  # it takes the fewest rows, and ties no embedding to lm_head
        return
    embedding = policy.decoder.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        embedding[50] = float("nan")
    try:
        engine.sample([[1], [50]], SamplingConfig(max_new_tokens=1), group_size=1, seeds=[0, 1])
    except FloatingPointError as error:
        assert "row 1 at new token 0" in str(error), error
    else:
        raise SystemExit("NaN logits were drawn from")

for architecture in sys.argv[2:]:
    print(architecture, file=sys.stderr)  # for whoever reads what failed
    check(architecture)
print("equal")
"""


def test_kernels_draw_the_same_tokens_as_plain_torch():
    builder = Path(__file__).with_name("conftest.py")
    require_equal(PROGRAM, str(builder), "qwen2", "qwen3", "llama")
