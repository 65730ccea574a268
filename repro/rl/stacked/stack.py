"""The stacked weights of S policies, and their form in a forward pass.

A frozen projection is its dense values in the compute dtype: of a quantised run the dequantised
ones, rounded once, which is what weight-only arithmetic multiplies by. So BF16, NF4, MXFP4 and
NVFP4 runs are rows of one tensor. Projections that read the same input are one matrix (q, k, v;
gate, up), their adapters one A and one block-diagonal B:

    y_s = x_s W_s^T + b_s + (x_s A_s^T) B_s^T,      B_s already times alpha / rank of its run

Under full training the same matrices come from float32 masters, cast at use, and the residual
stream is float32, as a single run's is under autocast.

Easy to get wrong: the embedding of runs that do not train it is kept once, not S times, and is then
multiplied as one matrix; a gain's added noise belongs to the forward pass, never to the gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from repro.models.decoder import ATTENTION_PROJECTIONS, BLOCK_NORMS, LINEARS
from repro.models.lora import adapter_layers
from repro.models.policy import Policy, trainable_parameters
from repro.models.policy_weights import LayerWeights, Projection, policy_weights
from repro.rl.stacked.masters import Masters, plain_name
from repro.rl.stacked.shape import Shape, shape_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linear:
    """One fused projection of S runs in the compute dtype.

    Attributes
    ----------
    weight : Tensor, (S, N, K)
    bias : Tensor or None, (S, 1, N)
    A : Tensor or None, (S, r, K)
        The adapters' A one under the other, r the sum of the ranks.
    B : Tensor or None, (S, N, r)
        Block-diagonal, scaled.
    """

    weight: Tensor
    bias: Tensor | None = None
    A: Tensor | None = None
    B: Tensor | None = None
    # Weight and bias of one run without an adapter on a CPU, where a plain product is sooner done
    # than a batched one.
    _plain: tuple[Tensor, Tensor | None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if len(self.weight) == 1 and self.A is None and not self.weight.is_cuda:
            bias = None if self.bias is None else self.bias[0, 0]
            object.__setattr__(self, "_plain", (self.weight[0], bias))

    def __call__(self, x: Tensor) -> Tensor:
        """Return (S, M, N) of x (S, M, K), in the weight's dtype."""
        x = x.to(self.weight.dtype)
        if self._plain is not None:
            return functional.linear(x, *self._plain)
        transposed = self.weight.transpose(1, 2)  # (S, K, N)
        if self.bias is None:
            y = torch.bmm(x, transposed)
        else:
            y = torch.baddbmm(self.bias, x, transposed)
        if self.A is None or self.B is None:
            return y
        down = torch.bmm(x, self.A.transpose(1, 2))  # (S, M, r)
        if torch.is_grad_enabled():
            return torch.baddbmm(y, down, self.B.transpose(1, 2))
        return y.baddbmm_(down, self.B.transpose(1, 2))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One block of S runs; gains are (S, 1, H) float32, added noise included.

    `head_gain` is that of Qwen3's norms on the heads of q and k, (S, 1, heads, head_dim).
    """

    input_gain: Tensor
    post_gain: Tensor
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    head_gain: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """What one forward pass reads.

    Attributes
    ----------
    embedding, head : Tensor, (E, V, H)
        E is 1 where all runs share it, else S; the same tensor when tied.
    """

    layers: tuple[Layer, ...]
    final_gain: Tensor
    embedding: Tensor
    head: Tensor

    def tensors(self) -> list[Tensor]:
        """Return every tensor in a fixed order, a tied head once."""
        tensors = [self.final_gain, self.embedding]
        if self.head is not self.embedding:
            tensors.append(self.head)
        for layer in self.layers:
            tensors += [layer.input_gain, layer.post_gain]
            if layer.head_gain is not None:
                tensors.append(layer.head_gain)
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                parts = (linear.weight, linear.bias, linear.A, linear.B)
                tensors += [part for part in parts if part is not None]
        return tensors


@dataclass(slots=True, kw_only=True, eq=False)
class Stack:
    """S policies.

    Attributes
    ----------
    dtype, stream
        Of products, and of the residual stream.
    frozen
        Stacked tensors that are not trained, by name; (S, ...) or, the embedding, (1, V, H).
    masters
        What is trained; None for untrained runs.
    scalings
        (S,) float32, alpha / rank; 1 without adapters.
    rotary
        `rotary(like, positions (B, T))` returns cos and sin, (B, T, head_dim).
    facts
        One per run: `Policy.facts`.
    """

    shape: Shape
    runs: int
    dtype: torch.dtype
    stream: torch.dtype
    device: torch.device
    frozen: dict[str, Tensor]
    masters: Masters | None
    scalings: Tensor
    rotary: Any
    tokenizer: Any
    end_token_ids: frozenset[int]
    facts: list[dict[str, Any]] = field(default_factory=list)

    def weights(self, noise: Tensor | None = None) -> Weights:
        """Return the weights as they are now, with gradient to the masters where it is enabled.

        Parameters
        ----------
        noise
            (S, 2 L + 1, H) float32, added to the gains: input and post norm of each layer, then the
            final norm.
        """
        layers = []
        for number in range(self.shape.layers):
            at, place = f"model.layers.{number}", 2 * number
            layers.append(
                Layer(
                    input_gain=self._gain(f"{at}.{BLOCK_NORMS[0]}", noise, place),
                    post_gain=self._gain(f"{at}.{BLOCK_NORMS[1]}", noise, place + 1),
                    **{name: self._linear(at, name) for name in LINEARS},
                    head_gain=self._head_gain(at) if self.shape.head_norms else None,
                )
            )
        embedding = self._tensor("model.embed_tokens.weight")
        return Weights(
            layers=tuple(layers),
            final_gain=self._gain("model.norm", noise, 2 * self.shape.layers),
            embedding=embedding,
            head=embedding if self.shape.tied else self._tensor("lm_head.weight"),
        )

    def gains(self, name: str) -> Tensor:
        """Return (S, H) the gains of one norm without noise."""
        return self._tensor(f"{name}.weight").detach()

    def _tensor(self, name: str) -> Tensor:
        if name in self.frozen:
            return self.frozen[name]
        if self.masters is None:
            raise KeyError(name)
        return self.masters.leaves[name]

    def _gain(self, name: str, noise: Tensor | None = None, place: int = 0) -> Tensor:
        gain = self._tensor(f"{name}.weight")
        gain = gain.to(torch.promote_types(gain.dtype, torch.float32)).unsqueeze(1)  # (S, 1, H)
        return gain if noise is None else gain + noise[:, place : place + 1]

    def _head_gain(self, at: str) -> Tensor:
        heads = {"q": self.shape.query_heads, "k": self.shape.key_heads}
        # (S, D) -> (S, heads, D) each
        gains = [
            self._gain(f"{at}.self_attn.{name}_norm").expand(-1, count, -1)
            for name, count in heads.items()
        ]
        return torch.cat(gains, dim=1).unsqueeze(1)  # (S, 1, heads, D)

    def _linear(self, at: str, name: str) -> Linear:
        members = [f"{at}.{_parent(leaf)}.{leaf}" for leaf in LINEARS[name]]
        fused = f"{at}.{name}"
        leaves = {} if self.masters is None else self.masters.leaves
        if f"{fused}.weight" in self.frozen:
            weight, bias = self.frozen[f"{fused}.weight"], self.frozen.get(f"{fused}.bias")
        else:
            # The members side by side: (S, N, K)
            weight = torch.cat([leaves[f"{m}.weight"].to(self.dtype) for m in members], dim=1)
            biases = [leaves[f"{m}.bias"] for m in members if f"{m}.bias" in leaves]
            # A bias is added to every token: (S, 1, N)
            bias = torch.cat(biases, dim=1).to(self.dtype).unsqueeze(1) if biases else None
        if f"{members[0]}.lora_A.default.weight" not in leaves:
            return Linear(weight=weight, bias=bias)
        # (S, r, K); r is the sum of the members' ranks
        A = torch.cat([leaves[f"{m}.lora_A.default.weight"] for m in members], dim=1)
        B = [leaves[f"{m}.lora_B.default.weight"] for m in members]
        return Linear(weight=weight, bias=bias, A=A.to(self.dtype), B=self._diagonal(B))

    def _diagonal(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the (S, N_i, R) matrices as one block-diagonal one, scaled, in the dtype."""
        # (S, N_i, R) each
        scaled = [(block * self.scalings[:, None, None]).to(self.dtype) for block in blocks]
        if len(scaled) == 1:
            return scaled[0]
        rank = scaled[0].shape[2]
        padded = [
            functional.pad(block, (rank * i, rank * (len(scaled) - 1 - i)))
            for i, block in enumerate(scaled)
        ]
        return torch.cat(padded, dim=1)  # (S, N, r)


