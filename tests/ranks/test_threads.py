"""Threads: settings are each one's own, one mesh belongs to one of them, and backward passes may run in others."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextvars import copy_context
from functools import partial
from threading import get_ident

import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ThreadConflict, UnsupportedSharding, context
from shardtensor._compat import keep_for_backward, kept_for_backward
from shardtensor.communication.exchange import _transport
from shardtensor.dispatch.gradients import for_tangents
from shardtensor.operators.forward_mode import _Halves
from shardtensor.ops.attention.sdpa import _method
from shardtensor.ranks import history, waiting
from shardtensor.testing import run_distributed, shard, shared_mesh

CUT = {0: (5, 3)}


def thread_of(target, **options):
    """A thread that has this one's default device, and that as its current one."""
    device = torch.get_default_device()

    def run(*args):
        if device.type != "cpu":
            torch.get_device_module(device).set_device(device)
        with device:
            target(*args)

    return threading.Thread(target=run, **options)


def in_thread(function, name="other"):
    """What the function returns, or raises, in a thread."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = thread_of(run, name=name)
    thread.start()
    thread.join(60)
    return found[0]


# -- settings ---------------------------------------------------------------------------------------------------------


def seen():
    return context.gather_allowed(), _method.value, _transport.value, context.settings()


def settings_of_a_thread():
    plain = seen()
    with shardtensor.allow_gather(), shardtensor.attention_method("ring"), shardtensor.set_transport("p2p"):
        assert seen()[:3] == (True, "ring", "p2p") and seen()[3] != plain[3]
        assert in_thread(seen) == plain
        assert in_thread(partial(copy_context().run, seen)) == plain, "as of asyncio.to_thread"
    assert seen() == plain and context._here.get() is context.UNCHANGED


def test_settings_of_a_thread():
    assert in_thread(settings_of_a_thread) is None  # a new one, which has no settings of other tests


def test_derivatives_of_other_threads_are_not_for_tangents():
    """The gradient of a Cholesky factor is a symmetric matrix where no tangent will be pushed."""
    matrix = torch.eye(3).requires_grad_()
    grads = torch.tensor([[1.0, 2.0, 3.0]] * 3)
    with for_tangents.set_to(True):
        (grad,) = in_thread(lambda: torch.autograd.grad(_Halves.apply(matrix), matrix, grads))
        assert torch.equal(torch.autograd.grad(_Halves.apply(matrix), matrix, grads)[0], grads)
    assert torch.equal(grad, grad.mT) and not torch.equal(grad, grads)


def test_settings_of_a_task():
    async def inside(entered, left):
        with shardtensor.allow_gather():
            entered.set()
            await left.wait()
            return context.gather_allowed()

    async def both():
        entered, left = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(inside(entered, left))
        await entered.wait()
        other = context.gather_allowed()
        left.set()
        return await first, other

    assert asyncio.run(both()) == (True, False)


def test_the_registry_is_that_of_all_threads():
    def twice(x):
        return 2 * x

    with shardtensor.allow_gather():
        before = context.settings()
        in_thread(lambda: shardtensor.extend.register(twice)(twice))
        assert context.settings() != before and context.gather_allowed()
        shardtensor.extend.unregister(twice)


def gathering():
    """Another thread's permission is none of this one's, on no rank."""
    x = shard(torch.randn(6, 30000), shared_mesh(2), [Shard(0)], {0: (4, 2)})
    with shardtensor.allow_gather():
        assert torch.linalg.svdvals(x).shape == (6,)
        return in_thread(lambda: torch.linalg.svdvals(x))


def test_allow_gather_of_another_thread():
    for error in run_distributed(gathering, 2):
        assert isinstance(error, UnsupportedSharding)


# -- one thread communicates ------------------------------------------------------------------------------------------


def mesh_of_its_own():
    """With a process group that no other mesh has: conflicts end its use. Meshes of equal names are one to DTensor."""
    group = dist.new_group()
    return DeviceMesh.from_group(group, torch.get_default_device().type, mesh_dim_names=(f"group {group.group_name}",))


def convolve(mesh, times, found, expected, x, weight):
    torch.manual_seed(0)
    sharded = shard(x, mesh, [Shard(2)], CUT)
    for _ in range(times):
        y = F.conv2d(sharded, weight, padding=1)
        found.append(torch.equal(y.to_local(), expected))


@on_ranks(2, timeout=120.0)
def test_two_threads_on_one_mesh():
    """Two threads on one mesh: a wrong result is followed by an error, in both of them."""
    mesh = mesh_of_its_own()
    rank = mesh.get_local_rank()
    weight = torch.randn(2, 2, 3, 3)
    found, errors = ([], []), [None, None]

    def run(i):
        x = torch.full((1, 2, 8, 4), float(i + 1))
        x += torch.arange(8.0)[:, None]
        expected = F.conv2d(x, weight, padding=1)[:, :, :5] if rank == 0 else F.conv2d(x, weight, padding=1)[:, :, 5:]
        try:
            convolve(mesh, 200, found[i], expected, x, weight)
        except (ThreadConflict, shardtensor.LostRankError) as error:
            errors[i] = error

    threads = [thread_of(run, args=(i,), name=f"worker {i}") for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads)
    numbers, errors = [len(results) for results in found], [(type(e).__name__, str(e)) for e in errors]
    assert all(n < 200 for n in numbers)
    assert [kind for kind, _ in errors] != ["NoneType", "NoneType"]
    assert all(kind in ("ThreadConflict", "LostRankError") for kind, _ in errors)
    said = [text for kind, text in errors if kind == "ThreadConflict"]
    assert said, errors
    for text in said:
        assert "two threads communicate in the process group" in text and "thread 'worker " in text
        assert "make all calls from one thread" in text and "shardtensor.take_turns()" in text


@on_ranks(2, timeout=120.0)
def test_threads_that_are_right():
    """The main thread, a thread after it, the main thread after that has ended."""
    mesh = mesh_of_its_own()
    x = shard(torch.randn(1, 2, 8, 4), mesh, [Shard(2)], CUT)
    layer = nn.Conv2d(2, 2, 3, padding=1)
    first = layer(x).full_tensor()
    for _ in range(2):
        assert torch.equal(in_thread(lambda: layer(x).full_tensor()), first)
        assert torch.equal(layer(x).full_tensor(), first)
    # Each thread has a mesh of its own: what one does is nothing to the other.
    other = mesh_of_its_own()
    theirs = shard(torch.randn(1, 2, 8, 4), other, [Shard(2)], CUT)
    wanted = layer(theirs).full_tensor()
    done, results = threading.Event(), []

    def run():
        for _ in range(20):
            results.append(torch.equal(layer(theirs).full_tensor(), wanted))
        done.set()

    thread = thread_of(run)
    thread.start()
    ours = [torch.equal(layer(x).full_tensor(), first) for _ in range(20)]
    thread.join(60)
    x.sum().item(), theirs.sum().item()  # compare what was communicated
    assert done.is_set() and all(ours) and all(results) and len(results) == 20


def alternating(turns):
    """Two threads that live on, and take turns by the program's own order."""
    mesh = mesh_of_its_own()
    layer = nn.Conv2d(2, 2, 3, padding=1)
    x = torch.randn(1, 2, 8, 4)
    expected = layer(x).square().mean()
    order = [threading.Event() for _ in range(7)]
    order[0].set()
    results = []

    def run(i):
        for step in range(i, 6, 2):
            order[step].wait(60)
            try:
                if turns:
                    with shardtensor.take_turns(), shardtensor.take_turns():
                        results.append(compute())
                else:
                    results.append(compute())
            except Exception as error:
                results.append(error)
            order[step + 1].set()

    def compute():
        loss = layer(shard(x, mesh, [Shard(2)], CUT)).square().mean()
        loss.backward()
        return torch.allclose(loss.full_tensor(), expected)

    threads = [thread_of(run, args=(i,), name=f"worker {i}") for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_turns():
    assert run_distributed(alternating, 2, True, timeout=120.0) == [[True] * 6] * 2


def test_alternating_threads_without_turns():
    """Nobody can know that the other ranks alternate in the same way."""
    for first, *others in run_distributed(alternating, 2, False, timeout=120.0):
        assert first is True
        assert [type(error) for error in others] == [ThreadConflict] * 5
        assert "thread 'worker 1', in " in str(others[0])
        assert "after thread 'worker 0', which is alive" in str(others[0])


def underway():
    """A thread that begins while the main one waits."""
    mesh = mesh_of_its_own()
    group = mesh.get_group().group_name
    x = shard(torch.randn(1, 2, 8, 4), mesh, [Shard(2)], CUT)
    found = []

    def observe(_):
        if not found:
            found.append(in_thread(lambda: F.max_pool2d(x, 3, 1, 1)))
        return lambda: None

    with waiting.observed(observe):
        try:
            F.conv2d(x, torch.ones(2, 2, 3, 3), padding=1)
        except ThreadConflict as error:
            found.append(error)
    assert group in history.conflicts
    return found


def test_a_thread_within_another_ones_operator():
    for errors in run_distributed(underway, 2):
        assert [type(error) for error in errors] == [ThreadConflict] * 2
        assert "in max_pool2d" in str(errors[0]) and "after thread 'MainThread'" in str(errors[0])


def test_what_is_kept_for_backward_passes_is_referred_to():
    """torch 2.11 takes no reference to it, and drops one when something else is kept."""
    before = kept_for_backward()
    value = (get_ident(), object())
    alone = sys.getrefcount(value)
    keep_for_backward(value)
    kept = sys.getrefcount(value)
    keep_for_backward(before)
    assert (kept, sys.getrefcount(value)) == (alone + 1, alone)
