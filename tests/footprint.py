"""What a program without ShardTensors notices of this package: run as a script, which prints it as JSON."""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
import time
import types
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.attention.flex_attention
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard


def snapshot():
    """Everything that modules of torch and classes in them hold, and the lengths of tables, by ``module:name``."""
    found = {}
    for module, content in [(m, vars(sys.modules[m])) for m in sorted(sys.modules) if m.partition(".")[0] == "torch"]:
        for name, value in list(content.items()):
            found[f"{module}:{name}"] = value
            if isinstance(value, (dict, set, list)):
                found[f"{module}:{name}", "length"] = len(value)
            if isinstance(value, type) and value.__module__ == module:
                found.update({f"{module}:{name}.{inner}": held for inner, held in list(vars(value).items())})
    found["sys:meta_path", "length"] = len(sys.meta_path)
    found["warnings:filters", "length"] = len(warnings.filters)
    found["atexit:register", "length"] = atexit._ncallbacks()
    found.update({f"sys:{name}": getattr(sys, name) for name in ("excepthook", "unraisablehook", "displayhook")})
    found.update({f"signal:{number}": signal.getsignal(number) for number in signal.valid_signals()})
    return found


def changed(before):
    """What is not as it was, in modules that were there, but for names that torch imports when they are first used."""
    after, there = snapshot(), {(k if isinstance(k, str) else k[0]).partition(":")[0] for k in before}
    keys = {k for k in before.keys() | after.keys() if (k if isinstance(k, str) else k[0]).partition(":")[0] in there}
    names = set()
    for key in keys:
        old, new = before.get(key), after.get(key)
        if old is not new and not (isinstance(old, int) and old == new) and type(new) is not types.ModuleType:
            names.add(key if isinstance(key, str) else key[0])
    return sorted(names - {"torch.ops:_dir", "torch.ops:c10d"})


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        return function(x).to_local()


def refusal(call):
    try:
        return str(call())
    except RuntimeError as error:
        return str(error)


def plain_calls():
    """Calls without ShardTensors, by name."""
    x, image, weight = torch.ones(3, requires_grad=True), torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3)
    net = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    calls = {
        "conv2d": lambda: F.conv2d(image, weight),
        "linear": lambda: F.linear(image, torch.ones(3, 4), bias=None),
        "add": lambda: x + 1,
        "in place": lambda: torch.ones(3).add_(1),
        "backward": lambda: (x * x).sum().backward(),
        "autograd.grad": lambda: torch.autograd.grad((x * x).sum(), x),
        "autograd.Function": lambda: Doubled.apply(x).sum().backward(),
        "vmap": lambda: torch.vmap(torch.sin)(torch.ones(3)),
        "grad": lambda: torch.func.grad(torch.sum)(torch.ones(3)),
        "jvp": lambda: torch.func.jvp(torch.sin, (torch.ones(3),), (torch.ones(3),)),
        "jacrev": lambda: torch.func.jacrev(torch.sin)(torch.ones(3)),
        "step of a module": step(net, image),
    }
    if dist.is_initialized():
        calls["all_reduce"] = lambda: dist.all_reduce(torch.ones(3))
        calls["step of DDP"] = step(nn.parallel.DistributedDataParallel(net), image)
        sharded = nn.Linear(4, 2)
        torch.distributed.fsdp.fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        calls["step of FSDP2"] = step(sharded, image)
    return calls


def step(module, image):
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

    def run():
        optimizer.zero_grad()
        module(image).square().mean().backward()
        optimizer.step()

    return run


def entered(call):
    """The functions of the package that a call enters."""
    root, found = os.path.dirname(sys.modules["shardtensor"].__file__), []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    call()  # what torch looks up the first time
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def microseconds(call):
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return round(min(times) * 1e6, 1)


def state():
    """What a program has that is no attribute of torch's modules."""
    groups = dist.distributed_c10d._world
    return {
        "random": [torch.get_rng_state().tolist(), hash(random.getstate())],
        "groups": [groups.group_count, len(groups.pg_map), dist.is_initialized()],
        "settings": [torch.get_default_dtype().itemsize, torch.is_grad_enabled(), torch.get_num_threads()],
        "filters": list(map(str, warnings.filters)),
    }


def main():
    result = {"before": state(), "times": {name: [microseconds(call)] for name, call in plain_calls().items()}}
    torch.manual_seed(0)
    result["before"], before = state(), snapshot()
    import shardtensor

    result["with import"], result["after"] = changed(before), state()
    result["alone"] = {name: entered(call) for name, call in plain_calls().items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    calls = plain_calls()
    result["in a group"] = {name: entered(call) for name, call in calls.items()}
    for name in result["times"]:
        result["times"][name].append(microseconds(calls[name]))
    mesh, before = init_device_mesh("cpu", (1,)), snapshot()

    def make(*_):
        return shardtensor.ShardTensor.from_local(torch.ones(3), mesh, (Shard(0),), shard_sizes={0: (3,)})

    late = [lambda: Called.apply(torch.ones(3), make), lambda: torch.func.vjp(make, torch.ones(3))]
    result["too late"] = [refusal(call) for call in late]
    with torch.inference_mode():
        x = make()
    result["with the first"] = changed(before)
    calls = plain_calls()
    result["next to ShardTensors"] = {name: entered(call) for name, call in calls.items()}
    for name in result["times"]:
        result["times"][name].append(microseconds(calls[name]))
    before = snapshot()
    x.full_tensor(), make().sum().item()
    result["with communication"] = changed(before)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
