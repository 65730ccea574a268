"""Form of what procedures write of their own: a record's `effects`, and its `environment`.

Only what is read back by name has a kind here (`repro.evidence.receipts`, `not_run`, pages and
pictures); other members may be anything that JSON holds.
"""

from __future__ import annotations

from repro.evidence.form import (
    COUNT,
    DIGEST,
    FLAG,
    NUMBER,
    TEXT,
    Kind,
    listing,
    mapping,
    maybe,
    members,
)

FLAG_OR_NULL = maybe(FLAG)

_NOISE = members(
    {
        "form": TEXT,
        "modules": COUNT,
        "channels_changed": COUNT,
        "rollouts_asked": COUNT,
        "rollouts_perturbed": COUNT,
        "sigma_max": NUMBER,
        "sigma_realised_max": NUMBER,
        "digest": TEXT,
    }
)
_WEIGHT_NOISE = members(
    {
        "matched_to": TEXT,
        "sigma": NUMBER,
        "kl_format": maybe(NUMBER),
        "kl_noise": maybe(NUMBER),
        "projections": COUNT,
    }
)
_ROUNDING = members(
    {"format": TEXT, "factor": NUMBER, "projections": COUNT, "relative_change_mean": NUMBER}
)
_EXPLORATION = members({"tokens_asked": COUNT, "tokens_explored": COUNT, "tokens_changed": COUNT})
_BY_QUARTER = members(
    {
        "sums": listing(NUMBER),
        "tokens": listing(COUNT),
        "abs_diff_mean": listing(maybe(NUMBER)),
    }
)
_VOTES = listing(
    members(
        {"problems": COUNT, "right": listing(COUNT), "wrong": listing(COUNT)},
        ("problems", "right", "wrong"),
        closed=True,
    )
)
_ANSWERS = members(
    {
        "dropped": COUNT,
        "right": listing(COUNT),
        "right_lenient": listing(COUNT),
        "format": listing(COUNT),
        "working": listing(COUNT),
        "truncated": listing(COUNT),
        "tokens": COUNT,
        "completions": DIGEST,
        # Of several samples per problem.
        "distinct_right": listing(COUNT),
        "votes": _VOTES,
        "votes_lenient": _VOTES,
    },
    (
        "dropped",
        "right",
        "right_lenient",
        "format",
        "working",
        "truncated",
        "tokens",
        "completions",
    ),
    closed=True,
)
_TIMING = members(
    {
        "method": TEXT,
        "seconds": NUMBER,
        "bytes": NUMBER,
        "flops": NUMBER,
        "bytes_per_second": NUMBER,
        "flops_per_second": NUMBER,
    }
)
_STATE_OF_DEVICE = members(
    {
        "at": NUMBER,
        "memory": members({"total_bytes": NUMBER, "free_bytes": NUMBER}),
        "card": members({}),
        "slowed_us": members({}),
        "processes": members({}),
    },
    ("at", "memory", "card", "slowed_us", "processes"),
)
EFFECTS: Kind = members(
    {
        "linears": mapping(COUNT),
        "relative_weight_error_mean": maybe(NUMBER),
        "adapter_modules": maybe(COUNT),
        "parameters_trainable": maybe(COUNT),
        "norms_wrapped": COUNT,
        "norms_trained": COUNT,
        "compute": TEXT,
        "optimizer_steps": maybe(COUNT),
        "trained_change_l2": maybe(NUMBER),
        "advantage_group_mean_max": maybe(NUMBER),
        "noise": _NOISE,
        "noise_at_start": maybe(members({"channels_changed": COUNT})),
        "weight_noise": maybe(_WEIGHT_NOISE),
        "rounding": _ROUNDING,
        "order": COUNT,
        "exploration": _EXPLORATION,
        "rows": mapping(COUNT),
        "grades": mapping(COUNT),
        "grader_workers_killed": COUNT,
        "answers": mapping(_ANSWERS),
        "seconds": mapping(NUMBER),
        "series_left_out": listing(TEXT),
        "sampler_trainer_by_quarter": _BY_QUARTER,
        "together": members({"runs": COUNT}),
        "test_sets_left_out": listing(TEXT),
        "timing": _TIMING,
        "device": members(
            {"before": _STATE_OF_DEVICE, "after": _STATE_OF_DEVICE}, ("before", "after")
        ),
        "timed_retries": mapping(COUNT),
        "timed_slowed": mapping(NUMBER),
        "timed_again": mapping(COUNT),
        "not_run": mapping(TEXT),
        "out_of_memory": listing(TEXT),
    }
)
_DEVICES = Kind(
    needs="a list of devices, each with its name, or why none could be asked",
    fits=lambda value: (
        isinstance(value, dict)
        or (
            isinstance(value, list)
            and all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in value)
        )
    ),
)
ENVIRONMENT: Kind = members(
    {
        "gpu": _DEVICES,
        "variables": mapping(TEXT),
        "packages": members({}),
        "cpu": members({}),
        "torch": members({}),
    }
)