@torch.no_grad()
def own_weights(stack: Stack) -> Weights:
    """Return the stack's weights in memory of their own, but for what is frozen.

    A reader that keeps them (a CUDA graph does) can then write new values, and noisy gains, into
    them.
    """
    frozen = {tensor.data_ptr() for tensor in stack.frozen.values()}

    def own(tensor: Tensor) -> Tensor:
        return tensor if tensor.data_ptr() in frozen else tensor.clone()

    def linear(source: Linear) -> Linear:
        parts = {"weight": source.weight, "bias": source.bias, "A": source.A, "B": source.B}
        return Linear(**{k: None if v is None else own(v) for k, v in parts.items()})  # type: ignore[arg-type]

    shared = stack.weights()
    embedding = own(shared.embedding)
    return Weights(
        layers=tuple(
            Layer(
                input_gain=layer.input_gain.clone(),
                post_gain=layer.post_gain.clone(),
                **{name: linear(getattr(layer, name)) for name in LINEARS},
                head_gain=None if layer.head_gain is None else layer.head_gain.clone(),
            )
            for layer in shared.layers
        ),
        final_gain=shared.final_gain.clone(),
        embedding=embedding,
        head=embedding if stack.shape.tied else own(shared.head),
    )


def _parent(leaf: str) -> str:
    return "self_attn" if leaf in ATTENTION_PROJECTIONS else "mlp"


