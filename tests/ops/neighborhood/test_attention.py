"""Neighborhood attention against a dense mask and natten itself: values, gradients, messages, errors, modules."""

from __future__ import annotations

import doctest
import math
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from alike import raises_alike
from hypothesis import given, settings
from hypothesis import strategies as st
from neighborhood_oracle import Dense, Problem, dense_attention, random_problem, visible
from on_ranks import on_ranks
from seeded import seeded
from spatial_cases import cut
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.layout import caches
from shardtensor.ops.neighborhood import attention as handlers
from shardtensor.ops.neighborhood import tiled as tiles
from shardtensor.ops.neighborhood.tiled import Dim, Neighborhood, tiled_attention
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

natten = pytest.importorskip("natten")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # natten on flex attention


# -- geometry --------------------------------------------------------------------------------------------------------


@st.composite
def neighborhoods(draw):
    kernel, dilation = draw(st.integers(2, 7)), draw(st.integers(1, 4))
    size = draw(st.integers(kernel * dilation, kernel * dilation + 12))
    return Neighborhood(size, kernel, draw(st.integers(1, kernel)), dilation, draw(st.booleans()))


def dense(n):
    return visible(n.size, n.kernel, n.stride, n.dilation, n.causal)


@st.composite
def with_queries(draw):
    n = draw(neighborhoods())
    start = draw(st.integers(0, n.size))
    return n, (start, draw(st.integers(start, n.size)))


def test_examples_in_the_documentation():
    result = doctest.testmod(tiles)
    assert result.attempted and not result.failed


@given(neighborhoods())
def test_windows_are_those_of_the_documented_rule(n):
    mask = torch.zeros(n.size, n.size, dtype=torch.bool)
    for query in range(n.size):
        first, last = n.window(query)
        mask[query, first : last + 1 : n.dilation] = True
    assert torch.equal(mask, dense(n))


@given(with_queries())
def test_a_rank_reads_no_more_than_its_windows_span(case):
    n, (start, stop) = case
    columns = dense(n)[start:stop].any(0).nonzero().flatten().tolist()
    expected = (columns[0], columns[-1] + 1) if columns else (0, 0)
    assert n.reads((start, stop)) == expected
    # Borrowing never drops a part of the shard.
    assert start == stop or (expected[0] <= start and stop <= expected[1])


@settings(max_examples=300)
@given(with_queries())
def test_a_slice_taken_for_the_whole_has_the_same_windows(case):
    n, (start, stop) = case
    lo, hi = n.slice_for((start, stop))
    if start == stop:
        assert (lo, hi) == (0, 0)
        return
    assert 0 <= lo <= start and stop <= hi <= n.size
    assert hi - lo > n.kernel or n.kernel == n.size
    part = Neighborhood(hi - lo, n.kernel, n.stride, n.dilation, n.causal)
    inside = dense(part)[start - lo : stop - lo]
    assert torch.equal(inside, dense(n)[start:stop, lo:hi])


@given(with_queries(), st.integers(1, 9))
def test_tiles_hold_every_query_once_with_its_window(case, most):
    n, queries = case
    mask = torch.zeros(n.size, n.size, dtype=torch.int)
    for tile in n.tiles(queries, most):
        assert 1 <= len(tile.windows) <= most
        for i, (first, stop) in enumerate(tile.windows):
            assert 0 <= first < stop <= tile.keys
            for j in range(first, stop):
                mask[tile.query + i * n.dilation, tile.key + j * n.dilation] += 1
    expected = dense(n).int()
    expected[: queries[0]] = expected[queries[1] :] = 0
    assert torch.equal(mask, expected)


# -- the kernel, and natten, against the oracle ----------------------------------------------------------------------


def tiled(query, key, value, *additional, kernel_size, stride, dilation, is_causal, scale=None, return_lse=False):
    """The product's kernel with the oracle's signature."""
    dims = tuple(
        Dim(Neighborhood(*window), (0, window[0]), (0, window[0]))
        for window in zip(query.shape[1:-2], kernel_size, stride, dilation, is_causal)
    )
    extra = torch.cat(additional, -1) if additional else None
    scale = scale or query.shape[-1] ** -0.5
    results = tiled_attention(query, torch.cat([key, value], -1), dims, extra, scale, return_lse)
    return (results[0], results[1].squeeze(-1)) if return_lse else results[0]


@pytest.mark.parametrize("seed", range(40))
def test_tiles_match_the_dense_mask(seed):
    problem = random_problem(random.Random(seed))
    whole = [t.requires_grad_() for t in problem.tensors()]
    twins = [t.detach().clone().requires_grad_() for t in whole]
    for return_lse in (False, True):
        expected = dense_attention(*whole, **problem.arguments, return_lse=return_lse)
        got = tiled(*twins, **problem.arguments, return_lse=return_lse)
        expected, got = (r if return_lse else (r,) for r in (expected, got))
        cotangents = [torch.randn(e.shape, dtype=e.dtype) for e in expected]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        grads = torch.autograd.grad(got, twins, cotangents)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, whole, cotangents), rtol=1e-10, atol=1e-11)


