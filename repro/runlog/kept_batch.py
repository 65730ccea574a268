"""The batch on which a training had to stop, for whoever looks for the cause.

`batch-of-step-000012.safetensors` in the run's folder has what `GrowingRollout.batch` says, of the
rollout that served the step of this number, counted from 1, first. Where ranks train, all hold the
whole rollout, and the first writes.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from repro.distributed import Ranks
from repro.rl.collect import GrowingRollout
from repro.spec.whole_files import replace_files


def keep_batch(folder: Path, ranks: Ranks, step: int, growing: GrowingRollout) -> str:
    """Write the rollout made after `step` steps; return where it is, on all ranks.

    No rank goes on before the file is there: the first that ends lets the others be ended.
    """
    said = ""
    if ranks.first:
        path = folder / f"batch-of-step-{step + 1:06d}.safetensors"
        try:
            replace_files({path: save(growing.batch())})
            said = f", kept in {path}"
        except OSError as error:
            said = f", which could not be kept: {error}"
    return ranks.texts(said)[0]
