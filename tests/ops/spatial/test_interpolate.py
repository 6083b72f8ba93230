"""Resampling on shards against resampling on one device."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from halves import in_halves
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from spatial_cases import check_cases, data, squared_gradient
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.layout.intervals import boundaries_of, intervals_of, length, map_boundaries
from shardtensor.layout.strides import CHANNELS_LAST
from shardtensor.ops.common.stencil import scaled_boundary
from shardtensor.ops.spatial.interpolate import Resize, as_local
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(sum)
SMOOTH = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}


def cases():
    """All modes, up and down, by size and by scale, over awkward sizes."""
    result = []

    def add(*shape, dims=None, **kwargs):
        # CUDA's gradient of this one is that of another input than the one which it reads.
        if torch.version.cuda and kwargs["mode"] == "nearest-exact" and kwargs.get("size") == 1:
            return
        fn = lambda x: F.interpolate(x, **kwargs)  # noqa: E731
        result.append((str(kwargs), fn, shape, dims or tuple(range(2, len(shape)))))

    shapes = {1: (2, 3, 17), 2: (2, 3, 7, 6), 3: (1, 2, 5, 4, 6)}
    for ndim, shape in shapes.items():
        for mode in ("nearest", "nearest-exact", "area", *SMOOTH[ndim]):
            corners = (False, True) if mode in SMOOTH[ndim] else (None,)
            for align_corners in corners:
                options = {"mode": mode, "align_corners": align_corners}
                for scale in (2, 0.5, 1.7, 0.3, (1.5, 0.9, 2.5)[:ndim]):
                    add(*shape, scale_factor=scale, **options)
                add(*shape, scale_factor=1.7, recompute_scale_factor=True, **options)
                for size in (1, 9, (13, 3, 8)[:ndim], shape[2:]):
                    add(*shape, size=size, **options)
    for n in (1, 2, 5, 33):
        for mode in ("nearest", "nearest-exact", "linear"):
            add(1, 2, n, mode=mode, scale_factor=3)
            add(1, 2, n, mode=mode, size=7)
    for shape in ((1, 2, 5), (1, 2, 5, 3), (1, 1, 5, 2, 3)):
        add(*shape, mode="nearest", scale_factor=2.04)
    for mode in ("bilinear", "bicubic"):
        for size in ((3, 4), (20, 3), (6, 21)):
            for align_corners in (False, True):
                add(2, 3, 13, 11, mode=mode, size=size, antialias=True, align_corners=align_corners)
        add(2, 3, 13, 11, mode=mode, scale_factor=0.4, antialias=True)
    for scale in (2, 3, 4):  # of which torch's kernel can compute a shard by itself
        add(1, 2, 33, 5, scale_factor=scale, mode="bilinear")
        add(1, 1, 17, 12, scale_factor=(scale, 1), mode="bicubic")
        add(1, 1, 17, 3, 7, size=(17 * scale, 6, 7), mode="trilinear")
    add(1, 2, 32, 5, scale_factor=0.5, mode="bilinear", antialias=True)
    add(4, 3, 5, 6, dims=(0, 1), scale_factor=1.7, mode="bicubic")
    result += [
        ("Upsample", nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 7, 6), (2, 3)),
        ("integers", lambda x: F.interpolate((x * 10).to(torch.uint8), scale_factor=1.5), (2, 3, 7, 6), (2, 3)),
    ]
    return result


SLOW = [pytest.param(n, None, marks=pytest.mark.slow) for n in (1, 3, 4)]


@pytest.mark.parametrize(("mesh_shape", "half"), [*in_halves([(2,), ((2, 2),)]), *SLOW], ids=str)
@on_ranks("mesh_shape", timeout=200)
def test_resampling_matches_one_device(mesh_shape, half):
    check_cases(cases(), mesh_shape, half=half)


SEPARABLE = [
    (shape, options, sizes)
    for shape, options in (
        ((1, 2, 34, 5), {"scale_factor": 2, "mode": "bilinear"}),
        ((2, 3, 34, 6), {"scale_factor": 2, "mode": "bicubic"}),
        ((1, 2, 34), {"size": 136, "mode": "linear"}),
        ((1, 1, 34, 4, 3), {"size": (68, 8, 9), "mode": "trilinear"}),
        ((1, 1, 34, 6), {"scale_factor": 0.5, "mode": "bilinear", "antialias": True}),
    )
    for sizes in ((18, 16), (28, 6), (8, 26))
]


@pytest.mark.parametrize("last", [False, True])
@on_ranks(2)
def test_uneven_shards_in_both_memory_formats(last):
    mesh = shared_mesh(2)
    for shape, options, sizes in SEPARABLE:
        x = data(*shape)
        if last and x.ndim in CHANNELS_LAST:
            x = x.contiguous(memory_format=CHANNELS_LAST[x.ndim])
        fn = lambda t, options=options: F.interpolate(t, **options)  # noqa: E731
        assert_matches_unsharded(fn, x, mesh=mesh, placements=[Shard(2)], shard_sizes={0: sizes})


def copied_by_kernels(fn):
    """The elements of each copy that torch's kernels make inside themselves."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        result = fn()
    copies = [event.input_shapes[0] for event in profile.events() if event.name == "aten::copy_"]
    return result, [math.prod(shape) for shape in copies]


