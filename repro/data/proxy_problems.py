"""The problems of the proxy tier: five levels of more steps, larger numbers and more wordings.

=====  ==========  ================  ==================================================
level  operations  numbers up to     share of extra sentences
=====  ==========  ================  ==================================================
1      2           99                0.15 before each operation
2      3           99                0.15
3      4           199               0.20
4      5 or 6      499               0.20
5      7 or 8      999               0.20
6      3 or 4      1999              0.20; never pre-trained on
=====  ==========  ================  ==================================================

Level 6 is apart: no policy here has seen a number above 999, so there is something to learn in it.
It is drawn only where it is named.

Each level is a `GeneratorConfig`, so that a problem is right, bounded and in one split by the same
code as at the smoke tier; here are only the words and the numbers. Stories add, take, multiply and
divide; four in ten begin with a comparison ("Mia has 12 more shells than Otto").

Easy to get wrong: words that count two things at once ("pairs of socks"), sentences whose subject
is unclear to a reader, and a distractor about the very thing that is asked for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from repro.data.generator import (
    GeneratorConfig,
    Split,
    WordProblem,
    as_problem,
    draw_new_problem,
)
from repro.data.problem import Problem
from repro.spec.arm import require, require_choice
from repro.spec.config import derive_seed

SOURCE = "generated_steps"

_NAMES = (
    *("Ada", "Amir", "Anna", "Aziz", "Bea", "Ben", "Carl", "Cleo", "Dan", "Dora", "Eli", "Emma"),
    *("Eva", "Felix", "Finn", "Gia", "Gus", "Hana", "Hugo", "Ida", "Ivy", "Jack", "Jana", "Joel"),
    *("Kai", "Kim", "Lena", "Leo", "Liam", "Lucy", "Maya", "Mia", "Mike", "Nadia", "Nina", "Noah"),
    *("Olga", "Omar", "Otto", "Paul", "Pia", "Rita", "Rosa", "Sam", "Sara", "Tara", "Tom", "Uma"),
    *("Vera", "Will", "Yara", "Zoe"),
)
_THINGS = (
    *("acorns", "apples", "badges", "balloons", "beads", "bottles", "boxes", "bricks", "buttons"),
    *("candies", "candles", "cans", "cards", "chairs", "chestnuts", "coins", "cookies", "crayons"),
    *("cups", "dolls", "eggs", "feathers", "flowers", "games", "keys", "lemons", "marbles"),
    *("markers", "muffins", "notebooks", "oranges", "peaches", "peanuts", "pears", "pencils"),
    *("plates", "plums", "postcards", "puzzles", "ribbons", "rocks", "seeds", "shells", "spoons"),
    *("stamps", "stickers", "tickets", "tiles", "toys", "tulips"),
)

_BASE = GeneratorConfig(
    names=_NAMES,
    things=_THINGS,
    divisors=(2, 3, 4, 5),
    divide_share=0.15,
    compare_share=0.4,
    starts=(
        "{name} has {n} {thing}.",
        "{name} starts with {n} {thing}.",
        "At first {name} owns {n} {thing}.",
        "There are {n} {thing} in {name}'s bag.",
        "{name} has collected {n} {thing}.",
        "On Monday {name} counts {n} {thing}.",
    ),
    additions=(
        "{name} buys {n} more {thing}.",
        "{name} finds {n} {thing}.",
        "{name} gets {n} {thing} from {other}.",
        "Then {other} gives {n} {thing} to {name}.",
        "{name} picks up another {n} {thing}.",
        "After that, {name} wins {n} {thing}.",
        "{name}'s aunt sends {n} more {thing}.",
        "The next day {name} receives {n} {thing} as a present.",
    ),
    subtractions=(
        "{name} loses {n} {thing}.",
        "{name} sells {n} {thing}.",
        "{name} gives {n} {thing} to {other}.",
        "Then {other} takes {n} {thing} from {name}.",
        "{name} leaves {n} {thing} at school.",
        "After that, {name} uses up {n} {thing}.",
        "{n} of {name}'s {thing} break.",
        "{name} puts {n} {thing} away for good.",
    ),
    multiplications=(
        "Then {name} has {n} times as many {thing}.",
        "The number of {thing} becomes {n} times as large.",
        "{name} trades until there are {n} times as many {thing}.",
        "By the weekend {name} has {n} times that number of {thing}.",
    ),
    divisions=(
        "{name} splits the {thing} into {n} equal piles and keeps only one pile.",
        "{name} shares the {thing} equally among {n} people and keeps one share.",
        "Then only one in {n} of the {thing} is left.",
    ),
    compare_starts=(
        "{other} has {n} {thing}.",
        "{other} owns {n} {thing}.",
        "There are {n} {thing} in {other}'s box.",
    ),
    compare_additions=(
        "{name} has {n} more {thing} than {other}.",
        "{name} has as many {thing} as {other} and {n} more.",
    ),
    compare_subtractions=(
        "{name} has {n} fewer {thing} than {other}.",
        "{other} has {n} more {thing} than {name}.",
    ),
    compare_multiplications=(
        "{name} has {n} times as many {thing} as {other}.",
        "For each of those, {name} has {n} {thing}.",
    ),
    distractors=(
        "{other} has {n} {stray}.",
        "{name} also has {n} {stray}.",
        "{other} buys {n} {stray}.",
        "{name} sees {n} {stray} in a shop.",
        "{n} children are playing outside.",
        "It takes {name} {n} minutes to walk home.",
        "{other} paid {n} dollars for some {stray}.",
    ),
    questions=(
        "How many {thing} does {name} have now?",
        "How many {thing} does {name} have in the end?",
        "How many {thing} are left for {name}?",
        "What is the number of {thing} that {name} has now?",
        "How many {thing} does {name} end up with?",
        "In the end, how many {thing} belong to {name}?",
    ),
)

LEVELS: dict[int, GeneratorConfig] = {
    1: replace(_BASE, levels=(2,), multiply_share=0.2),
    2: replace(_BASE, levels=(3,), multiply_share=0.2),
    3: replace(
        _BASE,
        levels=(4,),
        max_value=199,
        max_start=99,
        max_operand=60,
        factors=(2, 3, 4, 5),
        distractor_share=0.2,
    ),
    4: replace(
        _BASE,
        levels=(5, 6),
        max_value=499,
        max_start=150,
        max_operand=150,
        factors=(2, 3, 4, 5, 6),
        distractor_share=0.2,
    ),
    5: replace(
        _BASE,
        levels=(7, 8),
        max_value=999,
        max_start=300,
        max_operand=300,
        factors=(2, 3, 4, 5, 6, 7, 8, 9),
        distractor_share=0.2,
    ),
}
# Drawn where they are named, and never pre-trained on.
UNSEEN_LEVELS: dict[int, GeneratorConfig] = {
    6: replace(
        _BASE,
        levels=(3, 4),
        max_value=1999,
        max_start=900,
        max_operand=900,
        factors=(2, 3, 4, 5, 6, 7, 8, 9),
        distractor_share=0.2,
    ),
}


def iterate_leveled_problems(
    split: Split, levels: Sequence[int], seed: int
) -> Iterator[tuple[int, WordProblem]]:
    """Yield (level, problem) of `split` without end, levels in turn, no question twice.

    Raises
    ------
    ValueError
        When the split or a level is unknown.
    """
    require_choice("split", split, Split)
    chosen_levels = tuple(levels) or tuple(LEVELS)
    known = LEVELS | UNSEEN_LEVELS
    unknown = sorted(set(chosen_levels) - set(known))
    require(not unknown, f"level {unknown} is asked for; {SOURCE} has {tuple(known)}")
    rng = random.Random(derive_seed(seed, "leveled problems", split, *chosen_levels))
    seen: set[str] = set()
    for level in itertools.cycle(chosen_levels):
        config = known[level]
        steps = rng.choice(config.levels)
        yield level, draw_new_problem(steps, rng, config, split, seen)


def generate_leveled_problems(
    split: Split, count: int, levels: Sequence[int] = (), seed: int = 2025
) -> list[Problem]:
    """Return `count` problems of a split, levels in turn; the first of a longer list are the same.

    Parameters
    ----------
    split
        `train`, `development` or `test`: disjoint sets of questions for every seed.
    levels
        Of 1 to 6; empty takes 1 to 5, those that policies are pre-trained on.

    Raises
    ------
    ValueError
        When an argument is out of range.
    """
    require(count >= 1, f"count is {count}; it must be 1 or more")
    drawn = itertools.islice(iterate_leveled_problems(split, levels, seed), count)
    return [
        as_problem(problem, SOURCE, level, problem.solution.replace("\n", ".\n"))
        for level, problem in drawn
    ]
