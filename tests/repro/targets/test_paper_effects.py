"""The sizes that claims carry, held to the paper's cells by the arithmetic that they state."""

from __future__ import annotations

from itertools import pairwise

import pytest

from repro.evidence.paper import paper_cells
from repro.run.places import expected_folder
from repro.spec.effect import Effect
from repro.targets import paper_effects as sizes


def cells(name: str) -> dict[str, float]:
    return {cell.id: cell.value for cell in paper_cells(expected_folder(None), name)}


def paper(effect: Effect) -> float:
    assert effect.paper is not None
    return effect.paper


def table1() -> dict[str, float]:
    """Return {row: accuracy} of Table 1 at 7B."""
    return {key.split("/")[0]: value for key, value in cells("table1").items()
            if key.endswith("/7B/accuracy")}  # fmt: skip


def test_table_1_sizes_are_shares_of_gains() -> None:
    rows = table1()
    base = {name: rows[f"{name}, no training"] for name in ("BF16", "NF4", "MXFP4", "NVFP4")}
    lora, nf4, nvfp4 = (rows[f"{name}, LoRA"] for name in ("BF16", "NF4", "NVFP4"))
    qerl = rows["NVFP4, LoRA + AQN"]
    for name in ("NF4", "MXFP4", "NVFP4"):
        loss = (base["BF16"] - base[name]) / base[name]
        assert paper(sizes.UNTRAINED_LOSS[name.lower()]) == pytest.approx(loss, abs=6e-4)
    for effect, gain in (
        (sizes.QERL_OVER_LORA, (qerl - lora) / (lora - base["BF16"])),
        (sizes.NVFP4_OVER_LORA, (nvfp4 - lora) / (lora - base["BF16"])),
        (sizes.QERL_OVER_QLORA, (qerl - nf4) / (nf4 - base["NF4"])),
        (sizes.AQN_GAIN, (qerl - nvfp4) / (nvfp4 - base["NVFP4"])),
    ):
        assert paper(effect) == pytest.approx(gain, abs=6e-4)


def test_table_2_sizes_are_summed_over_three_models() -> None:
    rows = cells("table2")

    def total(row: str) -> float:
        return sum(rows[f"{row}/{size}/Avg"] for size in ("7B", "14B", "32B"))

    qerl, lora, nvfp4 = (total(row) for row in ("NVFP4 LoRA + AQN", "BF16 LoRA", "NVFP4 LoRA"))
    assert paper(sizes.QERL_OVER_LORA_BIGMATH) == pytest.approx(
        (qerl - lora) / (lora - total("BF16 base")), abs=6e-4
    )
    assert paper(sizes.AQN_GAIN_BIGMATH) == pytest.approx(
        (qerl - nvfp4) / (nvfp4 - total("NVFP4 base")), abs=6e-4
    )


def test_sizes_of_curves_are_those_of_the_points_read_off_them() -> None:
    fig4, fig5, fig10, fig14 = (cells(f"figure{n}") for n in (4, 5, 10, 14))
    first = fig4["BF16 Full, NVFP4, MXFP4/DAPO step of reward 0.9/step"]
    second = fig4["BF16 LoRA, NF4/DAPO step of reward 0.9/step"]
    assert paper(sizes.FORMAT_SPEED) == pytest.approx(1 - first / second, abs=6e-4)
    for effect in sizes.FORMAT_TAKE_OFF.values():
        assert paper(effect) == pytest.approx(second / first)
    # Both curves lie at the height between these points of theirs, to a hundredth.
    fig12 = cells("figure12")
    low, high = (fig12[f"LoRA/step {step}/reward"] for step in (500, 550))
    at_540 = low + (high - low) * 40 / 50
    assert at_540 == pytest.approx(fig12["QeRL/step 250/reward"], abs=0.01)
    assert paper(sizes.QERL_TAKE_OFF) == 540 / 250
    base = fig5["BF16/step 0/entropy"]
    for name in ("NF4", "MXFP4", "NVFP4"):
        more = fig5[f"{name}/step 0/entropy"] / base - 1
        assert paper(sizes.ENTROPY[name.lower()]) == pytest.approx(more, abs=6e-4)
    low, high = (fig10[f"rank {rank}/step 45/reward"] for rank in (128, 16))
    assert paper(sizes.RANK_SPEED) == pytest.approx((high - low) / (1 - low), abs=6e-4)
    late = fig14["QeRL/step 600/entropy"] / fig14["LoRA/step 600/entropy"] - 1
    assert paper(sizes.ENTROPY_LATE) == pytest.approx(late, abs=6e-4)


def test_who_bears_the_higher_rate_is_read_off_two_figures() -> None:
    lora, qerl = cells("figure17"), cells("figure16")
    assert lora["lr 3e-5/step 75/reward"] < 0.5 * lora["lr 3e-5/step 40/reward"]
    assert qerl["lr 3e-5/step 200/reward"] > 0.9


def test_what_added_noise_adds_to_bigmaths_reward_is_the_plots_difference() -> None:
    late = cells("figure8")["7B AQN - no AQN/after step 210/difference"]
    assert paper(sizes.AQN_LATE_BIGMATH) == late


def mean_to(points: dict[int, float]) -> float:
    """Return the mean under straight lines between points, {step: reward}."""
    steps = sorted(points)
    area = sum((points[a] + points[b]) / 2 * (b - a) for a, b in pairwise(steps))
    return area / (steps[-1] - steps[0])


def curve(name: str, row: str, last: int) -> dict[int, float]:
    by_step = {}
    for key, value in cells(name).items():
        line, column, _ = key.split("/")
        if line == row and column.startswith("step ") and int(column.split()[1]) <= last:
            by_step[int(column.split()[1])] = value
    return by_step


@pytest.mark.parametrize(
    ("name", "rows", "last", "effect"),
    [
        ("figure13", ("QeRL", "LoRA"), 254, sizes.QERL_SPEED_32B),
        ("figure16", ("lr 3e-5", "lr 5e-6"), 100, sizes.RATE_SPEED),
    ],
)
def test_sizes_of_whole_curves_are_shares_of_what_is_left_below_one(
    name: str, rows: tuple[str, str], last: int, effect: Effect
) -> None:
    high, low = (mean_to(curve(name, row, last)) for row in rows)
    assert paper(effect) == pytest.approx((high - low) / (1 - low), abs=6e-4)


def test_ratios_are_those_of_the_papers_rates() -> None:
    for number, model in ((5, "3B"), (6, "7B"), (7, "14B"), (8, "32B")):
        rows = cells(f"table{number}")
        for batch in (2, 8):
            fast, slow = (
                rows[f"{row}/{model} batch {batch}/rollout"] for row in ("NVFP4 QeRL", "BF16 LoRA")
            )
            assert sizes.ROLLOUT[model.lower(), batch] == pytest.approx(fast / slow)
    for name, other, stated in (
        ("table9", "BF16 LoRA", sizes.ROLLOUT_BY_RANK),
        ("figure11", "NF4 QLoRA", sizes.ROLLOUT_OVER_NF4),
    ):
        rows = cells(name)
        for (model, rank), ratio in stated.items():
            place = f"{model.upper()} rank {rank}/rollout"
            assert ratio == pytest.approx(rows[f"NVFP4 LoRA/{place}"] / rows[f"{other}/{place}"])
    steps = cells("table3")
    for name, ratio in sizes.STEPS.items():
        model, batch = name.upper().split("_B")
        if model != "3B":
            assert ratio == steps[f"NVFP4 QeRL/{model}/speedup_batch_{batch}"]
