"""The suite's commands: `nox -l` lists them; each session is one command of `python -m repro`.

All sessions share one environment (`<envdir>/suite`): a second start installs nothing, works
without a network, and torch lies on the disk once. The environment is made again when
`pyproject.toml` or the constraints change. In a folder that cannot be written, it is made in the
user's cache instead. What this project is timed beside has another (`<envdir>/peers`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints" / "constraints.txt"
PEERS_CONSTRAINTS = ROOT / "constraints" / "peers.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qerl-repro"
if not os.access(ROOT, os.W_OK):
    nox.options.envdir = CACHE / "nox"

# With blocks that are written from blessed records.
PAGES = ("README.md", "kernels/README.md", "docs/ci.md", "docs/claims.md", "docs/systems.md")
SUITE_GROUPS = ("test", "lint", "types")


def environment_python(
    session: nox.Session, name: str, constraints: Path, groups: tuple[str, ...], *packages: str
) -> str:
    """Return an environment's Python, made first if it is missing or out of date."""
    home = Path(session._runner.global_config.envdir or ROOT / ".nox").resolve() / name
    python, stamp = home / "bin" / "python", home / "installed"
    digest = hashlib.sha256()
    for file in (ROOT / "pyproject.toml", constraints):
        digest.update(file.read_bytes())
    digest.update(f"{sys.version_info[:2]} {ROOT}".encode())
    if not (stamp.exists() and stamp.read_text() == digest.hexdigest()):
        shutil.rmtree(home, ignore_errors=True)
        session.run_always(sys.executable, "-m", "venv", str(home), external=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints)]
        session.run_always(*install, "pip>=25.1", external=True)
        named = [f"--group={ROOT / 'pyproject.toml'}:{group}" for group in groups]
        session.run_always(*install, *named, *packages, external=True)
        stamp.write_text(digest.hexdigest())
    return str(python)


def suite_python(session: nox.Session) -> str:
    """Return the shared environment's Python."""
    return environment_python(session, "suite", CONSTRAINTS, SUITE_GROUPS, "-e", str(ROOT))


def repro(session: nox.Session, *arguments: str) -> None:
    """Run `python -m repro` with the arguments in the shared environment."""
    session.run(suite_python(session), "-m", "repro", *arguments, external=True)


def reproduce(session: nox.Session, target: str) -> None:
    """Run, check, draw and report one target; flags after `--` go to `python -m repro run`."""
    repro(session, "reproduce", target, *session.posargs)


@nox.session(name="reproduce-table1", venv_backend="none")
def reproduce_table1(session: nox.Session) -> None:
    """Table 1, ten arms with paired seeds: records, verdicts, curves, report.md."""
    reproduce(session, "table1")


