r"""Another rounding draw of the same function: a checkpoint's channels in another order.

Rounding error is fixed by which weights share a block of K. Three orders can be changed without
changing what the network computes, and each changes the blocks of some projections:

    residual channels   every norm's gain, the columns of what reads the stream (q, k, v, gate, up,
                        lm_head, embedding), the rows of what writes to it (o, down)
    intermediate        the rows of gate and up, the columns of down, a block's own order
    value channels      the rows of v within a key-value head, the columns of o in each query head
                        that attends with it

A draw of the permutations is then a draw of the rounding: errors of another sample of the same
size, at no training. Query and key channels stay, for rotary embedding pairs them by index.

Easy mistakes: permuting within a head of v in one order for all query heads of a group but o in
another; forgetting the biases of what writes to the stream; forgetting that a tied lm_head is the
embedding, so that it follows by itself.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from repro.models.files.tensor_files import CheckpointError, SourceAround, TensorFile
from repro.spec.config import derive_seed

_STREAM = re.compile(r"model\.embed_tokens|lm_head|model\.norm|.*_layernorm")
_IN_BLOCK = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<leaf>\w+)")


class PermutedSource(SourceAround):
    """A checkpoint's tensors, in 16 or 32 bits, with the channels of its model permuted.

    `draw` numbers the permutation; 0 is as good as any other, and not the stored order.
    """

    def __init__(self, source: TensorFile, config: Any, draw: int) -> None:
        super().__init__(source)
        self._draw = draw
        self._hidden, self._inner = config.hidden_size, config.intermediate_size
        self._heads, self._values = config.num_attention_heads, config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._width = int(width)

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, its channels in the draw's order."""
        value = self._source.read(name)
        module, _, kind = name.rpartition(".")
        rows, columns = self._orders(name, module)
        if rows is not None:
            value = value[rows]
        if columns is not None and kind == "weight":
            value = value[:, columns]
        return value.contiguous()

    def _orders(self, name: str, module: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the orders of a tensor's rows and of its columns; None leaves them."""
        stream = self._order("stream", self._hidden)
        if _STREAM.fullmatch(module):
            return (stream, None) if module.endswith("norm") else (None, stream)
        match = _IN_BLOCK.fullmatch(module)
        if match is None:
            raise CheckpointError(f"{self.where(name)}: its channels have no known order")
        layer, leaf = match["layer"], match["leaf"]
        if leaf in ("gate_proj", "up_proj"):
            return self._order(f"inner/{layer}", self._inner), stream
        if leaf == "down_proj":
            return stream, self._order(f"inner/{layer}", self._inner)
        if leaf == "v_proj":
            return self._values_of(layer, 1), stream
        if leaf == "o_proj":
            return stream, self._values_of(layer, self._heads // self._values)
        # Norms of queries and keys (Qwen3) stay as the channels they scale do.
        return None, (stream if leaf in ("q_proj", "k_proj") else None)

    def _order(self, name: str, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._draw, "order", name))
        return torch.randperm(size, generator=generator)

    def _values_of(self, layer: str, group: int) -> Tensor:
        """Return the order of value channels, each key-value head's `group` times, (channels,)."""
        orders = [
            self._order(f"values/{layer}/{head}", self._width) for head in range(self._values)
        ]
        within = torch.stack(orders).repeat_interleave(group, dim=0)  # (heads, width)
        starts = self._width * torch.arange(len(within))[:, None]  # (heads, 1)
        return (starts + within).flatten()
