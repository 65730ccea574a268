"""What the paper prints that is not run, and what runs though the paper has none of it.

Settings, diagrams, definitions and summaries are targets all the same, so that `repro list` shows
every table and figure, and says of each why there is nothing to run. The pre-training of the tiny
policy is what the smoke tier starts from.
"""

from __future__ import annotations

from repro.spec.arm import Arm
from repro.spec.config import PretrainScale
from repro.spec.needs import Needs
from repro.spec.target import Target
from repro.spec.tier import GIB, Tier
from repro.targets.table1 import metrics_named

TABLE4, FIGURE1, FIGURE2, FIGURE3, FIGURE6 = (
    Target(name=name, title=title, statement=statement, source=source, why_not=why_not,
           paper_file=paper)
    for name, title, statement, source, why_not, paper in (
        ("table4", "Table 4: hyperparameters", "the settings behind Tables 1 and 2",
         "Table 4; App. E", "nothing to run: settings, which the paper tier of table1 takes",
         "table4"),
        ("figure1", "Fig. 1: speed and accuracy in one picture (7B)",
         "QeRL is the fastest and matches full training", "Fig. 1",
         "nothing of its own: bars of Tables 1, 2, 3 and 6", "figure1"),
        ("figure2", "Fig. 2: the framework",
         "noise is drawn for the rollout's copy alone; the trainer's stays clean", "Fig. 2",
         "a diagram", ""),
        ("figure3", "Fig. 3: LoRA, QLoRA and QeRL side by side",
         "QeRL multiplies four-bit weights by 16-bit activations in one kernel", "Fig. 3",
         "a diagram", ""),
        ("figure6", "Fig. 6: noise merged into RMSNorm",
         "the noise of a block's two norms reaches q, k, v and gate, up", "Fig. 6; Eq. 10 to 12",
         "a diagram; the identity that it rests on is a test of the noise", ""),
    )
)  # fmt: skip

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
