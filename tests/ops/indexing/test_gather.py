"""Looking into sharded dims, and writing there, by index."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from seeded import seeded
from spatial_cases import check_cases, data
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.layout.intervals import clipped
from shardtensor.testing import assert_matches_unsharded, count_communication, run_distributed, shard, shared_mesh


def numbers(*shape, high=6, seed=0):
    return torch.randint(high, shape, generator=seeded(seed))


def written(write):
    """A case that writes into a copy, so that gradients of the kept and of the written values are compared."""

    def fn(x):
        y = x * 1
        write(y, x)
        return y**2

    return fn


def cases():
    """(5, 7, 6), of which the dims 1 and 2 are cut and looked into."""
    result = []

    def add(label, fn, *shape, dims=(1, 2)):
        result.append((label, fn, shape or (5, 7, 6), dims))

    i, j = torch.tensor([0, 5, 2, 2, 3, 0, 1, 6]), torch.tensor([[1, -1], [4, -5]])
    add("index_select", lambda x: x.index_select(1, i))
    add("in another order", lambda x: x.index_select(1, torch.tensor([6, 0, 5, 1, 4, 2, 3])).exp())
    add("one row", lambda x: torch.index_select(x, 1, torch.tensor(4)) * x)
    add("x[:, i]", lambda x: x[:, i].exp())
    add("x[:, i, slice]", lambda x: x[1:, i, 1:5] * x[0, None, i, 2:])
    add("two-dim index", lambda x: x[:, j])
    rows, columns = (index.cpu().numpy() for index in (i, j))
    add("lists and arrays", lambda x: x[:, [[0, 1], [6, -1]]] * x[:, columns, :, None][..., 0] * x[0, rows[3]])
    add("nothing selected", lambda x: x[:, i[:0]].sum() + x.sum())
    add("list of truth values", lambda x: x[:, [True, False, False, True, False, True, True]].exp())
    add("two indices", lambda x: x[:, j, j])
    add("three indices", lambda x: x[j[:, :1], j, j])
    add("indices apart", lambda x: x[j, :, j[0]])
    add("next to a number", lambda x: x[2, i] * x[:, i, 3].sum(0)[:, None])
    add("an index by ShardTensor", lambda x: x[:, (x[0, :, 0].detach() * 100).long() % 7])
    add("mask", lambda x: x[:, torch.arange(7) % 3 == 1])
    add("mask of two dims", lambda x: x[:, torch.arange(42).view(7, 6) % 5 == 1].exp())
    add("gather", lambda x: x.gather(1, numbers(5, 9, 6)))
    add("sort and unsort", lambda x: x.gather(1, x.argsort(1)).sort(1, descending=True)[0])
    add("gather of a part", lambda x: x.gather(2, numbers(3, 4, 5)).exp())
    add("gather by a ShardTensor", lambda x: torch.gather(x, 1, (x.detach() * 100).long() % 7))
    add("gather by a part", lambda x: torch.gather(x, 1, (x[:4, :3, 1:].detach() * 100).long() % 7))
    add("take", lambda x: x.take(torch.tensor([[0, -1], [100, 37]])) * torch.take(x, numbers(2, 2, high=210)))
    add("take_along_dim", lambda x: x.take_along_dim(x.argsort(1)[:, ::2], 1))
    add("take_along_dim broadcast", lambda x: torch.take_along_dim(x, numbers(1, 3, 1) - 2, 1))
    add("take_along_dim wraps", lambda x: torch.take_along_dim(x, numbers(1, 3, 1) * 9 - 20, 1))
    add("repeat_interleave", lambda x: x.repeat_interleave(torch.tensor([0, 2, 1, 1, 3, 0, 1]), 1).exp())
    add("combinations", lambda x: torch.combinations(x, 2).prod(1), 9, dims=(0,))
    add("searchsorted", lambda x: torch.searchsorted(x.detach().sort(1)[0].mT.contiguous(), numbers(5, 6, 4) - 2.5))
    add("bucketize", lambda x: torch.bucketize((x * 2).detach(), x.detach()[0, :, 0].sort()[0], right=True))
    # writing
    row = torch.arange(6.0).double()
    s, t = numbers(5, 4, 6, high=7), torch.tensor([5, 0, 3])
    add("scatter", lambda x: x.scatter(1, torch.tensor([6, 2])[:, None].expand(5, 2, 6), x[:, 3:5].exp()))
    add("scatter a number", lambda x: x.scatter(1, s, 1.5))
    two = torch.tensor([6, 2])[:, None]
    add("scatter of a part", lambda x: x.scatter(1, two.expand(3, 2, 4), x[:, :5].detach().exp()))
    add("scatter_add", lambda x: x.scatter_add(1, s, x[:, 1:5].exp()))
    add("scatter_add to a whole", lambda x: torch.ones(5, 7, 6).double().scatter_add(1, s, x[:, 3:]))
    for reduce in ("sum", "mean", "amax", "prod"):
        for inner in (True, False):
            add(
                f"scatter_reduce {reduce} {inner}",
                lambda x, r=reduce, inner=inner: torch.scatter_reduce(x, 1, s, x[:, 1:5].exp(), r, include_self=inner),
            )
    add("index_reduce", lambda x: x.index_reduce(1, t, x[:, 2:5].exp(), "mean", include_self=False))
    add("index_add", lambda x: x.index_add(1, i[:4], x[:, 3:].exp(), alpha=2))
    add("index_copy", lambda x: x.index_copy(1, t, x[:, 3:6].exp()))
    add("index_fill", lambda x: x.index_fill(1, t, 3.0))
    add("index_put", lambda x: torch.ops.aten.index_put(x, [None, j % 6, j], x[:, :2, :2].exp(), True))
    add("scatter_add to zeros", lambda x: torch.zeros_like(x).scatter_add_(1, s, x[:, 3:].exp()))
    add("index_fill_", written(lambda y, x: y.index_fill_(1, t, 3.0)))
    add("index_add_", written(lambda y, x: y.index_add_(1, t, x[:, 2:5])))
    add("scatter_", written(lambda y, x: y.scatter_(1, t[:, None].expand(5, 3, 6), x[:, 4:])))
    add("put", lambda x: x.put(torch.tensor([3, -1, 100]), x[0, 0, :3].exp(), accumulate=True))
    add("x[:, i] = v", written(lambda y, x: y.__setitem__((slice(None), t), x[:, 2:5].exp())))
    add("x[:, i] = row", written(lambda y, x: y.__setitem__((slice(None), t), torch.ones(6).double())))
    add("x[:, list] = number", written(lambda y, x: y.__setitem__((slice(None), [0, -1]), 2.0)))
    add("x[1, i] = v", written(lambda y, x: y.__setitem__((1, t), x[2, 1:4])))
    add("x[i, 2] = v", written(lambda y, x: y.__setitem__((t[1:], 2), x[3:, 4])))
    add("x[i, :, 2] = v", written(lambda y, x: y.__setitem__((t[1:], slice(None), 2), x[3:, :, 4])))
    add("x[1, 2:6, i] += 1", written(lambda y, x: y[1, 2:6, t].add(1)))
    add("x[:, 5] *= 2", written(lambda y, x: y.__setitem__((slice(None), 5), y[:, 5] * 2)))
    add("x[:, 2:5] = y", written(lambda y, x: y.__setitem__((slice(None), slice(2, 5)), x[:, 4:])))
    add("x[..., 0] = 0", written(lambda y, x: y.__setitem__((..., 0), 0)))
    add("x[mask] = v", written(lambda y, x: y.__setitem__(torch.arange(210).view(5, 7, 6) % 50 == 0, x[0, 0, :5])))
    add("x[x > 0] = number", written(lambda y, x: y.__setitem__(x > 0, 1.0)))
    add("x[:, sharded mask] = row", written(lambda y, x: y.__setitem__((slice(None), x[0, :, 0] > 0), 1.0)))
    add("x[..., plain mask] = v", written(lambda y, x: y.__setitem__((..., row > 2), x[..., :3])))
    add("masked_fill", lambda x: x.masked_fill(x > 0, 1.0) * x.masked_fill(row > 2, torch.tensor(2.0).double()))
    add("masked_fill plain", lambda x: x.masked_fill(torch.arange(7)[:, None] < 3, float("-inf")).softmax(-1))
    add("where", lambda x: torch.where(x > 0, x, torch.arange(7.0)[:, None].double()))
    add("one_hot", lambda x: F.one_hot((x.detach().abs() * 3).long()) * x.unsqueeze(-1))
    add("one_hot, wide", lambda x: F.one_hot((x.detach().abs() * 3).long() % 5, 6).double() * x.unsqueeze(-1))
    # A few rows of a sharded dim.
    few = torch.tensor([3, 1])
    add("the same row", lambda x: x[:, [8, 8, -1]], 3, 13, 2)
    add("rows and more", lambda x: x[None, 1:, few, ..., 1], 3, 13, 2)
    add("rows of integers", lambda x: (x * 100).long()[:, few], 3, 13, 2)
    add("rows of a mask", lambda x: (x > 0)[:, few], 3, 13, 2)
    # Of values, torch leaves leading dims of size 1 out.
    add("x[:, i] = 1x1x1xrow", written(lambda y, x: y.__setitem__((slice(None), t), row.view(1, 1, 1, 6))))
    mask = torch.arange(35).view(5, 7) % 4 == 0
    add("x[mask] = 1x1xrow", written(lambda y, x: y.__setitem__(mask, row.view(1, 1, 6))))
    add("x[sharded mask] = 1x1xrow", written(lambda y, x: y.__setitem__(x[..., 0] > 0, x[:1, :1, :] * 2)))
    add("x[x > 0] = 1x1", written(lambda y, x: y.__setitem__(x > 0, torch.ones(1, 1).double())))
    add("x[x > 0] = values", written(lambda y, x: y.__setitem__(x > 0, torch.arange(int((x > 0).sum())).double())))
    add("masked_scatter", lambda x: x.masked_scatter(x > 0.2, x.exp()))
    add("masked_scatter plain", lambda x: x.masked_scatter(torch.arange(6) % 2 == 0, torch.arange(300).double()))
    return result


@pytest.mark.parametrize("mesh_shape", [pytest.param(2, marks=pytest.mark.slow), 3, (2, 2)], ids=str)
@on_ranks("mesh_shape", timeout=300)
def test_lookups_match_one_device(mesh_shape):
    chosen = cases()
    if mesh_shape == (2, 2):  # a flattened tensor has one dim to cut
        chosen = [case for case in chosen if case[0] not in ("combinations", "masked_scatter")]
    check_cases(chosen, mesh_shape)


def drawn(seed, ranks):
    """Everything at random: shapes, which dim is looked into, how each operand lies."""
    g = seeded(seed)

    def pick(n):
        return int(torch.randint(n, (1,), generator=g))

    def layout(t):
        if not t.ndim or not pick(3):
            return None, None
        d = pick(t.ndim)
        cuts = sorted(pick(t.shape[d] + 1) for _ in range(ranks - 1))
        return [Shard(d)], {0: [b - a for a, b in zip([0, *cuts], [*cuts, t.shape[d]])]}

    shape = [1 + pick(7) for _ in range(1 + pick(3))]
    dim = pick(len(shape))
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    many = [n if d == dim else 1 + pick(n) for d, n in enumerate(shape)]
    many[dim] = 1 + pick(9)
    index = torch.randint(shape[dim], many, generator=g)
    source = torch.randn(many, generator=g, dtype=torch.float64)
    line = index.reshape(-1)[: 1 + pick(5)].contiguous()
    rows = torch.randn([len(line) if d == dim else n for d, n in enumerate(shape)], generator=g, dtype=torch.float64)
    spread = [slice(None)] * dim
    for fn, operands in (
        (lambda a, i: a.gather(dim, i).exp(), (x, index)),
        (lambda a, i, s: a.scatter_add(dim, i, s).exp(), (x, index, source)),
        (lambda a, i: a.index_select(dim, i).exp(), (x, line)),
        (lambda a, i, s: a.index_add(dim, i, s).exp(), (x, line, rows)),
        (lambda a, i: a[(*spread, i)].exp(), (x, index)),
    ):
        laid = [layout(t) for t in operands]
        if all(p is None for p, _ in laid):
            continue
        assert_matches_unsharded(
            fn, *operands, mesh_shape=ranks, placements=[p for p, _ in laid], shard_sizes=[s for _, s in laid]
        )


def draws(seeds, ranks):
    for seed in seeds:
        try:
            drawn(seed, ranks)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("ranks", [2, 3])
def test_operands_laid_out_at_random(ranks):
    run_distributed(draws, ranks, range(12), ranks, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_operands_laid_out_at_random(ranks):
    run_distributed(draws, ranks, range(100, 300), ranks, timeout=900)


# -- tables ---------------------------------------------------------------------------------------------------


@on_ranks(3, timeout=200)
def test_tables_with_sharded_rows():
    torch.manual_seed(0)
    words = numbers(3, 5, high=7)
    rows, columns = {0: (3, 0, 4)}, {0: (2, 2, 1)}
    for placements, sizes in (([Shard(0)], rows), ([Shard(1)], columns)):
        for where in (None, [Replicate()], [Shard(1)]):
            common = dict(
                mesh_shape=3,
                placements=[where, placements],
                shard_sizes=[columns if where == [Shard(1)] else None, sizes],
            )
            table = data(7, 5)
            assert_matches_unsharded(lambda i, t: F.embedding(i, t).exp(), words, table, **common)
            assert_matches_unsharded(lambda i, t: F.embedding(i, t, padding_idx=-3).exp(), words, table, **common)
            assert_matches_unsharded(
                lambda i, t: F.embedding(i, t, scale_grad_by_freq=True).exp(), words, table, **common
            )
            for mode in ("sum", "mean", "max"):
                assert_matches_unsharded(
                    lambda i, t, m=mode: F.embedding_bag(i, t, mode=m, padding_idx=2).exp(), words, table, **common
                )
    offsets = torch.tensor([0, 3, 3, 4, 11])
    for where, sizes in ((None, None), ([Shard(0)], {0: (4, 0, 7)})):
        for last in (False, True):
            for mode in ("sum", "mean", "max"):
                assert_matches_unsharded(
                    lambda i, t, last=last, m=mode: F.embedding_bag(i, t, offsets, mode=m, include_last_offset=last),
                    numbers(11, high=7),
                    data(7, 5),
                    mesh_shape=3,
                    placements=[where, [Shard(0)]],
                    shard_sizes=[sizes, rows],
                )
    mesh = shared_mesh(3)
    layer = nn.Embedding(7, 5)
    layer.weight = nn.Parameter(shard(layer.weight.detach(), mesh, [Shard(0)], rows))
    layer(words).sum().backward()
    assert layer.weight.grad.shard_sizes == rows
    assert torch.equal(layer.weight.grad.full_tensor()[:, 0], torch.bincount(words.view(-1), minlength=7).float())


# -- what travels ---------------------------------------------------------------------------------------------


def traffic():
    """By operator: layout of the result, then collectives and bytes sent by this rank, forward and backward."""
    mesh = shared_mesh(2)
    i, same = torch.tensor([2, 0, 6]), torch.tensor([2, 0, 6, 1, 3, 4, 5])
    sharded = shard(same, mesh, [Shard(0)], {0: (4, 3)})
    found = {}
    for label, fn in {
        "few rows": lambda x: x[i[:2]],
        "as many rows": lambda x: x[same],
        "a sharded index": lambda x: x.index_select(0, sharded),
        "gather": lambda x: x.gather(0, same[:5, None].expand(5, 4)),
        "scatter": lambda x: x.scatter(0, i[:, None].expand(3, 4), 1.0),
        "index_add": lambda x: x.index_add(0, i, torch.ones(3, 4).double()),
        "index_fill": lambda x: x.index_fill(0, i, 0.0),
        "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
        "index_add of a sharded source": lambda x: x.index_add(0, sharded, x * 1),
    }.items():
        x = shard(data(7, 4), mesh, [Shard(0)], {0: (5, 2)}, requires_grad=True)
        with count_communication() as forward:
            y = fn(x)
        where = y.placements, y.shard_sizes
        with count_communication() as backward:
            y.backward(torch.ones_like(y))
        assert x.grad.shard_sizes == x.shard_sizes
        found[label] = (
            *where,
            forward.collectives.total(),
            forward.bytes_sent,
            backward.collectives.total(),
            backward.bytes_sent,
        )
    return found


def test_what_travels():
    ranks = run_distributed(traffic, 2)
    row = 4 * 8
    cut = {0: (5, 2)}
    for rank, found in enumerate(ranks):
        assert found["few rows"] == ((Partial(),), {}, 0, 0, 0, 0)
        for label in ("scatter", "index_add", "index_fill", "masked_fill"):
            assert found[label] == ((Shard(0),), cut, 0, 0, 0, 0), label
        # Rank 0 has the first five entries and lacks row 6, rank 1 the last two and lacks row 4: both know that alone,
        # once they have compared the index.
        assert found["as many rows"] == ((Shard(0),), cut, 2, row, 1, row)
        # Rank 0 asks for row 6, rank 1 for rows 3 and 4: counts, positions, and then rows; backward rows only.
        asks, gives = (1, 2)[rank], (2, 1)[rank]
        assert found["a sharded index"] == ((Shard(0),), {0: (4, 3)}, 3, asks * 8 + gives * row, 1, asks * row)
        assert found["gather"][1:4] == ({0: (3, 2)}, 2, (2, 1)[rank] * row)
        # A row of the source, which is sharded otherwise than the index; then contributions to the other's rows.
        assert found["index_add of a sharded source"][2:4] == (2, (1 + 1, 2)[rank] * row)


# -- values that come out as they were, and errors ---------------------------------------------------------------


@on_ranks(2)
def test_values_come_out_as_they_were():
    mesh = shared_mesh(2)
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-0.0, inf], [nan, -inf], [1.0, -0.0], [0.0, 5e-324]], dtype=torch.float64)
    i = torch.tensor([3, 0, 2, 1, 0])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
        t = shard(x.to(dtype), mesh, [Shard(0)], {0: (3, 1)})
        for few in (i, i[1:2]):
            got, expected = t[few].full_tensor(), x.to(dtype)[few]
            assert got.dtype == dtype and torch.equal(got.isnan(), expected.isnan())
            got, expected = (torch.view_as_real(v) if v.is_complex() else v for v in (got, expected))
            assert torch.equal(got.nan_to_num(1), expected.nan_to_num(1))
            assert torch.equal(got.signbit()[~got.isnan()], expected.signbit()[~expected.isnan()])
    for dtype in (torch.int64, torch.int16, torch.uint8, torch.bool):
        t = numbers(4, 3, high=200).to(dtype)
        assert torch.equal(shard(t, mesh, [Shard(0)], {0: (1, 3)})[i].full_tensor(), t[i])
        assert torch.equal(shard(t, mesh, [Shard(0)], {0: (1, 3)})[i[:1]].full_tensor(), t[i[:1]])
    # A table of which an index is asked for twice on different ranks; double backward.
    t = shard(data(4, 3), mesh, [Shard(0)], {0: (4, 0)}, requires_grad=True)
    (first,) = torch.autograd.grad((t[i] ** 3).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad((first * data(4, 3)).sum(), t)
    plain = data(4, 3).requires_grad_()
    (first,) = torch.autograd.grad((plain[i] ** 3).sum(), plain, create_graph=True)
    assert torch.allclose(second.full_tensor(), torch.autograd.grad((first * data(4, 3)).sum(), plain)[0])
    for wrong in (
        ()
        if i.is_cuda
        else (  # there torch reports it by the device, which cannot be used any more then
            lambda t: t[i + 1],
            lambda t: t.index_add(0, i + 1, torch.ones(5, 3).double()),
            lambda t: t.gather(0, i[:, None] - 1),
            lambda t: F.embedding(i + 1, t),
            lambda t: t.__setitem__(i - 5, 0.0),
            lambda t: t.detach().put_(torch.tensor([-13]), torch.ones(1).double()),
        )
    ):
        with count_communication() as counted, pytest.raises(IndexError, match="out of range for dimension 0 with"):
            wrong(t.detach())
        assert counted.collectives in ({}, {"all_gather": 1})  # that of the comparison of an index
    with pytest.raises(RuntimeError, match=r"dtypes match|same dtype"):
        t.detach()[i] = torch.ones(3)
    with pytest.raises(IndexError, match="2 values for the"):
        t.detach()[t > -100] = torch.ones(2).double()
    some = shard(i, mesh, [Shard(0)], {0: (4, 1)})
    with torch.no_grad():
        assert torch.equal(F.embedding(some, plain, sparse=True).full_tensor(), plain[i])
    with pytest.raises(UnsupportedSharding, match=r"sparse gradient of the table.* Remedy: pass sparse=False"):
        F.embedding(some, plain, sparse=True)


# -- geometry, without processes --------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@settings(deadline=None)
@given(SIZES, st.integers(0, 30))
def test_clipped_sizes_begin_alike(sizes, n):
    found = clipped(sizes, n)
    assert sum(found) == n and min(found) >= 0 and len(found) == len(sizes)
    assert all(sum(found[:k]) == min(n, sum(sizes[:k])) for k in range(len(sizes)))
    assert clipped(clipped(sizes, sum(sizes) + 3), sum(sizes)) == tuple(sizes)


# -- a part of the tokens ----------------------------------------------------------------------------------------------


KEPT = torch.stack([torch.randperm(130, generator=seeded(i))[:33] for i in range(2)])  # of 130 tokens in each sample


def picked(how, x):
    """A masked autoencoder's encoder computes with these."""
    rows, features = KEPT.to(x.device), x.shape[-1]
    if how == "gather":
        return x.gather(1, rows[..., None].expand(-1, -1, features))
    if how == "x[samples, index]":
        return x[torch.arange(2, device=x.device)[:, None], rows]
    if how == "index_select":
        return x.index_select(1, rows[0])
    return x[:, rows[1]]


