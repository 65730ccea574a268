"""The batch on which a training had to stop, for whoever looks for the cause.

`batch-of-step-000012.safetensors` in the run's folder has what `GrowingRollout.batch` says, of the
rollout that served the step of this number, counted from 1, first; of runs that train together one
after another. Where ranks train, all hold the whole rollout, and the first writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from repro.rl.collect import GrowingRollout
from repro.rl.single_run.ranks import Ranks
from repro.spec.whole_files import replace_files


def keep_batches(folder: Path, ranks: Ranks, step: int, growing: Sequence[GrowingRollout]) -> str:
    """Write the rollouts made after `step` steps; return where they are, on all ranks.

    No rank goes on before the file is there: the first that ends lets the others be ended.
    """
    said = ""
    if ranks.first:
        batches = [own.batch() for own in growing]
        whole = {name: torch.cat([own[name] for own in batches]) for name in batches[0]}
        path = folder / f"batch-of-step-{step + 1:06d}.safetensors"
        try:
            replace_files({path: save(whole)})
            said = f", kept in {path}"
        except OSError as error:
            said = f", which could not be kept: {error}"
    return ranks.texts(said)[0]
