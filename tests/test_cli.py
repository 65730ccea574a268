"""The command line as a user meets it: what it prints, how soon, and what it imports for that."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from repro.__main__ import main
from repro.door.command_line import build_parser
from repro.targets import TARGETS, find

ROOT = Path(__file__).resolve().parent.parent
# The machine that runs the tests may be busy; the bars are 0.5 s and 0.1 s.
SLACK = 3.0


def said_by(capsys, *words, status=0):
    """Return what a command prints, which must end with a status."""
    assert main(words) == status
    return capsys.readouterr().out


def quickest(command, repeats=3):
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        subprocess.run(command, capture_output=True, cwd=ROOT, check=True)
        times.append(time.perf_counter() - begun)
    return min(times)


def test_list_answers_at_once():
    assert quickest([sys.executable, "-m", "repro", "list"]) < 0.5 * SLACK


def test_importing_the_package_costs_next_to_nothing():
    bare = quickest([sys.executable, "-c", "pass"])
    assert quickest([sys.executable, "-c", "import repro"]) - bare < 0.1


def test_the_package_and_commands_on_records_need_no_torch(tmp_path):
    code = (
        "import repro, sys; from repro.__main__ import main\n"
        "repro.train, repro.quantize\n"
        "for command in ('list', 'plan table1 --tier smoke', 'check table1 --tier smoke'):\n"
        "    main(command.split())\n"
        "    assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), command\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "REPRO_RUNS": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("plan table6 --tier systems", 0, "downloads"),
        ("check table6 --tier systems --blessed", 0, "claims"),
        ("run table1", 2, "(on Windows: WSL 2); this is Windows"),
        ("train --model tiny --data generated", 2, "WSL 2"),
        ("report table6 --tier systems --html {folder}/page.html", 2, "WSL 2"),
    ],
)
def test_windows_reads_and_plans_and_is_told_where_the_rest_is_done(line, status, said, tmp_path):
    code = (
        "import platform, sys; sys.modules.update(fcntl=None, resource=None)\n"
        "platform.system = lambda: 'Windows'\n"
        "from repro.__main__ import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", code, *line.format(folder=tmp_path).split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done.stderr
    assert status == 0 or len(done.stderr.splitlines()) == 1


def test_list_shows_every_table_and_figure_of_the_paper(capsys):
    every, short = said_by(capsys, "list", "--all"), said_by(capsys, "list")
    first, others = (part.splitlines()[1:] for part in short.split("\n\n")[:2])
    names = [line.split()[0] for line in first]
    tables = [f"table{number}" for number in range(1, 10)]
    assert names == tables + [f"figure{number}" for number in range(1, 18)]
    assert all(f"\n  {target.name} " in every.replace("\n\n", "\n") for target in TARGETS)
    assert sum(int(line.split()[0]) for line in others) == len(TARGETS) - len(names)


def test_plan_says_runs_time_memory_disk_and_downloads(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REPRO_RUNS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    text = said_by(capsys, "plan", "table1", "--tier", "smoke")
    runs = 3 * len(find("table1").arms)
    assert f"(0 recorded, {runs} to do)" in text
    for word in ("timed     median of 60", "memory", "disk", "downloads none"):
        assert word in text
    paper = said_by(capsys, "plan", "table1", "--tier", "paper")
    assert "Qwen/Qwen2.5-7B-Instruct (15.2 GB)" in paper
    assert (paper.count("not timed\n"), paper.count("h, priced\n")) == (5, 7)
    (one_run,) = [line for line in paper.splitlines() if line.startswith("  one run   ")]
    assert "(bf16_full) of memory" in one_run


def test_check_without_records_says_not_run_and_that_it_could_not_judge(tmp_path, capsys):
    line = ("check", "table1", "--tier", "smoke", "--json", "--runs", str(tmp_path))
    verdicts = json.loads(said_by(capsys, *line, status=2))[0]["verdicts"]
    statuses = {verdict["about"]: verdict["status"] for verdict in verdicts}
    assert statuses == {"claim": "not addressed", "mechanism": "not run", "expectation": "not run"}
    assert all(verdict["sentence"] for verdict in verdicts)


def test_check_ends_with_a_sentence_and_states_the_papers_claims_first(capsys):
    said = said_by(capsys, "check", "table1", "--tier", "smoke", "--blessed")
    count = sum(not claim.mechanism for claim in find("table1").claims)
    larger = f"{count} claims of the paper need a larger model (--tier paper)."
    assert said.splitlines()[-1] == f"All checks of the machinery passed. {larger}"
    assert max(map(len, said.splitlines())) == 120
    assert said.index("not tested") < said.index("about the")
    assert "no claim" in said_by(capsys, "check", "memory_dense", "--tier", "systems", "--blessed")


CHECK = ("-m", "repro", "check", "table1", "--tier", "smoke", "--blessed")
RUN = "from repro.run.progress import Outlasting\nfor _ in range(9999): Outlasting().print('on')\n"


@pytest.mark.parametrize("words", [CHECK, ("-c", f"{RUN}print('to nobody', flush=True)")])
def test_a_reader_that_leaves_early_ends_check_quietly_and_no_run(words):
    line = [sys.executable, *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_home_folder_that_no_shell_wrote_out_is_written_out(monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    args = build_parser().parse_args(["train", "--model", "~/m", "--data=a,~/d", "--out=~/o"])
    assert [args.model, args.data, args.out] == ["/users/me/m", "a,~/d", "/users/me/o"]
    assert build_parser().parse_args(["quantize", "tiny", "~/made"]).out == "/users/me/made"


def test_an_interrupt_is_a_sentence_and_a_closed_output_no_fault(monkeypatch, capsys):
    stopped = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("repro.evidence.environment.environment_text", stopped)
    monkeypatch.setattr("repro.report.console.main_check", stopped)
    for line in (["environment"], ["check", "table1", "--tier", "smoke"]):
        assert main(line) == 130
        assert capsys.readouterr().err == "repro: interrupted\n"
    # What transformers makes of Ctrl-C while it imports a module of its own.
    stopped.side_effect = ModuleNotFoundError("Could not import module")
    stopped.side_effect.__cause__ = KeyboardInterrupt()
    assert main(["environment"]) == 130
    assert capsys.readouterr().err == "repro: interrupted\n"
    stopped.side_effect = FloatingPointError("no logits")
    assert main(["environment"]) == 2
    assert capsys.readouterr().err == "repro: no logits\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["list"]) == 0
    # A reader that leaves early changes no status.
    monkeypatch.setattr("repro.__main__.carried_out", Mock(return_value=1))
    monkeypatch.setattr(sys, "stdout", Mock(flush=Mock(side_effect=BrokenPipeError)))
    assert main(["list"]) == 1
