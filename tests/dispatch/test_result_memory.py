"""What torch's operators return that are no views has memory of its own: what is written to it is written only there.

On a rank an operator may have nothing to do: no padding, no halo, a window of one element. Its result is a copy, too.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.testing import run_distributed, shard, shared_mesh

FUNCTIONS = {
    "pad by nothing": lambda x: F.pad(x, (0, 0, 0, 0)),
    "pad at the end": lambda x: F.pad(x, (0, 0, 0, 3)),
    "pad at the start": lambda x: F.pad(x, (0, 0, 2, 0)),
    "pad another dim": lambda x: F.pad(x, (0, 0, 0, 0, 0, 1)),
    "cut": lambda x: F.pad(x, (0, 0, -2, 0)),
    "reflect": lambda x: F.pad(x, (0, 0, 0, 2), mode="reflect"),
    "replicate": lambda x: F.pad(x, (0, 0, 0, 2), mode="replicate"),
    "circular": lambda x: F.pad(x, (0, 0, 0, 0), mode="circular"),
    "repeat_interleave": lambda x: x.repeat_interleave(1, 2),
    "repeat_interleave an entry": lambda x: x[:, :, :1].repeat_interleave(2, 2),
    "repeat_interleave along another dim": lambda x: x[:1].repeat_interleave(2, 0),
    "repeat_interleave each": lambda x: x[..., :3, :].repeat_interleave(2, 2),
    "repeat_interleave by counts": lambda x: x.repeat_interleave(torch.ones(8, dtype=torch.int64), 2),
    "repeat": lambda x: x.repeat(1, 1, 1, 1),
    "tile": lambda x: x.tile((1, 1)),
    "cat": lambda x: torch.cat([x]),
    "cat with nothing": lambda x: torch.cat([x, x[:, :, :0]], 2),
    "roll": lambda x: x.roll(0, 2),
    "flip": lambda x: x.flip(()),
    "rot90": lambda x: x.rot90(0, (2, 3)),
    "tril": lambda x: x.tril(100),
    "cumsum": lambda x: x[:, :, :1].cumsum(2),
    "max_pool2d": lambda x: F.max_pool2d(x, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 1),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 1.0, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (8, 4)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (8, 4)),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, (4, 2), _random_samples=torch.ones(2, 2, 2) / 3),
    "interpolate": lambda x: F.interpolate(x, (8, 4)),
    "interpolate bilinear": lambda x: F.interpolate(x, (8, 4), mode="bilinear", align_corners=True),
    "interpolate area": lambda x: F.interpolate(x, (8, 4), mode="area"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 1),
    "index_select": lambda x: x.index_select(2, torch.arange(8)),
    "by index": lambda x: x[:, :, torch.arange(8)],
    "gather": lambda x: x.gather(2, torch.arange(8)[:, None].expand(2, 2, 8, 4)),
    "take_along_dim": lambda x: x.take_along_dim(torch.arange(8)[None, None, :, None], 2),
    "masked_select": lambda x: x.masked_select(torch.tensor(True)),
    "masked_scatter": lambda x: x.masked_scatter(x > 100, torch.ones(64)),
    "index_put": lambda x: x.index_put((torch.zeros(0, dtype=torch.int64),), torch.zeros(0, 2, 8, 4)),
    "where": lambda x: torch.where(x < 100, x, torch.zeros(())),
    "sort": lambda x: x[:, :, :1].sort(2)[0],
    "topk": lambda x: x[:, :, :1].topk(1, 2)[0],
    "amax": lambda x: x[:, :, :1].amax(2),
    "sum of one": lambda x: x[:, :, :1].sum(2),
    "median": lambda x: x[:, :, :1].median(2)[0],
    "diff": lambda x: x.diff(n=0, dim=2),
    "stack": lambda x: torch.stack([x]),
    "as complex": lambda x: torch.complex(x, x * 0),
    "dropout": lambda x: F.dropout(x, 0.0),
    "to another dtype": lambda x: x.double(),
    "copied": lambda x: x.to(x.dtype, copy=True),
    "channels last": lambda x: x[:, :, :1].to(memory_format=torch.channels_last),
}


def whole():
    return torch.arange(128.0).reshape(2, 2, 8, 4).clone()


def shares(function):
    """Whether one device's result has the input's memory, or elements of it have the same."""
    x = whole()
    result = function(x)
    overlaps = any(s == 0 and n > 1 for s, n in zip(result.stride(), result.shape))
    return overlaps or result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def write(sizes, dim, requires_grad):
    for name, function in FUNCTIONS.items():
        if shares(function):
            continue
        v = whole()
        x = shard(v, shared_mesh(2), [Shard(dim)], {0: sizes}, requires_grad=requires_grad)
        expected, result = function(v), function(x)
        assert isinstance(result, ShardTensor), name
        try:
            with torch.no_grad():
                result.mul_(2).add_(1)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        assert torch.equal(x.detach().full_tensor(), whole()), f"{name}: the input was written to"
        torch.testing.assert_close(result.detach().full_tensor(), expected * 2 + 1, msg=name)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("sizes", "dim"), [((6, 2), 2), ((7, 1), 2), ((0, 2), 0)])
def test_results_are_copies(sizes, dim, requires_grad):
    assert sum(not shares(function) for function in FUNCTIONS.values()) > 45
    run_distributed(write, 2, sizes, dim, requires_grad)
