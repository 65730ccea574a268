"""One problem, a question with its final answer, and its JSONL form.

A file is UTF-8, one JSON object per line, with `id`, `question` and `answer` (non-empty strings),
`source` (a string), `solution` (a string or null) and, if the set has difficulty levels, `level`
(an integer, or as MATH writes it, `Level 5`, where `Level ?` is none). Further keys are ignored, so
that a file may carry its makers' own fields.

Easy to get wrong: splitting on Unicode line ends (a question may hold U+2028), turning the answer
into a number ("70000" and "7e4" and 70000.0 are three texts), and skipping a broken line, which
changes every number computed from the file. A broken line therefore raises `DataError`, which names
the file, the line, what was found and what is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_LOWERED = re.compile(r"(?<=[a-z])_(?=[0-9])")
_LOOKALIKES = {
    "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u02ba\uff02": '"',
    "\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u02b9\u02bc\u00b4\uff07": "'",
    "\u2212\u2043\u02d7": "-",
    "\u2215": "/",
}
_LEVEL = re.compile(r"Level ([0-9]{1,3})")


class DataError(ValueError):
    """Input data is missing or broken; the message names the place and what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and the final answer that a completion is graded against.

    Attributes
    ----------
    id
        Unique within its set, stable between runs.
    question
        The text shown to the policy, without any template.
    answer
        The final answer (the gold), as text.
    source
        Where the problem comes from (`generated`, `openai/gsm8k`, ...).
    where
        File and line that it was read from, for messages; no part of what the problem is.
    """

    id: str
    question: str
    answer: str
    solution: str | None = None
    source: str = ""
    level: int | None = None
    where: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("id", "question", "answer"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise DataError(
                    f"problem {self.id!r}: `{name}` is {_shown(value)}; it must be a non-empty "
                    "string"
                )


def problem_from_row(row: Any, *, where: str) -> Problem:
    """Check one decoded JSON row and return its problem.

    Raises `DataError` if a key is missing, empty or of another type.

    Parameters
    ----------
    row
        Any JSON value; only an object with the keys above passes.
    """
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: found {_shown(row)}; each line must be a JSON object with `id`, `question` "
            "and `answer`"
        )
    for name in ("id", "question", "answer"):
        if name not in row:
            raise DataError(
                f"{where}: `{name}` is missing (keys found: {', '.join(map(repr, row)) or 'none'});"
                " `id`, `question` and `answer` are needed"
            )
        value = row[name]
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{where}: `{name}` is {_shown(value)}; it must be a non-empty string")
    solution, source = row.get("solution"), row.get("source", "")
    if solution is not None and not isinstance(solution, str):
        raise DataError(f"{where}: `solution` is {_shown(solution)}; it must be a string or null")
    if not isinstance(source, str):
        raise DataError(f"{where}: `source` is {_shown(source)}; it must be a string")
    return Problem(
        id=row["id"],
        question=row["question"],
        answer=row["answer"],
        solution=solution,
        source=source,
        level=read_level(row.get("level"), where=where),
        where=where,
    )


def read_level(level: Any, *, where: str) -> int | None:
    """Return 5 for 5 and for MATH's `Level 5`, None for null and `Level ?`; raise for others."""
    if level is None or level == "Level ?":
        return None
    named = _LEVEL.fullmatch(level) if isinstance(level, str) else None
    if named:
        return int(named.group(1))
    if isinstance(level, bool) or not isinstance(level, int):
        raise DataError(
            f"{where}: `level` is {_shown(level)}; it must be an integer, `Level 5` or null"
        )
    return level


def read_problems(path: str | Path) -> list[Problem]:
    """Read a JSONL file of problems, in file order.

    A `DataError` names the file and the first line that is no problem of its own id.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; a JSONL file is needed") from error
    content = content.removeprefix(b"\xef\xbb\xbf")
    problems: list[Problem] = []
    line_of_id: dict[str, int] = {}
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path}, line {number}"
        problem = problem_from_row(_decoded(raw, where), where=where)
        first = line_of_id.setdefault(problem.id, number)
        if first != number:
            raise DataError(
                f"{where}: id {problem.id!r} is already on line {first}; ids must be unique"
            )
        problems.append(problem)
    if not problems:
        raise DataError(f"{path}: no problems found; at least one line is needed")
    return problems


def digest_of_problems(problems: Sequence[Problem]) -> str:
    """Return the SHA-256 hex digest of the problems' content and order, for a run's record."""
    digest = hashlib.sha256()
    for problem in problems:
        fields = dataclasses.asdict(problem)
        del fields["where"]
        row = json.dumps(fields, sort_keys=True, ensure_ascii=True)
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()


def hash_of(purpose: str, text: str) -> str:
    """Return a stable hash of a text for one purpose, its white space and case ignored."""
    canonical = " ".join(text.casefold().split())
    return hashlib.sha256(f"{purpose}\n{canonical}".encode()).hexdigest()


def same_text(text: str) -> str:
    """Return the one form of texts that differ in Unicode's spelling alone, for comparisons.

    White space, case, invisible signs, compatibility forms, and kinds of quotes and dashes are
    ignored; a raised digit stays one, and so does a lowered one behind a digit.
    """
    plain = _BEYOND_ASCII.sub(_plain_sign, unicodedata.normalize("NFC", text))
    plain = unicodedata.normalize("NFKC", plain).casefold().replace("\u2044", "/")
    plain = _LOWERED.sub("", plain.replace("``", '"').replace("`", "'").replace("''", '"'))
    return " ".join(plain.split())


def _plain_sign(match: re.Match[str]) -> str:
    """Return what a character is compared as, perhaps by its compatibility form."""
    sign = match.group()
    kind, written = unicodedata.category(sign), unicodedata.decomposition(sign)
    if kind == "Cf":
        return ""
    for signs, plain in _LOOKALIKES.items():
        if sign in signs:
            return plain
    mark = {"<super>": "^", "<sub>": "_", "<fraction>": " "}.get(written.partition(" ")[0], "")
    return "-" if kind == "Pd" else mark + sign


def _decoded(raw: bytes, where: str) -> Any:
    """Return the JSON value on one line of bytes."""
    try:
        value: Any = json.loads(raw)
        json.dumps(value, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
    except (RecursionError, ValueError) as error:
        raise DataError(
            f"{where}: {_shown(raw.strip())} is not read ({_shown(str(error))}); each line must be "
            "one JSON object in UTF-8"
        ) from error
    return value


def _shown(value: Any, limit: int = 80) -> str:
    """Return a value's repr, cut to `limit` characters, for an error message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
