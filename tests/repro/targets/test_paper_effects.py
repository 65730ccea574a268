"""The sizes that claims carry, held to the paper's cells by the arithmetic that they state."""

import pytest

from repro.evidence.paper import paper_cells
from repro.run.places import expected_folder
from repro.targets import paper_effects as sizes


def cells(name):
    return {cell.id: cell.value for cell in paper_cells(expected_folder(None), name)}


def table1():
    return {key.split("/")[0]: value for key, value in cells("table1").items()
            if key.endswith("/7B/accuracy")}  # fmt: skip


def test_table_1_sizes_are_shares_of_gains():
    rows = table1()
    base = {name: rows[f"{name}, no training"] for name in ("BF16", "NF4", "MXFP4", "NVFP4")}
    lora, nf4, nvfp4 = (rows[f"{name}, LoRA"] for name in ("BF16", "NF4", "NVFP4"))
    qerl = rows["NVFP4, LoRA + AQN"]
    for name in ("NF4", "MXFP4", "NVFP4"):
        loss = (base["BF16"] - base[name]) / base[name]
        assert sizes.UNTRAINED_LOSS[name.lower()].paper == pytest.approx(loss, abs=6e-4)
    for effect, gain in (
        (sizes.QERL_OVER_LORA, (qerl - lora) / (lora - base["BF16"])),
        (sizes.NVFP4_OVER_LORA, (nvfp4 - lora) / (lora - base["BF16"])),
        (sizes.QERL_OVER_QLORA, (qerl - nf4) / (nf4 - base["NF4"])),
        (sizes.AQN_GAIN, (qerl - nvfp4) / (nvfp4 - base["NVFP4"])),
    ):
        assert effect.paper == pytest.approx(gain, abs=6e-4)


def test_table_2_sizes_are_summed_over_three_models():
    rows = cells("table2")

    def total(row):
        return sum(rows[f"{row}/{size}/Avg"] for size in ("7B", "14B", "32B"))

    qerl, lora, nvfp4 = (total(row) for row in ("NVFP4 LoRA + AQN", "BF16 LoRA", "NVFP4 LoRA"))
    assert sizes.QERL_OVER_LORA_BIGMATH.paper == pytest.approx(
        (qerl - lora) / (lora - total("BF16 base")), abs=6e-4
    )
    assert sizes.AQN_GAIN_BIGMATH.paper == pytest.approx(
        (qerl - nvfp4) / (nvfp4 - total("NVFP4 base")), abs=6e-4
    )


def test_ratios_are_those_of_the_papers_rates():
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
