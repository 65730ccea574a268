r"""Whether an answer is as finished as its gold: the part of "equal" that algebra does not see.

`\sqrt{242}` equals `11\sqrt{2}`, `(x+1)^2` equals `x^2+2x+1`, and in a problem that says "simplify"
or "expand" the first of each is the question. A grader that does the algebra pays for restating it.
So an equal answer is paid only if, of the expression trees as they are written,

* no work is left undone that the gold has not left undone too: numbers to add, multiply or raise,
  like terms, powers of one base, a root that can be drawn, a root in a denominator;
* it has the gold's sums and products: the same numbers of terms, the same products with sums, the
  same powers of sums, so that what is expanded is not factored, and the reverse;
* it is not longer than the gold, counted in letters, numbers and functions;
* it has the same value: rational numbers exactly, others to 30 digits of the gold, however small it
  is, where math-verify compares six decimals.

Members of sets, pairs, intervals and matrices are each held to the same.

Equations and inequalities are compared side by side, perhaps with their sides exchanged: moving
terms across the sign is work, too.

Nothing here expands or multiplies out, so it is asked before math-verify's algebra. This module
runs in the worker, outside its package, and imports SymPy alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import sympy
from sympy import Add, Float, Mul, Pow, Rational
from sympy.core.relational import Relational
from sympy.logic.boolalg import And

_DIGITS = 40
_CLOSE = Rational(1, 10**30)


def as_finished(gold: Any, answer: Any) -> bool:
    """Say whether an answer may equal the gold and is written out as far as the gold is.

    Both are trees as math-verify parses them, unevaluated; a string was compared as text.
    """
    if isinstance(answer, str) or isinstance(gold, str):
        return True
    if gold == answer:
        return True
    if isinstance(gold, Relational | And) and isinstance(answer, Relational | And):
        return _same_sides(gold, answer)
    members = _members(gold)
    if members and type(answer) is type(gold):
        return _same_members(members, _members(answer), ordered=not isinstance(gold, sympy.Set))
    if isinstance(gold, Relational | And):
        # An interval for an inequality: ends are what can be left undone.
        return _undone(answer) <= _undone(gold)
    return (
        _undone(answer) <= _undone(gold)
        and _sums(answer) == _sums(gold)
        and _length(answer) <= _length(gold)
        and _same_value(gold, answer)
    )


def _members(tree: Any) -> list[Any]:
    """Return the members of a set, a pair, an interval or a matrix; none of anything else."""
    if isinstance(tree, sympy.MatrixBase):
        return list(tree.flat())
    if isinstance(tree, sympy.Interval):
        return [sympy.Tuple(*tree.args[:2])]
    if isinstance(tree, sympy.FiniteSet | sympy.Union | sympy.Tuple):
        return list(tree.args)
    return []


def _same_members(golds: list[Any], answers: list[Any], *, ordered: bool) -> bool:
    """Say whether every member of an answer is a finished member of the gold."""
    if len(golds) != len(answers):
        return False
    if ordered:
        return all(as_finished(one, other) for one, other in zip(golds, answers, strict=True))
    return all(any(as_finished(one, other) for one in golds) for other in answers)


def _same_sides(gold: Any, answer: Any) -> bool:
    """Say whether two conditions have equal, equally finished sides, in either direction."""
    golds, answers = _relations(gold), _relations(answer)
    if len(golds) != len(answers):
        return False
    return any(
        all(_same_relation(one, other) for one, other in zip(golds, order, strict=True))
        for order in (answers, answers[::-1])
    )


def _relations(condition: Any) -> list[Any]:
    """Return the single relations of a condition, as written."""
    if isinstance(condition, Relational):
        return [condition]
    return [part for one in condition._unsorted_args for part in _relations(one)]


def _same_relation(gold: Any, answer: Any) -> bool:
    """Say whether two relations have the same sides, perhaps exchanged."""
    return any(
        type(one) is type(gold)
        and as_finished(gold.lhs, one.lhs)
        and as_finished(gold.rhs, one.rhs)
        for one in (answer, answer.reversed)
    )


def _nodes(tree: Any) -> Iterator[Any]:
    """Yield every node of a tree, elements of matrices included."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, sympy.MatrixBase):
            stack.extend(node.flat())
            continue
        yield node
        stack.extend(_parts(node))


def _parts(node: Any) -> tuple[Any, ...]:
    """Return the arguments of a node; of a sum or product, those of the same within it as well."""
    arguments = getattr(node, "args", ())
    if not isinstance(node, Add | Mul):
        return tuple(arguments)
    return tuple(
        part
        for argument in arguments
        for part in (_parts(argument) if type(argument) is type(node) else (argument,))
    )


def _is_rational(node: Any) -> bool:
    """Say whether a node is a number, or one over a number."""
    if isinstance(node, Pow):
        base, exponent = node.args
        return base.is_Integer and exponent == -1
    return isinstance(node, sympy.Number) and node.is_finite is True


def _undone(tree: Any) -> int:
    """Count the operations that are left to the reader."""
    return sum(_undone_at(node) for node in _nodes(tree))


def _undone_at(node: Any) -> int:
    """Count the operations that one node leaves undone."""
    if isinstance(node, Add):
        terms = _parts(node)
        return max(len(terms) - len(Add.make_args(Add(*terms))), 0)
    if isinstance(node, Mul):
        return _undone_product(node)
    if isinstance(node, Pow):
        return _undone_power(*node.args)
    return 0


