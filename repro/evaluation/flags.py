"""What the words of `quantize`, `evaluate`, `export` and `dose` say, read without torch.

Importing torch and transformers takes 5 to 25 s. So whatever a line alone has wrong is said before
that, and all of it at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from functools import partial
from pathlib import Path

from repro.data.load import is_generated, is_own, source_named, without_kind
from repro.data.own import parse_columns
from repro.data.prompts import template_source
from repro.spec.arm import FOUR_BIT_FORMATS, NoiseConfig
from repro.spec.checks import all_of, in_digits, require
from repro.spec.config import DataConfig, SamplingConfig
from repro.spec.hub import is_hub_name, require_model

# bitsandbytes takes kernels/ for the distribution of that name, and peft asks transformers for an
# attribute by its old name: who types a command can mend neither.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def require_writing(args: argparse.Namespace) -> None:
    """Raise `ValueError` where `quantize` or `export` cannot begin."""
    base = getattr(args, "base", None)
    all_of(
        lambda: require_model(args.source) if "source" in args else adapter_folder(args.adapter),
        partial(require_model, base, "--base "),
        partial(require_hub_name, base if "base" in args else args.source, args.revision),
        lambda: require(
            base is None or args.kind == "adapter",
            f"--base names the base of an adapter; --as {getattr(args, 'kind', '')} merges into "
            "the one trained on",
        ),
        partial(_require_new, args.out, base if "base" in args else args.source),
        lambda: require_outside(
            args.out, adapter_folder(args.adapter) if "adapter" in args else None
        ),
    )


def _require_new(out: str, source: str | None) -> None:
    require(not Path(out).exists(), f"{out} exists; a checkpoint is never written over another")
    require_outside(out, source)


def _require_new_file(out: str) -> None:
    require(not os.path.lexists(out), f"--out {out} exists; name a new file")
    require(Path(out).absolute().parent.is_dir(), f"--out {out}: its folder does not exist")


def require_outside(out: str | Path, source: str | Path | None) -> None:
    """Raise where what is written would lie in the folder that it is made of."""
    folder = Path(source or out)
    inside = folder.is_dir() and folder.resolve() in Path(out).resolve().parents
    require(not inside, f"{out} lies in {folder}, of which it is made; name a folder elsewhere")


def require_asking(args: argparse.Namespace) -> None:
    """Raise `ValueError` where `evaluate` cannot begin."""
    named, adapter = args.checkpoint, args.adapter
    all_of(
        partial(require_model, named),
        partial(require_hub_name, named or "", args.revision if named else None),
        lambda: adapter is None or adapter_folder(adapter),
        lambda: require(
            bool(named or adapter), "name a checkpoint, or an adapter whose files name its base"
        ),
        *([partial(_require_new_file, args.out)] if args.out else []),
        partial(sampling_of, args),
        partial(at_of, args.at, args.samples),
        lambda: require(args.seed >= 0, f"--seed {args.seed}: needs 0 or more"),
        partial(template_source, args.template),
        *(partial(data_of, name, args.limit, args.columns) for name in names_of(args.data)),
    )


def dosing_of(args: argparse.Namespace) -> tuple[list[str], list[float]]:
    """Return the formats and strengths of noise of `dose`; `ValueError` where it cannot begin."""
    formats, sigmas, *_ = all_of(
        partial(_formats_of, args.formats),
        partial(_sigmas_of, args.sigmas),
        partial(require_model, args.model, "--model "),
        partial(require_hub_name, args.model, args.revision),
        lambda: require(
            args.prompts is None or args.prompts >= 1, f"--prompts {args.prompts}: needs 1 or more"
        ),
        lambda: require(args.new_tokens >= 1, f"--new-tokens {args.new_tokens}: needs 1 or more"),
    )
    return formats, sigmas


def require_hub_name(named: str | None, revision: str | None) -> None:
    """Raise where a revision is given of what has none."""
    require(
        not revision or (is_hub_name(named or "") and not Path(named or "").exists()),
        f"--revision {revision}: needs a hub name (owner/model), not {named}",
    )


def adapter_folder(named: str) -> Path:
    """Return the folder named, or `adapter` in a run's; `ValueError` if neither has an adapter."""
    for folder in (Path(named), Path(named) / "adapter"):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise ValueError(f"{named} holds no adapter_config.json; name an adapter's folder, or a run's")


def sampling_of(args: argparse.Namespace) -> SamplingConfig:
    """Return the sampling of `evaluate`; `ValueError` for numbers that do not fit together."""
    require(args.samples >= 1, f"--samples {args.samples}: needs 1 or more")
    require(
        args.temperature > 0 or args.samples == 1,
        f"--samples {args.samples} with --temperature 0: greedy answers are all the same; needs 1",
    )
    top_p = args.top_p if args.temperature > 0 else 1.0
    return SamplingConfig(temperature=args.temperature, top_p=top_p, max_new_tokens=args.tokens)


def at_of(text: str | None, samples: int) -> tuple[int, ...]:
    """Return the k of pass@k and maj@k: those named, else all samples."""
    if text is None:
        return (samples,) if samples > 1 else ()
    try:
        at = tuple(sorted({in_digits(int, part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"--at {text}: needs numbers such as 1,8") from None
    for k in at:
        require(1 <= k <= samples, f"--at {k}: with {samples} samples k must lie in [1, {samples}]")
    return at


def names_of(text: str) -> list[str]:
    """Return the data sets that `--data` names, each once; a file may have commas in its name."""
    if os.path.exists(os.path.expanduser(without_kind(text))):
        return [text]
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    require(bool(names), "--data names no data set")
    return names


def data_of(named: str, limit: int | None, columns: str | None = None) -> DataConfig:
    """Return the data for what `--data` names (`source_named`); `ValueError` if there is none."""
    require(limit is None or limit >= 1, f"--limit {limit}: needs 1 or more")
    source, columns = source_named(named), columns or ""
    parse_columns(columns)
    endless = is_generated(source) and limit is None
    require(not endless, f"--data {named}: generated problems have no end; give --limit N")
    taken = columns if is_own(source) else ""
    return DataConfig(source=source, columns=taken, test_problems=limit or 0)


def _formats_of(text: str) -> list[str]:
    formats = [name.strip() for name in text.split(",") if name.strip()]
    known = bool(formats) and set(formats) <= {*FOUR_BIT_FORMATS}
    require(known, f"--formats {text}: needs some of {', '.join(FOUR_BIT_FORMATS)}")
    return formats


def _sigmas_of(text: str) -> list[float]:
    try:
        sigmas = [in_digits(float, part) for part in text.split(",")]
        for sigma in sigmas:
            NoiseConfig(sigma_start=sigma, sigma_end=sigma)
    except ValueError:
        words = "needs numbers above 0 and at most 1, such as 0.01,0.0005"
        raise ValueError(f"--sigmas {text}: {words}") from None
    return sigmas
