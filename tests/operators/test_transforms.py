"""torch.func and dual tensors: of sharded inputs, of plain weights, of both."""

from __future__ import annotations

import copy
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from halves import half_of, in_halves
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.operators import transforms
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

# Of points along their first dim, and of images along the last; on four ranks, a mesh of 2 x 2, on both axes.
LAYOUTS = {
    2: ([Shard(0)], {0: (5, 2)}, [Shard(2)], {0: (7, 5)}),
    3: ([Shard(0)], {0: (4, 0, 3)}, [Shard(2)], {0: (2, 7, 3)}),
    4: ([Shard(0), Shard(1)], {0: (5, 2), 1: (1, 3)}, [Shard(2), Shard(0)], {0: (7, 5), 1: (2, 0)}),
}
WORLDS = [2, 3]


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(3 * x)


class Block(nn.Module):
    """A U-Net of one level."""

    def __init__(self):
        super().__init__()
        self.down, self.inner, self.up = (
            nn.Conv1d(2, 4, 3, padding=1),
            nn.Conv1d(4, 4, 3, padding=1),
            nn.Conv1d(6, 2, 1),
        )
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        y = F.gelu(self.norm(self.down(x)))
        y = F.interpolate(F.silu(self.inner(F.avg_pool1d(y, 2))), scale_factor=2, mode="nearest")
        return self.up(torch.cat([x, y], 1))


@cache
def made(name):
    torch.manual_seed(1)
    if name == "unet":
        module = Block()
    else:
        inner = [Sine(), nn.Linear(8, 8), Sine()] if name == "siren" else [nn.Tanh(), nn.LayerNorm(8)]
        module = nn.Sequential(nn.Linear(4, 8), *inner, nn.Linear(8, 1))
    return module.double()


def weights_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def call(module, weights, x):
    return functional_call(module, weights, (x,))


def laplacian(u, points):
    """Of each point by itself, as in networks that are trained on differential equations."""
    return vmap(lambda p: hessian(lambda q: u(q).squeeze())(p).diagonal().sum())(points)


def laplacian_by_autograd(u, points):
    (first,) = torch.autograd.grad(u(points).sum(), points, create_graph=True)
    return sum(
        torch.autograd.grad(first[:, i].sum(), points, create_graph=True)[0][:, i] for i in range(points.shape[1])
    )


def with_weights(loss, module):
    """A loss and its gradients by the weights, through the backward pass around a transform."""
    value = loss(module)
    found = torch.autograd.grad(value, list(module.parameters()), allow_unused=True)
    return [value.detach(), *(g for g in found if g is not None), [g is None for g in found]]


def scale(x):
    return torch.linspace(0.5, 1.5, 28, dtype=torch.float64).reshape(7, 4) * (x * 0 + 1)


def replicated(weights, x):
    """The weights as DTensors if ``x`` is sharded."""
    sharded = isinstance(x, ShardTensor)
    return {
        k: distribute_tensor(v, x.device_mesh, [Replicate()] * x.device_mesh.ndim) if sharded else v
        for k, v in weights.items()
    }


def unpooled(image):
    places = F.max_pool1d(image, 3, 1, return_indices=True)[1]
    return jvp(lambda t: F.max_unpool1d(t, places, 3, 1), (image[..., 2:],), (image[..., :-2],))


MLP, SIREN, UNET = "mlp", "siren", "unet"


def matrices(x):
    """One for each point, Hermitian, and a tangent that is not."""
    return x[:, :, None] * x[:, None] + torch.eye(4, dtype=x.dtype), x.cos()[:, :, None] * x.sin()[:, None]


def phases(x):
    """Complex matrices, and a tangent."""
    factor = torch.complex(x, x.cos())
    matrix = factor[:, :, None] * factor.conj()[:, None] + torch.eye(4, dtype=factor.dtype)
    return matrix, factor[:, :, None] * x.sin()[:, None]


def ramp(matrix):
    """Tells the eigenvalues apart."""
    return 3 * torch.arange(4.0).diag().to(matrix.dtype)


def pushed(function, primal, tangent):
    return jvp(function, (primal,), (tangent,))


def cubes(matrix):
    return torch.linalg.eigvalsh(matrix + ramp(matrix)).pow(3).sum()


def singular(matrix):
    """A number that does not depend on the vectors' phases."""
    u, s, vh = torch.linalg.svd(matrix + ramp(matrix))
    return torch.view_as_real(u).square().sum(-1).square().sum() + (s[:, None] * vh.abs()).pow(3).sum()


