"""The command line: `python -m repro list | plan | run | check | compare | regress | bless | ...`.

Flags name a target, a tier, seeds and folders; what a run is, is a Python value in
`repro.targets`. Each command imports what it needs when it is called, so that `list` answers at
once and checking needs no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from repro import __version__
from repro.export.command_line import (
    add_columns,
    add_commands,
    add_device,
    add_revision,
    add_reward,
)
from repro.measure.memory_command import add_memory, asks_for_bytes, main_memory
from repro.runlog.log_flags import add_log_flags
from repro.spec.command_parser import SentenceParser

FINE, CONTRADICTED, USAGE, INTERRUPTED = 0, 1, 2, 130
# torchrun ends all ranks with the first that ends, so the others leave that one time to speak.
_SAYING_SECONDS = 3.0
_TIERS = "smoke, systems, mini or paper"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None where it was closed
    try:
        args = build_parser().parse_args(arguments)
        status: int = args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) left early; let the interpreter flush into nothing.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends
        return FINE
    except KeyboardInterrupt:
        print("repro: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        from repro.evidence.printable import one_line
        from repro.run.disk import sentence_of

        _drop_unprinted()
        said = sentence_of(error) if isinstance(error, OSError) else str(error)
        # What is refused is said by the first of torchrun's ranks on a host, a disk by whose it is.
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, OSError):
            print(f"repro: {one_line(said)}", file=sys.stderr)
        else:
            time.sleep(_SAYING_SECONDS)
        return USAGE
    return status


def _drop_unprinted() -> None:
    """Drop what standard output does not take: the interpreter would fail on it once more."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser: argparse.ArgumentParser = SentenceParser(
        prog="python -m repro",
        description="Reproduce QeRL (arXiv 2510.11696): a command and a verdict for each claim.",
    )
    parser.add_argument("--version", action="version", version=f"qerl-repro {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    listing = commands.add_parser(
        "list", help="show the paper's tables and figures, and what runs on this machine"
    )
    listing.add_argument("--all", action="store_true", help="show every other target too")
    listing.set_defaults(command=_list)

    _add_train(commands)
    _add_running(
        commands, "plan", _plan, "show the runs, and their memory, disk, downloads and time"
    )
    _add_running(commands, "run", _run, "carry out the runs that have no record yet")
    _add_running(commands, "reproduce", _reproduce, "run, check, draw and report in one go")

    _add_check(commands)
    _add_compare(commands)
    _add_regress(commands)

    report = commands.add_parser(
        "report", help="write a report from records, without running anything"
    )
    _add_selection(report, optional=True)
    add_reward(report)
    _add_report(report)
    report.add_argument(
        "--readme", metavar="FILE", help="write the generated blocks of this Markdown file again"
    )
    report.add_argument(
        "--html",
        metavar="FILE",
        help="write one page of all claims to search, from stored records or those in --runs",
    )
    report.add_argument(
        "--log", metavar="A,B", help="send the training curves to trackers: tensorboard, wandb"
    )
    report.set_defaults(command=_report)

    _add_bless(commands)
    _add_bundle(commands)

    add_commands(commands)
    _add_environment(commands)
    _add_dose(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    add_columns(parser)
    parser.add_argument(
        "--reward", metavar="MODULE:FUNCTION",
        help="your reward; default: 1 for a correct answer in a completion that ended by itself",
    )  # fmt: skip
    parser.add_argument("--format", default="nvfp4", choices=("bf16", "nf4", "mxfp4", "nvfp4"))
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
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="any other setting, as for `run`"
    )
    parser.add_argument("--runs", metavar="FOLDER", help="folder of records (default: runs)")
    parser.set_defaults(command=_train)


