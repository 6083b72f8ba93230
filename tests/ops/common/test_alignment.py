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


def test_of_one_dim_the_first_operands_sizes_unless_others_are_much_more_even():
    """The first tensor goes to the sizes of the second one, or stays where those are about as even."""
    for first, second, kept in [((9, 7), (8, 8), (9, 7)), ((15, 1), (8, 8), (8, 8)), ((8, 8), (15, 1), (8, 8))]:
        layouts = [([Shard(1)], {0: sizes}) for sizes in (first, second)]
        for placements, sizes, _, grads_kept in run_distributed(added, 2, layouts, (2, 16, 3)):
            assert (placements, sizes, grads_kept) == ((Shard(1),), {0: kept}, True)


def test_much_more_even_shards_are_not_worth_many_bytes():
    """What is broadcast comes to the sizes of what it is added to, whichever comes first."""
    x, y = ([Shard(0)], {0: (15, 1)}), ([Shard(0)], {0: (8, 8)})
    for layouts, shapes in [((x, y), ((16, 9), (16, 1))), ((y, x), ((16, 1), (16, 9)))]:
        assert run_distributed(broadcast, 2, layouts, shapes) == [{0: (15, 1)}] * 2


def broadcast(layouts, shapes):
    mesh = shared_mesh(2)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    operands = [shard(t, mesh, *layout) for t, layout in zip(tensors, layouts, strict=True)]
    y = operands[0] * operands[1]
    torch.testing.assert_close(y.full_tensor(), tensors[0] * tensors[1], rtol=1e-10, atol=0)
    return y.shard_sizes


def joined(layouts, channels):
    mesh = shared_mesh(2)
    tensors = [torch.randn(2, c, 16, dtype=torch.float64) for c in channels]
    operands = [shard(t, mesh, *layout, requires_grad=True) for t, layout in zip(tensors, layouts, strict=True)]
    y = torch.cat(operands, 1)
    torch.testing.assert_close(y.full_tensor(), torch.cat(tensors, 1), rtol=1e-10, atol=0)
    y.square().sum().backward()
    for x, t in zip(operands, tensors, strict=True):
        assert x.grad.placements == x.placements and x.grad.shard_sizes == x.shard_sizes
        torch.testing.assert_close(x.grad.full_tensor(), 2 * t, rtol=1e-10, atol=0)
    return y.placements, y.shard_sizes


def test_joined_channels_have_the_sizes_of_the_skip_connection():
    """What comes from a stage of one row is on one rank; rows that are joined to it are not moved there."""
    up, skip = ([Shard(2)], {0: (16, 0)}), ([Shard(2)], {0: (8, 8)})
    for layouts, channels in [((up, skip), (2, 1)), ((skip, up), (1, 2)), ((up, skip, up), (1, 2, 1))]:
        assert run_distributed(joined, 2, layouts, channels) == [((Shard(2),), {0: (8, 8)})] * 2
    assert run_distributed(joined, 2, (up, skip), (9, 1)) == [((Shard(2),), {0: (16, 0)})] * 2
    slightly = ([Shard(2)], {0: (9, 7)})
    assert run_distributed(joined, 2, (slightly, skip), (1, 1)) == [((Shard(2),), {0: (9, 7)})] * 2


def test_of_two_dims_of_which_one_is_hardly_coarser_the_first_operands():
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
