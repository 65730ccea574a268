"""Choose layers with an adapter by the time of a whole decode step, on a Hopper GPU.

    python -m repro.measure.tune_steps --models 3b 7b --rows 1 8

Rewrites `kernels/tuned/<device>.json`, which `python -m kernels.tune` makes. What was chosen so
before stays, so a start after an interruption goes on.

In a step the next launch begins before a layer has ended (programmatic dependent launch), with the
registers and shared memory that the layer leaves free; so the fastest candidate in isolation need
not be the fastest in a step. Here the candidates of `kernels.tune` are timed in the engine's
captured step, of a model with a few layers of the real shape and a small vocabulary. Products are
chosen one after another, with the current choices for the others, in two rounds; the current choice
stays unless another is faster. Results apply only to the sizes tuned and to ranks up to the
adapter's: they made neighbouring sizes and larger ranks slower.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kernels import tune, tuning
from kernels.cuda import driver
from kernels.tuning import Way
from repro.models.random_policy import random_policy, shape_config
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.step_timing import fill_cache, fill_rows, time_steps
from repro.spec.checks import require
from repro.spec.shapes import shape_named

Key = tuple[int, int, int]
Clock = Callable[[Mapping[Key, Way]], float]

MODELS = ("3b", "7b", "14b", "32b")
# Rows attend to about as many positions as in the middle of the `rollout` target's completions.
_POSITION, _POSITIONS = 384, 512
_LAYERS, _VOCABULARY = 6, 2048
_STEPS = 48
# Number of candidates that are timed again, how often, and number for the second round.
_FINALISTS, _READINGS, _TRIED_AGAIN = 3, 5, 6


def tune_steps(models: Sequence[str], rows: Sequence[int]) -> None:
    """Choose the layers that this device's table lacks for the models and rows.

    Raises `ValueError` without a Hopper GPU or a table of it made with these versions.
    """
    require(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9,
        "tune_steps needs a CUDA device of compute capability 9.0 (Hopper); found none",
    )
    path = tuning.FOLDER / f"{tuning.device_slug(torch.cuda.get_device_name(0))}.json"
    require(path.is_file(), f"{path} is missing; python -m kernels.tune {path} makes it")
    table = json.loads(path.read_text(encoding="utf-8"))
    check_head(path, table)
    for model, count in itertools.product(models, rows):
        began = time.monotonic()
        entries = left_to_choose(table, model, count)
        if not entries:
            sys.stdout.write(f"{model}, {count} rows: chosen before\n")
            continue
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        tune.compile_ahead(entries, processors, driver.architecture(0))
        before, after = _choose_on_device(table, model, count, entries)
        tuning.write(table, path)
        tuning.forget()
        sys.stdout.write(
            f"{model}, {count} rows: {before:.1f} us before, {after:.1f} after, a step of "
            f"{_LAYERS} layers; {time.monotonic() - began:.0f} s\n"
        )


def check_head(path: Path, table: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless the table was made on this device with these versions."""
    import triton

    here = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    made = {name: table.get(name) for name in here}
    require(made == here, f"{path} is a table of {made}; this is {here}: make one here first")


def left_to_choose(table: Mapping[str, Any], model: str, rows: int) -> list[tune.TableEntry]:
    """Return the products of a model's block, with an adapter, that have not been chosen yet."""
    chosen = {(entry["N"], entry["K"], entry["M"]) for entry in table.get("in_steps", ())}
    shape = shape_named(model)
    width, inner, queries = shape.hidden, shape.intermediate, shape.query_size
    products = (
        (queries + 2 * shape.key_size, width, (queries, queries + shape.key_size)),
        (width, queries, ()),
        (2 * inner, width, (inner,)),
        (width, inner, ()),
    )
    entries = [
        tune.TableEntry(adapted=True, M=rows, N=N, K=K, ends=ends) for N, K, ends in products
    ]
    return [entry for entry in entries if (entry.N, entry.K, entry.M) not in chosen]


def _choose_on_device(
    table: dict[str, Any], model: str, rows: int, entries: Sequence[tune.TableEntry]
) -> tuple[float, float]:
    """Put the choices into the table; return the step's microseconds before and after."""
    shape = shape_config(f"qwen2.5-{model}")
    shape |= {"num_hidden_layers": _LAYERS, "vocab_size": _VOCABULARY}
    policy = random_policy(shape, weight_format="nvfp4", lora_rank=tune.RANK, seed=0, device="cuda")
    config = EngineConfig(
        slots=rows, max_positions=_POSITIONS, max_new_tokens=_STEPS,
        ignore_end=True,
    )  # fmt: skip
    engine = Engine(policy, config)
    fill_cache(engine, 0)

    def clock(ways: Mapping[Key, Way]) -> float:
        with tuning.trying(ways):
            engine.forget_steps()
            fill_rows(engine, rows, 0)
            return 1e6 * min(time_steps(engine, rows, _POSITION, _STEPS) for _ in range(2))

    present: dict[Key, Way] = {
        (e.N, e.K, e.M): tuning.choose_adapted(0, e.N, e.K, e.M, tune.RANK) for e in entries
    }
    candidates = {
        (entry.N, entry.K, entry.M): [
            (choice, joining) for choice, joining in entry.ways(0) if joining is not None
        ]
        for entry in entries
    }
    chosen = choose_by_steps(present, candidates, clock)
    before, after = (median(clock(ways) for _ in range(_READINGS)) for ways in (present, chosen))
    engine.close()
    known = table.setdefault("in_steps", [])
    for entry in entries:
        way = tune.entry_of(entry, chosen[entry.N, entry.K, entry.M])
        known.append(way | {"rank": tune.RANK, "step_us": round(after, 1)})
    known.sort(key=lambda entry: (entry["N"] * entry["K"], entry["N"], entry["M"]))
    return before, after


def choose_by_steps(
    present: Mapping[Key, Way], candidates: Mapping[Key, Sequence[Way]], clock: Clock
) -> dict[Key, Way]:
    """Return the ways that make a step fastest, chosen product by product.

    Those of the table, `present`, are kept unless another one is faster. `clock` gives microseconds
    of a step with the given ways, and raises `RuntimeError` if one cannot be launched.
    """
    chosen = dict(present)
    worth_trying = {key: list(ways) for key, ways in candidates.items()}
    for _ in range(2):
        for key, ways in worth_trying.items():
            times = {way: _timed(clock, chosen | {key: way}) for way in ways}
            ways.sort(key=lambda way, times=times: times[way])  # type: ignore[misc]
            del ways[_TRIED_AGAIN:]
            finalists = list(dict.fromkeys([chosen[key], *ways[:_FINALISTS]]))
            readings: dict[Way, list[float]] = {way: [] for way in finalists}
            for _ in range(_READINGS):
                for way in finalists:
                    readings[way].append(_timed(clock, chosen | {key: way}))
            # If times are equal, the first wins: the current choice.
            chosen[key] = min(finalists, key=lambda way: median(readings[way]))
    return chosen


def _timed(clock: Clock, ways: Mapping[Key, Way]) -> float:
    try:
        return clock(ways)
    except RuntimeError as error:
        sys.stderr.write(f"{str(error).splitlines()[0]}\n")
        return float("inf")


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune as the command line says; what cannot be tuned ends it with a sentence and status 2."""
    parser = argparse.ArgumentParser(prog="python -m repro.measure.tune_steps")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    rows = tune.ADAPTED_ROWS
    parser.add_argument("--rows", nargs="+", type=int, choices=rows, default=rows)
    chosen = parser.parse_args(arguments)
    try:
        tune_steps(chosen.models, chosen.rows)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
