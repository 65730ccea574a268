"""What S runs train, as one float32 matrix with a row per run.

Every trained tensor is a view (S, ...) into `values`, and its gradient one into `gradients`, so
that norms, clipping and AdamW are a handful of operations on (S, n) whatever the number of tensors.
A tensor that is smaller in some runs (another LoRA rank) is padded with zeros. Padded rows of A and
columns of B stay zero by themselves: each one's gradient is a product with the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_PEFT = "base_model.model."

# Leaves are rows of a wider matrix on purpose; torch would say once that this may be slow.
warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout")


def plain_name(name: str) -> str:
    """Return a parameter's name as it is without peft's wrapper."""
    return name.removeprefix(_PEFT)


class Masters:
    """Stacked float32 parameters of S runs, by plain name, the same names in each.

    Raises `ValueError` when two runs train different tensors.

    Attributes
    ----------
    values, gradients : Tensor, (S, n), float32
        All parameters and their gradients; `leaves` are views.
    leaves : dict of Tensor, (S, ...)
        Require gradients, which accumulate in `gradients`.
    shapes
        One dictionary per run: the shape of each parameter without padding.
    """

    def __init__(self, starts: Sequence[Mapping[str, Tensor]], device: torch.device | str) -> None:
        names = list(starts[0])
        for run, start in enumerate(starts):
            if start.keys() != starts[0].keys():
                odd = sorted(start.keys() ^ starts[0].keys())[0]
                raise ValueError(f"runs 0 and {run} of an ensemble train different tensors: {odd}")
        self.shapes = [{name: tuple(start[name].shape) for name in names} for start in starts]
        widest = {
            name: tuple(max(sizes) for sizes in zip(*(s[name] for s in self.shapes), strict=True))
            for name in names
        }
        counts = {name: torch.Size(shape).numel() for name, shape in widest.items()}
        dtype = next(iter(starts[0].values())).dtype
        self.values = torch.zeros(len(starts), sum(counts.values()), dtype=dtype, device=device)
        self.gradients = torch.zeros_like(self.values)
        self.leaves: dict[str, Tensor] = {}
        begin = 0
        for name in names:
            columns = slice(begin, begin + counts[name])
            begin += counts[name]
            view = self.values[:, columns].view(len(starts), *widest[name])  # (S, ...)
            for run, start in enumerate(starts):
                leading = tuple(slice(size) for size in self.shapes[run][name])
                view[run][leading].copy_(start[name].detach())
            leaf = view.detach().requires_grad_()
            leaf.grad = self.gradients[:, columns].view(len(starts), *widest[name])  # (S, ...)
            self.leaves[name] = leaf
