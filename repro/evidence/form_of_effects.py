"""Form of what procedures write of their own: a record's `effects`, and its `environment`.

Only what is read back by name has a type here (`repro.evidence.receipts`, `not_run`, pages and
pictures); other members may be anything that JSON holds.
"""

from __future__ import annotations

from typing import Any, TypedDict

from repro.evidence.form import Count, Digest


class _Noise(TypedDict, total=False):
    form: str
    modules: Count
    channels_changed: Count
    rollouts_asked: Count
    rollouts_perturbed: Count
    sigma_max: float
    sigma_realised_max: float
    digest: str


class _NoiseAtStart(TypedDict, total=False):
    channels_changed: Count


class _WeightNoise(TypedDict, total=False):
    matched_to: str
    sigma: float
    kl_format: float | None
    kl_noise: float | None
    projections: Count


class _Rounding(TypedDict, total=False):
    format: str
    factor: float
    projections: Count
    relative_change_mean: float


class _ByQuarter(TypedDict, total=False):
    sums: list[float]
    tokens: list[Count]
    abs_diff_mean: list[float | None]


class _Votes(TypedDict):
    problems: Count
    right: list[Count]
    wrong: list[Count]


class _OneSample(TypedDict):
    dropped: Count
    right: list[Count]
    right_lenient: list[Count]
    format: list[Count]
    working: list[Count]
    truncated: list[Count]
    tokens: Count
    completions: Digest


class _Answers(_OneSample, total=False):
    # Of several samples per problem.
    distinct_right: list[Count]
    votes: list[_Votes]
    votes_lenient: list[_Votes]


class _Timing(TypedDict, total=False):
    method: str
    seconds: float
    bytes: float
    flops: float
    bytes_per_second: float
    flops_per_second: float


class _Memory(TypedDict, total=False):
    total_bytes: float
    free_bytes: float


class _StateOfDevice(TypedDict):
    at: float
    memory: _Memory
    card: dict[str, Any]
    slowed_us: dict[str, Any]
    processes: dict[str, Any]


class _Device(TypedDict):
    before: _StateOfDevice
    after: _StateOfDevice


class _Together(TypedDict, total=False):
    runs: Count


class Effects(TypedDict, total=False):
    """What was really done; see `repro.evidence.receipts`."""

    linears: dict[str, Count]
    relative_weight_error_mean: float | None
    adapter_modules: Count | None
    parameters_trainable: Count | None
    norms_wrapped: Count
    norms_trained: Count
    compute: str
    optimizer_steps: Count | None
    trained_change_l2: float | None
    advantage_group_mean_max: float | None
    noise: _Noise
    noise_at_start: _NoiseAtStart | None
    weight_noise: _WeightNoise | None
    rounding: _Rounding
    order: Count
    rows: dict[str, Count]
    grades: dict[str, Count]
    grader_workers_killed: Count
    answers: dict[str, _Answers]
    seconds: dict[str, float]
    series_left_out: list[str]
    not_kept: list[str]
    sampler_trainer_by_quarter: _ByQuarter
    together: _Together
    test_sets_left_out: list[str]
    timing: _Timing
    device: _Device
    timed_retries: dict[str, Count]
    timed_slowed: dict[str, float]
    timed_again: dict[str, Count]
    not_run: dict[str, str]
    out_of_memory: list[str]


class _Gpu(TypedDict):
    name: str


class Environment(TypedDict, total=False):
    """What a reader needs to know of the machine; see `repro.evidence.environment`."""

    # An object says why no device could be asked.
    gpu: list[_Gpu] | dict[str, Any]
    variables: dict[str, str]
    packages: dict[str, Any]
    cpu: dict[str, Any]
    torch: dict[str, Any]
    source_sha256: Digest | dict[str, Any]
