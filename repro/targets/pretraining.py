"""Pre-training of the tiny policy: not in the paper, but what the smoke tier starts from.

The policy in the package was made by such a run, and anyone can make it again from its seed. It
must come out with room to learn: solving some problems, and able to solve most of them when made to
write their working.
"""

from __future__ import annotations

from repro.spec.arm import Arm
from repro.spec.config import PretrainScale
from repro.spec.needs import Needs
from repro.spec.target import Metric, Target
from repro.spec.tier import GIB, Tier
from repro.targets.table1 import metrics_named

PRETRAIN_TINY = Target(
    name="pretrain_tiny",
    title="Pre-training of the tiny policy (not in the paper)",
    statement="from a seed, in minutes on two cores, comes a policy with room to learn: greedy "
    "accuracy between 30 and 60 %",
    source="not in the paper; what the smoke tier starts from",
    procedure="pretrain",
    arms=(Arm(name="tiny", label="tiny policy, from scratch", training="full"),),
    scales={Tier.SMOKE: PretrainScale()},
    needs={Tier.SMOKE: Needs(memory_bytes=2 * GIB, disk_bytes=20_000_000)},
    metrics=(
        *metrics_named("accuracy_greedy", "accuracy_forced_working"),
        Metric(
            name="accuracy_sampled",
            unit="percent",
            title="mean of 8 at temperature 1",
            better="higher",
        ),
        Metric(
            name="pass_at_8", unit="percent", title="best of 8 at temperature 1", better="higher"
        ),
        *metrics_named("working_rate", "train_seconds", "peak_bytes"),
    ),
    headline="accuracy_greedy",
)
