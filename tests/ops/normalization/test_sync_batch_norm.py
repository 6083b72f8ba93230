"""``nn.SyncBatchNorm``: batch norm of the global batch, and of those of other meshes in its process group."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardtensor import explain
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

SHAPE = (4, 5, 6)  # of a sample
# Placements and sizes, by the coordinate along "data", where the replicas have 2 and 3 samples.
CUTS = {
    "rows": ([Shard(2)], [(4, 1), (2, 3)]),
    "rows, on one rank only": ([Shard(2)], [(5, 0), (0, 5)]),
    "batch": ([Shard(0)], [(1, 1), (1, 2)]),
    "nothing": ([Replicate()], [None, None]),
}


def made(kind, dtype, group=None, **options):
    module = nn.BatchNorm2d(4, **options) if kind == "batch" else nn.SyncBatchNorm(4, **options, process_group=group)
    module = module.to(dtype)
    if module.affine:
        with torch.no_grad():
            module.weight.copy_(torch.tensor([1.5, 0.5, -1.0, 2.0]))
            module.bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    return module


def compare(cut, over, dtype=torch.float64, samples=(2, 3), channels_last=False, **options):
    """With the process group of these mesh dims (None: none given) against one device that has all their samples."""
    torch.manual_seed(0)
    mesh = shared_mesh((2, 2), ("data", "domain"))
    domain, here = mesh["domain"], mesh["data"].get_local_rank()
    batches = [(torch.randn(n, *SHAPE) * (n + 1) + n).to(dtype) for n in samples]
    seeds = [torch.randn_like(batch) for batch in batches]
    together = [here] if over == "domain" else [0, 1]
    placements, sizes = CUTS[cut]
    cuts = {} if sizes[here] is None else {0: sizes[here]}

    reference = made("batch", dtype, **options)
    module = made("sync", dtype, mesh.get_group(over) if over else None, **options)
    given = torch.cat([batches[i] for i in together]).requires_grad_()
    x = batches[here].contiguous(memory_format=torch.channels_last) if channels_last else batches[here]
    x = shard(x, domain, placements, cuts, requires_grad=True)
    for _ in range(2):
        expected, y = reference(given), module(x)
    expected.backward(torch.cat([seeds[i] for i in together]))
    y.backward(shard(seeds[here], domain, placements, cuts))
    own = together.index(here)
    pairs = [
        (y.full_tensor(), expected.split([samples[i] for i in together])[own]),
        (x.grad.full_tensor(), given.grad.split([samples[i] for i in together])[own]),
        *zip(module.buffers(), reference.buffers(), strict=True),
    ]
    for p, expected in zip(module.parameters(), reference.parameters(), strict=True):
        total = p.grad.clone()  # that of its own replica: replicas are averaged by DDP, and added up here
        if len(together) > 1:
            dist.all_reduce(total, group=mesh.get_group("data"))
        pairs.append((total, expected.grad))
    assert x.grad.placements == x.placements and y.placements == x.placements
    for value, expected in pairs:
        torch.testing.assert_close(value, expected, **({} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}))


@pytest.mark.parametrize("over", [None, "data", "domain"])
@pytest.mark.parametrize("cut", CUTS)
def test_statistics_are_those_of_all_ranks_of_the_process_group(cut, over):
    run_distributed(compare, 4, cut, over)


@pytest.mark.parametrize("over", [None, "domain"])
@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"dtype": torch.float32, "channels_last": True},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options(options, over):
    run_distributed(compare, 4, "rows", over, **options)


@on_ranks(4)
def test_a_replica_without_samples():
    compare("rows", None, samples=(0, 3))


@on_ranks(4)
def test_replicas_of_different_sizes_agree_in_debug_mode():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDTENSOR_DEBUG", "1")
        compare("rows", None)


@on_ranks(4)
def test_sharded_channels():
    """Where ranks have different channels, those with the same ones belong together."""
    mesh = shared_mesh((2, 2), ("data", "domain"))
    torch.manual_seed(0)
    batches = torch.randn(2, 3, *SHAPE, dtype=torch.float64)
    here = mesh["data"].get_local_rank()
    module = made("sync", torch.float64, mesh.get_group("data"))
    reference = made("batch", torch.float64)
    y = module(shard(batches[here], mesh["domain"], [Shard(1)], {0: (3, 1)}))
    expected = reference(batches.flatten(0, 1)).unflatten(0, (2, 3))[here]
    torch.testing.assert_close(y.full_tensor(), expected)
    torch.testing.assert_close(module.running_var, reference.running_var)


def give_channels_to_the_world():
    mesh = shared_mesh((2, 2), ("data", "domain"))
    nn.SyncBatchNorm(4)(shard(torch.randn(2, *SHAPE), mesh["domain"], [Shard(1)], {0: (3, 1)}))


def test_channels_of_several_meshes_are_refused_on_all_ranks():
    for text in map(str, run_expecting_errors(give_channels_to_the_world, 4)):
        assert "SyncBatchNorm" in text and "[3, 1]" in text and "different channels" in text
        assert "the process group of the mesh" in text


@on_ranks(4)
def test_second_derivatives():
    mesh = shared_mesh((2, 2), ("data", "domain"))
    torch.manual_seed(0)
    here = mesh["data"].get_local_rank()
    batches = torch.randn(2, 2, *SHAPE, dtype=torch.float64)
    found = []
    sharded = shard(batches[here], mesh["domain"], [Shard(2)], {0: (4, 1)}, requires_grad=True)
    for x, kind in ((batches.flatten(0, 1).requires_grad_(), "batch"), (sharded, "sync")):
        module = made(kind, torch.float64)
        (grad,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.pow(2).sum(), x)[0])
    torch.testing.assert_close(found[1].full_tensor(), found[0].unflatten(0, (2, 2))[here])


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1))


@pytest.mark.on_device
@on_ranks(4)
def test_training_on_replicas_is_that_of_one_device_with_all_samples():
    """Two replicas of a domain each, with samples of their own, and one device that has all of them."""
    mesh = shared_mesh((2, 2), ("data", "domain"))
    torch.manual_seed(0)
    single = Network().double()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, model)]
    for _ in range(3):
        batches = torch.randn(2, 2, *SHAPE, dtype=torch.float64)
        x = shard(batches[mesh["data"].get_local_rank()], mesh["domain"], [Shard(2)], {0: (2, 3)})
        for m, batch, optimizer in zip((single, model), (batches.flatten(0, 1), x), optimizers, strict=True):
            optimizer.zero_grad()
            m(batch).pow(2).mean().backward()
            for p in m.parameters() if m is model else ():  # as wrappers do, of which DDP refuses the module on CPUs
                dist.all_reduce(p.grad.div_(2), group=mesh.get_group("data"))
            optimizer.step()
    for value, expected in zip(model.state_dict().values(), single.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected)


@on_ranks(2)
def test_within_its_mesh_it_sends_what_batch_norm_sends():
    mesh, counts = shared_mesh(2), []
    for module in (nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.SyncBatchNorm(4).eval()):
        x = shard(torch.randn(2, *SHAPE), mesh, [Shard(2)], {0: (4, 1)}, requires_grad=True)
        with count_communication() as counted:
            module(x).sum().backward()
        counts.append(dict(counted.collectives))
    plain, synchronized, evaluated = counts
    assert synchronized == plain and evaluated.get("all_gather", 0) == 0


def test_plain_tensors_get_what_torch_gives_them():
    module, x = made("sync", torch.float32).eval(), torch.randn(2, *SHAPE)
    expected = made("batch", torch.float32).eval()(x)
    assert torch.equal(module(x), expected)
    assert torch.equal(nn.SyncBatchNorm.forward(module, x), expected)
    assert torch.equal(copy.deepcopy(module)(x), expected)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), expected)


def test_a_preview_shows_batch_norm():
    x, kinds = torch.empty(2, *SHAPE, device="meta"), (nn.BatchNorm2d, nn.SyncBatchNorm)
    plain, synchronized = (explain(nn.Sequential(kind(4)), x, mesh=2, shard=2) for kind in kinds)
    shown = str(plain).removesuffix(plain.share()).rstrip()  # torch's own SyncBatchNorm does not run on one process
    assert str(synchronized) == shown and "batch_norm" in shown
