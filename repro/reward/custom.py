"""Rewards of a user's own: `--reward module:function`.

The function is called by name, once for each batch of sampled completions, and returns one reward
each:

    def reward(completions: list[str], answers: list[str]) -> list[float | None]:

It is given what its parameters name, a list with an entry per completion each: `completions`, texts
without the prompt and without control tokens; `answers`, the gold answers of their problems;
`prompts`, their questions without any template; and any other column of the data, by its name, as
reward functions of TRL are. One with `**kwargs` is given all of them. A reward is a finite number;
None means that there is none, and the completion leaves its group. The function must be
deterministic if a resumed run is to go on to the bit, and it runs in the process that trains.

The module is imported from the current folder or from wherever Python finds it. Its file's SHA-256
is part of the run's configuration: a module that has changed since is refused, and what it imports
in turn is not covered. Accuracy and format are measured beside it as always.

An exception in it fails the run, with its words and its place in the record.
"""

from __future__ import annotations

import importlib
import inspect
import numbers
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, cast

from repro.spec.arm import RewardFunction
from repro.spec.checks import meant, require, shown
from repro.spec.in_a_copy import ending_in_a_copy
from repro.spec.whole_files import sha256_of

CustomReward = Callable[..., Sequence[float | None]]
# Squares of larger ones need not be finite in float32, in which losses and gradients are.
_LARGEST = 1e15
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TRIAL = ("<think>3 + 4 = 7</think><answer>7</answer>", "I do not know.")
# Seconds: the import of its module may load a model, and two completions are paid.
_IMPORTING, _PAYING = 600.0, 120.0
_TRIAL_COLUMNS = {"answers": ["7", "7"], "prompts": ["What is 3 + 4?"] * 2}


def reward_named(named: str) -> RewardFunction:
    """Return a user's reward as a value of the configuration, after a trial of it.

    It is named `module:function`. Raises `ValueError`, saying what is missing or wrong: the form,
    the module, the function, its signature, or what it returns for two completions. One that asks
    for columns of the data is tried with these (`try_reward`).
    """
    module_name, _, function_name = named.partition(":")
    require(
        bool(module_name and function_name) and not re.search(r"/|\.py$", module_name),
        f"--reward {named}: needs module:function, such as my_rewards:reward for the function "
        "reward of my_rewards.py in the current folder",
    )
    module = in_a_copy(named, partial(_imported, module_name))
    function = function_of(module, function_name)
    if not (columns_asked(function) or _takes_all(function)):
        trial = partial(pay, function, _TRIAL, _TRIAL_COLUMNS, named)
        in_a_copy(named, trial, _PAYING, again=False)
    return RewardFunction(
        module=module_name, function=function_name, source_sha256=source_digest(module)
    )


def load_reward(stated: RewardFunction) -> CustomReward:
    """Return the function that a configuration names; `ValueError` if it is gone or has changed."""
    module = _imported(stated.module)
    digest = source_digest(module)
    require(
        digest == stated.source_sha256,
        f"{module.__file__} has SHA-256 {digest[:12]}; the run was planned with "
        f"{stated.source_sha256[:12]}: the reward has changed since",
    )
    return function_of(module, stated.function)


def try_reward(stated: RewardFunction, columns: Mapping[str, Sequence[Any]]) -> None:
    """Raise `ValueError` unless a reward pays completions of two problems with these columns."""
    named = f"{stated.module}:{stated.function}"
    function = in_a_copy(named, partial(load_reward, stated))
    completions = _TRIAL[: len(columns["answers"])]
    in_a_copy(named, partial(pay, function, completions, columns, named), _PAYING, again=False)


def in_a_copy(
    named: str, call: Callable[[], Any], seconds: float = _IMPORTING, *, again: bool = True
) -> Any:
    """Call a user's code where it may end its process, in a copy of this one.

    It is called here too where that is asked for, or where it raised an exception in the copy.
    """
    ending = ending_in_a_copy(call, seconds)
    require(
        not ending,
        f"reward {named} must return within {seconds:g} seconds, and load a model, if it has one, "
        f"where its module is imported; {ending}",
    )
    return call() if again or ending is not None else None


def _takes_all(function: CustomReward) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _asked(function: CustomReward) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in _BY_NAME and p.default is p.empty]


