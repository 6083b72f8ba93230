"""Normalization over sharded dims: precision of statistics and gradients, on shards large enough for every path."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from device import is_gpu
from on_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardtensor.testing import assert_matches_unsharded, count_communication, run_distributed, shard, shared_mesh

SHAPE, SIZES = (1, 4, 96, 128), {0: (61, 0, 35)}


def functions():
    weight, bias = torch.rand(4) + 0.5, torch.rand(4)
    rows = torch.rand(96, 128) + 0.5
    return {
        "group": lambda x: F.group_norm(x, 2, weight.to(x.dtype), bias.to(x.dtype)),
        "batch": lambda x: F.batch_norm(x, None, None, weight.to(x.dtype), bias.to(x.dtype), True),
        "instance": lambda x: F.instance_norm(x),
        "layer": lambda x: F.layer_norm(x, (96, 128), rows.to(x.dtype)),
        "rms": lambda x: F.rms_norm(x, (96, 128), rows.to(x.dtype), 1e-5),
    }


def errors(mean, spread, dtype, memory_format):
    """Largest errors of result and gradient, relative to the largest number of float64's: ours and torch's."""
    torch.manual_seed(0)
    mesh = shared_mesh(3)
    x, seed = torch.randn(2, *SHAPE, dtype=torch.float64)
    x, seed = (x * spread + mean).to(dtype), seed.to(dtype)
    local = [shard(t.contiguous(memory_format=memory_format), mesh, [Shard(2)], SIZES) for t in (x, seed)]

    def run(function, x, seed):
        x = x.detach().requires_grad_()
        y = function(x)
        (grad,) = torch.autograd.grad(y, x, seed)
        return [getattr(t, "full_tensor", lambda t=t: t)().double() for t in (y.detach(), grad)]

    result = {}
    for name, function in functions().items():
        exact, ours, torchs = (run(function, *given) for given in ((x.double(), seed.double()), local, (x, seed)))
        result[name] = [
            [((t - e).abs().max() / e.abs().max().clamp(min=1e-30)).item() for t, e in zip(found, exact, strict=True)]
            for found in (ours, torchs)
        ]
    return result


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("mean", "spread", "dtype", "least"),
    [
        (0.0, 1.0, torch.float32, 2e-6),
        (1e4, 1.0, torch.float32, 1e-3),
        (-3.0, 1e-6, torch.float32, 1e-3),  # a variance far below eps
        (0.0, 1e-9, torch.float32, 2e-6),
        (1e3, 0.0, torch.float32, 1e-6),  # all equal
        (5.0, 2.0, torch.bfloat16, 1e-2),
    ],
)
def test_precision(mean, spread, dtype, least, memory_format, device_of_ranks):
    times = 1.1
    if is_gpu(device_of_ranks):  # whose kernel for several processes has other roundings than that for one
        times, least = 2, least if spread else 1e-2
    for result in run_distributed(errors, 3, mean, spread, dtype, memory_format):
        for name, (ours, torchs) in result.items():
            for error, reference in zip(ours, torchs, strict=True):
                assert error <= max(times * reference, least), f"{name}: {ours} against torch's {torchs}"


@on_ranks(2)
def test_large_shards_in_any_memory_format():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 96, 64, dtype=torch.float64) + 3
    weight, bias = torch.rand(2, 4, dtype=torch.float64)
    for t in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3), x[:, :, ::2]):
        for function in (
            lambda x, w, b: F.group_norm(x, 2, w, b),
            lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
            lambda x, w, b: F.instance_norm(x, None, None, w, b),
        ):
            for dim in (2, 3):
                sizes = {0: (t.shape[dim] - 3, 3)}
                places = [[Shard(dim)], None, None]
                assert_matches_unsharded(
                    function, t, weight, bias, mesh_shape=2, placements=places, shard_sizes=[sizes, None, None]
                )


@on_ranks(3)
def test_shards_of_one_element_or_none():
    """Shards of one element, or of none, per set, also of equal ones; a shard with all of them; hardly any eps."""
    torch.manual_seed(0)
    weight, bias = torch.rand(2, 4, dtype=torch.float64) + 0.5
    functions = [
        lambda x, w, b: F.group_norm(x, 4, w, b),
        lambda x, w, b: F.group_norm(x, 2, w),
        lambda x, w, b: F.group_norm(x, 2),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, 1e-30),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=1e-30),
        lambda x, w, b: F.layer_norm(x, (3, 1), eps=1e-3),
    ]
    for n in (1, 2):
        x = torch.randn(n, 4, 3, 1, dtype=torch.float64)
        for sizes in ((1, 1, 1), (2, 0, 1), (0, 3, 0)):
            for i, function in enumerate(functions):
                used = (x, weight, bias) if i in (0, 3, 4) else (x, weight) if i == 1 else (x,)
                called = lambda *t, f=function: f(*t, *[None] * (3 - len(t)))  # noqa: E731
                places = [[Shard(2)], *[None] * (len(used) - 1)]
                cuts = [{0: sizes}, *[None] * (len(used) - 1)]
                assert_matches_unsharded(called, *used, mesh_shape=3, placements=places, shard_sizes=cuts)


@on_ranks(2)
def test_the_gradient_of_a_weight_is_not_overwritten_by_that_of_the_input():
    x = torch.randn(1, 2, 3, dtype=torch.float64)
    weight = torch.rand(1, 2, 3, dtype=torch.float64)
    mesh, grads = shared_mesh(2), []
    for whole in (False, True):
        w = (weight.clone() if whole else distribute_tensor(weight, mesh, [Replicate()])).requires_grad_()
        y = x.clone() if whole else shard(x, mesh, [Shard(0)], {0: (1, 0)})
        F.layer_norm(y.requires_grad_(), (1, 2, 3), w).pow(3).sum().backward()
        grads.append(w.grad if whole else w.grad.full_tensor())
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@on_ranks(4)
def test_messages_where_the_batch_is_sharded_too():
    """Collectives per mesh dim, for N > 1, with the batch sharded on the second one."""
    mesh = shared_mesh((2, 2))
    counts = {}
    for name, function in (
        ("group", lambda x, w, b: F.group_norm(x, 2, w, b)),
        ("batch", lambda x, w, b: F.batch_norm(x, None, None, w, b, True)),
        ("instance", lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    ):
        x = torch.randn(5, 4, 7, dtype=torch.float64)
        weight, bias = torch.rand(2, 4, dtype=torch.float64)
        sizes = {0: (3, 2), 1: (5, 2)}
        places = [[Shard(0), Shard(2)], None, None]
        cuts = [sizes, None, None]
        assert_matches_unsharded(function, x, weight, bias, mesh_shape=(2, 2), placements=places, shard_sizes=cuts)
        w, b = weight.requires_grad_(), bias.requires_grad_()
        given = shard(x, mesh, [Shard(0), Shard(2)], sizes, requires_grad=True)
        with count_communication() as forward:
            y = function(given, w, b)
        seed = torch.ones_like(y)
        with count_communication() as backward:
            y.backward(seed)
        counts[name] = dict(forward.collectives), dict(backward.collectives)
    one_per_mesh_dim = {"all_reduce": 2}
    assert counts == {
        "group": ({"all_gather": 1}, one_per_mesh_dim),
        "batch": ({"all_gather": 2}, one_per_mesh_dim),
        "instance": ({"all_gather": 1}, one_per_mesh_dim),
    }


def counted_writes():
    """How often each norm's parameters and buffers count as written to: on shards, and on one device."""
    torch.manual_seed(0)
    image = torch.randn(8, 4, 7, 3, dtype=torch.float64)
    found = {}
    for name, make in {
        "batch": lambda: torch.nn.BatchNorm2d(4),
        "evaluation": lambda: torch.nn.BatchNorm2d(4).eval(),
        "average": lambda: torch.nn.BatchNorm2d(4, momentum=None),
        "instance": lambda: torch.nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    }.items():
        for placement, sizes in ((Shard(2), (5, 2)), (Shard(0), (8, 0)), (Shard(1), (1, 3)), (Replicate(), None)):
            module, plain = make().double(), make().double()
            before = [t._version for t in module.state_dict(keep_vars=True).values()]
            module(shard(image.clone(), shared_mesh(2), [placement], sizes and {0: sizes}))
            plain(image)
            found[name, placement] = [
                [t._version - n for t, n in zip(m.state_dict(keep_vars=True).values(), before, strict=True)]
                for m in (module, plain)
            ]
    return found


def test_statistics_count_as_written_to_where_they_do_on_one_device():
    for ours, torchs in run_distributed(counted_writes, 2)[0].values():
        assert ours == torchs


class AlsoOnAWhole(torch.nn.Module):
    """Its batch norm is called with a plain tensor as well, whose graph keeps the running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(4).double()

    def forward(self, x):
        whole = torch.linspace(-1, 1, 48, dtype=x.dtype).view(2, 4, 2, 3).sin()
        return self.norm(whole).square().mean() + self.norm(x).exp().mean() + self.norm(whole).exp().mean()


@on_ranks(2)
def test_one_module_on_shards_and_on_wholes():
    image = torch.randn(2, 4, 7, 3, dtype=torch.float64)
    assert_matches_unsharded(AlsoOnAWhole(), image, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (5, 2)})
