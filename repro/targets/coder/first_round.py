r"""Real checkpoints of the paper's family: Qwen2.5-Coder-Instruct, 0.5B and 1.5B, on GSM8K.

The question is the paper's first chain: does four-bit rounding raise entropy, does that speed
learning up, does it raise the end, and does AQN add to it? Each seed has an order of channels of
its own, so seeds are draws of the rounding as well. The dose is measured before anything is
trained (`dose_coder_*`), and multiples of NVFP4's error reach the paper's.

The checkpoints are the publisher's GGUF files, whose weights are rounded already (0.5B: all but
twelve of 170 matrices finer than four bits, Q5_0, Q6_K and Q8_0; 1.5B: Q4_K and Q6_K): every arm
starts from the 16-bit copy of those, and a record names file and copy by digest. Noise of the
file's own step moves the copy by .32 of NVFP4's KL at 0.5B, by .68 at 1.5B (docs/learning.md).

What the paper leaves open, or is not for models of this size, is set here:

* prompt: asked for `\boxed{}`, an answer form that the model has. By the paper's own template it
  earns reward in 2 % of completions and learns the format alone: targets of their own
  (`table1_coder_0_5b_tags`).
* reward: 1 for a right answer in a completion that ended by itself, else 0; nothing for the format.
* rate: one for 16 and four bits. Table 4 gives four bits twice LoRA's; an arm tells that apart.
* schedule: constant after ten steps, so that a run's length does not decide its rate.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm, NoiseConfig, PlantedRounding
from repro.spec.claim import Claim, Dose, Effect
from repro.spec.config import DataConfig, LearningRates, OptimizerConfig, SamplingConfig, TrainScale
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import mini, paper_effects, paper_tier, table1
from repro.targets.table_rows import Statement, gains, metric, variant

# Publisher's file on the hub, and the SHA-256 of its bytes.
_FILES = {
    "0_5b": (
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "sha256:1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "1_5b": (
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "sha256:cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
_NEW_TOKENS = 512
_SEEDS = tuple(range(8))
_TUNING_SEED = 100
# Draws of the rounding, where nothing is trained.
_DRAWS = _SEEDS[:6]
# Samples of an attempt for which pass@k is estimated, from as many as the last.
_KS = (1, 4, 16, 64, 256)


def end_effect(paper: float, place: str) -> Effect:
    """Return the paper's difference of final accuracies, in points."""
    return Effect(
        paper=paper,
        smallest=1.35,
        measure="units",
        place=f"Table 1, 7B: {place}",
        because="chosen, as the rule for stopping: half of what QeRL gains over 16-bit LoRA",
    )


def finished(arm: Arm, **changes: object) -> Arm:
    """Return an arm paid for right answers in finished completions."""
    return dataclasses.replace(arm, reward="finished", **changes)  # type: ignore[arg-type]


BF16, NVFP4, AQN = map(finished, (table1.BF16_LORA, table1.NVFP4_LORA, table1.NVFP4_LORA_AQN))
NF4, MXFP4, FULL = map(finished, (table1.NF4_LORA, table1.MXFP4_LORA, table1.BF16_FULL))
HALF, DOUBLE = (
    finished(
        BF16,
        name=f"nvfp4_{name}",
        label=f"{words} NVFP4's rounding, LoRA",
        rounding=PlantedRounding(format="nvfp4", factor=factor),
    )
    for name, words, factor in (("half", "half", 0.5), ("x2", "twice", 2.0))
)
# From five times the paper's 1e-2 to five times its 5e-4 (Table 4).
STRONG_AQN = finished(
    NVFP4,
    name="nvfp4_lora_aqn_x5",
    label="NVFP4, LoRA + five times AQN",
    noise=NoiseConfig(sigma_start=5e-2, sigma_end=2.5e-3),
)
TWICE_RATE = variant(BF16, "twice_rate", " at twice the rate", learning_rate_factor=2)


def _at(temperature: float, arm: Arm) -> Arm:
    name, label = f"t{round(100 * temperature)}", f" at temperature {temperature:g}"
    return variant(arm, name, label, temperature_factor=temperature)


COOL, WARM = _at(0.9, BF16), _at(1.1, BF16)
_MEASURED = finished(BF16, name="bf16", label="BF16")
_TEMPERED = tuple(_at(temperature, _MEASURED) for temperature in (0.9, 1.1, 1.2))
_TRAINED = (BF16, NVFP4, AQN, HALF, DOUBLE, STRONG_AQN, WARM, COOL, TWICE_RATE, NF4, MXFP4, FULL)