def _add_bless(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bless = commands.add_parser(
        "bless", help="store records, with which new ones are then compared"
    )
    _add_selection(bless, optional=True)
    bless.add_argument(
        "--device",
        action="store_true",
        help="every target with complete records of this kind of device; the others are named",
    )
    bless.add_argument(
        "--add",
        action="store_true",
        help="add seeds or arms to what is stored already",
    )
    bless.add_argument(
        "--unfinished",
        action="store_true",
        help="store a part of the planned seeds; claims stay undecided until the rest is added",
    )
    bless.set_defaults(command=_bless)


def _add_bundle(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bundle",
        help="pack a target's records to send them; --verify judges such a file",
    )
    parser.add_argument("file", metavar="FILE", help="the bundle: NAME.jsonl.xz")
    parser.add_argument("target", metavar="TARGET", nargs="?", help="see `list`")
    parser.add_argument("--tier", help=_TIERS)
    parser.add_argument("--runs", metavar="FOLDER", help="folder of records (default: runs)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="judge FILE, or each file of a folder; exit status 1 when a record is refused",
    )
    parser.set_defaults(command=_bundle)


def _add_dose(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "dose",
        help="compare AQN's noise with the rounding of each format, in a checkpoint",
        description="It reads norms and weights, layer by layer. With --prompts it also measures "
        "the KL on the policy's own completions.",
    )
    parser.add_argument(
        "--model", required=True, metavar="FOLDER|FILE|NAME", help="a 16-bit checkpoint"
    )
    add_revision(parser, "--model")
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
    add_device(parser)
    parser.set_defaults(command=_dose)


def _add_environment(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "environment",
        help="print what records say about this machine: driver, packages, container",
        description="REPRO_CONTAINER, if set, must name an image with its digest "
        "(NAME@sha256:DIGEST).",
    )
    parser.add_argument("--out", metavar="FILE", help="also write the JSON to this file")
    parser.set_defaults(command=_environment)


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="judge records, without running anything",
        description="Exit status: 1 when a record is refused, a check of the machinery failed, or "
        "something is worse than in the stored records of the same device; 2 when there is no "
        "record, and for bad input; else 0, whatever the verdicts on the paper's claims.",
    )
    _add_selection(check, optional=True)
    add_reward(check)
    shown = check.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument(
        "--table",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write a row per claim to FILE.csv and a row per value to FILE.values.csv; without "
        "FILE the first are printed",
    )
    check.add_argument(
        "--blessed",
        action="store_true",
        help="judge the stored records instead of those in --runs",
    )
    check.set_defaults(command=_check)


_EXITS = (
    "Exit status: 0 when nothing is shown to be worse; 1 when something regressed; 2 when it could "
    "not be judged (nothing to compare with, no records, refused or failed ones, no GPU)."
)


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="show whether the second of two sets of records is worse",
        description=_EXITS,
    )
    parser.add_argument("old", metavar="A", help="a folder of runs, or `blessed`")
    parser.add_argument("new", metavar="B", help="a folder of runs")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all with records")
    parser.add_argument("--tier", help=f"{_TIERS}; default: all with records")
    parser.add_argument("--expected", metavar="FOLDER", help="folder of expectations")
    parser.set_defaults(command=_compare)