def nattens_own(problem, *tensors, return_lse=False):
    """natten's forward on plain tensors, None where it has no kernel."""
    query, key, value, *additional = tensors
    named = dict(zip(("additional_keys", "additional_values"), additional))
    function = {1: natten.na1d, 2: natten.na2d, 3: natten.na3d}[len(problem.shape)]
    try:
        return function(query, key, value, **problem.arguments, **named, return_lse=return_lse)
    except NotImplementedError:
        return None


def compare_with_natten(seeds):
    compared = 0
    for seed in seeds:
        problem = random_problem(random.Random(seed), head_dim=8, head_dim_v=8)
        tensors = problem.tensors(torch.float32)
        theirs = nattens_own(problem, *tensors, return_lse=True)
        if theirs is None:
            continue
        compared += 1
        for ours in (dense_attention, tiled):
            got = ours(*tensors, **problem.arguments, return_lse=True)
            torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-5, msg=f"{seed}: {problem} {ours.__name__}")
    return compared


def test_the_dense_mask_and_the_tiles_are_nattens():
    assert compare_with_natten(range(3)) >= 2


@pytest.mark.slow
def test_the_dense_mask_and_the_tiles_are_nattens_on_many_problems():
    assert compare_with_natten(range(100, 250)) > 130


# -- on shards -------------------------------------------------------------------------------------------------------


def attention(problem, **more):
    """natten on ShardTensors, the dense mask on plain ones."""

    def attend(query, key, value, *additional):
        if not any(isinstance(t, ShardTensor) for t in (query, key, value, *additional)):
            wanted = {"return_lse": more["return_lse"]} if "return_lse" in more else {}
            return dense_attention(query, key, value, *additional, **problem.arguments, **wanted)
        named = dict(zip(("additional_keys", "additional_values"), additional))
        function = {1: natten.na1d, 2: natten.na2d, 3: natten.na3d}[len(problem.shape)]
        return function(query, key, value, **problem.arguments, **named, **more)

    return attend


def check(problem, mesh_shape, dims, sizes, **more):
    """Compare on shards: the tensor dims cut per mesh dim (None: replicated), and the sizes of the queries' shards."""
    places = [Replicate() if d is None else Shard(d) for d in dims]
    heads = len(problem.shape) + 1
    per_kv = {
        m: tuple(n * problem.heads_kv // problem.heads for n in given) if dims[m] == heads else given
        for m, given in sizes.items()
    }
    tensors = problem.tensors()
    assert_matches_unsharded(
        attention(problem, **more),
        *tensors,
        mesh_shape=mesh_shape,
        placements=[places, places, places, None, None][: len(tensors)],
        shard_sizes=[sizes, per_kv, per_kv, None, None][: len(tensors)],
    )


def random_case(rng, mesh_shape):
    """Arguments of ``check``."""
    ranks = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    problem = random_problem(rng, heads=rng.choice((2, 4)))
    n = len(problem.shape)
    dims = []
    for _ in ranks:
        dims.append(rng.choice([d for d in (*range(1, n + 1), *range(1, n + 1), 0, n + 1, None) if d not in dims]))
    sizes = {}
    for m, d in enumerate(dims):
        if d == n + 1:
            group = problem.heads // problem.heads_kv
            sizes[m] = tuple(group * part for part in cut(rng, problem.heads_kv, ranks[m]))
        elif d is not None:
            sizes[m] = cut(rng, (problem.batch, *problem.shape)[d], ranks[m])
    return problem, mesh_shape, dims, sizes, rng.random() < 0.2


def check_cases(cases):
    for problem, mesh_shape, dims, sizes, return_lse in cases:
        try:
            check(problem, mesh_shape, dims, sizes, **({"return_lse": True} if return_lse else {}))
        except AssertionError as error:
            raise AssertionError(f"{problem} cut {dims} {sizes}, return_lse={return_lse}: {error}") from error


def drawn(mesh_shape, examples):
    world = mesh_shape if isinstance(mesh_shape, int) else math.prod(mesh_shape)

    @settings(max_examples=examples)
    @given(st.randoms(use_true_random=False))
    def run(rng):
        run_distributed(check_cases, world, [random_case(rng, mesh_shape) for _ in range(6)], timeout=200)

    run()


@pytest.mark.parametrize("mesh_shape", [2, 3, pytest.param(4, marks=pytest.mark.slow), (2, 2)], ids=str)
def test_drawn_problems_on_drawn_cuts(mesh_shape):
    drawn(mesh_shape, 8)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [1, 2, 3, 4, (2, 2), (1, 3)], ids=str)
