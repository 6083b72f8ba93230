"""All normalizations in all modes, memory formats, dtypes and shardings, on the device of the mesh."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from halves import in_halves
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor.ops.normalization import kernels
from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh

SHAPE = (2, 8, 12, 10)
# By the number of ranks: dim and sizes of the shards.
CUTS = {
    2: [(0, (1, 1)), (0, (0, 2)), (1, (6, 2)), (2, (4, 8)), (2, (12, 0)), (3, (3, 7))],
    3: [(0, (1, 0, 1)), (1, (2, 4, 2)), (2, (5, 0, 7)), (3, (1, 8, 1))],
}


def frozen(module):
    return module.requires_grad_(False)


def without_bias(module):
    module.bias = None
    return module


def without_weight(module):
    module.weight = None
    return module


NORMS = {
    "group": lambda: nn.GroupNorm(2, 8),
    "group, without weight and bias": lambda: nn.GroupNorm(2, 8, affine=False),
    "group, frozen": lambda: frozen(nn.GroupNorm(2, 8)),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "instance, without weight and bias": lambda: nn.InstanceNorm2d(8),
    "instance, evaluated": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True).eval(),
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, without weight and bias": lambda: nn.BatchNorm2d(8, affine=False),
    "batch, without bias": lambda: without_bias(nn.BatchNorm2d(8)),
    "batch, without weight": lambda: without_weight(nn.BatchNorm2d(8)),
    "batch, frozen": lambda: frozen(nn.BatchNorm2d(8)),
    "batch, evaluated": lambda: nn.BatchNorm2d(8).eval(),
    "batch, evaluated, without weight": lambda: without_weight(nn.BatchNorm2d(8)).eval(),
    "batch, evaluated, frozen": lambda: frozen(nn.BatchNorm2d(8).eval()),
    "layer": lambda: nn.LayerNorm(10),
    "layer, frozen": lambda: frozen(nn.LayerNorm(10)),
    "layer over samples": lambda: nn.LayerNorm(SHAPE[1:]),
    "rms": lambda: nn.RMSNorm(10),
    "rms over samples": lambda: nn.RMSNorm(SHAPE[1:]),
}


def made(name, dtype):
    """The module, with parameters and running statistics that show."""
    module = NORMS[name]().to(dtype)
    with torch.no_grad():
        for i, t in enumerate((*module.parameters(), *module.buffers())):
            if t.is_floating_point():
                t.copy_(torch.linspace(0.5, 1.5 + i, t.numel()).view(t.shape))
    return module


@pytest.mark.on_device
@pytest.mark.parametrize(
    ("ranks", "dtype", "half"),
    [
        *in_halves([(2, torch.float32), (2, torch.bfloat16), (3, torch.float64)]),
        pytest.param(2, torch.float64, None, marks=pytest.mark.slow),
        pytest.param(3, torch.float32, None, marks=pytest.mark.slow),
        pytest.param(3, torch.bfloat16, None, marks=pytest.mark.slow),
    ],
)
@on_ranks("ranks")
def test_values_gradients_and_running_statistics(ranks, dtype, half):
    """Each norm on all cuts, in the memory formats in turn; with ``half`` None in both formats on each cut."""
    torch.manual_seed(0)
    mesh, problems = shared_mesh(ranks), []
    image = (torch.randn(SHAPE) + 0.3).to(dtype)
    atol = 0.06 if dtype == torch.bfloat16 else None  # torch's kernels round on their way
    formats = (torch.contiguous_format, torch.channels_last)
    for i, name in enumerate(NORMS):
        if name.endswith("without weight") and (dtype == torch.bfloat16 or mesh.device_type != "cpu"):
            continue  # torch's backward raises
        for j, (dim, sizes) in enumerate(CUTS[ranks]):
            for memory_format in formats if half is None else formats[(i + j + half) % 2 :][:1]:
                x = image.contiguous(memory_format=memory_format)
                try:
                    y = assert_matches_unsharded(
                        made(name, dtype), x, mesh=mesh, placements=[Shard(dim)], shard_sizes={0: sizes}, atol=atol
                    )
                    here = y.to_local()
                    if dim in (0, 2, 3) and here.numel() and not name.startswith(("layer", "rms")):
                        assert here.is_contiguous(memory_format=memory_format), f"strides {here.stride()}"
                except Exception as error:
                    problems.append(f"{name}, dim {dim} in {sizes}, {memory_format}: {str(error)[:500]}")
    assert not problems, "\n".join(problems)


@pytest.mark.on_device
@on_ranks(2)
def test_ranks_whose_elements_are_equal_need_no_eps():
    """One rank's elements are all equal: its variance alone has no root to divide by."""
    torch.manual_seed(0)
    image = torch.randn(SHAPE, dtype=torch.float64)
    image[:, :, :4] = 1
    weight, bias = torch.rand(2, 8, dtype=torch.float64)
    for eps in (0.0, -0.1):
        assert_matches_unsharded(
            lambda x, w, b, eps=eps: F.group_norm(x, 2, w, b, eps),
            *(image, weight, bias),
            mesh=shared_mesh(2),
            placements=[[Shard(2)], None, None],
            shard_sizes=[{0: (4, 8)}, None, None],
        )


