r"""What a copy of the question earns: the share of a set where restating it is paid.

Copies are what a policy could take from the question without any work: the whole text, its last
sentence, each formula between mathematics signs, and each run of written arithmetic. A plain number
of a word problem is no copy but a guess at the answer: a question may well hold its answer among
other numbers, and no grader can tell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from repro.reward.grader import GraderPool

_FORMULA = re.compile(
    r"(?<!\\)\$([^$]{1,400})(?<!\\)\$|\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.S
)
_ARITHMETIC = re.compile(r"[0-9.()]+(?:\s?[-+*/^=]\s?[0-9.()]+)+")
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")


def copies(question: str) -> list[str]:
    """Return the different texts that can be copied from a question as an answer."""
    formulas = ["".join(match.groups("")).strip() for match in _FORMULA.finditer(question)]
    # An equation's sides are what "solve" and "simplify" leave as they are.
    sides = [side.strip() for formula in formulas for side in re.split("[=,]", formula)]
    arithmetic = [match.group().strip() for match in _ARITHMETIC.finditer(question)]
    sentences = [question.strip(), _SENTENCE_END.split(question.strip())[-1]]
    texts = [text for text in (*sentences, *formulas, *sides, *arithmetic) if text]
    return list(dict.fromkeys(texts))


def paid_copies(
    questions: Sequence[str], golds: Sequence[str], pool: GraderPool
) -> list[tuple[int, str]]:
    """Return the places of the questions of which a copy is paid, each with the first such copy.

    Raises
    ------
    ValueError
        If there are not equally many questions and golds.
    """
    tried = [
        (place, gold, copy)
        for place, (question, gold) in enumerate(zip(questions, golds, strict=True))
        for copy in copies(question)
    ]
    grades = pool.grade_answers([(gold, copy) for _, gold, copy in tried])
    paid: dict[int, str] = {}
    for (place, _, copy), grade in zip(tried, grades, strict=True):
        if grade.status == "ok":
            paid.setdefault(place, copy)
    return sorted(paid.items())