def test_many_drawn_problems_on_drawn_cuts(mesh_shape):
    drawn(mesh_shape, 50)


def plane(shape=(9, 7), kernel=3, stride=1, dilation=1, causal=False, **more):
    n = len(shape)
    return Problem(shape, (kernel,) * n, (stride,) * n, (dilation,) * n, (causal,) * n, **more)


CHOSEN = {
    # name: problem, tensor dim per mesh dim, sizes of the queries' shards
    "odd": (plane(kernel=5), [1], {0: (4, 5)}),
    "even": (plane(kernel=4), [2], {0: (2, 5)}),
    "dilated": (plane((12, 7), 3, dilation=2), [1], {0: (5, 7)}),
    "strided": (plane((12, 7), 5, stride=3), [1], {0: (4, 8)}),
    "blocks": (plane((12, 8), 4, stride=4), [1], {0: (5, 7)}),
    "causal": (plane(kernel=4, causal=True), [1], {0: (4, 5)}),
    "all of it": (plane((12, 7), 3, 2, 2, causal=True, heads=4, additional=2, scale=0.7), [1], {0: (7, 5)}),
    "one row": (plane(kernel=7), [1], {0: (1, 8)}),
    "empty": (plane(kernel=3, additional=2), [1], {0: (0, 9)}),
    "empty at the end": (plane(kernel=3, additional=2), [2], {0: (7, 0)}),
    "whole window": (plane((6, 7), 6), [1], {0: (2, 4)}),
    "self attention": (plane((6, 6), 6), [1], {0: (2, 4)}),
    "causal self attention": (plane((9,), 9, causal=True), [1], {0: (2, 7)}),
    "volume": (plane((5, 4, 6), 3), [3], {0: (1, 5)}),
    "batch": (plane(batch=3, additional=2), [0], {0: (1, 2)}),
    "no batch": (plane(batch=1, additional=2), [0], {0: (0, 1)}),
    "heads": (plane(heads=4, additional=2), [3], {0: (2, 2)}),
    "no heads": (plane(heads=4, heads_kv=1, additional=2), [3], {0: (4, 0)}),
    "replicated": (plane(additional=2), [None], {}),
}
CHOSEN_2D = {
    "rows and columns": (plane((9, 8), 5), [1, 2], {0: (4, 5), 1: (1, 7)}),
    "columns and rows": (plane((9, 8), 4, 2, 2), [2, 1], {0: (5, 3), 1: (2, 7)}),
    "all of it": (plane((8, 12), 3, 2, 2, causal=True, heads_kv=1, additional=2), [2, 1], {0: (5, 7), 1: (3, 5)}),
    "empty and rows": (plane((9, 8), 3, additional=2), [2, 1], {0: (8, 0), 1: (4, 5)}),
    "batch and rows": (plane((9, 4), 3, batch=3, additional=2), [0, 1], {0: (1, 2), 1: (2, 7)}),
    "rows and heads": (plane((9, 4), 3, heads=4, additional=2), [1, 3], {0: (1, 8), 1: (2, 2)}),
    "rows and replicas": (plane((9, 4), 3, additional=2), [1, None], {0: (5, 4)}),
    "depth and height": (plane((4, 5, 6), 3, additional=1), [1, 3], {0: (1, 3), 1: (4, 2)}),
}


def check_chosen(table, mesh_shape):
    for name, case in table.items():
        try:
            check(*case[:1], mesh_shape, *case[1:])
            check(*case[:1], mesh_shape, *case[1:], return_lse=True)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_chosen_problems_on_two_ranks():
    run_distributed(check_chosen, 2, CHOSEN, 2)


def test_chosen_problems_on_a_2x2_mesh():
    run_distributed(check_chosen, 4, CHOSEN_2D, (2, 2))


@on_ranks(4)
def test_windows_that_reach_over_several_shards():
    for sizes in ((1, 1, 2, 5), (3, 0, 0, 6), (0, 4, 5, 0), (2, 2, 2, 3)):
        check(plane(kernel=7), 4, [1], {0: sizes})
        check(plane((9, 3), 3, dilation=1, stride=2), 4, [1], {0: sizes})
        check(plane((9,), 3, dilation=3, causal=True), 4, [1], {0: sizes})


# -- operands cut differently ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_operands_that_are_cut_differently():
    """The largest that is sharded on a mesh dim decides, or the finer shards; gradients come back as operands lie."""
    problem = plane((9, 7), 3, heads_kv=1)
    rows, others, columns = {0: (4, 5)}, {0: (7, 2)}, {0: (1, 6)}
    for decides, places, sizes in (
        (0, [[Shard(1)], [Shard(1)], [Shard(1)]], [rows, others, {0: (0, 9)}]),
        (0, [[Shard(1)], [Shard(2)], [Replicate()]], [rows, columns, None]),
        (2, [[Replicate()], [Shard(2)], [Shard(1)]], [None, columns, rows]),
        (1, [None, [Shard(1)], None], [None, rows, None]),
        (1, [[Partial()], [Shard(1)], [Partial()]], [None, rows, None]),
    ):
        out = assert_matches_unsharded(
            attention(problem), *problem.tensors(), mesh_shape=2, placements=places, shard_sizes=sizes
        )
        assert out.placements == tuple(places[decides]) and out.shard_sizes == sizes[decides]


