"""Diagonals, windows, joins, copies and reshapes of sharded dims: what stays, what moves, and what a view writes to."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from alike import raises_alike
from on_ranks import on_ranks
from spatial_cases import check_cases, data
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor, UnsupportedSharding, allow_gather
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)


def cases():
    """``(label, function, shape, dims that may be cut)``"""
    result = []

    def add(label, fn, *shape, dims=(1, 2)):
        result.append((label, fn, shape, dims))

    for offset in (0, 2, -3, 9):
        add(f"diagonal {offset}", lambda x, k=offset: x.diagonal(k, 1, 2).exp(), 2, 7, 5)
        add(f"diagonal of other dims {offset}", lambda x, k=offset: x.diagonal(k, 2, 0).exp(), 5, 3, 7, dims=(0, 2))
        add(f"diag_embed {offset}", lambda x, k=offset: torch.diag_embed(x, k).exp(), 5, 4, 7)
        add(f"diag_embed in front {offset}", lambda x, k=offset: torch.diag_embed(x, k, 0, 2), 5, 4, 7)
    add("diag", lambda x: x.diag(1).exp().diag(-2) + x.diag().sum(), 7, 5, dims=(0, 1))
    add("diagonal_scatter", lambda x: x.diagonal_scatter(x.diagonal(1, 1, 2).exp(), 1, 1, 2), 3, 7, 5)
    add("block_diag", lambda x: torch.block_diag(x, x[:3].exp(), torch.ones(2).double(), x[0]), 5, 4, dims=(0, 1))
    add("slice_scatter", lambda x: x.slice_scatter(x[:, :3].exp(), 1, 2, 7, 2), 2, 9, 4)
    add("select_scatter", lambda x: x.select_scatter(x[:, 3].exp(), 1, -2), 2, 9, 4)
    # windows
    for size, step in ((3, 1), (3, 2), (2, 5), (7, 1), (1, 3), (9, 4)):
        add(f"unfold {size} {step}", lambda x, s=size, t=step: x.unfold(1, s, t).exp(), 2, 9, 4)
    add("unfold both", lambda x: x.unfold(1, 3, 1).unfold(2, 2, 2).exp().sum((-1, -2)), 2, 9, 8)
    add(
        "F.unfold and more",
        lambda x: F.unfold(x, (3, 2), dilation=(1, 2), padding=(2, 1), stride=(2, 3)).exp(),
        *(2, 5, 9, 8),
        dims=(0, 1, 2, 3),
    )
    add("F.fold", lambda x: F.fold(x, (6, 5), 2).exp(), 4, 16, 20, dims=(0, 1, 2))
    add("F.fold without a batch", lambda x: F.fold(x, (6, 5), 2, padding=1, stride=2).exp(), 16, 12, dims=(0, 1))
    # entries
    add("unbind", lambda x: torch.stack([t.exp() * k for k, t in enumerate(x.unbind(1))]), 5, 7, 4)
    add("unbind numbers", lambda x: sum(t.exp() * k for k, t in enumerate(x)), 7, dims=(0,))
    add("iteration", lambda x: torch.stack([row.exp() for row in x.transpose(0, 1)], 1), 2, 7, 5)
    # reshapes that cannot keep the sharded dim
    add("flatten", lambda x: x.flatten().exp(), 4, 7, 5, dims=(1, 2))
    add("flatten the last", lambda x: x.flatten(1).exp(), 5, 3, 6, dims=(2,))
    add("transposed", lambda x: x.transpose(0, 1).reshape(-1).exp(), 5, 7, dims=(0, 1))
    add("squeeze all", lambda x: x.squeeze().exp() * x.view(5, 4), 5, 1, 4, 1, dims=(1, 3))
    add("expand", lambda x: x.expand(5, 3, 4).exp(), 5, 1, 4, dims=(1, 2))
    add("expand and add", lambda x: x.expand(5, 3, 4) * x.expand(2, 5, 3, 4), 5, 1, 4, dims=(1,))
    add("channel_shuffle", lambda x: F.channel_shuffle(x, 3).exp(), 4, 6, 5, 4, dims=(1, 2))
    add("roll without dims", lambda x: x.roll(5).exp(), 4, 7, 5)
    add("repeat nothing", lambda x: x.repeat(1, 0, 2).sum() + x.repeat(1, 2, 0).sum() + x.sum(), 4, 7, 5)
    add("cartesian_prod", lambda x: torch.cartesian_prod(x, torch.arange(3.0).double(), x[:2]).exp(), 5, dims=(0,))
    add("copies", lambda x: torch.unfold_copy(torch.transpose_copy(x, 0, 1), 0, 3, 2) * x.sum(), 4, 7, 5)
    add("split copies", lambda x: torch.split_with_sizes_copy(x, [3, 0, 4], 1)[2].exp(), 4, 7, 5)
    return result


@pytest.mark.parametrize("mesh_shape", [pytest.param(2, marks=pytest.mark.slow), 3, (2, 2)], ids=str)
@on_ranks("mesh_shape", timeout=300)
def test_rearrangements_match_one_device(mesh_shape):
    chosen = cases()
    if mesh_shape == (2, 2):  # with two dims to cut, and a result that has two
        one = ("F.fold without a batch", "flatten", "transposed", "roll without dims")
        chosen = [case for case in chosen if len(case[2]) > 1 and case[0] not in one]
    check_cases(chosen, mesh_shape)


# -- what travels -----------------------------------------------------------------------------------------------


@on_ranks(3)
def test_what_travels():
    """By operator: the result's placement and sizes, collectives and bytes sent forward, collectives backward."""
    mesh = shared_mesh(3)
    found = {}
    for label, fn, shape, dim, sizes in (
        ("diagonal", lambda x: x.diagonal(1), (7, 6), 0, (4, 0, 3)),
        ("diagonal of columns", lambda x: x.diagonal(1), (6, 7), 1, (4, 0, 3)),
        ("diag_embed", lambda x: x.diag_embed(1), (2, 7), 1, (4, 0, 3)),
        ("windows", lambda x: x.unfold(1, 3, 1), (2, 9, 4), 1, (4, 2, 3)),
        ("apart windows", lambda x: x.unfold(1, 3, 3), (2, 9, 4), 1, (3, 3, 3)),
        ("flatten", lambda x: x.flatten(), (9, 6), 1, (2, 2, 2)),
        ("flatten the lead", lambda x: x.flatten(), (9, 6), 0, (4, 2, 3)),
        ("unbind", lambda x: x.unbind(1)[0], (9, 6), 1, (2, 2, 2)),
        ("slice_scatter", lambda x: x.slice_scatter(torch.ones(2, 3).double(), 1, 2, 5), (2, 6), 1, (2, 2, 2)),
        ("expand", lambda x: x.expand(6, 5), (6, 1), 1, (0, 1, 0)),
    ):
        x = shard(data(*shape), mesh, [Shard(dim)], {0: sizes}, requires_grad=True)
        with count_communication() as forward:
            y = fn(x)
        with count_communication() as backward:
            y.backward(torch.ones_like(y))
        assert x.grad.shard_sizes == x.shard_sizes
        sent = forward.collectives.total(), forward.bytes_sent, backward.collectives.total()
        found[label] = y.placements[0], y.shard_sizes.get(0), *sent
    rank = dist.get_rank()
    assert found["diagonal"] == (Shard(0), (4, 0, 1), 0, 0, 0)
    assert found["diagonal of columns"] == (Shard(0), (3, 0, 3), 0, 0, 0)
    assert found["diag_embed"] == (Shard(1), (4, 0, 4), 0, 0, 0)
    row = 2 * 4 * 8
    # A window belongs to its middle's owner, so a row goes across each cut in both directions.
    assert found["windows"] == (Shard(1), (3, 2, 2), 1, (1, 2, 1)[rank] * row, 1)
    assert found["apart windows"] == (Shard(1), (1, 1, 1), 0, 0, 0)
    # Two thirds of every shard of 9 x 2 go elsewhere; so do those of the gradient.
    assert found["flatten"] == (Shard(0), (18, 18, 18), 1, 12 * 8, 1)
    assert found["flatten the lead"] == (Shard(0), (24, 12, 18), 0, 0, 0)
    assert found["unbind"] == (Shard(0), (3, 3, 3), 1, 12 * 8, 1)
    assert found["slice_scatter"] == (Shard(1), (2, 2, 2), 0, 0, 0)
    assert found["expand"][0] == Replicate() and found["expand"][2:4] == (1, 2 * 6 * 8 if rank == 1 else 0)


