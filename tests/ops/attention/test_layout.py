"""Where queries that all ranks have meet sharded keys, a large result is sharded, and what follows is not repeated."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor.layout.intervals import chunk_sizes, intervals_of
from shardtensor.ops.attention.blockwise import pieces
from shardtensor.ops.attention.layout import _hops
from shardtensor.testing import assert_matches_unsharded, count_communication, shard, shared_mesh

ROWS = [Shard(-2)]
# batch, heads of queries and of keys, queries, keys, and what the result is sharded along on 2 and on 3 ranks
CALLS = [
    ((5, 2, 2, 17, 33), 0, 0),
    ((1, 4, 2, 65, 17), 1, 2),  # two groups of heads
    ((1, 6, 6, 33, 17), 1, 1),
    ((1, 1, 1, 129, 17), 2, 2),
    ((2, 1, 1, 2, 33), None, None),  # a small one
    ((1, 1, 1, 33, 3333), None, None),  # not worth so many keys
]


@pytest.mark.parametrize(("sizes", "two", "three"), CALLS, ids=lambda value: str(value))
@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world", timeout=180.0)
def test_what_a_result_is_sharded_along(world, sizes, two, three):
    torch.manual_seed(0)
    batch, heads, groups, rows, keys = sizes
    q, k, v = (
        torch.randn(*shape, 256, dtype=torch.float64)
        for shape in ((batch, heads, rows), (batch, groups, keys), (batch, groups, keys))
    )
    cut, mesh = {0: (keys - 1, 1) if world == 2 else (2, keys - 2, 0)}, shared_mesh(world)
    wanted = two if world == 2 else three

    def attend(q, k, v, *mask, causal=False):
        return F.scaled_dot_product_attention(q, k, v, *mask, is_causal=causal, enable_gqa=heads != groups)

    held = [shard(q, mesh, [Replicate()]), shard(k, mesh, ROWS, shard_sizes=cut), shard(v, mesh, ROWS, shard_sizes=cut)]
    with count_communication() as counted:
        out = attend(*held)
    assert out.placements == (Replicate() if wanted is None else Shard(wanted),)
    assert set(counted.collectives) == {"all_reduce" if wanted is None else "all_to_all"}
    layouts, sizes = [[Replicate()], ROWS, ROWS], [None, cut, cut]
    few = {"mesh_shape": world, "placements": layouts, "shard_sizes": sizes}
    for causal in (False, True):
        assert_matches_unsharded(lambda *t, causal=causal: attend(*t, causal=causal), q, k, v, **few)
    masks = (torch.rand(rows, keys) < 0.7, Replicate()), (torch.randn(batch, 1, 1, keys, dtype=q.dtype), Shard(-1))
    for mask, place in masks:
        assert_matches_unsharded(
            attend, q, k, v, mask, mesh_shape=world, placements=[*layouts, [place]], shard_sizes=[*sizes, None]
        )


@on_ranks((2, 2), timeout=180.0)
def test_two_mesh_dims():
    """One shards the batch already: the other one gets the heads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 256, dtype=torch.float64) for n in (33, 17, 17))
    layout, sizes = [Shard(0), Shard(2)], {1: (5, 12)}
    keys = [shard(t, shared_mesh((2, 2)), layout, shard_sizes=sizes) for t in (k, v)]
    out = F.scaled_dot_product_attention(shard(q, shared_mesh((2, 2)), [Shard(0), Replicate()]), *keys)
    assert out.placements == (Shard(0), Shard(1))
    for queries in ([Shard(0), Replicate()], [Replicate(), Replicate()]):
        assert_matches_unsharded(
            F.scaled_dot_product_attention,
            *(q, k, v),
            mesh_shape=(2, 2),
            placements=[queries, layout, layout],
            shard_sizes=[None, sizes, sizes],
        )


class Decoder(nn.Module):
    """Learned queries of several rows read each other's tokens, as levels of a forecast, or outputs of a perceiver."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(40, 64))
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        queries = self.queries.expand(x.shape[0], -1, -1)
        return self.mlp(self.attention(queries, x, x, need_weights=False)[0])


def test_what_follows_is_not_repeated():
    """A rank has half of all but the products of the plain queries, of which nobody can see that they will be cut."""
    tokens = torch.empty(64, 16, 64, device="meta")
    found = shardtensor.explain(Decoder(), tokens, mesh=2, shard=1, backward=True)
    one = shardtensor.explain(Decoder(), tokens, mesh=1, shard=None, backward=True)
    of_queries = 3 * (2 * 64 * 40 * 64 * 64)  # forward, and the gradients of queries and weight
    assert max(map(found.flops, (0, 1))) == (one.flops(0) + of_queries) / 2
    assert "alike" not in found.share()


def test_blocks_travel_as_far_as_rows_see_them():
    """Also past ranks without rows, and in a balanced ring, where each rank has an early and a late part."""
    random.seed(0)

    def cut(length, ranks):
        if random.random() < 0.5:
            parts = intervals_of(chunk_sizes(length, 2 * ranks))
            return [(parts[r], parts[-1 - r]) for r in range(ranks)]
        ends = [0, *sorted(random.randint(0, length) for _ in range(ranks - 1)), length]
        return [(own,) for own in pairwise(ends)]

    for _ in range(2000):
        ranks, lengths = random.randint(1, 6), (random.randint(0, 20), random.randint(0, 20))
        shift = random.choice([None, 0, lengths[1] - lengths[0], 3, -3])
        rows, columns = (cut(length, ranks) for length in lengths)
        needs = [[pieces(rows[(s + t) % ranks], columns[s], shift) for t in range(ranks)] for s in range(ranks)]
        expected = tuple(max((t for t in range(1, ranks) if needs[s][t]), default=0) for s in range(ranks))
        assert _hops(rows, columns, shift) == expected
