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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

# Elements that share a scale of 8-bit moments, and the fewest that have such moments at all
# (bitsandbytes): a cut between them would change what a checkpoint holds.
BLOCK, FEWEST = 256, 4096


class Gatherer(nn.Module):
    """Calls a function while the matrices of the modules in it are whole."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)  # torch 2.11 shards no subclass of it

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
            return rows * columns // BLOCK, -(-total * columns // BLOCK)
        return rows, total
