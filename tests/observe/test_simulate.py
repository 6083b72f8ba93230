"""Every rank of a large world in one process."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from shardtensor.testing import count_communication, run_expecting_errors, shared_mesh, simulate_ranks


def shift():
    mesh = shared_mesh(dist.get_world_size(), "x")
    rank, size = mesh.get_local_rank(), mesh.size()
    send = [int(abs(rank - peer) == 1) for peer in range(size)]
    with count_communication() as counted:
        dist.all_to_all_single(torch.empty(sum(send)), torch.empty(sum(send)), send, send, group=mesh.get_group())
    return counted.messages


def chunk_sum_shape(shape):
    tensor = DTensor.from_local(torch.ones(*shape), shared_mesh(4), [Shard(0)], run_check=False)
    return tuple(tensor.relu().to_local().shape), tensor.device_mesh.get_coordinate()


def test_neighbours_exchange_in_a_world_of_hundreds():
    messages = simulate_ranks(shift, 257)
    assert messages == [1] + [2] * 255 + [1]
    assert not dist.is_initialized()


def test_a_rank_does_not_see_the_last_ones_mesh():
    assert [tuple(at) for _, at in simulate_ranks(chunk_sum_shape, 4, (2, 3))] == [(0,), (1,), (2,), (3,)]


def test_some_ranks_only():
    assert simulate_ranks(dist.get_rank, 1000, only=[0, 999]) == [0, 999]


def test_the_group_is_gone_after_an_error():
    with pytest.raises(ZeroDivisionError):
        simulate_ranks(lambda: 1 / (dist.get_rank() - 1), 4)
    assert not dist.is_initialized()


def nested():
    return simulate_ranks(dist.get_rank, 2)


def test_a_running_group_is_refused():
    for error in run_expecting_errors(nested, 2):
        assert isinstance(error, RuntimeError) and re.search(r"of a \S*gloo\S* group already", str(error))


def test_the_hook_for_errors_is_put_back():
    """torch puts one in front that names the rank, with each process group."""
    before = sys.excepthook
    simulate_ranks(dist.get_rank, 3)
    assert sys.excepthook is before
