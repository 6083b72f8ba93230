"""Channels-last and permuted inputs with one sample, the usual case of domain parallelism, for every operator family.

With one sample a channels-last tensor has a dim of length 1, whose stride does not say where elements are, but is what
torch's kernels tell memory formats by.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from halves import half_of, in_halves
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.layout.strides import CHANNELS_LAST, stride_like
from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh


def parameters(*shapes):
    return [torch.linspace(0.5, 1.5, torch.Size(shape).numel(), dtype=torch.float64).view(shape) for shape in shapes]


def constant(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(0))


# What is called on images (1, 4, 8, 6).
IMAGES = {
    "conv2d": lambda x: F.conv2d(x, constant(6, 4, 3, 3), padding=1),
    "conv2d of stride 2": lambda x: F.conv2d(x, constant(6, 4, 3, 3), *parameters((6,)), stride=2, padding=1),
    "conv2d of few rows": lambda x: F.conv2d(x, constant(6, 4, 3, 3), stride=(5, 2)),
    "conv2d, depthwise": lambda x: F.conv2d(x, constant(4, 1, 3, 3), padding=1, groups=4),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, constant(4, 3, 3, 3), stride=2, padding=1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, *parameters((4,), (4,)), training=True),
    "batch_norm, running": lambda x: F.batch_norm(x, *parameters((4,), (4,), (4,), (4,))),
    "batch_norm, no bias": lambda x: F.batch_norm(x, *parameters((4,), (4,), (4,)), None, False, 0.1, 1e-12),
    "instance_norm": lambda x: F.instance_norm(x, weight=parameters((4,))[0]),
    "instance_norm, running": lambda x: F.instance_norm(x, *parameters((4,), (4,)), use_input_stats=False),
    "group_norm": lambda x: F.group_norm(x, 2, *parameters((4,), (4,))),
    "layer_norm of rows": lambda x: F.layer_norm(x, (6,), *parameters((6,), (6,))),
    "layer_norm of images": lambda x: F.layer_norm(x, (4, 8, 6)),
    "rms_norm": lambda x: F.rms_norm(x, (6,), *parameters((6,))),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "max_pool2d, ceil_mode": lambda x: F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1),
    "avg_pool2d, ceil_mode": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, ceil_mode=True),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2.0, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive_avg_pool2d to 1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "interpolate, nearest": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate, nearest, down": lambda x: F.interpolate(x, (13, 4)),
    "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "interpolate, bicubic": lambda x: F.interpolate(x, (5, 7), mode="bicubic", align_corners=True),
    "pad": lambda x: F.pad(x, (1, 2, 2, 1)),
    "pad, reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "pad, replicate": lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"),
    "pad, circular": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "pad, replicate, cropping": lambda x: F.pad(x, (-1, 2, -3, -1), mode="replicate"),
    "pad, circular, cropping": lambda x: F.pad(x, (-1, 2, 2, -1), mode="circular"),
    "grid_sample": lambda x: F.grid_sample(x, constant(1, 3, 3, 2), align_corners=False),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "relu, gelu, silu": lambda x: F.relu(x) + F.gelu(x) * F.silu(x),
    "prelu": lambda x: F.prelu(x, *parameters((4,))),
    "glu": lambda x: F.glu(x, 1),
    "softmax of channels": lambda x: x.softmax(1),
    "softmax of rows": lambda x: x.softmax(2),
    "sum, mean, var": lambda x: x.sum((2, 3), keepdim=True) + x.mean(2, keepdim=True) + x.var(3, keepdim=True),
    "amax": lambda x: x.amax((2, 3)),
    "cumsum": lambda x: x.cumsum(2),
    "sort": lambda x: x.sort(2).values,
    "topk": lambda x: x.topk(3, 2).values,
    "cat": lambda x: torch.cat([x, 2 * x], 1),
    "cat of rows": lambda x: torch.cat([x, 2 * x], 2),
    "stack": lambda x: torch.stack([x, x * x], 2),
    "slice": lambda x: x[:, 1:, 2:7, ::2],
    "select": lambda x: x[:, :, 3],
    "index": lambda x: x[:, :, torch.tensor([0, 6, 3, 3])],
    "gather": lambda x: x.gather(1, torch.tensor([2, 0]).view(1, 2, 1, 1).expand(1, 2, 8, 6)),
    "flip, roll": lambda x: x.flip(2).roll(3, 2),
    "permute": lambda x: x.permute(0, 2, 3, 1).contiguous() * 2,
    "flatten": lambda x: x.flatten(2).transpose(1, 2),
    "linear of channels": lambda x: F.linear(x.permute(0, 2, 3, 1), constant(5, 4), *parameters((5,))),
    "matmul": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("nchw,ncvw->nchv", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x - 1),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "interpolate, area": lambda x: F.interpolate(x, (5, 4), mode="area"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach().square()),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(1, 8, 6, dtype=torch.long)),
    "fft2": lambda x: torch.fft.fft2(x).abs(),
    "where, clamp": lambda x: torch.where(x > 0, x.clamp(max=1.0), -x),
    "expand": lambda x: x.expand(3, 4, 8, 6) * torch.arange(3.0, dtype=x.dtype).view(3, 1, 1, 1),
    "in place": lambda x: x.mul(2).add_(1).relu_(),
}
VOLUMES = {
    "conv3d": lambda x: F.conv3d(x, constant(5, 3, 3, 3, 3), padding=1),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x, constant(3, 2, 2, 2, 2), stride=2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, *parameters((3,), (3,)), training=True),
    "batch_norm, running": lambda x: F.batch_norm(x, *parameters((3,), (3,), (3,), (3,))),
    "group_norm": lambda x: F.group_norm(x, 3, *parameters((3,), (3,))),
    "instance_norm": lambda x: F.instance_norm(x),
    "max_pool3d": lambda x: F.max_pool3d(x, 2),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 3, stride=2, padding=1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "pad": lambda x: F.pad(x, (1, 1, 0, 2, 1, 0), mode="replicate"),
}


def in_memory(shape, order):
    """A tensor of this shape whose dims lie in memory in this order, the outermost first."""
    torch.manual_seed(0)
    inverse = [order.index(d) for d in range(len(shape))]
    return torch.randn([shape[d] for d in order], dtype=torch.float64).permute(inverse)


FORMATS = {
    "channels last": ((1, 4, 8, 6), (0, 2, 3, 1)),
    "permuted": ((1, 4, 8, 6), (3, 0, 2, 1)),
    "one channel": ((1, 1, 8, 6), (0, 2, 3, 1)),
}
# That need several channels.
CHANNELS = ("channel", "pixel_shuffle", "unpool", "grid", "conv", "norm", "prelu", "glu", "gather", "cross", "linear")


def check(name, function, x, sizes):
    try:
        assert_matches_unsharded(function, x, mesh_shape=len(sizes), placements=[Shard(2)], shard_sizes={0: sizes})
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def check_images(format_name, sizes, half):
    shape, order = FORMATS[format_name]
    for name, function in half_of(IMAGES.items(), half):
        if shape[1] > 1 or not any(part in name for part in CHANNELS):
            check(name, function, in_memory(shape, order), sizes)


def check_volumes(sizes):
    for name, function in VOLUMES.items():
        check(name, function, in_memory((1, 3, 8, 4, 4), (0, 2, 3, 4, 1)), sizes)


@pytest.mark.parametrize(
    ("format_name", "sizes", "half"), in_halves(itertools.product(FORMATS, [(5, 3), (0, 8), (3, 1, 4)])), ids=str
)
def test_one_sample_in_another_memory_format(format_name, sizes, half):
    run_distributed(check_images, len(sizes), format_name, sizes, half)


@pytest.mark.parametrize("sizes", [(5, 3), (0, 8)], ids=str)
def test_one_volume_with_channels_last(sizes):
    run_distributed(check_volumes, len(sizes), sizes)


# What torch calls row-major on meta tensors, as it is on other devices: so the global strides say.
BY_DEVICE = ("pad, reflect", "pad, replicate", "pad, replicate, cropping", "pad", "channel_shuffle", "flip, roll")


def is_channels_last(t):
    """Whether it is nothing else."""
    return t.is_contiguous(memory_format=CHANNELS_LAST.get(t.ndim)) and not t.is_contiguous()


def with_gradient(function, x):
    y = function(x)
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)
    return y.detach(), torch.autograd.grad((y * weights).sum(), x)[0]


def formats_of(functions, shape, sizes, dim):
    mesh, order = shared_mesh(len(sizes)), (0, *range(2, len(shape)), 1)
    inverse = [order.index(d) for d in range(len(shape))]
    lost = []
    for name, function in functions.items():
        if shape[0] > 1 and any(part in name for part in ("grid", "expand", "gather", "cross")):
            continue  # made for one sample
        x = in_memory(shape, order)
        local = shard(x, mesh, [Shard(dim)], {0: sizes}).to_local().permute(order).contiguous().permute(inverse)
        sharded = ShardTensor.from_local(local, mesh, [Shard(dim)], shard_sizes={0: sizes})
        expected = with_gradient(function, x.requires_grad_())
        found = with_gradient(function, sharded.requires_grad_())
        for what, a, b in zip(("result", "gradient"), found, expected):
            if b.ndim not in CHANNELS_LAST or not is_channels_last(b):
                continue
            fmt, local = CHANNELS_LAST[b.ndim], a.to_local()
            claims = name in BY_DEVICE or a.is_contiguous(memory_format=fmt)
            if not claims or (local.numel() and not local.is_contiguous(memory_format=fmt)):
                lost.append((name, what, dim, sizes, a.stride(), local.stride(), b.stride()))
    assert not lost, lost


@pytest.mark.parametrize("sizes", [(6, 2), (0, 8)], ids=str)
@on_ranks(2)
def test_channels_last_results_and_gradients_stay_so(sizes):
    formats_of(IMAGES, (1, 4, 8, 6), sizes, 2)
    formats_of(IMAGES, (2, 4, 8, 6), sizes, 2)
    formats_of(VOLUMES, (1, 3, 8, 4, 4), sizes, 2)


@on_ranks(2)
def test_likelihoods_of_channels_last_logarithms():
    """The gradient's kernel refuses channels-last logarithms; of shards, one may say so and the other not."""
    target = torch.randint(0, 3, (2, 4, 2), generator=seeded(0))
    for loss in (F.nll_loss, F.cross_entropy):
        for dim, sizes in ((1, (2, 1)), (2, (3, 1)), (3, (0, 2)), (0, (2, 0))):
            x = in_memory((2, 3, 4, 2), (0, 2, 3, 1))
            local = shard(x, shared_mesh(2), [Shard(dim)], {0: sizes}).to_local()
            local = torch.empty_like(local, memory_format=torch.channels_last).copy_(local)
            sharded = ShardTensor.from_local(local, shared_mesh(2), [Shard(dim)], shard_sizes={0: sizes})
            x = x.contiguous().requires_grad_()
            expected = torch.autograd.grad(loss(x, target), x)[0]
            found = torch.autograd.grad(loss(sharded.requires_grad_(), target), sharded)[0]
            torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_empty_and_short_shards_are_channels_last_too():
    """Every rank's part of a channels-last tensor says so, also one that is empty or has one row."""
    mesh = shared_mesh(2)
    for sizes in ((0, 8), (8, 0), (1, 7)):
        rows = sizes[mesh.get_local_rank()]
        local = torch.empty(1, 4, 8, 6).contiguous(memory_format=torch.channels_last)[:, :, :rows]
        x = ShardTensor.from_local(local, mesh, [Shard(2)], shard_sizes={0: sizes})
        moved = x.redistribute(placements=[Shard(3)])
        for t in (x, moved, x.relu(), x.redistribute(shard_sizes="even")):
            assert t.stride() == (192, 1, 24, 4), (sizes, t.stride())
            assert not t.to_local().numel() or t.to_local().is_contiguous(memory_format=torch.channels_last)


