"""Transposed convolution against the unsharded one."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from copied import Copied
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from spatial_cases import IN_WAYS, computing
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor import UnsupportedSharding
from shardtensor.layout.intervals import boundaries_of, intervals_of, map_boundaries
from shardtensor.ops.convolution.conv import TransposedWindow
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

MODULES = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@given(
    size=st.integers(1, 12),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    padding=st.integers(0, 3),
    extra=st.integers(0, 2),
    data=st.data(),
)
def test_geometry_against_brute_force(size, kernel, stride, dilation, padding, extra, data):
    w = TransposedWindow(size, kernel, stride, dilation, padding, extra)
    if w.outputs < 1:
        return
    cuts = [w.owned_boundary(c) for c in range(size + 1)]
    assert cuts[0] == 0 and cuts[-1] == w.outputs and cuts == sorted(cuts)
    a = data.draw(st.integers(0, w.outputs - 1))
    b = data.draw(st.integers(a + 1, w.outputs))
    reach = {i for i in range(size) for t in range(kernel) if a <= i * stride - padding + t * dilation < b}
    first, stop = w.reads((a, b))
    assert reach <= set(range(first, stop))
    if stop > first:
        before, after = w.margins((first, stop), (a, b))
        assert (stop - first - 1) * stride + w.extent + before + after == b - a
        p, more, (before, after) = w.options((first, stop), (a, b))
        assert p >= 0 and (more == 0 or 0 < more < stride)
        assert first * stride - padding + p == a + before
        assert (stop - first - 1) * stride + w.extent - 2 * p + more + before + after == b - a
        before, after = w.zeros((first, stop), (a, b))
        assert min(before, after) >= 0 and w.options((first - before, stop + after), (a, b))[2] == (0, 0)
        start, end = w.touching((first, stop), (a, b))
        outputs = {i * stride - padding + t * dilation for i in range(first, stop) for t in range(kernel)}
        assert outputs & set(range(a, b)) <= set(range(start, end))


def check(cases, way="by their size"):
    for shape, arguments, mesh_shape, dims, sizes in cases:
        torch.manual_seed(0)
        n = len(arguments["kernel_size"])
        module = MODULES[n](4, 4, **arguments).double()
        x = torch.randn(shape, dtype=torch.float64)
        placements = [Shard(d) for d in dims]
        with computing(way):
            assert_matches_unsharded(module, x, mesh_shape=mesh_shape, placements=placements, shard_sizes=sizes)


def arguments(n, kernel, stride, padding, extra, dilation, groups=1, bias=True):
    return {
        "kernel_size": (kernel,) * n,
        "stride": stride,
        "padding": padding,
        "output_padding": extra,
        "dilation": dilation,
        "groups": groups,
        "bias": bias,
    }


CUTS = {
    1: [(7,)],
    2: [(5, 3), (1, 7), (0, 6), (6, 0)],
    3: [(1, 5, 1), (2, 0, 3)],
    4: [(1, 1, 1, 2), (0, 4, 0, 3)],
}


def grid(world):
    cases = []
    for i, (kernel, stride, padding, dilation) in enumerate(
        itertools.product((1, 2, 3, 4), (1, 2, 3), (0, 1, 2), (1, 2))
    ):
        cut = CUTS[world][i % len(CUTS[world])]
        extra = i % 2 if max(stride, dilation) > 1 else 0
        made = arguments(1, kernel, stride, padding, extra, dilation, groups=(1, 2)[i % 2], bias=i % 3 > 0)
        if TransposedWindow(sum(cut), kernel, stride, dilation, padding, extra).outputs > 0:
            cases.append(((2, 4, sum(cut)), made, world, [2], {0: cut}))
    return cases


@pytest.mark.parametrize(("world", "way"), IN_WAYS)
def test_grid(world, way):
    cases = grid(world)
    assert len(cases) > 50
    run_distributed(check, world, cases, way, timeout=120)


def test_2x2_mesh_batches_and_volumes():
    cases = []
    for kernel, stride, padding, extra in [(2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (3, 1, 1, 0)]:
        made = arguments(2, kernel, stride, padding, extra, 1)
        for dims, sizes in [([2, 3], {0: (5, 3), 1: (1, 4)}), ([3, 2], {0: (0, 5), 1: (7, 1)}), ([0, 3], {1: (4, 1)})]:
            cases.append(((2, 4, 8, 5), made, (2, 2), dims, sizes))
    cases.append(((1, 4, 3, 4, 5), arguments(3, 3, 2, 1, 1, 1), (2, 2), [2, 4], {0: (1, 2), 1: (4, 1)}))
    cases.append(((4, 8, 5), arguments(2, 2, 2, 0, 0, 1), (2, 2), [1, 2], {0: (1, 7), 1: (3, 2)}))
    for way in ("at once", "in two", "by owners"):
        run_distributed(check, 4, cases, way)


@pytest.mark.on_device
@on_ranks(2)
def test_sizes_and_traffic():
    mesh = shared_mesh(2)
    x = shard(torch.randn(1, 4, 8, 5), mesh, [Shard(2)], {0: (5, 3)})
    w = torch.randn(4, 6, 2, 2)
    with count_communication() as counts:
        y = F.conv_transpose2d(x, w, stride=2)
    assert y.shape == (1, 6, 16, 10) and y.shard_sizes == {0: (10, 6)}
    assert not counts.messages, "a kernel as long as its stride needs no halo"
    with count_communication() as counts:
        F.conv_transpose2d(x, torch.randn(4, 6, 4, 4), stride=2, padding=1)
    assert counts.bytes_sent == 4 * 5 * 4


@pytest.mark.parametrize("way", ["at once", "in two"])
@pytest.mark.parametrize("n", [1, 2, 3])
@on_ranks(2)
def test_doubling_keeps_the_sizes(n, way):
    """A network's usual way down and up again: the result is sharded like the input, and copied at most once."""
    mesh = shared_mesh(2)
    x = torch.randn(1, 4, *[8] * n)
    down, up = torch.randn(4, 4, *[3] * n), torch.randn(4, 4, *[3] * n)
    convolve, transposed = getattr(F, f"conv{n}d"), getattr(F, f"conv_transpose{n}d")
    sharded = shard(x, mesh, [Shard(2)], {0: (4, 4)})
    half = convolve(sharded, down, None, 2, 1)
    with Copied() as copied, computing(way):
        y = transposed(half, up, torch.ones(4), 2, 1, 1)
    assert y.shard_sizes == sharded.shard_sizes
    # What reaches the last outputs ends with them, so there the kernel's padding leaves out all that others own. On the
    # other rank it does so where it is given zeros, too, which it is but for volumes on the CPU.
    cropped = mesh.get_local_rank() == 0 and (way == "at once" or (n == 3 and mesh.device_type == "cpu"))
    assert copied.elements["aten::clone"] == (y.to_local().numel() if cropped else 0)
    assert not copied.elements["aten::constant_pad_nd"]
    assert not [name for name in copied.order if "add" in name], "the kernel adds the bias"
    with count_communication() as counts:
        torch.cat([sharded, y], 1)
    assert not counts.messages


