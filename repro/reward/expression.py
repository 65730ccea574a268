r"""Which answers may be compared with a gold at all, before any algebra is done.

math-verify is made to be generous: asked about gold 18 it accepts `9+9`, `36/2` and `19 = 18`, it
reads `2516_9` as 2516 and `It is not $x+1$. Hm` as `x+1`, and from loose text it takes the last
number it finds. Under reinforcement learning such generosity is found and used: a policy that
writes `9+9` has moved the arithmetic into the grader. docs/grading.md says what counts as equal,
row by row; each rule here can only refuse.

A gold is one of these, tried in order:

* words (`\text{Evelyn}`), or anything with a colon (`12:30`, `3:4`): compared as text;
* a number with a base: the digits and the base must be the same number and the same base;
* a written number (`quantities`): compared exactly, with its unit;
* several things: a set or list in any order, or an ordered pair, tuple or interval with its
  brackets; written numbers inside are compared exactly;
* any other formula: what is left over for math-verify, if the answer is one formula of the gold's
  own letters and functions.

A name before an answer (`x = 18`, `AB = 18`, `f(2) = 18`, `(x,y) = (3,4)`) is dropped.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from fractions import Fraction

from repro.reward.quantities import (
    Quantity,
    read_based,
    read_quantity,
    same_quantity,
    with_unit_marked,
)
from repro.reward.units import SPACE, SPACES_BEFORE, is_known, read_unit

_WRAPPERS = (
    *(("\\boxed{", "}"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("{", "}")),
    *(("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`")),
)
_MOST_WRAPPERS = 16
# How a text looks and not what it says: fonts, sizes, and the last space, such as `\,`.
_FONT = re.compile(
    r"\\(?:math(?:bf|it|sf|tt)|boldsymbol|bm|underline)\s?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_STYLE = re.compile(
    r"\\(?:(?:display|text|script)style|large|Large|huge|Huge|bf|bfseries|rm|it)(?![A-Za-z])\s?"
)
_SPACE_AFTER = re.compile(r"(?:\\[,;:!]|(?<!\\)\\|\\q?quad|~|(?<![A-Za-z}])\{\})\s*$")
# Dashes and signs that are written for minus and plus, and currencies that are written out.
_ASCII_SIGNS = {ord(sign): "-" for sign in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"}
_ASCII_SIGNS |= {ord(sign): "-" for sign in "\u02d7\u2043\u2796\ufe58\ufe63\uff0d"}
_ASCII_SIGNS |= {ord(sign): "+" for sign in "\u2795\ufe62\uff0b"}
_ASCII_SIGNS |= {ord(sign): " " for sign in "\u00a0\u2007\u2009\u200a\u202f\u3000"}
# Mathematics in Unicode as LaTeX spells it.
_ASCII_SIGNS |= {
    ord(sign): f"\\{name} "
    for sign, name in {"π": "pi", "∞": "infty", "±": "pm", "≤": "le", "≥": "ge"}.items()
}
for _sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞":
    _above, _below = unicodedata.normalize("NFKD", _sign).split("\u2044")
    _ASCII_SIGNS[ord(_sign)] = rf"\frac{{{_above}}}{{{_below}}}"
_RAISED = re.compile(r"(?<=[\w)}\]])[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]+")
_ROOT = re.compile(r"√\s?(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_MINUS = re.compile(r"\\(?:text)?minus(?![A-Za-z])\s?|\\text\s?\{\s?-\s?\}|\{-\}")
_WRITTEN_OUT = {
    "dollar": "\\$",
    "euro": "\u20ac",
    "yen": "\u00a5",
    "cent": "\u00a2",
    "sterling": "\u00a3",
    "pounds": "\u00a3",
}
_SIGN_COMMANDS = re.compile(rf"\\(?:text|math)?({'|'.join(_WRITTEN_OUT)})(?![A-Za-z])\s?")
_SIGN_IN_TEXT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\s?\{\s*((?:[A-Z]{1,2})?\s?(?:\\?\$|[\u00a2-\u00a5\u20a0-\u20bf\u0e3f])"
    r"|(?:USD|EUR|GBP|JPY|INR|CHF|CNY|Rs)\.?(?=\s*\}\s*[0-9]))\s*\}"
)
_BARE_DOLLAR = re.compile(r"(?<![A-Za-z\\$])([A-Z]{1,2})\s?\$(?=\s?[0-9])")
# Digits in groups of three, and space of any width, within a formula.
_GROUPED = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9]{3}(?![0-9]))")
_SPACED = re.compile(SPACE)
_ARRAY = re.compile(
    r"(?:(\()|\[)\s*\\begin\{(array|matrix)\}(?:\{[lcr]+\})?"
    r"((?:(?!\\begin).)*?)\\end\{\2\}\s*(?(1)\)|\])",
    re.DOTALL,
)
_LETTER_BEFORE = re.compile(r"^\{([A-Za-z])\}(?=\s?=)")
_GREEK = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|omega|Delta|Omega)\b\s?"
_LABEL = rf"(?:[A-Za-z]{{1,3}}|{_GREEK}|\\(?:overline|vec|mathrm|text)\s?\{{[A-Za-z]{{1,3}}\}})"
_NAME_BEFORE = re.compile(
    rf"((?:m\s?)?(?:\\angle\s?)?{_LABEL}(?:_(?:[0-9A-Za-z]|\{{[0-9A-Za-z]{{1,3}}\}}))?"
    r"(?:\^\{-1\})?'?(?:\([^()=<>]{1,12}\))?"
    r"|\([A-Za-z](?:\s?,\s?[A-Za-z]){1,4}\))\s?=\s?"
)
_NAME_AFTER = re.compile(r"([^=<>]*[^=<>!\\\s])\s?=\s?([A-Za-z])")
_MEMBER = re.compile(r"[A-Za-z]\s?\\in\s?(?=[\[({\\])")
_EQUALS = re.compile(r"(?<![<>!\\])=")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]t)\b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|up)?|emph|mathrm|mbox|operatorname)\s?\{([^{}]*)\}")
_UNIT_AT_END = re.compile(
    r"(?<=[0-9A-Za-z)}])\s?\\(?:text|textrm|mbox)\s?\{[^{}]*\}(?:\^\{?[23]\}?)?$"
)
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s?")
_JOINING = re.compile(r"(?:,\s?)?(?:\\text\s?\{\s?(?:and|or)\s?\}|\s(?:and|or)\s)")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
# Commands that spell a formula and compute nothing.
_SPELLING = frozenset(
    {"frac", "dfrac", "tfrac", "cfrac", "sqrt", "cdot", "times", "pi", "infty", "cup", "in", "dots"}
    | {"text", "mathrm", "mbox", "quad", "displaystyle", "le", "leq", "ge", "geq", "lt", "gt"}
    | {"begin", "end", "circ", "degree"}
)
# Signs that a formula holds only if the gold does.
_SIGNS = frozenset("?!;:|%'\"&@#`~_\n")
_LOOSE_STOP = re.compile(r"\.(?![0-9])")
_PLAIN_FRACTION = re.compile(
    r"\\[cdt]?frac\s?(?:\{([0-9]+)\}|([0-9]))\s?(?:\{([0-9]+)\}|([0-9]))"
    r"|(?<![0-9.)}])([0-9]+)\s?/\s?([0-9]+)(?![0-9.])"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "all", "one", "two", "six", "ten"})
_LETTERS = re.compile(r"\(?([A-Za-z]{1,3})\)?")
_SINGLE = re.compile(r"\(?([A-Za-z])\)?")

# Gold and answer as they are to be compared by math-verify.
Forms = tuple[str, str]


# Completions repeat each other's claims.
@functools.lru_cache(maxsize=16_384)
def tidy(text: str) -> str:
    r"""Return the text without space, mathematics signs, box, emphasis and full stop around it.

    Signs, roots, powers and fractions of Unicode become LaTeX, a font's content stays in its
    braces, and a number in `\text{}` comes out of it; nothing inside is changed otherwise.
    """
    text = _RAISED.sub(_as_power, text)
    text = _ROOT.sub(r"\\sqrt{\1\2}", text.translate(_ASCII_SIGNS))
    text = _BARE_DOLLAR.sub(r"\1\\$", text).strip()
    if "\\" in text or "{" in text:
        text = _SIGN_COMMANDS.sub(lambda match: _WRITTEN_OUT[match[1]], _MINUS.sub("-", text))
        text = _SIGN_IN_TEXT.sub(r"\1 ", text)
        text = _LETTER_BEFORE.sub(r"\1", _STYLE.sub(" ", _FONT.sub(r"{\1}", text)))
    for _ in range(_MOST_WRAPPERS):
        before, text = text, _SPACE_AFTER.sub("", SPACES_BEFORE.sub("", text)).strip()
        text = _number_in_words(text)
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and _is_whole(inner, opening)
            ):
                text = inner.strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].strip()
        if text == before:
            break
    return text


def _as_power(match: re.Match[str]) -> str:
    """Return `^2` for a raised 2, and `^{12}` for more signs than one."""
    plain = unicodedata.normalize("NFKD", match[0])
    return f"^{plain}" if len(plain) == 1 else f"^{{{plain}}}"


def _number_in_words(text: str) -> str:
    r"""Return `12` for `\text{12}`, and `12\text{ cm}` for `\text{12 cm}`."""
    match = _TEXT.fullmatch(text)
    inner = match.group(1).strip().rstrip(".") if match else ""
    number = read_quantity(inner, words=True)
    return with_unit_marked(inner) if number and is_known(number.unit) else text


def comparable(gold: str, answer: str) -> Forms | None:
    """Return gold and answer in the forms to compare, or None if they may not be compared.

    Both are tidied. A gold that may not be compared with itself can never be paid.
    """
    if not (_is_clean(gold) and _is_clean(answer)):
        return None
    gold_name, gold = _without_name(_with_pmatrix(_SIZES.sub("", gold)))
    name, answer = _without_name(_with_pmatrix(_SIZES.sub("", answer)))
    if not gold or not answer or (name and gold_name and name != gold_name):
        return None
    letters = _letters_alone(gold)
    if letters and _letters_alone(answer) == letters:
        return _as_text(letters)
    words = _words(gold)
    if words is not None:
        return _as_text(words) if _words(answer, loosely=True) == words else None
    if ":" in gold:
        return _as_text(gold) if "".join(gold.split()) == "".join(answer.split()) else None
    based = read_based(gold)
    if based is not None:
        return (str(based[0]), str(based[0])) if read_based(answer) == based else None
    number = read_quantity(gold, words=True)
    if number is not None:
        alone = answer[1:-1] if answer.startswith("(") and answer.endswith(")") else answer
        return _as_numbers([number], [alone], gold, ordered=True)
    return _as_formula(gold, answer)


def _with_pmatrix(text: str) -> str:
    """Return the text with its matrices, and its arrays in brackets, in round brackets."""
    text = text.replace("{bmatrix}", "{pmatrix}")
    return _ARRAY.sub(r"\\begin{pmatrix}\3\\end{pmatrix}", text)


def is_readable(text: str) -> bool:
    """Say whether a tidied text could be an answer of numbers or a formula, rather than prose."""
    _, text = _without_name(_SIZES.sub("", text))
    return _is_clean(text) and (
        read_quantity(text, words=True) is not None
        or not re.search(r"[A-Za-z]{3,}|[?!;$]", _COMMAND.sub("", _TEXT.sub("", text)))
    )


def braces_balance(text: str) -> bool:
    """Say whether every `}` closes an earlier `{` and none is left open."""
    depth = 0
    for sign in re.findall(r"\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth < 0:
            return False
    return depth == 0


def _is_clean(text: str) -> bool:
    """Say whether a text is encodable, balanced, and opens no box of its own."""
    return (
        bool(text)
        and not _CONTROL.search(text)
        and braces_balance(text)
        and "boxed" not in text
        and "$" not in text.replace("\\$", "").removeprefix("$").removeprefix("-$")
    )


def _is_whole(inner: str, opening: str) -> bool:
    """Say whether a wrapper's two ends belong together rather than to two wrapped pieces."""
    if opening[-1] == "{":
        return braces_balance(inner)
    return opening not in inner.replace("\\$", "") and not inner.endswith("\\")


