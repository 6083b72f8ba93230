"""Set-up shared by the whole suite."""

from __future__ import annotations

import os

# Before torch is imported: several ranks share few cores, and one thread each is fastest then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# No deadline: a first example pays for imports and caches. Derandomized: a red run must be red again when repeated.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    told = "how ranks communicate: as gloo does, or late (CONTRIBUTING.md)"
    parser.addoption("--process-group", choices=["gloo", "late"], help=told)


def pytest_configure(config):
    if chosen := config.getoption("--process-group"):
        os.environ["SHARDTENSOR_TEST_PROCESS_GROUP"] = chosen


def pytest_collection_modifyitems(items):
    if os.environ.get("SHARDTENSOR_TEST_PROCESS_GROUP") == "late":
        for item in items:
            if marker := item.get_closest_marker("on_gloo"):
                item.add_marker(pytest.mark.skip(reason=marker.args[0]))
