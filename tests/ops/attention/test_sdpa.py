"""Attention over sharded sequences against the unsharded one: values, gradients, messages, memory and errors."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from alike import raises_alike
from copied import Copied
from on_ranks import on_ranks
from spatial_cases import squared_gradient
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalVariant, causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.ops.attention import layout
from shardtensor.ops.attention.blockwise import pieces
from shardtensor.ops.common import ring
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
    simulate_ranks,
)

METHODS = ("ring", "heads", "fetch")
WHOLE = [Replicate()]
ROWS = [Shard(-2)]
COLUMNS = [Shard(-1)]


def data(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def cut(n: int, ranks: int, rng: random.Random) -> tuple[int, ...]:
    """Random sizes, zeros among them."""
    at = sorted(rng.randint(0, n) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *at], [*at, n]))


def sdpa(*tensors, **options):
    return F.scaled_dot_product_attention(*tensors, **options)


def masks(length: int, keys: int) -> dict[str, torch.Tensor]:
    """Masks of many shapes; some rows see nothing."""
    seen = torch.rand(length, keys) < 0.7
    seen[:: max(2, length // 3)] = False
    return {
        "bool": seen,
        "float": data(length, keys).masked_fill(~seen, float("-inf")),
        "keys": torch.rand(2, 1, 1, keys) < 0.6,
        "rows": torch.rand(2, 1, length, 1) < 0.6,
        "heads": data(1, 2, length, keys),
        "all": data(2, 2, length, keys),
        "three dims": data(2, length, keys),
    }


def check_grid(world: int, length: int, seed: int, method: str, dtype: torch.dtype = torch.float64) -> None:
    """Queries and keys cut at random, alike and differently, with every kind of mask."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for keys in (length, rng.choice((1, 7, 33))):
        q, k, v = data(2, 2, length, 4), data(2, 2, keys, 4), data(2, 2, keys, 4)
        rows = {0: cut(length, world, rng)}
        columns = rows if keys == length and rng.random() < 0.5 else {0: cut(keys, world, rng)}
        cases = [(None, None, None), (None, None, "causal")]
        for name, mask in masks(length, keys).items():
            places = [None, WHOLE]
            if mask.shape[-2] > 1:
                places.append(ROWS)
            if mask.shape[-1] > 1:
                places.append(COLUMNS)
            cases.append((mask, rng.choice(places), name))
        for mask, places, name in cases:
            sizes = None if places in (None, WHOLE) else rows if places == ROWS else columns
            tensors = [t.to(dtype) if t.is_floating_point() else t for t in (q, k, v, mask) if t is not None]
            causal = name == "causal"
            with shardtensor.attention_method(method):
                try:
                    assert_matches_unsharded(
                        lambda *t, causal=causal: sdpa(*t, is_causal=causal),
                        *tensors,
                        mesh_shape=world,
                        placements=[ROWS, ROWS, ROWS, places][: len(tensors)],
                        shard_sizes=[rows, columns, columns, sizes][: len(tensors)],
                    )
                except Exception as error:
                    raise AssertionError(f"{length} x {keys}, mask {name} {places}, {rows} {columns}") from error


@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.slow] * (m == "ring")) for m in METHODS])
def test_grid_by_kernels_of_devices(method, emulated):
    run_distributed(check_grid, 3, 3, 33, 1, method, torch.float32)


@pytest.mark.parametrize(
    ("world", "length", "method"),
    [
        (2, 33, "ring"),
        (2, 7, "fetch"),
        (2, 7, "heads"),
        (3, 7, "ring"),
        (3, 33, "fetch"),
    ],
)
def test_grid(world, length, method):
    run_distributed(check_grid, world, world, length, length + world, method)


@on_ranks(3)
def test_other_ways_to_send():
    """Point-to-point messages, and the checks of debugging."""
    os.environ["SHARDTENSOR_DEBUG"] = "1"
    try:
        for method in METHODS:
            with shardtensor.set_transport("p2p"):
                check_grid(3, 7, 5, method)
    finally:
        del os.environ["SHARDTENSOR_DEBUG"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 33, 97])
def test_whole_grid(world, length, method):
    for seed in range(3):
        run_distributed(check_grid, world, world, length, seed, method)


# -- every kind of sharding -----------------------------------------------------------------------------------------

L, S, B = {0: (5, 2)}, {0: (1, 8)}, {0: (2, 1)}
Q, K = (3, 4, 7, 4), (3, 4, 9, 4)  # batch, heads, sequence, features
HEADS = {0: (1, 3)}
SEEN = torch.tensor([[(r + c) % 3 > 0 and r != 2 for c in range(9)] for r in range(7)])  # row 2 sees nothing

