"""Train a model of your own, quantise one, evaluate one: the functions behind `import repro`.

`train` is what `python -m repro train` carries out: a run like those of targets, recorded, watched
and resumed, and at its end exported. Nothing here imports torch before the request is checked.
"""

from __future__ import annotations

import argparse
import filecmp
import inspect
import json
import os
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from repro.data.load import is_generated, is_own
from repro.door.command_line import build_parser
from repro.door.own_run import request_text, selection_of
from repro.evaluation.flags import require_asking, require_outside, require_writing
from repro.evidence.provenance import source_at_start
from repro.evidence.receipts import violations
from repro.evidence.record import TRAINED, Record, find_record, read_record, record_path, run_folder
from repro.evidence.score_reached import Reached, score_reached
from repro.run.execute import FINE, INTERRUPTED, main_run
from repro.run.places import runs_folder
from repro.run.preflight import look_again
from repro.spec.checks import require, shown
from repro.spec.config import RunConfig
from repro.spec.tier import Tier, require_linux
from repro.spec.whole_files import require_place

_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """What a finished training left.

    Attributes
    ----------
    folder
        The run's folder: `metrics.jsonl`, and `adapter/` with what was trained, in float32; after
        full training `model/`.
    out
        The exported adapter with its tokenizer, or None where none was requested.
    accuracy_before, accuracy_after
        Percent of correct greedy answers to the held-out problems.
    steps
        Optimiser steps made.
    seconds
        Wall seconds of training and of evaluations during it.
    reached
        Where `until` was reached: percent, steps, and wall seconds from a cold start.
    """

    folder: Path
    out: Path | None
    accuracy_before: float | None
    accuracy_after: float | None
    steps: int
    seconds: float | None
    reached: Reached | None