@on_ranks(2)
def test_groups_of_heads():
    """Heads of queries stay with the head of the keys that they share, whichever of them is cut."""
    problem = plane((5, 4), 3, heads=6, heads_kv=2, additional=2)
    heads, whole = [Shard(3)], [Replicate()]
    for places, sizes, expected in (
        ([heads, whole, None], [{0: (2, 4)}, None, None], (3, 3)),
        ([heads, heads, heads], [{0: (1, 5)}, {0: (2, 0)}, {0: (1, 1)}], (3, 3)),
        ([None, heads, whole], [None, {0: (2, 0)}, None], (6, 0)),
        ([whole, whole, heads], [None, None, {0: (1, 1)}], (3, 3)),
        ([heads, whole, heads], [{0: (0, 6)}, None, {0: (1, 1)}], (0, 6)),
    ):
        out = assert_matches_unsharded(
            attention(problem),
            *problem.tensors(),
            mesh_shape=2,
            placements=[*places, None, None],
            shard_sizes=[*sizes, None, None],
        )
        assert out.placements == (Shard(3),) and out.shard_sizes == {0: expected}


@on_ranks(2)
def test_additional_keys_of_every_kind():
    """Additional keys and values may be plain, replicated or cut like batch or heads."""
    rows = plane((9, 7), 3, batch=2, additional=3)
    for place, extra in (
        (Shard(1), Replicate()),
        (Shard(1), Partial()),
        (Shard(0), Shard(0)),
        (Shard(0), Replicate()),
        (Shard(3), Shard(2)),
        (Replicate(), Replicate()),
    ):
        places = [[place]] * 3 + [[extra], None if extra.is_replicate() else [extra]]
        assert_matches_unsharded(attention(rows), *rows.tensors(), mesh_shape=2, placements=places)
    mesh = shared_mesh(2)
    query, key, value, *plain = (t.requires_grad_() for t in rows.tensors())
    dense_attention(query, key, value, *plain, **rows.arguments).square().sum().backward()
    expected = [t.grad for t in plain]
    shards = [shard(t.detach(), mesh, [Shard(1)], {0: (2, 7)}) for t in (query, key, value)]
    twins = [t.detach().clone().requires_grad_() for t in plain]
    wrapped = [DTensor.from_local(t.detach().clone(), mesh, [Replicate()]).requires_grad_() for t in plain]
    for additional in (twins, wrapped):
        with count_communication() as counts:
            attention(rows)(*shards, *additional).square().sum().backward()
        if additional is twins:  # DTensors keep their contribution or have it reduced, as the version of torch goes
            assert counts.collectives["all_reduce"] == 1, "keys and values together"
        for t, grad in zip(additional, expected):
            assert type(t.grad) is type(t.detach())
            got = t.grad.full_tensor() if isinstance(t, DTensor) else t.grad
            torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-12)


# -- what is sent ----------------------------------------------------------------------------------------------------


def needed(problem, sizes):
    """Per rank, the rows that its queries' windows span, by the dense mask."""
    mask = visible(*(v[0] for v in (problem.shape, problem.kernel_size, problem.stride, problem.dilation)), False)
    result, start = [], 0
    for size in sizes:
        rows = mask[start : start + size].any(0).nonzero().flatten().tolist()
        result.append(set(range(rows[0], rows[-1] + 1)) if rows else set())
        start += size
    return result


def traffic(problem, sizes):
    mesh = shared_mesh(len(sizes))
    rank = mesh.get_local_rank()
    q, k, v = (shard(t, mesh, [Shard(1)], {0: sizes}, requires_grad=True) for t in problem.tensors())
    bounds = [sum(sizes[:r]) for r in range(len(sizes) + 1)]
    own = [set(range(a, b)) for a, b in zip(bounds, bounds[1:])]
    needs = needed(problem, sizes)
    per_row = math.prod(problem.shape[1:]) * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * 8
    sent = {r: len(own[rank] & needs[r]) * per_row for r in range(len(sizes)) if r != rank and own[rank] & needs[r]}
    received = {r: len(own[r] & needs[rank]) * per_row for r in range(len(sizes)) if r != rank and own[r] & needs[rank]}
    with count_communication() as forward:
        out = attention(problem)(q, k, v)
    assert dict(forward.sent_to) == sent and dict(forward.received_from) == received
    assert (forward.messages, forward.received_messages) == (len(sent), len(received))
    assert forward.collectives == {"all_to_all": 1}, "one exchange for keys and values, no sizes"
    grad = shard(torch.ones(out.shape, dtype=out.dtype), mesh, [Shard(1)], {0: sizes})
    with count_communication() as backward:
        out.backward(grad)
    assert dict(backward.sent_to) == received and dict(backward.received_from) == sent
    assert backward.collectives == {"all_to_all": 1}
    return len(sent)


