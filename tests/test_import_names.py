"""The import names `kernels` and `repro` belong to other distributions too; these must be ours."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["kernels", "repro"])
def test_the_package_imported_is_the_one_of_this_checkout_and_no_distribution(name):
    installed = {
        (distribution.metadata["Name"] or "").lower()
        for distribution in importlib.metadata.distributions()
    }
    assert name not in installed, f"it shadows {name}/: pip uninstall {name}"
    module = importlib.import_module(name)
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"


def test_libraries_import_after_kernels_without_a_word_and_do_not_take_it_for_the_hub_loader():
    program = (
        "import kernels, repro.evaluation.flags, repro.models, torchao, bitsandbytes\n"
        "from transformers import Qwen2ForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available(), 'pip uninstall kernels'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("over", [False, True], ids=["before ours", "over ours"])
def test_another_distributions_kernels_is_refused_in_a_sentence(over, tmp_path):
    site, other = tmp_path / "site", tmp_path / "other"
    (site / "repro").mkdir(parents=True)
    (site / "repro" / "__init__.py").write_bytes((ROOT / "repro" / "__init__.py").read_bytes())
    for folder in (site, other):
        (folder / "kernels").mkdir(parents=True)
    ours = (ROOT / "kernels" / "__init__.py").read_text()
    (site / "kernels" / "__init__.py").write_text("import os\n" if over else ours)
    (other / "kernels" / "__init__.py").write_text("import os\n")
    program = f"import sys; sys.path[:0] = [{str(other)!r}] * (not {over}) + [{str(site)!r}]\n"
    program += "try:\n    import repro\nexcept ImportError as error:\n    print(error)"
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert "of another distribution" in said
    assert "pip uninstall kernels" in said
    assert said.count("\n") == 1
