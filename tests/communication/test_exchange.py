"""Moving intervals between ranks: all transports, the adjoint, how much travels, and what is kept for it."""

from __future__ import annotations

import gc
import random
import types
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from copied import Copied
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor
from shardtensor.communication import exchange
from shardtensor.communication.exchange import Exchange, plan_intervals
from shardtensor.communication.halo import Axis, Fetch
from shardtensor.communication.redistribute import swapped
from shardtensor.layout.intervals import intersect, intervals_of, length
from shardtensor.layout.spec import ShardTensorSpec
from shardtensor.ops.convolution.conv import plan_convolution
from shardtensor.ranks.groups import connect
from shardtensor.testing import (
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
    simulate_ranks,
)

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
    4: [
        ((3, 4, 0, 5), ((0, 4), (3, 7), (0, 0), (7, 12))),  # one of four needs something of another
        ((3, 4, 0, 5), ((0, 4), (2, 7), (0, 0), (7, 12))),
        ((3, 4, 1, 5), ((0, 4), (2, 8), (7, 8), (7, 13))),
        ((3, 4, 0, 5), ((0, 4), (2, 8), (2, 8), (6, 12))),
    ],
}
TRANSPORTS = ["all_to_all", "p2p", "auto"]


@contextmanager
def few(factor):
    """Peers are few if this many times their number is less than the ranks."""
    before, exchange._FEW = exchange._FEW, factor
    shardtensor.layout.caches.forget()  # exchanges know which they are
    try:
        yield
    finally:
        exchange._FEW = before
        shardtensor.layout.caches.forget()


DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int16]


def whole_tensor(n, dtype, dim, seed=0):
    shape = [2, 3]
    shape.insert(dim, n)
    values = torch.randint(0, 99, shape, generator=seeded(seed))
    return (values % 2).bool() if dtype == torch.bool else values.to(dtype)


def fetched(local, dim, sizes, need, mesh):
    """What this rank needs of a dim of which it holds ``local``."""
    shape = [*local.shape[:dim], sum(sizes), *local.shape[dim + 1 :]]
    spec = ShardTensorSpec.make(mesh, [Shard(dim)], shape, local.dtype, shard_sizes={0: sizes})
    return Fetch.of(spec, {dim: need})(local)


@pytest.mark.parametrize("world", [2, 3, 4])
@on_ranks("world")
def test_every_transport_brings_every_dtype_what_it_needs(world):
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
                for transport in TRANSPORTS:
                    with shardtensor.set_transport(transport):
                        received[transport] = fetched(local, dim, sizes, need, mesh)
                for transport, got in received.items():
                    assert got.dtype == dtype, transport
                    assert torch.equal(got, expected), (transport, sizes, need, dtype, dim)


def counts(world, transport, factor):
    mesh = shared_mesh(world)
    rank = dist.get_rank()
    with shardtensor.set_transport(transport), few(factor):
        connect(mesh.get_group(), torch.get_default_device())
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
            direct = plan.most_peers * factor < world if transport == "auto" else transport == "p2p"
            assert sum(counted.collectives.values()) == (plan.active and not direct)
            with count_communication() as counted:
                result.sum().backward()
            # The gradient goes the same ways back.
            assert (counted.messages, counted.bytes_sent) == (len(received), sum(received) * 6 * 8), (sizes, need)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_message_per_peer_with_just_the_needed_bytes(transport):
    run_distributed(counts, 3, 3, transport, 4)


def test_few_peers_get_messages_and_many_an_all_to_all():
    run_distributed(counts, 4, 4, "auto", 2)


def others_come_later():
    """Ranks 0 and 1 exchange while the others wait for them to be done."""
    mesh, rank = shared_mesh(4), dist.get_rank()
    sizes, need = CASES[4][1]
    local, token = torch.full((1, sizes[rank], 1), float(rank)), torch.zeros(1)
    with few(2):
        connect(mesh.get_group(), torch.get_default_device())
        fetched(local, 1, sizes, need, mesh)  # in whose first run ranks compare what they do
        if rank > 1:
            dist.recv(token, 0)
        got = fetched(local, 1, sizes, need, mesh)
    if rank == 0:
        for other in (2, 3):
            dist.send(token, other)
    return got.flatten().tolist()


def test_no_rank_waits_for_one_that_it_needs_nothing_from():
    assert run_distributed(others_come_later, 4) == [[0.0] * 3 + [1.0], [0.0] + [1.0] * 4, [], [3.0] * 5]


