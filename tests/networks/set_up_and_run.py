"""Runs a program where torchvision may not load: ``python set_up_and_run.py program [arguments]``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torchvision_set_up  # noqa: F401

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
