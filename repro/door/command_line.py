"""The flags of every command of `python -m repro`, in one place; nothing heavy is imported.

Flags name a target, a tier, seeds and folders; what a run is, is a Python value in `repro.targets`.
"""

from __future__ import annotations

import argparse
from typing import Any, get_args

import repro
from repro.door.command_parser import SentenceParser
from repro.spec.arm import FOUR_BIT_FORMATS, WEIGHT_FORMATS, OptimizerName, RolloutAdapter
from repro.spec.shapes import SHAPES

_Commands = argparse._SubParsersAction
# A command's parser, or a group of its flags.
_Flags = argparse._ActionsContainer
_TIERS = "smoke, systems, mini or paper"
_MODELS = "FOLDER|FILE|NAME"
_STALL = 600.0
_STEP = {"rank": 32, "prompts": 1, "group": 8, "prompt-tokens": 256, "completion-tokens": 2048}
# Flags that several commands have.
_SHARED: dict[str, dict[str, Any]] = {
    "tier": {"help": f"{_TIERS}; default: the smallest that runs here"},
    "runs": {"metavar": "FOLDER", "help": "folder of records (default: runs)"},
    "expected": {"metavar": "FOLDER", "help": "folder of expectations"},
    "columns": {
        "metavar": "ROLE=NAME,..",
        "help": "columns of your data, such as question=prompt,answer=solution",
    },
    "revision": {"metavar": "R", "help": "branch, tag or commit of a hub name"},
    "device": {"choices": ("cpu", "cuda"), "help": "default: cuda where there is one"},
    "seed": {"type": int, "default": 0, "metavar": "N", "help": "default: 0"},
    "set": {
        "action": "append",
        "metavar": "KEY=VALUE",
        "help": "change a setting by its dotted key, such as arm.lora_rank=16",
    },
}
_EXITS = (
    "Exit status: 0 when nothing is shown to be worse; 1 when something regressed; 2 when it could "
    "not be judged (nothing to compare with, no records, refused or failed ones, no GPU)."
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `command` is the name of the requested one."""
    parser: argparse.ArgumentParser = SentenceParser(
        prog="python -m repro",
        description="Reproduce QeRL (arXiv 2510.11696): a command and a verdict for each claim.",
    )
    parser.add_argument("--version", action="version", version=f"qerl-repro {repro.__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    listing = commands.add_parser(
        "list", help="show the paper's tables and figures, and what runs on this machine"
    )
    _switch(listing, "--all", "show every other target too")
    _add_train(commands)
    plan = commands.add_parser(
        "plan",
        help="show the runs, and their memory, disk, downloads and time",
        description="Exit status: 2 when no run fits this GPU or, in smoke, this machine; else 0.",
    )
    _add_choice(plan)
    _switch(plan, "--show-config", "print the scale's settings as JSON instead")
    _add_memory(commands)
    run = commands.add_parser("run", help="carry out the runs that have no record yet")
    _add_running(run)
    reproduce = commands.add_parser("reproduce", help="run, check, draw and report in one go")
    _add_running(reproduce)
    _add_report(reproduce)
    _add_check(commands)
    _add_compare(commands)
    _add_regress(commands)
    _add_reporting(commands)
    _add_bless(commands)
    _add_bundle(commands)
    _add_quantize(commands)
    _add_evaluate(commands)
    _add_export(commands)
    environment = commands.add_parser(
        "environment",
        help="print what records say about this machine: driver, packages, container",
        description="REPRO_CONTAINER, if set, must name an image with its digest "
        "(NAME@sha256:DIGEST).",
    )
    _flag(environment, "--out", "FILE", "also write the JSON to this file")
    _add_dose(commands)
    return parser


def _flag(parser: _Flags, name: str, metavar: str | None, help: str, **how: Any) -> None:
    """Add a flag or an argument that takes a value, which the help calls `metavar`."""
    parser.add_argument(name, metavar=metavar, help=help, **how)


def _count(parser: _Flags, name: str, help: str, **how: Any) -> None:
    """Add a flag that takes a whole number."""
    _flag(parser, name, "N", help, type=int, **how)


def _switch(parser: _Flags, name: str, help: str) -> None:
    """Add a flag that takes no value."""
    parser.add_argument(name, action="store_true", help=help)


def _add(parser: _Flags, *names: str) -> None:
    """Add flags that several commands have."""
    for name in names:
        parser.add_argument(f"--{name}", **_SHARED[name])


def _add_train(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train your own model on your own problems, and export the adapter",
        description="It trains LoRA on 4-bit weights with GRPO and records the run in --runs. The "
        "same command resumes. A CPU makes few short steps. Exit status: 0, 1 when the run failed, "
        "2 for bad input, 130 when interrupted.",
    )
    models = "a folder, a GGUF file, a name on the hub, or tiny (comes with the package)"
    _flag(parser, "--model", _MODELS, models, required=True)
    problems = "problems with answers: JSONL, JSON, CSV, Parquet, a name on the hub, gsm8k, ..."
    _flag(parser, "--data", "FILE|FOLDER|NAME", problems, required=True)
    reward = "your reward; default: 1 for a correct answer in a completion that ended by itself"
    _flag(parser, "--reward", "MODULE:FUNCTION", reward)
    parser.add_argument("--format", default="nvfp4", choices=WEIGHT_FORMATS)
    _switch(parser, "--aqn", "add QeRL's noise (AQN) during rollouts")
    parser.add_argument("--algorithm", default="grpo", choices=("grpo", "dapo", "gspo"))
    _flag(parser, "--template", "NAME|FILE", "prompt template; default: boxed (tiny: tiny)")
    _count(parser, "--ranks", "how many GPUs the run uses", default=1)
    until = "end when the held-out greedy accuracy reaches this"
    _flag(parser, "--until", "PERCENT", until, type=float)
    _flag(parser, "--out", "DIR", "new folder for the adapter, in PEFT's format")
    _count(parser, "--steps", "default: 150; 8 on a CPU (tiny: 30)")
    _add(parser, "revision", "columns", "seed", "set", "runs")
    # What `run` reads from its own line beside these.
    alone = dict.fromkeys(("expected", "tier", "seeds", "arms", "workers", "devices", "threads"))
    parser.set_defaults(**alone, stall_timeout=_STALL, executor="workers", example=True)


def _add_bless(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bless", help="store records, with which new ones are then compared"
    )
    _add_selection(parser, optional=True)
    complete = "every target with complete records of this kind of device; the others are named"
    _switch(parser, "--device", complete)
    _switch(parser, "--add", "add seeds or arms to what is stored already")
    part = "store a part of the planned seeds; claims stay undecided until the rest is added"
    _switch(parser, "--unfinished", part)


def _add_bundle(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bundle", help="pack a target's records to send them; --verify judges such a file"
    )
    _flag(parser, "file", "FILE", "the bundle: NAME.jsonl.xz")
    _flag(parser, "target", "TARGET", "see `list`", nargs="?")
    _flag(parser, "--tier", None, _TIERS)
    _add(parser, "runs")
    judged = "judge FILE, or each file of a folder; exit status 1 when a record is refused"
    _switch(parser, "--verify", judged)


def _add_dose(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "dose",
        help="compare AQN's noise with the rounding of each format, in a checkpoint",
        description="It prints the KL of each from the 16-bit policy, a token of that policy's "
        "completions, the entropy and the accuracy, before any training.",
    )
    _flag(parser, "--model", _MODELS, "a 16-bit checkpoint", required=True)
    parser.add_argument("--formats", default="nvfp4,mxfp4,nf4", metavar="A,B")
    sigmas = "default: the paper's range, Table 4"
    _flag(parser, "--sigmas", "A,B", sigmas, default="0.01,0.0005")
    _count(parser, "--prompts", "problems to ask; default: 16 on a GPU, else 4")
    _count(parser, "--new-tokens", "length of a completion; default: 128", default=128)
    _add(parser, "revision", "device")


def _add_check(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check",
        help="judge records, without running anything",
        description="Exit status: 1 when a record is refused, a check of the machinery failed, or "
        "something is worse than in the stored records of the same device; 2 when there is no "
        "record, and for bad input; else 0, whatever the verdicts on the paper's claims.",
    )
    _add_selection(parser, optional=True)
    shown = parser.add_mutually_exclusive_group()
    _switch(shown, "--json", "print JSON")
    rows = (
        "write a row per claim to FILE.csv and a row per value to FILE.values.csv; without FILE "
        "the first are printed"
    )
    _flag(shown, "--table", "FILE", rows, nargs="?", const="-")
    _switch(parser, "--blessed", "judge the stored records instead of those in --runs")


def _add_compare(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="show whether the second of two sets of records is worse",
        description=_EXITS,
    )
    _flag(parser, "old", "A", "a folder of runs, or `blessed`")
    _flag(parser, "new", "B", "a folder of runs")
    _flag(parser, "targets", "TARGET", "default: all with records", nargs="*")
    _flag(parser, "--tier", None, f"{_TIERS}; default: all with records")
    _add(parser, "expected")


def _add_regress(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "regress",
        help="measure again on a GPU, and compare with its stored records",
        description=_EXITS,
    )
    chosen = "default: table6 table3 step_lengths memory_budgets kernels; on two GPUs scaling"
    _flag(parser, "targets", "TARGET", chosen, nargs="*")
    folder = "continue in this folder (default: a new one, runs/regress/DATE-COMMIT)"
    _flag(parser, "--runs", "FOLDER", folder)
    _add(parser, "expected")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Add what selects runs."""
    _add_selection(parser)
    _flag(parser, "--seeds", "N", "how many seeds, or which: 0,3,4 (one alone: 3,)")
    _flag(parser, "--arms", "A,B", "only these arms")


def _add_memory(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "memory",
        help="plan the device memory of one GRPO step, by part, before anything runs",
        description="Exit status: 0 when the step fits the budget, 2 when it does not.",
    )
    _flag(parser, "--model", "SIZE", f"one of {', '.join(SHAPES)}", required=True)
    parser.add_argument("--format", default="nvfp4", choices=WEIGHT_FORMATS)
    for name, default in _STEP.items():
        _count(parser, f"--{name}", f"default: {default}", default=default)
    _flag(parser, "--budget", "SIZE", "default: 80GB", default="80GB")
    parser.add_argument("--optimizer", default="adamw", choices=get_args(OptimizerName))
    parser.add_argument("--rollout-adapter", default="apart", choices=get_args(RolloutAdapter))


def _add_running(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser)
    _count(parser, "--workers", "runs side by side")
    _count(parser, "--threads", "threads of each run")
    _flag(parser, "--devices", "N", "GPUs to fill with runs: how many, or 0,1")
    group = parser.add_argument_group("what training keeps beside metrics.jsonl")
    _flag(group, "--log", "A,B", "send metrics to trackers: tensorboard, wandb")
    _switch(group, "--completions", "keep the completions, one Parquet file per rollout")
    idle = "end a run after N steps in a row in which no reward differs in a group"
    _count(group, "--stop-idle", idle)
    _count(parser, "--ranks", "how many GPUs each run uses (docs/scale.md)", default=1)
    stall = "how long ranks wait for a silent one; default: 600, longer than a rollout"
    _flag(parser, "--stall-timeout", "SECONDS", stall, type=float, default=_STALL)
    where = "run on this machine or on a Ray cluster (docs/scale.md)"
    _flag(parser, "--executor", None, where, choices=("workers", "ray"), default="workers")


def _add_selection(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    _flag(parser, "targets", "TARGET", "see `list`", nargs="*" if optional else "+")
    _count(parser, "--steps", "cut training to N steps")
    _add(parser, "tier", "runs", "expected")
    changed = parser.add_argument_group("other settings (recorded under a name of their own)")
    model = "another checkpoint: a folder, a GGUF file, owner/model or owner/model:FILE.gguf"
    _flag(changed, "--model", _MODELS, model)
    _flag(
        changed, "--config", "FILE", "settings as TOML or JSON, as plan --show-config prints them"
    )
    _add(changed, "revision", "set")
    _count(changed, "--limit", "use at most N problems of a data set")


def _add_report(parser: argparse.ArgumentParser) -> None:
    _flag(parser, "--out", "FILE", "where to write (default: report.md in --runs)")


def _add_reporting(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report", help="write a report from records, without running anything"
    )
    _add_selection(parser, optional=True)
    _add_report(parser)
    _flag(parser, "--readme", "FILE", "write the generated blocks of this Markdown file again")
    page = "write one page of all claims to search, from stored records or those in --runs"
    _flag(parser, "--html", "FILE", page)
    _flag(parser, "--log", "A,B", "send the training curves to trackers: tensorboard, wandb")


def _add_quantize(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "quantize",
        help="round a 16-bit checkpoint to four bits",
        description="It rounds to nearest, without data, and writes the folder after its logits, "
        "read back, agree with the source quantised in memory.",
    )
    _flag(parser, "source", "SOURCE", "a 16-bit folder, GGUF file or hub name")
    _flag(parser, "out", "OUT", "the new folder; must not exist")
    _flag(parser, "--format", None, "default: nvfp4", default="nvfp4", choices=FOUR_BIT_FORMATS)
    _add(parser, "revision", "device")


def _add_export(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="write a trained adapter for other programs",
        description="It writes the folder after its logits, as peft or transformers reads it, "
        "agree with the trained policy.",
    )
    _flag(parser, "adapter", "ADAPTER", "an adapter's folder, or a run's")
    _flag(parser, "out", "OUT", "the new folder; must not exist")
    kinds = {"dest": "kind", "default": "adapter", "choices": ("adapter", "merged")}
    _flag(parser, "--as", None, "PEFT's files (default), or a merged 16-bit checkpoint", **kinds)
    _flag(parser, "--base", "FOLDER", "name this folder or GGUF file as the base")
    _add(parser, "revision", "device")


def _add_evaluate(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="measure the accuracy of a checkpoint on data sets",
        description="It prints strict and lenient accuracy, the share of truncated completions, "
        "mean@k, pass@k and maj@k.",
    )
    model = "a folder, GGUF file or hub name (default: the base of --adapter)"
    _flag(parser, "checkpoint", "CHECKPOINT", model, nargs="?")
    _flag(parser, "--adapter", "FOLDER", "an adapter's folder, or a run's")
    _flag(parser, "--data", "A,B", "data sets by name, or files and folders", required=True)
    _switch(parser, "--held-out", "of data without a test split, only what train holds out")
    _count(parser, "--limit", "problems of each (default: all)")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="default: 1")
    _flag(parser, "--at", "K,K", "k of pass@k; of maj@k if K <= 64 (default: K)")
    greedy = "0 is greedy; default: 0.6, as the paper"
    _flag(parser, "--temperature", None, greedy, type=float, default=0.6)
    _flag(parser, "--top-p", None, "default: 0.95, as the paper", type=float, default=0.95)
    _count(parser, "--tokens", "of a completion", default=4096)
    _count(parser, "--prompt-tokens", "of a prompt", default=1024)
    _flag(parser, "--template", "NAME|FILE", "of the prompt; default: paper", default="paper")
    stored = "of the weights (default: as the adapter was trained, else as they are stored)"
    _flag(parser, "--format", None, stored, choices=WEIGHT_FORMATS)
    _flag(parser, "--out", "FILE", "write the record there as JSON")
    _add(parser, "revision", "columns", "seed", "device")
