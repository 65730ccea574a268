"""The paper's twelve claims about learning, each decided by one declared statement.

A claim as a reader of the paper knows it ("the format speeds up reward growth") is wider than any
statement that can be tested. So each names the statement that decides it, chosen for what it rules
out rather than for its result, and the other statements that bear on it. Its verdict is that
statement's; where that has no records, the claim is *not run*, and says why.

Some claims can be put to a better test than the one that was run first: the ladder of exploration
(`repro.targets.ladder`) has environments in which the claimed effect could show. The statement that
takes over is named here before it is run, and decides once every seed of a planned look is there,
whatever they say. Until then the first one does; then it stands among the others.

Effects are shown as shares, in percent of what the statement's effect is a share of
(`repro.spec.effect`), which is the one scale on which a small policy and the paper's can stand side
by side: the effect in the metric's unit over what the whole share would be in these records.

Where an early look decided, the effect is that of all seeds, with the look's own beside it; the
verdict is the look's (`repro.evidence.verdict.AllSeeds`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from repro.evidence.verdict import AllSeeds, Verdict
from repro.judge.check import Checked
from repro.spec.effect import GAIN
from repro.spec.target import Claim

# What a share is a share of, in words.
_MEASURES = {
    "of gain": "% of the gain",
    "of shortfall": "% of the shortfall",
    "of baseline": "% of the mean",
    "ratio": "% in speed",
}
# Unit of a metric that each run has as 0 or 1, such as whether it collapsed.
_SHARE = "share"
# Kinds that claim that two arms do not differ.
_EQUALITIES = ("non_inferior", "equivalent")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperClaim:
    """One of the twelve, with the statements that bear on it.

    Attributes
    ----------
    title
        The claim in a few words.
    decided_by
        The deciding statement, `target.claim`.
    then
        The statement that takes over once its planned runs are there; empty where the first one
        stays.
    others
        Further statements on it, in the same form.
    remark
        What the deciding statement speaks of.
    then_remark
        What the one that takes over speaks of.
    place
        Where the paper says so, where the deciding statement has never been run.
    """

    title: str
    decided_by: str
    then: str = ""
    others: tuple[str, ...] = ()
    remark: str = ""
    then_remark: str = ""
    place: str = ""

    @property
    def statements(self) -> tuple[str, ...]:
        """The statements behind the claim, those that decide or will decide first."""
        return tuple(filter(None, (self.decided_by, self.then, *self.others)))


TWELVE = (
    PaperClaim(
        title="A 4-bit format speeds up reward growth",
        decided_by="figure4_dapo.nvfp4_grows_faster",
        then="needle_4.nvfp4_sooner",
        others=(
            "needle_4_fresh.nvfp4_sooner",
            "needle_policies.nvfp4_sooner",
            "needle_05.nvfp4_sooner",
            "needle_40.nvfp4_sooner",
            "anchor_dapo.nvfp4_sooner",
            "needle_dose.reward_rises_with_dose",
            "figure4.nvfp4_grows_faster",
            "figure4.nvfp4_reward_faster",
            "figure7.qerl_grows_faster",
            "figure12.qerl_grows_faster",
            "figure13.qerl_grows_faster",
        ),
        remark="NVFP4 against BF16, both with LoRA",
        then_remark="NVFP4 against BF16, steps to the take-off at a prior of 4 %",
    ),
    PaperClaim(
        title="NVFP4 is better than MXFP4 and NF4",
        decided_by="figure4_dapo.heldout_order",
        then="needle_4.nvfp4_sooner_than_nf4",
        others=(
            "needle_4.nvfp4_sooner_than_mxfp4",
            "figure4.heldout_order",
            "figure4.reward_order",
        ),
        remark="the order BF16, NF4, MXFP4, NVFP4, sized by the lead over BF16 and NF4 in Fig. 4; "
        "over MXFP4 it shows none",
        then_remark="over NF4, steps to the take-off; over MXFP4 Fig. 4 shows no lead",
    ),
    PaperClaim(
        title="QeRL ends above LoRA and QLoRA",
        decided_by="table1.qerl_beats_lora",
        then="skill.qerl_beats_lora",
        then_remark="where there is skill to gain",
        others=(
            "skill.qerl_beats_qlora",
            "table1.qerl_beats_qlora",
            "table1.nvfp4_beats_lora",
            "table2.qerl_beats_lora",
        ),
    ),
    PaperClaim(
        title="QeRL matches full fine-tuning",
        decided_by="table1.qerl_matches_full",
        then="skill.qerl_matches_full",
        then_remark="where there is skill to gain; it may end above, or 1.5 points below",
        others=("table2.qerl_matches_full",),
    ),
    PaperClaim(
        title="Quantisation raises entropy",
        decided_by="entropy_start.nvfp4_more_entropy_forced",
        then="dose_start.nvfp4_more_entropy",
        then_remark="NVFP4 on the same tokens, over six rounding draws",
        others=(
            "dose_start.mxfp4_more_entropy",
            "dose_start.nf4_more_entropy",
            "entropy_start.nvfp4_more_entropy_own",
            "figure5.nvfp4_more_entropy",
            "figure5.mxfp4_more_entropy",
            "figure5.nf4_more_entropy",
            "figure14.qerl_more_entropy",
        ),
        remark="NVFP4 on the same tokens, one rounding: on a policy's own samples the length of "
        "its answers mixes in",
    ),
    PaperClaim(
        title="AQN raises reward and accuracy",
        decided_by="needle_4.aqn_sooner",
        then="needle_4_fresh.aqn_sooner",
        then_remark="steps to the take-off at a prior of 4 %, forty fresh seeds",
        others=(
            "needle_policies.aqn_sooner",
            "figure8.aqn_raises_reward",
            "needle_05.aqn_sooner",
            "needle_40.aqn_sooner",
            "anchor_dapo.aqn_sooner",
            "skill.aqn_helps",
            "figure8.aqn_grows_faster",
            "table1.aqn_helps",
            "table2.aqn_helps",
        ),
        remark="steps to the take-off at a prior of 4 %",
    ),
    PaperClaim(
        title="The exponential schedule beats the others",
        decided_by="figure9.exponential_beats_linear",
        others=("figure9.exponential_beats_cosine", "figure9.exponential_beats_logarithmic"),
        remark="against the linear one",
    ),
    PaperClaim(
        title="The rank hardly matters",
        decided_by="figure10.rank_hardly_matters",
        then="needle_ranks.rank_hardly_matters_fixed",
        then_remark="rank 128 against 16, alpha fixed: steps to the take-off at a prior of 4 %",
        others=(
            "needle_ranks_grown.rank_hardly_matters_grown",
            "figure10.small_rank_faster",
            "figure10.small_rank_grows_faster",
        ),
    ),
    PaperClaim(
        title="A higher rate is borne by QeRL and not by LoRA",
        decided_by="needle_rates.qerl_bears_more",
        others=(
            "needle_rates.nvfp4_bears_more",
            "figure16.high_rate_faster",
            "figure17.high_rate_collapses",
        ),
        place="Figs. 16 and 17",
        remark="runs that collapse at the same five absolute rates; the statements of Figs. 16 and "
        "17 speak of one arm each, at multiples of its own rate",
    ),
    PaperClaim(
        title="The benefit grows with difficulty",
        decided_by="difficulty.qerl_helps_more",
        then="needle_05_fresh.qerl_finds_more",
        then_remark="runs that come across the habit at a prior of 0.5 %, forty-eight fresh seeds; "
        "at 4 % QeRL has no lead (`needle_4_fresh`)",
        others=(
            "needle_05_fresh.nvfp4_finds_more",
            "difficulty.nvfp4_helps_more",
            "table1_transfer.qerl_beats_lora_hard",
            "figure13.qerl_reward_faster",
        ),
        place="Fig. 13, 32B on harder problems",
        remark="QeRL's saving of steps at a prior of 0.5 % over that at 40 %",
    ),
    PaperClaim(
        title="Noise harms supervised fine-tuning",
        decided_by="noise_in_sft.rounding_raises_loss",
        then="noise_in_sft_draws.rounding_raises_loss",
        then_remark="NVFP4's rounding and the held-out loss, over twelve rounding draws",
        others=(
            "noise_in_sft_draws.rounding_lowers_accuracy",
            "noise_in_sft.rounding_lowers_accuracy",
            "noise_in_sft.aqn_on_bf16_raises_loss",
            "noise_in_sft.aqn_on_nvfp4_raises_loss",
        ),
    ),
    PaperClaim(
        title="Sharing the noise costs nothing",
        decided_by="needle_sharing.sharing_costs_nothing_strong",
        then="needle_sharing_fresh.sharing_costs_nothing_strong",
        then_remark="steps to the take-off against a draw per projection, at ten times the paper's "
        "sigma, forty fresh seeds",
        others=("needle_sharing.sharing_costs_nothing",),
        place="section 3.3; Fig. 6",
        remark="steps to the take-off against a draw per projection, at ten times the paper's "
        "sigma: at its own neither way does much",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An effect as a share with its simultaneous interval.

    Attributes
    ----------
    value, low, high
        In the measure of the claim; the ends None where the statement is not testable.
    pairs
        Behind it.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One of the twelve on one device, as its deciding statement has it.

    Attributes
    ----------
    statement, verdict
        The deciding statement and its verdict; None where it is not among what was checked.
    name, remark
        The deciding statement's name, `target.claim`, and what it speaks of.
    measured
        Relative effect, of all seeds, in `measure`; None without records.
    at_look
        The same at the look that decided, where that was an earlier one; else None.
    paper
        The paper's, in `measure`; 0 where it claims that there is no difference; None where it has
        no size.
    measure
        `% of the gain`, `% of the shortfall`, `% of the mean`, `% in speed`, `% of the runs` or
        `points`.
    """

    claim: PaperClaim
    name: str
    remark: str
    statement: Claim | None = None
    verdict: Verdict | None = None
    measured: Share | None = None
    at_look: Share | None = None
    paper: float | None = None
    measure: str = ""

    @property
    def is_run(self) -> bool:
        """Whether there is a deciding statement with records."""
        return self.verdict is not None and self.verdict.status != "not run"

    @property
    def is_testable(self) -> bool:
        """Whether an effect could have appeared."""
        return self.is_run and self.verdict is not None and self.verdict.status != "not testable"

    @property
    def is_equality(self) -> bool:
        """Whether the paper claims that there is no difference."""
        return self.statement is not None and self.statement.kind in _EQUALITIES

    @property
    def half(self) -> float | None:
        """Half of the interval's width; None without one."""
        share = self.measured
        if share is None or share.low is None or share.high is None:
            return None
        return (share.high - share.low) / 2


