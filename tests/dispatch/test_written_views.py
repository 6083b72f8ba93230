"""In-place writes through views of a ShardTensor, some of which shards can only copy: right, or refused, never ignored.

Each program writes to views of its argument and returns something that depends on it; what it returns and the argument
itself are those of one device, or the program is refused.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.testing import run_distributed, shard, shared_mesh


def along(d, index):
    return (*[slice(None)] * d, index)


def chunk(x, d):
    a, b = x.chunk(2, d)
    a.mul_(2)
    return x


def chunk_swap(x, d):
    a, b = x.chunk(2, d)
    a.add_(b)
    b.sub_(a)
    return x


def chunk_read(x, d):
    a, b = x.chunk(2, d)
    a.mul_(2)
    b.add_(1)
    return torch.cat([a, b], d) + x


def chunk_set(x, d):
    a, b = x.chunk(2, d)
    a[:] = b
    return x


def swap_copy(x, d):
    a, b = x.chunk(2, d)
    a.copy_(b)
    return x


def even(x, d):
    i = along(d, slice(0, None, 2))
    x[i] += x[i].flip(d)
    return x


def even_odd(x, d):
    i = along(d, slice(0, None, 2))
    j = along(d, slice(1, None, 2))
    x[i] -= x[j]
    x[j] *= 3
    return x


def even_named(x, d):
    i = along(d, slice(0, None, 2))
    v = x[i]
    v.mul_(2)
    v += 1
    return x


def shifted(x, d):
    x.narrow(d, 1, x.shape[d] - 1).add_(x.narrow(d, 0, x.shape[d] - 1).clone())
    return x


def overlap(x, d):
    x.narrow(d, 0, 4).copy_(x.narrow(d, 4, 4))
    return x


def complex_view(x, d):
    c = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    c.mul_(1j)
    return x


def complex_unflattened(x, d):
    c = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    c += 1
    return x


def real_view(x, d):
    c = torch.complex(x, x * 2)
    r = torch.view_as_real(c)
    r[..., 0].mul_(3)
    return c.abs() + r.sum(-1)


def real_parts(x, d):
    c = torch.complex(x, x * 2)
    c.real.mul_(3)
    c.imag[..., ::2] += 1
    return torch.view_as_real(c)


def flat_view(x, d):
    x.view(-1)[::3].mul_(2)
    return x


def flattened(x, d):
    v = x.flatten()
    v.mul_(2)
    return x


def transposed(x, d):
    x.transpose(0, d).mul_(torch.arange(x.numel(), dtype=x.dtype).view(x.transpose(0, d).shape))
    return x


def unflattened(x, d):
    v = x.unflatten(d, (2, -1))
    v.select(d, 0).mul_(5)
    return x


def unflattened_whole(x, d):
    v = x.unflatten(d, (2, -1))
    v.mul_(5)
    return x


def unflattened_transposed(x, d):
    v = x.unflatten(d, (2, -1))
    w = v.transpose(d, d + 1)
    w[..., :1].zero_()
    return x


def unflattened_unbound(x, d):
    v = x.unflatten(d, (-1, 2))
    a, b = v.unbind(d + 1)
    a.mul_(3)
    return x


def unflattened_chunked(x, d):
    v = x.unflatten(d, (-1, 2))
    a, b = v.chunk(2, d + 1)
    a.mul_(3)
    b += a
    return x


def unbound(x, d):
    a = x.unbind(d)[1]
    a.mul_(2)
    return x


def selected(x, d):
    x.select(d, 1).mul_(2)
    return x


def selected2(x, d):
    v = x.select(d, 1)
    v[..., :1].mul_(2)
    return x


def selected3(x, d):
    v = x.select(d, 1)
    torch.exp_(v)
    return x


def selected4(x, d):
    v = x.select(d, 1)
    v.clamp_(0)
    v.fill_(3)
    return x


def selected5(x, d):
    v = x.select(d, 1)
    v.copy_(torch.ones_like(v))
    return x


def selected6(x, d):
    v = x.select(d, 1)
    v[:] = 1
    return x


def selected7(x, d):
    v = x.select(d, 1)
    v.unsqueeze(0).zero_()
    return x


def selected8(x, d):
    F.relu(x.select(d, 1), inplace=True)
    return x


def selected9(x, d):
    x.select(d, 1).relu_()
    return x


def selected10(x, d):
    x.select(d, 1).normal_().zero_()
    return x


def selected11(x, d):
    x.select(d, 1).index_fill_(0, torch.tensor([0]), 3.0)
    return x


def selected12(x, d):
    x.select(d, 1).masked_fill_(torch.ones(x.select(d, 1).shape, dtype=torch.bool), 3.0)
    return x


def diagonal(x, d):
    x.diagonal(0, d - 1, d).add_(1)
    return x


def expanded(x, d):
    v = x[..., None]
    v.mul_(2)
    return x


def windows(x, d):
    v = x.unfold(d, 2, 2)
    v.mul_(3)
    return x


def permuted(x, d):
    v = x.permute(*reversed(range(x.ndim)))
    v.reshape(-1)[::2].zero_()
    return x


def reshaped(x, d):
    v = x.reshape(x.shape[0], -1)
    v.mul_(3)
    return x


def reshaped_perm(x, d):
    v = x.transpose(1, 2).reshape(x.shape[0], -1)
    v.mul_(3)
    return v + x.sum()


def reshaped_data(x, d):
    v = x.reshape(x.shape[0], -1)
    x.data.mul_(3)
    return v + 1


def reshaped_data_of_view(x, d):
    v = x.reshape(x.shape[0], -1)
    x.select(d, 1).data.mul_(3)
    x.data.narrow(d, 2, 3).add_(1)
    return v + 1


def data_reshaped(x, d):
    data = x.data
    v = data.reshape(x.shape[0], -1)
    x.mul_(3)
    x.data += 1
    return v + data.flatten(1)


def data_written_twice(x, d):
    v = x.data.reshape(x.shape[0], -1)
    v.mul_(2)
    x.data.sub_(1)
    return v + x.flatten(1)


def detached_reshaped(x, d):
    v = x.detach().reshape(x.shape[0], -1)
    x.data.mul_(3)
    return v + 1


def detached_of_data(x, d):
    data = x.data
    v = torch.detach(x.transpose(1, 2)).detach().reshape(x.shape[0], -1)
    data.narrow(d, 2, 3).sub_(2)
    return v + 1


def split_sizes(x, d):
    x.split([3, x.shape[d] - 3], d)[1].zero_()
    return x


def out_add(x, d):
    a, b = x.chunk(2, d)
    torch.add(a, b, out=a)
    return x


def foreach(x, d):
    ps = list(x.chunk(2, d))
    torch._foreach_mul_(ps, 2.0)
    return x


def foreach_of_copies(x, d):
    a, b = x.flatten().split([3, x.numel() - 3])
    torch._foreach_add_([b, a, x.transpose(0, 1).flatten()[:2]], 0.75)
    return x


def foreach_of_view_and_viewed(x, d):
    for tensors in ([x.flatten(), x], [x, x.flatten()]):  # each sees what was written to the one before it
        torch._foreach_add_(tensors, 2.5)
        torch._foreach_mul_(tensors, [2.0, 3.0])
    return x


def setitem_entry(x, d):
    i = along(d, 1)
    x[i] = x[i] * 2 + 1
    x[i] += 1
    x[i][..., :1] = 7
    return x


def chained(x, d):
    a = x.narrow(d, 1, 5).narrow(d, 1, 3)
    a[..., ::2].mul_(2)
    return x


def stale_unflattened(x, d):
    a, b = x.chunk(2, d)
    v = x.unflatten(d, (2, -1))
    x.mul_(2)
    return v.sum(d) + a + b


def stale_entry(x, d):
    e = x.select(d, 1)
    x.mul_(2)
    return e


def stale_flattened(x, d):
    f = x.flatten()
    x.mul_(2)
    return f


def stale_columns(x, d):
    f = x.flatten(1)
    a = f[:, ::2]
    x.mul_(2)
    return a


PROGRAMS = [
    chunk,
    chunk_swap,
    chunk_read,
    chunk_set,
    swap_copy,
    even,
    even_odd,
    even_named,
    shifted,
    overlap,
    complex_view,
    complex_unflattened,
    real_view,
    real_parts,
    flat_view,
    flattened,
    transposed,
    unflattened,
    unflattened_whole,
    unflattened_transposed,
    unflattened_unbound,
    unflattened_chunked,
    unbound,
    selected,
    selected2,
    selected3,
    selected4,
    selected5,
    selected6,
    selected7,
    selected8,
    selected9,
    selected10,
    selected11,
    selected12,
    diagonal,
    expanded,
    windows,
    permuted,
    reshaped,
    reshaped_perm,
    reshaped_data,
    reshaped_data_of_view,
    data_reshaped,
    data_written_twice,
    detached_reshaped,
    detached_of_data,
    split_sizes,
    out_add,
    foreach,
    foreach_of_copies,
    foreach_of_view_and_viewed,
    setitem_entry,
    chained,
    stale_unflattened,
    stale_entry,
    stale_flattened,
    stale_columns,
]
# Whose views lie as the tensor does, whatever is sharded: they are written to.
NEVER_REFUSED = {chunk, chunk_swap, chunk_read, chunk_set, swap_copy, even, even_odd, even_named, shifted, overlap}
NEVER_REFUSED |= {split_sizes, out_add, foreach, chained, transposed, selected, permuted, expanded, diagonal}


def written(cuts):
    mesh, wrong = shared_mesh(2), []
    for program in PROGRAMS:
        for d, dim, short in ((d, dim, short) for d in (1, 2) for dim in (0, 1, 2) for short in cuts):
            base = torch.arange(4.0 * 8 * 8, dtype=torch.float64).view(4, 8, 8).sin()
            sizes = {0: (max(0, base.shape[dim] - short), min(short, base.shape[dim]))}
            x = shard(base.clone(), mesh, [Shard(dim)], sizes)
            expected = program(base, d)
            said = f"{program.__name__} along {d}, dim {dim} in {sizes[0]}"
            try:
                found = program(x, d)
                found = found.full_tensor() if isinstance(found, ShardTensor) else found
            except UnsupportedSharding as error:
                if program in NEVER_REFUSED:
                    wrong.append(f"{said}: {error}")
                continue
            if not torch.allclose(found, expected, rtol=1e-12, atol=1e-12):
                wrong.append(f"{said}: the result")
            if not torch.allclose(x.full_tensor(), base, rtol=1e-12, atol=1e-12):
                wrong.append(f"{said}: the tensor")
    assert not wrong, "\n".join(wrong)


def test_writes_through_views():
    run_distributed(written, 2, (3,))


@pytest.mark.slow
def test_writes_through_views_of_short_and_empty_shards():
    run_distributed(written, 2, (1, 4, 8))
