"""Products of plain sparse matrices and ShardTensors against the unsharded ones."""

from __future__ import annotations

import pytest
import torch
from seeded import seeded
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)

pytestmark = pytest.mark.not_emulated("the emulated device has no sparse tensors")


def matrix(*shape, layout=torch.sparse_coo, dtype=torch.float64, seed=1):
    """A matrix with a third of its entries, the same on every rank."""
    generator = seeded(seed)
    dense = torch.randn(shape, generator=generator, dtype=torch.float64)
    dense = dense * (torch.rand(shape, generator=generator) < 0.3)
    return dense.to(dtype).to_sparse(layout=layout)


def data(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=seeded(2), dtype=torch.float64).to(dtype)


FORMS = {
    "mm": lambda s, x: torch.mm(s, x),
    "s.mm": lambda s, x: s.mm(mat2=x),
    "@": lambda s, x: s @ x,
    "matmul": torch.matmul,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda s, x: torch.addmm(x.sum(0), s, x, beta=2, alpha=3),
    "addmm of nothing": lambda s, x: torch.addmm(torch.full((5,), torch.nan, dtype=x.dtype), s, x, beta=0),
}
LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}


def check_products(mesh_shape, placements, sizes):
    """On a tall and on a wide matrix: along which dim a shard is cheapest depends on that."""
    for rows in (3, 40):
        cases = [(function, torch.sparse_coo) for function in FORMS.values()]
        for function, layout in [*cases, (torch.mm, torch.sparse_csr), (torch.matmul, torch.sparse_csc)]:
            s = matrix(rows, 8, layout=layout)
            assert_matches_unsharded(
                lambda x, function=function, s=s: function(s, x),
                data(8, 5),
                mesh_shape=mesh_shape,
                placements=placements,
                shard_sizes=sizes,
            )


@pytest.mark.parametrize(
    ("ranks", "mesh_shape", "placements", "sizes"),
    [
        (1, 1, [Shard(0)], None),
        (2, 2, [Shard(0)], {0: (7, 1)}),
        (2, 2, [Shard(0)], {0: (0, 8)}),
        (2, 2, [Shard(1)], {0: (1, 4)}),
        (2, 2, [Shard(1)], {0: (0, 5)}),
        (2, 2, [Replicate()], None),
        (3, 3, [Shard(0)], {0: (5, 0, 3)}),
        (3, 3, [Shard(1)], {0: (2, 3, 0)}),
        (4, (2, 2), [Shard(0), Shard(1)], {0: (5, 3), 1: (1, 4)}),
        (4, (2, 2), [Shard(1), Shard(0)], {0: (5, 0), 1: (2, 6)}),
        (4, (2, 2), [Replicate(), Shard(0)], {1: (2, 6)}),
    ],
)
def test_products(ranks, mesh_shape, placements, sizes):
    run_distributed(check_products, ranks, mesh_shape, placements, sizes)


def check_few_columns():
    """Fewer columns than ranks: the contracted dim stays sharded, and each rank has a contribution."""
    for layout in LAYOUTS.values():
        for function, x in ((torch.mm, data(8, 1)), (torch.mv, data(8)), (torch.matmul, data(8))):
            s = matrix(3, 8, layout=layout)
            y = assert_matches_unsharded(
                lambda x, function=function, s=s: function(s, x),
                x,
                mesh_shape=3,
                placements=[Shard(0)],
                shard_sizes={0: (5, 0, 3)},
            )
            assert y.placements == (Partial(),)


def test_few_columns():
    run_distributed(check_few_columns, 3)


def check_batches(dim, sizes):
    s, x = matrix(4, 6, 7), data(4, 7, 5)
    for function in (torch.bmm, lambda s, x: s.bmm(x)):
        assert_matches_unsharded(
            lambda x, function=function: function(s, x),
            x,
            mesh_shape=2,
            placements=[Shard(dim)],
            shard_sizes={0: sizes},
        )


@pytest.mark.parametrize(("dim", "sizes"), [(0, (1, 3)), (0, (0, 4)), (1, (5, 2)), (1, (7, 0)), (2, (1, 4))])
def test_batches(dim, sizes):
    run_distributed(check_batches, 2, dim, sizes)


def check_messages():
    s = matrix(40, 8)
    mesh = shared_mesh(2)
    columns = shard(data(8, 5), mesh, [Shard(1)], {0: (1, 4)}, requires_grad=True)
    with count_communication() as counted:
        y = s @ columns
        y.sum().backward()
    assert not counted.collectives and not counted.messages
    assert y.placements == (Shard(1),) and y.shard_sizes == {0: (1, 4)}
    rows = shard(data(8, 6), mesh, [Shard(0)], {0: (5, 3)})
    with count_communication() as counted:
        y = s @ rows
    assert dict(counted.collectives) == {"all_to_all": 1} and y.placements == (Shard(1),)
    partial = shard(data(8, 6), mesh, [Partial()])
    torch.testing.assert_close((s @ partial).full_tensor(), s @ data(8, 6))
    # A product of plain tensors that is added to a ShardTensor.
    added = torch.addmm(shard(data(40, 6), mesh, [Shard(0)], {0: (30, 10)}), s, data(8, 6))
    torch.testing.assert_close(added.full_tensor(), torch.addmm(data(40, 6), s, data(8, 6)))


def test_messages():
    run_distributed(check_messages, 2)


def check_twice():
    s, x = matrix(4, 8), shard(data(8, 5), shared_mesh(2), [Shard(0)], {0: (5, 3)}, requires_grad=True)
    (g,) = torch.autograd.grad((s @ x).pow(3).sum(), x, create_graph=True)
    g.square().sum().backward()
    whole = data(8, 5).requires_grad_()
    (g,) = torch.autograd.grad((s @ whole).pow(3).sum(), whole, create_graph=True)
    g.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)


def test_second_derivatives():
    run_distributed(check_twice, 2)


def check_refusals():
    x = shard(data(8, 8), shared_mesh(2), [Shard(0)], {0: (5, 3)})
    s = matrix(8, 8)
    with count_communication() as counted:
        with pytest.raises(UnsupportedSharding, match=r"gradient of a sparse operand.*Remedy: detach it"):
            torch.mm(matrix(8, 8).requires_grad_(), x)
        for call in (
            lambda: x @ s,
            lambda: torch.mm(x, s),
            lambda: s @ torch.stack([x, x]),
            lambda: s.to_dense().to_sparse_bsr((2, 2)) @ x,
            lambda: torch.bmm(torch.stack([s, s]).to_dense().to_sparse_csr(), torch.stack([x, x])),
            lambda: torch.sparse.mm(x, s),
            lambda: torch.sparse.mm(s, x, "mean"),
            lambda: torch.addmm(s, s, x),
        ):
            with pytest.raises(UnsupportedSharding, match=r"layout torch.sparse.*Remedy: make it dense"):
                call()
        for wrong in (matrix(8, 7), matrix(8, 8, dtype=torch.float32)):
            with pytest.raises(RuntimeError):
                wrong @ x
    assert not counted.collectives and not counted.messages


def test_refusals():
    run_distributed(check_refusals, 2)
