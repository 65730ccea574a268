"""Write llmcompressor_facts.json: what llm-compressor stores of the checkpoints made of bits.

    <environment with llmcompressor 0.14>/bin/python -m tests.repro.models.llmcompressor_oracle

from the root of the checkout. llm-compressor is no dependency of the suite.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.repro.architectures import CLASSES
from tests.repro.models.odd_checkpoints import write_odd

FACTS = Path(__file__).parent / "llmcompressor_facts.json"
PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers")


def digest(tensor: torch.Tensor) -> str:
    """Return the first 16 hex digits of the SHA-256 over dtype, shape and bytes."""
    tensor = tensor.contiguous()
    said = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    raw = tensor.view(torch.uint8).reshape(-1).numpy().tobytes()
    return hashlib.sha256(said + raw).hexdigest()[:16]


def facts_of(architecture: str, folder: Path) -> dict[str, Any]:
    """Quantise a model with llm-compressor; return digests of what it stores."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    source = write_odd(architecture, folder / "source")
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(folder, save_compressed=True)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "tensors": {name: digest(tensors[name]) for name in sorted(tensors)},
        "quantization_config": config["quantization_config"],
    }


def main() -> int:
    """Write the facts of every architecture."""
    facts: dict[str, Any] = {"versions": {name: version(name) for name in PACKAGES}}
    for architecture in CLASSES:
        with tempfile.TemporaryDirectory() as folder:
            facts[architecture] = facts_of(architecture, Path(folder))
    FACTS.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