def asks_for_answers(stated: RewardFunction) -> bool:
    """Whether a reward needs the gold answers by name."""
    function = in_a_copy(f"{stated.module}:{stated.function}", partial(load_reward, stated))
    return not {"answer", "answers"}.isdisjoint(_asked(function))


def columns_asked(function: CustomReward) -> tuple[str, ...]:
    """Return the columns of the data that a reward needs by name."""
    return tuple(n for n in _asked(function) if n not in ("completions", *_TRIAL_COLUMNS))


def pay(
    function: CustomReward,
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    named: str,
) -> list[float | None]:
    """Call a user's reward; it must return one finite number or None for each completion.

    `columns` are what else it may ask for by name, an entry per completion each.
    """
    given = {"completions": list(completions)}
    given |= {key: list(value) for key, value in columns.items() if key not in given}
    if not _takes_all(function):
        lacking = sorted(set(columns_asked(function)) - given.keys())
        require(
            not lacking,
            f"reward {named} asks for {', '.join(lacking)}, which no column of the data is; there "
            f"are {', '.join(given)}",
        )
        wanted = inspect.signature(function).parameters
        given = {key: value for key, value in given.items() if key in wanted}
    with _theirs(f"reward {named}"):
        returned: Any = function(**given)
        is_sequence = isinstance(returned, Sequence) and not isinstance(returned, str | bytes)
        values = list(returned) if is_sequence else None
    require(
        values is not None and len(values) == len(completions),
        f"reward {named} returned {shown(returned)} for {len(completions)} completions; needed is "
        "a list with one number (or None) each",
    )
    return [_number(value, named) for value in values or ()]


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _end_by_signals() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_by_signals)


@contextmanager
def _theirs(what: str) -> Iterator[None]:
    """Make a `ValueError` of whatever a user's code raises or leaves by, but for Ctrl-C.

    Processes that it starts end by SIGTERM, also where this one ignores the signal.
    """
    if ignored := signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _ignore)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        others = ("<", __file__, f"{importlib.__file__}")  # ours and Python's, which imports
        calls = traceback.extract_tb(error.__traceback__)
        theirs = [call for call in calls if not call.filename.startswith(others)]
        last = [call for call in theirs if call.filename == theirs[0].filename][-1:]
        place = "".join(f" in {call.filename}, line {call.lineno}" for call in last)
        raise ValueError(f"{what} raised {shown(error, 300)}{place}") from error
    finally:
        if ignored:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def source_digest(module: ModuleType) -> str:
    """Return the SHA-256 hex digest of a module's file."""
    path = getattr(module, "__file__", None)
    if path is None or not Path(path).is_file():
        raise ValueError(f"module {module.__name__} has no source file; needs one to be recorded")
    return sha256_of(Path(path))


def _imported(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        # An installed command does not look there, and worker processes inherit the list.
        sys.path.insert(0, here)
    with _theirs(f"reward module {name} cannot be imported: it"):
        return importlib.import_module(name)


def function_of(module: ModuleType, name: str) -> CustomReward:
    """Return a module's function; `ValueError` if it cannot be called as this module says."""
    known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
    with _theirs(f"module {module.__name__}"):
        function: Any = getattr(module, name, None)
    sentence = f"module {module.__name__} has no function {name}{meant(name, known)}"
    require(callable(function), sentence)
    waits = inspect.iscoroutinefunction(function)
    require(not waits, f"{module.__name__}:{name} is asynchronous; needed is a plain function")
    parameters = inspect.signature(function).parameters.values()
    takes = {p.name for p in parameters if p.kind in _BY_NAME}
    require(
        ("completions" in takes or _takes_all(function))
        and all(p.kind is not p.POSITIONAL_ONLY for p in parameters),
        f"{module.__name__}:{name} cannot be called with completions, by this name; its parameters "
        f"are {', '.join(map(str, parameters)) or 'none'}",
    )
    return cast(CustomReward, function)


def _number(value: Any, named: str) -> float | None:
    if value is None:
        return None
    with _theirs(f"reward {named}"), suppress(OverflowError):
        # As a float: in NumPy's float16 the bound itself is infinite.
        if isinstance(value, numbers.Real) and abs(number := float(value)) <= _LARGEST:
            return number
    needed = f"a number from {-_LARGEST:g} to {_LARGEST:g}, or None"
    raise ValueError(f"reward {named} returned {shown(value)}; needed is {needed}")
