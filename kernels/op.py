"""What a row of `kernels.ops.OPS` is: an operation, its reference, its kernel and its inputs."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import timing

Shape = tuple[int, ...]
Arguments = tuple[Any, ...]
Inputs = Callable[[Shape, torch.dtype, str, int], Arguments]
# A function of plain bfloat16 PyTorch and the arguments that it takes.
Dense = tuple[Callable[..., Any], Arguments]

# Larger tensors are drawn on their device, smaller ones on the CPU: the same on every device.
_DRAWN_ON_THE_CPU = 1 << 22
_MOST_SETS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation.

    Attributes
    ----------
    reference
        Called with the inputs.
    kernel
        "module:function", imported on use; called with the inputs, prepared by `prepare`.
    inputs
        (shape, dtype, device, seed) to the arguments.
    shapes
        Small ones for tests, ragged on purpose.
    large
        What the benchmark takes, of Qwen2.5-7B.
    nbytes, flops
        Of one call at a shape in 16 bits: each input read once, each output written once.
    named
        Names of the last arguments, which are passed by name.
    written
        Places of the arguments that a call writes into.
    exact
        Must equal the reference bit for bit.
    bound
        Largest error against the reference, in parts of the largest value, on every device; None
        allows 1e-5 in float32 and in 16 bits twice the error of plain PyTorch in the same type.
    interpretable
        Runs on a CPU in Triton's interpreter (`TRITON_INTERPRET=1`), in float32: its bfloat16
        products and roundings are wrong (kernels/README.md).
    hopper
        Needs the Hopper kernels.
    captured
        Can be captured in a CUDA graph: neither waits for the device nor branches on values.
    prepare
        Turns the reference's arguments into the kernel's.
    dense
        Turns the reference's arguments into the same operation in plain bfloat16 PyTorch, without
        4-bit weights; None where there is none.
    """

    name: str
    reference: Callable[..., Any]
    kernel: str
    inputs: Inputs
    shapes: tuple[Shape, ...]
    large: Shape
    nbytes: Callable[[Shape], float]
    flops: Callable[[Shape], float]
    named: tuple[str, ...] = ()
    written: tuple[int, ...] = ()
    exact: bool = False
    bound: float | None = None
    interpretable: bool = True
    hopper: bool = False
    captured: bool = True
    prepare: Callable[[Arguments], Arguments] = lambda arguments: arguments
    dense: Callable[[Arguments], Dense] | None = None

    def load(self) -> Callable[..., Any]:
        """Import the kernel."""
        module, function = self.kernel.split(":")
        kernel: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return kernel

    def call(self, function: Callable[..., Any], arguments: Arguments) -> Any:
        """Call the kernel or its reference as a run does; it may write into the arguments."""
        positional = len(arguments) - len(self.named)
        by_name = dict(zip(self.named, arguments[positional:], strict=True))
        return function(*arguments[:positional], **by_name)

    def outputs(self, function: Callable[..., Any], arguments: Arguments) -> tuple[Tensor, ...]:
        """Return the result of a call and all that it wrote, as tensors; the arguments stay."""
        own = list(arguments)
        for place in self.written:
            own[place] = copied(own[place])
        result = self.call(function, tuple(own))
        found = _tensors_of((result, [own[place] for place in self.written]))
        return tuple(t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in found)


def triton_row(
    reference: Callable[..., Any], module: str, named: tuple[str, ...] = (), **fields: Any
) -> Op:
    """Return a Triton kernel's row: of its reference's name, plain PyTorch being the reference."""
    name, end = reference.__name__, -len(named) or None
    usual: dict[str, Any] = {"name": name, "dense": lambda own: (reference, own[:end])}
    kernel = f"kernels.triton.{module}:{name}"
    return Op(reference=reference, kernel=kernel, named=named, **usual | fields)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments or results, those inside dataclasses too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_of(part)
    elif isinstance(value, dict):
        yield from _tensors_of(tuple(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_of([getattr(value, f.name) for f in dataclasses.fields(value)])


def copied(value: Any, by: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    """Return arguments with every tensor copied by a function, inside dataclasses too."""
    if isinstance(value, Tensor):
        return by(value)
    if isinstance(value, tuple | list):
        return type(value)(copied(part, by) for part in value)
    if isinstance(value, dict):
        return {name: copied(part, by) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: copied(getattr(value, f.name), by) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    return value


def rotated(arguments: Arguments) -> list[Arguments]:
    """Return sets of arguments at different addresses that together outgrow the caches.

    Small arguments would need thousands of sets: 128 of them, half a megabyte each, do.
    """
    count = min(_MOST_SETS, timing.copies(tensor_bytes(arguments)))
    return [arguments, *(copied(arguments) for _ in range(count - 1))]


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in arguments."""
    return sum(tensor.nbytes for tensor in _tensors_of(value))


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Return normal random values."""
    drawn_on = "cpu" if torch.Size(shape).numel() <= _DRAWN_ON_THE_CPU else device
    generator = torch.Generator(drawn_on).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=drawn_on).to(dtype).to(device)
