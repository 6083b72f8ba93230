"""Reductions, norms and products of vectors against one device: values, gradients, what travels, errors."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from halves import half_of, in_halves
from on_ranks import on_ranks
from row_cases import CUTS, check_all, placed, values
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    shard,
    shared_mesh,
)

INF = float("inf")


def with_zeros():
    x = values()
    x[0, 1] = 0
    x[1, :, 2] = 0
    x[2, 3:6, 1] = 0
    x[3, 7, 3] = 0
    return x


def with_nan():
    x = values()
    x[0, 2, 1] = x[1, :, 0] = float("nan")
    return x


def sums():
    """What torch's samples do not have: dtypes, zeros, ties, NaN, more correction than elements."""
    x, zeros, nan = values(), with_zeros(), with_nan()
    ties = (2 * x).round()
    for name in ("sum", "mean", "prod"):
        yield f"{name} in float64", lambda x, f=name: getattr(x, f)(1, dtype=torch.float64), x.float()
        yield f"{name} of integers", lambda x, f=name: getattr(x, f)(1, dtype=torch.float64), (9 * x).int()
    yield "sum of booleans", lambda x: x.sum(1), x > 0
    for dim in (None, 1, (0, 2)):
        yield f"sum {dim}", lambda x, d=dim: x.sum(d, keepdim=True), x
        yield f"nansum {dim}", lambda x, d=dim: x.nansum(d), nan
        yield f"nanmean {dim}", lambda x, d=dim: torch.nanmean(x, d), nan
        yield f"count_nonzero {dim}", lambda x, d=dim: x.count_nonzero(d), zeros
    only = x.clone()
    only[2, 5, 3] = 0
    for label, t in (("", x), (", zeros", zeros), (", one zero", only), (", complex", torch.complex(zeros, zeros))):
        yield f"prod{label}", lambda x: x.prod(), t
        yield f"prod 1{label}", lambda x: torch.prod(x, dim=1, keepdim=True), t
    for label, t in (("", x), (", ties", ties), (", NaN", nan)):
        yield f"amax 1{label}", lambda x: x.amax(1), t
        yield f"amin{label}", lambda x: torch.amin(x, (0, 1), keepdim=True), t
        yield f"max{label}", lambda x: x.max(), t
    for dtype in (torch.bool, torch.uint8, torch.bfloat16):
        yield f"any {dtype}", lambda x: torch.any(x, (0, 1)), zeros.to(dtype)
        yield f"all {dtype}", lambda x: torch.all(x, 1, keepdim=True), zeros.to(dtype)
    yield "histc", lambda x: x.detach().histc(5, -1, 1), x


def moments():
    x = values()
    for correction in (0, 1, 9, 10):  # up to more than there are elements
        for dim in (1, None, (1, 2)):
            for name in ("std", "var_mean"):
                function = getattr(torch, name)
                yield f"{name} {dim}, {correction}", lambda x, f=function, d=dim, c=correction: f(x, d, correction=c), x
    yield "std of equal numbers", lambda x: x.std(1), torch.ones_like(x)
    yield "var far from zero", lambda x: x.var(1), x + 1e4
    yield "var of complex", lambda x: x.var(1), torch.complex(x, x.flip(1))


@on_ranks(2)
def test_warnings_of_degrees_of_freedom():
    """Torch warns of too few elements where there are too few, whether a sharded dim is reduced or not."""
    mesh = shared_mesh(2)
    x = values(4, 11, 1, 3)  # a shape of its own: a plan that exists already says nothing
    for name in ("var", "std", "var_mean", "std_mean"):
        for dim in (None, 0, 1, 2, (1, 3)):
            for correction in (0, 1, 4, 10.5, 33, 132):
                seen = []
                for t in (x, shard(x, mesh, [Shard(1)], {0: (8, 3)})):
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        getattr(torch, name)(t, dim, correction=correction)
                    seen.append([str(w.message).partition("(")[0] for w in caught])
                assert seen[0] == seen[1], (name, dim, correction, seen)


