"""Fourier transforms along sharded and unsharded dims: values, gradients and what is sent."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_expecting_errors,
    shard,
    shared_mesh,
)

NAMES = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def data(name, *shape):
    dtype = torch.float64 if name.startswith(("rfft", "ihfft")) else torch.complex128
    return torch.randn(*shape, dtype=dtype)


def check(name, shape, at, sizes, mesh_shape, *args, **kwargs):
    placements = [Replicate() if d is None else Shard(d) for d in (at if isinstance(at, tuple) else (at,))]
    try:
        assert_matches_unsharded(
            lambda x: getattr(torch.fft, name)(x, *args, **kwargs),
            data(name, *shape),
            mesh_shape=mesh_shape,
            placements=placements,
            shard_sizes=sizes,
        )
    except AssertionError as error:
        raise AssertionError(f"{name} of {shape} cut at {at} in {sizes}, {args} {kwargs}") from error


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_one_dim(ranks):
    """A signal without any other dim on one rank, and one of one element."""
    for name in NAMES:
        for length in (None, 5, 20):
            if name not in ("irfft", "hfft") or length:
                check(name, (1,), 0, {0: (0, 1)[-ranks:]}, ranks, length, norm="ortho")
            if ranks == 1:
                check(name, (7,), 0, {0: (7,)}, 1, length)


def refused(name, shape, mesh_shape):
    x = shard(data(name, *shape), shared_mesh(mesh_shape), [Shard(d) for d in range(len(shape))])
    function = getattr(torch.fft, name)
    with shardtensor.allow_gather():
        torch.testing.assert_close(function(x).full_tensor(), function(x.full_tensor()))
    with count_communication() as counted:
        try:
            function(x)
        finally:
            assert not counted.bytes_sent


@pytest.mark.parametrize(("name", "shape", "mesh_shape"), [("fft", (17,), (2,)), ("irfftn", (7, 6), (2, 2))])
def test_without_another_dim_it_is_refused(name, shape, mesh_shape):
    for error in run_expecting_errors(refused, 2 ** len(shape), name, shape, mesh_shape):
        assert isinstance(error, UnsupportedSharding)
        assert f"fft_{name}: tensor dim 0 must be unsharded, but mesh dim 0 shards it, and no free" in str(error)
        assert f"ShardTensor{shape} complex128 on mesh {mesh_shape}" in str(error)
        assert "Remedy: redistribute it to Replicate() on mesh dim 0 if it is small" in str(error)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_many_dims(ranks):
    even = {2: (5, 2), 3: (3, 1, 3)}[ranks]
    for name in NAMES if ranks == 2 else ("fft", "irfft"):
        # Along the sharded dim, along others, along both; an empty shard.
        check(name, (7, 6), 0, {0: even}, ranks, dim=0)
        check(name, (7, 6), 0, {0: even}, ranks, dim=1)
        check(name, (7, 6), 0, {0: (0,) * (ranks - 1) + (7,)}, ranks)
        check(name, (7, 6), 0, {0: (7,) + (0,) * (ranks - 1)}, ranks, 9, 0, "ortho")
        check(name + "2", (3, 7, 6), 1, {0: even}, ranks)
        check(name + "2", (7, 6), 0, {0: even}, ranks, (5, 8))
        check(name + "n", (6, 7, 2), 1, {0: even}, ranks, norm="forward")
        check(name + "n", (7, 6, 5), 0, {0: even}, ranks, (4, 6), (1, 0))


@on_ranks(4)
def test_a_mesh_of_two_dims():
    for name in ("fftn", "rfftn", "irfftn"):
        check(name, (7, 6, 4), (0, 1), {0: (5, 2), 1: (1, 5)}, (2, 2), dim=(0, 1))


@pytest.mark.slow
@on_ranks(6)
def test_the_dim_on_fewer_ranks_goes_first():
    """Two images: their rows, on three ranks, find no other dim before their columns are free."""
    for name in ("fft2", "rfft2", "ifft2"):
        check(name, (2, 7, 6), (1, 2), {0: (5, 2, 0), 1: (1, 5)}, (3, 2))


# -- several dims: the result is sharded along another of them ---------------------------------------------------------


def layouts(result):
    return {m: (result.placements[m].dim, sizes) for m, sizes in result.shard_sizes.items()}


def transformed(name, shape, at, sizes, mesh_shape, *args, **kwargs):
    """The layout of the result, and how many collectives it took."""
    placements = [Shard(d) for d in (at if isinstance(at, tuple) else (at,))]
    x = shard(data(name, *shape), shared_mesh(mesh_shape), placements, sizes)
    with count_communication() as counted:
        y = getattr(torch.fft, name)(x, *args, **kwargs)
    return layouts(y), sum(counted.collectives.values())


@on_ranks(2)
def test_where_a_transform_of_several_dims_ends():
    for name, shape, at, sizes, expected in (
        # The next dim, and the one before.
        ("fft2", (3, 8, 6), 1, (4, 4), (2, (3, 3), 1)),
        ("ifft2", (3, 8, 6), 2, (3, 3), (1, (4, 4), 1)),
        ("fftn", (4, 5, 6), 0, (2, 2), (1, (3, 2), 1)),
        ("ifftn", (4, 5, 6), 1, (3, 2), (0, (2, 2), 1)),
        ("fftn", (4, 5, 6), 2, (3, 3), (0, (2, 2), 1)),
        ("ifftn", (4, 5, 6), 0, (2, 2), (2, (3, 3), 1)),
        # Uneven shards in proportion, to the nearest; empty ones.
        ("fft2", (3, 7, 8), 1, (5, 2), (2, (6, 2), 1)),
        ("ifft2", (3, 7, 8), 2, (6, 2), (1, (5, 2), 1)),
        ("fft2", (3, 7, 8), 1, (0, 7), (2, (0, 8), 1)),
        # Halves of real sequences: the last dim comes first, or last.
        ("rfft2", (3, 8, 6), 1, (4, 4), (2, (2, 2), 1)),
        ("irfft2", (3, 8, 4), 2, (2, 2), (1, (4, 4), 1)),
        ("rfft2", (3, 8, 6), 2, (3, 3), (2, (2, 2), 2)),
        ("irfft2", (3, 8, 4), 1, (4, 4), (1, (4, 4), 2)),
        ("hfft2", (3, 8, 4), 2, (2, 2), (1, (4, 4), 1)),
        ("ihfft2", (3, 8, 6), 1, (4, 4), (2, (2, 2), 1)),
        ("rfftn", (4, 5, 6), 2, (3, 3), (1, (3, 2), 2)),
        # No other dim that is long enough: to a free one and back.
        ("fft2", (3, 8, 1), 1, (4, 4), (1, (4, 4), 2)),
        ("fft", (3, 8, 6), 2, (3, 3), (2, (3, 3), 2)),
    ):
        (dim, ends, sent) = expected
        assert transformed(name, shape, at, {0: sizes}, 2) == ({0: (dim, ends)}, sent), (name, shape, at, sizes)
    assert transformed("rfft2", (3, 8, 6), 1, {0: (4, 4)}, 2, (8, 9), norm="ortho") == ({0: (2, (3, 2))}, 1)
    assert transformed("fftn", (5, 6, 7), 2, {0: (4, 3)}, 2, dim=(2, 0)) == ({0: (0, (3, 2))}, 1)


@on_ranks(4)
def test_where_it_ends_on_a_mesh_of_two_dims():
    for name, at, ends, sent in (
        ("fftn", (0, 1), (1, 2), 2),
        ("ifftn", (1, 2), (0, 1), 2),
        ("rfftn", (0, 1), (1, 2), 2),
        ("irfftn", (1, 2), (0, 1), 2),
        ("fft2", (1, 2), (2, 1), 3),  # no dim of the two is free: one goes to the first dim meanwhile
        ("ifft2", (2, 1), (1, 2), 3),
        ("irfft2", (2, 1), (1, 2), 3),
    ):
        found, collectives = transformed(name, (4, 6, 10), at, None, (2, 2))
        assert (tuple(found[m][0] for m in (0, 1)), collectives) == (ends, sent), name


def there_and_back(there, back, dims, x):
    return back(there(x, dim=dims).square(), [x.shape[d] for d in dims], dim=dims)


ON_TWO = [((5, 7, 6), 1, {0: (5, 2)}), ((2, 3, 17), 2, {0: (17, 0)}), ((2, 2, 5), 1, {0: (1, 1)})]
ON_THREE = [((5, 7, 6), 0, {0: (2, 0, 3)}), ((4, 2, 5), 1, {0: (1, 0, 1)})]
ON_FOUR = [((4, 7, 6), (0, 1), {0: (3, 1), 1: (2, 5)}), ((3, 4, 5), (2, 1), {0: (5, 0), 1: (2, 2)})]


@pytest.mark.parametrize(
    ("ranks", "mesh_shape", "given"),
    [(2, 2, ON_TWO), pytest.param(3, 3, ON_THREE, marks=pytest.mark.slow), (4, (2, 2), ON_FOUR)],
)
@on_ranks("ranks")
def test_several_dims(ranks, mesh_shape, given):
    """Values and gradients, of pairs as well, whose second transform gets what the first one made."""
    for shape, at, sizes in given:
        for forward, inverse in (("fft", "ifft"), ("rfft", "irfft"), ("ihfft", "hfft"), ("ifft", "fft")):
            for suffix, dims in (("2", (-2, -1)), ("n", tuple(range(len(shape)))), ("n", (1, 0))):
                check(forward + suffix, shape, at, sizes, mesh_shape, dim=dims)
                check(inverse + suffix, shape, at, sizes, mesh_shape, norm="ortho", dim=dims)
                check(inverse + suffix, shape, at, sizes, mesh_shape, [5] * len(dims), dims, "forward")
                there, back = getattr(torch.fft, forward + suffix), getattr(torch.fft, inverse + suffix)
                pair = partial(there_and_back, there, back, dims)
                try:
                    assert_matches_unsharded(
                        pair,
                        data(forward, *shape),
                        mesh_shape=mesh_shape,
                        placements=[Shard(d) for d in (at if isinstance(at, tuple) else (at,))],
                        shard_sizes=sizes,
                    )
                except AssertionError as error:
                    raise AssertionError(f"{inverse} of {forward} of {shape} cut at {at} in {sizes}, {dims}") from error


def filtered(x, weight, modes):
    """A spectral convolution as networks write it."""
    found = torch.fft.rfft2(x)
    lowest = torch.cat([found[:, :, :modes, :modes], found[:, :, -modes:, :modes]], 2)
    product = torch.einsum("bixy,ioxy->boxy", lowest, torch.view_as_complex(weight))
    result = torch.zeros_like(found)
    result[:, :, :modes, :modes] = product[:, :, :modes]
    result[:, :, -modes:, :modes] = product[:, :, modes:]
    return torch.fft.irfft2(result, s=x.shape[-2:])


@on_ranks(2)
def test_a_spectral_convolution():
    for shape, sizes in (((2, 3, 12, 10), (6, 6)), ((1, 3, 13, 7), (9, 4)), ((1, 3, 9, 8), (0, 9))):
        x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(3, 3, 6, 3, 2, dtype=torch.float64)
        assert_matches_unsharded(
            lambda x, w: filtered(x, w, 3) + x,
            x,
            weight,
            mesh_shape=2,
            placements=[[Shard(2)], None],
            shard_sizes=[{0: sizes}, None],
        )


@on_ranks(2)
def test_messages_of_spectral_layers():
    """One all-to-all for each transform, each way: of the half that is another rank's. And one more for a filter that
    lies along rows, like the input.
    """
    mesh, counts = shared_mesh(2), []
    x = shard(torch.randn(1, 3, 8, 12), mesh, [Shard(2)], requires_grad=True)
    weight, plain = torch.randn(3, 3, 4, 2, 2), torch.rand(8, 7)
    sharded = shard(plain, mesh, [Shard(0)])
    for layer in (
        lambda: filtered(x, weight, 2) + x,
        lambda: torch.fft.irfft2(torch.fft.rfft2(x) * plain, s=(8, 12)) + x,
        lambda: torch.fft.irfft2(torch.fft.rfft2(x) * sharded, s=(8, 12)),
        lambda: torch.fft.fft2(x).abs() - torch.fft.fft2(x.detach()).abs(),
    ):
        with count_communication() as forward:
            y = layer()
        with count_communication() as backward:
            y.backward(torch.ones_like(y.detach()))
        counts.append([(sum(c.collectives.values()), c.bytes_sent) for c in (forward, backward)])
    rank = dist.get_rank()
    there = 3 * 4 * (3, 4)[rank] * 8  # columns (4, 3) of 7, for each of a rank's 4 rows
    back = 3 * 4 * (4, 3)[rank] * 8
    assert counts[0] == counts[1] == [(2, there + back)] * 2
    assert counts[2][0] == (3, there + back + 4 * (3, 4)[rank] * 4) and counts[2][1][0] == 3
    assert counts[3][0][0] == 2 and counts[3][1][0] == 1


@on_ranks(2)
def test_second_derivatives():
    for name, at in (("rfft2", 1), ("fftn", 0), ("irfft2", 2), ("hfftn", 1), ("ihfft2", 2)):
        value, found = data(name, 4, 5, 6), []
        for x in (value.clone().requires_grad_(), shard(value, shared_mesh(2), [Shard(at)], requires_grad=True)):
            y = getattr(torch.fft, name)(x)
            (first,) = torch.autograd.grad((y * y.conj()).real.square().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((first * first.conj()).real.sum(), x)
            found.append(second if x is not value and not hasattr(second, "full_tensor") else second.full_tensor())
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10 * float(found[0].abs().max()))


@on_ranks(2)
def test_autocast():
    """Of real numbers in bfloat16, which the CPU's autocast has transformed in float32."""
    x = shard(torch.randn(2, 8, 6).bfloat16(), shared_mesh(2), [Shard(1)], requires_grad=True)
    plain = x.full_tensor().detach().requires_grad_()
    with torch.autocast(plain.device.type, torch.bfloat16):
        if plain.device.type != "cpu":  # autocast leaves them as they are, and cuFFT has no bfloat16
            for value in (x, plain):
                with pytest.raises(RuntimeError, match="BFloat16"):
                    torch.fft.rfft2(value)
            return
        found, expected = torch.fft.rfft2(x), torch.fft.rfft2(plain)
    assert found.dtype == expected.dtype == torch.complex64
    torch.testing.assert_close(found.full_tensor(), expected)
    for y in (found, expected):
        y.abs().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@on_ranks(2)
