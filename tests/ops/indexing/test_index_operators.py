"""Tables, errors, and what index operators send along other dims than they index; test_gather.py has their values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from on_ranks import on_ranks
from seeded import seeded
from spatial_cases import data
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    shard,
    shared_mesh,
)


def numbers(*shape, high=6, seed=0):
    return torch.randint(high, shape, generator=seeded(seed))


@on_ranks(4, timeout=120)
def test_tables():
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


@on_ranks(2)
def test_nothing_travels_along_other_dims_and_few_rows_stay_a_sum():
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