@pytest.mark.parametrize("how", ["gather", "x[samples, index]", "index_select", "x[:, index]"])
@pytest.mark.parametrize("sizes", [(65, 65), (80, 0, 50)], ids=str)
def test_a_part_of_the_tokens_is_sharded_if_it_is_large(sizes, how):
    run_distributed(parts_of_tokens, len(sizes), sizes, how)


def parts_of_tokens(sizes, how):
    mesh = shared_mesh(len(sizes))
    few, many = (torch.randn(2, 130, n, generator=seeded(1), dtype=torch.float64) for n in (8, 600))
    kept = picked(how, shard(few, mesh, [Shard(1)], {0: sizes}))
    assert kept.placements == (Partial(),)  # which takes no longer to reduce than an exchange
    kept = picked(how, shard(many, mesh, [Shard(1)], {0: sizes}))
    assert kept.placements == (Shard(1),)
    mine, even = kept._spec.sizes_along(0), 33 / 130
    assert all(abs(m - n * even) <= 1 for m, n in zip(mine, sizes, strict=True)), mine
    common = {"mesh": mesh, "placements": [Shard(1)], "shard_sizes": {0: sizes}}
    assert_matches_unsharded(lambda x: picked(how, x).sin(), many, **common)


@on_ranks(2)
def test_one_score_of_each_row_stays_partial():
    """Blocks of all classes would travel for one of each."""
    mesh = shared_mesh(2)
    scores = torch.randn(40_000, 10, generator=seeded(2))
    labels = numbers(40_000, 1, high=10)
    found = shard(scores, mesh, [Shard(1)], {0: (7, 3)}).gather(1, labels)
    assert found.placements == (Partial(),)
    torch.testing.assert_close(found.full_tensor(), scores.gather(1, labels))
