"""Normalizations against the unsharded ones: values, gradients, running statistics, precision, messages and errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from alike import raises_alike
from halves import half_of, in_halves
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardtensor
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)

# (mesh shape, dims cut, sizes) of inputs of shape (4, 8, 8, 3)
CUTS = [
    (1, (2,), {}),
    (2, (2,), {0: (5, 3)}),
    (2, (2,), {0: (7, 1)}),
    (2, (2,), {0: (0, 8)}),
    (2, (0,), {0: (3, 1)}),
    (2, (0,), {0: (4, 0)}),
    (2, (1,), {0: (6, 2)}),
    (2, (1,), {0: (0, 8)}),
    (2, (3,), {0: (1, 2)}),
    (2, (None,), {}),
    (3, (2,), {0: (3, 0, 5)}),
    (4, (2,), {0: (1, 4, 0, 3)}),
    ((2, 2), (0, 2), {0: (3, 1), 1: (5, 3)}),
    ((2, 2), (0, 2), {0: (0, 4), 1: (7, 1)}),
    ((2, 2), (2, 3), {0: (5, 3), 1: (0, 3)}),
    ((2, 2), (3, 2), {0: (1, 2), 1: (8, 0)}),
    ((2, 2), (1, 2), {0: (2, 6), 1: (5, 3)}),
    ((2, 2), (None, 2), {1: (6, 2)}),
]


def modules():
    """Every normalization of images (N, 8, 8, 3), with parameters and running statistics that are not neutral."""
    made = {
        "group": nn.GroupNorm(4, 8),
        "group of all": nn.GroupNorm(1, 8),
        "group plain": nn.GroupNorm(4, 8, affine=False),
        "instance": nn.InstanceNorm2d(8, affine=True),
        "instance plain": nn.InstanceNorm2d(8),
        "instance running": nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        "instance eval": nn.InstanceNorm2d(8, affine=True, track_running_stats=True).eval(),
        "batch": nn.BatchNorm2d(8),
        "batch cumulative": nn.BatchNorm2d(8, momentum=None),
        "batch plain": nn.BatchNorm2d(8, affine=False, track_running_stats=False),
        "batch eval": nn.BatchNorm2d(8).eval(),
        "layer": nn.LayerNorm(3),
        "layer of images": nn.LayerNorm([8, 8, 3]),
        "layer without bias": nn.LayerNorm([8, 3], bias=False),
        "layer plain": nn.LayerNorm([8, 3], elementwise_affine=False),
        "rms": nn.RMSNorm(3),
        "rms of rows": nn.RMSNorm([8, 3], eps=1e-3),
    }
    torch.manual_seed(0)
    for module in made.values():
        module.double()
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                nn.init.uniform_(tensor, 0.5, 2)
    return made


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes", "half"), in_halves(CUTS))
@on_ranks("mesh_shape")
def test_values_gradients_and_running_statistics(mesh_shape, dims, sizes, half):
    x = torch.randn(4, 8, 8, 3, dtype=torch.float64) * 2 + 1
    failures = []
    for name, module in half_of(modules().items(), half):
        placements = [Replicate() if d is None else Shard(d) for d in dims]
        try:
            assert_matches_unsharded(module, x, mesh_shape=mesh_shape, placements=placements, shard_sizes=sizes)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n".join(failures)


@on_ranks(2)
def test_other_shapes_layouts_and_doors():
    def check(module, x, dim, sizes):
        assert_matches_unsharded(module, x, mesh_shape=2, placements=[Shard(dim)], shard_sizes={0: sizes})

    x = torch.randn(3, 8, dtype=torch.float64)
    check(nn.BatchNorm1d(8).double(), x, 0, (1, 2))
    check(nn.BatchNorm1d(8).double(), x, 1, (5, 3))
    check(nn.GroupNorm(2, 8).double(), x, 0, (1, 2))
    check(nn.GroupNorm(2, 8).double(), x, 1, (4, 4))
    check(nn.LayerNorm(8).double(), x, 1, (7, 1))
    check(nn.LayerNorm(8).double(), x, 0, (0, 3))
    check(nn.RMSNorm(8).double(), x, 1, (7, 1))
    check(nn.RMSNorm(8).double(), x[0], 0, (5, 3))
    check(nn.BatchNorm1d(8).double(), torch.randn(2, 8, 5, dtype=torch.float64), 2, (1, 4))
    check(nn.BatchNorm3d(2).double(), torch.randn(2, 2, 3, 4, 2, dtype=torch.float64), 3, (1, 3))
    check(nn.InstanceNorm1d(8).double(), torch.randn(8, 5, dtype=torch.float64), 1, (1, 4))  # unbatched
    # One value per channel on each rank, but two on one device.
    check(nn.BatchNorm2d(8).double(), torch.randn(1, 8, 2, 1, dtype=torch.float64), 2, (1, 1))
    check(nn.InstanceNorm2d(8).double(), torch.randn(1, 8, 2, 1, dtype=torch.float64), 2, (1, 1))
    # Dims of length one that parameters belong to.
    check(nn.GroupNorm(1, 1).double(), torch.randn(2, 1, 6, dtype=torch.float64), 2, (2, 4))
    # Other layouts.
    image = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    check(nn.GroupNorm(2, 4).double(), image.contiguous(memory_format=torch.channels_last), 2, (2, 4))
    check(nn.BatchNorm2d(4).double(), image.contiguous(memory_format=torch.channels_last), 3, (2, 3))

    def after_a_sum(x):
        return F.layer_norm(x.sum(0), (3,))  # a Partial

    check(after_a_sum, torch.randn(8, 5, 3, dtype=torch.float64), 0, (5, 3))

    # The functions of torch itself take the statistics in another order.
    image, mean, var = image.abs(), torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    weight, bias = torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    for use_input in (True, False):
        check(
            lambda x, u=use_input: torch.batch_norm(x, weight, bias, mean.clone(), var.clone(), u, 0.3, 1e-5, False),
            image,
            2,
            (2, 4),
        )
        check(
            lambda x, u=use_input: torch.instance_norm(x, weight, bias, mean.clone(), var.clone(), u, 0.3, 1e-5, False),
            image,
            2,
            (2, 4),
        )
    check(lambda x: torch.group_norm(x, 2, weight, bias, 1e-3), image, 2, (2, 4))
    check(lambda x: torch.layer_norm(x, (6, 5), eps=1e-3), image, 2, (2, 4))
    check(lambda x: torch.rms_norm(x, (6, 5)), image, 2, (2, 4))


def running_statistics():
    mesh = shared_mesh(4)
    torch.manual_seed(0)
    module = nn.BatchNorm2d(3)
    for i in range(3):
        whole = torch.randn(2, 3, 9, 5) * 3 + i
        module(shard(whole, mesh, [Shard(2)], {0: (1, 4, 0, 4)}))
    return module.running_mean.tolist(), module.running_var.tolist(), int(module.num_batches_tracked)


def test_running_statistics_are_bitwise_equal_on_all_ranks():
    results = run_distributed(running_statistics, 4)
    assert all(r == results[0] for r in results)
    assert results[0][2] == 3


def errors_at_mean(dtype, mean, spread, width=8):
    """Largest error of ours and of torch's, against float64, per module."""
    mesh = shared_mesh(3)
    torch.manual_seed(0)
    x = (torch.randn(2, 4, 64, width, dtype=torch.float64) * spread + mean).to(dtype)
    result = {}
    for name, module in {
        "group": nn.GroupNorm(2, 4),
        "batch": nn.BatchNorm2d(4),
        "instance": nn.InstanceNorm2d(4),
        "layer": nn.LayerNorm([64, width]),
    }.items():
        exact = module.double()(x.double())
        module = module.to(dtype)
        ours = module(shard(x, mesh, [Shard(2)], {0: (40, 1, 23)})).full_tensor()
        result[name] = [(y.double() - exact).abs().max().item() for y in (ours, module(x))]
    return result