def scale_of(size: str) -> TrainScale:
    """Return the first round's scale of a size, `0_5b` or `1_5b`."""
    checkpoint, revision = _FILES[size]
    return dataclasses.replace(
        mini.SWEEP_1_5B,
        checkpoint=checkpoint,
        revision=revision,
        data=DataConfig(source="gsm8k", development_problems=200),
        steps=200,
        rollout=SamplingConfig(temperature=1.0, max_new_tokens=_NEW_TOKENS),
        optimizer=OptimizerConfig(
            learning_rates=LearningRates(lora_16bit=1e-4, lora_4bit=1e-4, full=1e-5),
            warmup_steps=10,
            schedule="constant",
        ),
        evaluation=paper_tier.evaluated(_NEW_TOKENS, samples=2, threshold=30.0),
        prompt_template="boxed",
        format_reward=0.0,
        checkpoint_every=50,
        permuted=True,
        seeds=_SEEDS,
    )


def _dose_scale(scale: TrainScale) -> TrainScale:
    """Return the scale on which doses are measured: 100 problems of training, 16 completions."""
    return dataclasses.replace(
        scale,
        data=dataclasses.replace(scale.data, development_problems=100),
        group_size=16,
        evaluation=dataclasses.replace(scale.evaluation, samples=16, at=(1, 16), threshold=0.0),
        seeds=_DRAWS,
    )


METRICS = (
    *table1.METRICS,
    metric("take_off_steps", "steps", "steps to the threshold", "lower"),
    metric("took_off", "share", "reached the threshold", "higher"),
    metric("collapsed", "share", "broke down", "lower"),
    metric("entropy_start", "nats", "entropy, finished, first", "neither"),
    metric("accuracy_start", "share", "right at the start", "neither"),
)
_DOSE_METRICS = (
    metric("kl_completions", "nats", "KL from BF16 per token of its completions", "neither"),
    metric("entropy_forced", "nats", "entropy, same tokens", "neither"),
    metric("entropy_own", "nats", "entropy, own completions", "neither"),
    metric("entropy_finished", "nats", "entropy, own finished", "neither"),
    metric("choice", "share", "p (1 - p) of what was drawn", "neither"),
    metric("mixed_groups", "percent", "groups that teach", "neither"),
    metric("distinct_answers", "answers", "answers a prompt", "neither"),
    metric("code_rate", "percent", "completions with a program", "lower"),
    *table1.metrics_named(
        "accuracy", "accuracy_lenient", "format_rate", "truncation_rate", "completion_tokens_mean"
    ),
    metric("pass_at_1", "percent", "pass@1", "higher"),
    metric("pass_at_16", "percent", "pass@16", "higher"),
)


def _dose(size: str) -> Target:
    arms = (BF16, NF4, MXFP4, NVFP4, AQN, HALF, DOUBLE, STRONG_AQN, *_TEMPERED)
    scale = _dose_scale(scale_of(size))
    return Target(
        name=f"dose_coder_{size}",
        title=f"How large each treatment is before training, Qwen2.5-Coder-{mini.spoken(size)}",
        statement="rounding to four bits raises the entropy, whichever the draw",
        source="Fig. 5, first step; section 3.2",
        procedure="dose",
        arms=arms,
        metrics=_DOSE_METRICS,
        claims=tuple(
            Statement(
                f"{arm.weight_format}_more_entropy_{how}",
                f"{arm.weight_format.upper()} weights have more entropy than BF16, {words}",
                "Fig. 5",
            ).above(
                arm,
                BF16,
                "weight_format",
                paper_effects.ENTROPY[arm.weight_format],
                f"entropy_{how}",
                draws=len(_DRAWS),
            )
            for arm in (NF4, MXFP4, NVFP4)
            for how, words in (
                ("finished", "on its own finished completions"),
                ("forced", "on the same tokens"),
            )
        ),
        headline="kl_completions",
        scales={Tier.MINI: scale},
    )


def _untrained(size: str, template: str) -> Target:
    """Return Table 1's first four rows, with four samples a problem."""
    scale = scale_of(size)
    suffix = "" if template == "boxed" else "_tags"
    return Target(
        name=f"untrained_coder_{size}{suffix}",
        title=f"Table 1's untrained rows, Qwen2.5-Coder-{mini.spoken(size)}, prompt {template!r}",
        statement="before training, four-bit weights are less accurate than BF16",
        source="Table 1, first four rows",
        arms=table1.UNTRAINED,
        metrics=METRICS,
        claims=table1.untrained_losses("accuracy_lenient", draws=len(_DRAWS)),
        headline="accuracy_lenient",
        scales={
            Tier.MINI: dataclasses.replace(
                scale,
                prompt_template=template,
                evaluation=dataclasses.replace(scale.evaluation, samples=4, threshold=0.0),
                seeds=_DRAWS,
            )
        },
    )


