"""Facts of a run: what it did, by names that are declared here.

A receipt reads a fact that another module wrote. Were the two spelt differently, the receipt would
find nothing and pass in silence. So a name that is not declared is refused where it is written,
where it is read, and in the file of a record. `repro.evidence.receipts` says what each fact means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from repro.spec.checks import meant

_OfPolicies = Literal[
    "adapter_modules",
    "base_bytes",
    "checkpoint_files",
    "checkpoint_sha256",
    "compute",
    "end_token_ids",
    "gguf",
    "linears",
    "norms_trained",
    "norms_wrapped",
    "order",
    "parameters_trainable",
    "recipe",
    "relative_weight_error_mean",
    "rounding",
]
_OfTraining = Literal[
    "advantage_group_mean_max",
    "checkpoints_refused",
    "kept_blocks",
    "micro_batch_fallbacks",
    "micro_tokens",
    "noise",
    "optimizer_steps",
    "ranks",
    "ranks_before",
    "rows",
    "seconds",
    "sources",
    "trained_change_l2",
]
_OfAnswers = Literal[
    "answers",
    "explored",
    "grader_workers_killed",
    "grades",
    "noise_at_start",
    "temperature",
    "test_sets_left_out",
]
_OfSampling = Literal["folded", "road", "sampler", "vllm"]
_OfTimes = Literal[
    "device",
    "failed",
    "largest_relative_difference",
    "not_run",
    "out_of_memory",
    "points",
    "products",
    "repeats_together",
    "timed_retries",
    "timed_slowed",
    "timing",
    "tuned_table",
]
_OfPretraining = Literal["checkpoint_folder", "parameters", "tokens", "weights_sha256"]
# Of stored records alone.
_OfBlessing = Literal[
    "baseline_record",
    "not_kept",
    "repeated_questions",
    "sampler_trainer_by_quarter",
    "series_left_out",
    "timed_again",
]
FactName = Literal[
    _OfPolicies, _OfTraining, _OfAnswers, _OfSampling, _OfTimes, _OfPretraining, _OfBlessing
]

Name = TypeVar("Name", bound=str)


class FactNameError(Exception):
    """A name that no fact has; of no kind that a reader of damaged records catches."""


class Named(dict[Name, Any], Generic[Name]):
    """A dictionary of JSON values whose names are declared; another name is `FactNameError`."""

    names: ClassVar[frozenset[str]]
    what: ClassVar[str]

    def __init__(self, *values: Any, **more: Any) -> None:
        super().__init__()
        self.update(*values, **more)

    @classmethod
    def known(cls, name: Any) -> Any:
        """Return a declared name as it is."""
        if name not in cls.names:
            near = meant(str(name), sorted(cls.names))
            raise FactNameError(f"{cls.what}: {str(name)!r:.60} is no name of a fact{near}")
        return name

    def __setitem__(self, name: Name, value: Any) -> None:
        super().__setitem__(self.known(name), value)

    def __getitem__(self, name: Name) -> Any:
        return super().__getitem__(self.known(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self.known(name))

    def get(self, name: Name, default: Any = None) -> Any:
        """Return a fact, or `default` where there is none of the name."""
        return super().get(self.known(name), default)

    def pop(self, name: Name, *default: Any) -> Any:
        """Take out a fact and return it; `default` where there is none of the name."""
        return super().pop(self.known(name), *default)

    def setdefault(self, name: Name, default: Any = None) -> Any:
        """Return a fact, which becomes `default` where there is none of the name."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *values: Any, **more: Any) -> None:
        """Write several facts."""
        for name, value in dict(*values, **more).items():
            self[name] = value

    def __or__(self, other: Any) -> Any:
        return type(self)({**self, **other})

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What was timed, and the device's own rates: a timer that did not wait shows higher ones.

    `bytes` and `flops` are of the work that took `seconds`.
    """

    method: Literal["device_events", "synchronized_clock"] = "device_events"
    seconds: float
    bytes: float
    flops: float | None = None
    bytes_per_second: float
    flops_per_second: float | None = None

    def fact(self) -> dict[str, Any]:
        """Return the fact by its name, as JSON values."""
        values = dataclasses.asdict(self)
        return {"timing": {name: value for name, value in values.items() if value is not None}}


class _Part(Named[str]):
    """A fact that has names of its own; pickled it is plain, until it is a fact again."""

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


_NAMES_OF_PARTS: dict[str, Iterable[str]] = {
    "timing": [item.name for item in dataclasses.fields(Timing)],
    "rows": ("groups_drawn", "tokens_sampled", "trained_on", "truncated", "without_reward"),
    "noise": (
        *("channels_changed", "digest", "form", "modules", "rollouts_asked", "rollouts_perturbed"),
        *("sigma_max", "sigma_realised_max"),
    ),
    "noise_at_start": ("channels_changed", "modules", "sigma", "sigma_realised"),
    "rounding": ("factor", "format", "projections", "relative_change_mean"),
    "seconds": ("evaluation_seconds", "rollout_seconds", "update_seconds"),
    "explored": ("entropy_sum", "tokens"),
}
_PARTS: dict[str, type[_Part]] = {
    part: type(part, (_Part,), {"what": f"facts.{part}", "names": frozenset(names)})
    for part, names in _NAMES_OF_PARTS.items()
}


class Facts(Named[FactName]):
    """The facts of a run, of its policy, or of the state of its training."""

    what = "facts"
    names = frozenset(get_args(FactName))

    def __setitem__(self, name: FactName, value: Any) -> None:
        part = _PARTS.get(name)
        if part is not None and isinstance(value, Mapping):
            value = part(value)
        super().__setitem__(name, value)
