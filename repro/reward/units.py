r"""Units of measure as answers spell them, read into one name each.

`\text{ square cm}`, `\text{ cm}^2` and `centimetres squared` are one unit. A unit that is not in
the table keeps its words, marked as unknown: a gold may carry it (`5\text{ apples}`), an answer
only if the gold does. Units side by side are their product (`kilowatt hours`). Words that change a
number's value or take it back (`thousand`, `dozen`, `or`, `not`) are no unit at all.
"""

from __future__ import annotations

import re

UNKNOWN = "~"
PERCENT, DEGREE, DOLLAR = "percent", "degree", "dollar"
# Signs of currencies, before a number or behind it.
CURRENCIES = {
    "$": DOLLAR,
    "\\$": DOLLAR,
    "\u20ac": "euro",
    "\u00a3": "pound sterling",
    "\u00a5": "yen",
    "\u20b9": "rupee",
    "\u20a8": "rupee",
    "\u20a9": "won",
    "\u20bd": "ruble",
    "\u20b1": "peso",
    "\u0e3f": "baht",
    "\u20a3": "franc",
    "\u20ba": "lira",
    "\u20ab": "dong",
    "\u20aa": "shekel",
    "\u20a6": "naira",
    "\u20b4": "hryvnia",
    "\u00a2": "cent",
}

# Units with a plural in s, each its own name.
_REGULAR = (
    "meter yard mile furlong fathom parsec angstrom acre hectare gram ounce pound ton carat "
    "liter teaspoon tablespoon cup pint quart gallon bushel barrel second minute hour day week "
    "fortnight month year decade watt joule calorie electronvolt newton pascal bar atmosphere volt "
    "ampere ohm coulomb farad tesla decibel lumen candela mole kelvin bit byte knot radian unit "
    "cent nickel dime euro rupee peso franc ruble degree dollar"
)
_PREFIXED = (
    "meter gram liter second watt joule newton pascal volt ampere ohm hertz calorie bit byte mole "
    "electronvolt ton"
)
# Prefixes are spelled out: of symbols, `mW` and `MW` are one word without their case.
_PREFIXES = "pico nano micro milli centi deci kilo mega giga tera"
# Other spellings and symbols that are one unit in any case, each before its name.
_OTHERS = (
    "m=meter in=inch inch=inch inches=inch ft=foot foot=foot feet=foot yd=yard mi=mile "
    "mm=millimeter cm=centimeter dm=decimeter km=kilometer nm=nanometer ha=hectare g=gram "
    "mg=milligram kg=kilogram oz=ounce lb=pound lbs=pound stone=stone tonne=ton tonnes=ton "
    "l=liter ml=milliliter cl=centiliter dl=deciliter tsp=teaspoon tbsp=tablespoon pt=pint "
    "qt=quart gal=gallon s=second sec=second secs=second ms=millisecond ns=nanosecond "
    "min=minute mins=minute h=hour hr=hour hrs=hour wk=week yr=year yrs=year century=century "
    "centuries=century millennium=millennium millennia=millennium w=watt kw=kilowatt "
    "hp=horsepower horsepower=horsepower j=joule kj=kilojoule cal=calorie kcal=kilocalorie "
    "ev=electronvolt n=newton kn=kilonewton kpa=kilopascal atm=atmosphere psi=psi v=volt "
    "kv=kilovolt amp=ampere amps=ampere henry=henry henries=henry hz=hertz hertz=hertz "
    "khz=kilohertz ghz=gigahertz rpm=rpm db=decibel lux=lux mol=mole celsius=celsius "
    "fahrenheit=fahrenheit kb=kilobyte mb=megabyte gb=gigabyte tb=terabyte penny=penny "
    "pennies=penny pence=penny eur=euro gbp=pound|sterling sterling=sterling yen=yen jpy=yen "
    "yuan=yuan won=won krone=krone kroner=krone rad=radian mph=mile/hour kph=kilometer/hour "
    "kmh=kilometer/hour mpg=mile/gallon kwh=kilowatt|hour mah=milliampere|hour "
    f"percent={PERCENT} deg={DEGREE} usd={DOLLAR} pa=pascal lm=lumen btu=btu baht=baht ac=acre"
)
_UNIT_OF = {spelling: unit for unit in _REGULAR.split() for spelling in (unit, f"{unit}s")}
_UNIT_OF |= {
    prefix + spelling: prefix + unit
    for prefix in _PREFIXES.split()
    for unit in _PREFIXED.split()
    for spelling in (unit, f"{unit}s")
}
for _entry in _OTHERS.split():
    _spelling, _, _unit = _entry.partition("=")
    _UNIT_OF[_spelling] = _unit.replace("|", " ")
