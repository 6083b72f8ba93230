"""A single matrix that is sharded: gathered where it is small, or refused."""

from __future__ import annotations

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


# name: function of a small square matrix with dominant diagonal, or of two
OF_SMALL = {
    "cholesky": lambda x: linalg.cholesky(x @ x.mT),
    "cholesky_solve": lambda x, b: torch.cholesky_solve(b, x.tril()),
    "cond": linalg.cond,
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


# Of a tall matrix.
OF_TALL = {
    "qr": linalg.qr,
    "qr r": lambda x: linalg.qr(x.detach(), mode="r")[1],
    "svd": lambda x: linalg.svd(x, full_matrices=False)[1],
    "svd, all of it": lambda x: linalg.svd(x.detach())[1],
    "svdvals": linalg.svdvals,
    "pinv": linalg.pinv,
    "pinverse": torch.pinverse,
    "lstsq": lambda x: linalg.lstsq(x, x[:, :2] + 1).solution,
    "norm 2": lambda x: linalg.norm(x, 2),
    "norm -2": lambda x: linalg.matrix_norm(x, -2, keepdim=True),
    "rank": lambda x: linalg.matrix_rank(x.detach()).double(),
}


@on_ranks(3)
def test_small_tall_matrices_are_gathered():
    for name, function in OF_TALL.items():
        for sizes in ((11, 0, 6), (2, 0, 15)):
            try:
                assert_matches_unsharded(function, matrix(17, 3), mesh_shape=3, placements=ROWS, shard_sizes={0: sizes})
            except Exception as error:
                raise AssertionError(f"{name} of {sizes}") from error


def layouts():
    mesh = shared_mesh(2)
    x, b = (shard(matrix(*shape), mesh, ROWS) for shape in ((5, 5), (5, 3)))
    tall = shard(matrix(30, 3), mesh, ROWS, {0: (20, 10)})
    found = [linalg.inv(x), linalg.solve(x, b), linalg.eigh(x)[0], *linalg.qr(tall)]
    return [(y.placements[0], y.shard_sizes.get(0)) for y in found]


def test_layouts_of_results():
    expected = [
        (Shard(0), (3, 2)),  # of the matrix's shape
        (Replicate(), None),
        (Replicate(), None),
        (Shard(0), (20, 10)),
        (Replicate(), None),
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
            elif case == "tall":
                linalg.qr(shard(torch.randn(3000, 30), mesh, ROWS))
            elif case == "least squares":
                linalg.lstsq(shard(torch.randn(3000, 30), mesh, ROWS), shard(torch.randn(3000, 2), mesh, ROWS))
        finally:
            assert case == "right-hand side" or not counted.messages + counted.collective_bytes


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("square", r"inv: dim 0 of operand 0 must be unsharded.*360000 bytes.*180000.*262144.*allow_gather"),
        ("right-hand side", r"solve: dim 0 of operand 0 must be unsharded.*360000 bytes.*358800, a rank's largest"),
        ("full", r"svd: dim 0 of operand 0 must be unsharded.*360000 bytes"),
        (
            "tall",
            r"qr: dim 0 of operand 0 must be unsharded, but mesh dim 0 shards it.*360000 bytes.*180000.*262144.*"
            r"ShardTensor\(3000, 30\) float32 on mesh \(2,\) as \(S\(0\)\[1500, 1500\]\)\. "
            r"Remedy: redistribute it to Replicate\(\) on mesh dim 0, call inside shardtensor\.allow_gather\(\)",
        ),
        ("least squares", r"lstsq: dim 0 of operand 0 must be unsharded.*384000 bytes.*allow_gather"),
    ],
)
def test_larger_ones_are_refused(case, text):
    for error in run_expecting_errors(fail, 2, case):
        with pytest.raises(UnsupportedSharding, match=text):
            raise error