@on_ranks(2)
def test_results_are_not_copied_for_strides_of_the_input():
    """One sample of a transposed sequence: channels-last memory, but not by its strides."""
    x = ShardTensor.from_local(data(1, 640, 8), shared_mesh(2), [Shard(1)], shard_sizes={0: (640, 640)})
    x = x.transpose(1, 2).unflatten(2, (20, 64))  # torch computes fewer outputs channels-last always
    for mode in ("bilinear", "bicubic"):
        result, sizes = copied_by_kernels(lambda mode=mode: F.interpolate(x, scale_factor=2, mode=mode))
        assert result.to_local().stride(-1) == 1 and result.contiguous().view(640, -1).to_local().is_contiguous()
        # Outputs of which other ranks are the owners stay in memory; torch's kernel would copy it twice.
        assert not any(size >= result.to_local().numel() for size in sizes), (mode, sizes)


def layouts():
    mesh = shared_mesh(3)
    x = shard(data(1, 2, 12, 4), mesh, [Shard(2)], {0: (5, 0, 7)})
    assert F.interpolate(x, scale_factor=2).shard_sizes == {0: (10, 0, 14)}
    assert F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True).shard_sizes == {0: (10, 0, 14)}
    with count_communication() as nearest:
        F.interpolate(x, scale_factor=2)
    with count_communication() as linear:
        F.interpolate(x, scale_factor=2, mode="bilinear")
    # What is down- and upsampled is cut within a row of its skip connection.
    odd = shard(data(1, 2, 13, 4), mesh, [Shard(2)], {0: (5, 3, 5)})
    up = F.interpolate(F.max_pool2d(odd, 2, ceil_mode=True), size=(13, 4))
    cuts = [boundaries_of(t.shard_sizes[0]) for t in (up, odd)]
    assert max(abs(a - b) for a, b in zip(*cuts)) == 1, cuts
    assert (up + odd).shard_sizes == up.shard_sizes
    return nearest.messages, linear.bytes_sent


@pytest.mark.on_device
def test_layouts_and_traffic():
    row = 2 * 4 * 8
    assert run_distributed(layouts, 3) == [(0, row), (0, 0), (0, row)]


@on_ranks(2)
def test_single_and_half_precision():
    """The same roundings as torch's: a few units in the last place, also far from the origin.

    Not of the gradient: torch rounds the weights otherwise in its backward pass.
    """
    for mode, kwargs in (
        ("bilinear", {"scale_factor": (3.0, 1.0)}),
        ("bilinear", {"size": (1777, 3)}),
        ("bicubic", {"scale_factor": (1.3, 1.0)}),
        ("nearest", {"scale_factor": (0.37, 1.0)}),
        ("nearest-exact", {"size": (1777, 3)}),
    ):
        fn = lambda x, mode=mode, kwargs=kwargs: F.interpolate(x, mode=mode, **kwargs)  # noqa: E731
        x = data(1, 1, 1013, 3, dtype=torch.float32)
        sizes = {0: (500, 513)}
        cut = {"mesh_shape": 2, "placements": [Shard(2)], "shard_sizes": sizes}
        assert_matches_unsharded(fn, x, **cut, rtol=1e-6, atol=1e-6, check_grads=False)
        assert_matches_unsharded(fn, x, **cut, rtol=1e-4, atol=1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        x = data(1, 2, 9, 7, dtype=dtype)
        up = nn.Upsample(scale_factor=2, mode="bilinear")
        assert_matches_unsharded(up, x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (9, 0)})

    def autocast(x):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return F.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=1.5, mode="bilinear")

    x = data(1, 2, 9, 7, dtype=torch.bfloat16)
    assert_matches_unsharded(autocast, x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (9, 0)})


