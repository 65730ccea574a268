"""Compile CUDA C++ sources at first use with NVRTC, and keep the result on disk.

NVRTC, the CUDA run-time compiler, comes with every CUDA build of torch, so neither a toolkit nor
a host compiler is needed. The sources in this folder include nothing: `build` joins the files
named, defines the macros given and compiles for one architecture. The machine code is kept under
`~/.cache/qerl-repro` (`XDG_CACHE_HOME` and `QERL_REPRO_CACHE` are honoured) by a digest of the
text, the options, the architecture and NVRTC's version; a second process compiles nothing.

Easy to get wrong: `sm_90a`, not `sm_90`, or wgmma and setmaxnreg are rejected; and libnvrtc finds
its built-ins beside itself, so it must be loaded from where torch's wheels put it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent


class CompileError(RuntimeError):
    """NVRTC is missing or rejected a source; the message says which."""


def cache_folder() -> Path:
    """Return the folder of compiled kernels (not created)."""
    named = os.environ.get("QERL_REPRO_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qerl-repro"


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    version = (torch.version.cuda or "").split(".")[0]
    if not version:
        raise CompileError("torch was built without CUDA; NVRTC comes with its CUDA builds only")
    packages = Path(torch.__file__).parents[1]
    name = f"libnvrtc.so.{version}"
    places = [*sorted(packages.glob(f"nvidia/*/lib/{name}")), *packages.glob(f"torch/lib/{name}")]
    for place in [*map(str, places), name]:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CompileError(f"{name} was not found, neither beside torch nor by the system's loader")


@lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    """Return NVRTC's (major, minor) version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def build(files: tuple[str, ...], macros: Mapping[str, int], architecture: str) -> bytes:
    """Return machine code (a cubin) for the joined files, from the cache or compiled now.

    Raises `CompileError` when NVRTC cannot be loaded or rejects the source; carries the compiler's
    log.

    Parameters
    ----------
    files
        Names in this folder, joined in order.
    macros
        Defined as integers.
    architecture
        "sm_90a".
    """
    texts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in files}
    text = "\n".join(f'#line 1 "{name}"\n{text}' for name, text in texts.items())
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in sorted(macros.items())]
    key = "\n".join([text, *options, repr(version())])
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    cubin = cache_folder() / f"{Path(files[-1]).stem}-{digest}.cubin"
    if cubin.is_file():
        return cubin.read_bytes()
    code = _compile(text, files[-1], options)
    try:
        cubin.parent.mkdir(parents=True, exist_ok=True)
        fresh = cubin.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_bytes(code)
        os.replace(fresh, cubin)
    except OSError:
        # A home that cannot be written to costs a second per process, nothing else.
        return code
    return code


def _compile(text: str, name: str, options: list[str]) -> bytes:
    library = _library()
    program = ctypes.c_void_p()
    failed = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), name.encode(), 0, None, None
    )
    if failed:
        raise CompileError(f"NVRTC could not read {name}: error {failed}")
    try:
        encoded = [option.encode() for option in options]
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        if library.nvrtcCompileProgram(program, len(encoded), array):
            raise CompileError(f"NVRTC rejected {name} ({' '.join(options)}):\n{_log(program)}")
        size = ctypes.c_size_t()
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _library().nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    _library().nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")
