"""A single matrix that is sharded: gathered where it is small, by its stack where it is tall, or refused."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from on_ranks import on_ranks
from torch import linalg
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.ops.common import alignment
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

ROWS, WHOLE = [Shard(0)], [Replicate()]


def matrix(*shape, dtype=torch.float64):
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype)


# Signs and all: as on one device.
OF_TALL = {
    "qr": linalg.qr,
    "qr signs": lambda x: tuple(linalg.qr(x.detach())),
    "qr r": lambda x: linalg.qr(x.detach(), mode="r")[1],
    "svd": lambda x: _gauge_invariant(linalg.svd(x, full_matrices=False)),
    "torch.svd": lambda x: _gauge_invariant(torch.svd(x)[:2]),
    "svd signs": lambda x: tuple(linalg.svd(x.detach(), full_matrices=False)),
    "svdvals": linalg.svdvals,
    "pinv": linalg.pinv,
    "pinv atol": lambda x: linalg.pinv(x, atol=0.5, rtol=0.1),
    "pinverse": torch.pinverse,
    "nuc": lambda x: linalg.matrix_norm(x, "nuc"),
    "norm 2": lambda x: linalg.norm(x, 2),
    "norm -2": lambda x: linalg.matrix_norm(x, -2, keepdim=True),
    "rank": lambda x: linalg.matrix_rank(x.detach()).double(),
    "cond": linalg.cond,
}
if torch.__version__ < (2, 14):  # which has it no longer
    OF_TALL["torch.qr"] = torch.qr


def _gauge_invariant(factors):
    """A function of singular vectors whose gradient torch has."""
    u, s, *vh = factors
    return (u.abs().square(), s, *(v.abs().square() for v in vh))


def check_tall(names, ranks, sizes, columns, dtype):
    for name in names:
        x = matrix(sum(sizes), columns, dtype=dtype)
        try:
            assert_matches_unsharded(
                OF_TALL[name], x, mesh_shape=ranks, placements=ROWS, shard_sizes={0: sizes}
            )
        except Exception as error:
            raise AssertionError(f"{name} of {sizes} x {columns}, {dtype}") from error


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [
        ((11, 6), 3),
        pytest.param(*((20, 0), 3), marks=pytest.mark.slow),
        ((0, 17), 3),
        ((20, 1), 4),
        pytest.param(*((9, 9), 1), marks=pytest.mark.slow),
        pytest.param(*((7, 4), 5), marks=pytest.mark.slow),
        pytest.param(*((8, 7, 9), 3), marks=pytest.mark.slow),
        ((1, 2, 15), 4),
        pytest.param(*((12, 0, 2), 3), marks=pytest.mark.slow),
        ((1, 13, 7), 2),
        pytest.param(*((6, 0, 5), 6), marks=pytest.mark.slow),
    ],
)
def test_tall_matrices(sizes, columns):
    run_distributed(check_tall, len(sizes), list(OF_TALL), len(sizes), sizes, columns, torch.float64)


def test_complex_and_single_precision():
    run_distributed(check_tall, 2, list(OF_TALL), 2, (5, 12), 3, torch.complex128)
    run_distributed(check_tall, 3, ["qr", "svd", "svdvals", "pinv"], 3, (5, 12, 1), 3, torch.float32)


def check_least_squares(sizes, columns):
    ranks, m = len(sizes), sum(sizes)
    x = matrix(m, columns)
    for b, places in ((matrix(m, 2), ROWS), (matrix(m), ROWS), (matrix(m, 5), [Shard(1)]), (matrix(m, 2), None)):
        given = {0: sizes} if places == ROWS else None
        options = {"mesh_shape": ranks, "placements": [ROWS, places], "shard_sizes": [{0: sizes}, given]}
        assert_matches_unsharded(lambda a, b: linalg.lstsq(a, b).solution, x, b, **options)
        for driver in ("gels", "gelsy", "gelsd", "gelss"):
            assert_matches_unsharded(partial(all_results, driver), x, b, **options)


def all_results(driver, a, b):
    return tuple(linalg.lstsq(a.detach(), b.detach(), driver=driver))


@pytest.mark.parametrize(("sizes", "columns"), [((11, 6), 3), ((2, 0, 15), 4), ((20, 1), 1)])
def test_least_squares(sizes, columns):
    run_distributed(check_least_squares, len(sizes), sizes, columns)


@on_ranks(4)
def test_batches_and_meshes():
    """Batches of fewer matrices than ranks, and meshes of two dims."""
    few = matrix(2, 13, 3)
    for function in (linalg.qr, linalg.pinv, linalg.svdvals):
        assert_matches_unsharded(function, few, mesh_shape=4, placements=[Shard(1)], shard_sizes={0: (1, 5, 0, 7)})
        for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
            assert_matches_unsharded(function, matrix(19, 3), mesh_shape=(2, 2), placements=placements)
        # Rows on one mesh dim, columns on the other: gathered.
        assert_matches_unsharded(function, matrix(19, 3), mesh_shape=(2, 2), placements=[Shard(0), Shard(1)])
    assert_matches_unsharded(
        lambda a, b: linalg.lstsq(a, b).solution, few, few[..., :2], mesh_shape=4, placements=[Shard(1)]
    )


@on_ranks(3)
def test_dependent_rows():
    """Shards whose own rows are dependent have the gradients of one device, and matrices with zeros its signs."""
    x = matrix(24, 3)
    x[8:16, 1] = 0
    x[16:, :] = x[16:, :1]
    for function in (linalg.qr, linalg.pinv, linalg.svdvals, OF_TALL["svd"]):
        assert_matches_unsharded(function, x, mesh_shape=3, placements=ROWS)
    for y in (torch.eye(17, 4, dtype=torch.float64), -torch.eye(17, 4, dtype=torch.float64).flip(0), x.triu()[:, :3]):
        assert_matches_unsharded(OF_TALL["qr signs"], y, mesh_shape=3, placements=ROWS)


@on_ranks(2)
def test_signs_of_large_matrices():
    """Of sizes at which LAPACK works in blocks, and on either side of its switch of methods."""
    for m, n in ((5000, 40), (600, 70), (130, 100), (200, 110)):
        x = matrix(m, n)
        for name in ("qr signs", "svd signs"):
            assert_matches_unsharded(OF_TALL[name], x, mesh_shape=2, placements=ROWS, rtol=1e-8)


def second(function):
    def derivative(x):
        y = function(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return grad

    return derivative


@on_ranks(2)
def test_second_derivatives():
    for function in (lambda x: linalg.qr(x)[1], lambda x: linalg.qr(x)[0], linalg.pinv, linalg.svdvals):
        assert_matches_unsharded(
            second(function), matrix(17, 3), mesh_shape=2, placements=ROWS, shard_sizes={0: (4, 13)}
        )


def communication():
    """Forward and backward of each operator: messages, their bytes, and bytes of collectives."""
    mesh, found = shared_mesh(3), []
    solution = lambda x: linalg.lstsq(x, x[:, :2]).solution  # noqa: E731
    for function in (lambda x: linalg.qr(x)[0], linalg.svdvals, solution, linalg.det):
        rows, columns = (6, 6) if function is linalg.det else (300, 4)
        sizes = (4, 0, 2) if function is linalg.det else (100, 150, 50)
        x = shard(matrix(rows, columns), mesh, ROWS, {0: sizes}, requires_grad=True)
        with count_communication() as forward:
            y = function(x)
        with count_communication() as backward:
            y.sum().backward()
        found.append([(c.received_messages, c.bytes_received, c.collective_bytes) for c in (forward, backward)])
    return found


def test_what_is_sent():
    qr, svdvals, lstsq, det = run_distributed(communication, 3)[0]
    # Four columns: four rows of each of the two other ranks. Of the 300 rows nothing else is sent.
    assert qr[0] == svdvals[0] == (2, 2 * 4 * 4 * 8, 0)
    assert lstsq[0] == (2, 2 * 4 * 6 * 8, 2 * 8)  # with the right-hand side's, and the sum of residuals
    assert qr[1][:2] == svdvals[1][:2] == (0, 0)
    assert qr[1][2] == 160 and svdvals[1][2] == 0
    assert det == [(1, 2 * 6 * 8, 0), (0, 0, 0)]  # the two rows of the one other rank that has any


# name: function of a small square matrix with dominant diagonal, or of two
OF_SMALL = {
    "cholesky": lambda x: linalg.cholesky(x @ x.mT),
    "cholesky_solve": lambda x, b: torch.cholesky_solve(b, x.tril()),
    "cond 1": lambda x: linalg.cond(x.detach(), 1),
    "det": linalg.det,
    "eig": lambda x: linalg.eig(x)[1].abs(),
    "eigh": lambda x: linalg.eigh(x)[1].abs(),
    "inv": linalg.inv,
    "lstsq": lambda x, b: linalg.lstsq(x, b).solution,
    "lu": lambda x: linalg.lu(x)[2],
    "matrix_exp": torch.matrix_exp,
    "nuc": lambda x: torch.norm(x, "nuc"),
    "pinv": linalg.pinv,
    "qr": lambda x: linalg.qr(x, mode="complete"),
    "slogdet": lambda x: linalg.slogdet(x)[1],
    "solve": linalg.solve,
    "solve left": lambda x, b: linalg.solve(x, b.mT, left=False),
    "svd": lambda x: linalg.svd(x)[1],
}


@on_ranks(3)
def test_small_matrices_are_gathered():
    x, b = matrix(5, 5) / 5 + 3 * torch.eye(5, dtype=torch.float64), matrix(5, 7)
    for name, function in OF_SMALL.items():
        both = "solve" in name or name == "lstsq"
        for places in (ROWS, [Shard(1)]):
            for right in (places, WHOLE, [Shard(1)]) if both else (None,):
                given, laid = ((x, b), [places, right]) if both else ((x,), [places])
                try:
                    assert_matches_unsharded(function, *given, mesh_shape=3, placements=laid)
                except Exception as error:
                    raise AssertionError(f"{name}, {laid}") from error
    for placements in ([Shard(0), Shard(1)], [Partial(), Shard(1)]):
        assert_matches_unsharded(linalg.inv, x, mesh_shape=(3, 1), placements=placements)


def layouts():
    mesh = shared_mesh(2)
    x, b = (shard(matrix(*shape), mesh, ROWS) for shape in ((5, 5), (5, 3)))
    tall = shard(matrix(30, 3), mesh, ROWS, {0: (20, 10)})
    found = [linalg.inv(x), linalg.solve(x, b), linalg.eigh(x)[0], *linalg.qr(tall), linalg.pinv(tall)]
    return [(y.placements[0], y.shard_sizes.get(0)) for y in found]


def test_layouts_of_results():
    expected = [
        (Shard(0), (3, 2)),  # of the matrix's shape
        (Replicate(), None),
        (Replicate(), None),
        (Shard(0), (20, 10)),
        (Replicate(), None),
        (Shard(1), (20, 10)),
    ]
    assert run_distributed(layouts, 2)[0] == expected


def fail(case):
    mesh = shared_mesh(2)
    large = shard(torch.randn(300, 300), mesh, ROWS)
    like_the_cpu = mock.patch.object(alignment, "_EXCHANGE_ELSEWHERE", alignment._EXCHANGE["cpu"])
    with count_communication() as counted, like_the_cpu:
        try:
            if case == "square":
                linalg.inv(large)
            elif case == "right-hand side":
                # Its share is as large as the matrix, which is gathered for it.
                linalg.solve(large, shard(torch.randn(300, 600), mesh, [Shard(1)]))
                linalg.solve(large, shard(torch.randn(300, 598), mesh, [Shard(1)]))
            elif case == "full":
                linalg.svd(shard(torch.randn(3000, 30), mesh, ROWS))
            elif case == "stack":
                linalg.qr(shard(torch.randn(700, 300), mesh, ROWS))
        finally:
            assert case == "right-hand side" or not counted.messages + counted.collective_bytes


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("square", r"inv: dim 0 of operand 0 must be unsharded.*360000 bytes.*180000.*262144.*allow_gather"),
        ("right-hand side", r"solve: dim 0 of operand 0 must be unsharded.*360000 bytes.*358800, a rank's largest"),
        ("full", r"svd: dim 0 .*full_matrices=False"),
        ("stack", r"qr: dim 0 .*840000 bytes.*420000.*Replicate\(\)"),
    ],
)
def test_larger_ones_are_refused(case, text):
    for error in run_expecting_errors(fail, 2, case):
        with pytest.raises(UnsupportedSharding, match=text):
            raise error
