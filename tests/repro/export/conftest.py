"""A trained adapter beside its base, as a run leaves it."""

import functools
from unittest import mock

import pytest

from repro.procedures.train import keep_policy
from tests.repro.rl.conftest import nudge
from tests.repro.small_runs import fresh_policy


def trained_policy(weight_format="bf16", *, norms_trained=False, order=None, rounding=None):
    """Return the tiny policy with an adapter that moves it as far as training would."""
    policy = fresh_policy(
        "tiny", weight_format=weight_format, training="lora", lora_rank=8, lora_alpha=16.0,
        norms_trained=norms_trained, seed=0, order=order, rounding=rounding,
    )  # fmt: skip
    nudge(policy, 0.02)
    return policy


@pytest.fixture(scope="package", autouse=True)
def few_probes():
    """Compare models on a quarter of the rows."""
    with mock.patch("repro.export.comparing._PROBES", 2):
        yield


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """Return a function that gives the folder of a run that trained on a format."""

    @functools.cache
    def run(weight_format):
        folder = tmp_path_factory.mktemp(weight_format)
        keep_policy(trained_policy(weight_format), folder)
        return folder

    return run