def _without_name(text: str) -> tuple[str, str]:
    """Return the name before an answer, "" for none, and the answer.

    `x = 2, x = 3` is `2, 3`; an answer with several names keeps them.
    """
    match = _NAME_BEFORE.match(text) or _MEMBER.match(text)
    if match is None:
        swapped = _NAME_AFTER.fullmatch(text)
        return (swapped.group(2), swapped.group(1)) if swapped else ("", text)
    name = match.group(1).replace(" ", "") if match.re is _NAME_BEFORE else ""
    rest = text[match.end() :]
    if not name or not _EQUALS.search(rest):
        return name, rest
    parts, brackets = pieces(text)
    named = [_NAME_BEFORE.match(part) for part in parts]
    if brackets or any(one is None or one.group(1).replace(" ", "") != name for one in named):
        return ("", text) if len(parts) > 1 else (name, rest)
    plain = [part[one.end() :] for part, one in zip(parts, named, strict=True) if one is not None]
    return name, ", ".join(plain)


def _words(text: str, *, loosely: bool = False) -> str | None:
    r"""Return the words that a text is, in one spelling, or None if it is no words.

    With `loosely` a single letter is words as well, as an answer to `\text{(A)}`.
    """
    match = _TEXT.fullmatch(text)
    plain = " ".join((match.group(1) if match else text).split()).rstrip(".")
    single = _SINGLE.fullmatch(plain)
    if single and (match or loosely):
        return single.group(1).casefold()
    if match and plain and read_quantity(plain) is None:
        return plain.casefold()
    if not _WORDS.fullmatch(plain):
        return None
    # Up to three letters are a product of variables, such as `xyz`, unless they are a known word.
    is_word = re.search("[A-Za-z]{4}", plain) or plain.casefold() in _SHORT_WORDS
    return plain.casefold() if is_word else None


