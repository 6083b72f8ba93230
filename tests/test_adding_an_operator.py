"""The guide's code, run as it stands in the page."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from on_ranks import on_ranks
from pages import Page, run

import shardtensor
from shardtensor import UnsupportedSharding
from shardtensor.dispatch import registry
from shardtensor.testing import run_distributed

GUIDE = Page("docs/adding-an-operator.md")


@contextmanager
def guide():
    """What the page defines, registered inside the block only: other tests in this process look at the table."""
    made = run(GUIDE)
    function, operator = made.names["second_difference"], torch.ops.guide.halve.default
    registry.declare(function, made.registered[function])
    registry.declare_rule(operator, made.registered[operator])
    try:
        yield made.names
    finally:
        shardtensor.extend.unregister(function, operator)


def check(sizes):
    torch.manual_seed(0)
    with guide() as made:
        made["check"](sizes)


@pytest.mark.parametrize("sizes", [(7,), (5, 3), (1, 6), (4, 0, 3), (1, 1, 1), (2, 17, 0, 1)], ids=str)
def test_the_guides_operators_are_exact(sizes):
    run_distributed(check, len(sizes), sizes)


@on_ranks(2)
def test_the_guides_refusal():
    from torch.distributed.tensor import Shard

    from shardtensor.testing import shard, shared_mesh

    x = shard(torch.zeros(0, 5), shared_mesh(2), [Shard(1)], {0: (2, 3)})
    text = r"second_difference: the dim has no elements.*Remedy: leave"
    with guide() as made, pytest.raises(UnsupportedSharding, match=text):
        made["second_difference"](x)


def test_what_is_declared_is_supported():
    with guide() as made:
        answer = shardtensor.supports(made["second_difference"])
        assert answer and answer.how == "declared"
        assert made["second_difference"] in shardtensor.extend.registered()
        assert shardtensor.supports(torch.ops.guide.halve).how == "declared"
    assert made["second_difference"] not in shardtensor.extend.registered()
    assert not shardtensor.supports(torch.ops.guide.halve)
