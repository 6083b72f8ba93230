"""Sorting and order statistics along whole rows, against one device."""

from __future__ import annotations

import pytest
import torch
from halves import half_of, in_halves
from on_ranks import on_ranks
from row_cases import CUTS, check_all, placed, values
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.testing import shard, shared_mesh


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


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes", "half"), in_halves(CUTS))
@on_ranks("mesh_shape")
def test_operators_on_whole_rows(mesh_shape, dims, sizes, half):
    check_all(half_of(row_cases(), half), mesh_shape, dims, sizes)
    with torch.no_grad():
        check_all(half_of(row_cases(), half), mesh_shape, dims, sizes, check_grads=False)
    x = shard(values(), shared_mesh(mesh_shape), placed(dims), sizes)
    for result in (*x.sort(1), x.argsort(1)):  # back where the input lies
        assert result.placements == x.placements and result.shard_sizes == x.shard_sizes


@on_ranks(2)
def test_medians_of_expanded_tensors():
    """torch's own are wrong there."""
    rows = torch.randn(1, 7, dtype=torch.float64).expand(6, 7)
    x = ShardTensor.from_local(rows[:3], shared_mesh(2), (Shard(0),), shard_sizes={0: (3, 3)})
    plain = rows.contiguous()
    for dim in (0, 1):
        torch.testing.assert_close(x.median(dim).values.full_tensor(), plain.median(dim).values)
        torch.testing.assert_close(torch.nanmedian(x, dim).values.full_tensor(), plain.nanmedian(dim).values)
