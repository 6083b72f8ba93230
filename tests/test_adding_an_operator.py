"""The guide's code, run as it stands in the page."""

from __future__ import annotations

import re
import runpy
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

import shardtensor
from shardtensor import UnsupportedSharding
from shardtensor.testing import run_distributed

GUIDE = Path(__file__).parent.parent / "docs" / "adding-an-operator.md"


@cache
def guide():
    """Everything that the page's blocks define, in their order; once per process."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.S)
    assert len(blocks) == 4
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write("\n".join(blocks))
        file.flush()
        return runpy.run_path(file.name)


def check(sizes):
    torch.manual_seed(0)
    guide()["check"](sizes)


@pytest.mark.parametrize("sizes", [(7,), (5, 3), (1, 6), (4, 0, 3), (1, 1, 1), (2, 17, 0, 1)], ids=str)
def test_the_guides_operators_are_exact(sizes):
    run_distributed(check, len(sizes), sizes)


def refused():
    from torch.distributed.tensor import Shard

    from shardtensor.testing import shard, shared_mesh

    x = shard(torch.zeros(0, 5), shared_mesh(2), [Shard(1)], {0: (2, 3)})
    with pytest.raises(UnsupportedSharding, match=r"second_difference: the dim has no elements.*Remedy: leave"):
        guide()["second_difference"](x)


def test_the_guides_refusal():
    run_distributed(refused, 2)


def test_what_is_declared_is_supported():
    made = guide()
    try:
        answer = shardtensor.supports(made["second_difference"])
        assert answer and answer.how == "declared"
        assert made["second_difference"] in shardtensor.registered()
        assert shardtensor.supports(torch.ops.guide.halve).how == "declared"
    finally:  # other tests look at the table
        shardtensor.unregister(made["second_difference"], torch.ops.guide.halve.default)
    assert made["second_difference"] not in shardtensor.registered()