# (what, query, key, value, mask: each (shape or tensor, placements, sizes)), options
KINDS = [
    ("whole keys", (Q, ROWS, L), (K, WHOLE, None), (K, WHOLE, None), None, {}),
    ("whole keys, causal", (Q, ROWS, L), (K, WHOLE, None), (K, WHOLE, None), None, {"is_causal": True}),
    ("whole keys, mask", (Q, ROWS, L), (K, WHOLE, None), (K, WHOLE, None), (SEEN, None, None), {}),
    ("plain keys", (Q, ROWS, {0: (7, 0)}), (K, None, None), (K, None, None), None, {}),
    ("whole queries", (Q, WHOLE, None), (K, ROWS, S), (K, ROWS, S), None, {}),
    ("whole queries, causal", (Q, WHOLE, None), (K, ROWS, S), (K, ROWS, S), None, {"is_causal": True}),
    ("whole queries, mask", (Q, WHOLE, None), (K, ROWS, S), (K, ROWS, S), (SEEN, None, None), {}),
    ("whole queries, cut mask", (Q, None, None), (K, ROWS, S), (K, ROWS, S), (SEEN, COLUMNS, S), {}),
    ("whole queries, float mask", (Q, None, None), (K, ROWS, S), (K, ROWS, S), ((7, 9), COLUMNS, {0: (5, 4)}), {}),
    ("keys on one rank", (Q, WHOLE, None), (K, ROWS, {0: (0, 9)}), (K, ROWS, {0: (0, 9)}), None, {}),
    ("only values sharded", (Q, ROWS, L), (K, WHOLE, None), (K, ROWS, S), None, {}),
    ("keys and values cut differently", (Q, ROWS, L), (K, ROWS, S), (K, ROWS, {0: (6, 3)}), None, {}),
    ("only the mask", (Q, WHOLE, None), (K, None, None), (K, WHOLE, None), (SEEN, ROWS, L), {}),
    ("only the mask's keys", (Q, WHOLE, None), (K, None, None), (K, WHOLE, None), (SEEN, COLUMNS, S), {}),
    ("batch", (Q, [Shard(0)], B), (K, [Shard(0)], B), (K, [Shard(0)], B), (SEEN, None, None), {}),
    ("batch of the queries", (Q, [Shard(0)], B), (K, WHOLE, None), (K, None, None), None, {}),
    ("batch and sequence", (Q, [Shard(0)], B), (K, ROWS, S), (K, ROWS, S), ((3, 1, 1, 9), [Shard(0)], B), {}),
    ("heads", (Q, [Shard(1)], HEADS), (K, [Shard(1)], HEADS), (K, None, None), ((4, 7, 9), [Shard(0)], HEADS), {}),
    ("broadcast batch", (Q, ROWS, L), ((1, 4, 9, 4), ROWS, S), ((4, 9, 4), ROWS, S), None, {}),
    ("other width of values", (Q, ROWS, L), (K, ROWS, S), ((3, 4, 9, 5), ROWS, S), (SEEN, None, None), {}),
    ("scale", (Q, ROWS, L), (K, ROWS, S), (K, ROWS, S), None, {"scale": 0.7}),
    ("no batch", ((7, 4), [Shard(0)], L), ((9, 4), [Shard(0)], S), ((9, 4), [Shard(0)], S), (SEEN, None, None), {}),
    ("three dims", ((4, 7, 4), ROWS, L), ((4, 9, 4), ROWS, S), ((4, 9, 4), ROWS, S), ((4, 7, 9), ROWS, L), {}),
    ("five dims", ((2, *Q), ROWS, L), ((2, *K), ROWS, S), ((2, *K), ROWS, S), ((2, 1, 1, 7, 9), None, None), {}),
    ("Partial", (Q, [Partial()], None), (K, ROWS, S), (K, ROWS, S), None, {}),
    ("groups", (Q, ROWS, L), ((3, 2, 9, 4), ROWS, S), ((3, 1, 9, 4), ROWS, S), None, {"enable_gqa": True}),
    ("keys and values in other groups", (Q, [Shard(0)], B), (Q, [Shard(0)], B), ((3, 2, 7, 4), [Shard(0)], B), None,
     {"enable_gqa": True}),
    ("groups, heads cut", (Q, [Shard(1)], HEADS), ((3, 2, 9, 4), WHOLE, None), ((3, 2, 9, 4), [Shard(1)], {0: (0, 2)}),
     None, {"enable_gqa": True}),
    ("groups, queries alone", (Q, ROWS, L), ((3, 2, 9, 4), WHOLE, None), ((3, 2, 9, 4), None, None), None,
     {"enable_gqa": True, "is_causal": True}),
]  # fmt: skip


def check_kinds(mesh_shape, kinds, dtype=torch.float64, first=None) -> None:
    """With all methods; or with one for each kind in turn, beginning with that number."""
    torch.manual_seed(0)
    for i, (what, *given, options) in enumerate(kinds):
        given = [g for g in given if g is not None]
        tensors = [data(*g[0], dtype=dtype) if isinstance(g[0], tuple) else g[0] for g in given]
        for method in METHODS if first is None else [METHODS[(i + first) % len(METHODS)]]:
            try:
                with shardtensor.attention_method(method):
                    assert_matches_unsharded(
                        lambda *t, options=options: sdpa(*t, **options),
                        *tensors,
                        mesh_shape=mesh_shape,
                        placements=[g[1] for g in given],
                        shard_sizes=[g[2] for g in given],
                    )
            except Exception as error:
                raise AssertionError(f"{what}, {method}") from error


def test_kinds():
    run_distributed(check_kinds, 2, 2, KINDS)