def all_traffic():
    peers = [
        traffic(plane((13, 3), 3, heads=4, head_dim_v=5), (5, 4, 4)),
        traffic(plane((13, 3), 3, dilation=1, stride=2), (4, 1, 8)),
        traffic(plane((13, 3), 3, heads_kv=1), (6, 0, 7)),
        traffic(Problem((13, 2), (3, 2), (1, 1), (3, 1), (False, False)), (6, 1, 6)),
        traffic(Problem((13, 3), (9, 3), (1, 1), (1, 1), (False, False)), (2, 2, 9)),
    ]
    x = torch.randn(3, 6, 5, 2, 4, dtype=torch.float64)
    mesh = shared_mesh(3)
    with count_communication() as silent:
        for place in (Shard(0), Replicate()):
            natten.na2d(*[shard(x, mesh, [place])] * 3, kernel_size=3)
        natten.na2d(*[shard(x, mesh, [Shard(1)], {0: (2, 2, 2)})] * 3, kernel_size=2, stride=2)
    assert not silent.messages and not silent.collectives
    return peers


def test_one_message_per_peer_with_the_halo_of_keys_and_values():
    assert run_distributed(all_traffic, 3)[1] == [2, 2, 0, 2, 2]


@on_ranks(4)
def test_corners_need_no_messages_of_their_own():
    """On a 2 x 2 mesh a rank receives exactly what its windows span beyond its shard, in one message per mesh dim."""
    mesh = shared_mesh((2, 2))
    x = torch.randn(1, 9, 8, 2, 4, dtype=torch.float64)
    sizes = {0: (4, 5), 1: (3, 5)}
    t = shard(x, mesh, [Shard(1), Shard(2)], sizes)
    with count_communication() as counts:
        natten.na2d(t, t, t, kernel_size=5)
    (i, j) = mesh.get_coordinate()
    rows, columns = sizes[0][i], sizes[1][j]
    beyond = (rows + 2) * (columns + 2) - rows * columns
    assert counts.bytes_received == beyond * 2 * 2 * 4 * 8
    assert counts.messages == counts.received_messages == 2


# -- what is worked out once -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_plans_and_masks_are_kept():
    problem = plane((9, 8), 5, additional=2)

    def step(seed):
        tensors = problem.tensors(seed=seed)
        shards = [shard(t, shared_mesh(2), [Shard(1)], {0: (4, 5)}, requires_grad=True) for t in tensors[:3]]
        attention(problem)(*shards, *tensors[3:]).sum().backward()

    step(0)
    before = tiles._plan.cache_info()
    with mock.patch.object(handlers, "_checked", side_effect=AssertionError("planned anew")):
        for seed in (1, 2, 3):
            step(seed)
    assert tiles._plan.cache_info()[:2] == (before.hits + 3, before.misses)


# -- natten's kernels ------------------------------------------------------------------------------------------------


@pytest.mark.not_emulated("natten asks for the CUDA version of torch's build, which has none there")
@on_ranks(2)
def test_natten_kernels_run_on_slices():
    """natten's own kernel on the slices: here its CPU kernel, which has no gradient and no float64."""
    mesh = shared_mesh(2)
    for problem, sizes in (
        (plane((9, 4), 3, head_dim=8, head_dim_v=8), {0: (4, 5)}),
        (plane((13,), 4, 3, 2, additional=2, head_dim=8, head_dim_v=8), {0: (6, 7)}),
        (plane((13,), 5, 3, causal=True, head_dim=8, head_dim_v=8), {0: (13, 0)}),
    ):
        tensors = problem.tensors(torch.float32)
        shards = [shard(t, mesh, [Shard(1)], sizes) for t in tensors[:3]] + tensors[3:]
        got = attention(problem, backend="flex-fna", return_lse=True)(*shards)
        ours = attention(problem, return_lse=True)(*shards)
        for t, o, expected in zip(got, ours, nattens_own(problem, *tensors, return_lse=True)):
            assert t.shard_sizes == sizes and t.dtype == o.dtype
            torch.testing.assert_close(t.full_tensor(), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(o.full_tensor(), expected, rtol=1e-4, atol=1e-5)


class DenseKernel:
    """In place of natten's kernels where there are none: takes what they take, and has gradients, in float64."""

    def __init__(self):
        self.patched = natten.functional.neighborhood_attention_generic
        self.calls = 0

    def __call__(self, query, key, value, kernel_size, stride, dilation, is_causal, scale, additional_keys=None,
                 additional_values=None, return_lse=False, **more):  # fmt: skip
        tensors = (query, key, value, *(() if additional_keys is None else (additional_keys, additional_values)))
        arguments = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation, "is_causal": is_causal}
        if any(isinstance(t, ShardTensor) for t in tensors):
            named = {"additional_keys": additional_keys, "additional_values": additional_values}
            return self.patched(query, key, value, **arguments, scale=scale, return_lse=return_lse, **named)
        checks = natten.utils.checks
        checks.na_tensor_checks(query, key, value)
        checks.check_args_against_input(query, **arguments)
        assert not checks.is_self_attention(query, kernel_size, is_causal, additional_keys is not None)
        assert more["backend"] == "dense"
        self.calls += 1
        return dense_attention(*tensors, **arguments, scale=scale, return_lse=return_lse)


