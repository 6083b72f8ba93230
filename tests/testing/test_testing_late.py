"""Late communication: right programs give gloo's results, and wrong ones do not."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from late import late_communication
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardtensor.testing import (
    run_distributed,
    run_expecting_errors,
    shared_mesh,
    shutdown_pools,
)

# -- each operation ----------------------------------------------------------------------------------------------------
# A function of rank and size that starts one, and returns its works and what they write.


def all_reduce(r, n):
    x = torch.arange(4.0) + r
    return [dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)], [x]


def all_reduce_of_integers(r, n):
    x = torch.arange(4) + r
    return [dist.all_reduce(x, async_op=True)], [x]


def all_gather(r, n):
    out = [torch.zeros(2, 2) for _ in range(n)]
    return [dist.all_gather(out, torch.full((2, 2), 1.0 + r), async_op=True)], out


def all_gather_into_tensor(r, n):
    out = torch.zeros(2 * n)
    return [dist.all_gather_into_tensor(out, torch.full((2,), 1.0 + r), async_op=True)], [out]


def all_gather_in_place(r, n):
    out = torch.zeros(2 * n, dtype=torch.float64)
    mine = out[2 * r : 2 * r + 2].fill_(1.0 + r)
    return [dist.all_gather_into_tensor(out, mine, async_op=True)], [out]


def reduce_scatter(r, n):
    out = torch.zeros(2)
    return [dist.reduce_scatter(out, [torch.full((2,), 1.0 + r + i) for i in range(n)], async_op=True)], [out]


def reduce_scatter_tensor(r, n):
    out = torch.zeros(2)
    return [dist.reduce_scatter_tensor(out, torch.arange(2.0 * n) * (r + 1), async_op=True)], [out]


def all_to_all_single(r, n):
    gets, gives = [i + r for i in range(n)], [i + r for i in range(n)]
    out, x = torch.zeros(sum(gets), 3), torch.rand(sum(gives), 3) + r
    return [dist.all_to_all_single(out, x, gets, gives, async_op=True)], [out]


def broadcast(r, n):
    x = torch.full((3,), 1.0 + r, dtype=torch.complex64)
    return [dist.broadcast(x, 1, async_op=True)], [x] if r != 1 else []


def scatter(r, n):
    out = torch.zeros(2)
    return [dist.scatter(out, [torch.full((2,), i + 1.0) for i in range(n)] if r == 0 else None, async_op=True)], [out]


def gather(r, n):
    out = [torch.zeros(2) for _ in range(n)] if r == 0 else None
    return [dist.gather(torch.full((2,), r + 1.0), out, async_op=True)], out or []


def send_and_receive(r, n):
    out = torch.zeros(5)
    return [dist.irecv(out, (r - 1) % n), dist.isend(torch.arange(5.0) + r, (r + 1) % n)], [out]


def batched_messages(r, n):
    out = [torch.zeros(5), torch.zeros(2)]
    ops = [dist.P2POp(dist.isend, torch.full((len(t),), 1.0 + r), (r + 1) % n) for t in out]
    ops += [dist.P2POp(dist.irecv, t, (r - 1) % n) for t in out]
    return dist.batch_isend_irecv(ops), out


def receive_from_anybody(r, n):
    out = torch.zeros(3)
    if r:
        return [dist.isend(torch.full((3,), 4.0), 0)] if r == 1 else [], []
    return [dist.irecv(out)], [out]


def in_a_group_of_some(r, n):
    x = torch.full((2,), r + 1.0)
    group = shared_mesh(n).get_group() if n == 2 else dist.new_group([0, 2])
    return ([dist.all_reduce(x, group=group, async_op=True)], [x]) if n == 2 or r != 1 else ([], [])


OPERATIONS = [
    all_reduce,
    all_reduce_of_integers,
    all_gather,
    all_gather_into_tensor,
    all_gather_in_place,
    reduce_scatter,
    reduce_scatter_tensor,
    all_to_all_single,
    broadcast,
    scatter,
    gather,
    send_and_receive,
    batched_messages,
    receive_from_anybody,
    in_a_group_of_some,
]


def poisoned(tensor):
    if tensor.dtype is torch.int64:
        return bool((tensor == torch.iinfo(torch.int64).max).all())
    return bool(tensor.isnan().all())


def operation(start):
    """Its results on gloo and late, and whether the late ones were there before they were waited for."""
    results, early = [], []
    for late in (False, True):
        with late_communication() if late else nullcontext():
            torch.manual_seed(0)
            works, out = start(dist.get_rank(), dist.get_world_size())
            early = [poisoned(t) for t in out]
            for work in works:
                work.wait()
            assert not late or all(work.is_completed() and work.is_success() for work in works)
            results.append(out)
            dist.barrier()
    return results, early


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("start", OPERATIONS, ids=lambda f: f.__name__)
def test_results_are_those_of_gloo_once_they_are_waited_for(start, world_size):
    for (expected, actual), early in run_distributed(operation, world_size, start):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert all(early)


# -- works -------------------------------------------------------------------------------------------------------------


def tells(seconds):
    with late_communication(seconds):
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        before = work.is_completed(), work.exception()
        while not work.is_completed():
            time.sleep(0.001)
        complete = work.is_success(), poisoned(x)
        assert work.wait()
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda f: [2 * t for t in f.value()])
        return before, complete, doubled.wait()[0].tolist(), x.tolist()


def test_what_a_work_tells():
    for result in run_distributed(tells, 2, 0.2):
        assert result == ((False, None), (True, True), [8.0, 8.0], [4.0, 4.0])


def too_long():
    group = dist.new_group(timeout=timedelta(seconds=1))
    with late_communication():
        x = torch.ones(2)
        if dist.get_rank() == 0:
            work = dist.all_reduce(x, group=group, async_op=True)
            with pytest.raises(RuntimeError, match="allreduce_: not complete after"):
                work.wait(timedelta(seconds=0.01))
            try:
                work.wait()
            finally:
                assert work.exception() is not None and not work.is_success() and poisoned(x)
        else:
            time.sleep(2)


def test_what_goes_wrong_in_gloo_is_raised_in_wait():
    errors = run_expecting_errors(too_long, 2)
    assert isinstance(errors[0], RuntimeError) and errors[1] is None


def test_negative_times_are_refused():
    with pytest.raises(ValueError, match="not negative"):
        late_communication(-1.0)


def out_of_step():
    """When each of some operations was complete on this rank, in the order of the calls."""
    completed = []
    with late_communication(0.02):
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(10)]
        while len(completed) < len(works):
            done = [work.is_completed() for work in works]
            assert done == sorted(done, reverse=True), "collectives of one group are complete in their order"
            completed += [time.monotonic()] * (sum(done) - len(completed))
    return completed


def test_collectives_of_a_group_keep_their_order():
    assert all(len(times) == 10 for times in run_distributed(out_of_step, 2))


# -- planted defects ---------------------------------------------------------------------------------------------------

shown_on_gloo = pytest.mark.on_gloo("the defect is shown to be forgiven by gloo, too")


def read_too_early(late):
    """A missing wait that gloo forgives, as the result has arrived."""
    with late_communication() if late else nullcontext():
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        early = x.sum()
        work.wait()
    return early.item()


@shown_on_gloo
def test_a_missing_wait_is_found():
    assert run_distributed(read_too_early, 2, False) == [6.0, 6.0]
    assert [result == result for result in run_distributed(read_too_early, 2, True)] == [False, False]


def reuse_too_early(late):
    """What is sent is overwritten before it is waited for; by then gloo has sent it, as the peer already waits."""
    with late_communication(1.0, seed=SEED) if late else nullcontext():
        if dist.get_rank() == 1:
            out = torch.zeros(3)
            dist.recv(out, 0)
            return out.tolist(), None
        x = torch.ones(3)
        time.sleep(0.2)
        work = dist.isend(x, 1)
        time.sleep(0.2)
        x.fill_(5.0)
        try:
            work.wait()
        except RuntimeError as error:
            return None, str(error)
    return None, None


SEED = 0  # with which rank 0 waits longer than 0.4 s before it reads what it sends


@shown_on_gloo
def test_a_buffer_that_is_reused_too_early_is_found():
    assert run_distributed(reuse_too_early, 2, False) == [(None, None), ([1.0] * 3, None)]
    (_, error), (received, _) = run_distributed(reuse_too_early, 2, True)
    assert received == [5.0] * 3
    assert "send: a tensor of (3,) that it reads or writes was written to before wait()" in error


def write_too_early():
    with late_communication():
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        x.add_(1)
        x.zero_()
        work.wait()


def test_a_result_that_is_written_to_before_it_is_there_is_found():
    for error in run_expecting_errors(write_too_early, 2):
        assert "allreduce_: a tensor of (3,)" in str(error)


# -- torch's own users -------------------------------------------------------------------------------------------------


def trained(wrapped, late):
    torch.manual_seed(dist.get_rank() if wrapped == "ddp" else 0)  # DDP makes weights equal itself
    network = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    with late_communication() if late else nullcontext():
        if wrapped == "ddp":
            model = DistributedDataParallel(network, bucket_cap_mb=1e-4)
        else:
            model = network
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=shared_mesh(dist.get_world_size()))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(3):
            model(torch.rand(2, 7)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor() if wrapped == "fsdp2" else p.detach() for p in network.parameters()]


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp2"])
def test_wrappers_train_as_on_gloo(wrapped):
    on_gloo, late = (run_distributed(trained, 2, wrapped, late) for late in (False, True))
    torch.testing.assert_close(late, on_gloo, rtol=0, atol=0)


def other_functions():
    rank, n = dist.get_rank(), dist.get_world_size()
    with late_communication(0.05):
        objects = [None] * n
        dist.all_gather_object(objects, {"rank": rank})
        box = [("of", rank)]
        dist.broadcast_object_list(box, src=1)
        dist.barrier()
        dist.monitored_barrier()
        pending = functional.all_reduce(torch.full((2,), rank + 1.0), "sum", dist.group.WORLD)
        return objects, box, (pending + 1).tolist()


def test_object_collectives_barriers_and_functional_collectives():
    expected = [{"rank": 0}, {"rank": 1}], [("of", 1)], [4.0, 4.0]
    assert run_distributed(other_functions, 2) == [expected, expected]


# -- the whole suite ---------------------------------------------------------------------------------------------------


def reads_at_once():
    """With no block of its own."""
    gc.collect()  # what nobody keeps is gone
    total = torch.ones(2)
    work = dist.all_reduce(total, async_op=True)
    early = poisoned(total)
    work.wait()
    return early, total.tolist()


@pytest.fixture
def fresh_pools():
    shutdown_pools()
    yield
    shutdown_pools()


@pytest.mark.parametrize("choice, late", [("late", True), pytest.param("gloo", False, marks=pytest.mark.slow)])
def test_the_suite_chooses_for_all_workers(fresh_pools, monkeypatch, choice, late):
    monkeypatch.setenv("SHARDTENSOR_TEST_PROCESS_GROUP", choice)
    assert run_distributed(reads_at_once, 2) == [(late, [2.0, 2.0])] * 2