def _add_regress(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    parser.add_argument("--expected", metavar="FOLDER", help="folder of expectations")
    parser.set_defaults(command=_regress)


def _add_running(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    command: Callable[[argparse.Namespace], int],
    help_text: str,
) -> None:
    parser = commands.add_parser(name, help=help_text)
    _add_selection(parser)
    add_reward(parser)
    parser.add_argument("--seeds", metavar="N", help="how many seeds, or a list such as 0,3,4")
    parser.add_argument("--arms", metavar="A,B", help="only these arms")
    parser.add_argument("--workers", type=int, metavar="N", help="runs side by side")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each run")
    parser.add_argument("--devices", metavar="N", help="GPUs to fill with runs: how many, or 0,1")
    if name != "plan":
        add_log_flags(parser)
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
    else:
        parser.add_argument(
            "--ranks", metavar="1,2,4", help="print measured steps on so many GPUs instead"
        )
        parser.add_argument(
            "--show-config", action="store_true", help="print the scale's settings as JSON instead"
        )
        add_memory(parser)
    if name == "reproduce":
        _add_report(parser)
    parser.set_defaults(command=command)


def _add_selection(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "targets", nargs="*" if optional else "+", metavar="TARGET", help="see `list`"
    )
    parser.add_argument("--tier", help=f"{_TIERS}; default: the smallest that runs here")
    parser.add_argument(
        "--data",
        metavar="FILE|FOLDER|NAME",
        help="your own problems instead: JSONL, JSON, CSV, Parquet, or a name on the hub",
    )
    add_columns(parser)
    parser.add_argument("--steps", type=int, metavar="N", help="cut training to N steps")
    changed = parser.add_argument_group("other settings (recorded under a name of their own)")
    changed.add_argument(
        "--model",
        metavar="FOLDER|FILE|NAME",
        help="another checkpoint: a folder, a GGUF file, owner/model or owner/model:FILE.gguf",
    )
    changed.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub name")
    changed.add_argument(
        "--config",
        metavar="FILE",
        help="settings as TOML or JSON, as plan --show-config prints them",
    )
    changed.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="change a setting by its dotted key, such as arm.lora_rank=16",
    )
    changed.add_argument(
        "--template",
        metavar="NAME|FILE",
        help="prompt template: paper, boxed, gsm8k or a file (docs/train.md)",
    )
    changed.add_argument(
        "--limit", type=int, metavar="N", help="use at most N problems of a data set"
    )
    parser.add_argument("--runs", metavar="FOLDER", help="folder of records (default: runs)")
    parser.add_argument("--expected", metavar="FOLDER", help="folder of expectations")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="FILE", help="where to write (default: report.md in --runs)"
    )
    parser.add_argument("--figures", metavar="FOLDER", help="folder of the figures to link")


def _list(args: argparse.Namespace) -> int:
    from repro.run.listing import listing_text

    print(listing_text(args.all))
    return FINE


def _plan(args: argparse.Namespace) -> int:
    from repro.run.data_check import data_lines
    from repro.run.device_queue import planned_workers
    from repro.run.places import expected_folder, runs_folder
    from repro.run.plan import plan_text
    from repro.run.select import parse_arms, parse_seeds, selections_of
    from repro.spec.settings import settings_text
    from repro.spec.target import other_tiers

    if asks_for_bytes(args):
        return main_memory(args)
    folder = runs_folder(args.runs)
    expected = expected_folder(args.expected)
    selections = selections_of(args)
    workers = {
        item.tier: planned_workers(item.tier, args.devices, args.workers) for item in selections
    }
    texts = []
    for selection in selections:
        runs = selection.plan(parse_seeds(args.seeds), parse_arms(args.arms))
        if args.show_config:
            texts.append(settings_text(selection.source.scales[selection.tier]))
            continue
        if args.ranks:
            from repro.run.several_ranks.ranks_plan import parse_ranks, ranks_text

            head = f"{selection.target.name} at the {selection.tier.value} tier on several GPUs:"
            texts.append(f"{head}\n{ranks_text(runs, parse_ranks(args.ranks), expected)}")
            continue
        others = None if args.tier else other_tiers(selection.source, selection.tier)
        texts += [others] if others else []
        text = plan_text(selection, runs, folder, expected, workers[selection.tier])
        notes = data_lines(runs, args.data is not None)
        texts.append("\n".join([text, *notes]))
    print("\n\n".join(texts))
    return FINE


def _run(args: argparse.Namespace) -> int:
    from repro.run.places import runs_folder
    from repro.run.select import check_line

    status = _carry_out(args)
    if status != INTERRUPTED and os.environ.get("RANK", "0") == "0":  # torchrun's first alone
        print(f"The records are in {runs_folder(args.runs)}. Next: {check_line(args)}")
    return status


