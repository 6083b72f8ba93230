"""Between every two layouts: values, gradients and what travels."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from alike import raises_alike
from halves import half_of, in_halves
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.communication.redistribute import all_gather_each, bytes_between
from shardtensor.testing import count_communication, shard, shared_mesh


def layouts_of(ranks, shape):
    """Layouts on one mesh dim: even, uneven and empty shards of each dim, whole, and summands."""
    result = [(Replicate(), None), (Partial(), None)]
    for dim, n in enumerate(shape):
        result += [(Shard(dim), None), (Shard(dim), (n,) + (0,) * (ranks - 1))]
        result += [(Shard(dim), (0, *(1,) * (ranks - 2), n - ranks + 2))] if ranks > 1 else []
    return result


def sizes_dict(sizes):
    return {m: s for m, s in enumerate(sizes) if s is not None}


def check_move(mesh, whole, source, target):
    """Forward and gradient of one redistribution."""
    (old, old_sizes), (new, new_sizes) = source, target
    what = f"{old} {old_sizes} -> {new} {new_sizes} on {tuple(mesh.shape)}"
    x = shard(whole, mesh, old, sizes_dict(old_sizes), requires_grad=True)
    y = x.redistribute(placements=new, shard_sizes=sizes_dict(new_sizes))
    assert y.placements == tuple(new), what
    for m, given in sizes_dict(new_sizes).items():
        assert y.shard_sizes[m] == given, what
    at = mesh.get_coordinate()
    expected = whole
    for m, placement in enumerate(new):
        if isinstance(placement, Shard):
            sizes = y.shard_sizes[m]
            expected = expected.narrow(placement.dim, sum(sizes[: at[m]]), sizes[at[m]])
    local = y.to_local().detach()
    for m, placement in enumerate(new):
        if placement.is_partial():
            local = local.clone()
            dist.all_reduce(local, group=mesh.get_group(m))
    torch.testing.assert_close(local, expected, rtol=1e-12, atol=1e-12, msg=what)

    cotangent = torch.randn(whole.shape, dtype=whole.dtype, generator=seeded(3))
    y.full_tensor().backward(cotangent)
    assert tuple(x.grad.placements) == tuple(Replicate() if p.is_partial() else p for p in old), what
    assert x.grad.shard_sizes == x.shard_sizes, what
    torch.testing.assert_close(x.grad.full_tensor(), cotangent, rtol=1e-12, atol=1e-12, msg=what)


@pytest.mark.parametrize(("ranks", "half"), in_halves([2, 3, 4]))
@on_ranks("ranks")
def test_every_pair_of_layouts(ranks, half):
    mesh = shared_mesh(ranks)
    whole = torch.randn(7, 5, dtype=torch.float64, generator=seeded(0))
    layouts = layouts_of(ranks, whole.shape)
    for (old, old_sizes), (new, new_sizes) in half_of(itertools.product(layouts, layouts), half):
        check_move(mesh, whole, ([old], [old_sizes]), ([new], [new_sizes]))


@pytest.mark.parametrize(("mesh_shape", "half"), in_halves([((2, 2),), ((1, 3),), ((4, 1),)]), ids=str)
@on_ranks("mesh_shape")
def test_every_pair_of_layouts_on_two_mesh_dims(mesh_shape, half):
    """Mesh dims that trade their tensor dims are among the pairs."""
    mesh = shared_mesh(mesh_shape)
    whole = torch.randn(6, 5, dtype=torch.float64, generator=seeded(0))
    per_dim = []
    for ranks in mesh_shape:
        uneven = [[n] if ranks == 1 else [n - 1, 1] + [0] * (ranks - 2) for n in whole.shape]
        per_dim.append(
            [(Replicate(), None), (Partial(), None), (Shard(0), tuple(uneven[0])), (Shard(1), tuple(uneven[1]))]
        )
    layouts = [
        ([a[0], b[0]], [a[1], b[1]])
        for a, b in itertools.product(*per_dim)
        if not (isinstance(a[0], Shard) and a[0] == b[0])
    ]
    for source, target in half_of(itertools.product(layouts, layouts), half):
        check_move(mesh, whole, source, target)


@on_ranks(4)
def test_sub_meshes_without_rank_0():
    """Meshes that do not hold rank 0, and whose ranks are not in a row."""
    whole = torch.randn(7, 5, dtype=torch.float64, generator=seeded(0))
    grid = shared_mesh((2, 2), ("data", "domain"))
    layouts = layouts_of(2, whole.shape)
    for name in ("data", "domain"):  # ranks [0, 2] and [1, 3]; [0, 1] and [2, 3]
        for (old, old_sizes), (new, new_sizes) in itertools.product(layouts, layouts):
            check_move(grid[name], whole, ([old], [old_sizes]), ([new], [new_sizes]))


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_maxima_minima_and_products_are_reduced(ranks):
    mesh = shared_mesh(ranks)
    rank = mesh.get_local_rank()
    locals_ = [torch.tensor([[1.0 + r, -3.0 * r], [2.0, 0.5 * r], [r % 2, 7.0]]) for r in range(ranks)]
    stacked = torch.stack(locals_)
    for op, expected in (
        ("max", stacked.amax(0)),
        ("min", stacked.amin(0)),
        ("product", stacked.prod(0)),
        ("sum", stacked.sum(0)),
    ):
        x = ShardTensor.from_local(locals_[rank], mesh, [Partial(op)])
        torch.testing.assert_close(x.full_tensor(), expected)
        uneven = {0: (3,) + (0,) * (ranks - 1)}
        y = x.redistribute(placements=[Shard(0)], shard_sizes=uneven)
        assert y.to_local().shape[0] == uneven[0][rank]
        torch.testing.assert_close(y.full_tensor(), expected)
        # What is whole may become summands, factors or candidates again.
        again = x.redistribute(placements=[Replicate()]).redistribute(placements=[Partial(op)])
        torch.testing.assert_close(again.full_tensor(), expected)


@on_ranks(3)
def test_only_what_differs_travels():
    mesh = shared_mesh(3)
    rank = dist.get_rank()
    x = shard(torch.arange(24.0).reshape(12, 2), mesh, [Shard(0)], {0: (5, 4, 3)})

    def count(**kwargs):
        with count_communication() as counted:
            x.redistribute(**kwargs)
        return counted.messages, counted.bytes_sent, sum(counted.collectives.values())

    row = 2 * 4
    assert count(placements=[Shard(0)]) == (0, 0, 0)
    assert count(shard_sizes={0: (5, 4, 3)}) == (0, 0, 0)
    # Only what differs travels: the border between the first two moves by one, then by two.
    assert count(shard_sizes={0: (4, 5, 3)}) == ((1, row, 1) if rank == 0 else (0, 0, 1))
    assert count(shard_sizes={0: (7, 2, 3)}) == ((1, 2 * row, 1) if rank == 1 else (0, 0, 1))
    # To another dim each rank sends the columns that the others get (the last gets none).
    columns = [(1, 5 * 4, 1), (1, 4 * 4, 1), (2, 2 * 3 * 4, 1)]
    assert count(placements=[Shard(1)], shard_sizes={0: (1, 1, 0)}) == columns[rank]
    assert count(placements=[Partial()]) == (0, 0, 0)
    whole = x.redistribute(placements=[Replicate()])
    with count_communication() as counted:
        local = whole.redistribute(placements=[Shard(0)], shard_sizes={0: (1, 1, 10)})
    assert (counted.messages, sum(counted.collectives.values())) == (0, 0)
    # The slice does not keep the whole alive.
    assert local.to_local().untyped_storage().nbytes() == local.to_local().numel() * 4


@on_ranks(4)
def test_mesh_dims_left_out_keep_their_cut():
    mesh = shared_mesh((2, 2))
    x = shard(torch.randn(8, 6), mesh, [Shard(0), Shard(1)], {0: (7, 1), 1: (2, 4)})
    y = x.redistribute(placements=[Shard(0), Replicate()])
    assert y.shard_sizes == {0: (7, 1)}  # the mesh dim that stays keeps its cut
    assert x.redistribute(shard_sizes={-1: (3, 3)}).shard_sizes == {0: (7, 1), 1: (3, 3)}
    assert x.redistribute(shard_sizes="even").shard_sizes == {0: (4, 4), 1: (3, 3)}
    assert x.redistribute(placements=[Shard(1), Shard(0)]).shard_sizes == {0: (3, 3), 1: (4, 4)}
    assert x.redistribute(mesh, [Shard(0), Shard(1)], async_op=True).shard_sizes == x.shard_sizes
    assert torch.equal(y.full_tensor(), x.full_tensor())


@on_ranks(3)
def test_every_dtype_travels():
    mesh = shared_mesh(3)
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.complex64):
        whole = torch.randint(0, 2, (7, 4), generator=seeded(0)).to(dtype)
        x = shard(whole, mesh, [Shard(0)], {0: (1, 0, 6)})
        y = x.redistribute(placements=[Shard(1)], shard_sizes={0: (0, 3, 1)}).redistribute(shard_sizes="even")
        assert y.dtype == dtype and torch.equal(y.full_tensor(), whole), dtype


@pytest.mark.on_device
@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_several_tensors_are_gathered_in_one_collective(ranks):
    group, me = shared_mesh(ranks).get_group(), dist.get_rank()
    # The second one is not contiguous.
    tensors = torch.full((3,), me + 0.5), (torch.arange(6.0) + 10 * me)[::2]
    with count_communication() as counted:
        found = all_gather_each(tensors, group)
    assert dict(counted.collectives) == {"all_gather": 1} and counted.collective_bytes == 2 * 3 * 4
    assert torch.equal(found[0], (torch.arange(ranks) + 0.5)[:, None].expand(ranks, 3))
    assert torch.equal(found[1], torch.tensor([[0.0, 2, 4]]) + 10 * torch.arange(ranks)[:, None])
    empty = all_gather_each([torch.zeros(0, 2)] * 3, group)
    assert empty.shape == (3, ranks, 0, 2)


def operand():
    return shard(torch.randn(8, 6), shared_mesh(2), [Shard(0)], {0: (7, 1)})


ERRORS = {
    "maximum": (lambda x: x.redistribute(placements=[Partial("max")]), ValueError, "only to Partial('sum')"),
    "sizes": (lambda x: x.redistribute(shard_sizes={0: (7, 2)}), ValueError, "add up to 9"),
    "average": (lambda x: x.redistribute(placements=[Partial("avg")]), ValueError, "not exact on unequal shards"),
    "mesh": (
        lambda x: x.redistribute(shared_mesh(2, "other"), [Shard(0)]),
        ValueError,
        "redistribute to another mesh",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_is_refused_on_every_rank(name):
    raises_alike(operand, name)


@on_ranks(4)
def test_bytes_that_are_sent_are_known_before():
    """Of shards of any sizes, also where mesh dims trade tensor dims and one of them is gathered in between."""
    mesh, whole = shared_mesh((2, 2)), torch.zeros(6, 8, 5)
    layouts = [
        ((Shard(0), Shard(1)), {0: (5, 1), 1: (2, 6)}),
        ((Shard(0), Shard(1)), {0: (3, 3), 1: (8, 0)}),
        ((Shard(1), Shard(0)), {0: (4, 4), 1: (1, 5)}),
        ((Shard(2), Shard(0)), {0: (0, 5), 1: (3, 3)}),
        ((Replicate(), Shard(1)), {1: (3, 5)}),
        ((Replicate(), Replicate()), {}),
    ]
    for (old, old_sizes), (new, new_sizes) in itertools.permutations(layouts, 2):
        x = shard(whole, mesh, old, old_sizes)
        with count_communication() as counted:
            y = x.redistribute(placements=new, shard_sizes=new_sizes)
        sent = torch.tensor(counted.bytes_sent)
        dist.all_reduce(sent)
        assert sent.item() == bytes_between(x._spec, y._spec), f"{old} {old_sizes} -> {new} {new_sizes}"
