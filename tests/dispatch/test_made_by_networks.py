"""Networks that write sharded values into tensors which they make themselves."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from spatial_cases import data
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_expecting_errors,
    shard,
    shared_mesh,
)


class SpectralConvolution(nn.Module):
    """The low modes, at both ends of the first dim, are multiplied by weights and written into zeros."""

    def __init__(self, channels, modes=(3, 3)):
        super().__init__()
        self.modes = modes
        shape = (2, channels, channels, *modes)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.complex128))

    def forward(self, x):
        b, c, h, w = x.shape
        m, n = self.modes
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.cfloat).to(spectrum.dtype)
        out[:, :, :m, :n] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :n], self.weight[0])
        out[:, :, -m:, :n] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :n], self.weight[1])
        return torch.fft.irfft2(out, s=(h, w))


class AdaptiveFourier(nn.Module):
    """Blocks of channels are mixed for the modes that are kept, real and imaginary parts in zeros of their own."""

    def __init__(self, channels, blocks=2, kept=3):
        super().__init__()
        size = channels // blocks
        self.blocks, self.size, self.kept = blocks, size, kept
        self.weight = nn.Parameter(torch.randn(2, blocks, size, size, dtype=torch.float64))

    def forward(self, x):
        b, h, w, c = x.shape
        f = torch.fft.rfft2(x, dim=(1, 2), norm="ortho").reshape(b, h, w // 2 + 1, self.blocks, self.size)
        real = torch.zeros([b, h, w // 2 + 1, self.blocks, self.size], device=x.device, dtype=x.dtype)
        imag = torch.zeros(real.shape, device=x.device, dtype=x.dtype)
        k = slice(0, self.kept)

        def mixed(y, i):
            return torch.einsum("...bi,bio->...bo", y, self.weight[i])

        real[:, :, k] = F.relu(mixed(f[:, :, k].real, 0) - mixed(f[:, :, k].imag, 1))
        imag[:, :, k] = F.relu(mixed(f[:, :, k].imag, 0) + mixed(f[:, :, k].real, 1))
        y = F.softshrink(torch.stack([real, imag], dim=-1), lambd=0.01)
        y = torch.view_as_complex(y.contiguous()).reshape(b, h, w // 2 + 1, c)
        return torch.fft.irfft2(y, s=(h, w), dim=(1, 2), norm="ortho") + x


class Tokens(nn.Module):
    """Masks, positions, tokens put in another order, padding, and sums by index."""

    def forward(self, x):
        b, n, c = x.shape
        mask = torch.zeros(b, n, dtype=torch.bool)
        mask[:, 1::2] = True
        mask[x[..., 0] > 0.5] = False
        positions = torch.arange(n, dtype=x.dtype) / torch.ones(n, dtype=x.dtype)
        y = (x + torch.sin(positions)[:, None]).masked_fill(mask[..., None], 0.0)
        order = torch.arange(n).flip(0)
        shuffled = torch.empty(b, n, c, dtype=x.dtype)
        shuffled[:, order] = y
        padded = torch.full((b, n + 3, c), -1.0, dtype=x.dtype)
        padded[:, 2 : n + 2] = shuffled
        padded[:, 0] = padded[:, 0] + y.mean(1)
        groups = torch.zeros(b, 4, c, dtype=x.dtype).index_add_(1, torch.arange(n) % 4, y)
        return padded, groups, mask.sum()


class Layers(nn.Module):
    """What layers make of a tensor, and functions that are Python code of torch's, is open, too."""

    def __init__(self, channels):
        super().__init__()
        self.linear, self.conv = nn.Linear(channels, channels), nn.Conv1d(channels, channels, 3, padding=1)

    def forward(self, x):
        b, n, c = x.shape
        places = torch.linspace(0, 1, n, dtype=x.dtype)[:, None].expand(b, n, c).contiguous()
        features = self.linear(places)
        features.mul_(x)
        windows = self.conv(places.transpose(1, 2))
        windows.add_(x.transpose(1, 2))
        scaled = F.layer_norm(places, (c,))
        scaled.mul_(x)
        return features, windows, scaled


class Sparse(nn.Module):
    """Products of a sparse matrix, which are written into zeros; one of what is replicated."""

    def forward(self, x):
        b, n, c = x.shape
        matrix = torch.eye(n, dtype=x.dtype).tril(-1).add(1)
        matrix = (matrix.full_tensor() if hasattr(matrix, "full_tensor") else matrix).to_sparse()
        out = torch.zeros(b, n, c, dtype=x.dtype)
        for i in range(b):
            out[i] = torch.mm(matrix, x[i])
        return out, torch.mm(matrix, torch.ones(n, 2, dtype=x.dtype)) + x[0, :, :2]


