"""A worker process that grades answers, killable at any moment, and replaced when it is.

Grading is computer algebra on text that a policy under training wrote, so three things are certain
to happen: an answer that never finishes (`10^{10^{10}}`), one that ends the interpreter, and one
that lies. The first two are why the work is done in processes of our own, which a timer of the
system ends when they are late, and the parent replaces; the third is the matter of `expression` and
of `finished`.

Every pair ends in one of five statuses, counted apart, since a silent zero looks like a wrong
answer:

=================  ==========  =====================================================================
status             accuracy    meaning
=================  ==========  =====================================================================
`ok`               1           math-verify holds the answer equal to the gold
`wrong`            0           it does not, or there is no answer, or it may not be compared
`timeout`          0           over the limit on two workers, though the gold alone is within it
`unparsable_gold`  None        the gold is at fault, it does not equal itself: the item is dropped
`error`            None        the worker failed twice on it: the item is dropped
=================  ==========  =====================================================================

A late worker is not a wrong answer. The limit is on the worker's own processor time, so a machine
that stands still for seconds changes no grade, and a pair over it is tried once more on a fresh
worker. An error is not remembered.

Measured on one core: 0.7 s to start a worker, 0.2 ms per new pair of integers, 6 microseconds per
pair seen before.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, cast, get_args

from repro.reward.expression import comparable, tidy
from repro.reward.grader_worker import Worker, WorkerGoneError, WorkerLateError

Status = Literal["ok", "wrong", "unparsable_gold", "timeout", "error"]
Pair = tuple[str, str]

_ATTEMPTS = 2
# Pairs whose statuses are kept, the least recently used being forgotten.
_REMEMBERED = 65_536
_CODES: tuple[Status, ...] = get_args(Status)


class GraderError(RuntimeError):
    """The pool cannot grade at all: a worker does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Result of grading one pair, with the answer that was compared, if any."""

    status: Status
    answer: str | None

    @property
    def accuracy(self) -> float | None:
        """1.0, 0.0, or None where the item is to be dropped."""
        if self.status in ("unparsable_gold", "error"):
            return None
        return 1.0 if self.status == "ok" else 0.0


class Sharing(Protocol):
    """Processes that grade the same pairs and share the work (`repro.distributed`)."""

    def mine(self, sizes: Sequence[int]) -> list[int]:
        """Return which items of these sizes are this process's."""

    def add_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return numbers, each added up over the processes."""


class GraderPool:
    """Grades answers against golds; to be used as a context manager.

    A worker is started when the first pair needs one. One thread grades.

    Parameters
    ----------
    seconds_per_item
        Processor time of a worker that one pair may take.
    among
        Processes that ask for the same pairs in the same order; each grades its share, and all have
        all grades.

    Attributes
    ----------
    counters
        How many grades of each status were given, repeated pairs included.
    workers_started, workers_killed
        Processes started, and those ended for being late.
    """

    def __init__(self, seconds_per_item: float = 5.0, *, among: Sharing | None = None) -> None:
        self.seconds_per_item = seconds_per_item
        self.counters: Counter[str] = Counter()
        self.workers_started = 0
        self.workers_killed = 0
        self.worker: Worker | None = None
        self._among = among
        self._memory: OrderedDict[Pair, Status] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._discard()

    def grade_answers(self, pairs: Sequence[tuple[str, str | None]]) -> list[Grade]:
        """Grade `(gold, answer)` pairs; an answer of None is wrong unless the gold is at fault."""
        asked = [_form_of(gold, answer) for gold, answer in pairs]
        results = self._results(dict.fromkeys(pair for pair, _ in filter(None, asked)))
        grades = [
            Grade(status=_status_of(form, results), answer=answer)
            for (_, answer), form in zip(pairs, asked, strict=True)
        ]
        self.counters.update(grade.status for grade in grades)
        return grades

    def _results(self, pairs: dict[Pair, None]) -> dict[Pair, Status]:
        """Return the result of each different pair, from memory or from the worker."""
        known = {pair: self._memory[pair] for pair in pairs if pair in self._memory}
        new = [pair for pair in pairs if pair not in known]
        try:
            known |= self._shared_work(new, self._among) if self._among else self._work(new)
        except BaseException:
            # The worker may still hold unread answers, which would be taken for the next ones.
            self._discard()
            raise
        for pair in pairs:
            if known[pair] != "error":
                self._memory[pair] = known[pair]
                self._memory.move_to_end(pair)
        while len(self._memory) > _REMEMBERED:
            self._memory.popitem(last=False)
        return known

    def _shared_work(self, pairs: list[Pair], among: Sharing) -> dict[Pair, Status]:
        """Grade the pairs that are this process's; return the results of all."""
        if not pairs:
            return {}
        mine = among.mine([1] * len(pairs))
        killed = self.workers_killed
        results = self._work([pairs[number] for number in mine])
        numbers = [0] * len(pairs)
        for number in mine:
            numbers[number] = _CODES.index(results[pairs[number]])
        every, *codes = among.add_numbers([self.workers_killed - killed, *numbers])
        self.workers_killed = killed + every
        return dict(zip(pairs, [_CODES[code] for code in codes], strict=True))

    def _work(self, pairs: list[Pair]) -> dict[Pair, Status]:
        """Grade pairs, replacing the worker each time that it is late or gone."""
        results: dict[Pair, Status] = {}
        failures: Counter[Pair] = Counter()
        late_pairs: list[Pair] = []
        left = list(pairs)
        while left:
            worker = self.worker or self._start()
            try:
                worker.send(left)
                while left:
                    status = cast(Status, worker.receive())
                    gold, answer = pair = left.pop(0)
                    # A gold that does not equal itself is at fault.
                    at_fault = status == "wrong" and gold == answer
                    results[pair] = "unparsable_gold" if at_fault else status
            except (WorkerLateError, WorkerGoneError) as error:
                is_late = isinstance(error, WorkerLateError)
                self._discard(late=is_late)
                failures[left[0]] += 1
                if failures[left[0]] < _ATTEMPTS:
                    continue
                pair = left.pop(0)
                own = (pair[0], pair[0])
                if not is_late:
                    results[pair] = "error"
                elif pair == own:  # a gold over the limit is dropped, as one at fault is
                    results[own] = "unparsable_gold"
                else:
                    # Whose fault is it? The gold alone, on a new worker, tells.
                    late_pairs.append(pair)
                    left += [own] if own not in results and own not in left else []
        for pair in late_pairs:
            of_gold = results[pair[0], pair[0]]
            results[pair] = "timeout" if of_gold == "ok" else of_gold
        return results

    def _start(self) -> Worker:
        """Start a worker and wait for its imports, once more if it ends before that."""
        said = ""
        for _ in range(_ATTEMPTS):
            worker = self.worker = Worker(self.seconds_per_item)
            self.workers_started += 1
            try:
                worker.receive()  # that it is ready: imports count against no pair's limit
            except (WorkerGoneError, WorkerLateError):
                said = worker.errors() or f"exit code {worker.process.poll()}, nothing said"
                self._discard()
            else:
                return worker
        raise GraderError(f"a grader worker does not start: {said}; math-verify must import in it")

    def _discard(self, *, late: bool = False) -> None:
        """End the worker, if there is one, and forget it."""
        if self.worker is not None:
            self.worker.end()
            self.worker = None
        self.workers_killed += late


def _status_of(form: tuple[Pair, bool] | None, results: Mapping[Pair, Status]) -> Status:
    """Return the status of a pair from the results of what `_form_of` has asked for it."""
    if form is None:
        return "unparsable_gold"
    pair, refused = form
    return "wrong" if refused and results[pair] == "ok" else results[pair]


@functools.lru_cache(maxsize=65_536)
def _form_of(gold: str, answer: str | None) -> tuple[Pair, bool] | None:
    """Return what to ask for a pair, and whether its answer was refused.

    None where the gold may not be compared with itself. An answer that may not be compared is
    replaced by the gold, which may be at fault.
    """
    gold = tidy(gold)
    itself = comparable(gold, gold)
    if itself is None:
        return None
    tidied = None if answer is None else tidy(answer)
    pair = itself if tidied == gold else None if tidied is None else comparable(gold, tidied)
    return pair or itself, pair is None
