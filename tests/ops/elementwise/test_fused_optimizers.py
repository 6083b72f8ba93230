"""Fused optimizers, gradient scaling and clipping of ShardTensor parameters, against one device."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtensor import UnsupportedSharding
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
}


def has_kernel(make):
    """Whether torch has this optimizer on the device: torch 2.11 has no fused Adagrad for CUDA, for example."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    try:
        make([p]).step()
    except RuntimeError as error:
        assert "supported devices" in str(error)
        return False
    return True


def parameters(whole, sharded):
    """A parameter of each layout; one stays plain."""
    mesh = shared_mesh((2, 2))
    layouts = [([Shard(0), Shard(1)], {0: (5, 0), 1: (1, 2)}), ([Replicate(), Shard(0)], {1: (4, 3)}), None]
    result = []
    for value, layout in zip(whole, layouts):
        t = value.clone() if not sharded or layout is None else shard(value.clone(), mesh, *layout)
        result.append(nn.Parameter(t))
    return result


def values():
    torch.manual_seed(0)
    return [torch.randn(5, 3), torch.randn(7, 2), torch.randn(4)]


def trained(name, sharded, clip):
    whole = values()
    ps = parameters(whole, sharded)
    optimizer = OPTIMIZERS[name](ps)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(((p * (step + 1) - 1) ** 2).sum() for p in ps)
        loss.backward()
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(ps, 0.5)))
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in ps], norms


@on_ranks(4)
def test_fused_steps_are_those_of_one_device():
    for name in filter(lambda name: has_kernel(OPTIMIZERS[name]), OPTIMIZERS):
        for clip in (False, True):
            (got, norms), (expected, whole_norms) = trained(name, True, clip), trained(name, False, clip)
            for a, b in zip(got, expected):
                torch.testing.assert_close(a, b, msg=f"{name}, {clip}")
            assert norms == pytest.approx(whole_norms)


@on_ranks(3)
def test_norms_of_lists_and_steps_that_return_new_tensors():
    """What clipping by lists calls, in one all-reduce; and the steps that return new tensors."""
    whole, mesh = [torch.randn(n, 3, dtype=torch.float64) for n in (5, 7, 1)], shared_mesh(3)
    sharded = [shard(t, mesh, [Shard(0)], {0: (len(t), 0, 0)}) for t in whole[:2]] + whole[2:]
    for name in [name for name in ("_foreach_norm", "_foreach_powsum") if hasattr(torch, name)]:
        for order in (0, 1, 2, 3.5, float("inf"), -float("inf"))[: None if name == "_foreach_norm" else 4]:
            with count_communication() as counted:
                found = getattr(torch, name)(sharded, order)
            assert dict(counted.collectives) == {"all_reduce": 1} and counted.collective_bytes == 2 * 8
            for one, other in zip(found, getattr(torch, name)(whole, order), strict=True):
                torch.testing.assert_close(getattr(one, "full_tensor", lambda one=one: one)(), other)
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    for name in ("_fused_adam", "_fused_adamw"):
        for lr in (0.1, torch.tensor(0.1)):
            results = []
            for ps in (whole, sharded):
                states = [[(p * k).abs() for p in ps] for k in (1, 2, 3)]
                results.append(
                    getattr(torch.ops.aten, name)(ps, *states, [], [torch.tensor(2.0)] * 3, lr=lr, **options)
                )
            for ones, others in zip(*results, strict=True):
                for one, other in zip(ones, others, strict=True):
                    torch.testing.assert_close(getattr(other, "full_tensor", lambda other=other: other)(), one)


KINDS = {"foreach": True}, {"fused": True}, {}


def on_uneven_shards(names):
    """All of torch's optimizers, next to a DTensor and a plain parameter, with gradients clipped in each way."""
    mesh, failures = shared_mesh(2), []
    whole = [torch.randn(n, 3, dtype=torch.float64, generator=seeded(n)) for n in (5, 7, 4)]

    def parameters(kind):
        ours = [shard(t, mesh, [Shard(i)], {0: (t.shape[i] - 1, 1)}) for i, t in enumerate(whole[:2])]
        if kind == "mixed":
            ours[1:] = [distribute_tensor(whole[1], mesh, [Replicate()]), whole[2].clone()]
        return [nn.Parameter(t) for t in (ours if kind else [t.clone() for t in whole])]

    for i, (name, options) in enumerate((name, options) for name in names for options in KINDS):
        make = getattr(torch.optim, name)
        if not set(options) <= set(inspect.signature(make).parameters) or not has_kernel(partial(make, **options)):
            continue
        # Its factors are of float32, and rounded otherwise for lists, the default of devices for plain tensors.
        rtol = 1e-6 if name == "ASGD" and not options and whole[0].device.type != "cpu" else 1e-10
        clip = [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_][i % 2]
        # What Rprop(foreach=True) copies to a DTensor's gradient is a ShardTensor, which is refused.
        for kind in ("shards", "mixed") if name != "Rprop" else ("shards",):
            results = []
            for ps in (parameters("")[: 2 if kind == "shards" else 3], parameters(kind)):
                optimizer = make(ps, **options)
                for step in range(3):
                    optimizer.zero_grad()
                    for p in ps:
                        ((p * (step + 1) - 1) ** 2).sum().backward()
                    norm = nn.utils.get_total_norm([p.grad for p in ps], foreach=options.get("foreach"))
                    clip(ps, 0.5, foreach=(None, True, False)[step])
                    optimizer.step()
                results.append([*ps, norm])
            for one, other in zip(*results, strict=True):
                other = other.full_tensor() if isinstance(other, DTensor) else other
                if not torch.allclose(one, other, rtol=rtol, atol=rtol / 100):
                    failures.append(f"{name} {options} {kind}")
    return failures


