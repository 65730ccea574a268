"""Figures, drawn from records alone: `python -m figures --records runs --out figures_out`.

Each module draws one figure and has two functions: `rows(records) -> plain rows` and
`draw(rows) -> Figure`. Nothing is computed while drawing, and nothing here imports torch.
"""

import os

# Files alone are drawn. A notebook names a backend of its own, which is not installed here.
os.environ["MPLBACKEND"] = "agg"
