"""Pre-training of the tiny policy: not in the paper, but what the smoke tier stands on.

The policy in the package was made by this recipe. Anyone can make it again from its seed; the claim
is that it comes out with room to learn: solving some problems, and able to solve most of them when
made to write its working.
"""

from __future__ import annotations

from repro.spec.config import Arm, PretrainScale
from repro.spec.target import Cost, Metric, Target
from repro.spec.tier import GIB, Tier

PRETRAIN_TINY = Target(
    name="pretrain_tiny",
    title="Pre-training of the tiny policy (not in the paper)",
    statement="from a seed, in minutes on two cores, comes a policy with room to learn: greedy "
    "accuracy between 30 and 60 %",
    source="not in the paper; what the smoke tier starts from",
    procedure="pretrain",
    arms=(Arm(name="tiny", label="tiny policy, from scratch", training="full"),),
    scales={Tier.SMOKE: PretrainScale()},
    costs={
        Tier.SMOKE: Cost(
            train_seconds=900.0,
            evaluate_seconds=None,
            memory_bytes=2 * GIB,
            disk_bytes=20_000_000,
            basis="one timed run of an early version of the recipe on two busy cores",
        )
    },
    metrics=(
        Metric(name="accuracy_greedy", unit="percent", title="accuracy, greedy"),
        Metric(name="accuracy_forced_working", unit="percent", title="greedy, working forced"),
        Metric(name="accuracy_sampled", unit="percent", title="mean of 8 at temperature 1"),
        Metric(name="pass_at_8", unit="percent", title="best of 8 at temperature 1"),
        Metric(name="working_rate", unit="percent", title="working shown"),
        Metric(name="train_seconds", unit="seconds", title="training time"),
        Metric(name="peak_bytes", unit="bytes", title="peak memory"),
    ),
    headline="accuracy_greedy",
)
