"""The numbers that two runs must share to be one batched model."""

from __future__ import annotations

from dataclasses import dataclass

from repro.models.policy_weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen2, Qwen3 or Llama decoder: L layers, H hidden, the MLP's width, V, and heads.

    Query head j reads key head j // (query_heads // key_heads). `scaling` is the factor on
    attention scores and `epsilon` is added to the norms' mean square; `biased` are q, k and v,
    `tied` is the head to the embedding, and `head_norms` are those of Qwen3's q and k.
    """

    layers: int
    hidden: int
    inner: int
    vocabulary: int
    query_heads: int
    key_heads: int
    head_dim: int
    scaling: float
    epsilon: float
    biased: bool
    tied: bool
    head_norms: bool

    @property
    def queries(self) -> int:
        """Columns of all query heads."""
        return self.query_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all key heads."""
        return self.key_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.query_heads // self.key_heads


def shape_of(weights: DecoderWeights) -> Shape:
    """Return the shape of a decoder's weights.

    Raises `ValueError` when the decoder has parts that an ensemble does not batch: biases beside
    those of q, k and v, another activation than SiLU.
    """
    first = weights.layers[0]
    if any(p.bias is not None for p in (first.o, first.gate, first.up, first.down)):
        raise ValueError("o, gate, up or down has a bias; an ensemble takes them on q, k and v")
    name = getattr(weights.activation, "__class__", type(None)).__name__
    if name not in ("SiLUActivation", "SiLU"):
        raise ValueError(f"the MLP's activation is {name}; an ensemble computes SiLU")
    return Shape(
        layers=len(weights.layers),
        hidden=weights.embedding.shape[1],
        inner=first.gate.weight.shape[0],
        vocabulary=weights.embedding.shape[0],
        query_heads=weights.query_heads,
        key_heads=weights.key_heads,
        head_dim=weights.head_dim,
        scaling=weights.scaling,
        epsilon=_epsilon(first, weights),
        biased=first.q.bias is not None,
        tied=weights.lm_head is weights.embedding,
        head_norms=first.q_norm is not None,
    )


def _epsilon(first: LayerWeights, weights: DecoderWeights) -> float:
    epsilons = {
        first.input_norm.variance_epsilon,
        first.post_norm.variance_epsilon,
        weights.final_norm.variance_epsilon,
    }
    if first.q_norm is not None:
        epsilons.add(weights.head_norm_eps)
    if len(epsilons) > 1:
        raise ValueError(f"the norms have different epsilons ({sorted(epsilons)}); they must agree")
    return epsilons.pop()
