"""The analysis plan: fixed before the runs, carried by their records, held to by check."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.evidence.record import Record
from repro.judge.check import check_selection, gather
from repro.run import analysis_plan as plans
from repro.run.places import expected_folder
from repro.run.select import Selection, select
from repro.spec.tier import Tier
from repro.targets import find

Maker = Callable[..., Record]


def selected(name: str) -> Selection:
    (selection,) = select([name], tier="proxy")
    return selection


def write(name: str, runs: Path, maker: Maker, seeds: int | None = None) -> None:
    for run in selected(name).plan(seeds):
        maker(run).write(runs)


def test_a_record_carries_the_plan_of_every_target_that_reads_it(
    tmp_path: Path, proxy_record: Maker
) -> None:
    (run,) = selected("table1").plan(1, ["nvfp4_lora_aqn"])
    carried = {key.removeprefix("plan:") for key in plans.plan_inputs(run)}
    readers = {"table1", "table1_transfer", "figure8", "figure9", "figure10", "aqn_factorial"}
    assert readers <= carried
    assert "figure4" not in carried
    assert "table2" not in carried
    assert "pretrain_proxy" not in carried


def test_words_are_not_part_of_a_plan_and_everything_else_is() -> None:
    figure = find("figure9")
    first = plans.analysis_plan(figure, Tier.PROXY)
    (claim, *rest) = figure.claims
    reworded = dataclasses.replace(claim, statement="otherwise put")
    changed = dataclasses.replace(claim, metric="heldout_area")
    for other, same in ((reworded, True), (changed, False)):
        target = dataclasses.replace(figure, claims=(other, *rest))
        assert (plans.analysis_plan(target, Tier.PROXY) == first) is same
    fewer = {Tier.PROXY: dataclasses.replace(figure.scales[Tier.PROXY], seeds=(0, 1))}
    assert plans.analysis_plan(dataclasses.replace(figure, scales=fewer), Tier.PROXY) != first


def test_check_refuses_records_of_another_plan_or_of_none(
    tmp_path: Path, proxy_record: Maker
) -> None:
    write("figure9", tmp_path, proxy_record)
    evidence = gather(selected("figure9"), tmp_path)
    assert evidence.count == 20
    assert not evidence.refused
    (run,) = selected("figure9").plan([5], ["aqn_linear"])
    path = tmp_path / "proxy" / "figure9" / "aqn_linear" / "seed-5.json"
    for inputs, words in (
        ({"plan:figure9": "0" * 64}, "another analysis plan of figure9"),
        ({}, "before figure9 had an analysis plan"),
    ):
        path.unlink()
        record = proxy_record(run)
        kept = {key: value for key, value in record.inputs.items() if not key.startswith("plan:")}
        dataclasses.replace(record, inputs=kept | inputs).write(tmp_path)
        checked = check_selection(selected("figure9"), tmp_path, expected_folder(None))
        assert not checked.sound
        assert words in checked.evidence.refused[0][1]


def test_check_refuses_seeds_that_were_not_planned(tmp_path: Path, proxy_record: Maker) -> None:
    for run in selected("figure9").plan([5, 77], ["aqn_linear"]):
        proxy_record(run).write(tmp_path)
    evidence = gather(selected("figure9"), tmp_path)
    assert "seed 77 is not in the analysis plan" in evidence.refused[0][1]


def test_plans_are_written_once_before_the_runs(tmp_path: Path) -> None:
    runs = selected("figure9").plan(1)
    paths = plans.write_plans(runs, tmp_path)
    assert {path.name.split("-")[0] for path in paths} >= {"figure9", "table1"}
    assert plans.write_plans(runs, tmp_path) == []
    written = json.loads(paths[0].read_text(encoding="utf-8"))
    assert written["digest"][:12] in paths[0].name
    assert written["plan"]["statistics"]["alpha"] == 0.05
    assert plans.write_plans(find_smoke(), tmp_path) == []


def find_smoke() -> list:  # type: ignore[type-arg]
    (selection,) = select(["table1"], tier="smoke")
    return selection.plan(1)


def test_shared_runs_count_for_each_target_that_names_them(
    tmp_path: Path, proxy_record: Maker
) -> None:
    write("aqn_factorial", tmp_path, proxy_record)
    assert gather(selected("aqn_factorial"), tmp_path).count == 40
    assert gather(selected("figure10"), tmp_path).records.keys() == {"rank_32"}
    # What was blessed is no expectation of made-up records.
    checked = check_selection(selected("aqn_factorial"), tmp_path, tmp_path / "nothing blessed")
    assert checked.sound
    by_name = {item.name: item for item in checked.verdicts}
    assert by_name["nvfp4_gains_more_from_aqn"].n == 5


@pytest.mark.parametrize("name", ["figure4", "figure5", "figure8", "table1_transfer"])
def test_a_figure_asks_its_own_arms_of_a_table_and_no_others(
    tmp_path: Path, proxy_record: Maker, name: str
) -> None:
    write("table1", tmp_path, proxy_record)
    evidence = gather(selected(name), tmp_path)
    assert not evidence.refused
    assert evidence.records.keys() == {arm.name for arm in find(name).arms}


def test_an_arm_that_no_target_knows_is_refused_by_all_that_read_its_folder(
    tmp_path: Path, proxy_record: Maker
) -> None:
    write("table1", tmp_path, proxy_record, seeds=1)
    folder = tmp_path / "proxy" / "table1"
    (folder / "bf16_lora").rename(folder / "nobodys")
    for name in ("table1", "figure4"):
        (refused,) = gather(selected(name), tmp_path).refused
        assert refused[0].parent.name == "nobodys"


@pytest.mark.parametrize("field", ["checkpoint", "test_problems"])
def test_arms_that_saw_other_inputs_are_not_compared(
    tmp_path: Path, proxy_record: Maker, field: str
) -> None:
    def spoil(run: object) -> Record:
        record = proxy_record(run)
        if record.arm == "aqn_linear":
            return dataclasses.replace(record, inputs=record.inputs | {field: "x" * 64})
        return record

    write("figure9", tmp_path, spoil)
    checked = check_selection(selected("figure9"), tmp_path, expected_folder(None))
    assert any("different" in why for _, why in checked.evidence.refused)
