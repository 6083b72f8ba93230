"""Contractions by opt_einsum, which calls torch for ShardTensors as it does for tensors."""

from __future__ import annotations

import sys

import opt_einsum
import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.tensor import Shard

from shardtensor.dispatch import patches
from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh

CONTRACTIONS = {
    "bixy,ioxy->boxy": ((2, 3, 6, 4), (3, 5, 6, 4)),  # a spectral layer of a neural operator
    "bixy,ir,or,r->boxy": ((2, 3, 6, 4), (3, 2), (5, 2), (2,)),  # the same, its weights factorized
    "bixy,oi->boxy": ((2, 3, 6, 4), (5, 3)),
    "bixy,bjxy->ij": ((2, 3, 6, 4), (2, 2, 6, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@on_ranks(2)
def test_as_on_one_device(dtype):
    torch.manual_seed(0)
    for equation, (first, *others) in CONTRACTIONS.items():
        tensors = [torch.randn(shape, dtype=dtype) for shape in (first, *others)]
        expression = opt_einsum.contract_expression(equation, first, *others)
        for contract in (lambda *t, equation=equation: opt_einsum.contract(equation, *t), expression):
            for dim, sizes in ((2, (5, 1)), (3, (0, 4)), (0, (1, 1))):
                assert_matches_unsharded(
                    contract,
                    *tensors,
                    mesh_shape=2,
                    placements=[[Shard(dim)], *[None] * len(others)],
                    shard_sizes=[{0: sizes}, *[None] * len(others)],
                )


def without_patches():
    x = shard(torch.randn(4, 3), shared_mesh(2), [Shard(0)], {0: (3, 1)})
    patches.uninstall()
    try:
        return sys.modules["opt_einsum.contract"].infer_backend(x)
    finally:
        patches.install()


def test_it_is_the_patch_that_tells():
    assert run_distributed(without_patches, 2) == ["shardtensor"] * 2
    assert "opt_einsum.contract.infer_backend" in patches.installed()
    numbers = torch.randn(3, 4, dtype=torch.float64)
    found, expected = (einsum("ij,kj->ik", numbers, numbers) for einsum in (opt_einsum.contract, torch.einsum))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