def norms():
    x, zeros, y = values(), with_zeros(), values().flip(0).cos()
    for p in (0, 1, 2, INF, -INF, 3, 0.5, -2):
        for dim in (None, 1, (0, 1)):
            yield f"vector_norm {p} {dim}", lambda x, p=p, d=dim: torch.linalg.vector_norm(x, p, d), x
        yield f"vector_norm {p}, zeros", lambda x, p=p: torch.linalg.vector_norm(x, p, 1, keepdim=True), zeros
        yield f"normalize {p}", lambda x, p=p: F.normalize(x, p, 1), x
        if p:  # torch has no gradient of it for 0
            yield f"dist {p}", lambda x, p=p: torch.dist(x, 0.5 * x + 1, p), x
        if p > 0:
            yield f"renorm {p}", lambda x, p=p: torch.renorm(x, p, 1, 1.5), x
            yield f"pairwise_distance {p}", lambda x, y, p=p: F.pairwise_distance(x.mT, y.mT, p=p, keepdim=True), x, y
    yield "norm in float64", lambda x: torch.linalg.vector_norm(x, 2, 1, dtype=torch.float64), x.float()
    yield "norm of complex", lambda x: torch.linalg.vector_norm(x, 2, 1), torch.complex(x, zeros)
    yield "cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=1), x, y


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes", "half"), in_halves(CUTS))
@pytest.mark.parametrize("cases", [sums, moments, norms])
@on_ranks("mesh_shape")
def test_reductions(cases, mesh_shape, dims, sizes, half):
    warnings.simplefilter("ignore")  # var of too few elements
    check_all(half_of(cases(), half), mesh_shape, dims, sizes)


# -- vectors and matrices -----------------------------------------------------------------------------------------


def vectors():
    a, b = values(9), values(9).exp()
    c, d = torch.complex(a, b), torch.complex(b, a)
    whole = torch.arange(9.0, dtype=torch.float64)
    for name, x, y in (("", a, b), (" of complex", c, d)):
        yield f"dot{name}", lambda x, y: x.dot(y), x, y
        yield f"vdot{name}", lambda x, y: torch.vdot(x, y), x, y
        yield f"inner{name}", lambda x, y: torch.inner(x, y), x, y
        yield f"linalg.vecdot{name}", lambda x, y: torch.linalg.vecdot(x, y), x, y
    yield "dot with a plain vector", lambda x: x.dot(whole), a
    yield "plain vector with it", lambda x: torch.vdot(whole, x), a


@on_ranks(2)
def test_second_derivatives_along_a_dim_that_is_not_sharded():
    """Where no rank has a part of another's row, what is differentiable twice on one device is here, too."""
    x = values()
    x[0, 0], x[1, :2] = 0, 0
    for function in (
        lambda x: x.prod(2),
        lambda x: x.cumprod(0),
        lambda x: x.cumsum(2),
        lambda x: x.logcumsumexp(2),
    ):

        def twice(x, function=function):
            return torch.autograd.grad(function(x).square().sum(), x, create_graph=True)[0]

        assert_matches_unsharded(twice, x, mesh_shape=2, placements=[Shard(1)], shard_sizes={0: (9, 0)})


@on_ranks(2)
def test_products_of_vectors():
    for sizes in ({0: (7, 2)}, {0: (0, 9)}):
        check_all(vectors(), 2, (0,), sizes)
    a, b = values(9), values(9).exp()
    mixed = [
        ([Shard(0)], None, {0: (7, 2)}, None),  # plain, with a gradient that is plain and complete
        ([Shard(0)], [Shard(0)], {0: (7, 2)}, {0: (1, 8)}),
        ([Replicate()], [Shard(0)], None, {0: (1, 8)}),
        ([Partial()], [Shard(0)], None, {0: (1, 8)}),
    ]
    for p, q, s, t in mixed:
        assert_matches_unsharded(torch.dot, a, b, mesh_shape=2, placements=[p, q], shard_sizes=[s, t])
    assert shard(a, shared_mesh(2), [Shard(0)], {0: (7, 2)}).dot(b).placements == (Partial(),)