def _carry_out(args: argparse.Namespace) -> int:
    from repro.evidence.provenance import source_at_start
    from repro.spec.tier import require_linux

    require_linux()
    source_at_start()  # what the records of this start, and its plans, are of
    from repro.run.execute import main_run

    status: int = main_run(args)
    return status


def _train(args: argparse.Namespace) -> int:
    from repro.door.front_door import main_train

    return main_train(args)


def _check(args: argparse.Namespace) -> int:
    from repro.report.console import main_check

    return main_check(args)


def _compare(args: argparse.Namespace) -> int:
    from repro.regression.regression_commands import judged_or_not, main_compare

    return judged_or_not(main_compare, args)


def _regress(args: argparse.Namespace) -> int:
    from repro.regression.regression_commands import judged_or_not, main_regress

    def run(line: Sequence[str]) -> int:
        return _carry_out(build_parser().parse_args(["run", *line]))

    return judged_or_not(partial(main_regress, run=run), args)


def _report(args: argparse.Namespace) -> int:
    from repro.report.run_report import main_report, require_read, stored_or_own

    require_read(args)
    if not args.log:
        return main_report(args, build_parser())
    from repro.run.places import runs_folder
    from repro.runlog.trackers import parse_trackers, send

    trackers = parse_trackers(args.log)
    records = [r for checked in stored_or_own(args) for r in checked.evidence.every_record()]
    folder = runs_folder(args.runs) / "logged"
    print(f"sent {send(records, trackers, folder)} runs to {', '.join(trackers)}; see {folder}")
    return FINE


def _bless(args: argparse.Namespace) -> int:
    from repro.judge.blessing import main_bless, main_bless_device

    return main_bless_device(args) if args.device else main_bless(args)


def _bundle(args: argparse.Namespace) -> int:
    from repro.evidence.store import RunsFolder
    from repro.judge.bundle import pack
    from repro.report.console import main_verify
    from repro.run.places import expected_folder, runs_folder
    from repro.run.select import select

    if bool(args.target) == args.verify:
        raise ValueError("bundle: FILE TARGET packs, --verify FILE judges")
    expected = expected_folder(None)
    if args.verify:
        return main_verify(Path(args.file), expected)
    (selection,) = select([args.target], tier=args.tier)
    source = RunsFolder(runs_folder(args.runs))
    print(pack(selection, source, expected, Path(args.file)))
    return FINE


def _environment(args: argparse.Namespace) -> int:
    from repro.evidence.environment import environment_text

    text = environment_text()
    print(text, end="")
    if args.out:
        from repro.spec.whole_files import replace_text

        replace_text(Path(args.out), text)
    return FINE


def _dose(args: argparse.Namespace) -> int:
    from repro.evaluate.flags import dosing_of

    formats, sigmas = dosing_of(args)
    from repro.measure.noise_dose import main_dose

    return main_dose(args, formats, sigmas)


def _reproduce(args: argparse.Namespace) -> int:
    from repro.report.run_report import main_report

    status = _carry_out(args)
    if status not in (FINE, CONTRADICTED):
        return status
    _draw(_as_for("report", args))
    main_report(_as_for("report", args), build_parser())
    return max(status, _check(_as_for("check", args)))


def _draw(args: argparse.Namespace) -> None:
    """Draw the pictures that a report links; the drawing code is the checkout's, not installed."""
    from repro.run.places import PACKAGE

    if (PACKAGE.parent / "figures" / "__main__.py").is_file():
        import_module("figures.__main__").draw_reported(args)
    else:
        print("figures are drawn from the checkout; this installation has none")


def _as_for(command: str, args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of `command` for the same targets: what is given, else its defaults."""
    alone = build_parser().parse_args([command, *args.targets])
    return argparse.Namespace(**(vars(alone) | vars(args)))


if __name__ == "__main__":
    ended = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a thread now and then aborts an orderly exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)
    sys.exit(ended)
