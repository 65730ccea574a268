"""Blocks of Markdown files that are written from blessed records: which page writes which."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from repro.door.command_line import build_parser
from repro.evidence.gpu_tests import gpu_tests_rows
from repro.judge.blessed import blessed_checks
from repro.judge.check import Checked
from repro.report import learning
from repro.report.command_reference import command_rows
from repro.report.one_page import REPORTED, reported_rows
from repro.report.readme import answer_rows
from repro.report.systems import systems_writers
from repro.report.tidy import rendered
from repro.report.verdict_words import count_rows

_BLOCK = re.compile(r"(<!-- (\w+):begin [^\n]*-->\n)(.*?)(<!-- \2:end -->)", re.DOTALL)


def renew_blocks(text: str, writers: Mapping[str, Callable[[], list[str]]]) -> str:
    """Return a text with the part between its markers replaced by what the block's writer writes.

    A block begins with a line `<!-- NAME:begin ... -->` and ends with `<!-- NAME:end -->`. A text
    without a block, or with a block that has no writer, raises `ValueError`.
    """

    def written(match: re.Match[str]) -> str:
        if match[2] not in writers:
            raise ValueError(f"block {match[2]!r} is unknown; needs one of {sorted(writers)}")
        lines = "\n".join(writers[match[2]]()).rstrip("\n")
        return f"{match[1]}\n{lines}\n\n{match[4]}"

    renewed, count = _BLOCK.subn(written, text)
    if not count:
        raise ValueError("the file has no block from `<!-- NAME:begin ... -->` to its end")
    return renewed


def renewed_readme(readme: Path, expected: Path) -> str:
    """Return a file's text with its blocks written anew, that of commands from their parser."""

    @cache
    def judged() -> list[Checked]:
        return blessed_checks(expected)

    dosed = ("dose_coder_0_5b", "dose_coder_1_5b")
    untrained = [f"untrained_coder_{size}{of}" for size in ("0_5b", "1_5b") for of in ("", "_tags")]
    writers = {
        "answer": lambda: answer_rows(judged(), expected),
        "counts": lambda: count_rows(judged(), expected),
        "doses": lambda: learning.dose_rows(judged(), expected, *dosed),
        "slopes": lambda: learning.slope_rows(judged(), "dose_response_coder_0_5b"),
        "training": lambda: learning.training_rows(judged(), expected, "table1_coder_0_5b"),
        "second_round": lambda: learning.second_round_rows(judged()),
        "anchors": lambda: rendered("anchors.md"),
        "untrained": lambda: learning.untrained_rows(judged(), expected, *untrained),
        "gpu_tests": lambda: gpu_tests_rows(expected),
        "reported": lambda: reported_rows(REPORTED, expected),
        "commands": lambda: command_rows(build_parser()),
        **systems_writers(judged, expected),
    }
    try:
        return renew_blocks(readme.read_text(encoding="utf-8"), writers)
    except ValueError as error:
        raise ValueError(f"{readme}: {error}") from error
