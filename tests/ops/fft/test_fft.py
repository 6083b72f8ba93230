"""Fourier transforms along sharded and unsharded dims: values, gradients and what is sent."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardtensor.ops import fft
from shardtensor.testing import assert_matches_unsharded, count_communication, run_distributed, shard, shared_mesh

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


def check_one_dim():
    """A signal without any other dim: the shards go round."""
    for name in NAMES:
        for n, sizes in ((17, (12, 5)), (8, (0, 8)), (2, (1, 1))):
            for length in (None, 5, 20):
                check(name, (n,), 0, {0: sizes}, 2, length, norm={5: "ortho", 20: "forward"}.get(length))


def test_one_dim():
    run_distributed(check_one_dim, 2)


def check_many_dims(ranks):
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_dims(ranks):
    run_distributed(check_many_dims, ranks, ranks)


def check_shifts():
    for name in ("fftshift", "ifftshift"):
        check(name, (7, 6), 0, {0: (5, 2)}, 2)
        check(name, (7, 6), 1, {0: (0, 6)}, 2, (1,))


def test_shifts():
    run_distributed(check_shifts, 2)


def check_two_mesh_dims():
    for name in ("fftn", "rfftn", "irfftn"):
        check(name, (7, 6), (0, 1), {0: (5, 2), 1: (1, 5)}, (2, 2))  # no free dim: both shards go round
        check(name, (7, 6, 4), (0, 1), {0: (5, 2), 1: (1, 5)}, (2, 2), dim=(0, 1))


def test_a_mesh_of_two_dims():
    run_distributed(check_two_mesh_dims, 4)


def communication():
    mesh = shared_mesh(2)
    found = []
    for shape, dim in (((6, 4), 1), ((6, 4), 0), ((6,), 0)):
        x = shard(data("fft", *shape), mesh, [Shard(0)], {0: (4, 2)}, requires_grad=True)
        with count_communication() as forward:
            y = torch.fft.fft(x, dim=dim)
        assert y.shard_sizes == {0: (4, 2)}
        cotangent = torch.ones_like(y.detach())
        with count_communication() as backward:
            y.backward(cotangent)
        found.append((forward.bytes_sent, backward.bytes_sent, forward.collective_bytes + backward.collective_bytes))
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_the_ring_transforms_half_precision_in_float32():
    """Kernels of GPUs for it, which the CPU does not have, take powers of two only: each rank's have other lengths."""
    signal = torch.randn(5, dtype=torch.complex64)
    for given in (signal.to(torch.complex32), signal.real.half(), signal.real.bfloat16()):
        sums = fft._chirp(given, 2, (3, 9), -1, 11)
        j, k = torch.arange(2, 7), torch.arange(3, 9)
        expected = torch.exp(-2j * torch.pi * j * k[:, None] / 11) @ given.to(torch.complex64)
        torch.testing.assert_close(sums, expected, atol=1e-5, rtol=1e-5)


def test_what_is_sent():
    number = 16
    for rank, (across, along, signal) in enumerate(run_distributed(communication, 2)):
        assert across == (0, 0, 0)
        # Half of what a rank has, there; and back, half of what it then has.
        there, back = (4, 2)[rank] * 2 * number, (2, 4)[rank] * 2 * number
        assert along == (there + back, there + back, 0)
        # The own shard to the other rank; backward again, and the other's gradient home.
        assert signal == ((4, 2)[rank] * number, 6 * number, 0)
