"""What others install: the lock, the images and the hooks agree with the rest of the suite."""

import json
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from repro.evidence.store import read_stored
from tests.test_workflows import session_of, sessions

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"([A-Za-z0-9_.-]+)==([^\s;]+)")


def pinned(file):
    """Return the versions that a file of requirements names, by package."""
    lines = (ROOT / "constraints" / file).read_text(encoding="utf-8").splitlines()
    return dict(match.groups() for line in lines if (match := LINE.match(line)))


def test_the_lock_holds_what_is_asked_for_in_the_versions_of_the_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [Requirement(line) for line in project["project"]["dependencies"]]
    for group in ("test", "lint", "types", "build"):
        asked += [Requirement(line) for line in project["dependency-groups"][group]]
    lock, left_out = pinned("lock.txt"), {"torch", "triton"}
    assert not left_out & set(lock), "their files differ from index to index"
    kept = [item for item in asked if item.name not in left_out]
    assert not [item for item in kept if lock.get(item.name, "") not in item.specifier]
    held = {name: version for name, version in pinned("constraints.txt").items() if name in lock}
    assert not held.items() - lock.items(), "run `nox -s lock`"


def test_what_runs_on_a_gpu_has_the_versions_of_the_gpu_records():
    gpu = pinned("gpu.txt")
    named = ("torch", "triton", "transformers")
    for peers in (pinned("peers.txt"), pinned("peers-unsloth.txt")):
        assert {name: peers[name] for name in named} == {name: gpu[name] for name in named}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = {item.name: item for item in map(Requirement, project["project"]["dependencies"])}
    assert not [name for name, version in gpu.items() if name in asked
                and version not in asked[name].specifier]  # fmt: skip
    stored = ROOT / "expected" / "records" / "systems" / "nvidia_h100_80gb_hbm3"
    records = [record for path in stored.glob("table*.csv") for record in read_stored(path)]
    assert records
    for record in records:
        packages = record.environment["packages"]
        assert {name: packages[name] for name in named} == {name: gpu[name] for name in named}
    for page in ("README.md", "docs/reproduce.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert all(f"{name} {gpu[name]}" in text for name in named), page


def test_one_range_of_pythons_stands_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = SpecifierSet(project["requires-python"])
    versions = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]
    prefix = "Programming Language :: Python :: 3."
    classified = [item for item in project["classifiers"] if item.startswith(prefix)]
    assert [item.rsplit(" ", 1)[1] for item in classified] == versions
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert ci["jobs"]["sessions"]["strategy"]["matrix"]["python"] == versions
    for page in ("README.md", "docs/reproduce.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"Python {versions[0]} to {versions[-1]}" in text
    oldest, newest = (tuple(map(int, versions[at].split("."))) for at in (0, -1))
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert f"PYTHONS = ({oldest}, {newest})" in noxfile
    assert f"FROM python:{versions[-1]}." in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_images_start_from_one_that_is_named_by_its_digest_and_end_in_a_session():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    stages = [line.split()[1:4:2] for line in lines if line.startswith("FROM ")]
    names = [name for _, name in stages]
    assert names[1:] == ["cpu", "cuda"]
    for image, name in stages:
        assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", image) or image in names, name
    ends = [yaml.safe_load(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    assert {session_of(" ".join(end)) for end in ends} <= sessions()


def test_hooks_are_sessions_of_every_change():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    named = {session_of(hook["entry"]) for repo in hooks["repos"] for hook in repo["hooks"]}
    assert named == {"lint", "types"} & sessions()


def test_the_notebook_is_kept_without_what_a_run_printed():
    book = json.loads((ROOT / "notebooks" / "smoke.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"]]
