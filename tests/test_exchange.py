"""Moving intervals between ranks: both transports, the adjoint, and how much travels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import exchange
from shardtensor.exchange import plan_intervals, start_swap
from shardtensor.geometry import intervals_of, length
from shardtensor.halo import Axis, Fetch, Halo
from shardtensor.spec import ShardTensorSpec
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

# Sizes per rank, and what each needs: neighbours, several hops, an empty shard, gaps, everything, nothing.
CASES = {
    2: [
        ((5, 3), ((0, 6), (4, 8))),
        ((7, 1), ((0, 8), (3, 8))),
        ((0, 8), ((0, 4), (4, 8))),
        ((5, 3), ((0, 5), (5, 8))),
        ((5, 3), ((6, 8), (0, 2))),
        ((4, 4), ((0, 0), (0, 8))),
    ],
    3: [
        ((5, 4, 2), ((0, 7), (3, 11), (4, 11))),
        ((6, 0, 3), ((0, 7), (5, 8), (6, 9))),
        ((1, 1, 5), ((0, 4), (0, 5), (0, 7))),
        ((0, 0, 7), ((0, 3), (2, 5), (0, 0))),
        ((2, 3, 2), ((1, 2), (4, 5), (0, 1))),
    ],
}
DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int16]


def whole_tensor(n, dtype, dim, seed=0):
    shape = [2, 3]
    shape.insert(dim, n)
    values = torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(seed))
    return (values % 2).bool() if dtype == torch.bool else values.to(dtype)


def fetched(local, dim, sizes, need, mesh):
    """What this rank needs of a dim of which it holds ``local``."""
    shape = [*local.shape[:dim], sum(sizes), *local.shape[dim + 1 :]]
    spec = ShardTensorSpec.make(mesh, [Shard(dim)], shape, local.dtype, shard_sizes={0: sizes})
    return Fetch.of(spec, {dim: need})(local)


def moves_what_is_needed(world):
    mesh = shared_mesh(world)
    rank = dist.get_rank()
    for sizes, need in CASES[world]:
        own = intervals_of(sizes)
        for dtype in DTYPES:
            for dim in (0, 2):
                whole = whole_tensor(sum(sizes), dtype, dim)
                local = whole.narrow(dim, own[rank][0], sizes[rank])
                expected = whole.narrow(dim, need[rank][0], length(need[rank]))
                received = {}
                for transport in ("all_to_all", "p2p"):
                    with shardtensor.set_transport(transport):
                        received[transport] = fetched(local, dim, sizes, need, mesh)
                for transport, got in received.items():
                    assert got.dtype == dtype, transport
                    assert torch.equal(got, expected), (transport, sizes, need, dtype, dim)


@pytest.mark.parametrize("world", [2, 3])
def test_both_transports_bring_every_dtype_what_it_needs(world):
    run_distributed(moves_what_is_needed, world, world)


def counts(world, transport):
    mesh = shared_mesh(world)
    rank = dist.get_rank()
    with shardtensor.set_transport(transport):
        for sizes, need in CASES[world]:
            own = intervals_of(sizes)
            plan = plan_intervals(own, need, rank)
            local = torch.zeros(2, sizes[rank], 3, dtype=torch.float64, requires_grad=True)
            sent, received = ([length(part) for _, part in parts] for parts in (plan.sends, plan.recvs))
            with count_communication() as counted:
                result = fetched(local, 1, sizes, need, mesh)
            assert counted.messages == len(sent), (sizes, need)
            assert counted.bytes_sent == sum(sent) * 6 * 8
            assert counted.bytes_received == sum(received) * 6 * 8
            assert sum(counted.collectives.values()) == (plan.active and transport == "all_to_all")
            with count_communication() as counted:
                result.sum().backward()
            # The gradient goes the same ways back.
            assert (counted.messages, counted.bytes_sent) == (len(received), sum(received) * 6 * 8), (sizes, need)


@pytest.mark.parametrize("transport", ["all_to_all", "p2p"])
def test_one_message_per_peer_with_just_the_needed_bytes(transport):
    run_distributed(counts, 3, 3, transport)


def total(value):
    """The sum of a number over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def fetching_has_its_adjoint(world):
    mesh = shared_mesh(world)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float64, torch.complex128):
        for sizes, need in CASES[world]:
            x = torch.randn(2, sizes[rank], 3, dtype=dtype, generator=generator, requires_grad=True)
            out = fetched(x, 1, sizes, need, mesh)
            y = torch.randn(out.shape, dtype=dtype, generator=generator)
            (back,) = torch.autograd.grad(out, x, y, create_graph=False)
            left = total((out.conj() * y).sum())
            right = total((x.conj() * back).sum())
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=f"{sizes} {need}")


@pytest.mark.parametrize("world", [2, 3])
def test_the_gradient_of_fetching_is_its_adjoint(world):
    run_distributed(fetching_has_its_adjoint, world, world)


