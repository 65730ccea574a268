"""Full training on several ranks: each has its rows of every matrix, by torch's FSDP2.

A pass gathers the matrices of a block while it multiplies by them, and adds their gradients up over
ranks as backward leaves the block. Vectors (norms, biases), and matrices that cannot be cut, are
whole on each rank, and so are frozen and 4-bit bases, always. What optimiser and checkpoints see
are plain tensors, `Shards.parts`, in FSDP's own memory.

Easy mistakes
-------------
* FSDP's hooks are those of a module's call, and a pass calls parts of blocks: it must go through
  `Policy.within`. All gathers need one root, or each keeps its buffers until backward has ended.
* A head that is the embedding must be gathered with it, or it becomes a second trained tensor.
* FSDP averages gradients unless it is told otherwise; losses divide by counts of all ranks' rows.
* Masters gathered in 16 bits, as autocast would make them, are right for products; embedding and
  head are read in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.spec.arm import OptimizerName, require

if TYPE_CHECKING:
    from repro.models.policy import Policy

# Elements that share a scale of 8-bit moments, and the fewest that have such moments at all
# (bitsandbytes): a cut between them would change what a checkpoint holds.
_BLOCK, _FEWEST = 256, 4096


class Gatherer(nn.ModuleList):
    """Calls a function while the matrices of the modules in it are whole."""

    def forward(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return what the function returns."""
        return function(*tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shards:
    """What this rank has of a fully trained policy.

    Attributes
    ----------
    group
        The ranks.
    gatherers
        By the module whose matrices a pass needs; by the decoder, the root of all.
    cut
        FSDP's own parameters, by name.
    parts
        All that is trained, by name: this rank's rows of what is cut, the rest whole.
    """

    group: dist.ProcessGroup
    gatherers: Mapping[nn.Module, nn.Module]
    cut: Mapping[str, Any]
    parts: dict[str, nn.Parameter]

    def take_gradients(self) -> None:
        """Give this rank's rows the gradients that FSDP has added up for them."""
        for name, parameter in self.cut.items():
            if parameter.grad is not None:
                self.parts[name].grad = parameter.grad.to_local()
                parameter.grad = None

    def norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the L2 norm, (), of tensors like `parts` over all ranks; all must ask."""
        cut = nn.utils.get_total_norm([tensors[name] for name in self.cut]).double().square()
        square = cut.to(next(iter(self.parts.values())).device)
        dist.all_reduce(square, group=self.group)
        whole = [tensor for name, tensor in tensors.items() if name not in self.cut]
        return (square + nn.utils.get_total_norm(whole).to(square).square()).sqrt()

    def whole(self, name: str, part: Tensor, key: str = "") -> Tensor:
        """Return a part of a trained tensor, or of its moments by `key`, whole; all must ask."""
        if (found := self._lengths(name, part, key)) is None:
            return part
        length, total = found
        ranks = dist.get_world_size(self.group)
        own = part.new_zeros((length, *part.shape[1:]))
        own[: len(part)] = part
        every = own.new_empty((length * ranks, *part.shape[1:]))
        dist.all_gather(list(every.chunk(ranks)), own, group=self.group)
        return every[:total]

    def written(self, name: str, part: Tensor, key: str = "") -> Tensor:
        """Return what `whole` does to the first rank, on the CPU, and nothing to the others."""
        whole = self.whole(name, part, key)
        return (whole if dist.get_rank(self.group) == 0 else whole.new_empty(0)).cpu()

    def part(self, name: str, whole: Tensor, key: str = "") -> Tensor:
        """Return this rank's part of what `whole` returned."""
        if (found := self._lengths(name, whole, key)) is None:
            return whole
        begin = found[0] * dist.get_rank(self.group)
        return whole[begin : begin + found[0]]

    def _lengths(self, name: str, tensor: Tensor, key: str) -> tuple[int, int] | None:
        """Return the length of the first rank's part and of the whole; None if it is not cut."""
        scales = key.startswith("absmax")
        if name not in self.cut or not (scales or tensor.dim() == 2):
            return None
        total, columns = self.cut[name].shape
        rows = -(-total // dist.get_world_size(self.group))
        if scales:
            return rows * columns // _BLOCK, -(-total * columns // _BLOCK)
        return rows, total


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
            Gatherer(modules), mesh=mesh, reshard_after_forward=True, mp_policy=mixed,
            ignored_params=uncut,
        )  # fmt: skip
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
        return rows * columns % _BLOCK == 0 and last * columns >= _FEWEST
    return last > 0


def whole_parameters(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of a fully trained decoder's parameters, whole, by name; all ranks must ask."""
    shards = policy.shards
    for name, parameter in policy.decoder.named_parameters():
        own = parameter if shards is None else shards.parts[name]
        copied = own.detach().to(dtype, copy=True)
        yield name, copied if shards is None else shards.whole(name, copied)
