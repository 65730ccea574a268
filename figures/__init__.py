"""Pictures, drawn from checks of records: `python -m figures --records runs --out figures_out`.

There are four kinds: `curves`, rows with `intervals`, `bars` and the `roofline`; `floors` draws the
imports of the source. Pictures and pages share the computation of their values. Needs no torch.
"""

import os

# Pictures are only written to files; a notebook's backend may not be installed here.
os.environ["MPLBACKEND"] = "agg"