NAMES = [
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
]


def test_all_optimizers_on_uneven_shards_and_mixtures():
    for failures in run_distributed(on_uneven_shards, 2, NAMES, timeout=120.0):
        assert failures == []


def trained_on(name, weight, sharded):
    mesh = shared_mesh((2,))
    results = []
    for value, layout in ((weight, Shard(0)), (weight, Shard(1)), (weight, Replicate())):
        t = shard(value, mesh, [layout], {} if layout.is_replicate() else {0: (1, value.shape[layout.dim] - 1)})
        p = nn.Parameter(t if sharded else value.clone())
        optimizer = OPTIMIZERS[name]([p])
        factors = torch.arange(float(value.numel())).view(value.shape)
        for _ in range(2):
            optimizer.zero_grad()
            loss = (p.transpose(0, 1).reshape(p.shape[1], -1) ** 3).sum() + (p * factors).sum()
            loss.backward()
            optimizer.step()
        results.append(p.full_tensor() if sharded else p)
    return results


@on_ranks(2)
def test_gradients_in_another_order_of_memory_than_their_parameter():
    """torch's kernels, which would go wrong on the CPU and raise on CUDA, where strides differ."""
    torch.manual_seed(1)
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    permuted = weight.transpose(0, 1).contiguous().transpose(0, 1)
    for value in (weight, weight.contiguous(memory_format=torch.channels_last), permuted):
        for name in filter(lambda name: has_kernel(OPTIMIZERS[name]), OPTIMIZERS):
            for got, expected in zip(trained_on(name, value, True), trained_on(name, value, False)):
                torch.testing.assert_close(got, expected, msg=f"{name}, {value.stride()}")


@on_ranks(3)
def test_all_ranks_skip_a_step_that_overflowed_on_one():
    p = nn.Parameter(shard(torch.ones(5), shared_mesh(3), [Shard(0)], {0: (3, 0, 2)}))
    optimizer = torch.optim.SGD([p], lr=0.5, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    factors = torch.ones(5)
    factors[4] = float("inf")  # on the last rank only
    history = []
    for factor in (torch.ones(5), factors, torch.ones(5)):
        optimizer.zero_grad()
        scaler.scale((p * shard(factor, shared_mesh(3), [Shard(0)], {0: (3, 0, 2)})).sum()).backward()
        with count_communication() as counted:
            scaler.unscale_(optimizer)
        assert dict(counted.collectives) == {"all_reduce": 1} and counted.collective_bytes == 4
        scaler.step(optimizer)
        scaler.update()
        history.append((p.full_tensor().tolist(), scaler.get_scale()))
    assert history == [([0.5] * 5, 4.0), ([0.5] * 5, 2.0), ([0.0] * 5, 2.0)]


@on_ranks(4)
def test_a_step_communicates_nothing():
    ps = parameters(values(), True)
    optimizer = OPTIMIZERS["AdamW"](ps)
    sum((p**2).sum() for p in ps).backward()
    with count_communication() as counted:
        optimizer.step()
    assert (counted.messages, dict(counted.collectives)) == (0, {})


def mixed():
    mesh = shared_mesh(2)
    p = shard(torch.ones(5), mesh, [Shard(0)], {0: (3, 2)})
    g = shard(torch.ones(5), mesh, [Shard(0)], {0: (2, 3)})
    torch._fused_sgd_(
        [p],
        [g],
        [],
        lr=0.1,
        momentum=0.0,
        weight_decay=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


def test_other_cuts_of_gradients_are_refused():
    for error in run_expecting_errors(mixed, 2):
        with pytest.raises(UnsupportedSharding, match=r"_fused_sgd_.*different layouts.*\[3, 2\].*\[2, 3\].*Remedy"):
            raise error
