"""``SHARDTENSOR_DEBUG=1``: ranks compare their histories before each communication, with lines of code.

Without it they do so where a communication is new, see [Note: first communication] in history.py.
"""

from __future__ import annotations

import os

# The dict behind os.environ, which is asked once per communication: os.environ itself takes ten times as long.
environment = os.environ._data  # type: ignore[attr-defined]
NAME, *_OFF = (os.environ.encodekey(text) for text in ("SHARDTENSOR_DEBUG", "", "0"))


def debug_enabled() -> bool:
    """Whether ``SHARDTENSOR_DEBUG`` requests cross-rank checks. It must be the same on all ranks.

    Read on every call, so that a test or a debugger can set it in a running process.
    """
    value = environment.get(NAME)
    return value is not None and value not in _OFF
