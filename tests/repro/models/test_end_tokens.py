"""End tokens that `generation_config.json` alone names reach samplers; broken ones are refused."""

import json

import pytest

from repro.models.files.tensor_files import CheckpointError
from repro.models.policy import end_token_ids, load_policy
from repro.rollout.torch_sampler import TorchSampler
from tests.repro.models.conftest import edit_config, random_model


def with_ends(folder, ends):
    """Write a checkpoint whose generation config names end tokens; return its folder."""
    random_model("qwen2", eos_token_id=1).save_pretrained(folder)
    config = json.dumps({"eos_token_id": ends, "do_sample": True})
    (folder / "generation_config.json").write_text(config, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("stored", "ends"),
    [(2, [1, 2]), ([2, 3], [1, 2, 3]), ([], [1]), (None, [1]), (1, [1]), ([96], [1, 96])],
)
def test_end_tokens_are_those_of_both_configs(tmp_path, stored, ends):
    policy = load_policy(with_ends(tmp_path, stored), weight_format="bf16")
    assert sorted(end_token_ids(policy)) == policy.facts["end_token_ids"] == ends
    assert TorchSampler(policy).end_token_ids == frozenset(ends)


@pytest.mark.parametrize("stored", ["2", [1, "2"], [1.0], -1, True, {"id": 2}])
def test_end_tokens_that_are_no_token_ids_are_refused(tmp_path, stored):
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is .*needed"):
        load_policy(with_ends(tmp_path, stored), weight_format="bf16")


def test_a_checkpoint_none_of_whose_end_tokens_is_in_the_vocabulary_is_refused(tmp_path):
    folder = with_ends(tmp_path, [5000, 6000])  # beside the config's own, 1
    load_policy(folder, weight_format="bf16")
    edit_config(folder, lambda values: values.update(eos_token_id=None))
    with pytest.raises(CheckpointError, match=r"\[5000, 6000\]"):
        load_policy(folder, weight_format="bf16")
