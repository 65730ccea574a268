"""The flags of `quantize`, `evaluate` and `export`.

Nothing heavy is imported until a command is carried out.
"""

from __future__ import annotations

import argparse

from repro.evaluate.flags import require_asking, require_writing

_FOUR_BITS = ("nvfp4", "mxfp4", "nf4")
_Commands = argparse._SubParsersAction


def add_commands(commands: _Commands[argparse.ArgumentParser]) -> None:
    """Add the three commands."""
    _add_quantize(commands)
    _add_evaluate(commands)
    _add_export(commands)


def add_reward(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names a user's own reward."""
    parser.add_argument(
        "--reward",
        metavar="MODULE:FUNCTION",
        help="use your own reward function (docs/train.md)",
    )


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the columns of a user's own problems."""
    parser.add_argument(
        "--columns",
        metavar="ROLE=NAME,..",
        help="columns of your data, such as question=prompt,answer=solution",
    )


def add_revision(parser: argparse.ArgumentParser, of: str) -> None:
    """Add the flag that names the revision of a hub name."""
    parser.add_argument("--revision", metavar="R", help=f"branch, tag or commit of {of} on the hub")


def _add_quantize(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "quantize",
        help="round a 16-bit checkpoint to four bits",
        description="It rounds to nearest, without data, and writes the folder after its logits, "
        "read back, agree with the source quantised in memory.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a 16-bit folder, GGUF file or hub name")
    parser.add_argument("out", metavar="OUT", help="the new folder; must not exist")
    add_revision(parser, "SOURCE")
    parser.add_argument("--format", default="nvfp4", choices=_FOUR_BITS, help="default: nvfp4")
    add_device(parser)
    parser.set_defaults(command=_quantize)


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
    add_revision(parser, "--base")
    add_device(parser)
    parser.set_defaults(command=_export)


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
    add_revision(parser, "CHECKPOINT")
    parser.add_argument("--adapter", metavar="FOLDER", help="an adapter's folder, or a run's")
    parser.add_argument(
        "--data", required=True, metavar="A,B", help="data sets by name, or files and folders"
    )
    add_columns(parser)
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
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--format",
        choices=("bf16", *_FOUR_BITS),
        help="of the weights (default: as the adapter was trained, else as they are stored)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the record there as JSON")
    add_device(parser)
    parser.set_defaults(command=_evaluate)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the device that a command computes on; see `repro.models.policy.device_named`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )


def _quantize(args: argparse.Namespace) -> int:
    require_writing(args)
    from repro.export.quantising import main_quantize

    return main_quantize(args)


def _export(args: argparse.Namespace) -> int:
    require_writing(args)
    from repro.export.exporting import main_export

    return main_export(args)


def _evaluate(args: argparse.Namespace) -> int:
    require_asking(args)
    from repro.evaluate.evaluate_command import main_evaluate

    return main_evaluate(args)
