"""Normalization of channels in compiled graphs: one device's numbers, and operators of which loops can be made."""

from __future__ import annotations

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from on_ranks import on_ranks
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh

DOUBLE = torch.float64


class Norms(nn.Module):
    """All kinds, with and without weights; compiled for ShardTensors."""

    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    def forward(self, *args):
        torch._dynamo.reset()
        compiled = torch.compile(norms, backend=self.backend, fullgraph=True)
        return (compiled if isinstance(args[0], ShardTensor) else norms)(*args)


def norms(x, weight, bias):
    return (
        F.group_norm(x, 2, weight, bias),
        F.group_norm(x, 2, weight),
        F.group_norm(x, 3),
        F.batch_norm(x, None, None, weight, bias, True),
        F.instance_norm(x, None, None, weight, bias),
        F.instance_norm(x),
    )


def check_norms(shape, memory_format, dim, sizes, backend="aot_eager"):
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=DOUBLE) + 3).contiguous(memory_format=memory_format)
    weight, bias = torch.rand(2, 6, dtype=DOUBLE)
    places, given = [[Shard(dim)], None, None], [{0: sizes}, None, None]
    assert_matches_unsharded(
        Norms(backend), x, weight, bias, mesh_shape=len(sizes), placements=places, shard_sizes=given, rtol=1e-10
    )


@pytest.mark.parametrize(
    ("shape", "memory_format", "dim", "sizes"),
    [
        ((2, 6, 17, 5), torch.contiguous_format, 2, (11, 0, 6)),
        pytest.param((2, 6, 17, 33), torch.channels_last, 3, (1, 32), marks=pytest.mark.slow),
        pytest.param((1, 6, 7, 2, 5), torch.contiguous_format, 2, (5, 2), marks=pytest.mark.slow),
        pytest.param((3, 6, 97), torch.contiguous_format, 0, (1, 2), marks=pytest.mark.slow),
    ],
)
def test_norms_give_one_devices_numbers(shape, memory_format, dim, sizes):
    run_distributed(check_norms, len(sizes), shape, memory_format, dim, sizes, timeout=200)


@pytest.mark.slow
def test_norms_in_inductors_loops():
    """Which reuses memory of what the backward pass has read."""
    given = (2, 6, 17, 33), torch.channels_last, 2, (11, 6)
    run_distributed(check_norms, 2, *given, "inductor", timeout=500)


# -- what a compiler gets ----------------------------------------------------------------------------------------------

VIEWS = {"getitem", "aten.unbind.int", "aten.view.default", "aten.select.int", "aten.slice.Tensor"}
VIEWS |= {"aten.reshape.default", "aten.unsqueeze.default", "aten.alias.default"}


def name_of(node):
    return "getitem" if node.target is operator.getitem else str(node.target)


def origin(node):
    """The name of the operator that has computed what the node is a view of."""
    while node.op == "call_function" and name_of(node) in VIEWS:
        node = node.args[0]
    return node.op if node.op != "call_function" else name_of(node)


@pytest.mark.on_cpu("counts loops of the C++ that is made for CPUs")
@on_ranks(2, timeout=100)
def test_loops_have_the_shards_shape_and_read_what_is_materialized_before():
    torch._dynamo.reset()
    found = []

    def record(graph, inputs):
        found.append(graph)
        return make_boxed_func(graph.forward)

    x = shard(torch.randn(1, 4, 97, 33), shared_mesh(2), [Shard(2)], {0: (64, 33)}, requires_grad=True)
    own, net = x.to_local(), nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())
    torch.compile(net, backend=aot_autograd(fw_compiler=record), fullgraph=True)(x).sum().backward()
    loops, read = set(), set()
    for graph in found:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.numel() < own.numel():
                continue
            loops.add(tuple(value.shape))
            operands = [n for n in node.all_input_nodes if 1 < math.prod(n.meta["val"].shape) < value.numel()]
            read |= {origin(n) for n in operands}
    own = tuple(own.shape)
    assert loops == {own}
    assert read == {"shardtensor.materialized.default", "placeholder"}  # the forward pass materializes and keeps
