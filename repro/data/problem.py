"""One problem, a question with its final answer, and the row that it is read from.

A row has a question and an answer, perhaps an `id`, a `source`, a `solution` and a difficulty
`level` (an integer, or as MATH writes it, `Level 5`, where `Level ?` is none). A row without an id
is named by its line. Columns may have other names: those that `columns` gives, else `prompt`,
`problem` or `messages` for the question and `solution` for the answer. A question may be a chat, a
list of `role` and `content`, that ends with the user's message; what the assistant says after it is
the answer where no column is. Of an answer with a `####` mark, the gold is what follows it. Other
columns are kept for rewards that ask for them.

A number in the file becomes the text that it is written as. A broken row is not skipped, which
would change every number computed from the file: it raises `DataError`, which names the file, the
line, what was found and what is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from repro.spec.checks import shown

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_LOWERED = re.compile(r"(?<=[a-z])_(?=[0-9])")
_LOOKALIKES = {
    "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u02ba\uff02": '"',
    "\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u02b9\u02bc\u00b4\uff07": "'",
    "\u2212\u2043\u02d7": "-",
    "\u2215": "/",
}
_LEVEL = re.compile(r"(?:Level )?([0-9]{1,3})")
_GROUPED = r"(?<![\d,])\d{1,3}(?:,\d{3})+(?!\d|,\d)"
# Alone in brackets, (1,200) is a pair; \frac{1,200}{7} has a number there.
_THOUSANDS = re.compile(rf"(?:(?<![(\[{{])|(?<=[A-Za-z}}]\{{)){_GROUPED}|{_GROUPED}(?!\\?[)\]}}])")
# What a problem is read from, and other people's names for it.
ROLES: Mapping[str, tuple[str, ...]] = {
    "question": ("question", "prompt", "problem", "messages"),
    "answer": ("answer", "solution"),
    "id": ("id",),
    "solution": ("solution",),
    "level": ("level",),
    "source": ("source",),
}
# Whether a value is one of a role that may be absent.
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("solution", "source"), lambda value: isinstance(value, str)),
    "level": lambda value: type(value) is int or bool(_LEVEL.fullmatch(str(value))),
}
Split = Literal["train", "development", "test"]
_NEEDED = ("question", "answer")
_SPEAKERS = ("system", "user", "assistant")


class DataError(ValueError):
    """Input data is missing or broken; the message names the place and what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and the final answer that a completion is graded against.

    Attributes
    ----------
    id
        Unique within its set, stable between runs.
    question, answer
        The text shown to the policy, without any template, and the gold; empty in a row without.
    before
        Role and content of the messages before the question: a system prompt, earlier turns.
    row
        The row's columns by their own names, for rewards that ask for them; no part of what the
        problem is, nor is `where`.
    where
        File and line that it was read from, for messages.
    """

    id: str
    question: str
    answer: str
    solution: str | None = None
    source: str = ""
    level: int | None = None
    before: tuple[tuple[str, str], ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    where: str = field(default="", compare=False)


def problem_from_row(
    row: Any, *, where: str, columns: Mapping[str, str] | None = None, place: str = ""
) -> Problem:
    """Check one decoded row and return its problem.

    Raises `DataError` if a column but the answer's is missing, empty or of another type. `columns`
    are the row's names of `question`, `answer`, ... (`ROLES`) where they are its own; `where` is
    file and line, `place` the id of a row that has none, by default `where` without its folder.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: found {shown(row)}; each row must be an object with columns")
    found = _columns_of(row, columns or {}, where)
    question, before, said = _question(row, found["question"], where)
    answer = _text(row, found["answer"], where) if "answer" in found else said or ""
    gold = answer.rpartition("####")[2].strip()
    gold = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), gold)
    given = {role: row[column] for role, column in found.items()}
    solution, source = given.get("solution"), given.get("source", "")
    if not isinstance(solution, str | None):
        raise DataError(f"{where}: `solution` is {shown(solution)}; it must be a string or null")
    if not isinstance(source, str):
        raise DataError(f"{where}: `source` is {shown(source)}; it must be a string")
    own = _text(row, found["id"], where) if "id" in found else ""
    return Problem(
        id=own or place or where.rpartition("/")[2],
        question=question,
        answer=gold if gold and "####" in answer else answer,
        solution=solution,
        source=source,
        level=read_level(given.get("level"), where=where),
        before=before,
        row=row,
        where=where,
    )


