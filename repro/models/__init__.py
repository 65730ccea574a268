"""Policies: a transformers decoder with a quantised base, an adapter, and norms that take noise.

transformers imports torchao and bitsandbytes where they are installed. Their warnings about builds
for other machines, and torch's about them, concern nothing that is used here, so only errors are
shown.
"""

import logging

for _name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
