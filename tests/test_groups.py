"""Process groups of the package's own: made once, by their ranks alone, on all of them or on none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardtensor._compat.c10d import number_of_groups
from shardtensor.ranks import groups
from shardtensor.ranks.groups import own_group
from shardtensor.testing import run_distributed, shared_mesh


def in_as_many_groups() -> None:
    """Groups of themselves alone for ranks that are in fewer than others: this process may have served other tests."""
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number_of_groups())
    for _ in range(max(numbers) - number_of_groups()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def made() -> None:
    mesh = shared_mesh((2, 2), ("data", "domain"))
    in_as_many_groups()
    groups.forget_groups()
    line, device = mesh["domain"].get_group(), torch.empty(0, device=mesh.device_type).device
    ranks = dist.get_process_group_ranks(line)
    own = own_group("a test", ranks, [line], device)
    assert own is not line and dist.get_process_group_ranks(own) == ranks
    total = torch.ones(1, device=device) + dist.get_rank()
    dist.all_reduce(total, group=own)
    assert total.item() == 2 + sum(ranks)
    number = number_of_groups()
    assert own_group("a test", ranks, [line], device) is own
    grid = [mesh.get_group(m) for m in range(2)]
    everybody = own_group("a test", range(4), grid, device)
    assert everybody.size() == 4 and everybody is not own and number_of_groups() == number + 1
    groups.forget_groups()
    assert own_group("a test", ranks, [line], device) is not own, "a group of another world"


def test_a_group_is_made_once_for_its_ranks_and_purpose():
    run_distributed(made, 4)


def uneven() -> int:
    for _ in range(dist.get_rank() % 3):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return number_of_groups()


def test_ranks_that_have_served_other_tests_are_made_equal():
    assert len(set(run_distributed(uneven, 4))) > 1
    run_distributed(made, 4)


@pytest.mark.parametrize("more_on", [0, 1])
def test_ranks_that_are_in_different_numbers_of_groups_do_without(more_on):
    """torch would have them wait for each other under different names."""
    assert run_distributed(one_has_more, 2, more_on) == [True, True]


def one_has_more(more_on: int) -> bool:
    mesh, rank = shared_mesh(2), dist.get_rank()
    device = torch.empty(0, device=mesh.device_type).device
    if rank == more_on:
        dist.new_group([rank], use_local_synchronization=True)
    groups.forget_groups()
    found = own_group("a test", range(2), [mesh.get_group()], device)
    if rank != more_on:  # the processes serve other tests
        dist.new_group([rank], use_local_synchronization=True)
    return found is None
