"""``torch.distributed.all_reduce`` on ShardTensors: values are reduced, layouts stay."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import count_communication, run_expecting_errors, shard, shared_mesh

AXES = ("dp", "domain")


def whole():
    return torch.arange(5.0, dtype=torch.float64)


def on_domain(placement, **options):
    """On a 2 x 2 mesh, with values of each domain's own."""
    mesh = shared_mesh((2, 2), AXES)
    sizes = {0: (4, 1)} if isinstance(placement, Shard) else None
    return shard(whole() + 10 * mesh["dp"].get_local_rank(), mesh["domain"], [placement], sizes, **options), mesh


@pytest.mark.parametrize("placement", [Replicate(), Partial(), Shard(0)], ids=str)
@pytest.mark.parametrize(
    ("op", "expected"), [(dist.ReduceOp.SUM, 2 * whole() + 10), (dist.ReduceOp.MAX, whole() + 10)], ids=["sum", "max"]
)
@on_ranks(4)
def test_reduction_over_the_data_axis(placement, op, expected):
    """Whatever the placement along the domain, aliases of the memory included."""
    x, mesh = on_domain(placement)
    alias, before = x.detach(), x._spec
    assert dist.all_reduce(x, op, group=mesh["dp"].get_group()) is None
    assert x._spec == before and torch.equal(x.full_tensor(), expected)
    assert torch.equal(alias.full_tensor(), expected)
    x, _ = on_domain(placement)
    work = dist.all_reduce(x, op, group=mesh["dp"].get_group(), async_op=True)
    work.wait()
    assert torch.equal(x.full_tensor(), expected)


@on_ranks(4)
def test_a_loss_is_averaged_over_all_ranks():
    """What frameworks do to report a loss: the mean over all ranks, those of one domain having the same value."""
    x, mesh = on_domain(Shard(0), requires_grad=True)
    loss = x.square().mean()
    shown = loss.detach().clone()
    with count_communication() as counts:
        dist.all_reduce(shown)
    assert counts.collectives == {"all_reduce": 2} and counts.collective_bytes == 16  # a number each
    values = [(whole() + 10 * d).square().mean() for d in range(2)]
    assert (shown / 4).item() == pytest.approx(sum(values).item() / 2, rel=1e-12)
    loss.backward()
    expected = 2 * (whole() + 10 * mesh["dp"].get_local_rank()) / 5
    torch.testing.assert_close(x.grad.full_tensor(), expected, rtol=1e-12, atol=0)


def over_its_own_shards(group):
    x, mesh = on_domain(Shard(0))
    dist.all_reduce(x, group=mesh["domain"].get_group() if group == "domain" else None)


@pytest.mark.parametrize("group", ["domain", "all"])
def test_different_shards_are_not_added_up(group):
    for error in run_expecting_errors(over_its_own_shards, 4, group):
        assert isinstance(error, UnsupportedSharding)
        assert "hold different shards of it (mesh dim 0)" in str(error) and "group of the data axis" in str(error)


@on_ranks(4)
def test_what_every_rank_has_whole_is_broadcast():
    x, _ = on_domain(Replicate())
    dist.broadcast(x, 3)
    assert torch.equal(x.to_local(), whole() + 10)


@pytest.mark.parametrize("placement", [Replicate(), Partial(), Shard(0)], ids=str)
@on_ranks(4)
def test_values_of_one_domain_are_broadcast_along_the_data_axis(placement):
    x, mesh = on_domain(placement)
    dist.broadcast(x, group=mesh["dp"].get_group(), group_src=1)
    assert torch.equal(x.full_tensor(), whole() + 10)


@pytest.mark.parametrize("placement", [Replicate(), Partial(), Shard(0)], ids=str)
@on_ranks(4)
def test_a_reduction_to_one_rank_gives_the_sum_to_all(placement):
    """A rank with another value than the others would be silently wrong in what follows."""
    x, mesh = on_domain(placement)
    assert dist.reduce(x, group=mesh["dp"].get_group(), group_dst=1) is None
    assert torch.equal(x.full_tensor(), 2 * whole() + 10)
    dist.reduce(x, group=mesh["dp"].get_group(), group_dst=0, op=dist.ReduceOp.MAX, async_op=True).wait()
    assert torch.equal(x.full_tensor(), 2 * whole() + 10)


def sent_to_others(name):
    getattr(dist, name)(on_domain(Shard(0))[0], 0)


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_different_shards_are_not_taken_for_one_value(name):
    for error in run_expecting_errors(sent_to_others, 4, name):
        assert isinstance(error, UnsupportedSharding) and str(error).startswith(f"{name}: the group's ranks hold diff")


def sent(name, placement):
    x, _ = on_domain(placement)
    if name == "scatter":
        dist.scatter(x, [whole()] * 4 if dist.get_rank() == 0 else None, 0)
    elif name == "reduce_scatter":
        dist.reduce_scatter(x, [whole()] * 4)
    else:
        getattr(dist, name)(x, 1 - dist.get_rank() % 2)


@pytest.mark.parametrize("name", ["send", "recv", "scatter", "reduce_scatter"])
def test_what_gives_each_rank_a_value_of_its_own_is_refused(name):
    for placement in (Replicate(), Partial(), Shard(0)):
        for error in run_expecting_errors(sent, 4, name, placement):
            assert isinstance(error, UnsupportedSharding)
            assert f"torch.distributed.{name}: each rank would send, or get, a value of its own" in str(error)
            assert "Remedy: pass a plain tensor: full_tensor(), or to_local()" in str(error)


def gathered():
    dist.all_gather([whole()] * 4, on_domain(Shard(0))[0])


def test_shards_are_not_gathered_as_values():
    for error in run_expecting_errors(gathered, 4):
        assert isinstance(error, UnsupportedSharding) and "the ranks have different parts of it" in str(error)
        assert "full_tensor()" in str(error) and "sync_on_compute=False" in str(error)
