"""Views, slices, joins and shuffles on shards against the same on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from halves import in_halves
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from seeded import seeded
from spatial_cases import check_cases, data
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor.dispatch.tensor import wrap
from shardtensor.layout.intervals import boundaries_of, intervals_of, whole_blocks
from shardtensor.ops.shape.cat import joined_sizes
from shardtensor.ops.shape.flip import rolled
from shardtensor.ops.shape.slice import boundary_of_slice, sizes_before_slice
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)


def rows_written(x):
    x = x * 1.0
    y = x.detach().clone()
    y[:, 3] = 7.0
    y[1, ..., -2] = y[0, ..., 2] * 2
    y[:, 2:5, 1] = torch.arange(6, dtype=y.dtype).reshape(2, 3, 1)
    y[:, None, 1, 2] = torch.ones(y.shape[-1], dtype=y.dtype)
    y[0, 6] = torch.arange(6, dtype=y.dtype)[:, None]
    y[..., 1:3].mul_(3)
    return x + y


def cases():
    result = []

    def add(label, fn, *shape, dims=None):
        result.append((label, fn, shape, dims or tuple(range(1, len(shape)))))

    # slices
    add("range", lambda x: x[:, 2:7], 2, 9, 4)
    add("steps", lambda x: x[:, 2:9:3, 1::2] * x[:, 1:7:2, :2].sum(1, keepdim=True), 2, 9, 4)
    add("nothing", lambda x: x[:, 5:3].sum() + x.sum(), 2, 9, 4)
    add("ellipsis", lambda x: x[..., 1:3, None], 2, 9, 4)
    add("two slices", lambda x: x[:, :4].exp().sum(1) + x[:, 4:].sin().sum(1), 2, 9, 4)
    add("differences", lambda x: x[:, 1:] - x[:, :-1], 2, 9, 4)
    add("differences of both", lambda x: (x[:, 1:] - x[:, :-1])[:, :, 1:] ** 2 + x[:, 1:, :-1], 2, 9, 4)
    add("chunk, some used", lambda x: x.chunk(4, 1)[1] * 2, 2, 9, 4)
    add("split", lambda x: torch.split(x, [2, 0, 4, 3], 1)[2:], 2, 9, 4)
    add("tensor_split at indices", lambda x: torch.tensor_split(x, indices=(2, 5), dim=1), 2, 9, 4)
    places = {"tensor_indices_or_sections": torch.tensor([2, 5])}
    if torch.get_default_device().type == "cpu":  # torch takes them from the CPU only, where no ShardTensor is then
        add("tensor_split at a tensor", lambda x: x.tensor_split(dim=1, **places), 2, 9, 4)
    add("tensor_split into sections", lambda x: torch.tensor_split(x, sections=3, dim=1), 2, 9, 4)
    add("hsplit", lambda x: torch.hsplit(x, (4,))[1], 2, 9, 4)
    add("split and cat", lambda x: torch.cat(x.split([2, 3, 4], 1)[::-1], 1), 2, 9, 4)
    # entries of a sharded dim
    add("number", lambda x: x[:, -2], 2, 9, 4)
    add("numbers and more", lambda x: x[None, :, 3, ..., None], 2, 9, 4, 2)
    add("entries", lambda x: x[:, 3].exp() * x[:, 0] + x[:, 8], 2, 9, 4)
    add("entry among all", lambda x: x - x[:, 4:5] + x[:, 2].unsqueeze(1), 2, 9, 4)
    add("mask", lambda x: (x > 0)[:, 3], 2, 9, 4)
    add("integers", lambda x: (x * 100).long()[:, 3], 2, 9, 4)
    add("written", rows_written, 2, 9, 6, 4)
    # joins
    add("cat", lambda x: torch.cat([x, x * 2, x[:, 1:3]], 1), 2, 7, 4)
    add("cat front", lambda x: torch.cat([torch.ones(2, 2, 4, dtype=x.dtype), x], 1), 2, 7, 4, dims=(1, 2))
    add("cat around", lambda x: torch.cat([x.new_ones(2, 1, 4), x, torch.ones(2, 3, 4).double()], -2), 2, 7, 4)
    add("cat between", lambda x: torch.cat([x, torch.arange(24.0).double().view(2, 3, 4), x.cos()], 1), 2, 7, 4)
    add("cat mixed dtypes", lambda x: torch.cat([x.float(), x], 1), 2, 7, 4)
    add("cat nothing", lambda x: torch.cat([torch.empty(0), x, x[:, :0]], 1), 2, 7, 4)
    add("cat other cuts", lambda x: torch.cat([x[:, 1:6], x.flip(1), x.roll(2, 1)[:, ::2]], 1), 2, 7, 4)
    add("stack", lambda x: torch.stack([x, x * 2, torch.ones(2, 7, 4).double()], 1), 2, 7, 4)
    # rolls and turns
    for shift in (1, -5, 0, 100):
        add(f"roll {shift}", lambda x, shift=shift: x.roll(shift, 1), 2, 7, 4)
    add("roll twice", lambda x: torch.roll(x, (3, 2), (1, -2)), 2, 7, 4)
    for k in (1, 2):
        add(f"rot90 {k}", lambda x, k=k: torch.rot90(x, k, (1, 2)), 2, 7, 4)
    add("tril", lambda x: x.tril(-3) * torch.triu(x, 2).sum(), 2, 7, 5)
    # repeats
    add("repeat to more", lambda x: x.repeat(2, 1, 2, 2), 2, 7, 4)
    add("repeat_interleave", lambda x: x.repeat_interleave(3, 1), 2, 7, 4)
    # reshapes
    add("by keyword", lambda x: x.view(size=(2, 8, 6)) + torch.reshape(input=x, shape=(2, 8, -1)), 2, 8, 6, dims=(1,))
    add("flatten by keyword", lambda x: x.unflatten(-1, (2, 3)).movedim(1, 2).flatten(start_dim=2), 2, 8, 6, dims=(1,))
    add("image of tokens", lambda x: x.view(2, 3, 4, 5).exp(), 2, 12, 5)
    add("image and back", lambda x: x.view(2, 6, 4, 3).sin().reshape(2, 24, 3), 2, 24, 3)
    add("heads", lambda x: x.reshape(2, 7, 2, 3).permute(0, 2, 1, 3).reshape(2, 2, 7, 3), 2, 7, 6, dims=(1,))
    add(
        "patches",
        lambda x: x.reshape(2, 3, 4, 2, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(2, 4, 3, 12),
        *(2, 3, 8, 6),
        dims=(2, 3),
    )
    add("patches to tokens", lambda x: x.view(2, 3, 4, 2, 6).transpose(1, 2).flatten(2), 2, 3, 8, 6, dims=(2,))
    add("ones", lambda x: x[:, None].view(2, 1, 7, 1, 4).squeeze().unsqueeze(-1), 2, 7, 4)
    add("diagonal", lambda x: x.diagonal(1, 2, 3) * x.diagonal(dim1=-1, dim2=2)[..., :4], 2, 5, 4, 5, dims=(1,))
    add("contiguous", lambda x: x.transpose(1, 2).contiguous().view(2, 4, 7), 2, 7, 4)
    add("movedim", lambda x: x.movedim(1, -1).swapaxes(0, 1).swapdims(1, 2).mT, 2, 7, 4)
    add("pixel_shuffle channels", lambda x: torch.pixel_shuffle(x, 2), 1, 16, 5, 3, dims=(1, 2, 3))
    add("unfold", lambda x: x.unfold(2, 3, 2).sum(-1), 2, 9, 8, dims=(1,))
    return [(label, fn, shape, dims if isinstance(dims, tuple) else (1, 2)) for label, fn, shape, dims in result]


@pytest.mark.parametrize(("mesh_shape", "half"), [(1, None), (2, None), *in_halves([(3,), ((2, 2),)])], ids=str)
@on_ranks("mesh_shape", timeout=200)
def test_views_match_one_device(mesh_shape, half):
    check_cases(cases(), mesh_shape, half=half)


def traffic():
    """Bytes that this rank sends, forward and backward, by operator."""
    mesh = shared_mesh(3)
    found = {}

    def measure(label, fn, n=12, sizes=(5, 4, 3)):
        x = shard(data(1, n, 2), mesh, [Shard(1)], {0: sizes}, requires_grad=True)
        with count_communication() as forward:
            y = fn(x)
        with count_communication() as backward:
            torch.autograd.backward(y, [torch.ones_like(t) for t in y] if isinstance(y, tuple) else torch.ones_like(y))
        assert x.grad.shard_sizes == x.shard_sizes
        assert forward.collectives.total() <= 1
        where = [t.shard_sizes.get(0) for t in (y if isinstance(y, tuple) else (y,))]
        found[label] = forward.bytes_sent, backward.bytes_sent, where[0] if len(where) == 1 else where

    measure("slice", lambda x: x[:, 2:11:2])
    measure("slices of slices", lambda x: x[:, 1:][:, 2:6])
    measure("split", lambda x: x.split([6, 6], 1))
    measure("differences", lambda x: x[:, 1:] - x[:, :-1])
    measure("split and cat", lambda x: torch.cat(x.split([7, 2, 3], 1), 1))
    measure("token in front", lambda x: torch.cat([torch.ones(1, 1, 2).double(), x], 1))
    measure("roll", lambda x: x.roll(1, 1))
    measure("whole blocks", lambda x: x.view(1, 3, 4, 2))
    measure("blocks as they are", lambda x: x.view(1, 4, 3, 2), sizes=(6, 3, 3))
    measure("select", lambda x: x[:, 6])
    return found


def test_only_what_has_to_move_moves():
    ranks = run_distributed(traffic, 3)
    row = 16  # bytes
    expected = {
        "slice": ([0, 0, 0], [0, 0, 0], (2, 2, 1)),
        "slices of slices": ([0, 0, 0], [0, 0, 0], (2, 2, 0)),
        "split": ([0, 0, 0], [0, 0, 0], [(5, 1, 0), (0, 3, 3)]),
        # (4, 4, 3) minus (5, 4, 2): one row crosses each cut; so does its gradient.
        "differences": ([row, row, 0], [0, row, row], (4, 4, 3)),
        "split and cat": ([0, 0, 0], [0, 0, 0], (5, 4, 3)),
        "token in front": ([0, 0, 0], [0, 0, 0], (6, 4, 3)),
        "roll": ([row, row, row], [row, row, row], (5, 4, 3)),
        # Cuts at 5 and 9 move to 4 and 8.
        "whole blocks": ([row, row, 0], [0, row, row], (1, 1, 1)),
        "blocks as they are": ([0, 0, 0], [0, 0, 0], (2, 1, 1)),
        "select": ([0, 0, 0], [0, 0, 0], None),
    }
    for label, (forward, backward, sizes) in expected.items():
        assert [found[label][0] for found in ranks] == forward, label
        assert [found[label][1] for found in ranks] == backward, label
        assert all(found[label][2] == sizes for found in ranks), label


TOKENS = [  # shape and cut of a video (N, C, frames, rows, columns); how many all-to-alls make tokens of it; their cut
    ((1, 6, 3, 5, 4), (3, 2), 1, (30, 30)),  # of 3 frames one rank would have two
    ((1, 6, 5, 5, 4), (3, 2), 1, (60, 40)),  # frames are cut instead of rows
    ((1, 6, 1, 5, 4), (3, 2), 0, (12, 8)),  # there is one frame: rows lead
    ((1, 6, 2, 5, 4), (2, 0, 3), 1, (14, 14, 12)),  # fewer frames than ranks: intervals of each
]


def tokens(shape, sizes, exchanges, cut):
    def flat(x):
        return x.flatten(2).transpose(1, 2)

    def mixed(x):
        return F.linear(flat(x), torch.linspace(-1, 1, 12, dtype=x.dtype).reshape(2, 6)).tanh()

    x, mesh = data(*shape), shared_mesh(len(sizes))
    arguments = {"mesh_shape": len(sizes), "placements": [Shard(3)], "shard_sizes": {0: sizes}}
    assert_matches_unsharded(mixed, x, **arguments)
    sharded = shard(x, mesh, [Shard(3)], {0: sizes})
    with count_communication() as counted:
        y = flat(sharded)
        assert y.placements == (Shard(1),) and y.shard_sizes == {0: cut}
        mixed(sharded)
    assert dict(counted.collectives) == ({"all_to_all": 2 * exchanges} if exchanges else {})


@pytest.mark.parametrize(("shape", "sizes", "exchanges", "cut"), TOKENS, ids=["uneven", "frames", "rows", "few frames"])
def test_tokens_stay_sharded(shape, sizes, exchanges, cut):
    """Pixels that are flattened to tokens stay with many ranks, whatever was cut; a linear layer then sends nothing."""
    run_distributed(tokens, len(sizes), shape, sizes, exchanges, cut)


# Shape and sizes of a video (N, C, frames, rows, columns), the dim and sizes that its pixels have again, all-to-alls.
PIXELS = [
    ((1, 6, 3, 5, 4), (3, 2), 3, (3, 2), 2),
    ((1, 6, 2, 5, 4), (2, 0, 3), 3, (2, 0, 3), 2),  # fewer frames than ranks
    ((1, 6, 9, 10, 4), (6, 4), 2, (5, 4), 1),  # frames enough
    ((1, 6, 3, 3, 4), (1, 2), 2, (2, 1), 2),  # not more rows than frames
]


def pixels(shape, sizes, dim, again, exchanges):
    def mixed(x):
        tokens = x.flatten(2).transpose(1, 2)
        tokens = F.linear(tokens, torch.linspace(-1, 1, 36, dtype=x.dtype).reshape(6, 6)).tanh()
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])

    for mesh, placements in ((len(sizes), [Shard(3)]), ((1, len(sizes)), [Shard(0), Shard(3)])):
        last = len(placements) - 1
        arguments = {"mesh_shape": mesh, "placements": placements, "shard_sizes": {last: sizes}}
        y = assert_matches_unsharded(mixed, data(*shape), rtol=1e-10, **arguments)
        assert y.placements[last] == Shard(dim) and y.shard_sizes[last] == again
    x = shard(data(*shape), shared_mesh(len(sizes)), [Shard(3)], {0: sizes})
    with count_communication() as counted:
        y = mixed(x)
    assert dict(counted.collectives) == {"all_to_all": exchanges}
    y.mul_(2)
    assert torch.equal(y.full_tensor(), mixed(x).full_tensor() * 2)


@pytest.mark.parametrize(("shape", "sizes", "dim", "again", "exchanges"), PIXELS)
def test_tokens_become_the_pixels_that_they_were(shape, sizes, dim, again, exchanges):
    """Where ranks would have a few frames each, the rows that were sharded are again."""
    run_distributed(pixels, len(sizes), shape, sizes, dim, again, exchanges)


# Reshapes of fewer blocks than ranks: the function, the shape, and the sharded dims of operand and result.
FEW_BLOCKS = {
    "pixels": (lambda x: x.flatten().sin(), (2, 5, 6), 1, 0),
    "inner pixels": (lambda x: x.flatten().sin(), (2, 5, 6), 2, 0),
    "pixels of channels": (lambda x: x.view(-1).sin(), (2, 2, 5, 6), 3, 0),
    "labels": (lambda x: x.movedim(1, -1).reshape(-1, 7).softmax(1), (2, 7, 5, 6), 2, 0),
    "frames": (lambda x: x.flatten(2).cos(), (2, 3, 2, 7, 1), 3, 2),
    "images": (lambda x: x.view(2, 7, 5).sin(), (70,), 0, 1),
    "images of channels": (lambda x: x.view(2, 7, 5, 3).sin(), (70, 3), 0, 1),
    "windows": (lambda x: x.view(2, 7, 2, 2, 5).sin(), (56, 5), 0, 1),
    "other blocks": (lambda x: x.reshape(7, 10).exp(), (2, 5, 7), 2, 0),
    "heads": (lambda x: x.view(3, 2, 6).softmax(2), (3, 12), 1, 1),
    "levels": (lambda x: x.flatten(0, 1).sin(), (2, 7, 3), 0, 0),
    "windows of levels": (lambda x: windows(x).softmax(1), (4, 6, 4, 3), 0, 0),
}


def windows(x):
    """Windows of (levels, latitudes, longitudes) as in a Swin transformer of three dims."""
    return x.view(2, 2, 3, 2, 2, 2, 3).permute(0, 2, 4, 1, 3, 5, 6).reshape(12, 8, 3)


def few_blocks(name, sizes):
    function, shape, dim, where = FEW_BLOCKS[name]
    placements = [Shard(dim)]
    y = assert_matches_unsharded(
        function, data(*shape), mesh_shape=len(sizes), placements=placements, shard_sizes={0: sizes}
    )
    return y.placements == (Shard(where),) and (name == "heads" or min(y.shard_sizes[0]) > 0)


@pytest.mark.parametrize("name", FEW_BLOCKS)
@pytest.mark.parametrize("ranks", [3, 4])
def test_reshapes_of_fewer_blocks_than_ranks(name, ranks):
    """No rank is left without its part."""
    n = FEW_BLOCKS[name][1][FEW_BLOCKS[name][2]]
    sizes = (n - 1, 0, 1, 0)[:ranks]
    assert all(run_distributed(few_blocks, ranks, name, sizes))


def few_blocks_traffic():
    x = shard(data(2, 6, 4), shared_mesh(3), [Shard(1)], {0: (2, 2, 2)}, requires_grad=True)
    with count_communication() as forward:
        y = x.view(-1)
    with count_communication() as backward:
        y.backward(torch.ones_like(y))
    with count_communication() as written, torch.no_grad():
        y.add_(1)
    assert dict(written.collectives) == {"all_to_all": 1}  # one exchange back
    assert torch.equal(x.full_tensor().flatten(), data(48) + 1) and torch.equal(y.full_tensor(), data(48) + 1)
    assert y.shard_sizes == {0: (16, 16, 16)} and x.grad.shard_sizes == {0: (2, 2, 2)}
    return [(c.bytes_sent, dict(c.collectives)) for c in (forward, backward)]


def test_blocks_move_once():
    """Of two blocks of 24 elements every rank has 8, and gets 16 that follow each other."""
    ends, middle = (8 * 8, {"all_to_all": 1}), (2 * 8 * 8, {"all_to_all": 1})
    assert run_distributed(few_blocks_traffic, 3) == [[ends, ends], [middle, middle], [ends, ends]]


@on_ranks(2)
def test_layouts():
    mesh = shared_mesh(2)
    x = shard(data(2, 6, 3), mesh, [Shard(1)], {0: (5, 1)})
    assert x[:, 5].placements == (Partial(),)
    assert x[1].shard_sizes == {0: (5, 1)}
    part = x[:, 2:]
    part.zero_()
    assert torch.equal(x.full_tensor(), torch.cat([data(2, 6, 3)[:, :2], torch.zeros(2, 4, 3)], 1))
    # On ranks whose part happens to be a view, or to be empty, too.
    for copied in (lambda: x.unfold(1, 2, 1), lambda: x[:, 5].unsqueeze(0), lambda: x.select(1, 0)[1:]):
        for write in (lambda t: t.add_(1), lambda t: t.mul_(2), lambda t: t.detach().zero_()):
            with pytest.raises(NotImplementedError, match="write to a view that is a copy on shards"):
                write(copied())
    with torch.inference_mode():
        assert torch.equal(x[:, 1:4].roll(1, 1).full_tensor(), x.full_tensor()[:, 1:4].roll(1, 1))
    twice = shard(data(2, 6, 3), mesh, [Shard(1)], {0: (5, 1)}, requires_grad=True)
    (first,) = torch.autograd.grad((twice[:, 1:5:2] ** 3).sum(), twice, create_graph=True)
    assert torch.allclose(
        torch.autograd.grad(first[:, 3:].exp().sum(), twice)[0].full_tensor()[:, 3],
        (3 * data(2, 6, 3)[:, 3] ** 2).exp() * 6 * data(2, 6, 3)[:, 3],
    )
    partial = shard(data(2, 6, 3).round(), mesh, [Partial()])
    for fn in (lambda t: t[:, 2:4], lambda t: t.roll(2, 1), lambda t: t.select(1, 3)):
        assert fn(partial).placements == (Partial(),)
        assert torch.equal(fn(partial).full_tensor(), fn(data(2, 6, 3).round()))


@on_ranks(2)
def test_gradients_through_what_is_written_into_slices():
    def slices(x):
        z = x * 1
        z[2:5].mul_(3)
        z[1:3] = x[4:6]
        z[5] = x[1] * 2
        z[:, 1] = 5
        return z**2

    assert_matches_unsharded(slices, data(8, 4), mesh_shape=2, placements=[Shard(0)], shard_sizes={0: (3, 5)})
    assert_matches_unsharded(
        slices, data(8, 4), mesh_shape=2, placements=[Shard(0)], shard_sizes={0: (0, 8)}, check_grads=False
    )


@on_ranks(3)
def test_gradients_of_equal_slices_of_different_cuts():
    """Two inputs cut differently whose slices are cut alike: the gradients still come back as the inputs are."""
    mesh = shared_mesh(3)
    for sizes in ((4, 2, 3), (3, 3, 3), (2, 4, 3), (0, 9, 0)):
        x = shard(data(1, 9, 2), mesh, [Shard(1)], {0: sizes}, requires_grad=True)
        ((x[:, 6:] ** 2).sum() + x[:, 5].sum()).backward()
        expected = torch.zeros(1, 9, 2, dtype=torch.float64)
        expected[:, 6:] = 2 * data(1, 9, 2)[:, 6:]
        expected[:, 5] = 1
        assert x.grad.shard_sizes == {0: sizes}
        assert torch.equal(x.grad.full_tensor(), expected)


@on_ranks(2)
def test_views_of_whole_tensors_with_other_strides():
    """Whole tensors whose memory does not lie as their strides say, as that of some gradients does."""
    mesh = shared_mesh(2)
    whole = data(2, 3, 4)
    for shape in ((24,), (6, 4), (2, 12), (4, 6), (2, 3, 2, 2), (2, 1, 12)):
        x = shard(whole, mesh, [Replicate()])
        odd = wrap(whole.permute(2, 0, 1).contiguous().permute(1, 2, 0), x._spec)
        view = odd.view(shape)
        assert torch.equal(view.to_local(), whole.view(shape))
        view.mul_(2)
        assert torch.equal(odd.to_local(), 2 * whole) and torch.equal(view.to_local(), 2 * whole.view(shape))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.permute(2, 0, 1).view(24)


@on_ranks(2)
def test_views_of_another_dtype():
    value = data(2, 6, 2)
    for placement, sizes in ((Shard(1), {0: (1, 5)}), (Shard(2), {0: (2, 0)}), (Partial(), None)):
        x = shard(value, shared_mesh(2), [placement], sizes)
        seen = x.view(torch.int64)
        numbers = x.full_tensor().view(torch.int64)  # of a Partial, the sum is rounded
        assert seen.shard_sizes == x.shard_sizes and torch.equal(seen.full_tensor(), numbers)
        assert torch.equal(torch.view_copy(x, dtype=torch.int64).full_tensor(), numbers)
        if sizes:
            seen.zero_()  # the same memory
            assert not x.full_tensor().any()


ERRORS = {
    "dtype": (lambda x: x.view(torch.int32), NotImplementedError, "float64 and torch.int32 have different sizes"),
    "entry": (lambda x: x[:, 6], IndexError, "index 6 is out of bounds for dimension 1 with size 6"),
    "select": (lambda x: x.select(1, -7), IndexError, "index -7 is out of bounds"),
    "dim": (lambda x: x.narrow(3, 0, 1), IndexError, "Dimension out of range"),
    "narrow": (lambda x: x.narrow(1, 4, 3), RuntimeError, "exceeds dimension size"),
    "step": (lambda x: x[:, ::-1], ValueError, "step must be greater than zero"),
    "too many": (lambda x: x[0, 0, 0, 0], IndexError, "too many indices"),
    "cat": (lambda x: torch.cat([x, x[:, :, 1:]], 1), RuntimeError, "Sizes of tensors must match"),
    "rolls": (lambda x: x.roll((1, 2), 0), RuntimeError, "shifts and dimensions must align"),
    "view": (lambda x: x.view(5, 5), RuntimeError, "invalid for input of size"),
    "rot90": (lambda x: torch.rot90(x, 1, (1, 1)), RuntimeError, "rotation dims to be different"),
    "tril": (lambda x: x[0, :, 0].tril(), RuntimeError, "at least 2 dimensions"),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 1)), NotImplementedError, "as_strided.default: no distributed"),
}


def operand():
    return shard(data(2, 6, 2), shared_mesh(2), [Shard(1)], {0: (1, 5)})


@pytest.mark.parametrize("name", ERRORS)
def test_errors_on_every_rank_before_anything_is_sent(name):
    raises_alike(operand, name)


# -- geometry, without processes ----------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(sum)


@given(SIZES, st.integers(0, 12), st.integers(0, 12), st.integers(1, 4))
def test_slices_stay_with_their_owners(sizes, start, stop, step):
    n = sum(sizes)
    taken = range(*slice(start, stop, step).indices(n))
    cut = boundary_of_slice(taken)
    pieces = [[i for i in taken if a <= i < b] for a, b in intervals_of(sizes)]
    cuts = [cut(c) for c in boundaries_of(sizes)]
    assert [b - a for a, b in zip(cuts, cuts[1:])] == [len(piece) for piece in pieces]


@given(SIZES, st.integers(0, 4), st.integers(1, 3), st.integers(0, 3))
def test_a_gradients_cut_gives_back_the_slices(sizes, start, step, rest):
    count = sum(sizes)
    taken = range(start, start + (count - 1) * step + 1, step)
    n = taken[-1] + 1 + rest
    found = sizes_before_slice(taken, n, sizes)
    assert sum(found) == n and min(found) >= 0
    cut = boundary_of_slice(taken)
    cuts = [cut(c) for c in boundaries_of(found)]
    assert [b - a for a, b in zip(cuts, cuts[1:])] == list(sizes)


@given(SIZES, st.data())
def test_joining_the_pieces_of_a_split_gives_its_cut(sizes, draw):
    n = sum(sizes)
    at = sorted(draw.draw(st.lists(st.integers(0, n), max_size=3)))
    pieces = []
    for a, b in zip([0, *at], [*at, n]):
        cuts = [max(a, min(b, c)) for c in boundaries_of(sizes)]
        pieces.append((b - a, tuple(y - x for x, y in zip(cuts, cuts[1:]))))
    assert joined_sizes(pieces, len(sizes)) == tuple(sizes)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 0, 1)], ids=str)
def test_many_rows_of_a_plain_tensor_are_spread_behind_few_of_a_shard(sizes):
    run_distributed(few_and_many, len(sizes), sizes)


def few_and_many(sizes):
    mesh, ranks = shared_mesh(len(sizes)), len(sizes)
    few, many = (torch.randn(2, n, 3, generator=seeded(n), dtype=torch.float64) for n in (sum(sizes), 12))
    x = shard(few, mesh, [Shard(1)], {0: sizes})
    for before, fn in ((0, lambda x: torch.cat([x, many], 1)), (1, lambda x: torch.cat([many, x], 1))):
        assert max(fn(x)._spec.sizes_along(0)) * ranks <= 1.5 * 16, (before, fn(x)._spec)
        options = {"mesh": mesh, "placements": [Shard(1)], "shard_sizes": {0: sizes}}
        assert_matches_unsharded(lambda x, fn=fn: fn(x).sin(), few, **options)
    border = torch.cat([many[:, :1], x, many[:, :1]], 1)  # as padding adds it
    assert border._spec.sizes_along(0) == (sizes[0] + 1, *sizes[1:-1], sizes[-1] + 1)


@given(SIZES, st.integers(0, 30))
def test_rolled_intervals_are_torchs(sizes, shift):
    n = sum(sizes)
    expected = torch.arange(n).roll(shift).tolist()
    found = [None] * n
    for a, b in intervals_of(sizes):
        stays, wraps = rolled((a, b), shift % n, n)
        places = [*range(*stays), *range(*wraps)]
        assert len(places) == b - a
        for i, place in zip(range(a, b), places):
            found[place] = i
    assert found == expected


@given(SIZES, st.integers(1, 5))
def test_whole_blocks_are_near(sizes, block):
    sizes = [*sizes[:-1], sizes[-1] + -sum(sizes) % block]
    found = whole_blocks(sizes, block)
    assert sum(found) == sum(sizes) and all(size >= 0 and size % block == 0 for size in found)
    assert all(abs(a - b) * 2 <= block for a, b in zip(boundaries_of(found), boundaries_of(sizes)))
