"""Sums over the edges of graphs, as graph networks write them: edges sharded, nodes whole or sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

EDGES, FEATURES = 11, 3
CUT = {2: (4, 7), 3: (4, 0, 7)}


def graph(nodes):
    """Messages, source and target of each edge, and nodes; no message is given to node 0, and node 1 gets one."""
    generator = seeded(0)
    messages = torch.randn(EDGES, FEATURES, dtype=torch.float64, generator=generator)
    target = torch.randint(2, nodes, (EDGES,), generator=generator)
    target[3] = 1
    source = torch.randint(nodes, (EDGES,), generator=generator)
    return messages, source, target, torch.randn(nodes, FEATURES, dtype=torch.float64, generator=generator)


def wide(index, like):
    return index.view(-1, 1).expand_as(like)


def scatter(messages, index, nodes, reduce):
    """What graph libraries build on: zeros like the messages, written in place."""
    size = (nodes, *messages.shape[1:])
    index_of_all = wide(index, messages) if messages.ndim > 1 else index
    if reduce in ("sum", "mean"):
        total = messages.new_zeros(size).scatter_add_(0, index_of_all, messages)
        if reduce == "sum":
            return total
        count = messages.new_zeros(nodes)
        count.scatter_add_(0, index, messages.new_ones(messages.size(0)))
        return total / count.clamp(min=1).view(-1, *[1] * (messages.ndim - 1))
    if reduce == "prod":
        return messages.new_ones(size).scatter_reduce_(0, index_of_all, messages, reduce="prod", include_self=True)
    return messages.new_zeros(size).scatter_reduce_(0, index_of_all, messages, reduce=reduce, include_self=False)


def in_place(write):
    def fn(messages, target, x):
        return write(x * 1, target, messages) ** 2

    return fn


def cases():
    """``{label: fn(messages, target, nodes)}``"""
    found = {
        "scatter_add": lambda m, t, x: x.scatter_add(0, wide(t, m), m),
        "index_add": lambda m, t, x: x.index_add(0, t, m, alpha=2),
        "index_put": lambda m, t, x: x.index_put((t,), m, accumulate=True),
        "index_reduce": lambda m, t, x: x.index_reduce(0, t, m, "prod", include_self=False),
        "scatter_add_": in_place(lambda x, t, m: x.scatter_add_(0, wide(t, m), m)),
        "index_add_": in_place(lambda x, t, m: x.index_add_(0, t, m)),
        "index_put_": in_place(lambda x, t, m: x.index_put_((t,), m, accumulate=True)),
        "index_reduce_": in_place(lambda x, t, m: x.index_reduce_(0, t, m, "mean", include_self=False)),
        "scatter_, multiply": lambda m, t, x: x.detach().clone().scatter_(0, wide(t, m), m.detach(), reduce="multiply"),
        "out=": lambda m, t, x: torch.index_add(
            x.detach(), 0, t, m.detach(), out=torch.zeros_like(x, requires_grad=False)
        ),
    }
    for reduce in ("sum", "mean", "amax", "amin", "prod"):
        found[f"new_zeros, {reduce}"] = lambda m, t, x, r=reduce: scatter(m, t, x.shape[0], r) * x
        for itself in (True, False):
            found[f"scatter_reduce, {reduce}, {itself}"] = lambda m, t, x, r=reduce, i=itself: x.scatter_reduce(
                0, wide(t, m), m, r, include_self=i
            )
    found["scatter_reduce_"] = in_place(lambda x, t, m: x.scatter_reduce_(0, wide(t, m), m, "amax"))
    return found


def check(ranks, nodes, index, x):
    messages, _, target, values = graph(nodes)
    edges = {0: CUT[ranks]}
    for label, fn in cases().items():
        try:
            assert_matches_unsharded(
                fn,
                *(messages, target, values),
                mesh_shape=ranks,
                placements=[[Shard(0)], index, x],
                shard_sizes=[edges, None if index is None else edges, None],
            )
        except Exception as error:
            raise AssertionError(f"{label} of {nodes} nodes as {x}, index {index}") from error


@pytest.mark.parametrize("ranks, nodes", [(2, 5), (2, 9), (3, 5)])
def test_edges_are_summed_into_whole_and_sharded_nodes(ranks, nodes):
    # Contributions to 5 nodes go in one exchange, those to 9 nodes owner by owner.
    for index, x in ((None, [Replicate()]), ([Shard(0)], [Shard(0)])):
        run_distributed(check, ranks, ranks, nodes, index, x, timeout=200)


@on_ranks(2, timeout=200)
def test_other_layouts():
    """Index and messages sharded in different ways, nodes plain, edges along a later dim, and on a mesh of two dims."""
    messages, _, target, values = graph(5)
    for label in ("scatter_add", "new_zeros, mean", "new_zeros, amax", "scatter_reduce, amin, False"):
        fn = cases()[label]
        for placements, sizes in (
            ([[Shard(0)], [Shard(0)], None], [{0: (4, 7)}, {0: (9, 2)}, None]),
            ([[Replicate()], [Shard(0)], [Replicate()]], [None, {0: (4, 7)}, None]),
            ([[Shard(0)], None, [Shard(1)]], [{0: (11, 0)}, None, None]),
        ):
            common = dict(mesh_shape=2, placements=placements, shard_sizes=sizes)
            assert_matches_unsharded(fn, messages, target, values, **common)

    def last(m, t, x):
        return x.t().clone().scatter_add_(1, t.expand(FEATURES, EDGES), m.t()) * x.t()

    along = dict(placements=[[Shard(0)], [Shard(0)], [Replicate()]], shard_sizes=[{0: (4, 7)}, {0: (4, 7)}, None])
    assert_matches_unsharded(last, messages, target, values, mesh_shape=2, **along)
    counts = assert_matches_unsharded(
        lambda t: torch.zeros_like(t)[:5].index_add(0, t, torch.ones_like(t)),
        *(target,),
        mesh_shape=2,
        placements=[Shard(0)],
        shard_sizes={0: (4, 7)},
    )
    return counts.placements


@on_ranks(4, timeout=200)
def test_edges_on_one_dim_of_a_mesh_and_features_on_the_other():
    messages, _, target, values = graph(5)
    for label in ("new_zeros, sum", "new_zeros, amax", "index_add"):
        for x in ([Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(1), Shard(0)]):
            assert_matches_unsharded(
                cases()[label],
                *(messages, target, values),
                mesh_shape=(2, 2),
                placements=[[Shard(1), Shard(0)], [Replicate(), Shard(0)], x],
                shard_sizes=[{1: (4, 7)}, {1: (4, 7)}, None],
            )


class Convolution(nn.Module):
    """Of a graph, with normalization by degrees and self-loops left out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4)

    def forward(self, x, source, target):
        degree = scatter(torch.ones_like(target, dtype=x.dtype), target, x.shape[0], "sum")
        norm = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
        x = self.linear(x)
        messages = (norm[source] * norm[target]).view(-1, 1) * x.index_select(0, source)
        return scatter(messages, target, x.shape[0], "sum").relu()


