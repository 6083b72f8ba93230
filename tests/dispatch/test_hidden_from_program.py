"""What plans are made with is hidden from the program: its modes, profiler, counters and hooks see the work alone."""

from __future__ import annotations

import copy
import gc
import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import operator_sweep
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from operator_sweep import operator_names
from operator_sweep.cases import cuts, place
from operator_sweep.transforms import POLICIES, checkpointed
from operator_sweep.worker import (
    RIGHT,
    Expected,
    Lockstep,
    Options,
    evaluate,
    samples_of,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from shardtensor._compat import hidden_from_program
from shardtensor.layout import caches
from shardtensor.testing import run_distributed, shard, shared_mesh


class Seen(TorchDispatchMode):
    """What reaches a dispatch mode, in order: operators, and the shapes of their tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        self.calls.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """The same of a mode of torch functions."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def difference(first, second):
    """In words, what the first call shows that the second does not; None if there is nothing."""
    if first == second:
        return None
    at = next((i for i, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), min(len(first), len(second)))
    return f"{first[at : at + 3]} instead of {second[at : at + 3]}, {len(first)} for {len(second)} calls"


def compare_calls(folder, names, limit):
    """Where a first call of an operator shows more than its second one."""
    warnings.simplefilter("ignore")
    gc.disable()
    ranks = dist.get_world_size()
    lockstep = Lockstep(Path(folder) / "lockstep", dist.get_rank(), ranks)
    found, tried = [], 0
    for name in names:
        options = Options(limit=limit)
        for sample in samples_of(name, options):
            expected = Expected(name, sample, options)
            if expected.impossible:
                continue
            for cut in cuts(sample):
                caches.forget()
                seen, called, problem = [], [], None
                try:
                    for _ in range(3):
                        arguments = place(sample, cut, ranks)
                        gc.collect(0)  # a mode also sees what is called where others' generators are collected
                        with Called() as function_mode, Seen() as mode:
                            evaluate(expected.function, arguments, expected.gradients)
                        seen.append(mode.calls)
                        called.append(function_mode.calls)
                except NotImplementedError:
                    problem = "refused"
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                lockstep.outcomes(0 if problem is None else 1)
                if problem is None:
                    tried += 1
                    # The second call may be the first one to use what the first has kept for the backward pass.
                    problem = difference(seen[0], seen[2]) or difference(called[0], called[2])
                elif problem == "refused":
                    problem = None
                if problem:
                    found.append(f"{name} {cut}: {problem}")
                lockstep.outcomes(RIGHT)
    gc.enable()
    return found, tried


def sweep(ranks, names, limit=1, timeout=600):
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_distributed(compare_calls, ranks, folder, names, limit, timeout=timeout)
    found = sorted({line for lines, _ in outcomes for line in lines})
    assert not found, "\n".join(found)
    return sum(tried for _, tried in outcomes)


@pytest.mark.slow
def test_first_calls_show_what_later_ones_do():
    assert sweep(2, operator_names()) > 2000


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_first_calls_inside_selective_checkpointing_are_right(ranks, policy):
    # Its derivative runs a backward pass inside of the backward pass, for which the checkpoint recomputes once more.
    names = [name for name in operator_names() if name != "max_pool2d_with_indices_backward"]
    report = operator_sweep.sweep(names, ranks, Options(limit=1, checkpoint=policy))
    assert not report.bad(), "\n".join(f"{c.operator} {c.cut}: {c.outcome} {c.detail}" for c in report.bad())
    assert report.counted()["right"] > 1000


# -- programs ----------------------------------------------------------------------------------------------------------


def listed(ctx, op, *args, **kwargs):
    """A policy as in torch's documentation: results of expensive kernels are kept."""
    aten = torch.ops.aten
    kept = (aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default)
    kept += (aten._scaled_dot_product_flash_attention_for_cpu.default,)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


class EverySecondProduct:
    """A policy that counts: as ranks have different numbers of kernels, they keep different ones."""

    def __init__(self):
        self.count = 0

    def __call__(self, ctx, op, *args, **kwargs):
        if op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.count += 1
        return CheckpointPolicy.MUST_SAVE if self.count % 2 else CheckpointPolicy.PREFER_RECOMPUTE


def policies():
    yield from POLICIES.values()
    yield [torch.ops.aten.convolution.default, torch.ops.aten.native_batch_norm.default]
    yield listed
    yield EverySecondProduct()


def modules():
    """Modules, their inputs, and the dim of them that is sharded."""
    images = torch.randn(2, 3, 22, 8)
    yield nn.ConvTranspose2d(3, 2, 2, 2), images, 2
    norm = nn.BatchNorm2d(4)
    norm.num_batches_tracked = None  # torch refuses to keep a result that is written to, as counts of batches are
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ZeroPad2d(1), norm, nn.GroupNorm(2, 4), nn.AvgPool2d(2)
    channels_last = nn.Sequential(*layers)
    yield channels_last.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last), 2
    yield nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 22, 8), 1
    yield nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2)), images, 2
    yield nn.Linear(8, 5), images, 2
    yield nn.LayerNorm(8), images, 2
    yield nn.BatchNorm2d(3, track_running_stats=False), images, 2
    yield nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Upsample(scale_factor=2), nn.Softplus()), images, 3


