"""AdamW on float32 masters, its learning rate by step, and its state as plain tensors.

A bfloat16 weight of 1.0 does not move under an update of 1e-6, nor under any below 2^-9: what is
trained is float32 (`trainable_parameters` insists), and so are the optimiser's moments, unless
`adamw_8bit` keeps them in 8 bits with block scales ("AdamW-8bit", Table 4), which needs
bitsandbytes and a GPU. Betas, weight decay, warm-up and clipping are not stated in the paper.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from repro.distributed import BatchError
from repro.models.sharding import Shards
from repro.spec.config import OptimizerConfig


def build_optimizer(
    parameters: dict[str, nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimiser over the parameters, in their order.

    Raises `ValueError` without parameters, or where `adamw_8bit` meets some that are off the GPU.
    """
    if not parameters:
        raise ValueError("there are no trainable parameters; an optimiser needs at least one")
    ordered = list(parameters.values())
    device = ordered[0].device.type
    settings: dict[str, Any] = {
        "lr": 0.0,  # set before every step
        "betas": (float(config.beta1), float(config.beta2)),
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw":
        # On a GPU one kernel, since the device waits for the host between the norm and this step.
        return torch.optim.AdamW(ordered, **settings, fused=device == "cuda")
    if device != "cuda":
        raise ValueError(f"adamw_8bit needs a CUDA device; the parameters are on {device}")
    bitsandbytes = importlib.import_module("bitsandbytes")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(ordered, **settings)
    return optimizer


def gradient_step(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    *,
    rate: float,
    max_grad_norm: float,
    shards: Shards | None = None,
) -> float:
    """Clip the gradients to a total norm, step at a rate, clear them; return the norm before.

    With `shards` it is the norm over all ranks. `BatchError` when it is not finite: an update would
    destroy the weights.
    """
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    over_ranks = None if shards is None else shards.norm(gradients)
    total = nn.utils.get_total_norm(gradients.values()) if over_ranks is None else over_ranks
    nn.utils.clip_grads_with_norm_(parameters.values(), max_grad_norm, total)
    norm = float(total)
    if not math.isfinite(norm):
        raise BatchError(f"the gradient norm is {norm}; it must be finite")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    shards: Shards | None = None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Return the optimiser's state as `{"<parameter>//<key>": tensor}` and its plain numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, float]] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                whole = value if shards is None else shards.written(name, value, key)
                tensors[f"{name}//{key}"] = whole.detach().cpu().contiguous()
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    tensors: dict[str, Tensor],
    numbers: dict[str, dict[str, float]],
    shards: Shards | None = None,
) -> None:
    """Put back what `optimizer_tensors` returned; of what ranks divide, this rank's part."""
    states: dict[str, dict[str, Any]] = {name: dict(numbers.get(name, {})) for name in parameters}
    for key, value in tensors.items():
        name, _, field = key.rpartition("//")
        # torch keeps its step counter on the CPU, unless its step is one fused kernel; everything
        # else lives beside its parameter.
        on_cpu = field == "step" and not optimizer.defaults.get("fused")
        device = "cpu" if on_cpu else parameters[name].device
        part = value if shards is None else shards.part(name, value, field)
        states[name][field] = part.to(device, copy=True)
    for name, state in states.items():
        if state:
            optimizer.state[parameters[name]].update(state)