@on_ranks(2)
def test_partial_sums_stay_so():
    mesh = shared_mesh(2)
    whole = data(1, 2, 5)
    up = F.interpolate(shard(whole, mesh, [Partial()]), scale_factor=2, mode="linear")
    torch.testing.assert_close(up.full_tensor(), F.interpolate(whole, scale_factor=2, mode="linear"))
    fn = lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")  # noqa: E731
    mesh = shared_mesh((2, 1))
    assert_matches_unsharded(fn, data(1, 2, 5, 4), mesh=mesh, placements=[Partial(), Shard(2)])
    assert_matches_unsharded(fn, data(1, 2, 5, 4), mesh=mesh, placements=[Shard(2), Replicate()])
    assert up.placements[0].is_partial()


@on_ranks(2)
def test_doubling_keeps_channels_last():
    """Doubling takes one call of torch's kernel, which leaves the memory format alone."""
    x = shard(data(1, 2, 8, 6), shared_mesh(2), [Shard(2)], {0: (3, 5)}).to(memory_format=torch.channels_last)
    up = F.interpolate(x, scale_factor=2).to_local()
    assert up.is_contiguous(memory_format=torch.channels_last), up.stride()


@on_ranks(2)
def test_every_mode_keeps_channels_last():
    x = data(2, 4, 6, 8).to(memory_format=torch.channels_last)
    for dim in (0, 2, 3):
        sharded = shard(x, shared_mesh(2), [Shard(dim)], {0: (1, x.shape[dim] - 1)})
        for options in (
            {"scale_factor": 2, "mode": "bilinear"},
            {"size": (7, 9), "mode": "bilinear", "align_corners": True},
            {"size": (9, 9), "mode": "bicubic"},
            {"size": (7, 9)},
        ):
            y = F.interpolate(sharded, **options)
            local = y.to_local()
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert local.is_contiguous(memory_format=torch.channels_last), (dim, options, local.stride())


@given(
    SIZES,
    st.sampled_from([(2, None), (3, None), (0.5, None), (2, 2.0), (4, 4.0), (0.5, 0.5), (2, 2.04)]),
    st.sampled_from(["nearest", "nearest-exact", "linear", "bicubic"]),
)
def test_torchs_kernel_on_a_part_gives_the_outputs_of_the_whole(sizes, ratio, mode):
    n = sum(sizes)
    out, scale = int(n * ratio[0]), ratio[1]
    if out == 0 or (scale and int(n * scale) != out):
        return
    x = data(1, 2, n)[:, :, None] if mode == "bicubic" else data(1, 2, n)
    resize = Resize(n, out, scale, mode, None, False, torch.float64, "cpu", x.ndim - 2)
    parts = []
    outs = map_boundaries(sizes, scaled_boundary(n, out))
    for interval, (start, stop) in zip(intervals_of(outs), resize.taps().reads(outs), strict=True):
        found = as_local(resize, (start, stop), interval) if stop > start else None
        if found is None:
            parts.append(resize.taps().of(interval, start, x.dtype, x.device)(x[..., start:stop], x.ndim - 1))
            continue
        local, drop = found
        assert local.size == stop - start
        given_size = {"size": local.out} if scale is None else {"scale_factor": scale}
        if mode == "bicubic":
            given_size = {k: (1, v) for k, v in given_size.items()}
        parts.append(F.interpolate(x[..., start:stop], mode=mode, **given_size).narrow(-1, drop, length(interval)))
    whole = resize.taps().of((0, out), 0, x.dtype, x.device)(x, x.ndim - 1)
    torch.testing.assert_close(torch.cat(parts, -1), whole, rtol=1e-14, atol=1e-14)


def test_where_torchs_kernel_serves_parts():
    def serves(n, out, part, wanted, scale=None, mode="linear", corners=None):
        resize = Resize(n, out, scale, mode, corners, False, torch.float32, "cpu", 1)
        return as_local(resize, part, wanted) is not None

    assert serves(8, 16, (3, 8), (8, 16)) and serves(8, 16, (3, 8), (8, 16), scale=2.0, mode="nearest")
    assert serves(8, 4, (4, 8), (2, 4))
    assert not serves(8, 16, (3, 8), (8, 16), corners=True)
    assert not serves(8, 12, (3, 8), (6, 12))
    assert not serves(50, 100, (20, 50), (42, 100), scale=2.01)


@on_ranks(2)
def test_nearest_neighbours_are_copies():
    """A nearest neighbour is a copy: nothing else may leak into it."""
    x = torch.full((1, 1, 6, 6), torch.inf, dtype=torch.float64)
    x[..., ::2] = torch.nan
    up = F.interpolate(shard(x, shared_mesh(2), [Shard(2)]), scale_factor=2).full_tensor()
    assert torch.equal(up.nan_to_num(-1.0), F.interpolate(x, scale_factor=2).nan_to_num(-1.0))


def operand():
    return shard(data(1, 1, 4, 4), shared_mesh(2), [Shard(2)], {0: (1, 3)})


