"""A command line that cannot be read is reported in one sentence, with the nearest valid name.

argparse prints the usage, many lines of it, and ends the process. Here such a line is a
`ValueError` like any other mistake of a user's, and the program prints its sentence.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from repro.spec.checks import in_digits, meant

_CHOICE = re.compile(r"argument (\S+): invalid choice: '?([^']*)'? \(choose from (.*)\)", re.DOTALL)


class SentenceParser(argparse.ArgumentParser):
    """A parser whose `error` raises `ValueError`; its subcommands' parsers are of the same kind.

    Flags are named in full: `run --rank 8` is a mistake, and no `--ranks 8`. A program is named as
    documentation types it, in three words: `python -m repro`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        for kind in (int, float):
            self.register("type", kind, partial(in_digits, kind))

    def error(self, message: str) -> NoReturn:
        """Raise `ValueError` with the command and what is wrong with its line."""
        choice = _CHOICE.fullmatch(message)
        if choice:
            known = [name.strip(" '") for name in choice[3].split(",")]
            named = f"{choice[1]} {choice[2]!r}"
            message = f"{named}{meant(choice[2], known)}: needs one of {', '.join(known)}"
        message = re.sub("invalid (int|float) value:", "needs a number such as 8, not", message)
        command = " ".join(self.prog.split()[3:])
        raise ValueError(f"{command}: {message}" if command else message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; an unknown or blank argument is an error here, where its command is known."""
        parsed, extra = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not text.strip():
                    self.error(str(argparse.ArgumentError(action, f"{text!r} names nothing")))
            if isinstance(value, str) and action.dest != "data":  # which may name several
                setattr(parsed, action.dest, os.path.expanduser(value))  # bash leaves --out=~/x
        if extra:
            flag = extra[0].partition("=")[0]
            flags = sorted(set(re.findall(r"--[a-z][a-z-]*", self.format_help())))
            self.error(f"there is no argument {flag}{meant(flag, flags)}")
        return parsed, extra
