r"""Reading a completion: its format, and the answer it gives.

Three readings, kept apart because they measure different things: the strict format that our reward
pays (`format_ok`), the answer that it compares (`extract_answer`; two blocks are two guesses, and
earn nothing), and what a generous reader would take, which is logged and never paid
(`lenient_answer`): the last claim in any usual form (`<answer>`, `\boxed{}`, `#### N`, "the answer
is N") that can be read as an answer, so that rambling after a box ("the answer is as expected")
takes nothing back. The last number in the text is not a claim.

The strict readings are those of the paper's tags; a prompt template that asks for another form has
its own (`READINGS`): the last box, or what follows the last `####`, with one of them as the format.

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

from repro.reward.expression import end_of_bracket, is_readable, tidy
from repro.reward.quantities import read_quantity, with_unit_marked
from repro.spec.checks import require

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
_BOLD = r"(?:\*\*|__)?"
_SENTENCE = re.compile(
    rf"\banswer{_BOLD}"
    r"(?:\s{1,4}(?:is|equals|would be)\b|\s{0,4}[:=]|(?<=final answer)\s{0,4}\n)"
    rf"{_BOLD}\s{{0,8}}:?{_BOLD}\s{{0,8}}"
    r"(?:(?:therefore|thus|then|hence|simply|just|equal to)\b,?\s{0,4})*",
    re.IGNORECASE,
)
# Followed at once by a number with at most a word, and the sentence's end.
_CONCLUSION = re.compile(
    rf"(?:\b(?:therefore|thus|hence)\b|\\therefore\b|\u2234)[,:]?\s{{0,4}}{_BOLD}", re.IGNORECASE
)
_NUMBER_AND_WORD = re.compile(r"[^A-Za-z]*(?:\s?[A-Za-z]+)?")
_DISPLAY = re.compile(r"(?:\$\$|\\\[)(.*?)(?:\$\$|\\\])", re.DOTALL)
_SENTENCE_CHARACTERS = 200
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)|<")
# Marks of emphasis, but for those between two numbers: `2**3`.
_EMPHASIS = re.compile(r"(?<![\w)}])(?:\*\*|__|`)|(?:\*\*|__|`)(?![\w({\\])")
_NUMBER_IN_WORDS = re.compile(r"\\text[a-z]*\s?\{\s*([0-9$\\][^{}]*)\}")
# Words in a gold, apart from commands, functions, and what joins the members of a list.
_IN_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit)\s?\{([^{}]*)\}")
_NO_PROSE = re.compile(
    r"\\(?:begin|end|operatorname)\s?\{[^{}]*\}|\\[A-Za-z]+"
    r"|\b(?:and|sin|cos|tan|cot|sec|csc|log|exp|max|min|mod|gcd|lcm|det|sqrt|arc[a-z]+)\b"
)
_PROSE = re.compile(r"[A-Za-z]{3}|\bis\b|[\u2248~]")
_NUMBER = re.compile(
    r"-?\\?\$?(?:\\[cdt]?frac\s?\{[0-9]+\}\s?\{[0-9]+\}|[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?)"
)
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
    r"""Return the answer of the last claim that can be read, else of the last; None without any.

    A claim inside an answer block comes after the block's own and is therefore preferred. Words
    after a number, in `\text{}` or plain, are taken for its unit, and emphasis is dropped.
    """
    claims = [_usable(_EMPHASIS.sub("", one)) for _, one in sorted(_claims(text), reverse=True)]
    if not claims:
        return None
    readable = (claim for claim in claims if claim is not None and is_readable(tidy(claim)))
    answer = next(readable, claims[0])
    if answer is None:
        return None
    plain = tidy(answer)
    in_words = _NUMBER_IN_WORDS.fullmatch(plain)
    return with_unit_marked(in_words[1] if in_words else plain)


def claims_within(gold: str) -> list[str]:
    """Return the answers that stand among a gold's words; none where it has no words around one."""
    text = tidy(gold)
    claim = lenient_answer(gold)
    claims = [claim] if claim and tidy(claim) != text else []
    prose = _PROSE.search(_NO_PROSE.sub(" ", _IN_WORDS.sub(r" \1 ", text)))
    return claims + (_NUMBER.findall(text) if prose else [])


def boxed_answer(text: str) -> str | None:
    """Return the content of the last box, or None without one."""
    at = text.rfind(_BOX)
    return None if at < 0 else _usable(_balanced(text, at + len(_BOX)))


def hashed_answer(text: str) -> str | None:
    """Return the text after the last `####` on its line, or None without one."""
    _, mark, rest = text.rpartition("####")
    return _usable(rest.partition("\n")[0]) if mark else None


class Reading(NamedTuple):
    """How a template's completions are read strictly: the answer, and whether the format holds.

    `example` is a completion of that format, whose answer is 4.
    """

    answer: Callable[[str], str | None]
    format_ok: Callable[[str], bool]
    example: str


READINGS: Mapping[str, Reading] = {
    "tags": Reading(extract_answer, format_ok, "<think> 2 + 2 </think> <answer> 4 </answer>"),
    "boxed": Reading(
        boxed_answer, lambda text: text.count(_BOX) == 1 and bool(boxed_answer(text)), "\\boxed{4}"
    ),
    "hashes": Reading(
        hashed_answer, lambda text: text.count("####") == 1 and bool(hashed_answer(text)), "#### 4"
    ),
}


def require_readable(reads: str, respelled: Callable[[str], str]) -> None:
    """Raise `ValueError` unless an answer survives what a tokenizer makes of its own tokens."""
    reading = READINGS[reads]
    text = respelled(reading.example)
    require(
        reading.answer(text) == "4" and reading.format_ok(text),
        f"the tokenizer makes {text!r} of the completion {reading.example!r}, whose answer is lost;"
        f" a template that reads {reads} needs a tokenizer that keeps its marks",
    )


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
    claims += [(match.start(), _sentence(text, match.end())) for match in sentences]
    for match in list(_CONCLUSION.finditer(text))[-_CLAIMS:]:
        claim = _EMPHASIS.sub("", _sentence(text, match.end())).strip()
        if _NUMBER_AND_WORD.fullmatch(claim) and read_quantity(tidy(claim), words=True):
            claims.append((match.start(), claim))
    return claims


def _sentence(text: str, start: int) -> str:
    """Return what stands from a place to its sentence's end: a line's, or a display of its own."""
    rest = text[start : start + _SENTENCE_CHARACTERS]
    display = _DISPLAY.match(rest)
    return display.group(1) if display else _SENTENCE_END.split(rest.partition("\n")[0])[0]


def _usable(content: str) -> str | None:
    """Return an answer's content, white space cut, or None if it cannot be an answer."""
    content = content.strip()
    if not content or content in _PLACEHOLDERS or len(content) > _MOST_ANSWER_CHARACTERS:
        return None
    return content


def _balanced(text: str, start: int) -> str:
    """Return the text from `start` up to the brace that closes it, or an empty one."""
    end = end_of_bracket(text, start, "[{}]", depth=1)
    return text[start : end - 1] if end else ""