@pytest.mark.parametrize(
    ("dtype", "first"),
    [
        (torch.float64, 0),
        (torch.float32, 1),
        (torch.bfloat16, 2),
        pytest.param(torch.float32, None, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param(torch.float16, None, marks=pytest.mark.slow),
    ],
)
def test_kinds_by_kernels_of_devices(dtype, first, emulated):
    run_distributed(check_kinds, 2, 2, KINDS, dtype, first)


BOTH, OUTER, INNER = {0: (2, 1), 1: (5, 2)}, {0: (2, 1)}, {1: (5, 2)}
KEYS = {0: (2, 1), 1: (1, 8)}
CUT_HEADS, CUT_KEYS = {0: (3, 1), 1: (5, 2)}, {0: (3, 1), 1: (1, 8)}
TWO_DIMS = [
    ("batch x sequence", (Q, [Shard(0), Shard(2)], BOTH), (K, [Shard(0), Shard(2)], KEYS),
     (K, [Shard(0), Shard(2)], KEYS), ((3, 1, 1, 9), None, None), {}),
    ("heads x sequence", (Q, [Shard(1), Shard(2)], CUT_HEADS), (K, [Shard(1), Shard(2)], CUT_KEYS),
     (K, [Shard(1), Shard(2)], CUT_KEYS), ((4, 7, 9), [Shard(0), Shard(1)], CUT_HEADS), {}),
    ("sequence x nothing", (Q, [Replicate(), Shard(2)], INNER), (K, [Replicate(), Shard(2)], {1: (1, 8)}),
     (K, [Replicate(), Shard(2)], {1: (1, 8)}), None, {"is_causal": True}),
    ("queries x keys", (Q, [Shard(2), Replicate()], {0: (6, 1)}), (K, [Replicate(), Shard(2)], {1: (1, 8)}),
     (K, [Replicate(), Shard(2)], {1: (1, 8)}), ((7, 9), [Shard(0), Shard(1)], {0: (4, 3), 1: (4, 5)}), {}),
    ("queries x keys, causal", (Q, [Shard(2), Replicate()], {0: (6, 1)}), (K, [Replicate(), Shard(2)], {1: (1, 8)}),
     (K, [Replicate(), Shard(2)], {1: (1, 8)}), None, {"is_causal": True}),
]  # fmt: skip


def test_two_mesh_dims():
    run_distributed(check_kinds, 4, (2, 2), TWO_DIMS)


def check_any_placements(seed: int, count: int) -> tuple[int, int]:
    """Operands cut in any way on two mesh dims: the result is right, or all ranks refuse."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mesh, right, refused = shared_mesh((2, 2)), 0, 0

    def anyhow(tensor):
        """Placements and sizes, or None to leave the tensor plain."""
        if rng.random() < 0.1:
            return None, None
        dims = rng.sample([None, None, *range(tensor.ndim - (tensor.dtype != torch.bool))], 2)
        sizes = {m: cut(tensor.shape[d], 2, rng) for m, d in enumerate(dims) if d is not None}
        return [Replicate() if d is None else Shard(d) for d in dims], sizes

    for _ in range(count):
        length, keys, group = rng.choice((1, 5, 9)), rng.choice((2, 7)), rng.choice((1, 1, 2))
        tensors = [data(3, 4, length, 4)] + [data(3, 4 // group, keys, 4) for _ in range(2)]
        options = {"enable_gqa": group > 1, "is_causal": rng.random() < 0.3}
        if not options["is_causal"] and rng.random() < 0.6:
            shape = [rng.choice((1, n)) for n in (3, 4)] + [length, rng.choice((1, keys))]
            tensors.append(data(*shape) if rng.random() < 0.5 else torch.rand(shape) < 0.7)
        given = [anyhow(t) for t in tensors]
        if not any(places for places, _ in given):
            continue
        with shardtensor.attention_method(rng.choice(("auto", *METHODS))):
            try:
                assert_matches_unsharded(
                    lambda *t, options=options: sdpa(*t, **options),
                    *tensors,
                    mesh=mesh,
                    placements=[places for places, _ in given],
                    shard_sizes=[sizes for _, sizes in given],
                )
                right += 1
            except UnsupportedSharding:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{[tuple(t.shape) for t in tensors]} {given} {options}") from error
    return right, refused


def test_any_placements():
    results = run_distributed(check_any_placements, 4, 0, 40)
    assert len(set(results)) == 1
    right, refused = results[0]
    assert right > refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_placements(seed):
    run_distributed(check_any_placements, 4, seed, 300, timeout=400.0)


# -- rows without keys, zeros, half precision --------------------------------------------------------------------------


@on_ranks(2)
def test_rows_that_see_nothing():
    """They are zero, as in torch, whether nobody sees them or the one rank that has their keys does not."""
    q, k, v = (shard(data(1, 2, 6, 4), shared_mesh(2), ROWS, {0: (4, 2)}) for _ in range(3))
    for mask in (torch.zeros(6, 6, dtype=torch.bool), torch.full((6, 6), float("-inf"), dtype=torch.float64)):
        assert (sdpa(q, k, v, mask).full_tensor() == 0).all()
    zero = sdpa(q, k, torch.zeros_like(v)).full_tensor()
    assert (zero == 0).all()


@pytest.mark.parametrize("method", METHODS)
@on_ranks(2)
def test_scores_that_overflow(method):
    """A key whose score overflows to -inf counts for nothing, also where it is the only one of its rank."""
    q, v = torch.full((1, 1, 4, 2), 1e200, dtype=torch.float64), data(1, 1, 4, 2)
    k = torch.zeros_like(q)
    k[:, :, 3] = -1e200
    for options in ({}, {"is_causal": True}):
        with shardtensor.attention_method(method):
            assert_matches_unsharded(
                lambda *t, options=options: sdpa(*t, **options),
                q,
                k,
                v,
                mesh_shape=2,
                placements=ROWS,
                shard_sizes={0: (3, 1)},
                check_grads=False,
            )


@pytest.mark.parametrize("method", METHODS)
@on_ranks(3)
def test_nan_is_not_lost(method):
    """Comes out where it went in, however few keys a rank has: torch's kernel makes it zero if they are very few."""
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        for where in range(3):
            tensors = [data(1, 2, 40, 4).to(dtype) for _ in range(3)]
            tensors[where][0, 1, 17, 2] = float("nan")
            expected = sdpa(*tensors).isnan()
            assert expected.any() and not expected.all()
            with shardtensor.attention_method(method):
                y = sdpa(*(shard(t, shared_mesh(3), ROWS, {0: (3, 25, 12)}) for t in tensors))
            assert torch.equal(y.full_tensor().isnan(), expected)


@pytest.mark.on_device
@pytest.mark.parametrize("method", METHODS)
@on_ranks(3)
def test_half_precision(method):
    """Twice the error that torch itself makes in this precision is allowed."""
    torch.manual_seed(0)
    q, k, v, grad = (data(2, 4, 61, 8).to(torch.bfloat16) for _ in range(4))
    for options in ({}, {"is_causal": True}):

        def run(cast, options=options):
            tensors = [cast(t).requires_grad_() for t in (q, k, v)]
            out = sdpa(*tensors, **options)
            grads = torch.autograd.grad(out, tensors, cast(grad))
            return [t.full_tensor() if isinstance(t, ShardTensor) else t for t in (out, *grads)]

        exact, whole = run(lambda t: t.double()), run(lambda t: t.detach().clone())
        with shardtensor.attention_method(method):
            ours = run(lambda t: shard(t, shared_mesh(3), ROWS, {0: (20, 1, 40)}))
        for what, a, b, c in zip(("result", "query", "key", "value"), exact, whole, ours):
            assert c.dtype == torch.bfloat16
            theirs, mine = (b - a).abs().max().item(), (c - a).abs().max().item()
            assert mine <= 2 * theirs, f"{what}, {options}: error {mine}, torch's {theirs}"


# GPUs compute scores of three dims by products, which are rounded otherwise for other numbers of batches.
PRODUCTS = pytest.param((4, 7, 8), marks=pytest.mark.on_cpu("rounding depends on the number of batches"))


@pytest.mark.parametrize("shape", [PRODUCTS, (4, 2, 7, 8)], ids=str)
@on_ranks(2)
def test_batches_are_computed_by_the_kernel_of_one_device(shape):
    """Keys that are nearly equal: the kernels differ in what they make of their gradients, so it has to be the same."""
    q, k, v = (torch.randn(shape).bfloat16() for _ in range(3))
    k = (k / 128 + 1).detach()

    def gradients(inputs):
        return torch.autograd.grad(sdpa(*inputs, is_causal=True).square().sum(), inputs)

    ours = gradients([shard(t, shared_mesh(2), [Shard(0)], {0: (3, 1)}, requires_grad=True) for t in (q, k, v)])
    theirs = gradients([t.requires_grad_() for t in (q, k, v)])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.full_tensor(), b)


