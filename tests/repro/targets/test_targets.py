"""Targets: Table 1's arms as the paper has them, and plans that follow."""

import dataclasses
import re

import pytest

from repro.spec.arm import Arm
from repro.spec.claim import Effect, planned
from repro.spec.config import TrainScale
from repro.spec.hub import is_hub_name
from repro.spec.target import Claim, Metric, default_tier, differing_fields, other_tiers, plan
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices, parse_tier
from repro.spec.variants import with_steps
from repro.targets import TARGETS, find
from repro.targets.table1 import METRICS, TABLE1

EFFECT = Effect(paper=0.2, measure="of gain", place="Table 1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature_factor": 0.0}, "temperature_factor is 0.0"),
        ({"temperature_factor": float("inf")}, "temperature_factor is inf"),
        ({"temperature_factor": 1.1, "training": "none"}, "must be 1, not 1.1"),
        ({"rollout_adapter": "merged"}, "rollout_adapter is 'merged'"),
        (
            {"rollout_adapter": "folded", "weight_format": "nvfp4"},
            "of nvfp4 weights; it needs lora",
        ),
        ({"rollout_adapter": "folded", "training": "full"}, "training full of bf16 weights"),
    ],
)
def test_a_policy_of_no_temperature_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Arm(name="warm", label="warm", **changes)


def test_a_scale_shares_no_field_with_an_arm():
    scale = {item.name for item in dataclasses.fields(TrainScale)}
    arm = {item.name for item in dataclasses.fields(type(TABLE1.arms[0]))}
    assert not scale & arm


def test_a_plan_is_every_arm_of_a_seed_before_the_next_seed():
    runs = plan(TABLE1, Tier.SMOKE)
    arms = len(TABLE1.arms)
    assert [run.seed for run in runs] == [0] * arms + [1] * arms + [2] * arms
    assert len({run.digest() for run in runs}) == len(runs)
    assert {run.procedure for run in runs if run.arm.training == "none"} == {"evaluate"}
    assert {run.procedure for run in runs if run.arm.training != "none"} == {"train"}
    # The other seeds of the scale are the same runs as ever, where they are named.
    assert plan(TABLE1, Tier.SMOKE, 5)[:36] == runs


def test_a_plan_takes_seeds_and_arms_and_a_number_counts_on_from_the_scales_first():
    runs = plan(TABLE1, Tier.SMOKE, [7, 3], ["bf16", "nf4"])
    named = [(run.seed, run.arm.name) for run in runs]
    assert named == [(7, "bf16"), (7, "nf4"), (3, "bf16"), (3, "nf4")]
    for name, tier, first in (("table1", Tier.SMOKE, 0), ("learning_rates_0_5b", Tier.MINI, 100)):
        seeds = {run.seed for run in plan(find(name), tier, 6)}
        assert seeds == set(range(first, first + 6))


@pytest.mark.parametrize(
    ("seeds", "arms", "words"),
    [([], None, "no seed"), ([1, 1], None, "repeat 1"), (1, ["int8"], "there is no arm 'int8'")],
)
def test_a_bad_plan_says_what_is_wrong(seeds, arms, words):
    with pytest.raises(ValueError, match=words):
        plan(TABLE1, Tier.SMOKE, seeds, arms)


def test_a_plan_at_a_tier_without_a_scale_names_the_others():
    with pytest.raises(ValueError, match="it has: smoke, paper"):
        plan(TABLE1, Tier.SYSTEMS)
    with pytest.raises(ValueError, match="the paper's scale of these runs is figure9_3b"):
        plan(find("figure9"), Tier.SYSTEMS)


def test_a_figure_of_table_1_plans_table_1():
    assert find("figure4").runs is TABLE1
    runs = plan(find("figure4"), Tier.SMOKE, 1)
    assert [run.target for run in runs] == ["table1"] * len(find("figure4").arms)
    for target in TARGETS:
        if target.records_of:
            source = {arm.name: arm for arm in target.runs.arms}
            assert all(source[arm.name] == arm for arm in target.arms)


def test_arms_that_two_targets_share_are_one_run():
    for target in TARGETS:
        for name, (home, other) in target.shared.items():
            assert not differing_fields(target.arm(name), home.arm(other))
            assert target.procedure == home.procedure
            assert other not in home.shared
            for tier, scale in target.scales.items():
                assert differing_fields(scale, home.scales[tier]) <= {"seeds"}


def test_names_are_unique_and_unknown_ones_get_the_list():
    names = [target.name for target in TARGETS]
    assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match=r"the nearest of \d+ targets are table1"):
        find("tabel1")
    with pytest.raises(ValueError, match="smoke, systems, mini, paper"):
        parse_tier("laptop")


def test_every_target_says_where_it_runs_or_why_not():
    for target in TARGETS:
        assert target.runs.scales or target.why_not
        assert target.statement
        assert target.source


ONE_ARM = {"contrast": {"a": 1}, "mechanism": True, "effect": None}


