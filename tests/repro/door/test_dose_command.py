"""The `dose` command: each treatment beside the 16-bit policy, and what it refuses."""

from repro.__main__ import main
from repro.models.checkpoint import resolve, write_quantized


def test_the_command_prints_how_far_each_treatment_moves_the_policy(capsys):
    flags = ["--sigmas", "0.01,0.1", "--formats", "nvfp4", "--prompts", "2", "--new-tokens", "8"]
    assert main(["dose", "--model", "tiny", "--device", "cpu", *flags]) == 0
    lines = [line.strip(" │").split("│") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines if len(line) == 4]
    kl = {name: float(value) for name, value, *_ in cells}
    assert list(kl) == ["16 bits", "AQN 0.01", "AQN 0.1", "NVFP4"]
    assert kl["16 bits"] == 0 < kl["AQN 0.01"] < min(kl["AQN 0.1"], kl["NVFP4"])


def test_a_checkpoint_of_codes_is_refused(tmp_path, capsys):
    write_quantized(resolve("tiny"), tmp_path / "codes", weight_format="nvfp4")
    assert main(["dose", "--model", str(tmp_path / "codes"), "--device", "cpu"]) == 2
    assert "holds nvfp4 codes" in capsys.readouterr().err
