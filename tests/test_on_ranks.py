"""Tests that are one function: where it runs, what it is given, and how its failure reads."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from shardtensor.testing import DistributedFailure


@on_ranks(2)
def leaves_its_rank(folder, *, word="rank"):
    (folder / f"{word} {dist.get_rank()}").touch()


@on_ranks(2)
def fails_on(rank):
    assert dist.get_rank() != rank, f"the rank {rank} of two"


@on_ranks(1, timeout=0.3)
def never_ends():
    while True:
        pass


def test_each_rank_runs_the_function(tmp_path):
    leaves_its_rank(folder=tmp_path)
    leaves_its_rank(folder=tmp_path, word="again")
    assert {path.name for path in tmp_path.iterdir()} == {"rank 0", "rank 1", "again 0", "again 1"}


@pytest.mark.parametrize("mesh_shape", [1, 2, (1, 2)])
@pytest.mark.parametrize("x", [torch.arange(3), torch.arange(4)], ids=["three", "four"])
@on_ranks("mesh_shape")
def test_parameters_go_to_the_ranks_and_may_be_their_number(x, mesh_shape):
    """As many ranks add the parameter up as the other parameter says."""
    total = x.clone()
    dist.all_reduce(total)
    ranks = math.prod(mesh_shape) if isinstance(mesh_shape, tuple) else mesh_shape
    assert total.tolist() == [ranks * n for n in range(len(x))]


def test_a_failure_names_the_test_and_the_rank():
    with pytest.raises(DistributedFailure) as caught:
        fails_on(rank=1)
    text = str(caught.value)
    assert text.startswith("1 of 2 ranks failed in test_on_ranks.fails_on.on_each_rank\n--- rank 1 raised\nTraceback")
    assert "AssertionError: the rank 1 of two" in text and text.endswith("--- rank 0 returned")


def test_ranks_that_do_not_return_in_time_are_reported():
    with pytest.raises(DistributedFailure, match=r"(?s)did not return within .* in never_ends") as caught:
        never_ends()
    assert caught.value.hung == (0,)
