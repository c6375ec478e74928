"""A native build that does not fit the Python code is told of: its twins stand in, far slower.

It is older than the code that wants more of it, or was made for another machine. Where none was
ever built, nothing is said: that was known when warmroute was installed.
"""

from __future__ import annotations

import sys

import kvkernels


def warn() -> None:
    """Write one line to stderr where there is a build that cannot be used. For programs' starts."""
    if kvkernels.UNUSABLE:
        print(
            f"warning: the native build of kvkernels does not fit: {kvkernels.UNUSABLE}; plain "
            "Python stands in, some twenty times slower. Build it anew: `pip install -e .` "
            "in a checkout, `pip install --force-reinstall warmroute` elsewhere",
            file=sys.stderr,
        )
