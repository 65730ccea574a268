"""`python -m repro export`: a trained adapter for others, compared with what was trained.

`--as adapter` writes PEFT's files, naming base and revision: `AutoPeftModelForCausalLM` needs no
more. `--as merged` writes a 16-bit checkpoint folder, the adapter merged into the weights that it
was trained on; `quantize` rounds that to 4 bits again.

An adapter trained on 4-bit codes that were made in memory names the 16-bit base that they were made
of. Put on that, it is not the policy that was trained, and the command says how far it is from it;
`--base` names a folder that `quantize` wrote, whose codes are those that were trained on.

Added noise (AQN) is never in what is written. Where each seed of a run had an order of channels of
its own, its adapter fits that order alone; merged, it is a checkpoint like any other.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import CompressedTensorsConfig

from repro.evaluation.flags import adapter_folder, require_outside
from repro.export.comparing import (
    Said,
    distance,
    logits_of,
    released,
    require_same,
    said_by,
    stock_logits,
)
from repro.export.quantising import DTYPE, missing_reader
from repro.models.checkpoint import TOKENIZER, copy_files, resolve
from repro.models.files import compressed_tensors
from repro.models.files.adapter_files import load_adapted, named_base, read_adapter, save_adapter
from repro.models.files.gguf_files import made_of
from repro.models.files.merged_files import write_merged
from repro.models.loading import read_description
from repro.models.peft_parts import AutoPeftModelForCausalLM, PeftModel
from repro.models.policy import Policy, device_named
from repro.spec.arm import WeightFormat
from repro.spec.checks import require
from repro.spec.whole_files import appearing


def main_export(args: argparse.Namespace) -> int:
    """Write the export, compare, and only then give the folder its name; return 0.

    Raises `ValueError` when the adapter or its base cannot be read, or what was written does not
    say what was trained, and `FileExistsError` when the folder exists.
    """
    adapter, device = adapter_folder(args.adapter), device_named(args.device)
    require_outside(args.out, read_adapter(adapter).base)
    with appearing(Path(args.out)) as folder, released():
        # float32 costs little on a CPU; a GPU has the 16 bits of training.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        policy = load_adapted(adapter, compute_dtype=dtype, device=device)
        trained = said_by(policy, adapter)
        with cast(PeftModel, policy.model).disable_adapter():
            effect = distance(trained.logits, logits_of(policy.model, trained.rows)).mean
        said = [
            f"training moved the policy by {effect:.2e} nats; one more rounding of "
            f"each layer's output, by {trained.rounding:.2e}"
        ]
        moved = f"{adapter} moves no probe text's distribution: training changed nothing"
        if args.kind == "adapter":
            changed = [name for name in ("order", "rounding") if policy.facts.get(name) is not None]
            require(
                not changed,
                f"{args.adapter} was trained on weights with another {' and '.join(changed)} than "
                "their checkpoint's, which no base has for other readers; export it --as merged",
            )
            said = said if effect > 0 else [moved]
            said += _adapter(policy, trained, folder, args, device)
        else:
            require(effect > 0, f"{moved}, so there is nothing to merge")
            merged = stock_logits(write_merged(policy, folder), trained.rows, dtype, device)
            difference = distance(trained.logits, merged)
            what = f"{args.out} merged, from what was trained"
            require_same(what, difference, dtype, rounding=trained.rounding, effect=effect)
            said.append(f"merged in 16 bits, from what was trained: {difference}")
        del policy
    sys.stdout.write("\n".join((f"{args.out}: {args.kind}", *said)) + "\n")
    return 0


def _adapter(
    policy: Policy, trained: Said, folder: Path, args: argparse.Namespace, device: str
) -> list[str]:
    """Write PEFT's files and compare them as peft and this project read them."""
    source = resolve(args.base or policy.folder or "", args.revision or "")
    base, revision = named_base(args.base or policy.checkpoint, source)
    served = cast(WeightFormat, read_description(source).stored_format or "bf16")
    missing = missing_reader(served)
    require(
        missing is None,
        f"transformers reads {served} by a package that is not installed here: "
        f"pip install {missing}",
    )
    # peft does not load a GGUF file by its name, so that it is given the folder made of it.
    is_gguf = bool(made_of(source))
    of_readers = (str(source), None) if is_gguf else (base, revision)
    save_adapter(policy, folder, base=of_readers[0], revision=of_readers[1])
    copy_files(source, folder, TOKENIZER)
    # Other readers unpack 4-bit weights to bfloat16.
    dtype = policy.compute_dtype if served == "bf16" else DTYPE
    with released():
        served_policy = load_adapted(
            folder, checkpoint=source, weight_format=served, compute_dtype=dtype, device=device
        )
        ours = said_by(served_policy, folder, trained.rows)
        del served_policy
    # Trained in float32, it says nothing of what 16 bits cost.
    rounding = max(trained.rounding, ours.rounding)
    unpack = served in compressed_tensors.LAYOUTS
    load: Any = AutoPeftModelForCausalLM.from_pretrained
    if unpack:
        # For the codes peft has no layer: it wraps `nn.Linear`, and compressed-tensors' has no
        # weight until the first forward pass, unless told to unpack at once.
        load = partial(load, quantization_config=CompressedTensorsConfig(dequantize=True))
    peft_logits = stock_logits(folder, trained.rows, dtype, device, load)
    difference = distance(ours.logits, peft_logits)
    require_same(f"{folder} as peft reads it", difference, dtype, rounding=rounding)
    named = f"base {base}" + (f", revision {revision}" if revision else "")
    said = [named, f"as peft reads it: {difference}"]
    if is_gguf:
        save_adapter(policy, folder, base=base, revision=revision)
        said.append(
            "peft takes a GGUF file's model, loaded by transformers with gguf_file=, as "
            "PeftModel.from_pretrained(model, folder)"
        )
    if unpack:
        said.append(
            "peft takes it with quantization_config=CompressedTensorsConfig(dequantize=True)"
        )
    if served == policy.weight_format:
        own = distance(trained.logits, ours.logits)
        what = f"{folder} on {base}, from what was trained"
        require_same(what, own, dtype, rounding=rounding)
        return [*said, f"from what was trained: {own}"]
    return [
        *said,
        f"it was trained on {policy.weight_format} codes and this base is {served}: "
        f"{distance(trained.logits, peft_logits)} from what was trained; for the policy that was "
        f"trained, name a folder that `quantize` wrote in {policy.weight_format} (--base)",
    ]
