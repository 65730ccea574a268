"""Form: what a record's JSON must be before anything in it is looked at, as declared values.

A `Kind` says what a JSON value must be, and of its members. `fault` walks a value beside its kind
and returns one sentence on the first that does not fit, with its dotted path; so any file, however
it was damaged or made, is either a record in form or one refusal that names file and field.

Python's JSON reader takes more than JSON: NaN and infinities, a name given twice (the last counts),
numbers too large for a float (they become infinite), lone surrogates that no page can print.
`read_json` refuses them, and nesting that would exhaust the stack of whoever walks the value later.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

# No record nests deeper than 6; every later walk is recursive.
DEEPEST = 24
# Counts and seeds of up to 63 bits; larger integers cannot become floats.
_LARGEST = 2**63
_SHOWN = 60
# What XML 1.0 cannot carry, not even escaped, and what a terminal takes for a command.
_CONTROL = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class FormError(ValueError):
    """JSON that is out of form; the message names the field where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a JSON value must be.

    Attributes
    ----------
    needs
        In words.
    fits
        Whether a value is of the kind, its members aside.
    known
        Kinds of an object's named members.
    required
        Names of members that must be there.
    closed
        Whether there may be no other members.
    each
        Kind of every element of a list, and of every member of an object that is not named.
    exact
        Types of which every value fits, subclasses aside: `fits` is not called for those.
    """

    needs: str
    fits: Callable[[Any], bool]
    known: Mapping[str, Kind] = field(default_factory=dict)
    required: Collection[str] = ()
    closed: bool = False
    each: Kind | None = None
    exact: frozenset[type] = frozenset()

    @property
    def bare(self) -> bool:
        """Whether nothing is asked of members."""
        return self.each is None and not (self.known or self.required or self.closed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


NUMBER = Kind(needs="a number", fits=_is_number, exact=frozenset({int, float}))
INTEGER = Kind(needs="an integer", fits=_is_integer, exact=frozenset({int}))
COUNT = Kind(needs="an integer, 0 or more", fits=lambda value: _is_integer(value) and value >= 0)
FLAG = Kind(
    needs="true or false",
    fits=lambda value: isinstance(value, bool),
    exact=frozenset({bool}),
)
TEXT = Kind(needs="a string", fits=lambda value: isinstance(value, str), exact=frozenset({str}))
WORDS = Kind(
    needs="a string with words in it",
    fits=lambda value: isinstance(value, str) and bool(value.strip()),
)
TIME = Kind(needs="an ISO 8601 time with its zone", fits=_is_time)
DIGEST = Kind(needs="a SHA-256 of 64 hex digits", fits=_is_digest)


def maybe(kind: Kind) -> Kind:
    """Return the kind of a value that may be null instead."""
    return Kind(
        needs=f"{kind.needs} or null",
        fits=lambda value: value is None or kind.fits(value),
        known=kind.known,
        required=kind.required,
        closed=kind.closed,
        each=kind.each,
        exact=kind.exact | {type(None)},
    )


def listing(each: Kind) -> Kind:
    """Return the kind of a list of such elements."""
    return Kind(needs="a list", fits=lambda value: isinstance(value, list), each=each)


def mapping(each: Kind) -> Kind:
    """Return the kind of an object whose members are all of a kind."""
    return Kind(needs="an object", fits=lambda value: isinstance(value, dict), each=each)


def members(
    known: Mapping[str, Kind],
    required: Collection[str] = (),
    *,
    closed: bool = False,
    others: Kind | None = None,
) -> Kind:
    """Return the kind of an object with named members, and of `others` if they have one kind."""
    return Kind(
        needs="an object",
        fits=lambda value: isinstance(value, dict),
        known=known,
        required=required,
        closed=closed,
        each=others,
    )


def fault(value: Any, kind: Kind) -> str | None:
    """Return a sentence on the first member that is not of its kind, or None."""
    flaw = _fault(value, kind)
    if flaw is None:
        return None
    path, sentence = flaw
    return sentence.format(path.lstrip(".") or "(the whole)")


# A path grows from the inside out, so that it costs nothing where all is well.
def _fault(value: Any, kind: Kind) -> tuple[str, str] | None:
    """Return the path of the first fault and a sentence with a gap for it, or None."""
    if type(value) not in kind.exact and not kind.fits(value):
        what = f"is {shown(value)}, of kind {type(value).__name__}; it must be {kind.needs}"
        return "", "field {} " + what.replace("{", "{{").replace("}", "}}")
    if isinstance(value, dict):
        return _fault_of_members(value, kind)
    if isinstance(value, list) and kind.each is not None:
        # A long series: without a call of this function, or of any, for each number.
        if kind.each.bare and (
            kind.each.exact.issuperset(map(type, value)) or all(map(kind.each.fits, value))
        ):
            return None
        for place, item in enumerate(value):
            flaw = _fault(item, kind.each)
            if flaw is not None:
                return f"[{place}]{flaw[0]}", flaw[1]
    return None


def _fault_of_members(value: Mapping[str, Any], kind: Kind) -> tuple[str, str] | None:
    for name in kind.required:
        if name not in value:
            return f".{name}", "field {} is missing"
    for name, item in value.items():
        own = kind.known.get(name, kind.each)
        if own is None and kind.closed:
            return f".{ascii(name)[1:-1]}", "unknown field {}"
        flaw = _fault(item, own) if own is not None else None
        if flaw is not None:
            return f".{ascii(name)[1:-1]}{flaw[0]}", flaw[1]
    return None


def shown(value: Any) -> str:
    """Return a value for a message, in short."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def without_controls(text: str) -> str:
    """Return a text with a question mark for each character that a terminal or XML may not take.

    What an error says of a run's own texts may hold colours, or commands to the terminal.
    """
    return _CONTROL.sub("?", text)


