"""A user's own reward: checked before a run starts, recorded by its source, never judged."""

import signal
import sys

import pytest

from repro.__main__ import main
from repro.data.problem import Problem, columns_of
from repro.evidence.record import read_record
from repro.reward.custom import load_reward, pay, reward_named, try_reward
from repro.reward.score import score
from tests.repro.small_runs import request_of

SHORT = """
CALLS = []
def shorter(completions, answers):
    CALLS.append(1)
    return [1.0 / (1 + len(text)) for text in completions]

def asking(completions, prompts, level):
    return [(level > 0) / (1 + len(text)) for text, level in zip(completions, level, strict=True)]

def none(completions, answers):
    return [None for _ in completions]

def off(completions, answers):
    raise GeneratorExit

async def later(completions, answers):
    return [0.0] * len(completions)

def swapped(answers, texts):
    return [0.0] * len(answers)

NUMBER = 3
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a module into the current folder and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = f"own_reward_{tmp_path.name}"

    def module(source):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        sys.modules.pop(name, None)
        return name

    yield module
    sys.modules.pop(name, None)


def test_a_reward_is_found_tried_and_stated_by_its_source(write):
    name = write(SHORT)
    stated = reward_named(f"{name}:shorter")
    assert (stated.module, stated.function) == (name, "shorter")
    assert len(stated.source_sha256) == 64
    assert sys.modules[name].CALLS == []  # it was tried in a copy of this process alone
    assert pay(load_reward(stated), ["a", "bcd"], {"answers": ["1", "1"]}, "s") == [0.5, 0.25]


def test_a_reward_that_changed_since_the_run_was_planned_is_refused(write):
    stated = reward_named(f"{write(SHORT)}:shorter")
    write(SHORT + "# changed\n")
    with pytest.raises(ValueError, match="changed"):
        load_reward(stated)


def returning(value):
    return f"def reward(completions): return {value}"


@pytest.mark.parametrize(
    ("named", "source", "words"),
    [
        ("nothing", SHORT, "module:function"),
        ("{}.py:shorter", SHORT, "module:function"),
        (":f", SHORT, "module:function"),
        ("no_such_module_here:f", SHORT, r"ModuleNotFoundError\(.*\)$"),
        ("{}:shortest", SHORT, "shortest .*shorter"),
        ("{}:NUMBER", SHORT, "NUMBER"),
        ("{}:swapped", SHORT, "answers, texts"),
        ("{}:off", SHORT, r"raised GeneratorExit.* in .*\.py, line \d+$"),
        ("{}:later", SHORT, "asynchronous"),
        ("{}:reward", "import json; json.loads('{')", r"JSONDecodeError.* in .*\.py, line 1$"),
        ("{}:reward", "import os; os.abort()", "exit code -6"),
        ("{}:reward", returning("[0.0]"), r"returned \[0.0\] for 2"),
        ("{}:reward", returning("'ab'"), "'ab' for 2"),
        ("{}:reward", returning("b'ab'"), "b'ab' for 2"),
        ("{}:reward", returning("[float('inf')] * 2"), "returned inf"),
        ("{}:reward", returning("[type('Bad', (), {'__repr__': lambda self: 1 / 0})()] * 2"),
         "a Bad that cannot"),
        ("{}:reward", returning("[type('Bad', (), {'__repr__': lambda self: '\\x1b\\n'})()] * 2"),
         r"\\x1b\\n; needed"),
        ("{}:reward", returning("__import__('os')._exit(0)"), "exit code 0"),
        ("{}:reward", returning("__import__('sys').exit(0)"), r"raised SystemExit\(0\)"),
        ("{}:reward", returning("__import__('time').sleep(60)"), "within 2 seconds, .*model"),
        ("{}:reward", returning("[10**16] * 2"), r"returned 1000.*1e\+15"),
        ("{}:reward", returning("list(__import__('numpy').full(2, float('inf'), 'float16'))"),
         "returned .*inf"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_reward_is_a_sentence(named, source, words, write, monkeypatch):
    monkeypatch.setattr("repro.reward.custom._PAYING", 2.0)
    with pytest.raises(ValueError, match=words):
        reward_named(named.format(write(source)))


PROBLEMS = [
    Problem(id="a", question="2 + 2?", answer="4", row={"topic": "sums", "weight": 2}),
    Problem(id="b", question="3 * 3?", answer="9", row={"topic": "products"}),
]


@pytest.mark.parametrize(
    ("signature", "body", "paid"),
    [
        ("completions", "[len(text) for text in completions]", [1, 2]),
        ("completions, prompts", "[len(p) for p in prompts]", [6, 6]),
        ("prompts, completions, topic, **more", "[len(t) for t in topic]", [4, 8]),
        ("completions, weight=(0, 0)", "[w or 1 for w in weight]", [2, 1]),
        ("completions, **more", "[w or 1 for w in more['weight']]", [2, 1]),
        ("*, answers, completions, **more", "list(map(float, answers))", [4, 9]),
        ("completions, **more", "[float(a) for a in more['answers']]", [4, 9]),
        ("completions, solution", "[s is None for s in solution]", [1, 1]),
        ("completions, absent=3", "[absent, absent]", [3, 3]),
    ],
)
def test_a_reward_is_given_the_columns_that_it_names(signature, body, paid, write):
    stated = reward_named(f"{write(f'def reward({signature}): return {body}')}:reward")
    try_reward(stated, columns_of(PROBLEMS))
    assert pay(load_reward(stated), ["a", "bc"], columns_of(PROBLEMS), "reward") == paid


def test_a_reward_that_asks_for_no_column_there_is_names_those_there_are(write):
    stated = reward_named(f"{write('def reward(completions, topik): return topik')}:reward")
    with pytest.raises(ValueError, match=r"topik, .*topic"):
        try_reward(stated, columns_of(PROBLEMS))


SIGNALLED = """
import multiprocessing, subprocess

def reward(completions):
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    assert program.wait(10) == -15
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()
    loop = fork.Process(target=endless, args=(runs,), daemon=True)
    loop.start()
    runs.wait(10)
    loop.terminate()
    loop.join(10)
    return [float(loop.exitcode) for _ in completions]

def endless(runs):
    runs.set()
    sum(range(10**14))
"""


def test_a_reward_can_end_what_it_started_where_the_signal_is_ignored(write):
    name = write(SIGNALLED)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert pay(load_reward(reward_named(f"{name}:reward")), ["7"], {}, name) == [-15.0]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_reward_pays_and_accuracy_and_format_are_measured_beside_it(write, pool):
    own = load_reward(reward_named(f"{write(SHORT)}:none"))
    requests = [request_of(text, "3") for text in ("<think>1</think><answer>3</answer>", "no")]
    rewards = score(requests, "task", 0.2, pool, own=own)
    assert [one.unshaped for one in rewards] == [None, None]
    assert [(one.accuracy, one.format) for one in rewards] == [(1.0, 1.0), (0.0, 0.0)]


@pytest.mark.usefixtures("warm_workers")
def test_a_run_under_a_user_s_reward_goes_the_whole_way(write, tmp_path):
    line = ["train", "--model", "tiny", "--data", "generated", "--steps", "2"]
    line += ["--runs", str(tmp_path / "runs"), "--set", "data.test_problems=8"]
    assert main([*line, "--reward", f"{write(SHORT)}:asking"]) == 0
    (path,) = (tmp_path / "runs").rglob("seed-0.json")
    record = read_record(path)
    assert record.config["arm"]["reward_function"]["function"] == "asking"
    assert all(0 < (reward or 0) < 0.5 for reward in record.series["reward"])
