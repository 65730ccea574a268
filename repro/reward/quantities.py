r"""Written numbers, read exactly: `\$1{,}250.50`, `-\frac{3}{4}`, `3\frac12`, `18\text{ cm}`.

A written number is a decimal, a fraction or a mixed number, perhaps times a power of ten, with a
sign, a currency and a unit. Arithmetic is not a written number (`9+9`, `2^{10}`, `36/2/1`). Values
are exact fractions; nothing is rounded while reading.

Digits are ASCII digits: `\d` would match 18 in any script, and `int` would read it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Literal

from repro.reward.units import CURRENCIES, DOLLAR, SPACE, SPACES_BEFORE, is_known, read_unit

Form = Literal["whole", "decimal", "repeating", "fraction", "mixed"]

_MOST_CHARACTERS = 400
_MOST_BASED_CHARACTERS = 80
# Golds with more decimals than this stand for a number that was cut there, such as 2/3.
_EXACT_DECIMALS = 6
_WHOLE = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|,\\!|\\,)[0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(rf"({_WHOLE})?(?:\.([0-9]+))?")
_REPEATING = re.compile(r"([0-9]+)\.([0-9]*)\\overline\{([0-9]+)\}")
_POWER = re.compile(r"\s?(?:\\times|\\cdot)\s?10\^(?:([0-9])|\{(-?[0-9]{1,3})\})")
_PART = r"(?:\{\s?(-?[0-9]+)\s?\}|([0-9]))"
_FRACTION = re.compile(rf"\\[cdt]?frac\s?{_PART}\s?{_PART}")
_SLASH = re.compile(r"([0-9]+)\s?/\s?([0-9]+)")
_MIXED = re.compile(r"([0-9]+)(?:\s|\\,|\\ )?(?=\\[cdt]?frac)|([0-9]+)\s(?=[0-9]+\s?/)")
# Whose dollar it is; in front of another sign there is nothing.
_WHOSE = {"US": DOLLAR, "R": "real"} | {
    letters: f"{letters} dollar" for letters in ("A", "AU", "C", "CA", "HK", "NT", "NZ", "S", "SG")
}
_CODES = {"USD": DOLLAR, "EUR": "euro", "GBP": "pound sterling", "JPY": "yen", "INR": "rupee"}
_CODES |= {"Rs": "rupee", "CHF": "franc", "CNY": "yuan"}
_SIGNS = "".join(sign for sign in CURRENCIES if len(sign) == 1 and sign != "$")
_CURRENCY = re.compile(
    rf"(?:(?:({'|'.join(_WHOSE)})\s?)?(\\?\$)|([{_SIGNS}])|({'|'.join(_CODES)})\.?(?=[\s~\\0-9]))"
    rf"(?:{SPACE}|\s)*"
)
_MARKED_UNIT = re.compile(rf"(?:{SPACE}|\s)*" r"\\(?:text|mathrm|mbox)[a-z]*\s?\{[^{}]*\}$")
_PLAIN_UNIT = re.compile(r"(.*?[0-9}])\s*([A-Za-z][^\\{}]*)")
_BRACED = re.compile(r"^\{\s?([0-9.,]+)\s?\}(?![0-9.,{])")
_BASED = re.compile(r"(-?[0-9A-Za-z]*[0-9][0-9A-Za-z]*)_(?:\{\s?([0-9]{1,2})\s?\}|([0-9]))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A written number by its exact value, without the unit: `35%` has 35.

    A decimal whose `decimals` are all zero is of the form `whole`. `unit` is the name of its unit
    or currency, "" for none. `reduced` is False for a fraction that could be cancelled or is a
    whole number.
    """

    value: Fraction
    form: Form
    decimals: int
    unit: str
    reduced: bool


# Answers to a problem are few, and each is read with every gold that it is compared with.
@functools.lru_cache(maxsize=16_384)
def read_quantity(text: str, *, words: bool = False) -> Quantity | None:
    """Return the number that a tidied text is, or None if it is anything else.

    With `words` its unit may stand in plain words, as in `18 cm`.
    """
    if not text or len(text) > _MOST_CHARACTERS:
        return None
    sign, rest = _signed(text)
    unit = ""
    currency = _CURRENCY.match(rest)
    if currency:
        whose, dollar, sign_alone, code = currency.groups()
        unit = _CODES[code] if code else CURRENCIES[sign_alone] if sign_alone else DOLLAR
        unit = _WHOSE[whose] if dollar and whose else unit
        second, rest = _signed(rest[currency.end() :])
        if second != 1 and sign != 1:
            return None
        sign *= second
    # A font leaves a number in braces; a digit after them would be another number.
    rest = _BRACED.sub(r"\1", rest, count=1)
    body = _mixed(rest) or _fraction(rest) or _decimal(rest)
    if body is None:
        return None
    value, form, decimals, reduced, end = body
    behind = rest[end:].strip().removesuffix(".")
    written = _CODES.get(behind) or read_unit(rest[end:], words=words)
    if written is None:
        return None
    if unit and written.startswith("/"):
        written = unit + written
    if unit and written and written.split("/")[0] != unit:
        return None
    return Quantity(
        value=sign * value, form=form, decimals=decimals, unit=written or unit, reduced=reduced
    )


