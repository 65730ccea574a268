"""The ladder of exploration: seeds of its own, controls that gate, and one rate."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from repro.data.load import load_problems
from repro.evidence.record import Estimate
from repro.evidence.sizes import not_testable
from repro.evidence.verdict import Verdict
from repro.judge.check import check_selection
from repro.judge.choose_rates import choose
from repro.pretrain.recipes import PROXIES
from repro.run.places import expected_folder
from repro.run.select import select
from repro.spec.arm import Arm
from repro.spec.config import RunConfig
from repro.spec.shapes import shape_by_name
from repro.spec.target import Target, differing_fields, plan
from repro.spec.tier import Tier
from repro.targets import TARGETS, find
from repro.targets.chosen_rates import EVERY_ARM, rule_of
from repro.targets.ladder import AGAIN, LADDER, OVER_POLICIES
from repro.targets.ladder.needle import (
    DIFFICULTY,
    NEEDLE_05,
    NEEDLE_4,
    NEEDLE_40,
    NEEDLE_SWEEP,
    OPENING_COLDER,
    OPENING_WARMER,
    RATE,
)
from repro.targets.ladder.rates import NEEDLE_RATES
from repro.targets.ladder.skill import FULL_RATES, LORA_RATES, SKILL, SKILL_SWEEP
from repro.targets.rates import lacking_rates
from tests.repro.made_up import honest_proxy_record

RUNGS = (NEEDLE_40, NEEDLE_4, NEEDLE_05)


def runs_of(*targets: Target) -> list[RunConfig]:
    """Return the runs that targets need, one of each."""
    return list({run.digest(): run for t in targets for run in plan(t, Tier.PROXY)}.values())


def test_policies_of_the_ladder_have_recipes_and_shapes() -> None:
    assert len(runs_of(NEEDLE_4, NEEDLE_05)) == 8 * 16 + 4 * 20
    policies = {name for target in LADDER for name in target.needs_at(Tier.PROXY).policies}
    assert policies <= PROXIES.keys()
    assert all(shape_by_name(name) for name in policies)


def test_no_other_run_has_had_these_seeds() -> None:
    others = {
        run.seed
        for target in TARGETS
        if target not in (*LADDER, *AGAIN, *OVER_POLICIES)
        and Tier.PROXY in target.scales
        and target.procedure != "pretrain"
        for run in plan(target, Tier.PROXY)
    }
    own = {run.seed for run in runs_of(*LADDER)}
    assert not own & others
    # What was asked first and left open is asked again of other seeds.
    first = {run.seed for target in (NEEDLE_4, find("needle_sharing")) for run in runs_of(target)}
    assert not first & {run.seed for run in runs_of(*AGAIN)}
    sweeps = (NEEDLE_SWEEP, SKILL_SWEEP)
    tuning = {run.seed for run in runs_of(*sweeps)}
    compared = {run.seed for run in runs_of(*(t for t in LADDER if t not in sweeps))}
    assert not tuning & compared


def test_rungs_differ_in_the_checkpoint_alone_and_every_seed_rounds_differently() -> None:
    scales = [target.scales[Tier.PROXY] for target in RUNGS]
    for one in scales:
        assert differing_fields(one, scales[0]) <= {
            "checkpoint",
            "steps",
            "evaluation",
            "seeds",
        }
        assert differing_fields(one.evaluation, scales[0].evaluation) <= {"threshold"}
        assert one.permuted
        assert len(one.seeds) >= 16
    shares = [PROXIES[scale.checkpoint].working_share for scale in scales]
    assert shares == [None, 0.04, 0.005]
    # Of the logarithm of the prior, the outer two stand for the slope over all three.
    steps = [math.log(0.4 / 0.04), math.log(0.04 / 0.005)]
    assert steps[0] == pytest.approx(steps[1], rel=0.15)


def test_every_statement_about_a_format_or_noise_waits_for_the_positive_control() -> None:
    for target in RUNGS:
        for claim in target.claims:
            gates = {assay.claim for assay in claim.assays if assay.kind == "control"}
            is_control = "exploration" in claim.factor
            assert gates == (set() if is_control else {"opening_colder_later"})
            watched = {(a.arm, a.metric) for a in claim.assays if a.kind == "range"}
            binds = {("bf16_lora", "informative_first")}
            where_rare = set() if is_control or target is NEEDLE_40 else binds
            # A control's slower arm may be too slow for its runs; its quotient errs towards one.
            reach = claim.arms[1:] if is_control else claim.arms
            assert watched == {(arm, "took_off") for arm in reach} | where_rare
    (control,) = [c for c in NEEDLE_4.claims if c.name == "opening_colder_later"]
    assert control.effect is not None
    assert control.effect.matters == 1.15


def test_where_most_groups_are_informative_from_the_start_no_format_is_judged() -> None:
    (claim,) = [c for c in NEEDLE_4.claims if c.name == "nvfp4_sooner"]
    metrics = {metric.name: metric for metric in NEEDLE_4.metrics}
    steps = {arm: {216: 90.0} for arm in claim.arms}
    took_off = {arm: {216: 1.0} for arm in claim.arms}

    def reason(informative: float) -> str:
        values = {"took_off": took_off, "informative_first": {"bf16_lora": {216: informative}}}
        return not_testable(claim, metrics, steps, values, None)

    assert reason(33.0) == ""
    assert reason(68.0).startswith("informative_first of bf16_lora is 68; needs at most 50: ")


def test_the_clean_controls_reach_the_decision_and_no_further() -> None:
    for control in (OPENING_WARMER, OPENING_COLDER):
        assert control.exploration is not None
        assert control.exploration.opening_tokens == 2
        assert differing_fields(control, NEEDLE_4.arm("bf16_lora")) == {"exploration"}


def test_difficulty_has_no_runs_of_its_own_and_names_what_differs() -> None:
    own = {run.digest() for run in plan(DIFFICULTY, Tier.PROXY)}
    assert own < {run.digest() for rung in RUNGS for run in plan(rung, Tier.PROXY)}
    with pytest.raises(
        ValueError, match="also differ in checkpoint, evaluation, steps; declare it"
    ):
        dataclasses.replace(
            DIFFICULTY,
            claims=tuple(
                dataclasses.replace(claim, factor=claim.factor[3:]) for claim in DIFFICULTY.claims
            ),
        )
    with pytest.raises(ValueError, match="another scale at the proxy tier"):
        dataclasses.replace(DIFFICULTY, across=("steps",), claims=())


def rewards(**best: float) -> dict[str, dict[int, float]]:
    """Return mean rewards of the sweep: .5, and more at the rates named."""
    seeds = NEEDLE_SWEEP.scales[Tier.PROXY].seeds
    return {
        arm.name: {seed: 0.5 + best.get(arm.name.rsplit("_", 1)[1], 0.0) for seed in seeds}
        for arm in NEEDLE_SWEEP.arms
    }


def test_one_rate_is_chosen_for_all_arms_and_only_inside_the_grid() -> None:
    scale = NEEDLE_SWEEP.scales[Tier.PROXY]
    values = rewards(**{"1e3": 0.1, "14e4": 0.2, "2e3": 0.15})
    assert choose(NEEDLE_SWEEP, scale, values)["chosen"] == {EVERY_ARM: 1.4e-3}
    # What one arm would rather have does not give it a rate of its own.
    values["nvfp4_lora_2e3"] = dict.fromkeys(scale.seeds, 0.72)
    assert choose(NEEDLE_SWEEP, scale, values)["chosen"] == {EVERY_ARM: 1.4e-3}
    for end in ("7e4", "28e4"):
        with pytest.raises(
            ValueError, match=r"train_reward_mean is best at .*, an end of the grid"
        ):
            choose(NEEDLE_SWEEP, scale, rewards(**{end: 0.1}))


def test_skill_is_swept_at_the_scale_and_by_the_quantity_of_its_claim() -> None:
    scale, swept = SKILL.scales[Tier.PROXY], SKILL_SWEEP.scales[Tier.PROXY]
    assert differing_fields(scale, swept) == {"data", "evaluation", "seeds"}
    assert differing_fields(scale.evaluation, swept.evaluation) <= {"every", "samples", "at"}
    assert differing_fields(scale.data, swept.data) == {"seed", "test_problems"}
    asked, tried = ({p.question for p in load_problems(s.data, "test")} for s in (scale, swept))
    assert len(asked & tried) <= 0.01 * len(asked)
    assert {claim.metric for claim in SKILL.claims} == {rule_of(SKILL_SWEEP.name).metric}
    for name, grid in (
        ("bf16_full", FULL_RATES),
        ("bf16_lora", LORA_RATES),
        ("nvfp4_lora_aqn", LORA_RATES),
    ):
        arm = SKILL.arm(name)
        swept_arms = [SKILL_SWEEP.arm(f"{name}_{rate}") for rate in grid]
        assert [one.learning_rate for one in swept_arms] == list(grid.values())
        assert all(differing_fields(one, arm) <= {"learning_rate"} for one in swept_arms)
    assert SKILL.arm("bf16_full").learning_rate in sorted(FULL_RATES.values())[1:-1]
    assert len({arm.learning_rate for arm in SKILL.arms if arm.training == "lora"}) == 1


def test_the_rates_of_skill_are_the_most_accurate_inside_the_grids() -> None:
    scale = SKILL_SWEEP.scales[Tier.PROXY]

    def ends(full: dict[str, float], lora: dict[str, float]) -> dict[str, dict[int, float]]:
        return {
            arm.name: dict.fromkeys(
                scale.seeds,
                50.0
                + (full if arm.training == "full" else lora).get(arm.name.rsplit("_", 1)[1], 0.0),
            )
            for arm in SKILL_SWEEP.arms
        }

    best = {"25e6": 6.0, "5e5": 5.9}
    choice = choose(SKILL_SWEEP, scale, ends(best, {"175e6": 3.0}))
    assert choice["chosen"] == {"bf16_full": 2.5e-5, EVERY_ARM: 1.75e-4}
    # One rate for both arms with LoRA: what one loses the other must gain.
    values = ends(best, {"175e6": 3.0}) | {
        f"nvfp4_lora_aqn_{rate}": dict.fromkeys(scale.seeds, value)
        for rate, value in (("175e6", 50.0), ("35e5", 54.0))
    }
    assert choose(SKILL_SWEEP, scale, values)["chosen"][EVERY_ARM] == 3.5e-4
    ends_of_grids = [({rate: 6.0}, {"175e6": 3.0}) for rate in ("125e7", "1e4")]
    ends_of_grids += [(best, {rate: 6.0}) for rate in ("88e6", "14e4")]
    for full, lora in ends_of_grids:
        with pytest.raises(ValueError, match=r"accuracy is best at .*, an end of the grid"):
            choose(SKILL_SWEEP, scale, ends(full, lora))


def test_every_arm_of_the_needle_has_the_one_rate() -> None:
    rates = {arm.learning_rate for rung in RUNGS for arm in rung.arms}
    assert rates == {RATE}
    for target in LADDER:
        if target.name != "anchor_dapo":
            unchosen = dataclasses.replace(
                target, scales={Tier.PROXY: NEEDLE_SWEEP.scales[Tier.PROXY]}, shared={}, looks=()
            )
            assert lacking_rates(unchosen, Tier.PROXY) is None


def test_the_rates_are_compared_pair_by_pair_at_the_same_rate() -> None:
    (pooled,) = [c for c in NEEDLE_RATES.claims if c.name == "qerl_bears_more"]
    pairs = list(zip(pooled.arms[::2], pooled.arms[1::2], strict=True))
    assert len(pairs) == 5
    for lora, qerl in pairs:
        one, other = NEEDLE_RATES.arm(lora), NEEDLE_RATES.arm(qerl)
        assert one.learning_rate == other.learning_rate
        assert differing_fields(one, other) == {"weight_format", "noise"}
    homes = {NEEDLE_RATES.home(arm.name)[0].name for arm in NEEDLE_RATES.arms}
    assert homes == {"needle_rates", "needle_4_fresh"}


def test_ranks_are_compared_with_alpha_fixed_and_with_alpha_grown() -> None:
    def alpha(arm: Arm) -> float:
        return arm.lora_alpha / arm.lora_rank

    for claim in find("needle_ranks").claims:
        high, low = (find("needle_ranks").arm(name) for name in claim.arms)
        assert (high.lora_rank, low.lora_rank) == (128, 16)
        assert high.learning_rate == low.learning_rate
        assert (alpha(high) == alpha(low)) == ("lora_alpha" in claim.factor)


def write(
    folder: Path, target: Target, seeds: Sequence[int], quotients: dict[tuple[str, str], float]
) -> None:
    """Write records of a target: by (rung, arm), BF16's steps over the arm's."""
    # Arms with noise differ more, so that nothing is decided about them.
    spread = {"nvfp4_lora_aqn": 0.6} if target is NEEDLE_4 else {}
    with mock.patch("os.fsync"):
        for run in plan(target, Tier.PROXY, seeds):
            record = honest_proxy_record(run)
            width = spread.get(run.arm.name, 0.02)
            wobble = 1 + width * random.Random(run.digest()).random()
            steps = 60 * wobble / quotients.get((run.target, run.arm.name), 1.0)
            numbers = {
                "take_off_steps": Estimate(value=steps, unit="steps"),
                "took_off": Estimate(value=1.0, unit="share"),
                "informative_first": Estimate(value=20.0, unit="percent"),
            }
            own = hashlib.sha256(run.scale.checkpoint.encode()).hexdigest()
            dataclasses.replace(
                record,
                metrics=record.metrics | numbers,
                inputs=record.inputs | {"checkpoint": own},
            ).write(folder)


def judged(folder: Path, target: str = "difficulty") -> dict[str, Verdict]:
    (selection,) = select([target], tier="proxy")
    checked = check_selection(selection, folder, expected_folder(None))
    assert not checked.evidence.refused
    return {verdict.name: verdict for verdict in checked.verdicts}


def test_the_benefit_by_difficulty_is_judged_over_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is made up here are the two numbers that are compared, not the runs behind them.
    monkeypatch.setattr("repro.judge.gathering.refusals", lambda *_: [])
    seeds = DIFFICULTY.scales[Tier.PROXY].seeds
    helps = {
        ("needle_05", "opening_colder"): 1 / 2.0,
        ("needle_40", "opening_colder"): 1 / 1.2,
        ("needle_05", "nvfp4_lora_aqn"): 1.5,
        ("needle_40", "nvfp4_lora_aqn"): 1.1,
    }
    write(tmp_path / "binding", DIFFICULTY, seeds, helps)
    by_claim = judged(tmp_path / "binding")
    assert by_claim["qerl_helps_more"].status == "reproduced"
    assert by_claim["qerl_helps_more"].effect == pytest.approx(1.5 / 1.1, rel=0.01)
    assert by_claim["nvfp4_helps_more"].status == "no difference"
    # Where a colder decision does not cost more either, no statement is judged.
    harder = {("needle_05", "opening_colder"): 1 / 1.2}
    write(tmp_path / "free", DIFFICULTY, seeds, helps | harder)
    free = judged(tmp_path / "free")
    assert {free[name].status for name in ("qerl_helps_more", "nvfp4_helps_more")} == {
        "not testable"
    }


def test_a_control_that_the_first_look_has_shown_holds_at_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repro.judge.gathering.refusals", lambda *_: [])
    first, *_ = NEEDLE_4.looks
    seeds = NEEDLE_4.scales[Tier.PROXY].seeds
    # Between two looks: what the first has not decided is judged on what is there, and is open.
    write(tmp_path, NEEDLE_4, seeds[: first.seeds + 4], {("needle_4", "opening_colder"): 1 / 1.5})
    verdicts = judged(tmp_path, "needle_4")
    assert verdicts["opening_colder_later"].status == "reproduced"
    assert verdicts["opening_colder_later"].n == first.seeds
    assert verdicts["aqn_sooner"].status == "inconclusive"
    assert "planned seeds" in verdicts["aqn_sooner"].sentence
    assert "control" not in verdicts["aqn_sooner"].sentence