def decided(checks: Sequence[Checked]) -> list[Decided]:
    """Return the twelve, in their order, from the checks of one device."""
    by_name = statements(checks)
    return [_decided(claim, by_name) for claim in TWELVE]


def statements(checks: Sequence[Checked]) -> dict[str, tuple[Checked, Claim, Verdict]]:
    """Return every statement with its verdict, by `target.claim`."""
    return {
        f"{checked.selection.target.name}.{verdict.name}": (checked, claim, verdict)
        for checked in checks
        for claim, verdict in checked.statements()
    }


def _decided(claim: PaperClaim, by_name: Mapping[str, tuple[Checked, Claim, Verdict]]) -> Decided:
    name, remark = claim.decided_by, claim.remark
    if claim.then in by_name and _has_run(*by_name[claim.then]):
        name, remark = claim.then, claim.then_remark
    if name not in by_name:
        return Decided(claim=claim, name=name, remark=remark)
    checked, statement, verdict = by_name[name]
    row = Decided(claim=claim, name=name, remark=remark, statement=statement, verdict=verdict)
    return row if verdict.effect is None else _with_shares(row, checked, statement, verdict)


def _has_run(checked: Checked, statement: Claim, verdict: Verdict) -> bool:
    """Whether the statement has all seeds of a planned look; a part of them decides nothing."""
    if verdict.status == "not run":
        return False
    parts = checked.evidence.at_looks(checked.selection.target.looks)
    return any(not any(part.without_record(arm) for arm in statement.arms) for part in parts)