def energies(matrix):
    values, vectors = torch.linalg.eigh(matrix + ramp(matrix))
    return values.pow(3).sum() + vectors.abs().pow(4).sum()


CASES = {
    # of what is sharded
    "grad": lambda x, i: grad(lambda t: made(MLP)(t).square().mean())(x),
    "grad twice": lambda x, i: grad(lambda t: grad(lambda s: made(SIREN)(s).sum())(t).square().sum())(x),
    "grad of a U-Net": lambda x, i: grad(lambda t: made(UNET)(t).square().sum())(i),
    "vjp": lambda x, i: vjp(made(UNET), i)[1](i.cos()),
    "vjp of several": lambda x, i: vjp(lambda a, b: (a * b, a.sum()), x, x.cos())[1](
        (scale(x), torch.tensor(2.0).double())
    ),
    "jvp": lambda x, i: jvp(made(UNET), (i,), (i.cos(),)),
    "jvp, a plain tangent": lambda x, i: jvp(torch.sin, (x,), (scale(torch.ones(7, 4)),)),
    "jacrev": lambda x, i: jacrev(lambda t: made(MLP)(t).sum(0))(x),
    "jacrev, sharded results": lambda x, i: jacrev(lambda t: t.sin().cumsum(0))(x),
    "jacfwd": lambda x, i: jacfwd(lambda t: made(MLP)(t).sum(0))(x),
    "hessian": lambda x, i: hessian(lambda t: made(SIREN)(t).sum())(x),
    "jvp of grad": lambda x, i: jvp(grad(lambda t: made(SIREN)(t).sin().sum()), (x,), (x.cos(),)),
    "grad of jvp": lambda x, i: grad(lambda t: jvp(made(SIREN), (t,), (t.cos(),))[1].square().sum())(x),
    "vjp of jvp": lambda x, i: vjp(lambda v: jvp(made(UNET), (i,), (v,))[1], i.cos())[1](i.sin()),
    # of contributions, and of what is picked
    "jvp of sums of sums": lambda x, i: jvp(lambda t: t.sin().sum(0).mean(), (x,), (x.cos(),)),
    "hessian of sums of sums": lambda x, i: hessian(lambda t: t.sin().sum(0).sum().square())(x),
    "jvp of what is picked": lambda x, i: jvp(lambda t: (t.max(0)[0], t.cummax(0)[0].sin()), (x,), (x.cos(),)),
    "hessian of maxima": lambda x, i: hessian(lambda t: t.max(0)[0].square().sum())(x),
    "jvp of unpooling, windows overlap": lambda x, i: unpooled(i.repeat(2, 1, 1)),
    # of matrices of which a half is read, with tangents of both
    "jvp of cholesky": lambda x, i: pushed(torch.linalg.cholesky, *matrices(x)),
    "jvp of cholesky, complex": lambda x, i: pushed(lambda t: torch.linalg.cholesky_ex(t, upper=True)[0], *phases(x)),
    "jvp of eigh": lambda x, i: pushed(lambda t: tuple(torch.linalg.eigh(t + ramp(t))), *matrices(x)),
    "jvp of eigh, complex": lambda x, i: pushed(lambda t: torch.linalg.eigh(t + ramp(t), UPLO="U")[1], *phases(x)),
    "jvp of grad of eigh": lambda x, i: pushed(grad(energies), *matrices(x)),
    "jvp of grad of cholesky": lambda x, i: pushed(
        grad(lambda t: torch.view_as_real(torch.linalg.cholesky(t)).pow(3).sum()), *phases(x)
    ),
    "grad of jvp of cholesky": lambda x, i: grad(
        lambda t, v: pushed(torch.linalg.cholesky, t, v)[1].square().sum(), argnums=(0, 1)
    )(*matrices(x)),
    "jvp of jvp of cholesky": lambda x, i: pushed(
        lambda t: pushed(torch.linalg.cholesky, t, matrices(x)[1])[1], *matrices(x)
    ),
    "jvp of a complex svd": lambda x, i: pushed(
        lambda t: tuple(torch.linalg.svd(t[:, :3] + ramp(t)[:3], full_matrices=False)), *phases(x)
    ),
    "jvp of grad of a complex svd": lambda x, i: pushed(grad(singular), *phases(x)),
    "jvp of grad of eigvalsh": lambda x, i: pushed(grad(cubes), *matrices(x)),
    "hessian of eigvalsh": lambda x, i: hessian(cubes)(matrices(x)[0][:2]),
    "jvp of vmap of cholesky": lambda x, i: pushed(vmap(torch.linalg.cholesky), *matrices(x)),
    "jvp of vmap of grad of eigh": lambda x, i: pushed(vmap(grad(energies)), *matrices(x)),
    "jvp of cholesky of a plain matrix": lambda x, i: pushed(
        lambda t: torch.linalg.cholesky(t) * x.sum(), *(t[0] for t in matrices(scale(torch.zeros(7, 4))))
    ),
    # of plain weights
    "grad by weights": lambda x, i: grad(lambda p: call(made(UNET), p, i).square().sum())(weights_of(made(UNET))),
    "value and aux": lambda x, i: grad_and_value(
        lambda p: (call(made(UNET), p, i).square().sum(), {"twice": i * 2}), has_aux=True
    )(weights_of(made(UNET))),
    "jacrev by weights": lambda x, i: jacrev(lambda p: call(made(MLP), p, x).sum(0))(weights_of(made(MLP))),
    "jvp by weights": lambda x, i: jvp(
        lambda p: call(made(UNET), p, i), (weights_of(made(UNET)),), (weights_of(made(UNET)),)
    ),
    "hvp by weights": lambda x, i: jvp(
        grad(lambda p: call(made(MLP), p, x).sin().sum()), (weights_of(made(MLP)),), (weights_of(made(MLP)),)
    ),
    # of DTensor weights
    "laplacian by DTensors": lambda x, i: grad(
        lambda p: laplacian(lambda r: call(made(SIREN), p, r), x).square().mean()
    )(replicated(weights_of(made(SIREN)), x)),
    # of both
    "grad by both": lambda x, i: grad(lambda p, t: call(made(MLP), p, t).square().mean(), argnums=(0, 1))(
        weights_of(made(MLP)), x
    ),
    "grad of a residual": lambda x, i: grad(lambda p: grad(lambda t: call(made(SIREN), p, t).sum())(x).square().mean())(
        weights_of(made(SIREN))
    ),
    # mapped
    "vmap": lambda x, i: vmap(made(MLP))(x),
    "vmap, another dim": lambda x, i: vmap(lambda r: r.sin() / r.sum(), in_dims=1, out_dims=1)(x),
    "vmap, negative dims": lambda x, i: vmap(lambda r: r.sin(), in_dims=-2, out_dims=-1)(x),
    "vmap, several": lambda x, i: vmap(lambda a, b, c: (a * b).sum() * c, in_dims=(0, 0, None))(
        x, scale(0 * x), x.sum()
    ),
    "vmap, a plain one": lambda x, i: vmap(lambda a, b: a @ b)(x, torch.arange(28.0).double().view(7, 4)),
    "vmap, a held one": lambda x, i: vmap(lambda a: (a * x).sum())(x),
    "vmap of images": lambda x, i: vmap(lambda t: made(UNET)(t[None])[0])(i),
    "vmap of grad": lambda x, i: vmap(grad(lambda r: made(SIREN)(r).sum()))(x),
    "vmap of vmap": lambda x, i: vmap(vmap(lambda r: r.sin()))(x),
    "gradients of each sample": lambda x, i: vmap(grad(lambda p, r: call(made(MLP), p, r).sum()), in_dims=(None, 0))(
        weights_of(made(MLP)), x
    ),
    "ensemble": lambda x, i: vmap(lambda p: call(made(UNET), p, i))(
        {k: torch.stack([v, 2 * v, v.cos()]) for k, v in weights_of(made(UNET)).items()}
    ),
    "ensemble and samples": lambda x, i: vmap(
        vmap(grad(lambda p, r: call(made(MLP), p, r).sin().mean()), in_dims=(None, 0)), in_dims=(0, None)
    )({k: torch.stack([v, 2 * v, v.cos()]) for k, v in weights_of(made(MLP)).items()}, x),
    "jacobians of each sample": lambda x, i: vmap(jacrev(lambda p, r: call(made(MLP), p, r)), in_dims=(None, 0))(
        weights_of(made(MLP)), x
    ),
    "grad of vmap with a shared sum": lambda x, i: grad(
        lambda t: vmap(lambda a, b: (a * b).sum().sin(), in_dims=(0, None))(t, t.sum(0)).square().sum()
    )(x),
    "the same random numbers": lambda x, i: vmap(lambda r: F.dropout(r, 0.5), randomness="same")(x),
    "chunks": lambda x, i: vmap(made(MLP), chunk_size=2)(x),
    # differential equations, with the gradients of the weights
    "laplacian": lambda x, i: laplacian(made(SIREN), x),
    "grad of a laplacian": lambda x, i: grad(lambda p: laplacian(lambda r: call(made(MLP), p, r), x).square().mean())(
        weights_of(made(MLP))
    ),
    "backward of a laplacian": lambda x, i: with_weights(lambda m: laplacian(m, x).square().mean(), made(SIREN)),
    "laplacian by autograd": lambda x, i: with_weights(
        lambda m: laplacian_by_autograd(m, x.detach().requires_grad_()).square().mean(), made(SIREN)
    ),
    "backward of a gradient": lambda x, i: with_weights(
        lambda m: grad(lambda t: m(t).sin().sum())(i).square().mean(), made(UNET)
    ),
    "backward of jvp": lambda x, i: with_weights(lambda m: jvp(m, (i,), (i.cos(),))[1].square().mean(), made(UNET)),
    # torch.autograd.functional, and batches of gradients
    "functional.jacobian": lambda x, i: torch.autograd.functional.jacobian(lambda t: made(MLP)(t).sum(0), x),
    "functional.hvp": lambda x, i: torch.autograd.functional.hvp(lambda t: made(SIREN)(t).sum(), x, x.cos()),
    "batched gradients": lambda x, i: batched(x),
}


