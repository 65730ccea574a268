"""Whether a device still computes, asked by a worker process before it takes its first run.

An error on a device spoils the CUDA context of its process: whatever the process asks later fails,
whether the device lives or not. Such a worker ends, and its run goes back to the queue; what the
next process hears on that device tells a spoilt context from a dead device, which gets no more
work. A device that hangs without an error is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable

from repro.spec.tier import cuda_devices

Answers = Callable[[], bool]

# Exit status of a worker whose device does not answer, apart from those of Python and shells.
DEAD = 82


def device_answers() -> bool:
    """Return whether the device that this process sees adds up a few numbers."""
    if not cuda_devices():
        return False
    import torch

    try:
        return float(torch.ones(256, device="cuda").sum()) == 256
    except RuntimeError:
        return False