# -- what is written through a view reaches the tensor, or is refused on every rank -------------------------------


def writes(mesh_shape, placements, sizes):
    mesh = shared_mesh(mesh_shape)
    reached, refused = 0, 0
    for view in (
        lambda t: t[:, 1:5],
        lambda t: t[:, ::2][1:],
        lambda t: t.diagonal(),
        lambda t: t.diagonal(-1, 1, 0),
        lambda t: t.mT,
        lambda t: t.unsqueeze(1),
        lambda t: t.split([2, 4], 1)[1],
        lambda t: t.narrow(0, 1, 3),
        lambda t: t.view(5, 6, 1)[1:3],
        lambda t: t[2],
        lambda t: t[:, 3],
        lambda t: t.select(0, 4),
        lambda t: t.unbind(1)[2],
        lambda t: t.unbind()[1],
        lambda t: t.view(30),
        lambda t: t.view(5, 2, 3),
        lambda t: t.unfold(1, 2, 2),
        lambda t: t[:1].squeeze(0),
        lambda t: t[:, 4:5].squeeze(1),
        lambda t: t.expand(1, 5, 6)[0],
    ):
        for write in (
            lambda t: t.zero_(),
            lambda t: t.add_(1),
            lambda t: t.mul_(2),
            lambda t: t.copy_(torch.full(t.shape, 3.0).double()),
            lambda t: t.masked_fill_(t > 0, 5),
            lambda t: t.__setitem__(..., 7),
            lambda t: t.detach().neg_(),
        ):
            whole = data(5, 6)
            x = shard(whole.clone(), mesh, placements, sizes)
            try:
                write(view(x))
            except NotImplementedError:
                refused += 1
                assert torch.equal(x.full_tensor(), whole)
                continue
            reached += 1
            write(view(whole))
            assert torch.equal(x.full_tensor(), whole), (reached, refused)
    return reached, refused


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "sizes"),
    [
        (2, [Shard(1)], {0: (5, 1)}),
        (2, [Shard(0)], {0: (0, 5)}),
        (3, [Shard(1)], {0: (2, 0, 4)}),
        ((2, 2), [Shard(0), Shard(1)], {0: (2, 3), 1: (4, 2)}),
    ],
    ids=str,
)
def test_writes_through_views(mesh_shape, placements, sizes):
    ranks = run_distributed(
        writes, 4 if mesh_shape == (2, 2) else mesh_shape, mesh_shape, placements, sizes, timeout=120
    )
    assert len(set(ranks)) == 1  # all ranks refuse the same
    reached, refused = ranks[0]
    assert reached > 50 and refused > 10


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks", timeout=120)
def test_writes_one_after_the_other(ranks):
    def steps(x):
        y = x * 1
        y[:, 5] = y[:, 5] * 2
        y[2:5] = y[:3].clone()
        y[..., 0] = 0
        y[1] = y[1] + y[0]
        y[:, 2:4].mul_(y[:, 4:6].exp())
        y.diagonal().add_(1)
        y.diagonal(1).copy_(y.diagonal(1).flip(0) * 3)
        y.fill_diagonal_(2.0)
        y[y > 1.5] = 0.5
        y[[0, 3]] = y[[1, 2]] * 2
        y[:, torch.tensor([1, 4])] += 1
        y.index_fill_(1, torch.tensor([2]), 0.25)
        y.tril_(3)
        return y**2

    cuts = {2: ((6, 1), (0, 6)), 3: ((2, 4, 1), (1, 3, 2))}[ranks]
    for dim, sizes in enumerate(cuts):
        assert_matches_unsharded(steps, data(7, 6), mesh_shape=ranks, placements=[Shard(dim)], shard_sizes={0: sizes})


