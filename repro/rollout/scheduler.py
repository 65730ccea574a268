"""Which rows run, what is computed for them first, and who must wait: bookkeeping without tensors.

A *row* is one completion in the making. Waiting rows enter as slots and cache blocks allow
(continuous batching); a row that ends leaves its slot to the next. When blocks run out, the row
that entered last is put back to the head of the queue with the tokens it has (*preempted*); when it
enters again its whole sequence is computed again, and it goes on with the next random number of its
own seed. Nothing is lost but time.

A row's sequence is its prompt and its tokens so far. All but the last token are *prefilled*; the
last one is left to the first decode step, which therefore serves every row alike, and no logits
are needed of a prefill.

The members of a group share the full blocks of their prompt, and copy the last, partly filled one.
The group itself holds these blocks while members wait.

Easy to get wrong: the row that wrote a shared block first must have been prefilled before another
reads it. Jobs are carried out in the order in which they are returned here, each chunk writing all
its keys before it attends, and copies come last; so a block that is copied from must stay held
until then, even if its last member has just entered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from repro.rollout.blocks import BlockPool, OutOfBlocksError


@dataclass(slots=True, eq=False)
class Group:
    """The completions of one prompt, of which so many are `waiting` to enter.

    `blocks` hold all prompt tokens but the last, once a member was prefilled; else they are empty.
    """

    prompt: tuple[int, ...]
    waiting: int
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Row:
    """One completion in the making, in its `slot`; None while it waits.

    `tokens` and `logprobs` are what was generated before the last time the row left a slot;
    `launched` counts tokens whose decode steps have been launched, the ones in `tokens` included:
    the host's upper bound of the row's length.
    """

    index: int
    group: Group
    seed: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    launched: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and known tokens."""
        return (*self.group.prompt, *self.tokens)

    @property
    def positions(self) -> int:
        """Positions that may be written to by the steps launched so far."""
        return len(self.group.prompt) - 1 + self.launched


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens `start` to `end` of a row's sequence, to be prefilled."""

    row: Row
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What must be done for the rows that enter: segments in order, then copies of blocks."""

    rows: list[Row]
    segments: list[Segment]
    copies: list[tuple[int, int]]


class Scheduler:
    """Queues, slots (the rows that can run at once) and blocks of the cache."""

    def __init__(self, pool: BlockPool, slots: int) -> None:
        self.pool = pool
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self._slots = list(range(slots - 1, -1, -1))
        # Prompts' blocks that the last admission copies from, held until that is launched.
        self._copied: list[int] = []

    @property
    def unfinished(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def free_slots(self) -> int:
        """Slots that no row holds."""
        return len(self._slots)

    def add(self, rows: Sequence[Row]) -> None:
        """Queue rows at the end.

        Raises `ValueError` when a row at full length needs more blocks than the cache has.
        """
        for row in rows:
            needed = self.pool.blocks_for(len(row.group.prompt) - 1 + row.limit)
            if needed > self.pool.capacity:
                raise ValueError(
                    f"row {row.index} needs {needed} blocks of {self.pool.block_size} positions at "
                    f"full length; the cache has {self.pool.capacity}"
                )
        self.waiting.extend(rows)

    def admit(self, steps: int, watermark: int) -> Admission:
        """Let waiting rows enter, first come first served, while slots and blocks last.

        An entering row must have room for `steps` decode steps at once, and leaves a `watermark` of
        blocks free for the rows that run already; a lone row is not asked for that.
        """
        admission = Admission(rows=[], segments=[], copies=[])
        while self.waiting and self._slots:
            row = self.waiting[0]
            keep = watermark if self.running else 0
            try:
                self._place(row, min(steps, row.limit - row.launched), keep, admission)
            except OutOfBlocksError:
                if self.running or not self._drop_prompts():
                    break
                continue
            self.waiting.popleft()
            row.slot = self._slots.pop()
            self.running.append(row)
            admission.rows.append(row)
        return admission

    def entered(self) -> None:
        """Note that what the last admission asked for has been launched."""
        self.pool.release(self._copied)
        self._copied = []

    def _place(self, row: Row, steps: int, keep: int, admission: Admission) -> None:
        """Give `row` its blocks and note what must be computed."""
        pool, group = self.pool, row.group
        prefilled = len(row.sequence) - 1
        prompt_cached = len(group.prompt) - 1
        shared = group.blocks[: prompt_cached // pool.block_size]
        total = pool.blocks_for(len(group.prompt) - 1 + row.launched + steps)
        if total - len(shared) + keep > pool.free:
            raise OutOfBlocksError(f"{total - len(shared)} blocks asked for; {pool.free} are free")
        own = pool.allocate(total - len(shared))
        pool.share(shared)
        row.blocks = [*shared, *own]
        start = len(shared) * pool.block_size
        if group.blocks and prompt_cached % pool.block_size and not row.tokens:
            admission.copies.append((group.blocks[-1], own[0]))
            start = prefilled
        if start < prefilled:
            admission.segments.append(Segment(row=row, start=start, end=prefilled))
        self._keep_prompt(row, prompt_cached)

    def _keep_prompt(self, row: Row, prompt_cached: int) -> None:
        """Let the group hold its prompt's blocks as long as members wait."""
        group = row.group
        group.waiting -= 1
        if group.waiting > 0 and not group.blocks and prompt_cached:
            group.blocks = row.blocks[: self.pool.blocks_for(prompt_cached)]
            self.pool.share(group.blocks)
        if group.waiting == 0 and group.blocks:
            # Not free yet: a row that enters after this one must not write over what is copied.
            self._copied.extend(group.blocks)
            group.blocks = []

    def _drop_prompts(self) -> bool:
        """Release the prompts that waiting groups hold, to be computed again; whether any was."""
        dropped = False
        for row in self.waiting:
            if row.group.blocks:
                self.pool.release(row.group.blocks)
                row.group.blocks, dropped = [], True
        return dropped

    def reserve(self, steps: int) -> list[Row]:
        """Give every running row blocks for its next `steps`; return rows that must leave for it.

        The caller preempts those (it alone knows their tokens) and calls again.
        """
        for row in self.running:
            ahead = min(steps, row.limit - row.launched)
            missing = self.pool.blocks_for(row.positions + ahead) - len(row.blocks)
            if missing <= 0:
                continue
            if missing > self.pool.free:
                self._drop_prompts()
                if missing > self.pool.free:
                    return [self.running[-1]]
            row.blocks += self.pool.allocate(missing)
        return []

    def preempt(self, row: Row, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Put a running row back to the head of the queue with what it has generated."""
        self.leave(row)
        row.tokens, row.logprobs = list(tokens), list(logprobs)
        row.launched = len(row.tokens)
        row.group.waiting += 1
        self.waiting.appendleft(row)

    def leave(self, row: Row) -> None:
        """Let a running row go, and give its slot and blocks back."""
        assert row.slot is not None
        self.running.remove(row)
        self._slots.append(row.slot)
        self._slots.sort(reverse=True)
        self.pool.release(row.blocks)
        row.slot, row.blocks = None, []

    def move(self, row: Row, slot: int) -> None:
        """Move a running row to a free slot."""
        assert row.slot is not None
        self._slots.remove(slot)
        self._slots.append(row.slot)
        self._slots.sort(reverse=True)
        row.slot = slot

    def clear(self) -> None:
        """Drop every row and every held block, after a failure or an interrupt."""
        self.entered()
        for row in list(self.running):
            self.leave(row)
        self._drop_prompts()
        self.waiting.clear()
