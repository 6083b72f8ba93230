"""Factorizations and solvers on shards of batches and of right-hand sides."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from torch import linalg
from torch.distributed.tensor import Replicate, Shard

from shardtensor import allow_gather
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_expecting_errors,
    shard,
    shared_mesh,
)

WHOLE = [Replicate()]


def square(*shape):
    return torch.randn(*shape, shape[-1], dtype=torch.float64) + 3 * torch.eye(shape[-1], dtype=torch.float64)


def positive(*shape):
    a = torch.randn(*shape, shape[-1], dtype=torch.float64)
    return a @ a.mT + 3 * torch.eye(shape[-1], dtype=torch.float64)


# name: (function, kind of matrix); signs and order, which are up to the algorithm, made the same. One of each kind of
# results; the others are among torch's samples.
OF_ONE = {
    "cholesky": (linalg.cholesky, positive),
    "det": (torch.det, square),
    "eig": (lambda x: linalg.eig(x)[1].abs(), square),
    "eigvalsh": (linalg.eigvalsh, positive),
    "geqrf": (lambda x: torch.geqrf(x.detach())[1], square),
    "inverse": (lambda x: x.inverse(), square),
    "lu_unpack": (lambda x: torch.lu_unpack(*linalg.lu_factor(x))[1], square),
    "matrix_rank": (lambda x: linalg.matrix_rank(x.detach()).double(), square),
    "nuc": (lambda x: torch.norm(x, "nuc", (1, 2), True), square),
    "ormqr's reflectors": (lambda x: torch.ormqr(x, x[..., 0].sin(), x), square),
    "qr": (lambda x: linalg.qr(x)[1], square),
    "svd": (lambda x: torch.svd(x)[0].abs(), square),
}


@on_ranks(2)
def test_batches_of_matrices():
    for name, (function, make) in OF_ONE.items():
        for sizes, dim in (((5, 0), 0), ((1, 4), 0), ((1, 2), 1), ((0, 3), 2)):
            torch.manual_seed(0)
            try:
                assert_matches_unsharded(
                    function, make(5, 3), mesh_shape=2, placements=[Shard(dim)], shard_sizes={0: sizes}
                )
            except AssertionError as error:
                raise AssertionError(f"{name}, dim {dim} in {sizes}") from error


SOLVERS = [
    linalg.solve,
    lambda a, b: linalg.solve(a, b.mT, left=False),
    lambda a, b: linalg.solve_triangular(a.triu(), b, upper=True),
    lambda a, b: torch.cholesky_solve(b, a.tril()),
    lambda a, b: linalg.lstsq(a, b).solution,
    lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b),
    lambda a, b: torch.linalg.ldl_solve(*linalg.ldl_factor(a.detach()), b.detach()),
]


@on_ranks(2)
def test_solvers():
    five = {0: (1, 4)}
    for function in SOLVERS:
        for places, sizes in [
            ([[Shard(0)], WHOLE], [five, None]),
            ([WHOLE, [Shard(0)]], [None, {0: (0, 5)}]),
            ([[Shard(0)], [Shard(0)]], [{0: (5, 0)}, five]),
            ([WHOLE, [Shard(2)]], [None, {0: (4, 0)}]),  # the columns of the right-hand side
            ([WHOLE, [Shard(1)]], [None, {0: (1, 2)}]),
            ([[Shard(1)], [Shard(0)]], [{0: (3, 0)}, five]),
        ]:
            torch.manual_seed(0)
            b = torch.randn(5, 3, 4, dtype=torch.float64)
            assert_matches_unsharded(function, positive(5, 3), b, mesh_shape=2, placements=places, shard_sizes=sizes)
    vectors = torch.randn(5, 3, dtype=torch.float64)
    assert_matches_unsharded(
        linalg.solve, square(5, 3), vectors, mesh_shape=2, placements=[[Shard(0)], WHOLE], shard_sizes=[five, None]
    )
    # One whole matrix for right-hand sides that are cut.
    assert_matches_unsharded(
        linalg.solve, square(3), torch.randn(3, 7, dtype=torch.float64), mesh_shape=2, placements=[WHOLE, [Shard(1)]]
    )


@on_ranks(2)
def test_left_out_results():
    """Results that torch leaves out are so on every rank, also on those without matrices."""
    torch.manual_seed(0)
    tall = torch.randn(5, 4, 3, dtype=torch.float64)
    deficient = tall.clone()
    deficient[3] = deficient[3, :, :1]  # a matrix of rank 1, which one rank has
    b = torch.randn(5, 4, 2, dtype=torch.float64)
    drivers = ("gels", "gelsy", "gelsd", "gelss") if tall.device.type == "cpu" else ("gels",)  # all that CUDA has
    functions = {
        f"lstsq by {driver}": lambda a, b, d=driver: tuple(linalg.lstsq(a.detach(), b.detach(), driver=d))
        for driver in drivers
    }
    functions["qr"] = lambda a, b: tuple(linalg.qr(a.detach(), mode="r"))
    functions["lu_unpack"] = lambda a, b: torch.lu_unpack(*linalg.lu_factor_ex(a.detach())[:2], unpack_data=False)
    functions["lu_unpack 2"] = lambda a, b: torch.lu_unpack(*linalg.lu_factor_ex(a)[:2], unpack_pivots=False)
    functions["eig"] = lambda a, b: linalg.svdvals(a)
    for name, function in functions.items():
        for matrices in (tall, deficient):
            if name.split()[-1] == "gels" and matrices is deficient:
                continue  # this one is for matrices of full rank
            for sizes in ((2, 3), (0, 5), (5, 0)):
                try:
                    assert_matches_unsharded(
                        function,
                        matrices,
                        b,
                        mesh_shape=2,
                        placements=[[Shard(0)], [Shard(0)]],
                        shard_sizes={0: sizes},
                    )
                except AssertionError as error:
                    raise AssertionError(f"{name}, {sizes}") from error


@on_ranks(4)
def test_a_mesh_of_two_dims():
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(2)]):
        assert_matches_unsharded(linalg.inv, square(3, 5, 4), mesh_shape=(2, 2), placements=placements)


@on_ranks(2)
def test_what_is_sent():
    mesh = shared_mesh(2)
    found = []
    for dim in (0, 1):
        x = shard(square(4, 6), mesh, [Shard(dim)], requires_grad=True)
        with count_communication() as forward:
            y = linalg.inv(x)
            det = linalg.det(x)
        assert y.placements == (Shard(dim),)
        assert det.placements == (Shard(0),)
        cotangent = torch.ones_like(y.detach())
        with count_communication() as backward:
            y.backward(cotangent)
        found.append((forward.bytes_sent, backward.bytes_sent, forward.collective_bytes + backward.collective_bytes))
    batch, rows = found
    assert batch == (0, 0, 0)
    exchange = 4 * 36 // 4 * 8  # half of what a rank has
    assert rows == (3 * exchange, 2 * exchange, 0)  # there and back for inv, there for det


def fail():
    with allow_gather():
        large = shard(square(300), shared_mesh(2), [Shard(0)])
        torch.testing.assert_close(linalg.inv(large).full_tensor(), linalg.inv(large.full_tensor()))
    linalg.inv(shard(torch.randn(4, 3, 2), shared_mesh(2), [Shard(0)]))


def test_errors_are_the_same_on_every_rank():
    for error in run_expecting_errors(fail, 2):
        with pytest.raises(RuntimeError, match="square"):
            raise error


@on_ranks(2)
def test_gradients_through_the_copy_of_a_matrix_count_once():
    """The copy of the matrix that comes with the solution depends on no column of the right-hand side."""
    b, matrix = torch.randn(2, 3, 4, dtype=torch.float64), square(2, 3).triu()
    for dim, sizes in ((2, (3, 1)), (0, (2, 0))):
        for placements in ([Shard(dim)], WHOLE), ([Shard(dim)], [Shard(0)] if dim == 0 else WHOLE):
            assert_matches_unsharded(
                lambda b, a: tuple(torch.triangular_solve(b, a)),
                b,
                matrix,
                mesh_shape=2,
                placements=placements,
                shard_sizes=[{0: sizes}, {0: (2, 0)} if placements[1] != WHOLE else None],
            )


@on_ranks(2)
def test_gradients_of_no_matrices():
    for n in (0, 1, 5):
        none = torch.empty(0, n, n, dtype=torch.float64)
        assert_matches_unsharded(linalg.slogdet, none, mesh_shape=2, placements=[[Shard(0)]])


@on_ranks(2)
def test_eigenvectors_of_real_matrices_are_complex():
    """Of real matrices: where they are exchanged back to the layout of the matrices, too."""
    for shape, dim in (((5, 3), 1), ((5, 3), 2), ((2, 0), 1), ((0, 3), 0)):
        x = shard(square(*shape), shared_mesh(2), [Shard(dim)])
        for function in (lambda t: linalg.eig(t)[1], lambda t: torch.linalg.eigvals(t)):
            y = function(x)
            assert y.dtype == y.to_local().dtype == y._spec.tensor_meta.dtype == torch.complex128
            assert torch.equal(y.full_tensor(), function(x.full_tensor()))
