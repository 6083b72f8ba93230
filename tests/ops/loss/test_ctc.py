"""``ctc_loss`` against the unsharded one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded


@on_ranks(2)
def test_ctc_loss():
    torch.manual_seed(0)
    logs = torch.randn(7, 3, 5, dtype=torch.float64)
    rows, flat = torch.randint(1, 5, (3, 4)), torch.randint(1, 5, (6,))
    inputs, lengths = torch.tensor([7, 5, 6]), torch.tensor([2, 3, 1])
    for reduction in ("mean", "sum", "none"):
        for dim, sizes in ((0, (6, 1)), (1, (0, 3)), (1, (1, 2)), (2, (3, 2))):
            for targets, given in ((rows, (inputs, lengths)), (flat, ([7, 5, 6], [2, 3, 1]))):
                assert_matches_unsharded(
                    lambda x, r=reduction, t=targets, g=given: F.ctc_loss(x.log_softmax(2), t, *g, reduction=r),
                    logs,
                    mesh_shape=2,
                    placements=[Shard(dim)],
                    shard_sizes={0: sizes},
                )