def changed_entries(x):
    y, z = x * 1, x.new_zeros(7, 6)
    y[:, 5] *= 2
    y[2].add_(y[1])
    y[:, 0].fill_(3)
    y[4].zero_()
    y[3].clamp_(-0.5, 0.5)
    y[5].masked_fill_(torch.arange(6, device=x.device) > 2, 0.25)
    for i in range(7):
        z[i].copy_(y[6 - i])
    row = y[6]
    row.mul_(x[0])
    return z**2 + row + y


@on_ranks(2)
def test_in_place_operators_on_entries():
    """In-place operators on an entry of a sharded dim, which is a copy: Python writes the result back."""
    for dim, sizes in ((0, (6, 1)), (1, (2, 4))):
        whole = data(7, 6)
        x = shard(whole.clone(), shared_mesh(2), [Shard(dim)], {0: sizes})
        for t in (x, whole):
            t[:, 5] *= 2
            t[1] += t[0]
            t[2:5, -1] -= 1
            t[..., 0] /= 3
            row = t[6]
            row *= 0.5
            t[0] **= row
        assert torch.equal(x.full_tensor().isnan(), whole.isnan())
        assert torch.equal(x.full_tensor().nan_to_num(), whole.nan_to_num())
        assert torch.equal(row, whole[6]) and torch.equal(x[6].full_tensor(), row)
        with pytest.raises(RuntimeError, match="cannot be written to an entry"):
            x.select(dim, 0).add_(torch.ones(3, 1).double())
    for dim, sizes in ((0, (6, 1)), (1, (2, 4))):
        assert_matches_unsharded(
            changed_entries, data(7, 6), mesh_shape=2, placements=[Shard(dim)], shard_sizes={0: sizes}
        )
    x = shard(data(7, 6), shared_mesh(2), [Shard(0)], {0: (6, 1)})
    with count_communication() as counted:
        x[3] *= 2
        x[6].zero_()
    assert not counted.messages