def check_kernel_on_slices(cases):
    kernel = DenseKernel()
    caches.forget()
    try:
        with (
            mock.patch.object(natten.functional, "neighborhood_attention_generic", kernel),
            mock.patch.object(handlers, "natten_kernel", lambda *args, **kwargs: "dense"),
        ):
            check_cases(cases)
    finally:
        caches.forget()  # which have that kernel
    return kernel.calls


@pytest.mark.parametrize("mesh_shape", [2, (2, 2)], ids=str)
def test_a_kernel_of_nattens_kind_is_exact_on_slices(mesh_shape):
    rng = random.Random(0)
    cases = [random_case(rng, mesh_shape) for _ in range(40)]
    calls = run_distributed(check_kernel_on_slices, 2 if mesh_shape == 2 else 4, cases, timeout=200)
    assert max(calls) > 15


# -- dtypes ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_dtypes_autocast_and_inference_mode():
    mesh = shared_mesh(2)
    problem = plane((9, 7), 3, heads_kv=1)
    whole = problem.tensors()
    expected = dense_attention(*whole, **problem.arguments)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        shards = [shard(t.to(dtype), mesh, [Shard(1)], {0: (9, 0)}, requires_grad=True) for t in whole]
        for more in ({}, {"return_lse": True}):
            with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=dtype == torch.float32):
                out = attention(problem, **more)(*shards)
            out, lse = out if more else (out, None)
            assert out.dtype == out.to_local().dtype == dtype, "as natten, which autocast leaves alone"
            assert lse is None or lse.dtype == torch.float32
            torch.testing.assert_close(out.full_tensor().double(), expected, rtol=tolerance, atol=tolerance)
            out.float().sum().backward()
            assert shards[1].grad.dtype == dtype
    with torch.inference_mode():
        out = attention(problem)(*(shard(t, mesh, [Shard(1)], {0: (4, 5)}) for t in whole))
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-12)
    assert out.is_contiguous() and out.to_local().is_contiguous()
    # What inference has prepared serves training.
    problem = plane((10, 7), 3, heads_kv=1, additional=1)
    whole = problem.tensors()
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            shards = [shard(t, mesh, [Shard(1)], {0: (4, 6)}) for t in whole[:3]]
            inputs = shards + [t.clone() for t in whole[3:]]
            if torch.is_grad_enabled():
                inputs = [t.requires_grad_() for t in inputs]
            out = attention(problem)(*inputs)
    out.square().sum().backward()
    assert all(t.grad is not None for t in inputs)


def second_derivatives():
    q, k, v = (shard(t, shared_mesh(2), [Shard(1)], {0: (4, 5)}, requires_grad=True) for t in plane().tensors())
    (grad,) = torch.autograd.grad(natten.na2d(q, k, v, kernel_size=3).square().sum(), q, create_graph=True)
    grad.square().sum().backward()


@pytest.mark.on_cpu("in float64 torch composes attention on devices of operators that can be differentiated twice")
def test_second_derivatives_raise():
    for error in run_expecting_errors(second_derivatives, 2):
        assert "derivative" in str(error), repr(error)


# -- modules ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block as in NAT and DiNAT."""

    def __init__(self, channels, heads, **arguments):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = natten.NeighborhoodAttention2D(channels, heads, **arguments)
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    ("mesh_shape", "dims", "cuts"), [(2, [1], [3]), (2, [2], [9]), ((2, 2), [1, 2], [4, 7]), ((2, 2), [0, 1], [5, 6])]
)
@on_ranks("mesh_shape")
def test_modules_run_unmodified(mesh_shape, dims, cuts):
    torch.manual_seed(0)
    models = {
        (2, 13, 6): natten.NeighborhoodAttention1D(6, 2, kernel_size=4, stride=2, is_causal=True),
        (2, 9, 8, 6): natten.NeighborhoodAttention2D(6, 2, kernel_size=(5, 3), dilation=(1, 2), qkv_bias=False),
        (2, 6, 5, 4, 6): natten.NeighborhoodAttention3D(6, 3, kernel_size=(3, 5, 2), stride=(1, 2, 1)),
        (1, 9, 8, 6): nn.Sequential(Block(6, 2, kernel_size=3), Block(6, 2, kernel_size=3, dilation=2)),
    }
    for shape, model in models.items():
        places, sizes = [], {}
        for m, d in enumerate(dims):
            there = d < len(shape) - 1
            places.append(Shard(d) if there else Replicate())
            if there:
                first = cuts[m] * shape[d] // 10
                sizes[m] = (first, shape[d] - first)
        assert_matches_unsharded(
            Dense(model.double()),
            torch.randn(shape, dtype=torch.float64),
            mesh_shape=mesh_shape,
            placements=places,
            shard_sizes=sizes,
        )