def one_line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return " ".join(without_controls(text).split())


def read_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises
    ------
    FormError
        If it is not JSON, or holds what the module names.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise FormError(f"nests too deep; at most {DEEPEST} levels are read") from None
    except ValueError as error:
        raise FormError(str(error)) from None
    if not _is_plain(value):
        raise FormError(next(_not_plain(value)))
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FormError(f"field {shown(twice)} is given twice")
    return value


def _is_plain(top: Any) -> bool:
    """Whether every later walk can bear a value; see the module. Itself without recursion."""
    level = [top]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            # Nearly all values are numbers: a call for each would be most of the time.
            if type(value) is float and math.isfinite(value):
                continue
            if type(value) is list and _is_plain_series(value):
                inner.append(value[0])  # one is as deep as all
                continue
            if not _fits_plain(value):
                return False
            inner.extend(_inside(value))
        if not inner:
            return True
        level = inner
    return False


def _is_plain_series(values: list[Any]) -> bool:
    """Whether a list is of numbers of one type, all plain; of others each is to be looked at."""
    types = set(map(type, values))
    if types == {float}:
        return all(map(math.isfinite, values))
    return types == {int} and max(map(abs, values)) <= _LARGEST


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _fits_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    if isinstance(value, dict):
        return _encodes("".join(value))
    return not isinstance(value, str) or _encodes(value)


def _not_plain(top: Any) -> Iterator[str]:
    """Yield a sentence on each member that is not plain, with its path."""
    waiting: list[tuple[str, int, Any]] = [("", 0, top)]
    while waiting:
        path, depth, value = waiting.pop()
        if not _fits_plain(value):
            yield f"field {path} is {shown(value)}; numbers must be finite, text whole characters"
        elif depth >= DEEPEST:
            yield f"field {path[:_SHOWN]} nests too deep; at most {DEEPEST} levels are read"
        elif isinstance(value, dict):
            waiting += [(f"{path}.{name}".lstrip("."), depth + 1, v) for name, v in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}[{n}]", depth + 1, item) for n, item in enumerate(value)]


def _encodes(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
