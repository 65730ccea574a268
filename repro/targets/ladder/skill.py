"""E2, skill: final accuracy where there is room for it; E0, the anchor; untrained rounding draws.

`skill` trains `proxy-30m-early`, whose pre-training stopped before it could do the arithmetic, for
400 steps on levels 3 to 5. Statements about final accuracy (Tables 1 and 2) belong here: the tier's
other policies end within 2 % of the same ceiling. Its assays are that pass@16 lies far above pass@1
before training (there is skill that sampling finds and that can be learnt) and that the held-out
accuracy still rises in the second half (what is compared is not one plateau).

`anchor_dapo` is the task of Figure 4's upper row as the tier had it, prior 40 %, at the rates that
its sweep chose, with the ladder's metrics: what the ladder adds is a change of environment, and this
is the environment unchanged.

`untrained_draws` asks Table 1's first four rows of thirty roundings of one checkpoint instead of
one: each seed has its own order of channels, and with it its own blocks.
"""

from __future__ import annotations

import dataclasses

from repro.spec.config import DAPO, DataConfig, SamplingConfig
from repro.spec.effect import Assay
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects, proxy
from repro.targets.claims import HEADROOM, difference
from repro.targets.ladder.common import (
    METRICS_OF_LADDER,
    NEEDLE,
    SEEDS,
    THRESHOLD,
    TIERS,
    WHY_NOT,
    cost_of,
    sooner,
)
from repro.targets.ladder.needle import BF16, NF4, NVFP4, QERL
from repro.targets.table1 import (
    BF16 as UNTRAINED_BF16,
)
from repro.targets.table1 import (
    BF16_FULL,
    BF16_LORA,
    NVFP4_LORA,
    NVFP4_LORA_AQN,
    UNTRAINED,
)
