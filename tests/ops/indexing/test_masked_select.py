"""What sharded masks choose, against one device: values, gradients, cuts, messages."""

from __future__ import annotations

import math

import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)


def values():
    return (torch.arange(7 * 4 * 6, dtype=torch.float64) * 2.4).sin().reshape(7, 4, 6)


def written(x):
    y = x.clone()
    y[x > 0] = 1.0
    return y


FUNCTIONS = {
    "x[mask]": lambda x: x[x > 0],
    "masked mean": lambda x: x[x > 0].mean(),
    "nothing chosen": lambda x: x[x > 100],
    "all chosen": lambda x: x[x < 100],
    "rows": lambda x: x[x.sum((1, 2)) > 0],
    "rows of rows": lambda x: x[x.sum(2) > 0],
    "in the middle": lambda x: x[:, x.sum((0, 2)) > 0],
    "at the end": lambda x: x[..., x.sum((0, 1)) > 0],
    "of a part": lambda x: x[1:, x.sum(0) > 0],
    "next to a number": lambda x: x[x.sum((1, 2)) > 0, 1],
    "next to an index": lambda x: x[x.sum((1, 2)) > 0, :, torch.tensor([2])],
    "plain x": lambda x: torch.ones(7, 4, 6, dtype=torch.float64)[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "masked_select, broadcast": lambda x: x[:, :1].masked_select((x > 0)[:, :, :1]),
    "masked_select, plain mask": lambda x: torch.masked_select(x, values() > 0),
    "nonzero": lambda x: torch.nonzero(x > 0),
    "nonzero, as a tuple": lambda x: torch.nonzero(x > 0, as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "where": lambda x: x[torch.where(x > 0)],
    "nonzero_static, too long": lambda x: torch.nonzero_static(x > 0, size=200),
    "nonzero_static, too short": lambda x: torch.nonzero_static(x > 0, size=20, fill_value=-7),
    "written": written,
}
CUTS = [
    (2, (0,), {0: (5, 2)}),
    (2, (1,), {0: (0, 4)}),
    (2, (2,), {0: (1, 5)}),
    (3, (0,), {0: (1, 0, 6)}),
    (3, (2,), {0: (3, 2, 1)}),
    ((2, 2), (2, None), {0: (5, 1)}),
]


def check(mesh_shape, dims, sizes):
    placements = [[Replicate() if d is None else Shard(d) for d in dims]]
    x = values()
    for name, function in FUNCTIONS.items():
        try:
            assert_matches_unsharded(function, x, placements=placements, mesh_shape=mesh_shape, shard_sizes=sizes)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("mesh_shape,dims,sizes", CUTS)
def test_choices(mesh_shape, dims, sizes):
    ranks = math.prod(mesh_shape) if isinstance(mesh_shape, tuple) else mesh_shape
    run_distributed(check, ranks, mesh_shape, dims, sizes)


@on_ranks(3)
def test_choices_of_few_samples():
    """A batch of 2 on 3 ranks: the flattened mask is sharded, no dim that leads is long enough."""
    for name in ("x[mask]", "masked_select", "nonzero", "written"):
        for dim, sizes in ((1, (1, 0, 3)), (2, (1, 2, 3))):
            layout = {"placements": [Shard(dim)], "shard_sizes": {0: sizes}, "mesh_shape": 3}
            assert_matches_unsharded(FUNCTIONS[name], values()[:2], **layout)


@on_ranks(2)
def test_of_tensors_cut_otherwise():
    def choose(x, y):
        return y[x > 0]

    x = values()
    for other in ([Replicate()], [Shard(0)], [Shard(1)], None):
        assert_matches_unsharded(choose, x, 2 * x, placements=[[Shard(0)], other], mesh_shape=2)
    rows = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    for dims in ((0, 1), (1, 2)):  # rows chosen of what is cut along its columns
        assert_matches_unsharded(choose, rows, x, placements=[[Shard(0)], [Shard(dims[1])]], mesh_shape=2)


def selected_rows(r, v, mask):
    r = r * 1
    r[mask] = v[mask]
    return r


def into_a_constant(r, v, mask):
    out = torch.ones(7, 4, dtype=torch.float64)
    out[mask] = v[mask] * r.detach()[mask]
    return out


def by_index(r, v, mask):
    out, rows = torch.ones(7, 4, dtype=torch.float64), mask.nonzero()[:, 0]
    out[rows] = v[rows]
    return out


MASKED = {
    "rows": selected_rows,
    "a constant": into_a_constant,
    "by index": by_index,
    "index_put": lambda r, v, mask: r.index_put((mask,), v[mask]),
    "index_put, added": lambda r, v, mask: r.index_put((mask,), v[mask].exp(), accumulate=True),
    "masked_scatter": lambda r, v, mask: r.masked_scatter(mask.unsqueeze(1), v[mask]),
    "elements": lambda r, v, mask: selected_rows(r, v, mask.unsqueeze(1) & (v.detach() > 0)),
}


@pytest.mark.parametrize("sizes", [(5, 2), (0, 7)])
@on_ranks(2)
def test_what_a_mask_chooses_is_written_where_it_chooses(sizes):
    """Nothing, one row, rows of one rank, of all: values, and whether there is a gradient."""
    r, v = values()[:, :, 0], values()[:, :, 1]
    places = [[Shard(0)]] * 3
    for rows in ([], [0], [6], [1, 4], [0, 3, 6]):
        mask = torch.isin(torch.arange(7), torch.tensor(rows))
        for name, function in MASKED.items():
            try:
                assert_matches_unsharded(function, r, v, mask, placements=places, mesh_shape=2, shard_sizes={0: sizes})
            except Exception as error:
                raise AssertionError(f"{name} of {rows}: {error}") from error


@on_ranks(2)
def test_a_replicated_mask_chooses_of_a_plain_tensor():
    """Of a plain tensor, by a mask that every rank has."""
    x = values()
    mask = shard(x > 0, shared_mesh(2), [Replicate()])
    assert torch.equal(x[mask].full_tensor(), x[x > 0])


@on_ranks(2)
def test_the_chosen_stay_where_they_are_and_only_their_number_travels():
    x = shard(values(), shared_mesh(2), [Shard(0)], {0: (5, 2)})
    with count_communication() as counted:
        y = x[x > 0]
    local = x.to_local()
    assert y.placements == (Shard(0),) and torch.equal(y.to_local(), local[local > 0])
    assert (counted.messages, dict(counted.collectives), counted.collective_bytes) == (0, {"all_gather": 1}, 8)


def cut_twice():
    x = shard(values(), shared_mesh((2, 2)), [Shard(0), Shard(1)])
    with count_communication() as counted:
        try:
            x.nonzero()
        finally:
            assert not counted.messages and not counted.collectives


def other_axis():
    mesh = shared_mesh((2, 2))
    x = shard(values(), mesh, [Replicate(), Shard(0)])
    torch.masked_select(x, shard(values() > 0, mesh, [Shard(0), Replicate()]))


def wrong_shape():
    x = shard(values(), shared_mesh(2), [Shard(0)])
    x[x[:, :3] > 0]


REFUSED = {
    cut_twice: (4, UnsupportedSharding, r"nonzero: it has to be flattened, but several.*S\(0\)\[4, 3\].*Remedy"),
    other_axis: (4, UnsupportedSharding, r"masked_select: its dim 0 is sharded.* 1, where the mask is replicated"),
    wrong_shape: (2, IndexError, r"the mask of shape \(7, 3, 6\) does not fit"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_errors_on_every_rank_before_anything_is_sent(function):
    ranks, kind, text = REFUSED[function]
    for error in run_expecting_errors(function, ranks):
        with pytest.raises(kind, match=text):
            raise error
