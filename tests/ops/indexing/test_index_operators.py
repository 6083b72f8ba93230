"""Looking up and writing by index, on shards against the same on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from on_ranks import on_ranks
from seeded import seeded
from spatial_cases import check_cases, data
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)


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
    """Most of (4, 7, 6) cut along the first two dims; the last is indexed."""
    result = []

    def add(label, fn, *shape, dims=(1,)):
        result.append((label, fn, shape or (4, 7, 6), dims))

    i, mask = torch.tensor([0, 5, 2, 2]), torch.tensor([True, False, True, True, False, False])
    add("index_select", lambda x: x.index_select(2, i))
    add("x[..., i]", lambda x: x[..., i])
    add("x[:, :, list]", lambda x: x[:, :, [0, -1, 3]])
    add("two-dim index", lambda x: x[:, :, i.view(2, 2)])
    add("nothing selected", lambda x: x[..., i[:0]].sum() + x.sum())
    add("with slices", lambda x: x[1:, 2:6, i] * x[1:, 2:6, 1:5])
    add("two indices", lambda x: x[:, i.clamp(max=3), i], 5, 4, 6, dims=(0,))
    add("indices apart", lambda x: x[i[:, None].clamp(max=2), :, i], 3, 9, 6)
    add("mask of a dim", lambda x: x[..., mask])
    add("mask of two dims", lambda x: x[:, torch.arange(24).view(4, 6) % 3 == 0], 5, 4, 6, dims=(0,))
    add("gather", lambda x: x.gather(2, numbers(4, 7, 3)))
    add("gather by a ShardTensor", lambda x: torch.gather(x, -1, (x * 100).long() % 6))
    add("sort and unsort", lambda x: x.gather(2, x.argsort(2)).sort(2, descending=True)[0])
    add("take_along_dim", lambda x: x.take_along_dim(x.argmax(2, keepdim=True), 2))
    add("take_along_dim broadcast", lambda x: torch.take_along_dim(x, numbers(1, 1, 2), 2))
    add("scatter", lambda x: x.scatter(2, numbers(4, 7, 2).sort(2)[0] * 2 % 5 + torch.tensor([0, 1]), x[..., :2]))
    add("scatter a number", lambda x: x.scatter(2, numbers(4, 7, 2), 1.5))
    add("scatter_add", lambda x: x.scatter_add(2, numbers(4, 7, 4), x[..., 1:5]))
    add("scatter_add to zeros", lambda x: torch.zeros_like(x).scatter_add_(2, numbers(4, 7, 6), x.exp()))
    add("scatter_reduce", lambda x: x.detach().scatter_reduce(2, numbers(4, 7, 4), x.detach()[..., 1:5], "amax"))
    add("scatter_", written(lambda y, x: y.scatter_(2, torch.tensor([3]).expand(4, 7, 1), x[..., :1])))
    add("index_add", lambda x: x.index_add(2, i, x[..., 1:5], alpha=2))
    add("index_copy", lambda x: x.index_copy(2, i[:3], x[..., 1:4]))
    add("index_fill", lambda x: x.index_fill(2, i, 3.0))
    add("index_fill_", written(lambda y, x: y.index_fill_(2, i, 3.0)))
    add("x[..., i] = v", written(lambda y, x: y.__setitem__((..., i[:3]), x[..., :3].exp())))
    add("x[..., i] = plain", written(lambda y, x: y.__setitem__((..., i[:3]), data(4, 7, 3))))
    add("x[..., i] = row", written(lambda y, x: y.__setitem__((..., i[:3]), torch.ones(3).double())))
    add("x[..., i] = number", written(lambda y, x: y.__setitem__((slice(None), slice(1, 5), i), 2.0)))
    add("index_put accumulates", lambda x: torch.ops.aten.index_put(x, [None, None, i], x[..., :4], True))
    add("x[x > 0] = 0", written(lambda y, x: y.__setitem__(x > 0, 0.5)))
    add("x[rows] = 0", written(lambda y, x: y.__setitem__(torch.arange(28).view(4, 7) % 3 == 0, 0.5)))
    add("x[:, plain mask] = v", written(lambda y, x: y.__setitem__((..., mask), x[..., :3])))
    add("masked_fill", lambda x: x.masked_fill(x > 0, 1.0) * x.masked_fill(mask, torch.tensor(2.0).double()))
    add("masked_fill plain", lambda x: x.masked_fill(torch.arange(7)[:, None] < 3, float("-inf")).softmax(-1))
    add("where", lambda x: torch.where(x > 0, x, torch.arange(7.0)[:, None].double()))
    add("bucketize", lambda x: torch.bucketize(x.detach(), torch.linspace(-1, 1, 5).double()))
    add("searchsorted", lambda x: torch.searchsorted(torch.linspace(-1, 1, 5).double(), x.detach()))
    add("isin", lambda x: torch.isin((x * 3).long(), torch.tensor([0, 2])))
    add("one_hot", lambda x: F.one_hot((x.detach().abs() * 3).long()) * x.unsqueeze(-1))
    add("one_hot, wide", lambda x: F.one_hot((x.detach().abs() * 3).long() % 5, 6).double() * x.unsqueeze(-1))
    # A few rows of a sharded dim.
    few = torch.tensor([3, 1])
    add("rows", lambda x: x.index_select(1, few).exp(), 3, 13, 2)
    add("the same row", lambda x: x[:, [8, 8, -1]], 3, 13, 2)
    add("rows and more", lambda x: x[None, 1:, few, ..., 1], 3, 13, 2)
    add("rows of integers", lambda x: (x * 100).long()[:, few], 3, 13, 2)
    add("rows of a mask", lambda x: (x > 0)[:, few], 3, 13, 2)
    return result


@pytest.mark.parametrize("mesh_shape", [2, 3, (2, 2)], ids=str)
@on_ranks("mesh_shape", timeout=200)
def test_indexing_matches_one_device(mesh_shape):
    chosen = cases()
    if mesh_shape == (2, 2):  # of those that index the first dim only one dim can be cut
        chosen = [case for case in chosen if case[0] not in ("two indices", "mask of two dims", "indices apart")]
    check_cases(chosen, mesh_shape)


def tables():
    """Whole tables, and indices that are cut."""
    torch.manual_seed(0)
    for mesh_shape, placements, sizes in (
        (4, [Shard(1)], {0: (3, 0, 2, 4)}),
        ((2, 2), [Shard(0), Shard(1)], {0: (2, 0), 1: (4, 5)}),
        ((2, 2), [Replicate(), Shard(1)], {1: (4, 5)}),
    ):
        indices = numbers(2, 9)
        common = dict(mesh_shape=mesh_shape, placements=placements, shard_sizes=sizes)
        assert_matches_unsharded(nn.Embedding(6, 5).double(), indices, **common)
        assert_matches_unsharded(nn.Embedding(6, 5, padding_idx=2).double(), indices, **common)
        two = dict(
            mesh_shape=mesh_shape,
            placements=[[Replicate()] * len(placements), placements],
            shard_sizes=[None, sizes],
        )
        assert_matches_unsharded(lambda t, i: t[i].exp(), data(6, 5), indices, **two)
        assert_matches_unsharded(lambda t, i: t[:, i] * t[:, i + 1], data(3, 7), indices, **two)
        assert_matches_unsharded(lambda t, i: t.index_select(0, i[1]).exp(), data(6, 5), indices, **two)
        assert_matches_unsharded(lambda t, i: torch.take_along_dim(t, i, 1), data(2, 6), indices, **two)
        plain = dict(two, placements=[None, placements])
        assert_matches_unsharded(lambda t, i: t[i].exp(), data(6, 5), indices, **plain)
        assert_matches_unsharded(lambda t, i: F.embedding(i, t), data(6, 5), indices, **plain)
    mesh = shared_mesh(4)
    indices = shard(numbers(2, 9), mesh, [Shard(1)], {0: (3, 0, 2, 4)})
    layer = nn.Embedding(6, 5)
    with count_communication() as forward:
        y = layer(indices)
    assert y.shard_sizes == {0: (3, 0, 2, 4)} and not forward.collectives
    with count_communication() as backward:
        y.sum().backward()
    assert dict(backward.collectives) == {"all_reduce": 1}
    with torch.no_grad():
        assert torch.equal(layer(indices).full_tensor(), layer(indices.full_tensor()))
    return True


def test_tables():
    assert all(run_distributed(tables, 4, timeout=120))


def traffic():
    mesh = shared_mesh(2)
    x = shard(data(4, 7, 6), mesh, [Shard(1)], {0: (5, 2)}, requires_grad=True)
    i = torch.tensor([2, 0, 2])
    found = []
    for fn in (
        lambda x: x[..., i],
        lambda x: x.gather(2, numbers(4, 7, 3)),
        lambda x: x.index_add(2, i, x[..., :3]),
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: x[:, i],
    ):
        with count_communication() as forward:
            y = fn(x)
        with count_communication() as backward:
            y.backward(torch.ones_like(y))
        found.append((y.placements, forward.collectives.total(), backward.collectives.total()))
        assert x.grad.shard_sizes == x.shard_sizes
    # A part of the owners' rows may be infinite without spoiling the others'.
    x = shard(torch.full((3, 8), float("inf")).triu(1).nan_to_num(0.0, posinf=float("inf")), mesh, [Shard(1)])
    rows = x[:, [0, 7]].full_tensor()
    assert torch.equal(rows, x.full_tensor()[:, [0, 7]])
    partial = shard(data(4, 6).round(), mesh, [Partial()])
    assert partial[:, i].placements == (Partial(),)
    assert torch.equal(partial[:, i].full_tensor(), data(4, 6).round()[:, i])
    with torch.inference_mode():
        assert torch.equal(partial.gather(1, numbers(4, 3)).full_tensor(), data(4, 6).round().gather(1, numbers(4, 3)))
    return found


def test_nothing_travels_along_other_dims_and_few_rows_stay_a_sum():
    for found in run_distributed(traffic, 2):
        assert found[:4] == [((Shard(1),), 0, 0)] * 4
        assert found[4] == ((Partial(),), 0, 0)


I = torch.tensor([2, 0, 2, 1])
ERRORS = {
    "out of range": (lambda x: x[:, [7]], IndexError, "index is out of range for dimension 1 with size 7"),
    "below": (lambda x: x.scatter(1, numbers(4, 2, 6) - 1, 1.0), IndexError, "index is out of range for dimension 1"),
    "wrong mask": (lambda x: x.__setitem__(x[:, :3] > 0, 1.0), IndexError, "mask"),
    "plain": (
        lambda x: torch.frombuffer(bytearray(1344), dtype=torch.float64).view(4, 7, 6).scatter_(2, numbers(4, 7, 3), x),
        NotImplementedError,
        "plain tensor",
    ),
    "shape": (lambda x: x.gather(2, numbers(4, 7)), RuntimeError, "same number of dimensions"),
    "dtype": (lambda x: x.gather(2, data(4, 7, 6)), RuntimeError, "int64|int32"),
    "one_hot": (lambda x: F.one_hot(x), RuntimeError, "LongTensor"),
    "classes": (lambda x: F.one_hot(x.long().abs() + 5, 5), RuntimeError, "must be smaller than num_classes"),
    "negative classes": (lambda x: F.one_hot(x.long().abs() - 9, 5), RuntimeError, "must be non-negative"),
}


def operand():
    return shard(data(4, 7, 6), shared_mesh(2), [Shard(1)], {0: (5, 2)})


OUT_OF_RANGE = pytest.mark.on_cpu("GPUs report an index out of range as a failed assertion on the device")
LOCAL = ("out of range", "below", "classes", "negative classes")


@pytest.mark.parametrize("name", [pytest.param(n, marks=OUT_OF_RANGE if n in LOCAL else ()) for n in ERRORS])
def test_errors_on_every_rank_before_anything_is_sent(name):
    raises_alike(operand, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_products_of_half_precision(dtype):
    """One rank's columns are one; torch's kernel on the CPU raises for that, on no other rank."""
    x, v = (torch.rand(n, 3, generator=seeded(n)).to(dtype) for n in (4, 6))
    index = torch.tensor([0, 2, 2, 1, 0, 0])
    for include_self in (True, False):
        tensors = [shard(t, shared_mesh(2), [Shard(1)], {0: (2, 1)}, requires_grad=True) for t in (x, v)]
        got = tensors[0].index_reduce(0, index, tensors[1], "prod", include_self=include_self)
        expected = x.double().index_reduce(0, index, v.double(), "prod", include_self=include_self)
        assert got.dtype == dtype
        torch.testing.assert_close(got.full_tensor().double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
        got.sum().backward()
        assert tensors[1].grad.dtype == dtype