# -- plain tensors ---------------------------------------------------------------------------------------------------


def test_plain_tensors_get_nattens_own_bitwise():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 6, 5, 2, 8)
    module = natten.NeighborhoodAttention2D(16, 2, kernel_size=3)
    x = torch.randn(1, 5, 5, 16)
    with torch.no_grad():
        patched = natten.na2d(q, k, v, kernel_size=3, dilation=(2, 1)), module(x)
        shardtensor.dispatch.patches.uninstall()
        try:
            original = natten.na2d(q, k, v, kernel_size=3, dilation=(2, 1)), module(x)
        finally:
            shardtensor.dispatch.patches.install()
    assert all(map(torch.equal, patched, original))
    with pytest.raises(ValueError, match="product of kernel size and dilation"):
        natten.na2d(q, k, v, kernel_size=4, dilation=2)


# -- errors ----------------------------------------------------------------------------------------------------------

x_shape = (1, 8, 6, 4, 8)
ERRORS = {
    # name: (a call on q sharded in rows, the error, its text)
    "kernel": (lambda q: natten.na2d(q, q, q, kernel_size=9), ValueError, "cannot be larger than input size"),
    "dilation": (lambda q: natten.na2d(q, q, q, 3, dilation=3), ValueError, "cannot be larger than input size"),
    "stride": (lambda q: natten.na2d(q, q, q, 3, stride=4), ValueError, "Stride cannot be larger than kernel size"),
    "kernel of 1": (lambda q: natten.na2d(q, q, q, 1), ValueError, "Invalid value for `kernel_size`"),
    "causal": (lambda q: natten.na2d(q, q, q, 3, is_causal=(True,)), ValueError, "Invalid value for `is_causal`"),
    "layouts": (lambda q: natten.na2d(q, q[:, :, :5], q, 3), ValueError, "match in their token layouts"),
    "dtypes": (lambda q: natten.na2d(q, q.double(), q, 3), ValueError, "same data type"),
    "no floats": (lambda q: natten.na2d(q.int(), q.int(), q.int(), 3), UnsupportedSharding, "not compute in torch.int"),
    "a byte": (
        lambda q: natten.na2d(*[q.to(torch.float8_e5m2)] * 3, kernel_size=3),
        UnsupportedSharding,
        "torch's attention does not compute in torch.float8_e5m2.*Remedy: convert the operands",
    ),
    "heads": (lambda q: natten.na2d(q[:, :, :, :3], q, q, 3), ValueError, "must evenly divide query heads"),
    "half of the additional": (
        lambda q: natten.na2d(q, q, q, 3, additional_keys=torch.ones(1, 2, 4, 8)),
        ValueError,
        "must be either both Tensors or None",
    ),
    "backend": (lambda q: natten.na2d(q, q, q, 3, backend="magic"), NotImplementedError, "Unrecognized NATTEN backend"),
    "no such kernel": (lambda q: natten.na2d(q, q, q, 3, backend="cutlass-fna"), RuntimeError, "CUTLASS FNA"),
    "schedule": (lambda q: natten.na2d(q, q, q, 3, kernel_schedule="?"), ValueError, "Kernel schedule"),
    "head_dim": (
        lambda q: natten.na2d(q, q.redistribute(placements=[Shard(4)]), q, 3),
        UnsupportedSharding,
        r"na2d: head_dim \(tensor dim 4\) is sharded.*Remedy: redistribute to shard heads, batch or spatial dims",
    ),
    "additional sequence": (
        lambda q: natten.na2d(
            q, q, q, 3, **dict.fromkeys(("additional_keys", "additional_values"), q[:, :, 0])
        ),
        UnsupportedSharding,
        "would have to be gathered over mesh dim 0",
    ),
    "nothing is reduced before": (
        lambda q: natten.na2d(half(q), q.redistribute(placements=[Shard(4)]), half(q), 3),
        UnsupportedSharding,
        r"head_dim \(tensor dim 4\) is sharded",
    ),
    "attention's log-sum-exp": (
        lambda q: natten.attention(*[q[:, :, 0]] * 3, return_lse=True),
        UnsupportedSharding,
        "natten.attention: torch's attention returns no log-sum-exp.*Remedy: drop return_lse",
    ),
    "packed sequences": (
        lambda q: natten.attention(*[q[:, :, 0]] * 3, seqlens_Q=torch.tensor([8]), seqlens_KV=torch.tensor([8])),
        UnsupportedSharding,
        "packed sequences have no distributed form",
    ),
}