@nox.session(name="reproduce", venv_backend="none", default=False)
def reproduce_any(session: nox.Session) -> None:
    """Any target by name: `nox -s reproduce -- table9 --tier systems` (`repro list` names them)."""
    if not session.posargs:
        session.error("name a target: nox -s reproduce -- table1 (python -m repro list shows all)")
    repro(session, "reproduce", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test but the nightly ones, two files at a time; those for a GPU say why they skip."""
    # Tests are single-threaded: two fill two cores, and more would crowd a GPU's memory.
    arguments = ["-m", "pytest", "-n", "2", "--dist", "loadfile"]
    # By default files of few tests come last, which here are the longest: one process would wait.
    arguments += ["--no-loadscope-reorder", *session.posargs]
    # Two hundred processes that tests start import what was compiled once, also where the shell
    # forbids compiled files.
    compiled = {"PYTHONDONTWRITEBYTECODE": ""}
    session.run(suite_python(session), *arguments, external=True, env=compiled)


@nox.session(name="tests-nightly", venv_backend="none", default=False)
def tests_nightly(session: nox.Session) -> None:
    """The tests that are slow by nature, which `tests` leaves out."""
    arguments = ["-m", "pytest", "-m", "nightly", *session.posargs]
    session.run(suite_python(session), *arguments, external=True)


@nox.session(venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Malformed input of every kind, ten times as many cases as in the tests."""
    session.env["REPRO_FUZZ"] = "nightly"
    arguments = ["-m", "pytest", "tests/test_fuzz.py", *session.posargs]
    session.run(suite_python(session), *arguments, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    python = suite_python(session)
    session.run(python, "-m", "ruff", "check", "--no-cache", str(ROOT), external=True)
    session.run(python, "-m", "ruff", "format", "--no-cache", "--check", str(ROOT), external=True)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy over the packages, the figures, the benchmarks and this file."""
    python = suite_python(session)
    session.run(python, "-m", "mypy", "-p", "repro", "-p", "kernels", external=True)
    session.run(python, "-m", "mypy", "-p", "figures", "-p", "benchmarks", external=True)
    session.run(python, "-m", "mypy", str(ROOT / "noxfile.py"), external=True)


@nox.session(venv_backend="none", default=False)
def smoke(session: nox.Session) -> None:
    """Two arms of Table 1, four steps each, from question to report; its records are not kept."""
    arguments = ["--arms", "bf16,nvfp4_lora_aqn", "--seeds", "1", "--steps", "4"]
    # A session's own folder outlives it, and what is recorded is not run again.
    with tempfile.TemporaryDirectory() as folder:
        repro(session, "reproduce", "table1", *arguments, "--runs", folder)


@nox.session(venv_backend="none", default=False)
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel into dist/; the wheel must answer alone, away from the checkout."""
    folder = Path(session.create_tmp())
    python, built = str(folder / "venv" / "bin" / "python"), folder / "dist"
    session.run(sys.executable, "-m", "venv", str(folder / "venv"), external=True)
    install = [python, "-m", "pip", "install", "--quiet"]
    session.run(*install, "build", external=True)
    session.run(python, "-m", "build", "--outdir", str(built), str(ROOT), external=True)
    # What follows needs no dependency; that they install, the suite's environment has shown.
    session.run(*install, "--no-deps", *map(str, built.glob("*.whl")), external=True)
    with session.chdir(folder):
        alone = [python, "-I", "-m", "repro"]  # -I: neither this folder nor PYTHONPATH
        session.run(*alone, "list", external=True)
        # Which reads the expectations, too.
        session.run(*alone, "plan", "table1", "--tier", "smoke", external=True)
    shutil.copytree(built, ROOT / "dist", dirs_exist_ok=True)


@nox.session(venv_backend="none", default=False)
def environment(session: nox.Session) -> None:
    """Name this machine in runs/environment.json: driver, packages, container with its digest."""
    repro(session, "environment", "--out", "runs/environment.json", *session.posargs)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """On a GPU: every GPU test and benchmark; writes their record, runs/gpu_tests.json."""
    repro(session, "gpu-tests", "--out", "runs/gpu_tests.json", *session.posargs)


@nox.session(name="bless-device", venv_backend="none", default=False)
def bless_device(session: nox.Session) -> None:
    """Bless what `gpu` and the latest `regress` left in runs/, and write the pages again."""
    # Their names begin with the date.
    measured = sorted(path for path in (ROOT / "runs" / "regress").glob("*") if path.is_dir())
    if not measured:
        session.error("runs/regress has no records; nox -s regress on a GPU makes them")
    repro(session, "gpu-tests", "--bless", "runs/gpu_tests.json")
    repro(session, "bless", "--device", "--tier", "systems", "--runs", str(measured[-1]))
    drawn = ["--blessed", "--tier", "systems", "--kinds", "svg", "--out", "docs/figures"]
    session.run(suite_python(session), "-m", "figures", *drawn, external=True)
    for page in PAGES:
        repro(session, "report", "--readme", page)


@nox.session(venv_backend="none", default=False)
def propose(session: nox.Session) -> None:
    """Open a change with the baselines that `bless-device` wrote (needs git's and gh's rights)."""
    commit = str(session.run("git", "rev-parse", "--short", "HEAD", silent=True, external=True))
    branch, title = f"baselines-{commit.strip()}", f"Bless the GPU records of {commit.strip()}"
    session.run("git", "switch", "--create", branch, external=True)
    session.run("git", "add", "benchmarks", "expected", "docs", *PAGES, external=True)
    session.run("git", "commit", "--message", title, external=True)
    session.run("git", "push", "--set-upstream", "origin", branch, external=True)
    body = "Written by `nox -s bless-device` from records of one machine; docs/ci.md says how."
    session.run("gh", "pr", "create", "--title", title, "--body", body, external=True)


@nox.session(venv_backend="none", default=False)
def peers(session: nox.Session) -> None:
    """On a GPU: the update beside transformers + peft, Liger, TRL and bitsandbytes; a JSON record.

    `-- --models 0.5b --folder 0.5b=FOLDER` names a checkpoint, which whole steps of TRL need;
    `-- --into docs/systems.md` writes the blessed records into the page, and measures nothing.
    """
    command = [suite_python(session), "-m", "benchmarks.peers", *session.posargs]
    if not {"--table", "--into"} & {*session.posargs}:
        python = environment_python(session, "peers", PEERS_CONSTRAINTS, ("peers",))
        command += ["--peers-python", python]
    session.run(*command, external=True)


@nox.session(venv_backend="none", default=False)
def regress(session: nox.Session) -> None:
    """On a GPU: measure again, compare with what is blessed on it; exit status 0, 1 or 2.

    Without arguments: `table6`, `table3`, `memory_budgets` and one seed of `kernels`: nine
    and a half minutes on a bare machine with one H100 80GB (1fc623c); and `step_lengths`, four
    minutes by its plan.
    Other targets: `nox -s regress -- rollout`; after an interrupt `-- --runs FOLDER`.
    """
    # nox itself ends in 1 whatever failed; here 1 says that something regressed, and nothing else.
    try:
        python = suite_python(session)
    except CommandFailed:
        raise SystemExit(2) from None
    done = subprocess.run([python, "-m", "repro", "regress", *session.posargs], check=False)
    if done.returncode:
        raise SystemExit(1 if done.returncode == 1 else 2)
