"""Whether a template, somebody else's program, comes to an end: it is tried in a process apart.

Jinja's sandbox keeps a template from files and attributes, not from loops within loops nor from a
power of a power. The latter holds the interpreter where no signal reaches it, so that only another
process can be given up.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys

# Of a prompt's text: longer than any context, short enough to be tokenised within a second.
LONGEST_TEXT = 4_000_000
SECONDS = 10
_BYTES = 2**31
_TOO_LONG = 3  # exit status of the trial
# transformers' own tags around what the assistant says, which Jinja alone does not know.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_TRIAL = f"""
import json, resource, sys
from jinja2.sandbox import ImmutableSandboxedEnvironment
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
text, variables = json.load(sys.stdin)
environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
length = 0
for piece in environment.from_string(text).generate(**variables):
    length += len(piece)
    if length > {LONGEST_TEXT}:
        sys.exit({_TOO_LONG})
"""


@functools.lru_cache(maxsize=16)
def require_bounded(template: str, variables: str, what: str) -> None:
    """Raise unless a template ends within `SECONDS`, after at most `LONGEST_TEXT` characters.

    One that fails otherwise passes: whoever renders it says why.

    Parameters
    ----------
    template
        Jinja.
    variables
        What it is rendered with, as a JSON object.
    what
        Of the sentence.

    Raises
    ------
    ValueError
        If it does not.
    """
    text = _GENERATION.sub("", template)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _TRIAL],
            input=json.dumps([text, json.loads(variables)]),
            text=True,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{what} has come to no end after {SECONDS} seconds") from None
    if ended.returncode == _TOO_LONG:
        raise ValueError(f"{what} makes a prompt of more than {LONGEST_TEXT} characters")
