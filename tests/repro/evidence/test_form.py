"""A malformed record is one refusal that names file and field; the others are judged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from repro.evidence.form import DEEPEST, FormError, read_json
from repro.evidence.receipts import violations
from repro.evidence.record import SEAL, RecordError, parse_record, seal_of
from repro.judge.gathering import gather
from repro.spec.config import digest_of
from tests.repro.evidence.edits import drop, put
from tests.repro.recorded_smoke import SELECTION, SMALL, place

ARM = "nvfp4_lora_aqn"


def edited(text: str, edit: Callable[[Any], None]) -> str:
    """Return a record's text after an edit, with the digest and the seal made again."""
    raw = json.loads(text)
    edit(raw)
    if isinstance(raw.get("config"), dict):
        raw["digest"] = digest_of(raw["config"])
    raw[SEAL] = seal_of({key: value for key, value in raw.items() if key != SEAL})
    return json.dumps(raw)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def by_edit(edit: Callable[[Any], None]) -> Callable[[str], str]:
    return lambda text: edited(text, edit)


MALFORMED: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "no number": (
        by_edit(put("metrics.peak_bytes.value", float("nan"))),
        "metrics.peak_bytes.value",
    ),
    "an infinite number": (by_edit(put("series.loss", [float("inf")])), "series.loss"),
    "too large for a float": (
        lambda text: text.replace('"seed": 1', '"seed": 1e999', 1),
        "is inf; numbers must be finite",
    ),
    "an integer of five thousand digits": (
        lambda text: text.replace('"seed": 1', '"seed": ' + "9" * 5000, 1),
        "not a readable record",
    ),
    "a truth for a seed": (by_edit(put("seed", True)), "field seed is True"),
    "a metric with a field of its own": (
        by_edit(put("metrics.peak_bytes.note", "x")),
        "unknown field metrics.peak_bytes.note",
    ),
    "a series of words": (by_edit(put("series.loss", ["a"] * 6)), "series.loss[0]"),
    "noise in a word": (by_edit(put("effects.noise", "none")), "effects.noise"),
    "linears in words": (by_edit(put("effects.linears", {"nvfp4": "28"})), "effects.linears.nvfp4"),
    "fewer linears than none": (
        by_edit(put("effects.linears", {"nvfp4": -28})),
        "effects.linears.nvfp4",
    ),
    "answers in words": (
        by_edit(put("effects.answers.accuracy", "all")),
        "effects.answers.accuracy",
    ),
    "a device without states": (by_edit(put("effects.device", {})), "effects.device.before"),
    "an input that is no digest": (by_edit(put("inputs.checkpoint", "none")), "inputs.checkpoint"),
    "a GPU without a name": (by_edit(put("environment.gpu", [{}])), "environment.gpu"),
    "a configuration without an arm": (by_edit(drop("config.arm")), "config.arm is missing"),
    "a time without a zone": (by_edit(put("started", "2026-11-22T10:00:00")), "field started"),
    "no seal": (
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != SEAL}),
        "field seal is missing",
    ),
    "sources in words": (by_edit(put("sources", ["HEAD"])), "sources[0]"),
    "a failure without a reason": (
        by_edit(put("outcome", {"status": "failed"})),
        "outcome.reason is missing",
    ),
    "a failure for an empty reason": (
        by_edit(put("outcome", {"status": "failed", "reason": " "})),
        "outcome.reason",
    ),
    "a failure in the place of a success": (
        by_edit(put("outcome", {"status": "failed", "reason": "lost"})),
        "lies elsewhere",
    ),
    "half a character": (by_edit(put("effects.compute", "\ud800")), "effects.compute"),
    "a field given twice": (lambda text: text.replace("{", '{"seed": 1,', 1), "is given twice"),
    "nested thirty deep": (by_edit(put("effects.extra", nested(30))), "nests too deep"),
    "nested without end": (lambda text: "[" * 100_000, "nests too deep"),
    "half of the file": (lambda text: text[: len(text) // 2], "not a readable record"),
    "nothing": (lambda text: "", "not a readable record"),
    "no text": (lambda text: b"\xff\xfe\x00", "not a readable record"),
    "a list": (lambda text: "[1, 2]", "(the whole) is [1, 2]"),
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_a_malformed_record_is_one_refusal_and_the_others_are_judged(
    name: str, smoke_runs: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(smoke_runs, tmp_path / "runs")
    spoil, words = MALFORMED[name]
    spoilt = spoil(place(runs).read_text())
    place(runs).write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    evidence = gather(SELECTION, runs)
    ((path, reason),) = evidence.refused
    assert path == place(runs)
    assert words in reason
    reason.encode()
    assert evidence.count == 3
    assert not evidence.failed


def test_a_folder_at_a_records_place_is_one_refusal(smoke_runs: Path, tmp_path: Path) -> None:
    runs = shutil.copytree(smoke_runs, tmp_path / "runs")
    place(runs).unlink()
    place(runs).mkdir()
    evidence = gather(SELECTION, runs)
    assert [path for path, _ in evidence.refused] == [place(runs)]


def test_any_edit_by_hand_breaks_the_seal(smoke_runs: Path) -> None:
    raw = json.loads(place(smoke_runs).read_text())
    raw["effects"]["base_bytes"] += 1
    with pytest.raises(RecordError, match=r"here: seal is not that of the record's contents"):
        parse_record(raw, "here")


@pytest.mark.parametrize("inmost", [7, 0.5, "x", None])
def test_lists_of_numbers_may_nest_as_deep_as_others(inmost: Any) -> None:
    deepest = json.dumps([inmost, inmost])
    for _ in range(DEEPEST - 2):
        deepest = f"[{deepest}]"
    assert json.dumps(read_json(deepest)) == deepest
    with pytest.raises(FormError, match="nests too deep"):
        read_json(f"[{deepest}]")


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every member of a JSON value, the first two elements of lists alone."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = list(enumerate(value))[:2]
    for name, item in items:
        yield from nodes(item, (*path, name))


JUNK: tuple[Any, ...] = (None, "x", -1, 1e308, True, [], {}, [None], {"a": [1]})
# Each value of a record gets one kind of junk at a turn, and every kind at the turns together.
TURNS = [0, *(pytest.param(turn, marks=pytest.mark.nightly) for turn in range(1, len(JUNK)))]


@pytest.mark.parametrize("turn", TURNS)
def test_no_wrong_value_anywhere_ends_in_a_traceback(turn: int, smoke_runs: Path) -> None:
    raw = json.loads(place(smoke_runs).read_text())
    for number, path in enumerate(list(nodes(raw))[1:]):
        if path[0] == "config":
            continue  # a configuration has a digest, and is held against the target's
        junk = JUNK[(number + turn) % len(JUNK)]
        holder = raw
        for name in path[:-1]:
            holder = holder[name]
        whole, holder[path[-1]] = holder[path[-1]], junk
        raw[SEAL] = seal_of({key: value for key, value in raw.items() if key != SEAL})
        text = json.dumps(raw)
        holder[path[-1]] = whole
        try:
            record = parse_record(read_json(text), "here")
        except RecordError:
            continue  # any other error fails the test
        assert all(isinstance(sentence, str) for sentence in violations(record, SMALL.metrics)), (
            path
        )
