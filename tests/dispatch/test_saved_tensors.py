"""What a graph has saved and is written to before the backward pass: torch's error, or one device's gradient.

Operators whose gradient is that of local operators save local tensors, which are written to through ShardTensors.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import DTensor, Shard

from shardtensor.testing import run_distributed, shard, shared_mesh

FUNCTIONS = {
    "sin": torch.sin,
    "prod": lambda x: x.prod(2),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "conv2d": lambda x: F.conv2d(x, torch.ones(2, 2, 3, 3, dtype=x.dtype), padding=1),
    "matmul": lambda x: x.transpose(2, 3) @ x,
    "frozen linear": lambda x: F.linear(x, torch.ones(3, 4, dtype=x.dtype)),
    "einsum": lambda x: torch.einsum("bchw,bchv->bcwv", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() * 2, reduction="none"),
    "view": lambda x: x.narrow(3, 0, 4)[:, :].tanh() * x,
}


def _enter(x):
    x[:, :, 2] = 5.0


def _by_mask(x):
    x[x > 0] = 3.0


WRITES = {
    "mul_": lambda x: x.mul_(1.7),
    "relu_": torch.relu_,
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(x * 2),
    "uniform_": lambda x: x.uniform_(),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "detached": lambda x: x.detach().mul_(1.7),
    "an entry": _enter,
    "a mask": _by_mask,
    "index_fill_": lambda x: x.index_fill_(2, torch.tensor([1, 4]), 2.0),
    "a part": lambda x: x.narrow(3, 0, 2).mul_(1.7),
    "a part of the sharded dim": lambda x: x.narrow(2, 0, 5).mul_(1.7),
    "a chunk": lambda x: x.chunk(2, 2)[1].zero_(),
    "an item": lambda x: x.unbind(3)[1].zero_(),
    "a selected item": lambda x: x.transpose(2, 3)[..., 1].mul_(2),
    "transposed": lambda x: x.transpose(1, 2).add_(1),
    "view": lambda x: x.view(2, 9, 4).mul_(1.7),
    "flat": lambda x: x.reshape(-1).mul_(3),
}


def gradient(leaf, function, write=lambda x: None, *, result=False):
    """The gradient by ``leaf`` where the function's operand, or its result, is written to before the backward pass."""
    leaf.requires_grad_(True)
    x = leaf * 1.0
    y = function(x)
    if result:
        write(y)
    else:
        with torch.no_grad():
            write(x)
    try:
        (y * torch.arange(1.0, y.shape[-1] + 1)).sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return None
    return leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad


def whole():
    return torch.randn(1, 2, 9, 4, dtype=torch.float64, generator=seeded(0))


def check(functions, writes):
    """As on one device, or the error of torch; a graph that has kept nothing of what was written to may be right."""
    noticed = 0
    for name in functions:
        for write in writes:
            what = f"{name}, {write}"
            expected = gradient(whole(), FUNCTIONS[name], WRITES[write])
            x = shard(whole(), shared_mesh(2), [Shard(2)], {0: (6, 3)})
            found = gradient(x, FUNCTIONS[name], WRITES[write])
            if found is None:
                noticed += 1
                assert expected is None, f"{what}: one device has a gradient"
            elif expected is None:
                expected = gradient(whole(), FUNCTIONS[name])  # as of the values before
            if found is not None:
                torch.testing.assert_close(found, expected, msg=lambda text, what=what: f"{what}: {text}")
    return noticed


@pytest.mark.parametrize(
    ("functions", "writes"),
    [
        (["matmul", "sin"], list(WRITES)),
        (list(FUNCTIONS), ["mul_", "foreach", "a part of the sharded dim"]),
        pytest.param(list(FUNCTIONS), list(WRITES), marks=pytest.mark.slow),
    ],
)
def test_an_operand_that_is_written_to(functions, writes):
    noticed = run_distributed(check, 2, functions, writes)
    assert noticed[0] == noticed[1] > len(functions) * len(writes) // 2


@on_ranks(2)
def test_a_result_that_is_written_to():
    """Torch's error, or the gradient of the written result."""
    for name, function in FUNCTIONS.items():
        x = shard(whole(), shared_mesh(2), [Shard(2)], {0: (6, 3)})
        found = gradient(x, function, lambda y: y.mul_(1.7), result=True)
        expected = gradient(whole(), lambda x, function=function: function(x) * 1.7)
        if found is None:
            assert name in ("prod", "attention", "cdist"), name
        else:
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_a_frozen_weight():
    """A linear layer saves its input only for its weight's gradient; second derivatives are as with all saved."""
    linear = torch.nn.Linear(4, 3, dtype=torch.float64)
    linear.weight.requires_grad_(False)
    gradients, sharded = [], shard(whole(), shared_mesh(2), [Shard(2)], {0: (9, 0)}, requires_grad=True)
    for x in (whole().requires_grad_(), sharded):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.shape) or t, lambda t: t):
            y = linear(x)
        assert x.shape not in saved
        (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        gradients.append([grad, *torch.autograd.grad(grad.square().sum(), (x, linear.bias))])
    for one, of_shards in zip(*gradients, strict=True):
        of_shards = of_shards.full_tensor() if isinstance(of_shards, DTensor) else of_shards
        torch.testing.assert_close(of_shards, one, rtol=1e-10, atol=0)


@on_ranks(2)
def test_an_entry_whose_tensor_was_written_to_has_no_gradient():
    """An entry of a sharded dim is a copy, of which autograd does not know that it is a view."""
    for sizes in ((2, 2), (4, 0)):
        x = shard(torch.ones(4, 6), shared_mesh(2), [Shard(0)], {0: sizes}).requires_grad_()
        base = x * 1
        row = base[3]
        base.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"written to since.*take the view again after the write, or clone"):
            row.sum()
        with torch.no_grad():
            assert torch.equal((row * 1).full_tensor(), torch.full((6,), 0.5))
        base[3].sum().backward()
        expected = torch.zeros(4, 6)
        expected[3] = 0.5
        assert torch.equal(x.grad.full_tensor(), expected)
