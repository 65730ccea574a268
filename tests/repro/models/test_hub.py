"""The hub, against a server of its API: fetched once and whole, or refused in one sentence."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import datasets
import pytest

from repro.__main__ import main
from repro.data.load import load_problems, source_named
from repro.data.problem import DataError, require_answers
from repro.data.public import PUBLIC_SETS
from repro.models.checkpoint import digests_of_read, resolve
from repro.models.files.adapter_files import load_adapted, read_adapter, save_adapter
from repro.models.files.tensor_files import CheckpointError
from repro.spec import hub as hubs
from repro.spec.config import DataConfig
from repro.spec.needs import DATA_DOWNLOADS
from tests.repro.hub_server import ANSWERS, Fault, serving
from tests.repro.qwen_checkpoint import write_small
from tests.repro.rl.conftest import nudge
from tests.repro.small_runs import fresh_policy
from tests.said import refusal, unsaid

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """Return a folder to serve: a model, one of another architecture, and sets of problems."""
    root = tmp_path_factory.mktemp("hub")
    for commit in COMMITS:
        write_small(root / "models/owner/model" / commit, lessons=60 * (commit == COMMITS[1]))
    other = root / "models/owner/other" / COMMITS[0]
    shutil.copytree(root / "models/owner/model" / COMMITS[0], other)
    config = json.loads((other / "config.json").read_text()) | {"model_type": "qwen3_moe"}
    (other / "config.json").write_text(json.dumps(config))
    packed = root / "models/owner/packed" / COMMITS[0]
    packed.mkdir(parents=True)
    (packed / "small.gguf").write_bytes(bytes(1_230_000))
    sums = root / "datasets/owner/sums" / COMMITS[0]
    for name in ("easy", "hard"):
        for split, rows in (("train", range(8)), ("test", range(8, 10))):
            made = [{"prompt": f"{name} {n}?", "gold": n, "topic": name} for n in rows]
            datasets.Dataset.from_list(made).to_parquet(sums / name / f"{split}-0.parquet")
    listed = [
        {"config_name": name, "data_files": [
            {"split": split, "path": f"{name}/{split}-*"} for split in ("train", "test")
        ]}
        for name in ("easy", "hard")
    ]  # fmt: skip
    (sums / "README.md").write_text(f"---\nconfigs: {json.dumps(listed)}\n---\n# Sums\n")
    made = [{"question": f"{n}?", "answer": n} for n in range(20)]
    plain = root / "datasets/owner/plain" / COMMITS[0] / "data/train-00000-of-00001.parquet"
    datasets.Dataset.from_list(made).to_parquet(plain)
    gsm8k = PUBLIC_SETS["gsm8k"]
    rows = [{"question": f"{n}, is it 7 or 8?", "answer": f"#### {7 + n % 2}"} for n in range(8)]
    home = root / "datasets" / DATA_DOWNLOADS["gsm8k"].name / gsm8k.revision
    datasets.Dataset.from_list(rows).to_parquet(home / gsm8k.files["test"])
    return root


@pytest.fixture
def hub(contents, tmp_path, monkeypatch):
    """Return a server in the hub's place, with an empty cache and no waits between attempts."""
    for name in [name for name in os.environ if name.startswith("HF_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    at_once = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", at_once)
    monkeypatch.setattr("huggingface_hub.file_download.time", at_once)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serving(contents) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


def test_a_checkpoint_is_fetched_config_first_and_once(hub):
    folder = resolve("owner/model")
    config, weights = (
        next(n for n, path in enumerate(hub.asked) if part in path)
        for part in ("config.json", "/large/")
    )
    assert config < weights
    assert folder.name == COMMITS[1]
    hub.asked.clear()
    assert resolve("owner/model") == folder
    assert not hub.asked
    assert resolve("owner/model", COMMITS[0]).name == COMMITS[0]


@pytest.mark.parametrize(
    ("kind", "match", "said"),
    [
        ("gated", "/api/", "terms .*HF_TOKEN "),
        ("gated", "/resolve/", "terms "),
        ("hidden", "/api/", "no such name.*HF_TOKEN"),
        ("missing", "/api/", "no such name"),
        ("revision", "/api/", "no such revision"),
        ("forbidden", "/api/", r"refuses access \(403\)"),
        ("forbidden", "/resolve/", r"refuses access \(403\)"),
        ("limit", "/api/", r"asked too often \(429\)"),
        ("limit", "/resolve/", r"asked too often \(429\)"),
        ("down", "/api/", r"the hub fails \(503\)"),
        ("down", "/large/", r"the hub fails \(503\)"),
        ("portal", "/api/", "login page"),
        ("portal", "", "login page"),
        ("cut", "/large/", "the download failed"),
        ("cut", "config.json", "the download failed"),
        ("changed", "/large/", "other bytes"),
    ],
)
def test_what_the_hub_does_is_one_sentence_with_its_cause(kind, match, said, hub):
    hub.fault = Fault(kind=kind, match=match)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=said) as caught:
        resolve("owner/model")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 20
    hub.fault = None
    assert hubs.is_whole(resolve("owner/model"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "", "/cache/blob"), r"\(/cache/blob\)"),
        (RuntimeError("Data processing error: CAS\nmore"), "RuntimeError: "),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "login page"),
    ],
)
def test_what_has_no_answer_of_the_hub_is_named_by_what_it_is(error, said):
    assert re.search(said, hubs.reason_of(error))
    assert "\n" not in hubs.reason_of(error)


