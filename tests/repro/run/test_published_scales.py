"""Every scale of a published checkpoint, from the command line to a verdict, without the hub.

A small checkpoint of the same layout and other problems stand in under the hub's names. What is
changed of a scale is size, steps and counts, and the optimiser that needs a GPU.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

import repro.run.execute  # noqa: F401 - binds the real devices before a test pretends others
from repro.__main__ import main
from repro.data.public import PUBLIC_SETS
from repro.evidence.record import find_record, read_record
from repro.judge.check import check_selection
from repro.models.checkpoint import resolve, write_quantized
from repro.models.files.tensor_files import CheckpointError
from repro.run import preflight as preflights
from repro.run import present_card
from repro.run.carry_out import carry_out
from repro.run.places import expected_folder
from repro.run.preflight import files_refusal, memory_of, refusal
from repro.run.select import Changes, select
from repro.spec import tier as tiers
from repro.spec.needs import DATA_DOWNLOADS
from repro.spec.tier import REAL_CHECKPOINTS, CudaDevice, Tier
from repro.targets import TARGETS, find
from tests.repro.qwen_checkpoint import write_hub, write_small
from tests.repro.small_runs import context_of
from tests.said import unsaid

PUBLISHED = [
    (target.name, tier) for target in TARGETS for tier in REAL_CHECKPOINTS if tier in target.scales
]
# Sizes, steps and counts; and AdamW in float32, since its 8-bit form needs a GPU.
SMALLER = {
    "steps": 2,
    "prompts_per_rollout": 2,
    "group_size": 4,
    "updates_per_rollout": 1,
    "micro_batch_rows": 4,
    "rollout": {"max_new_tokens": 24},
    "optimizer": {"name": "adamw", "warmup_steps": 1},
    "evaluation": {"samples": 2, "sampling": {"max_new_tokens": 24}},
}
H200 = CudaDevice(name="NVIDIA H200", capability=(9, 0), memory_bytes=150_000_000_000)
H100 = CudaDevice(name="NVIDIA H100", capability=(9, 0), memory_bytes=85_000_000_000)
CARD_24GB = CudaDevice(name="a 24 GB card", capability=(8, 9), memory_bytes=22 * 2**30)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a small checkpoint folder, with small data sets in the hub's place."""
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        write_hub(folder / "hub", {"train": 640, "test": 24})
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield write_small(folder / "Qwen2.5-small", lessons=150)


def small(name, tier, model, **settings):
    changed = SMALLER | {"checkpoint": str(model), "revision": ""} | settings
    if tier is Tier.MINI:
        changed = changed | {"evaluation": SMALLER["evaluation"] | {"every": 1}}
    (selection,) = select([name], tier=tier.value, changes=Changes(settings=changed, limit=2))
    return selection


def carried_out(run, folder):
    (path,) = carry_out([run], folder, context_of(folder / "work" / run.digest()))
    assert path == find_record(run, folder)
    return read_record(path)


@pytest.mark.parametrize(("name", "tier"), PUBLISHED)
def test_every_published_scale_is_ready_but_for_its_checkpoint(name, tier, checkpoint, monkeypatch):
    monkeypatch.setattr(preflights, "cuda_devices", lambda: (H200,))
    (selection,) = select(
        [name], tier=tier.value, changes=Changes(settings={"checkpoint": str(checkpoint)})
    )
    runs = selection.plan(1)
    assert not [run for run in runs if refusal(run)]
    # Of an arm, files are read for its format alone.
    by_format = {run.arm.weight_format: run for run in runs}
    assert not [run for run in by_format.values() if files_refusal(run)]


@pytest.fixture(scope="module")
def recorded(checkpoint, tmp_path_factory):
    """Return, by target, a selection and the folder with a record of each of its arms."""
    collected = {}
    for name, tier in (("table1", Tier.PAPER), ("table2", Tier.PAPER), ("table1_1_5b", Tier.MINI)):
        selection, folder = small(name, tier, checkpoint), tmp_path_factory.mktemp(name)
        for run in selection.plan(1):
            carried_out(run, folder)
        collected[name] = selection, folder
    return collected


