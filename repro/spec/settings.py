"""Configuration values by name: as plain JSON, and changed by `--set key=value` and files.

A key is a dotted path of fields (`optimizer.learning_rates.lora_4bit`), a value is what the field's
type says: text from a command line is read as JSON (`3`, `1e-5`, `[0, 1]`, `true`, `null`), and as
it stands where the field takes text. An unknown key is refused with the nearest known one, a value
of another type with the type that is needed, and whatever the configuration itself refuses stays
refused.

A field added after the first records were blessed carries `OMIT_AT_DEFAULT` and is left out at its
default, so that what a run without it did keeps its description, and its record its digest. Such a
default must mean "as before"; changing what it means needs a new `Target.version`.

A setting that is gone and that recorded runs were described with stands in its class's `RETIRED`,
with the value that all of them had.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
import types
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_origin

from repro.spec.checks import all_of, check_value, field_types, require, shown, unknown

T = TypeVar("T")
OMIT_AT_DEFAULT: Mapping[str, bool] = {"left_out_at_default": True}


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys; an empty table is a value."""
    if not (isinstance(value, dict) and value):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flattened(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def plain_values(value: Any) -> Any:
    """Return dataclasses as dictionaries and sequences as tuples; omit fields at such defaults.

    Anything else is returned as it is.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {
            item.name: plain_values(getattr(value, item.name))
            for item in dataclasses.fields(value)
            if not item.metadata.get("left_out_at_default")
            or getattr(value, item.name) != item.default
        }
        return held | getattr(value, "RETIRED", {})
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain_values(item) for item in value)
    return value


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return `--set` texts such as `steps=3` as nested values; `ValueError` for other texts."""
    nested: dict[str, Any] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        require(bool(mark and key.strip()), f"--set {text}: needs key=value, such as steps=3")
        place = nested
        *path, leaf = key.strip().split(".")
        for part in path:
            place = place.setdefault(part, {})
            require(isinstance(place, dict), f"--set {text}: {part} was given a value already")
        fits = not isinstance(place.get(leaf), dict)
        require(fits, f"--set {text}: parts of {leaf} were given values already")
        place[leaf] = value.strip()  # of one key given twice the last counts, as of a flag
    return nested


def read_settings(path: Path) -> dict[str, Any]:
    """Return the values of a TOML or JSON file; `ValueError` if it is missing or broken."""
    fits = path.suffix in (".toml", ".json") and (path.is_file() or not path.exists())
    require(fits, f"--config {path}: needs a .toml or .json file")
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = tomllib.loads(text) if path.suffix == ".toml" else json_once(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    return table_of(content, f"--config {path}")


def settings_text(scale: Any) -> str:
    """Return all settings of a scale as JSON, which `read_settings` takes back."""
    return json.dumps(dataclasses.asdict(scale), indent=1)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values of both; where both have one, the second's."""
    result = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def with_settings(value: T, settings: Mapping[str, Any], where: str = "") -> T:
    """Return a dataclass instance with the named fields replaced.

    Settings are nested by field; texts are converted to the field's type. `where` is the dotted
    path of the instance, for messages. Raises `ValueError` if a key is unknown, a value is not of
    its field's type, or the result is refused.
    """
    instance: Any = value
    values = _values_of(instance.__class__, settings, where, instance)
    replaced: T = dataclasses.replace(instance, **values)
    return replaced


def _values_of(kind: Any, settings: Mapping[str, Any], where: str, now: Any) -> dict[str, Any]:
    """Return the values of a class's fields, of a table those that an instance has `now`, too."""
    hints = field_types(kind)
    known = [f"{where}{item.name}" for item in dataclasses.fields(kind)]
    strange = [path for path in (f"{where}{key}" for key in settings) if path not in known]

    def value_of(key: str, given: Any) -> Any:
        path = f"{where}{key}"
        if path in strange:
            raise ValueError(unknown("setting", known, *strange))
        current = getattr(now, key, None)
        if dataclasses.is_dataclass(current) and isinstance(parsed_json(given), Mapping):
            return with_settings(current, table_of(given, path), f"{path}.")
        return check_value(given, hints[key], path, _read)

    values = all_of(*(partial(value_of, key, given) for key, given in settings.items()))
    return dict(zip(settings, values, strict=True))


def _read(hint: Any, given: Any, path: str) -> Any:
    """Return a value in a type's form, where it has one: an int as a float, a list as a tuple."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return None if given in (None, "null", "none") else given
    if dataclasses.is_dataclass(hint):
        return _built(hint, given, path)
    if hint is str or origin in (Annotated, Literal):
        return given
    parsed = parsed_json(given)
    if origin is tuple and isinstance(parsed, list):
        return tuple(parsed)
    if hint is float and type(parsed) is int and abs(parsed) < sys.float_info.max:
        return float(parsed)
    return parsed


def _built(kind: Any, given: Any, path: str) -> Any:
    """Return an instance of a dataclass made of nested values."""
    values = _values_of(kind, table_of(given, path), f"{path}.", None)
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def table_of(given: Any, path: str) -> dict[str, Any]:
    """Return nested values, or what their JSON says; `ValueError` for anything else."""
    table = parsed_json(given)
    require(isinstance(table, Mapping), f"{path} is {shown(given)}; it must be a table of values")
    return dict(table)


class _RepeatedKeyError(ValueError):
    """A table of JSON has a key twice, of which `json` would drop the first without a word."""


def json_once(text: str | bytes) -> Any:
    """Return the values of JSON; `ValueError` where it is none, or an object has a key twice."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys if len(set(keys)) < len(keys) else ():
            if keys.count(key) > 1:
                raise _RepeatedKeyError(f"the key {shown(key)} is given twice; needed is once")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=table)


def parsed_json(given: Any) -> Any:
    """Return what a text says as JSON; a text that is none, and any other value, as it is."""
    if not isinstance(given, str):
        return given
    try:
        return json_once(given)
    except _RepeatedKeyError:
        raise
    except (ValueError, RecursionError):
        return given