_IMPLIED = "not in the paper; section 3.2 implies it"
_BEST = f"pass_at_{_KS[-1]}_lenient"
_SMALL_SCALE = scale_of("0_5b")
_SMALL_DOSES = _dose_scale(_SMALL_SCALE)
# What many samples find, drawn as in rollouts: exploration's own measure.
_PASS_AT_K = Target(
    name="pass_at_k_coder_0_5b",
    title=f"What {_KS[-1]} samples find before training, Qwen2.5-Coder-0.5B",
    statement="rounding to NVFP4 costs accuracy by one sample and finds more by many",
    source="Table 1, first four rows; section 3.2",
    arms=(table1.BF16, table1.NVFP4),
    metrics=(
        *(metric(f"pass_at_{k}_lenient", "percent", f"pass@{k}", "higher") for k in _KS),
        *table1.metrics_named("truncation_rate", "completion_tokens_mean", "peak_bytes"),
    ),
    claims=(
        Statement(
            "nvfp4_costs_at_1",
            "NVFP4 weights solve fewer problems than BF16 by one sample",
            "Table 1, first four rows",
        ).above(
            table1.BF16,
            table1.NVFP4,
            "weight_format",
            paper_effects.UNTRAINED_LOSS["nvfp4"],
            "pass_at_1_lenient",
            draws=len(_DRAWS),
        ),
        Statement(
            "nvfp4_finds_more",
            f"NVFP4 weights solve more problems than BF16 by the best of {_KS[-1]} samples",
            _IMPLIED,
        ).above(
            table1.NVFP4,
            table1.BF16,
            "weight_format",
            paper_effects.OPEN_UNSOLVED,
            _BEST,
            draws=len(_DRAWS),
        ),
    ),
    headline=_BEST,
    scales={
        Tier.MINI: dataclasses.replace(
            _SMALL_DOSES,
            data=dataclasses.replace(_SMALL_DOSES.data, test_problems=200),
            evaluation=dataclasses.replace(
                _SMALL_DOSES.evaluation, samples=_KS[-1], at=_KS, sampling=_SMALL_DOSES.rollout
            ),
        )
    },
)


_LENIENT = "accuracy_lenient"
_NOISY = "weight_format noise"
CLAIMS = (
    *gains(BF16, NVFP4, AQN),
    mini.NVFP4_MORE_ENTROPY.above(
        NVFP4, BF16, "weight_format", paper_effects.ENTROPY["nvfp4"], "entropy_first"
    ),
    Statement(
        "aqn_more_entropy",
        "AQN raises the entropy of NVFP4 late in training",
        "Fig. 14, on a smaller checkpoint",
    ).above(AQN, NVFP4, "noise", paper_effects.ENTROPY_LATE, "entropy_last"),
    Statement(
        "nvfp4_sooner",
        "NVFP4 LoRA takes off after fewer steps than 16-bit LoRA",
        "Fig. 4, on a smaller checkpoint",
    ).times(BF16, NVFP4, "weight_format", "take_off_steps", effect=paper_effects.FORMAT_TAKE_OFF),
    Statement(
        "qerl_sooner",
        "QeRL takes off after fewer steps than 16-bit LoRA",
        "Fig. 12, on a smaller checkpoint",
    ).times(BF16, AQN, _NOISY, "take_off_steps", effect=paper_effects.QERL_TAKE_OFF),
    table1.NVFP4_BEATS_LORA(mini.SOURCE).above(
        NVFP4, BF16, "weight_format", end_effect(0.4, "88.5 - 88.1"), _LENIENT
    ),
    table1.QERL_BEATS_LORA(mini.SOURCE).above(
        AQN, BF16, _NOISY, end_effect(2.7, "90.8 - 88.1"), _LENIENT
    ),
    table1.AQN_HELPS(mini.SOURCE).above(
        AQN, NVFP4, "noise", end_effect(2.3, "90.8 - 88.5"), _LENIENT
    ),
    table1.QERL_BEATS_QLORA(mini.SOURCE).above(
        AQN, NF4, _NOISY, end_effect(5.8, "90.8 - 85.0"), _LENIENT
    ),
    Statement(
        "reward_rises_with_dose",
        "the training reward, mean over the steps, rises in the order BF16, half of NVFP4's "
        "rounding, and twice",
        _IMPLIED,
    ).rises((BF16, HALF, DOUBLE), "rounding", paper_effects.OPEN_SHARE, "train_reward_mean"),
)


