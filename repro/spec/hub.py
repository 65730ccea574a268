"""Whether the hub can be asked, and what of it is on this machine. Standard library only.

A machine without network must learn so in one sentence within seconds: the hub's own client tries
again for a minute, and a server that accepts a connection and stays silent holds it longer still.
So the hub is asked here first, on a thread that may be left behind.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from repro.spec.whole_files import sha256_of, stamp_of

ANSWER_SECONDS = 4.0
# Before the SHA-256 of a GGUF file: a revision of `owner/model:FILE.gguf` that pins its bytes.
PINNED_BYTES = "sha256:"
# Of the conversion of GGUF files: it moves whenever a copy's contents would.
_GGUF_VERSION = 2
_INDEX = "model.safetensors.index.json"

Result = TypeVar("Result")


class HubError(Exception):
    """Nothing could be fetched from the hub; the message is the reason, to end a sentence with."""


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps what it fetched."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    return Path(home) / "hub"


def is_hub_name(name: str) -> bool:
    """Whether a checkpoint's name has the hub's form, `owner/model` or `owner/model:FILE.gguf`."""
    model = name.partition(":")[0]
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def snapshots(kind: str, name: str) -> list[Path]:
    """Return the folders of all revisions of a `model` or `dataset` in the hub's cache.

    Of a model's GGUF file, `owner/model:FILE.gguf`, they are the folders made of it (`gguf_copy`),
    and those made of a file of that name that lies elsewhere.
    """
    name, _, file = name.partition(":")
    folder = hub_cache() / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    if not file:
        return found
    made = [gguf_copy(item / file) for item in found if (item / file).is_file()]
    elsewhere = sorted((user_cache() / "gguf").glob(f"*-{_GGUF_VERSION}/SOURCE.json"))
    made += [
        source.parent
        for source in elsewhere
        if json.loads(source.read_text(encoding="utf-8")).get("gguf") == file
    ]
    return [*dict.fromkeys(made)]


def local_folders(checkpoint: str) -> list[Path]:
    """Return where a checkpoint's config may lie on this machine, given a path or a hub name."""
    path = Path(checkpoint).expanduser()
    if path.is_file():
        return [gguf_copy(path)]
    return (
        [path] if path.is_dir() or not is_hub_name(checkpoint) else snapshots("model", checkpoint)
    )


def user_cache() -> Path:
    """Return this project's folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "qerl-repro"


def gguf_copy(path: Path) -> Path:
    """Return the path, by digest, of the checkpoint folder that is made from a GGUF file.

    The number at its end is the version of the conversion.
    """
    return gguf_copy_of(_digest_now(path.resolve(), stamp_of(path)))


def gguf_copy_of(digest: str) -> Path:
    """Return the path of the checkpoint folder that was made from the file with that SHA-256."""
    return user_cache() / "gguf" / f"{digest.removeprefix(PINNED_BYTES)[:16]}-{_GGUF_VERSION}"


@functools.lru_cache(maxsize=16)
def _digest_now(path: Path, stamp: str) -> str:
    return sha256_of(path)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint folder has its config and every weight file that its index names.

    A download that was cut short leaves a folder that lacks some of them.
    """
    if not (folder / "config.json").is_file():
        return False
    index = folder / _INDEX
    if not index.is_file() or (folder / "model.safetensors").is_file():
        return any(folder.glob("*.safetensors"))
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / name).is_file() for name in shards)


def resolved_revision(folder: Path) -> str | None:
    """Return the hub's commit of a folder in its cache; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def why_unreachable() -> str | None:
    """Return why the hub cannot be asked, or None if it can; answers within seconds."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return f"{variable} is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    # Name resolution has no timeout of its own, hence a thread that may be left behind.
    answers: list[str | None] = []
    attempt = threading.Thread(target=_ask, args=(endpoint, answers), daemon=True)
    attempt.start()
    attempt.join(ANSWER_SECONDS + 1)
    problem = answers[0] if answers else f"no answer within {ANSWER_SECONDS + 1:.0f} seconds"
    return None if problem is None else f"{endpoint} cannot be reached ({problem})"


def fetch(download: Callable[[], Result], failures: tuple[type[Exception], ...]) -> Result:
    """Return what `download` fetches; `HubError` says why the hub cannot be asked."""
    reason = why_unreachable()
    if reason is not None:
        raise HubError(reason)
    try:
        return download()
    except failures as error:
        first = next(iter(str(error).splitlines()), "no message")
        raise HubError(f"the download failed ({type(error).__name__}: {first})") from error


def _ask(endpoint: str, answers: list[str | None]) -> None:
    """Append what went wrong with one request, or None if there was any answer at all."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
            answers.append(None)
    except urllib.error.HTTPError:
        answers.append(None)
    except (OSError, ValueError, http.client.HTTPException) as error:
        answers.append(str(getattr(error, "reason", error)) or type(error).__name__)
