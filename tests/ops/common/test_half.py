"""Half precision: what is summed over ranks is rounded once, as on one device, also where contributions cancel.

For gradients of weights that holds in ``half_precision("exact")``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import RanksDiffer, ShardTensor, half_precision
from shardtensor.communication import weight_gradients
from shardtensor.ops.common.alignment import is_half, product, widened
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))  # of the ranks, too, which import what they call
bench_half = importlib.import_module("bench_half")
HALF = (torch.bfloat16, torch.float16)


def numbers(*shape, dtype, offset=40.0, seed=0):
    """Numbers with an offset of many units, all of them exact in ``dtype``."""
    unit = offset * torch.finfo(dtype).eps
    noise = torch.randint(-4, 5, shape, generator=seeded(seed))
    return (offset + unit * noise).to(dtype)


def cancelling(*shape, dim, dtype, offset=40.0, seed=0):
    """The same, of the other sign in the second half of a dim."""
    x = numbers(*shape, dtype=dtype, offset=offset, seed=seed)
    n = shape[dim]
    x.narrow(dim, n - n // 2, n // 2).neg_()
    return x


def assert_as_exact(got, one, exact, what):
    """Not further from ``exact`` than twice what one device gives, or than a unit of the largest number."""
    got = (got.full_tensor() if isinstance(got, ShardTensor) else got).detach()
    one, exact = one.detach(), exact.detach()
    assert got.dtype == one.dtype, what
    error, of_one = (float((t.double() - exact).abs().max()) for t in (got, one))
    unit = torch.finfo(one.dtype).eps * float(exact.abs().max())
    assert error <= 2 * max(of_one, unit / 2), f"{what}: off by {error}, one device by {of_one}, a unit is {unit}"


def leaf(t):
    return t.clone().requires_grad_()


def results(function, tensors, factor):
    """The result and the gradients of ``(result * factor).sum()``."""
    y = function(*tensors)
    (y * (1 if factor is None else factor.to(y.dtype))).sum().backward()
    return [y, *(t.grad for t in tensors)]


def check(function, tensors, dims, sizes, mesh, factor=None, others=leaf):
    """The first tensor sharded along ``dims``, the others as ``others`` makes them; with gradients."""
    exact = results(function, [leaf(t.double()) for t in tensors], factor)
    one = results(function, [leaf(t) for t in tensors], factor)
    x = shard(tensors[0], mesh, [Shard(d) for d in dims], sizes, requires_grad=True)
    got = results(function, [x, *map(others, tensors[1:])], factor)
    for i, (a, b, c) in enumerate(zip(got, one, exact, strict=True)):
        assert_as_exact(a, b, c, f"{tensors[0].dtype}, number {i}")


# -- contributions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@on_ranks(2)
def test_contributions_are_rounded_once(dtype):
    mesh = shared_mesh(2)
    x = cancelling(63, 4, dim=0, dtype=dtype)
    s = shard(x, mesh, [Shard(0)], {0: (40, 23)})
    total, exact = s.sum(0), x.double().sum(0)
    assert total.dtype == dtype and total.placements == (Partial(),)
    assert total.to_local().dtype == dtype  # what the user sees
    for pending, value in [
        (total, exact),
        (total * 2 + s.mean(0), exact * 2 + exact / 63),
        ((-total).view(2, 2).sum(0) / 4, -exact.view(2, 2).sum(0) / 4),
        (total.detach().clone().unsqueeze(0), exact.unsqueeze(0)),
        (s[:, :2].trace() * 3, x[:, :2].double().trace() * 3),
    ]:
        assert pending.placements == (Partial(),) and pending.dtype == dtype
        with count_communication() as counted:
            whole = pending.full_tensor()
        assert counted.collectives == {"all_gather": 1, "all_reduce": 1}, counted
        assert counted.collective_bytes == 4 * value.numel() + 16, counted  # with what the ranks compare
        assert_as_exact(whole, value.to(dtype), value, "pending")
    assert torch.zeros_like(total).to_local().dtype == dtype
    assert torch.equal(total.redistribute(placements=[Shard(0)]).full_tensor(), total.full_tensor())
    given = ShardTensor.from_local(x[:4], mesh, [Partial()])
    assert given.to_local().data_ptr() == x.data_ptr() and torch.equal(given.full_tensor(), x[:4] * 2)
    product = shard(torch.full((8,), 300.0, dtype=dtype), mesh, [Shard(0)], {0: (1, 7)}) / 60
    assert_as_exact(product.prod(), torch.tensor(5.0**8).to(dtype), torch.tensor(5.0**8), "product")


@half_precision("exact")
def exactly_linear(x, w):
    return F.linear(x, w.t())


@pytest.mark.parametrize("dtype", HALF)
@on_ranks(3)
def test_sums_over_a_sharded_dim(dtype):
    mesh, sizes = shared_mesh(3), {0: (11, 4, 9)}
    x = cancelling(24, 6, dim=0, dtype=dtype)
    for name in ("sum", "mean"):
        check(lambda x, name=name: getattr(x, name)(0), [x], [0], sizes, mesh)
        check(lambda x, name=name: getattr(x, name)(), [x], [0], sizes, mesh)
    near_one = numbers(24, 5, dtype=dtype, offset=1.0)
    for function in (
        lambda x, w: x.t() @ w,
        lambda x, w: torch.einsum("ki,kj->ij", x, w),
        lambda x, w: torch.mv(x.t(), w[:, 0]),
        lambda x, w: F.linear(x.t(), w.t()),
    ):
        check(function, [x, near_one], [0], sizes, mesh)
    # The gradients of what is replicated.
    factor = cancelling(24, 5, dim=0, dtype=dtype, offset=2.0)
    ones = numbers(24, 6, dtype=dtype, offset=1.0)
    for function in (lambda x, w: x @ w, lambda x, w: torch.einsum("ki,ij->kj", x, w), exactly_linear):
        check(function, [ones, numbers(6, 5, dtype=dtype, offset=1.0)], [0], sizes, mesh, factor)
    factor = cancelling(24, 6, dim=0, dtype=dtype)
    check(torch.mul, [ones, numbers(6, dtype=dtype, offset=1.0)], [0], sizes, mesh, factor)


# -- weights ----------------------------------------------------------------------------------------------------------


def replicated(t):
    return shard(t, shared_mesh(2), [Replicate()], requires_grad=True)


def hooked(t):
    """A weight whose gradient its operator sums itself."""
    t = leaf(t)
    t.register_post_accumulate_grad_hook(lambda t: None)
    return t


@pytest.mark.parametrize("others", [leaf, hooked, replicated])
@pytest.mark.parametrize("dtype", HALF)
@on_ranks(2)
@half_precision("exact")
def test_gradients_of_weights(dtype, others):
    mesh = shared_mesh(2)
    x, w, b = numbers(24, 6, dtype=dtype), numbers(5, 6, dtype=dtype, offset=1.0), numbers(5, dtype=dtype, offset=1.0)
    check(F.linear, [x, w, b], [0], {0: (17, 7)}, mesh, cancelling(24, 5, dim=0, dtype=dtype), others)
    factor = cancelling(2, 4, 16, dim=2, dtype=dtype, offset=2.0)
    x, w, b = (numbers(*n, dtype=dtype) for n in ((2, 4, 16), (4, 4, 3), (4,)))
    for function in (
        lambda x, w, b: F.conv1d(x, w / 40, b, padding=1),
        lambda x, w, b: F.conv_transpose1d(x, w / 40, b, padding=1),
        lambda x, w, b: F.group_norm(x, 2, w[:, 0, 0] / 40, b),
    ):
        check(function, [x, w, b], [2], {0: (11, 5)}, mesh, factor, others)
    check(
        lambda x, w, b: F.layer_norm(x, (16,), w, b),
        [x, numbers(16, dtype=dtype), numbers(16, dtype=dtype)],
        [1],
        {0: (3, 1)},
        mesh,
        cancelling(2, 4, 16, dim=1, dtype=dtype, offset=2.0),
        others,
    )


@pytest.mark.parametrize("others", [leaf, hooked, replicated])
@on_ranks(2)
@half_precision("exact")
def test_gradients_of_weights_that_autocast_casts(others):
    """Weights in float32, which autocast casts: what ranks contribute to their gradients is not rounded to it."""
    mesh, dtype = shared_mesh(2), torch.bfloat16
    autocast = torch.autocast(torch.get_default_device().type, dtype)
    x = cancelling(2, 4, 16, dim=0, dtype=dtype).float()
    w, b = (numbers(*n, dtype=dtype, offset=1.0).float() for n in ((4, 4, 3), (4,)))
    for function in (
        lambda x, w, b: F.conv1d(x, w, b, padding=1),
        lambda x, w, b: F.conv_transpose1d(x, w, b, padding=1),
        lambda x, w, b: F.linear(x.mT, w[..., 0], b),
        lambda x, w, b: x.mT @ w[..., 0] + b,
    ):
        check(autocast(function), [x, w, b], [0], {0: (1, 1)}, mesh, None, others)


# -- "fast", and the choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in bench_half.CASES if not case.startswith("norm after")])
def test_contributions_are_as_exact_as_torch_s_kernels(case, record_property):
    """Each rank's contribution by torch's kernel, rounded, and the sum in float32; next to DDP's and one device's."""
    for found in run_distributed(bench_half.errors, 2, case):
        for way, error in found.items():
            record_property(way, error)
        assert found["fast"] <= 1.1 * found["by hand"], found
        assert found["exact"] <= 1.1 * found["one device"], found


@pytest.mark.on_device
@pytest.mark.parametrize("data", bench_half.DATA)
def test_norms_over_shards_on_devices(data):
    """There the kernel of several processes rounds the sums of a shard."""
    for found in run_distributed(bench_half.errors, 2, f"group norm, {data}"):
        assert found["fast"] <= 1.1 * found["by hand"] and found["exact"] <= 1.1 * found["one device"], found


@on_ranks(2)
def test_the_setting_of_the_forward_pass_holds_for_its_backward_pass():
    """The same call under both settings, and what the sum over ranks is computed from."""
    torch.manual_seed(0)
    mesh, conv = shared_mesh(2), nn.Conv2d(4, 4, 3, padding=1).bfloat16()
    image = torch.randn(1, 4, 24, 8).bfloat16()
    x = shard(image, mesh, [Shard(2)])
    found = {}
    for way in ("fast", "exact", "fast", "exact"):
        with half_precision(way):
            y = conv(x)
        (grad,) = torch.autograd.grad(y.float().pow(3).sum(), conv.weight)  # outside of the block
        assert grad.dtype == torch.bfloat16
        assert torch.equal(found.setdefault(way, grad), grad), f"{way}: another result than before"
    assert not torch.equal(*found.values())
    y = conv(x)
    (grad,) = torch.autograd.grad(y.float().pow(3).sum(), conv.weight)
    assert torch.equal(grad, found["fast"]), "not the default"


def set_differently(layer):
    mesh, x = shared_mesh(2), torch.randn(1, 6, 24, 8).bfloat16()
    module = {"linear": nn.Linear(8, 4), "conv": nn.Conv2d(6, 4, 3, padding=1)}[layer].bfloat16()
    try:
        with half_precision(("fast", "exact")[mesh.get_local_rank()]):
            loss = module(shard(x, mesh, [Shard(2)])).float().square().mean()
            loss.backward()
            return loss.item()
    finally:
        weight_gradients._passes.clear()  # the one that has ended in an error


@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_ranks_that_set_it_differently_are_told(layer):
    for error in run_expecting_errors(set_differently, 2, layer):
        assert isinstance(error, RanksDiffer), error
        assert "half precision exact" in str(error) or "sum of rounded contributions" in str(error), error


def test_there_are_two_ways():
    with pytest.raises(ValueError, match="half precision 'quick': choose 'fast' or 'exact'"), half_precision("quick"):
        pass


def messages_of_a_step(dtype):
    """Forward and backward, once plans are made."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3, padding=1)).to(dtype)
    x = shard(torch.randn(1, 3, 16, 8).to(dtype), shared_mesh(2), [Shard(2)], {0: (9, 7)}, requires_grad=True)
    net(x).square().mean().backward()
    with count_communication() as counted:
        net(x).square().mean().backward()
    assert all(p.grad.dtype == dtype for p in net.parameters())
    return counted.messages