def bad(which):
    mesh = shared_mesh(2)
    x = torch.randn(2, 4, 8, 5)
    if which == "channels":
        F.conv_transpose2d(shard(x[:1, :, :1, :1], mesh, [Shard(1)], {0: (3, 1)}), torch.randn(4, 4, 2, 2))
    else:
        F.conv_transpose2d(shard(x, mesh, [Shard(2)], {0: (5, 3)}), torch.randn(3, 4, 2, 2))


def test_errors():
    for error in run_expecting_errors(bad, 2, "channels"):
        with pytest.raises(UnsupportedSharding, match=r"conv_transpose2d: tensor dim 1 must be un.*S\(1\)\[3, 1\]"):
            raise error
    for error in run_expecting_errors(bad, 2, "weight"):
        with pytest.raises(RuntimeError, match=r"transpose|channels"):
            raise error


def test_cuts_follow_the_upsampling():
    w = TransposedWindow(size=9, kernel=2, stride=2, dilation=1, padding=0, extra=0)
    assert map_boundaries((4, 0, 5), w.owned_boundary) == (8, 0, 10)
    w = TransposedWindow(size=9, kernel=3, stride=2, dilation=1, padding=1, extra=1)
    assert map_boundaries((4, 0, 5), w.owned_boundary) == (8, 0, 10)
    assert boundaries_of((8, 0, 10)) == (0, 8, 8, 18) and intervals_of((8, 0, 10))[2] == (8, 18)
