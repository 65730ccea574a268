"""Checks of values, and sentences on what they refuse."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, get_args


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """Return what each check returns; all that they refuse is said in one `ValueError`."""
    found, refused = tried(*checks)
    require(not refused, "; ".join(dict.fromkeys(refused)))
    return found


def tried(*checks: Callable[[], Any]) -> tuple[list[Any], list[str]]:
    """Return what each check returns, None where it refuses, and what is refused."""
    found: list[Any] = []
    refused = []
    for check in checks:
        try:
            found.append(check())
        except ValueError as error:
            found.append(None)
            refused.append(str(error))
    return found, refused


def require_choice(name: str, value: object, choices: object) -> None:
    """Raise `ValueError` unless `value` is one of the literal type's choices."""
    allowed = get_args(choices)
    require(
        value in allowed, f"{name} is {value!r}; it must be one of {', '.join(map(str, allowed))}"
    )


# Most names that a sentence lists whole, and how many of more.
_LISTED, _NEAR = 16, 3


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """Return a sentence on a name that is not known: the nearest one that is, then all or some."""
    listed = f"the {what}s are {', '.join(known)}"
    if len(known) > _LISTED:
        near = difflib.get_close_matches(name, known, n=_NEAR, cutoff=0.0)
        listed = f"the nearest of {len(known)} {what}s are {', '.join(near)}"
    return f"there is no {what} {name!r}{meant(name, known)}; {listed}"


def meant(name: str, known: Sequence[str]) -> str:
    """Return the question whether the nearest known name was meant; empty where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
