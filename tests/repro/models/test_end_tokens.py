"""End tokens that `generation_config.json` alone names reach samplers; broken ones are refused."""

import json

import pytest

from repro.models.files.tensor_files import CheckpointError
from repro.models.policy import end_token_ids, load_policy
from repro.rollout.torch_sampler import TorchSampler
from tests.repro.models.conftest import edit_config, random_model


@pytest.fixture
def with_ends(tmp_path):
    """Return a function that writes a checkpoint whose generation config names end tokens."""

    def write(ends):
        random_model("qwen2", eos_token_id=1).save_pretrained(tmp_path)
        path = tmp_path / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": ends, "do_sample": True}), encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("stored", "ends"),
    [(2, [1, 2]), ([2, 3], [1, 2, 3]), ([], [1]), (None, [1]), (1, [1]), ([96], [1, 96])],
)
def test_end_tokens_are_those_of_both_configs(with_ends, stored, ends):
    policy = load_policy(with_ends(stored), weight_format="bf16")
    assert sorted(end_token_ids(policy)) == policy.facts["end_token_ids"] == ends
    assert TorchSampler(policy).end_token_ids == frozenset(ends)


@pytest.mark.parametrize("stored", ["2", [1, "2"], [1.0], -1, True, {"id": 2}])
def test_end_tokens_that_are_no_token_ids_are_refused(with_ends, stored):
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is .*needed"):
        load_policy(with_ends(stored), weight_format="bf16")


def test_a_checkpoint_none_of_whose_end_tokens_is_in_the_vocabulary_is_refused(with_ends):
    folder = with_ends([5000, 6000])  # beside the config's own, 1
    load_policy(folder, weight_format="bf16")
    edit_config(folder, lambda values: values.update(eos_token_id=None))
    with pytest.raises(CheckpointError, match=r"\[5000, 6000\]"):
        load_policy(folder, weight_format="bf16")
