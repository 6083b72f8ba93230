"""How images are sharded in the tests of operators that take batch and channels each by itself."""

from __future__ import annotations

from torch.distributed.tensor import Shard

IMAGE = (3, 5, 6, 7)
# (mesh shape, dims cut, sizes) of tensors of shape IMAGE
CUTS = [
    (2, (0,), {0: (1, 2)}),
    (2, (1,), {0: (0, 5)}),
    (2, (2,), {0: (5, 1)}),
    (3, (3,), {0: (3, 0, 4)}),
    ((2, 2), (0, 2), {0: (3, 0), 1: (2, 4)}),
    ((2, 2), (3, 2), {0: (3, 4), 1: (6, 0)}),
]


def places(dims):
    return [Shard(d) for d in dims]