@pytest.mark.parametrize("name", ["table1", "table2", "table1_1_5b"])
def test_every_arm_goes_from_checkpoint_to_a_record_that_counts(name, recorded):
    selection, folder = recorded[name]
    checked = check_selection(selection, folder, expected_folder(None))
    assert not checked.evidence.refused
    assert not checked.evidence.failed
    assert set(checked.evidence.records) == {arm.name for arm in selection.source.arms}


def test_a_run_with_other_settings_is_never_judged_as_the_targets_own(recorded):
    name = "table1"
    selection, folder = recorded[name]
    assert selection.source.name.startswith(f"{name}_with_")
    judged = check_selection(selection, folder, expected_folder(None))
    assert not [verdict for verdict in judged.verdicts if verdict.about == "paper value"]
    (own,) = select([name], tier=selection.tier.value)
    assert check_selection(own, folder, expected_folder(None)).lacking is not None
    others = {run.digest() for run in own.plan()}
    assert not others & {run.digest() for run in selection.plan()}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_other_architectures_train_too(architecture, checkpoint, tmp_path):
    folder = write_small(tmp_path / architecture, architecture)
    selection = small("table1", Tier.PAPER, folder)
    (run,) = selection.plan(1, ["nvfp4_lora_aqn"])
    record = carried_out(run, tmp_path / "runs")
    assert record.config["scale"]["checkpoint"] == str(folder)
    assert record.facts["trained_change_l2"] > 0


