"""The flags of every command of `python -m repro`, in one place; nothing heavy is imported.

Flags name a target, a tier, seeds and folders; what a run is, is a Python value in `repro.targets`.
"""

from __future__ import annotations

import argparse
from typing import Any, get_args

import repro
from repro.door.command_parser import SentenceParser
from repro.spec.arm import WEIGHT_FORMATS, OptimizerName, RolloutAdapter
from repro.spec.checks import require
from repro.spec.shapes import SHAPES

_Commands = argparse._SubParsersAction
_TIERS = "smoke, systems, mini or paper"
_FOUR_BITS = tuple(kind for kind in WEIGHT_FORMATS if kind != "bf16")
# Flags that several commands have.
_SHARED: dict[str, dict[str, Any]] = {
    "tier": {"help": f"{_TIERS}; default: the smallest that runs here"},
    "runs": {"metavar": "FOLDER", "help": "folder of records (default: runs)"},
    "expected": {"metavar": "FOLDER", "help": "folder of expectations"},
    "reward": {
        "metavar": "MODULE:FUNCTION",
        "help": "use your own reward function (docs/train.md)",
    },
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
_COUNT: dict[str, Any] = {"type": int, "metavar": "N"}
# The flags of `plan memory --model SIZE`: their defaults, and how they are read.
MEMORY_FLAGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "format": ("nvfp4", {"choices": WEIGHT_FORMATS}),
    "rank": (32, _COUNT),
    "prompts": (1, _COUNT),
    "group": (8, _COUNT),
    "prompt_tokens": (256, _COUNT),
    "completion_tokens": (2048, _COUNT),
    "budget": ("80GB", {"metavar": "SIZE"}),
    "optimizer": ("adamw", {"choices": get_args(OptimizerName)}),
    "rollout_adapter": ("apart", {"choices": get_args(RolloutAdapter)}),
}


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
    listing.add_argument("--all", action="store_true", help="show every other target too")
    _add_train(commands)
    plan = commands.add_parser(
        "plan", help="show the runs, and their memory, disk, downloads and time"
    )
    _add_planning(plan)
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
    _add_environment(commands)
    _add_dose(commands)
    return parser


def _add(parser: argparse.ArgumentParser, *names: str) -> None:
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
    parser.add_argument(
        "--model", required=True, metavar="FOLDER|FILE|NAME",
        help="a folder, a GGUF file, a name on the hub, or tiny (comes with the package)",
    )  # fmt: skip
    parser.add_argument(
        "--data", required=True, metavar="FILE|FOLDER|NAME",
        help="problems with answers: JSONL, JSON, CSV, Parquet, a name on the hub, gsm8k, ...",
    )  # fmt: skip
    parser.add_argument(
        "--reward", metavar="MODULE:FUNCTION",
        help="your reward; default: 1 for a correct answer in a completion that ended by itself",
    )  # fmt: skip
    parser.add_argument("--format", default="nvfp4", choices=WEIGHT_FORMATS)
    parser.add_argument("--aqn", action="store_true", help="add QeRL's noise (AQN) during rollouts")
    parser.add_argument("--algorithm", default="grpo", choices=("grpo", "dapo", "gspo"))
    parser.add_argument("--template", metavar="NAME|FILE", help="prompt template; default: boxed")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="how many GPUs the run uses"
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="PERCENT",
        help="end when the held-out greedy accuracy reaches this",
    )
    parser.add_argument("--out", metavar="DIR", help="new folder for the adapter, in PEFT's format")
    parser.add_argument("--steps", type=int, metavar="N", help="default: 150; 8 on a CPU")
    _add(parser, "columns", "seed", "set", "runs")


def _add_bless(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bless", help="store records, with which new ones are then compared"
    )
    _add_selection(parser, optional=True)
    parser.add_argument(
        "--device",
        action="store_true",
        help="every target with complete records of this kind of device; the others are named",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="add seeds or arms to what is stored already",
    )
    parser.add_argument(
        "--unfinished",
        action="store_true",
        help="store a part of the planned seeds; claims stay undecided until the rest is added",
    )


def _add_bundle(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bundle",
        help="pack a target's records to send them; --verify judges such a file",
    )
    parser.add_argument("file", metavar="FILE", help="the bundle: NAME.jsonl.xz")
    parser.add_argument("target", metavar="TARGET", nargs="?", help="see `list`")
    parser.add_argument("--tier", help=_TIERS)
    _add(parser, "runs")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="judge FILE, or each file of a folder; exit status 1 when a record is refused",
    )


