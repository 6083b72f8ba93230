"""Which layout operands with different layouts get."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh

FRAMES, ROWS = ([Shard(0)], {0: (1, 1)}), ([Shard(1)], {0: (9, 7)})


def added(layouts, shape):
    mesh = shared_mesh(2)
    tensors = [torch.randn(shape, dtype=torch.float64) for _ in layouts]
    operands = [
        shard(t, mesh, placements, sizes, requires_grad=True)
        for t, (placements, sizes) in zip(tensors, layouts, strict=True)
    ]
    with count_communication() as counted:
        y = sum(operands[1:], start=operands[0])
    torch.testing.assert_close(y.full_tensor(), sum(tensors[1:], start=tensors[0]), rtol=1e-10, atol=0)
    y.sum().backward()
    kept = all(x.grad.placements == tuple(places) for x, (places, _) in zip(operands, layouts, strict=True))
    return y.placements, y.shard_sizes, counted.messages, kept


@pytest.mark.parametrize("layouts", [(FRAMES, ROWS), (ROWS, FRAMES)])
def test_of_two_dims_the_one_with_much_more_even_shards(layouts):
    """Two frames are shared as evenly as 16 rows, but not any longer after a frame more or less."""
    for placements, sizes, messages, kept in run_distributed(added, 2, layouts, (2, 16, 3)):
        assert (placements, sizes, messages, kept) == ((Shard(1),), {0: (9, 7)}, 1, True)


def test_of_one_dim_the_first_operands_sizes():
    layouts = [([Shard(1)], {0: sizes}) for sizes in ((15, 1), (8, 8))]
    for rank, (placements, sizes, messages, _) in enumerate(run_distributed(added, 2, layouts, (2, 16, 3))):
        assert (placements, sizes, messages) == ((Shard(1),), {0: (15, 1)}, rank)
    for placements, *_ in run_distributed(added, 2, (([Shard(1)], {0: (4, 4)}), ([Shard(0)], {0: (5, 4)})), (9, 8, 3)):
        assert placements == (Shard(1),)  # 5 of 8 is hardly coarser than 6 of 9
    layouts = [([Replicate()], None), FRAMES]
    for placements, sizes, messages, _ in run_distributed(added, 2, layouts, (2, 16, 3)):
        assert (placements, sizes, messages) == ((Shard(0),), {0: (1, 1)}, 0)


def added_on_two_dims(layouts, shape):
    mesh = shared_mesh((2, 2))
    tensors = [torch.randn(shape, dtype=torch.float64) for _ in layouts]
    operands = [shard(t, mesh, placements) for t, placements in zip(tensors, layouts, strict=True)]
    y = sum(operands[1:], start=operands[0])
    torch.testing.assert_close(y.full_tensor(), sum(tensors[1:], start=tensors[0]), rtol=1e-10, atol=0)
    return y.placements


def test_mesh_dims_are_decided_together():
    """The first mesh dim leaves the rows to the second one, which shards them already: nothing is gathered."""
    layouts = [(Shard(0), Replicate()), (Shard(1), Shard(0))]
    for order in (layouts, layouts[::-1]):
        assert run_distributed(added_on_two_dims, 4, order, (8, 6, 3)) == [(Shard(1), Shard(0))] * 4
