"""`train`, `quantize` and `evaluate` of a model of one's own, by command and from Python."""

import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import repro
from repro.__main__ import main
from repro.door.command_line import build_parser
from repro.door.own_run import selection_of
from repro.evidence.receipts import violations
from repro.evidence.record import find_record, read_record
from repro.models.checkpoint import TINY_FOLDER
from repro.run.execute import INTERRUPTED
from repro.spec.arm import DAPO, GSPO
from repro.spec.tier import CudaDevice, Tier
from repro.targets import TARGETS
from tests.repro.conftest import forked_workers
from tests.said import unsaid
from tests.test_printed_commands import printed

SMALL = ("steps=3", "optimizer.warmup_steps=1", "prompts_per_rollout=4", "data.test_problems=8")
(PAGE, *_) = (one.words for one in printed("README.md") if one.words[0] == "train")
LINE = (*PAGE[1 : PAGE.index("--out")], *(w for text in SMALL for w in ("--set", text)))
SETTINGS = dict(text.split("=") for text in SMALL)


def selected(*words, line=LINE):
    return selection_of(build_parser().parse_args(["train", *line, *words]))


def record_of(selection, runs):
    (run,) = selection.plan()
    return read_record(find_record(run, runs))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder in which the command trained and exported."""
    folder = tmp_path_factory.mktemp("trained")
    line = ["train", *LINE, "--runs", str(folder / "runs"), "--out", str(folder / "adapter")]
    with (folder / "printed").open("w") as file, redirect_stdout(file), forked_workers():
        assert main(line) == 0
    return folder


def test_a_command_trains_records_and_exports_an_adapter_that_peft_loads(trained):
    record = record_of(selected(), trained / "runs")
    assert violations(record) == []
    assert record.facts["optimizer_steps"] == 3
    assert record.config["arm"]["reward"] == "finished"
    assert record.target not in {target.name for target in TARGETS}
    adapter = trained / "adapter"
    assert len(AutoTokenizer.from_pretrained(adapter)) > 0
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY_FOLDER), adapter)
    assert any("lora" in name for name, _ in model.named_parameters())


def test_a_person_sees_a_prompt_a_completion_its_reward_and_the_accuracies(trained):
    printed = (trained / "printed").read_text()
    record = record_of(selected(), trained / "runs")
    before, after = (record.value(n) for n in ("accuracy_greedy_start", "accuracy_greedy"))
    assert f"{record.series['reward'][0]:.2f} at first" in printed
    assert f"{before:.1f} % before, {after:.1f} % after 3 steps" in printed
    assert printed.index("Its reward: ") < printed.index("Held-out accuracy")


def test_a_second_call_from_python_trains_nothing_and_keeps_the_export(trained, monkeypatch):
    monkeypatch.chdir(trained)
    began = (trained / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
    done = repro.train("tiny", "generated", settings=SETTINGS, runs="runs", out="adapter")
    assert (done.steps, done.reached, done.out) == (3, None, Path("adapter"))
    assert (done.folder / "metrics.jsonl").is_file()
    assert (trained / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns == began
    (trained / "another").mkdir()
    with pytest.raises(FileExistsError):
        repro.train("tiny", "generated", settings=SETTINGS, runs="runs", out="another")

    def beaten(args):
        shutil.copytree("adapter", args.out)
        raise OSError("Directory not empty")

    monkeypatch.setattr("repro.export.exporting.main_export", beaten)
    twin = repro.train("tiny", "generated", settings=SETTINGS, runs="runs", out="twin")
    assert twin.out == Path("twin")


def test_commands_of_the_page_on_what_was_trained_end_as_it_says(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (run,) = (trained / "runs").glob("smoke/*/*/seed-0/*/")
    Path("mine.csv").write_text("prompt,gold\nWhat is 3 + 4?,7\n")
    stands_for = {"RUN": run, "gsm8k": "generated", "gsm8k,math500": "generated"}
    few = {"evaluate": ("--limit", "1", "--tokens", "8", "--template", "tiny")}
    done = "(evaluate|export|quantize) (?!.*--revision)"  # which is of hub names alone
    lines = [one for one in printed("docs/train.md") if re.match(done, str(one))]
    for one in lines:
        models = (TINY_FOLDER if re.search("Qwen|gguf", word) else word for word in one.words)
        words = [str(stands_for.get(word, word)) for word in models]
        assert main([*words, *few.get(words[0], ())]) == one.status, one
    assert len(lines) >= 7


def test_the_adapter_is_evaluated_and_its_base_quantised_from_python(trained, tmp_path):
    sets = repro.evaluate(
        adapter=trained / "adapter", data="generated", limit=4, template="tiny", tokens=32
    )
    assert 0 <= sets["generated"]["accuracy"] <= 100
    assert (repro.quantize(TINY_FOLDER, tmp_path / "nvfp4") / "config.json").is_file()
    with pytest.raises(ValueError, match="int3"):
        repro.quantize(TINY_FOLDER, tmp_path / "int3", format="int3")
    with pytest.raises(ValueError, match=r"data is .*needs one value"):
        repro.evaluate("tiny", data=["a", "b"])
    with pytest.raises(ValueError, match=r"settings is .*needs a dict"):
        repro.train("tiny", "generated", settings=["steps=1"])
    with pytest.raises(ValueError, match="columns is 'question=a'; needs a dict"):
        repro.evaluate("tiny", data="generated", columns="question=a")
    with pytest.raises(ValueError, match="-x is not there"):
        repro.quantize("-x", tmp_path / "nothing")


def test_data_mended_since_are_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.setattr("repro.run.execute._carry_out", lambda *batches: INTERRUPTED)
    data, rows = tmp_path / "sums.csv", [f"What is {n} + {n}?,{2 * n}" for n in range(60)]
    for some, ends in ((rows[:3], ValueError), (rows, KeyboardInterrupt)):
        data.write_text("\n".join(["question,answer", *some]))
        with pytest.raises(ends):
            repro.train("tiny", data, settings=SETTINGS, runs=tmp_path / "runs")
    assert main(["train", *LINE, "--runs", str(tmp_path / "runs")]) == INTERRUPTED


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("training", ["lora", "full"])
def test_a_finished_run_of_other_data_or_another_model_is_no_answer(tmp_path, capsys, training):
    model, data = tmp_path / "model", tmp_path / "a,b.csv"
    shutil.copytree(TINY_FOLDER, model)
    data.write_text("question,answer\n" + "".join(f"What is {n}?,{n}\n" for n in range(60)))
    settings = SETTINGS | {"steps": 1, "optimizer.warmup_steps": 0, "arm.training": training}
    how = {"format": "bf16", "template": "tiny", "settings": settings, "runs": tmp_path / "runs"}
    call = partial(repro.train, model, data, **how)
    done = call()
    (line,) = re.findall("repro (evaluate .*)", capsys.readouterr().out)
    assert main([*shlex.split(line), "--limit", "1", "--tokens", "8"]) == 0
    for file, word, named in (data, "W", "train_problems"), (model / "config.json", "{", "config"):
        kept = file.read_text()
        file.write_text(kept.replace(word, f" {word}"))
        with pytest.raises(ValueError, match=rf"{named}.* changed since"):
            call()
        file.write_text(kept)
    assert call() == done
    shutil.rmtree(done.folder / {"lora": "adapter", "full": "model"}[training])
    with pytest.raises(ValueError, match="is gone"):
        call()


@pytest.mark.usefixtures("warm_workers")
def test_training_ends_at_an_accuracy_and_says_after_how_many_steps(tmp_path, capsys):
    line = ["train", *LINE, "--runs", str(tmp_path), "--until", "0.1"]
    assert main(line) == 0
    record = record_of(selected("--until", "0.1"), tmp_path)
    assert violations(record) == []
    assert record.facts["optimizer_steps"] == 1
    accuracy, seconds = (record.series[f"test_{n}"][0] for n in ("accuracy_greedy", "seconds"))
    assert accuracy >= 0.1
    assert seconds > record.value("train_seconds") > 0
    line_of_score = r"(\d+) seconds from a cold start to (\S+) % \(greedy, held-out\), 1 steps"
    (said,) = re.findall(line_of_score, capsys.readouterr().out)
    assert int(said[0]) >= round(seconds)
    assert said[1] == f"{accuracy:.1f}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--format int3", "bf16, nf4, mxfp4, nvfp4"),
        ("--algorithm ppo", "grpo, dapo, gspo"),
        ("--model ./nowhere", "./nowhere"),
        ("--data nosuch", "'nosuch'"),
        ("--columns answer=gold", "leave it out"),
        ("--until 120", "until is 120"),
        ("--until 0", "until is 0"),
        ("--seed -1", "seed is -1"),
        ("--revision v1", "--revision v1"),
        ("--aqn --steps 1 --set steps=1", "no noise"),
        ("--data {folder}/unanswered.csv", "`answer` is missing"),
        ("--reward bad_rewards:too_few", "returned [1.0] for 2 completions"),
        ("--out {folder}", "name a new folder"),
        ("--out new --format bf16 --set arm.training=full", "is for an adapter"),
        ("--out {folder}/bad_rewards.py/out", "bad_rewards.py is no folder"),
        ("--model {tiny} --template tiny --out {tiny}/out", "lies in"),
    ],
)
def test_bad_input_is_a_sentence_and_leaves_nothing(line, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unanswered.csv").write_text("\n".join(["question", *"abcdefgh"]))
    (tmp_path / "bad_rewards.py").write_text("def too_few(completions): return [1.0]")
    monkeypatch.delitem(sys.modules, "bad_rewards", raising=False)
    line = line.format(folder=tmp_path, tiny=TINY_FOLDER)
    assert main(["train", *LINE, *line.split(), "--runs", "runs"]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not Path("runs").exists()


def test_algorithms_and_noise_are_values_of_the_arm():
    line = ("--aqn", "--format", "bf16", "--algorithm")
    dapo, gspo = (selected(*line, name).source.arms[0] for name in ("dapo", "gspo"))
    assert (dapo.loss, gspo.loss, dapo.weight_format) == (DAPO, GSPO, "bf16")
    assert dapo.noise is not None


def test_each_setting_has_a_record_of_its_own():
    lines = [(), ("--aqn",), ("--seed", "1"), ("--until", "50"), ("--revision", "v1")]
    own = [selected(*words, line=("--model", "owner/model", "--data", "gsm8k")) for words in lines]
    assert len({run.target.name for run in own}) == len(lines)
    assert [run.source.scales[run.tier].revision for run in own][-2:] == ["main", "v1"]


@pytest.mark.parametrize("reward", [lambda completions: [1.0], partial(len), DAPO.__eq__])
def test_a_reward_that_no_module_s_file_has_as_a_function_is_refused(reward):
    with pytest.raises(ValueError, match=f"reward is {re.escape(repr(reward)[:9])}.*module's file"):
        repro.train("tiny", "generated", reward=reward)


def test_training_in_another_thread_is_refused_before_a_plan_is_printed(capsys):
    with ThreadPoolExecutor() as pool, pytest.raises(ValueError, match="needs the main thread"):
        pool.submit(repro.train, "tiny", "generated").result()
    assert not capsys.readouterr().out


def test_a_card_that_cannot_train_is_refused_rather_than_left_idle(monkeypatch):
    card = CudaDevice(name="T4", capability=(7, 5), memory_bytes=16 * 10**9)
    for module in ("repro.spec.tier", "repro.run.preflight"):
        monkeypatch.setattr(f"{module}.cuda_devices", lambda: (card,))
    with pytest.raises(ValueError, match=r"T4 with 7\.5; CUDA_VISIBLE_DEVICES="):
        selected()


@pytest.mark.parametrize(
    ("card", "ram", "flags", "words"),
    [
        (12, 99, "--format bf16", "has 12.0 GB; --set arm.weight_format=nvfp4 needs|which fits"),
        (8.65, 99, "", "arm.lora_rank=8 --set rollout.max_new_tokens=256|, which fits"),
        (8, 99, "--set arm.lora_rank=4", "rollout.max_new_tokens=128|a model of 3b would fit"),
        (0.5, 99, "--format bf16 --set arm.rounding.format=nvfp4", "no size of 135m"),
        (0, 16, "--format bf16 --set arm.training=full", "RAM|lora --set arm.weight_f|which fits"),
        (0, 16, "--ranks 2", "at least 24.1 GB of RAM|a model of 3b would fit"),
        (0, 4, "", "of RAM|--set arm.lora_rank=8 needs|a model of 1.5b would fit"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_would(
    card, ram, flags, words, monkeypatch, capsys
):
    for module in ("repro.run.preflight", "repro.door.own_run"):
        monkeypatch.setattr(f"{module}.host_bytes", lambda: ram * 10**9)
    if card:
        monkeypatch.setattr(Tier, "missing", lambda tier: None)
        device = CudaDevice(name="a card", capability=(8, 9), memory_bytes=int(card * 10**9))
        monkeypatch.setattr("repro.run.preflight.cuda_devices", lambda: (device,))
    assert main(f"train --model Qwen/Qwen2.5-7B-Instruct --data gsm8k {flags}".split()) == 2
    assert unsaid(capsys.readouterr().err, words) == []
