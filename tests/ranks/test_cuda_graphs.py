"""What cannot be captured in a CUDA graph is refused, on every rank, before anything is sent; all else may be."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from copied import Copied
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import count_communication, shard, shared_mesh

READS, DRAWS = "the host reads values", "every replay would repeat the same numbers"


def captured():
    """Inside the block this process believes that what it computes is captured, as a GPU's stream would say."""
    return mock.patch("shardtensor.ranks.cuda_graphs.is_capturing", lambda device: True)


def rows(*shape, **kwargs):
    return shard(torch.randn(*shape), shared_mesh(2), [Shard(0)], {0: (5, 3)}, **kwargs)


def attention(x):
    q = x.view(1, 1, *x.shape)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def ctc(x):
    targets, lengths = torch.ones(8, 2, dtype=torch.long), torch.full((8,), 4)
    return F.ctc_loss(x.view(8, 4, 2).transpose(0, 1).log_softmax(-1), targets, lengths, lengths // 2)


REFUSED = {  # what the text begins with, a function of a sharded (8, 8) tensor, what the text has
    "item": ("item", lambda x: x.sum().item(), READS),
    "if": ("item", lambda x: bool(x.sum()), READS),
    "allclose": ("item", lambda x: torch.allclose(x, x), READS),
    "a sharded mask": ("masked_select", lambda x: x[x > 0], READS),
    "masked_select": ("masked_select", lambda x: torch.masked_select(x, x > 0), READS),
    "a plain mask": ("an index with a mask", lambda x: x[torch.arange(8) > 3], READS),
    "a plain mask, written": ("an index with a mask", lambda x: x.__setitem__(torch.arange(8) > 3, x[:4]), READS),
    "nonzero": ("nonzero", lambda x: x.nonzero(), READS),
    "unique": ("unique", lambda x: x.unique(), READS),
    "unique along a dim": ("unique", lambda x: x.unique(dim=0), READS),
    "unique_consecutive": ("unique_consecutive", lambda x: x.unique_consecutive(), READS),
    "sort": ("a sort across shards", lambda x: x.view(-1).sort(), READS),
    "topk": ("a sort across shards", lambda x: x.view(-1).topk(40), READS),
    "histc": ("histc", lambda x: x.histc(3), "Remedy: give it min and max"),
    "bincount": ("bincount", lambda x: x[:, 0].abs().long().bincount(), READS),
    "ctc_loss": ("ctc_loss", ctc, READS),
    "dropout": ("random numbers", lambda x: F.dropout(x, 0.5), DRAWS),
    "rand_like": ("random numbers", torch.rand_like, "leave them outside"),
    "normal_": ("random numbers", lambda x: x.normal_(), DRAWS),
    "multinomial": ("random numbers", lambda x: x.exp().multinomial(2), DRAWS),
    "attention with dropout": ("random numbers", attention, DRAWS),
    "from_local": (
        "a comparison",
        lambda x: ShardTensor.from_local(x.to_local(), shared_mesh(2), [Shard(0)]),
        "give from_local its shard_sizes",
    ),
}


@on_ranks(2)
def test_what_the_host_reads_or_draws_is_refused():
    for name, (begins, function, says) in REFUSED.items():
        x = rows(8, 8)
        function(x)  # what is made at the first call is made
        with captured(), count_communication() as counted, pytest.raises(RuntimeError, match=says) as raised:
            function(x)
        assert str(raised.value).startswith(begins), f"{name}: {raised.value}"
        assert not counted.collectives and not counted.messages, f"{name} has sent something"


def networks():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(4, 2, 3, padding=1),
    )


@on_ranks(2)
def test_a_training_step_without_draws_is_not():
    """A training step reads nothing, and replicated tensors are drawn by torch's generator, which graphs know."""
    net, x = networks(), shard(torch.randn(1, 2, 24, 8), shared_mesh(2), [Shard(2)], {0: (14, 10)}, requires_grad=True)
    everywhere = shard(torch.ones(8), shared_mesh(2), [Replicate()])
    with captured():
        loss = (net(x).softmax(2) ** 2).mean() + F.dropout(everywhere, 0.5).sum()
        loss.backward()
    assert x.grad is not None and all(p.grad is not None for p in net.parameters())


def write(x, index):
    x[index] = 1.5


NUMBERS = {  # functions of a sharded (8, 8) tensor and of an index
    "to an entry": lambda x, index: write(x, 2),
    "to rows": lambda x, index: write(x, index),
    "to the diagonal": lambda x, index: x.fill_diagonal_(1.5),
    "of a quantile": lambda x, index: x.view(-1).quantile(0.3),
}


@on_ranks(2)
def test_numbers_are_written_by_a_kernel_rather_than_copied_from_the_host():
    for name, function in NUMBERS.items():
        x, index = rows(8, 8), torch.tensor([1, 6])
        function(x, index)
        with Copied() as seen:
            function(x, index)
        # torch.tensor(number) calls it: a tensor of the host, which is copied to the device.
        assert "aten::lift_fresh" not in seen.order, name