@pytest.mark.parametrize("mean", [0.0, 0.9, 1.1, -3.0, 30.0])
def test_the_way_that_statistics_are_computed_costs_no_precision(mean):
    """It depends on the mean, see statistics.py."""
    for errors in run_distributed(errors_at_mean, 3, torch.float32, mean, 1.0, 64):
        for name, (ours, torchs) in errors.items():
            assert ours <= max(1.5 * torchs, 1e-6 * (1 + abs(mean))), f"{name}: {ours} against torch's {torchs}"


def test_a_large_mean_costs_no_more_precision_than_on_one_device():
    for errors in run_distributed(errors_at_mean, 3, torch.float32, 1e4, 1.0):
        for name, (ours, torchs) in errors.items():
            assert ours <= max(1.1 * torchs, 1.5e-3), f"{name}: {ours} against torch's {torchs}"


def test_statistics_of_half_precision_are_float32():
    # Sums of 1024 numbers around 100 have no accurate half precision, nor have the squares.
    for dtype in (torch.bfloat16, torch.float16):
        for errors in run_distributed(errors_at_mean, 3, dtype, 100.0, 30.0):
            for name, (ours, torchs) in errors.items():
                assert ours <= max(1.5 * torchs, 0.01), f"{dtype} {name}: {ours} against torch's {torchs}"