def with_unit_marked(text: str) -> str:
    r"""Return `18\text{ cm}` for `18 cm`, and `18` where the words after it are no known unit."""
    read = read_quantity(text, words=True)
    if read is not None and not is_known(read.unit) and (marked := _MARKED_UNIT.search(text)):
        return text[: marked.start()]
    # Only a text that was read is short enough to be split in all ways.
    split = None if read is None else _PLAIN_UNIT.fullmatch(text)
    if read is None or split is None or read_quantity(text) is not None:
        return text
    return f"{split.group(1)}\\text{{ {split.group(2)}}}" if is_known(read.unit) else split.group(1)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Say whether an answer is paid for a gold, both being written numbers; see docs/grading.md."""
    if answer.unit and answer.unit != gold.unit and (gold.unit or not is_known(answer.unit)):
        return False
    if not answer.reduced and gold.reduced:
        return False
    if gold.form == "whole" and answer.form in ("fraction", "mixed"):
        return False
    # Turning one into the other is what such a problem asks for.
    if (gold.form == "repeating") != (answer.form == "repeating"):
        return False
    return gold.value == answer.value or _same_when_cut(gold, answer)


def read_based(text: str) -> tuple[int, int] | None:
    """Return value and base of a number with a base (`2516_8`), or None if it is none."""
    match = _BASED.fullmatch(text) if len(text) <= _MOST_BASED_CHARACTERS else None
    if match is None:
        return None
    base = int(match.group(2) or match.group(3))
    try:
        return int(match.group(1), base), base
    except ValueError:
        return None


def _same_when_cut(gold: Quantity, answer: Quantity) -> bool:
    """Say whether both agree to six decimals, where the gold is a decimal cut after more."""
    if gold.form != "decimal" or gold.decimals <= _EXACT_DECIMALS:
        return False
    rounded = round(gold.value, _EXACT_DECIMALS)
    # Few significant digits are left of a small gold: it is taken as it is written.
    if abs(rounded) < Fraction(1, 1000):
        return False
    return rounded == round(answer.value, _EXACT_DECIMALS)


def _signed(text: str) -> tuple[int, str]:
    """Return 1 or -1, and the text without its sign."""
    if text[:1] in ("-", "+"):
        return (-1 if text[0] == "-" else 1), SPACES_BEFORE.sub("", text[1:])
    return 1, text


_Body = tuple[Fraction, Form, int, bool, int]


def _mixed(text: str) -> _Body | None:
    """Return a mixed number's value and end, or None; its fraction is positive and below 1."""
    whole = _MIXED.match(text)
    if whole is None:
        return None
    part = _fraction(text[whole.end() :])
    if part is None or not 0 < part[0] < 1:
        return None
    value = int(whole.group(1) or whole.group(2)) + part[0]
    return value, "mixed", 0, part[3], whole.end() + part[4]


def _fraction(text: str) -> _Body | None:
    """Return a fraction's value and end, or None."""
    match = _FRACTION.match(text) or _SLASH.match(text)
    if match is None:
        return None
    top, bottom = (int(group) for group in match.groups() if group is not None)
    if bottom == 0:
        return None
    reduced = gcd(top, bottom) == 1 and abs(bottom) != 1
    return Fraction(top, bottom), "fraction", 0, reduced, match.end()


def _decimal(text: str) -> _Body | None:
    """Return the value and end of a decimal, perhaps times a power of ten, or None."""
    match = _REPEATING.match(text)
    if match:
        whole, fixed, repeat = match.groups()
        places = len(fixed)
        value = Fraction(int(whole + fixed), 10**places)
        value += Fraction(int(repeat), 10**places * (10 ** len(repeat) - 1))
        return value, "repeating", 0, True, match.end()
    match = _DECIMAL.match(text)
    if match is None or not match.end():
        return None
    whole, after = re.sub("[^0-9]", "", match.group(1) or "0"), match.group(2) or ""
    value, end = Fraction(int(whole + after), 10 ** len(after)), match.end()
    power = _POWER.match(text, end)
    if power:
        value *= Fraction(10) ** int(power.group(1) or power.group(2))
        end = power.end()
    form: Form = "decimal" if after.strip("0") and value.denominator > 1 else "whole"
    return value, form, len(after), True, end