def strides_of_a_local_view():
    mesh = shared_mesh(2)
    given = in_memory((1, 4, 5 if mesh.get_local_rank() == 0 else 3, 6), (0, 2, 3, 1)).requires_grad_()
    x = ShardTensor.from_local(given, mesh, [Shard(2)], shard_sizes={0: (5, 3)})
    even = x.redistribute(shard_sizes={0: (4, 4)})
    return x.to_local().stride(), even.to_local().is_contiguous(memory_format=torch.channels_last)


def test_local_tensors_keep_their_strides():
    assert run_distributed(strides_of_a_local_view, 2) == [((120, 1, 24, 4), True), ((72, 1, 24, 4), True)]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_shards_have_the_format_of_the_whole(memory_format):
    """On all ranks of a mesh of two dims, also those without channels or rows: plans follow from it."""
    whole = torch.empty(2, 3, 8, 6, memory_format=memory_format)
    for d, e in ((1, 2), (2, 3), (1, 3), (0, 1)):
        for start, stop in ((0, 0), (0, 1), (1, 3)):
            part = whole[(slice(None),) * d + (slice(start, stop),)].narrow(e, 0, whole.shape[e] // 2)
            for t in (part, torch.empty(part.shape, memory_format=memory_format)):
                assert stride_like(t, whole.shape) == whole.stride(), (t.shape, t.stride())
