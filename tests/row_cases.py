"""Layouts of one tensor, and the comparison of many operators along its dims with one device."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

from shardtensor.testing import assert_matches_unsharded

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


def placed(dims):
    return [Replicate() if d is None else Shard(d) for d in dims]


def check_all(cases, mesh_shape, dims, sizes, **options):
    """Compare every ``(name, function, *tensors)``; the failures of all of them at once."""
    failures = []
    for name, function, *tensors in cases:
        try:
            assert_matches_unsharded(
                function, *tensors, mesh_shape=mesh_shape, placements=placed(dims), shard_sizes=sizes, **options
            )
        except AssertionError as error:
            failures.append(f"{name}: {error}")
        except Exception as error:
            raise RuntimeError(f"{name} on {dims}, {sizes}: {type(error).__name__}: {error}") from error
    assert not failures, "\n".join(failures)


def values(*shape):
    torch.manual_seed(0)
    return torch.randn(*(shape or SHAPE), dtype=torch.float64)
