"""What a run's policy wrote, one Parquet file per rollout: `completions/step-000012.parquet`.

One row per completion that was trained on, in the order of the rollout:

==================  =========  ==================================================================
column              type       meaning
==================  =========  ==================================================================
run                 string     target, arm and seed
step                int64      optimiser step, counted from 1, that the rollout served first
group, sample       int32      the prompt's place in the rollout, and the completion's in its group
prompt, text        string     as the tokenizer decodes them; the prompt with control tokens
reward              float64    what the advantage was made of; null where there is none
accuracy, format    float64    the parts of the task's reward
accuracy_lenient    float64    the same when the answer may stand in any usual form
gold                string     the answer of the problem
advantage           float64    null where there is no reward
finish_reason       string     `stop`, or `length` (truncated)
tokens              int32      length of the completion
==================  =========  ==================================================================

A resumed run writes the files of the steps it does again in place of the old ones. A training that
has to stop keeps its last batch, too (`keep_batch`).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from safetensors.torch import save
from transformers import PreTrainedTokenizerBase

from repro.data.prompts import texts_of
from repro.distributed import Ranks
from repro.rl.collect import GrowingRollout, Rollout
from repro.runlog.trackers import name_of
from repro.spec.config import RunConfig
from repro.spec.whole_files import replace_files


def write_completions(
    folder: Path, run: RunConfig, step: int, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Write the completions of the rollout after `step` optimiser steps; return the file."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = _columns_of(run, step + 1, rollout, tokenizer)
    arrays = {name: pa.array(own, getattr(pa, kind)()) for name, (kind, own) in columns.items()}
    table = pa.table(arrays, metadata={"run_digest": run.digest()})
    whole = io.BytesIO()
    parquet.write_table(table, whole, compression="zstd")
    path = folder / f"step-{step + 1:06d}.parquet"
    replace_files({path: whole.getvalue()})
    return path


def _columns_of(
    run: RunConfig, step: int, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> dict[str, tuple[str, list[Any]]]:
    """Return the table's columns by name: type, and B values."""
    rows, advantages = rollout.rows, rollout.advantages
    groups = rows.prompt_of_row.tolist()
    prompts = tokenizer.batch_decode([list(prompt) for prompt in rows.prompts])
    ids = [own[mask].tolist() for own, mask in zip(rows.token_ids, rows.mask, strict=True)]
    texts = texts_of(ids, tokenizer) if ids else []
    scored = zip(advantages.values, advantages.scored, strict=True)
    count = len(groups)
    return {
        "run": ("string", [name_of(run)] * count),
        "step": ("int64", [step] * count),
        "group": ("int32", groups),
        "sample": ("int32", [place % run.scale.group_size for place in range(count)]),
        "prompt": ("string", [prompts[group] for group in groups]),
        "text": ("string", texts),
        "reward": ("float64", [one.reward for one in rollout.graded]),
        "accuracy": ("float64", [one.accuracy for one in rollout.graded]),
        "format": ("float64", [one.format for one in rollout.graded]),
        "accuracy_lenient": ("float64", [one.lenient for one in rollout.graded]),
        "gold": ("string", [one.gold for one in rollout.graded]),
        "advantage": ("float64", [float(value) if known else None for value, known in scored]),
        "finish_reason": (
            "string",
            ["length" if cut else "stop" for cut in rows.truncated.tolist()],
        ),
        "tokens": ("int32", [len(own) for own in ids]),
    }


def keep_batch(folder: Path, ranks: Ranks, step: int, growing: GrowingRollout) -> str:
    """Write the rollout on which a training had to stop, after `step` steps; return where it is.

    `batch-of-step-000012.safetensors` has what `GrowingRollout.batch` says. All ranks hold the
    whole rollout, and the first writes; no rank goes on before the file is there, since the first
    that ends lets the others be ended.
    """
    said = ""
    if ranks.first:
        path = folder / f"batch-of-step-{step + 1:06d}.safetensors"
        try:
            replace_files({path: save(growing.batch())})
            said = f", kept in {path}"
        except OSError as error:
            said = f", which could not be kept: {error}"
    return ranks.objects(said)[0]