def half(q):
    """A Partial of the same shape."""
    return ShardTensor.from_local(torch.ones(x_shape) / 2, q.device_mesh, [Partial()])


def operand():
    return shard(torch.randn(x_shape), shared_mesh(2), [Shard(1)], {0: (0, 8)})


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_raised_on_every_rank_before_anything_is_sent(name):
    raises_alike(operand, name, silent=name not in ("head_dim", "nothing is reduced before"))  # made by communication


@on_ranks(2)
def test_refused_layouts_may_be_gathered():
    """What is refused works where gathering is allowed."""
    problem = plane((6, 5), 3)
    whole = problem.tensors()
    shards = [shard(t, shared_mesh(2), [Shard(4)], {0: (1, 2)}) for t in whole]
    with shardtensor.allow_gather():
        out = attention(problem)(*shards)
    torch.testing.assert_close(out.full_tensor(), dense_attention(*whole, **problem.arguments))
    assert out.placements == (Shard(4),) and out.shard_sizes == {0: (1, 2)}


@on_ranks(2)
def test_nattens_attention_is_torchs():
    """natten's ``attention``, over which additional contexts go: heads behind the sequence, fewer of them for keys."""
    problem = plane((9,), 9, heads=4, heads_kv=2)
    query, key, value = problem.tensors()
    for causal in (False, True):
        expected = dense_attention(query, key, value, **(problem.arguments | {"is_causal": (causal,)}))
        shards = [shard(t, shared_mesh(2), [Shard(1)], {0: (2, 7)}) for t in (query, key, value)]
        got = natten.attention(*shards, is_causal=causal)
        assert got.shard_sizes == {0: (2, 7)}
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_merged_attentions_have_the_right_gradients():
    """Two dilations merged by natten's ``merge_attentions``, differentiated."""
    problem = plane((11,), 3, dilation=1)
    whole = problem.tensors()
    wide = problem.arguments | {"kernel_size": (5,), "dilation": (2,)}

    def both(*tensors):
        if isinstance(tensors[0], ShardTensor):
            pairs = [natten.na1d(*tensors, **a, return_lse=True) for a in (problem.arguments, wide)]
            return natten.merge_attentions(*map(list, zip(*pairs)))[0]
        (a, lse_a), (b, lse_b) = (dense_attention(*tensors, **x, return_lse=True) for x in (problem.arguments, wide))
        share = torch.sigmoid(lse_a - lse_b)[..., None]
        return share * a + (1 - share) * b

    # natten merges in float32.
    assert_matches_unsharded(
        both, *whole, mesh_shape=2, placements=[Shard(1)], shard_sizes={0: (4, 7)}, rtol=1e-4, atol=1e-5
    )


# The largest error of attention and its gradients, against float64 on one device; see docs/attention.md.
ERROR_OF = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@on_ranks(2)
def test_errors_of_each_dtype():
    """In one, two and three dims, with odd and even windows, dilated; on uneven shards."""
    for attend, shape in ((natten.na1d, (8,)), (natten.na2d, (8, 6)), (natten.na3d, (8, 4, 5))):
        n = len(shape)
        for kernel, dilation in ((3, 1), (4, 1), (2, 2)):
            problem = Problem(shape, (kernel,) * n, (1,) * n, (dilation,) * n, (False,) * n)
            whole = [t.requires_grad_() for t in problem.tensors()]
            expected = dense_attention(*whole, **problem.arguments)
            grad = torch.randn(expected.shape, dtype=torch.float64, generator=seeded(0))
            expected = [expected, *torch.autograd.grad(expected, whole, grad)]
            for dtype, tolerance in ERROR_OF.items():
                for sizes in ((5, 3), (7, 1), (0, 8)):
                    *shards, cotangent = (
                        shard(t.detach().to(dtype), shared_mesh(2), [Shard(1)], {0: sizes}, requires_grad=True)
                        for t in (*whole, grad)
                    )
                    y = attend(*shards, kernel_size=kernel, dilation=dilation)
                    for a, b in zip(expected, [y, *torch.autograd.grad(y, shards, cotangent.detach())]):
                        assert (b.full_tensor().double() - a).abs().max() <= tolerance * a.abs().max()


def test_how_it_works_states_the_errors():
    text = (Path(__file__).parents[3] / "docs" / "how-it-works.md").read_text()
    for dtype, tolerance in ERROR_OF.items():
        name = str(dtype).removeprefix("torch.")
        assert f"{tolerance:.0e} in {name}".replace("e-0", "e-") in text
