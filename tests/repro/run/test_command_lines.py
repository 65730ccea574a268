"""Settings by name, and command lines that are refused in a sentence before anything starts."""

import json
import subprocess
import sys

import pytest

from repro.__main__ import build_parser, main
from repro.run.select import check_line, select, selections_of
from repro.run.several_ranks.room import devices_to_fill, require_workers
from repro.spec.settings import parse_settings, with_settings
from repro.spec.tier import Tier
from repro.targets import find
from tests.said import unsaid

SMOKE = find("table1").scales[Tier.SMOKE]


def selected(*line):
    (selection,) = selections_of(build_parser().parse_args(["plan", *line]))
    return selection


def test_run_ends_with_the_line_that_judges_what_it_did():
    line = ["table1", "--tier", "smoke", "--set", "steps=4", "--set", "arm.lora_rank=8"]
    args = build_parser().parse_args(["run", *line, "--runs", "a folder", "--seeds", "1"])
    assert check_line(args) == (
        "python -m repro check table1 --tier smoke --set steps=4 --set arm.lora_rank=8 "
        "--runs 'a folder'"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--workers 0", "--workers 0|1"),
        ("--stall-timeout 0", "--stall-timeout 0"),
        ("--revision main", "--revision main|owner/model|--model"),
        ("--stop-idle 0", "--stop-idle 0|1"),
        ("--tir smoke", "--tir|mean --tier?"),
        ("--seeds=-1,3", "seed -1|0"),
        ("--seeds 3,3", "seeds repeat 3"),
        ("--seeds all", "--seeds all|5|0,3,4"),
        ("--seeds \u0663", "--seeds \u0663|5|0,3,4"),
        ("--steps=1_0", "--steps|'1_0'|such as 8"),
        ("--arms bf16,bf16", "bf16 |twice"),
        ("--model=", "--model|''"),
        ("--set data.source=gsm8", "mean gsm8k?"),
        ("--set data.levels=[99]", "level [99]"),
        ("--set arm.noise=nonsense", "arm.noise is 'nonsense'|table"),
        ("--set arm.noise.sigma_start=0.0001", "sigma_end <= sigma_start"),
        ("--set max_prompt_tokens=50", "max_prompt_tokens|50"),
        ("--set rollout.max_new_tokens=3000", "2048 positions|1973"),
        ("--set prompts_per_rollout=3000", "2000 training problems"),
        ("--set checkpoint=nowhere", "checkpoint is 'nowhere'|folder"),
        ("--set prompt_template=papers", "template 'papers'"),
        ("--set optimizer.name=adamw_8bit --arms bf16_lora", "smoke tier|adamw"),
        ("--set data.train_problems=99999999999", "1000000"),
        ("--set arm.noise.form=as_describd", "arm.noise.form|as_described"),
        ("--log tensorbord", "mean tensorboard?"),
        ("--log ,", "--log "),
        ("--devices 8", "smoke tier|devices|1"),
        ("--arms=,", "--arms ','"),
        ("--arms bf16_lra", "mean bf16_lora?"),
        ("--set lora_rank=16", "'lora_rank'|arm.lora_rank"),
        ("--set steps=few", "steps is 'few'|whole number"),
        ("--set steps", "steps|key=value"),
        ('--set optimizer.beta1=0.5 --set optimizer={"beta2":0.5}', "given"),
        ('--set arm={"lora_rank":4,"lora_rank":5}', "given"),
        ("--set evaluation.every=5", "evaluation.every|held out"),
        ("--config nothing.toml", "--config nothing.toml"),
        ("--config settings.yaml", "settings.yaml|.toml|.json"),
    ],
)
def test_a_bad_command_line_is_a_sentence_and_starts_nothing(line, words, tmp_path, capsys):
    tier = [] if "--tier" in line else ["--tier", "smoke"]
    runs = tmp_path / "runs"
    assert main(["run", "table1", *tier, *line.split(), "--runs", str(runs)]) == 2
    said = capsys.readouterr()
    assert unsaid(said.err, words) == []
    assert len(said.err.splitlines()) == 1
    assert not runs.exists()
    if "--set" in line or "--arms" in line:
        assert main(["plan", "table1", *tier, *line.split(), "--runs", str(runs)]) == 2
        assert capsys.readouterr().err == said.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "run table1 --tier smoke --model ./no --seeds x --steps 0 --arms bf,nf "
            "--set stepz=3 --set optimizer.name=sgd --set arm.nois=1",
            "./no is|owner/model|--seeds x|--steps 0|'bf'|'nf'|mean steps?|'sgd'|adamw, adamw_8bit|"
            "arm.nois",
        ),
        ("plan tabel1 --tier smok --limit 0", "mean table1?|mean smoke?|--limit 0"),
        ("quantize ./no {folder}", "./no is|{folder} exists"),
        (
            "export ./no {folder} --base ./nor --as merged",
            "./no holds|./nor is|as merged|{folder} exists",
        ),
        ("evaluate ./no --data gsm9k,generated --at x", "./no is|'gsm9k'|give --limit N|--at x"),
        ("evaluate {folder} --data gsm9k", "{folder} holds no config.json|'gsm9k'"),
        ("dose --model ./no --formats int3 --sigmas 0", "./no is|int3|--sigmas 0"),
    ],
)
def test_all_that_a_line_has_wrong_is_said_at_once_without_torch(line, words, tmp_path):
    main_alone = (
        "import sys; from repro.__main__ import main; status = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(status)"
    )
    words = words.format(folder=tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", main_alone, *line.format(folder=tmp_path).split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "False\n")
    assert unsaid(ended.stderr, words) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rnu table1", "'rnu'|mean run?|list, train, plan, memory, run"),
        ("run", "run: |required: TARGET"),
        ("run figure1", "figure1: "),
        ("run table6 --tier systems --workers 2 --runs {folder}/out", "--workers 2"),
        ("run table6 --tier systems --workers 1 --devices 2 --runs {folder}/out", "devices|1"),
        ("check", "name a target"),
        ("check table6 --blessed --table table9", "--table table9"),
        ("check table6 --blessed --tier mini", "table6 at the mini tier"),
        ("check table6 --blessed --tier large", "tier 'large'"),
        ("check table6 --blessed --tier systems --runs elsewhere", "leave out --runs"),
        ("check table1 --tier mini --runs {folder}", "no scale at the mini tier"),
        ("report table1_coder_0_5b --tier smoke --runs {folder}", "scale at the smoke tier"),
        ("bless untrained_coder_0_5b --tier systems --runs {folder}", "systems tier is not"),
        ("check --jsn", "--jsn|mean --json?"),
        ("check table1 --runs {file}", "{file} is no folder"),
        ("compare blessed {file}", "{file} is no folder"),
        ("bless", "targets"),
        ("report --readme {file} table1", "--readme|blessed"),
        ("report --readme {file} table1 table3 --tier smoke", "leave out table1, table3, --tier"),
        ("report --readme {file} --runs {folder}", "blessed|leave out --runs"),
        ("report --set steps=3 --limit 5", "--set, --limit: |targets"),
        ("report --html {folder}", "{folder} |Is a directory"),
        ("report --html {folder}/out --out x.md", "leave out --out"),
        ("plan table1 --tier smoke --seeds 99999999999", "--seeds is 99999999999|at most 10000"),
        ("memory --model 33b", "size '33b'"),
        ("memory --model 72b --budget 24GB", "does not fit 24.00 GB"),
        ("memory --model 7b --budget " + "9" * 400, "--budget 99|161 letters left out"),
        (f"plan {'y' * 5000}", "'yyy|yyy'|4763 letters left out"),
        ("memory --model 7b --group 9999999999", "group is 9999999999|at most 1e+09"),
        ("quantize tiny {folder}/out --format nvfp", "mean nvfp4?"),
        ("quantize {folder}/nothing {folder}/out", "{folder}/nothing"),
        ("quantize tiny {file}", "{file} exists"),
        ("quantize {empty} {folder}/out", "argument SOURCE|''"),
        ("quantize {folder} {folder}/out", "{folder}/out lies in {folder}"),
        ("export {folder} {folder}/out", "holds no adapter_config.json"),
        ("evaluate tiny", "evaluate: |required: --data"),
        ("evaluate tiny --data generatd", "mean generated?"),
        ("evaluate --data generated", "checkpoint|adapter"),
        ("evaluate tiny --data generated --samples 0", "--samples 0|1"),
        ("dose --model {folder}", "holds no config.json"),
        ("dose --model tiny --formats ,", "--formats ,|nvfp4"),
        ("dose --model tiny --sigmas inf", "--sigmas inf|0"),
        ("dose --model tiny --sigmas \u0661", "--sigmas \u0661|0"),
        ("dose --model tiny --prompts 0", "--prompts 0|1"),
        ("dose --model tiny --new-tokens 0", "--new-tokens 0|1"),
        ("dose --model tiny --device gpu", "--device 'gpu'|mean cpu?|cpu, cuda"),
        ("dose --model tiny --device cuda", "no CUDA device"),
        ("quantize tiny {folder}/out --device cuda", "no CUDA device"),
    ],
)
def test_other_commands_refuse_in_a_sentence_too(line, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file, folder = tmp_path / "a file", tmp_path / "a folder"
    file.write_text("words")
    folder.mkdir()
    places = {"file": str(file), "folder": str(folder), "empty": ""}
    assert main([word.format(**places) for word in line.split()]) == 2
    said = capsys.readouterr()
    assert unsaid(said.err + said.out.replace("\n", " "), words.format(**places)) == []
    assert "Traceback" not in said.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a file", "a folder"]


def test_a_run_of_a_real_checkpoint_takes_a_device_for_itself():
    require_workers(Tier.PAPER, 2, 2)
    with pytest.raises(ValueError, match=r"device .*1"):
        require_workers(Tier.PAPER, 8, 1)
    with pytest.raises(ValueError, match="0 devices"):
        devices_to_fill(Tier.MINI, "8")


def test_settings_change_scale_and_arms_under_another_name():
    selection = selected(
        "table1", "--tier", "smoke", "--set", "steps=3", "--set", "optimizer.beta1=0.5",
        "--set", "arm.lora_rank=4", "--set", "arm.noise.num_stages=4",
    )  # fmt: skip
    target, scale = selection.source, selection.source.scales[Tier.SMOKE]
    assert target.name.startswith("table1_with_steps_3_optimizer_beta1_0_5")
    assert (scale.steps, scale.optimizer.beta1) == (3, 0.5)
    assert {arm.lora_rank for arm in target.arms} == {4}
    assert target.arm("nvfp4_lora_aqn").noise.num_stages == 4
    assert target.arm("nvfp4_lora").noise is None
    assert target.paper_file == ""
    again = selected("table1", "--tier", "smoke", "--set", "steps=4")
    assert again.source.name != target.name


def test_a_figure_reads_the_changed_runs_and_is_renamed_with_them():
    selection = selected("figure4", "--tier", "smoke", "--set", "steps=3")
    assert selection.source.name.startswith("table1_with_steps_3")
    assert selection.target.name.startswith("figure4_with_steps_3")
    assert selection.target.records_of is selection.source


def test_a_limit_holds_for_every_set_of_problems():
    scale = selected("table2", "--tier", "paper", "--limit", "5").source.scales[Tier.PAPER]
    assert [item.data.test_problems for item in scale.test_sets] == [5, 5, 5, 5]
    mini = selected("table1_1_5b", "--tier", "mini", "--limit", "5").source.scales[Tier.MINI]
    assert (mini.data.test_problems, mini.data.development_problems) == (5, 5)


@pytest.mark.parametrize(("name", "tier"), [("table1", "smoke"), ("table2", "paper")])
def test_a_printed_configuration_can_be_given_back(name, tier, tmp_path, capsys):
    assert main(["plan", name, "--tier", tier, "--show-config"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "scale.json"
    path.write_text(text)
    assert selected(name, "--tier", tier, "--config", str(path)).source is find(name)
    path.write_text(json.dumps(json.loads(text) | {"steps": 70}))
    scale = selected(name, "--tier", tier, "--config", str(path)).source.scales[Tier(tier)]
    assert scale.steps == 70


def test_a_command_line_goes_before_a_file(tmp_path):
    path = tmp_path / "scale.toml"
    path.write_text("steps = 7\n[optimizer]\nbeta1 = 0.5\nbeta2 = 0.6\n")
    line = ["table1", "--tier", "smoke", "--config", str(path), "--set", "optimizer.beta2=0.7"]
    scale = selected(*line).source.scales[Tier.SMOKE]
    assert (scale.steps, scale.optimizer.beta1, scale.optimizer.beta2) == (7, 0.5, 0.7)


def test_a_hub_name_brings_its_revision_and_a_folder_none(tmp_path):
    def settings(*line):
        scale = selected("table1", "--tier", "smoke", *line).source.scales[Tier.SMOKE]
        return scale.checkpoint, scale.revision

    assert settings("--model", "owner/model") == ("owner/model", "main")
    assert settings("--model", "owner/model", "--revision", "v1") == ("owner/model", "v1")
    assert settings("--model", str(tmp_path)) == (str(tmp_path), "")
    # The commit that the targets pin, not whatever the branch holds by then.
    named = "Qwen/Qwen2.5-7B-Instruct"
    assert settings("--model", named) == (named, find("table1").scales[Tier.PAPER].revision)


def test_values_are_read_by_the_type_of_their_field():
    texts = ["seeds=[3, 4]", "optimizer.learning_rates.full=1", "data.levels=[1]"]
    texts += ["checkpoint=tiny", 'test_sets=[{"name": "hard", "data": {"source": "gsm8k"}}]']
    changed = with_settings(SMOKE, parse_settings(texts))
    assert changed.seeds == (3, 4)
    assert changed.optimizer.learning_rates.full == 1.0
    assert changed.data.levels == (1,)
    assert changed.test_sets[0].data.source == "gsm8k"
    with pytest.raises(ValueError, match="seeds is 3"):
        with_settings(SMOKE, parse_settings(["seeds=3"]))


def test_each_unknown_setting_is_named_and_the_known_ones_of_its_table_once():
    lines = ["evaluation.a=1", "evaluation.b=2", "seeds=3"]
    with pytest.raises(ValueError, match=r"'evaluation\.a'.*'evaluation\.b'.*seeds is 3") as caught:
        with_settings(SMOKE, parse_settings(lines))
    assert str(caught.value).count("evaluation.every") == 1


def test_without_a_tier_the_smallest_is_taken():
    assert select(["table1"])[0].tier is Tier.SMOKE
