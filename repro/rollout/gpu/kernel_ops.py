"""The operations of `repro.rollout.ops` by this project's kernels: each can be captured."""

from __future__ import annotations

import torch

from kernels.triton import decode_adapter, decode_choice, decode_step, prefill_attention, rotary
from repro.rollout.ops import Operations, Primitives

KERNELS = Primitives(
    add_norm=decode_step.add_norm,
    attend_step=decode_step.attend_step,
    rotary_write=rotary.rotary_write,
    prefill_attention=prefill_attention.prefill_attention,
    add_adapter=decode_adapter.add_adapter,
    swiglu=decode_step.swiglu,
    adapted_swiglu=decode_adapter.adapted_swiglu,
    choose=decode_choice.choose,
)


def kernel_operations(
    slots: int, heads: tuple[int, int, int], device: torch.device, *, overlap: bool
) -> Operations:
    """Return the operations by kernels, for steps of at most `slots` rows.

    `heads` are query heads, key heads and head dimension; `overlap` uses programmatic dependent
    launch (Hopper and newer).
    """
    workspace = decode_step.StepWorkspace(slots, *heads, device)
    return Operations(KERNELS, overlap=overlap, workspace=workspace)