def train(
    model: str | Path,
    data: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    reward: str | Callable[..., Any] | None = None,
    format: str = "nvfp4",
    aqn: bool = False,
    algorithm: str = "grpo",
    template: str | None = None,
    ranks: int = 1,
    until: float | None = None,
    out: str | Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    settings: Mapping[str, Any] | None = None,
    runs: str | Path | None = None,
) -> TrainedRun:
    """Train LoRA on a model's quantised weights by reinforcement learning, and export the adapter.

    The run is recorded in `runs`. The same call resumes one that was stopped. It returns what one
    that is finished left, if data and model are the same. Call it from the main thread.

    Parameters
    ----------
    model
        A checkpoint folder, a GGUF file, or a hub name (`owner/model`); `tiny` is in the package.
    data
        A file (JSONL, JSON, CSV, Parquet), a folder, a hub name, or a public set such as `gsm8k`.
    columns
        {role: column} where the data name them otherwise, such as `{"question": "prompt"}`.
    reward
        A function of a module's file, or `module:function`. It takes lists by name, one entry per
        completion: `completions`, `answers`, `prompts` or any column; it returns as many finite
        numbers or None. None here: 1 for a correct answer in a completion that ended by itself.
    format
        Of the frozen weights: `bf16`, `nf4`, `mxfp4` or `nvfp4`.
    aqn
        Whether noise is added to norms in rollouts (QeRL's AQN); any format takes it.
    algorithm
        `grpo`, `dapo` or `gspo`.
    template
        Prompt template by name or file; None takes `boxed`, of the model `tiny` its own.
    ranks
        GPUs of the run.
    until
        Percent of correct greedy answers to held-out problems at which training ends; tested about
        ten times along the run.
    out
        New folder for the adapter in PEFT's layout, with its tokenizer; must not exist. Full
        training takes none.
    steps
        Optimiser steps; None takes 150 on a GPU, 8 on a CPU, of the model `tiny` 30.
    revision
        Branch, tag or commit of a hub name; None takes its `main`, or what a target pins.
    settings
        Any other setting, as `--set`: `{"optimizer.learning_rates.lora_4bit": 5e-5}`.
    runs
        Folder of records; None takes `$REPRO_RUNS`, else `runs`.

    Returns
    -------
    TrainedRun

    Raises
    ------
    ValueError
        For a request that cannot be carried out here, before anything is downloaded; names all
        that is wrong.
    FileExistsError
        When `out` exists and is not this run's export.
    RuntimeError
        When the run failed; its reason is printed and recorded.
    KeyboardInterrupt
        When it was interrupted; what was trained is in a checkpoint.
    """
    thread = threading.current_thread()
    main = thread is threading.main_thread()  # which alone is told of signals
    require(main, f"train is called in thread {thread.name}; needs the main thread of a process")
    flags: dict[str, object] = {"model": model, "data": data, "columns": _pairs(columns)}
    flags |= {"format": format, "aqn": aqn, "algorithm": algorithm, "template": template}
    flags |= {"ranks": ranks, "until": until, "out": out, "steps": steps, "seed": seed}
    flags |= {"revision": revision, "runs": runs}
    flags["reward"] = _function_named(reward) if callable(reward) else reward
    named = settings is None or isinstance(settings, Mapping)
    require(named, f"settings is {settings!r}; needs a dict such as {{'arm.lora_rank': 16}}")
    items = (settings or {}).items()
    texts = {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in items}
    flags["set"] = [f"{key}={text}" for key, text in texts.items()]
    status, trained = _carry_out(_line("train", **flags))
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if trained is None:
        raise RuntimeError("the run failed; its record, `seed-*.failed-*.json`, has the reason")
    return trained


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    format: str = "nvfp4",
    revision: str | None = None,
    device: str | None = None,
) -> Path:
    """Write a 16-bit checkpoint as a 4-bit one, compared before it is done; return the folder.

    Parameters
    ----------
    model
        A 16-bit folder, GGUF file or hub name.
    out
        The new folder; must not exist.
    format
        `nvfp4`, `mxfp4` or `nf4`, round to nearest.
    revision
        Branch, tag or commit of a hub name.
    device
        `cpu` or `cuda`; None takes CUDA where there is one.

    Raises
    ------
    ValueError
        When the model cannot be read or is quantised already, or `out` exists.
    """
    args = _line("quantize", model, out, format=format, revision=revision, device=device)
    require_writing(args)
    from repro.export.quantising import main_quantize

    main_quantize(args)
    return Path(args.out)


def evaluate(
    model: str | Path | None = None,
    *,
    data: str,
    adapter: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    held_out: bool = False,
    limit: int | None = None,
    samples: int = 1,
    temperature: float = 0.6,
    top_p: float = 0.95,
    tokens: int = 4096,
    prompt_tokens: int = 1024,
    template: str = "paper",
    seed: int = 0,
    format: str | None = None,
    revision: str | None = None,
    device: str | None = None,
) -> dict[str, dict[str, float | None]]:
    """Evaluate a checkpoint, with or without an adapter, on the problems of data sets.

    Parameters
    ----------
    model
        A folder, GGUF file or hub name; None takes the base that the adapter names.
    data
        Data sets by name, or files and folders, comma-separated; their test splits.
    adapter
        An adapter's folder, or a run's.
    held_out
        Whether data without a test split are asked only for what `train` holds out, or whole.
    limit
        Problems of each set; None takes all.
    samples, temperature, top_p, tokens
        Completions per problem, how they are drawn (temperature 0 is greedy), and their longest.
    prompt_tokens, template
        Longest prompt, and the prompt template by name or file.
    format
        Of the weights; None takes that with which the adapter was trained, else the stored one.

    Returns
    -------
    dict
        By data set, metrics by name: `accuracy`, `accuracy_lenient`, `truncation_rate` in percent,
        `pass_at_<samples>` where several are drawn; None where there is no value.

    Raises
    ------
    ValueError
        For a request that cannot be carried out; names all that is wrong.
    """
    flags: dict[str, object] = {"data": data, "adapter": adapter, "columns": _pairs(columns)}
    flags |= {"limit": limit, "samples": samples, "temperature": temperature, "top_p": top_p}
    flags["held_out"] = held_out
    flags |= {"tokens": tokens, "prompt_tokens": prompt_tokens, "template": template}
    flags |= {"seed": seed, "format": format, "revision": revision, "device": device}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        args = _line("evaluate", model, **flags, out=record)
        require_asking(args)
        from repro.evaluation.evaluate_command import main_evaluate

        main_evaluate(args)
        sets = json.loads(record.read_text())["sets"]
    return {
        name: {key: one["value"] for key, one in of["metrics"].items()} for name, of in sets.items()
    }