def convolved(transports):
    """Result and gradients of a convolution and of a redistribution, by transport."""
    mesh, results = shared_mesh(4), []
    generator = seeded(3)
    whole, weight = (torch.randn(n, dtype=torch.float64, generator=generator) for n in ((1, 2, 13, 3), (2, 2, 5, 3)))
    for transport in transports:
        with shardtensor.set_transport(transport):
            for sizes in ((4, 1, 0, 8), (3, 4, 3, 3), (0, 0, 13, 0)):
                x = shard(whole, mesh, [Shard(2)], {0: sizes}).requires_grad_()
                y = F.conv2d(x, weight, padding=(2, 1))
                y = y.redistribute(shard_sizes={0: (2, 5, 0, 6)}).bfloat16()
                y.float().square().sum().backward()
                results.append((transport, sizes, y.to_local().detach(), x.grad.to_local()))
    return results


@on_ranks(4)
def test_every_transport_gives_the_same_bits():
    results = convolved(TRANSPORTS)
    with few(1):  # two peers of four ranks
        results += convolved(TRANSPORTS)
    references = {sizes: rest for _, sizes, *rest in results[:3]}
    for transport, sizes, *rest in results[3:]:
        assert all(map(torch.equal, rest, references[sizes])), (transport, sizes)


# -- what all ranks decide alike, and what is kept --------------------------------------------------------------------


def test_every_rank_plans_its_part_of_the_same_transfers():
    pick = random.Random(5)
    for _ in range(300):
        ranks = pick.randint(1, 9)
        own = list(intervals_of([pick.choice((0, 1, 2, 5)) for _ in range(ranks)]))
        if pick.random() < 0.3:
            pick.shuffle(own)
        n = max(stop for _, stop in own) + 2  # some of it is nobody's
        need = [tuple(sorted((pick.randint(0, n), pick.randint(0, n)))) for _ in range(ranks)]
        need = [near if pick.random() < 0.5 else any_ for near, any_ in zip(own, need, strict=True)]
        plans = [plan_intervals(own, need, rank) for rank in range(ranks)]
        for rank, plan in enumerate(plans):
            for mine, parts, of_others in ((own, plan.sends, need), (need, plan.recvs, own)):
                common = [(r, intersect(mine[rank], theirs)) for r, theirs in enumerate(of_others) if r != rank]
                assert parts == tuple((r, part) for r, part in common if length(part)), (own, need, rank)
        most = max(len(parts) for plan in plans for parts in (plan.sends, plan.recvs))
        assert {plan.most_peers for plan in plans} == {most}, (own, need)
        assert {plan.active for plan in plans} == {most > 0}


def halo_traffic():
    """Of a convolution along a dim with 2 elements a rank, but none on the second to last one; and of its gradient."""
    mesh = shared_mesh(dist.get_world_size())
    rank, ranks = mesh.get_local_rank(), mesh.size()
    sizes = [2] * ranks
    sizes[-2] = 0
    local = torch.ones(1, 1, sizes[rank], 3, dtype=torch.bfloat16)
    x = ShardTensor.from_local(local, mesh, [Shard(2)], shard_sizes={0: tuple(sizes)}).requires_grad_()
    with count_communication() as counted:
        y = F.conv2d(x, torch.ones(1, 1, 3, 1, dtype=torch.bfloat16), padding=(1, 0))
    sent = (dict(counted.sent_to), dict(counted.received_from), dict(counted.collectives))
    with count_communication() as back:
        y.backward(torch.ones_like(y))
    return *sent, dict(back.sent_to), dict(back.received_from), back.collectives["all_to_all"]


@pytest.mark.parametrize("ranks", [8, 9])
def test_all_ranks_choose_the_same_transport(ranks):
    row = 3 * 2  # bytes, also of the outputs' gradients that owners fetch
    pairs = {(r, r + 1) for r in range(ranks - 3)} | {(ranks - 3, ranks - 1)}
    for rank, (sent, received, collectives, returned, got_back, many) in enumerate(simulate_ranks(halo_traffic, ranks)):
        neighbours = {r: row for pair in pairs if rank in pair for r in pair if r != rank}
        assert sent == received == neighbours, rank
        assert returned == got_back == neighbours, rank
        assert collectives == ({"all_to_all": 1} if ranks == 8 else {}) and many == (ranks == 8), rank


