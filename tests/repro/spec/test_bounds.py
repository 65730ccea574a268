"""Settings out of range are refused in one sentence, by whichever way they come."""

import dataclasses
import json
import math
import os

import pytest

from repro.evidence.record import finite_json
from repro.spec.arm import LossConfig
from repro.spec.config import LearningRates, OptimizerConfig, digest_of
from repro.spec.settings import read_settings
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.changed_settings import with_value
from tests.repro.run.test_command_lines import selected

# A setting of Table 1's smoke runs, a value that it cannot have, and what it needs.
REFUSED = [
    ("optimizer.learning_rates.lora_16bit", -0.001, "1e-12 or more"),
    ("optimizer.learning_rates.lora_16bit", 0, "1e-12 or more"),
    ("optimizer.learning_rates.lora_16bit", -0.0, "1e-12 or more"),
    ("optimizer.learning_rates.full", 2.0, "at most 1"),
    ("optimizer.learning_rates.full", 1e-300, "a number from 1e-18"),
    ("optimizer.max_grad_norm", 0, "1e-06 or more"),
    ("optimizer.max_grad_norm", math.inf, "a number from 1e-18 to 1e+18"),
    ("optimizer.beta1", 1, "below 1"),
    ("optimizer.beta2", 1.5, "below 1"),
    ("optimizer.weight_decay", -0.1, "0 or more"),
    ("optimizer.warmup_steps", -1, "0 or more"),
    ("optimizer.warmup_steps", 31, "at most 30"),
    ("optimizer.schedule", "linear", "constant, cosine"),
    ("group_size", 1, "2 or more"),
    ("steps", 0, "1 or more"),
    ("steps", True, "a whole number"),
    ("steps", 2**63, "at most 63 bits"),
    ("format_reward", -0.2, "0 or more"),
    ("checkpoint_every", 0, "1 or more"),
    ("max_prompt_tokens", -1, "1 or more"),
    ("max_prompt_tokens", 2**31, "at most 1e+08"),
    ("prompts_per_rollout", 2**31, "at most 1e+09"),
    ("compute_dtype", "float8", "float32, bfloat16, float16"),
    ("permuted", 1, "true or false"),
    ("rollout.temperature", 0, "above 0"),
    ("rollout.temperature", 1e-9, "0, or 0.01 or more"),
    ("rollout.top_p", 0, "above 0"),
    ("rollout.top_p", 0.9, "it must be 1"),
    ("evaluation.samples", 0, "1 or more"),
    ("evaluation.threshold", math.nan, "a number from 1e-18"),
    ("evaluation.threshold", -1, "0 or more"),
    ("evaluation.threshold", 101, "at most 100"),
    ("evaluation.at", [2], "k = 2"),
    ("evaluation.test_at", [2, 2], "must rise"),
    ("evaluation.test_at", [0], "1 or more"),
    ("evaluation.test_at", [30], "the run has 30"),
    ("data.test_problems", -1, "0 or more"),
    ("seeds", [-1], "0 or more"),
    ("arm.lora_alpha", 0, "0.01 or more"),
    ("arm.lora_rank", 0, "1 or more"),
    ("arm.learning_rate_factor", 0, "above 0"),
    ("arm.learning_rate_factor", 1e9, "at most 1"),
    ("arm.noise.sigma_end", -0.1, "above 0"),
    ("arm.noise.sigma_start", 1e30, "a number from 1e-18 to 1e+18"),
    ("arm.loss.clip_low", 1, "below 1"),
    ("arm.loss.clip_high", 0, "above 0"),
    ("arm.loss.beta", math.inf, "a number from 1e-18 to 1e+18"),
    ("arm.loss.importance_cap", 0, "1 or more"),
    ("arm.loss.dynamic_sampling", -1, "0 or more"),
    ("arm.loss.overlong_buffer", 1, "below 1"),
]


WAYS = ("--set", "scale.json", "scale.toml", "Python")


def planned(name, value, way, folder):
    """Return the smoke runs of Table 1 with a setting given in one of the ways."""
    if way == "Python":
        arm = "bf16_lora" if name.endswith("16bit") else "nvfp4_lora_aqn"
        (run,) = plan(find("table1"), Tier.SMOKE, 1, [arm])
        path = name if name.startswith("arm.") else f"scale.{name}"
        return [with_value(run, path, tuple(value) if isinstance(value, list) else value)]
    *tables, key = name.split(".")
    words = ["table1", "--tier", "smoke", "--set", f"{name}={json.dumps(value)}"]
    if way != "--set":
        text = f"{key} = {json.dumps(value).replace('Infinity', 'inf').replace('NaN', 'nan')}\n"
        text = (f"[{'.'.join(tables)}]\n" if tables else "") + text
        if way.endswith("json"):
            nested = {key: value}
            for table in reversed(tables):
                nested = {table: nested}
            text = json.dumps(nested)
        (folder / way).write_text(text, encoding="utf-8")
        words[3:] = ["--config", str(folder / way)]
    return selected(*words).plan(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "value", "needed"), REFUSED)