def test_a_connection_that_is_cut_once_is_taken_up_again(hub):
    hub.fault = Fault(kind="cut", match="/large/", times=1)
    digests_of_read(resolve("owner/model"))


@pytest.mark.parametrize("match", ["/api/", "/resolve/", "/large/"])
def test_a_silent_server_is_given_up(match, hub, monkeypatch):
    monkeypatch.setattr(hubs, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr("repro.models.checkpoint.SILENT_SECONDS_OF_WEIGHTS", 1.0)
    hub.fault = Fault(kind="silent", match=match)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=r"1 seconds|timed out"):
        resolve("owner/model")
    assert time.monotonic() - begun < 40


def test_bytes_that_changed_in_the_cache_are_refused_at_loading(hub):
    folder = resolve("owner/model")
    blob = next(folder.glob("*.safetensors")).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"bytes changed; .*"):
        digests_of_read(folder)
    blob.unlink()
    digests_of_read(resolve("owner/model"))


OWN = DataConfig(source=source_named("owner/sums:easy"), columns="answer=gold")
GSM8K = DataConfig(source="gsm8k")


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE is set"),
        ("HF_ENDPOINT", "http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached"),
        ("HF_ENDPOINT", "https://no-such-host.invalid", "no-such-host.invalid cannot be reached"),
        ("HF_ENDPOINT", "http://127.0.0.1:{mute}", "timed out"),
        ("HF_ENDPOINT", "https://{hub}", "SSL"),
    ],
)
def test_without_the_hub_one_sentence_comes_quickly(variable, value, reason, hub, monkeypatch):
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it takes connections, never answers
        own = hub.address.removeprefix("http://")
        monkeypatch.setenv(variable, value.format(mute=mute.getsockname()[1], hub=own))
        for load in (
            lambda: resolve("owner/model"),
            lambda: load_problems(OWN, "test"),
            lambda: load_problems(GSM8K, "test"),
        ):
            said = refusal(load, ValueError)
            assert reason in said
            assert "\n" not in said
    assert time.monotonic() - begun < 30
    assert not hub.asked


def test_a_set_of_the_hub_is_read_by_its_name_one_configuration_alone(hub, monkeypatch):
    train, test = (load_problems(OWN, split) for split in ("train", "test"))
    assert [problem.answer for problem in train] == [str(n) for n in range(8)]
    assert [problem.question for problem in test] == ["easy 8?", "easy 9?"]
    assert test[0].row["topic"] == "easy"
    assert not [path for path in hub.asked if "hard" in path]
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_problems(OWN, "train") == train
    assert not hub.asked


def test_a_set_without_a_card_is_read_as_its_files_are_called(hub):
    plain = DataConfig(source=source_named("owner/plain"))
    assert [len(load_problems(plain, split)) for split in ("train", "test")] == [18, 2]
    assert len(load_problems(plain, "test", alone=True)) == 20


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/sums", "easy, hard"),
        ("owner/sums:middle", "easy, hard"),
        ("owner/sums:easy@v1", "no such revision"),
        ("owner/none", "no such name"),
        ("owner/sums:hard", "`answer` is missing .columns found: 'prompt', 'gold', 'topic'"),
    ],
)
def test_a_set_of_the_hub_that_is_not_there_is_a_sentence(name, said, hub):
    with pytest.raises(DataError, match=said):
        require_answers(load_problems(DataConfig(source=source_named(name)), "train"))


