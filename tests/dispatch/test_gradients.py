"""backward(), autograd.grad(), activation checkpointing and hooks see what they see with plain tensors."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardtensor.communication import redistribute
from shardtensor.observe.counting import count_communication
from shardtensor.ops.normalization import plans
from shardtensor.testing import assert_matches_unsharded, run_distributed, run_expecting_errors, shard, shared_mesh

CUT = {0: (5, 3)}


def image(requires_grad=True):
    torch.manual_seed(0)
    whole = torch.randn(2, 4, 8, 6, dtype=torch.float64)
    return whole, shard(whole, shared_mesh(2), [Shard(2)], CUT, requires_grad=requires_grad)


def network():
    torch.manual_seed(1)
    layers = [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2),
    ]
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1)).double()


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@on_ranks(2)
def test_activation_checkpointing_recomputes_on_shards(reentrant):
    whole, x = image()
    model = network()
    y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
    y.square().mean().backward()
    whole.requires_grad_()
    reference = network()
    reference(whole).square().mean().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad, rtol=1e-10, atol=1e-12)
    assert x.grad.shard_sizes == x.shard_sizes
    for p, q in zip(model.parameters(), reference.parameters()):
        assert type(p.grad) is torch.Tensor
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_autograd_grad_and_backward_take_plain_and_sharded_seeds():
    whole, x = image()
    seed, local_seed = torch.randn_like(whole), None
    (plain,) = torch.autograd.grad(x.square(), x, seed)
    local_seed = shard(seed, shared_mesh(2), [Shard(2)], {0: (1, 7)})
    (cut,) = torch.autograd.grad([x.square()], [x], [local_seed])
    for g in (plain, cut):
        torch.testing.assert_close(g.full_tensor(), 2 * whole * seed, rtol=1e-12, atol=1e-12)
    other = torch.zeros(3, requires_grad=True)
    assert torch.autograd.grad(x.sum(), [x, other], allow_unused=True)[1] is None
    assert torch.equal(torch.autograd.grad(x.sum(), [other], materialize_grads=True)[0], torch.zeros(3))
    torch.autograd.backward([x.sum(), (2 * x).sum()])
    assert torch.equal(x.grad.full_tensor(), torch.full_like(whole, 3))
    x.grad = None
    x.square().backward(seed, inputs=[x])
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole * seed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoint"])
@on_ranks(2)
def test_gradients_that_are_not_asked_for_are_neither_computed_nor_summed(checkpointed):
    """Forces are the gradient of an energy by positions: no gradient of a weight is needed for them."""
    whole, x = image()
    whole.requires_grad_()
    model, reference = network(), network()

    def energy(y):
        return (checkpoint(model, y, use_reentrant=False) if checkpointed else model(y)).square().mean()

    (expected,) = torch.autograd.grad(reference(whole).square().mean(), whole, create_graph=True)
    loss = energy(x)
    with count_communication() as counted:
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-10, atol=1e-12)
    sums = 2 * 2 * 2 * 8  # of the group norm's gradient: two for each of two groups of two images
    assert counted.collective_bytes <= sums * (2 if checkpointed else 1), counted
    loss = energy(x)
    with count_communication() as counted:
        (found,) = torch.autograd.grad(loss, x, create_graph=True)
    assert counted.collective_bytes <= 4 * sums, counted
    found.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        if q.grad is None:
            assert p.grad is None or not p.grad.any()
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_gradients_of_some_weights_leave_out_the_input_s():
    whole, x = image()
    model, reference = network(), network()
    whole.requires_grad_()
    some = [model[0].weight, model[5].bias]
    with count_communication() as forward:
        loss = model(x).square().mean()
    with count_communication() as backward:
        found = torch.autograd.grad(loss, some)
    expected = torch.autograd.grad(reference(whole).square().mean(), [reference[0].weight, reference[5].bias])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    with count_communication() as both:
        torch.autograd.grad(model(x).square().mean(), [*some, x])
    assert both.messages - forward.messages - backward.messages == 1  # the gradient of the first convolution's halo
    model(x).square().mean().backward(inputs=[*some, x])
    assert [p.grad is not None for p in model.parameters()] == [True, False, False, False, False, True]
    torch.testing.assert_close(model[0].weight.grad, expected[0], rtol=1e-10, atol=1e-12)


def operand():
    return image()[1]


ERRORS = {
    "scalar": (lambda x: (x * 2).backward(), RuntimeError, "grad can be implicitly created only for scalar outputs"),
    "shape": (
        lambda x: (x * 2).backward(torch.ones_like(x.to_local())),
        RuntimeError,
        "for a ShardTensor of shape (2, 4, 8, 6); a plain gradient must be that of the global tensor",
    ),
    "detached": (
        lambda x: x.detach().sum().backward(),
        RuntimeError,
        "does not require grad and does not have a grad_fn",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    raises_alike(operand, name)


@on_ranks(2)
def test_second_derivatives():
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)

    def penalty(function):
        def squared_gradient(x):
            (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            return (grad * grad).sum()

        return squared_gradient

    functions = {
        "sum": lambda x: x.square().sum(1).square(),
        "mean": lambda x: (x * x * x).mean(),
        "mean of rows": lambda x: (x * x * x).mean(0, keepdim=True).exp(),
        "softmax": lambda x: x.softmax(1)[:, :1],
        "softmax of columns": lambda x: x.softmax(0).square(),
        "logsumexp": lambda x: x.logsumexp(1),
        "var": lambda x: x.var(1),
        "norm": lambda x: x.norm(dim=1),
        "cumsum": lambda x: x.square().cumsum(1).square(),
        "gelu": F.gelu,
        "normalize": lambda x: F.normalize(x) ** 3,
    }
    failures = []
    for name, function in functions.items():
        for dim, sizes in ((0, (1, 3)), (1, (0, 6)), (1, (5, 1))):
            try:
                assert_matches_unsharded(
                    penalty(function), x, mesh_shape=2, placements=[Shard(dim)], shard_sizes={0: sizes}
                )
            except AssertionError as error:
                failures.append(f"{name} {dim} {sizes}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("order", [2, 3])
@on_ranks(2)
def test_derivatives_with_weights(order):
    """Whose sums over the ranks are differentiated, too, on ranks with nothing to sum as well."""
    torch.manual_seed(0)
    image, rows = torch.randn(2, 3, 6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    kernel, weight = torch.randn(3, 2, 3, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    cases = {
        "conv_transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1), image, kernel, kernel[0, :, 0, 0], 2),
        "linear": (F.linear, rows, weight, weight[:, 0], 0),
    }
    for function, x, w, b, dim in cases.values():

        def penalty(function):
            def squares(*tensors):
                grads = torch.autograd.grad(function(*tensors).pow(3).sum(), tensors, create_graph=True)
                return sum((grad * grad).sum() for grad in grads)

            return squares

        for _ in range(order - 1):
            function = penalty(function)
        for sizes in ((2, 4), (6, 0)):
            assert_matches_unsharded(
                function,
                x * 0.1,
                w,
                b.clone(),
                mesh_shape=2,
                placements=[[Shard(dim)], None, None],
                shard_sizes=[{0: sizes}, None, None],
            )


@on_ranks(2)
def test_what_second_derivatives_do_not_depend_on_has_none():
    """An optimizer changes a parameter whose gradient is zero, by weight decay or momentum, and not one without."""
    torch.manual_seed(0)
    image, rows, scale = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 6, 3), (6, 4), (2, 4)))
    kernel, weight = torch.randn(4, 4, 3, 3, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    cases = {
        "linear": (F.linear, rows, (weight, scale[0]), 0),
        "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), image, (kernel, scale[0]), 2),
        "conv_transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1), image, (kernel, scale[0]), 2),
        "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), image, tuple(scale), 2),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), rows, tuple(scale), 0),
        "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), rows, (scale[0],), 0),
        "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), image, tuple(scale), 2),
        "batch_norm, eval": (lambda x, w, b: F.batch_norm(x, scale[0], scale[1].exp(), w, b), image, tuple(scale), 2),
    }

    def absent(function, x, parameters, wanted, alone):
        """Whether there is no gradient of the weight's and the bias's, after a penalty on one of the gradients, which
        is computed alone or with the others.
        """
        x, parameters = x.detach().requires_grad_(), [p.clone().requires_grad_() for p in parameters]
        y = function(x.tanh(), *parameters).sum()
        tensors = [x, *parameters]
        if alone:
            (grad,) = torch.autograd.grad(y, tensors[wanted], create_graph=True)
        else:
            grad = torch.autograd.grad(y, tensors, create_graph=True)[wanted]
        grad.square().sum().backward()
        return [p.grad is None for p in parameters], parameters

    def replicated(p):
        return distribute_tensor(p, shared_mesh(2), [Replicate()])

    failures = []
    for name, (function, x, parameters, dim) in cases.items():
        for sizes in ((4, 2), (6, 0)):
            sharded = shard(x, shared_mesh(2), [Shard(dim)], {0: sizes})
            ways = [(0, True, False), (1, True, False), (0, False, True), (1, False, False), (1, False, True)]
            for wanted, alone, distributed in ways:  # of a bias nothing depends on anything
                expected, one = absent(function, x, parameters, wanted, alone)
                given = map(replicated, parameters) if distributed else parameters
                found, ours = absent(function, sharded, given, wanted, alone)
                if found != expected:
                    failures.append(f"{name} {sizes} {wanted} {distributed}: {found} instead of {expected}")
                for p, q in zip(one, ours):
                    if p.grad is not None and q.grad is not None:
                        torch.testing.assert_close(q.grad.full_tensor() if distributed else q.grad, p.grad)
    assert not failures, "\n".join(failures)


@on_ranks(2)
def test_zeros_that_have_no_memory_are_added_to_gradients():
    """The second derivative of abs() is zeros that torch keeps no memory for; other gradients are added to them."""
    cases = {
        "abs": (lambda x: x.abs().pow(3), torch.float64),
        "hfftn": (lambda x: torch.fft.hfftn(x).abs().pow(3), torch.complex128),
        "sgn": (lambda x: (x.sgn() * x).square() + x.sgn() * x.exp(), torch.float64),
        "products": (lambda x: (x * x.cos()).abs().pow(3) + (x / x.exp()).abs().pow(3), torch.float64),
    }
    for function, dtype in cases.values():
        torch.manual_seed(0)
        whole = torch.randn(6, 5, dtype=dtype)
        found = []
        for x in (whole, shard(whole, shared_mesh(2), [Shard(0)], {0: (4, 2)})):
            x = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.abs().square().sum(), x)
            found.append((first.detach(), second))
        for expected, ours in zip(*found):
            torch.testing.assert_close(ours.full_tensor(), expected, rtol=1e-10, atol=1e-10)


def second_derivative(case):
    x = shard(torch.rand(1, 2, 8, 6), shared_mesh(2), [Shard(2)], {0: (5, 3)}, requires_grad=True)
    # The gradient of a sum is a constant, but what comes of it depends on the input.
    value = {"cumprod": x.cumprod, "prod": x.prod}[case](2)
    (grad,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    grad.square().sum().backward()


@pytest.mark.parametrize(("case", "name"), [("cumprod", "cumprod"), ("prod", "prod")])
def test_what_cannot_be_differentiated_twice_says_so(case, name):
    for error in run_expecting_errors(second_derivative, 2, case):
        with pytest.raises(RuntimeError, match=f"gradient of {name} on a ShardTensor cannot be differentiated twice"):
            raise error


class Backward(TorchDispatchMode):
    """What happens in a backward pass, in order: the all-reduces' starts and waits, and torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.events.append(str(func))
        return func(*args, **(kwargs or {}))

    def all_reduce(self, started, *args, **kwargs):
        work = started(*args, **kwargs)
        self.events.append("start")
        return SimpleNamespace(wait=lambda: (self.events.append("wait"), work.wait()))