def main_train(args: argparse.Namespace) -> int:
    """Carry out `python -m repro train`; return the exit status, as `run` does."""
    return _carry_out(args)[0]


def _line(command: str, *given: object, **flags: object) -> argparse.Namespace:
    """Return the parsed line of a command; what is None or False stands in none."""
    words: list[str] = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            several = isinstance(value, list | tuple)
            require(name == "set" or not several, f"{name} is {value!r}; needs one value")
            values = value if isinstance(value, list) else [value]
            words += [f"{flag}={one}" for one in values]
    named = [str(value) for value in given if value is not None]
    words += ["--", *named] if named else []
    return build_parser().parse_args([command, *words])


def _carry_out(args: argparse.Namespace) -> tuple[int, TrainedRun | None]:
    """Carry out a line of `train`; return the exit status, and what a finished run left."""
    require_linux()
    look_again()
    source_at_start()  # what the record is of
    folder, out = runs_folder(args.runs), args.out and Path(args.out)
    selection = selection_of(args)
    (run,) = selection.plan()
    recorded = find_record(run, folder)
    free = out is None or recorded is not None or not out.exists()
    require(free, f"--out {out} exists; name a new folder")
    require(
        out is None or TRAINED[run.arm.training] == "adapter",
        f"--out {out} is for an adapter, and arm.training is full; the run's folder has the model",
    )
    if recorded is not None:
        left = run_folder(run, folder) / TRAINED[run.arm.training]
        require(
            any(left.glob("*.safetensors")),
            f"{left} is gone; put back what was there, or move {recorded} away to train again",
        )
    if out is not None and not out.exists():
        require_outside(out, args.model)
        require_place(out)
    if run.tier == Tier.SMOKE.value:
        args.threads = len(os.sched_getaffinity(0))
    status = main_run(args, (selection, request_text(selection, folder, args.ranks)))
    if status != FINE or os.environ.get("RANK", "0") != "0":  # of torchrun's, the first exports
        return status, None
    record = read_record(record_path(run, folder))
    if out is not None:
        _export(run_folder(run, folder), out)
    trained = _trained(run, record, folder, out)
    sys.stdout.write("\n".join(_end_lines(args, run, record, trained)) + "\n")
    return FINE, trained


def _export(folder: Path, out: Path) -> None:
    """Write a run's adapter to `out`, unless that has it already."""
    from repro.export.exporting import main_export

    if out.exists():
        same = (out / _ADAPTER).is_file() and filecmp.cmp(
            out / _ADAPTER, folder / "adapter" / _ADAPTER, shallow=False
        )
        if not same:
            raise FileExistsError(f"{out} exists and is not this run's adapter; name a new folder")
        return
    try:
        main_export(_line("export", folder, out))
    except (OSError, ValueError):
        if not out.exists():
            raise
        _export(folder, out)  # the same command, started twice, was there first


def _trained(run: RunConfig, record: Record, runs: Path, out: Path | None) -> TrainedRun:
    until = run.scale.evaluation.until
    reached = score_reached(record, until) if until else None
    if reached is not None:
        reached = _cold(reached, record, run_folder(run, runs)) if reached.cold else None
    return TrainedRun(
        folder=run_folder(run, runs),
        out=out,
        accuracy_before=record.value("accuracy_greedy_start"),
        accuracy_after=record.value("accuracy_greedy"),
        steps=int(record.facts["optimizer_steps"]),
        seconds=record.value("train_seconds"),
        reached=reached,
    )


