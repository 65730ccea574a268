"""The plan as text: which runs a command would start, and what they would need, before they start.

A time is quoted: the median of what blessed records of an arm took, with their devices and commits.
An arm without any is priced by a blessed step of its shape, which the line says; where there is no
such step, it is not timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median_low

from repro.evidence.environment import capture_environment, device_of
from repro.evidence.origins import commits_of, grouped_by
from repro.evidence.record import run_folder, standing_of
from repro.evidence.store import blessed_records
from repro.run.data_check import data_lines
from repro.run.disk import free_bytes, said_in_the_way, size
from repro.run.places import expected_folder, runs_folder
from repro.run.preflight import (
    among_unlike_devices,
    disk_bytes,
    fit_runs,
    is_published,
    machine_refusal,
    memory_of,
    refusal,
    require_fit,
    smallest_device,
)
from repro.run.present_card import kernels_line, points_left_out
from repro.run.priced import Price, blessed_steps, price, shortest_answer
from repro.run.select import Selection, parse_arms, parse_seeds, selections_of
from repro.spec.checks import require
from repro.spec.config import RunConfig
from repro.spec.hub import ANSWER_SECONDS, PINNED_BYTES, HubError, endpoint, fetch, hub_cache
from repro.spec.needs import Needs
from repro.spec.settings import settings_text
from repro.spec.shapes import shape_of_checkpoint
from repro.spec.target import other_tiers
from repro.spec.tier import REAL_CHECKPOINTS, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class BlessedTimes:
    """What blessed records of the planned runs' kind took.

    `seconds` has, by target and arm, the wall time of the middle record and how many runs shared
    it; `peak_bytes` is the largest among them; `basis` says how many, on which devices and commits.
    `elsewhere` tells whether none of them is of this machine's card.
    """

    seconds: dict[tuple[str, str], tuple[float, int]]
    peak_bytes: int
    basis: str
    elsewhere: bool = False


def main_plan(args: argparse.Namespace) -> int:
    """Print the plan of what a command line selects; return 2 where nothing can run here."""
    possible = []
    folder, expected = runs_folder(args.runs), expected_folder(args.expected)
    texts = []
    for selection in selections_of(args):
        source, tier = selection.source, selection.tier
        runs = selection.plan(parse_seeds(args.seeds), parse_arms(args.arms))
        if args.show_config:
            texts.append(settings_text(source.scales[tier]))
            continue
        others = None if args.tier else other_tiers(source, tier)
        texts += [others] if others else []
        text = plan_text(selection, runs, folder, expected)
        left = standing_of(runs, folder).left
        elsewhere = tier is not Tier.SMOKE and not smallest_device()  # on another machine
        able = machine_refusal(source, tier) is None and fit_runs(left, refusal)[0]
        possible.append(bool(elsewhere or able or not left))
        texts.append("\n".join([text, *data_lines(runs, named=False)]))
    sys.stdout.write("\n\n".join(texts) + "\n")
    return 0 if any(possible) or not possible else 2


def plan_text(
    selection: Selection,
    runs: list[RunConfig],
    folder: Path,
    expected: Path,
    workers: int = 1,
    ranks: int = 1,
) -> str:
    """Return the plan of `runs`, recorded in `folder`, as lines of text.

    Raises `ValueError` if no machine can carry out any that is left, or its place is taken.

    `workers` runs at a time share memory and disk; each takes `ranks` devices.
    """
    listed, unheard = _listed(runs)
    needs = selection.source.needs_at(selection.tier)
    standing = standing_of(runs, folder)
    done, left = {run.digest() for run in standing.recorded}, standing.left
    require(bool(left or done) or not runs, "; ".join(standing.blocked))
    for run in left:
        require(not (said := said_in_the_way(run_folder(run, folder))), said)
    require_fit(left)
    timed = timed_runs(selection.tier, runs, expected)
    lines = [
        f"{selection.target.name} at the {selection.tier.value} tier: {len(runs)} runs "
        f"({len(done)} recorded, {len(left)} to do)",
        f"  {selection.target.statement}",
    ]
    lines += _one_run_lines(left or runs, needs, ranks)
    missing = machine_refusal(selection.source, selection.tier)
    if missing:
        lines.append(f"  This machine cannot run it: {missing}.")
    steps = blessed_steps(expected) if selection.tier in REAL_CHECKPOINTS else []
    prices = {
        run.arm.name: of_run
        for run in {run.arm.name: run for run in runs}.values()
        if (run.target, run.arm.name) not in timed.seconds
        and (of_run := price(run, steps, _device_here(selection.tier))) is not None
    }
    lines += _arm_lines(runs, done, timed, prices)
    absent = [item for item in needs.downloads if not item.present()]
    fetched = [f"{item.name} ({_known(item.nbytes or listed.get(item.name))})" for item in absent]
    of_one = max(needs.memory_bytes, timed.peak_bytes)
    answer = shortest_answer(prices, expected, selection.source.planned_seeds(selection.tier))
    memory = _memory(left or runs, of_one, workers, ranks)
    lines += [
        f"  timed     {timed.basis}",
        *(f"  priced    {basis}" for basis in sorted({one.basis for one in prices.values()})),
        *([] if answer is None else [f"  answer    {answer}"]),
        *_card_lines(selection.tier, left or runs),
        f"  memory    {_known(memory)}{_beyond_card(selection.tier, memory)}",
        f"  downloads {'; '.join(fetched) or 'none'}",
        *(f"  hub       {reason}" for reason in unheard),
    ]
    fit, sentences = fit_runs(left, lambda run: refusal(run, ranks))
    lines += [f"  refused   {sentence}" for sentence in (*sentences, *standing.blocked)]
    # What cannot start here takes no disk, unless nothing can: then the plan is for elsewhere.
    writing = left if missing else fit
    written = None if _unknown(writing) else disk_bytes(writing, needs, workers)
    lines += _disk_lines(written, free_bytes(folder))
    lines.append(f"  records   {folder}")
    return "\n".join(lines)


def _known(nbytes: int | None) -> str:
    """Return a number of bytes as text: none and 0 stand for one that nobody knows."""
    return size(nbytes) if nbytes else "not known"


def _beyond_card(tier: Tier, memory: int | None) -> str:
    """Return what a plan adds to the memory of measurements that fill a larger card than this."""
    device = smallest_device()
    if tier is not Tier.SYSTEMS or device is None or (memory or 0) <= device.memory_bytes:
        return ""
    return f" on a card that holds every point; {size(device.memory_bytes)} here"


def _card_lines(tier: Tier, runs: list[RunConfig]) -> list[str]:
    """Return the card of this machine, its kernels, and the points of each arm it cannot hold."""
    device = smallest_device()
    if device is None or tier is Tier.SMOKE:
        return []
    lines = [
        f"  card      {device.name}, {size(device.memory_bytes)}{among_unlike_devices()}: "
        f"{kernels_line(device)}"
    ]
    for run in {run.arm.name: run for run in runs}.values():
        left_out = points_left_out(run, device.memory_bytes)
        if left_out:
            parts = ", ".join(left_out)
            lines.append(f"  left out  {run.arm.name}, by the plan of memory: {parts}")
    return lines


def _one_run_lines(runs: list[RunConfig], needs: Needs, ranks: int) -> list[str]:
    """Return sizes of published checkpoints, and what the smallest and largest arm's run takes."""
    every = list({run.arm.name: run for run in runs if is_published(run.scale)}.values())
    if not every:
        return []
    unknown = _unknown(every)
    if unknown:
        return [f"  one run   not known: no config.json of {', '.join(unknown)} on this machine"]
    memory = [(memory_of(run.arm, run.scale, ranks)[0] or 0, run.arm.name) for run in every]
    disk = [(disk_bytes([run], needs, 1), run.arm.name) for run in every]
    parts = [
        f"{size(min(of)[0])} ({min(of)[1]}) to {size(max(of)[0])} ({max(of)[1]}) of {what}"
        if min(of)[0] < max(of)[0]
        else f"{_known(of[0][0])} of {what}"
        for of, what in ((memory, "memory"), (disk, "disk"))
    ]
    shapes = (shape_of_checkpoint(name) for name in sorted({run.scale.checkpoint for run in every}))
    return [
        *(
            f"  model     {shape.name}: {shape.parameters() / 1e6:.4g} million parameters, "
            f"{shape.layers} blocks of width {shape.hidden}"
            for shape in shapes
            if shape is not None
        ),
        f"  one run   {', '.join(parts)}",
    ]


