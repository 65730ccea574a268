"""What can be wrong with a checkpoint: each is done to a folder that was good."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from repro.models.checkpoint import sha256_of

STATE, SUMS, MOMENTS = "state.json", "SHA256SUMS", "optimizer.safetensors"


def sum_again(folder: Path) -> None:
    """List the files as they are now, so that the sums tell nothing."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines))


def rewrite_state(folder: Path, state: dict[str, Any]) -> None:
    """Put other JSON values into a checkpoint, with sums that hold."""
    (folder / STATE).write_text(json.dumps(state))
    sum_again(folder)


def flip_a_bit(folder: Path) -> None:
    """Flip the lowest bit of a weight."""
    path = folder / "parameters.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def drop_a_moment(folder: Path) -> None:
    """Leave one moment out, with sums that hold."""
    tensors = load_file(folder / MOMENTS)
    tensors.pop(next(key for key in tensors if key.endswith("//exp_avg_sq")))
    save_file(tensors, folder / MOMENTS)
    sum_again(folder)


def shorten_a_moment(folder: Path) -> None:
    """Give one moment another shape, with sums that hold."""
    tensors = load_file(folder / MOMENTS)
    key = next(key for key in tensors if key.endswith("//exp_avg"))
    tensors[key] = tensors[key][:1].clone()
    save_file(tensors, folder / MOMENTS)
    sum_again(folder)


def lie_about_the_step(folder: Path) -> None:
    """Write another step into the state, with sums that hold."""
    state = json.loads((folder / STATE).read_text())
    rewrite_state(folder, state | {"step": state["step"] - 1})


def lie_about_the_optimizer(folder: Path) -> None:
    """Let the optimiser have counted another number of steps, with sums that hold."""
    tensors = load_file(folder / MOMENTS)
    key = next(key for key in tensors if key.endswith("//step"))
    tensors[key] += 1
    save_file(tensors, folder / MOMENTS)
    sum_again(folder)


def name_another_step(folder: Path) -> None:
    """Give the folder of an older step a newer name."""
    older = folder.with_name(f"step-{int(folder.name[-8:]) - 1:08d}")
    shutil.rmtree(folder)
    shutil.copytree(older, folder)


def add_a_file(folder: Path) -> None:
    """Put a file there that is nobody's."""
    (folder / "notes.txt").write_text("mine")


def remove_a_file(folder: Path) -> None:
    """Remove a file of tensors."""
    (folder / MOMENTS).unlink()


def remove_the_sums(folder: Path) -> None:
    """Remove the list of sums."""
    (folder / SUMS).unlink()


def spoil_the_sums(folder: Path) -> None:
    """Add an empty line to the list of sums."""
    (folder / SUMS).write_text((folder / SUMS).read_text() + "\n")


def put_a_file_in_its_place(folder: Path) -> None:
    """Put a file where the folder was."""
    shutil.rmtree(folder)
    folder.write_text("nothing")


def drop_a_field(folder: Path) -> None:
    """Leave out what a run's state must have, with sums that hold."""
    state = json.loads((folder / STATE).read_text())
    for part in (state.get("state", {}), state.get("progress", {})):
        part.pop("series", part.pop("step", None))
    rewrite_state(folder, state)


# By what is done, what the sentence says.
DAMAGE: dict[Callable[[Path], None], str] = {
    flip_a_bit: "parameters.safetensors has SHA-256",
    drop_a_moment: "moment exp_avg_sq of .* is missing",
    shorten_a_moment: "moment exp_avg of .* has shape",
    lie_about_the_step: "is of step",
    lie_about_the_optimizer: "the optimiser counted",
    name_another_step: "is of step",
    add_a_file: "notes.txt is foreign",
    remove_a_file: "optimizer.safetensors is missing",
    remove_the_sums: "SHA256SUMS",
    spoil_the_sums: "SHA256SUMS lists it",
    put_a_file_in_its_place: "Not a directory",
    drop_a_field: "series|step",
}
