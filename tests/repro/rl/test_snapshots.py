"""Snapshots: whole or absent whenever a process is killed, two kept, verified when read."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repro.rl import training_state
from repro.rl.snapshots import SnapshotError, read_newest, write_snapshot
from repro.rl.training_state import TrainState

ROOT = Path(__file__).parents[3]


def write(folder, step):
    tensors = {"a.safetensors": {"w": torch.full((3,), float(step)), "n": torch.tensor(step)}}
    return write_snapshot(folder, step, tensors, {"name": "run"})


def checked(snapshot):
    """Return the step of a snapshot whose every value says the same step."""
    tensors = snapshot.tensors["a.safetensors"]
    assert torch.equal(tensors["w"], torch.full((3,), float(snapshot.step)))
    assert int(tensors["n"]) == snapshot.content["step"] == snapshot.step
    return snapshot.step


def newest(folder):
    step, refused = read_newest(folder, checked)
    assert refused == []
    return step


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_last_two_are_kept(tmp_path):
    for step in (0, 5, 10, 15):
        write(tmp_path, step)
    assert names(tmp_path) == ["step-00000010", "step-00000015"]
    assert newest(tmp_path) == 15


def odd_steps(snapshot):
    """Refuse a snapshot of an even step, as a caller may whose run is another."""
    if snapshot.step % 2 == 0:
        raise SnapshotError("it is even")
    return checked(snapshot)


@pytest.mark.parametrize(
    ("stray", "check", "why"),
    [(True, checked, "stray has SHA-256"), (False, odd_steps, "it is even")],
)
def test_a_refused_snapshot_is_set_aside(tmp_path, stray, check, why):
    for step in (5, 10):
        write(tmp_path, step)
    if stray:
        (tmp_path / "step-00000010" / "stray").touch()
    assert read_newest(tmp_path, check, sets_aside=False) is not None
    assert names(tmp_path) == ["step-00000005", "step-00000010"]
    step, (sentence,) = read_newest(tmp_path, check)
    assert step == 5
    assert "step-00000010 was refused" in sentence
    assert why in sentence
    write(tmp_path, 7)
    assert names(tmp_path) == ["refused-00000010", "step-00000005", "step-00000007"]


# Ends the process at the file operation of a number, as a kill at that moment would.
COUNTING = """
import os, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from tests.repro.rl.test_snapshots import write
os.fsync = lambda descriptor: None  # what a killed process has written stays without it
write(Path({folder!r}), 3)
last, count = 0, 0
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir")

def count_operations(event, arguments):
    global count
    if event in OPERATIONS and {folder!r} in str(arguments):
        count += 1
        if count == last:
            os._exit(9)

def forked():
    sys.addaudithook(count_operations)
    write(Path({folder!r}), 4)

while True:
    last += 1
    child = os.fork()
    if child == 0:
        forked()
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, 9), ended
    from tests.repro.rl.test_snapshots import newest, names
    found = newest(Path({folder!r}))
    assert found in (3, 4), found
    if ended == 0:
        assert found == 4
        break
    if found == 4:
        # Again from the state of before: the next kill comes one operation later.
        import shutil
        shutil.rmtree({folder!r})
        write(Path({folder!r}), 3)
print(last)
"""


def test_a_kill_at_any_file_operation_leaves_a_good_snapshot(tmp_path):
    folder = tmp_path / "kept"
    script = COUNTING.format(paths=[str(ROOT)], folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15
    write(folder, 5)
    assert names(folder)[-1] == "step-00000005"
    assert not list(folder.glob("unfinished-*"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["replace", "fsync", "mkdir"])
def test_a_disk_that_fails_leaves_the_snapshot_of_before(tmp_path, monkeypatch, code, call):
    write(tmp_path, 1)

    def fail(*arguments, **named):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            write(tmp_path, 2)
    assert str(tmp_path) in str(caught.value.filename)
    assert names(tmp_path) == ["step-00000001"]
    assert newest(tmp_path) == 1


def test_a_checkpoint_says_on_how_many_other_ranks_its_steps_were_done(tmp_path, monkeypatch):
    parameters = {"w": torch.nn.Parameter(torch.ones(3, 2))}
    optimizer = torch.optim.SGD(parameters.values(), momentum=0.9)
    parameters["w"].sum().backward()
    optimizer.step()
    state = TrainState(digest="d", step=1, draws=2, series={}, facts={})
    seen = []
    for world in (2, 2, 1, 4):
        monkeypatch.setattr(training_state, "_world", lambda world=world: world)
        loaded = training_state.load_checkpoint(tmp_path, "d", parameters, optimizer)
        state = loaded or state
        seen.append(state.facts.get("ranks_before"))
        state.step += 1
        training_state.save_checkpoint(tmp_path, state, parameters, optimizer)
    assert seen == [None, None, [2], [1, 2]]