def _letters_alone(text: str) -> str | None:
    r"""Return the letters that a text is, in words or brackets or bare, or None: `\text{(B)}`."""
    match = _TEXT.fullmatch(text)
    single = _LETTERS.fullmatch((match.group(1) if match else text).strip().rstrip("."))
    return single.group(1) if single else None


def _as_text(text: str) -> Forms:
    """Return words twice, as a symbol that math-verify compares letter by letter."""
    symbol = f"\\text{{w{''.join(format(ord(sign), 'x') for sign in text)[:400]}}}"
    return symbol, symbol


def _as_numbers(
    golds: list[Quantity], answers: list[str], gold: str, *, ordered: bool
) -> Forms | None:
    """Return the plain numbers of a gold twice, if the answers are the same, else None.

    Units in plain words are read where the gold has them.
    """
    words = re.search(r"[0-9]\s?[A-Za-z]", gold) is not None
    read = [read_quantity(answer, words=words) for answer in answers]
    if len(read) != len(golds) or not all(read):
        return None
    pairs = [one for one in read if one is not None]
    if not ordered:
        golds = sorted(golds, key=lambda one: one.value)
        pairs.sort(key=lambda one: one.value)
    if not all(same_quantity(a, b) for a, b in zip(golds, pairs, strict=True)):
        return None
    plain = ", ".join(_plain(one.value) for one in golds)
    return plain, plain


