"""Sorting, order statistics and quantiles along sharded dims, also where no free dim could take the rows."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from halves import half_of, in_halves
from on_ranks import on_ranks
from row_cases import placed
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor.ops.common.distributed_sort import Sorted, find_places, sort_keys
from shardtensor.testing import assert_matches_unsharded, count_communication, shard, shared_mesh

DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]
# (columns of each rank, columns of the sorted rows on each rank)
COLUMNS = [([5, 0, 12], [5, 0, 12]), ([17, 0, 0], [1, 15, 1]), ([4, 6, 7], [0, 17, 0]), ([0, 0, 17], [17, 0, 0])]


def awkward_rows(rows, dtype):
    """Ties, both zeros, infinities and NaN where the dtype has them."""
    x = (torch.randn(rows, 17) * 2).round()
    if not dtype.is_floating_point:
        return x.abs().to(dtype) if dtype == torch.uint8 else x > 0 if dtype == torch.bool else x.to(dtype)
    x[0, 3] = x[-1, 12] = float("nan")
    x[0, 5], x[0, 9], x[-1, 2], x[-1, 15] = float("inf"), float("-inf"), -0.0, 0.0
    return x.to(dtype)


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@on_ranks(3)
def test_sorted_rows_and_their_elements(half):
    """Bit by bit what a stable sort on one device gives, whatever the dtype and the columns of each rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(0)
    for dtype in DTYPES:
        cases = itertools.product((1, 3), COLUMNS, (False, True))
        for rows, (own, need), descending in half_of(cases, half):
            x = awkward_rows(rows, dtype)
            start, begin = sum(own[:rank]), sum(need[:rank])
            mine = x[:, start : start + own[rank]]
            index = torch.arange(start, start + own[rank]).expand(rows, -1)
            expected = torch.sort(x, dim=-1, stable=True, descending=descending)
            part = slice(begin, begin + need[rank])
            result = Sorted(mine, own, need, descending, group)
            assert torch.allclose(result.values.double(), expected.values[:, part].double(), 0, 0, equal_nan=True)
            assert torch.equal(result.there(index), expected.indices[:, part])
            assert torch.equal(result.back(result.there(index)), index)
            ordered, order = torch.sort(mine, dim=-1, stable=True, descending=descending)
            places = torch.tensor([0, 5, 16]).repeat(rows, 1)
            found = find_places(sort_keys(ordered, descending), dtype, places, [group])
            assert torch.equal(found.pick(index.gather(-1, order), [group]), expected.indices[:, [0, 5, 16]])


