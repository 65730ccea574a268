"""What this machine's card, and the torch installed here, mean for a run; by driver and plan alone.

Measured were H100 and H200. Other cards run other kernels (`kernels.dispatch`) and hold other
points, which a plan says before anything is loaded.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from importlib import metadata

from repro.evidence.environment import KERNELS
from repro.evidence.not_run import needs
from repro.measure.rollout_plan import least_of_step, not_fitting
from repro.spec import tier
from repro.spec.checks import require
from repro.spec.config import RunConfig
from repro.spec.step_scale import StepScale
from repro.spec.throughput_scale import ThroughputScale
from repro.spec.tier import CudaDevice

# Computes once on the device; what fails says why in its last line.
_COMPUTE = """import torch
assert torch.version.cuda, "it is built without CUDA"
torch.ones(1, device="cuda").add_(1).item()"""


def torch_refusal() -> str | None:
    """Return why torch cannot compute on the device that the driver reports, or None.

    Raises `ValueError` where `REPRO_KERNELS` names no kernels.
    """
    devices = tier.cuda_devices()
    for device in devices:
        kernels_line(device)
    reason = _torch_fault() if devices else None
    if reason is None:
        return None
    return (
        f"torch {metadata.version('torch')} cannot compute on {devices[0].name}: {reason}; needed "
        "is a build for the card and its driver, as `nox -s environment` installs it"
    )


@functools.cache
def _torch_fault() -> str | None:
    """Ask torch in a process of its own, whose context goes with it."""
    done = subprocess.run(
        [sys.executable, "-c", _COMPUTE], capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit status {done.returncode}"
    return last.split(": ", 1)[-1].rstrip(".") if done.returncode else None


def kernels_line(device: CudaDevice) -> str:
    """Return which kernels serve on a device, and whether their speed was measured."""
    if runs_hopper_kernels(device):
        return "this project's kernels for Hopper"
    return "portable kernels (Triton), whose speed was not measured on it"


def runs_hopper_kernels(device: CudaDevice) -> bool:
    """Tell whether the kernels for Hopper serve on a device; `ValueError` for a wrong choice."""
    named = os.environ.get(KERNELS, "")
    require(named in ("", "portable"), f"{KERNELS} is {named!r}; needs `portable`, or to be unset")
    return device.capability[0] == 9 and not named


def kernels_refusal(run: RunConfig, device: CudaDevice) -> str | None:
    """Return why a measurement of Hopper's own kernels cannot run on a device, or None."""
    if run.procedure != "operation" or runs_hopper_kernels(device):
        return None
    if device.capability[0] == 9:
        return f"{run.target} measures kernels for Hopper; {KERNELS} is portable: unset it"
    found = ".".join(map(str, device.capability))
    return f"{run.target} measures kernels for Hopper (9.0); {device.name} is of {found}"


def points_left_out(run: RunConfig, device_bytes: int) -> dict[str, str]:
    """Return the points or batches of a measurement that do not fit a device, with why."""
    scale, arm = run.scale, run.arm
    if isinstance(scale, ThroughputScale):
        return not_fitting(scale, arm, device_bytes)
    if not isinstance(scale, StepScale) or arm.training == "full":
        return {}
    if getattr(arm, "linears", "kernels") != "kernels":
        return {}  # has no plan
    least = {p.name: least_of_step(p, arm, scale.optimizer) for p in scale.points}
    return {
        name: needs(nbytes, device_bytes, "by the plan")
        for name, nbytes in least.items()
        if nbytes > device_bytes
    }


def measured_parts(run: RunConfig) -> int:
    """Return how many points or batches a measurement has; 0 where it is none."""
    if isinstance(run.scale, ThroughputScale):
        return sum(len(point.batches) for point in run.scale.points)
    return len(run.scale.points) if isinstance(run.scale, StepScale) else 0
