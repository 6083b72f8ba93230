"""The counter of messages: exact numbers for every kind of communication, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from on_ranks import on_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardtensor.testing import count_communication, run_distributed, shared_mesh

SPLITS = [[2, 3, 0], [0, 1, 0], [4, 0, 5]]  # rows that rank (row) sends to rank (column)


def splits():
    me = dist.get_rank()
    return SPLITS[me], [row[me] for row in SPLITS]


def uneven_all_to_all(how):
    send, receive = splits()
    data = torch.zeros(sum(send), 2, dtype=torch.float64)
    with count_communication() as counted:
        if how == "c10d":
            dist.all_to_all_single(data.new_empty(sum(receive), 2), data, receive, send)
        else:
            functional.all_to_all_single(data, receive, send, dist.group.WORLD).wait()
    return counted


@pytest.mark.parametrize("how", ["c10d", "functional"])
def test_all_to_all_counts_the_pieces_for_others(how):
    first, second, third = run_distributed(uneven_all_to_all, 3, how)
    assert (first.messages, first.bytes_sent, dict(first.sent_to)) == (1, 48, {1: 48})
    assert (second.messages, second.bytes_sent) == (0, 0)
    assert (third.messages, third.bytes_sent) == (1, 64)
    assert (first.received_messages, first.bytes_received, dict(first.received_from)) == (1, 64, {2: 64})
    assert (second.received_messages, second.bytes_received) == (1, 48)
    assert (third.received_messages, third.bytes_received) == (0, 0)
    for counted in (first, second, third):
        assert dict(counted.collectives) == {"all_to_all": 1} and counted.collective_bytes == 0


@on_ranks(3)
def test_no_splits_are_even_splits():
    with count_communication() as counted:
        dist.all_to_all_single(torch.empty(6, 2), torch.empty(6, 2))
    assert (counted.messages, counted.bytes_sent, counted.received_messages, counted.bytes_received) == (2, 32, 2, 32)


@on_ranks(3)
def test_sends_count_unless_they_are_empty():
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, empty = torch.zeros(5, dtype=torch.float16), torch.zeros(0)
    with count_communication() as counted:
        operations = [
            dist.P2POp(dist.isend, tensor, (rank + 1) % size),
            dist.P2POp(dist.irecv, torch.empty_like(tensor), (rank - 1) % size),
            dist.P2POp(dist.isend, empty, (rank + 1) % size),
            dist.P2POp(dist.irecv, torch.empty_like(empty), (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    rank = dist.get_rank()
    assert (counted.messages, counted.bytes_sent) == (1, 10)
    assert (counted.received_messages, counted.bytes_received) == (1, 10)
    assert dict(counted.sent_to) == {(rank + 1) % 3: 10} and dict(counted.received_from) == {(rank - 1) % 3: 10}
    assert not counted.collectives


def send_in_subgroup():
    group = shared_mesh((2, 2), ("a", "b")).get_group("a")
    ranks = dist.get_process_group_ranks(group)
    with count_communication() as counted:
        if dist.get_rank() == ranks[0]:
            dist.send(torch.zeros(1), ranks[1], group=group)
        else:
            dist.recv(torch.zeros(1), ranks[0], group=group)
    return dict(counted.sent_to), dict(counted.received_from)


def test_peers_are_told_by_their_global_rank():
    assert run_distributed(send_in_subgroup, 4) == [({2: 4}, {}), ({3: 4}, {}), ({}, {0: 4}), ({}, {1: 4})]


@on_ranks(2)
def test_collectives_have_one_name_each():
    tensor, size = torch.zeros(6), dist.get_world_size()
    with count_communication() as counted:
        dist.all_reduce(tensor)
        functional.all_reduce(tensor, "sum", dist.group.WORLD).wait()
        dist.all_gather([torch.empty(6) for _ in range(size)], tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
        functional.reduce_scatter_tensor(tensor, "sum", 0, dist.group.WORLD).wait()
    assert counted.collectives == {
        "all_reduce": 2,
        "all_gather": 1,
        "broadcast": 1,
        "barrier": 1,
        "reduce_scatter": 1,
    }
    assert counted.collective_bytes == 5 * 24
    assert counted.messages == 0


@on_ranks(2)
def test_what_dtensor_does_inside_is_counted_in_backward_too():
    mesh = shared_mesh(2)
    local = torch.ones(3, 4, requires_grad=True)
    with count_communication() as forward:
        # With a shape: without one, sizes are compared along axes along which another test has sharded unevenly.
        part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 4)), stride=(4, 1))
        full = part.full_tensor(grad_placements=[Partial()])
    with count_communication() as backward:
        full.sum().backward()
    with count_communication() as reduced:
        DTensor.from_local(local, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    assert dict(forward.collectives) == {"all_gather": 1} and forward.collective_bytes == 48
    assert dict(backward.collectives) == {"reduce_scatter": 1} and dict(reduced.collectives) == {"all_reduce": 1}
