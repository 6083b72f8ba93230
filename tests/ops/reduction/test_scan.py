"""Softmax, cumulative operators, positions of extremes and sorting against one device, also along sharded dims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

SHAPE = (4, 9, 5)
# (mesh shape, dims cut, sizes) of inputs of shape SHAPE
CUTS = [
    (2, (1,), {0: (6, 3)}),
    (2, (1,), {0: (0, 9)}),
    (2, (2,), {0: (5, 0)}),
    (2, (None,), {}),
    (3, (1,), {0: (4, 0, 5)}),
    (3, (0,), {0: (1, 1, 2)}),
    (3, (2,), {0: (2, 3, 0)}),
    ((2, 2), (1, 2), {0: (8, 1), 1: (0, 5)}),
    ((2, 2), (None, 1), {1: (3, 6)}),
]


NEW_TORCH = torch.__version__ >= (2, 13)


def placed(dims):
    return [Replicate() if d is None else Shard(d) for d in dims]


def world_of(mesh_shape):
    return mesh_shape if isinstance(mesh_shape, int) else 4


def check_all(cases, mesh_shape, dims, sizes, **options):
    """Compare every ``(name, function, tensor)``; the failures of all of them at once."""
    failures = []
    for name, function, x in cases:
        try:
            assert_matches_unsharded(
                function, x, mesh_shape=mesh_shape, placements=placed(dims), shard_sizes=sizes, **options
            )
        except AssertionError as error:
            failures.append(f"{name}: {error}")
        except Exception as error:
            raise RuntimeError(f"{name} on {dims}, {sizes}: {type(error).__name__}: {error}") from error
    assert not failures, "\n".join(failures)


def values():
    torch.manual_seed(0)
    return torch.randn(*SHAPE, dtype=torch.float64)


# -- softmax ------------------------------------------------------------------------------------------------------


def softmax_cases():
    x = values()
    masked = x.clone()
    masked[:, 2:] = float("-inf")  # whole shards hold nothing else
    large = 1000 * x
    cases = []
    for dim in (0, 1, -1):
        for label, t in (("", x), (", large", large), (", masked", masked)):
            cases += [
                (f"softmax {dim}{label}", lambda x, d=dim: x.softmax(d), t),
                (f"log_softmax {dim}{label}", lambda x, d=dim: F.log_softmax(x, d), t),
                (f"logsumexp {dim}{label}", lambda x, d=dim: x.logsumexp(d), t),
            ]
        cases += [
            (f"softmin {dim}", lambda x, d=dim: F.softmin(x, dim=d), x),
            (f"logsumexp {dim}, keepdim", lambda x, d=dim: torch.logsumexp(x, d, keepdim=True), x),
            (f"module {dim}", torch.nn.Softmax(dim), x),
        ]
    cases += [
        ("logsumexp of two dims", lambda x: x.logsumexp((0, 1)), x),
        ("logsumexp of all dims", lambda x: x.logsumexp((0, 1, 2)), x),
        ("logsumexp of complex", lambda x: x.logsumexp(1), torch.complex(x, x.flip(0))),
        ("square of softmax", lambda x: x.softmax(1).square().sum(), x),
    ]
    return cases


def check_softmax(mesh_shape, dims, sizes):
    check_all(softmax_cases(), mesh_shape, dims, sizes)
    # Rows without a finite element: NaN where torch has it.
    nothing = values()
    nothing[1] = float("-inf")
    nothing[2, :, 1] = float("inf")
    nothing[3, 4, 2] = float("nan")
    cases = [(f.__name__, lambda x, f=f: f(x, 1), nothing) for f in (torch.softmax, torch.log_softmax, torch.logsumexp)]
    check_all(cases, mesh_shape, dims, sizes)


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
def test_softmax(mesh_shape, dims, sizes):
    run_distributed(check_softmax, world_of(mesh_shape), mesh_shape, dims, sizes)


def check_softmax_details():
    mesh = shared_mesh(2)
    x = values()
    # Half precision: the sum of 4000 equal weights needs more digits than the numbers have.
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.zeros(4000, 2, dtype=dtype)
        for function in (torch.softmax, torch.log_softmax):
            sharded = function(shard(half, mesh, [Shard(0)], {0: (3000, 1000)}), 0)
            assert sharded.dtype == dtype
            torch.testing.assert_close(sharded.full_tensor(), function(half, 0), rtol=1e-3, atol=0)
        total = shard(half, mesh, [Shard(0)], {0: (3000, 1000)}).logsumexp(0)
        torch.testing.assert_close(total.full_tensor(), half.logsumexp(0))
    wide = shard(half, mesh, [Shard(0)], {0: (0, 4000)}).softmax(0, dtype=torch.float64)
    assert wide.dtype == torch.float64 and wide.shard_sizes == {0: (0, 4000)}
    # A Partial is reduced first.
    assert_matches_unsharded(lambda x: x.softmax(1), x, mesh_shape=2, placements=[Partial()])
    # A plain gradient counts as replicated.
    for function in (torch.softmax, torch.log_softmax):
        leaf, whole = shard(x, mesh, [Shard(1)], {0: (2, 7)}, requires_grad=True), x.clone().requires_grad_()
        function(leaf, 1).backward(x.cos())
        function(whole, 1).backward(x.cos())
        torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad)
        # Once more: torch's formulas for the second derivative.
        grads = []
        for t in (leaf, whole):
            (grad,) = torch.autograd.grad(function(t, 1).square().sum(), t, create_graph=True)
            (second,) = torch.autograd.grad(grad.square().sum(), t)
            grads.append(second)
        torch.testing.assert_close(grads[0].full_tensor(), grads[1])
    with torch.inference_mode():
        sharded = shard(x, mesh, [Shard(1)], {0: (2, 7)})
        torch.testing.assert_close(F.softmax(sharded, 1).full_tensor(), x.softmax(1))


def test_softmax_in_half_precision_twice_and_without_grad():
    run_distributed(check_softmax_details, 2)


# -- cumulative ---------------------------------------------------------------------------------------------------


def cumulative_cases():
    x = values()
    one_zero, zeros = x.clone(), x.clone()
    one_zero[:, 4, 1:3] = 0
    zeros[0, 1, 0] = zeros[0, 7, 0] = 0
    zeros[1] = 0
    zeros[2, 5] = 0
    cases = []
    for dim in (0, 1, -1):
        cases += [
            (f"cumsum {dim}", lambda x, d=dim: x.cumsum(d), x),
            (f"cumprod {dim}", lambda x, d=dim: torch.cumprod(x, d), x),
            (f"cumprod {dim}, one zero in a row", lambda x, d=dim: x.cumprod(d), one_zero),
            (f"cumprod {dim}, zeros", lambda x, d=dim: x.cumprod(dim=d), zeros),
            (f"logcumsumexp {dim}", lambda x, d=dim: x.logcumsumexp(d), x),
        ]
    started = x.clone()
    started[:, :6] = float("-inf")
    cases += [
        ("logcumsumexp after -inf", lambda x: torch.logcumsumexp(x, 1), started),
        ("cumsum of integers", lambda x: x.cumsum(1), (x * 9).int()),
        ("cumsum of booleans", lambda x: x.cumsum(1), x > 0),
        ("cumsum, dtype", lambda x: x.cumsum(1, dtype=torch.float64), x.float()),
        ("cumprod, dtype", lambda x: x.cumprod(1, dtype=torch.float64), x.float()),
        ("cumprod of complex", lambda x: x.cumprod(1), torch.complex(x, x.flip(0))),
        ("cumprod of complex with zeros", lambda x: x.cumprod(1), torch.complex(zeros, zeros)),
    ]
    return cases


def check_cumulative(mesh_shape, dims, sizes):
    check_all(cumulative_cases(), mesh_shape, dims, sizes)
    with torch.no_grad():
        check_all(cumulative_cases(), mesh_shape, dims, sizes, check_grads=False)


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
def test_cumulative(mesh_shape, dims, sizes):
    run_distributed(check_cumulative, world_of(mesh_shape), mesh_shape, dims, sizes)


def check_cumulative_details():
    mesh = shared_mesh(2)
    half = torch.full((4000, 1), 0.5, dtype=torch.float16)
    total = shard(half, mesh, [Shard(0)], {0: (3000, 1000)}).cumsum(0)
    torch.testing.assert_close(total.full_tensor(), half.float().cumsum(0).half())
    assert_matches_unsharded(lambda x: x.cumsum(0), values(), mesh_shape=2, placements=[Partial()])
    leaf, whole = shard(values(), mesh, [Shard(1)], {0: (2, 7)}, requires_grad=True), values().requires_grad_()
    second = []
    for t in (leaf, whole):
        (grad,) = torch.autograd.grad(t.cumsum(1).square().sum(), t, create_graph=True)
        second += torch.autograd.grad(grad.square().sum(), t)
    torch.testing.assert_close(second[0].full_tensor(), second[1])
    # A gradient that is cut otherwise.
    other = shard(values(), mesh, [Shard(0)], {0: (1, 3)})
    for function in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
        leaf.grad = whole.grad = None
        function(leaf, 1).backward(other)
        function(whole, 1).backward(values())
        torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad)


def test_cumulative_in_half_precision_and_twice():
    run_distributed(check_cumulative_details, 2)


# -- where the extremes are -----------------------------------------------------------------------------------------


def extreme_cases():
    x = values()
    ties = (x * 2).round()  # values that stand on several ranks
    unknown = x.clone()
    unknown[1, 2, 0] = unknown[1, 7, 0] = float("nan")
    unknown[2] = float("-inf")
    unknown[3] = float("inf")
    integers = (x * 3).round().int()
    cases = []
    for label, t in (("", x), (", ties", ties), (", NaN", unknown), (", integers", integers)):
        for dim in (0, 1, -1):
            cases += [
                (f"argmax {dim}{label}", lambda x, d=dim: x.argmax(d), t),
                (f"argmin {dim}, keepdim{label}", lambda x, d=dim: torch.argmin(x, d, keepdim=True), t),
                (f"max {dim}{label}", lambda x, d=dim: tuple(x.max(d)), t),
                (f"min {dim}, keepdim{label}", lambda x, d=dim: tuple(torch.min(x, dim=d, keepdim=True)), t),
                (f"cummax {dim}{label}", lambda x, d=dim: tuple(x.cummax(d)), t),
                (f"cummin {dim}{label}", lambda x, d=dim: tuple(torch.cummin(x, d)), t),
            ]
        cases += [
            (f"argmax{label}", lambda x: x.argmax(), t),
            (f"argmin{label}", lambda x: torch.argmin(x), t),
            (f"argmax, keepdim{label}", lambda x: torch.argmax(x, keepdim=True), t),
            (f"max of all{label}", lambda x: x.max(), t),
            (f"min of all{label}", lambda x: torch.min(x), t),
            (f"aminmax of all{label}", lambda x: tuple(x.detach().aminmax()), t),
            (f"aminmax{label}", lambda x: tuple(torch.aminmax(x.detach(), dim=1)), t),
        ]
    cases += [
        # torch has this derivative since 2.13.
        *([("aminmax, gradient", lambda x: tuple(x.aminmax(dim=1, keepdim=True)), x)] if NEW_TORCH else []),
        ("max of booleans", lambda x: tuple((x > 0).max(1)), x),
        ("values by name", lambda x: x.max(1).values * 2, x),
        ("of two tensors", lambda x: torch.max(x, x.sin()), x),
    ]
    if torch.__version__ >= (2, 13):  # before, torch had no derivative of it
        cases.append(("aminmax, gradient", lambda x: tuple(x.aminmax(dim=1, keepdim=True)), x))
    return cases


def check_extremes(mesh_shape, dims, sizes):
    check_all(extreme_cases(), mesh_shape, dims, sizes)
    with torch.inference_mode():
        check_all(extreme_cases(), mesh_shape, dims, sizes, check_grads=False)


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
def test_extremes(mesh_shape, dims, sizes):
    run_distributed(check_extremes, world_of(mesh_shape), mesh_shape, dims, sizes)


# -- whole rows -------------------------------------------------------------------------------------------------------


def row_cases():
    x = values()
    ties = (x * 2).round()
    cases = []
    for dim in (0, 1, -1):
        cases += [
            (f"sort {dim}", lambda x, d=dim: tuple(x.sort(d)), x),
            (f"stable sort {dim}", lambda x, d=dim: tuple(torch.sort(x, dim=d, descending=True, stable=True)), ties),
            (f"stable sort by keywords {dim}", lambda x, d=dim: tuple(torch.sort(x, stable=True, dim=d)), ties),
            (f"argsort {dim}", lambda x, d=dim: x.argsort(d, descending=True), x),
            (f"topk {dim}", lambda x, d=dim: tuple(x.topk(3, d)), x),
            (f"smallest {dim}", lambda x, d=dim: tuple(torch.topk(x, 2, dim=d, largest=False)), x),
            (f"kthvalue {dim}", lambda x, d=dim: tuple(x.kthvalue(2, d)), x),
            (f"median {dim}", lambda x, d=dim: tuple(x.median(d)), x),
            (f"nanmedian {dim}", lambda x, d=dim: tuple(torch.nanmedian(x, d, keepdim=True)), x),
            (f"mode {dim}", lambda x, d=dim: tuple(torch.mode(x, d)), x),
            (f"sort of integers {dim}", lambda x, d=dim: x.sort(d).values, (9 * x).int()),
        ]
    return [*cases, ("msort", lambda x: torch.msort(x), x)]


def check_rows(mesh_shape, dims, sizes):
    check_all(row_cases(), mesh_shape, dims, sizes)
    with torch.no_grad():
        check_all(row_cases(), mesh_shape, dims, sizes, check_grads=False)
    x = shard(values(), shared_mesh(mesh_shape), placed(dims), sizes)
    for result in (*x.sort(1), x.argsort(1)):  # back where the input lies
        assert result.placements == x.placements and result.shard_sizes == x.shard_sizes


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
def test_operators_on_whole_rows(mesh_shape, dims, sizes):
    run_distributed(check_rows, world_of(mesh_shape), mesh_shape, dims, sizes)


# -- what travels, and errors ---------------------------------------------------------------------------------------


def communication():
    """``{name: forward and backward as (messages, their bytes, collectives, their bytes)}``"""
    mesh = shared_mesh(2)
    counts = {}
    for name, function in {
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "cumsum": lambda x: x.cumsum(1),
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "cumprod": lambda x: x.cumprod(1),
        "max": lambda x: x.max(1).values,
        "argmax": lambda x: x.argmax(1),
        "cummax": lambda x: x.cummax(1).values,
        "aminmax": lambda x: x.detach().aminmax(dim=1).max,
        "sort": lambda x: x.sort(1).values,
        "topk": lambda x: x.topk(2, 1).values,
        "softmax of whole rows": lambda x: x.softmax(0),
        "max of whole rows": lambda x: x.max(0).values,
        "sort of whole rows": lambda x: x.sort(0).values,
    }.items():
        x = shard(values().float(), mesh, [Shard(1)], {0: (6, 3)}, requires_grad=True)
        with count_communication() as forward:
            y = function(x)
        if y.requires_grad:
            grad = shard(torch.ones(y.shape), mesh, y.placements, y.shard_sizes)
        with count_communication() as backward:
            if y.requires_grad:
                torch.autograd.grad(y, x, grad)
        counts[name] = [
            (c.messages, c.bytes_sent, dict(c.collectives), c.collective_bytes) for c in (forward, backward)
        ]
    return counts


def test_what_travels():
    rows = 4 * 5  # of 9 elements, 6 on rank 0 and 3 on rank 1
    none = (0, 0, {}, 0)

    def reduced(n, size=4):
        return (0, 0, {"all_reduce": n}, n * size * rows)

    def gathered(n, size=4):
        return (0, 0, {"all_gather": n}, n * size * rows)

    for rank, counts in enumerate(run_distributed(communication, 2)):
        expected = {
            "softmax": [reduced(2), reduced(1)],
            "log_softmax": [reduced(2), reduced(1)],
            "logsumexp": [reduced(2), none],
            "cumsum": [gathered(1), gathered(1)],
            "logcumsumexp": [gathered(1), gathered(2)],
            # Backward: how many zeros come before (int64), and three scans.
            "cumprod": [gathered(1), (0, 0, {"all_gather": 4}, (8 + 3 * 4) * rows)],
            "max": [(0, 0, {"all_reduce": 2}, (4 + 8) * rows), none],
            "argmax": [(0, 0, {"all_reduce": 2}, (4 + 8) * rows), none],
            "cummax": [(0, 0, {"all_gather": 2}, (4 + 8) * rows)] * 2,
            "aminmax": [none, none],
            "softmax of whole rows": [none, none],
            "max of whole rows": [none, none],
            "sort of whole rows": [none, none],
        }
        for name, count in expected.items():
            assert counts[name] == count, name
        # Half of what the rank has goes to the other (2 of the 4 rows of 5, or 3 of 5 columns), and back.
        n = (6, 3)[rank]
        for name in ("sort", "topk"):
            (messages, sent, collectives, other), (back, _, back_collectives, _) = counts[name]
            assert other == 0 and collectives["all_to_all"] == (3 if name == "sort" else 1) == messages
            assert back == back_collectives["all_to_all"] == (2 if name == "sort" else 1)
        assert counts["topk"][0][1] == 4 * 4 * n * (2 if rank == 0 else 3)


def fail(case):
    mesh = shared_mesh(2)
    x = shard(torch.rand(8, 1), mesh, [Shard(0)], {0: (8, 0)}, requires_grad=True)
    if case == "mode":
        x.mode(0)
    elif case == "dim":
        x.softmax(2)
    elif case == "k":
        shard(torch.rand(8, 8), mesh, [Shard(0)], {0: (8, 0)}).topk(9, 0)
    elif case == "max of complex":
        shard(torch.rand(8, 1) * 1j, mesh, [Shard(0)], {0: (8, 0)}).max(0)
    elif case == "argmax of complex":
        shard(torch.rand(8, 1) * 1j, mesh, [Shard(0)], {0: (8, 0)}).argmax(0)
    elif case == "cummax of complex":
        shard(torch.rand(8, 1) * 1j, mesh, [Shard(0)], {0: (8, 0)}).cummax(0)
    elif case == "softmax of integers":
        shard(torch.ones(8, 1, dtype=torch.int64), mesh, [Shard(0)], {0: (8, 0)}).softmax(0)
    elif case == "logcumsumexp of integers":
        shard(torch.ones(8, 1, dtype=torch.int64), mesh, [Shard(0)], {0: (8, 0)}).logcumsumexp(0)


WHOLE = r"{}.*: it needs tensor dim 0 whole, which is sharded on mesh dim 0, and no other dim is free.*\[8, 0\].*Remedy"
ERRORS = [
    ("mode", UnsupportedSharding, WHOLE.format("mode")),
    ("dim", IndexError, "Dimension out of range"),
    ("k", RuntimeError, "k not in range|k out of range"),
    ("max of complex", (RuntimeError, TypeError, NotImplementedError), "omplex"),
    ("argmax of complex", (RuntimeError, TypeError, NotImplementedError), "omplex"),
    ("cummax of complex", (RuntimeError, TypeError, NotImplementedError), "omplex"),
    ("softmax of integers", (RuntimeError, NotImplementedError), "[Ii]nt|Long"),
    ("logcumsumexp of integers", RuntimeError, "[Ii]nt|Long"),
]


@pytest.mark.parametrize(("case", "kind", "text"), ERRORS)
def test_errors_are_the_same_on_every_rank(case, kind, text):
    errors = run_expecting_errors(fail, 2, case)
    assert len(errors) == 2
    for error in errors:
        with pytest.raises(kind, match=text):
            raise error
