"""The memory plan against published parameter counts, the paper's sizes, and real tensors."""

import dataclasses

import pytest
import torch

from kernels.formats import FORMATS
from kernels.packing import pack
from kernels.reference import quantize
from repro.models.memory_plan import (
    SLOTS_SHARE,
    StepShape,
    checkpoint_bytes,
    fit_slots,
    fit_update,
    plan_memory,
    weight_bytes,
)
from repro.spec.shapes import SHAPES, TINY

# As the model cards count them.
PARAMETERS = {
    # SmolLM2-135M's 134,515,008 and the biases of q, k and v in 30 blocks.
    "135m": 134_543_808,
    "0.5b": 494_032_768,
    "1.5b": 1_543_714_304,
    "3b": 3_085_938_688,
    "7b": 7_615_616_512,
    "14b": 14_770_033_664,
    "32b": 32_763_876_352,
    "72b": 72_706_203_648,
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_shape_has_the_published_number_of_parameters(name):
    assert SHAPES[name].parameters() == PARAMETERS[name]


@pytest.mark.parametrize(
    ("weight_format", "printed"),
    [
        ("nvfp4", {"3b": 2.8, "7b": 5.9, "14b": 10.6, "32b": 20.7}),
        ("bf16", {"7b": 15.2, "14b": 29.6}),
    ],
)
def test_sizes_are_the_papers(weight_format, printed):
    # 14B comes to 10.55, printed as 10.6.
    for name, size in printed.items():
        found = checkpoint_bytes(SHAPES[name], weight_format) / 1e9
        assert found == pytest.approx(size, abs=0.06)


@pytest.mark.parametrize("weight_format", sorted(FORMATS))
def test_weights_take_the_bytes_of_real_ones(weight_format):
    step = StepShape(shape=TINY, weight_format=weight_format)
    packed, stored = 0, 0
    for rows, columns in TINY.projections().values():
        weight = quantize(torch.randn(rows, columns), weight_format)
        packed += pack(weight).packs.nbytes
        stored += weight.codes.nbytes + weight.block_scales.nbytes
    assert weight_bytes(step) == TINY.layers * packed
    other = TINY.embedding_parameters(count_tied_twice=True) + TINY.small_parameters()
    assert checkpoint_bytes(TINY, weight_format) - 2 * other == TINY.layers * stored


def test_rows_share_the_blocks_before_their_prompts_last_token():
    even = StepShape(shape=TINY, prompt_tokens=64, completion_tokens=64, slots=8)
    odd = dataclasses.replace(even, prompt_tokens=65)
    assert even.cache_blocks == 2 + 8 * (4 - 1) + 1
    assert odd.cache_blocks == 3 + 8 * (5 - 2) + 1


def test_the_most_slots_that_fit_leave_no_room_for_one_more():
    budget = 80 * 10**9
    step = fit_slots(StepShape(shape=SHAPES["32b"], prompts=16, group=8), budget)
    assert 8 < step.slots < 128
    assert plan_memory(step).peak <= SLOTS_SHARE * budget
    more = dataclasses.replace(step, slots=step.slots + 1, micro_tokens=step.row_tokens)
    assert plan_memory(more).peak > SLOTS_SHARE * budget
    whole = dataclasses.replace(step, slots=1, kept_blocks=step.shape.layers)
    assert fit_slots(whole, 2 * budget).kept_blocks == step.shape.layers


def test_the_update_takes_what_the_budget_leaves_and_keeps_one_row():
    step = StepShape(shape=SHAPES["32b"], prompts=1, group=8)
    small = fit_update(step, 10**9)
    assert (small.micro_tokens, small.kept_blocks) == (step.row_tokens, 0)
    peaks = []
    for budget in (38 * 10**9, 48 * 10**9, 140 * 10**9):
        fitting = fit_update(step, budget)
        peaks.append(plan_memory(fitting).peak)
        assert peaks[-1] <= budget
        if fitting.kept_blocks < fitting.shape.layers:
            more = dataclasses.replace(fitting, kept_blocks=fitting.kept_blocks + 1)
            assert sum(plan_memory(more).update.values()) > budget
    assert peaks == sorted(peaks)
    assert fitting.kept_blocks == fitting.shape.layers
    # All rows at once would fit below the most that is useful; two times four waste none.
    assert fitting.micro_tokens in (step.packed(4), step.packed(8))
    assert step.packed(1) == step.row_tokens
    # A prompt once; a cut inside a group leaves its rows' prompt to both passes.
    assert (step.packed(8), step.packed(4)) == (256 + 8 * 2048, 512 + 4 * 2048)
    assert fit_update(step, 140 * 10**9, kept=0).kept_blocks == 0
