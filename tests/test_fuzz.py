"""Malformed input of every kind gives the project's named error, and never another exception.

Some 2,500 cases in all; ten times as many with `REPRO_FUZZ=nightly`. Files are made from good ones:
random bytes seldom pass the first check. Statistics are compared with SciPy's and statsmodels'.
"""

import copy
import json
import lzma
import math
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from scipy import stats
from statsmodels.stats.multitest import multipletests

from repro.__main__ import main
from repro.data.own import read_splits
from repro.data.problem import DataError, Problem, digest_of_problems
from repro.data.prompts import render
from repro.evaluation.grades import shows_working
from repro.evidence.estimate import mean_interval
from repro.evidence.record import RecordError, finite_json, read_record
from repro.evidence.store import stored_line, stored_text
from repro.evidence.verdicts.statistics import false_discovery, holm, t_test, wilson_interval
from repro.judge.bundle import judge_bundle
from repro.models.checkpoint import TINY_FOLDER
from repro.models.files.adapter_files import read_adapter
from repro.models.files.tensor_files import CheckpointError, TensorFolder, read_header
from repro.models.loading import build_on_meta, read_description, require_same_names, stored_ends
from repro.models.policy import load_tokenizer
from repro.reward.answers import extract_answer, format_ok, lenient_answer
from repro.reward.expression import comparable, tidy
from repro.reward.grader import GraderPool
from repro.rl.snapshots import SUMS
from repro.rl.training_state import TrainState, load_checkpoint, save_checkpoint
from repro.run.preflight import lacking
from repro.run.select import Changes, parse_arms, parse_seeds, select
from repro.spec.config import digest_of
from repro.spec.settings import parse_settings, settings_text, with_settings
from repro.spec.shapes import shape_of_checkpoint
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import TARGETS, find
from tests.changed_settings import places, with_value
from tests.repro.made_up import honest_record
from tests.repro.models.test_adapter_settings import plain_values
from tests.said import refusal

NIGHTLY = os.environ.get("REPRO_FUZZ") == "nightly"
CASES = 20_000 if NIGHTLY else 2_000
_TESTS = 16
fuzzed = settings(
    max_examples=CASES // _TESTS,
    deadline=None,
    derandomize=not NIGHTLY,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

ROOT = Path(__file__).resolve().parent.parent
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
NUMBERS = JSON | st.sampled_from((0, -1, 3, 2**31, 2**40, 2**70, 0.0, -1.0, 1e300))


def damaged(data, content):
    """Return a file's bytes with a few of them cut, changed or put in."""
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        kind = data.draw(st.sampled_from(("cut", "change", "insert", "repeat")))
        noise = data.draw(st.binary(min_size=1, max_size=4))
        if kind == "cut":
            content = content[:at]
        elif kind == "change":
            content = content[:at] + noise + content[at + len(noise) :]
        elif kind == "insert":
            content = content[:at] + noise + content[at:]
        else:
            content = content[: at + 1] + content[at:]
    return content


def replaced(data, value, by=JSON):
    """Return JSON values with one of them, at any depth, replaced or removed."""
    value = copy.deepcopy(value)
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return value
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        if data.draw(st.booleans()):
            place[key] = data.draw(by)
        else:
            del place[key]
        return value


LINES = [
    {"id": "a", "question": "How many?", "answer": "18", "level": "Level 5"},
    {"id": "b", "question": "And \u2028 now?", "answer": "\\frac{1}{2}", "solution": "1/2"},
]
RECORD = honest_record(*plan(find("table1"), Tier.SMOKE, 1, ["bf16_lora"]))
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}


def read_settings(path):
    read = read_adapter(path.parent).settings
    assert read["lora_rank"] >= 1
    assert math.isfinite(read["lora_alpha"])


