"""rrelu, softmax of masked rows and halves of glu against the unsharded ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded, count_communication, run_distributed, shard, shared_mesh


def safe_softmax_below_functions(x, dim):
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten._safe_softmax(x, dim)


@on_ranks(2)
def test_values():
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    masked = x.masked_fill(torch.tensor([[True], [False], [True], [False]]), float("-inf"))
    for dim, sizes in ((0, (1, 3)), (0, (4, 0)), (1, (5, 1)), (1, (0, 6))):
        options = {"mesh_shape": 2, "placements": [Shard(dim)], "shard_sizes": {0: sizes}}
        for along in (0, 1, -1):
            for values in (x, masked):
                assert_matches_unsharded(lambda x, a=along: safe_softmax_below_functions(x, a), values, **options)
        assert_matches_unsharded(lambda x: torch.ops.aten._safe_softmax(x, 1), masked, **options)
        assert_matches_unsharded(lambda x: F.rrelu(x.clone(), 0.1, 0.3, inplace=True), x, **options)
        assert_matches_unsharded(lambda x: torch.rrelu_(x.clone(), 0.1, 0.3), x, **options)


def drawn():
    torch.manual_seed(0)
    x = torch.cat([torch.full((500,), -2.0), torch.ones(20)])
    sharded = shard(x, shared_mesh(2), [Shard(0)], {0: (400, 120)}, requires_grad=True)
    y = F.rrelu(sharded, 0.1, 0.3, training=True)
    y.sum().backward()
    slopes = sharded.grad.full_tensor()
    torch.testing.assert_close(y.full_tensor(), x * slopes)
    assert (slopes[500:] == 1).all()
    assert slopes[:500].min() >= 0.1 and slopes[:500].max() <= 0.3
    assert slopes[:500].unique().numel() > 400
    return slopes.tolist()


def test_slopes_are_drawn_within_bounds_and_used_backward():
    first, second = run_distributed(drawn, 2)
    assert first == second


@on_ranks(2)
def test_halves_of_a_sharded_dim_meet_evenly():
    x = shard(torch.randn(8, 3), shared_mesh(2), [Shard(0)], {0: (6, 2)})
    with count_communication() as counts:
        y = F.glu(x, 0)
    sizes, messages, collectives = y.shard_sizes, counts.messages, dict(counts.collectives)
    assert sizes == {0: (3, 1)}
    assert messages <= 2 and collectives == {"all_to_all": 2}