@pytest.mark.parametrize("sizes, dim", [((4, 0), 0), ((7, 0), 1), ((5, 2), 1)])
@on_ranks(2)
def test_half_precision_of_fewer_than_four_dims(sizes, dim):
    """Keys that are nearly equal, whose gradients cancel: torch's kernel for fewer than four dims keeps float32.

    Also where some rank's shard is empty, so that no rank calls torch's kernel.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 7, 8) for _ in range(3))
    q, k, v = (t.bfloat16() for t in (q, k / 128 + 1, v))

    def gradients(cast):
        inputs = [cast(t.detach()).requires_grad_() for t in (q, k, v)]
        found = torch.autograd.grad(sdpa(*inputs, is_causal=True).square().sum(), inputs)
        return [t.full_tensor() if isinstance(t, ShardTensor) else t for t in found]

    exact, one = gradients(lambda t: t.double()), gradients(lambda t: t.clone())
    ours = gradients(lambda t: shard(t, shared_mesh(2), [Shard(dim)], {0: sizes}))
    for a, b, c in zip(exact, one, ours, strict=True):
        assert (c - a).abs().max() <= 2 * (b - a).abs().max()


@pytest.mark.parametrize("method", METHODS)
@on_ranks(3)
def test_without_flash(method):
    """With explicit scores, or torch's own after a fetch; also where a rank has no queries or no keys."""
    torch.manual_seed(0)
    q, k, v, bias = data(2, 4, 9, 4), data(2, 2, 9, 4), data(2, 2, 9, 4), data(9, 9)
    with shardtensor.attention_method(method), sdpa_kernel(SDPBackend.MATH):
        for sizes in ((5, 1, 3), (0, 4, 5)):
            for tensors, options in (((q, k, v), {}), ((q, k, v), {"is_causal": True}), ((q, k, v, bias), {})):
                assert_matches_unsharded(
                    lambda *t, options=options: sdpa(*t, enable_gqa=True, **options),
                    *tensors,
                    mesh_shape=3,
                    placements=[ROWS] * len(tensors),
                    shard_sizes=[{0: sizes}] * len(tensors),
                )


@on_ranks(2)
def test_autocast():
    torch.manual_seed(0)
    q = data(1, 2, 7, 4).float()
    x = shard(q, shared_mesh(2), ROWS, L, requires_grad=True)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        y, whole = sdpa(x, x, x), sdpa(q, q, q)
        z = sdpa(x.double(), x.double(), x.double())
    assert y.dtype == whole.dtype == torch.bfloat16 and z.dtype == torch.float64
    torch.testing.assert_close(y.full_tensor(), whole, rtol=0.02, atol=0.02)
    y.sum().backward()
    assert x.grad.dtype == torch.float32


@on_ranks(2)
def test_causal_bias():
    """torch's own names for causal masks, aligned at either corner."""
    torch.manual_seed(0)
    for length, keys in ((7, 7), (5, 9), (9, 5)):
        q, k, v = data(2, 4, length, 4), data(2, 4, keys, 4), data(2, 4, keys, 4)
        for bias in (causal_upper_left(length, keys), causal_lower_right(length, keys)):
            seen = torch.ones(length, keys, dtype=torch.bool)
            seen = seen.tril(keys - length if bias.variant == CausalVariant.LOWER_RIGHT else 0)
            for rows, columns in ((ROWS, ROWS), (ROWS, WHOLE), (WHOLE, ROWS), (WHOLE, WHOLE)):
                for method in METHODS:

                    def attend(q, k, v, bias=bias, seen=seen):
                        return sdpa(q, k, v, bias if isinstance(q, ShardTensor) else seen)

                    with shardtensor.attention_method(method):
                        assert_matches_unsharded(
                            attend,
                            q,
                            k,
                            v,
                            mesh_shape=2,
                            placements=[rows, columns, columns],
                            shard_sizes=[{0: (length - 3, 3)} if rows == ROWS else None]
                            + [{0: (1, keys - 1)} if columns == ROWS else None] * 2,
                        )


# -- causal rings, balanced --------------------------------------------------------------------------------------------


@contextmanager
def dear_scores():
    """A score takes so long that the ring is balanced wherever that makes its steps shorter."""
    rates = {"cpu": 1e-6}
    with mock.patch.multiple(layout, _RATES=rates, _OTHER_RATES=rates["cpu"]), shardtensor.attention_method("ring"):
        yield


def check_balanced(world: int, dtype: torch.dtype) -> None:
    """Shards of all kinds, keys of other lengths and at either corner."""
    rng = random.Random(world)
    torch.manual_seed(0)
    for length, keys in ((29, 29), (29, 37), (41, 17)):
        for sizes in (cut(length, world, rng), (0,) * (world - 1) + (length,), None):
            rows = None if sizes is None else {0: sizes}
            columns = rows if length == keys else {0: cut(keys, world, rng)}
            q, k, v = (data(2, n, t, e, dtype=dtype) for n, t, e in ((4, length, 4), (2, keys, 4), (2, keys, 8)))
            for bias in (causal_upper_left(length, keys), causal_lower_right(length, keys)):
                seen = torch.ones(length, keys, dtype=torch.bool)
                seen = seen.tril(keys - length if bias.variant == CausalVariant.LOWER_RIGHT else 0)

                def attend(q, k, v, bias=bias, seen=seen):
                    return sdpa(q, k, v, bias if isinstance(q, ShardTensor) else seen, enable_gqa=True)

                with dear_scores(), count_communication() as counted:
                    assert_matches_unsharded(
                        attend, q, k, v, mesh_shape=world, placements=ROWS, shard_sizes=[rows, columns, columns]
                    )
            if length == keys and sizes is None:  # forward and backward: the ring's steps, there and back
                assert counted.collectives["all_to_all"] >= 2 * (world - 1) + 4


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_balanced_rings(world):
    run_distributed(check_balanced, world, world, torch.float64)


