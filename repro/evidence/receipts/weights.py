"""Receipts of the policy: its format, its noise, and how many of its modules there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from repro.evidence.record import Record
from repro.spec.facts import FactName
from repro.spec.shapes import TINY, DecoderShape, shape_by_name

# Relative weight error of a 4-bit format on bell-shaped weights is 0.09 to 0.12; random signs
# would give 1 or more. A wide gate: it only tells whether weights were quantised.
WEIGHT_ERROR = (0.02, 0.4)
# Projections of a decoder block.
PROJECTIONS = 7


def weights(record: Record) -> Iterator[str]:
    """Yield why the projections were not of the arm's format."""
    weight_format = record.config["arm"]["weight_format"]
    linears = record.facts.get("linears")
    if not isinstance(linears, Mapping) or not linears:
        yield "facts.linears is missing: nothing shows which format the projections had"
        return
    others = {name: count for name, count in linears.items() if name != weight_format and count}
    if not linears.get(weight_format):
        yield f"no projection was {weight_format}; found {dict(linears)}"
    elif others:
        yield f"some projections were not {weight_format}: {others}"
    error = record.facts.get("relative_weight_error_mean")
    low, high = WEIGHT_ERROR
    if weight_format != "bf16" and error is not None and not low <= error <= high:
        yield (
            f"weights called {weight_format} differ from the originals by {error:.3g} of their "
            f"size; a 4-bit format gives {low} to {high}"
        )


def rounding(record: Record) -> Iterator[str]:
    """Yield why weights lack the arm's rounding, rollouts its fold, or channels the run's order."""
    planned, done = record.config["arm"].get("rounding"), record.facts.get("rounding")
    asked = {key: (planned or {}).get(key) for key in ("format", "factor")}
    if asked != {key: (done or {}).get(key) for key in asked}:
        yield f"facts.rounding is {done}; the arm has {planned}"
    elif done and done["projections"] != record.facts["linears"].get("bf16"):
        yield f"facts.rounding has {done['projections']} projections; bf16 ones are more"
    elif done and not 0 < done["relative_change_mean"] <= max(1, done["factor"]):
        yield f"facts.rounding.relative_change_mean is {done['relative_change_mean']:.3g}"
    folds, folded = record.config["arm"].get("rollout_adapter"), record.facts.get("folded")
    if (folds == "folded") != bool((folded or {}).get("rollouts")):
        yield f"facts.folded is {folded}; the arm's rollout_adapter is {folds or 'apart'}"
    order = record.seed if record.config["scale"].get("permuted") else None
    if record.facts.get("order") != order:
        yield f"facts.order is {record.facts.get('order')}; the run's channels have {order}"


def counts(record: Record) -> Iterator[str]:
    """Yield which counts of modules and parameters differ from the model's."""
    arm = record.config["arm"]
    linears = sum((record.facts.get("linears") or {}).values())
    shape = shape_by_name(record.config["scale"]["checkpoint"])
    layers = shape.layers if shape is not None else linears // PROJECTIONS
    projections = PROJECTIONS * layers
    needed: dict[FactName, int] = {
        "norms_wrapped": 2 * layers + 1,
        "norms_trained": 2 * layers * arm["norms_trained"],
        "adapter_modules": projections if arm["training"] == "lora" else 0,
    }
    if shape is not None:
        needed["parameters_trainable"] = _trainable(record, shape)
    if linears != projections or not layers:
        yield f"facts.linears counts {linears} projections; {layers} blocks have {projections}"
    for name, count in needed.items():
        # Before training an adapter has no effect; some measurements leave it out.
        if name in ("adapter_modules", "parameters_trainable") and record.procedure == "dose":
            continue
        if record.facts.get(name) != count:
            yield f"facts.{name} is {record.facts.get(name)}; the model has {count}"


def _trainable(record: Record, shape: DecoderShape) -> int:
    arm = record.config["arm"]
    if arm["training"] == "none":
        return 0
    if arm["training"] == "full":
        return shape.parameters()
    norms = 2 * shape.layers * shape.hidden if arm["norms_trained"] else 0
    return shape.adapter_parameters(arm["lora_rank"]) + norms


def precision(record: Record) -> Iterator[str]:
    """Yield why the policy did not compute as the scale says, or shows no error of its format."""
    needed, done = record.config["scale"]["compute_dtype"], record.facts.get("compute")
    if (done or "").split(" ")[0] != needed:
        yield f"facts.compute is {done}; the scale has {needed}"
    error = record.facts.get("relative_weight_error_mean")
    # Another checkpoint may hold codes: then there is nothing to compare them with.
    stored = record.config["scale"]["checkpoint"] != TINY.name
    if record.config["arm"]["weight_format"] != "bf16" and error is None and not stored:
        yield "facts.relative_weight_error_mean is missing: nothing shows the rounding"