def _columns_of(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the row's columns by role, of the roles that it has."""
    found: dict[str, str] = {}
    for role, names in ROLES.items():
        wanted = columns.get(role)
        if wanted is not None and wanted not in row:
            raise _missing(wanted, row, where)
        taken = {found.get(of) for of in _NEEDED} | {columns.get(of) for of in _NEEDED}
        own = (name for name in names if name in row and (name == role or name not in taken))
        if column := wanted or next(own, None):
            found[role] = column
    if found.get("solution") == found.get("answer") and "solution" not in columns:
        found.pop("solution", None)
    if "question" not in found:
        raise _missing("question", row, where)
    for role, reads in _KINDS.items():  # such a column, not named by its role, is the user's own
        if role in found and role not in columns and not reads(row[found[role]]):
            found.pop(role)
    return found


def require_answers(problems: Sequence[Problem]) -> Sequence[Problem]:
    """Return problems; raise `DataError` for the first without an answer."""
    for problem in problems:
        if not problem.answer:
            raise _missing("answer", problem.row, problem.where)
    return problems


def _missing(name: str, row: Mapping[str, Any], where: str) -> DataError:
    names = ", ".join(map(repr, row)) or "none"
    return DataError(
        f"{where}: `{name}` is missing (columns found: {names}); a question and an answer are "
        "needed (--columns question=NAME,answer=NAME names them)"
    )


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return a column's text; of a number the text of it, whole ones without decimals."""
    value = row[column]
    if isinstance(value, float) and math.isfinite(value):
        value = str(int(value)) if value.is_integer() else repr(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: `{column}` is {shown(value)}; it must be a non-empty string, or a number"
        )
    return value


def _question(
    row: Mapping[str, Any], column: str, where: str
) -> tuple[str, tuple[tuple[str, str], ...], str | None]:
    """Return the question, the messages before it, and what the assistant says after it."""
    value = row[column]
    if not isinstance(value, list):
        return _text(row, column, where), (), None
    chat = [_message(item, f"{where}: `{column}`") for item in value]
    said = chat.pop()[1] if chat and chat[-1][0] == "assistant" else None
    if not chat or chat[-1][0] != "user":
        roles = ", ".join(role for role, _ in chat) or "none"
        raise DataError(
            f"{where}: `{column}` has the roles {roles}; its last message but for the answer must "
            "be the user's"
        )
    return chat[-1][1], tuple(chat[:-1]), said


def _message(item: Any, where: str) -> tuple[str, str]:
    """Return role and content of a message."""
    role, content = (item.get(k) for k in ("role", "content")) if isinstance(item, dict) else (0, 0)
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if role not in _SPEAKERS or not isinstance(content, str) or not content.strip():
        raise DataError(
            f"{where} holds {shown(item)}; a message needs a `role` ({', '.join(_SPEAKERS)}) and a "
            "`content`, a non-empty string"
        )
    return role, content


def read_level(level: Any, *, where: str) -> int | None:
    """Return 5 for 5, "5" and MATH's `Level 5`, None for null and `Level ?`; raise for others."""
    if level is None or level == "Level ?":
        return None
    named = _LEVEL.fullmatch(level) if isinstance(level, str) else None
    if named:
        return int(named.group(1))
    if isinstance(level, bool) or not isinstance(level, int):
        raise DataError(
            f"{where}: `level` is {shown(level)}; it must be an integer, `Level 5` or null"
        )
    return level


def problems_of_rows(
    rows: Iterable[tuple[Any, str]], name: str, columns: Mapping[str, str] | None = None
) -> list[Problem]:
    """Return the problems of rows, each with the place that it was read from, in their order.

    A `DataError` names the place of the first that is no problem of its own id, or `name` where
    there is none. Files of one name are told apart by their folders below the one that holds all.
    """
    rows = list(rows)
    files = {where.rpartition(", ")[0] for _, where in rows}
    names = Counter(map(os.path.basename, files))
    repeated = {file for file in files if names[os.path.basename(file)] > 1}
    folder = os.path.commonpath(repeated) if repeated else ""
    problems: list[Problem] = []
    place_of_id: dict[str, str] = {}
    for row, where in rows:
        own = where.rpartition(", ")[0] in repeated
        place = where.removeprefix(f"{folder}/") if own else ""
        problem = problem_from_row(row, where=where, columns=columns, place=place)
        first = place_of_id.setdefault(problem.id, where)
        if first != where:
            raise DataError(
                f"{where}: id {problem.id!r} is already on {first.rpartition(', ')[2]}; ids must "
                "be unique"
            )
        problems.append(problem)
    if not problems:
        raise DataError(f"{name}: no problems found; at least one row is needed")
    return problems


def digest_of_problems(problems: Sequence[Problem], *, rows: bool = False) -> str:
    """Return the SHA-256 hex digest of the problems' content and order, for a run's record.

    With `rows` all columns of theirs are in it too: a reward may ask for any.
    """
    columns = sorted({str(name) for problem in problems for name in problem.row} if rows else ())
    digest = hashlib.sha256()
    for problem in problems:
        fields = {
            item.name: getattr(problem, item.name)
            for item in dataclasses.fields(problem)
            if item.compare and (item.name != "before" or problem.before)
        }
        fields |= {f"row.{name}": problem.row.get(name) for name in columns}
        row = json.dumps(fields, sort_keys=True, ensure_ascii=True, default=str)
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()


def columns_of(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """Return what a reward may ask for, an entry a problem each, by name.

    `prompts` are the questions, `answers` the golds; then what a problem has, and its row's columns
    by their own names. What a row has not is None.
    """
    golds, questions = [p.answer or None for p in problems], [p.question for p in problems]
    columns = {name: [getattr(p, name) for p in problems] for name in ("id", "solution", "level")}
    columns |= {"question": questions, "answer": golds}
    for name in dict.fromkeys(key for problem in problems for key in problem.row):
        columns[str(name)] = [problem.row.get(name) for problem in problems]
    return columns | {"answers": golds, "prompts": questions}


def hash_of(purpose: str, text: str) -> str:
    """Return a stable hash of a text for one purpose, its white space and case ignored."""
    return hashlib.sha256(f"{purpose}\n{' '.join(text.casefold().split())}".encode()).hexdigest()


def hashes_of(purpose: str, problems: Sequence[Problem]) -> list[str]:
    """Return the hash of each question; of twins by `same_text`, that of the first."""
    first: dict[str, str] = {}
    return [
        first.setdefault(same_text(own.question), hash_of(purpose, own.question))
        for own in problems
    ]


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