def _add_dose(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "dose",
        help="compare AQN's noise with the rounding of each format, in a checkpoint",
        description="It reads norms and weights, layer by layer. With --prompts it also measures "
        "the KL on the policy's own completions.",
    )
    parser.add_argument(
        "--model", required=True, metavar="FOLDER|FILE|NAME", help="a 16-bit checkpoint"
    )
    parser.add_argument("--formats", default="nvfp4,mxfp4,nf4", metavar="A,B")
    parser.add_argument(
        "--sigmas", default="0.01,0.0005", metavar="A,B", help="default: the paper's range, Table 4"
    )
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="problems for the KL; default: 16 on a GPU, else 0"
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="length of a completion; default: 128",
    )
    _add(parser, "revision", "device")


def _add_environment(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "environment",
        help="print what records say about this machine: driver, packages, container",
        description="REPRO_CONTAINER, if set, must name an image with its digest "
        "(NAME@sha256:DIGEST).",
    )
    parser.add_argument("--out", metavar="FILE", help="also write the JSON to this file")


def _add_check(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check",
        help="judge records, without running anything",
        description="Exit status: 1 when a record is refused, a check of the machinery failed, or "
        "something is worse than in the stored records of the same device; 2 when there is no "
        "record, and for bad input; else 0, whatever the verdicts on the paper's claims.",
    )
    _add_selection(parser, optional=True)
    _add(parser, "reward")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument(
        "--table",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write a row per claim to FILE.csv and a row per value to FILE.values.csv; without "
        "FILE the first are printed",
    )
    parser.add_argument(
        "--blessed",
        action="store_true",
        help="judge the stored records instead of those in --runs",
    )


_EXITS = (
    "Exit status: 0 when nothing is shown to be worse; 1 when something regressed; 2 when it could "
    "not be judged (nothing to compare with, no records, refused or failed ones, no GPU)."
)


def _add_compare(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="show whether the second of two sets of records is worse",
        description=_EXITS,
    )
    parser.add_argument("old", metavar="A", help="a folder of runs, or `blessed`")
    parser.add_argument("new", metavar="B", help="a folder of runs")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all with records")
    parser.add_argument("--tier", help=f"{_TIERS}; default: all with records")
    _add(parser, "expected")


