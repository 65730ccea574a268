"""Dividing a fully trained policy among ranks by torch's FSDP2; what each has is a `Shards`."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from repro.models.policy import Policy
from repro.models.sharding import BLOCK, FEWEST, Gatherer, Shards
from repro.spec.arm import OptimizerName
from repro.spec.checks import require


def shard(policy: Policy, group: dist.ProcessGroup | None, optimizer: OptimizerName) -> None:
    """Leave each rank of a group (None: the default) its rows of a policy that all have loaded.

    `ValueError` when not every weight is trained. The optimiser's 8-bit moments are cut between
    their blocks alone.
    """
    require(
        policy.training == "full",
        f"training is {policy.training!r} on {policy.weight_format} weights; weights are divided "
        "among ranks under full training alone: a frozen base is whole on each",
    )
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    group = dist.group.WORLD if group is None else group
    assert group is not None
    mesh = dist.device_mesh.DeviceMesh.from_group(group, policy.device.type)
    decoder: Any = policy.decoder
    # No list of all is kept: what is cut is given back one by one.
    uncut = {p for p in decoder.parameters() if not _may_be_cut(p, group.size(), optimizer)}
    names = [name for name, whole in decoder.named_parameters() if whole not in uncut]

    def gatherer(modules: list[nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
        reduced = None if dtype is None else torch.float32
        mixed = MixedPrecisionPolicy(dtype, reduced, cast_forward_inputs=False)
        made = fully_shard(
            Gatherer(modules),
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=mixed,
            ignored_params=uncut,
        )
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)  # gloo has no other sum by a factor
        return cast(nn.Module, made)

    narrow = policy.compute_dtype if policy.compute_dtype.itemsize == 2 else None
    gatherers = {block: gatherer([block], narrow) for block in decoder.model.layers}
    embedding, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    tied = head.weight is embedding.weight
    for modules in ([embedding, head],) if tied else ([embedding], [head]):
        gatherers |= dict.fromkeys(modules, gatherer(modules))
    gatherers[decoder] = gatherer(list(dict.fromkeys(gatherers.values())))
    parts = dict(decoder.named_parameters())
    cut = {name: parts[name] for name in names}
    parts |= {name: nn.Parameter(p.detach().to_local()) for name, p in cut.items()}
    policy.shards = Shards(group=group, gatherers=gatherers, cut=cut, parts=parts)


def _may_be_cut(parameter: nn.Parameter, ranks: int, optimizer: OptimizerName) -> bool:
    """Tell whether every rank can have rows of a parameter."""
    if parameter.dim() != 2:
        return False
    total, columns = parameter.shape
    rows = -(-total // ranks)
    last = total - (ranks - 1) * rows
    if optimizer == "adamw_8bit":
        return rows * columns % BLOCK == 0 and last * columns >= FEWEST
    return last > 0
