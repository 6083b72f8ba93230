"""Neighborhood attention on the sphere: its operator as torch-harmonics declares it, with a dense form in its place.

The package itself is in tests/networks.
"""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.ops.neighborhood import sphere
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

library = torch.library.Library("attention_kernels", "FRAGMENT")
library.define(
    "_neighborhood_s2_attention_torch(Tensor kw, Tensor vw, Tensor qw, Tensor quad_weights, Tensor col_idx, Tensor "
    "row_off, Tensor seg, Tensor seg_off, SymInt nh, SymInt nlon_in, SymInt nlat_out, SymInt nlon_out) -> Tensor"
)


def dense(kw, vw, qw, quad_weights, col_idx, row_off, seg, seg_off, nh, nlon_in, nlat_out, nlon_out):
    """All scores, of which those outside the neighborhood do not count."""
    gathers, nlat_in, device = nlon_in % nlon_out == 0, kw.shape[1], kw.device
    wide, narrow = max(nlon_in, nlon_out), min(nlon_in, nlon_out)
    assert arcs(seg, seg_off, wide) == [
        set(col_idx[a:b].tolist()) for a, b in zip(row_off.tolist(), row_off.tolist()[1:], strict=False)
    ]
    row = torch.arange(len(row_off) - 1, device=device).repeat_interleave(row_off.diff())
    shape = (nlat_out, nlon_out, nlat_in, nlon_in) if gathers else (nlat_in, nlon_in, nlat_out, nlon_out)
    mask = torch.zeros(shape, device=device)
    for shift in range(narrow):
        mask[row, shift, col_idx // wide, (col_idx % wide + wide // narrow * shift) % wide] = 1
    mask = mask if gathers else mask.permute(2, 3, 0, 1)
    q, k, v = (t.unflatten(-1, (nh, -1)) for t in (qw, kw, vw))
    scores = torch.einsum("bhwnc,bijnc->bnhwij", q, k) + quad_weights.log()[:, None]
    weights = scores.masked_fill(mask == 0, float("-inf")).flatten(-2).softmax(-1).unflatten(-1, (nlat_in, nlon_in))
    return torch.einsum("bnhwij,bijnc->bhwnc", weights, v).flatten(-2)


def arcs(seg, seg_off, longitudes):
    bounds = seg_off.tolist()
    return [
        {h * longitudes + (start + i) % longitudes for h, start, n in seg[a:b].tolist() for i in range(n)}
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]


library.impl("_neighborhood_s2_attention_torch", dense, "CompositeImplicitAutograd")
sphere._register(None)
attend = torch.ops.attention_kernels._neighborhood_s2_attention_torch


def neighborhoods(rows, columns, longitudes):
    """A matrix of ``rows`` latitudes, whose columns are those of a grid of ``columns`` latitudes."""
    seg, seg_off, col_idx, row_off = [], [0], [], [0]
    for row in range(rows):
        middle = row * columns // rows
        for h in range(max(0, middle - 1), min(columns, middle + 3)):
            seg.append((h, longitudes - 1 - (row + h) % 3, 2 + (row + 2 * h) % 3))
        seg_off.append(len(seg))
        arcs_of_row = arcs(torch.tensor(seg[seg_off[-2] :]), torch.tensor([0, seg_off[-1] - seg_off[-2]]), longitudes)
        col_idx += sorted(arcs_of_row[0])
        row_off.append(len(col_idx))
    of = torch.tensor
    return of(col_idx), of(row_off), of(seg, dtype=torch.int32), of(seg_off, dtype=torch.int32)


def attention(grid, to):
    """The operator between two grids, as a function of queries, keys and values."""
    torch.manual_seed(0)
    coarse, fine = (to, grid) if grid[1] % to[1] == 0 else (grid, to)
    sparse, weights = neighborhoods(coarse[0], fine[0], fine[1]), torch.rand(grid[0], dtype=torch.float64) + 0.5
    return lambda q, k, v: attend(k, v, q, weights, *sparse, 2, grid[1], *to)


BATCH, ROWS, COLUMNS, CHANNELS, WHOLE = [Shard(0)], [Shard(1)], [Shard(2)], [Shard(3)], [Replicate()]
FINE, COARSE = (11, 6), (7, 3)


def operands(grid, to, batch=2):
    return [torch.randn(batch, *n, c, dtype=torch.float64) for n, c in ((to, 4), (grid, 4), (grid, 6))]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("grid", "to"), [(FINE, FINE), (FINE, COARSE), (COARSE, FINE)])
@on_ranks("ranks")
def test_attention_on_the_sphere(grid, to, ranks):
    given, call = operands(grid, to, ranks), attention(grid, to)
    for placements in (
        [ROWS, ROWS, ROWS],
        [WHOLE, ROWS, ROWS],
        [ROWS, WHOLE, WHOLE],
        [COLUMNS, CHANNELS, ROWS],
        [WHOLE, BATCH, ROWS],
        [CHANNELS, CHANNELS, CHANNELS],
    ):
        assert_matches_unsharded(call, *given, mesh_shape=ranks, placements=placements)
    n, m = to[0], grid[0]
    for first, second in (((0, n), (m, 0)), ((1, n - 1), (m - 1, 1)), ((n, 0), (m, 0))):
        sizes = [{0: (*first, *[0] * (ranks - 2))}, *[{0: (*[0] * (ranks - 2), *second)}] * 2]
        assert_matches_unsharded(call, *given, mesh_shape=ranks, placements=[ROWS, ROWS, ROWS], shard_sizes=sizes)


@on_ranks(4)
def test_a_mesh_of_two_dims():
    given, call = operands(FINE, FINE), attention(FINE, FINE)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
        assert_matches_unsharded(call, *given, mesh_shape=(2, 2), placements=placements)


def sent():
    call, counts = attention(FINE, FINE), []
    given = [shard(t, shared_mesh(2), ROWS, {0: (6, 5)}, requires_grad=True) for t in operands(FINE, FINE)]
    with count_communication() as forward:
        y = call(*given)
    with count_communication() as backward:
        y.sum().backward()
    for counted in (forward, backward):
        assert not counted.collective_bytes
        counts.append((counted.messages, counted.bytes_sent))
    return counts


def test_what_is_sent():
    """Keys and values together: a neighborhood reaches one latitude up, and two down. Gradients come back."""
    latitude = 2 * 6 * (4 + 6) * 8
    assert run_distributed(sent, 2) == [[(1, latitude), (1, 2 * latitude)], [(1, 2 * latitude), (1, latitude)]]


def fail():
    given = [shard(t, shared_mesh((2, 2)), [Shard(1), Shard(2)]) for t in operands(FINE, FINE, 1)]
    attention(FINE, FINE)(*given)


def test_what_is_refused():
    for error in run_expecting_errors(fail, 4):
        text = r"sphere: tensor dim 2 must be unsharded, but mesh dim 1 shards it.*Remedy: redistribute it"
        with pytest.raises(UnsupportedSharding, match=text):
            raise error
