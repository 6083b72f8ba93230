"""A part of what the suite tests, on late communication in every run: the same bits as on gloo.

``pytest --process-group late`` runs all of it so.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from late import late_communication
from seeded import seeded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardtensor import attention_method, set_transport
from shardtensor.data import ShardLoader
from shardtensor.testing import run_distributed, shard, shared_mesh

CUTS = {2: (7, 4), 3: (5, 1, 5)}


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def cut(x, dim, requires_grad=False):
    mesh = shared_mesh(dist.get_world_size())
    return shard(x, mesh, [Shard(dim)], {0: CUTS[mesh.size()]}, requires_grad)


def plain(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def with_gradients(network, x):
    """Result, gradient of the input, and of all weights."""
    y = network(x)
    y.square().sum().backward()
    return [y.to_local(), *plain([y, x.grad, *(p.grad for p in network.parameters())])]


def halos():
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 3, 5, padding=2), nn.AvgPool2d(3, 1, 1)
    return with_gradients(nn.Sequential(*layers).double(), cut(drawn(1, 2, 11, 6), 2, True))


def halos_by_messages():
    with set_transport("p2p"):
        return halos()


def norms():
    layers = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm([4, 11, 6])
    return with_gradients(nn.Sequential(*layers).double(), cut(drawn(2, 4, 11, 6), 2, True))


def attention(method):
    q, k, v = (cut(drawn(1, 4, 11, 8, seed=i), 2, True) for i in range(3))
    with attention_method(method):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=method == "ring")
        y.square().sum().backward()
    return plain([y, q.grad, k.grad, v.grad])


def ring():
    return attention("ring")


def heads():
    return attention("heads")


def fetch():
    return attention("fetch")


def redistributions():
    x, results = cut(drawn(11, 5), 0), []
    for placement in (Shard(1), Partial(), Shard(0), Replicate(), Partial("max"), Shard(1)):
        x = x.redistribute(placements=[placement])
        results.append(x.to_local())
    return results


def fsdp2_steps():
    """Of two layers on their own, whose gathers and reductions are under way while others compute."""
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 3, 3, padding=1))
    network.double()
    ranks = dist.get_world_size()
    for unit in (network[0], network[3], network):
        fully_shard(unit, mesh=shared_mesh((1, ranks), ("dp", "domain")))
    optimizer = torch.optim.AdamW(network.parameters(), 0.01)
    for step in range(2):
        network(cut(drawn(1, 2, 11, 6, seed=step), 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain(network.parameters())


def loaded():
    mesh = shared_mesh(dist.get_world_size())
    batches = [{"x": drawn(2, 11, seed=i), "i": i} for i in range(3)] if dist.get_rank() == 0 else None
    layout = {"x": (Shard(1),), "i": None}
    found = ShardLoader(batches, mesh, layout, shard_sizes={"x": {0: CUTS[mesh.size()]}, "i": None})
    return [batch["x"].to_local() + batch["i"] for batch in found]


PARTS = [halos, halos_by_messages, norms, ring, heads, fetch, redistributions, fsdp2_steps, loaded]


def run(part, late):
    torch.manual_seed(0)
    with late_communication() if late else nullcontext():
        return [t.detach() for t in part()]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("part", PARTS, ids=lambda f: f.__name__)
def test_the_same_bits_as_on_gloo(part, world_size):
    on_gloo, late = (run_distributed(run, world_size, part, late) for late in (False, True))
    assert not any(t.isnan().any() for results in on_gloo for t in results)
    torch.testing.assert_close(late, on_gloo, rtol=0, atol=0)
