"""Set-up shared by the whole suite."""

from __future__ import annotations

import contextlib
import os

# Before torch is imported: several ranks share few cores, and one thread each is fastest then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import device
import hypothesis
import pytest
import torch
import turns
from device.build import NotAvailable, begin

torch.set_num_threads(1)

# No deadline: a first example pays for imports and caches. Derandomized: a red run must be red again when repeated.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    told = "how ranks communicate: as gloo does, or late (CONTRIBUTING.md)"
    parser.addoption("--process-group", choices=["gloo", "late"], help=told)
    told = "what ranks compute on: the CPU, an emulated CUDA device, or a real one with NCCL (docs/devices.md)"
    parser.addoption("--device", choices=device.NAMES, default="cpu", help=told)
    turns.add_options(parser)


def pytest_configure(config):
    if chosen := config.getoption("--process-group"):
        os.environ["SHARDTENSOR_TEST_PROCESS_GROUP"] = chosen
    for_all = contextlib.ExitStack()  # fixtures of modules are set up outside of device_of_ranks
    for_all.enter_context(device.on("cpu"))
    config.add_cleanup(for_all.close)


def pytest_generate_tests(metafunc):
    """Tests marked ``on_device`` run on the emulated device, too; with ``--device`` all run on that one only."""
    if metafunc.config.getoption("--device") == "cpu" and metafunc.definition.get_closest_marker("on_device"):
        metafunc.fixturenames.append("device_of_ranks")
        metafunc.parametrize("device_of_ranks", ["cpu", "emulated"], indirect=True)


def pytest_report_header(config):
    return turns.told(config)


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    late = os.environ.get("SHARDTENSOR_TEST_PROCESS_GROUP") == "late"
    for item in items:
        if late and (marker := item.get_closest_marker("on_gloo")):
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))
        on = config.getoption("--device")
        for name, skips in (("on_cpu", on != "cpu"), ("not_emulated", on == "emulated")):
            if skips and (marker := item.get_closest_marker(name)):
                item.add_marker(pytest.mark.skip(reason=marker.args[0]))
    turns.select(config, items)


def needs_emulated(item):
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return "emulated" in item.fixturenames or parameters.get("device_of_ranks") == "emulated"


def pytest_collection_finish(session):
    """Compile the emulated device, if tests need it, while the first tests run."""
    if not session.config.option.collectonly and any(map(needs_emulated, session.items)):
        begin()


def on_device_or_skip(name):
    try:
        return device.on(name)
    except NotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def device_of_ranks(request):
    """What the test's ranks compute on: ``"cpu"``, ``"emulated"`` or ``"cuda"``."""
    name = getattr(request, "param", request.config.getoption("--device"))
    with on_device_or_skip(name):
        yield name


@pytest.fixture
def emulated(request):
    """Ranks of the pool compute on the emulated device, whatever ``--device`` says."""
    if device.is_gpu(request.config.getoption("--device")):
        pytest.skip("counts what only the emulated device counts")
    with on_device_or_skip("emulated"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    from shardtensor.testing import TooFewDevices

    try:
        return (yield)
    except TooFewDevices as error:
        pytest.skip(str(error))
