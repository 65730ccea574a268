"""Settings by name, and command lines that are refused in a sentence before anything starts."""

import json
import subprocess
import sys

import pytest

from repro.__main__ import build_parser, main
from repro.run.select import changes_of, check_line, select, selections_of
from repro.run.several_ranks.room import devices_to_fill, planned_workers, require_workers
from repro.spec.settings import parse_settings, with_settings
from repro.spec.tier import Tier
from repro.targets import find

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
        ("--workers 0", "--workers 0: needs 1 or more"),
        ("--limit 0", "--limit 0: needs 1 or more"),
        ("--stall-timeout 0", "--stall-timeout 0: needs more than 0"),
        ("--revision main", "--revision main: needs a hub name (owner/model) as --model"),
        ("--model . --revision main", "--revision main: needs a hub name"),
        ("--stop-idle 0", "--stop-idle 0: needs 1 or more"),
        ("--tir smoke", "run: there is no argument --tir (did you mean --tier?)"),
        ("--seeds=-1,3", "seed -1 is negative; needs 0 or more"),
        ("--seeds 3,3", "seeds repeat 3"),
        ("--seeds all", "needs a number such as 5, or 0,3,4"),
        ("--arms bf16,bf16", "bf16 is named twice"),
        ("--model=", "--model '' names no checkpoint"),
        ("--data=", "--data '' names no problems"),
        ("--set steps=0", "steps is 0; it must be 1 or more"),
        ("--set data.source=gsm8", "did you mean gsm8k?"),
        ("--set data.levels=[99]", "99"),
        ("--set arm.noise=nonsense", "arm.noise is 'nonsense'; it must be a table of values"),
        ("--set arm.noise.sigma_start=0.0001", "needs sigma_end <= sigma_start"),
        ("--set optimizer.max_grad_norm=Infinity", "optimizer.max_grad_norm is inf; it must be"),
        ("--set group_size=1", "group_size is 1; a reward is compared with the others"),
        ("--set max_prompt_tokens=50", "max_prompt_tokens there is 50"),
        ("--set rollout.max_new_tokens=3000", "2048 positions, so it must be 1973 or less"),
        (
            "--set prompts_per_rollout=3000",
            "there are 2000 training problems",
        ),
        ("--set checkpoint=nowhere", "checkpoint is 'nowhere'; it must be a folder that is here"),
        ("--set prompt_template=papers", "prompt template 'papers' is unknown"),
        ("--set optimizer.name=adamw_8bit --arms bf16_lora", "the smoke tier needs adamw"),
        ("--set data.train_problems=99999999999", "it must be 1000000 or less"),
        ("--set arm.noise.form=as_describd", "it must be one of as_described"),
        ("--reward nomodule:f", "reward module nomodule cannot be imported"),
        ("--log tensorbord", "did you mean tensorboard?"),
        ("--data nosuch", "there is no data source 'nosuch'"),
        ("--devices 8", "runs of the smoke tier do not spread over devices; needs 1"),
        ("--arms=", "--arms '' names no arm"),
        ("--arms bf16_lra", "did you mean bf16_lora?"),
        ("--tier papper", "did you mean paper?"),
        ("--set stepz=3", "did you mean steps?"),
        ("--set lora_rank=16", "there is no setting 'lora_rank' of the scale; arm.lora_rank is"),
        ("--set steps=few", "steps is 'few'; it must be a whole number"),
        ("--set optimizer.name=sgd", "it must be one of adamw, adamw_8bit"),
        ("--set steps", "needs key=value"),
        ("--set evaluation.every=5", "needs 1 or more problems held out"),
        ("--model ./nowhere", "there is no such folder or file, and a hub name is owner/model"),
        ("--config nothing.toml", "--config nothing.toml"),
        ("--config settings.yaml", "needs a .toml or .json file"),
    ],
)
def test_a_bad_command_line_is_a_sentence_and_starts_nothing(line, words, tmp_path, capsys):
    tier = [] if "--tier" in line else ["--tier", "smoke"]
    runs = tmp_path / "runs"
    assert main(["run", "table1", *tier, *line.split(), "--runs", str(runs)]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert len(said.err.splitlines()) == 1
    assert not runs.exists()
    if "--set" in line or "--arms" in line:
        assert main(["plan", "table1", *tier, *line.split(), "--runs", str(runs)]) == 2
        assert capsys.readouterr().err == said.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "run table1 --tier smoke --model ./no --template no --seeds x --steps 0 --reward no:f "
            "--data nosuch --arms bf,nf --set stepz=3 --set optimizer.name=sgd --set arm.nois=1",
            "./no:|'no'|--seeds x|--steps 0|module no|'nosuch'|'bf'|'nf'|stepz|'sgd'|arm.nois",
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
    assert [word for word in words.split("|") if word not in ended.stderr] == []


def test_an_unknown_target_gets_the_nearest_name(capsys):
    assert main(["run", "tabel1"]) == 2
    assert "did you mean table1?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rnu table1", "COMMAND 'rnu' (did you mean run?): needs one of list, train, plan, run"),
        ("run", "run: the following arguments are required: TARGET"),
        ("run figure1", "figure1: nothing of its own"),
        ("check --jsn", "check: there is no argument --jsn (did you mean --json?)"),
        ("check table1 --runs {file}", "{file} is a file; a folder of records is needed there"),
        ("compare blessed {file}", "{file} is a file; a folder of records is needed there"),
        ("bless", "name the targets to bless"),
        ("report --readme {file} table1", "--readme writes the blocks of one file from blessed"),
        ("report --readme {file} table1 table3 --tier smoke", "; leave out table1, table3, --tier"),
        ("report --readme {file} --runs {folder}", "from blessed records; leave out --runs"),
        ("report --set steps=3 --limit 5", "--set, --limit: name the targets that change"),
        ("report --html {folder}", "{folder} cannot be used: Is a directory"),
        ("plan memory --model 33b", "there is no model size '33b'"),
        ("quantize tiny {folder}/out --format nvfp", "did you mean nvfp4?"),
        ("quantize {folder}/nothing {folder}/out", "it is neither a folder"),
        ("quantize tiny {file}", "exists; a checkpoint is never written over another"),
        ("export {folder} {folder}/out", "holds no adapter_config.json"),
        ("evaluate tiny", "evaluate: the following arguments are required: --data"),
        ("evaluate tiny --data generatd", "did you mean generated?"),
        ("evaluate --data generated", "name a checkpoint, or an adapter"),
        ("evaluate tiny --data generated --samples 0", "--samples 0: needs 1 or more"),
        ("evaluate {folder} --data generated --limit 2", "holds no config.json"),
        ("evaluate tiny --data generated", "generated problems have no end; give --limit N"),
        ("dose --model {folder}/nothing", "it is neither a folder"),
        ("dose --model {folder}", "holds no config.json"),
        ("dose --model tiny --formats ,", "--formats ,: needs nvfp4"),
        ("dose --model tiny --sigmas inf", "--sigmas inf: needs numbers above 0"),
        ("dose --model tiny --prompts -3", "--prompts -3: needs 0 or more"),
        (
            "dose --model tiny --device gpu",
            "--device 'gpu' (did you mean cpu?): needs one of cpu, cuda",
        ),
        ("dose --model tiny --device cuda", "torch finds no CUDA device"),
        ("quantize tiny {folder}/out --device cuda", "torch finds no CUDA device"),
    ],
)
def test_other_commands_refuse_in_a_sentence_too(line, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file, folder = tmp_path / "a file", tmp_path / "a folder"
    file.write_text("words")
    folder.mkdir()
    places = {"file": str(file), "folder": str(folder)}
    assert main([word.format(**places) for word in line.split()]) == 2
    said = capsys.readouterr()
    assert words.format(**places) in said.err + said.out.replace("\n", " ")
    assert "Traceback" not in said.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a file", "a folder"]


def test_a_run_of_a_real_checkpoint_takes_a_device_for_itself():
    require_workers(Tier.PAPER, 2, 2)
    with pytest.raises(ValueError, match="takes a device for itself, out of 1; needs at most 1"):
        require_workers(Tier.PAPER, 8, 1)
    with pytest.raises(ValueError, match="this machine shows 0 devices"):
        devices_to_fill(Tier.MINI, "8")


def test_a_plan_is_of_as_many_devices_as_are_named_here_or_elsewhere():
    planned = [planned_workers(Tier.MINI, named) for named in ("2", "0,1,2", None)]
    assert planned == [2, 3, 1]
    assert planned_workers(Tier.SYSTEMS, None) == planned_workers(Tier.SMOKE, "1") == 1
    for named in ("0", ","):
        with pytest.raises(ValueError, match="needs a number such as 2, or 0,1"):
            planned_workers(Tier.MINI, named)
    with pytest.raises(ValueError, match="do not spread over devices"):
        planned_workers(Tier.SYSTEMS, "2")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("table6 --tier systems --workers 2", "--workers 2: measurements on one device run one at"),
        ("table6 --tier systems --workers 1 --devices 2", "do not spread over devices; needs 1"),
        ("table1 --tier paper --devices 2 --workers 3", "takes a device for itself, out of 2;"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--show-config"]])
def test_a_plan_refuses_the_workers_that_its_runs_would(line, words, flags, tmp_path, capsys):
    assert main(["plan", *line.split(), *flags, "--runs", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""
    assert not (tmp_path / "runs").exists()
    assert planned_workers(Tier.PAPER, "2", 2) == planned_workers(Tier.SMOKE, None, 2) == 2


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
    assert selection.target.records_of == selection.source.name


def test_settings_that_change_nothing_leave_the_target_its_own():
    assert selected("table1", "--tier", "smoke", "--set", "steps=30").source is find("table1")


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
        return changes_of(build_parser().parse_args(["plan", "table1", *line])).settings

    assert settings("--model", "owner/model") == {"checkpoint": "owner/model", "revision": "main"}
    assert settings("--model", "owner/model", "--revision", "v1") == {
        "checkpoint": "owner/model",
        "revision": "v1",
    }
    assert settings("--model", str(tmp_path)) == {"checkpoint": str(tmp_path), "revision": ""}
    # The commit that the targets pin, not whatever the branch holds by then.
    named = "Qwen/Qwen2.5-7B-Instruct"
    pinned = find("table1").scales[Tier.PAPER].revision
    assert settings("--model", named) == {"checkpoint": named, "revision": pinned}


def test_values_are_read_by_the_type_of_their_field():
    changed = with_settings(
        SMOKE,
        parse_settings(
            [
                "seeds=[3, 4]",
                "optimizer.learning_rates.full=1",
                "data.levels=[1]",
                "checkpoint=tiny",
                'test_sets=[{"name": "hard", "data": {"source": "gsm8k"}}]',
            ]
        ),
    )
    assert changed.seeds == (3, 4)
    assert changed.optimizer.learning_rates.full == 1.0
    assert changed.data.levels == (1,)
    assert changed.test_sets[0].data.source == "gsm8k"
    with pytest.raises(ValueError, match="seeds is 3; it must be a list"):
        with_settings(SMOKE, parse_settings(["seeds=3"]))


def test_without_a_tier_the_smallest_is_taken():
    assert select(["table1"])[0].tier is Tier.SMOKE
