"""Compile this project's Triton launches for a card that is not here; print what each takes.

    python -m tests.kernels.compiled CAPABILITY WHICH      # 86 few; 120 all

Wrappers are called with CPU tensors; in place of a launch its kernel is compiled with the ptxas of
Triton's own package. Lines of JSON tell its shared memory, registers and spills. Where
`TRITON_INTERPRET` is set nothing is compiled, so a process of its own compiles, without it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver, jit

from kernels.formats import FORMATS, QuantizedWeight, random_weight
from kernels.reference_step import Heads, LayerCache, Rotation
from kernels.triton import (
    decode_adapter,
    decode_choice,
    decode_step,
    dequantize,
    logprobs,
    nucleus,
    packed_attention,
    portable_linear,
    prefill_attention,
    quantize,
    rms_norm,
    rotary,
    swiglu,
)
from repro.rollout.state import RowState

BF16 = torch.bfloat16
# Hidden, query heads, key heads, head dimension, inner, vocabulary.
MODELS = {
    "0.5B": (896, 14, 2, 64, 4864, 151936),
    "1.5B": (1536, 12, 2, 128, 8960, 151936),
    "7B": (3584, 28, 4, 128, 18944, 152064),
}
# Rows of captured steps that take different tiles, and ranks as they are padded.
ROWS = (1, 2, 16, 32, 64, 128, 256)
RANKS = (16, 32, 64, 128, 256)
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
Launch = tuple[str, Callable[[], object]]


class Absent:
    """A driver of a card that is not here."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers = {"get_current_target": self.target, "get_device_interface": torch.cuda}
        return lambda *arguments: answers.get(name, 0)


