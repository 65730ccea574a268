"""Pictures, drawn from checks of records: `python -m figures --records runs --out figures_out`.

Kinds: `curves`, rows with `intervals`, `bars`; `paper_pictures` are in its panels.
What they show is what pages say, computed in the same place. Nothing here imports torch.
"""

import os

# Pictures are only written to files; a notebook's backend may not be installed here.
os.environ["MPLBACKEND"] = "agg"
