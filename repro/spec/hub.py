"""The hub: what of it is on this machine, and fetching what is not. Standard library only.

A machine without network must learn so within seconds: the hub's own client tries again for a
minute, and waits without end for a server that takes a connection and stays silent. So the hub is
asked here first, and what is fetched is watched: a download that brings nothing for a while is
given up. Both run on threads that may be left behind.

The client's errors have no common class: those of HTTP, of its Rust library and of JSON are no
`OSError`. All that a download raises is therefore caught, in `fetch` alone, and told apart by the
hub's answer where there is one.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from repro.spec.checks import require
from repro.spec.whole_files import sha256_of, stamp_of

ANSWER_SECONDS = 4.0
# Without a byte, after which a download is given up; large files come in pieces of up to 64 MB.
SILENT_SECONDS, SILENT_SECONDS_OF_WEIGHTS = 60.0, 300.0
# Before the SHA-256 of a GGUF file: a revision of `owner/model:FILE.gguf` that pins its bytes.
PINNED_BYTES = "sha256:"
# Of the conversion of GGUF files: it moves whenever a copy's contents would.
_GGUF_VERSION = 2
_INDEX = "model.safetensors.index.json"
# What the client ends with where an answer is not what the hub sends.
_NOT_THE_HUB = (ValueError, LookupError, TypeError, AttributeError, AssertionError)

Result = TypeVar("Result")


class HubError(Exception):
    """Nothing could be fetched from the hub; the message is the reason, to end a sentence with."""


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps what it fetched."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    return Path(os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))) / "hub"


def is_hub_name(name: str) -> bool:
    """Whether a checkpoint's name has the hub's form, `owner/model` or `owner/model:FILE.gguf`."""
    model = name.partition(":")[0]
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def require_model(named: str | None, flag: str = "") -> None:
    """Raise where a path leads nowhere, and has not the form of a hub name or of our policies."""
    known = named in (None, "tiny") or is_hub_name(str(named))
    place = Path(str(named)).expanduser()
    require(
        known or place.exists(),
        f"{flag}{named} is not there: it is neither a folder, a GGUF file nor a hub name "
        "(owner/model, owner/model:FILE.gguf)",
    )
    described = any((place / f"{kind}config.json").is_file() for kind in ("", "adapter_"))
    require(
        known or described or not place.is_dir(),
        f"{flag}{named} holds no config.json; it is not a checkpoint folder",
    )


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


def hub_digest(path: Path) -> str | None:
    """Return the SHA-256 by which the hub names a file of its cache; None of any other file."""
    blob = path.resolve()
    is_named = blob.parent.name == "blobs" and len(blob.name) == 64  # small files have Git's sums
    return blob.name if is_named else None


def fetch(download: Callable[[], Result], home: Path, silent: float | None = None) -> Result:
    """Return what `download` fetches; `HubError` says why it cannot.

    Watched is `home`, the repository's folder in the hub's cache, for `silent` seconds without a
    new byte, by default those of small files. Files that arrive with other bytes than the hub names
    them by are removed, which raises, too.
    """
    reason = why_unreachable()
    if reason is not None:
        raise HubError(reason)
    before = {*(home / "blobs").glob("*")}
    result = _watched(download, home, SILENT_SECONDS if silent is None else silent)
    if isinstance(result, Exception):
        raise HubError(reason_of(result)) from result
    arrived = sorted({*(home / "blobs").glob("*")} - before)
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = dict(zip(arrived, pool.map(sha256_of, arrived), strict=True))
    odd = [blob for blob, digest in digests.items() if hub_digest(blob) not in (None, digest)]
    for blob in odd:
        blob.unlink()
    if odd:
        raise HubError(f"{odd[0]} arrived with other bytes than the hub names; it was removed")
    return result


def _watched(download: Callable[[], Result], home: Path, silent: float) -> Result | Exception:
    """Return what `download` returns or raises, or `HubError` after so many silent seconds."""
    ended: list[Result | Exception] = []

    def work() -> None:
        try:
            ended.append(download())
        except Exception as error:  # noqa: BLE001 - see the module docstring
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    size, since = _bytes_below(home), time.monotonic()
    while thread.is_alive() and time.monotonic() - since < silent:
        thread.join(0.5)
        now = _bytes_below(home)
        if now != size:
            size, since = now, time.monotonic()
    if not ended:
        raise HubError(f"{endpoint()} has sent nothing for {silent:.0f} seconds")
    return ended[0]


def reason_of(error: BaseException) -> str:
    """Return why a download failed, by the hub's answer where there was one."""
    chain = list(_causes(error))
    for cause in chain:
        response = getattr(cause, "response", None)
        if response is not None:
            return _answered(int(response.status_code), response.headers.get("X-Error-Code") or "")
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno is not None:
            place = cause.filename2 or cause.filename
            return f"{os.strerror(cause.errno)}" + (f" ({place})" if place else "")
    first = next(iter(str(chain[-1]).splitlines()), "no message")
    said = f"{type(chain[-1]).__name__}: {first:.120}"
    if isinstance(chain[-1], _NOT_THE_HUB) or type(chain[-1]).__name__ == "FileMetadataError":
        return (
            f"what answers at {endpoint()} is not the hub ({said}); a network's login page or a "
            "proxy may stand between"
        )
    return f"the download failed ({said})"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _answered(status: int, code: str) -> str:
    """Return what an answer of the hub means to whom it refuses."""
    token = _token()
    no_name = f"the hub knows no such name; a private one needs HF_TOKEN ({token})"
    meanings: dict[str | int, str] = {
        "GatedRepo": f"its owner grants access by request: accept its terms on {endpoint()}, and "
        f"set HF_TOKEN to a token of that account ({token})",
        "RevisionNotFound": "the hub has no such revision of it (--revision)",
        "EntryNotFound": "the hub has no such file in it",
        "RepoNotFound": no_name,
        401: no_name,
        403: f"the hub refuses access (403); HF_TOKEN must be allowed to read it ({token})",
        404: no_name,
        429: f"the hub was asked too often (429); wait some minutes, or set HF_TOKEN ({token})",
    }
    refused = f"the hub refuses with status {status} {code}".rstrip()
    other = f"the hub fails ({status}); try again later" if status >= 500 else refused
    return meanings.get(code) or meanings.get(status) or other


