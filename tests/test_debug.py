"""``SHARDTENSOR_DEBUG=1`` turns a would-be hang into an error on every rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor, set_transport
from shardtensor.testing import run_expecting_errors, shared_mesh


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
        ("order", "ranks do not agree on the next communication: rank 0 .*, rank 1 .*same operators in the same order"),
        ("sizes", "exchange of float32: rank 0 would send 2 elements to rank 1, which expects 1"),
        ("transports", "ranks do not agree on the next communication: rank 0 .*, rank 1 .*over the same transport"),
    ],
)
def test_ranks_that_would_hang_raise_alike(how, text):
    for error in run_expecting_errors(disagree, 2, how):
        with pytest.raises(RuntimeError, match=text):
            raise error


def test_ranks_that_agree_are_left_alone():
    assert run_expecting_errors(disagree, 2, "agree") == [None, None]
