"""Tables 5 to 9, Fig. 11: rollout throughput and end-to-end speed of a GRPO step.

Measured in the paper on one H100-80GB: 256 prompt tokens, up to 2048 new ones, the first 30 steps
averaged (App. J). The comparisons mix: rollout figures are quoted against QLoRA, memory against
BF16, and Table 9's batch-1 figures equal Tables 5 to 7's at batch 2. The ratios here name both arms
and are taken in one process on one device.

Each cell is the paper's protocol, estimated once per seed from its prefill and from short windows
of decode steps spread over all positions (`repro.measure.rollout_cells`): a verdict needs five
paired repeats, and 2,048 tokens of a 32B take up to 40 seconds. One cell of each of Tables 5 to 8
(batch 8), of Table 9 and of Fig. 11 (the smallest model, rank 32) is also rolled out whole, and
what the windows gain over it has a bar.

QLoRA's products are timed by this project's kernel and by bitsandbytes' own, in the same engine;
without bitsandbytes that arm is not run.

16-bit LoRA multiplies by its adapter apart, as in the paper. TRL and Unsloth fold it into the
weights before a rollout; `table6_folded` and `table8_folded` time that, each against QeRL.
"""

from __future__ import annotations

from typing import Any

from repro.spec.arm import Arm
from repro.spec.claim import Claim, Metric
from repro.spec.target import Target
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale
from repro.spec.tier import GIB
from repro.targets import paper_effects
from repro.targets.table1 import BF16_LORA, BF16_LORA_FOLDED, NF4_LORA, NVFP4_LORA
from repro.targets.table_rows import (
    FORMAT_RATE,
    NOT_IN_PAPER,
    Statement,
    metric,
    timed,
    variant,
    with_folded,
)

# "batch size in {2, 8}", 256 prompt tokens and up to 2048 new ones (App. J); 1 and 4 are added.
BATCHES = (1, 2, 4, 8)
SHAPES = {size: f"qwen2.5-{size}" for size in ("3b", "7b", "14b", "32b")}


def rate(point: str, batch: int) -> Metric:
    """Return the metric of one cell: new tokens per second of a size (`0_5b`) at a batch."""
    model, at = point.replace("_", "."), f"batch {batch}"
    return metric(
        f"tokens_per_second_{point}_{batch}",
        "tokens per second",
        f"rollout, {model}, {at}",
        quantity="rollout",
        model=model,
        point=at,
        batch=batch,
    )


# Stretches of a rollout, in the middle of each of which steps are timed.
_WINDOWS = 4


