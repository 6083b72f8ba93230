"""Process groups of the package's own: made once, by their ranks alone, on all of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import scatter_tensor
from shardtensor.ranks.groups import forget_groups, new_group, number_of_groups, own_group
from shardtensor.testing import run_distributed, shared_mesh


@contextlib.contextmanager
def in_more_groups(more: int) -> Iterator[None]:
    """Inside the block this rank is in groups of itself alone: torch's, after whose number it names groups, and the
    package's. At the end every rank is in three more: torch waits forever if it makes a mesh where they differ.
    """
    rank = dist.get_rank()

    def make(groups: int) -> None:
        for _ in range(groups):
            dist.new_group([rank], use_local_synchronization=True)
            new_group("one rank of a test", [rank], number_of_groups(), torch.device("cpu"))

    make(more)
    try:
        yield
    finally:
        make(3 - more)


def made(more: tuple[int, ...]) -> int:
    mesh = shared_mesh((2, 2), ("data", "domain"))
    forget_groups()
    with in_more_groups(more[dist.get_rank()]):
        return made_inside(mesh)


def made_inside(mesh: DeviceMesh) -> int:
    line, device = mesh["domain"].get_group(), torch.empty(0, device=mesh.device_type).device
    ranks, number = dist.get_process_group_ranks(line), number_of_groups()
    own = own_group("a test", ranks, [line], device)
    assert own is not line and dist.get_process_group_ranks(own) == ranks
    total = torch.ones(1, device=device) + dist.get_rank()
    dist.all_reduce(total, group=own)
    assert total.item() == 2 + sum(ranks)
    assert own_group("a test", ranks, [line], device) is own
    grid = [mesh.get_group(m) for m in range(2)]
    everybody = own_group("a test", range(4), grid, device)
    assert everybody.size() == 4 and everybody is not own
    dist.all_reduce(total, group=everybody)
    assert total.item() == 2 * (2 + 1 + 2 + 5)
    forget_groups()
    assert own_group("a test", ranks, [line], device) is not own, "a group of another world"
    return number


@pytest.mark.on_device
@pytest.mark.parametrize("more", [(0, 0, 0, 0), (1, 0, 0, 2), (0, 3, 1, 0)])
def test_a_group_is_made_once_for_its_ranks_and_purpose(more):
    """Also where ranks are in different numbers of groups: torch would have them wait under different names."""
    numbers = run_distributed(made, 4, more)
    assert len(set(numbers)) > 1 or not any(more)


def made_meanwhile() -> tuple[str, str]:
    """The names of a group, for which rank 0 waits, and of torch's own, which it makes in another thread meanwhile."""
    rank, number = dist.get_rank(), number_of_groups()
    own: list[str] = []
    make = threading.Thread(
        target=lambda: own.append(new_group("a test", [0, 1], number, torch.device("cpu")).group_name)
    )
    time.sleep(2 * rank)
    make.start()
    time.sleep(1)
    other = dist.new_group([rank], use_local_synchronization=True).group_name
    make.join(60)
    return own[0], other


def test_groups_of_other_threads_have_torchs_names():
    ours, *theirs = run_distributed(made_meanwhile, 2)
    assert ours[0] == theirs[0][0] and ours[0] not in (ours[1], theirs[0][1])


@pytest.mark.on_device
@on_ranks(4)
def test_scatter_over_a_mesh_whose_ranks_are_in_different_numbers_of_groups():
    planes = shared_mesh((2, 2, 1), ("data", "domain", "one"))["domain", "one"]
    forget_groups()
    source = planes.mesh.flatten().tolist()[-1]
    whole = torch.arange(5.0, device=torch.empty(0, device=planes.device_type).device)
    with in_more_groups(dist.get_rank()):
        x = scatter_tensor(whole if dist.get_rank() == source else None, planes, source=source)
    assert torch.equal(x.to_local(), whole)