class Waits(TorchDispatchMode):
    """Notes what a GPU's host would wait for besides tolist(): lengths that depend on data, copies to the device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        masks = [i for i in indices if i is not None and i.dtype == torch.bool]
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if masks or repeats or name in ("nonzero", "lift_fresh", "masked_select"):
            self.seen.append(name)
        return func(*args, **kwargs)


@on_ranks(3)
def test_a_host_waits_for_the_numbers_of_elements_only():
    seen = []
    for shape in ((23,), (23, 2)):
        for _ in range(2):  # the second call finds what the first one has prepared
            x = shard(torch.randn(shape), shared_mesh(3), [Shard(0)], {0: (10, 0, 13)}, requires_grad=True)
            with Waits() as counted:
                torch.sort(x, dim=0).values.sum().backward()
        seen += counted.seen
    assert seen == []


# -- operators ----------------------------------------------------------------------------------------------------

# (mesh shape, shape, dims cut, sizes): no free dim can take the rows of dim 0
CUTS = [
    (2, (17,), (0,), {0: (12, 5)}),
    (2, (33, 1), (0,), {0: (0, 33)}),
    (3, (17, 2), (0,), {0: (7, 0, 10)}),
    pytest.param(4, (33,), (0,), {0: (1, 1, 30, 1)}, marks=pytest.mark.slow),
    ((2, 2), (17, 2), (0, 1), {0: (3, 14), 1: (1, 1)}),
    ((2, 2), (7, 1), (None, 0), {1: (2, 5)}),
]


def operators():
    """(name, function, whether it takes NaN)"""
    cases = [
        ("sort", lambda x: tuple(x.sort(0))),
        ("stable descending sort", lambda x: tuple(torch.sort(x, dim=0, descending=True, stable=True))),
        ("argsort", lambda x: x.argsort(0)),
        ("msort", torch.msort),
        ("topk of few", lambda x: tuple(x.topk(2, 0))),
        ("topk of many", lambda x: tuple(torch.topk(x, 6, dim=0, largest=False))),
        ("kthvalue", lambda x: tuple(x.kthvalue(4, 0))),
        ("median", lambda x: tuple(x.median(0, keepdim=True))),
        ("nanmedian", lambda x: tuple(torch.nanmedian(x, 0))),
        ("median of all", lambda x: x.median()),
        ("nanmedian of all", lambda x: torch.nanmedian(x)),
        ("quantile", lambda x: x.quantile(0.3, 0)),
        ("quantiles of all", lambda x: torch.quantile(x, torch.tensor([0.0, 0.5, 0.77, 1.0], dtype=x.dtype))),
        ("quantiles, keepdim", lambda x: x.quantile(torch.tensor([0.9, 0.1], dtype=x.dtype), 0, keepdim=True)),
        ("nanquantile", lambda x: torch.nanquantile(x, 0.6, 0)),
    ]
    for mode in ("lower", "higher", "nearest", "midpoint"):
        cases.append((f"quantile, {mode}", lambda x, m=mode: x.quantile(0.37, 0, interpolation=m)))
    return cases


@pytest.mark.parametrize(("mesh_shape", "shape", "dims", "sizes", "half"), in_halves(CUTS))
@on_ranks("mesh_shape")
def test_rows_that_stay_cut(mesh_shape, shape, dims, sizes, half):
    torch.manual_seed(0)
    x = torch.randn(*shape, dtype=torch.float64)
    unknown = x.clone()
    unknown[1], unknown[4] = float("nan"), float("inf")
    options = {"mesh_shape": mesh_shape, "placements": placed(dims), "shard_sizes": sizes}
    for name, function in half_of(operators(), half):
        try:
            assert_matches_unsharded(function, x, **options)
            if "kth" not in name and "topk" not in name:
                assert_matches_unsharded(function, unknown, check_grads="quantile" not in name, **options)
            with torch.no_grad():
                assert_matches_unsharded(function, x, check_grads=False, **options)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    q = torch.tensor([0.2, 0.8], dtype=torch.float64, requires_grad=True)
    assert_matches_unsharded(lambda x, q: x.quantile(q, 0), x, q, **{**options, "placements": [placed(dims), None]})
    ties = (x * 2).round()
    assert_matches_unsharded(lambda x: tuple(torch.sort(x, dim=0, stable=True)), ties, **options)
    assert_matches_unsharded(lambda x: tuple((x * 2).int().sort(dim=0, stable=True)), x, check_grads=False, **options)


@on_ranks(3)
def test_large_results_lie_as_the_input_and_small_ones_are_whole():
    mesh = shared_mesh(3)
    x = shard(torch.randn(40), mesh, [Shard(0)], {0: (25, 0, 15)})
    for result in (*x.sort(), x.argsort(), torch.msort(x)):
        assert result.placements == x.placements and result.shard_sizes == x.shard_sizes
    assert all(t.shard_sizes == {0: (25, 0, 5)} for t in x.topk(30))
    for small in (*x.topk(4), x.median(), *x.kthvalue(3, 0), x.quantile(0.5)):
        assert small.placements == (Replicate(),)


# -- what travels -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_travels():
    """Counting takes one all-reduce of 15 integers for every 4 bits of the dtype; only sorted rows are exchanged."""
    # ``{name: (forward, backward)}``, each as (bytes sent to the other rank, collectives).
    mesh = shared_mesh(2)
    torch.manual_seed(0)
    values = torch.randn(1000)
    counts = {}
    for name, function in {
        "sort": lambda x: x.sort().values,
        "topk": lambda x: x.topk(5).values,
        "many": lambda x: x.topk(900).values,
        "kthvalue": lambda x: x.kthvalue(7).values,
        "median": lambda x: x.median(),
        "quantile": lambda x: x.quantile(0.5),
    }.items():
        x = shard(values, mesh, [Shard(0)], {0: (700, 300)}, requires_grad=True)
        with count_communication() as forward:
            y = function(x)
        grad = shard(torch.ones(y.shape), mesh, y.placements, y.shard_sizes)
        with count_communication() as backward:
            torch.autograd.grad(y, x, grad)
        counts[name] = [(c.bytes_sent, dict(c.collectives), c.collective_bytes) for c in (forward, backward)]
    digits, found = 32 // 4, {"all_gather": 1}
    none = (0, {}, 0)
    for name in ("sort", "many"):
        (sent, collectives, size), (back, back_collectives, _) = counts[name]
        assert collectives == {"all_reduce": digits, **found, "all_to_all": 2}
        assert size == digits * 15 * 8 + 2 * 8
        assert back_collectives == {"all_to_all": 1}
        # Values and their indices there, gradients back: no more than the smaller shard either way.
        assert sent <= 300 * (4 + 8) and back <= 300 * 4
    assert counts["topk"] == [(0, {"all_gather": 2}, 5 * (4 + 8)), none]
    # The element and its index are told to all ranks.
    assert counts["kthvalue"] == [(0, {"all_reduce": digits + 2, **found}, (digits * 15 + 2) * 8 + 4 + 8), none]
    # How many NaN there are; the element.
    (sent, collectives, _), (back, back_collectives, _) = counts["median"]
    assert (sent, collectives) == (0, {"all_reduce": digits + 2, **found})
    assert (back, back_collectives) == (0, {"all_reduce": 1})  # how many elements share the gradient
    assert counts["quantile"][0][:2] == (0, {"all_reduce": digits + 2, **found}) and counts["quantile"][1] == none