def claim(**values):
    fields: dict[str, object] = {
        "name": "c",
        "statement": "s",
        "source": "p",
        "contrast": {"nvfp4_lora": 1, "bf16_lora": -1},
        "metric": "accuracy",
        "factor": ("weight_format",),
        "effect": EFFECT,
        **values,
    }
    return Claim(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"contrast": {"nvfp4_lora": 1, "int8": -1}}, "names no arm of it: int8"),
        ({"metric": "speed"}, "names no metric of it: speed"),
        ({"factor": ()}, "also differ in weight_format"),
        ({"contrast": {"nvfp4_lora_aqn": 1, "bf16_lora": -1}}, "also differ in noise"),
        ({"contrast": {}}, "must sum to 0"),
        ({"contrast": {"a": 2}}, "that of one arm must be 1"),
        ({"contrast": {"a": 1, "b": -2}}, "must sum to 0"),
        ({"bound": -1.0, "effect": None}, "has no reason"),
        ({"effect": None}, "has no `effect`"),
        ({"test": "tost"}, "side"),
        ({"test": "page", "side": "within", "bound": 1.0, "because": "b"}, "side"),
        ({"widest": 0.0}, "widest is 0.0"),
        ({"log": True, "bound": 1.0, "widest": 1.0}, "above 1"),
        ({**ONE_ARM, "unpaired_below": 0.3}, "need two arms"),
        ({**ONE_ARM, "secondary": ("iqm",)}, "need two arms"),
        ({"test": "sign_flip", "unpaired_below": 0.3}, "no unpaired"),
    ],
)
def test_a_claim_that_makes_no_sense_or_does_not_fit_its_target_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TABLE1, claims=(claim(**values),))


def test_the_smallest_effect_that_matters_is_a_tenth_of_the_papers_unless_stated():
    assert EFFECT.matters == pytest.approx(0.02)
    assert Effect(paper=2.0, measure="ratio", place="p").matters == pytest.approx(2**0.1)
    assert dataclasses.replace(EFFECT, smallest=0.05, because="b").matters == 0.05


def test_plans_spell_a_claim_without_its_wording_and_defaults():
    stated = claim(contrast={"b": 1, "a": -1}, effect=EFFECT)
    spelled = planned(stated)
    assert spelled["contrast"] == [["b", 1], ["a", -1]]
    assert spelled["effect"] == {"paper": 0.2, "smallest": None, "measure": "of gain"}
    assert not {"statement", "source", "side", "test", "draws"} & spelled.keys()
    worded = dataclasses.replace(stated, statement="otherwise put", source="elsewhere")
    assert planned(worded) == spelled
    for other in (
        {"contrast": {"a": -1, "b": 1}},
        {"effect": dataclasses.replace(EFFECT, paper=0.3)},
        {"draws": 6},
        {"test": "sign_flip"},
    ):
        assert planned(dataclasses.replace(stated, **other)) != spelled


def test_repeated_names_are_refused():
    with pytest.raises(ValueError, match="arms repeat bf16"):
        dataclasses.replace(TABLE1, arms=(*TABLE1.arms, TABLE1.arms[0]))
    with pytest.raises(ValueError, match="metrics repeat accuracy"):
        dataclasses.replace(
            TABLE1, metrics=(*METRICS, Metric(name="accuracy", unit="percent", title="again"))
        )


def test_fewer_steps_have_a_name_and_records_of_their_own():
    short = with_steps(TABLE1, 3)
    assert short.name == "table1_in_3_steps"
    one, other = (plan(target, Tier.SMOKE, 1)[4] for target in (TABLE1, short))
    assert other.scale.steps == 3
    assert one.digest() != other.digest()
    with pytest.raises(ValueError, match="no training steps"):
        with_steps(find("table9"), 3)


def test_the_default_tier_is_the_smallest_that_runs_here_without_downloads(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(Tier, "missing", lambda tier: None)
    assert default_tier(TABLE1) is Tier.SMOKE
    assert default_tier(find("table6")) is Tier.SYSTEMS
    said = other_tiers(TABLE1, Tier.SMOKE)
    assert said is not None
    assert "--tier paper would download Qwen/Qwen2.5-7B-Instruct" in said
    monkeypatch.setattr(Tier, "missing", lambda tier: "needs a GPU; found none")
    with pytest.raises(ValueError, match="paper needs a GPU; found none"):
        default_tier(find("table1_3b"))


def test_a_machine_without_the_driver_is_told_in_a_sentence(monkeypatch):
    monkeypatch.setattr("repro.spec.tier.cuda_devices", lambda: ())
    assert Tier.SMOKE.missing() is None
    sentence = Tier.SYSTEMS.missing()
    assert sentence == "needs a CUDA device of compute capability 8.0 or newer; found none"


@pytest.mark.gpu
def test_devices_are_those_that_torch_sees():
    torch = pytest.importorskip("torch")
    devices = cuda_devices()
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here; the driver's answer cannot be compared with torch's")
    assert len(devices) == torch.cuda.device_count()
    assert devices[0].capability == torch.cuda.get_device_capability(0)
    assert devices[0].memory_bytes == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("name", ["figure9_3b", "figure17", "figure4_bigmath", "table2_32b"])
def test_a_cut_of_a_target_that_shares_arms_runs_them_itself(name):
    target = find(name)
    short = with_steps(target, 2)
    assert target.shared
    assert not short.shared
    planned = {run.arm.name for run in plan(short, Tier.PAPER, [0])}
    assert planned == {arm.name for arm in target.arms}
    assert {run.target for run in plan(short, Tier.PAPER, [0])} == {short.name}


def test_every_published_checkpoint_is_pinned_to_a_commit():
    scales = [
        scale
        for target in TARGETS
        for tier in REAL_CHECKPOINTS
        if isinstance(scale := target.scales.get(tier), TrainScale)
    ]
    assert len({scale.checkpoint for scale in scales}) == 8
    for scale in scales:
        # One file of a repository is pinned by its bytes.
        pin = "sha256:[0-9a-f]{64}" if ":" in scale.checkpoint else "[0-9a-f]{40}"
        assert is_hub_name(scale.checkpoint)
        assert re.fullmatch(pin, scale.revision), scale.checkpoint
    # No two checkpoints share a commit.
    assert len({scale.revision for scale in scales}) == 8
