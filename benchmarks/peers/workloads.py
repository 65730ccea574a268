"""What every way is given, as files: rows of an update, questions of a whole step, a checkpoint.

An update has 16 prompts with 8 completions each, prompt-major, of random tokens; the lengths of the
completions are drawn anew for each step, as in training (`repro.spec.step_scale.StepPoint`):

    spread    log-normal, 300 tokens on average
    equal     as many tokens in all as `spread` has in that step, every row of one length
    long      every row of 256 + 2,048 tokens, as the paper times a step (App. J)

A whole step (`STEPS`) samples completions of at most 512 tokens. Rewards are real ones, or paid in
turn whatever a completion says, so that every row has an advantage. At 7B weights are random,
prompts have 256 tokens and no row ends before 512.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.harness import WARM_UP
from repro.data.load import load_problems, source_named
from repro.data.problem import Problem
from repro.data.prompts import render, template_named
from repro.measure.rollout_cells import random_prompts
from repro.models.random_policy import shape_config
from repro.rl.collect import order_of_epoch
from repro.spec.config import DataConfig, derive_seed
from repro.spec.step_scale import StepPoint
from repro.targets.steps import LENGTH_POINTS

UPDATES = ("spread", "equal", "long")
# `tiny` is for a rehearsal on a CPU.
MODELS = ("135m", "0.5b", "7b", "tiny")
_LONG = StepPoint(name="7b_long", model="7b", prompts=16, group=8)
TEMPLATE = "boxed"
# They lie at the end of a vocabulary.
_SPECIAL_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A step that samples its completions.

    The longest prompt has `prompt_tokens`, and every one where no row ends early. `reward` is a
    function of `benchmarks.peers.harness`; `steps` include the warm-up's. Trials of the workload
    `swept_as`, or its own, choose a peer's settings.
    """

    model: str = "0.5b"
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 384
    new_tokens: int = 512
    reward: str = "in_turn"
    ignore_end: bool = False
    steps: int = 10
    swept_as: str = ""


TRIAL_STEPS = WARM_UP + 3
_TINY_STEP = WholeStep(model="tiny", prompts=2, group=2, new_tokens=8, steps=5)
STEPS = {
    "16x8": WholeStep(),
    "16x8_real": WholeStep(reward="boxed", steps=20, swept_as="16x8"),
    "64x8": WholeStep(prompts=64),
    "64x8_real": WholeStep(prompts=64, reward="boxed", steps=20, swept_as="64x8"),
    "7b_16x8": WholeStep(model="7b", prompt_tokens=256, ignore_end=True),
    "tiny_2x2": _TINY_STEP,
    "tiny_2x2_real": dataclasses.replace(_TINY_STEP, reward="boxed", swept_as="tiny_2x2"),
}


def point_of(model: str, lengths: str) -> StepPoint:
    """Return the sizes of an update's rows."""
    if lengths == "long":
        return _LONG
    if model == "tiny":
        small = dataclasses.replace(point_of("135m", lengths), prompts=2, group=2, prompt_tokens=5)
        return dataclasses.replace(small, completion_tokens=40, mean_tokens=9)
    return next(p for p in LENGTH_POINTS if (p.model, p.lengths) == (model, lengths))


def write_rows(model: str, lengths: str, steps: int, folder: Path, place: Path) -> dict[str, Any]:
    """Write the rows of an update's steps: a JSON line of P `prompts` and B `completions` each.

    Both are of token ids. Lengths depend on the step alone, and those of `equal` come of the same
    draws as `spread`. Returns the file, `rows`, and the sizes of a step.
    """
    point, out = point_of(model, lengths), place / "rows.jsonl"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = config["vocab_size"] - _SPECIAL_TOKENS
    with out.open("w", encoding="utf-8") as file:
        for step in range(steps):
            seed = derive_seed("rows", step)
            generator = torch.Generator().manual_seed(seed)
            completions = [
                torch.randint(0, vocabulary, (length,), generator=generator).tolist()
                for length in point.drawn_lengths(seed)
            ]
            prompts = random_prompts(point.prompts, point.prompt_tokens, vocabulary, seed)
            file.write(json.dumps({"prompts": prompts, "completions": completions}) + "\n")
    return {
        "rows": str(out),
        "prompts": point.prompts,
        "group": point.group,
        "prompt_tokens": point.prompt_tokens,
        "new_tokens": point.completion_tokens,
    }


def write_questions(request: Mapping[str, Any], data: str, place: Path) -> dict[str, str]:
    """Write the questions of a row's steps, as a run of this project meets them.

    Returns `data`, the source of this project's run, and `questions`, a file for peers: a JSON line
    for each `prompt`, a list of one message, and its `answers`, in the order of the run's steps.
    """
    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    if tokenizer.chat_template is None:
        raise ValueError(f"{request['folder']} has no chat template; whole steps need one")
    if request["ignore_end"]:
        data = str(place / "problems.jsonl")
        _write_problems(tokenizer, request, Path(data))
    source = source_named(data)
    seed, size = request["seed"], request["prompts"]
    problems = load_problems(DataConfig(source=source), "train")
    steps = len(problems) // size
    if steps < request["steps"]:
        raise ValueError(f"{data} has {steps} rollouts of {size}; {request['steps']} are needed")
    out = place / "questions.jsonl"
    order, build = order_of_epoch(seed, 0, len(problems)), template_named(TEMPLATE).build
    asked = [problems[number] for number in order[: request["steps"] * size]]
    said = [([{"role": "user", "content": build(own.question)}], own.answer) for own in asked]
    lines = [json.dumps({"prompt": messages, "answers": answer}) for messages, answer in said]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"data": source, "questions": str(out)}


def _write_problems(tokenizer: Any, request: Mapping[str, Any], out: Path) -> None:
    """Write as many problems as the steps take, and are held out, of the step's prompt tokens."""
    # Digits, of which Qwen's tokenizer makes a token each.
    digits, wanted, missing = "", request["prompt_tokens"], 1
    while missing > 0:
        problem = Problem(id="drawn", question=f"1000{digits}", answer="0")
        missing = wanted - len(render(problem, TEMPLATE, tokenizer))
        digits += "7" * missing
    if missing:
        raise ValueError(f"a prompt has {wanted - missing} tokens or more; {wanted} were planned")
    numbers = range(1000, 1000 + 2 * request["prompts"] * request["steps"])
    lines = [json.dumps({"question": f"{number}{digits}", "answer": "0"}) for number in numbers]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_checkpoint(model: str, tokenizer: Any, out: str, device: str) -> None:
    """Save a model with random weights in bfloat16, and a tokenizer, as a folder."""
    config = AutoConfig.for_model(**shape_config(f"qwen2.5-{model}"))
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    name, tokens, folder, where = sys.argv[1:]
    write_checkpoint(name, AutoTokenizer.from_pretrained(tokens), folder, where)
