"""Two hosts, modelled by network namespaces with one cable between them: the globe on both, and a cable that is cut.

Needs root and ``ip``; skipped elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardtensor

ROOT = Path(shardtensor.__file__).parents[1]
HOSTS = ("shardtensor0", "shardtensor1")
ADDRESSES = ("10.123.45.1", "10.123.45.2")


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def can_make_hosts():
    if shutil.which("ip") is None or os.geteuid():
        return False
    made = ip("netns", "add", HOSTS[0], check=False).returncode == 0
    ip("netns", "del", HOSTS[0], check=False)
    return made


pytestmark = pytest.mark.slow


@pytest.fixture
def hosts():
    """Two namespaces whose interfaces ``cable`` are the ends of one pair."""
    if not can_make_hosts():
        pytest.skip("needs root and network namespaces")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip("-n", HOSTS[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
        yield HOSTS
    finally:
        for host in HOSTS:
            ip("netns", "del", host, check=False)


def start(host, rank, program, *arguments):
    """torchrun on one of the hosts, with one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--node-rank", str(rank), "--master-addr", ADDRESSES[0], "--master-port", "29511"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command, str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def finish(processes, timeout):
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=timeout)[0])
    finally:
        for process in processes:
            process.kill()
    return outputs


def test_the_globe_on_two_hosts(hosts):
    globe = ROOT / "examples" / "globe" / "train.py"
    options = ("--resolution", "128", "--steps", "3", "--check")
    processes = [start(host, rank, globe, *options) for rank, host in enumerate(hosts)]
    outputs = finish(processes, 300)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "128 x 256 pixels on 2 x cpu" in outputs[0], outputs


def test_a_host_that_is_cut_off_is_told_as_a_lost_rank(hosts):
    program = Path(__file__).with_name("failing_rank.py")
    processes = [start(host, rank, program, "cable") for rank, host in enumerate(hosts)]
    for line in processes[0].stdout:
        if "step 2" in line:
            break
    ip("-n", hosts[0], "link", "set", "cable", "down")
    start_of_it = time.monotonic()
    errors = [error_of(process) for process in processes]
    print(f"both told {time.monotonic() - start_of_it:.1f} s after the cut")
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun would go on looking for the other host
    assert "LostRankError: rank 0: " in errors[0] and "rank 1 has said nothing" in errors[0]
    # The store is on the first host.
    assert "LostRankError: rank 1: " in errors[1]
    assert "the store by which the ranks found each other does not answer" in errors[1]


def error_of(process):
    """The line with the error; where there is none, the end of the output shows what there is."""
    return next((line for line in process.stdout if "LostRankError: " in line), "")