# The only ones of two letters that are no product of letters in plain words: `2 pt`.
_PLAIN_SYMBOLS = frozenset({"mm", "cm", "km", "in", "ft", "yd", "mi", "kg", "oz", "lb", "ml", "hr"})
# Words that make another unit of the one behind them: `nautical miles`.
_KINDS = frozenset({"nautical", "light", "metric", "fluid", "fl", "troy", "board"})
_POWERS = {"square": 2, "sq": 2, "squared": 2, "^2": 2, "cubic": 3, "cu": 3, "cubed": 3, "^3": 3}
# Words after a number that change its value, or take it back.
NOT_UNITS = frozenset(
    {"and", "else", "if", "is", "less", "minus", "more", "no", "not", "or", "plus", "than", "times"}
    | {"to", "wrong", "pi", "half", "halves", "third", "thirds", "quarter", "quarters", "tenth"}
    | {"tenths", "hundredth", "hundredths", "k", "dozen", "dozens", "hundred", "hundreds"}
    | {"thousand", "thousands", "million", "millions", "billion", "billions", "trillion", "base"}
    | {"maybe", "perhaps", "either", "but", "so", "wait", "divided", "by", "factorial", "x"}
)
# Commands that leave space and say nothing.
SPACE = (
    r"(?:(?<!\\)\\(?:[ ,;:!>]|[hm]space\*?\s?\{[^{}]*\}"
    r"|(?:q?quad|(?:neg)?(?:thin|med|thick)space|enspace|enskip|space)(?![A-Za-z]))|~|\{\})"
)
_SPACES = re.compile(SPACE)
SPACES_BEFORE = re.compile(rf"^(?:{SPACE}|\s)+")
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textup|mbox|operatorname)\s?\{([^{}]*)\}")
_DEGREE_SIGN = re.compile(
    r"^(?:\^\{?\\circ\}?|\u00b0|\\degree)\s*(?:([CF])|\\(?:text|mathrm)\s?\{\s?([CF])\s?\})?$"
)
_HYPHEN = re.compile(r"(?<=[a-z])-(?=[a-z])")
_TOKEN = re.compile(r"[a-z]+|\^[23]|/")
_READABLE = re.compile(r"(?:[a-z]|\^[23]|/|\s)+")


def read_unit(rest: str, *, words: bool) -> str | None:
    r"""Return the unit written after a number, "" for none, or None if it is not a unit.

    `rest` is what follows the number, as `\%`, `^\circ` or `\text{ cm}^2`; with `words` a unit may
    stand outside `\text{}`, too.
    """
    rest = _SPACES.sub(" ", rest).strip()
    if not rest:
        return ""
    if rest in ("%", "\\%"):
        return PERCENT
    if rest != "$" and rest in CURRENCIES:  # an unescaped one is mathematics that ends
        return CURRENCIES[rest]
    rest = _DEGREE_SIGN.sub(_degrees, rest).strip()
    plain, texts = _TEXT.subn(r" \1 ", rest)
    if not texts and not words:
        return None
    plain = re.sub(r"\^\{([23])\}", r"^\1", plain).casefold().replace(".", "")
    plain = _HYPHEN.sub(" ", plain.replace("metre", "meter").replace("litre", "liter"))
    if not _READABLE.fullmatch(plain):
        return None
    tokens = _TOKEN.findall(plain.replace("per cent", "percent"))
    if not tokens or NOT_UNITS.intersection(tokens):
        return None
    letters = {token for token in tokens if len(token) == 1 and token.isalpha()}
    if letters - _UNIT_OF.keys():
        return None
    # Single letters outside `\text{}` are variables: `3m`.
    if not texts and (letters or all(map(_may_be_letters, tokens))):
        return None
    return _named(["/" if token == "per" else token for token in tokens])


def is_known(unit: str) -> bool:
    """Say whether every part of a unit is in the table; `/day` lacks one."""
    return UNKNOWN not in unit and not unit.startswith("/")


def _may_be_letters(token: str) -> bool:
    """Say whether a plain word may be a product of letters, as `pt` and `xyz` are."""
    if len(token) < 3:
        return token not in _PLAIN_SYMBOLS
    return len(token) == 3 and token not in _UNIT_OF


def _degrees(match: re.Match[str]) -> str:
    r"""Return a degree sign in words, with its scale: `^\circ\text{C}`."""
    scale = match.group(1) or match.group(2)
    return "\\text{degrees" + {None: "", "C": " celsius", "F": " fahrenheit"}[scale] + "}"


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
    if words[-1] in _UNIT_OF and all(word in _UNIT_OF or word in _KINDS for word in words):
        name = " ".join(_UNIT_OF.get(word, word) for word in words).replace("fl ", "fluid ")
    else:
        name = UNKNOWN + " ".join(words)
    return name if power == 1 else f"{name}^{power}"