@pytest.mark.on_device
@pytest.mark.parametrize("launch", [0, 1 << 20], ids=["large", "small"])
@on_ranks(2)
def test_ways_of_weighting_groups(launch):
    """Weights of zero, or hardly more, in groups with others; and groups without weights, or frozen ones."""
    torch.manual_seed(0)
    image = torch.randn(SHAPE, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_LAUNCH", launch)
        for weight in ([0.0, 1, 2, 3, 0, 0, 0, 0], [1e-30, 1, -1e-19, 1e-12, 5, -2, 0, 1e3]):
            weight, bias = torch.tensor(weight, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
            for parameters in ((weight, bias), (weight,)):
                assert_matches_unsharded(
                    lambda x, *given: F.group_norm(x, 2, *given),
                    *(image, *parameters),
                    mesh=shared_mesh(2),
                    placements=[[Shard(2)], *[None] * len(parameters)],
                    shard_sizes=[{0: (5, 7)}, *[None] * len(parameters)],
                )
        for name in ("group, frozen", "group, without weight and bias"):
            module = made(name, torch.float64)
            mesh, sizes = shared_mesh(2), {0: (12, 0)}
            assert_matches_unsharded(module, image, mesh=mesh, placements=[Shard(2)], shard_sizes=sizes)


class Demands(TorchDispatchMode):
    """Notes what CUDA's kernels would refuse, or read wrongly: autograd always gives them more than CPUs ask for."""

    def __init__(self):
        super().__init__()
        self.refused, self.seen = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_batch_norm_backward.default:
            self.seen += 1
            grad, x, weight, running_mean, _, mean, rstd, train, _, mask = args
            if mean is None or rstd is None:
                self.refused.append("save_mean should always be defined")
            if train and (mean is None or mean.numel() != x.shape[1]):
                self.refused.append("the saved statistics are read")
            if weight is None and (mask[1] or mask[2]):
                self.refused.append("the gradients of weight and bias are made like the weight")
            given = [t for t in (weight, running_mean) if t is not None]
            if given and any(t.dtype != given[0].dtype for t in given):
                self.refused.append(f"weight and running statistics of {[t.dtype for t in given]}")
            if grad.dtype != x.dtype:
                self.refused.append(f"a gradient of {grad.dtype} of {x.dtype}")
        if func is torch.ops.aten.batch_norm_backward_reduce.default:
            self.seen += 1
            grad, x, mean, rstd, weight, _, of_weight, of_bias = args
            if weight is None and (of_weight or of_bias):
                self.refused.append("the gradients of weight and bias are made like the weight")
            if grad.dtype != x.dtype or mean.dtype != rstd.dtype:
                self.refused.append(f"{[t.dtype for t in (grad, x, mean, rstd)]}")
        return func(*args, **(kwargs or {}))


def demands(ranks, dtype):
    torch.manual_seed(0)
    mesh, problems, seen = shared_mesh(ranks), [], 0
    image = torch.randn(SHAPE).to(dtype)
    for name in NORMS:
        if dtype == torch.bfloat16 and name.endswith("without weight"):
            continue
        for dim, sizes in CUTS[ranks]:
            for memory_format in (torch.contiguous_format, torch.channels_last):
                x = shard(image.contiguous(memory_format=memory_format), mesh, [Shard(dim)], {0: sizes}, True)
                y = made(name, dtype)(x)
                with Demands() as asked:
                    y.sum().backward()
                seen += asked.seen
                problems += [f"{name}, dim {dim} in {sizes}, {memory_format}: {text}" for text in asked.refused]
    assert not problems, "\n".join(problems)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_get_what_those_of_gpus_demand(dtype):
    assert min(run_distributed(demands, 2, 2, dtype)) > 50
