"""Fixtures of tests that read records: made-up ones (`made_up`), real ones (`recorded_smoke`)."""

import fcntl
import functools
import multiprocessing
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from repro.data.tiny_tokenizer import build_tokenizer
from repro.evidence import origins
from repro.evidence.record import record_path
from repro.reward.grader import GraderPool
from repro.run import workers
from repro.run.places import expected_folder
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.environment import with_environment
from tests.repro.made_up import honest_record, source_of
from tests.repro.recorded_smoke import record_smoke


@pytest.fixture(autouse=True)
def made_up_commits(monkeypatch):
    """Let commits that were made up (forty times the same digit) have sources of their own."""
    known = origins._committed

    def committed(commit):
        return source_of(commit) if len(set(commit)) == 1 else known(commit)

    monkeypatch.setattr(origins, "_committed", committed)


@pytest.fixture
def run():
    """Return a smoke run of Table 1 with added noise."""
    return plan(find("table1"), Tier.SMOKE, 1, ["nvfp4_lora_aqn"])[0]


@pytest.fixture(scope="session", autouse=True)
def uncollected_garbage():
    """Let runs and measurements search for no garbage, 0.3 s each, where no device needs it."""
    if torch.cuda.is_available():
        yield
        return
    with mock.patch("repro.measure.device_state.gc"), mock.patch("repro.export.comparing.gc"):
        yield


@contextmanager
def forked_workers():
    """Fork workers off a process that has imported what training needs: 9 s less for each.

    For tests of what runs leave and of workers that die or get signals at work, not of their start.
    Beside a GPU workers start afresh: what the server imports begins CUDA, which no fork survives.
    """
    if torch.cuda.is_available():
        yield
        return
    server = multiprocessing.get_context("forkserver")
    # Of this project what every run imports; what a run reads of its environment it reads later.
    server.set_forkserver_preload(
        [
            "transformers.models.qwen2.modeling_qwen2",
            "peft.tuners.lora.bnb",
            "repro.procedures.train",
            "repro.run.carry_out",
        ]
    )

    def process(target, args, **more):
        # A forked process has its server's environment; a fresh one would have this one's.
        in_place = os.environ.copy(), target, *args
        return server.Process(target=with_environment, args=in_place, **more)

    forking = SimpleNamespace(Pipe=server.Pipe, Process=process)
    by_fork = SimpleNamespace(get_context=lambda method: forking)
    with mock.patch.object(workers, "multiprocessing", by_fork):
        yield


@pytest.fixture
def warm_workers():
    """Let a test's workers be forked."""
    with forked_workers():
        yield


IDLE_GRADERS: list = []  # workers that no pool has now


@contextmanager
def graders_kept(idle):
    """Let a pool leave its idle workers to the next one, which saves a second of imports each."""
    start, leave = GraderPool._start, GraderPool.__exit__

    def started(pool):
        for worker in list(idle):
            same = worker.process.args[-1] == str(pool.seconds_per_item)
            if same and worker.process.poll() is None:
                idle.remove(worker)
                pool.worker = worker
                pool.workers_started += 1
                return worker
        return start(pool)

    def left(pool, *raised):
        if pool.worker is not None:
            idle.append(pool.worker)
            pool.worker = None
        leave(pool, *raised)

    with mock.patch.multiple(GraderPool, _start=started, __exit__=left):
        yield


@pytest.fixture(scope="module", autouse=True)
def kept_graders():
    """Keep graders for a module: what its tests share is made before any fixture of a test."""
    with graders_kept(IDLE_GRADERS):
        yield


@pytest.fixture
def pool():
    """Return a pool of graders."""
    with GraderPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def tokenizer():
    """Return the tokenizer of the tiny policy."""
    return build_tokenizer()


def write_table1(runs, spoil=lambda record: record, seeds=5):
    """Write Table 1's smoke records to `runs`, each passed through `spoil`, which edits a copy."""
    # Sixty waits for the disk a test would be most of the time of these tests.
    with mock.patch("os.fsync"):
        for run in plan(find("table1"), Tier.SMOKE, seeds):
            honest, text = _honest(run)
            record = spoil(honest)
            if record is not honest:
                record.write(runs)
                continue
            path = record_path(run, runs)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)


@functools.cache
def _honest(run):
    """Return an honest record, made once, and the text of its file."""
    record = honest_record(run)
    with tempfile.TemporaryDirectory() as folder:
        return record, record.write(Path(folder)).read_text(encoding="utf-8")


@pytest.fixture
def table1_records():
    """Return a writer of made-up records of Table 1."""
    return write_table1


@pytest.fixture
def expected(tmp_path):
    """Return a folder of expectations to bless into, with the paper's alone."""
    shutil.copytree(expected_folder(None) / "paper", tmp_path / "expected" / "paper")
    return tmp_path / "expected"


@pytest.fixture
def made_up_record():
    """Return the maker of one honest record."""
    return honest_record


@pytest.fixture(scope="session")
def smoke_runs(tmp_path_factory):
    """Return a folder of real records of the smoke tier; see `recorded_smoke`. Copy it to edit.

    Where several processes run the tests, the first that asks makes it for all; the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / "recorded_smoke" / "runs", shared / "recorded_smoke" / "done"
    folder.mkdir(parents=True, exist_ok=True)
    with (shared / "recorded_smoke.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            record_smoke(folder)
            done.touch()
    return folder
