"""Kernels in Triton, for every GPU from compute capability 8.0 on.

Long lists of a kernel's parameters stand by groups: tensors, numbers, then constants.
"""

import functools

import torch

# Of every launch: a product and a sum are rounded once, as in all stored records. From Triton 3.10
# on that is no longer the default.
FUSED = {"enable_fp_fusion": True}


@functools.cache
def on_hopper(device: torch.device) -> bool:
    """Tell whether a device's matrix unit is Hopper's, which reads operands from shared memory.

    Tensors of Triton's interpreter count as there.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
