"""Load compiled kernels and launch them through the CUDA driver, with dependent launch.

`Kernel.launch` puts a kernel on torch's current stream; it allocates nothing and synchronises
nothing, so it can be captured in a CUDA graph. Each launch carries the attribute of
*programmatic dependent launch*: the kernel may start while the one before it drains, and waits
by itself (`griddepcontrol.wait`) before it touches what that one wrote. Every kernel of this
folder waits before its first read of an activation and its first write.

Easy to get wrong: the driver copies the arguments during the call, so their ctypes objects need
to live until it returns, no longer; a kernel that takes more than 48 KB of shared memory must be
allowed to once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cuda import compiler

_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED = 8

_BFLOAT16_ELEMENTS = 9
_SWIZZLE_128_BYTES = 3
_PROMOTE_TO_256_BYTES = 3


class TensorMap(ctypes.Structure):
    """The driver's description of a matrix, for tensor copies; passed to a kernel by value."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


Argument = Tensor | TensorMap | int | float | None


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@lru_cache(maxsize=32)
def _attributes(cluster: int) -> ctypes.Array[_Attribute]:
    chosen: list[tuple[int, tuple[int, ...]]] = [(_PROGRAMMATIC_STREAM_SERIALIZATION, (1,))]
    if cluster > 1:
        chosen.append((_CLUSTER_DIMENSION, (cluster, 1, 1)))
    made = [_Attribute(id=key, value=(ctypes.c_int * 16)(*value)) for key, value in chosen]
    return (_Attribute * len(made))(*made)


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, doing: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown"
        raise RuntimeError(f"CUDA driver, {doing}: error {status} ({reason})")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel on one device, ready to launch."""

    name: str
    function: ctypes.c_void_p

    def launch(
        self,
        blocks: int,
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """Launch on torch's current stream.

        Raises `RuntimeError` when the driver refuses. Of `arguments`, in the kernel's order, a
        tensor passes its address, None a null pointer, an int 32 bits, a float float32, a tensor
        map itself. `cluster` consecutive blocks can read one another's shared memory.
        """
        values: list[ctypes.c_void_p | ctypes.c_int | ctypes.c_float | TensorMap] = []
        for argument in arguments:
            if argument is None:
                values.append(ctypes.c_void_p(0))
            elif isinstance(argument, Tensor):
                values.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, TensorMap):
                values.append(argument)
            elif isinstance(argument, int):
                values.append(ctypes.c_int(argument))
            else:
                values.append(ctypes.c_float(argument))
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        attributes = _attributes(cluster)
        config = _Config(
            grid=(ctypes.c_uint * 3)(blocks, 1, 1),
            block=(ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes=shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=attributes,
            attribute_count=len(attributes),
        )
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None)
        _check(status, f"launch of {self.name}")


@lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, columns: int, stride: int, box: int) -> TensorMap:
    """Describe a bfloat16 matrix for copies of `box` rows x 64 columns in the 128-byte swizzle.

    Raises `RuntimeError` when the driver refuses.

    Parameters
    ----------
    address
        Of the first element, a multiple of 16.
    rows, columns
        Elements beyond them arrive as zeros.
    stride
        Elements from row to row, a multiple of 8.
    box
        Rows per copy, at most 256.
    """
    memory = (ctypes.c_char * (ctypes.sizeof(TensorMap) + 64))()
    offset = -ctypes.addressof(memory) % 64  # the driver asks for this alignment
    made = TensorMap.from_buffer(memory, offset)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(made),
        _BFLOAT16_ELEMENTS,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(stride * 2),
        (ctypes.c_uint32 * 2)(64, box),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128_BYTES,
        _PROMOTE_TO_256_BYTES,
        0,
    )
    _check(status, f"tensor map of a {rows} x {columns} matrix with stride {stride}")
    return made


def architecture(device: int) -> str:
    """Return the architecture of a CUDA device: "sm_90a" for Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@lru_cache(maxsize=256)
def load(
    files: tuple[str, ...],
    name: str,
    macros: tuple[tuple[str, int], ...],
    device: int,
    shared_bytes: int = 0,
) -> Kernel:
    """Compile (or find) a kernel and load it on a device.

    Raises `CompileError` or `RuntimeError` when it cannot be compiled or loaded. `files` and
    `macros` are as `compiler.build` takes them; a launch asks for at most `shared_bytes` of dynamic
    shared memory.
    """
    code = compiler.build(files, dict(macros), architecture(device))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), code), f"load of {name}")
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            f"look-up of {name}",
        )
        if shared_bytes > 48 * 1024:
            _check(
                _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
                f"{shared_bytes} bytes of shared memory for {name}",
            )
    return Kernel(name, function)