def batched(x):
    x = x.detach().requires_grad_()
    y = x.sin().sum(0)
    return torch.autograd.grad(y, x, torch.eye(4, dtype=torch.float64), is_grads_batched=True)


def inputs():
    for name in (MLP, SIREN, UNET):  # before any transform: within, torch makes no modules
        made(name)
    return torch.randn(7, 4, dtype=torch.float64, generator=seeded(2)), torch.randn(
        2, 2, 12, dtype=torch.float64, generator=seeded(3)
    )


def on_shards(world):
    x, image = inputs()
    mesh = shared_mesh((2, 2) if world == 4 else world)
    of_points, points, of_images, images = LAYOUTS[world]
    return shard(x, mesh, of_points, points), shard(image, mesh, of_images, images)


def plain(results):
    whole = tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, results)
    return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, whole)


def said_of(name, said):
    return f"{name}: {said}"


def check(names):
    world = torch.distributed.get_world_size()
    for name in names:
        torch.manual_seed(0)
        expected = plain(CASES[name](*inputs()))
        torch.manual_seed(0)
        found = CASES[name](*on_shards(world))
        torch.testing.assert_close(plain(found), expected, rtol=1e-10, atol=1e-12, msg=partial(said_of, name))


@pytest.mark.parametrize(("world", "half"), in_halves(WORLDS))
@pytest.mark.parametrize("part", range(2))
def test_transforms_are_those_of_one_device(world, half, part):
    run_distributed(check, world, half_of(CASES, half)[part::2])


