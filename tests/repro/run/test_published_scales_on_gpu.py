"""On a CUDA device: a published checkpoint's way in small, from its folder to files for others."""

import pytest
import torch

from repro.__main__ import main
from repro.evidence.record import read_record, run_folder
from repro.judge.check import check_selection
from repro.models.loading import read_description
from repro.run.carry_out import carry_out
from repro.run.places import expected_folder
from repro.run.preflight import files_refusal, refusal
from repro.run.select import Changes, select
from tests.repro.qwen_checkpoint import write_hub, write_small
from tests.repro.small_runs import context_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]
SMALLER = {
    "steps": 3,
    "prompts_per_rollout": 2,
    "group_size": 4,
    "updates_per_rollout": 1,  # three rollouts, of which the second and third are perturbed
    "rollout": {"max_new_tokens": 48},
    "optimizer": {"warmup_steps": 1},
    "evaluation": {"samples": 2, "sampling": {"max_new_tokens": 48}},
    "revision": "",
    # Random weights are never right; what rewards do to training is tested elsewhere.
    "arm": {"reward": "random"},
}
ARMS = ["bf16_lora", "nvfp4_lora_aqn", "nf4_lora", "bf16_full"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        write_hub(folder / "hub", {"train": 640, "test": 24}, names=("gsm8k",))
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield write_small(folder / "Qwen2.5-small", hidden_size=256, intermediate_size=512)


@pytest.fixture(scope="module")
def selection(checkpoint):
    settings = SMALLER | {"checkpoint": str(checkpoint)}
    (chosen,) = select(["table1"], tier="paper", changes=Changes(settings=settings, limit=4))
    return chosen


@pytest.fixture(scope="module")
def records(selection, tmp_path_factory):
    """Return the folder of the records of one seed of each arm, and of what the runs keep."""
    pytest.importorskip("bitsandbytes", reason="the scale's optimiser is bitsandbytes'")
    folder = tmp_path_factory.mktemp("runs")
    for run in selection.plan(1, ARMS):
        assert refusal(run) is None
        assert files_refusal(run) is None
        (path,) = carry_out([run], folder, context_of(run_folder(run, folder)))
        assert read_record(path).ok
    return folder


def test_every_arm_leaves_a_record_that_counts(selection, records):
    checked = check_selection(selection, records, expected_folder(None))
    assert not checked.evidence.refused
    assert not checked.evidence.failed
    assert set(checked.evidence.records) == set(ARMS)
    (record,) = checked.evidence.records["nvfp4_lora_aqn"].values()
    assert record.config["scale"]["optimizer"]["name"] == "adamw_8bit"
    assert record.facts["linears"] == {"nvfp4": 14}


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_what_was_trained_is_exported_and_asked(kind, selection, records, tmp_path, capsys):
    (run,) = selection.plan(1, ["nvfp4_lora_aqn"])
    trained, out = run_folder(run, records), tmp_path / "out"
    assert main(["export", str(trained), str(out), "--as", kind]) == 0, capsys.readouterr().err
    assert "training moved the policy by" in capsys.readouterr().out
    named = ["--adapter", str(out)] if kind == "adapter" else [str(out)]
    asked = ["evaluate", *named, "--data", "gsm8k", "--limit", "4", "--tokens", "48"]
    assert main(asked) == 0, capsys.readouterr().err


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4", "nf4"])
def test_a_checkpoint_is_quantised_on_the_device(weight_format, checkpoint, tmp_path, capsys):
    line = ["quantize", str(checkpoint), str(tmp_path / "out"), "--format", weight_format]
    assert main([*line, "--device", "cuda"]) == 0, capsys.readouterr().err
    assert read_description(tmp_path / "out").stored_format == weight_format
    assert f"14 projections in {weight_format}" in capsys.readouterr().out
