"""Bundles: the sealed records of a target and their plans in one file, to be judged elsewhere.

A bundle is a zip of what `run` wrote, under the names it has among raw runs; its comment names
target and tier. A record holds its configuration, its environment and the digest of its plan.

Who verifies one believes nothing in it. Each name must be that of a record or a plan before its
bytes are read, so that no path leads elsewhere; bytes are counted as they are unpacked, whatever
the headers say; they become new plain files in a scratch folder, so that no link is made or
followed. Then they are judged as any runs are, which reads JSON and carries nothing out.

Easy to get wrong: seals and digests show that nothing was damaged, not who ran it.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from pathlib import Path

from repro.evidence.store import RunsFolder
from repro.run.places import absence_text
from repro.run.select import Selection, select
from repro.spec.arm import require
from repro.spec.whole_files import replace_files

_MEMBER = re.compile(
    r"[a-z]+/(plans/[a-z0-9_]+-[0-9a-f]{12}|[a-z0-9_]+/[a-z0-9_]+/seed-\d{1,9}(\.failed-\d{1,4})?)"
    r"\.json"
)
# A training run's record has some kilobytes per step at most, a target some hundred records.
MOST_FILES, MOST_BYTES, MOST_IN_ALL = 5_000, 2**25, 2**29


def pack(selection: Selection, runs: Path, out: Path) -> str:
    """Write a target's records to a new bundle, each read first; return a sentence on it."""
    tier, name = selection.tier.value, selection.target.name
    homes = [selection.source.home(arm.name) for arm in selection.target.arms]
    arms = {(home.name, arm) for home, arm in homes}
    entries = [
        entry
        for home in sorted({home for home, _ in arms})
        for entry in RunsFolder(runs).entries(tier, home)
        if (home, entry.arm) in arms
    ]
    require(bool(entries), absence_text(runs, runs / tier / selection.source.name))
    require(not out.exists(), f"{out} exists; a bundle is written to a new file")
    for entry in entries:
        entry.read()
    plans = sorted((runs / tier / "plans").glob(f"{name}-*.json"))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = f"{name} {tier}".encode()
        for path in [*(entry.path for entry in entries), *plans]:
            archive.writestr(path.relative_to(runs).as_posix(), path.read_bytes())
    replace_files({out: packed.getvalue()})
    return f"{out}: {len(entries)} records and {len(plans)} plans of {name}, {tier} tier"


def unpack(bundle: Path, folder: Path) -> Selection:
    """Write a bundle's records into an empty folder; `ValueError` names a member that is none."""
    try:
        with zipfile.ZipFile(bundle) as archive:
            _unpack(archive, bundle, folder)
            words = archive.comment.decode(errors="replace").split()
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, UnicodeError, zlib.error) as error:
        raise ValueError(f"{bundle}: not a bundle that can be read: {error}") from error
    require(len(words) == 2, f"{bundle}: its comment is {words!r:.80}; needs a target and a tier")
    return select(words[:1], tier=words[1])[0]


def _unpack(archive: zipfile.ZipFile, bundle: Path, folder: Path) -> None:
    members, left = archive.infolist(), MOST_IN_ALL
    require(len(members) <= MOST_FILES, f"{bundle} has {len(members)} files; at most {MOST_FILES}")
    for info in members:
        name = info.filename
        known = _MEMBER.fullmatch(name) is not None
        require(known, f"{bundle}: {name!r:.80} is no name of a record or plan")
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        require(deflated, f"{bundle}: {name} is packed in another way than deflate")
        path = folder / name
        require(not path.exists(), f"{bundle} has {name} twice")
        with archive.open(info) as member:
            content = member.read(min(left, MOST_BYTES) + 1)
        left -= len(content)
        require(len(content) <= MOST_BYTES and left >= 0, f"{bundle}: {name} is too large")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