def test_balanced_rings_on_a_device(emulated):
    run_distributed(check_balanced, 3, 3, torch.float32)


@pytest.mark.parametrize("half", [False, True])
@on_ranks(3)
def test_steps_of_balanced_rings(half):
    torch.manual_seed(0)
    mesh, world = shared_mesh(3), 3
    dtype = torch.bfloat16 if half else torch.float64
    q, k, v = (shard(data(1, 2, 53, 8, dtype=dtype), mesh, ROWS, {0: (3, 41, 9)}, requires_grad=True) for _ in range(3))
    with dear_scores():
        with count_communication() as forward:
            y = sdpa(q, k, v, is_causal=True)
        with count_communication() as backward:
            y.float().sum().backward()
        assert forward.collectives == {"all_to_all": 2 + world - 1}
        assert backward.collectives == {"all_to_all": 2 + world + 1}  # gradients end one step after the blocks
        # Inside of layers, with dropout, and below autograd.
        sdpa(q, k, v, is_causal=True, dropout_p=0.5)
        if not half and torch.get_default_device().type == "cpu":  # devices compose float64
            with torch._C.DisableTorchFunctionSubclass(), count_communication() as below:
                again = sdpa(q.detach(), k.detach(), v.detach(), is_causal=True)
            assert below.collectives == {"all_to_all": world - 1}, "each rank computes with its shards"
            torch.testing.assert_close(again.full_tensor(), y.full_tensor(), rtol=1e-10, atol=1e-12)
    with count_communication() as cheap, shardtensor.attention_method("ring"):
        sdpa(q, k, v[..., :4], is_causal=True)
    assert cheap.collectives == {"all_to_all": world - 1}, "where scores are cheap, nothing is exchanged for them"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@on_ranks(2, timeout=180.0)
def test_compiled_rings_on_a_device(dtype, emulated):
    """A balanced ring, and one with the gradient of a mask, in a graph."""
    torch.manual_seed(0)
    q, k, v, bias = (data(1, 2, 47, n, dtype=dtype) for n in (8, 8, 8, 47))
    compiled = torch.compile(sdpa, backend="aot_eager")
    for tensors, options in (((q, k, v), {"is_causal": True}), ((q, k, v, bias), {})):
        with dear_scores():
            assert_matches_unsharded(
                lambda *t, options=options: compiled(*t, **options),
                *tensors,
                mesh_shape=2,
                placements=ROWS,
                shard_sizes={0: (40, 7)},
            )


@on_ranks(4)
def test_balanced_rings_have_equal_work():
    """The scores that each rank computes in each step."""
    spec = shard(data(1, 2, 2048, 8), shared_mesh(4), ROWS, {0: (100, 1000, 500, 448)})._spec
    with dear_scores():
        found = layout.layout_of(spec, spec, spec, None, 0, "ring")
        assert found.balance is not None and found.ring is not None
    blocks = [found.columns[found.ring.block(step)] for step in range(4)]
    steps = [sum(piece.scores for piece in pieces(found.rows, columns, 0)) for columns in blocks]
    assert all(abs(n - 2048 * 2048 / 32) <= 512 for n in steps)


@pytest.mark.parametrize("squares", [False, True])
def test_pieces_are_what_rows_see(squares):
    """Each score that is seen is in one piece, whatever lies next to what."""
    rng = random.Random(0)

    def parts():
        at = sorted(rng.randint(0, 9) for _ in range(2 * rng.choice((1, 1, 2, 3))))
        return list(zip(at[::2], at[1::2]))

    for _ in range(2000):
        rows, columns, shift = parts(), parts(), rng.choice((None, 0, 0, -3, 2))
        columns = rows if rng.random() < 0.3 else columns
        r, c = ([i for a, b in intervals for i in range(a, b)] for intervals in (rows, columns))
        expected = [(i, j) for i, x in enumerate(r) for j, y in enumerate(c) if shift is None or y <= x + shift]
        found = []
        for piece in pieces(rows, columns, shift, squares):
            (a, b), (c, d) = piece.rows, piece.columns
            seen = [(i, j) for i in range(a, b) for j in range(c, d) if not piece.causal or d - j >= b - i]
            assert piece.scores == len(seen) > 0
            assert not piece.causal or (d - c == b - a if squares else d - c >= b - a)
            found += seen
        assert sorted(found) == expected


# -- dropout -----------------------------------------------------------------------------------------------------------


def check_dropout(placements, sizes, key_placements, key_sizes, method) -> list:
    """What was dropped shows in the result for unit vectors as values; with it the reference is made."""
    torch.manual_seed(0)
    mesh = shared_mesh((2, 2))
    whole = [data(2, 4, 8, 4), data(2, 4, 30, 4), torch.eye(30, dtype=torch.float64).expand(2, 4, 30, 30)]
    q, k, v = (
        shard(t, mesh, *where, requires_grad=True)
        for t, where in zip(whole, [(placements, sizes)] + [(key_placements, key_sizes)] * 2)
    )
    p = 0.25
    with shardtensor.attention_method(method):
        torch.manual_seed(1)
        out = sdpa(q, k, v, dropout_p=p)
        after = torch.rand(())
        torch.manual_seed(1)
        again = sdpa(q, k, v, dropout_p=p)
    assert torch.equal(out.to_local(), again.to_local())
    grad = data(2, 4, 8, 30)
    out.backward(grad)
    kept = out.full_tensor() != 0
    reference = [t.clone().requires_grad_() for t in whole]
    shares = (reference[0] @ reference[1].mT / 2).softmax(-1)
    expected = (shares * kept / (1 - p)) @ reference[2]
    expected.backward(grad)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip((q, k, v), reference):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-12)
    assert (sdpa(q, k, v, dropout_p=1.0).full_tensor() == 0).all()
    return [kept, after]


