"""Every command that a page prints is understood and ends with the status that the page says.

What measures needs a GPU or hours: its last line is that of a check of the stored records. What a
CPU does in minutes runs at night.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from repro.__main__ import build_parser, main
from repro.judge import blessed
from repro.judge.blessed import blessed_checks
from repro.judge.check import exit_status
from repro.report import page_blocks
from repro.report.ending import ending
from repro.run.places import expected_folder
from repro.targets import TARGETS, find
from tests.test_workflows import sessions

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "reported/*.md", "kernels/*.md", "expected/*.md")
    for path in ROOT.glob(pattern)
)
# Its code is at an earlier commit, which the page names.
ELSEWHERE = "docs/proxy_study.md"
REPRO = re.compile(r"\S*python3? -m repro (.*)")
JUDGED = {"run", "reproduce", "check"}
H100 = "nvidia_h100_80gb_hbm3"
GUARDED = [page for page in PAGES if page != ELSEWHERE]
# A word that stands for one of the reader's own: FILE, or <date>.
PLACE = re.compile(r"\b[A-Z]{3,}\b|<|\.\.\.")
TRAINS = re.compile(r"(?:--model|evaluate) tiny\b")
DRAWS = re.compile(r"report --html|figures paper")


@dataclass(frozen=True)
class Printed:
    """A command as a page prints it: its words after `python -m repro`, and the status it says."""

    words: tuple[str, ...]
    status: int

    def __str__(self):
        return " ".join(self.words)

    @property
    def has_place(self):
        """Whether a word stands for one of the reader's own."""
        return any(map(PLACE.search, self.words))


def lines_of(page):
    """Return (command, line that it stands on) of what a page prints as code."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
    found = []
    for language, block in blocks.findall(text):
        for line in block.splitlines():
            # Outside of a shell's block an explanation follows after some spaces.
            command = line if language else re.split(r" {2,}", line)[0]
            found += [(part.split(" > ")[0].strip(), line) for part in command.split("&&")]
    for line in blocks.sub("", text).splitlines():
        codes = re.findall(r"`([^`]+)`", line)
        found += [(code, line) for code in codes if code.startswith("python -m repro ")]
        if line.startswith("|"):  # a table of what follows `python -m repro`
            rows = [code for code in codes if re.match(r"(?:reproduce|check) \w", code)]
            found += [(f"python -m repro {code}", line) for code in rows]
    return found


def printed(page):
    commands = []
    for command, line in lines_of(page):
        if match := REPRO.search(command):
            said = re.search(r"exit status (\d)", line)
            typed = match[1].split(" #")[0]
            # The last quote may be that of a shell command around it.
            words = shlex.split(typed[:-1] if typed.count("'") % 2 else typed)
            commands.append(Printed(tuple(words), int(said[1]) if said else 0))
    return commands


EVERY = sorted({one for page in GUARDED for one in printed(page)}, key=str)


@pytest.mark.parametrize("page", GUARDED)
def test_commands_are_understood(page):
    for one in printed(page):
        args = build_parser().parse_args(one.words)
        names = getattr(args, "targets", None) or []
        assert all(name == "memory" or find(name) for name in names)
    known = {*sessions(), *(f"reproduce-{target.name}" for target in TARGETS)}
    for command, _ in lines_of(page):
        words = command.split()
        if "nox" in words and "-s" in words:
            assert words[words.index("-s") + 1] in known


def test_enough_commands_are_found():
    assert len(EVERY) > 60
    assert all(printed(page) for page in ("README.md", "docs/reproduce.md", "docs/commands.md"))
    scripts = runs_on_a_cpu()
    assert sum(bool(TRAINS.search(script)) for script in scripts) >= 3
    assert sum(bool(DRAWS.search(script)) for script in scripts) >= 2


def stands_alone(one):
    """Whether a command reads neither runs nor a checkpoint of the reader's, nor a device."""
    if one.words[0] in ("list", "environment", "memory"):
        return True
    if one.words[0] == "plan":
        return "--config" not in one.words
    return "--blessed" in one.words and not one.has_place


@pytest.fixture
def read_once(every_blessed, monkeypatch):
    """Let commands on all stored records take the checks of the session."""

    def checks(expected, *names):
        return blessed_checks(expected, *names) if names else every_blessed

    for module in (blessed, page_blocks):
        monkeypatch.setattr(module, "blessed_checks", checks)


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("one", [one for one in EVERY if stands_alone(one)], ids=str)
def test_what_runs_anywhere_ends_as_its_page_says(one, tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert main(one.words) == one.status


def measured(one):
    """Return the targets and the tier of a command that measures what is stored, else None."""
    if one.words[0] not in JUDGED or "--blessed" in one.words or one.has_place:
        return None
    args = build_parser().parse_args(one.words)
    changed = any(getattr(args, name, None) for name in ("model", "set", "config", "reward"))
    return None if changed or not args.targets else (args.targets, args.tier)


def stored(names, tier, device=None):
    """Return the checks of stored records, of one kind of device or all."""
    return [
        checked
        for checked in blessed_checks(expected_folder(None), *names)
        if tier in (None, checked.selection.tier.value)
        and (not device or checked.evidence.device in ("", device))
    ]


@pytest.mark.parametrize("one", [one for one in EVERY if measured(one)], ids=str)
def test_what_measures_ends_as_stored_records_do(one):
    names, tier = measured(one) or ([], None)
    assert exit_status(stored(names, tier)) == one.status


@pytest.mark.parametrize("page", ["README.md", "docs/reproduce.md"])
def test_last_lines_are_those_of_stored_records(page):
    """A row's last cell quotes sentences, or parts of them, of the last line."""
    quoted = 0
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        row = re.match(r"\|[^|]*\| `(reproduce|check) ([\w ]+) --tier (\w+)", line)
        if row is None:
            continue
        device = H100 if row[1] == "reproduce" else None
        checks = stored(row[2].split(), row[3], device)
        last = re.findall(r"`([^`]+)`", line.split("|")[-2])
        assert all(part in ending(checks) for part in last), ending(checks)
        quoted += len(last)
    assert quoted >= 2


def test_the_first_command_ends_as_readme_shows():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\n{ending(stored(['table1'], 'smoke'))}\nnox > " in text


@pytest.mark.usefixtures("read_once")
def test_a_page_is_written_again(tmp_path):
    page = ROOT / "docs" / "systems.md"
    copy = tmp_path / page.name
    copy.write_text(re.sub(r"(?m)^(<!-- systems_\w+:begin .*)$", r"\1\nstale", page.read_text()))
    assert main(["report", "--readme", str(copy)]) == 0
    assert copy.read_bytes() == page.read_bytes()


def runs_on_a_cpu():
    """Return {script: its page}: blocks that name the model `tiny`, and lines that draw.

    A line with a place of the reader's is left out.
    """
    found = {}
    for page in GUARDED:
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            typed = [line.split(" #")[0].rstrip() for line in block.splitlines()]
            lines = [line for line in typed if not PLACE.search(line)]
            whole = any(map(TRAINS.search, lines))
            if kept := [line for line in lines if whole or DRAWS.search(line)]:
                found["\n".join(kept)] = page
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("script", "page"), runs_on_a_cpu().items(), ids=str)
def test_what_a_page_prints_for_a_cpu_runs(script, page, tmp_path):
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL):
        if named := re.match(r"# (\w+\.py)\b", code):
            (tmp_path / named[1]).write_text(code, encoding="utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=os.environ | own, check=True)
    for out in re.findall(r"--out (\S+)", script):
        assert (tmp_path / out / "adapter_config.json").is_file()
