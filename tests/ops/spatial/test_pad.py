"""Padding on shards against padding on one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from alike import raises_alike
from halves import in_halves
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from seeded import seeded
from spatial_cases import check_cases, data
from torch import nn
from torch.distributed.tensor import Partial, Shard
from torch.nn.utils.rnn import pad_sequence

from shardtensor.layout.intervals import boundaries_of, intervals_of
from shardtensor.ops.spatial.pad import pad_reads, pad_sizes, pad_sources
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)


def cases():
    """All modes over awkward sizes, one-sided, wider than shards, and cropping."""
    result = []

    def add(label, fn, *shape, dims=None):
        result.append((label, fn, shape, dims or tuple(range(2, len(shape)))))

    pads = [(1, 1, 1, 1), (2, 0, 0, 3), (0, 0, 1, 2), (4, 3, 6, 5), (-1, 2, 3, -2), (-2, -1, 0, -3), (0, 3, -4, 0)]
    for mode in ("constant", "reflect", "replicate", "circular"):
        for pad in pads:
            add(f"{mode} {pad}", lambda x, mode=mode, pad=pad: F.pad(x, pad, mode=mode), 2, 3, 7, 6)
        for n in (1, 2, 5, 17, 33):
            for pad in ((1, 0), (0, 1), (n - 1, n - 1), (min(2, n - 1), -1) if n > 2 else (0, 0)):
                if mode != "reflect" or max(pad) < n:
                    add(f"{mode} {pad}", lambda x, mode=mode, pad=pad: F.pad(x, pad, mode=mode), 2, 3, n)
        pad = (1, 2, 3, 0, 2, 1)
        add(f"{mode} {pad}", lambda x, mode=mode, pad=pad: F.pad(x, pad, mode=mode), 1, 2, 5, 6, 4)
    add("value", lambda x: F.pad(x, (1, 2, 3, 4), value=2.5), 2, 3, 7, 6)
    add("batch and channels", lambda x: F.pad(x, (0, 1, 2, 0, 1, 1, 2, 3), value=1.0), 2, 3, 5, 6, dims=(0, 1, 2))
    add("crop batch", lambda x: F.pad(x, (0, 1, 2, 0, -1, 1, 2, -3)), 5, 3, 5, 6, dims=(0, 1, 2))
    add("far more than there is", lambda x: F.pad(x, (40, 30)), 1, 2, 3)
    add("replicate far", lambda x: F.pad(x, (40, 30), mode="replicate"), 1, 2, 3)
    add("once around", lambda x: F.pad(x, (5, 5), mode="circular"), 1, 2, 5)
    add("nothing", lambda x: F.pad(x, (0, 0, 0, 0)), 2, 3, 7, 6)
    add("unbatched", lambda x: F.pad(x, (1, 1, 2, 2), mode="reflect"), 3, 7, 6, dims=(1, 2))
    add("unbatched circular", lambda x: F.pad(x, (1, 1, 2, 2), mode="circular"), 3, 7, 6, dims=(1, 2))
    add("zero module", nn.ZeroPad2d((1, 2, 0, 3)), 2, 3, 7, 6)
    add("integers", lambda x: F.pad((x * 10).long(), (1, 2, 3, 4), value=7), 2, 3, 7, 6)
    return result


@pytest.mark.parametrize(("mesh_shape", "half"), [(1, None), (2, None), *in_halves([(3,), (4,), ((2, 2),)])], ids=str)
@on_ranks("mesh_shape", timeout=200)
def test_padding_matches_one_device(mesh_shape, half):
    check_cases(cases(), mesh_shape, half=half)


@pytest.mark.on_device
@on_ranks(2)
def test_convolutions_with_other_padding_modes():
    for mode in ("zeros", "circular", "reflect", "replicate"):
        conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode).double()
        sizes = {0: (5, 2)}
        assert_matches_unsharded(conv, data(2, 3, 7, 6), mesh_shape=2, placements=[Shard(2)], shard_sizes=sizes)


@on_ranks(3)
def test_only_circular_padding_travels_and_no_more_than_the_padding():
    mesh = shared_mesh(3)
    x = shard(data(1, 1, 12, 2), mesh, [Shard(2)], {0: (5, 4, 3)})
    with count_communication() as constant:
        y = F.pad(x, (0, 0, 1, 2))
    with count_communication() as circular:
        F.pad(x, (0, 0, 1, 2), mode="circular")
    with count_communication() as reflect:
        F.pad(x, (1, 1, 1, 2), mode="reflect")
    rank = dist.get_rank()
    sizes, *sent = y.shard_sizes, constant.bytes_sent, circular.bytes_sent, reflect.bytes_sent
    assert sizes == {0: (6, 4, 5)}
    # The first rank sends two rows to the last one, the last one a row to the first: rows of 2 doubles.
    assert sent == [0, {0: 32, 1: 0, 2: 16}[rank], 0]


@on_ranks(2)
def test_partial_sums_stay_so_where_padding_is_linear():
    mesh = shared_mesh(2)
    whole = data(1, 2, 5, dtype=torch.float64).round()
    x = shard(whole, mesh, [Partial()])
    zeros, ones = F.pad(x, (1, 2)), F.pad(x, (1, 2), value=1.0)
    assert torch.equal(zeros.full_tensor(), F.pad(whole, (1, 2)))
    assert torch.equal(ones.full_tensor(), F.pad(whole, (1, 2), value=1.0))
    assert (zeros.placements[0].is_partial(), ones.placements[0].is_partial()) == (True, False)


def operand():
    return shard(data(1, 1, 4, 4), shared_mesh(2), [Shard(2)], {0: (1, 3)})


ERRORS = {
    "reflect": (
        lambda x: F.pad(x, (0, 0, 4, 0), mode="reflect"),
        RuntimeError,
        "Padding size should be less than the corresponding",
    ),
    "circular": (lambda x: F.pad(x, (0, 0, 5, 0), mode="circular"), RuntimeError, "wrapping around more than once"),
    "crop": (lambda x: F.pad(x, (0, 0, -5, 0)), RuntimeError, "negative"),
    "odd": (lambda x: F.pad(x, (1, 1, 1)), RuntimeError, "divisible by 2|even"),
    "mode": (lambda x: F.pad(x, (1, 1), mode="sideways"), NotImplementedError, "sideways"),
    "crop and wrap": (
        lambda x: F.pad(x, (0, 0, -3, 2), mode="circular"),
        NotImplementedError,
        r"pad: padding \(-3, 2\) crops dim 2 and wraps .*S\(2\)\[1, 3\].*Remedy: crop first, then pad",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_torchs_own_on_every_rank(name):
    raises_alike(operand, name)


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(sum)


@given(SIZES, st.integers(-6, 6), st.integers(-6, 6))
def test_boundaries_stay_where_they_were_in_the_input(sizes, left, right):
    n = sum(sizes)
    new = n + left + right
    if new < 0:
        return
    cuts = boundaries_of(pad_sizes(sizes, left, right))
    assert cuts[0] == 0 and cuts[-1] == new and list(cuts) == sorted(cuts)
    for c, moved in zip(boundaries_of(sizes), cuts):
        if 0 < c < n:
            assert moved == min(max(c + ((left + right) // 2 if left > right >= 0 else left), 0), new)


class Causal(nn.Module):
    """Layers that see the past, as those of video autoencoders do along time."""

    def __init__(self, mode, kernel_size):
        super().__init__()
        self.mode, self.pad = mode, kernel_size - 1
        self.layers = nn.ModuleList(nn.Conv1d(2, 2, kernel_size) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(F.pad(x, (self.pad, 0), mode=self.mode))
        return x


def causal(mode, kernel_size, sizes):
    torch.manual_seed(0)
    x = torch.randn(1, 2, sum(sizes), dtype=torch.float64)
    network = Causal(mode, kernel_size).double()
    y = assert_matches_unsharded(
        network, x, placements=[Shard(2)], shard_sizes={0: sizes}, mesh_shape=len(sizes), rtol=1e-10
    )
    return y.shard_sizes[0]


@pytest.mark.parametrize("mode", ["constant", "replicate", "reflect"])
@pytest.mark.parametrize("kernel_size", [2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [(7, 5), (1, 6), (6, 0, 4), (1, 1, 10)])
def test_causal_layers_keep_their_sizes(mode, kernel_size, sizes):
    assert run_distributed(causal, len(sizes), mode, kernel_size, sizes) == [sizes] * len(sizes)


@given(st.integers(1, 9), st.data())
def test_sources_are_torchs(n, draw):
    left, right = draw.draw(st.integers(0, n)), draw.draw(st.integers(0, n))
    places = torch.arange(n, dtype=torch.float64)[None, None]
    padded = F.pad(places, (left, right), mode="circular")[0, 0].int().tolist()
    before, after = (list(range(*source)) for source in pad_sources(n, left, right))
    assert before + list(range(n)) + after == padded


@given(st.sampled_from(["constant", "reflect", "replicate"]), SIZES, st.data())
def test_ranks_give_kernels_what_they_read(mode, sizes, draw):
    n = sum(sizes)
    most = n - 1 if mode == "reflect" else n
    left, right = draw.draw(st.integers(0, most)), draw.draw(st.integers(0, most))
    places = torch.arange(1, n + 1, dtype=torch.float64)[None, None]
    padded = F.pad(places, (left, right), mode=mode)
    for start, stop in intervals_of(pad_sizes(sizes, left, right)):
        (a, b), around, drop = pad_reads(mode, n, (left, right), (start, stop))
        if stop > start:
            part = F.pad(places[..., a:b], around, mode=mode)
            assert torch.equal(part[..., drop : drop + stop - start], padded[..., start:stop])


# -- sequences ---------------------------------------------------------------------------------------------------------


def check_pad_sequence(sizes):
    mesh = shared_mesh(len(sizes))
    generator = seeded(0)
    n = sum(sizes)
    whole = [torch.randn(k, 3, dtype=torch.float64, generator=generator) for k in (n // 2, n, 0, n - 1)]
    for options in ({}, {"batch_first": True, "padding_value": 1.5}, {"padding_side": "left"}):
        for kinds in ((Shard(0),) * 4, (Shard(1), Shard(0), Shard(0), Shard(0)), (None, None, Shard(0), Shard(0))):
            sharded = [
                t.clone()
                if kind is None
                else shard(t, mesh, [kind], {0: sizes} if kind == Shard(0) and len(t) == n else None)
                for t, kind in zip(whole, kinds, strict=True)
            ]
            twins = [t.clone().requires_grad_() for t in whole]
            for t in sharded:
                t.requires_grad_()
            y = pad_sequence(sharded, **options)
            expected = pad_sequence(twins, **options)
            torch.testing.assert_close(y.full_tensor(), expected)
            y.square().sum().backward()
            expected.square().sum().backward()
            for t, twin in zip(sharded, twins, strict=True):
                torch.testing.assert_close(
                    t.grad.full_tensor() if hasattr(t.grad, "full_tensor") else t.grad, twin.grad
                )
    if n:
        y = pad_sequence([shard(t, mesh, [Shard(0)], {0: sizes} if len(t) == n else None) for t in whole])
        assert y.shard_sizes == {0: sizes}  # those of the longest, not of the first
    with count_communication() as counted:
        pad_sequence([shard(whole[1], mesh, [Shard(0)], {0: sizes})] * 2)
    assert not counted.messages and not counted.collectives


@pytest.mark.parametrize("sizes", [(7,), (5, 3), (0, 4, 3)])
def test_sequences_are_padded_as_on_one_device(sizes):
    run_distributed(check_pad_sequence, len(sizes), sizes)
