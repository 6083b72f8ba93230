"""That the emulated device finds out what it is there for."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

from shardtensor.testing import DistributedFailure, run_distributed, run_expecting_errors, shared_mesh

pytestmark = pytest.mark.usefixtures("emulated")


def raises(text, f):
    with pytest.raises(RuntimeError, match=text):
        f()


@on_ranks(2)
def test_tensors_are_on_devices_that_do_not_mix():
    x = torch.ones(3)
    assert x.is_cuda and x.device == torch.device("cuda", dist.get_rank())
    assert torch.cuda.current_device() == dist.get_rank() and torch.accelerator.current_accelerator().type == "cuda"
    raises("at least two devices", lambda: x + torch.ones(3, device="cpu"))
    raises("at least two devices", lambda: x + torch.ones(3, device=f"cuda:{dist.get_rank() + 1}"))
    raises("at least two devices", lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2, device="cpu")))
    assert (x + torch.tensor(1.0, device="cpu")).tolist() == [2, 2, 2]  # a number, as an argument of the kernel
    assert torch.empty(5).isnan().all()
    torch.cuda.set_device(dist.get_rank() + 1)
    assert torch.empty(1, device="cuda").device.index == dist.get_rank() + 1


@on_ranks(1)
def test_backward_runs_in_a_thread_of_the_device():
    import threading

    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(threading.current_thread() is threading.main_thread())
            return grad

    Identity.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [False]
    conv = nn.Conv2d(2, 3, 3)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert conv(torch.randn(1, 2, 5, 5)).dtype == torch.bfloat16


@on_ranks(1)
def test_generators_have_a_seed_and_an_offset():
    state = torch.cuda.get_rng_state()
    assert state.numel() == 16 and state.device.type == "cpu"
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4)) and not torch.equal(first, torch.rand(4))
    raises("'cuda' device type for generator", lambda: torch.rand(4, generator=torch.Generator("cpu")))
    assert not torch.equal(nn.functional.dropout(torch.ones(99)), nn.functional.dropout(torch.ones(99)))


@on_ranks(1)
def test_kernels_of_two_streams_have_to_be_ordered():
    from device.emulated import after_call

    side, x = torch.cuda.Stream(), torch.ones(4)
    with torch.cuda.stream(side):
        raises("race: aten::mul.out on stream .* reads what aten::fill_.Scalar on stream 0", lambda: x * 2)
        side.wait_stream(torch.cuda.default_stream())
        y = x * 2
        event = side.record_event()
        x.add_(1)
    raises("race: .* reads what aten::mul.out", lambda: y + 1)
    event.wait()
    assert (y + 1).tolist() == [3] * 4
    raises("race: aten::add.out on stream 0 .* what aten::add.out on stream", lambda: x.add_(1))
    torch.cuda.synchronize()
    x.add_(1)
    after_call()
    def made_and_freed(record):
        with torch.cuda.stream(side):
            z = torch.ones(4)
        torch.cuda.current_stream().wait_stream(side)
        z.mul(2)
        if record:
            z.record_stream(torch.cuda.current_stream())

    made_and_freed(record=False)
    with torch.cuda.stream(side):
        torch.ones(1)  # may get that memory
    raises("was freed while aten::mul.out on stream 0", after_call)
    made_and_freed(record=False)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        torch.ones(1)
    after_call()
    made_and_freed(record=True)
    with torch.cuda.stream(side):
        torch.ones(1)
    after_call()


@on_ranks(1)
def test_copies_from_and_to_pinned_memory_take_their_time():
    from device.emulated import after_call

    x, host = torch.full((4,), 3.0), torch.zeros(4, device="cpu").pin_memory()
    host.copy_(x, non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [3] * 4
    x.copy_(host, non_blocking=True)
    host.zero_()
    torch.cuda.synchronize()
    raises("pinned memory of .* was written to before", after_call)
    x.copy_(torch.ones(4, device="cpu"), non_blocking=True)  # not pinned: the host waits
    assert x.tolist() == [1] * 4


@on_ranks(1)
def test_synchronizations_and_copies_are_counted():
    from device.emulated import counted

    x = torch.arange(4.0)
    with counted() as found:
        x.sum().item()
        x[x > 1]
        x.cpu()
        torch.ones(2, device="cpu").to(x.device)
        x.mul(2)
    assert found.total("sync") == 4 and found.total("d2h") == found.total("h2d") == 1, found.events
    assert found.events["kernel", "aten::mul.out"] == 1 and found.bytes > 0
    with counted() as found:
        x.cos_()
        x[torch.arange(2)]
    assert not found.total("sync"), found.of("sync")


@on_ranks(1)
def test_graphs_are_recorded_and_replayed():
    x, total = torch.ones(4), torch.zeros(())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + torch.rand(4)
        total += y.sum()
    assert y.isnan().all() and not total
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y) and (y >= 2).all() and torch.allclose(total, first.sum() + y.sum())
    x.zero_()
    graph.replay()
    assert (y < 1).all()

    def synchronizing():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.sum().item()

    raises("not permitted when stream is capturing", synchronizing)


@on_ranks(1)
def test_graphs_have_the_streams_that_wait_for_theirs():
    x, side, graph = torch.ones(4), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    before = torch.cuda.Event()
    before.record()
    variance = torch.ones(2)
    with torch.cuda.graph(graph):
        inside = torch.cuda.current_stream()
        side.wait_stream(inside)
        with torch.cuda.stream(side):  # which the graph has from now on
            assert torch.cuda.is_current_stream_capturing()
            y = x * 2
        inside.wait_stream(side)
        with torch.cuda.stream(torch.cuda.Stream()):  # which it has not
            assert not torch.cuda.is_current_stream_capturing()
        raises("dependency created on uncaptured work", lambda: inside.wait_event(before))
        after = torch.cuda.Event()
        after.record()
        sums = torch.ones(2, 2)  # the kernel writes to what its schema does not tell
        torch.batch_norm_gather_stats_with_counts(x.view(1, 2, 2), sums, sums, None, variance, 0.1, 1e-5, sums[0])
    assert variance.tolist() == [1, 1]
    raises("an event last recorded in a capturing stream", lambda: torch.cuda.current_stream().wait_event(after))
    graph.replay()
    assert y.tolist() == [2] * 4 and variance.tolist() != [1, 1]

    def unjoined():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x * 2

    raises("unjoined work", unjoined)


@on_ranks(1)
def test_graphs_do_not_keep_what_they_read():
    x, graph = torch.ones(4), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2) * 2  # the graph keeps what is in between
    graph.replay()
    assert y.tolist() == [4] * 4
    del x
    raises("memory that was allocated outside of the capture, and has been freed", graph.replay)


@on_ranks(2)
def test_communication_has_nccls_rules():
    rank, others = dist.get_rank(), 1 - dist.get_rank()
    x = torch.full((3,), rank + 1.0)
    work = dist.all_reduce(x, async_op=True)
    raises("race: .* what allreduce on stream .* has written", lambda: x + 1)
    work.wait()
    assert x.tolist() == [3] * 3
    received = torch.empty(3)
    sent = torch.full((3,), float(rank))
    messages = [dist.P2POp(dist.isend, sent, others), dist.P2POp(dist.irecv, received, others)]
    works = dist.batch_isend_irecv(messages)
    raises("race: aten::add.out .* what messages on stream .* has read", lambda: sent.add_(1))
    for each in works:
        each.wait()
    assert received.tolist() == [others] * 3
    raises("must be CUDA and dense", lambda: dist.group.WORLD._get_backend(x.device).allreduce([x.cpu()]))
    raises("must be contiguous", lambda: dist.all_reduce(torch.ones(3, 4)[:, :2]))
    raises("not supported for NCCL", lambda: dist.all_reduce(torch.ones(3, dtype=torch.int16)))
    mean = torch.full((2,), float(rank))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [0.5, 0.5]
    everybodys = [torch.empty(2, dtype=torch.complex64) for _ in range(2)]
    dist.all_gather(everybodys, torch.full((2,), rank * 1j))
    assert [t[0].item() for t in everybodys] == [0, 1j]


def in_another_order():
    x = torch.ones(3)
    if dist.get_rank():
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


def test_ranks_that_call_different_collectives_are_told():
    for error in run_expecting_errors(in_another_order, 2):
        assert "ranks call different collectives on one communicator" in str(error)


def lost():
    torch.cuda.current_stream()
    dist.barrier()
    if dist.get_rank():
        raise ValueError("this rank is gone")
    dist.group.WORLD._get_backend(torch.device("cuda"))._set_default_timeout(timedelta(seconds=2))
    dist.all_reduce(torch.ones(3))


@pytest.mark.slow
def test_the_watchdog_ends_a_process_whose_peers_are_gone():
    with pytest.raises(DistributedFailure, match="watchdog: allreduce failed, and the process is ended"):
        run_distributed(lost, 2)


@on_ranks(2)
def test_communication_is_captured():
    mesh = shared_mesh(2)
    x = torch.full((3,), mesh.get_local_rank() + 1.0)
    group, graph = mesh.get_group(), torch.cuda.CUDAGraph()
    dist.all_reduce(torch.ones(1), group=group)  # connects, which cannot be captured
    with torch.cuda.graph(graph):
        y = x * 2
        dist.all_reduce(y, group=group)
        z = y + 1
    graph.replay()
    assert z.tolist() == [7] * 3
    x.zero_()
    graph.replay()
    assert z.tolist() == [1] * 3
