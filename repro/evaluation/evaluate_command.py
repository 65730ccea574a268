"""`python -m repro evaluate`: any checkpoint, with an adapter or without, asked as runs are.

The prompts, seeds, graders and estimators are those of `run`; only the choice of checkpoint, data
and sampling is the caller's. Whatever can be known before the weights are read is checked before:
data, template, lengths, k.

Easy to get wrong: an adapter on other weights than it was trained on. Its files say which format
those had, and that is what is loaded, unless `--format` says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from repro.data.load import load_problems
from repro.data.problem import digest_of_problems, require_answers
from repro.data.prompts import respelled, template_inputs, template_named, template_source
from repro.evaluation.asking import Evaluator, Question, questions
from repro.evaluation.flags import adapter_folder, at_of, data_of, names_of, sampling_of
from repro.evaluation.grades import Answers
from repro.evidence.environment import capture_environment
from repro.evidence.provenance import source_commit
from repro.evidence.record import Estimate
from repro.models.checkpoint import digest_of_files, resolve, weights_digest
from repro.models.files.adapter_files import TENSORS, base_named, load_adapted, read_adapter
from repro.models.loading import read_description
from repro.models.policy import Policy, device_named, load_policy, load_tokenizer
from repro.reward.answers import require_readable
from repro.reward.grader import GraderPool
from repro.rollout.for_policy import sampler_for
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.arm import WeightFormat
from repro.spec.checks import require
from repro.spec.config import SamplingConfig
from repro.spec.hub import resolved_revision
from repro.spec.whole_files import replace_text, require_place

_ROWS = 256
_SILENT_SECONDS = 15.0
_COLUMNS = ("accuracy", "accuracy_lenient", "truncation_rate")
Metrics = Mapping[str, Mapping[str, Estimate]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationRequest:
    """What will be asked, all of it known before the weights are read.

    `name` is the checkpoint's as it was given or as the adapter's files have it, `questions` are by
    data set, `longest` is the longest prompt in tokens.
    """

    name: str
    folder: Path
    adapter: Path | None
    weight_format: WeightFormat
    template: str
    questions: dict[str, list[Question]]
    longest: int
    sampling: SamplingConfig
    samples: int
    at: tuple[int, ...]
    seed: int


def main_evaluate(args: argparse.Namespace) -> int:
    """Ask and grade; print a table, write the record where one is asked for; return 0."""
    device = device_named(args.device)
    if args.out:
        require_place(Path(args.out))
    asked = asked_of(args)
    policy = _load(asked, device)
    began = time.perf_counter()
    with GraderPool() as pool:
        answers = _ask(asked, policy, pool)
    seconds = time.perf_counter() - began
    metrics = {name: one.estimates(asked.at) for name, one in answers.items()}
    if args.out:
        record = _record(asked, policy, answers, metrics) | {"seconds": seconds}
        replace_text(Path(args.out), json.dumps(record, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{_table(asked, answers, metrics)}; {seconds:.1f} s once loaded\n")
    return 0


def asked_of(args: argparse.Namespace) -> EvaluationRequest:
    """Return the questions of a command line; `ValueError` names the flag that does not fit."""
    adapter = None if args.adapter is None else adapter_folder(args.adapter)
    stored = None if adapter is None else read_adapter(adapter)
    template, sampling = template_source(args.template), sampling_of(args)
    name = args.checkpoint or (base_named(adapter, stored) if adapter and stored else "")
    of_base = stored.revision if stored and not args.checkpoint else None
    revision = args.revision or of_base or ""
    folder = resolve(name, revision, weights=False)
    description, tokenizer = read_description(folder), load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer; asking questions needs one")
    require_readable(template_named(template).reads, lambda text: respelled(text, tokenizer))
    rendered = {
        of: questions(
            require_answers(
                load_problems(
                    data_of(of, args.limit, args.columns), "test", alone=not args.held_out
                )
            ),
            template,
            tokenizer,
            max_prompt_tokens=args.prompt_tokens,
        )
        for of in names_of(args.data)
    }
    longest = max(len(question.prompt) for of in rendered.values() for question in of)
    positions = description.config.max_position_embeddings
    require(
        sampling.max_new_tokens <= positions - longest,
        f"--tokens {sampling.max_new_tokens}: the longest prompt has {longest} tokens and the "
        f"model {positions} positions; needs {positions - longest} or fewer",
    )
    trained = stored.weight_format if stored else None
    weight_format = args.format or description.stored_format or trained or "bf16"
    return EvaluationRequest(
        name=name,
        folder=resolve(name, revision),
        adapter=adapter,
        weight_format=cast(WeightFormat, weight_format),
        template=template,
        questions=rendered,
        longest=longest,
        sampling=sampling,
        samples=args.samples,
        at=at_of(args.at, args.samples),
        seed=args.seed,
    )


def _load(asked: EvaluationRequest, device: str) -> Policy:
    how: dict[str, Any] = {
        "weight_format": asked.weight_format,
        "compute_dtype": "float32" if device == "cpu" else "bfloat16",
        "device": device,
    }
    if asked.adapter is None:
        return load_policy(asked.folder, **how)
    return load_adapted(asked.adapter, checkpoint=asked.folder, **how)


def _ask(asked: EvaluationRequest, policy: Policy, pool: GraderPool) -> dict[str, Answers]:
    tokens = asked.sampling.max_new_tokens
    sampler = sampler_for(
        policy, rows=_ROWS, max_new_tokens=tokens, max_positions=asked.longest + tokens
    )
    tokenizer, reads = cast(Any, policy.tokenizer), template_named(asked.template).reads
    evaluator = Evaluator(sampler, tokenizer, pool, asked.seed, reads=reads)
    answers: dict[str, Answers] = {}
    for name, of in asked.questions.items():
        if isinstance(sampler, TorchSampler):
            sampler.on_token = _telling(name, len(of) * asked.samples)
        try:
            answers[name] = evaluator.ask(of, asked.sampling, samples=asked.samples)
        except RuntimeError as error:
            on_cpu = "DefaultCPUAllocator" in str(error)
            exhausted = on_cpu or isinstance(error, torch.OutOfMemoryError)
            asking = f"--samples {asked.samples} with --tokens {tokens}"
            require(not exhausted, f"{asking}: out of memory; needs fewer of either")
            raise
        require(bool(answers[name].groups), f"--data {name}: no gold answer could be read")
    return answers


def _telling(name: str, completions: int) -> Callable[[int, int], None]:
    """Return a callback that reports a CPU's progress on stderr every `_SILENT_SECONDS`."""
    began = last = time.monotonic()

    def tell(tokens: int, going: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SILENT_SECONDS:
            last = now
            sys.stderr.write(
                f"{name}, {completions} completions: {going} under way have {tokens} tokens each "
                f"({now - began:.0f} s)\n"
            )

    return tell


def _record(
    asked: EvaluationRequest, policy: Policy, answers: Mapping[str, Answers], metrics: Metrics
) -> dict[str, Any]:
    """Return the record as JSON values: checkpoint, questions, sampling and results."""
    commit, dirty = source_commit()
    adapter = asked.adapter and {
        "folder": str(asked.adapter),
        "sha256": digest_of_files([asked.adapter / TENSORS]),
    }
    template = template_named(asked.template)
    inputs = template_inputs(asked.template, policy.tokenizer)
    return {
        "schema": 1,
        "checkpoint": {
            "name": asked.name,
            "folder": str(asked.folder),
            "revision": resolved_revision(asked.folder),
            "sha256": weights_digest(policy.facts),
            "files": policy.facts["checkpoint_files"],
            "gguf": policy.facts.get("gguf"),
        },
        "end_token_ids": policy.facts["end_token_ids"],
        "adapter": adapter,
        "weight_format": asked.weight_format,
        "sampling": dataclasses.asdict(asked.sampling),
        "samples": asked.samples,
        "seed": asked.seed,
        "template": {"name": template.name, "sha256": inputs.pop("prompt_template"), **inputs},
        "sets": {
            name: {
                "problems": len(one.problems),
                "left_out": one.dropped,
                "sha256": digest_of_problems([q.problem for q in asked.questions[name]]),
                "metrics": {key: dataclasses.asdict(e) for key, e in metrics[name].items()},
            }
            for name, one in answers.items()
        },
        "commit": commit,
        "dirty": dirty,
        "environment": capture_environment(),
    }


def _table(asked: EvaluationRequest, answers: Mapping[str, Answers], metrics: Metrics) -> str:
    """Return a line per data set: problems, then percents; the lenient reading in brackets."""
    sampled = [f"mean_at_{asked.samples}"] if asked.at else []
    estimated = [f"{kind}_at_{k}" for k in asked.at for kind in ("pass", "maj")]
    sampled += [key for key in estimated if any(key in of_set for of_set in metrics.values())]
    rows = [["data", "problems", "strict", "lenient", "truncated", *sampled]]
    for name, one in answers.items():
        own = {
            key: "-" if e.value is None else f"{e.value:.1f}" for key, e in metrics[name].items()
        }
        both = [f"{own[key]} ({own[key + '_lenient']})" for key in sampled]
        rows.append([name, str(len(one.problems)), *(own[key] for key in _COLUMNS), *both])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    unit = f"percent; {asked.samples} samples per problem, temperature {asked.sampling.temperature}"
    return "\n".join([*lines, unit + (", in brackets by the lenient reading" if sampled else "")])