class Compiler:
    """What a launch becomes: a kernel compiled for the card, once per specialisation."""

    def __init__(self, capability: int) -> None:
        self.overlap = capability >= 90
        self.target = GPUTarget("cuda", capability, 32)
        self.backend: Any = make_backend(self.target)
        self.seen: set[str] = set()
        prefill_attention.on_hopper = lambda device: capability == 90
        self.where = ""

    def run(self, kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Compile the kernel for these arguments, and print what it takes."""
        names, arguments = list(kernel.signature.parameters), list(given)
        if "WIDEN" in names and any(getattr(a, "dtype", None) == BF16 for a in arguments):
            arguments[names.index("WIDEN")] = False
        options.setdefault("debug", False)
        knobs = getattr(jit, "knobs", None)
        for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
            if hasattr(getattr(knobs, "compilation", None), name):
                options[name] = getattr(knobs.compilation, name)
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialised, chosen = bind(*arguments, **options)
        name = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
        key = f"{name} {specialised} {sorted(map(str, chosen.items()))}"
        if key in self.seen:
            return
        self.seen.add(key)
        chosen, signature, constants, attributes = kernel._pack_args(
            self.backend, options, bound, specialised, chosen
        )
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=self.target, options=chosen.__dict__)
        row = {"kernel": name, "where": self.where, "shared": made.metadata.shared}
        row["fused"] = chosen.enable_fp_fusion
        print(json.dumps(row | usage(made.asm["cubin"])), flush=True)


def usage(cubin: bytes) -> dict[str, int]:
    """Return a thread's registers, and the bytes of its stack: what was spilt lies there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BINARIES / "cuobjdump"), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", said)}


def weight(format: str, N: int, K: int) -> QuantizedWeight:
    return random_weight(format, N, K, torch.Generator().manual_seed(0))


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def products(name: str) -> Iterator[Launch]:
    H, HQ, HK, D, I, _ = MODELS[name]
    layers = {
        "qkv": ((HQ + 2 * HK) * D, H), "o": (H, HQ * D), "gate_up": (2 * I, H), "down": (H, I),
    }  # fmt: skip
    for layer, (N, K) in layers.items():
        bias = zeros(N) if layer == "qkv" else None
        for format in FORMATS:
            packed = weight(format, N, K)
            yield f"{format} {layer}", partial(dequantize.dequantize, packed, BF16)
            for M in ROWS:
                if not portable_linear.goes_dense(packed, M):
                    call = partial(portable_linear.linear, zeros(M, K), packed, bias)
                    yield f"{format} {layer} {M}", call


def adapters(name: str, overlap: bool) -> Iterator[Launch]:
    H, HQ, HK, D, I, _ = MODELS[name]
    N, ends = (HQ + 2 * HK) * D, (HQ * D, (HQ + HK) * D)
    for M in ROWS:
        for R in RANKS:
            qkv = zeros(M, N), zeros(M, 3 * R), zeros(N, R)
            gate_up = zeros(M, 2 * I), zeros(M, 2 * R), zeros(2 * I, R)
            calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = [
                (decode_adapter.project, (zeros(M, H), zeros(3 * R, H))),
                (decode_adapter.project, (zeros(M, I), zeros(R, I))),
                (decode_adapter.add_adapter, (*qkv, ends, 1.0)),
                (decode_adapter.add_adapter, (zeros(M, H), zeros(M, R), zeros(H, R), (), 1.0)),
                (decode_adapter.adapted_swiglu, (*gate_up, 1.0)),
            ]
            for function, given in calls:
                yield f"{function.__name__} {M} {R}", partial(function, *given, overlap=overlap)


def decoding(name: str, overlap: bool) -> Iterator[Launch]:
    H, HQ, HK, D, I, V = MODELS[name]
    gain, cpu, turns = zeros(H), torch.device("cpu"), Rotation(cos=zeros(64, D), sin=zeros(64, D))
    for M in ROWS:
        for noise in (None, zeros(H, dtype=torch.float32)):
            stream = zeros(M, H), zeros(M, H)
            call = partial(decode_step.add_norm, *stream, gain, noise, 1e-6, overlap=overlap)
            yield f"add_norm {M}", call
        cache = LayerCache(keys=zeros(M * 4 + 1, 32, HK, D), values=zeros(M * 4 + 1, 32, HK, D))
        for g in (None, zeros(D)):
            yield f"attend {M}", partial(
                decode_step.attend_step, zeros(M, (HQ + 2 * HK) * D), ints(M), ints(M, 4), cache,
                Heads(query=HQ, scaling=D**-0.5, q_gain=g, k_gain=g, eps=1e-6), turns,
                decode_step.StepWorkspace(M, HQ, HK, D, cpu), overlap=overlap,
            )  # fmt: skip
        yield f"swiglu {M}", partial(decode_step.swiglu, zeros(M, 2 * I), overlap=overlap)
    for greedy in (False, True):
        rows = RowState(4, max_new_tokens=64, max_blocks=1, device=cpu)
        call = partial(
            decode_choice.choose, torch.zeros(4, V), rows, greedy=greedy, overlap=overlap
        )
        yield f"choose greedy={greedy}", call
    whole = zeros(4, V, dtype=torch.float32), zeros(dtype=torch.float32), 0.95
    yield "keep_nucleus", partial(nucleus.keep_nucleus, *whole, overlap=overlap)
    cache = LayerCache(keys=zeros(9, 32, HK, D), values=zeros(9, 32, HK, D))
    heads = Heads(query=HQ, scaling=D**-0.5)
    turned = zeros(64, (HQ + 2 * HK) * D), ints(64), ints(64), cache, heads, turns
    yield "rotary_write", partial(rotary.rotary_write, *turned)
    given = zeros(64, HQ, D), cache, ints(1, 8), ints(3, 4), D**-0.5
    yield "prefill_attention", partial(prefill_attention.prefill_attention, *given)


def training(name: str) -> Iterator[Launch]:
    H, HQ, HK, D, I, V = MODELS[name]
    gain, f32, rows = zeros(H), torch.zeros, zeros(64, H)
    for noise in (None, f32(H)):
        yield "norm", partial(rms_norm.norm_rows, rows, gain, 1e-6, noise, BF16)
        for beside in (None, rows):
            given = rows, rows, gain, noise, f32(64), beside, True
            yield "norm backward", partial(rms_norm.norm_backward, *given)
    for again in (False, True):
        pair = zeros(8, 2 * I), zeros(8, I)
        yield "swiglu backward", partial(swiglu.swiglu_backward, *pair, again)
    q, k, turn = zeros(64, HQ, D), zeros(64, HK, D), zeros(64, D)
    for back in (False, True):
        whole = zeros(64, (HQ + 2 * HK) * D)
        yield "rotate", partial(packed_attention._rotate, q, k, k, turn, turn, whole, back=back)
    yield "join", partial(packed_attention._join, q, f32(HQ, 64), q.clone(), f32(HQ, 64))

    def both_ways() -> None:
        hidden = zeros(4, 64).requires_grad_()
        logprob, entropy = logprobs.token_logprobs(hidden, zeros(V, 64), ints(4).long(), 1.0)
        (logprob.sum() + entropy.sum()).backward()

    yield "logprobs", both_ways
    for format in FORMATS:
        encode = torch.ones(()) if FORMATS[format].has_global_scale else None
        for values in (rows, rows.float()):
            yield f"quantize {format}", partial(quantised_on_a_card, values, format, encode)


def quantised_on_a_card(*given: Any) -> None:
    """Quantise by the kernel that every card runs: PTX, which no CPU's tensors reach."""
    with patch.object(torch.Tensor, "is_cuda", True):
        quantize.quantize_blocks(*given)


def few(overlap: bool) -> Iterator[Launch]:
    """Yield the launches that take most of a card: large tiles, large ranks."""
    H, HQ, HK, D, *_ = MODELS["7B"]
    packed = weight("nvfp4", (HQ + 2 * HK) * D, H)
    yield "nvfp4 128", partial(portable_linear.linear, zeros(128, H), packed, None)
    hard = re.compile(r"(project|add_adapter|adapted_swiglu) 256 (128|256)|attend 64|prefill_.*")
    for where, call in (*adapters("7B", overlap), *decoding("7B", overlap)):
        if hard.fullmatch(where):
            yield where, call


def main(capability: int, which: str) -> None:
    driver.set_active(Absent(capability))
    compiler = Compiler(capability)
    jit.JITFunction.run = lambda self, *a, **options: compiler.run(self, *a, **options)  # type: ignore[method-assign]
    overlap = compiler.overlap
    launches = few(overlap) if which == "few" else (
        launch for name in MODELS for launches in (
            products(name), adapters(name, overlap), decoding(name, overlap), training(name)
        ) for launch in launches
    )  # fmt: skip
    for compiler.where, call in launches:
        call()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
