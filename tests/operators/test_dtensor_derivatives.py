"""Derivatives of every order by weights that are DTensors, as one device has them."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp
from torch.utils._pytree import tree_leaves

from shardtensor.testing import run_distributed, shard, shared_mesh

ORDERS = 4


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.second(self.first(x).tanh())


# Module, shape of the input, the dim that is sharded.
MODULES = {
    "linear": (lambda: nn.Linear(4, 3), (2, 7, 4), 1),
    "convolution": (lambda: nn.Conv1d(2, 4, 3, padding=1), (1, 2, 12), 2),
    "mlp": (MLP, (7, 4), 0),
}
CUTS = {2: {7: (5, 2), 12: (8, 4)}, 3: {7: (4, 0, 3), 12: (4, 6, 2)}}
# The mesh, and how weights of several dims lie; the others are replicated.
LAYOUTS = {
    "replicated on 2": ((2,), (Replicate(),)),
    "replicated on 3": ((3,), (Replicate(),)),
    "replicated on 2x2": ((2, 2), (Replicate(), Replicate())),
    "sharded on 2": ((2,), (Shard(0),)),
    "sharded on 3": ((3,), (Shard(0),)),
    "sharded on 2x2, like the batch": ((2, 2), (Shard(0), Replicate())),
    "sharded on 2x2, like the input": ((2, 2), (Replicate(), Shard(0))),
}


def ranks(layout):
    return math.prod(LAYOUTS[layout][0])


def made(name):
    torch.manual_seed(0)
    create, shape, dim = MODULES[name]
    module = create().double()
    weights = {k: p.detach() + torch.rand_like(p) * 0.1 for k, p in module.named_parameters()}
    return module, weights, torch.randn(shape, dtype=torch.float64) * 0.5, dim


def on_mesh(layout, weights, x, dim):
    """The weights as DTensors, and the input as a ShardTensor."""
    shape, placements = LAYOUTS[layout]
    mesh = shared_mesh(shape if len(shape) > 1 else shape[0])
    found = {}
    for k, w in weights.items():
        found[k] = distribute_tensor(w, mesh, placements if w.ndim > 1 else [Replicate()] * mesh.ndim)
    cuts = {mesh.ndim - 1: CUTS[shape[-1]][x.shape[dim]]}
    # On a second axis, the batch: of one sample, a rank has none.
    batch = [Shard(0) if dim else Replicate()] * (mesh.ndim - 1)
    if dim and batch:
        cuts[0] = (1, x.shape[0] - 1)
    return found, shard(x, mesh, [*batch, Shard(dim)], cuts)


def call(module, weights, x):
    """A sharded weight of a convolution is gathered before, as the error says."""
    if isinstance(module, nn.Conv1d):
        weights = {
            k: w.redistribute(placements=[Replicate()] * w.device_mesh.ndim) if isinstance(w, DTensor) else w
            for k, w in weights.items()
        }
    return functional_call(module, weights, (x,))


def derivatives(module, weights, x):
    x, weights = x.detach().requires_grad_(), {k: w.detach().requires_grad_() for k, w in weights.items()}
    tensors = [x, *weights.values()]
    # Means and norms of shards are not sums; DTensor of torch 2.11 does not add one to the other.
    size = sum(w.mean() for w in weights.values()) * sum(w.norm() for w in weights.values())
    total = call(module, weights, x).pow(3).mean() * size
    found = []
    for _ in range(ORDERS):
        grads = torch.autograd.grad(total, tensors, create_graph=True)
        found.append(grads)
        total = sum((g * g).mean() for g in grads)
    return found


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def said_of(name, said):
    return f"{name}: {said}"


def check(layout, name):
    module, weights, x, dim = made(name)
    expected = derivatives(module, weights, x)
    found = derivatives(module, *on_mesh(layout, weights, x, dim))
    for order, (ours, theirs) in enumerate(zip(found, expected), 1):
        for i, (g, e) in enumerate(zip(ours, theirs)):
            said = partial(said_of, f"{name}, order {order}, tensor {i}")
            torch.testing.assert_close(whole(g).detach(), e.detach(), rtol=1e-9, atol=1e-10, msg=said)


ALWAYS = (("replicated on 2", "mlp"), ("sharded on 3", "linear"), ("sharded on 2x2, like the batch", "linear"))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=() if (layout, name) in ALWAYS else pytest.mark.slow)
        for layout in LAYOUTS
        for name in MODULES
    ],
)
def test_derivatives_of_four_orders(layout, name):
    run_distributed(check, ranks(layout), layout, name)


ON_2X2 = [n for n in LAYOUTS if "2x2" in n]


def squares(module, x):
    return lambda w: call(module, w, x).sin().square().mean()


# Of module, weights, input, and the weights on one device.
TRANSFORMS = {
    "jvp": lambda m, w, x, one: jvp(lambda v: call(m, v, x), (w,), (w,)),
    "jvp, plain tangents": lambda m, w, x, one: jvp(lambda v: call(m, v, x), (w,), (one,)),
    "jvp by both": lambda m, w, x, one: jvp(lambda v, t: call(m, v, t), (w, x), (w, x)),
    "jvp of jvp": lambda m, w, x, one: jvp(lambda v: jvp(squares(m, x), (v,), (v,))[1], (w,), (w,)),
    "jvp of grad": lambda m, w, x, one: jvp(grad(squares(m, x)), (w,), (w,)),
    "grad of jvp": lambda m, w, x, one: grad(lambda v: jvp(squares(m, x), (v,), (v,))[1])(w),
    "jacrev": lambda m, w, x, one: jacrev(lambda v: call(m, v, x).sum((0, 1)))(w),
    "jacfwd": lambda m, w, x, one: jacfwd(lambda v: call(m, v, x).sum((0, 1)))(w),
    "hessian": lambda m, w, x, one: hessian(squares(m, x))(w),
}


def check_transforms(layout):
    module, weights, x, dim = made("linear")
    for name, transform in TRANSFORMS.items():
        expected = transform(module, weights, x, weights)
        found = transform(module, *on_mesh(layout, weights, x, dim), weights)
        for g, e in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            torch.testing.assert_close(whole(g), e, rtol=1e-10, atol=1e-12, msg=partial(said_of, name))


@pytest.mark.parametrize(
    "layout",
    ["replicated on 2", *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n in ("sharded on 3", *ON_2X2))],
)
def test_transforms_by_weights(layout):
    run_distributed(check_transforms, ranks(layout), layout)