def order(layer) -> list[str]:
    _, x = image(requires_grad=False)
    x = (x.movedim(1, -1) if isinstance(layer, nn.Linear | nn.LayerNorm) else x).detach().requires_grad_()
    for p in layer.parameters():  # so that its gradient is summed at once
        p.register_post_accumulate_grad_hook(lambda p: None)
    total = layer.double()(x).square().sum()
    mode = Backward()
    started = {
        name: partial(mode.all_reduce, getattr(redistribute, name))
        for name in ("c10d_all_reduce", "c10d_all_reduce_coalesced")
    }
    small = mock.patch.object(plans, "WORTH_OVERLAPPING", 0)  # and a small layer norm
    with mode, small, mock.patch.multiple(redistribute, **started):
        total.backward()
    assert x.grad is not None and all(type(p.grad) is torch.Tensor for p in layer.parameters())
    return mode.events


@pytest.mark.parametrize(
    ("layer", "meanwhile"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), "convolution_backward"),
        (nn.ConvTranspose2d(4, 4, 2, stride=2), "convolution_backward"),
        (nn.Linear(4, 4), "mm"),
        (nn.LayerNorm(4), "native_layer_norm_backward"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_parameters_gradients_are_summed_while_the_input_s_is_computed(layer, meanwhile):
    """One all-reduce for weight and bias; all the while the layer works on its input's gradient."""
    for events in run_distributed(order, 2, layer):
        first = events.index("start")
        last = len(events) - 1 - events[::-1].index("wait")
        assert any(meanwhile in event for event in events[first:last]), events
        assert events.count("start") == 1


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.BatchNorm2d(4)], ids=lambda layer: type(layer).__name__)
def test_sums_of_parameters_and_of_statistics_are_one_message(layer):
    for events in run_distributed(order, 2, layer):
        assert events.count("start") == 1


@on_ranks(2)
def test_a_leaf_s_gradient_is_added_to_and_scaled_in_place():
    """That of a sum is one number expanded, which torch would keep as it is where the strides look contiguous."""
    _, x = image()
    for _ in range(2):
        x.sum().backward()
    x.grad.mul_(3)
    assert torch.equal(x.grad.full_tensor(), torch.full(x.shape, 6.0, dtype=x.dtype))
