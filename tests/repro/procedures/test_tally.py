"""Receipts of a run that was stopped are those of the whole run, not of its last start."""

import dataclasses
import shutil

import pytest

from repro.data.problem import digest_of_problems
from repro.data.problem_sets import ProblemSets
from repro.evidence.procedure import Stopped
from repro.models.checkpoint import TINY_FOLDER, checkpoint_inputs, digest_of_files, weights_digest
from repro.models.policy import load_policy
from repro.procedures import loaded_run as module
from repro.procedures.train import train_and_evaluate
from tests.repro.procedures.conftest import SCALE
from tests.repro.small_runs import context_of, small_run

RUN = small_run(dataclasses.replace(SCALE, test_sets=()))


def start(run, folder, stops=()):
    answers = iter([*stops, *[False] * 100])
    return train_and_evaluate(run, context_of(folder, should_stop=lambda: next(answers)))


def test_a_stopped_run_has_the_receipts_of_an_uninterrupted_one(tmp_path, monkeypatch):
    whole = start(RUN, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(module, "peak_bytes", lambda: 2**50)
        with pytest.raises(Stopped):
            start(RUN, tmp_path / "parts", [False, False, True])
    rest = start(RUN, tmp_path / "parts")
    assert rest.series == whole.series
    for facts in (rest.facts, whole.facts):
        facts.pop("seconds")
    assert rest.facts == whole.facts
    assert sum(rest.facts["grades"].values()) > 0
    assert rest.metrics["peak_bytes"].value == 2**50


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("tokenizer_config.json", b"}", b', "chat_template": "another system line"}'),
        ("config.json", b"1e-06", b"1e-05"),
        ("model.safetensors", b"\x3c", b"\x3d"),
        ("generation_config.json", b"use_cache", b"use_cach"),
        ("chat_template.jinja", b"", b"another system line"),
        ("train_problems", b"", b""),
    ],
)
def test_a_run_goes_on_with_the_same_files(tmp_path, monkeypatch, name, old, new):
    checkpoint = tmp_path / "policy"
    shutil.copytree(TINY_FOLDER, checkpoint)
    scale = dataclasses.replace(SCALE, checkpoint=str(checkpoint), test_sets=())
    run = dataclasses.replace(RUN, scale=scale)

    with pytest.raises(Stopped):
        start(run, tmp_path / "run", [False, True])
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    path = checkpoint / name
    if "." in name:
        content = path.read_bytes() if path.is_file() else b""
        # Of weights the last such byte, which is one of a value.
        path.write_bytes(new.join(content.rsplit(old, 1)) if old else new)
    else:
        fewer = property(lambda own: digest_of_problems(own.train[1:]))
        monkeypatch.setattr(ProblemSets, "train_digest", fewer)
    with pytest.raises(ValueError, match=rf"^{name} changed since "):
        start(run, tmp_path / "run")
    assert all(path.read_bytes() == content for path, content in kept.items())


def test_a_record_names_the_files_that_were_read(tmp_path):
    policy = load_policy("tiny", weight_format="bf16")
    assert sorted(policy.facts["checkpoint_files"]) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    before = digest_of_files([TINY_FOLDER / "model.safetensors"])
    assert weights_digest(policy.facts) == before
    folder = tmp_path / "policy"
    shutil.copytree(TINY_FOLDER, folder)
    same = load_policy(folder, weight_format="bf16").facts
    (folder / "chat_template.jinja").write_text("another system line")
    (folder / "README.md").write_text("read by nobody")
    other = load_policy(folder, weight_format="bf16").facts
    assert checkpoint_inputs(same) == checkpoint_inputs(policy.facts)
    changed = checkpoint_inputs(other)
    assert changed["checkpoint"] == before
    assert changed["checkpoint_files"] != checkpoint_inputs(same)["checkpoint_files"]