def _with_shares(row: Decided, checked: Checked, statement: Claim, verdict: Verdict) -> Decided:
    scale, offset = _scale(checked, statement, verdict)

    def share(value: float | None) -> float | None:
        return None if value is None else (value - offset) * scale

    def shares(of: Verdict | AllSeeds) -> Share:
        value = share(of.effect)
        assert value is not None
        return Share(value=value, low=share(of.low), high=share(of.high), pairs=of.n)

    every = verdict.all_seeds
    equality = 0.0 if row.is_equality else None
    return dataclasses.replace(
        row,
        measured=shares(every or verdict),
        at_look=None if every is None else shares(verdict),
        paper=equality if verdict.paper is None else share(verdict.paper),
        measure=_measure(statement, verdict),
    )


def _scale(checked: Checked, statement: Claim, verdict: Verdict) -> tuple[float, float]:
    """Return by what to multiply a value of a verdict, after what is subtracted from it."""
    effect = statement.effect
    if effect is None:
        gains = checked.evidence.values(GAIN).get(statement.baseline, {})
        return (100 / fmean(gains.values()) if gains else 1.0), 0.0
    if effect.measure == "units":
        return (100.0 if verdict.unit == _SHARE else 1.0), 0.0
    if effect.measure == "ratio":
        return 100.0, 1.0
    if verdict.matters is None:
        raise ValueError(f"verdict {verdict.name}: it has no size to take shares of")
    return 100 * effect.matters / verdict.matters, 0.0


def _measure(statement: Claim, verdict: Verdict) -> str:
    if statement.effect is None:
        return _MEASURES["of gain"]
    unit = "% of the runs" if verdict.unit == _SHARE else verdict.unit
    return _MEASURES.get(statement.effect.measure, unit)
