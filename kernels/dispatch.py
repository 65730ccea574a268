"""Pick the implementation of each operation: a kernel where one fits, else the reference.

Models and trainers import operations from here only. Names, signatures and meaning are those of
`kernels.reference`.
"""

from kernels.reference import (
    QuantizedWeight,
    decode_attention,
    dequantize,
    linear,
    lora_linear,
    quantize,
    rms_norm,
    rotary,
    sample_tokens,
    shared_global_scale,
    swiglu,
    token_logprobs,
)

__all__ = [
    "QuantizedWeight",
    "decode_attention",
    "dequantize",
    "linear",
    "lora_linear",
    "quantize",
    "rms_norm",
    "rotary",
    "sample_tokens",
    "shared_global_scale",
    "swiglu",
    "token_logprobs",
]
