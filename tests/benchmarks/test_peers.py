"""The rows that peers are timed on, the table of their record, and both sides' update on a CPU."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers import __main__ as peers
from benchmarks.peers import ours, peer_update, table
from benchmarks.peers.step_rows import MODELS, Sizes, draw_lengths, draw_step, sizes_of
from repro.models.random_policy import shape_config

ROOT = Path(__file__).parents[2]


def test_spread_lengths_have_the_stated_mean_variation_and_cap() -> None:
    sizes = Sizes(most=900)
    drawn = [n for step in range(60) for n in draw_lengths("spread", step, 0, sizes)]
    assert len(drawn) == 60 * 128
    assert statistics.fmean(drawn) == pytest.approx(300, rel=0.02)
    assert statistics.stdev(drawn) / statistics.fmean(drawn) == pytest.approx(0.5, rel=0.04)
    assert (min(drawn) >= 1, max(drawn)) == (True, 900)


def test_equal_lengths_have_as_many_tokens_as_spread_ones() -> None:
    sizes = Sizes()
    for step in range(5):
        equal = draw_lengths("equal", step, 0, sizes)
        assert len(set(equal)) == 1
        assert sum(equal) == sum(draw_lengths("spread", step, 0, sizes))
    rows = draw_step("long", 0, 0, sizes_of("long", sizes), 152064)
    assert rows.prompts.shape == (16, 256)
    assert {len(completion) for completion in rows.completions} == {2048}


def test_the_peers_models_have_the_shapes_of_the_suite() -> None:
    for name in ("0.5b", "7b"):
        assert MODELS[name] == shape_config(f"qwen2.5-{name}")


def entry(way: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    return {
        "model": "7b", "lengths": "long", "way": way, "seconds": seconds,
        "median": statistics.median(seconds), "commit": "abcdef012345", "date": "2026-01-01",
        "weights": "random", "packages": {"torch": "2.11.0"}, **more,
    }  # fmt: skip


MADE_UP: dict[str, Any] = {
    "device": "A card",
    "driver": "1.2",
    "entries": [
        entry("peft", [15.0, 16.0, 17.0], micro_batch_rows=4, peak_bytes=2**30),
        entry("ours_bf16", [10.0, 10.0, 10.5], micro_batch_tokens=16384),
        entry("peft_trl", [9.0]),
        entry("peft_liger", [1.0])
        | {"failed": "not run: liger-kernel is not installed in the peers' environment"},
    ],
}


def test_the_table_has_ratios_bars_what_loses_and_what_was_not_run() -> None:
    lines = table.record_lines(MADE_UP)
    rows = {line.split(" | ")[2]: line for line in lines if line.startswith("| Qwen")}
    assert list(rows) == [table.LABELS[w] for w in ("ours_bf16", "peft", "peft_liger", "peft_trl")]
    assert (
        "16 (15 to 17) | 1.60 x |  | at least 1.6 x: met | 4 rows | 1.0 GiB"
        in rows["transformers + peft"]
    )
    assert "not run: liger-kernel is not installed" in rows["transformers + peft + Liger"]
    faster = next(line for line in lines if line.startswith("Faster than this project"))
    assert "TRL's fused head, Qwen2.5-7B, equal, 256 + 2,048: 0.90 times" in faster
    slower = MADE_UP | {"entries": [entry("ours_bf16", [10.0]), entry("peft", [15.0])]}
    assert "Bars missed: Qwen2.5-7B, equal, 256 + 2,048." in table.record_lines(slower)


def test_whole_steps_are_compared_by_the_tokens_that_they_sampled() -> None:
    def sampled(way: str, tokens: int) -> dict[str, Any]:
        parts = {"rollout_seconds": [4.0], "update_seconds": [6.0], "completion_tokens": [tokens]}
        return entry(way, [10.0], **parts) | {"lengths": "sampled"}

    entries = [sampled("ours_nvfp4", 4000), sampled("trl", 1000)]
    assert table.ratios(entries[1], entries) == {"ours_nvfp4": 4.0}
    assert "| 10 (10 to 10) | 4 | 6 | 1,000 | 10 |  | 4.00 x |" in "\n".join(
        table.record_lines(MADE_UP | {"entries": entries})
    )


def test_the_page_is_written_from_the_blessed_records() -> None:
    page = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    files = table.blessed_files(ROOT / "benchmarks")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    assert table.written_into(page, table.page_lines(records)) == page


def test_a_way_that_cannot_be_run_is_written_down_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--models tiny --lengths equal --ways peft --device nowhere --out {tmp_path}/p.json"
    monkeypatch.setattr(sys, "argv", ["peers", *flags.split(), "--steps", "1"])
    assert peers.main() == 0
    (written,) = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))["entries"]
    assert written["failed"].startswith("failed: RuntimeError: ")


def test_both_sides_see_the_same_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    folder, out = tmp_path / "model", tmp_path / "entries.jsonl"
    config = AutoConfig.for_model(**MODELS["tiny"])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    flags = "--model tiny --device cpu --dtype float32 --steps 2 --prompts 2 --group 2 --mean 9"
    for way, module in (("ours_bf16", ours), ("peft", peer_update)):
        given = f"{flags} --prompt-tokens 5 --way {way} --folder {folder} --out {out}"
        monkeypatch.setattr(sys, "argv", [way, *given.split()])
        module.main()
    packed, padded = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert (packed["way"], padded["way"]) == ("ours_bf16", "peft")
    assert packed["completion_tokens"] == padded["completion_tokens"]
    assert len(packed["seconds"]) == len(padded["seconds"]) == 2
    assert padded["micro_batch_rows"] in (1, 2, 4)
    assert packed["logprob"] == pytest.approx(padded["logprob"], abs=1e-5)