NOTHING = Replicate()
DROPOUTS = [
    ([NOTHING, Shard(2)], {1: (5, 3)}, [NOTHING, Shard(2)], {1: (7, 23)}, "ring"),
    ([NOTHING, Shard(2)], {1: (5, 3)}, [NOTHING, Shard(2)], {1: (7, 23)}, "heads"),
    ([NOTHING, Shard(2)], {1: (5, 3)}, [NOTHING, Shard(2)], {1: (7, 23)}, "fetch"),
    ([NOTHING, Shard(2)], {1: (5, 3)}, [NOTHING, NOTHING], None, "auto"),
    ([NOTHING, NOTHING], None, [NOTHING, Shard(2)], {1: (7, 23)}, "auto"),
    ([Shard(1), Shard(2)], {0: (3, 1), 1: (5, 3)}, [Shard(1), Shard(2)], {0: (3, 1), 1: (7, 23)}, "ring"),
]


@pytest.mark.parametrize("case", DROPOUTS)
def test_dropout(case):
    results = run_distributed(check_dropout, 4, *case)
    masks = [kept for kept, _ in results]
    assert all(torch.equal(masks[0], mask) for mask in masks)  # ranks that hold the same drop the same
    assert len({float(after) for _, after in results}) == 1  # the generators stay in step
    rate = masks[0].double().mean().item()
    assert abs(rate - 0.75) < 0.04
    rows = masks[0].flatten(0, 2)
    assert len({tuple(row.tolist()) for row in rows}) > 0.95 * len(rows)  # shards draw different numbers


# -- communication, memory, order --------------------------------------------------------------------------------------


def check_ring_with_an_empty_shard() -> tuple[int, int, dict]:
    sizes = {0: (5, 0, 3, 9)}
    q, k, v = (shard(torch.randn(2, 3, 17, 4), shared_mesh(4), ROWS, sizes, requires_grad=True) for _ in range(3))
    with shardtensor.attention_method("ring"):
        with count_communication() as forward:
            y = sdpa(q, k, v)
        loss = y.sum()
        with count_communication() as backward:
            loss.backward()
    return forward.bytes_sent, backward.bytes_sent, dict(forward.collectives)


def test_blocks_travel_as_far_as_they_are_needed():
    """Rank 1 has nothing: it passes on the blocks of ranks 0 and 3, and is the end of the way for that of rank 2."""
    a_key = 2 * 2 * 3 * 4 * 4  # bytes of a key and a value
    results = run_distributed(check_ring_with_an_empty_shard, 4)
    assert [forward for forward, _, _ in results] == [a_key * n for n in (5 + 9, 5 + 9, 5 + 3, 3 + 9)]
    # Backward, sums of gradients follow the blocks, from the second stop on, and go home from the last.
    gradients = (3 + 9, 5 + 9, 5 + 9, 5 + 3)
    assert [backward for _, backward, _ in results] == [
        forward + a_key * n for (forward, _, _), n in zip(results, gradients)
    ]
    assert all(collectives == {"all_to_all": 3} for _, _, collectives in results)


def check_ring_exactly() -> tuple[int, int]:
    sizes = {0: (5, 1, 3)}
    q, k, v = (shard(torch.randn(2, 3, 9, 4), shared_mesh(3), ROWS, sizes, requires_grad=True) for _ in range(3))
    with shardtensor.attention_method("ring"), count_communication() as forward:
        y = sdpa(q, k, v)
    with shardtensor.attention_method("ring"), count_communication() as causal:
        sdpa(q, k, v, is_causal=True)
    with count_communication() as backward:
        y.sum().backward()
    return forward.bytes_sent, backward.bytes_sent, causal.bytes_sent


def test_bytes_of_the_ring():
    a_key = 2 * 2 * 3 * 4 * 4
    forward, backward, causal = zip(*run_distributed(check_ring_exactly, 3))
    assert forward == (a_key * (5 + 3), a_key * (1 + 5), a_key * (3 + 1))
    # Each gradient is sent by all but its owner.
    assert backward == tuple(f + a_key * (9 - n) for f, n in zip(forward, (5, 1, 3)))
    assert causal == (a_key * 5, a_key * (5 + 1), 0)


def check_fetch_exactly(dtype) -> list[tuple[int, int, dict]]:
    sizes = {0: (5, 1, 3)}
    tensors = [data(2, 3, 9, 4, dtype=dtype) for _ in range(3)]
    q, k, v = (shard(t, shared_mesh(3), ROWS, sizes, requires_grad=True) for t in tensors)
    sent = []
    for causal in (False, True):
        with shardtensor.attention_method("fetch"), count_communication() as forward:
            loss = sdpa(q, k, v, is_causal=causal).sum()
        with count_communication() as backward:
            loss.backward()
        assert forward.collectives == backward.collectives == {"all_to_all": 1}
        sent += [(c.messages, c.bytes_sent) for c in (forward, backward)]
    return sent


@pytest.mark.on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_fetching(dtype):
    """There, each rank's keys to all that see them; back, of each rank the gradients of what it fetched, in float32."""
    width = 2 * 2 * 3 * 4  # of keys and values
    there, back = width * dtype.itemsize, width * 4
    results = run_distributed(check_fetch_exactly, 3, dtype)
    for rank, (forward, backward, causal, causal_backward) in enumerate(results):
        own, before = (5, 1, 3)[rank], (0, 5, 6)[rank]
        assert forward == (2, 2 * own * there) and backward == (2, (9 - own) * back)
        assert causal == (2 - rank, (2 - rank) * own * there) and causal_backward == (rank, before * back)


def kept_and_sent(length, causal) -> tuple[int, tuple[int, int]]:
    """Bytes that autograd keeps of attention by fetching, and messages of both passes; its gradients are checked."""
    whole = [data(1, 2, length, 64, dtype=torch.float32) for _ in range(3)]
    q, k, v = (shard(t, shared_mesh(2), ROWS, {0: (length - 9, 9)}, requires_grad=True) for t in whole)
    memory = {}
    noting = torch.autograd.graph.saved_tensors_hooks(lambda t: note_memory(memory, t), lambda t: t)
    with shardtensor.attention_method("fetch"), count_communication() as forward, noting:
        out = sdpa(q, k, v, is_causal=causal)
    with count_communication() as backward:
        out.sum().backward()
    plain = [t.clone().requires_grad_() for t in whole]
    sdpa(*plain, is_causal=causal).sum().backward()
    for own, one in zip((q, k, v), plain, strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-4)
    return sum(memory.values()), (forward.collectives["all_to_all"], backward.collectives["all_to_all"])