def _scale(
    sizes: tuple[str, ...],
    batches: tuple[int, ...],
    whole: tuple[Arm, ...],
    bitsandbytes: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return procedure, scale and needs of the paper's protocol on these sizes.

    The arms of `whole` also roll out the first size whole, at the largest batch.
    """
    scale = ThroughputScale(
        points=tuple(
            ThroughputPoint(
                name=size, shape=SHAPES[size], new_tokens=2048, batches=batches, windows=_WINDOWS
            )
            for size in sizes
        ),
        bitsandbytes=bitsandbytes,
        whole=tuple((arm.name, sizes[0], max(batches)) for arm in whole),
    )
    return timed("throughput", scale, (90 if "32b" in sizes else 45) * GIB)


def _metrics(sizes: tuple[str, ...], batches: tuple[int, ...]) -> tuple[Metric, ...]:
    size, batch = sizes[0], max(batches)
    return (
        *(rate(size, batch) for size in sizes for batch in batches),
        metric(
            f"tokens_per_second_whole_{size}_{batch}",
            "tokens per second",
            f"rollout, whole {size}, batch {batch}",
            model=size,
        ),
        metric(
            f"window_gain_{size}_{batch}",
            "percent",
            f"rollout, {size}, batch {batch}: rate from windows above the whole's",
            "neither",
            model=size,
            change=True,
        ),
    )


_TWICE = "the paper's own figure for the rollout against QLoRA"


def _throughput(number: int, size: str) -> Target:
    point = size.lower()
    arms = (BF16_LORA, NVFP4_LORA)
    return Target(
        name=f"table{number}",
        version=4,
        title=f"Table {number}: rollout throughput and end-to-end speed, {size}",
        statement=f"QeRL samples faster than 16-bit LoRA at {size}",
        source=f"Table {number}; App. J",
        arms=arms,
        metrics=_metrics((point,), BATCHES),
        claims=tuple(
            Statement(
                f"qerl_samples_faster_at_{batch}",
                f"QeRL's rollout is faster than 16-bit LoRA's at {size}, batch {batch}",
                f"Table {number}",
            ).times(
                NVFP4_LORA,
                BF16_LORA,
                FORMAT_RATE,
                rate(point, batch).name,
                effect=paper_effects.ratio(paper_effects.ROLLOUT[point, batch], f"Table {number}"),
            )
            for batch in (2, 8)
        ),
        headline=rate(point, 8).name,
        paper_file=f"table{number}",
        **_scale((point,), BATCHES, arms),
    )


_SIZED = ((5, "3B"), (6, "7B"), (7, "14B"), (8, "32B"))
TABLES_5_TO_8 = tuple(_throughput(number, size) for number, size in _SIZED)


def faster_than(
    slow: Arm, point: str, batch: int, source: str = NOT_IN_PAPER, bound: float = 1.0, **more: Any
) -> Claim:
    """Return the claim that QeRL's rollout is more than `bound` times as fast as an arm's."""
    words = "faster than" if bound == 1 else f"more than {bound:g} times as fast as"
    stated = Statement(
        f"faster_than_{slow.name}_{point}_{batch}",
        f"at {point} and batch {batch}, QeRL's rollout is {words} that of {slow.label}",
        source,
    )
    factor = f"{FORMAT_RATE} rollout_adapter"
    return stated.times(NVFP4_LORA, slow, factor, rate(point, batch).name, bound=bound, **more)


def beside_folded(target: Target) -> Target:
    """Return the target that times the folded arm in all cells of `target`."""
    (scale,) = target.scales.values()
    cells = ((point.name, batch) for point in scale.points for batch in point.batches)
    claims = tuple(faster_than(BF16_LORA_FOLDED, *cell) for cell in cells)
    return with_folded(target, BF16_LORA_FOLDED, claims, NVFP4_LORA)


TABLES_FOLDED = (beside_folded(TABLES_5_TO_8[1]), beside_folded(TABLES_5_TO_8[3]))


RANKS = (16, 32, 64)
_WHOLE_RANK = 32


def at_rank(arm: Arm, rank: int) -> Arm:
    """Return `arm` with another LoRA rank, and a scaling of 1 as before."""
    return variant(arm, f"r{rank}", f", rank {rank}", lora_rank=rank, lora_alpha=float(rank))


def unranked(arm: Arm) -> str:
    """Return the name of an arm without the rank that `at_rank` gave it, if it did."""
    return arm.name.replace(f"_r{arm.lora_rank}", "")


def _ranked(arm: Arm) -> tuple[Arm, ...]:
    return tuple(at_rank(arm, rank) for rank in RANKS)


def _ranked_claim(other: Arm, whose: str, size: str, source: str, bound: float) -> Claim:
    bf16 = other.weight_format == "bf16"
    papers = paper_effects.ROLLOUT_BY_RANK if bf16 else paper_effects.ROLLOUT_OVER_NF4
    words = "at least twice as fast as" if bound == 2.0 else "faster than"
    name = words.removeprefix("at least ").replace(" ", "_")
    return Statement(
        f"nvfp4_{name}_{whose}_{size}_r{other.lora_rank}",
        f"NVFP4 LoRA samples {size.upper()} {words} {other.label}",
        source,
    ).times(
        at_rank(NVFP4_LORA, other.lora_rank),
        other,
        FORMAT_RATE,
        rate(size, 1).name,
        effect=paper_effects.ratio(papers.get((size, other.lora_rank)), source),
        bound=bound,
        because=_TWICE,
    )


def _by_rank(
    sizes: tuple[str, ...],
    others: dict[str, tuple[Arm, ...]],
    source: str,
    *,
    name: str,
    title: str,
    statement: str,
    asked: tuple[float, ...] = (1.0,),
) -> Target:
    arms = (*(arm for group in others.values() for arm in group), *_ranked(NVFP4_LORA))
    foreign = tuple(arm.name for arm in arms if "_bitsandbytes" in arm.name)
    whole = tuple(arm for arm in arms if arm.lora_rank == _WHOLE_RANK)
    return Target(
        name=name,
        version=4,
        title=title,
        statement=statement,
        source=source,
        arms=arms,
        metrics=_metrics(sizes, (1,)),
        claims=tuple(
            _ranked_claim(other, whose, size, source, bound)
            for bound in asked
            for whose, group in others.items()
            for size in sizes
            for other in group
        ),
        headline=rate(sizes[-1], 1).name,
        paper_file=name,
        **_scale(sizes, (1,), whole, foreign),
    )


TABLE9 = _by_rank(
    ("3b", "7b", "14b", "32b"),
    {"bf16": _ranked(BF16_LORA)},
    "Table 9",
    name="table9",
    title="Table 9: rollout throughput by LoRA rank, batch 1",
    statement="NVFP4 LoRA samples faster than BF16 LoRA at every rank",
)
_QLORA = _ranked(NF4_LORA)
_THEIRS = tuple(variant(arm, "bitsandbytes", ", products by bitsandbytes") for arm in _QLORA)
FIGURE11 = _by_rank(
    ("14b", "32b"),
    {"nf4": _QLORA, "bitsandbytes": _THEIRS},
    "Fig. 11",
    name="figure11",
    title="Fig. 11: rollout throughput by LoRA rank against QLoRA, 14B and 32B",
    statement="QeRL samples about twice as fast as QLoRA",
    asked=(1.0, 2.0),
)

# The abstract names no batch; 8 is that of Fig. 1.
_FINAL = {8: "ICLR 2026, camera-ready abstract", 64: "not in the paper, whose batches end at 8"}
_OVER_QLORA = (
    "the abstract's own; the stage table of the same version has 2.37 (9.48 s over 4.00 s), Fig. 1 "
    "of v1 1.54, and no other table QLoRA's rate at 7B"
)
_OVER_LORA = paper_effects.ratio(
    1.3,
    "ICLR 2026, abstract: about 1.3, as Table 6 of v1 (1.31, 1.27); the stage table of the same "
    "version has 1.57 (6.28 s over 4.00 s)",
)
BITSANDBYTES = variant(NF4_LORA, "bitsandbytes", ", products by bitsandbytes")
FINAL_ABSTRACT = Target(
    name="final_abstract",
    title="The final abstract: rollout against QLoRA and 16-bit LoRA, 7B",
    statement="QeRL's rollout is more than 1.5 times as fast as QLoRA's, and about 1.3 times as "
    "fast as 16-bit LoRA's",
    source=_FINAL[8],
    arms=(BF16_LORA, BF16_LORA_FOLDED, NF4_LORA, BITSANDBYTES, NVFP4_LORA),
    metrics=tuple(rate("7b", batch) for batch in _FINAL),
    claims=tuple(
        claim
        for batch, source in _FINAL.items()
        for claim in (
            *(
                faster_than(slow, "7b", batch, source, 1.5, because=_OVER_QLORA)
                for slow in (BITSANDBYTES, NF4_LORA)
            ),
            faster_than(BF16_LORA, "7b", batch, source, effect=_OVER_LORA),
            faster_than(BF16_LORA_FOLDED, "7b", batch),
        )
    ),
    headline=rate("7b", 8).name,
    paper_file="camera_ready",
    **_scale(("7b",), tuple(_FINAL), (), (BITSANDBYTES.name,)),
)