def _unknown(runs: Iterable[RunConfig]) -> dict[str, str]:
    """Return published checkpoints of runs whose sizes are not known, with their revisions."""
    scales = [run.scale for run in runs if is_published(run.scale)]
    named = {scale.checkpoint: scale.revision for scale in scales}
    return {name: rev for name, rev in named.items() if shape_of_checkpoint(name) is None}


def _listed(runs: Iterable[RunConfig]) -> tuple[dict[str, int], list[str]]:
    """Return the bytes of checkpoints of unknown sizes as the hub lists them; fetch their configs.

    Those of which the hub cannot be asked are left out; why not is said beside them.
    """
    listed: dict[str, int] = {}
    unheard = []
    for name, revision in _unknown(runs).items():
        try:
            listed[name] = ask_size(name, revision)
        except HubError as error:
            unheard.append(f"{name}: {error}")
    return listed, unheard


def _arm_lines(
    runs: list[RunConfig], done: set[str], timed: BlessedTimes, prices: dict[str, Price]
) -> list[str]:
    by_arm = grouped_by(runs, lambda run: (run.target, run.arm.name))
    homes = Counter(arm for _, arm in by_arm)
    lines = []
    for (target, arm), of_arm in by_arm.items():
        seconds, shared_by = timed.seconds.get((target, arm), (None, 1))
        priced = prices.get(arm)
        about = "at most" if priced is not None and priced.at_most else "about"
        untimed = "not timed" if priced is None else f"{about} {duration(priced.seconds)}, priced"
        took = untimed if seconds is None else duration(seconds)
        took += f" for {shared_by} at once" if shared_by > 1 else ""
        took += " on another card" if seconds is not None and timed.elsewhere else ""
        finished = sum(run.digest() in done for run in of_arm)
        recorded = f", {finished} recorded" if finished else ""
        listed = ", ".join(str(run.seed) for run in of_arm)
        name = f"{target}.{arm}" if homes[arm] > 1 else arm
        lines.append(f"  {name:<26} {of_arm[0].procedure:<9} seeds {listed:<14} {took}{recorded}")
    return lines


