"""What a training run takes of its device: micro-batches that fill it, and a peak within it."""

import dataclasses
import json

import pytest

from repro.models.memory_plan import plan_memory, training_memory
from repro.models.random_policy import shape_config
from repro.spec.tier import Tier
from repro.targets import find

H100, CARD = 85_000_000_000, 24 * 2**30


def of(target, tier, arm="nvfp4_lora"):
    return training_memory(find(target).arm(arm), find(target).scales[tier])


def test_a_published_model_trains_in_micro_batches_as_long_as_its_device_holds():
    memory = of("table1", Tier.PAPER)
    row = memory.step.row_tokens
    fitting = memory.fitting(H100)
    # Activations take what is left: every block's where they fit, of as many rows as then fit.
    assert fitting.kept_blocks == fitting.shape.layers
    assert fitting.micro_tokens >= 2 * row
    small = memory.fitting(16 * 2**30)
    assert small.kept_blocks < fitting.kept_blocks or small.micro_tokens < fitting.micro_tokens
    none = memory.fitting(10**9)
    assert (none.micro_tokens, none.kept_blocks) == (row, 0)


@pytest.mark.parametrize("arm", ["bf16_lora", "nvfp4_lora"])
@pytest.mark.parametrize(
    ("target", "tier", "device"),
    [
        ("table1", Tier.PAPER, H100),
        ("table2_14b", Tier.PAPER, H100),
        ("table1_1_5b", Tier.MINI, CARD),
    ],
)
def test_the_planned_peak_lies_within_the_device(target, tier, device, arm):
    memory = of(target, tier, arm)
    assert memory.least < memory.peak(device) <= 0.95 * device


def test_full_training_leaves_less_for_micro_batches():
    lora, full = (of("table1", Tier.PAPER, arm) for arm in ("bf16_lora", "bf16_full"))
    assert full.step.full_over == 1
    device = int(1.05 * full.least / 0.95)
    assert full.fitting(device).micro_tokens < lora.fitting(device).micro_tokens
    assert full.fitting(device).kept_blocks == 0


@pytest.mark.parametrize(
    ("optimizer", "fits"), [("adamw", [False, False, True]), ("adamw_8bit", [False, True, True])]
)
def test_ranks_divide_what_full_training_of_7b_holds(optimizer, fits):
    arm, scale = find("table1").arm("bf16_full"), find("table1").scales[Tier.PAPER]
    scale = dataclasses.replace(
        scale, optimizer=dataclasses.replace(scale.optimizer, name=optimizer)
    )
    every = [training_memory(arm, scale, ranks) for ranks in (1, 2, 4)]
    plans = [plan_memory(memory.step).update for memory in every if memory is not None]
    masters = [plan["adapter"] / 1e9 for plan in plans]
    assert masters == pytest.approx([4 * 7.62, 2 * 7.62, 7.62], abs=0.05)
    assert [plan["gradients"] for plan in plans] == [plan["adapter"] for plan in plans]
    # Each samples from a whole copy.
    assert len({plan["weights"] for plan in plans}) == 1
    assert [memory.least <= H100 for memory in every if memory is not None] == fits


def test_a_folder_trains_in_the_micro_batches_of_the_checkpoint_that_its_config_describes(tmp_path):
    target = find("table1_0_5b")
    arm, scale = target.arm("nvfp4_lora"), target.scales[Tier.MINI]
    config = shape_config("qwen2.5-0.5b")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    folder = training_memory(arm, dataclasses.replace(scale, checkpoint=str(tmp_path), revision=""))
    assert folder == training_memory(arm, scale)
    fitting = folder.fitting(H100)
    assert fitting.micro_tokens > 16384
    assert fitting.kept_blocks == fitting.shape.layers
    # Another vocabulary is another shape, and still one with a plan.
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"vocab_size": 49152, "model_type": "llama"}), encoding="utf-8"
    )
    other = training_memory(arm, dataclasses.replace(scale, checkpoint=str(tmp_path)))
    assert other.fitting(CARD).micro_tokens >= folder.fitting(CARD).micro_tokens
    # One whose shape is not known has none.
    assert training_memory(arm, find("table1").scales[Tier.SMOKE]) is None


def test_a_folded_adapter_takes_a_second_copy_of_the_projections() -> None:
    for target, fits in (("table1", True), ("table2", True), ("table2_32b", False)):
        arm, scale = find(target).arm("bf16_lora"), find(target).scales[Tier.PAPER]
        folded = dataclasses.replace(arm, rollout_adapter="folded")
        apart, beside = training_memory(arm, scale), training_memory(folded, scale)
        shape = apart.step.shape
        images = 2 * shape.adapter_parameters(apart.step.rank)
        assert beside.least - apart.least == 2 * shape.projection_parameters() - images
        assert (beside.least <= H100) is fits
        assert beside.fitting(H100).micro_tokens <= apart.fitting(H100).micro_tokens