class Autocast(nn.Module):
    def __init__(self, module, enabled):
        super().__init__()
        self.module, self.enabled = module, enabled

    def forward(self, x):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=self.enabled):
            return self.module(x)


@pytest.mark.on_cpu("GPUs have no group norm of mixed dtypes")
@on_ranks(2)
def test_dtypes_of_results_are_torchs():
    x = torch.randn(2, 4, 8, 6)

    def check(module, dtype, amp):
        wrapped = Autocast(module, amp)
        for placements, sizes in (([Shard(2)], {0: (5, 3)}), ([Shard(0)], {0: (1, 1)})):
            # torch rounds gradients of float32 parameters to half precision on the way.
            assert_matches_unsharded(
                wrapped, x.to(dtype), mesh_shape=2, placements=placements, shard_sizes=sizes, rtol=0.04, atol=0.04
            )

    for module in (nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm([8, 6])):
        check(module, torch.bfloat16, False)  # float32 parameters: torch mixes them
        check(module, torch.bfloat16, True)
        check(module, torch.float32, True)
        module.to(torch.bfloat16)
        check(module, torch.bfloat16, False)
    check(nn.RMSNorm([8, 6], dtype=torch.bfloat16), torch.bfloat16, False)


@on_ranks(2)
def test_what_is_sent():
    mesh = shared_mesh(2)
    result = {"device": mesh.device_type}
    for name, module, dim in (
        ("group", nn.GroupNorm(2, 4), 2),
        ("batch", nn.BatchNorm2d(4), 2),
        ("instance", nn.InstanceNorm2d(4), 2),
        ("group, batch cut", nn.GroupNorm(2, 4), 0),
        ("layer", nn.LayerNorm(6), 2),
        ("layer plain", nn.LayerNorm(6, elementwise_affine=False), 2),
        ("batch eval", nn.BatchNorm2d(4).eval(), 2),
    ):
        x = shard(torch.randn(2, 4, 8, 6), mesh, [Shard(dim)], requires_grad=True)
        cotangent = torch.ones_like(x)
        module(x).backward(cotangent)  # devices connect the group of gradients
        with count_communication() as forward:
            y = module(x)
        with count_communication() as backward:
            y.backward(cotangent)
        assert not forward.messages and not backward.messages
        result[name] = [(dict(c.collectives), c.collective_bytes) for c in (forward, backward)]
    # Mean and variance of 2 x 2 groups in float32; backward two sums per group, and weight and bias (4 each), which
    # for batch norm are the same numbers; but kernels of devices take another sum than the weight's gradient.
    on_cpu = result.pop("device") == "cpu"
    assert result == {
        "group": [({"all_gather": 1}, 32), ({"all_reduce": 1}, 32 + 32)],
        "batch": [({"all_gather": 1}, 32), ({"all_reduce": 1}, 32 if on_cpu else 48)],
        "instance": [({"all_gather": 1}, 64), ({"all_reduce": 1}, 64)],
        "group, batch cut": [({}, 0), ({"all_reduce": 1}, 32)],
        "layer": [({}, 0), ({"all_reduce": 1}, 48)],
        "layer plain": [({}, 0), ({}, 0)],
        "batch eval": [({}, 0), ({"all_reduce": 1}, 32)],
    }


