"""Human-written problems are read by set."""

from __future__ import annotations

import pytest

from repro.pretrain.human_data import read_human_data
from tests.repro.pretrain.small import write_humans


def test_human_data_are_read_by_set_and_a_missing_one_is_named(tmp_path):
    human = read_human_data(str(write_humans(tmp_path / "human")))
    assert (len(human.worked), human.left_out) == (8, 0)
    assert {name: len(of) for name, of in human.asked.items()} == {"mawps": 3, "svamp": 3}
    with pytest.raises(ValueError, match="give --human-data, or set REPRO_DATA"):
        read_human_data(None)
    with pytest.raises(ValueError, match=r"train.jsonl is missing"):
        read_human_data(str(tmp_path))
