"""The reference of commands, written from the parsers: what each does, and its options.

Options that several commands have, in the same words, are listed once.
"""

from __future__ import annotations

import argparse
from collections import Counter

from repro.report.tidy import rendered


def command_rows(parser: argparse.ArgumentParser) -> list[str]:
    """Return the commands of a parser with their options, as lines of Markdown."""
    (group,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
    options = {name: _options(one) for name, one in group.choices.items()}
    counts = Counter(option for listed in options.values() for option in listed)
    commands = [
        {
            "name": name,
            "help": f"{helps[name][:1].upper()}{helps[name][1:]}.",
            "description": one.description or "",
            "positional": " ".join(_arguments(one)),
            "options": [option for option in options[name] if counts[option] == 1],
            "shared": [
                o.partition("`")[2].split("`")[0].split(" ")[0]
                for o in options[name]
                if counts[o] > 1
            ],
        }
        for name, one in group.choices.items()
    ]
    shared = sorted(option for option, count in counts.items() if count > 1)
    return rendered("commands.md", commands=commands, shared=shared)


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    """Return the positional arguments as a usage line shows them."""
    formatter = argparse.HelpFormatter("")
    return [
        formatter._format_args(action, str(action.metavar or action.dest).upper())
        for action in parser._actions
        if not action.option_strings
    ]


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Return each option as an item of a list: its flag, its value, what it does."""
    items = []
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        flag = action.option_strings[-1]
        if action.choices:
            value = " " + "|".join(map(str, action.choices))
        else:
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        text = (action.help or "").replace("*", r"\*")
        items.append(f"`{flag}{value}`" + (f": {text}" if text else ""))
    return items