@on_ranks(2)
def test_nothing_of_the_inputs_size_but_the_input_is_kept_for_backward():
    mesh = shared_mesh(2)
    x = shard(torch.randn(2, 4, 8, 6), mesh, [Shard(2)], requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        nn.GroupNorm(2, 4)(x)
    sizes, is_input = (
        sorted(t.numel() for t in saved),
        any(t is x or t.data_ptr() == x.data_ptr() for t in saved if t.shape == x.shape),
    )
    assert sizes == [4, 2 * 4, 2 * 4, 2 * 4 * 8 * 6]  # weight, mean and variance of the samples' channels, x
    assert is_input


@on_ranks(2)
def test_replicated_dtensor_parameters():
    mesh = shared_mesh(2)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    weight = torch.rand(4, dtype=torch.float64)
    for dim, groups in ((2, 2), (0, 2), (1, 4)):
        distributed = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
        plain = weight.clone().requires_grad_()
        F.group_norm(shard(x, mesh, [Shard(dim)]), groups, distributed).square().sum().backward()
        F.group_norm(x, groups, plain).square().sum().backward()
        torch.testing.assert_close(distributed.grad.full_tensor(), plain.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_operators_by_name():
    """The operators below, which return their statistics, too."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    w, b = torch.rand(2, 6, dtype=torch.float64)
    rows = torch.rand(5, dtype=torch.float64)
    aten = torch.ops.aten
    functions = {
        "group": lambda x, w, b: torch.native_group_norm(x, w, b, 4, 6, 5, 3, 1e-3),
        "layer": lambda x, w, b: aten.native_layer_norm(x, [5], rows, None, 1e-3),
        "layer of images": lambda x, w, b: aten.native_layer_norm.default(x, [6, 5], None, None, 1e-3),
        "batch": lambda x, w, b: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-3),
        "batch without": lambda x, w, b: aten._native_batch_norm_legit(x, w, b, True, 0.1, 1e-3),
        "batch running": lambda x, w, b: torch._native_batch_norm_legit_no_training(
            x, w, b, w.detach() - 1, b.detach(), 0.1, 1e-3
        ),
    }
    failures = []
    for name, function in functions.items():
        for dim, sizes in ((0, (1, 3)), (0, (4, 0)), (1, (5, 1)), (1, (0, 6)), (2, (4, 1))):
            try:
                assert_matches_unsharded(
                    # The gradients of the others' statistics torch ignores.
                    lambda *t, f=function, n=3 if name == "group" else 1: f(*t)[:n],
                    *(x, w, b),
                    mesh_shape=2,
                    placements=[[Shard(dim)], None, None],
                    shard_sizes=[{0: sizes}, None, None],
                )
            except AssertionError as error:
                failures.append(f"{name} {dim} {sizes}: {error}")
            cut = shard(x, shared_mesh(2), [Shard(dim)], {0: sizes})
            for got, expected in zip(function(cut, w, b), function(x, w, b), strict=True):
                torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-10, atol=1e-12)
    assert not failures, "\n".join(failures)


@on_ranks(2)
def test_sharded_parameters():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    w, b, images = torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64), torch.rand(4, 6).double()

    def check(function, *tensors, dims, sizes):
        placements = [None if d is None else [Shard(d)] for d in dims]
        assert_matches_unsharded(function, x, *tensors, mesh_shape=2, placements=placements, shard_sizes=sizes)

    for sizes in ({0: (3, 1)}, {0: (0, 4)}):
        check(lambda x, w, b: F.group_norm(x, 2, w, b), w, b, dims=(1, 0, 0), sizes=[sizes, sizes, {0: (1, 3)}])
        batch = lambda x, w, b: F.batch_norm(x, None, None, w, b, True)  # noqa: E731
        check(batch, w, b, dims=(1, 0, None), sizes=[sizes, sizes, None])
        check(lambda x, w: F.layer_norm(x, (4, 6), w), images, dims=(1, 0), sizes=[sizes, sizes])
        check(lambda x, w: F.rms_norm(x, (4, 6), w), images, dims=(1, 0), sizes=[sizes, {0: (2, 2)}])


@on_ranks(2)
def test_second_derivatives():
    torch.manual_seed(0)
    x = torch.randn(4, 4, 6, dtype=torch.float64)
    w, b = torch.rand(2, 4, dtype=torch.float64)
    rows = torch.rand(6, dtype=torch.float64)

    def penalty(function):
        def squares(*tensors):
            grads = torch.autograd.grad(function(*tensors).pow(3).sum(), tensors, create_graph=True)
            return sum((grad * grad).sum() for grad in grads)

        return squares

    functions = {
        "group": (lambda x, w, b: F.group_norm(x, 2, w, b), (w, b)),
        "layer": (lambda x, w: F.layer_norm(x, (6,), w), (rows,)),
        "rms": (lambda x, w: F.rms_norm(x, (6,), w), (rows,)),
        "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (w, b)),
        "batch eval": (lambda x, w, b: F.batch_norm(x, w.detach(), b.detach() + 1, w, b), (w, b)),
    }
    failures = []
    for name, (function, parameters) in functions.items():
        for dim, sizes in ((0, (1, 3)), (0, (4, 0)), (1, (3, 1)), (2, (5, 1)), (2, (0, 6))):
            try:
                assert_matches_unsharded(
                    penalty(function),
                    x,
                    *parameters,
                    mesh_shape=2,
                    placements=[[Shard(dim)], *[None] * len(parameters)],
                    shard_sizes=[{0: sizes}, *[None] * len(parameters)],
                )
            except AssertionError as error:
                failures.append(f"{name} {dim} {sizes}: {error}")
    assert not failures, "\n".join(failures)


@on_ranks(2)
def test_cut_groups_are_exchanged_there_and_back():
    mesh = shared_mesh(2)
    counts = []
    for groups in (2, 1):  # cuts move to the border of a group; or the longest other dim is cut
        x = shard(torch.randn(2, 4, 8), mesh, [Shard(1)], {0: (1, 3)}, requires_grad=True)
        with count_communication() as forward:
            y = F.group_norm(x, groups)
        assert y.shard_sizes == {0: (1, 3)}
        counts.append((forward.messages, forward.bytes_sent, dict(forward.collectives)))
    rank = dist.get_rank()
    two, one = counts
    channel = 2 * 8 * 4
    assert two == (1, channel, {"all_to_all": 2})  # one rank hands a channel over and gets it back
    half = channel // 2
    assert one == (2, ((1, 3)[rank] + (3, 1)[rank]) * half, {"all_to_all": 2, "all_gather": 1})


def operand():
    return shard(torch.randn(2, 4, 8, 6), shared_mesh(2), [Shard(2)])


def one_value(function, dim, sizes):
    return lambda x: function(shard(torch.randn(1, 4, 1), x.device_mesh, [Shard(dim)], {0: sizes}))


def sharded_weight(x):
    F.group_norm(x, 2, distribute_tensor(torch.ones(4), x.device_mesh, [Shard(0)], src_data_rank=None))


ERRORS = {
    "group cut": (
        one_value(lambda x: F.group_norm(x, 1), 1, (1, 3)),
        shardtensor.UnsupportedSharding,
        r"tensor dim 1 must be unsharded, .*no free dim.*\[1, 3\]",
    ),
    "one value": (
        one_value(lambda x: F.batch_norm(x, None, None, training=True), 2, (1, 0)),
        ValueError,
        "Expected more than 1 value per channel when training",
    ),
    "one value per group": (
        one_value(lambda x: F.group_norm(x, 4), 2, (0, 1)),
        ValueError,
        "Expected more than 1 value per channel when training",
    ),
    "groups": (lambda x: F.group_norm(x, 3), RuntimeError, "divisible by num_groups"),
    "normalized shape": (lambda x: F.layer_norm(x, (4, 6)), RuntimeError, "normalized_shape=[4, 6]"),  # of rank 0
    "dtypes": (
        lambda x: F.group_norm(x, 2, torch.ones(4, dtype=torch.float64)),
        RuntimeError,
        "mixed dtype|expected scalar type",
    ),
    "sharded weight": (
        sharded_weight,
        shardtensor.UnsupportedSharding,
        "would have to be gathered over mesh dim 0.*Replicate",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_same_on_every_rank(name):
    raises_alike(operand, name)


@on_ranks(2)
def test_parameters_that_are_not_contiguous():
    """Kernels that torch's functions call with contiguous parameters get them so here as well."""
    for shape, dims in (((5, 6, 7), (0, 2)), ((5, 6, 4, 3), (0, 1, 3))):
        table = torch.randn(6, 4, dtype=torch.float64, generator=seeded(0)).exp()
        x = torch.randn(shape, dtype=torch.float64, generator=seeded(1))
        rows = x.new_ones(2 * shape[-1]).cumsum(0)[::2]
        functions = {
            "group norm": lambda x, t: F.group_norm(x, 3, t[:, 0], t[:, 1]),
            "batch norm": lambda x, t: F.batch_norm(x, None, None, t[:, 0], t[:, 1], True),
            "batch norm, running": lambda x, t: F.batch_norm(x, *t.detach()[:, 2:].unbind(1), t[:, 0], t[:, 1]),
            "instance norm": lambda x, t: F.instance_norm(x, None, None, t[:, 0], t[:, 1]),
            "layer norm": lambda x, t, r=rows: F.layer_norm(x, r.shape, r, r),
        }
        for name, function in functions.items():
            for dim in dims:
                try:
                    results = []
                    for t in (x, shard(x, shared_mesh(2), [Shard(dim)], {0: (shape[dim] - 1, 1)})):
                        t, given = t.detach().requires_grad_(), table.clone().requires_grad_()
                        y = function(t, given)
                        y.square().sum().backward()
                        results.append([y, t.grad, *([] if given.grad is None else [given.grad])])
                    for ours, torchs in zip(results[1], results[0], strict=True):
                        torch.testing.assert_close(getattr(ours, "full_tensor", lambda t=ours: t)(), torchs)
                except Exception as error:
                    raise AssertionError(f"{name}, {shape}, dim {dim}: {error}") from error