ERRORS = {
    "neither": (lambda x: F.interpolate(x), ValueError, "either size or scale_factor should be defined"),
    "mode": (
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        NotImplementedError,
        "Got 4D input, but trilinear mode needs 5D input",
    ),
    "corners": (
        lambda x: F.interpolate(x, scale_factor=2, align_corners=True),
        ValueError,
        "align_corners option can only be set",
    ),
    "length": (lambda x: F.interpolate(x, size=(1, 2, 3)), ValueError, "same number of spatial dimensions"),
    "empty": (lambda x: F.interpolate(x, size=(0, 2)), RuntimeError, "greater than (0|zero)"),
    "rounded": (
        lambda x: F.interpolate(x.to(torch.uint8), scale_factor=2, mode="bilinear"),
        NotImplementedError,
        r"interpolate: .*uint8 rounds .*S\(2\)\[1, 3\].*Remedy: convert",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_torchs_own_on_every_rank(name):
    raises_alike(operand, name)


MODES = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic")


@given(
    SIZES,
    st.one_of(st.integers(1, 60), st.floats(0.05, 6.0)),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.sampled_from((torch.float32, torch.float64)),
)
def test_taps_are_torchs_and_every_part_can_be_computed_from_what_it_reads(sizes, target, mode, corners, smooth, dtype):
    n = sum(sizes)
    out = target if isinstance(target, int) else int(n * target)
    if out == 0:
        return
    antialias = smooth and mode in ("bilinear", "bicubic")
    align_corners = None if mode.startswith("nearest") else corners
    scale = None if isinstance(target, int) else target
    ndim = {"linear": 1, "trilinear": 3}.get(mode, 2)
    ones = [1] * (ndim - 1)
    given_size = {"size": [*ones, out]} if scale is None else {"scale_factor": [*map(float, ones), scale]}
    x = data(1, 2, *ones, n, dtype=dtype)
    whole = F.interpolate(x, mode=mode, align_corners=align_corners, antialias=antialias, **given_size)
    taps = Resize(n, out, scale, mode, align_corners, antialias, dtype, "cpu", ndim).taps()
    parts = []
    outs = map_boundaries(sizes, scaled_boundary(n, out))
    for (a, b), (start, stop) in zip(intervals_of(outs), taps.reads(outs), strict=True):
        assert 0 <= start <= stop <= n
        if b > a:
            parts.append(taps.of((a, b), start, x.dtype, x.device)(x[..., start:stop], x.ndim - 1))
    result = torch.cat(parts, -1)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(result, whole, rtol=tolerance, atol=4 * tolerance)
    if mode.startswith("nearest"):
        assert torch.equal(result, whole) and taps.weights.shape[1] == 1


@on_ranks(2)
def test_operators_called_by_name():
    aten = torch.ops.aten
    cases = [
        (lambda x: aten.upsample_bicubic2d.default(x, [10, 6], False, 2.0, 2.0), (2, 3, 5, 3)),
        (lambda x: aten._upsample_bilinear2d_aa(x, [3, 4], align_corners=False), (2, 3, 5, 3)),
    ]
    for function, shape in cases:
        torch.manual_seed(0)
        x = torch.randn(shape, dtype=torch.float64)
        assert_matches_unsharded(function, x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (4, 1)})
    x = shard(torch.randn(2, 3, 5, 3), shared_mesh(2), [Shard(2)], {0: (4, 1)})
    with pytest.raises(UnsupportedSharding, match="do not lead to the output size"):
        aten.upsample_bilinear2d(x, [9, 4], False, 3.0, 3.0)


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks("world")
def test_second_derivatives(world):
    """Also where some ranks resample by torch's kernel, and others dim by dim."""
    options = (
        {"scale_factor": 2, "mode": "bilinear"},
        {"scale_factor": 2, "mode": "nearest"},
        {"size": (5, 11), "mode": "bicubic", "antialias": True},
        {"size": (13, 4), "mode": "bilinear", "align_corners": True},
    )
    cases = [
        (str(kwargs), squared_gradient(lambda x, kwargs=kwargs: F.interpolate(x, **kwargs)), (2, 3, 8, 6), (2, 3))
        for kwargs in options
    ]
    check_cases(cases, torch.distributed.get_world_size(), rounds=3)


@on_ranks(2)
def test_the_input_is_not_kept():
    """As it is not on one device: no gradient depends on it."""
    whole = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    x = shard(whole, shared_mesh(2), [Shard(2)], {0: (4, 5)}).requires_grad_()
    inner = x * 2
    memory = weakref.ref(inner._local_tensor)
    y = F.interpolate(inner, scale_factor=2, mode="bilinear")
    del inner
    assert memory() is None
    y.square().sum().backward()
