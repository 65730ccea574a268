"""How far training moved a policy: its KL divergence from what it was before, on own completions.

    KL(trained || before) = E over the trained policy's completions of the mean over tokens of
                            log p_trained(token) - log p_before(token)

The completions are sampled at temperature 1 without added noise, on the first problems of the test
split. Both log-probabilities are the trainer's own passes over the same rows, so the rounding of a
sampler's arithmetic is no part of it, and a policy that training left alone has exactly 0.

Easy to get wrong: completions of the policy before training give the other divergence, which hardly
sees what was learnt where it was rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repro.data.problem import Problem
from repro.evaluate.board import Board
from repro.evaluate.grades import digest_of_completions
from repro.rl.lessons import Lesson, rows_of
from repro.rl.policies import Policies
from repro.spec.config import KL_PROBLEMS


def log_ratios(
    policies: Policies,
    board: Board,
    test: Sequence[Problem],
    alive: Sequence[bool] | None = None,
) -> list[dict[str, Any] | None]:
    """Return each run's receipt of its KL to the start; None for runs that are not alive.

    Parameters
    ----------
    policies
        As trained; `board` samples from them.
    test
        The test split.

    Returns
    -------
    list
        `log_ratio` (nats, summed over a completion) and `tokens`, one per problem, and the SHA-256
        `completions` of all tokens; what `repro.evidence.derived.kl_estimate` takes.
    """
    asked, completed = board.completed(test[:KL_PROBLEMS], alive, stream="kl to start")
    prompts = [question.prompt for question in asked]
    taken = [
        rows_of(
            [
                Lesson(prompt=prompt, completion=tuple(one.token_ids))
                for prompt, one in zip(prompts, own, strict=True)
            ]
        )
        if own
        else None
        for own in completed
    ]
    now, then = (policies.logprobs(taken, before_training=before) for before in (False, True))
    receipts: list[dict[str, Any] | None] = []
    for own, rows, after, before in zip(completed, taken, now, then, strict=True):
        if rows is None or after is None or before is None:
            receipts.append(None)
            continue
        ratios = ((after.double() - before.double()) * rows.mask).sum(1)  # (B,)
        receipts.append(
            {
                "log_ratio": ratios.tolist(),
                "tokens": rows.lengths().tolist(),
                "completions": digest_of_completions(own),
            }
        )
    return receipts