ERRORS = {
    "flatten": (
        lambda x: torch.stack([x[:, 0]] * 4).reshape(2, 16),
        NotImplementedError,
        "tensor dim 1, sharded on mesh dim 0, does not stay a dim of the result",
    ),
    "diagonal": (lambda x: x.diagonal(0, 1, 1), RuntimeError, "cannot be identical"),
    "windows": (lambda x: x.unfold(0, 9, 1), RuntimeError, "maximum size for tensor at dimension 0 is 8"),
    "as_strided": (lambda x: x.as_strided((2, 2), (0, 1)), NotImplementedError, "as_strided.default: no distributed"),
    "a layout in place": (lambda x: x.t_(), NotImplementedError, "would change the layout of a tensor in place"),
    "entry": (lambda x: x.select_scatter(torch.ones(1).double(), 0, 8), IndexError, "out of range"),
}


def operand():
    return shard(data(8, 1), shared_mesh(3), [Shard(0)], {0: (1, 5, 2)})


@pytest.mark.parametrize("name", ERRORS)
def test_errors_on_every_rank_before_anything_is_sent(name):
    raises_alike(operand, name, ranks=3)


# -- by places in memory ----------------------------------------------------------------------------------------------


def chunks_of_longformer(x):
    heads = x.view(12, 2, 2).transpose(0, 1).view(2, 3, 4, 2)
    outer, chunk, *inner = heads.stride()
    return heads.as_strided((2, 5, 4, 2), (outer, chunk // 2, *inner))


# Of (1, 12, 4); each takes elements by the strides that the tensor has on one device.
BY_PLACE = {
    "longformer": chunks_of_longformer,
    "permuted": lambda x: x[0].t().as_strided((2, 3), (1, 5)),
    "a copy": lambda x: torch.as_strided_copy(x[0].t(), (2, 3), (1, 5)),
    "scattered": lambda x: x + x.detach()[0].t().as_strided_scatter(x.detach()[0, :2, :3], (2, 3), (1, 5)).t(),
    "gathered before": lambda x: whole(x[0].t())[:, 2:].as_strided((2, 3), (1, 4)),
    "channels last": lambda x: x.view(1, 12, 2, 2).permute(0, 3, 1, 2).as_strided((5, 3), (4, 7)),
    "every second": lambda x: x[0, ::2].contiguous().as_strided((3, 3), (4, 5)),
}


def whole(x):
    return x.redistribute(placements=[Replicate()]) if isinstance(x, ShardTensor) else x


def by_place(sizes):
    for f in BY_PLACE.values():
        with allow_gather():
            assert_matches_unsharded(
                f, data(1, 12, 4), mesh_shape=len(sizes), placements=[Shard(1)], shard_sizes={0: sizes}
            )
    x = shard(data(12, 4), shared_mesh(len(sizes)), [Shard(0)], {0: sizes})
    assert x.t().full_tensor().stride() == (1, 4) == whole(x.t()).to_local().stride()
    # What one device has around the elements, no rank knows.
    for f, reason in (
        (lambda: x[1:].as_strided((2, 2), (1, 4), 0), "storage_offset could be a place"),
        (lambda: x[:, 1:3].as_strided((2, 2), (1, 4)), r"gaps between its elements \(strides \(4, 1\)\)"),
        (lambda: x[:2].as_strided((3, 4), (4, 1)), "reach beyond its elements"),
        (lambda: whole(x[:, 1:3].t()).as_strided((2, 2), (1, 5)), r"strides \(12, 1\) instead of \(1, 4\)"),
    ):
        with allow_gather(), pytest.raises(UnsupportedSharding, match=reason):
            f()
    named = {"size": (2, 3), "stride": (1, 5)}
    with allow_gather():
        assert torch.equal(x.t().as_strided(**named).full_tensor(), data(12, 4).t().as_strided(**named))
        assert torch.equal(torch.ops.aten.as_strided(x, **named).full_tensor(), data(12, 4).as_strided(**named))


@pytest.mark.parametrize("sizes", [(8, 4), pytest.param((0, 7, 5), marks=pytest.mark.slow)], ids=str)
def test_elements_by_their_places_in_memory_are_those_of_one_device(sizes):
    run_distributed(by_place, len(sizes), sizes)


# -- repeats for each entry, of which each rank knows its own -------------------------------------------------------


def repeated(x, counts):
    numbers = torch.repeat_interleave(counts)
    rows = x.repeat_interleave(counts, 0, output_size=numbers.shape[0])
    return rows.exp() * numbers.unsqueeze(1), x.sum(1).repeat_interleave(counts), (numbers * rows[:, 0]).sum()


def check_repeats(mesh_shape, of_rows, of_counts):
    torch.manual_seed(0)
    x, counts = torch.randn(8, 3, dtype=torch.float64), torch.tensor([1, 0, 2, 3, 0, 0, 4, 1])
    (places, sizes), (its_places, its_sizes) = of_rows, of_counts
    for numbers in (counts, counts.int(), torch.zeros_like(counts)):
        assert_matches_unsharded(
            repeated, x, numbers, mesh_shape=mesh_shape, placements=[places, its_places], shard_sizes=[sizes, its_sizes]
        )


ALONG = [
    (2, ([Shard(0)], {0: (5, 3)}), ([Shard(0)], {0: (5, 3)})),
    (2, ([Shard(0)], {0: (1, 7)}), ([Shard(0)], {0: (8, 0)})),
    (3, ([Shard(1)], None), ([Shard(0)], {0: (2, 0, 6)})),
    (3, (None, None), ([Shard(0)], {0: (0, 3, 5)})),
    (3, ([Shard(0)], {0: (2, 5, 1)}), (None, None)),
    ((2, 2), ([Shard(0), Shard(1)], {0: (5, 3), 1: (1, 2)}), ([Replicate(), Shard(0)], {1: (4, 4)})),
]


@pytest.mark.parametrize("case", [*ALONG[:3], *[pytest.param(case, marks=pytest.mark.slow) for case in ALONG[3:]]])
def test_repeats_of_each_entry(case):
    run_distributed(check_repeats, 4 if case[0] == (2, 2) else case[0], *case)


def repeat_wrongly(counts, output_size):
    counts = shard(torch.tensor(counts), shared_mesh(2), [Shard(0)], {0: (3, 1)})
    torch.repeat_interleave(counts, output_size=output_size)


@pytest.mark.parametrize(
    ("counts", "size", "match"), [([1, 2, 0, -1], None, "can not be negative"), ([1, 2, 0, 1], 5, "add up to 4")]
)
def test_wrong_repeats_raise_on_every_rank(counts, size, match):
    for error in run_expecting_errors(repeat_wrongly, 2, counts, size):
        with pytest.raises(RuntimeError, match=match):
            raise error
