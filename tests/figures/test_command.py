"""The command: files of the right names, the same bytes again, and the ones in docs/."""

import os
import subprocess
import sys

import pytest

from figures import curves
from figures.__main__ import draw, main, save
from repro.run.places import expected_folder

EXPECTED = expected_folder(None)

ROOT = EXPECTED.parent


def test_the_command_draws_png_and_svg_of_the_target_that_is_named(
    checks_of, tmp_path, monkeypatch
):
    stored = [*checks_of("rollout"), *checks_of("rollout", device="nvidia_h100_80gb_hbm3")]
    monkeypatch.setattr("figures.__main__.blessed_of", lambda expected, names, tier: stored)
    line = ["--blessed", "--expected", str(EXPECTED), "--target", "rollout", "--out", str(tmp_path)]
    assert main(line) == 0
    # Devices are named where a tier has several.
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"systems_{device}_rollout_throughput.{kind}"
        for device in ("nvidia_h100_80gb_hbm3", "nvidia_h200")
        for kind in ("png", "svg")
    )
    picture = tmp_path / "systems_nvidia_h200_rollout_throughput.svg"
    assert "5 seeds per arm on one NVIDIA H200" in picture.read_text(encoding="utf-8")
    picture.unlink()
    assert main([*line, "--renew"]) == 0
    assert len(list(tmp_path.iterdir())) == 3


def test_curves_are_of_the_target_whose_records_they_are(every_blessed, tmp_path):
    checks = [c for c in every_blessed if c.selection.source.name == "table1_coder_0_5b"]
    assert len(checks) == 2
    draw(checks, EXPECTED, tmp_path, ["svg"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"mini_table1_coder_0_5b_{name}.svg"
        for name in ("entropy_curves", "length_curves", "reward_curves")
    ]


def test_nothing_to_draw_is_said_and_is_no_success(tmp_path, capsys, monkeypatch):
    assert main(["--records", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no records" in capsys.readouterr().err
    (tmp_path / "paper").mkdir()
    assert main(["--blessed", "--expected", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "no blessed records" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)  # `expected/` is found from any folder
    assert main(["--blessed", "--target", "learning_coder_1_5b", "--out", str(tmp_path)]) == 2
    assert "no records are blessed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--kinds gif", "png,svg,pdf"),
        ("--kinds csv", "png,svg,pdf"),
        ("--tagret table6", "--tagret (did you mean --target?)"),
        ("paper figure44", "'figure44' (did you mean figure4?)"),
        ("papers", "papers: "),
        ("paper table6 --expected nowhere", "no expectations"),
    ],
)
def test_a_bad_command_line_is_a_sentence(line, words, capsys, monkeypatch):
    monkeypatch.setattr("figures.__main__.blessed_checks", lambda expected: [])
    assert main(line.split()) == 2
    assert words in capsys.readouterr().err


def test_a_layout_that_differs_in_its_last_digits_gives_the_same_file(checks_of, tmp_path):
    texts = []
    for shift in (0.0, 1e-14):
        figure = curves.by_batch(checks_of("table6"), EXPECTED, "A title")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for part in figure.axes:
            x, y, width, height = part.get_position().bounds
            part.set_position((x, y + shift, width, height))
        (path,) = save(figure, tmp_path / f"{shift}", "rates", ["svg"])
        texts.append(path.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]


def test_drawing_needs_no_torch_and_no_backend_of_a_notebook():
    code = "import sys, figures.__main__; assert 'torch' not in sys.modules"
    notebook = os.environ | {"MPLBACKEND": "module://not_installed.backend_inline"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=notebook)
