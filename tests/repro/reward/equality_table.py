r"""What counts as equal, as a table: one row per decision, from which docs/grading.md is written.

A row has a statement and two examples or more, each a gold, an answer and what the strict reading
pays. The corpus (equality.jsonl, beside it) holds more of each row under its name, and the tests of
the graders are loops over both.

Where a row pays what math-verify alone refuses, it says so (`beyond_math_verify`); a test over the
corpus finds no other such place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A gold, an answer, and whether the strict reading pays it."""

    gold: str
    answer: str
    paid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One decision of what counts as equal.

    Attributes
    ----------
    name
        Short and unique; the corpus refers to it.
    rule
        The decision in a sentence, with its reason.
    examples
        At least one.
    beyond_math_verify
        Whether the row pays answers that math-verify alone would refuse.
    """

    name: str
    rule: str
    examples: tuple[Example, ...]
    beyond_math_verify: bool = False


def _row(
    name: str,
    rule: str,
    *,
    gold: str,
    paid: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
    beyond_math_verify: bool = False,
) -> Row:
    """Return a row whose examples share a gold."""
    examples = [Example(gold=gold, answer=answer, paid=True) for answer in paid]
    examples += [Example(gold=gold, answer=answer, paid=False) for answer in refused]
    return Row(
        name=name, rule=rule, examples=tuple(examples), beyond_math_verify=beyond_math_verify
    )


NUMBERS = (
    _row(
        "written number",
        "A number may be spelled with thousands commas, a currency sign, zeros after the point, "
        "or as a decimal times a power of ten; its value must be the gold's exactly.",
        gold="70000",
        paid=("70,000", "70000.00", "7 \\times 10^4"),
        refused=("70001", "-70000", "7,00,00"),
    ),
    _row(
        "arithmetic",
        "Arithmetic is not a number: the policy's task is to do it.",
        gold="18",
        paid=("18",),
        refused=("9+9", "2 \\cdot 9", "36/2", "\\sqrt{324}", "3^2+9"),
    ),
    _row(
        "fraction",
        "A fraction in lowest terms equals the decimal of the same value; its sign may stand "
        "before it, above or below, and brackets around it are dropped. A whole gold takes none.",
        gold="-\\frac{1}{2}",
        paid=("-1/2", "\\frac{-1}{2}", "\\frac{1}{-2}", "-\\cfrac12", "(-1/2)", "-0.5"),
        refused=("\\frac{1}{2}", "-\\frac{2}{4}", "-\\frac{1}{2.0}"),
    ),
    _row(
        "repeating decimal",
        "A bar over digits repeats them without end; a fraction of the same value is another "
        "answer, since turning one into the other is what is asked.",
        gold="0.\\overline{3}",
        paid=("0.\\overline{3}", "0.\\overline{33}"),
        refused=("0.3", "0.333333", "\\frac{1}{3}"),
        beyond_math_verify=True,
    ),
    _row(
        "mixed number",
        "A whole number followed by a proper fraction is their sum.",
        gold="\\frac{7}{2}",
        paid=("3\\frac{1}{2}", "3 1/2", "3.5"),
        refused=("3+\\frac{1}{2}", "2\\frac{3}{2}", "7 \\div 2"),
        beyond_math_verify=True,
    ),
    _row(
        "small number",
        "Nothing is rounded: a small number is not zero.",
        gold="0",
        paid=("0", "0.000"),
        refused=("\\frac{1}{100000000}", "0.00000001", "-10^{-9}"),
    ),
    _row(
        "cut decimal",
        "A gold of more than six decimals was cut there; six decimals are compared, unless it is "
        "below a thousandth.",
        gold="0.6666666666666666",
        paid=("\\frac{2}{3}", "0.666667", "0.66666667"),
        refused=("0.6667", "0.67"),
    ),
    _row(
        "percent",
        "A percent sign is a unit and never a factor: the numbers beside it are compared, and the "
        "sign may be there or not. So each answer has one reading, and a factor of 100 is never "
        "forgiven.",
        gold="35",
        paid=("35\\%", "35%", "35.0\\%", "35\\text{ percent}"),
        refused=("0.35", "3500\\%", "0.35\\%"),
        beyond_math_verify=True,
    ),
    _row(
        "percent in the gold",
        "The same where the gold has the sign.",
        gold="43.75\\%",
        paid=("43.75", "43.75%", "\\frac{175}{4}"),
        refused=("0.4375", "4375", "43.75\\text{ cm}"),
        beyond_math_verify=True,
    ),
    _row(
        "unit",
        "A unit may be left out, or be spelled otherwise; where the gold has one, it must not be "
        "another. Units stand in `\\text{}`, as currency sign, percent or degree sign.",
        gold="18\\text{ cm}^2",
        paid=("18", "18\\text{ square centimeters}", "18 \\text{ sq cm}"),
        refused=("18\\text{ cm}", "18\\text{ m}^2", "9\\cdot 2\\text{ cm}^2", "\\$18"),
    ),
    _row(
        "unit in plain words",
        "A gold may have its unit in plain words; then an answer may, too.",
        gold="12 ounces",
        paid=("12", "12 ounces", "12\\text{ oz}"),
        refused=("12 pounds", "6+6 ounces", "12 or 13 ounces"),
        beyond_math_verify=True,
    ),
    _row(
        "look",
        "Fonts, emphasis, braces and spaces around an answer say nothing; what stands in them is "
        "read by the same rules.",
        gold="12",
        paid=("\\text{12}", "\\mathbf{12}", "{12}", "\\displaystyle 12", "\\,12", "**12**"),
        refused=("\\text{9+3}", "{1}2", "**12** or **13**", "\\text{12 apples}", "**9+3**"),
        beyond_math_verify=True,
    ),
    _row(
        "unit beside a bare gold",
        "A gold without a unit takes any unit of measure, and no other words: those that change "
        "the number are not told from those that do not.",
        gold="18",
        paid=("18\\text{ cm}", "\\$18", "18^\\circ\\text{C}", "18\\text{ acres}", "18\\text{ kWh}"),
        refused=("18\\text{ thousand}", "18\\text{ apples}", "18\\text{ or }19", "18 dollars"),
    ),
    _row(
        "base",
        "A number with a base equals the same digits with the same base; the digits alone are "
        "another number.",
        gold="2516_8",
        paid=("2516_{8}", "2516_8"),
        refused=("2516_9", "2516", "1358", "2500_8+16_8"),
    ),
)
NAMES = (
    _row(
        "name",
        "A name before the answer is dropped: a letter or a label of up to three, an angle, a "
        "function's value. What holds a number on its left is an equation.",
        gold="18",
        paid=("x = 18", "AB = 18", "f(2) = 18", "\\angle ABC = 18^\\circ"),
        refused=("19 = 18", "x = 17 = 18", "x + 1 = 18", "x = 19"),
    ),
    _row(
        "name of several",
        "The same name before every one of several, or their names as a pair.",
        gold="2, 3",
        paid=("x=2, x=3", "x = 2 \\text{ or } x = 3", "x = 3, 2"),
        refused=("x=2, y=3", "x=2", "x=2, x=4"),
    ),
    _row(
        "name of a pair",
        "The letters of a pair before the pair.",
        gold="(3,4)",
        paid=("(x,y)=(3,4)", "(x, y) = (3, 4)"),
        refused=("(x,y)=(4,3)", "x=3, y=4"),
    ),
)
SEVERAL = (
    _row(
        "list",
        "A list or a set has the same members, none missing, none more, in any order.",
        gold="1,2,3",
        paid=("3, 2, 1", "\\{1,2,3\\}", "1, 2 \\text{ and } 3"),
        refused=("1,2", "1,2,3,4", "(1,2,3)", "1,2,2,3", "6"),
    ),
    _row(
        "ordered",
        "A pair, a tuple or an interval has the same brackets and the same order.",
        gold="(3,4)",
        paid=("(3, 4)", "\\left(3,4\\right)", "(3.0,4)"),
        refused=("3,4", "(4,3)", "[3,4]", "\\{3,4\\}"),
    ),
    _row(
        "plus or minus",
        "`\\pm` names both values.",
        gold="3, -3",
        paid=("\\pm 3", "-3, 3"),
        refused=("3", "-3", "\\pm 4"),
    ),
    _row(
        "inequality",
        "An inequality has the same sides, perhaps exchanged, or is written as its interval; two "
        "numbers are no range.",
        gold="1<x<2",
        paid=("1 < x < 2", "(1,2)"),
        refused=("1, 2", "\\{1,2\\}", "[1,2]", "x<2"),
    ),
)
FORMULAS = (
    _row(
        "one formula",
        "An answer is one formula: no sentence, no second guess, no word that the gold lacks.",
        gold="x+1",
        paid=("1+x", "$x+1$"),
        refused=(
            "It is not $x+1$. Hm",
            "Either $x+2$. Or $x+1$. So",
            "x+2 \\text{ or } x+1",
            "x+1, x+2",
            "x+2 = x+1",
        ),
    ),
    _row(
        "letters and functions",
        "It has the gold's letters and functions and no others.",
        gold="2n",
        paid=("2n", "n \\cdot 2"),
        refused=("2n + x - x", "\\lfloor 2n \\rfloor", "\\gcd(2n, 2n)", "2m"),
    ),
    _row(
        "roots",
        "Roots are drawn and denominators free of them, if they are so in the gold: else "
        "restating the question is paid.",
        gold="11\\sqrt{2}",
        paid=("\\sqrt{2} \\cdot 11",),
        refused=("\\sqrt{242}", "\\sqrt{2 \\cdot 121}", "\\frac{22}{\\sqrt{2}}"),
    ),
    _row(
        "expanded and factored",
        "What the gold has expanded is expanded, and what it has factored is factored.",
        gold="x^2+2x+1",
        paid=("2x + x^2 + 1",),
        refused=("(x+1)^2", "(x+1)(x+1)", "x(x+2)+1"),
    ),
    _row(
        "like terms",
        "Like terms, powers of one base and numbers are brought together.",
        gold="6x^5",
        paid=("6 \\cdot x^5",),
        refused=("2x^2 \\cdot 3x^3", "4x^5+2x^5", "3 \\cdot 2x^5", "\\frac{12}{2}x^5"),
    ),
    _row(
        "length",
        "An answer is not longer than the gold, counted in letters, numbers and functions.",
        gold="\\frac{x+1}{2}",
        paid=("\\frac{1+x}{2}",),
        refused=("\\frac{2x+2}{4}", "\\frac{x^2-1}{2x-2}"),
    ),
    _row(
        "unit of a formula",
        "The rule for units holds for formulas, too.",
        gold="10\\sqrt{3}\\text{ cm}",
        paid=("10\\sqrt{3}", "10\\sqrt{3}\\text{ centimeters}"),
        refused=("10\\sqrt{3}\\text{ m}", "10\\sqrt{3}\\text{ cm}^2", "10\\sqrt{3}\\text{ maybe}"),
    ),
    _row(
        "exact formula",
        "A decimal near an exact value is not that value.",
        gold="\\frac{\\pi}{4}",
        paid=("\\frac{1}{4}\\pi", "0.25\\pi"),
        refused=("0.785398163397", "0.2500000001\\pi"),
    ),
    _row(
        "tiny formula",
        "However small both are: rational numbers are compared exactly, others to 30 digits of "
        "the gold's value.",
        gold="1-2^{-200}",
        paid=("-2^{-200}+1",),
        refused=("1-2^{-201}", "1", "1-2^{-200}\\pi"),
    ),
    _row(
        "matrix",
        "A matrix has the same entries in the same places, in round or square brackets; a "
        "determinant is another thing.",
        gold="\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        paid=("\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}",),
        refused=(
            "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}",
            "\\begin{bmatrix} 1 & 3 \\\\ 2 & 4 \\end{bmatrix}",
        ),
    ),
    _row(
        "equation",
        "An equation has the same sides, perhaps exchanged; moving a term across is work. The "
        "name on its left may be missing.",
        gold="y=2x+1",
        paid=("y = 1 + 2x", "2x+1", "2x+1 = y"),
        refused=("2x-y+1=0", "2y=4x+2", "x=2x+1"),
    ),
)
WORDS = (
    _row(
        "words",
        "Words are compared as words, letter by letter, whatever their case; a choice's letter "
        "may have brackets.",
        gold="\\text{(A)}",
        paid=("A", "(A)", "\\text{A}"),
        refused=("B", "\\text{A or B}", "A, B"),
    ),
    _row(
        "words are no product",
        "Letters in another order are another word.",
        gold="Monday",
        paid=("monday", "\\text{Monday}"),
        refused=("Mondya", "not Monday", "Monday or Tuesday"),
        beyond_math_verify=True,
    ),
    _row(
        "colon",
        "A time or a ratio is compared as it is written.",
        gold="3:4",
        paid=("3 : 4",),
        refused=("6:8", "0.75", "4:3"),
    ),
)
ROWS: tuple[Row, ...] = (*NUMBERS, *NAMES, *SEVERAL, *FORMULAS, *WORDS)
