"""Errors that all ranks raise alike, before anything is sent: tables of calls, and the test of a row."""

from __future__ import annotations

import re
import sys

from shardtensor.testing import count_communication, run_expecting_errors


def raises_alike(operand, name, ranks=2, silent=True):
    """A row of the table ``ERRORS`` of a test module: ``{name: (function, kind of error, text)}``.

    The function is called with what ``operand``, a function of that module, makes on the rank. The text is a part of
    the error's, or a pattern of it. If not ``silent``, the call may communicate.
    """
    _, kind, text = sys.modules[operand.__module__].ERRORS[name]
    for error in run_expecting_errors(call, ranks, operand, name, silent):
        assert isinstance(error, kind), repr(error)
        assert text in str(error) or re.search(text, str(error), re.DOTALL), error


def call(operand, name, silent):
    x, function = operand(), sys.modules[operand.__module__].ERRORS[name][0]
    if not silent:
        return function(x)
    with count_communication() as counted:
        try:
            function(x)
        finally:
            assert not counted.messages and not counted.collectives
