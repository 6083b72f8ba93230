"""Pooling on shards against pooling on one device."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from seeded import seeded
from spatial_cases import check_cases, data, squared_gradient
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor.layout.intervals import intervals_of, map_boundaries
from shardtensor.layout.windows import Window
from shardtensor.ops.common.stencil import scaled_boundary
from shardtensor.ops.pooling.adaptive_pool import adaptive_window
from shardtensor.ops.pooling.pool import pool_reads
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    shard,
    shared_mesh,
)

MAX = [F.max_pool1d, F.max_pool2d, F.max_pool3d]
AVG = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d]


def window_cases():
    """Fixed windows over awkward sizes, in one to three dims."""
    cases = []
    both = [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
        {"kernel_size": 2, "stride": 3, "ceil_mode": True},
        {"kernel_size": 5, "stride": 1, "padding": 2},
        {"kernel_size": 5, "stride": 3, "padding": 2, "ceil_mode": True},
        {"kernel_size": 1, "stride": 2},
    ]
    only = {
        "max": [
            {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
            {"kernel_size": 4, "stride": 3, "padding": 2, "dilation": 3, "ceil_mode": True},
        ],
        "avg": [
            {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
            {"kernel_size": 4, "stride": 3, "padding": 2, "ceil_mode": True, "count_include_pad": False},
        ],
    }
    for kind, functions in (("max", MAX), ("avg", AVG)):
        for ndim, function in enumerate(functions, 1):
            for kwargs in both + only[kind]:
                reach = (kwargs["kernel_size"] - 1) * kwargs.get("dilation", 1) + 1 - 2 * kwargs.get("padding", 0)
                for n in {1: (1, 2, 5, 7, 17, 33), 2: (5, 7, 17), 3: (5, 6)}[ndim]:
                    if n < reach:
                        continue
                    shape = (2, 3, n, n + 1, n + 2)[: ndim + 2]
                    fn = lambda x, function=function, kwargs=kwargs: function(x, **kwargs)  # noqa: E731
                    cases.append((f"{kind} {kwargs}", fn, shape, tuple(range(2, ndim + 2))))
    cases += [
        ("divisor", lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), (2, 3, 9, 8), (2, 3)),
        ("divisor 3d", lambda x: F.avg_pool3d(x, 2, divisor_override=5), (2, 3, 5, 6, 4), (2, 3, 4)),
        ("unbatched max", lambda x: F.max_pool2d(x, 3, 1, 1), (3, 9, 8), (1, 2)),
        ("unbatched avg", lambda x: F.avg_pool1d(x, 3, 1, 1), (3, 9), (1,)),
        ("unequal", lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0)), (2, 3, 9, 8), (2, 3)),
        ("unequal avg", lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), ceil_mode=True), (2, 3, 9, 8), (2, 3)),
        ("module", nn.MaxPool2d(3, 2, 1), (2, 3, 9, 8), (2, 3)),
        ("indices", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (2, 3, 9, 8), (2, 3)),
        ("indices 1d", lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), (2, 3, 9), (2,)),
        ("indices 3d", nn.MaxPool3d(3, 2, 1, return_indices=True), (2, 3, 9, 8, 5), (2, 3, 4)),
        ("lp", lambda x: F.lp_pool2d(x, 2.0, 3, 2), (2, 3, 9, 8), (2, 3)),
        ("lp of infinity", lambda x: F.lp_pool2d(x, math.inf, 3, 2), (2, 3, 9, 8), (2, 3)),
        ("ties", lambda x: F.max_pool2d(x.round() / 2, 4, 2, 1, return_indices=True), (2, 3, 11, 9), (2, 3)),
        ("all -inf", lambda x: F.max_pool2d(x * 0 - torch.inf, 3, 1, 1, return_indices=True)[1], (2, 3, 7, 5), (2, 3)),
    ]
    return cases


def adaptive_cases():
    """Adaptive windows: to one value, divisible, not divisible, larger than the input."""
    cases = []
    avg = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d]
    best = [F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d]
    for name, functions in (("adaptive avg", avg), ("adaptive max", best)):
        for ndim, function in enumerate(functions, 1):
            outs = {1: (1, 2, 3, 7, 9), 2: (1, (1, 4), (3, 1), (2, 4), (9, 3)), 3: (1, (1, 2, 3), (2, 1, 3), 3)}[ndim]
            for out in outs:
                fn = lambda x, function=function, out=out: function(x, out)  # noqa: E731
                cases.append((f"{name} {out}", fn, (2, 3, 8, 7, 6)[: ndim + 2], tuple(range(2, ndim + 2))))
    both = lambda out: lambda x: F.adaptive_max_pool2d(x, out, return_indices=True)  # noqa: E731
    ties = lambda out: lambda x: F.adaptive_max_pool2d(x.round() / 2, out, return_indices=True)  # noqa: E731
    cases += [(f"indices {out}", both(out), (2, 3, 8, 7), (2, 3)) for out in (1, (1, 3), (3, 1), (2, 3), (5, 9))]
    cases += [(f"ties {out}", ties(out), (2, 3, 8, 7), (2, 3)) for out in (1, (1, 3), (3, 1), (2, 3), (5, 9))]
    cases += [
        ("None", nn.AdaptiveAvgPool2d((None, 1)), (2, 3, 8, 7), (2, 3)),
        ("None max", nn.AdaptiveMaxPool2d((3, None)), (2, 3, 8, 7), (2, 3)),
        ("unbatched", lambda x: F.adaptive_avg_pool2d(x, 3), (3, 8, 7), (1, 2)),
        ("one channel", lambda x: F.adaptive_max_pool1d(x, 1), (2, 1, 8), (1, 2)),
        ("one channel avg", lambda x: F.adaptive_avg_pool2d(x, (1, 3)), (2, 1, 8, 5), (1, 2)),
        ("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), (2, 3, 8, 7), (2, 3)),
    ]
    return cases


SLOW = [pytest.param(*values, marks=pytest.mark.slow) for values in [(3, 1), (4, None), ((2, 2), 0)]]


@pytest.mark.parametrize(("mesh_shape", "half"), [(1, None), (2, None), (3, 0), ((2, 2), 1), *SLOW], ids=str)
@on_ranks("mesh_shape", timeout=200)
def test_windows_match_one_device(mesh_shape, half):
    check_cases(window_cases(), mesh_shape, half=half)


@pytest.mark.parametrize("mesh_shape", [1, 2, 3, 4, (2, 2)], ids=str)
@on_ranks("mesh_shape", timeout=200)
def test_adaptive_windows_match_one_device(mesh_shape):
    check_cases(adaptive_cases(), mesh_shape)


@on_ranks(3)
def test_layouts():
    """What the results look like: who owns what, and in which placements."""
    mesh = shared_mesh(3)
    x = shard(data(2, 3, 12, 5), mesh, [Shard(2)], {0: (6, 0, 6)}, requires_grad=True)
    halved, one, best = F.max_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, (1, 2))
    assert halved.shard_sizes == {0: (3, 0, 3)}
    assert one.placements == (Partial(),) and best.placements == (Replicate(),)
    assert F.adaptive_avg_pool2d(x, (2, 1)).shard_sizes == {0: (1, 0, 1)}
    wide = x.redistribute(placements=[Shard(3)])
    assert F.adaptive_max_pool2d(wide, (1, 2)).shard_sizes == {0: (1, 1, 0)}
    values, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    assert indices.dtype == torch.int64 and indices.shard_sizes == values.shard_sizes and not indices.requires_grad
    whole = data(2, 3, 4, 4).to(memory_format=torch.channels_last)
    channels = shard(data(2, 3, 4, 4), mesh, [Shard(1)], {0: (3, 0, 0)}).to(memory_format=torch.channels_last)
    assert F.avg_pool2d(channels, 2).stride() == F.avg_pool2d(whole, 2).stride()


@on_ranks(2)
def test_averages_of_volumes():
    """Average pooling of volumes, whose kernel takes no input shorter than its window, batched and not."""
    for shape in ((3, 4, 5, 6), (2, 3, 4, 5, 6)):
        x = data(*shape)
        for dim in range(len(shape)):
            for sizes in ((shape[dim] - 1, 1), (0, shape[dim]), (1, shape[dim] - 1)):
                for options in (
                    {"kernel_size": 2},
                    {"kernel_size": (2, 2, 3), "stride": (1, 2, 3), "padding": (1, 0, 1)},
                    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
                    {"kernel_size": (4, 1, 6)},
                    {"kernel_size": (1, 3, 6), "stride": 5, "padding": (0, 1, 3), "divisor_override": 3},
                ):
                    assert_matches_unsharded(
                        lambda x, o=options: F.avg_pool3d(x, **o),
                        x,
                        mesh_shape=2,
                        placements=[Shard(dim)],
                        shard_sizes={0: sizes},
                    )


@on_ranks(2)
def test_averages_of_partial_sums_stay_partial():
    mesh = shared_mesh(2)
    whole = data(1, 2, 8).round()
    x = shard(whole, mesh, [Partial()])
    mean, best = F.avg_pool1d(x, 3, 2, 1), F.max_pool1d(x, 3, 2, 1)
    torch.testing.assert_close(mean.full_tensor(), F.avg_pool1d(whole, 3, 2, 1))
    assert torch.equal(best.full_tensor(), F.max_pool1d(whole, 3, 2, 1))
    assert_matches_unsharded(lambda x: F.avg_pool1d(x, 2), whole, mesh=mesh, placements=[Partial()])
    assert_matches_unsharded(lambda x: F.adaptive_avg_pool1d(x, 3), whole, mesh=mesh, placements=[Partial()])
    assert_matches_unsharded(lambda x: F.adaptive_max_pool1d(x, 1), whole, mesh=mesh, placements=[Partial()])
    assert (mean.placements[0].is_partial(), best.placements[0].is_partial()) == (True, False)


@on_ranks(2)
def test_nothing_travels_where_windows_fit_the_shards_and_one_row_where_they_overlap():
    mesh = shared_mesh(2)
    x = shard(data(1, 1, 16, 2), mesh, [Shard(2)], {0: (8, 8)})
    with count_communication() as none:
        F.max_pool2d(x, 2)
        F.adaptive_avg_pool2d(x, 4)
        F.adaptive_avg_pool2d(x, 1)
    with count_communication() as halo:
        F.avg_pool2d(x, 3, 1, 1)
    assert (none.messages, sum(none.collectives.values()), halo.messages, halo.bytes_sent) == (0, 0, 1, 16)


@on_ranks(2)
def test_dtypes():
    pools = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1)
    for dtype in (torch.float32, torch.bfloat16):
        for fn in pools:
            assert_matches_unsharded(
                fn, data(2, 3, 9, 8, dtype=dtype), mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (9, 0)}
            )


@pytest.mark.not_emulated("whose kernels are the CPU's, and torch's CPU has no average pooling of bfloat16 volumes")
@on_ranks(2)
def test_autocast():
    def autocast(x):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return F.avg_pool3d(x, 2), F.max_pool3d(x, 2)

    x = data(2, 3, 4, 4, 4, dtype=torch.bfloat16)
    assert_matches_unsharded(autocast, x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (4, 0)})


def operand():
    return shard(data(1, 1, 4, 4), shared_mesh(2), [Shard(2)], {0: (1, 3)})


ERRORS = {
    "padding": (
        lambda x: F.max_pool2d(x, 2, padding=2),
        RuntimeError,
        "pad should be at most half of effective kernel size",
    ),
    "too small": (lambda x: F.avg_pool2d(x, 7), RuntimeError, "[Oo]utput size is too small"),
    "divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=0), RuntimeError, "divisor must be not zero"),
    "no spatial dims": (lambda x: F.max_pool3d(x.flatten(1), 2), RuntimeError, "4D|3D|dim"),
    "negative": (lambda x: F.adaptive_avg_pool2d(x, (-1, 2)), RuntimeError, "greater than or equal to 0"),
    "random": (
        lambda x: F.fractional_max_pool2d(x, 2, output_size=2),
        NotImplementedError,
        "rand.*|no distributed form",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_torchs_own_on_every_rank(name):
    raises_alike(operand, name)


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)


@given(SIZES, st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3), st.booleans(), st.booleans())
def test_kernels_get_what_the_windows_read(sizes, kernel, stride, padding, dilation, ceil_mode, averages):
    """Kernels on what ``pool_reads`` says give the whole's outputs, side by side."""
    padding = min(padding, kernel // 2)
    dilation = 1 if averages else dilation
    w = Window(sum(sizes), kernel, stride, dilation, padding, padding, ceil_mode)
    if w.outputs <= 0 or (averages and w.size < kernel):
        return
    x = data(1, 2, w.size)
    if averages:
        # The 3-D kernel, because it refuses what is shorter than the window.
        x = x[..., None, None]
        pool = lambda x, p: F.avg_pool3d(x, (kernel, 1, 1), (stride, 1, 1), (p, 0, 0), ceil_mode, False)  # noqa: E731
    else:
        pool = lambda x, p: F.max_pool1d(x, kernel, stride, p, dilation, ceil_mode)  # noqa: E731
    parts = []
    for out in intervals_of(map_boundaries(sizes, w.owned_boundary)):
        (start, stop), p, drop = pool_reads(w, out, kernel if averages else 0)
        assert 0 <= start <= stop <= w.size
        if out[1] > out[0]:
            parts.append(pool(x[:, :, start:stop], p)[:, :, drop : drop + out[1] - out[0]])
    assert torch.equal(torch.cat(parts, 2), pool(x, padding))


@given(st.integers(1, 40), st.integers(1, 40))
def test_adaptive_windows_are_torchs(n, out):
    places = torch.arange(n, dtype=torch.float64)[None, None]
    low = -F.adaptive_max_pool1d(-places, out)[0, 0]
    high = F.adaptive_max_pool1d(places, out)[0, 0] + 1
    assert [adaptive_window(n, out, o) for o in range(out)] == list(zip(low.int().tolist(), high.int().tolist()))


@given(SIZES, st.integers(1, 40))
def test_scaled_boundaries_give_outputs_to_the_owner_of_their_centre(sizes, out):
    n = sum(sizes)
    owned = intervals_of(map_boundaries(sizes, scaled_boundary(n, out)))
    assert owned[-1][1] == out
    for (start, stop), (a, b) in zip(owned, intervals_of(sizes)):
        for o in range(start, stop):
            assert a * 2 * out <= (2 * o + 1) * n <= b * 2 * out
    assert map_boundaries(sizes, scaled_boundary(n, 2 * n)) == tuple(2 * s for s in sizes)


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks("world")
def test_second_derivatives(world):
    functions = {
        "aligned": lambda x: F.max_pool2d(x, 2),
        "max": lambda x: F.max_pool2d(x, 3, 2, 1),
        "average": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    }
    cases = [(name, squared_gradient(f), (2, 3, 9, 7), (2, 3)) for name, f in functions.items()]
    volumes = {"max 3d": lambda x: F.max_pool3d(x, 3, 1, 1), "average 3d": lambda x: F.avg_pool3d(x, 2, ceil_mode=True)}
    cases += [(name, squared_gradient(f), (1, 2, 5, 4, 6), (2, 4)) for name, f in volumes.items()]
    check_cases(cases, torch.distributed.get_world_size(), rounds=3)


@on_ranks(3)
def test_higher_derivatives_of_ranks_without_outputs():
    """The rank in the middle has an entry and no outputs: its graph has to reach the same exchanges."""
    for pool, shape in (
        (F.avg_pool1d, (2, 3, 6)),
        (F.max_pool2d, (2, 3, 4, 6)),
        (F.max_pool3d, (1, 2, 4, 4, 6)),
        (F.adaptive_max_pool2d, (2, 3, 4, 6)),
        (F.avg_pool3d, (1, 2, 4, 4, 6)),
    ):
        x = torch.randn(shape, dtype=torch.float64, generator=seeded(4))

        def product(t, pool=pool):
            gradient = torch.func.grad(lambda u: pool(u.pow(3), 2).square().sum())
            return torch.func.jvp(gradient, (t,), (t.cos(),))[1]

        cut = shard(x, shared_mesh(3), [Shard(len(shape) - 1)], {0: (3, 1, 2)})
        torch.testing.assert_close(product(cut).full_tensor(), product(x), rtol=1e-10, atol=1e-10)
        if pool is not F.avg_pool3d:  # of a volume it takes a minute
            fourth = torch.func.grad(lambda t, product=product: (product(t) * t.sin()).sum())
            torch.testing.assert_close(fourth(cut).full_tensor(), fourth(x), rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_second_derivatives_of_empty_shards():
    """All ranks have a gradient: a rank without, next to one with zeros, would go on while others communicate."""
    for pool in (F.avg_pool1d, F.max_pool1d):
        x = shard(torch.randn(2, 4, 7).double(), shared_mesh(2), [Shard(2)], {0: (0, 7)}).requires_grad_()
        (grad,) = torch.autograd.grad(pool(x, 2).square().sum(), [x], create_graph=True)
        plain = x.detach().full_tensor().requires_grad_()
        (expected,) = torch.autograd.grad(pool(plain, 2).square().sum(), [plain], create_graph=True)
        for of, to in ((pool(x, 2).sum(), x), (pool(plain, 2).sum(), plain)):
            (linear,) = torch.autograd.grad(of, [to], create_graph=True)
            linear.square().sum().backward()
        torch.testing.assert_close(grad.full_tensor(), expected)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@on_ranks(2)
def test_the_gradient_called_by_its_operators_name():
    torch.manual_seed(0)

    def gradient(x, grad):
        y, at = F.max_pool2d(x, 3, 2, 1, return_indices=True)
        return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, [3], [2], [1], [1], False, at)

    whole = torch.randn(2, 3, 8, 5, dtype=torch.float64)
    grad = torch.randn(2, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    factors = torch.randn_like(whole)
    for sizes in ((5, 3), (7, 1), (0, 8)):
        expected = gradient(whole, grad)
        (of_grad,) = torch.autograd.grad((expected * factors).sum(), grad)
        x = shard(whole, shared_mesh(2), [Shard(2)], {0: sizes}, requires_grad=True)
        seed = shard(grad, shared_mesh(2), [Replicate()], requires_grad=True)
        found = gradient(x, seed)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=0)
        (found * shard(factors, shared_mesh(2), [Replicate()])).sum().backward()
        torch.testing.assert_close(seed.grad.full_tensor(), of_grad, rtol=1e-12, atol=0)
        assert not x.grad.full_tensor().any()  # a constant of the pooled tensor