def fetching_is_twice_differentiable():
    mesh = shared_mesh(3)
    rank = dist.get_rank()
    sizes, need = CASES[3][0]
    x = torch.randn(sizes[rank], dtype=torch.float64, requires_grad=True)
    out = fetched(x, 0, sizes, need, mesh)
    (first,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    uses = torch.zeros(sum(sizes), dtype=torch.float64)
    for a, b in need:
        uses[a:b] += 1
    a, b = intervals_of(sizes)[rank]
    torch.testing.assert_close(second, 6 * x.detach() * uses[a:b], rtol=1e-12, atol=0)


def test_fetching_can_be_differentiated_twice():
    run_distributed(fetching_is_twice_differentiable, 3)


def fetch_of_two_dims():
    mesh = shared_mesh((2, 2))
    rank = dist.get_rank()
    whole = torch.arange(2 * 7 * 5, dtype=torch.float64).view(2, 7, 5)
    x = shard(whole, mesh, [Shard(1), Shard(2)], {0: (2, 5), 1: (4, 1)})
    needs = {2: ((0, 5), (2, 5)), 1: ((0, 4), (0, 0))}
    (a, b), (c, d) = needs[1][rank // 2], needs[2][rank % 2]
    fetch = Fetch.of(x._spec, needs)
    local = x.to_local().requires_grad_()
    found = fetch(local)
    assert fetch and found.shape == fetch.shape and torch.equal(found, whole[:, a:b, c:d])
    with torch.no_grad():
        assert torch.equal(fetch.forward(local), found)
    seed = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    (first,) = torch.autograd.grad((found**2 * seed).sum(), local, create_graph=True)
    torch.testing.assert_close(first, fetch.backward(2 * found.detach() * seed), rtol=0, atol=0)
    expected = torch.zeros_like(whole)
    for at in range(4):
        (a, b), (c, d) = needs[1][at // 2], needs[2][at % 2]
        seed = torch.randn(2, max(b - a, 0), d - c, dtype=torch.float64, generator=torch.Generator().manual_seed(at))
        expected[:, a:b, c:d] += seed
    own = shard(expected, mesh, [Shard(1), Shard(2)], {0: (2, 5), 1: (4, 1)}).to_local()
    torch.testing.assert_close(first.detach(), 2 * local.detach() * own, rtol=1e-12, atol=0)
    (second,) = torch.autograd.grad(first.sum(), local)
    torch.testing.assert_close(second, 2 * own, rtol=1e-12, atol=0)
    same = Fetch.of(x._spec, {1: intervals_of((2, 5))})
    return bool(same), same.shape == tuple(local.shape)


def test_fetching_several_dims():
    assert run_distributed(fetch_of_two_dims, 4) == [(False, True)] * 4


def inner(t, axes):
    """The part of a shard that is read, along some axes."""
    for axis in axes:
        t = t.narrow(axis.dim, axis.main[0] - axis.transfers.own[0], length(axis.main))
    return t


def tiled(axes, halo, x):
    """Shard and halo put together: what this rank reads."""
    result = inner(x, axes)
    for i, axis in enumerate(axes):
        # The halo spans the shard along later axes.
        before, after = (None if side is None else inner(side, axes[i + 1 :]) for side in halo[i])
        result = torch.cat([t for t in (before, result, after) if t is not None], dim=axis.dim)
    return result


def halos_tile_and_return(mesh_shape, cases, transport):
    """On one or two axes: halos hold the right values, and returning gradients is the adjoint of fetching."""
    mesh = shared_mesh(mesh_shape)
    at = mesh.get_coordinate()
    with shardtensor.set_transport(transport):
        for case in cases:
            sizes, needs = zip(*case)
            owns = [intervals_of(s) for s in sizes]
            dims = range(1, 1 + len(case))
            generator = torch.Generator().manual_seed(1)
            whole = torch.randn(2, *(sum(s) for s in sizes), dtype=torch.float64, generator=generator)
            axes, x, expected = [], whole, whole
            for m, dim in enumerate(dims):
                axes.append(Axis(dim, m, plan_intervals(owns[m], needs[m], at[m])))
                x = x.narrow(dim, owns[m][at[m]][0], sizes[m][at[m]])
                expected = expected.narrow(dim, needs[m][at[m]][0], length(needs[m][at[m]]))
            planned = Halo(axes, mesh, x.shape)
            halo = planned.nothing()
            for i in range(len(axes)):
                planned.finish(i, planned.start(i, x, halo), halo)
            assert torch.equal(tiled(axes, halo, x), expected), case

            y = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
            # Cut y as the halo tiles: what is outermost last.
            middle, grads = y, [[None, None] for _ in axes]
            for i in reversed(range(len(axes))):
                sides = axes[i].sides
                lengths = [length(sides[0]), length(axes[i].main), length(sides[1])]
                before, middle, after = middle.split(lengths, dim=axes[i].dim)
                for k, part in ((0, before), (1, after)):
                    if halo[i][k] is not None:
                        grads[i][k] = torch.zeros_like(halo[i][k])
                        inner(grads[i][k], axes[i + 1 :]).copy_(part)
            back = torch.zeros_like(x)
            inner(back, axes).add_(middle)
            for i in reversed(range(len(axes))):
                mine = planned.finish_return(i, planned.start_return(i, grads, x), grads)
                planned.add_to_shard(i, back, mine)
            left, right = total((expected * y).sum()), total((x * back).sum())
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=str(case))


@pytest.mark.parametrize("transport", ["all_to_all", "p2p"])
def test_halos_along_one_axis(transport):
    # Halos are for windows: what a rank needs includes no gap next to its shard.
    cases = [[case] for case in CASES[3][:3]]
    run_distributed(halos_tile_and_return, 3, 3, cases, transport)


@pytest.mark.parametrize("transport", ["all_to_all", "p2p"])
def test_halos_along_two_axes_with_corners(transport):
    cases = [
        [((5, 3), ((0, 6), (4, 8))), ((2, 4), ((0, 3), (1, 6)))],
        [((7, 1), ((0, 8), (3, 8))), ((4, 3), ((0, 6), (1, 7)))],
        [((0, 4), ((0, 2), (1, 4))), ((3, 2), ((0, 4), (2, 5)))],
        [((3, 3), ((0, 3), (3, 6))), ((1, 5), ((0, 4), (0, 6)))],
        [((3, 3), ((0, 2), (1, 6))), ((4, 2), ((1, 5), (2, 6)))],
    ]
    run_distributed(halos_tile_and_return, 4, (2, 2), cases, transport)


def swap_several_pieces():
    """Several tensors per peer in one message, some of them empty, on a group that does not start at rank 0."""
    mesh = shared_mesh((2, 2))
    rank, group = mesh.get_local_rank(1), mesh.get_group(1)
    peer = 1 - rank
    mine = [torch.full((rank + 2, 3), 10.0 + dist.get_rank()), torch.zeros(0, 4), torch.arange(rank + 1.0)]
    shapes = [(peer + 2, 3), (0, 4), (peer + 1,)]
    pieces = [mine if r == peer else [] for r in range(2)]
    expected = [shapes if r == peer else [] for r in range(2)]
    with count_communication() as counted:
        first, empty, last = start_swap(pieces, expected, group, mine[0]).wait()
    other = dist.get_global_rank(group, peer)
    assert counted.messages == 1 and list(counted.sent_to) == [other]
    assert torch.equal(first, torch.full((peer + 2, 3), 10.0 + other))
    assert empty.shape == (0, 4)
    assert torch.equal(last, torch.arange(peer + 1.0))


def test_several_pieces_travel_in_one_message():
    run_distributed(swap_several_pieces, 4)


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match="choose 'auto', 'all_to_all' or 'p2p'"):
        shardtensor.set_transport("pigeon")
    with shardtensor.set_transport("p2p"):
        with pytest.raises(ValueError), shardtensor.set_transport("pigeon"):
            pass
        assert exchange.transport() == "p2p"
    assert exchange.transport() == "auto"
    shardtensor.set_transport("p2p")  # without a block: from here on
    assert exchange.transport() == "p2p"
    shardtensor.set_transport("auto")


def all_reduce_every_dtype():
    from shardtensor.redistribute import all_reduce

    group = shared_mesh(2).get_group()
    rank = dist.get_rank()
    for dtype in (torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.complex64):
        value = torch.tensor([rank + 1, 5], dtype=dtype)
        kept = value.clone()
        assert torch.equal(all_reduce(value, group), torch.tensor([3, 10], dtype=dtype)), dtype
        assert torch.equal(value, kept)  # the operand is left alone
    low = torch.tensor([rank, 3 - rank], dtype=torch.int16)
    assert torch.equal(all_reduce(low, group, "max"), torch.tensor([1, 3], dtype=torch.int16))
    assert torch.equal(all_reduce(low, group, "min"), torch.tensor([0, 2], dtype=torch.int16))
    flags = torch.tensor([rank == 0, True, False])
    assert torch.equal(all_reduce(flags, group, "max"), torch.tensor([True, True, False]))
    assert torch.equal(all_reduce(flags, group, "min"), torch.tensor([False, True, False]))
    all_reduce(torch.ones(1, dtype=torch.complex64), group, "max")


def test_all_reduce_knows_the_dtypes_that_backends_do_not():
    errors = run_expecting_errors(all_reduce_every_dtype, 2)
    assert [type(error) for error in errors] == [ValueError] * 2, errors
    assert "of complex numbers is not defined" in str(errors[0])
