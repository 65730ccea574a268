r"""Units of measure as answers spell them, read into one name each.

`\text{ square cm}`, `\text{ cm}^2` and `centimetres squared` are one unit. A unit that is not in
the table keeps its words, marked as unknown: a gold may carry it (`5\text{ apples}`), an answer
only if the gold does. Words that change a number's value or take it back (`thousand`, `dozen`,
`or`, `not`) are no unit at all.
"""

from __future__ import annotations

import re

UNKNOWN = "~"
PERCENT, DEGREE, DOLLAR = "percent", "degree", "dollar"

_SPELLINGS: dict[str, str] = {
    "millimeter": "mm millimeter millimeters millimetre millimetres",
    "centimeter": "cm centimeter centimeters centimetre centimetres",
    "meter": "m meter meters metre metres",
    "kilometer": "km kilometer kilometers kilometre kilometres",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard yards",
    "mile": "mi mile miles",
    "gram": "g gram grams",
    "kilogram": "kg kilogram kilograms",
    "ounce": "oz ounce ounces",
    "pound": "lb lbs pound pounds",
    "liter": "l liter liters litre litres",
    "milliliter": "ml milliliter milliliters millilitre millilitres",
    "gallon": "gallon gallons",
    "second": "s sec second seconds",
    "minute": "min minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years",
    "cent": "cent cents",
    "euro": "euro euros",
    "unit": "unit units",
    "radian": "rad radian radians",
    "mph": "mph",
    PERCENT: "percent",
    DEGREE: "degree degrees deg",
    DOLLAR: "dollar dollars usd",
}
_UNIT_OF = {word: unit for unit, words in _SPELLINGS.items() for word in words.split()}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "^2": 2, "cubic": 3, "cu": 3, "cubed": 3, "^3": 3}
# Words after a number that change its value, or take it back.
NOT_UNITS = frozenset(
    {"and", "else", "if", "is", "less", "minus", "more", "no", "not", "or", "plus", "than", "times"}
    | {"to", "wrong", "pi", "half", "halves", "third", "thirds", "quarter", "quarters", "tenth"}
    | {"tenths", "hundredth", "hundredths", "k", "dozen", "dozens", "hundred", "hundreds"}
    | {"thousand", "thousands", "million", "millions", "billion", "billions", "trillion", "base"}
    | {"maybe", "perhaps", "either", "but", "so", "wait", "divided", "by", "factorial", "x"}
)
_SPACES = re.compile(r"\\[ ,;:!]|~|\\quad\b")
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textup|mbox|operatorname)\s?\{([^{}]*)\}")
_TOKEN = re.compile(r"[a-z]+|\^[23]|/")
_READABLE = re.compile(r"(?:[a-z]|\^[23]|/|\s)+")


def read_unit(rest: str, *, words: bool) -> str | None:
    r"""Return the unit written after a number, "" for none, or None if it is not a unit.

    Parameters
    ----------
    rest
        What follows the number: `\%`, `^\circ`, `\text{ cm}^2`, ` cm`.
    words
        Whether a unit may stand in plain words, outside `\text{}`.
    """
    rest = _SPACES.sub(" ", rest).strip()
    if not rest:
        return ""
    if rest in ("%", "\\%"):
        return PERCENT
    if rest in ("^\\circ", "^{\\circ}", "\u00b0", "\\degree"):
        return DEGREE
    plain, texts = _TEXT.subn(r" \1 ", rest)
    if not texts and not words:
        return None
    plain = re.sub(r"\^\{([23])\}", r"^\1", plain).casefold().replace(".", "")
    if not _READABLE.fullmatch(plain):
        return None
    tokens = _TOKEN.findall(plain.replace("per cent", "percent"))
    if not tokens or NOT_UNITS.intersection(tokens):
        return None
    if any(len(token) == 1 and token.isalpha() and token not in _UNIT_OF for token in tokens):
        return None
    # Single letters outside `\text{}` are variables: `3m`.
    if not texts and any(len(token) == 1 and token.isalpha() for token in tokens):
        return None
    if not texts and not any(len(token) > 2 or token in _UNIT_OF for token in tokens):
        return None
    return _named(["/" if token == "per" else token for token in tokens])


def is_known(unit: str) -> bool:
    """Say whether every part of a unit is in the table; `/day` lacks one."""
    return UNKNOWN not in unit and not unit.startswith("/")


def _named(tokens: list[str]) -> str | None:
    """Return the one name of a unit's tokens: `square feet` and `ft^2` are `foot^2`.

    The first part may be missing, as in `per day`; a power of nothing is no unit.
    """
    first, *others = [part.split() for part in " ".join(tokens).split("/")]
    named = [_part(part) for part in ([first] if first or not others else []) + others]
    if None in named:
        return None
    return ("" if first else "/") + "/".join(part for part in named if part)


def _part(tokens: list[str]) -> str | None:
    """Return one part of a unit with its power, or None where there is nothing but a power."""
    power = max((_POWERS[token] for token in tokens if token in _POWERS), default=1)
    words = [token for token in tokens if token not in _POWERS]
    if not words:
        return None
    if len(words) == 1 and words[0] in _UNIT_OF:
        name = _UNIT_OF[words[0]]
    else:
        name = UNKNOWN + " ".join(words)
    return name if power == 1 else f"{name}^{power}"