def _add_regress(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "regress",
        help="measure again on a GPU, and compare with its stored records",
        description=_EXITS,
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="default: table6 table3 step_lengths memory_budgets kernels",
    )
    parser.add_argument(
        "--runs",
        metavar="FOLDER",
        help="continue in this folder (default: a new one, runs/regress/DATE-COMMIT)",
    )
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="measure all seeds, so that the records can be stored",
    )
    _add(parser, "expected")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Add what selects runs, and the room that they have."""
    _add_selection(parser)
    _add(parser, "reward")
    parser.add_argument("--seeds", metavar="N", help="how many seeds, or a list such as 0,3,4")
    parser.add_argument("--arms", metavar="A,B", help="only these arms")
    parser.add_argument("--workers", type=int, metavar="N", help="runs side by side")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each run")
    parser.add_argument("--devices", metavar="N", help="GPUs to fill with runs: how many, or 0,1")


def _add_planning(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser)
    parser.add_argument(
        "--ranks", metavar="1,2,4", help="print measured steps on so many GPUs instead"
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print the scale's settings as JSON instead"
    )
    group = parser.add_argument_group(
        "memory --model SIZE",
        "Device memory of one GRPO step, by part, before anything runs; SIZE is one of "
        f"{', '.join(SHAPES)}. Exit status: 0 when the step fits, 2 when it does not.",
        argument_default=argparse.SUPPRESS,  # those that are not given are not in the namespace
    )
    for name, (default, reading) in MEMORY_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", help=f"default: {default}", **reading)


def asks_for_bytes(args: argparse.Namespace) -> bool:
    """Whether `plan` is to print the bytes of a step rather than a target's runs.

    `memory` is a target, too; with `--model` its plan is that of a model's size. Flags of the one
    with the other raise.
    """
    asks = args.targets == ["memory"] and args.model is not None
    given = [name for name, value in vars(args).items() if value is not None and value is not False]
    flags = {n: f"--{n.replace('_', '-')}" for n in given if n not in ("targets", "command")}
    if asks:
        others = [flag for n, flag in flags.items() if n not in MEMORY_FLAGS and n != "model"]
        require(not others, f"plan memory --model takes no {', '.join(others)}")
    else:
        own = [flag for name, flag in flags.items() if name in MEMORY_FLAGS]
        require(not own, f"{', '.join(own)}: only with plan memory --model SIZE")
    return asks


def _add_running(parser: argparse.ArgumentParser) -> None:
    _add_choice(parser)
    group = parser.add_argument_group("what training keeps beside metrics.jsonl")
    group.add_argument("--log", metavar="A,B", help="send metrics to trackers: tensorboard, wandb")
    group.add_argument(
        "--completions",
        action="store_true",
        help="keep the completions, one Parquet file per rollout",
    )
    group.add_argument(
        "--stop-idle",
        type=int,
        metavar="N",
        help="end a run after N steps in a row in which no reward differs in a group",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="how many GPUs each run uses (docs/scale.md)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long ranks wait for a silent one; default: 600, longer than a rollout",
    )
    parser.add_argument(
        "--executor", choices=("workers", "ray"), default="workers",
        help="run on this machine or on a Ray cluster (docs/scale.md)",
    )  # fmt: skip


def _add_selection(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "targets", nargs="*" if optional else "+", metavar="TARGET", help="see `list`"
    )
    parser.add_argument(
        "--data",
        metavar="FILE|FOLDER|NAME",
        help="your own problems instead: JSONL, JSON, CSV, Parquet, or a name on the hub",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="cut training to N steps")
    _add(parser, "tier", "columns", "runs", "expected")
    changed = parser.add_argument_group("other settings (recorded under a name of their own)")
    changed.add_argument(
        "--model",
        metavar="FOLDER|FILE|NAME",
        help="another checkpoint: a folder, a GGUF file, owner/model or owner/model:FILE.gguf",
    )
    changed.add_argument(
        "--config",
        metavar="FILE",
        help="settings as TOML or JSON, as plan --show-config prints them",
    )
    for name in ("revision", "set"):
        changed.add_argument(f"--{name}", **_SHARED[name])
    changed.add_argument(
        "--template",
        metavar="NAME|FILE",
        help="prompt template: paper, boxed, gsm8k or a file (docs/train.md)",
    )
    changed.add_argument(
        "--limit", type=int, metavar="N", help="use at most N problems of a data set"
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="FILE", help="where to write (default: report.md in --runs)"
    )
    parser.add_argument("--figures", metavar="FOLDER", help="folder of the figures to link")


def _add_reporting(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report", help="write a report from records, without running anything"
    )
    _add_selection(parser, optional=True)
    _add(parser, "reward")
    _add_report(parser)
    parser.add_argument(
        "--readme", metavar="FILE", help="write the generated blocks of this Markdown file again"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write one page of all claims to search, from stored records or those in --runs",
    )
    parser.add_argument(
        "--log", metavar="A,B", help="send the training curves to trackers: tensorboard, wandb"
    )


def _add_quantize(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "quantize",
        help="round a 16-bit checkpoint to four bits",
        description="It rounds to nearest, without data, and writes the folder after its logits, "
        "read back, agree with the source quantised in memory.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a 16-bit folder, GGUF file or hub name")
    parser.add_argument("out", metavar="OUT", help="the new folder; must not exist")
    parser.add_argument("--format", default="nvfp4", choices=_FOUR_BITS, help="default: nvfp4")
    _add(parser, "revision", "device")


def _add_export(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="write a trained adapter for other programs",
        description="It writes the folder after its logits, as peft or transformers reads it, "
        "agree with the trained policy.",
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="an adapter's folder, or a run's")
    parser.add_argument("out", metavar="OUT", help="the new folder; must not exist")
    parser.add_argument(
        "--as",
        dest="kind",
        default="adapter",
        choices=("adapter", "merged"),
        help="PEFT's files (default), or a merged 16-bit checkpoint",
    )
    parser.add_argument(
        "--base", metavar="FOLDER", help="name this folder or GGUF file as the base"
    )
    _add(parser, "revision", "device")


def _add_evaluate(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="measure the accuracy of a checkpoint on data sets",
        description="It prints strict and lenient accuracy, the share of truncated completions, "
        "mean@k, pass@k and maj@k.",
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CHECKPOINT",
        help="a folder, GGUF file or hub name (default: the base of --adapter)",
    )
    parser.add_argument("--adapter", metavar="FOLDER", help="an adapter's folder, or a run's")
    parser.add_argument(
        "--data", required=True, metavar="A,B", help="data sets by name, or files and folders"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="problems of each (default: all)")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="default: 1")
    parser.add_argument("--at", metavar="K,K", help="k of pass@k; of maj@k if K <= 64 (default: K)")
    parser.add_argument(
        "--temperature", type=float, default=0.6, help="0 is greedy; default: 0.6, as the paper"
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="default: 0.95, as the paper")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of a completion")
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="of a prompt")
    parser.add_argument(
        "--template", default="paper", metavar="NAME|FILE", help="of the prompt; default: paper"
    )
    parser.add_argument(
        "--format",
        choices=WEIGHT_FORMATS,
        help="of the weights (default: as the adapter was trained, else as they are stored)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the record there as JSON")
    _add(parser, "revision", "columns", "seed", "device")
