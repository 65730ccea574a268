"""The options of `run pretrain-proxy`: applied to it alone, and independent of where files lie."""

from __future__ import annotations

import argparse
import os

import pytest

from repro.__main__ import build_parser
from repro.evidence.record import record_path
from repro.pretrain.recorded_run import policy_name
from repro.run.proxy_options import making, sentence_on_lost_policies, with_proxy_options
from repro.run.select import parse_arms, parse_seeds, select


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in ("REPRO_DATA", "REPRO_POLICIES"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["run", *words])


def selected(*words: str):
    args = parsed(*words)
    (selection,) = select(args.targets, tier="proxy" if "proxy" in args.targets[0] else "smoke")
    return with_proxy_options(selection, args), args


def test_a_size_is_an_arm():
    _, args = selected("pretrain-proxy", "--size", "30m")
    assert args.arms == "proxy_30m"
    selection, args = selected("pretrain-proxy", "--size", "30m-early")
    assert args.arms in {arm.name for arm in selection.source.arms}
    with pytest.raises(ValueError, match="give one"):
        selected("pretrain-proxy", "--size", "30m", "--arms", "proxy_120m")


def test_a_size_may_name_a_pre_training_seed():
    selection, args = selected("pretrain-proxy", "--size", "30m-needle4-seed2")
    (run,) = selection.plan(parse_seeds(args.seeds), parse_arms(args.arms))
    assert (run.arm.name, run.seed) == ("proxy_30m_needle4", 2)
    selection, args = selected("pretrain-proxy", "--size", "30m", "--seeds", "2")
    runs = selection.plan(parse_seeds(args.seeds), parse_arms(args.arms))
    assert [run.seed for run in runs] == [0, 1]
    with pytest.raises(ValueError, match="--seeds 3 both name seeds"):
        selected("pretrain-proxy", "--size", "30m-seed1", "--seeds", "3")
    with pytest.raises(ValueError, match="--size 31m: there is 30m"):
        selected("pretrain-proxy", "--size", "31m")


def test_the_command_that_makes_a_policy_makes_that_policy():
    for name in ("proxy-120m", "proxy-30m-needle05-seed3-nvfp4"):
        *_, target, flag, size = making(name).split()
        selection, args = selected(target, flag, size)
        (run,) = selection.plan(parse_seeds(args.seeds), parse_arms(args.arms))
        assert policy_name(run) == name.removesuffix("-nvfp4")


def test_folders_travel_by_environment_and_do_not_change_what_a_run_is(tmp_path):
    digests = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        words = ("--human-data", str(folder), "--out", str(folder / "out"))
        selection, _ = selected("pretrain-proxy", *words)
        digests.append([run.digest() for run in selection.plan()])
        assert os.environ["REPRO_DATA"] == str(folder)
        assert os.environ["REPRO_POLICIES"] == str(folder / "out")
    assert digests[0] == digests[1]
    # `check`, `plan` and `bless` have no such options: the environment says the same to them.
    (chosen,) = select(["pretrain-proxy"], tier="proxy")
    assert [run.digest() for run in chosen.plan()] == digests[0]
    del os.environ["REPRO_DATA"]
    without, _ = selected("pretrain-proxy")
    assert [run.digest() for run in without.plan()] != digests[0]
    assert not without.plan()[0].scale.human_data


def test_other_targets_take_none_of_them(tmp_path):
    with pytest.raises(ValueError, match="table1 takes none"):
        selected("table1", "--size", "30m")
    selection, _ = selected("table1")
    assert selection == select(["table1"], tier="smoke")[0]
    with pytest.raises(ValueError, match="no such folder"):
        selected("pretrain-proxy", "--human-data", str(tmp_path / "none"))


def test_a_recorded_policy_that_is_gone_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_POLICIES", str(tmp_path / "policies"))
    selection, _ = selected("pretrain-proxy")
    plan = selection.plan()
    assert sentence_on_lost_policies(plan, tmp_path) is None
    monkeypatch.setattr("repro.run.proxy_options.find_record", record_path)
    assert "proxy_30m is recorded" in str(sentence_on_lost_policies(plan, tmp_path))
    # A policy of another seed is no stand-in.
    (tmp_path / "policies" / "proxy-30m-seed1").mkdir(parents=True)
    (tmp_path / "policies" / "proxy-30m-seed1" / "config.json").touch()
    assert "proxy_30m is recorded" in str(sentence_on_lost_policies(plan[:1], tmp_path))
    assert sentence_on_lost_policies(selection.plan([1], ["proxy_30m"]), tmp_path) is None
