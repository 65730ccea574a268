"""Pictures, drawn from checks of records: `python -m figures --records runs --out figures_out`.

Four kinds: `curves`, rows with `intervals`, `bars` and the `roofline`.
What they show is what pages say, computed in the same place. Nothing here imports torch.
"""

import os

# Files alone are drawn. A notebook names a backend of its own, which is not installed here.
os.environ["MPLBACKEND"] = "agg"
