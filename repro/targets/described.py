"""What the paper prints that is not run: settings, diagrams, definitions and summaries.

They are targets all the same, so that `repro list` shows every table and figure, and says of each
why there is nothing to run.
"""

from __future__ import annotations

from repro.spec.target import Target


def _described(
    name: str, title: str, statement: str, source: str, why_not: str, paper: str = ""
) -> Target:
    return Target(
        name=name,
        title=title,
        statement=statement,
        source=source,
        why_not=why_not,
        paper_file=paper,
    )


TABLE4 = _described(
    "table4",
    "Table 4: hyperparameters",
    "the settings behind Tables 1 and 2",
    "Table 4; App. E",
    "nothing to run: settings, which the paper tier of table1 takes",
    "table4",
)
FIGURE1 = _described(
    "figure1",
    "Fig. 1: speed and accuracy in one picture (7B)",
    "QeRL is the fastest and matches full training",
    "Fig. 1",
    "nothing of its own: bars of Tables 1, 2, 3 and 6",
    "figure1",
)
FIGURE2 = _described(
    "figure2",
    "Fig. 2: the framework",
    "noise is drawn for the rollout's copy alone; the trainer's stays clean",
    "Fig. 2",
    "a diagram",
)
FIGURE3 = _described(
    "figure3",
    "Fig. 3: LoRA, QLoRA and QeRL side by side",
    "QeRL multiplies four-bit weights by 16-bit activations in one kernel",
    "Fig. 3",
    "a diagram",
)
FIGURE6 = _described(
    "figure6",
    "Fig. 6: noise merged into RMSNorm",
    "the noise of a block's two norms reaches q, k, v and gate, up",
    "Fig. 6; Eq. 10 to 12",
    "a diagram; the identity that it rests on is a test of the noise",
)
