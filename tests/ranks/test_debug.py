"""``SHARDTENSOR_DEBUG=1`` turns a would-be hang into an error on every rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor, set_transport
from shardtensor.testing import run_expecting_errors, shared_mesh


def summed(x):
    return x.sum().full_tensor()


def disagree(how):
    os.environ["SHARDTENSOR_DEBUG"] = "1"
    try:
        mesh = shared_mesh(2)
        rank = mesh.get_local_rank()
        x = ShardTensor.from_local(torch.ones(1, 1, 4), mesh, [Shard(2)], shard_sizes={0: (4, 4)})
        if how == "order":
            x.sum().full_tensor() if rank else F.conv1d(x, torch.ones(1, 1, 3), padding=1)
        elif how == "sizes":
            F.conv1d(x, torch.ones(1, 1, 3 if rank else 5), padding=1 if rank else 2)
        elif how == "transports":
            with set_transport("p2p" if rank else "all_to_all"):
                F.conv1d(x, torch.ones(1, 1, 3), padding=1)
        elif how == "operators":  # of the same counts
            F.max_pool1d(x, 3, 1, 1) if rank else F.conv1d(x, torch.ones(1, 1, 3), padding=1)
        elif how == "construction":  # a comparison of one kind, and a sum
            x.sum().item() if rank else ShardTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        elif how == "even":
            ShardTensor.from_local(torch.ones(3 if rank else 5), mesh, [Shard(0)], shard_sizes="even")
        elif how == "lines":
            with pytest.warns(UserWarning, match=r"different lines of code: .*test_debug.py:\d+ on rank 0, "):
                if rank:
                    x.sum().full_tensor()
                else:
                    x.sum().full_tensor()
        elif how == "callers":  # the line in summed is the same
            with pytest.warns(UserWarning, match=r"of code: .*\.py:(\d+) on rank 0, .*\.py:(?!\1\b)\d+ on rank 1"):
                if rank:
                    summed(x)
                else:
                    summed(x)
        elif how == "agree":
            x.sum().full_tensor()
            F.conv1d(x, torch.ones(1, 1, 3), padding=1)
            with set_transport("p2p"):
                F.conv1d(x, torch.ones(1, 1, 3), padding=1)
    finally:
        del os.environ["SHARDTENSOR_DEBUG"]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "order",
            r"number \d+ was exchange of float32 in conv1d .* \(.*test_debug.py:\d+\) on rank 0, "
            r"full_tensor.* \(.*test_debug.py:\d+\) on rank 1. Every rank must call the same operators",
        ),
        ("operators", r"exchange of float32 in conv1d .* on rank 0, exchange of float32 in max_pool1d .* on rank 1"),
        ("construction", r"comparison of ranks.* \(.*test_debug.py:\d+\) on rank 0, item .* on rank 1"),
        ("even", r"shard_sizes \(4, 4\) of mesh dim 0 do not match the local tensors, which have sizes \(5, 3\)"),
        ("sizes", r"in conv1d to .*weight=\(1, 1, 5\).* on rank 0, .* in conv1d to .*weight=\(1, 1, 3\).* on rank 1"),
        ("transports", r"exchange of .* on rank 0, exchange by messages of .* on rank 1"),
    ],
)
def test_ranks_that_would_hang_raise_alike(how, text):
    for error in run_expecting_errors(disagree, 2, how):
        with pytest.raises((RuntimeError, ValueError), match=text):
            raise error


def test_ranks_that_agree_are_left_alone():
    assert run_expecting_errors(disagree, 2, "agree") == [None, None]


@pytest.mark.parametrize("how", ["lines", "callers"])
def test_the_same_communication_from_different_lines_is_a_warning(how):
    assert run_expecting_errors(disagree, 2, how) == [None, None]