def test_compiled():
    x = shard(torch.randn(2, 8, 6, dtype=torch.float64), shared_mesh(2), [Shard(1)], requires_grad=True)

    def pair(x):
        return torch.fft.irfft2(torch.fft.rfft2(x) * 2.0, s=(8, 6)) + x

    results = []
    for function in (pair, torch.compile(pair, backend="aot_eager", fullgraph=True)):
        y = function(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y.to_local(), grad.to_local()))
    for compiled, eager in zip(*reversed(results), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


# -- what is sent ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_sent():
    mesh = shared_mesh(2)
    found = []
    for shape, dim in (((6, 4), 1), ((6, 4), 0)):
        x = shard(data("fft", *shape), mesh, [Shard(0)], {0: (4, 2)}, requires_grad=True)
        with count_communication() as forward:
            y = torch.fft.fft(x, dim=dim)
        assert y.shard_sizes == {0: (4, 2)}
        cotangent = torch.ones_like(y.detach())
        with count_communication() as backward:
            y.backward(cotangent)
        found.append((forward.bytes_sent, backward.bytes_sent, forward.collective_bytes + backward.collective_bytes))
    number = 16
    rank = dist.get_rank()
    across, along = found
    assert across == (0, 0, 0)
    # Half of what a rank has, there; and back, half of what it then has.
    there, back = (4, 2)[rank] * 2 * number, (2, 4)[rank] * 2 * number
    assert along == (there + back, there + back, 0)