def _undone_product(node: Any) -> int:
    """Return the operations that a product leaves: numbers, powers of one base, roots."""
    tops: list[int] = []
    bottoms: list[int] = []
    bases: list[Any] = []
    roots = 0
    for factor in _parts(node):
        if isinstance(factor, Float):
            tops.append(0)
        elif _is_rational(factor):
            value = Rational(1, factor.base) if isinstance(factor, Pow) else Rational(factor)
            tops += [abs(value.p)] if abs(value.p) != 1 else []
            bottoms += [value.q] if value.q != 1 else []
        elif _is_root(factor):
            roots += 1
        else:
            bases.append(factor.base if isinstance(factor, Pow) else factor)
    count = max(len(tops) - 1, 0) + max(len(bottoms) - 1, 0) + max(roots - 1, 0)
    count += len(bases) - len(set(bases))
    if len(tops) == len(bottoms) == 1 and sympy.gcd(tops[0], bottoms[0]) != 1:
        count += 1
    return count


def _is_root(node: Any) -> bool:
    """Say whether a node is a root of a number."""
    return (
        isinstance(node, Pow)
        and node.args[0].is_Rational is True
        and node.args[1].is_Rational is True
        and not node.args[1].is_Integer
    )


def _undone_power(base: Any, exponent: Any) -> int:
    """Return the operations that a power leaves: of a number, of a power, of a root below a bar."""
    if exponent.is_Integer:
        if exponent == -1 and base.is_Integer:
            return 0
        if exponent < 0 and any(_is_root(node) for node in _nodes(base)):
            return 1
        if exponent == -1:
            return 0
        return int(base.is_Rational is True or isinstance(base, Mul | Pow))
    if isinstance(base, Float):
        return 1
    if base.is_Rational and exponent.is_Rational:
        return int(exponent < 0 or not base.is_Integer or _can_be_drawn(base, exponent))
    return 0


def _can_be_drawn(base: Any, exponent: Any) -> bool:
    """Say whether SymPy takes a factor out of a root."""
    drawn = Pow(base, exponent)
    return not (isinstance(drawn, Pow) and drawn.args == (base, exponent))


def _sums(tree: Any) -> Counter[tuple[str, int]]:
    """Return how many sums of how many terms, products with sums and powers of sums there are."""
    counts: Counter[tuple[str, int]] = Counter()
    for node in _nodes(tree):
        if isinstance(node, Add):
            counts["sum", len(_parts(node))] += 1
        elif isinstance(node, Mul):
            factors = _parts(node)
            others = [factor for factor in factors if not _is_sum(factor)]
            sums = len(factors) - len(others)
            if sums > 1 or (sums == 1 and any(not _is_divisor(factor) for factor in others)):
                counts["product", sums] += 1
        elif isinstance(node, Pow) and isinstance(node.args[0], Add):
            exponent = node.args[1]
            if exponent.is_Integer and abs(exponent) > 1:
                counts["power", int(exponent)] += 1
    return counts


def _is_sum(node: Any) -> bool:
    """Say whether a factor is a sum or a positive power of one."""
    return isinstance(node, Add) or (
        isinstance(node, Pow) and isinstance(node.args[0], Add) and node.args[1].is_positive is True
    )


def _is_divisor(node: Any) -> bool:
    """Say whether a factor only divides, or changes the sign."""
    if isinstance(node, Pow):
        return node.args[1].is_negative is True
    return isinstance(node, Rational) and abs(node.p) == 1


def _length(tree: Any) -> int:
    """Return the number of letters, numbers and functions; a coefficient of two numbers is one."""
    if isinstance(tree, sympy.MatrixBase):
        return sum(_length(element) for element in tree.flat())
    if not getattr(tree, "args", ()):
        return int(tree not in (1, -1))
    if isinstance(tree, Mul):
        rational = [factor for factor in _parts(tree) if _is_rational(factor)]
        others = [factor for factor in _parts(tree) if not _is_rational(factor)]
        return int(any(abs(factor) != 1 for factor in rational)) + sum(map(_length, others))
    return isinstance(tree, sympy.Function) + sum(map(_length, _parts(tree)))


def _exact(tree: Any) -> Any:
    """Return a tree with its decimals as the fractions that they were written as."""
    decimals = {node: Rational(str(node)) for node in _nodes(tree) if isinstance(node, Float)}
    return tree.xreplace(decimals) if decimals else tree


def _same_value(gold: Any, answer: Any) -> bool:
    """Say whether two formulas agree where every letter has a value of its own.

    Rational numbers are compared exactly, others to 30 digits of the gold's value. What has no
    value (sets, intervals, matrices) is left to math-verify.
    """
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return True
    trees = [_exact(gold), _exact(answer)]
    letters = trees[0].free_symbols | trees[1].free_symbols
    names = sorted({str(letter) for letter in letters})
    place = {name: Rational(17 + 6 * i, 11 + 2 * i) for i, name in enumerate(names)}
    # Two letters of one name may differ in what SymPy assumes of them.
    point = {letter: place[str(letter)] for letter in letters}
    placed = [tree.subs(point) for tree in trees]
    here, there = (tree.evalf(_DIGITS) for tree in placed)
    if not (here.is_number and there.is_number):
        return True
    if here != there and not abs(here - there) <= _CLOSE * abs(here):
        return False
    # Only of values so close are all digits computed.
    exact = [tree.doit() for tree in placed] if all(tree.is_rational for tree in placed) else [0, 0]
    return bool(exact[0] == exact[1])
