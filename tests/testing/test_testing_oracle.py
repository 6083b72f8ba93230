"""The oracle must pass what is right and name what is wrong; here it judges functions with known faults."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.dispatch.tensor import wrap
from shardtensor.testing import assert_matches_unsharded, run_distributed, run_expecting_errors, shard, shared_mesh

UNEVEN = {0: (5, 3)}


def data(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


class Scale(nn.Module):
    """Linear along a dim that is not cut, with a fault on demand."""

    def __init__(self, fault=None):
        super().__init__()
        self.weight = nn.Parameter(data(4, seed=1))
        self.register_buffer("calls", torch.zeros(()))
        self.fault = fault

    def forward(self, x):
        sharded = isinstance(x, ShardTensor)
        self.calls += 2 if sharded and self.fault == "buffer" else 1
        weight = self.weight
        if sharded and self.fault == "parameter gradient":
            weight = weight.detach() * 0.5 + weight * 0.5
        if sharded and self.fault == "input gradient":
            x = x.detach() * 0.5 + x * 0.5
        out = x * weight
        if sharded and self.fault == "output":
            out = out + 1e-6
        return out


def compare(fault, placements, sizes, shape=(8, 4), mesh_shape=2):
    result = assert_matches_unsharded(
        Scale(fault), data(*shape), mesh_shape=mesh_shape, placements=placements, shard_sizes=sizes
    )
    return None if result is None else tuple(result.to_local().shape)


def test_right_results_pass_and_come_back_sharded():
    assert run_distributed(compare, 2, None, [Shard(0)], UNEVEN) == [(5, 4), (3, 4)]
    assert run_distributed(compare, 2, None, [Shard(-2)], None) == [(4, 4), (4, 4)]
    assert run_distributed(compare, 2, None, [Replicate()], None) == [(8, 4), (8, 4)]
    assert run_distributed(compare, 2, None, [Shard(0)], {0: (0, 8)}) == [(0, 4), (8, 4)]


def test_meshes_of_two_dims_and_smaller_than_the_world():
    both = [Shard(1), Shard(0)]
    sizes = {0: (5, 2), 1: (1, 3)}
    shapes = run_distributed(compare, 4, None, both, sizes, (4, 7, 4), (2, 2))
    assert shapes == [(1, 5, 4), (3, 5, 4), (1, 2, 4), (3, 2, 4)]
    assert run_distributed(compare, 4, None, [Shard(0)], UNEVEN) == [(5, 4), (3, 4), None, None]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("output", r"output 0 \(.*, sizes \{0: \(5, 3\)\}, this rank's shard \(5, 4\)\): 20 of 20 values differ"),
        ("input gradient", "gradient of input 0 .*by up to"),
        ("parameter gradient", "gradient of parameter weight: 4 of 4 values differ"),
        ("buffer", r"buffer calls: 1 of 1 values differ, by up to 1 .* at \(\): 2.0 instead of 1.0"),
    ],
    ids=lambda value: value if len(value) < 20 else "",
)
def test_faults_are_named(fault, message):
    errors = run_expecting_errors(compare, 2, fault, [Shard(0)], UNEVEN)
    assert all(isinstance(error, AssertionError) for error in errors)
    assert "sharded and unsharded results differ at (0,) of a mesh of (2,)" in str(errors[0])
    with pytest.raises(AssertionError, match=message):
        raise errors[0]
    assert str(errors[0]).count("\n") == 1, "one fault, one line"


@on_ranks(2)
def test_plain_arguments_and_nested_outputs():
    def fn(x, scale, times, flags):
        return {"product": x * scale * times, "times": times, "flags": ~flags}

    assert_matches_unsharded(
        fn,
        data(8, 4),
        data(4, seed=2),
        3,
        data(8, 4) > 0,
        mesh_shape=2,
        placements=[[Shard(0)], None, None, [Shard(0)]],
        shard_sizes=[UNEVEN, None, None, UNEVEN],
    )


def cut_and_gather(placements, sizes):
    whole = torch.arange(24).reshape(8, 3)
    x = shard(whole, shared_mesh(2), placements, sizes)
    assert type(x) is ShardTensor and tuple(x.shape) == (8, 3) and x.is_leaf
    assert torch.equal(x.full_tensor(), whole)
    return x.to_local()


def test_shard_cuts_and_sums_up():
    first, second = run_distributed(cut_and_gather, 2, [Shard(0)], {0: (1, 7)})
    assert (first.shape, second.shape) == ((1, 3), (7, 3))
    first, second = run_distributed(cut_and_gather, 2, [Partial()], None)
    assert not torch.equal(first, second) and second.any()


def test_wrong_sizes_are_refused():
    for error in run_expecting_errors(cut_and_gather, 2, [Shard(0)], {0: (5, 4)}):
        assert str(error) == "sizes (5, 4) on mesh dim 0 do not shard 8 over 2 ranks"


def rank_dependent():
    def fn(x):
        return x * (1 + dist.get_rank()) if isinstance(x, ShardTensor) else x

    assert_matches_unsharded(fn, data(8), mesh_shape=2, placements=[Shard(0)], check_grads=False)


def test_values_wrong_on_one_rank_fail_on_every_rank():
    first, second = map(str, run_expecting_errors(rank_dependent, 2))
    assert "nothing differs on rank 0, output 0" in first and "4 of 4 values differ" in first
    assert "4 of 4 values differ" in second and ", at (" in second


def other_sizes():
    def fn(x):  # each rank's rows are right by its own spec, but row 4 is nobody's
        if not isinstance(x, ShardTensor):
            return x * 1
        sizes, rows = ((4, 4), data(8)[:4]) if dist.get_rank() == 0 else ((5, 3), data(8)[5:])
        return wrap(rows, x._spec.replace(sizes=(sizes,)))

    assert_matches_unsharded(fn, data(8), mesh_shape=2, placements=[Shard(0)], shard_sizes=UNEVEN, check_grads=False)


def test_layouts_that_differ_between_ranks_fail_on_every_rank():
    for error in run_expecting_errors(other_sizes, 2):
        assert "ranks do not agree on the layouts of the results: output 0" in str(error), error
        assert "sizes {0: (4, 4)}) on rank 0" in str(error) and "sizes {0: (5, 3)}) on rank 1" in str(error)


@on_ranks(2)
def test_contributions_are_summed_before_they_are_compared():
    def fn(x):
        return x.sum(0)

    assert_matches_unsharded(fn, data(8, 3), mesh_shape=2, placements=[Shard(0)], shard_sizes=UNEVEN)
