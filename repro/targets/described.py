"""What the paper prints that is not run, and what runs though the paper has none of it.

Settings, diagrams, definitions and summaries are targets all the same, so that `repro list` shows
every table and figure, and says of each why there is nothing to run. The pre-training of the tiny
policy is what the smoke tier starts from.
"""

from __future__ import annotations

from typing import Any

from repro.spec.arm import Arm
from repro.spec.config import PretrainScale
from repro.spec.needs import Needs
from repro.spec.target import Target
from repro.spec.tier import GIB, Tier
from repro.targets.table1 import figure, metrics_named

TABLE4 = Target(
    name="table4",
    title="Table 4: hyperparameters",
    statement="the settings behind Tables 1 and 2",
    source="Table 4; App. E",
    why_not="nothing to run: settings, which the paper tier of table1 takes",
    paper_file="table4",
)
FIGURE1 = figure(
    1,
    "speed and accuracy in one picture (7B)",
    "QeRL is the fastest and matches full training",
    metrics=(),
    why_not="nothing of its own: bars of Tables 1, 2, 3 and 6",
)
_DIAGRAM: dict[str, Any] = {"metrics": (), "why_not": "a diagram", "paper_file": ""}
FIGURE2 = figure(
    2,
    "the framework",
    "noise is drawn for the rollout's copy alone; the trainer's stays clean",
    **_DIAGRAM,
)
FIGURE3 = figure(
    3,
    "LoRA, QLoRA and QeRL side by side",
    "QeRL multiplies four-bit weights by 16-bit activations in one kernel",
    **_DIAGRAM,
)
FIGURE6 = figure(
    6,
    "noise merged into RMSNorm",
    "the noise of a block's two norms reaches q, k, v and gate, up",
    **_DIAGRAM
    | {
        "source": "Fig. 6; Eq. 10 to 12",
        "why_not": "a diagram; the identity that it rests on is a test of the noise",
    },
)
PRETRAIN_TINY = Target(
    name="pretrain_tiny",
    title="Pre-training of the tiny policy (not in the paper)",
    statement="from a seed, in minutes on two cores, comes a policy with room to learn",
    source="not in the paper; what the smoke tier starts from",
    procedure="pretrain",
    arms=(Arm(name="tiny", label="tiny policy, from scratch", training="full"),),
    scales={Tier.SMOKE: PretrainScale()},
    needs={Tier.SMOKE: Needs(memory_bytes=2 * GIB, disk_bytes=20_000_000)},
    metrics=metrics_named("train_seconds", "peak_bytes"),
)