def step(module, policy, x):
    """Output, gradients and buffers of a training step inside selective checkpointing."""
    module = copy.deepcopy(module)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(module, x, use_reentrant=False, context_fn=contexts)
    y.square().mean().backward()
    found = [y, x.grad, *(p.grad for p in module.parameters()), *module.buffers()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]


def train_checkpointed(sizes, some):
    torch.manual_seed(0)
    for module, x, dim in list(modules())[: 4 if some else None]:
        module.double()
        x = x.double()
        for policy in list(policies())[:: 2 if some else 1]:
            expected = step(module, policy, x.clone().requires_grad_())
            caches.forget()
            lengths = (5,) + (0,) * (len(sizes) - 2) + (3,) if dim == 3 else sizes
            cut = shard(x.clone(), shared_mesh(len(sizes)), [Shard(dim)], {0: lengths}, requires_grad=True)
            for found, value in zip(step(module, policy, cut), expected, strict=True):
                torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)


def test_selective_checkpointing_of_first_calls():
    run_distributed(train_checkpointed, 2, (14, 8), True)


@pytest.mark.slow
def test_selective_checkpointing_with_an_empty_shard():
    run_distributed(train_checkpointed, 3, (14, 0, 8), False)


@on_ranks(2)
def test_counters_and_profiles_of_first_steps():
    """FLOPs, calls in the profile and random numbers of a first step and of a second one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 2, 2), nn.LayerNorm(14), nn.Linear(14, 5))
    x = shard(torch.randn(1, 3, 22, 9), shared_mesh(2), [Shard(2)], {0: (14, 8)}, requires_grad=True)
    caches.forget()
    flops, profiles = [], []
    for _ in range(3):
        module.zero_grad()
        x.grad, state = None, torch.get_rng_state()
        with FlopCounterMode(display=False) as counter, torch.profiler.profile() as profile:
            module(x).square().mean().backward()
        assert torch.equal(state, torch.get_rng_state())
        flops.append(counter.get_total_flops())
        events = Counter(e.name for e in profile.events() if e.name.startswith("aten::"))
        profiles.append(Counter({name: n for name, n in events.items() if "detach" not in name}))
    assert flops[0] == flops[1] > 0
    assert profiles[0] == profiles[2], (profiles[0] - profiles[2], profiles[2] - profiles[0])


@pytest.mark.parametrize("inference", [False, True])
def test_modes_are_back_afterwards(inference):
    with torch.inference_mode(inference), torch.autocast("cpu"), Seen() as mode, Called() as functions:
        with hidden_from_program(), hidden_from_program():
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            torch.ones(2).add(1)
        assert not mode.calls and torch.is_inference_mode_enabled() is inference
        torch.ones(2).add(1)
    assert [name for name, _ in mode.calls] == ["aten.ones.default", "aten.add.Tensor"]
    assert functions.calls[-1] == "add"


@pytest.mark.parametrize("selective", [False, True])
@on_ranks(3, timeout=60)
def test_checkpoints_where_some_ranks_save_nothing(selective):
    """The kernel of the rank in the middle pads nothing, and saves nothing."""
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    weights = torch.linspace(0.5, 1.5, 12, dtype=torch.float64).view(2, 6)

    def loss(x):
        def padded(x):
            return F.pad(x.sin(), (1, 2), mode="reflect")

        y = checkpointed("all", padded)(x) if selective else checkpoint(padded, x, use_reentrant=False)
        return (y * weights).sum()

    cut = shard(x.detach().clone(), shared_mesh(3), [Shard(1)], {0: (1, 1, 1)}, requires_grad=True)
    (expected,), (found,) = torch.autograd.grad(loss(x), x), torch.autograd.grad(loss(cut), cut)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-10, atol=1e-12)
