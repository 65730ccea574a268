"""Whole steps of TRL's GRPOTrainer, by TRL or by Unsloth, completions sampled by vLLM or not.

    trl            LoRA on a bfloat16 base; vLLM in the same process, a second copy of the weights
    trl_alone      the same without vLLM, which nobody with a GPU runs
    unsloth        vLLM's weights are the trainer's; sequences packed; the adapter merged to sample
    unsloth_nf4    the same on bitsandbytes' NF4

16-bit LoRA of rank 32 on the seven projections, one update per rollout, no KL term, AdamW at a
constant rate. Everything else is the tool's own choice, but for the settings of the sweep. A step
is cut into `rollout` (weights or adapter handed over, its `sync`, and generation), `score` (the
rest of `_generate_and_score_completions`: rewards, and the correction's pass) and `update`, which
is all else.

Unsloth rewrites TRL's trainer when it is imported: never both in one process, and Unsloth first.
Unsloth's own defaults for `dapo` mask completions that were cut; here it has TRL's.
vLLM's tear-down can hang, so that the process ends without it.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import harness
from benchmarks.peers.harness import ALPHA, PROJECTIONS, RANK

_OF_TRL = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "vllm")
PACKAGES = (*_OF_TRL, "unsloth", "unsloth_zoo", "bitsandbytes", "xformers")
_LEARNING_RATE = 1e-4


class StepClock:
    """Notes the phases of each step of a trainer, and what it sampled; `watch` puts it on."""

    def __init__(self, asked: Namespace) -> None:
        self.asked, self.device = asked, torch.device(asked.device)
        self.steps: list[dict[str, float]] = []
        self.began, self.ended = 0.0, list[float]()
        self.chosen: dict[str, Any] = {}
        self._last, self._tokens = 0.0, 0
        self._rewards: list[float] = []
        self._spent: dict[str, float] = defaultdict(float)

    def reward(self, completions: list[Any], **columns: Any) -> list[float]:
        """Pay completions as the workload does."""
        paid: list[float] = getattr(harness, self.asked.reward)(completions, **columns)
        self._rewards += paid
        return paid

    def watch(self, trainer: Any) -> None:
        """Note the parts of a trainer's steps, and what it chose."""
        from transformers import TrainerCallback

        args = trainer.args
        corrects = bool(args.use_vllm and args.vllm_importance_sampling_correction)
        self.chosen = {"micro_batch_rows": args.per_device_train_batch_size, "correction": corrects}
        engine = getattr(trainer, "vllm_generation", None)
        if engine is not None:
            self._add_seconds(engine, "sync_weights", "sync")
            self._add_seconds(engine, "generate", "generate")
        elif getattr(trainer, "llm", None) is not None:
            self._add_seconds(trainer.llm, "generate", "generate")
        else:
            self._add_seconds(trainer, "_generate_single_turn", "generate")
        self._add_seconds(trainer, "_generate_and_score_completions", "whole")
        hand: Any = TrainerCallback()
        hand.on_step_begin = lambda *unused, **also: self.step_began()
        hand.on_step_end = lambda *unused, **also: self.step_ended()
        trainer.add_callback(hand)

    def _add_seconds(self, of: Any, name: str, part: str) -> None:
        """Let the seconds of a method be added to a part, and the tokens of what it completes."""
        inner = getattr(of, name)

        def outer(*given: Any, **named: Any) -> Any:
            began = harness.now(self.device)
            out = inner(*given, **named)
            self._spent[part] += harness.now(self.device) - began
            self._tokens += int(out["completion_mask"].sum()) if part == "whole" else 0
            return out

        setattr(of, name, outer)

    def step_began(self) -> None:
        """Start before the first step."""
        if not self.steps:
            self._last, self.began = harness.now(self.device), time.time()

    def step_ended(self) -> None:
        """Note a step, and write the entry of the steps so far; the clock stands meanwhile."""
        total = harness.now(self.device) - self._last
        self.ended.append(time.time())
        whole, sync, generate = (self._spent[part] for part in ("whole", "sync", "generate"))
        step = {
            "total": total,
            "rollout": sync + generate,
            "sync": sync,
            "score": whole - sync - generate,
            "update": total - whole,
            "tokens": self._tokens,
            "reward": statistics.fmean(self._rewards),
        }
        self.steps.append(step)
        shown = ", ".join(f"{name} {value:.3g}" for name, value in step.items())
        harness.say(f"{self.asked.way}: step {len(self.steps)}: {shown}")
        self._spent, self._tokens, self._rewards = defaultdict(float), 0, []
        if len(self.steps) > harness.WARM_UP:
            entry = harness.whole_steps(self.steps, self.began, self.ended)
            harness.write_entry(self.asked, PACKAGES, entry | self.chosen)
        self._last = harness.now(self.device)


