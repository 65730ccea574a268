"""The environment of a run: what a reader needs to know before comparing two records.

Every probe that fails is recorded as such, with its reason, rather than left out: "no GPU" and "the
GPU could not be asked" are different findings. Packages are asked for by their metadata; torch is
asked further only where the process has it loaded already, so that nothing here imports it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from repro.evidence.provenance import source_digest
from repro.spec.tier import MEMORY_VARIABLE
from repro.spec.whole_files import replace_text

# The time of day, read once and then counted by a clock that nobody sets.
_ORIGIN = datetime.now(UTC) - timedelta(seconds=time.monotonic())

PACKAGES = (
    "qerl-repro",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "peft",
    "safetensors",
    "tokenizers",
    "math-verify",
    "datasets",
    "bitsandbytes",
    "compressed-tensors",
    "vllm",
)
# Names the container that a process runs in, which cannot be found out from inside.
CONTAINER = "REPRO_CONTAINER"
# Lets a Hopper GPU run the kernels of other cards (`kernels.dispatch`).
KERNELS = "REPRO_KERNELS"
# Lets torch's allocator give segments that grow (`repro.run.worker.is_segmented`).
SEGMENTED = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
VARIABLES = (
    CONTAINER,
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    SEGMENTED[0],
    KERNELS,
    "MALLOC_TRIM_THRESHOLD_",
    MEMORY_VARIABLE,
)


def capture_environment() -> dict[str, Any]:
    """Return the environment as JSON values; a failed probe is `{"failed": reason}`."""
    return {
        "python": probe(lambda: sys.version.split()[0]),
        "platform": probe(platform.platform),
        "packages": probe(package_versions),
        "torch": probe(_torch),
        "cpu": probe(_cpu),
        "memory_bytes": probe(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "gpu": probe(_gpu),
        "source_sha256": probe(source_digest),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def main_environment(args: argparse.Namespace) -> int:
    """Print the environment of this machine, and write it where a file is named; return 0."""
    text = environment_text()
    sys.stdout.write(text)
    if args.out:
        replace_text(Path(args.out), text)
    return 0


def environment_text() -> str:
    """Return the environment as JSON; a container without its digest raises."""
    container = os.environ.get(CONTAINER)
    if container is not None and not re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", container):
        raise ValueError(f"{CONTAINER} is {container!r}; needs NAME@sha256:DIGEST, 64 digits")
    return json.dumps(capture_environment(), indent=1, sort_keys=True) + "\n"


def device_of(environment: dict[str, Any]) -> str | None:
    """Return the name of the device of a record's environment, as folders spell it, or None.

    One that runs the kernels of other cards has a name of its own: `nvidia_h200_portable`.
    """
    gpus = environment.get("gpu")
    if not isinstance(gpus, list) or not gpus:
        return None
    name = f"{gpus[0]['name']} {environment.get('variables', {}).get(KERNELS, '')}"
    return "_".join(name.lower().replace("-", " ").split())


def probe(ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns, or `{"failed": reason}`."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the probe's result
        return {"failed": f"{type(error).__name__}: {error}"}


def package_versions() -> dict[str, str | None]:
    """Return the installed versions of `PACKAGES`, None for those that are not."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {"loaded": False}
    return {
        "loaded": True,
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _cpu() -> dict[str, Any]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8") if listing.is_file() else ""
    named = re.search(r"^model name[^:\n]*:(.*)$", text, re.MULTILINE)
    model = named[1].strip() if named else platform.processor() or platform.machine()
    return {"model": model, "cores": os.cpu_count(), "cores_usable": affinity}


def _gpu() -> list[dict[str, str]]:
    """Ask the driver's own tool; an absent tool means that no NVIDIA driver is installed.

    If a process may use only some of several devices, only those are returned.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    fields = ("index", "name", "driver_version", "memory.total", "compute_cap", "power.limit")
    try:
        return ask_driver_tool(fields, device=visible)
    except FileNotFoundError:
        return []
    except subprocess.CalledProcessError:
        if not visible:
            raise
        return ask_driver_tool(fields)  # it knows no such name, as of a part of a device


def ask_driver_tool(
    fields: Sequence[str], *, device: str | None = None, about: str = "gpu"
) -> list[dict[str, str]]:
    """Return what `nvidia-smi` says, a row per device or per process on it.

    Parameters
    ----------
    fields
        As `nvidia-smi --help-query-<about>` lists them.
    device
        Index or UUID; None asks about all.
    about
        `gpu`, or `compute-apps` for the processes that compute.

    Raises
    ------
    FileNotFoundError
        Without the tool.
    subprocess.CalledProcessError
        When it knows no such device or field.
    """
    chosen = ("-i", device) if device else ()
    done = subprocess.run(
        ["nvidia-smi", *chosen, f"--query-{about}={','.join(fields)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=True)) for row in rows]


def steady_now() -> datetime:
    """Return the time, UTC; within a process it never goes back, so no length is negative."""
    return _ORIGIN + timedelta(seconds=time.monotonic())