def test_the_graph_of_derivatives_within_vmap_on_devices(emulated):
    """Which autograd would compute in a device's thread, where nodes have numbers of their own."""
    run_distributed(check, 2, ["backward of a laplacian"])


# On an axis of two ranks one has no images, and its local work another graph.
ON_TWO_AXES = [
    "jvp by weights",
    "hvp by weights",
    "grad of a residual",
    "grad of a laplacian",
    "backward of a gradient",
]


@pytest.mark.parametrize(
    "names",
    [ON_TWO_AXES, pytest.param([name for name in CASES if "random" not in name], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_transforms_on_a_mesh_of_two_axes(names):
    run_distributed(check, 4, names)


@on_ranks(2)
def test_results_are_plain_where_arguments_are_and_have_a_graph_where_one_surrounds():
    x, image = on_shards(2)
    found = grad(lambda p: call(made(UNET), p, image).square().sum())(weights_of(made(UNET)))
    assert not any(isinstance(t, ShardTensor) for t in tree_leaves(found))
    found = grad(lambda t: t.sin().sum())(x)
    assert isinstance(found, ShardTensor) and found.shard_sizes == x.shard_sizes and not found.requires_grad
    # Nothing surrounds the transform, so there is no graph of the result; with parameters there is.
    value, _ = vjp(lambda t: t.sin(), x)
    assert not value.requires_grad
    assert vjp(made(MLP), x)[0].requires_grad
    with torch.no_grad():
        assert not grad(lambda t: made(MLP)(t).sum())(x).requires_grad


@on_ranks(2)
def test_mapping_over_a_sharded_dim_sends_nothing():
    """Each rank maps over its own rows: nothing is sent but the sums of what the ranks share."""
    x, _ = on_shards(2)
    module = made(SIREN)
    with count_communication() as counted:
        value = laplacian(module, x)
    assert counted == type(counted)() and value.shard_sizes == {0: (5, 2)}
    with count_communication() as counted:
        vmap(lambda p: (p * x).sum())(x)  # it holds a ShardTensor: one row after the other
    assert counted != type(counted)()


@on_ranks(2)
def test_transforms_in_captured_graphs():
    """As if a graph were captured, in which generators have no state: nothing asks for it, and nothing goes twice."""
    x = shard(torch.ones(8), shared_mesh(2), [Shard(0)], {0: (5, 3)})
    nothing = mock.Mock(side_effect=AssertionError)
    with mock.patch.multiple(transforms, draws_are_captured=lambda: True, random_states=nothing):
        assert torch.equal(vmap(torch.sin)(torch.ones(3)), torch.ones(3).sin())
        with pytest.raises(UnsupportedSharding, match="inside a transform"):
            grad(lambda t: (t * x).sum())(torch.ones(8))
        assert torch.equal(grad(lambda t: (t * t).sum())(x).full_tensor(), 2 * torch.ones(8))


# -- dual tensors -----------------------------------------------------------------------------------------------------


def tangent_of(function, *pairs):
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(function(*(forward_ad.make_dual(p, t) for p, t in pairs)))
        return result.primal, result.tangent


DUAL = {
    "sin": lambda x, i: tangent_of(torch.sin, (x, x.cos())),
    "composed": lambda x, i: tangent_of(lambda t: (t.exp() * t).cumsum(0) + t.mean(), (x, x.cos())),
    "network": lambda x, i: tangent_of(made(UNET), (i, i.cos())),
    "weights": lambda x, i: tangent_of(lambda w: F.linear(x, w), (torch.ones(3, 4).double(), torch.eye(3, 4).double())),
    "both": lambda x, i: tangent_of(
        lambda t, w: F.linear(t, w), (x, x.cos()), (torch.ones(3, 4).double(), torch.eye(3, 4).double())
    ),
    "half of a matrix": lambda x, i: tangent_of(torch.linalg.cholesky, matrices(x)),
    "a view": lambda x, i: tangent_of(lambda t: t.diagonal().log(), (x @ x.mT, (x @ x.mT).cos())),
    "an entry": lambda x, i: tangent_of(lambda t: t.sum(0) * t.select(0, 3), (x, x.cos())),
    "without a graph": lambda x, i: torch.no_grad()(tangent_of)(made(MLP), (x, x.cos())),
    "read": lambda x, i: tangent_of(lambda t: t * int(t.sum()), (x, x.cos())),
    "reverse over forward": lambda x, i: with_weights(
        lambda m: tangent_of(m, (i, i.cos()))[1].square().mean(), made(UNET)
    ),
}


@pytest.mark.parametrize("world", WORLDS)
@on_ranks("world")
def test_dual_tensors_have_the_tangents_of_one_device(world):
    for name, dual in DUAL.items():
        expected, found = plain(dual(*inputs())), plain(dual(*on_shards(world)))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=partial(said_of, name))


# -- what is refused --------------------------------------------------------------------------------------------------


def in_place_on_a_dual():
    x, _ = on_shards(2)
    tangent_of(lambda t: t.mul_(2), (x, x.cos()))


def different_numbers():
    x, _ = on_shards(2)
    vmap(lambda r: F.dropout(r, 0.5), randomness="different")(x)


def random_numbers():
    _, image = on_shards(2)
    vmap(lambda r: F.dropout(r, 0.5))(image)


def running_statistics():
    _, image = on_shards(2)
    norm = nn.BatchNorm1d(2).double()
    vmap(lambda r: norm(r[None]))(image)


def attention():
    x, _ = on_shards(2)
    jvp(lambda t: F.scaled_dot_product_attention(t, t, t, is_causal=True), (x[None],), (x[None],))


def of_torch_without_a_second_derivative():
    x, _ = on_shards(2)
    jvp(F.hardsigmoid, (x,), (x.cos(),))


def without_a_second_derivative():
    x, _ = on_shards(2)
    jvp(lambda t: t.cumprod(0), (x,), (x.cos(),))


def linearized():
    x, _ = on_shards(2)
    linearize(torch.sin, x)


def level_that_is_not_ours():
    x, _ = on_shards(2)
    torch._C._functorch._grad_increment_nesting()  # as what is called by other ways than torch.func's does
    try:
        x.sin()
    finally:
        torch._C._functorch._grad_decrement_nesting()


REFUSED = {
    in_place_on_a_dual: "mul_: it writes to a tensor where tangents are computed forward.*out-of-place form",
    different_numbers: "vmap: randomness='different' draws.*Remedy: draw them before",
    random_numbers: "called random operation while in randomness error mode",
    running_statistics: "batch_norm: it would write running statistics once for each row.*Remedy: .*eval",
    without_a_second_derivative: "jvp: .*the gradient of cumprod on a ShardTensor cannot be differentiated twice.*vjp",
    of_torch_without_a_second_derivative: "jvp: .*hardsigmoid_backward is not implemented.*use grad, vjp or jacrev",
    attention: "scaled_dot_product_attention: it cannot be differentiated twice.*write the attention as products",
    linearized: "torch.func.linearize: its graph would have derivatives by weights.*call torch.func.jvp",
    level_that_is_not_ours: r"sin: a ShardTensor is met inside a transform of torch's \(grad\).*create_graph=True",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_is_refused_says_which_transform_and_what_to_do(function):
    for error in run_expecting_errors(function, 2):
        assert isinstance(error, UnsupportedSharding if function is not random_numbers else RuntimeError)
        with pytest.raises(RuntimeError, match=REFUSED[function]):
            raise error


# -- half precision --------------------------------------------------------------------------------------------------

HALVES = {
    "grad": lambda m, x: grad(lambda t: call(m, weights_of(m), t).square().sum())(x),
    "grad by weights": lambda m, x: grad(lambda p: call(m, p, x).square().sum())(weights_of(m)),
    "vmap": lambda m, x: vmap(m)(x),
    "vmap, another dim": lambda m, x: vmap(lambda r: r.sin() / r.exp().sum(), in_dims=1, out_dims=1)(x),
    "gradients of each sample": lambda m, x: vmap(grad(lambda p, r: call(m, p, r).square().sum()), in_dims=(None, 0))(
        weights_of(m), x
    ),
    "jvp": lambda m, x: jvp(m, (x,), (x.cos(),)),
    "jvp by weights": lambda m, x: jvp(lambda p: call(m, p, x).sum(0), (weights_of(m),), (weights_of(m),)),
    "jvp of grad": lambda m, x: jvp(grad(lambda t: m(t).square().sum()), (x,), (x,)),
}


@on_ranks(2)
def test_half_precision_is_about_as_exact_as_on_one_device():
    x = torch.randn(64, 32, generator=seeded(2)).bfloat16()
    layers = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8)).bfloat16()
    for p in layers.parameters():
        nn.init.normal_(p, std=0.2, generator=seeded(3))
    exact = copy.deepcopy(layers).double()
    cut = shard(x, shared_mesh(2), [Shard(0)], {0: (40, 24)})
    for name, transform in HALVES.items():
        expected, one = tree_leaves(transform(exact, x.double())), tree_leaves(transform(layers, x))
        for e, a, b in zip(expected, one, tree_leaves(plain(transform(layers, cut))), strict=True):
            assert a.dtype == b.dtype, name
            ours, theirs = (b - e).norm(), (a - e).norm()
            assert ours <= 2 * theirs, f"{name}: an error of {ours:.3g}, and {theirs:.3g} on one device"


# -- programs without ShardTensors ----------------------------------------------------------------------------------


def test_transforms_of_plain_tensors_are_torchs():
    x, image = inputs()
    assert torch.equal(vmap(made(MLP))(x), vmap(made(MLP))(x))
    compiled = torch.compile(lambda t: vmap(grad(lambda r: r.sin().sum()))(t), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x.cos())
    compiled = torch.compile(lambda t: jacrev(lambda r: r.sin())(t), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x[0]), x[0].cos().diag())
    compiled = torch.compile(lambda t: hessian(lambda r: r.sin().sum())(t), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x[0]), -x[0].sin().diag())
    with pytest.raises(RuntimeError, match="running_mean"):
        norm = nn.BatchNorm1d(2).double()
        vmap(lambda r: norm(r[None]))(image)
