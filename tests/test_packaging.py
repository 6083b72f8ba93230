"""What an installation promises: few hard dependencies, types, and an import that leaves the test tools alone."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest


def requirements() -> list[str]:
    try:
        return metadata.requires("shardtensor") or []
    except metadata.PackageNotFoundError:
        pytest.skip("shardtensor is used from its source tree, not installed")


def test_torch_and_wrapt_are_the_only_hard_dependencies():
    hard = {re.split(r"[<>=!~ ;\[]", line)[0] for line in requirements() if "extra ==" not in line}
    assert hard == {"torch", "wrapt"}


def test_natten_is_an_extra_with_an_exact_version():
    assert [line for line in requirements() if line.startswith("natten")] == ['natten==0.21.7; extra == "natten"']


def test_types_are_shipped():
    package = find_spec("shardtensor")
    assert package is not None
    assert any((Path(folder) / "py.typed").is_file() for folder in package.submodule_search_locations or [])


def test_the_test_tools_are_not_imported_by_the_package():
    code = "import sys, shardtensor; print([name for name in sys.modules if name.startswith('shardtensor.testing')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == "[]"
