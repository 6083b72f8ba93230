"""Communication as operators of graphs: where they are in a graph, and what they return."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from on_ranks import on_ranks
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import ir
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.utils import run_and_get_code
from torch.distributed.tensor import Shard

from shardtensor._compat.replaced import begin
from shardtensor.communication.tracing import ticket_for, wait
from shardtensor.testing import shard, shared_mesh

START, WAIT, SUM = (f"shardtensor.{name}.default" for name in ("exchange", "wait", "all_reduce"))


def test_a_ticket_serves_once():
    result = torch.ones(3)
    ticket = ticket_for(lambda: result)
    assert wait(ticket, result, [3], None) is result
    with pytest.raises(RuntimeError, match="nothing was started for this ticket"):
        wait(ticket, result, [3], None)


def convolutions():
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1))


def large_shards():
    """Tall enough for gradients to be computed while those of halos travel."""
    return shard(torch.randn(1, 4, 1536, 96), shared_mesh(2), [Shard(2)], {0: (804, 732)}, requires_grad=True)


def meanwhile(names, kind):
    """How many operators of a kind there are between the start of each exchange and the next wait."""
    starts = [i for i, name in enumerate(names) if name == START]
    return [sum(kind in name for name in names[i : names.index(WAIT, i)]) for i in starts]


def assert_overlaps(forward, backward):
    assert meanwhile(forward, "convolution") == [0, 0]  # one kernel computes shard and halo
    assert meanwhile(backward, "convolution_backward") == [1, 1]  # the shard's and the parameters' gradients
    assert forward.count(WAIT) == 2 and backward.count(WAIT) == 3
    assert backward.count(SUM) == 1  # for the parameters of all layers


def names_of(graph):
    """The operators of a graph, in order; for those with effects, which of them."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    effects = torch.ops.higher_order.with_effects
    return [str(node.args[1] if node.target is effects else node.target) for node in nodes]


def gradients_of(step, x, net):
    x.grad = None
    net.zero_grad()
    y = step(x)
    y.sum().backward()
    return [t.to_local() for t in (y, x.grad)] + [p.grad for p in net.parameters()]


@on_ranks(2, timeout=200)
def test_gradients_are_computed_while_those_of_halos_travel():
    graphs = []

    def record(graph, inputs):
        graphs.append(names_of(graph))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    x, net = large_shards(), convolutions()
    compiled = torch.compile(net, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    pairs = zip(gradients_of(compiled, x, net), gradients_of(net, x, net), strict=True)
    assert all(torch.equal(mine, expected) for mine, expected in pairs)
    assert_overlaps(*graphs)


@pytest.mark.slow
@on_ranks(2, timeout=500)
def test_inductor_does_not_move_them_from_there():
    torch._dynamo.reset()
    x, net = large_shards(), convolutions()
    compiled = torch.compile(net, fullgraph=True)
    found, codes = run_and_get_code(gradients_of, compiled, x, net)
    for mine, expected in zip(found, gradients_of(net, x, net), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-3)
    codes = [re.findall(r"torch\.ops\.([\w.]+)\(|extern_kernels\.(\w+)\(", code) for code in codes]
    assert_overlaps(*([a or b for a, b in code] for code in codes))


# -- order -------------------------------------------------------------------------------------------------------------


def sums_started_before_the_first_is_waited_for(*tensors):
    """One after the other they would need a quarter of the memory."""
    sent = [2 * t for t in tensors]
    tickets = [torch.ops.shardtensor.all_reduce(t, "sum", "0", "") for t in sent]
    sums = [wait(ticket, t, t.shape, None) for ticket, t in zip(tickets, sent, strict=True)]
    return [t.sum() for t in sums]


class Scheduled(Exception):
    """What inductor's scheduler was asked for is known."""


def test_inductor_keeps_the_order_in_which_communication_was_traced():
    """Where its scheduler would need less memory for another one, which on other ranks it may not."""
    begin()  # as the first ShardTensor does
    torch._dynamo.reset()
    orders = []

    def record(scheduler, *_):
        kernels = [node.node for node in scheduler.nodes]
        orders.append([str(k.op_overload) for k in kernels if isinstance(k, ir.FallbackKernel)])
        raise Scheduled

    compiled = torch.compile(sums_started_before_the_first_is_waited_for, fullgraph=True)
    with mock.patch.object(Scheduler, "codegen", record), pytest.raises(Exception, match="Scheduled"):
        compiled(*(torch.ones(1000 + i, 100) for i in range(4)))
    assert orders == [[SUM] * 4 + [WAIT] * 4]


# -- CUDA graphs: inductor makes none of a graph that communicates -----------------------------------------------------


@pytest.mark.slow
@on_ranks(2, timeout=500)
def test_no_cuda_graphs_are_made_of_what_communicates():
    """What inductor makes for CUDA graphs, asked on the CPU what it would split on a GPU: operands of one ``cat``."""
    torch._dynamo.reset()
    x, net, ask = large_shards(), convolutions(), Scheduler.should_partition

    def as_on_a_gpu(self, node):
        with mock.patch.object(BaseSchedulerNode, "is_gpu", lambda _: True):
            return ask(self, node)

    skipped = counters["inductor"]["cudagraph_skips"]
    with mock.patch.object(Scheduler, "should_partition", as_on_a_gpu):
        compiled = torch.compile(net, mode="reduce-overhead", fullgraph=True)
        found, codes = run_and_get_code(gradients_of, compiled, x, net)
    for mine, expected in zip(found, gradients_of(net, x, net), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-3)
    assert ["def partition_" in code for code in codes] == [False] * 2
    assert counters["inductor"]["cudagraph_skips"] > skipped