def _plain(value: Fraction) -> str:
    """Return a number in the spelling that math-verify is given."""
    whole = value.denominator == 1
    return str(value.numerator) if whole else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _as_formula(gold: str, answer: str) -> Forms | None:
    """Return a gold that is no number, and the answer, or None; see the module's list."""
    gold, gold_unit = _without_unit(_SPACED.sub(" ", _GROUPED.sub("", gold)))
    answer, unit = _without_unit(_SPACED.sub(" ", _GROUPED.sub("", answer)))
    if unit and unit != gold_unit and (gold_unit or not is_known(unit)):
        return None
    if bool(_EQUALS.search(gold)) is not bool(_EQUALS.search(answer)):
        return None
    gold_pieces, gold_brackets = pieces(gold)
    answer_pieces, brackets = pieces(answer)
    is_range = _INEQUALITY.search(answer) or "(" in answer or "[" in answer
    if _INEQUALITY.search(gold):
        if not is_range:
            return None
    elif gold_brackets != brackets or len(gold_pieces) != len(answer_pieces):
        return None
    numbers = [read_quantity(piece) for piece in gold_pieces]
    if len(numbers) > 1 and all(numbers) and not _INEQUALITY.search(gold):
        written = [one for one in numbers if one is not None]
        forms = _as_numbers(written, answer_pieces, gold, ordered=bool(gold_brackets))
        if forms is None:
            return None
        return (gold, gold) if gold_brackets else forms
    if not gold_brackets and not brackets:
        gold, answer = ", ".join(gold_pieces), ", ".join(answer_pieces)
    return (gold, answer) if _spelled_like(gold, answer) else None