def grpo_settings(asked: Namespace) -> dict[str, Any]:
    """Return what both tools' GRPOConfig is given."""
    total, settings = asked.prompts * asked.group, asked.settings
    rows = min(total, settings["rows"])
    by_vllm = asked.way != "trl_alone"
    chosen: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": total // rows,
        "num_generations": asked.group,
        "max_completion_length": asked.new_tokens,
        "max_steps": asked.steps,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": _LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "beta": 0.0,
        "loss_type": "dapo",
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": asked.seed,
        "bf16": asked.dtype == "bfloat16",
        "use_cpu": asked.device == "cpu",
        "use_vllm": by_vllm,
    }
    if by_vllm:
        chosen["vllm_mode"] = "colocate"
        if asked.terms != "as shipped":
            chosen["vllm_importance_sampling_correction"] = False
    if asked.ignore_end:
        longest = {"ignore_eos": True} if by_vllm else {"min_new_tokens": asked.new_tokens}
        chosen["generation_kwargs"] = longest
    return chosen


def trl_trainer(asked: Namespace, clock: StepClock) -> Any:
    """Return TRL's trainer."""
    from trl import GRPOConfig, GRPOTrainer

    settings, chosen = asked.settings, grpo_settings(asked)
    if chosen["use_vllm"]:
        chosen |= {
            "vllm_gpu_memory_utilization": settings["memory"],
            "vllm_enable_sleep_mode": settings.get("sleep", False),
            "vllm_max_model_length": asked.model_tokens,
        }
    config = GRPOConfig(
        **chosen,
        gradient_checkpointing=settings.get("checkpointing", False),
        model_init_kwargs={"dtype": asked.dtype, "attn_implementation": "sdpa"},
    )
    return GRPOTrainer(
        model=asked.folder,
        reward_funcs=clock.reward,
        args=config,
        train_dataset=_dataset(asked),
        peft_config=harness.adapter_settings(),
    )


def unsloth_trainer(asked: Namespace, clock: StepClock) -> Any:
    """Return Unsloth's trainer, which is TRL's, rewritten."""
    settings = asked.settings
    if settings.get("sleep"):
        os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
    _load_cuda_12()
    from unsloth import FastLanguageModel  # isort: skip  # first, for it rewrites the others
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=asked.folder,
        max_seq_length=asked.model_tokens,
        load_in_4bit=asked.way == "unsloth_nf4",
        dtype=None,
        fast_inference=True,
        max_lora_rank=RANK,
        gpu_memory_utilization=settings["memory"],
        max_num_seqs=asked.prompts * asked.group,
        max_num_batched_tokens=8192,
        local_files_only=True,
        **({"unsloth_vllm_standby": True} if settings.get("sleep") else {}),
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0,
        bias="none",
        target_modules=list(PROJECTIONS),
        use_gradient_checkpointing=settings["checkpointing"],
        random_state=asked.seed,
    )
    config = GRPOConfig(
        **grpo_settings(asked),
        optim="adamw_torch_fused",
        weight_decay=0.0,
        mask_truncated_completions=False,
        epsilon_high=0.2,
    )
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[clock.reward],
        args=config,
        train_dataset=_dataset(asked),
    )


def _load_cuda_12() -> None:
    """Load what xformers' wheel, built for CUDA 12, needs beside torch's CUDA 13, if it is here."""
    for folder in sys.path:
        library = Path(folder) / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12"
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return


def _dataset(asked: Namespace) -> Any:
    from datasets import Dataset

    return Dataset.from_list(harness.json_lines(asked.questions))


def main() -> int:
    """Measure the whole steps of a row; return the exit status."""
    asked = harness.requested()
    clock = StepClock(asked)
    torch.set_num_threads(asked.settings.get("threads", torch.get_num_threads()))
    build = unsloth_trainer if asked.way.startswith("unsloth") else trl_trainer
    try:
        trainer = build(asked, clock)
        clock.watch(trainer)
        trainer.train()
    except Exception:  # noqa: BLE001 - the last line is the row's reason
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
