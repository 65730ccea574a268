"""Pre-training of policies: not in the paper, but what the smoke and proxy tiers stand on.

The tiny policy in the package was made by such a run, the proxy policies are made by each user.
Anyone can make them again from a seed; the claim is that they come out with room to learn: solving
some problems, and able to solve most of them when made to write their working.
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

PRETRAIN_PROXY = Target(
    name="pretrain_proxy",
    title="Pre-training of the proxy policies (not in the paper)",
    statement="from a seed, in minutes on one GPU, come policies with room to learn: greedy "
    "accuracy between 35 and 60 % on held-out problems",
    source="not in the paper; what the proxy tier starts from",
    procedure="pretrain_proxy",
    arms=(
        Arm(name="proxy_30m", label="proxy policy of 30 million parameters", training="full"),
        Arm(
            name="proxy_30m_early",
            label="proxy policy of 30 million parameters, trained for a shorter time",
            training="full",
        ),
        Arm(
            name="proxy_30m_needle4",
            label="proxy policy of 30 million parameters, 4 % show their working",
            training="full",
        ),
        Arm(
            name="proxy_30m_needle05",
            label="proxy policy of 30 million parameters, 0.5 % show their working",
            training="full",
        ),
        Arm(name="proxy_120m", label="proxy policy of 120 million parameters", training="full"),
    ),
    scales={Tier.PROXY: PretrainScale(recipe="proxy", quality_problems=1000)},
    needs={
        # Policies with their copies, and three states while the last is written (1.4 GB each at 120
        # million parameters, 0.4 at 30).
        Tier.PROXY: Needs(memory_bytes=24 * GIB, disk_bytes=3_000_000_000)
    },
    metrics=(
        *PRETRAIN_TINY.metrics[:3],
        Metric(
            name="pass_at_4", unit="percent", title="best of 4 at temperature 1", better="higher"
        ),
        *PRETRAIN_TINY.metrics[4:],
        Metric(name="accuracy_mawps", unit="percent", title="MAWPS test, greedy", better="higher"),
        Metric(name="accuracy_svamp", unit="percent", title="SVAMP, greedy", better="higher"),
        Metric(name="accuracy_gsm8k", unit="percent", title="GSM8K test, greedy", better="higher"),
    ),
    headline="accuracy_greedy",
)