def long_containers(root, longest=64):
    """The containers with more entries that an object refers to, apart from specs, meshes, modules, functions."""
    found, seen, todo = [], set(), [root]
    while todo:
        at = todo.pop()
        if id(at) in seen or isinstance(at, (ShardTensorSpec, DeviceMesh, type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(at))
        if isinstance(at, (list, tuple, dict, set)) and len(at) > longest:
            found.append(at)
        todo.extend(gc.get_referents(at))
    return found


def planned_convolutions():
    ranks = dist.get_world_size()
    mesh = shared_mesh(ranks)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        spec = ShardTensorSpec.make(mesh, [Shard(2)], (1, 4, 8 * ranks, 8), dtype)
        found.append(long_containers(plan_convolution(spec, (4, 4, 3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 1)))
    pair = [(1, (3,))]
    many = Exchange(pair, pair, mesh.get_group(), ranks - 1)
    assert len(long_containers(many)) == 2, "counts for each rank, for an all-to-all"
    return found


def test_a_plan_of_neighbours_holds_nothing_for_each_rank():
    for found in simulate_ranks(planned_convolutions, 4096, only=[0, 1]):
        assert found == [[], []]


def first_messages_of_a_device():
    few = Exchange([], [], shared_mesh(16).get_group(), 2)  # nothing of this rank, but of others
    collectives = []
    for device in ("meta", "meta", "cpu"):
        with count_communication() as counted:
            few.start([], torch.empty(0, device=device)).wait()
        collectives.append(dict(counted.collectives))
    return collectives


def test_all_ranks_of_a_device_meet_before_some_of_them_exchange_messages():
    """As NCCL needs it; once per group, also by ranks without messages."""
    for _ in range(2):  # worlds
        assert simulate_ranks(first_messages_of_a_device, 16, only=[3]) == [[{"all_reduce": 1}, {}, {}]]


def total(value):
    """The sum of a number over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float32])
@on_ranks(2)
def test_a_single_element_of_any_stride(dtype):
    """torch calls it contiguous, but does not view it as bytes."""
    group, rank = shared_mesh(2).get_group(), dist.get_rank()
    piece = torch.arange(4).to(dtype)[2 * rank :: 2][:1]  # the next element would lie two further
    (got,) = exchange.Exchange([(1 - rank, (1,))], [(1 - rank, (1,))], group, 1).start([piece], piece).wait()
    assert torch.equal(got, torch.tensor([2 - 2 * rank]).to(dtype))


@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world")
def test_the_gradient_of_fetching_is_its_adjoint(world):
    mesh = shared_mesh(world)
    rank = dist.get_rank()
    generator = seeded(rank)
    for dtype in (torch.float64, torch.complex128):
        for sizes, need in CASES[world]:
            x = torch.randn(2, sizes[rank], 3, dtype=dtype, generator=generator, requires_grad=True)
            out = fetched(x, 1, sizes, need, mesh)
            y = torch.randn(out.shape, dtype=dtype, generator=generator)
            (back,) = torch.autograd.grad(out, x, y, create_graph=False)
            left = total((out.conj() * y).sum())
            right = total((x.conj() * back).sum())
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=f"{sizes} {need}")


@on_ranks(3)
def test_fetching_can_be_differentiated_twice():
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


@on_ranks(4)
def test_fetching_several_dims():
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
        assert torch.equal(fetch.read(local)[0], found)
    seed = torch.randn(found.shape, dtype=torch.float64, generator=seeded(rank))
    (first,) = torch.autograd.grad((found**2 * seed).sum(), local, create_graph=True)
    torch.testing.assert_close(first, fetch.backward(2 * found.detach() * seed), rtol=0, atol=0)
    expected = torch.zeros_like(whole)
    for at in range(4):
        (a, b), (c, d) = needs[1][at // 2], needs[2][at % 2]
        seed = torch.randn(2, max(b - a, 0), d - c, dtype=torch.float64, generator=seeded(at))
        expected[:, a:b, c:d] += seed
    own = shard(expected, mesh, [Shard(1), Shard(2)], {0: (2, 5), 1: (4, 1)}).to_local()
    torch.testing.assert_close(first.detach(), 2 * local.detach() * own, rtol=1e-12, atol=0)
    (second,) = torch.autograd.grad(first.sum(), local)
    torch.testing.assert_close(second, 2 * own, rtol=1e-12, atol=0)
    same = Fetch.of(x._spec, {1: intervals_of((2, 5))})
    assert (bool(same), same.shape == tuple(local.shape)) == (False, True)


def halos_are_kept_and_return(mesh_shape, cases, transport):
    """On one or two axes: halos go next to the shard, also later; returning gradients is the adjoint of fetching."""
    mesh = shared_mesh(mesh_shape)
    at = mesh.get_coordinate()
    with shardtensor.set_transport(transport):
        for case in cases:
            sizes, needs = zip(*case)
            owns = [intervals_of(s) for s in sizes]
            dims = range(1, 1 + len(case))
            generator = seeded(1)
            whole = torch.randn(2, *(sum(s) for s in sizes), dtype=torch.float64, generator=generator)
            axes, x, expected = [], whole, whole
            for m, dim in enumerate(dims):
                axes.append(Axis(dim, m, plan_intervals(owns[m], needs[m], at[m])))
                x = x.narrow(dim, owns[m][at[m]][0], sizes[m][at[m]])
                expected = expected.narrow(dim, needs[m][at[m]][0], length(needs[m][at[m]]))
            fetch = Fetch(axes, mesh, x.shape)
            found, halo = fetch.read(x)
            assert torch.equal(found, expected), case
            with count_communication() as counted:
                assert torch.equal(fetch.join(x, halo), expected), case
            assert counted.messages == 0 and not counted.collectives

            y = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
            back = fetch.backward(y)
            left, right = total((expected * y).sum()), total((x * back).sum())
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=str(case))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_halos_along_one_axis(transport):
    cases = [[case] for case in CASES[3][:3]]
    run_distributed(halos_are_kept_and_return, 3, 3, cases, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_halos_along_two_axes_with_corners(transport):
    cases = [
        [((5, 3), ((0, 6), (4, 8))), ((2, 4), ((0, 3), (1, 6)))],
        [((7, 1), ((0, 8), (3, 8))), ((4, 3), ((0, 6), (1, 7)))],
        [((0, 4), ((0, 2), (1, 4))), ((3, 2), ((0, 4), (2, 5)))],
        [((3, 3), ((0, 3), (3, 6))), ((1, 5), ((0, 4), (0, 6)))],
        [((3, 3), ((0, 2), (1, 6))), ((4, 2), ((1, 5), (2, 6)))],
    ]
    run_distributed(halos_are_kept_and_return, 4, (2, 2), cases, transport)


@on_ranks(4)
def test_several_pieces_travel_in_one_message():
    """Several tensors per peer in one message, some of them empty, on a group that does not start at rank 0."""
    mesh = shared_mesh((2, 2))
    rank, group = mesh.get_local_rank(1), mesh.get_group(1)
    peer = 1 - rank
    mine = [torch.full((rank + 2, 3), 10.0 + dist.get_rank()), torch.zeros(0, 4), torch.arange(rank + 1.0)]
    shapes = [(peer + 2, 3), (0, 4), (peer + 1,)]
    with count_communication() as counted:
        first, empty, last = swapped([mine, mine], [shapes, shapes], rank, group)[peer]
    other = dist.get_global_rank(group, peer)
    assert counted.messages == 1 and list(counted.sent_to) == [other]
    assert torch.equal(first, torch.full((peer + 2, 3), 10.0 + other))
    assert empty.shape == (0, 4)
    assert torch.equal(last, torch.arange(peer + 1.0))


@pytest.mark.not_emulated("whose communication copies, too")
@on_ranks(2)
def test_packing_copies_each_piece_once():
    mesh = shared_mesh(2)
    group, me = mesh.get_group(), mesh.get_local_rank()
    mine = [torch.arange(12.0).view(3, 4).t() + me, torch.arange(6.0).view(2, 3) + me, torch.arange(8.0)[::2] + me]
    shapes = [t.shape for t in mine]
    with Copied() as copied:
        received = swapped([mine, mine], [shapes, shapes], me, group)[1 - me]
    assert copied.total == sum(t.numel() for t in mine), copied.elements
    for t, got in zip(mine, received, strict=True):
        assert torch.equal(got, t - me + (1 - me))


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match="choose 'auto', 'all_to_all' or 'p2p'"):
        shardtensor.set_transport("pigeon")
    with shardtensor.set_transport("p2p"):
        with pytest.raises(ValueError), shardtensor.set_transport("pigeon"):
            pass
        assert exchange._transport.value == "p2p"
    assert exchange._transport.value == "auto"
    shardtensor.set_transport("p2p")  # without a block: from here on
    assert exchange._transport.value == "p2p"
    shardtensor.set_transport("auto")


def all_reduce_every_dtype():
    from shardtensor.communication.redistribute import all_reduce

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