def test_as_many_messages_as_in_float32():
    half, single = (run_distributed(messages_of_a_step, 2, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert half == single


# -- the boundary between shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@on_ranks(4)
def test_convolution_next_to_a_boundary(dtype):
    """Inputs with an offset under weights without a mean, and gradients likewise; small and large shards."""
    for side in (16, 96):
        x = numbers(1, 16, side, side, dtype=dtype, offset=280.0)
        w = torch.randn(16, 16, 3, 3, generator=seeded(1))
        w = (w - w.mean((0, 2, 3), keepdim=True)).to(dtype)
        for options in ({"padding": 1}, {"padding": 2, "dilation": 2}, {"padding": 1, "stride": 2}):

            def convolve(x, w, options=options):
                return F.conv2d(x, w, **options)

            factor = numbers(*convolve(x, w).shape, dtype=dtype, offset=2.0)
            sizes = {0: (side - 7, 7), 1: (side // 2 + 1, side // 2 - 1)}
            check(convolve, [x, w], [2, 3], sizes, shared_mesh((2, 2)), factor)


# -- what it is made of -----------------------------------------------------------------------------------------------


def test_products_in_float32():
    a = numbers(10_000, 3, dtype=torch.bfloat16, offset=1.0)
    b = cancelling(10_000, 2, dim=0, dtype=torch.bfloat16, offset=1.0)
    found = product(a, b)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), a.double().t() @ b.double(), rtol=0, atol=0.1)
    assert product(a.double(), b.double()).dtype == torch.float64
    assert is_half(a) and not is_half(found)
    wide, nothing, double = widened(a, None, found.double())
    assert wide.dtype == torch.float32 and nothing is None and double.dtype == torch.float64
