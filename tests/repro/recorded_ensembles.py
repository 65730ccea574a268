"""The ensembles behind the proxy tier's blessed records, for tests of memory estimates."""

from __future__ import annotations

from dataclasses import dataclass, field

from repro.evidence.record import Record
from repro.evidence.store import Blessed
from repro.run.carry_out import is_ensemble
from repro.run.places import expected_folder
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.tier import SHARING_VARIABLE, Tier
from repro.targets import find

# Of these, two or three starts shared one card (docs/proxy_tier.md): they were cut
# smaller than the card would have held, and two that began in one second look like one. Where
# workers of one start share a card, records say so.
_SHARED = ("85ab40e", "08fcdb7", "0236d39", "aba11ad")


@dataclass
class RecordedEnsemble:
    """Runs that were trained together on one device, and their records."""

    runs: list[RunConfig] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


def recorded_ensembles() -> list[RecordedEnsemble]:
    """Return the ensembles that had a card for themselves and whose runs finished.

    Records that began together share one.
    """
    collected: dict[tuple[str, str], RecordedEnsemble] = {}
    blessed = Blessed(expected_folder(None), "proxy", "nvidia_h200")
    for tier, target in blessed.targets():
        for entry in blessed.entries(tier, target):
            record = entry.read()
            (run,) = plan(find(target), Tier.PROXY, [record.seed], [record.arm])
            variables = record.environment["variables"]
            shared = record.commit.startswith(_SHARED) or SHARING_VARIABLE in variables
            if is_ensemble(run) and record.ok and not shared:
                began = (record.started, variables["CUDA_VISIBLE_DEVICES"])
                ensemble = collected.setdefault(began, RecordedEnsemble())
                ensemble.runs.append(run)
                ensemble.records.append(record)
    return list(collected.values())
