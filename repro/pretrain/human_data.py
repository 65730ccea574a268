"""Human-written problems for the proxy policies: some to train on, some only to be asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from repro.data.human_working import WorkedProblem, worked_problems
from repro.data.load import DATA_VARIABLE
from repro.data.problem import DataError, Problem, read_problems
from repro.spec.config import digest_of

# Folders: the set trained on, and those that are only asked.
_TRAINED_ON = "mawps"
_ASKED = ("mawps", "svamp", "gsm8k")


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanData:
    """Human-written problems from a named folder.

    Attributes
    ----------
    worked
        Training problems with worked steps.
    left_out
        Training problems whose equation gives no steps.
    asked
        Test problems by set, never trained on.
    """

    worked: tuple[WorkedProblem, ...] = ()
    left_out: int = 0
    asked: dict[str, list[Problem]] = field(default_factory=dict)

    def digest(self) -> str:
        """Return the SHA-256 hex digest of the problems that are trained on."""
        return digest_of([[w.problem.question, *w.steps, w.answer] for w in self.worked])


def read_human_data(folder: str | None) -> HumanData:
    """Read `mawps/train.jsonl`, and what there is of `{mawps,svamp,gsm8k}/test.jsonl`.

    Parameters
    ----------
    folder
        The folder that holds them.

    Raises
    ------
    DataError
        When no folder is named, it has no MAWPS training problems, or a file is broken.
    """
    if not folder:
        raise DataError(
            f"human-written problems are asked for and no folder is named: give --human-data, or "
            f"set {DATA_VARIABLE}"
        )
    root = Path(folder).expanduser()
    train = root / _TRAINED_ON / "train.jsonl"
    if not train.is_file():
        raise DataError(f"{train} is missing; --human-data needs a folder that holds it")
    problems = read_problems(train)
    worked = worked_problems(problems)
    asked = {
        name: read_problems(root / name / "test.jsonl")
        for name in _ASKED
        if (root / name / "test.jsonl").is_file()
    }
    return HumanData(worked=tuple(worked), left_out=len(problems) - len(worked), asked=asked)