@on_ranks(4)
def test_trace():
    # Before 2.13 torch's own gradient of a tall matrix's trace was wrong.
    for shape in ((9, 9), (9, 4), (3, 9)) if torch.__version__ >= (2, 13) else ((9, 9), (3, 9)):
        for dims, mesh_shape, sizes in (
            ((0,), 4, {0: (1, 0, 0, shape[0] - 1)}),
            ((1,), 4, {0: (0, 2, shape[1] - 2, 0)}),
            ((0, 1), (2, 2), {0: (1, shape[0] - 1), 1: (shape[1] - 1, 1)}),
        ):
            assert_matches_unsharded(
                torch.trace, values(*shape), mesh_shape=mesh_shape, placements=placed(dims), shard_sizes=sizes
            )


# -- Partials, half precision, clipping ---------------------------------------------------------------------------


@on_ranks(2)
def test_partials():
    """A reduction that is not linear needs the sum of the contributions first."""
    x = with_zeros()
    for function in (
        lambda x: x.sum(1),
        lambda x: x.mean(),
        lambda x: x.nansum(1),
        lambda x: x.count_nonzero(1),
        lambda x: x.amax(1),
        lambda x: x.prod(1),
        lambda x: x.var(1),
        lambda x: torch.linalg.vector_norm(x, 2, 1),
        lambda x: x.histc(5, -1, 1) if not x.requires_grad else x.sum(),
        lambda x: (x > 0).any(1),
    ):
        assert_matches_unsharded(function, x, mesh_shape=2, placements=[Partial()])


@on_ranks(2)
def test_half_precision():
    mesh = shared_mesh(2)
    for dtype in (torch.float16, torch.bfloat16):
        # The squares sum to 400 000 and more, which float16 does not hold.
        x = torch.linspace(10, 30, 1000).to(dtype)
        for function in (torch.linalg.vector_norm, torch.var, torch.std, torch.mean, torch.amax):
            sharded = function(shard(x, mesh, [Shard(0)], {0: (900, 100)}))
            assert sharded.dtype == dtype
            torch.testing.assert_close(sharded.full_tensor(), function(x), rtol=1e-3, atol=0)


@on_ranks(2)
def test_variance_that_overflows():
    """float16 holds the standard deviation, but not the variance."""
    x = torch.tensor([-400.0, 300.0, 500.0, -350.0]).half()
    sharded = shard(x, shared_mesh(2), [Shard(0)], {0: (3, 1)})
    for function in (torch.std, lambda x: torch.std_mean(x, 0)[0]):
        assert function(sharded).full_tensor() == function(x) < float("inf")
    assert torch.var(sharded).full_tensor() == torch.var(x) == float("inf")


@on_ranks(2)
def test_autocast():
    mesh = shared_mesh(2)
    x = values().bfloat16()
    for function in (torch.sum, torch.mean, torch.prod, lambda x: x.cumsum(1), lambda x: x.cumprod(1)):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            leaf = shard(x, mesh, [Shard(1)], {0: (6, 3)}, requires_grad=True)
            result = function(leaf)
            assert result.dtype == function(x).dtype
        result.sum().backward()
        assert leaf.grad.dtype == torch.bfloat16


@on_ranks(2)
def test_extremes_keep_nan():
    mesh = shared_mesh(2)
    rows = torch.tensor([[1, float("nan"), -INF, -3.0, 0], [float("nan"), 2, -INF, -2, INF]])
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = rows.to(dtype)
        for function in (torch.amax, torch.amin):
            sharded = function(shard(x, mesh, [Shard(0)], {0: (1, 1)}), 0).full_tensor()
            torch.testing.assert_close(sharded, function(x, 0), rtol=0, atol=0, equal_nan=True)


