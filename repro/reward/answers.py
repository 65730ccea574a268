r"""Reading a completion: its format, and the answer it gives.

Three readings, kept apart because they measure different things:

* `format_ok`, the strict format that our reward pays: each tag exactly once, in order, only white
  space before, between and after, and an answer that is not the prompt's own placeholder;
* `extract_answer`, the answer that our reward compares: the content of the *only* answer block;
  two blocks are two guesses, and earn nothing;
* `lenient_answer`, what a generous reader would take: the last claim in any usual form
  (`<answer>`, `\boxed{}`, `#### N`, "the answer is N") that can be read as an answer, so that
  rambling after a box ("the answer is as expected") takes nothing back; words after a number, in
  `\text{}` or plain, are taken for its unit, and marks of emphasis are dropped. It is logged and
  never paid. The last number in the text is not a claim.

The strict readings are those of the paper's tags; a prompt template that asks for another form has
its own (`READINGS`): the last box, or what follows the last `####`, with one of them as the format.

The gap between strict and lenient accuracy is how much of a rise in reward is learning the format.

Easy to get wrong: a regular expression for the tags, such as the released code's
`<think>.*?</think>\s*<answer>.*?</answer>`, takes cubic time on a completion that repeats
`<think></think><answer>` without ever closing an answer; every reading here is a fixed number of
linear scans. Source: arXiv 2510.11696v1 section 4.1 for the format.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from repro.reward.expression import is_readable, tidy
from repro.reward.quantities import with_unit_marked

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
_TAGS = (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)

# What the paper's prompt itself writes between the tags; echoing it is not an answer.
_PLACEHOLDERS = frozenset({"answer here", "...", "\u2026"})
_MOST_ANSWER_CHARACTERS = 8192
# Texts whose readings are kept, the least recently used being forgotten.
_REMEMBERED = 65_536
_HASHES = re.compile(r"####[ \t]*([^\n]{1,200})")
_SENTENCE = re.compile(r"\banswer is[ \t]*(?::(?:\*\*|__)?\s*)?", re.IGNORECASE)
_SENTENCE_CHARACTERS = 200
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)|<")
# Marks of emphasis, but for those between two numbers: `2**3`.
_EMPHASIS = re.compile(r"(?<![\w)}])(?:\*\*|__|`)|(?:\*\*|__|`)(?![\w({\\])")
_NUMBER_IN_WORDS = re.compile(r"\\text[a-z]*\s?\{\s*([0-9$\\][^{}]*)\}")
# How many claims of one form are looked at, from the last.
_CLAIMS = 16


@functools.lru_cache(maxsize=_REMEMBERED)
def format_ok(text: str) -> bool:
    """Say whether the text is exactly one thinking block and one answer block, and nothing else.

    The thinking may be empty; the answer may not.
    """
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    positions = [text.index(tag) for tag in _TAGS]
    if positions != sorted(positions):
        return False
    before = text[: positions[0]]
    between = text[positions[1] + len(THINK_CLOSE) : positions[2]]
    after = text[positions[3] + len(ANSWER_CLOSE) :]
    if (before + between + after).strip():
        return False
    return extract_answer(text) is not None


def extract_answer(text: str) -> str | None:
    """Return the content of the only answer block, white space cut, or None.

    None if there is no closed block, more than one opening or closing answer tag, a block inside
    the thinking, an empty block, a placeholder, or more than 8,192 characters.
    """
    if text.count(ANSWER_OPEN) != 1 or text.count(ANSWER_CLOSE) != 1:
        return None
    start = text.index(ANSWER_OPEN) + len(ANSWER_OPEN)
    end = text.index(ANSWER_CLOSE)
    if end < start or text.find(THINK_CLOSE, start) >= 0:
        return None
    return _usable(text[start:end])


# Runs side by side write many texts alike, and each is read when graded and when scored.
@functools.lru_cache(maxsize=_REMEMBERED)
def lenient_answer(text: str) -> str | None:
    """Return the answer of the last claim that can be read, or of the last, or None without claims.

    A claim inside an answer block comes after the block's own and is therefore preferred.
    """
    claims = [_usable(_EMPHASIS.sub("", one)) for _, one in sorted(_claims(text), reverse=True)]
    if not claims:
        return None
    readable = (claim for claim in claims if claim is not None and is_readable(tidy(claim)))
    answer = next(readable, claims[0])
    return answer and with_unit_marked(_words_out(tidy(answer)))


def _words_out(text: str) -> str:
    r"""Return `12 apples` for `\text{12 apples}`."""
    match = _NUMBER_IN_WORDS.fullmatch(text)
    return match.group(1) if match else text


def boxed_answer(text: str) -> str | None:
    """Return the content of the last box, or None without one."""
    at = text.rfind(_BOX)
    return None if at < 0 else _usable(_balanced(text, at + len(_BOX)))


def hashed_answer(text: str) -> str | None:
    """Return the text after the last `####` on its line, or None without one."""
    _, mark, rest = text.rpartition("####")
    return _usable(rest.partition("\n")[0]) if mark else None


class Reading(NamedTuple):
    """How a template's completions are read strictly: the answer, and whether the format holds."""

    answer: Callable[[str], str | None]
    format_ok: Callable[[str], bool]


READINGS: Mapping[str, Reading] = {
    "tags": Reading(extract_answer, format_ok),
    "boxed": Reading(boxed_answer, lambda text: text.count(_BOX) == 1 and bool(boxed_answer(text))),
    "hashes": Reading(
        hashed_answer, lambda text: text.count("####") == 1 and bool(hashed_answer(text))
    ),
}


def _claims(text: str) -> list[tuple[int, str]]:
    """Return place and content of the claims in a text: of blocks and boxes the last alone."""
    claims: list[tuple[int, str]] = []
    opened = text.rfind(ANSWER_OPEN)
    if opened >= 0:
        claims.append((opened, text[opened + len(ANSWER_OPEN) :].partition(ANSWER_CLOSE)[0]))
    boxed = text.rfind(_BOX)
    if boxed >= 0:
        claims.append((boxed, _balanced(text, boxed + len(_BOX))))
    hashes = list(_HASHES.finditer(text))[-_CLAIMS:]
    claims += [(match.start(), match.group(1).partition("<")[0]) for match in hashes]
    sentences = list(_SENTENCE.finditer(text))[-_CLAIMS:]
    for match in sentences:
        line = text[match.end() : match.end() + _SENTENCE_CHARACTERS].partition("\n")[0]
        claims.append((match.start(), _SENTENCE_END.split(line)[0]))
    return claims


def _usable(content: str) -> str | None:
    """Return an answer's content, white space cut, or None if it cannot be an answer."""
    content = content.strip()
    if not content or content in _PLACEHOLDERS or len(content) > _MOST_ANSWER_CHARACTERS:
        return None
    return content


def _balanced(text: str, start: int) -> str:
    """Return the text from `start` up to the brace that closes it, or an empty one."""
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return text[start : match.start()]
    return ""
