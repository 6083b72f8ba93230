"""Positions and values of extremes, also cumulative ones, against one device, also along sharded dims."""

from __future__ import annotations

import pytest
import torch
from halves import half_of, in_halves
from on_ranks import on_ranks
from row_cases import CUTS, check_all, values
from torch.distributed.tensor import Shard

from shardtensor.testing import shard, shared_mesh

NEW_TORCH = torch.__version__ >= (2, 13)


def extreme_cases():
    x = values()
    ties = (x * 2).round()  # values that stand on several ranks
    unknown = x.clone()
    unknown[1, 2, 0] = unknown[1, 7, 0] = float("nan")
    unknown[2] = float("-inf")
    unknown[3] = float("inf")
    integers = (x * 3).round().int()
    cases = []
    for label, t in (("", x), (", ties", ties), (", NaN", unknown), (", integers", integers)):
        for dim in (0, 1, -1):
            cases += [
                (f"argmax {dim}{label}", lambda x, d=dim: x.argmax(d), t),
                (f"argmin {dim}, keepdim{label}", lambda x, d=dim: torch.argmin(x, d, keepdim=True), t),
                (f"max {dim}{label}", lambda x, d=dim: tuple(x.max(d)), t),
                (f"min {dim}, keepdim{label}", lambda x, d=dim: tuple(torch.min(x, dim=d, keepdim=True)), t),
                (f"cummax {dim}{label}", lambda x, d=dim: tuple(x.cummax(d)), t),
                (f"cummin {dim}{label}", lambda x, d=dim: tuple(torch.cummin(x, d)), t),
            ]
        cases += [
            (f"argmax{label}", lambda x: x.argmax(), t),
            (f"argmin{label}", lambda x: torch.argmin(x), t),
            (f"argmax, keepdim{label}", lambda x: torch.argmax(x, keepdim=True), t),
            (f"max of all{label}", lambda x: x.max(), t),
            (f"min of all{label}", lambda x: torch.min(x), t),
            (f"aminmax of all{label}", lambda x: tuple(x.detach().aminmax()), t),
            (f"aminmax{label}", lambda x: tuple(torch.aminmax(x.detach(), dim=1)), t),
        ]
    cases += [
        # torch has this derivative since 2.13.
        *([("aminmax, gradient", lambda x: tuple(x.aminmax(dim=1, keepdim=True)), x)] if NEW_TORCH else []),
        ("max of booleans", lambda x: tuple((x > 0).max(1)), x),
        ("values by name", lambda x: x.max(1).values * 2, x),
        ("of two tensors", lambda x: torch.max(x, x.sin()), x),
    ]
    return cases


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes", "half"), in_halves(CUTS))
@on_ranks("mesh_shape")
def test_extremes(mesh_shape, dims, sizes, half):
    check_all(half_of(extreme_cases(), half), mesh_shape, dims, sizes)
    with torch.inference_mode():
        check_all(half_of(extreme_cases(), half), mesh_shape, dims, sizes, check_grads=False)


@on_ranks(2)
def test_shards_without_what_is_reduced_of_tensors_without_elements():
    x = shard(torch.ones(3, 0, 2, dtype=torch.float64), shared_mesh(2), [Shard(0)], {0: (3, 0)})
    assert [tuple(y.full_tensor().shape) for y in (x.amin(0), x.amax(0), *torch.aminmax(x, dim=0))] == [(0, 2)] * 4