@on_ranks(2)
def test_clip_grad_norm():
    mesh = shared_mesh(2)
    for p in (2.0, 1.0, INF):
        norms, clipped = [], []
        for sharded in (False, True):
            made = []
            for n in (0, 1):
                t = values() + n
                parameter = shard(t, mesh, [Shard(1 + n)], {0: (2, (9, 5)[n] - 2)}) if sharded else t
                parameter.requires_grad_().square().sum().backward()
                made.append(parameter)
            norms.append(torch.nn.utils.clip_grad_norm_(made, 0.5, p))
            clipped.append([t.grad for t in made])
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        for ours, theirs in zip(*reversed(clipped)):
            torch.testing.assert_close(ours.full_tensor(), theirs)
            assert ours.placements != (Replicate(),)


# -- what travels, and errors -------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_travels():
    mesh = shared_mesh(2)
    counts = {}
    for name, function in {
        "sum": lambda x: x.sum(1),
        "mean": lambda x: x.mean(1),
        "prod": lambda x: x.prod(1),
        "amax": lambda x: x.amax(1),
        "norm": lambda x: x.norm(2, 1),
        "var": lambda x: x.var(1),
        "nansum": lambda x: x.nansum(1),
        "count_nonzero": lambda x: x.detach().count_nonzero(1),
        "normalize": lambda x: F.normalize(x, 2, 1),
    }.items():
        x = shard(values().float(), mesh, [Shard(1)], {0: (6, 3)}, requires_grad=True)
        with count_communication() as forward:
            y = function(x)
        if y.requires_grad:
            grad = shard(torch.ones(y.shape), mesh, y._spec.for_gradient().placements, y.shard_sizes)
        with count_communication() as backward:
            if y.requires_grad:
                torch.autograd.grad(y, x, grad)
        counts[name] = [(c.messages, dict(c.collectives), c.collective_bytes) for c in (forward, backward)]
    rows = 4 * 5 * 4  # bytes of the result

    def reduced(n, size=rows):
        return (0, {"all_reduce": n}, n * size) if n else (0, {}, 0)

    assert counts == {
        "sum": [reduced(0), reduced(0)],  # the result stays a Partial
        "mean": [reduced(0), reduced(0)],
        "prod": [reduced(0), (0, {"all_reduce": 2}, 3 * rows)],  # the other factors, and how many zeros (int64)
        "amax": [reduced(0), (0, {"all_reduce": 2}, 3 * rows)],  # the extreme, and how often it stands there
        "norm": [reduced(1), reduced(0)],
        "var": [reduced(2), reduced(1)],
        "nansum": [reduced(0), reduced(0)],
        "count_nonzero": [reduced(0), reduced(0)],
        "normalize": [reduced(1), reduced(1)],
    }


def operand():
    return shard(torch.rand(8, 3), shared_mesh(2), [Shard(0)], {0: (8, 0)})


ERRORS = {
    "dim": (lambda x: x.sum(2), IndexError, "Dimension out of range"),
    "dims twice": (lambda x: x.mean((0, -2)), RuntimeError, "multiple times|duplicate value"),
    "mean of integers": (lambda x: x.long().mean(0), RuntimeError, "[Ii]nput dtype"),
    "amax of complex": (lambda x: (x * 1j).amax(0), (RuntimeError, NotImplementedError), "omplex"),
    "norm of integers": (lambda x: torch.linalg.vector_norm(x.long()), RuntimeError, "floating point or complex"),
    "dot of booleans": (lambda x: (x[:, 0] > 0).dot(x[:, 0] > 0), (RuntimeError, NotImplementedError), "Bool"),
    "lengths": (lambda x: x[:, 0].dot(torch.rand(7)), RuntimeError, "same number of elements|inconsistent tensor size"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_same_on_every_rank(name):
    raises_alike(operand, name)
