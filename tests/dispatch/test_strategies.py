"""Operators that DTensor has been given a sharding strategy for: results and gradients of one device, or a refusal."""

from __future__ import annotations

import pytest
import torch
from alike import raises_alike
from on_ranks import on_ranks
from seeded import seeded
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor._ops.utils import register_op_strategy
from torch.distributed.tensor.experimental import register_sharding

import shardtensor
from shardtensor import UnsupportedSharding, allow_gather
from shardtensor._compat import strategies
from shardtensor.dispatch.user_strategies import fall_back
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)

# -- operators of a user ----------------------------------------------------------------------------------------------


@torch.library.custom_op("falling::gate", mutates_args=())
def gate(x: Tensor, w: Tensor, power: float) -> Tensor:
    return torch.tanh(x * w) ** power


@torch.library.custom_op("falling::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, w: Tensor, power: float) -> tuple[Tensor, Tensor]:
    gates = torch.tanh(x * w)
    slope = grad * power * gates ** (power - 1) * (1 - gates * gates)
    return slope * w, (slope * x).flatten(0, -2).sum(0)


gate.register_fake(lambda x, w, power: torch.empty_like(x))
gate_backward.register_fake(lambda grad, x, w, power: (torch.empty_like(x), torch.empty_like(w)))
gate.register_autograd(
    lambda ctx, grad: (*gate_backward(grad, *ctx.saved_tensors, ctx.power), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(*inputs[:2]), setattr(ctx, "power", inputs[2])),
)


@register_sharding(torch.ops.falling.gate.default)
def gate_sharding(x, w, power):
    last = x.ndim - 1
    rows = [([Shard(d)], [Shard(d), Replicate(), None]) for d in range(last)]
    return [([Replicate()], [Replicate(), Replicate(), None]), *rows, ([Shard(last)], [Shard(last), Shard(0), None])]


@register_sharding(torch.ops.falling.gate_backward.default)
def gate_backward_sharding(grad, x, w, power):
    last = x.ndim - 1
    rows = [([Shard(d), Partial()], [Shard(d), Shard(d), Replicate(), None]) for d in range(last)]
    alike = [[Replicate()] * 2, [Replicate()] * 3 + [None]]
    return [tuple(alike), *rows, ([Shard(last), Shard(0)], [Shard(last), Shard(last), Shard(0), None])]


@torch.library.custom_op("falling::every_second", mutates_args=())
def every_second(x: Tensor) -> Tensor:
    return x[::2].clone()


every_second.register_fake(lambda x: x.new_empty((x.shape[0] + 1) // 2, *x.shape[1:]))
register_sharding(torch.ops.falling.every_second.default)(lambda x: [([Shard(0)], [Shard(0)])])


@torch.library.custom_op("falling::centered", mutates_args=())
def centered(x: Tensor, dim: int) -> Tensor:
    return x - x.mean(dim, keepdim=True)


centered.register_fake(lambda x, dim: torch.empty_like(x))
register_sharding(torch.ops.falling.centered.default)(
    lambda x, dim: (
        [([Replicate()], [Replicate(), None])] + [([Shard(d)], [Shard(d), None]) for d in range(x.ndim) if d != dim]
    )
)


@torch.library.custom_op("falling::total", mutates_args=())
def total(tensors: list[Tensor], scale: Tensor) -> Tensor:
    return sum(tensors) * scale


total.register_fake(lambda tensors, scale: torch.empty_like(tensors[0]))
register_sharding(torch.ops.falling.total.default)(
    lambda tensors, scale: [([Shard(0)], [Shard(0)] * len(tensors) + [Replicate()])]
)


@torch.library.custom_op("falling::parts", mutates_args=())
def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp(min=0), x.clamp(max=0)


@register_op_strategy(torch.ops.falling.parts.default)
def parts_strategy(schema):
    spec = schema.args_schema[0].strategies[0].output_spec
    return OpStrategy([OpSpec((spec, spec), (spec,), [[0.0]])])


parts.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))


@torch.library.custom_op("falling::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
register_sharding(torch.ops.falling.doubled.default)(
    lambda x: [([p], [p]) for p in (Replicate(), Partial(), *map(Shard, range(x.ndim)))]
)


@torch.library.custom_op("falling::blocks", mutates_args=())
def blocks(x: Tensor, y: Tensor) -> Tensor:
    return x * y.repeat_interleave(2, 0)


@blocks.register_fake
def _(x, y):
    torch._check(x.shape[0] == 2 * y.shape[0], lambda: f"{x.shape[0]} is not twice {y.shape[0]}")
    return torch.empty_like(x)


register_sharding(torch.ops.falling.blocks.default)(lambda x, y: [([Shard(0)], [Shard(0), Shard(0)])])


@torch.library.custom_op("falling::written", mutates_args={"x"})
def written(x: Tensor) -> None:
    x.zero_()


register_sharding(torch.ops.falling.written.default)(lambda x: [([], [Shard(0)])])


@torch.library.custom_op("falling::copied", mutates_args={"target"})
def copied(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


@torch.library.custom_op("falling::step", mutates_args=(), tags=(torch.Tag.pointwise,))
def step(x: Tensor) -> Tensor:
    return x * x * (3 - 2 * x)


step.register_fake(torch.empty_like)


@torch.library.custom_op("falling::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


noise.register_fake(torch.empty_like)
register_sharding(torch.ops.falling.noise.default)(lambda x: [([Shard(0)], [Shard(0)])])


@torch.library.custom_op("falling::unruled", mutates_args=())
def unruled(x: Tensor) -> Tensor:
    return x * 2


unruled.register_fake(torch.empty_like)


# -- what works -------------------------------------------------------------------------------------------------------


def values(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed))


class Gated(torch.nn.Module):
    """Plain weights, of which a strategy may want a shard."""

    def __init__(self, features):
        super().__init__()
        self.weight = torch.nn.Parameter(values(features, seed=1))

    def forward(self, x):
        return gate(x, self.weight, 2.0)


def gated(shape, placements, sizes):
    x = values(3, 7, 6)
    layout = {"mesh_shape": shape, "placements": placements, "shard_sizes": sizes}
    assert_matches_unsharded(Gated(6), x, **layout)
    # Operands that lie otherwise are sharded as the strategy says.
    w = values(6, seed=1)
    weights = [Shard(0)] + [Replicate()] * (len(placements) - 1)
    layout |= {"placements": [placements, weights, None], "shard_sizes": [sizes, {}, None]}
    assert_matches_unsharded(gate, x, w, 2.0, **layout)


CASES = [
    (2, [Shard(1)], {0: (5, 2)}),
    (3, [Shard(2)], {0: (4, 0, 2)}),
    (3, [Shard(0)], {0: (1, 1, 1)}),
    (2, [Replicate()], {}),
    (2, [Partial()], {}),
    ((2, 2), [Shard(1), Shard(2)], {0: (5, 2), 1: (1, 5)}),
    ((2, 2), [Replicate(), Shard(1)], {1: (3, 4)}),
]


@pytest.mark.parametrize(("shape", "placements", "sizes"), CASES)
def test_custom_operators_with_gradients(shape, placements, sizes):
    ranks = shape if isinstance(shape, int) else shape[0] * shape[1]
    run_distributed(gated, ranks, shape, placements, sizes, timeout=180.0)  # torch's first call imports dynamo


def local_results():
    mesh, x = shared_mesh(2), values(7, 5)
    sharded = shard(x, mesh, [Shard(0)], {0: (5, 2)})
    four, contributed = shard(x, mesh, [Shard(0)], {0: (4, 3)}), shard(x, mesh, [Partial()])
    with count_communication() as counted:
        both, half, twice = parts(sharded), every_second(four), doubled(contributed)
    assert not counted.collectives and not counted.messages
    assert [one.shard_sizes for one in both] == [{0: (5, 2)}] * 2
    assert all(torch.equal(one.full_tensor(), part) for one, part in zip(both, parts(x), strict=True))
    assert half.shard_sizes == {0: (2, 2)} and torch.equal(half.full_tensor(), every_second(x))
    assert twice.placements == (Partial(),)
    torch.testing.assert_close(twice.full_tensor(), 2 * x)


def communicating_results():
    mesh, x, y = shared_mesh(2), values(7, 5), values(7, 5, seed=1)
    sharded, other = shard(x, mesh, [Shard(0)], {0: (5, 2)}), shard(y, mesh, [Shard(0)], {0: (1, 6)})
    # Operands get common sizes; plain ones count as replicated, and are sharded without a message.
    with count_communication() as counted:
        found = total([y, sharded, other], torch.tensor(2.0, dtype=torch.float64))
    assert counted.messages <= 1 and found.shard_sizes == {0: (5, 2)}
    torch.testing.assert_close(found.full_tensor(), 2 * (x + y + y))
    # Different lengths are sharded evenly, as strategies suppose.
    z, halves = values(8, 5), values(4, 5)
    found = blocks(shard(z, mesh, [Shard(0)], {0: (5, 3)}), shard(halves, mesh, [Shard(0)], {0: (1, 3)}))
    assert found.shard_sizes == {0: (4, 4)}
    torch.testing.assert_close(found.full_tensor(), blocks(z, halves))
    # Of what the strategy accepts, what needs no gather.
    found = centered(sharded, 0)
    assert found.placements == (Shard(1),)
    torch.testing.assert_close(found.full_tensor(), centered(x, 0))
    with allow_gather():
        row = centered(shard(x[0], mesh, [Shard(0)]), 0)
    torch.testing.assert_close(row.full_tensor(), centered(x[0], 0))
    # What is elementwise by its tag needs no strategy.
    assert step(sharded).shard_sizes == {0: (5, 2)}
    torch.testing.assert_close(step(sharded).full_tensor(), step(x))


def writing_results():
    mesh, x = shared_mesh(2), values(7, 5)
    sharded, other = (shard(x, mesh, [Shard(0)], {0: sizes}) for sizes in ((5, 2), (1, 6)))
    with allow_gather():
        assert written(sharded) is None
        with pytest.raises(UnsupportedSharding, match="it would write to an operand other than"):
            copied(sharded, other)
    assert not sharded.full_tensor().any() and torch.equal(other.full_tensor(), x)


@pytest.mark.parametrize("check", [local_results, communicating_results, writing_results])
def test_results(check):
    run_distributed(check, 2)


@on_ranks(2)
def test_an_operator_of_torch_by_a_strategy_of_the_user():
    mesh, op = shared_mesh(2), torch.ops.aten.reflection_pad1d_backward.default
    x, grad = values(5, 3, 4), values(5, 3, 6)
    sharded = [shard(t, mesh, [Shard(0)], {0: (4, 1)}) for t in (grad, x)]
    with pytest.raises(UnsupportedSharding, match="no distributed form is known"):
        op(*sharded, [1, 1])
    before = strategies().get(op)
    register_sharding(op)(lambda grad, x, padding: [([Shard(0)], [Shard(0), Shard(0), None])])
    try:
        assert shardtensor.extend.registered()[op] is fall_back and shardtensor.supports(op).how == "strategy"
        found = op(*sharded, [1, 1])
    finally:
        strategies().pop(op)
        if before is not None:
            strategies()[op] = before
    assert found.shard_sizes == {0: (4, 1)}
    torch.testing.assert_close(found.full_tensor(), op(grad, x, [1, 1]))


def test_what_falls_back_is_registered():
    ops = torch.ops.falling
    table = shardtensor.extend.registered()
    assert all(table[getattr(ops, name).default] is fall_back for name in ("gate", "parts", "total"))
    assert shardtensor.supports(ops.gate.default).where == "shardtensor.dispatch.user_strategies"
    for op in (ops.noise.default, ops.unruled.default, torch.ops.aten.reflection_pad1d_backward.default):
        assert op not in table and not shardtensor.supports(op)
    # Strategies are for operators without a rule.
    assert table[torch.ops.aten.flip.default] is not fall_back
    assert shardtensor.supports(torch.ops.aten.add.Tensor).how == "elementwise"


# -- what is refused --------------------------------------------------------------------------------------------------


def operand():
    return shard(values(8, 5), shared_mesh(2), [Shard(0)], {0: (5, 3)})


ERRORS = {
    "gather": (
        lambda x: centered(shard(values(8, 5)[0], x.device_mesh, [Shard(0)]), 0),
        UnsupportedSharding,
        "its sharding strategy lists no placements that the operands can take without a gather",
    ),
    "sizes": (
        lambda x: every_second(x),
        UnsupportedSharding,
        "(Shard(dim=0),), but local results (3, 5), (2, 5) do not add up to (4, 5)",
    ),
    "raises": (
        lambda x: blocks(shard(values(6, 2), x.device_mesh, [Shard(0)], {0: (3, 3)}), values(3, 2)),
        UnsupportedSharding,
        "on a rank whose operands have the shapes (3, 2), (2, 2) it would raise: 3 is not twice 2",
    ),
    "writes": (lambda x: written(x), UnsupportedSharding, "may not write to operands"),
    "random": (lambda x: noise(x), UnsupportedSharding, "random numbers of shards would not match one device"),
    "none": (
        lambda x: unruled(x),
        UnsupportedSharding,
        "register a handler, or for a custom operator a sharding strategy",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_refusals(name):
    raises_alike(operand, name)


@on_ranks(2, timeout=120.0)
def test_compiled():
    torch.compiler.reset()
    x, w = values(3, 7, 6), values(6, seed=1).requires_grad_()
    expected = gate(x, w, 2.0) * 3
    (slope,) = torch.autograd.grad(expected.sum(), w)
    sharded = shard(x, shared_mesh(2), [Shard(1)], {0: (5, 2)})
    found = torch.compile(lambda x, w: gate(x, w, 2.0) * 3, backend="aot_eager", fullgraph=True)(sharded, w)
    torch.testing.assert_close(found.full_tensor(), expected)
    found.sum().backward()
    torch.testing.assert_close(w.grad, slope)