def views(x):
    """Written to through one of several views, which are read before and after."""
    b, c, n = x.shape
    out = torch.zeros(2, b, n, c + 1, dtype=x.dtype)
    rest, all_of_it = out[1], out.detach()
    before = rest.sum()
    channels = out.transpose(2, 3)[:, :, :c]
    channels[0].add_(x)
    channels[1].copy_(2 * x).mul_(0.5)
    last = out[..., -1]
    last[0, :] = x[:, 0]
    return before, rest, out * 3, channels.sum(1), last, all_of_it * 1


def rolled(x):
    """The layout is open until the first value that is sharded, whatever is written before."""
    out = torch.ones(x.shape[0], x.shape[1], x.shape[2] + 2, dtype=x.dtype).clone()
    out[..., 0] = 3
    out[..., -1] = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
    out *= 2
    out[..., 1:-1] = x
    return out


def filled(x):
    """A tensor made of a number."""
    out = torch.as_tensor(0.5, dtype=x.dtype).repeat(x.shape[0], x.shape[1] + 2, *x.shape[2:])
    out[:, torch.tensor([3, 0, 5, 1])] = x.exp()
    return out


def chosen(x, whole):
    """Whole tensors, written at places that the network makes."""
    table = whole * 2
    table[torch.arange(3)] = whole[:3].exp()
    table.index_add_(0, torch.arange(2), whole[2:4])
    return x * table.t()


@pytest.mark.not_emulated("one of them has a sparse matrix, which that device has no products for")
@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks", timeout=300)
def test_networks_that_make_tensors(ranks):
    torch.manual_seed(0)
    image, tokens = data(2, 4, 9, 8), data(2, 7, 3)
    cuts = {2: ({0: (4, 5)}, {0: (0, 7)}), 3: ({0: (2, 0, 7)}, {0: (3, 0, 4)})}[ranks]
    for network, x, dim, sizes in (
        (SpectralConvolution(4), image, 2, cuts[0]),
        (SpectralConvolution(4), image, 3, None),
        (AdaptiveFourier(4), image.permute(0, 2, 3, 1).contiguous(), 1, cuts[0]),
        (Tokens(), tokens, 1, cuts[1]),
        (Layers(3).double(), tokens, 1, cuts[1]),
        (Sparse(), tokens, 1, cuts[1]),
    ):
        assert_matches_unsharded(network, x, mesh_shape=ranks, placements=[Shard(dim)], shard_sizes=sizes)
    # (Of the channels, ``last`` would be one entry of a sharded dim, which is a copy.)
    for function, dim in ((views, 2), (rolled, 1), (rolled, 2), (filled, 2)):
        assert_matches_unsharded(function, data(2, 4, 7), mesh_shape=ranks, placements=[Shard(dim)])
    assert_matches_unsharded(chosen, data(2, 4, 7), data(7, 4), mesh_shape=ranks, placements=[[Shard(2)], None])


@on_ranks(2)
def test_the_first_value_decides_the_layout_and_nothing_is_gathered():
    x = shard(data(2, 3, 8), shared_mesh(2), [Shard(2)], {0: (5, 3)})
    found = {}

    def noted(label, out):
        found[label] = out.placements, out.shard_sizes

    with count_communication() as traffic:
        out = torch.zeros(2, 3, 8)
        out[:] = x
        noted("same sizes", out)
        out = torch.zeros(2, 3, 20)
        out[..., 4:12] = x
        noted("a part", out)
        out = torch.zeros(2, 3, 20)
        out[..., 1:17:2] = x
        noted("every second one", out)
        out = torch.zeros(3, 8, 2).permute(2, 0, 1)
        out[0] = x[1]
        noted("transposed", out)
        rows = torch.zeros(8, 3).index_add_(0, torch.arange(8) % 3, x[0].t().float())
    assert type(rows) is torch.Tensor  # every rank has all of them
    collectives = dict(traffic.collectives)
    assert found == {
        "same sizes": ((Shard(2),), {0: (5, 3)}),
        "a part": ((Shard(2),), {0: (9, 11)}),
        "every second one": ((Shard(2),), {0: (11, 9)}),
        "transposed": ((Shard(2),), {0: (5, 3)}),
    }
    assert collectives == {"all_reduce": 1}


