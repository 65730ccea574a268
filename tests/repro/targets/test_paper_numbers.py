"""The paper's numbers as typed: the schema, and every printed sum and difference recomputed."""

import math

import pytest

from repro.evidence.paper import read_paper
from repro.run.places import expected_folder
from repro.spec.tier import Tier
from repro.targets import TARGETS, find
from repro.targets.table1 import CONTROLS

FOLDER = expected_folder(None) / "paper"
FILES = sorted(FOLDER.glob("*.json"))
KINDS = ("arithmetic", "text against table", "between places", "inferred")
BASE = {"table1": "BF16, no training", "table2": "BF16 base"}


def by_id(name):
    return {cell.id: cell for cell in read_paper(FOLDER / f"{name}.json")[1]}


def arithmetic(raw):
    return {
        item["id"]: item["computed"]
        for item in raw["contradictions"]
        if item["kind"] == "arithmetic"
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_follows_the_schema(path):
    raw, cells = read_paper(path)
    assert raw["schema"] == 1
    assert raw["name"] == path.stem
    assert raw["statement"]
    assert cells
    assert len({cell.id for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.id == f"{cell.row}/{cell.column}/{cell.quantity}"
        assert cell.confidence in ("exact", "plot", "secondary", "inferred")
        assert cell.place
        assert cell.unit
        assert math.isfinite(cell.value)
    for item in raw["contradictions"]:
        assert set(item) == {"id", "kind", "printed", "computed", "note"}
        assert item["kind"] in KINDS


def test_every_table_is_there_and_every_target_finds_its_file():
    names = {path.stem for path in FILES}
    assert {f"table{number}" for number in range(1, 10)} <= names
    assert {target.paper_file for target in TARGETS if target.paper_file} <= names


def test_every_named_arm_of_table_1_is_an_arm_of_the_target():
    arms = {arm.name for arm in find("table1").arms}
    cells = [cell for cell in by_id("table1").values() if cell.quantity == "accuracy"]
    assert len(cells) == 20
    assert {cell.arm for cell in cells} == arms - {arm.name for arm in CONTROLS}


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_the_printed_differences_are_wrong_exactly_where_it_is_said(name):
    raw, _ = read_paper(FOLDER / f"{name}.json")
    cells = by_id(name)
    computed_values = {}
    for cell in cells.values():
        if not cell.quantity.endswith("delta_printed"):
            continue
        quantity = cell.quantity.removesuffix("delta_printed").rstrip("_") or "accuracy"
        value = cells[f"{cell.row}/{cell.column}/{quantity}"].value
        start = cells[f"{BASE[name]}/{cell.column}/{quantity}"].value
        if not math.isclose(cell.value, value - start, abs_tol=1e-9):
            computed_values[cell.id] = round(value - start, 1)
    if name == "table1":
        gain = cells["NVFP4, LoRA + AQN/7B/gain_over_lora_printed"]
        computed = 90.8 - cells["BF16, LoRA/7B/accuracy"].value
        if not math.isclose(gain.value, computed, abs_tol=1e-9):
            computed_values[gain.id] = round(computed, 1)
    assert computed_values == arithmetic(raw)


@pytest.mark.parametrize("number", [5, 6, 7, 8])
def test_the_printed_rollout_ratios_are_wrong_exactly_where_it_is_said(number):
    raw, _ = read_paper(FOLDER / f"table{number}.json")
    cells = by_id(f"table{number}")
    computed_values = {}
    for cell in cells.values():
        if cell.quantity == "rollout_ratio_printed":
            slow = cells[f"BF16 LoRA/{cell.column}/rollout"].value
            ratio = cells[f"NVFP4 QeRL/{cell.column}/rollout"].value / slow
            # Printed with one digit, of factors that were rounded themselves.
            if not math.isclose(cell.value, round(ratio, 1), abs_tol=0.05):
                computed_values[cell.id] = round(ratio, 2)
    assert computed_values == arithmetic(raw)


def test_the_paper_scale_of_table_1_is_table_4():
    cells = by_id("table4")
    scale = find("table1").scales[Tier.PAPER]
    arm = find("table1").arm("nvfp4_lora_aqn")
    stated = {
        "learning_rate_4bit": scale.optimizer.learning_rates.lora_4bit,
        "learning_rate_bf16_lora": scale.optimizer.learning_rates.lora_16bit,
        "batch_size": scale.prompts_per_rollout,
        "samples_per_prompt": scale.group_size,
        "updates_per_rollout": scale.updates_per_rollout,
        "max_response_tokens": scale.rollout.max_new_tokens,
        "rollout_temperature": scale.rollout.temperature,
        "clip_low": arm.loss.clip_low,
        "clip_high": arm.loss.clip_high,
        "sigma_start": arm.noise.sigma_start,
        "sigma_end": arm.noise.sigma_end,
    }
    printed = {cell.quantity: cell.value for cell in cells.values() if cell.column == "GSM8K"}
    assert stated == printed
