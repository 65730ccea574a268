"""Pictures on the page of learning: by target, the one that verdicts are about shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from repro.report.pictures import picture_lines


def lines(folder: Path, names: Sequence[str]) -> list[str]:
    (folder / "figures").mkdir()
    for name in names:
        (folder / "figures" / name).touch()
    return picture_lines(folder / "figures", folder)


def test_paired_differences_are_shown_and_the_others_linked(tmp_path: Path) -> None:
    names = [
        f"proxy_norms_{what}.svg" for what in ("accuracy", "paired_differences", "reward_curves")
    ]
    text = "\n".join(lines(tmp_path, names))
    assert "### `norms`\n\nStated: training the norms' gains" in text
    assert text.count("![") == 1
    assert "![norms paired differences](figures/proxy_norms_paired_differences.svg)" in text
    assert text.rstrip().endswith(
        "Also drawn: [accuracy](figures/proxy_norms_accuracy.svg), "
        "[reward curves](figures/proxy_norms_reward_curves.svg)."
    )


def test_without_paired_differences_the_heldout_accuracy_is_shown(tmp_path: Path) -> None:
    names = [f"proxy_figure10_{what}.svg" for what in ("accuracy", "heldout_accuracy")]
    text = "\n".join(lines(tmp_path, names))
    assert "![figure10 heldout accuracy](figures/proxy_figure10_heldout_accuracy.svg)" in text
    assert "Also drawn: [accuracy](" in text


def test_all_of_table_1_is_shown_and_first(tmp_path: Path) -> None:
    names = ["proxy_aqn_factorial_accuracy.svg", "proxy_table1_accuracy.svg",
             "proxy_table1_reward_curves.svg"]  # fmt: skip
    rows = lines(tmp_path, names)
    shown = [line for line in rows if line.startswith("![")]
    assert [line.split("]")[0] for line in shown] == [
        "![table1 accuracy",
        "![table1 reward curves",
        "![aqn factorial accuracy",
    ]
    assert "Also drawn" not in "\n".join(rows)


def test_the_longest_targets_name_counts_and_devices_stay_apart(tmp_path: Path) -> None:
    names = ["proxy_figure4_dapo_heldout_accuracy.svg", "proxy_nvidia_h200_norms_accuracy.svg",
             "proxy_nvidia_h100_norms_accuracy.svg"]  # fmt: skip
    text = "\n".join(lines(tmp_path, names))
    assert "### `figure4_dapo`" in text
    assert "### `figure4`" not in text
    for device in ("nvidia_h100", "nvidia_h200"):
        words = f"norms accuracy {device}".replace("_", " ")
        assert f"![{words}](figures/proxy_{device}_norms_accuracy.svg)" in text


def test_a_picture_is_taken_once_and_of_other_tiers_none(tmp_path: Path) -> None:
    names = ["proxy_norms_accuracy.svg", "proxy_norms_accuracy.png", "smoke_table1_accuracy.svg"]
    assert "\n".join(lines(tmp_path, names)).count("![") == 1


def test_without_pictures_there_is_no_section(tmp_path: Path) -> None:
    assert picture_lines(tmp_path / "none", tmp_path) == []
    assert lines(tmp_path, ["systems_memory.svg"]) == []


def test_a_picture_of_no_target_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"picture proxy_norm_accuracy: needs a target's name"):
        lines(tmp_path, ["proxy_norm_accuracy.svg"])


def test_the_forest_plot_is_of_no_single_target_and_left_to_the_top_of_the_page(
    tmp_path: Path,
) -> None:
    assert lines(tmp_path, ["proxy_forest.svg", "proxy_nvidia_h200_forest.svg"]) == []
