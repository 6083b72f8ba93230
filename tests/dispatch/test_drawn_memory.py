"""Every family of operators on shards in any memory: channels-last, permuted, expanded and sliced, of short dims too.

Ranks may have their shards in different memory, and must send the same all the same.
"""

from __future__ import annotations

import memory_cases
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory_formats import IMAGES, VOLUMES, constant

from shardtensor.testing import run_distributed

# What is called on (3, 5, 6), along any dim.
ROWS = {
    "conv1d": lambda x: F.conv1d(x, constant(4, x.shape[1], 3), padding=1),
    "max_pool1d": lambda x: F.max_pool1d(x, 2, ceil_mode=True),
    "linear": lambda x: F.linear(x, constant(4, x.shape[2])),
    "bmm": lambda x: torch.bmm(x, x.mT),
    "tensordot": lambda x: torch.tensordot(x, constant(x.shape[1], 3), dims=([1], [0])),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x * 2),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax": lambda x: x.softmax(1) + x.log_softmax(2),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "cumsum": lambda x: x.cumsum(1) + x.flip(1).cumsum(0),
    "logcumsumexp": lambda x: x.logcumsumexp(2),
    "median": lambda x: x.median(1).values + x.median(1).indices,
    "sort": lambda x: x.sort(1, descending=True)[0],
    "unique": lambda x: (x * 2).round().unique() * x.sum(),
    "nonzero": lambda x: x[x > 0].cumsum(0),
    "index": lambda x: x[:, torch.tensor([0, -1, 0])],
    "index_put": lambda x: x.index_put((torch.tensor([0]),), x[-1].exp()),
    "scatter_add": lambda x: x.scatter_add(1, torch.zeros(3, 2, 6, dtype=torch.long)[: x.shape[0]], x.sin()),
    "gather": lambda x: x.gather(2, torch.zeros(x.shape[0], 5, 2, dtype=torch.long)[:, : x.shape[1]]),
    "where": lambda x: torch.where(x > 0, x, x.mean(1, keepdim=True)),
    "roll": lambda x: x.roll((1, 2), (0, 1)).flip(2),
    "view": lambda x: x.reshape(x.shape[0], -1).exp().view(x.shape),
    "flatten": lambda x: x.flatten().cumsum(0),
    "unfold": lambda x: x.unfold(1, 2, 1).exp(),
    "diagonal": lambda x: x.diagonal(0, 1, 2).exp(),
    "repeat": lambda x: x.repeat(1, 2, 1) * x.repeat_interleave(2, 1),
    "pad": lambda x: F.pad(x, (1, 2), mode="circular") + F.pad(x, (2, 1)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "fft": lambda x: torch.fft.rfft(x, dim=1),
    "inv": lambda x: torch.linalg.inv(x @ x.mT + torch.eye(x.shape[1]).double()),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "norm": lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 2)),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="batchmean"),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(x.shape[0], x.shape[2], dtype=torch.long)),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "gru": lambda x: torch.gru(
        x, x.new_zeros(1, x.shape[1], 2), [constant(6, 6), constant(6, 2)], False, 1, 0.0, False, False, False
    )[0],
    "embedding": lambda x: F.embedding((x.detach() * 3).long().abs() % 4, constant(4, 3)) * x[..., None],
    "chain": lambda x: (x.transpose(0, 1) * 2 + 1).square().permute(2, 0, 1).contiguous().sum(0),
}
TABLES = {"IMAGES": (IMAGES, (2, 4, 8, 6)), "VOLUMES": (VOLUMES, (2, 3, 8, 4, 4)), "ROWS": (ROWS, (3, 5, 6))}


def check(table, ranks, number, examples):
    functions, shape = TABLES[table]
    case = memory_cases.cases(functions, shape, ranks, range(len(shape)), tuple(range(len(shape))))

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.lists(case, min_size=number, max_size=number))
    def compare(drawn):
        module = __name__ if table == "ROWS" else "test_memory_formats"
        run_distributed(memory_cases.check_drawn, ranks, module, table, drawn, timeout=200)

    compare()


@pytest.mark.parametrize("table", TABLES)
def test_drawn_memory(table):
    check(table, 2, 8, 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("table", TABLES)
def test_much_drawn_memory(table, ranks):
    check(table, ranks, 30, 15)
