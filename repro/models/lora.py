"""LoRA on the seven projections, through stock peft, over dense and 4-bit bases alike.

    y = x W^T + b + scaling * (x A^T) B^T,    scaling = alpha / R   (rsLoRA: alpha / sqrt(R))

peft does the bookkeeping (names, files, enabling and disabling); `AdapterLinear` does the
arithmetic.

Easy mistakes
-------------
* `A` and `B` are float32 masters whatever the activations' dtype: an update below w * 2^-9 is lost
  in bfloat16. They are cast to the activations' dtype in the forward pass;
  peft's own layer would cast the activations up instead, and multiply in float32.
* Two arms that differ in weight format must start from the same `A`. Here it is drawn per module
  from (seed, module name) on the CPU, so neither format, device, nor the order of modules matters.
* scaling is alpha / R, and a second implementation (the sampler) easily drops it.
  `effective_weight` is the one place that merges for it, into a fresh float32 tensor.
* What was folded into a 16-bit base cannot be subtracted again, because the sum was rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import dispatch
from repro.models.decoder import PROJECTIONS, causal_lm, is_projection
from repro.models.peft_parts import LoraConfig, PeftLinear, PeftModel, get_peft_model
from repro.models.quantized_linear import QuantizedLinear
from repro.spec.config import derive_seed

ADAPTER_NAME = "default"


class AdapterLinear(PeftLinear):
    """peft's LoRA layer with float32 masters cast to the activations' dtype, and no 4-bit merge.

    `base_layer` is an `nn.Linear` or a `QuantizedLinear`; everything else is peft's.
    """

    def _get_base_layer_device_and_dtype(
        self, base_layer: nn.Module
    ) -> tuple[torch.device, torch.dtype]:
        # peft gives an adapter its base's dtype; ours stays float32 on any base.
        return base_linear(base_layer).weight.device, torch.float32

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # peft knows nn.Linear only, and warns about anything else.
        linear = cast(nn.Linear, module)
        return linear.in_features, linear.out_features

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return x W^T + b + scaling * (x A^T) B^T, (..., N), in x's dtype."""
        if args or kwargs:
            raise TypeError(f"AdapterLinear takes one tensor; got also {args} and {kwargs}")
        base = base_linear(self)
        factors = self.factors()
        if factors is None:
            return cast(Tensor, base(x))
        A, B, scaling = factors
        down = functional.linear(x, A.to(x.dtype))
        return cast(Tensor, base(x)) + functional.linear(down, B.to(x.dtype)) * scaling

    def adapter(self) -> tuple[nn.Parameter, nn.Parameter, float]:
        """Return A (R, K), B (N, R), both float32 masters, and the scaling."""
        A, B = self.lora_A[ADAPTER_NAME].weight, self.lora_B[ADAPTER_NAME].weight
        return cast(nn.Parameter, A), cast(nn.Parameter, B), self.scaling[ADAPTER_NAME]

    def factors(self) -> tuple[nn.Parameter, nn.Parameter, float] | None:
        """Return the adapter that `forward` adds to the base, or None."""
        acts = ADAPTER_NAME in self.active_adapters and ADAPTER_NAME in self.lora_A
        return self.adapter() if acts and not (self.disable_adapters or self.merged) else None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge into a dense base; refuse for a 4-bit one."""
        base = self.get_base_layer()
        if isinstance(base, QuantizedLinear):
            raise TypeError(
                f"merging an adapter into a {base.weight_format} base is refused: the merged "
                "weight does not lie on the 4-bit grid, and rounding it there again loses much of "
                "the adapter; keep the adapter apart, or take effective_weight() in 16 bits or more"
            )
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)


def attach_adapter(
    model: nn.Module, *, rank: int, alpha: float, seed: int, rslora: bool = False
) -> PeftModel:
    """Wrap `model` with a fresh adapter on every projection: A random from `seed`, B zero.

    A projection without an adapter raises.
    """
    if rank < 1:
        raise ValueError(f"LoRA rank is {rank}; it must be 1 or more")
    config = LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # type: ignore[arg-type]
        target_modules=sorted(PROJECTIONS),
        lora_dropout=0.0,
        bias="none",
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: AdapterLinear, QuantizedLinear: AdapterLinear})
    # Init by peft would draw from the global generator, shifting every later draw of the process.
    with torch.random.fork_rng(devices=[]):
        # On the meta device: peft would draw every factor twice on the CPU, to no avail.
        peft_model = get_peft_model(model, config, low_cpu_mem_usage=True)
    adapters = dict(adapter_layers(peft_model))
    expected = {name for name, _ in causal_lm(peft_model).named_modules() if is_projection(name)}
    if not adapters or set(adapters) != expected:
        missing = sorted(expected - set(adapters))
        raise ValueError(f"no adapter on {missing[:3]} and {max(0, len(missing) - 3)} more")
    for name, layer in adapters.items():
        initialise(layer, derive_seed(seed, "lora", name))
    return peft_model


def initialise(layer: AdapterLinear, seed: int) -> None:
    """Give a layer its masters, on its base's device.

    A is drawn from U(-1/sqrt(K), 1/sqrt(K)) by `seed` (peft's own distribution), B is zero.
    """
    A, B, _ = layer.adapter()
    device = base_linear(layer).weight.device
    generator = torch.Generator().manual_seed(seed)
    bound = 1.0 / math.sqrt(A.shape[1])
    values = torch.empty(A.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    zeros = torch.zeros(B.shape, dtype=torch.float32, device=device)
    for factor, master, value in ((layer.lora_A, A, values.to(device)), (layer.lora_B, B, zeros)):
        cast(Any, factor[ADAPTER_NAME]).weight = nn.Parameter(
            value, requires_grad=master.requires_grad
        )


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, AdapterLinear]]:
    """Yield `(projection name, adapter layer)` in the order of the layers."""
    for name, module in causal_lm(model).named_modules():
        if isinstance(module, AdapterLinear):
            yield name, module


def base_linear(linear: nn.Module) -> nn.Linear | QuantizedLinear:
    """Return the base layer of a projection, adapted or not."""
    base = linear.get_base_layer() if isinstance(linear, AdapterLinear) else linear
    if not isinstance(base, nn.Linear | QuantizedLinear):
        raise TypeError(f"{type(base).__name__} is neither nn.Linear nor QuantizedLinear")
    return base


@torch.no_grad()
def effective_weight(linear: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return W + scaling * B A of a projection, (N, K), summed in float32, as a fresh tensor.

    The projection is an `nn.Linear`, a `QuantizedLinear`, or either inside an `AdapterLinear`. A
    `dtype` below float32 rounds the sum.
    """
    base = base_linear(linear)
    if isinstance(base, QuantizedLinear):
        weight = dispatch.dequantize(base.weight, torch.float32)
    else:
        weight = base.weight.detach().to(torch.float32)
    factors = linear.factors() if isinstance(linear, AdapterLinear) else None
    if factors is not None:
        A, B, scaling = factors
        return torch.addmm(weight, B.float(), A.float(), alpha=scaling).to(dtype)
    return weight.to(dtype, copy=True)


@torch.no_grad()
def fold_adapter(model: nn.Module) -> None:
    """Add a model's adapter into its dense bases, in place; modules multiply by these alone then.

    Each sum is formed in float32 and rounded to 16 bits once, whatever dtype the base is kept in.
    """
    for layer, base in dense_bases(model):
        base.weight.copy_(effective_weight(layer, _folded_dtype(base)))
        layer.merged_adapters.append(ADAPTER_NAME)


@torch.no_grad()
def folding_loss(model: nn.Module) -> float:
    """Return the norm of what a fold's rounding takes from the adapters' products, over theirs."""
    lost, whole = 0.0, 0.0
    for layer, base in dense_bases(model):
        exact = effective_weight(layer)
        lost += float((exact.to(_folded_dtype(base)).float() - exact).square().sum())
        whole += float((exact - base.weight).square().sum())
    return math.sqrt(lost / (whole or 1.0))


def dense_bases(model: nn.Module) -> Iterator[tuple[AdapterLinear, nn.Linear]]:
    """Yield each adapter's layer with its dense base; `TypeError` for a 4-bit one."""
    for name, layer in adapter_layers(model):
        base = base_linear(layer)
        if isinstance(base, QuantizedLinear):
            raise TypeError(f"{name} is {base.weight_format}; folding an adapter needs 16 bits")
        yield layer, base


def _folded_dtype(base: nn.Linear) -> torch.dtype:
    return base.weight.dtype if base.weight.dtype.itemsize == 2 else torch.bfloat16
