"""A server of the hub's API on 127.0.0.1, with faults that a test switches on (`hub.fault = ...`).

`root` holds `models/OWNER/NAME/COMMIT/...` and `datasets/...`; `main` is the last commit by name.
Large files are sent by another path, as the hub sends them.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE = (".safetensors", ".gguf", ".parquet")
# Kind of fault: status and the hub's own code of it.
ANSWERS = {
    "gated": (401, "GatedRepo"),
    "forbidden": (403, ""),
    "hidden": (401, "RepoNotFound"),
    "missing": (404, "RepoNotFound"),
    "revision": (404, "RevisionNotFound"),
    "limit": (429, ""),
    "down": (503, ""),
}


@dataclass(kw_only=True)
class Fault:
    """What the server does, `times` times, to requests whose path holds `match`.

    Beside `ANSWERS`, a kind is `cut` (half-way), `silent`, `portal` (a login page) or `changed`.
    """

    kind: str
    match: str = ""
    times: int = 10_000


@dataclass(kw_only=True)
class Hub:
    """A running server: its address, the paths that it was asked for, and its fault."""

    root: Path
    address: str = ""
    asked: list[str] = field(default_factory=list)
    fault: Fault | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def fault_of(self, path: str) -> str | None:
        """Return the fault of a request, once fewer times then."""
        self.asked.append(path)
        if self.fault is None or self.fault.match not in path or not self.fault.times:
            return None
        self.fault.times -= 1
        return self.fault.kind


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """Serve a folder until the block ends."""
    hub = Hub(root=root)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = None if path == "/" else self.hub.fault_of(path)
        if fault == "silent":
            self.hub.ended.wait(30)
            self.close_connection = True
        elif fault == "portal":
            self._send(200, b"<html>Please log in to the guest network</html>")
        elif fault in ANSWERS:
            status, code = ANSWERS[fault]
            self._send(status, b'{"error": "refused"}', {"X-Error-Code": code} if code else {})
        elif path.startswith("/large/"):
            self._blob(self.hub.root / path.removeprefix("/large/"), {}, fault)
        else:
            self._answer(path, fault)

    def _answer(self, path: str, fault: str | None) -> None:
        listed = re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        named = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if listed:
            kind, name, verb, revision = listed.groups()
            folder = self._commit(f"{kind}/{name}", revision or "main")
            if folder is not None:
                files = sorted(p for p in folder.rglob("*") if p.is_file())
                rows = [_row(file, folder) for file in files]
                siblings = [{"rfilename": row["path"]} for row in rows]
                info = {"id": name, "sha": folder.name, "tags": [], "siblings": siblings}
                self._send(200, json.dumps(rows if verb == "tree" else info).encode())
        elif named:
            data, name, revision, inside = named.groups()
            folder = self._commit(f"{'datasets' if data else 'models'}/{name}", revision)
            if folder is None:
                return
            headers = {"X-Repo-Commit": folder.name}
            file = folder / inside
            if not file.is_file():
                self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
            elif file.suffix in _LARGE:
                headers |= {
                    # Another host, as the hub's store is: the client follows no other redirect.
                    "Location": self.hub.address.replace("127.0.0.1", "localhost")
                    + f"/large/{file.relative_to(self.hub.root)}",
                    "X-Linked-Etag": f'"{_sha256(file)}"',
                    "X-Linked-Size": str(file.stat().st_size),
                }
                self._send(302, b"", headers)
            else:
                self._blob(file, headers | {"ETag": f'"{_git_sum(file)}"'}, fault)
        else:
            self._send(404, b"")

    def _commit(self, name: str, revision: str) -> Path | None:
        """Return the folder of a commit; where there is none, answer so."""
        commits = sorted(p for p in (self.hub.root / name).glob("*") if p.is_dir())
        if not commits:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        found = [p for p in commits if p.name == revision] or commits[-1:] * (revision == "main")
        if not found:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return found[0] if found else None

    def _blob(self, file: Path, headers: dict[str, str], fault: str | None) -> None:
        content = file.read_bytes()
        if fault == "changed":
            content = content[:-8] + bytes(b ^ 255 for b in content[-8:])
        wanted = re.fullmatch(r"bytes=(\d+)-\d*", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        if wanted:
            headers = headers | {
                "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"
            }
        half = fault == "cut" and self.command == "GET"
        self._send(206 if wanted else 200, content[start:], headers, half=half)
        if half:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, half: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if half else body)
            self.wfile.flush()


def _row(file: Path, folder: Path) -> dict[str, Any]:
    """Return a file as the hub lists it."""
    size = file.stat().st_size
    row = {"type": "file", "oid": _git_sum(file), "size": size}
    row["path"] = str(file.relative_to(folder))
    if file.suffix in _LARGE:
        row["lfs"] = {"oid": _sha256(file), "size": size, "pointerSize": 134}
    return row


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git_sum(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
