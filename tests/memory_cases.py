"""How a tensor lies in memory, drawn: for tests that compare operators on shards in any memory with one device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from seeded import seeded
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.testing import shard, shared_mesh


@dataclass(frozen=True)
class Memory:
    """Of one rank's tensor.

    Attributes:
        order: its dims, the outermost in memory first.
        steps: how many places of its memory there are for each entry of a dim.
        ones: multiplies the strides of dims of length 1, which say nothing of where elements are.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    ones: int = 1

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The same values in this memory."""
        room = [t.shape[d] * self.steps[d] for d in self.order]
        strides = [math.prod(room[i + 1 :]) for i in range(len(room))]
        stride = [0] * t.ndim
        for d, n in zip(self.order, strides):
            stride[d] = n * self.steps[d] * (self.ones if t.shape[d] == 1 else 1)
        made = t.new_empty(max(1, math.prod(room) * self.ones)).as_strided(t.shape, stride)
        return made.copy_(t)


ROW_MAJOR, CHANNELS_LAST = "row-major", "channels last"


def order_of(ndim, kind):
    """The dims in memory, the outermost first."""
    return (0, *range(2, ndim), 1) if kind == CHANNELS_LAST else tuple(range(ndim))


@st.composite
def memories(draw, ndim):
    """Row-major, channels-last or permuted; dense, or every other entry of a wider tensor."""
    kinds = st.sampled_from([ROW_MAJOR, CHANNELS_LAST, CHANNELS_LAST])
    order = draw(st.one_of(kinds.map(lambda kind: order_of(ndim, kind)), st.permutations(range(ndim)).map(tuple)))
    sliced = draw(st.one_of(st.none(), st.none(), st.integers(0, ndim - 1)))
    steps = tuple(2 if d == sliced else 1 for d in range(ndim))
    return Memory(order, steps, draw(st.sampled_from([1, 1, 3])))


@st.composite
def placements_in_memory(draw, shape, ranks, dims):
    """``(tensor dim, shard sizes, memory of each rank, dim that is expanded)``; most ranks have the same memory."""
    dim = draw(st.sampled_from(list(dims)))
    ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=ranks - 1, max_size=ranks - 1)))
    sizes = tuple(b - a for a, b in zip([0, *ends], [*ends, shape[dim]]))
    same = draw(memories(len(shape)))
    each = tuple(draw(st.one_of(st.just(same), st.just(same), memories(len(shape)))) for _ in range(ranks))
    expanded = draw(st.one_of(st.none(), st.none(), st.sampled_from([d for d in range(len(shape)) if d != dim])))
    return dim, sizes, each, expanded


@st.composite
def cases(draw, functions, shape, ranks, dims, ones=(0, 1)):
    """A name of ``functions``, a shape, of which dims ``ones`` may be short, and a placement in memory."""
    name = draw(st.sampled_from(sorted(functions)))
    short = draw(st.sets(st.sampled_from(ones), max_size=len(ones))) if ones else ()
    shape = tuple(1 if d in short else n for d, n in enumerate(shape))
    return name, shape, draw(placements_in_memory(shape, ranks, dims))


def evaluated(function, x):
    """The result and the gradient of a weighted sum of it."""
    y = function(x)
    number = y.abs() if y.is_complex() else y
    weights = torch.linspace(0.5, 1.5, max(1, y.numel()), dtype=number.dtype)[: y.numel()].view(y.shape)
    return y.detach(), torch.autograd.grad((number * weights).sum(), x)[0]


def check_case(function, shape, placement):
    """Compare with one device, whose tensor is row-major; None where that raises or shards are refused."""
    dim, sizes, each, expanded = placement
    mesh = shared_mesh(len(sizes))
    x = torch.randn(*shape, dtype=torch.float64, generator=seeded(math.prod(shape)))
    if expanded is not None:
        x = x.narrow(expanded, 0, 1).expand(shape)
    x = x.clone(memory_format=torch.contiguous_format)
    try:
        expected = evaluated(function, x.requires_grad_())
    except (RuntimeError, ValueError, IndexError):
        return
    local = shard(x.detach(), mesh, [Shard(dim)], {0: sizes}).to_local()
    if expanded is not None:
        local = local.narrow(expanded, 0, 1)
    local = each[mesh.get_local_rank()].of(local)
    if expanded is not None:
        local = local.expand([shape[d] if d == expanded else n for d, n in enumerate(local.shape)])
    sharded = ShardTensor.from_local(local, mesh, [Shard(dim)], shard_sizes={0: sizes}).requires_grad_()
    try:
        found = evaluated(function, sharded)
    except UnsupportedSharding:
        return
    for what, a, b in zip(("result", "gradient"), found, expected):
        a = a.full_tensor() if isinstance(a, ShardTensor) else a
        try:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None


def check_drawn(module, table, drawn):
    """Every drawn case of a table of functions; tells the first that fails."""
    functions = getattr(__import__(module), table)
    for name, shape, placement in drawn:
        try:
            check_case(functions[name], shape, placement)
        except Exception as error:
            raise AssertionError(f"{name} of {shape} as {placement}: {type(error).__name__}: {error}") from error