def _table(size: str, remark: str = "") -> Target:
    return Target(
        name=f"table1_coder_{size}",
        title=f"Table 1's contrast on Qwen2.5-Coder-{mini.spoken(size)}-Instruct",
        statement="NVFP4 weights with LoRA and AQN learn faster and end above 16-bit LoRA" + remark,
        source="Table 1; Figs. 4 and 5; the size is this suite's",
        arms=(*_TRAINED, table1.RANDOM_REWARD),
        metrics=METRICS,
        claims=CLAIMS,
        headline="accuracy_lenient",
        scales={Tier.MINI: scale_of(size)},
    )


# What NVFP4's entropy is above BF16's in the paper's Fig. 5, step 0: .297 - .242.
_PAPERS_DOSE = 0.055
_GRADED = (BF16, NVFP4, HALF, DOUBLE, WARM, COOL)


def _per_entropy(name: str, statement: str, measured: str, effect: Effect, *given: str) -> Claim:
    """Return the claim that a metric follows the entropy that a seed's arms start with.

    Of a quotient, what .055 nats less are worth: the steps grow where entropy was what saved them.
    """
    log = effect.measure == "ratio"
    return Claim(
        name=name,
        statement=statement + (", accuracy at the start held fixed" if given else ""),
        source="Figs. 4, 5 and Table 1 together; section 3.2",
        contrast={arm.name: 0 for arm in _GRADED},
        metric=measured,
        factor=("weight_format", "rounding", "temperature_factor"),
        log=log,
        bound=1.0 if log else 0.0,
        effect=effect,
        dose=Dose("entropy_start", -_PAPERS_DOSE if log else _PAPERS_DOSE, given),
    )


def _response(table: Target) -> Target:
    """Return the answer to the paper's chain: what the paper's rise of entropy is worth here."""
    sooner, higher = (
        "where the policy starts with less entropy, it takes more steps to take off",
        "the more entropy a policy starts with, the more accurate it ends",
    )
    claims = [
        _per_entropy(f"{name}_given_start" if given else name, words, of, effect, *given)
        for name, words, of, effect in (
            ("sooner", sooner, "take_off_steps", paper_effects.FORMAT_TAKE_OFF),
            ("ends_higher", higher, _LENIENT, end_effect(2.7, "90.8 - 88.1, as if all of it")),
        )
        for given in ((), ("accuracy_greedy_start",))
    ]
    return Target(
        name=table.name.replace("table1", "dose_response"),
        title=table.title.replace("Table 1's contrast", "What a rise of entropy is worth"),
        statement="entropy at the start, by rounding or by temperature, speeds learning up",
        source="section 3.2",
        arms=_GRADED,
        metrics=METRICS,
        claims=tuple(claims),
        headline="take_off_steps",
        records_of=table,
    )


# The paper's own template and reward on such a checkpoint.
_TAGS = Target(
    name="table1_coder_0_5b_tags",
    title="The paper's prompt and reward on Qwen2.5-Coder-0.5B-Instruct",
    statement="asked for tags that it does not know, a small model learns the format alone",
    source="not in the paper; its prompt of section 4.1",
    arms=(table1.BF16_LORA, table1.NVFP4_LORA_AQN),
    metrics=METRICS,
    headline="accuracy_lenient",
    scales={
        Tier.MINI: dataclasses.replace(
            _SMALL_SCALE, steps=100, prompt_template="paper", format_reward=0.2, seeds=_SEEDS[:2]
        )
    },
)
_SWEEP = Target(
    name="learning_rates_coder_0_5b",
    title="The learning rate at which Qwen2.5-Coder-0.5B's arms are compared",
    statement="one of three rates serves 16-bit and four-bit weights alike",
    source=mini.SWEEP_SOURCE,
    arms=tuple(mini.at_rate(arm, name) for arm in (BF16, NVFP4) for name in mini.FACTORS),
    metrics=METRICS,
    scales={
        Tier.MINI: dataclasses.replace(
            _SMALL_SCALE,
            steps=60,
            data=dataclasses.replace(_SMALL_SCALE.data, test_problems=300),
            seeds=(_TUNING_SEED,),
        )
    },
    headline="train_reward_mean",
)
_SMALL = _table("0_5b")
CODER_TARGETS = (
    _SMALL,
    _response(_SMALL),
    _dose("0_5b"),
    _untrained("0_5b", "boxed"),
    _untrained("0_5b", "paper"),
    _PASS_AT_K,
    _TAGS,
    _SWEEP,
    # By the rule set before, from half of NVFP4's KL on.
    _table(
        "1_5b",
        "; not trained, as NVFP4 would be additional rounding: the file's is two thirds of it",
    ),
    _dose("1_5b"),
    _untrained("1_5b", "boxed"),
    _untrained("1_5b", "paper"),
)
