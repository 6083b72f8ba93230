"""Linear layers and matrix products against the unsharded ones: values, gradients, messages and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    shard,
    shared_mesh,
)

WHOLE = [Replicate()]


def data(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


LINEAR = [
    (1, [((2, 8, 3, 4), (1,), {})]),
    (
        2,
        [
            ((2, 8, 3, 4), (1,), {0: (5, 3)}),
            ((2, 3, 8, 4), (2,), {0: (7, 1)}),
            ((2, 8, 4), (1,), {0: (0, 8)}),
            ((3, 8, 4), (0,), {0: (1, 2)}),
            ((8, 4), (0,), {0: (8, 0)}),
            ((2, 8, 4), (None,), {}),
            # The features themselves: each rank's product is a contribution.
            ((2, 8, 4), (2,), {0: (3, 1)}),
            ((4,), (0,), {0: (0, 4)}),
            ((4,), (None,), {}),
        ],
    ),
    (3, [((2, 8, 4), (1,), {0: (3, 0, 5)})]),
    (4, [((2, 8, 3, 4), (1,), {0: (1, 4, 0, 3)})]),
    (
        (2, 2),
        [
            ((3, 8, 4), (0, 1), {0: (1, 2), 1: (5, 3)}),
            ((2, 8, 3, 4), (1, 2), {0: (0, 8), 1: (1, 2)}),
            ((2, 8, 4), (1, 2), {0: (7, 1), 1: (1, 3)}),
            ((2, 8, 4), (None, 1), {1: (7, 1)}),
        ],
    ),
]


@pytest.mark.parametrize(("mesh_shape", "cases"), LINEAR)
@on_ranks("mesh_shape")
def test_linear(mesh_shape, cases):
    """Cases: (input shape, dims cut, sizes)."""
    torch.manual_seed(0)
    for bias in (True, False):
        module = nn.Linear(4, 5, bias=bias).double()
        for shape, dims, sizes in cases:
            placements = [Replicate() if d is None else Shard(d) for d in dims]
            assert_matches_unsharded(
                module, data(*shape), mesh_shape=mesh_shape, placements=placements, shard_sizes=sizes
            )


def flattened():
    """As networks for signals end: a layer over all samples, of which each rank has some."""
    return nn.Sequential(nn.Conv1d(3, 4, 5, padding=2), nn.Flatten(), nn.Linear(4 * 17, 32))


@on_ranks(3)
def test_a_layer_over_flattened_samples():
    signal = data(2, 3, 17)
    for sizes in [(6, 6, 5), (0, 16, 1)]:
        options = {"mesh_shape": 3, "placements": [Shard(2)], "shard_sizes": {0: sizes}}
        assert_matches_unsharded(flattened().double(), signal, **options)
        weight = nn.Parameter(data(4, 3, 17))
        assert_matches_unsharded(lambda x, w=weight: torch.einsum("bct,oct->bo", x, w), signal, **options)


def test_slices_of_parameters_are_not_kept():
    """The program keeps the parameter, so a rank's part of it may be a view. It takes no memory of its own."""
    found = shardtensor.explain(flattened(), torch.empty(2, 3, 17, device="meta"), mesh=2, shard=2, backward=True)
    ((linear, kept),) = [(each, each.shares) for each in found.layers if each.operator == "linear"]
    assert linear.layout == "R" or linear.layout.startswith("P")
    assert {share.saved_bytes for share in kept.values()} == {2 * 34 * 4}  # its half of the features