class Attention(nn.Module):
    """Softmax over the edges of each node."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4)
        self.score = nn.Linear(8, 1)

    def forward(self, x, source, target):
        n, x = x.shape[0], self.linear(x)
        score = self.score(torch.cat([x[source], x[target]], 1)).tanh().squeeze(1)
        highest = scatter(score.detach(), target, n, "amax")
        weight = (score - highest.index_select(0, target)).exp()
        weight = weight / (scatter(weight, target, n, "sum") + 1e-16).index_select(0, target)
        return scatter(weight.view(-1, 1) * x.index_select(0, source), target, n, "sum")


class EdgeConvolution(nn.Module):
    """The maximum over edges of what is made of both ends."""

    def __init__(self, reduce="amax"):
        super().__init__()
        self.reduce = reduce
        self.layers = nn.Sequential(nn.Linear(2 * FEATURES, 5), nn.SiLU(), nn.Linear(5, 4))

    def forward(self, x, source, target):
        messages = self.layers(torch.cat([x[target], x[source] - x[target]], -1))
        return scatter(messages, target, x.shape[0], self.reduce)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks", timeout=200)
def test_layers_of_graph_networks(ranks):
    _, source, target, values = graph(6)
    edges = {0: CUT[ranks]}
    for make in (Convolution, Attention, EdgeConvolution, lambda: EdgeConvolution("mean")):
        torch.manual_seed(0)
        layer = make().double()
        for x in (None, [Replicate()], [Shard(0)]):
            assert_matches_unsharded(
                layer,
                *(values, source, target),
                mesh_shape=ranks,
                placements=[x, [Shard(0)], [Shard(0)]],
                shard_sizes=[None, edges, edges],
            )


def traffic():
    mesh = shared_mesh(2)
    messages, _, target, values = graph(5)
    m, t = (shard(value, mesh, [Shard(0)], {0: (4, 7)}) for value in (messages, target))
    index = wide(t, m)
    found = {}

    def counted(label, fn):
        with count_communication() as traffic:
            result = fn()
        found[label] = result.placements, dict(traffic.collectives), traffic.bytes_sent

    whole, cut = (shard(values, mesh, [p]) for p in (Replicate(), Shard(0)))
    counted("out of place", lambda: whole.scatter_add(0, index, m))
    counted("in place", lambda: whole.scatter_add_(0, index, m))
    counted("maximum", lambda: whole.scatter_reduce(0, index, m, "amax"))
    cut.scatter_add(0, index, m)
    counted("sharded nodes", lambda: cut.scatter_add(0, index, m))
    return found, target.tolist()


def test_contributions_are_what_is_sent():
    nodes = 5 * FEATURES * 8
    for rank, (found, targets) in enumerate(run_distributed(traffic, 2)):
        assert found["out of place"] == ((Partial(),), {}, 0)
        assert found["in place"][:2] == ((Replicate(),), {"all_reduce": 1})
        assert found["maximum"][:2] == ((Replicate(),), {"all_reduce": 1})
        # To the other rank what its nodes get: those that have edges here.
        target, owned = (targets[:4], targets[4:])[rank], ((0, 1, 2), (3, 4))[rank]
        assert found["sharded nodes"][0] == (Shard(0),)
        assert found["sharded nodes"][2] == len(set(target) - set(owned)) * nodes // 5


def laid_out(ranks, nodes, targets, sizes, used=None):
    """How the sums at nodes are sharded, what is sent for them in a second call, and whether they are right; sources
    are read before from nodes in the sizes ``used``, if there are any."""
    mesh = shared_mesh(ranks)
    edges = torch.stack([torch.arange(len(targets)) % nodes, torch.tensor(targets, dtype=torch.int64)])
    values = torch.randn(nodes, FEATURES, dtype=torch.float64, generator=seeded(1))
    index = shard(edges, mesh, [Shard(1)], {0: sizes})
    x = values if used is None else shard(values, mesh, [Shard(0)], {0: used}, requires_grad=True)
    expected = {reduce: scatter(values[edges[0]], edges[1], nodes, reduce) for reduce in ("sum", "mean", "amax")}
    for _ in range(2):
        messages = shard(values[edges[0]], mesh, [Shard(0)], {0: sizes}) if used is None else x[index[0]]
        with count_communication() as traffic:
            found = {reduce: scatter(messages, index[1], nodes, reduce) for reduce in expected}
    for reduce, result in found.items():
        torch.testing.assert_close(result.full_tensor(), expected[reduce], rtol=1e-10, atol=1e-10)
        assert result.shard_sizes == found["sum"].shard_sizes
    if used is not None:
        found["sum"].square().sum().backward()
        leaf = values.requires_grad_()
        scatter(leaf[edges[0]], edges[1], nodes, "sum").square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, rtol=1e-10, atol=1e-10)
    return found["sum"].shard_sizes.get(0), traffic.bytes_sent, dict(traffic.collectives)


@pytest.mark.parametrize(
    ("targets", "sizes", "used", "expected", "apart"),
    [
        ([0, 1, 1, 2, 3, 4, 5], (4, 3), None, (3, 5), True),
        ([2, 0, 1, 2, 5, 4, 4], (4, 3), None, (3, 5), True),
        ([0, 1, 1, 2, 4, 4, 5], (4, 3), (4, 4), (4, 4), True),  # sizes that suit the index, too
        ([0, 1, 1, 2, 3, 4, 5], (4, 3), (4, 4), (3, 5), True),  # and that do not: node 3 is of the second rank
        ([0, 1, 1, 2, 2, 4, 5], (0, 7), None, (0, 8), True),
        ([0, 1, 1, 2, 2, 4, 5], (7, 0), None, (8, 0), True),
        ([0, 1, 2, 2, 3, 4, 5], (2, 0, 5), None, (2, 0, 6), True),
        ([5, 1, 1, 2, 2, 4, 0], (4, 3), None, None, False),
        ([5, 1, 1, 2, 2, 4, 0], (4, 3), (3, 5), (3, 5), False),
        ([], (0, 0), None, (0, 8), True),
    ],
)
def test_an_index_tells_which_rank_has_which_rows(targets, sizes, used, expected, apart):
    for found, sent, collectives in run_distributed(laid_out, len(sizes), len(sizes), 8, targets, sizes, used):
        assert found == expected
        assert not apart or (sent == 0 and not collectives), (sent, collectives)
        assert expected is not None or "all_reduce" in collectives


def beyond():
    index = shard(torch.tensor([0, 1, 7, 3]), shared_mesh(2), [Shard(0)])
    messages = shard(torch.ones(4, 2), shared_mesh(2), [Shard(0)])
    messages.new_zeros(5, 2).index_add_(0, index, messages)


def test_a_row_out_of_range_raises_on_all_ranks():
    for error in run_expecting_errors(beyond, 2):
        assert isinstance(error, IndexError) and "out of range for dimension 0 with size 5" in str(error)


@on_ranks(2)
def test_zeros_take_no_memory_for_rows_of_other_ranks():
    """Bytes of zeros before the sum into them, and after it."""
    messages = shard(torch.ones(4, 3), shared_mesh(2), [Shard(0)])
    index = shard(torch.tensor([0, 1, 3, 4]), shared_mesh(2), [Shard(0)])
    total = messages.new_zeros(1000, 3)
    before = total._local_tensor.untyped_storage().nbytes()
    total.index_add_(0, index, messages)
    written = messages.new_zeros(6, 3)
    written[0] = 1.0  # in memory of its own
    assert written.full_tensor().sum() == 3
    rank = dist.get_rank()
    found = before, total._local_tensor.untyped_storage().nbytes(), total.shard_sizes
    assert found == (4, (2, 998)[rank] * 3 * 4, {0: (2, 998)})


def plain_target():
    mesh = shared_mesh(2)
    m = shard(torch.ones(4, 2), mesh, [Shard(0)])
    with count_communication() as traffic:
        try:
            torch.frombuffer(bytearray(24), dtype=torch.float32).view(3, 2).index_add_(0, torch.tensor([0, 1, 2, 0]), m)
        finally:
            assert not traffic.collectives


def test_a_plain_target_is_refused():
    for error in run_expecting_errors(plain_target, 2):
        with pytest.raises(NotImplementedError, match="plain tensor"):
            raise error


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax"])
@on_ranks(3)
def test_sources_sharded_along_another_dim(reduce, include_self):
    """The source is sharded along another dim than what it is reduced into, neither of them the indexed one."""
    mesh = shared_mesh(3)
    generator = seeded(0)
    x, source = (torch.rand(4, 5, 3, dtype=torch.float64, generator=generator) + 0.5 for _ in range(2))
    index = torch.randint(3, (4, 5, 3), generator=generator)
    spread = shard(x, mesh, [Shard(1)], {0: (1, 1, 3)}, requires_grad=True)
    values = shard(source, mesh, [Shard(2)], {0: (1, 0, 2)}, requires_grad=True)
    result = torch.scatter_reduce(spread, 0, index, values, reduce, include_self=include_self)
    expected = torch.scatter_reduce(
        x.requires_grad_(), 0, index, source.requires_grad_(), reduce, include_self=include_self
    )
    torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-10, atol=1e-10)
    result.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in ((spread, x), (values, source)):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-10)


# -- a plain index that has read sharded positions ---------------------------------------------------------------------

ATOMS, WIDTH = 12, 8
SUMS = {
    "index_add": lambda x, to, sent: torch.zeros(x.shape, dtype=x.dtype).index_add(0, to, sent),
    "negative dim": lambda x, to, sent: torch.ones(x.shape, dtype=x.dtype).index_add(-2, to, sent, alpha=2),
    "scatter_add": lambda x, to, sent: torch.zeros(x.shape, dtype=x.dtype).scatter_add(0, wide(to, sent), sent),
    "new_zeros": lambda x, to, sent: sent.new_zeros(x.shape).index_add_(0, to, sent),
    "new_zeros, scatter": lambda x, to, sent: sent.new_zeros(x.shape).scatter_add_(0, wide(to, sent), sent),
}


class Interactions(nn.Module):
    """Of atoms whose positions are sharded, by a plain list of edges; their kinds are plain, too."""

    def __init__(self, how, seen):
        super().__init__()
        self.how, self.seen = SUMS[how], seen
        self.to = torch.arange(ATOMS).repeat_interleave(2)
        self.source = (torch.arange(2 * ATOMS) * 5 + 1) % ATOMS
        self.kinds, self.filters = nn.Embedding(3, WIDTH), nn.Linear(3, WIDTH)
        self.update = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, positions):
        filters = self.filters(positions[self.source] - positions[self.to])
        x = self.kinds(torch.arange(ATOMS) % 3)
        for _ in range(2):
            summed = self.how(x, self.to, x[self.source] * filters)
            x = x + self.update(summed)
            self.seen.append((getattr(summed, "placements", None), getattr(x, "shard_sizes", None)))
        graphs = torch.zeros(2, WIDTH, dtype=x.dtype).index_add(0, torch.arange(ATOMS) // 6, x)
        self.seen.append((getattr(graphs, "placements", None), {}))
        return x, graphs * 2


@pytest.mark.parametrize("sizes", [(5, 7), (0, 12), (3, 1, 8)])
@pytest.mark.parametrize("how", SUMS)
def test_nodes_lie_like_the_positions_that_their_index_has_read(how, sizes):
    run_distributed(compare_interactions, len(sizes), how, sizes, timeout=200.0)


def compare_interactions(how, sizes):
    """A sum by an index that has read nothing, of atoms into graphs, is contributed to by all ranks, as before."""
    seen = []
    positions = torch.randn(ATOMS, 3, dtype=torch.float64, generator=seeded(1))
    model = Interactions(how, seen).double()
    assert_matches_unsharded(model, positions, mesh_shape=len(sizes), placements=[Shard(0)], shard_sizes={0: sizes})
    model(shard(positions, shared_mesh(len(sizes)), [Shard(0)], {0: sizes}))
    assert seen == [((Shard(0),), {0: sizes})] * 2 + [((Partial(),), {})]


@pytest.mark.parametrize("how", SUMS)
def test_no_rank_repeats_what_is_computed_of_nodes(how):
    positions = torch.randn(ATOMS, 3, requires_grad=True)
    model = Interactions(how, [])
    found = shardtensor.explain(model, positions, mesh=2, shard=0, backward=True, values=True)
    assert found.excess.work == pytest.approx(1.0)
    summed = [layer for layer in found.layers if layer.operator.startswith(("index_add", "scatter_add"))]
    # Edges are in the order of their targets, and divided evenly: no rank adds to a row of the other one.
    assert len(summed) == 3 and not any(share.bytes_sent for layer in summed[:2] for share in layer.shares.values())