def _token() -> str:
    """Say whether the hub's client has a token; never which."""
    home = Path(os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface")))
    file = Path(os.environ.get("HF_TOKEN_PATH", home / "token"))
    return "one is set" if os.environ.get("HF_TOKEN") or file.is_file() else "none is set"


def _bytes_below(folder: Path) -> int:
    """Return the size of all files below a folder, which may not be there yet."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # renamed meanwhile
                continue
    return total


def endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def why_unreachable() -> str | None:
    """Return why the hub cannot be asked, or None if it can; answers within seconds."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return f"{variable} is set"
    # Name resolution has no timeout of its own, hence a thread that may be left behind.
    answers: list[str | None] = []
    attempt = threading.Thread(target=_ask, args=(endpoint(), answers), daemon=True)
    attempt.start()
    attempt.join(ANSWER_SECONDS + 1)
    problem = answers[0] if answers else f"no answer within {ANSWER_SECONDS + 1:.0f} seconds"
    return None if problem is None else f"{endpoint()} cannot be reached ({problem})"


def _ask(place: str, answers: list[str | None]) -> None:
    """Append what went wrong with one request, or None if there was any answer at all."""
    request = urllib.request.Request(place, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
            answers.append(None)
    except urllib.error.HTTPError:
        answers.append(None)
    except (OSError, ValueError, http.client.HTTPException) as error:
        answers.append(str(getattr(error, "reason", error)) or type(error).__name__)
