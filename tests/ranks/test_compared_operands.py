"""Plain tensors with other values on each rank are told, on all ranks, with the next number that is read."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from copied import Copied
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardtensor import RanksDiffer, ShardTensor
from shardtensor.dispatch import planning
from shardtensor.layout.caches import forget
from shardtensor.ranks.history import fingerprint
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

SIZES = {2: (5, 3), 3: (5, 0, 3)}


def image(mesh, *, grad=False):
    forget()  # what other tests have used
    x = shard(torch.randn(1, 4, 8, 6), mesh, [Shard(2)], {0: SIZES[mesh.size()]})
    return x.requires_grad_(grad)


def with_own_seed(make, mesh):
    """What a program makes that does not seed its ranks alike, as torch does by itself."""
    torch.manual_seed(1 + mesh.get_local_rank())
    made = make()
    torch.manual_seed(0)
    return made


def noise(mesh, *shape):
    return with_own_seed(partial(torch.randn, *(shape or (1, 4, 8, 6))), mesh)


# What meets an image and what is computed then: the operands are made on each rank with a seed of its own.
OPERANDS = {
    "x + noise": lambda x, mesh: x + noise(mesh),
    "noise - x": lambda x, mesh: noise(mesh) - x,
    "a number": lambda x, mesh: x * noise(mesh, 1)[0],
    "broadcast": lambda x, mesh: x * noise(mesh, 4, 1, 1),
    "expanded": lambda x, mesh: x * noise(mesh, 4, 1, 1).expand(4, 8, 6),
    "where": lambda x, mesh: torch.where(noise(mesh) > 0, x, x * 2),
    "masked_fill": lambda x, mesh: x.masked_fill(noise(mesh) > 0, 0.0),
    "written by a mask": lambda x, mesh: x.clone().__setitem__(noise(mesh) > 0, 0.0),
    "chosen by a mask": lambda x, mesh: x[noise(mesh) > 0],
    "chosen by a mask of channels": lambda x, mesh: x[:, noise(mesh, 4) > 0],
    "index": lambda x, mesh: x[:, with_own_seed(partial(torch.randperm, 4), mesh)],
    "integers": lambda x, mesh: x + with_own_seed(partial(torch.randint, 9, (8, 6)), mesh),
    "target": lambda x, mesh: F.mse_loss(x, noise(mesh)),
    "labels": lambda x, mesh: F.cross_entropy(x, with_own_seed(partial(torch.randint, 4, (1, 8, 6)), mesh)),
    "second image": lambda x, mesh: torch.cat([x, noise(mesh)], 1),
    "matrix": lambda x, mesh: x @ noise(mesh, 6, 5),
    "kernel": lambda x, mesh: F.conv2d(x, noise(mesh, 4, 4, 3, 3), padding=1),
    "attention mask": lambda x, mesh: F.scaled_dot_product_attention(x, x, x, attn_mask=noise(mesh, 8, 8)),
    "written": lambda x, mesh: x.clone().copy_(noise(mesh)),
    "part written": lambda x, mesh: x.clone()[:, 1:3].add_(noise(mesh, 1, 2, 8, 6)),
    "foreach": lambda x, mesh: torch._foreach_add([x], [noise(mesh)])[0],
    "embedding of a step": lambda x, mesh: x + nn.Linear(3, 4)(noise(mesh, 3))[:, None, None],
    "parameter as an operand": lambda x, mesh: x * nn.Parameter(noise(mesh, 4, 1, 1)),
    "number as a parameter": lambda x, mesh: x * nn.Parameter(noise(mesh, 1)[0]),
}


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def operands_differ(what, mode):
    mesh = shared_mesh(2)
    x = image(mesh, grad=mode == "grad")
    with MODES[mode]():
        OPERANDS[what](x if mode == "grad" else x.detach(), mesh)
        x.detach().sum().item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", OPERANDS)
def test_operands_that_differ_are_told_on_every_rank(what, mode):
    for error in run_expecting_errors(operands_differ, 2, what, mode):
        where = r"tensors differ between ranks: the plain (tensor|parameter) of [\w.]+ \(.*test_compared_operands.py:"
        with pytest.raises(RuntimeError, match=where):
            raise error
        assert "Call torch.manual_seed" in str(error) and "All numbers since then may be wrong" in str(error)


LAYERS = {
    "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "linear": lambda: nn.Linear(6, 5),
    "norm": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)),
    "frozen": lambda: nn.Conv2d(4, 4, 3).requires_grad_(False),
    "after a pooling": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    "the second of two": lambda: nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5))),
}


def weights_differ(what, mode, ask):
    mesh = shared_mesh(3)
    layer = with_own_seed(LAYERS[what], mesh)
    with MODES[mode]():
        x = image(mesh)
        y = layer(x)
        y = y if y.placements[0].is_shard() else x  # what is replicated is read without asking others
        y.full_tensor() if ask == "full_tensor" else y.sum().item()


@pytest.mark.parametrize("ask", ("item", "full_tensor"))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", LAYERS)
def test_weights_that_differ_are_told_with_and_without_gradients(what, mode, ask):
    for error in run_expecting_errors(weights_differ, 3, what, mode, ask):
        with pytest.raises(
            RuntimeError, match=r"the plain parameter of .* is \(.*on rank 0, .* on rank 1, .* on rank 2"
        ):
            raise error
        assert "shardtensor.parallel.synchronize(model, mesh)" in str(error)


def one_of_a_mesh(odd):
    mesh = shared_mesh((2, 2))
    forget()
    x = shard(torch.randn(4, 8), mesh, [Replicate(), Shard(1)])
    (x + torch.full((8,), float(list(mesh.get_coordinate()) == odd))).full_tensor()


@pytest.mark.parametrize("odd", ([1, 0], [0, 1], [1, 1]))
def test_all_ranks_of_a_mesh_of_two_dims_are_compared(odd):
    for error in run_expecting_errors(one_of_a_mesh, 4, odd):
        assert "tensors differ" in str(error)


def on_a_part_first(make):
    """Noise for each member of an ensemble is equal on the domain of each, and not on all of the mesh."""
    mesh = shared_mesh((2, 2), ("ens", "domain"))
    domain = mesh["domain"]
    forget()
    own = make(torch.full((8,), float(mesh.get_coordinate()[0])))
    data = torch.randn(4, 8)
    for _ in range(2):
        (shard(data.clone(), domain, [Shard(1)]) * own).full_tensor()
    (shard(data.clone(), mesh, [Replicate(), Shard(1)]) * own).full_tensor()


@pytest.mark.parametrize("make", [torch.Tensor.clone, nn.Parameter])
def test_what_was_used_on_a_part_of_a_mesh_is_compared_on_all_of_it(make):
    for error in run_expecting_errors(on_a_part_first, 4, make):
        with pytest.raises(RanksDiffer, match="tensors differ"):
            raise error


# -- what is left alone ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_right_programs_are_left_alone():
    mesh = shared_mesh(2)
    rank = mesh.get_local_rank()
    x = image(mesh)
    generator = seeded(7)
    torch.manual_seed(rank)
    for _ in range(5):
        y = x + torch.randn(1, 4, 8, 6, generator=generator)  # the seeds differ, the generators do not
        own = torch.randn(1, 4, SIZES[2][rank], 6)  # a shard
        y = y + ShardTensor.from_local(own, mesh, (Shard(2),), shard_sizes={0: SIZES[2]})
        y.to_local().add_(torch.randn(6))  # each rank its own
        y.sum().item()
    if rank == 1:  # for itself
        str(x + torch.randn(8, 6))
        [x * torch.randn(8, 6) for _ in range(7)]
    y = x + torch.ones(8, 6)
    y.sum().item()
    x.full_tensor()


def nearly(off, dtype):
    """What ranks compute for themselves, with kernels that each chooses by their speed."""
    mesh = shared_mesh(2)
    x = image(mesh)
    same = torch.randn(1, 4, 8, 6)
    other = same * (1 + off * mesh.get_local_rank() * torch.rand_like(same))
    return (x + other.to(dtype)).sum().item()


def test_rounding_is_no_difference():
    for off, dtype in ((1e-5, torch.float32), (1e-9, torch.float64), (1e-2, torch.bfloat16), (1e-5, torch.complex64)):
        run_distributed(nearly, 2, off, dtype)
    for off, dtype in ((3e-2, torch.float32), (0.3, torch.bfloat16)):
        for error in run_expecting_errors(nearly, 2, off, dtype):
            assert "tensors differ" in str(error)


@on_ranks(2)
def test_ranks_may_forget_plans_by_themselves():
    """A rank may forget plans by itself: what is the first run to it is not to others."""
    mesh = shared_mesh(2)
    x = image(mesh)
    for i in range(6):
        if mesh.get_local_rank() == 1 and i % 2:
            planning._plans.clear()
        x = x + torch.full((8, 6), float(i))
        x.sum().item()


def many(count):
    """The error is the one of the first runs; later runs look at nothing."""
    mesh = shared_mesh(2)
    x = image(mesh)
    odd = float(mesh.get_local_rank())
    for i in range(6):
        x = x + torch.full((8, 6), odd if i == count else 0.0)
    x.sum().item()


def test_the_first_runs_of_a_plan_are_looked_at():
    for count in range(3):
        for error in run_expecting_errors(many, 2, count):
            assert "the plain tensor of add.Tensor" in str(error)
    run_distributed(many, 2, 3)


@on_ranks(2)
def test_it_sends_nothing_and_later_runs_are_not_looked_at():
    mesh = shared_mesh(2)
    group = mesh.get_group().group_name
    x, conv, target = image(mesh), nn.Conv2d(4, 4, 3, padding=1), torch.randn(1, 4, 8, 6)

    def step():
        F.mse_loss(conv(x + torch.randn(8, 6)), target).backward()

    with count_communication() as first:
        step()
    assert not first.collectives.get("all_gather")
    x.sum().item()
    for _ in range(3):
        step()
    x.sum().item()
    with count_communication() as counted:
        counts, before = [], fingerprint(group)
        for _ in range(3):
            x + torch.randn(8, 6)
            F.mse_loss(x, torch.randn(1, 4, 8, 6))
            counts.append(fingerprint(group))
    assert counts == [before] * 3, "digests of later runs"
    assert not counted.collectives.get("all_gather")


def told_once():
    mesh = shared_mesh(2)
    x = image(mesh)
    y = x + noise(mesh)
    with pytest.raises(RuntimeError, match="tensors differ"):
        y.sum().item()
    return x.sum().item()


def test_what_was_told_is_not_told_again():
    a, b = run_distributed(told_once, 2)
    assert a == b


@on_ranks(2)
def test_modes_of_the_program_do_not_see_it():
    mesh = shared_mesh(2)
    x = image(mesh)
    with Copied() as copied:
        x + torch.ones(8, 6)
    assert copied.order.count("aten::add") == 1
    assert not {"aten::sum", "aten::arange", "aten::mul"} & set(copied.order), copied.order