@on_ranks(4)
def test_a_value_that_is_sharded_on_two_mesh_dims_decides_both():
    mesh = shared_mesh((2, 2))
    whole, labels = data(2, 8, 7), (data(2, 1, 8, 7) > 0).long()
    x = shard(whole, mesh, [Shard(1), Shard(2)], {0: (5, 3), 1: (1, 6)})
    classes = shard(labels, mesh, [Shard(2), Shard(3)], {0: (5, 3), 1: (1, 6)})
    with count_communication() as traffic:
        out = torch.zeros(2, 3, 9, 7, dtype=torch.float64)
        out[:, 1, :8] = x
        one_hot = torch.zeros(2, 2, 8, 7).scatter_(1, classes, 1.0)
    assert out.shard_sizes == {0: (5, 4), 1: (1, 6)} and one_hot.shard_sizes == {0: (5, 3), 1: (1, 6)}
    assert not traffic.messages and not traffic.collectives
    expected = torch.zeros(2, 3, 9, 7, dtype=torch.float64)
    expected[:, 1, :8] = whole
    assert torch.equal(out.full_tensor(), expected)
    assert torch.equal(one_hot.full_tensor(), torch.zeros(2, 2, 8, 7).scatter_(1, labels, 1.0))


@on_ranks(2)
def test_activation_checkpointing_recomputes_them():
    torch.manual_seed(0)
    layer = SpectralConvolution(4)
    x = shard(data(2, 4, 9, 8), shared_mesh(2), [Shard(2)], {0: (4, 5)}, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    expected = layer.weight.grad.clone(), x.grad.full_tensor()
    layer.weight.grad = x.grad = None
    layer(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected[0])
    torch.testing.assert_close(x.grad.full_tensor(), expected[1])


@on_ranks(2)
def test_all_views_see_what_is_written_to_one():
    whole = data(2, 3, 8)
    x = shard(whole, shared_mesh(2), [Shard(2)], {0: (5, 3)})
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = torch.zeros(3, 8, 2, dtype=x.dtype)
            even, odd = out.unbind(2)
            kept, rows = out.detach(), [out[:2], out[2:]]
            rows.append(rows)  # a cycle
            del rows
            even.copy_(x[0])
            odd.copy_(x[1]).mul_(2)
            expected = torch.stack([whole[0], 2 * whole[1]], 2)
            assert even.shard_sizes == odd.shard_sizes == {0: (5, 3)} and out.shard_sizes == {0: (5, 3)}
            assert torch.equal(out.full_tensor(), expected) and torch.equal(kept.full_tensor(), expected)
    leaf = shard(whole, x.device_mesh, [Shard(2)], {0: (5, 3)}, requires_grad=True)
    out = torch.zeros(2, 3, 8, dtype=x.dtype)
    kept = out.detach()
    out.mul_(leaf).add_(leaf)
    assert torch.equal(kept.full_tensor(), whole) and out.requires_grad and not kept.requires_grad


def shared(case):
    """A plain tensor to write to, and what else has its memory."""
    whole = torch.zeros(2, 3, 8, dtype=torch.float64)
    match case:
        case "an array":
            array = np.zeros((2, 3, 8))
            return torch.from_numpy(array), array
        case "a parameter":
            return (weight := nn.Parameter(whole)).data, weight
        case "a leaf":
            return whole.requires_grad_(), None
        case "a diagonal":
            return (larger := torch.zeros(2, 3, 8, 9, dtype=whole.dtype)).diagonal(0, 2, 3), larger
        case "another shape":
            return (flat := whole.view(2, 24)).view(2, 3, 8), flat
        case "a graph":
            return whole, torch.ones(8, dtype=torch.float64, requires_grad=True) * whole
        case "a detached view":
            return whole, whole.detach()[1:]


def written_to_shared(case):
    x = shard(data(2, 3, 8), shared_mesh(2), [Shard(2)], {0: (5, 3)})
    target, other = shared(case)
    with count_communication() as traffic, torch.no_grad():
        for remedy in (torch.zeros_like(x), x.new_zeros(2, 3, 8)):
            assert remedy.copy_(x).shard_sizes == {0: (5, 3)} and type(target) is not ShardTensor
        larger = x.new_zeros(4, 3, 8)
        first, last = larger[:2], larger[2:]
        first.copy_(x), last.add_(x * 2)
        assert larger.shard_sizes == first.shard_sizes == last.shard_sizes == {0: (5, 3)}
        try:
            target.copy_(x)
        finally:
            assert not traffic.collectives and other is not x


SHARED = ("an array", "a parameter", "a leaf", "a diagonal", "another shape", "a graph", "a detached view")


@pytest.mark.parametrize("case", SHARED)
def test_memory_that_others_have_is_refused(case):
    for error in run_expecting_errors(written_to_shared, 2, case):
        assert isinstance(error, UnsupportedSharding)
        assert re.search(r"a plain tensor inside.*Remedy: .*x\.new_zeros.*in the shape in which", str(error))
