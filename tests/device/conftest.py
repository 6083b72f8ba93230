"""Tests of, and on, the emulated device."""

from __future__ import annotations

import pytest

import device
from device.build import NoCompiler


@pytest.fixture
def emulated(request):
    """Ranks of the pool compute on the emulated device, whatever ``--device`` says."""
    if request.config.getoption("--device") == "cuda":
        pytest.skip("counts what only the emulated device counts")
    try:
        chosen = device.on("emulated")
    except NoCompiler as error:
        pytest.skip(str(error))
    with chosen:
        yield