@on_ranks(2)
def test_a_parameter_that_is_written_before_the_backward_pass():
    """It is an error, as on one device: a gradient would be computed with what has been written."""
    layer = nn.Linear(8, 3)
    y = layer(shard(torch.randn(2, 8), shared_mesh(2), [Shard(1)], {0: (5, 3)}, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


A, B = {0: (5, 3)}, {0: (1, 2)}
# (shape, placements, sizes) of both operands of a matmul on two ranks; test_contraction.py has all pairs of cuts
MATMUL = [
    # rows
    ((8, 4), [Shard(0)], A, (4, 6), WHOLE, None),
    ((2, 8, 4), [Shard(1)], A, (4, 6), WHOLE, None),
    ((2, 8, 4), [Shard(1)], A, (2, 4, 6), WHOLE, None),
    ((2, 8, 4), [Shard(1)], A, (4,), WHOLE, None),
    # columns
    ((4, 3), WHOLE, None, (3, 8), [Shard(1)], A),
    ((2, 4, 3), WHOLE, None, (3, 8), [Shard(1)], A),
    ((3,), WHOLE, None, (3, 8), [Shard(1)], A),
    # the contracted dim, the other operand cut alike or not at all
    ((4, 8), [Shard(1)], A, (8, 6), WHOLE, None),
    ((4, 8), WHOLE, None, (8, 6), [Shard(0)], {0: (0, 8)}),
    ((8,), [Shard(0)], A, (8,), [Shard(0)], A),
    ((4, 8), [Shard(1)], A, (8,), [Shard(0)], A),
    # batch dims, of both or of one that the other is broadcast along
    ((3, 4, 5), [Shard(0)], B, (3, 5, 6), WHOLE, None),
    ((3, 4, 5), WHOLE, None, (3, 5, 6), [Shard(0)], B),
    ((3, 4, 5), [Shard(0)], B, (5, 6), WHOLE, None),
    ((4, 5), WHOLE, None, (3, 5, 6), [Shard(0)], B),
    ((3, 4, 5), [Shard(0)], B, (1, 5, 6), WHOLE, None),
    ((2, 3, 4, 5), [Shard(1)], B, (3, 5, 6), [Shard(0)], B),
    ((3, 2, 4, 5), [Shard(0)], B, (2, 5, 6), WHOLE, None),
    # Partial
    ((8, 4), [Partial()], None, (4, 6), WHOLE, None),
]


@on_ranks(2)
def test_matmul():
    for a, pa, sa, b, pb, sb in MATMUL:
        try:
            assert_matches_unsharded(
                torch.matmul, data(*a), data(*b), mesh_shape=2, placements=[pa, pb], shard_sizes=[sa, sb]
            )
            if pb == WHOLE and sb is None:  # a plain operand
                other = data(*b)
                assert_matches_unsharded(
                    lambda x, other=other: x @ other, data(*a), mesh_shape=2, placements=pa, shard_sizes=sa
                )
            if pa == WHOLE and sa is None:
                other = data(*a)
                assert_matches_unsharded(
                    lambda x, other=other: other @ x, data(*b), mesh_shape=2, placements=pb, shard_sizes=sb
                )
        except AssertionError as error:
            raise AssertionError(f"{a} {pa} {sa} @ {b} {pb} {sb}") from error


@on_ranks(4)
def test_matmul_on_a_mesh_of_two_dims():
    both = {0: (1, 2), 1: (5, 3)}
    for a, pa, sa, b, pb, sb in [
        ((3, 8, 4), [Shard(0), Shard(1)], both, (3, 4, 6), [Shard(0), Replicate()], {0: (1, 2)}),
        ((3, 8, 4), [Shard(0), Shard(1)], both, (4, 6), [Replicate(), Replicate()], None),
        ((3, 8), [Shard(0), Shard(1)], both, (8, 4), [Replicate(), Shard(0)], {1: (5, 3)}),
        ((3, 4), [Shard(0), Replicate()], {0: (1, 2)}, (4, 8), [Replicate(), Shard(1)], {1: (5, 3)}),
    ]:
        assert_matches_unsharded(
            torch.matmul, data(*a), data(*b), mesh_shape=(2, 2), placements=[pa, pb], shard_sizes=[sa, sb]
        )


@on_ranks(2)
def test_autocast():
    x, weight = data(2, 8, 4, dtype=torch.float32), nn.Parameter(data(5, 4, dtype=torch.float32))
    sharded = shard(x, shared_mesh(2), [Shard(1)], {0: (5, 3)})
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        for function in (F.linear, lambda x, w: x @ w.t(), lambda x, w: torch.mm(x[0], w.t())):
            y, whole = function(sharded, weight), function(x, weight)
            assert isinstance(y, ShardTensor)
            assert y.dtype == whole.dtype == torch.bfloat16
            torch.testing.assert_close(y.full_tensor(), whole, rtol=0.02, atol=0.02)
    F.linear(sharded, weight).sum().backward()
    assert weight.grad.dtype == torch.float32


@on_ranks(2)
def test_replicated_dtensor_weights():
    mesh = shared_mesh(2)
    x, weight, bias = data(2, 8, 4), data(5, 4), data(5)
    plain = [t.clone().requires_grad_() for t in (weight, bias)]
    distributed = [distribute_tensor(t, mesh, [Replicate()]).requires_grad_() for t in (weight, bias)]
    F.linear(x, *plain).square().sum().backward()
    F.linear(shard(x, mesh, [Shard(1)], {0: (5, 3)}), *distributed).square().sum().backward()
    for mine, theirs in zip(distributed, plain):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_what_is_sent():
    mesh = shared_mesh(2)
    module = nn.Linear(4, 5)
    x = shard(data(2, 8, 4, dtype=torch.float32), mesh, [Shard(1)], {0: (5, 3)}, requires_grad=True)
    cotangent = torch.ones_like(module(x).detach())
    module.zero_grad()
    with count_communication() as forward:
        y = module(x)
        placements = [tuple((module(x) @ data(5, 2, dtype=torch.float32)).placements)]
        a = shard(data(3, 8), mesh, [Shard(1)])
        placements.append(tuple((a @ data(8, 1)).placements))
    with count_communication() as exchanged:
        placements.append(tuple((a @ data(8, 5)).placements))
        module(a[:, 2:6].float()).relu()
    with count_communication() as backward:
        y.backward(cotangent)
    forward, backward, exchanged, placements = (
        (forward.messages, dict(forward.collectives)),
        (backward.messages, dict(backward.collectives), backward.collective_bytes),
        dict(exchanged.collectives),
        placements,
    )
    assert forward == (0, {})
    assert backward == (0, {"all_reduce": 1}, 4 * (20 + 5))  # the weight's and bias's gradients
    # What is summed over is cut: a small sum stays Partial, for a large one rows are cut instead.
    assert placements == [(Shard(1),), (Partial(),), (Shard(0),)]
    assert exchanged == {"all_to_all": 2}


def operand():
    return shard(data(2, 8, 4), shared_mesh(2), [Shard(1)], {0: (5, 3)})


ERRORS = {
    "shapes of linear": (lambda x: F.linear(x, data(6, 5)), RuntimeError, "same reduction dim|cannot be multiplied"),
    "shapes": (lambda x: x @ data(5, 6), RuntimeError, "same reduction dim|cannot be multiplied"),
    "dtypes": (lambda x: F.linear(x, data(6, 4).float()), RuntimeError, "dtype"),
    "einsum": (
        lambda x: torch.einsum("bij,jk->bik", x, data(5, 6)),
        RuntimeError,
        "does not broadcast|subscript j",
    ),
    "growing in place": (
        lambda x: shard(torch.zeros(1), x.device_mesh, [Shard(0)]).addbmm_(torch.ones(2, 5, 3), torch.ones(2, 3, 10)),
        UnsupportedSharding,
        "addbmm_: it would change the shape of a tensor in place",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_same_on_every_rank(name):
    raises_alike(operand, name)
