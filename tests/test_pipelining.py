"""torch's pipelines over stages that are sharded in space: local tensors travel between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.testing import run_distributed, shared_mesh

SIZES = {0: (5, 3)}


class Local(nn.Module):
    """A stage that is called with this rank's rows, and returns them."""

    def __init__(self, stage: nn.Module, mesh: object) -> None:
        super().__init__()
        self.stage, self.mesh = stage, mesh

    def forward(self, x: Tensor) -> Tensor:
        x = ShardTensor.from_local(x, self.mesh, (Shard(2),), shard_sizes=SIZES)
        return self.stage(x).to_local()


def stages():
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU()).double(),
        nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 5, padding=2)).double(),
    ]


def train():
    mesh = shared_mesh((2, 2), ("pp", "domain"))
    domain, i = mesh["domain"], mesh.get_local_rank("pp")
    parts, alone = stages(), stages()
    x, target = torch.randn(4, 3, 8, 6, dtype=torch.float64), torch.randn(4, 2, 8, 6, dtype=torch.float64)
    rows = slice(0, 5) if domain.get_local_rank() == 0 else slice(5, 8)

    def loss(y: Tensor, t: Tensor) -> Tensor:
        y, t = (ShardTensor.from_local(part, domain, (Shard(2),), shard_sizes=SIZES) for part in (y, t))
        return (y - t).square().mean()

    stage = PipelineStage(Local(parts[i], domain), i, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule, losses = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss), []
    if i == 0:
        schedule.step(x[:, :, rows])
    else:
        schedule.step(target=target[:, :, rows], losses=losses)
    expected = (nn.Sequential(*alone)(x) - target).square().mean()
    expected.backward()
    for found, p in zip(parts[i].parameters(), alone[i].parameters(), strict=True):
        torch.testing.assert_close(found.grad, p.grad)
    if losses:
        torch.testing.assert_close(torch.stack(losses).mean().full_tensor(), expected)


@pytest.mark.slow
def test_stages_of_local_tensors():
    run_distributed(train, 4)