def _memory(runs: list[RunConfig], of_one: int, workers: int, ranks: int) -> int | None:
    """Return the memory that runs need, `workers` of them at a time, or None if it is not known.

    A run of a published checkpoint has a device for itself.
    """
    planned = [
        memory_of(run.arm, run.scale, ranks)[0]
        for run in {run.arm: run for run in runs}.values()
        if is_published(run.scale)
    ]
    if planned:
        return None if None in planned else max(peak or 0 for peak in planned)
    return of_one * max(1, min(workers, len(runs)))


def _disk_lines(needed: int | None, free: int | None) -> list[str]:
    """Return how much disk the runs need where the records are, and how much is free."""
    written = "not known" if needed is None else size(needed)
    if free is None:
        return [f"  disk      {written}"]
    lines = [f"  disk      {written} of {size(free)} free"]
    if needed is not None and needed > free:
        lines.append(f"  It does not fit: the disk lacks {size(needed - free)}.")
    return lines


def timed_runs(tier: Tier, runs: Iterable[RunConfig], expected: Path) -> BlessedTimes:
    """Return what blessed records of the runs' targets and arms took.

    If there are records from this machine's kind of device, only those count. Records of an earlier
    version of a target did something else and say nothing about its time.
    """
    kinds = {(run.target, run.target_version, run.arm.name) for run in runs}
    blessed = [
        record
        for target in sorted({run.target for run in runs})
        for record in blessed_records(expected, tier, target)
        if (record.target, record.target_version, record.arm) in kinds
    ]
    here = _device_here(tier)
    of_this = [record for record in blessed if device_of(record.environment) == here]
    blessed = of_this or blessed
    times: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for record in blessed:
        begun, ended = map(datetime.fromisoformat, (record.started, record.finished))
        at_once = int(record.facts.get("repeats_together", 1))  # seeds on one loaded model
        taken = ((ended - begun).total_seconds(), at_once)
        times.setdefault((record.target, record.arm), []).append(taken)
    devices = sorted({device_of(record.environment) or "a CPU" for record in blessed})
    commits = ", ".join(commit[:7] for commit in commits_of(blessed))
    basis = f"median of {len(blessed)} blessed records of {', '.join(devices)} at {commits}"
    return BlessedTimes(
        seconds={arm: median_low(taken) for arm, taken in times.items()},
        peak_bytes=max((int(record.value("peak_bytes") or 0) for record in blessed), default=0),
        basis=basis if blessed else "no blessed record of these arms",
        elsewhere=bool(blessed) and not of_this and tier is not Tier.SMOKE and here is not None,
    )


def _device_here(tier: Tier) -> str | None:
    """Return this machine's device as folders of records spell it, by its tool or its driver."""
    device = smallest_device()
    if tier is Tier.SMOKE or device is None:
        return device_of(capture_environment())
    driver = {"gpu": [{"name": device.name}], "variables": dict(os.environ)}
    return device_of(capture_environment()) or device_of(driver)


def duration(seconds: float) -> str:
    """Return a time as text, in the unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def ask_size(checkpoint: str, revision: str = "") -> int:
    """Return the bytes of a checkpoint's weights as the hub lists them; fetch its config.

    The checkpoint is `owner/model` or `owner/model:FILE.gguf`. `HubError` says why the hub cannot
    tell.
    """
    from huggingface_hub import HfApi, hf_hub_download

    model, _, file = checkpoint.partition(":")
    pinned = "main" if not revision or revision.startswith(PINNED_BYTES) else revision

    def ask() -> int:
        listed = HfApi(endpoint=endpoint()).list_repo_tree(model, revision=pinned, recursive=True)
        sizes = {item.path: int(getattr(item, "size", 0)) for item in listed}
        if "config.json" in sizes and not file:
            hf_hub_download(
                model,
                "config.json",
                revision=pinned,
                cache_dir=hub_cache(),
                endpoint=endpoint(),
                etag_timeout=ANSWER_SECONDS,
            )
        wanted = [n for n in sizes if n == file or (not file and n.endswith(".safetensors"))]
        return sum(sizes[name] for name in wanted)

    return fetch(ask, hub_cache() / f"models--{model.replace('/', '--')}")