def test_a_setting_out_of_range_is_refused(name, value, needed, way, tmp_path):
    with pytest.raises(ValueError, match=name.rpartition(".")[2]) as caught:
        planned(name, value, way, tmp_path)
    assert needed in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer.max_grad_norm", 1e18),
        ("optimizer.warmup_steps", 30),
        ("optimizer.beta1", 0),
        ("evaluation.sampling.temperature", 0),
        ("arm.loss.importance_cap", None),
        ("arm.label", "a \u2028 label"),
    ],
)
def test_a_setting_at_its_bound_is_taken_and_its_digest_is_read_back(name, value, way, tmp_path):
    if value is None and way == "scale.toml":  # which has no such value
        return
    for run in planned(name, value, way, tmp_path):
        text = json.dumps(run.resolved(), allow_nan=False)
        assert digest_of(finite_json(text)) == run.digest()


def test_an_untrained_arm_needs_nothing_to_train_with():
    (run,) = plan(find("table1"), Tier.SMOKE, 1, ["nvfp4"])
    zeros = LearningRates(lora_16bit=0, lora_4bit=0, full=0)
    scale = dataclasses.replace(
        run.scale, steps=0, group_size=1, optimizer=OptimizerConfig(learning_rates=zeros)
    )
    assert dataclasses.replace(run, scale=scale).scale.steps == 0
    with pytest.raises(ValueError, match="steps is 0"):
        dataclasses.replace(
            run, scale=scale, procedure="train", arm=find("table1").arm("bf16_lora")
        )


def test_two_settings_that_undo_each_other_are_refused():
    with pytest.raises(ValueError, match=r"importance_cap is 2\.0; .*None"):
        LossConfig(importance_cap=2.0, old_policy="sampler")
    (run,) = plan(find("table1"), Tier.SMOKE, 1, ["bf16_lora"])
    with pytest.raises(ValueError, match="temperature is 1000"):
        with_value(run, "arm.temperature_factor", 1000.0)
    full = dataclasses.replace(run.arm, training="full", norms_trained=True)
    with pytest.raises(ValueError, match=r"norms_trained .* must be lora"):
        dataclasses.replace(run, arm=full)


@pytest.mark.parametrize("file", ["scale.toml", "scale.json"])
def test_a_file_of_deep_brackets_is_a_sentence(file, tmp_path):
    (tmp_path / file).write_text("levels = " * file.endswith("toml") + "[" * 100_000)
    with pytest.raises(ValueError, match="--config"):
        read_settings(tmp_path / file)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"arm": 3}, "arm is 3"),
        ({"arm": None}, "arm is None"),
        ({"scale": [1]}, "scale is"),
        ('{"steps": 5, "steps": 6}', "'steps' is given twice"),
        ('{"optimizer": {"beta1": 0.5, "beta1": 0.6}}', "'beta1' is given twice"),
    ],
)
def test_a_table_that_is_none_or_gives_a_key_twice_is_refused(content, named, tmp_path):
    file = tmp_path / "scale.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        selected("table1", "--tier", "smoke", "--config", str(file))


def test_a_table_in_json_changes_what_it_names_alone():
    given = ["--set", 'optimizer={"beta2": 0.5}', "--set", 'arm={"noise": {"sigma_end": 0.001}}']
    selection = selected("table1", "--tier", "smoke", *given)
    (run,) = selection.plan(1, ["nvfp4_lora_aqn"])
    before = find("table1").scales[Tier.SMOKE].optimizer
    assert run.scale.optimizer == dataclasses.replace(before, beta2=0.5)
    assert (run.arm.noise.sigma_end, selection.target.arm("bf16").noise) == (0.001, None)


def test_a_pipe_is_no_file_of_settings(tmp_path):
    os.mkfifo(tmp_path / "scale.toml")
    with pytest.raises(ValueError, match=r"scale\.toml: needs"):
        read_settings(tmp_path / "scale.toml")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    for file, text in (("scale.toml", "steps = 7"), ("scale.json", '{"steps": 7}')):
        (tmp_path / file).write_text(f"\ufeff{text}", encoding="utf-8")
        assert read_settings(tmp_path / file) == {"steps": 7}