def _without_unit(text: str) -> Forms:
    """Return a formula without the unit at its end, and that unit, "" for none."""
    match = _UNIT_AT_END.search(text)
    unit = read_unit(match.group(), words=False) if match else None
    return (text[: match.start()].rstrip(), unit) if match and unit else (text, "")


def pieces(text: str) -> tuple[list[str], str]:
    r"""Return the things that a text lists, and the brackets that give them an order.

    A set, a list, and things joined by `and` have none (""); `\pm` makes two of one. A pair or an
    interval has its brackets, such as `()` or `[)`.
    """
    inside, brackets = text, ""
    if text.startswith("\\{") and text.endswith("\\}") and _closes_last(text):
        inside = text[2:-2]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_last(text):
        if len(_split(text[1:-1])) > 1:
            return _split(text[1:-1]), text[0] + text[-1]
    else:
        inside = _JOINING.sub(", ", text)
    parts = [both for part in _split(inside) for both in _both_signs(part)]
    return parts, brackets


def _both_signs(part: str) -> list[str]:
    r"""Return `+3` and `-3` for `\pm 3`."""
    if part.count("\\pm") != 1:
        return [part]
    before, after = part.split("\\pm")
    plus = f"{before}+{after.lstrip()}" if before.strip() else after.strip()
    return [plus, f"{before}-{after.lstrip()}"]


def _split(text: str) -> list[str]:
    """Return the parts between the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    if read_quantity(text) is not None:
        return [text.strip()]
    for match in re.finditer(r"\\[,!]|[()\[\]{},]", text):
        sign = match.group()
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _closes_last(text: str) -> bool:
    """Say whether the first bracket of a text closes with its last."""
    return end_of_bracket(text, 0, r"[()\[\]{}]") == len(text)


def end_of_bracket(text: str, start: int, brackets: str, depth: int = 0) -> int:
    """Return the place behind the bracket that closes the first from `start`, 0 for none.

    `brackets` is a pattern of those that count, `depth` how many are open at `start`.
    """
    for match in re.compile(brackets).finditer(text, start):
        depth += 1 if match.group() in "([{" else -1
        if depth == 0:
            return match.end()
    return 0


def _spelled_like(gold: str, answer: str) -> bool:
    """Say whether an answer is one formula made of what the gold is made of."""
    commands = Counter(_COMMAND.findall(_TEXT.sub("", answer)))
    extra = commands - Counter(_COMMAND.findall(_TEXT.sub("", gold)))
    if set(extra) - _SPELLING:
        return False
    if not set(_letters(answer)) <= set(_letters(gold)):
        return False
    texts = {" ".join(text.split()).casefold() for text in _TEXT.findall(gold)}
    for text in _TEXT.findall(answer):
        if " ".join(text.split()).casefold() not in texts:
            return False
    if {sign for sign in answer if sign in _SIGNS or not sign.isascii()} - set(gold):
        return False
    if _LOOSE_STOP.search(answer) and not _LOOSE_STOP.search(gold):
        return False
    return _unreduced(answer) <= _unreduced(gold)


def _letters(text: str) -> str:
    """Return the letters of a formula that are not part of a command or of words."""
    return re.sub("[^A-Za-z]", "", _COMMAND.sub(" ", _TEXT.sub(" ", text)))


def _unreduced(text: str) -> int:
    """Count the fractions of two whole numbers that could be cancelled, or are whole."""
    count = 0
    for match in _PLAIN_FRACTION.finditer(text):
        top, bottom = (int(group) for group in match.groups() if group is not None)
        count += bottom in (0, 1) or Fraction(top, bottom).denominator != bottom
    return count