@torch.no_grad()
def stack_policies(
    policies: Sequence[Policy], *, end_token_ids: frozenset[int], device: torch.device | str
) -> Stack:
    """Return freshly loaded policies as one stack; the policies can be dropped afterwards.

    Raises `ValueError` when they differ in more than an ensemble can hold.

    Parameters
    ----------
    policies
        Of one shape, one kind of training and one compute dtype. Adapters must be at their start
        (B zero).
    """
    first = policies[0]
    full, dtype = first.training == "full", first.compute_dtype
    target = torch.device(device)
    shape, trained, scalings = None, [], []
    columns: list[dict[str, Tensor]] = []
    for number, policy in enumerate(policies):
        if (policy.training, policy.compute_dtype) != (first.training, dtype):
            raise ValueError(
                f"run {number} of an ensemble trains {policy.training} in {policy.compute_dtype}; "
                f"run 0 {first.training} in {dtype}"
            )
        dense = policy_weights(policy, torch.float32 if full else dtype)
        own = shape_of(dense)
        if shape not in (None, own):
            raise ValueError(f"run {number} of an ensemble has shape {own}; run 0 has {shape}")
        shape = own
        parameters = {plain_name(n): p for n, p in trainable_parameters(policy).items()}
        trained.append(parameters)
        scalings.append(_scaling(policy))
        columns.append({} if full else _frozen(dense.layers, policy, parameters))
    if shape is None:
        raise ValueError("there are no policies; an ensemble needs at least one")
    masters = Masters(trained, target) if trained[0] else None
    return Stack(
        shape=shape,
        runs=len(policies),
        dtype=dtype,
        stream=torch.promote_types(torch.float32, dtype) if full else dtype,
        device=target,
        frozen={name: _stacked(name, [c[name] for c in columns], target) for name in columns[0]},
        masters=masters,
        scalings=torch.tensor(scalings, device=target),
        rotary=policy_weights(first).rotary,
        tokenizer=first.tokenizer,
        end_token_ids=end_token_ids,
        facts=[dict(policy.facts) for policy in policies],
    )


@torch.no_grad()
def merged_stack(policy: Policy, *, end_token_ids: frozenset[int]) -> Stack:
    """Return one policy as it is now as a stack that trains nothing: float32, adapter merged."""
    dense = policy_weights(policy)
    frozen = _frozen(dense.layers, policy, {})
    return Stack(
        shape=shape_of(dense),
        runs=1,
        dtype=torch.float32,
        stream=torch.float32,
        device=policy.device,
        frozen={name: part.to(torch.float32).unsqueeze(0) for name, part in frozen.items()},
        masters=None,
        scalings=torch.ones(1),
        rotary=dense.rotary,
        tokenizer=policy.tokenizer,
        end_token_ids=end_token_ids,
    )


def _frozen(
    layers: Sequence[LayerWeights], policy: Policy, trained: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a run's frozen tensors, fused as the forward pass multiplies them."""
    decoder: Any = policy.decoder
    named = dict(decoder.named_parameters())
    frozen = {
        name: named[name].detach()
        for name in named
        if name not in trained and ("norm" in name or name in _OUTSIDE)
    }
    for number, layer in enumerate(layers):
        at = f"model.layers.{number}"
        for name, members in _fused(layer).items():
            frozen[f"{at}.{name}.weight"] = torch.cat([m.weight for m in members])  # (N, K)
            biases = [m.bias for m in members if m.bias is not None]
            if biases:
                frozen[f"{at}.{name}.bias"] = torch.cat(biases).unsqueeze(0)  # (1, N)
    return frozen


_OUTSIDE = ("model.embed_tokens.weight", "lm_head.weight")


def _fused(layer: LayerWeights) -> dict[str, tuple[Projection, ...]]:
    return {
        name: tuple(getattr(layer, member.removesuffix("_proj")) for member in members)
        for name, members in LINEARS.items()
    }


def _stacked(name: str, parts: Sequence[Tensor], device: torch.device) -> Tensor:
    if name in _OUTSIDE and all(torch.equal(part, parts[0]) for part in parts[1:]):
        return parts[0].unsqueeze(0).to(device, copy=True)  # (1, V, H)
    return torch.stack([part.to(device) for part in parts])  # (S, ...)


def _scaling(policy: Policy) -> float:
    scalings = {layer.adapter()[2] for _, layer in adapter_layers(policy.model)}
    if len(scalings) > 1:
        raise ValueError(f"a policy's adapters have different scalings ({sorted(scalings)})")
    return scalings.pop() if scalings else 1.0