def _cold(reached: Reached, record: Record, folder: Path) -> Reached:
    """Return when a score was reached with what came before loading: the process's own start."""
    kept = (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    times = [line["time"] for line in map(json.loads, kept) if line["step"] == reached.steps]
    if not times:
        return reached
    begun, ended = map(datetime.fromisoformat, (record.started, times[-1]))
    # Of a run in several starts, those before this one are in the seconds that it counted itself.
    seconds = max(reached.seconds, (ended - begun).total_seconds())
    return replace(reached, seconds=seconds)


# Steps at each end of a run over which its reward is averaged.
_EDGE = 5


def _end_lines(
    args: argparse.Namespace, run: RunConfig, record: Record, trained: TrainedRun
) -> list[str]:
    """Return what is printed at the end: accuracies, places, and the next commands."""

    def percent(value: float | None) -> str:
        return "not known" if value is None else f"{value:.1f} %"

    lines = [f"Careful: {sentence}." for sentence in violations(record)]
    if trained.reached is not None:
        lines.append(trained.reached.text())
    elif args.until is not None:
        lines.append(f"did not reach {args.until:g} % at a test in {trained.steps} steps")
    minutes = "" if trained.seconds is None else f" ({trained.seconds / 60:.1f} minutes)"
    kind = TRAINED[run.arm.training]
    left = trained.out or trained.folder / kind
    sampling = run.scale.evaluation.sampling
    template = args.template or run.scale.prompt_template
    named = ["--adapter", str(left)] if run.arm.training == "lora" else [str(left)]
    asked = ["evaluate", *named, "--data", args.data, "--template", template]
    asked += ["--temperature", "0", "--tokens", str(sampling.max_new_tokens)]
    asked += ["--prompt-tokens", str(run.scale.max_prompt_tokens)]
    asked += ["--columns", args.columns] if args.columns else []
    asked += ["--held-out"] if is_own(run.scale.data.source) else []
    asked += ["--limit", "100"] if is_generated(run.scale.data.source) else []
    merged = [str(trained.folder), f"{trained.out or 'my-model'}-merged", "--as", "merged"]
    following = [asked] if trained.accuracy_after is not None else []
    following += [["export", *merged]] if run.arm.training == "lora" else []
    rewards = [value for value in record.series.get("reward", ()) if value is not None]
    edge = max(1, min(_EDGE, len(rewards) // 2))
    if rewards:
        first, last = fmean(rewards[:edge]), fmean(rewards[-edge:])
        lines.append(f"Reward in training: {first:.2f} at first, {last:.2f} at last.")
    steps = "step" if trained.steps == 1 else "steps"
    return [
        *lines,
        f"Held-out accuracy, greedy: {percent(trained.accuracy_before)} before, "
        f"{percent(trained.accuracy_after)} after {trained.steps} {steps}{minutes}.",
        f"The {kind} is in {left}, the run in {trained.folder}.",
        *(["Next:"] if following else []),
        *(f"  python -m repro {shlex.join(command)}" for command in following),
    ]


def _pairs(columns: Mapping[str, str] | None) -> str | None:
    """Return columns by role as a command line names them."""
    named = columns is None or isinstance(columns, Mapping)
    require(named, f"columns is {columns!r}; needs a dict such as {{'question': 'prompt'}}")
    return ",".join(f"{role}={name}" for role, name in (columns or {}).items()) or None


def _function_named(function: Callable[..., Any]) -> str:
    """Return `module:function` of a function that worker processes can import."""
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", "")
    importable = module not in ("", "__main__") and name.isidentifier()
    require(
        importable and inspect.isfunction(function),
        f"reward is {shown(function)}; worker processes import it, so it needs to be a function of "
        "a module's file, such as my_rewards.py, and not of the script or notebook itself, or "
        "'module:name' of any other object that such a file names",
    )
    return f"{module}:{name}"
