"""Previews in programs whose process groups run: one rank asks, and the groups know nothing of it."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.testing import run_distributed, shard, shared_mesh


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())


def image():
    return torch.empty(1, 3, 130, 270)


DIFFERENTIATED = pytest.mark.on_cpu("a copy of a process has no threads for the backward passes of devices")

LAYOUT = {"mesh": 4, "shard": 2, "shard_sizes": {0: (100, 0, 13, 17)}}


def step(model):
    model.zero_grad()
    model(shard(torch.ones(1, 3, 9, 8), shared_mesh(2), [Shard(2)], {0: (7, 2)})).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def explain_on_rank_0(backward):
    """Between two steps, whose groups, caches and histories it must leave as they are."""
    model = made()
    before = step(model)
    found = None
    if dist.get_rank() == 0:
        found = shardtensor.explain(model, image(), backward=backward, **LAYOUT).to_dict()
    assert dist.get_world_size() == 2
    torch.testing.assert_close(step(model), before, rtol=0, atol=0)
    return found


@pytest.mark.parametrize("backward", [pytest.param(True, marks=DIFFERENTIATED), False])
def test_explain_says_what_it_says_without_a_group(backward):
    found, nothing = run_distributed(explain_on_rank_0, 2, backward)
    assert found == shardtensor.explain(made(), image(), backward=backward, **LAYOUT).to_dict() and nothing is None


def explain_after_a_step():
    step(model := made())
    try:
        shardtensor.explain(model, image(), backward=True, **LAYOUT)
    except RuntimeError as error:
        return str(error)


def test_a_copy_has_no_threads_for_devices(emulated):
    for error in run_distributed(explain_after_a_step, 2):
        assert "call this before the first backward pass, before init_process_group" in error


def advise_on_all():
    step(model := made())
    tried = []
    found = shardtensor.advise(model, image(), ranks=2, machine="cpu", tried=lambda choice, left: tried.append(left))
    step(model)
    return str(found), tried


@DIFFERENTIATED
def test_advise_says_what_it_says_without_a_group():
    expected = str(shardtensor.advise(made(), image(), ranks=2, machine="cpu"))
    for text, tried in run_distributed(advise_on_all, 2):
        assert text == expected
        assert tried == [1, 0]


@on_ranks(2)
def test_values_are_read():
    found = shardtensor.explain(lambda x: x * x.sum().item(), torch.ones(4, 6, device="cpu"), mesh=2, shard=0)
    notes = found.notes
    assert "reads values of tensors" in notes[0]


def explain_after_a_group():
    """Plans and meshes of a group that is gone are freed in the copy, which has none of the group's threads."""
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    shard(torch.ones(4, 6), mesh, [Shard(0)]).sum()
    dist.destroy_process_group(group)
    del group, mesh
    return shardtensor.explain(nn.GELU(), torch.ones(4, 6, device="cpu"), mesh=2, shard=0).to_dict()["mesh"]


@pytest.mark.on_cpu("an ended NCCL group has no threads")
def test_groups_that_are_gone():
    assert run_distributed(explain_after_a_group, 2) == [[2], [2]]


class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def divide(x):
    return 1 / 0


def raise_unsendable(x):
    raise Unsendable("this", "that")


def leave(x):
    os._exit(3)


def errors_of(model):
    try:
        shardtensor.explain(model, torch.ones(4, 6), mesh=2, shard=0)
    except Exception as error:
        return type(error), str(error), str(error.__cause__)


@pytest.mark.parametrize(
    "model, kind, text",
    [
        (divide, ZeroDivisionError, "division by zero"),
        (raise_unsendable, RuntimeError, "Unsendable: this and that"),
        (leave, RuntimeError, "ended with exit code 3.*call this before init_process_group"),
    ],
    ids=["divide", "unsendable", "leave"],
)
def test_errors_come_back(model, kind, text):
    for found, message, cause in run_distributed(errors_of, 2, model):
        assert found is kind and re.search(text, message)
        assert model is leave or f"in {model.__name__}" in cause
