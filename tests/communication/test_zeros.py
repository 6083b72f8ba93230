"""Zeros beside tensors: torch's padding, in fewer kernels."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks

from shardtensor.communication.zeros import padded, zeros_of
from shardtensor.layout.strides import is_dense


@pytest.mark.parametrize(
    "around", [(1, 0), (0, 2), (0, 0, 2, 1), (-1, 0), (0, 0, -1, -2), (2, -1), (-2, 3), (1, 1, 2, 0)]
)
@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
def test_padding_is_torch_s(around, last):
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64).contiguous(memory_format=last)
    expected = torch.constant_pad_nd(x, around)
    found = padded(x, around)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    leaf = x.clone().requires_grad_()
    weights = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad((f(leaf, around) * weights).sum(), leaf)[0] for f in (padded, torch.constant_pad_nd)
    )
    assert torch.equal(ours, theirs)


def test_what_is_dense():
    x = torch.zeros(2, 3, 5, 4)
    assert all(map(is_dense, (x, x.movedim(1, -1), x[1:], x[:, :0], torch.zeros(()), x.as_strided((1, 3), (9, 1)))))
    assert not any(map(is_dense, (x[:, :, 1:], x[:1].expand(2, 3, 5, 4), x[..., ::2])))


@on_ranks(1)
def test_a_device_keeps_zeros(emulated):
    from device.emulated import counted

    x = torch.randn(1, 2, 3, 4)
    first = zeros_of((1, 2, 1, 4), x)
    with counted() as seen:
        again, smaller = zeros_of((1, 2, 1, 4), x), zeros_of((5,), x)
        joined = padded(x, (0, 0, 1, 0))
    assert again.data_ptr() == smaller.data_ptr() == first.data_ptr() and not first.any()
    assert seen.total("kernel") == 1, seen.events
    assert torch.equal(joined, torch.constant_pad_nd(x, (0, 0, 1, 0)))
    assert zeros_of((2,), x.bfloat16()).dtype == torch.bfloat16 and zeros_of((3,), x).device == x.device