@pytest.mark.parametrize(
    ("name", "rows", "read", "error"),
    [
        ("train.jsonl", LINES, lambda at: digest_of_problems(read_splits(at)["all"]), DataError),
        ("seed-0.json", [json.loads(json.dumps(RECORD.to_json()))], read_record, RecordError),
        ("adapter_config.json", [plain_values()], read_settings, CheckpointError),
        ("model.safetensors", [], read_header, CheckpointError),
    ],
)
@settings(fuzzed, max_examples=CASES // 8)
@given(st.data())
def test_a_broken_file_is_refused_by_its_name_or_read(tmp_path, name, rows, read, error, data):
    damages = not rows or data.draw(st.booleans())
    changed = rows if damages else [replaced(data, row, NUMBERS) for row in rows]
    content = "\n".join(map(json.dumps, changed)).encode() or save(TENSORS)
    path = tmp_path / name
    path.write_bytes(damaged(data, content) if damages else content)
    said = refusal(lambda: read(path), error)
    assert said is None or (str(path) in said and "\n" not in said)


PIECES = (
    *("<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "####", "$", "\\$"),
    *("The answer is ", "18", "3.5", "1,000", "/", "%", "\\%", "\\frac", "{1}{2}", "\\sqrt", "^"),
    *("x", "=", "<", ",", "(", ")", "[", "]", "\\pm", "\\text{", " cm", " or ", "_8", "\n", "."),
    *("\\{", "\\}", "\\left", "\\right", "-", "+", "\\overline{3}", "\\cup", "\\infty", ":"),
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)


@fuzzed
@given(TEXTS, TEXTS)
def test_any_completion_can_be_read(gold, text):
    strict = extract_answer(text)
    assert not format_ok(text) or strict is not None
    lenient_answer(text)
    for answer in (text, strict or ""):
        if comparable(tidy(gold), tidy(answer)) is not None:
            assert comparable(tidy(gold), tidy(gold)) is not None


@fuzzed
@given(
    st.sampled_from(("", "18", "18 ", "x = ", "\\frac12")),
    st.lists(st.sampled_from((*PIECES, " shells", "so ", "1", " ")), min_size=1, max_size=3),
    st.sampled_from(("", "?", "{", "}", "_", "=")),
    st.sampled_from((40, 300, 3_000)),
)
def test_no_completion_takes_long_to_read(before, pieces, after, characters):
    unit = "".join(pieces)
    answer = before + unit * (characters // len(unit) + 1) + after
    start = time.process_time()
    lenient_answer(answer)
    lenient_answer(f"<answer>{answer}</answer>")
    shows_working(answer)
    assert time.process_time() - start < 1.0


def test_any_completion_gets_a_status_and_no_answer_drops_its_item():
    golds = ("18", "\\frac{1}{2}", "x+1", "(1,2)", "2\\sqrt{3}", "y=2x", "x>1", "\\text{A}")
    examples = CASES // _TESTS

    @settings(fuzzed, max_examples=max(1, examples // 10))
    @given(st.lists(st.tuples(st.sampled_from(golds), TEXTS), min_size=10, max_size=10))
    def check(pairs):
        statuses = {grade.status for grade in pool.grade_answers(pairs)}
        assert statuses <= {"ok", "wrong", "timeout"}

    with GraderPool(seconds_per_item=0.5) as pool:
        check()


@fuzzed
@given(st.data())
def test_a_bundle_with_other_values_is_judged_or_is_a_sentence(tmp_path, data):
    head = stored_line({"target": "table1", "tier": "smoke", "plans": []})
    lines = [json.loads(line) for line in (head + stored_text([RECORD])).splitlines()]
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = replaced(data, lines[at])
    if at and "seal" in lines[at] and data.draw(st.booleans()):
        lines[at].pop("seal")
    path = tmp_path / "changed.jsonl.xz"
    text = "\n".join(map(json.dumps, lines)).encode()
    path.write_bytes(lzma.compress(text, preset=0))
    said = refusal(lambda: judge_bundle(path, ROOT / "expected"), ValueError)
    assert said is None or said.startswith(f"{path}: ")


def test_a_damaged_training_checkpoint_is_named_or_passed_over(tmp_path):
    parameters = {"w": torch.nn.Parameter(torch.ones(3, 2))}
    optimizer = torch.optim.AdamW(parameters.values())
    parameters["w"].sum().backward()
    optimizer.step()
    state = TrainState(digest="d", step=1, draws=2, series={"reward": [0.5]}, facts={})
    final = save_checkpoint(tmp_path, state, parameters, optimizer)
    files = {path.name: path.read_bytes() for path in sorted(final.iterdir())}

    @fuzzed
    @given(st.data())
    def check(data):
        for refused in tmp_path.iterdir():
            shutil.rmtree(refused)
        final.mkdir()
        for name, content in files.items():
            (final / name).write_bytes(content)
        name = data.draw(st.sampled_from(sorted(files)))
        content = damaged(data, files[name])
        (final / name).write_bytes(content)
        said = refusal(lambda: load_checkpoint(tmp_path, "d", parameters, optimizer), ValueError)
        # The list of checksums may be written in another way and say the same.
        if content == files[name] or (said is None and name == SUMS):
            return
        assert str(tmp_path) in said

    check()


RUNS = [
    run
    for target in TARGETS
    for tier in target.tiers()
    if target.records_of is None
    for run in plan(target, tier, 1)
]
EXTREMES = JSON | st.sampled_from(
    (
        *(math.inf, -math.inf, math.nan, 0, 0.0, -0.0, 1, -1, 0.5, 1e-300, 1e300, 5e-324),
        *(2**31, 2**62, 2**63, 10**400, True, False, "", "1", "none", "\ud800", "x" * 300),
        *((), (0,), (-1,), (1.5,), ("x",), (1, 1), (2**70,)),
    )
)


@settings(fuzzed, max_examples=CASES // 8)
@given(st.data())
def test_a_setting_at_an_extreme_is_refused_or_its_run_can_be_read_back(data):
    run = data.draw(st.sampled_from(RUNS))
    path = data.draw(st.sampled_from(sorted(places(run))))
    value = data.draw(EXTREMES)
    made = []
    said = refusal(lambda: made.append(with_value(run, path, value)), ValueError)
    if said is not None:
        assert "\n" not in said
        assert len(said) < 400
        return
    (changed,) = made
    text = json.dumps(changed.resolved(), allow_nan=False)
    assert digest_of(finite_json(text)) == changed.digest()
    assert "\n" not in (lacking(changed) or "")
    hash(changed)


@fuzzed
@given(st.data())
def test_a_setting_by_name_is_refused_or_is_that_of_its_field(data):
    run = data.draw(st.sampled_from(RUNS))
    path = data.draw(st.sampled_from(sorted(places(run.scale))))
    extremes = EXTREMES.map(lambda one: one if isinstance(one, str) else json.dumps(one))
    text = data.draw(st.one_of(extremes, st.text(max_size=6)))
    made = []
    setting = parse_settings([f"{path}={text}"])
    said = refusal(lambda: made.append(with_settings(run.scale, setting)), ValueError)
    assert said is None or ("\n" not in said and len(said) < 1_000)
    for scale in made:
        values = json.loads(settings_text(scale))
        assert with_settings(run.scale, values) == scale


@fuzzed
@given(st.text(max_size=12), st.text(max_size=8), st.integers(-2, 3))
def test_a_command_line_that_names_nothing_is_a_value_error(name, seeds, steps):
    changes = Changes(steps=steps)
    for read in (
        lambda: parse_arms(name),
        lambda: parse_seeds(seeds),
        lambda: select(["table1", name], changes=changes),
    ):
        assert refusal(read, ValueError) != "no sentence"


SAMPLES = st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 3)), min_size=3, max_size=12)


@fuzzed
@given(SAMPLES, st.integers(1, 60), st.floats(0, 1))
def test_intervals_and_tests_are_scipys(values, n, share):
    wins = round(share * n)
    wilson = stats.binomtest(wins, n).proportion_ci(method="wilson")
    assert wilson_interval(wins, n) == pytest.approx((wilson.low, wilson.high), abs=1e-9)
    if max(values) - min(values) < 1e-6:
        return
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval()
    mean = mean_interval(values)
    assert (mean.low, mean.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-9)
    assert t_test(values) == pytest.approx(test.pvalue, rel=1e-7, abs=1e-12)


@fuzzed
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_corrections_are_exact(monkeypatch, p_values):
    # It collects garbage at each call, which takes 0.1 s where torch is loaded.
    monkeypatch.setattr("gc.collect", lambda: 0)
    for ours, method in ((holm, "holm"), (false_discovery, "fdr_bh")):
        _, adjusted, _, _ = multipletests(p_values, method=method)
        assert ours(p_values) == pytest.approx(list(adjusted), rel=1e-9, abs=1e-300)


CONFIG = json.loads((TINY_FOLDER / "config.json").read_text(encoding="utf-8"))
FIELDS = {
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "layer_types": ["full_attention"] * 4,
    "head_dim": 32,
    "sliding_window": 4,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "eos_token_id": [2, 3],
}


@settings(fuzzed, max_examples=CASES // 8)
@given(st.data())
def test_a_broken_config_is_refused_or_builds_a_model(tmp_path, data):
    added = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=2))
    values = CONFIG | {name: FIELDS[name] for name in added}
    for _ in range(data.draw(st.integers(1, 2))):
        values = replaced(data, values, NUMBERS)
    content = json.dumps(values).encode()
    if data.draw(st.integers(0, 3)) == 0:
        content = damaged(data, content)
    (tmp_path / "config.json").write_bytes(content)
    shutil.copy(TINY_FOLDER / "model.safetensors", tmp_path)

    def read():
        description = read_description(tmp_path)
        model = build_on_meta(description.config)
        require_same_names(model, TensorFolder(tmp_path), description.stored_format)

    said = refusal(read, ValueError)
    assert said is None or ("\n" not in said and str(tmp_path) in said)
    shape = refusal(lambda: shape_of_checkpoint(str(tmp_path)), ValueError)
    assert shape is None or tmp_path.name in shape


@settings(fuzzed, max_examples=CASES // 400)
@given(st.data())
def test_what_is_refused_leaves_nothing_and_ends_with_status_2(tmp_path, data):
    source, out = tmp_path / "source", tmp_path / "out"
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(TINY_FOLDER, source)
    name = data.draw(st.sampled_from(("config.json", "tokenizer_config.json", "tokenizer.json")))
    values = json.loads((source / name).read_text(encoding="utf-8"))
    (source / name).write_text(json.dumps(replaced(data, values, NUMBERS)), encoding="utf-8")
    status = main(["quantize", str(source), str(out), "--device", "cpu"])
    assert status == (0 if out.exists() else 2)
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "out"}


@settings(fuzzed, max_examples=CASES // 8)
@given(st.data())
def test_a_broken_tokenizer_is_refused_or_tokenises(tmp_path, data):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_FOLDER / name, tmp_path)
    name = data.draw(
        st.sampled_from(("tokenizer.json", "tokenizer_config.json", "generation_config.json"))
    )
    path = tmp_path / name
    content = path.read_bytes() if path.exists() else b'{"eos_token_id": [1, 2]}'
    if data.draw(st.booleans()):
        content = json.dumps(replaced(data, json.loads(content))).encode()
    else:
        content = damaged(data, content)
    path.write_bytes(content)

    def read():
        stored_ends(tmp_path / "generation_config.json")
        tokenizer = load_tokenizer(tmp_path)
        problem = Problem(id="a", question="How many are 3 + 4?", answer="7")
        ids = render(problem, "tiny", tokenizer)
        assert all(isinstance(number, int) for number in ids)
        tokenizer.batch_decode([ids], skip_special_tokens=True)

    said = refusal(read, ValueError)
    path.unlink()
    assert said is None or "\n" not in said


CHAT = (
    *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m['role'] }}", "{{ m.x }}"),
    *("{% if add_generation_prompt %}", "{% endif %}", "{{ bos_token }}", "{% set a = 1 %}"),
    *("{{ messages[9] }}", "{{ messages[0].content / 0 }}", "{{", "}}", "{%", "%}", "{#"),
    *("{{ m.content | tojson }}", "{{ m | nothing }}", "{% generation %}", "{{ [1] * 3 }}"),
    *("<|im_start|>", "{{ raise_exception(1) }}", "{{ range(9 ** 9) }}"),
    *("{% include 'a' %}", "{{ ''.__class__ }}", "{% macro f(x) %}", "{{ strftime_now('%Y') }}"),
)


@settings(fuzzed, max_examples=CASES // 100)
@given(st.lists(st.sampled_from(CHAT) | st.text(max_size=3), max_size=6).map("".join))
def test_any_chat_template_renders_or_is_refused(template):
    tokenizer = load_tokenizer(TINY_FOLDER)
    tokenizer.chat_template = template
    problem = Problem(id="a", question="How many are 3 + 4?", answer="7")
    said = refusal(lambda: render(problem, "boxed", tokenizer), ValueError)
    assert said is None or "\n" not in said