def note_memory(memory, tensor):
    storage = (tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor).untyped_storage()
    memory[storage.data_ptr()] = storage.nbytes()
    return tensor


@pytest.mark.parametrize("causal", [False, True])
def test_large_keys_are_fetched_again_and_not_kept(causal):
    """From 1 MiB of keys and values on each rank keeps its shard alone; smaller ones are kept, in one exchange less."""
    for length, exchanges in ((1500, (1, 2)), (128, (1, 1))):
        results = run_distributed(kept_and_sent, 2, length, causal)
        for rows, (kept, sent) in zip((length - 9, 9), results, strict=True):
            assert sent == exchanges
            row = 2 * 4  # bytes of a number of both heads
            shard_alone = row * rows * (4 * 64 + 1)
            fetched = row * 2 * 64 * (rows if causal and rows > 9 else length)
            assert kept == shard_alone + (0 if length == 1500 else fetched)


@on_ranks(3)
def test_bytes_of_heads():
    """5 heads are cut (2, 2, 1). One exchange takes q, k and v there, one the result back."""
    sizes = {0: (5, 1, 3)}
    q, k, v = (shard(torch.randn(2, 5, 9, 4), shared_mesh(3), ROWS, sizes) for _ in range(3))
    with shardtensor.attention_method("heads"), count_communication() as counted:
        sdpa(q, k, v)
    rows, heads, width = (5, 1, 3), (2, 2, 1), 2 * 4 * 4
    rank = dist.get_rank()
    sent, collectives = counted.bytes_sent, dict(counted.collectives)
    there, back = 3 * rows[rank] * (5 - heads[rank]), heads[rank] * (9 - rows[rank])
    assert sent == width * (there + back)
    assert collectives == {"all_to_all": 2}


@on_ranks(2)
def test_local_kinds_send_nothing():
    """Nothing is sent where every rank has all keys, or where the batch or the heads are cut alike."""
    mesh = shared_mesh(2)
    rows, keys = shard(torch.randn(2, 4, 7, 4), mesh, ROWS, L, requires_grad=True), torch.randn(2, 4, 9, 4)
    heads = [shard(torch.randn(2, 4, 7, 4), mesh, [Shard(1)], {0: (1, 3)}, requires_grad=True) for _ in range(3)]
    with count_communication() as counted:
        sdpa(rows, keys, keys, is_causal=True).sum().backward()
        sdpa(*heads, torch.rand(7, 7) < 0.5).sum().backward()
    assert [counted.messages, dict(counted.collectives)] == [0, {}]


class Largest(TorchDispatchMode):
    """The largest local tensor that any operator makes, in elements, and the order of kernels and exchanges."""

    def __init__(self):
        super().__init__()
        self.elements, self.order = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, ShardTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if "alltoall" in name or "_attention" in name:
            self.order.append("send" if "alltoall" in name else "compute")
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor) and t.dtype != torch.uint8 and t.device.type != "meta":
                self.elements = max(self.elements, t.numel())
        return result


def check_memory(causal: bool) -> tuple[int, int, list[str]]:
    sizes = {0: (256,) * 4}
    tensors = [shard(torch.randn(1, 4, 1024, 8), shared_mesh(4), ROWS, sizes, requires_grad=True) for _ in range(3)]
    with shardtensor.attention_method("ring"):
        sdpa(*tensors, is_causal=causal)  # a device's kernels are looked for once
        with Largest() as forward:
            y = sdpa(*tensors, is_causal=causal)
        with Largest() as backward:
            y.sum().backward()
    return forward.elements, backward.elements, forward.order


@pytest.mark.on_device
def test_memory_and_overlap_of_the_ring():
    """No tensor is larger than one block, forward or backward; each block is on its way before the one is computed."""
    for forward, backward, order in run_distributed(check_memory, 4, False):
        assert max(forward, backward) <= 2 * 4 * 256 * 8  # keys and values
        assert order == ["send", "compute"] * 3 + ["compute"]


@pytest.mark.on_cpu("what is small enough to be fetched differs by device")
@on_ranks(4)
def test_choice_of_the_method():
    """Small keys are fetched. Many heads: heads. Few heads, or a cut mask without heads: the ring."""
    mesh = shared_mesh(4)
    counts = []
    for heads, length, mask in ((8, 512, False), (2, 1024, False), (8, 8, False), (8, 512, True)):
        q = shard(torch.randn(1, heads, length, 32), mesh, ROWS)
        options = {"attn_mask": shard(torch.zeros(length, length), mesh, ROWS)} if mask else {"is_causal": True}
        with count_communication() as counted:
            sdpa(q, q, q, **options)
        counts.append(counted.collectives["all_to_all"])
    assert counts == [2, 3, 1, 3]


@on_ranks(2)
def test_plans_are_kept():
    def step(method) -> None:
        q, k, v = (shard(data(1, 4, 9, 4), shared_mesh(2), ROWS, {0: (2, 7)}, requires_grad=True) for _ in range(3))
        with shardtensor.attention_method(method):
            sdpa(q, k, v, is_causal=True).sum().backward()

    for method in (*METHODS, "auto"):
        step(method)
        with mock.patch("shardtensor.ops.attention.sdpa.layout_of", side_effect=AssertionError("not kept")):
            for _ in range(3):
                step(method)


def exchanges_planned() -> int:
    q = shard(torch.randn(1, 2, 64, 4), shared_mesh(32), ROWS, requires_grad=True)
    with shardtensor.attention_method("ring"), mock.patch.object(ring, "Exchange", wraps=ring.Exchange) as made:
        sdpa(q, q, q).sum().backward()
    return made.call_count


def test_steps_that_are_alike_are_planned_once():
    """Forward all of them are; backward the first two, those with gradients on their way, and the last two."""
    assert simulate_ranks(exchanges_planned, 32) == [5] * 32


MANY = (3, 2, 5, 1, 1, 9, 2, 1, 4, 7, 1, 2)


def one_of_many() -> tuple[int, int]:
    q = shard(torch.randn(1, 2, sum(MANY), 4), shared_mesh(len(MANY)), ROWS, {0: MANY})
    with shardtensor.attention_method("ring"), count_communication() as counted:
        y = sdpa(q, q, q)
    return y.to_local().shape[2], counted.messages