@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_public_sets_fail_with_the_same_causes(kind, hub):
    hub.fault = Fault(kind=kind, match="gsm8k")
    with pytest.raises(DataError, match=r"openai/gsm8k .*local hub cache.*folder:PATH"):
        load_problems(GSM8K, "test")
    hub.fault = None
    assert len(load_problems(GSM8K, "test")) == 8


@pytest.mark.parametrize(
    "line",
    [
        ["evaluate", "owner/other", "--data", "generated", "--limit", "1"],
        ["quantize", "owner/other", "out"],
        ["dose", "--model", "owner/other"],
    ],
)
def test_every_command_refuses_another_architecture(line, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*line, "--revision", COMMITS[0], "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("repro: ")
    assert "qwen3_moe" in said
    assert not [path for path in hub.asked if "/large/" in path]
    assert not (tmp_path / "out").exists()


def test_a_revision_is_what_is_evaluated_and_recorded(hub, tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("prompt,gold\nIs it 7 or 8?,7\n")
    asked = ["--data", str(tmp_path / "mine.csv"), "--columns", "answer=gold"]
    asked += ["--temperature", "0", "--tokens", "40", "--device", "cpu"]
    for commit in COMMITS:
        out = tmp_path / f"{commit[0]}.json"
        line = ["evaluate", "owner/model", "--revision", commit, *asked, "--out", str(out)]
        assert main(line) == 0
        assert json.loads(out.read_text())["checkpoint"]["revision"] == commit
    assert main(["evaluate", "tiny", "--revision", "main", *asked]) == 2
    assert "--revision main" in capsys.readouterr().err


def test_an_adapter_is_exported_for_a_base_of_the_hub_and_loads_by_its_commit(hub, tmp_path):
    folder, out = resolve("owner/model", COMMITS[0]), tmp_path / "out"
    lora = {"training": "lora", "lora_rank": 8, "lora_alpha": 16.0}
    policy = fresh_policy(str(folder), weight_format="bf16", **lora)
    nudge(policy, 0.02)
    line = ["export", str(save_adapter(policy, tmp_path / "adapter")), str(out)]
    # In a process of its own: transformers reads HF_ENDPOINT when it is imported.
    command = [sys.executable, "-m", "repro", *line, "--base", "owner/model"]
    assert subprocess.run([*command, "--revision", COMMITS[0]]).returncode == 0
    stored, trained = read_adapter(out), read_adapter(tmp_path / "adapter")
    assert (trained.base, trained.revision) == (str(folder), None)
    # `main` is another commit.
    assert (stored.base, stored.revision) == ("owner/model", COMMITS[0])
    assert load_adapted(out).folder == folder


OWN_RUN = ["table1", "--tier", "smoke", "--model", "owner/model", "--arms", "bf16_lora"]
OWN_RUN += ["--seeds", "1", "--steps", "1", "--set", "max_prompt_tokens=600"]
OWN_RUN += ["--set", "prompt_template=boxed"]


def test_weights_that_cannot_be_fetched_stop_the_command_and_fail_no_run(hub, tmp_path, capsys):
    hub.fault = Fault(kind="cut", match="/large/")
    assert main(["run", *OWN_RUN, "--runs", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "local hub cache" in said
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]


def test_plan_asks_the_hub_for_sizes_that_it_does_not_know(hub, tmp_path, monkeypatch, capsys):
    line = ["plan", "table1", "--tier", "paper", "--model", "owner/model", "--arms", "nvfp4_lora"]
    line += ["--runs", str(tmp_path / "runs")]
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        assert main(line) == 0
    said = capsys.readouterr().out
    assert unsaid(said, "owner/model (not known)|memory    not known") == []
    assert " 0 B" not in said
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "not known" not in said
    assert "million parameters" in said
    line[line.index("owner/model")] = "owner/packed:small.gguf"  # whose sizes no config says
    assert main(line) == 0
    assert "owner/packed:small.gguf (1.23 MB)" in capsys.readouterr().out
    line[line.index("owner/packed:small.gguf")] = "owner/other"
    assert main(line) == 2
    assert "model_type is 'qwen3_moe'" in capsys.readouterr().err
    line[line.index("owner/other")] = "owner/absent"
    assert main(line) == 0
    (said,) = re.findall("  hub       (.*)", capsys.readouterr().out)
    assert said.startswith("owner/absent: ")
    assert not [path for path in hub.asked if "/large/" in path or path.endswith(".gguf")]
