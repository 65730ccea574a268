"""`python -m repro quantize`: a 16-bit checkpoint to a 4-bit one, compared before it is done.

What is written must be what training would have quantised on loading: the folder is read back, by
transformers where the package of its layout is installed and by this project elsewhere, and its
logits are compared with those of the source quantised in memory. How far rounding moved the model
from its 16-bit weights is printed, and is nobody's error.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from repro.export.comparing import Said, distance, released, require_same, said_by, stock_logits
from repro.models.checkpoint import MANIFEST, resolve, write_quantized
from repro.models.files.stored_layouts import LAYOUTS, quantization_config
from repro.models.files.tensor_files import TensorFolder, read_object
from repro.models.loading import read_description
from repro.models.policy import device_named, load_policy
from repro.spec.arm import WeightFormat
from repro.spec.checks import require
from repro.spec.whole_files import appearing

# Other readers of the layouts unpack to bfloat16, so that is what is compared.
DTYPE = torch.bfloat16
# The package by which transformers reads a format; its method of quantising has the same name.
READERS = {name: quantization_config(name)["quant_method"] for name in LAYOUTS}


def main_quantize(args: argparse.Namespace) -> int:
    """Quantise, compare, and only then give the folder its name; return 0.

    Raises `ValueError` when the source cannot be read or is quantised already, or what was written
    does not say what the quantised source says, and `FileExistsError` when the folder exists.
    """
    revision, device = args.revision or "", device_named(args.device)
    # The config first: what is quantised already is refused before its weights are fetched.
    source = resolve(args.source, revision, weights=False)
    stored = read_description(source).stored_format
    require(stored is None, f"{source} is quantised already, to {stored}; name the 16-bit folder")
    source = resolve(args.source, revision)
    with appearing(Path(args.out)) as folder:
        write_quantized(source, folder, args.format, device=device)
        checked = check_quantized(source, folder, args.format, device)
        linears = read_object(folder / MANIFEST)["linears"]
        files = (TensorFolder(of).files() for of in (source, folder))
        before, after = (sum(path.stat().st_size for path in own) for own in files)
    sys.stdout.write(
        f"{args.out}: {linears} projections in {args.format}, round to nearest, "
        f"{after / 1e9:.3g} GB of {before / 1e9:.3g} GB\n{checked}\n"
    )
    return 0


def check_quantized(source: Path, folder: Path, weight_format: WeightFormat, device: str) -> str:
    """Return how a quantised folder compares with its source; `DifferentError` if otherwise."""
    plain = _said(source, "bf16", device)
    quantised = _said(source, weight_format, device, rounded=True)
    read_back, reader = read_logits(folder, weight_format, quantised.rows, device)
    difference = distance(quantised.logits, read_back)
    require_same(
        f"{folder} as {reader} reads it, from the source quantised here",
        difference,
        DTYPE,
        rounding=quantised.rounding,
    )
    return "\n".join(
        (
            f"read back by {reader}, from the source quantised in memory: {difference}",
            f"from the 16-bit source: {distance(plain.logits, quantised.logits)}",
            f"one more rounding of each layer's output costs {quantised.rounding:.2e} nats",
        )
    )


def read_logits(
    folder: Path, weight_format: WeightFormat, rows: Tensor, device: str
) -> tuple[Tensor, str]:
    """Return a folder's logits, (B, T, V), and who read it: transformers where it can, else us."""
    missing = missing_reader(weight_format)
    if missing is None:
        return stock_logits(folder, rows, DTYPE, device), "transformers"
    reader = f"this project alone (for transformers: pip install {missing})"
    return _said(folder, weight_format, device).logits, reader


def missing_reader(weight_format: str) -> str | None:
    """Return the package that transformers needs to read a format and lacks here, or None."""
    package = READERS.get(weight_format, "transformers")
    return package if importlib.util.find_spec(package.replace("-", "_")) is None else None


def _said(folder: Path, kind: WeightFormat, device: str, *, rounded: bool = False) -> Said:
    """Return what a folder says as this project reads it in a format."""
    load = partial(load_policy, weight_format=kind, compute_dtype=DTYPE, device=device)
    with released():  # without a name for the policy, which would hold it
        return said_by(load(folder), folder, rounded=rounded)