def test_every_rank_of_many():
    """Each has its own rows of the result, and passes on all blocks but the one of its neighbour."""
    assert simulate_ranks(one_of_many, len(MANY)) == [(rows, len(MANY) - 1) for rows in MANY]


# -- entry points -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_entry_points():
    torch.manual_seed(0)
    whole = data(1, 2, 7, 4)
    x = shard(whole, shared_mesh(2), ROWS, L)
    expected = sdpa(whole, whole, whole)
    for entry in (
        F.scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
        lambda *t: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*t)[0],
    ):
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                y = entry(x, x, x)
                assert y.shard_sizes == L
                torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-10, atol=1e-12)
    # With torch functions disabled, as inside of composites, autograd's own formulas run over the shards.
    x = x.detach().requires_grad_()
    leaf = whole.clone().requires_grad_()
    with torch._C.DisableTorchFunctionSubclass():
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    grad = data(*whole.shape)
    y.backward(shard(grad, shared_mesh(2), ROWS, L))
    sdpa(leaf, leaf, leaf, is_causal=True).backward(grad)
    torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_composed_attention_of_devices_is_differentiated_twice(emulated):
    penalty = squared_gradient(lambda x: sdpa(x, x, x))
    with shardtensor.attention_method("fetch"):
        assert_matches_unsharded(penalty, data(2, 4, 8, 4), mesh_shape=2, placements=ROWS, shard_sizes={0: (5, 3)})


# -- errors ------------------------------------------------------------------------------------------------------------


TWICE = pytest.mark.on_cpu("devices compose the attention of float64, which can be differentiated twice")


def operand():
    return shard(data(2, 4, 8, 4), shared_mesh(2), ROWS, {0: (5, 3)}, requires_grad=True)


def on_one_rank(q):
    return shard(data(2, 4, 8, 4), q.device_mesh, ROWS, {0: (8, 0)}, requires_grad=True)


def unknown_method(q):
    with shardtensor.attention_method("quick"):
        pass


def mask_of_keys(q):
    return shard(data(2, 1, 1, 8), q.device_mesh, COLUMNS)


LONGER = causal_lower_right(8, 9)  # made outside of the mode that counts messages
ERRORS = {
    "features": (
        lambda q: sdpa(q, q, shard(data(2, 4, 8, 4), q.device_mesh, [Shard(3)])),
        UnsupportedSharding,
        "shards the features, which every score needs unsharded",
    ),
    "mask": (
        lambda q: sdpa(q, data(2, 4, 8, 4), data(2, 4, 8, 4), mask_of_keys(q)),
        UnsupportedSharding,
        "an operand would have to be gathered over mesh dim 0",
    ),
    "causal": (
        lambda q: sdpa(q, q, q, data(8, 8), is_causal=True),
        RuntimeError,
        "attn_mask should not be set when is_causal=True",
    ),
    "shape": (lambda q: sdpa(q, q, q, data(8, 7)), RuntimeError, "should be broadcastable"),
    "bias": (
        lambda q: sdpa(q, q, q, LONGER),
        ValueError,
        "a causal bias for (queries, keys) (8, 9), but there are (8, 8)",
    ),
    "dtype": (
        lambda q: sdpa(*[on_one_rank(q).to(torch.float8_e4m3fn)] * 3),
        UnsupportedSharding,
        "torch's attention does not compute in torch.float8_e4m3fn",
    ),
    "method": (unknown_method, ValueError, "choose 'auto', 'ring', 'heads' or 'fetch'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_on_every_rank(name):
    raises_alike(operand, name)


def differentiate_twice(method, sizes):
    """Torch's own function, which an empty shard cannot use, could be differentiated twice."""
    q = shard(data(2, 4, 8, 4), shared_mesh(2), ROWS, {0: sizes}, requires_grad=True)
    backends = SDPBackend.MATH if 0 in sizes else list(SDPBackend.__members__.values())
    with shardtensor.attention_method(method), sdpa_kernel(backends):
        y = sdpa(q, q, q)
    (grad,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    grad.sum().backward()


@pytest.mark.parametrize(
    ("method", "sizes"), [("ring", (5, 3)), pytest.param("fetch", (5, 3), marks=TWICE), ("fetch", (8, 0))]
)
def test_attention_is_not_differentiated_twice(method, sizes):
    for error in run_expecting_errors(differentiate_twice, 2, method, sizes):
        with pytest.raises(UnsupportedSharding, match="it cannot be differentiated twice"):
            raise error


def conflicting() -> None:
    mesh = shared_mesh((2, 2))
    q = shard(data(2, 4, 8, 4), mesh, [Shard(0), Shard(2)])
    sdpa(q, shard(data(2, 4, 8, 4), mesh, [Shard(2), Shard(0)]), q)


def test_conflicting_mesh_dims():
    for error in run_expecting_errors(conflicting, 4):
        assert isinstance(error, UnsupportedSharding)
        assert "two mesh dims would have to shard the same dim" in str(error)


def joins_heads(method):
    mesh = shared_mesh(2)
    inputs = [torch.randn(1, 3, 8, 4, dtype=torch.float64) for _ in range(3)]
    # As a projection and a view leave them: the heads of a row next to each other.
    inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    sharded = [shard(t, mesh, [Shard(2)], {0: (5, 3)}) for t in inputs]
    with shardtensor.attention_method(method), Copied() as copied:
        out = sdpa(*sharded)
        sent = copied.total
        joined = out.transpose(1, 2).contiguous().view(1, 8, 12)
    assert out.stride() == sdpa(*inputs).stride()
    assert copied.total == sent, "the kernel's result lies like that"
    expected = sdpa(*inputs).transpose(1, 2).reshape(1, 8, 12)
    torch.testing.assert_close(joined.full_tensor(), expected)
    block = sum(t.to_local().numel() for t in sharded[1:]) * inputs[0].itemsize
    return sent, block, out.to_local()[..., 0].numel()


@pytest.mark.on_cpu("devices compose the attention of float64, and its result lies in another order")
def test_heads_are_joined_without_a_copy():
    for sent, block, rows in run_distributed(joins_heads, 2, "ring"):
        assert sent <= block + rows, "keys and values are packed, and copied nowhere else"  # rows: a number of each
    run_distributed(joins_heads, 2, "fetch")
