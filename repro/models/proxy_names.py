"""Names of the policies pre-trained here, and the folder in which each lies.

=======================  ========================================================================
`proxy-30m`              16-bit weights of the smaller policy
`proxy-30m-early`        the same, trained for a shorter time
`proxy-30m-needle4`      the same with its habit of working made rare (4 %)
`proxy-30m-needle05`     rarer still (0.5 %)
`proxy-120m`             16-bit weights of the larger
`<any>-seed2`            the same recipe from pre-training seed 2; without it the seed is 0
`<any>-nvfp4`            its NVFP4 codes, rounded to nearest
`<any>-mxfp4`            its MXFP4 codes, rounded to nearest
`<any>-nf4`              its NF4 codes, rounded to nearest
=======================  ========================================================================

A seed draws the initial weights and the stream of documents (which, and in which order); recipe,
tokenizer and the problems that the policy is examined on are those of seed 0. A needle goes on from
`proxy-30m` of its own seed.

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

# Seed 0 has no suffix: one policy, one name.
_SIZE = rf"({'|'.join(PROXY_SIZES)})(?:-seed([1-9]\d*))?"
_NAME = re.compile(rf"proxy-({_SIZE})(?:-(?:{'|'.join(PROXY_VARIANTS)}))?")


def is_proxy_name(name: str) -> bool:
    """Whether a checkpoint's name is one of the table above."""
    return _NAME.fullmatch(name) is not None


def seeded(name: str, seed: int) -> str:
    """Return the name of the policy of a pre-training seed, given that of seed 0."""
    return f"{name}-seed{seed}" if seed else name


def size_and_seed(size: str) -> tuple[str, int]:
    """Return the size and the pre-training seed that `pretrain-proxy --size` names.

    Raises
    ------
    ValueError
        When there is no such size, or the seed is not written as names have it.
    """
    match = re.fullmatch(_SIZE, size)
    if match is None:
        known = ", ".join(PROXY_SIZES)
        raise ValueError(
            f"--size {size}: there is {known}, each with -seed1, -seed2, ... for other "
            "pre-training seeds than 0"
        )
    return match[1], int(match[2] or 0)


def size_of(name: str) -> str:
    """Return the size in a policy's name with its seed, as `pretrain-proxy --size` takes it.

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
