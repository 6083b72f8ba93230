"""torch's pipelines over stages that are sharded in space: ShardTensors travel between unmodified modules."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.testing import run_distributed, shard, shared_mesh

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 12), reason="pipelines of torch 2.11 take no DTensors")


def stages():
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU()).double(),
        nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 5, padding=2)).double(),
    ]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def train(schedule, sizes):
    mesh = shared_mesh((2, 2), ("pp", "domain"))
    domain, i = mesh["domain"], mesh.get_local_rank("pp")
    parts, alone = stages(), nn.Sequential(*stages())
    x, target = torch.randn(4, 3, 8, 6, dtype=torch.float64), torch.randn(4, 2, 8, 6, dtype=torch.float64)
    places = domain, [Shard(2)], {0: sizes}

    def get_mesh(names, layout=None):
        return domain

    stage = pipelining.PipelineStage(parts[i], i, 2, torch.device("cpu"), group=mesh.get_group("pp"), get_mesh=get_mesh)
    steps, losses = getattr(pipelining, schedule)(stage, n_microbatches=2, loss_fn=loss), []
    expected = alone(x)
    loss(expected, target).backward()
    if i == 0:
        steps.step(shard(x, *places))
    else:
        y = steps.step(target=shard(target, *places), losses=losses)
        assert isinstance(y, ShardTensor) and y.shard_sizes == {0: sizes}
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-10, atol=1e-12)
        found = torch.stack(losses).mean().full_tensor()
        torch.testing.assert_close(found, loss(expected, target), rtol=1e-10, atol=1e-12)
    for p, q in zip(parts[i].parameters(), alone[i].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


def test_stages_of_shards():
    run_distributed(train, 4, "ScheduleGPipe", (5, 3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 0)])
def test_stages_of_equal_and_empty_shards(schedule, sizes):
    run_distributed(train, 4, schedule, sizes)