def test_the_commit_of_a_hub_name_is_recorded(checkpoint, tmp_path, monkeypatch):
    hub, commit = tmp_path / "hub", "a" * 40
    home = hub / "models--owner--model"
    shutil.copytree(checkpoint, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    data = Path(os.environ["HF_HUB_CACHE"]) / "datasets--openai--gsm8k"
    (hub / data.name).symlink_to(data, target_is_directory=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    selection = small("table1", Tier.PAPER, "owner/model", revision="main")
    (run,) = selection.plan(1, ["nvfp4"])
    record = carried_out(run, tmp_path / "runs")
    assert record.inputs["checkpoint_revision"] == commit
    assert record.config["scale"]["revision"] == "main"


@pytest.mark.usefixtures("warm_workers")
def test_one_command_plans_runs_checks_and_reports(checkpoint, tmp_path, monkeypatch, capsys):
    # Workers are processes of their own: their data sets have as many rows as the hub's.
    write_hub(tmp_path / "hub", {"train": 7473, "test": 1319}, names=("gsm8k",))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(tiers, "cuda_devices", lambda: (H100,))
    monkeypatch.setattr(present_card, "_torch_fault", lambda: None)
    config = tmp_path / "small.json"
    config.write_text(json.dumps(SMALLER))
    line = ["table1", "--tier", "paper", "--model", str(checkpoint), "--config", str(config)]
    line += ["--limit", "2", "--runs", str(tmp_path / "runs")]
    chosen = ["--seeds", "1", "--arms", "nvfp4_lora_aqn"]
    assert main(["plan", *line, *chosen]) == 0
    assert main(["run", *line, *chosen, "--workers", "1", "--threads", "1"]) == 0
    assert main(["check", *line]) == 0
    assert main(["report", *line, "--out", str(tmp_path / "report.md")]) == 0
    assert "(0 recorded, 1 to do)" in capsys.readouterr().out
    assert "| NVFP4, LoRA + AQN (QeRL) |" in (tmp_path / "report.md").read_text()


def names_refused(name, tier, device):
    scale = find(name).scales[tier]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflights, "cuda_devices", lambda: (device,))
        return {arm.name for arm in find(name).arms if memory_of(arm, scale)[1]}


def test_what_no_row_of_fits_the_device_is_refused_by_the_memory_plan():
    assert names_refused("table1", Tier.PAPER, H200) == set()
    assert names_refused("table1", Tier.PAPER, H100) == {"bf16_full"}
    assert names_refused("table2_32b", Tier.PAPER, H100) == {"bf16_full"}
    assert names_refused("table1_1_5b", Tier.MINI, CARD_24GB) == set()
    assert "bf16_lora" in names_refused("table2_14b", Tier.PAPER, CARD_24GB)


def test_of_cards_of_different_memory_the_smallest_counts_and_the_plan_says_so(
    tmp_path, monkeypatch, capsys
):
    line = ["plan", "table2_14b", "--tier", "paper", "--arms", "bf16_lora", "--runs", str(tmp_path)]
    for second, unlike in ((H200, False), (CARD_24GB, True)):
        monkeypatch.setattr(preflights, "cuda_devices", lambda second=second: (H200, second))
        monkeypatch.setattr("repro.run.plan.machine_refusal", lambda source, tier: None)
        assert main(line) == (2 if unlike else 0)
        said = capsys.readouterr().out
        assert said.count("smallest of 2 cards") == (2 if unlike else 0)  # card, refusal
        assert (f"{CARD_24GB.name} has " in said) == unlike


def test_a_checkpoint_without_any_end_token_is_refused(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "endless")
    for name in ("config", "generation_config", "tokenizer_config"):
        path = tmp_path / "endless" / f"{name}.json"
        values = json.loads(path.read_text()) | {"eos_token_id": None, "eos_token": None}
        path.write_text(json.dumps(values))
    selection = small("table1", Tier.PAPER, tmp_path / "endless")
    assert "no end token" in (files_refusal(selection.plan(1, ["bf16"])[0]) or "")


@pytest.mark.parametrize(
    ("steps", "updates", "perturbed"), [(3, 4, False), (3, 1, True), (1, 1, False), (8, 4, True)]
)
def test_steps_of_which_no_rollout_is_perturbed_are_refused_before_they_are_made(
    steps, updates, perturbed, checkpoint, monkeypatch
):
    monkeypatch.setattr(preflights, "cuda_devices", lambda: (H100,))
    changed = {"steps": steps, "updates_per_rollout": updates}
    selection = small("table1", Tier.PAPER, checkpoint, **changed)
    noisy, plain = (
        refusal(selection.plan(1, [name])[0]) for name in ("nvfp4_lora_aqn", "nvfp4_lora")
    )
    assert plain is None
    assert (noisy is None) == perturbed
    if noisy is not None:
        assert unsaid(noisy, "nvfp4_lora_aqn|no noise") == []
        assert ("--set updates_per_rollout=1" in noisy) == (updates > 1)


def test_codes_are_refused_to_arms_of_another_format(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(preflights, "cuda_devices", lambda: (H100,))
    codes = write_quantized(checkpoint, tmp_path / "codes", max_shard_bytes=60_000)
    assert len([*codes.glob("model-*")]) > 1
    selection = small("table1", Tier.PAPER, codes)
    said = {run.arm.name: files_refusal(run) for run in selection.plan(1)}
    assert "stores nvfp4 codes" in (said["bf16_lora"] or "")
    assert said["nvfp4_lora_aqn"] is None
    (run,) = selection.plan(1, ["nvfp4_lora_aqn"])
    assert carried_out(run, tmp_path / "runs").facts["linears"] == {"nvfp4": 14}


def test_a_missing_package_and_a_hub_that_is_not_there_are_said_in_a_sentence(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflights, "cuda_devices", lambda: (H200,))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    run = select(["table1"], tier="paper")[0].plan(1, ["nvfp4_lora"])[0]
    said = files_refusal(run)
    assert "HF_HUB_OFFLINE" in (said or "")
    monkeypatch.setattr(preflights.importlib.util, "find_spec", lambda name: None)
    assert "bitsandbytes" in (refusal(run) or "")


def test_a_download_that_was_cut_short_is_not_taken_for_a_checkpoint(
    checkpoint, tmp_path, monkeypatch
):
    home = tmp_path / "models--owner--model"
    folder = home / "snapshots" / ("b" * 40)
    shutil.copytree(checkpoint, folder)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(folder.name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve("owner/model", "main") == folder
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="local hub cache"):
        resolve("owner/model", "main")
    assert resolve("owner/model", "main", weights=False) == folder


def test_downloads_are_named_as_the_data_sets_are():
    assert DATA_DOWNLOADS.keys() == PUBLIC_SETS.keys()
