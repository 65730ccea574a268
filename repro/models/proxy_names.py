"""Names of the policies pre-trained here, and the folder in which each lies.

=======================  ========================================================================
`proxy-30m`              16-bit weights of the smaller policy
`proxy-30m-early`        the same, trained for a shorter time
`proxy-120m`             16-bit weights of the larger
`<any>-nvfp4`            its NVFP4 codes, rounded to nearest
`<any>-mxfp4`            its MXFP4 codes, rounded to nearest
`<any>-nf4`              its NF4 codes, rounded to nearest
=======================  ========================================================================

They lie side by side in `$REPRO_POLICIES`, else in the user's cache folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from repro.spec.tier import policies_folder

# Beside the weights of every policy pre-trained here: recipe, seed, loss and quality.
SUMMARY_FILE = "pretraining.json"

PROXY_SIZES = ("30m", "30m-early", "30m-needle4", "30m-needle05", "120m")
PROXY_VARIANTS = ("nvfp4", "mxfp4", "nf4")

_NAME = re.compile(rf"proxy-({'|'.join(PROXY_SIZES)})(?:-({'|'.join(PROXY_VARIANTS)}))?")


def is_proxy_name(name: str) -> bool:
    """Whether a checkpoint's name is one of the table above."""
    return _NAME.fullmatch(name) is not None


def size_of(name: str) -> str:
    """Return the size in a policy's name.

    Raises
    ------
    ValueError
        When the name is none of the table above.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} names no policy pre-trained here; such as proxy-30m is needed")
    return match[1]


def proxy_folder(name: str) -> Path:
    """Return where the policy of that name lies, whether or not it is there."""
    size_of(name)
    return policies_folder() / name
