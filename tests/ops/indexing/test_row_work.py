"""Rows that an index reads of other ranks: each is sent once, and which ones is found out once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from device import asserted
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import ShardTensor
from shardtensor.communication import row_halos
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

FEATURES = 32
ROW = FEATURES * 4


def grid(side):
    """The edges of a grid of nodes in row order, both ways, in the order of the nodes at which they end."""
    node = torch.arange(side * side, device="cpu").view(side, side)
    ends = [(node[:, :-1], node[:, 1:]), (node[:-1], node[1:])]
    edges = torch.cat([torch.stack([a.reshape(-1), b.reshape(-1)]) for a, b in ends], 1)
    edges = torch.cat([edges, edges.flip(0)], 1)
    return edges[:, edges[1].argsort(stable=True)]


class Layer(nn.Module):
    """One layer of message passing."""

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(2 * features, features)

    def forward(self, x, edges):
        source, target = edges[0], edges[1]
        messages = self.linear(torch.cat([x[source], x[target]], -1)).relu()
        return torch.zeros_like(x).index_add(0, target, messages)


class looks:
    """Counts how often this rank looks at an index."""

    def __enter__(self):
        self._patch = mock.patch.object(row_halos, "wanted", wraps=row_halos.wanted)
        self._calls = self._patch.__enter__()
        return self

    def __exit__(self, *error):
        self.count = self._calls.call_count
        self._patch.__exit__(*error)


def laid_out(edges, nodes, features, ranks, at_nodes):
    """``x`` in even shards, and the edges: each rank has those that end at its nodes, or an even part."""
    mesh = shared_mesh(ranks)
    x = shard(torch.randn(nodes, features, generator=seeded(1)), mesh, [Shard(0)], requires_grad=True)
    ends = torch.tensor(shardtensor.layout.intervals.boundaries_of(x.shard_sizes[0]), device="cpu")
    sizes = {0: torch.searchsorted(edges[1].contiguous(), ends).diff().tolist()} if at_nodes else None
    return x, shard(edges.to(x.device), mesh, [Shard(1)], sizes)


def steps(ranks, at_nodes):
    """Bytes and looks, forward and backward, for each step."""
    side = 24
    edges = grid(side)
    if not at_nodes:
        edges = torch.randint(side * side, edges.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    x, edges = laid_out(edges, side * side, FEATURES, ranks, at_nodes)
    layer, found = Layer(FEATURES), []
    for _ in range(3):
        with looks() as looked, count_communication() as forward:
            y = layer(x, edges)
        with looks() as again, count_communication() as backward:
            y.square().sum().backward()
        found.append((looked.count, again.count, forward.bytes_sent, backward.bytes_sent))
    return found


def least(edges, ranks, nodes, at_nodes):
    """What each rank has to send forward and backward: rows that others read, and contributions to others' nodes."""
    owner = torch.arange(nodes) * ranks // nodes
    here = owner[edges[1]] if at_nodes else torch.arange(edges.shape[1]) * ranks // edges.shape[1]
    read = [[set(e[(here == r) & (owner[e] != r)].tolist()) for r in range(ranks)] for e in edges]
    given = [[sum(int(owner[i] == r) for to in ends for i in to) for r in range(ranks)] for ends in read]
    taken = [[len(to) for to in ends] for ends in read]
    # Forward sources and targets are read and messages added to targets; backward these are read, and those added to.
    forward = [given[0][r] + given[1][r] + taken[1][r] for r in range(ranks)]
    return forward, [taken[0][r] + taken[1][r] + given[1][r] for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at_nodes", [True, False], ids=["edges at their nodes", "random edges"])
def test_rows_are_sent_once_and_the_index_is_looked_at_once(ranks, at_nodes):
    side = 24
    edges = grid(side)
    if not at_nodes:
        edges = torch.randint(side * side, edges.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    forward, backward = least(edges, ranks, side * side, at_nodes)
    if at_nodes and ranks == 2:
        assert forward == backward == [side, side]
    for rank, found in enumerate(run_distributed(steps, ranks, ranks, at_nodes, timeout=200)):
        assert found[0][0] == 2 and found[0][1] == 0  # sources and targets
        for step in found[1:]:
            assert step == (0, 0, forward[rank] * ROW, backward[rank] * ROW)


@on_ranks(2)
def test_no_host_waits_for_rows(emulated):
    """What the device's host waits for in a step: the first one, which looks at the index, and another."""
    from device.emulated import counted

    x, edges = laid_out(grid(8), 64, 4, 2, True)
    layer, found = Layer(4).to(x.device), []
    for _ in range(3):
        with counted() as seen:
            layer(x, edges).square().sum().backward()
        found.append((seen.total("sync") + seen.total("d2h"), seen.of("sync", "d2h")))
    first, _, last = found
    assert first[0] > 0 and last == (0, "")


# -- values ------------------------------------------------------------------------------------------------------------


def operators():
    """``{label: fn(x, index, values)}``"""
    return {
        "x[index]": lambda x, i, v: x[i] * v,
        "index_select": lambda x, i, v: x.index_select(0, i) * v,
        "gather": lambda x, i, v: x.gather(0, i.view(-1, 1).expand_as(v)) * v,
        "take_along_dim": lambda x, i, v: x.take_along_dim(i.view(-1, 1), 0) * v,
        "embedding": lambda x, i, v: F.embedding(i, x) * v,
        "index_add": lambda x, i, v: x.index_add(0, i, v, alpha=2) ** 2,
        "index_add_": lambda x, i, v: (x * 1).index_add_(0, i, v) ** 2,
        "scatter_add": lambda x, i, v: x.scatter_add(0, i.view(-1, 1).expand_as(v), v) ** 2,
        "index_put": lambda x, i, v: x.index_put((i,), v, accumulate=True) ** 2,
        "amax": lambda x, i, v: x.scatter_reduce(0, i.view(-1, 1).expand_as(v), v, "amax", include_self=False) ** 2,
        "mean": lambda x, i, v: x.index_reduce(0, i, v, "mean") ** 2,
        "prod": lambda x, i, v: x.index_reduce(0, i, v, "prod") ** 2,
    }


@pytest.mark.parametrize(
    ("ranks", "plain"),
    [(2, True), (3, False), *(pytest.param(*values, marks=pytest.mark.slow) for values in ((2, False), (3, True)))],
)
@on_ranks("ranks", timeout=300)
def test_awkward_sizes(ranks, plain):
    """With an index that is sharded as what it reads or adds is, or plain."""
    g = seeded(0)
    for nodes, edges, at, along in (
        (7, 17, (0, 7) + (0,) * (ranks - 2), (17, 0) + (0,) * (ranks - 2)),  # a rank without nodes, one without edges
        (5, 33, None, (2,) * (ranks - 1) + (33 - 2 * (ranks - 1),)),
        (97, 2, None, (1, 1) + (0,) * (ranks - 2)),
        (1, 5, (0,) * (ranks - 1) + (1,), None),
        (5, 0, None, None),
    ):
        x, v = (torch.randn(n, 3, dtype=torch.float64, generator=g) for n in (nodes, edges))
        for dtype in (torch.int64, torch.int32):
            index = torch.randint(nodes, (edges,), generator=g).to(dtype)
            for label, fn in operators().items():
                if dtype == torch.int32 and label in ("gather", "take_along_dim", "scatter_add", "amax", "index_put"):
                    continue  # which torch refuses
                sizes = None if along is None else {0: along}
                try:
                    assert_matches_unsharded(
                        fn,
                        *(x, index, v),
                        mesh_shape=ranks,
                        placements=[[Shard(0)], None if plain else [Shard(0)], [Shard(0)]],
                        shard_sizes=[None if at is None else {0: at}, None if plain else sizes, sizes],
                    )
                except Exception as error:
                    raise AssertionError(f"{label}, {nodes} nodes, {edges} edges, {dtype}") from error


class Messages(nn.Module):
    """Two layers, of which the second finds what the first one has found about the edges."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(3), Layer(3)

    def forward(self, x, edges):
        return self.second(self.first(x, edges), edges)


GRAPHS = {
    "edges twice": [[0, 0, 4, 4, 8, 0], [4, 4, 0, 0, 0, 8]],
    "loops": [[0, 4, 8, 8], [0, 4, 8, 8]],
    "isolated nodes": [[1, 7], [7, 1]],
    "all edges of one node": [[8] * 7, [0] * 7],
    "edges of one rank": [[0, 1], [1, 0]],
    "no edges": [[], []],
}


@pytest.mark.parametrize(
    ("ranks", "plain"),
    [(3, False), (2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, False), (3, True)))],
)
@on_ranks("ranks", timeout=200)
def test_unusual_graphs(ranks, plain):
    """Steps with and without gradients, and after a change in place that all ranks make."""
    mesh, x = shared_mesh(ranks), torch.randn(9, 3, dtype=torch.float64, generator=seeded(0))
    torch.manual_seed(0)
    model = Messages().double()
    for label, edges in GRAPHS.items():
        edges = torch.tensor(edges, dtype=torch.int64)
        nodes = {0: (5, 4, *[0] * (ranks - 2))}
        n = edges.shape[1]
        theirs, whole = x.clone().requires_grad_(), edges.clone()
        ours = shard(x, mesh, [Shard(0)], nodes, requires_grad=True)
        index = edges.clone() if plain else shard(edges, mesh, [Shard(1)], {0: (*[0] * (ranks - 1), n)})
        for step in range(4):
            if step == 3:
                index.copy_(index.flip(0)), whole.copy_(whole.flip(0))
            with torch.set_grad_enabled(step != 1):
                got, expected = model(ours, index), model(theirs, whole)
            assert torch.allclose(got.full_tensor(), expected, rtol=1e-10), (label, step)
            if step != 1:
                (mine,) = torch.autograd.grad(got.square().sum(), ours)
                (true,) = torch.autograd.grad(expected.square().sum(), theirs)
                assert torch.allclose(mine.full_tensor(), true, rtol=1e-10), (label, step)


@on_ranks(4, timeout=200)
def test_batches_on_the_other_mesh_dim():
    """Batches on one mesh dim, nodes and edges on the other; each batch has an index of its own."""
    g = seeded(0)
    x = torch.randn(3, 7, 2, dtype=torch.float64, generator=g)
    index = torch.randint(7, (3, 11, 2), generator=g)
    line = torch.randint(-7, 7, (11,), generator=g)
    cut = dict(mesh_shape=(2, 2), shard_sizes=[{0: (1, 2), 1: (2, 5)}, {0: (1, 2), 1: (4, 7)}])
    both = [Shard(0), Shard(1)]
    assert_matches_unsharded(lambda x, i: x.gather(1, i).exp(), x, index, placements=[both, both], **cut)
    cut["shard_sizes"][1] = {1: (11, 0)}
    assert_matches_unsharded(lambda x, i: x[:, i].exp(), x, line, placements=[both, [Replicate(), Shard(0)]], **cut)


@on_ranks(2)
def test_rows_that_are_more_than_blocks():
    """Where each element has an index of its own, rows can be more than blocks: these travel then."""
    mesh = shared_mesh(2)
    g = seeded(0)
    x = torch.randn(50, 20, dtype=torch.float64, generator=g)
    sent = []
    for edges, columns in ((3, 1), (40, 20)):
        index = torch.randint(50, (edges, columns), generator=g)
        a, i = shard(x, mesh, [Shard(0)]), shard(index, mesh, [Shard(0)])
        a.gather(0, i)
        with count_communication() as counted:
            got = a.gather(0, i)
        assert torch.equal(got.full_tensor(), x.gather(0, index))
        sent.append(counted.bytes_sent)
        assert_matches_unsharded(
            lambda x, i: x.gather(0, i).exp() @ torch.ones(i.shape[1], 1, dtype=x.dtype),
            *(x, index),
            mesh_shape=2,
            placements=[[Shard(0)], [Shard(0)]],
        )
    few, many = sent
    assert few <= 3 * 20 * 8
    # Blocks of the index and, for each entry, what is read there: half of them go to the other rank.
    assert many == 2 * 20 * 20 * 8


# -- what is kept ------------------------------------------------------------------------------------------------------


def kept():
    mesh, rank = shared_mesh(2), torch.distributed.get_rank()
    x = torch.randn(9, 3, dtype=torch.float64, generator=seeded(0))
    a = shard(x, mesh, [Shard(0)])
    entries = torch.tensor([[0, 8, 3, 3, -1], [7, 0, 1, 2, 2]])
    edges = shard(entries, mesh, [Shard(1)])
    found = {}

    def look(label, index, entries, read=None):
        with looks() as looked:
            got = a[index] if read is None else read(index)
        expected = x[entries] if read is None else None
        assert expected is None or torch.equal(got.full_tensor(), expected), label
        found[label] = looked.count

    look("first", edges[0], entries[0])
    look("again", edges[0], entries[0])
    look("another view", edges[1], entries[1])
    look("unbound", edges.unbind()[1], entries[1])
    look("unbound again", edges.unbind()[1], entries[1])
    look("a part", edges[0, 1:], entries[0, 1:])
    look("a part again", edges[0, 1:], entries[0, 1:])
    look("detached", edges.detach()[0], entries[0])
    look("other rows", edges[0], entries[0], lambda i: shard(x[:, 0].clone(), mesh, [Shard(0)])[i])
    look("other sizes", edges[0], entries[0], lambda i: shard(x, mesh, [Shard(0)], {0: (1, 8)})[i])
    # One rank looks at views for itself.
    if rank == 0:
        for i in range(100):
            edges[i % 2][:0]
    look("after views on one rank", edges[0], entries[0])
    edges[1, 2] = 8
    entries[1, 2] = 8
    look("written", edges[1], entries[1])
    look("written, another view", edges[0], entries[0])
    look("written, again", edges[0], entries[0])
    source = edges[0]
    source.copy_(source.flip(0))
    entries[0] = entries[0].flip(0)
    look("written through a view", edges[0], entries[0])
    look("written through a view, itself", source, entries[0])
    edges.data = shard(entries.roll(1, 1), mesh, [Shard(1)])
    look("data", edges[0], entries.roll(1, 1)[0])
    torch._foreach_mul_([edges], 1)
    look("a list", edges[0], entries.roll(1, 1)[0])
    with torch.no_grad():
        look("without grad", edges[0], entries.roll(1, 1)[0])
    with torch.inference_mode():
        look("inference", edges[0], entries.roll(1, 1)[0])
        made = shard(entries, mesh, [Shard(1)])
        look("made in inference", made[0], entries[0])
        made.add_(0)
        look("made in inference, again", made[0], entries[0])
    return found


def test_what_is_kept_follows_the_program():
    once = ("first", "another view", "unbound", "a part", "other sizes", "written", "written, another view")
    once += ("written through a view", "data", "a list", "made in inference", "made in inference, again")
    for found in run_distributed(kept, 2):
        assert {label for label, count in found.items() if count} == set(once)
        assert set(found.values()) == {0, 1}


@on_ranks(2)
def test_what_is_kept_is_bounded():
    mesh = shared_mesh(2)
    a = shard(torch.arange(10.0), mesh, [Shard(0)])
    index = shard(torch.arange(64) % 10, mesh, [Shard(0)])
    looked = []
    for _ in range(2):
        with looks() as counted:
            for start in range(0, 40):
                part = index.view(8, 8)[:, 0] if start == 0 else index.view(64, 1).expand(64, start)
                a[part]
        looked.append(counted.count)
    left = len(index._found.entries)
    assert looked == [40, 40] and left == 32


def whole():
    """Looks and bytes for plain indices: each rank finds by itself what it reads and what others do."""
    mesh = shared_mesh(2)
    x = torch.randn(40, 4, dtype=torch.float64, generator=seeded(0))
    a, edges = shard(x, mesh, [Shard(0)], {0: (30, 10)}), torch.arange(40).roll(3).repeat(2, 1)
    found = {}

    def look(label, index, read=None):
        with looks() as looked, count_communication() as counted:
            got = a[index] if read is None else read(a, index)
        expected = x[index] if read is None else read(x, index)
        assert torch.equal(got.full_tensor(), expected), label
        found[label] = looked.count, counted.bytes_sent, counted.collectives.total()

    look("first", edges[0])
    look("again, another view", edges[0])
    look("another row", edges[1])
    edges[0, 5] = 35  # which the first rank reads: now it lacks four rows
    look("written", edges[0])
    look("written, again", edges[0])
    source = shard(torch.ones(40, 4, dtype=torch.float64), mesh, [Shard(0)], {0: (30, 10)})

    def add(x, index):
        return x.index_add(0, index, source if isinstance(x, ShardTensor) else source.full_tensor())

    look("added to", edges[1], add)
    look("two indices", edges[0], lambda x, i: x[i, i % 4])
    look("an index of a replicated ShardTensor", shard(edges[1], mesh, [Replicate()]), lambda x, i: x[i] * 1.0)
    return found


def test_plain_indices_exchange_rows():
    row = 4 * 8
    for rank, found in enumerate(run_distributed(whole, 2)):
        # 0..29 read rows 37, 38, 39, 0..26, the others 27..36: each lacks three rows.
        three = (0, 3 * row, 1)
        # An index that is looked at first is compared.
        looked = (2, 3 * row, 2)
        assert found["first"] == found["another row"] == looked
        assert found["again, another view"] == three
        four = (3, 4)[rank] * row
        assert found["written"] == (2, four, 2) and found["written, again"] == (0, four, 1)
        assert found["added to"] == looked  # both rows are views of what was written to


def whole_written():
    """Through something that raises no version, in the part of each rank: one raises where its own part is another."""
    a, index = shard(torch.arange(10.0), shared_mesh(2), [Shard(0)]), torch.arange(10).roll(1)
    a[index]
    index.data.copy_(index.flip(0))
    a[index]


def test_plain_indices_changed_unseen_raise(device_of_ranks):
    text = asserted(device_of_ranks, r"raises no version.*Remedy: make a new one")
    for error in run_expecting_errors(whole_written, 2):
        with pytest.raises(RuntimeError, match=text):
            raise error


def different(how, debug):
    """An index that is another one on each rank, although it counts as the same."""
    mesh, rank = shared_mesh(2), torch.distributed.get_rank()
    a, index = shard(torch.randn(10, 2, generator=seeded(0)), mesh, [Shard(0)]), torch.arange(10)
    a[index], a[shard(index, mesh, [Replicate()])], a * 2  # nothing that follows is communicated for the first time
    other = index.roll(1 + rank) if how != "beyond" else index + 20 * rank
    with mock.patch.dict("os.environ", SHARDTENSOR_DEBUG=str(int(debug))):
        if how == "replicated":
            other = ShardTensor.from_local(other, mesh, [Replicate()], shard_sizes={})
        if how == "added":
            a.index_add(0, other, a * 2)
        elif how in ("coo", "csr"):
            s = torch.sparse_coo_tensor(torch.stack([index, other]), torch.ones(10), (10, 10))
            (s.to_sparse_csr() if how == "csr" else s) @ a
        else:
            a[other]


NO_SPARSE = pytest.mark.not_emulated("whose sparse tensors are the CPU's")
SPARSE = [pytest.param(layout, marks=NO_SPARSE) for layout in ("coo", "csr")]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("how", ["plain", "replicated", "added", "beyond", *SPARSE])
def test_indices_that_differ_between_ranks_raise_on_all(how, debug):
    text = "differ" if debug else r"not sharded, but differs between ranks: .* on rank 0, .* on rank 1.*broadcast"
    for error in run_expecting_errors(different, 2, how, debug):
        with pytest.raises(shardtensor.RanksDiffer if not debug else RuntimeError, match=text):
            raise error


def local_positions():
    """One index per row of this rank's shard, where the program means one per row of the tensor."""
    mesh, rank = shared_mesh(2), torch.distributed.get_rank()
    a = ShardTensor.from_local(torch.ones((5, 3)[rank], 2), mesh, [Shard(0)])
    a[torch.arange(len(a.to_local()))].sum().item()


def test_indices_of_another_length_on_each_rank_raise_on_all():
    for error in run_expecting_errors(local_positions, 2):
        assert isinstance(error, shardtensor.RanksDiffer), error
        assert "comparison of indices" in str(error) and "item" in str(error)


# -- bad input ---------------------------------------------------------------------------------------------------------


def out_of_range(how):
    """The entry that is out of range is on one rank only."""
    mesh = shared_mesh(2)
    x, v = torch.ones(5, 2), torch.ones(4, 2)
    entries = torch.tensor([0, 1, 2, -1 if how == "negative" else 5])
    a, i, v = (shard(t, mesh, [Shard(0)]) for t in (x, entries, v))
    with count_communication() as counted:
        try:
            a[entries if how == "plain" else i] if how in ("plain", "x[index]") else a.index_add(0, i, v)
        finally:
            assert counted.bytes_sent <= (8 if how == "negative" else 0)  # at most a position


@pytest.mark.parametrize("how", ["x[index]", "index_add", "negative", "plain"])
def test_entries_out_of_range_raise_on_all_ranks(how):
    for error in run_expecting_errors(out_of_range, 2, how):
        with pytest.raises(IndexError, match="out of range for dimension 0 with size 5"):
            raise error


def local_write(through):
    mesh, rank = shared_mesh(2), torch.distributed.get_rank()
    a = shard(torch.arange(10.0), mesh, [Shard(0)])
    mine = torch.tensor([[0, 9, 3 + rank], [1, 1, 1]])
    edges = ShardTensor.from_local(mine, mesh, [Shard(1)])
    a[edges[0]]
    local = edges.to_local()
    if through == "given":
        mine[0, 0] = 1
    elif through == "collective":  # which raises no version
        torch.distributed.all_reduce(local)
    elif through == "numpy" and local.device.type == "cpu":
        local.numpy()[0, 0] = 1
    elif through == "view":
        edges[0].to_local()[0] = 1
    else:
        local[0, 0] = 1
    a[edges[0]]


@pytest.mark.parametrize("through", ["given", "collective", "numpy", "local", "view"])
def test_writes_to_local_tensors_raise(through, device_of_ranks):
    text = asserted(device_of_ranks, r"local tensor of an index.*Remedy: write to the ShardTensor")
    for error in run_expecting_errors(local_write, 2, through):
        with pytest.raises(RuntimeError, match=text):
            raise error


def debugged():
    """Nothing is kept where ranks compare what they do."""
    mesh = shared_mesh(2)
    a = shard(torch.arange(10.0), mesh, [Shard(0)])
    mine = torch.tensor([0, 9, 3])
    index = ShardTensor.from_local(mine, mesh, [Shard(0)])
    with mock.patch.dict("os.environ", SHARDTENSOR_DEBUG="1"):
        a[index]
        mine[0] = 5
        return a[index].full_tensor().tolist()


def test_nothing_is_kept_under_debug():
    assert run_distributed(debugged, 2) == [[5, 9, 3, 5, 9, 3]] * 2


# -- gradients, dtypes, graphs -----------------------------------------------------------------------------------------


@on_ranks(2, timeout=200)
def test_second_derivatives():
    g = seeded(0)
    x, v = (torch.randn(n, 2, dtype=torch.float64, generator=g) for n in (7, 11))
    source, target = (torch.randint(7, (11,), generator=g) for _ in range(2))

    def second(x, v, i, j):
        y = torch.zeros_like(x).index_add(0, j, x[i].sin() * v)
        (first,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
        return first.square()

    sizes = {0: (4, 7)}
    assert_matches_unsharded(
        second,
        *(x, v, source, target),
        mesh_shape=2,
        placements=[[Shard(0)]] * 4,
        shard_sizes=[None, sizes, sizes, sizes],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_half_precision_is_added_up_in_float32(dtype):
    """Sums of many numbers that cancel, and their errors against float64: ours and one device's."""
    mesh = shared_mesh(2)
    g = seeded(0)
    x = torch.zeros(5, 3, dtype=dtype)
    v = torch.randn(400, 3, generator=g).to(dtype)
    v[200:] = -v[:200] + torch.randn(200, 3, generator=g).to(dtype) / 8
    index = torch.arange(400) % 5
    a, w, i = (shard(t, mesh, [Shard(0)]) for t in (x, v, index))
    exact = x.double().index_add(0, index, v.double())
    ours = (a.index_add(0, i, w).full_tensor().double() - exact).abs().max()
    theirs = (x.index_add(0, index, v).double() - exact).abs().max()
    a.index_add_(0, i, w)
    again = (a.full_tensor().double() - exact).abs().max()
    assert a.dtype == a.to_local().dtype == dtype
    ours, again, theirs = [float(e) for e in (ours, again, theirs)]
    assert ours == again <= theirs


@on_ranks(2, timeout=200)
def test_a_graph_has_the_same_values():
    x, edges = laid_out(grid(6), 36, 4, 2, True)
    layer = Layer(4)
    eager = layer(x, edges)
    (eager_grad,) = torch.autograd.grad(eager.square().sum(), x)
    got = torch.compile(layer, backend="aot_eager")(x, edges)
    (grad,) = torch.autograd.grad(got.square().sum(), x)
    torch.testing.assert_close(got.full_tensor(), eager.full_tensor())
    torch.testing.assert_close(grad.full_tensor(), eager_grad.full_tensor())
    edges[0, 3] = 35
    graph = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(graph(x, edges).full_tensor(), layer(x, edges).full_tensor())
