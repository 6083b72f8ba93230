"""Results that are written into tensors: ``out=``, in-place operators by way of others, Partials, gathered results."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from on_ranks import on_ranks
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor, UnsupportedSharding, allow_gather
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)


def whole():
    torch.manual_seed(0)
    return torch.randn(7, 4, dtype=torch.float64)


def cut(value, sizes=(5, 2), placement=None, requires_grad=False):
    placement = placement or Shard(0)
    sizes = {0: sizes} if isinstance(placement, Shard) else None
    return shard(value.clone(), shared_mesh(2), [placement], sizes, requires_grad=requires_grad)


@on_ranks(2)
def test_out():
    v, x = whole(), cut(whole())
    out = cut(torch.zeros(7, 4, dtype=torch.float64), (0, 7))
    cases = [
        (lambda t, o: torch.add(t, 1, out=o), v + 1),
        (lambda t, o: torch.cumsum(t, 0, out=o), v.cumsum(0)),
        (lambda t, o: torch.matmul(t, torch.eye(4, dtype=t.dtype), out=o), v),
        (lambda t, o: torch.ops.aten.mul.out(t, t, out=o), v * v),
        (lambda t, o: torch.sort(t, 1, out=(o, o.clone().long())).values, v.sort(1).values),
        (lambda t, o: torch.add(v, v, out=o), v + v),  # plain operands
        (lambda t, o: torch.where(t > 0, t, -t, out=o), v.abs()),
    ]
    for function, expected in cases:
        assert function(x, out) is out
        assert out.shard_sizes == {0: (0, 7)}
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=0.0)
    total = cut(torch.zeros(4), placement=Replicate())
    torch.sum(x, 0, out=total)
    assert total.placements == (Replicate(),) and torch.allclose(total.full_tensor(), v.sum(0).float())
    with count_communication() as counted:
        torch.sin(x, out=x)
    assert not counted.collectives and torch.equal(x.full_tensor(), v.sin())


PARTIALS = {
    "add": lambda p, x: p.add_(x),
    "subtract twice": lambda p, x: p.sub_(x, alpha=2),
    "add a row": lambda p, x: p.add_(x[3]),
    "add to rows": lambda p, x: p[1:6].add_(x[1:6]),
    "copy": lambda p, x: p.copy_(x),
    "copy to a row": lambda p, x: p[2].copy_(x[3]),
}
REDUCED = {
    "multiply": lambda p, x: p.mul_(x),
    "addcmul": lambda p, x: p.addcmul_(x, x),
    "out=": lambda p, x: torch.sub(x, p, out=p),
    "number": lambda p, x: p.add_(1),
    "plain": lambda p, x: p.add_(whole()),
    "copied plain": lambda p, x: p.copy_(whole() * 2),
}


@on_ranks(2)
def test_written_to_partials():
    v, w = whole(), whole() + 1
    for placement, sizes in ((Shard(0), (5, 2)), (Shard(1), (0, 4)), (Replicate(), None), (Partial(), None)):
        for name, function in {**PARTIALS, **REDUCED}.items():
            p, expected = cut(v, placement=Partial()), v.clone()
            x = cut(w, sizes, placement)
            function(expected, w)
            with count_communication() as counted:
                function(p, x)
            assert p.placements == (Partial(),), name
            assert torch.allclose(p.full_tensor(), expected), (name, placement)
            if name in PARTIALS:
                assert not counted.collectives, (name, placement)
    p = cut(v, placement=Partial())
    assert torch.equal(p.copy_(cut(w, placement=Partial()).float()).full_tensor(), w.float().double())
    leaf, plain = cut(w, requires_grad=True), w.clone().requires_grad_()
    total, expected = cut(v).sum(0), v.sum(0)
    total += leaf[2] * 2
    expected = expected + plain[2] * 2
    total.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(leaf.grad.full_tensor(), plain.grad)


@on_ranks(2)
def test_data():
    v, w = whole(), whole() + 1
    for placement, sizes in ((Shard(0), (1, 6)), (Shard(1), (0, 4)), (Replicate(), None), (Partial(), None)):
        x = cut(v)
        x.data = cut(w, sizes, placement)
        assert x.shard_sizes == {0: (5, 2)} and torch.equal((x * 1).full_tensor(), w)
        partial = cut(v, sizes, placement)
        partial.data = cut(w).float()
        assert partial.placements == (placement,) and partial.dtype == torch.float32
        assert torch.equal((partial + 1).full_tensor(), w.float() + 1)
    leaf, other = cut(v, requires_grad=True), cut(w)
    leaf.data = other
    other.mul_(3)  # the same memory, as in torch
    (leaf * leaf).sum().backward()
    assert leaf.is_leaf and torch.equal(leaf.grad.full_tensor(), w * 6) and leaf.grad.shard_sizes == {0: (5, 2)}
    leaf.data = w
    assert torch.equal(leaf.full_tensor(), w)
    parameter = torch.nn.Parameter(cut(v))
    torch.nn.utils.vector_to_parameters(w.flatten(), [parameter])
    assert torch.equal(parameter.full_tensor(), w)
    row = leaf.detach()[3:]
    row.data = row * 0
    assert torch.equal(leaf.full_tensor(), w) and not row.full_tensor().any()


@on_ranks(2)
def test_in_place():
    v = whole()
    for name, args in (("cumsum_", (0,)), ("cumprod_", (0,)), ("cumprod_", (1,))):
        x, plain = cut(v, requires_grad=True), v.clone().requires_grad_()
        written, expected = x * 2, plain * 2
        assert getattr(written, name)(*args) is written
        getattr(expected, name)(*args)
        assert torch.allclose(written.full_tensor(), expected) and written.shard_sizes == {0: (5, 2)}
        (written * v).sum().backward()
        (expected * v).sum().backward()
        assert torch.allclose(x.grad.full_tensor(), plain.grad)
    total = cut(v).sum(0)
    assert total.placements == (Partial(),)
    with count_communication() as counted:
        total.exp_().add_(1)
    assert dict(counted.collectives) == {"all_reduce": 2}
    assert total.placements == (Partial(),) and torch.allclose(total.full_tensor(), v.sum(0).exp() + 1)


@on_ranks(2)
def test_gathered_results_are_written_back():
    v = whole()
    with allow_gather():
        x = cut(v)
        assert torch.triu(x, out=x) is x and torch.equal(x.full_tensor(), v.triu())
        reduced = (0, torch.tensor([6, 1]), v[:2], "amax")
        for name, args in (("renorm_", (2, 0, 1.0)), ("tril_", ()), ("index_reduce_", reduced)):
            x = cut(v)
            assert getattr(x, name)(*args) is x
            assert x.shard_sizes == {0: (5, 2)}
            assert torch.equal(x.full_tensor(), getattr(v.clone(), name)(*args)), name
        x = cut(v)
        x[torch.tensor([1, 6])] = 0.0
        assert torch.equal(x.full_tensor(), v.index_fill(0, torch.tensor([1, 6]), 0.0))
        leaf, plain = cut(v, requires_grad=True), v.clone().requires_grad_()
        y, expected = (leaf * 2).renorm_(2, 0, 0.5), (plain * 2).renorm_(2, 0, 0.5)
        (y * v).sum().backward()
        (expected * v).sum().backward()
        assert torch.allclose(leaf.grad.full_tensor(), plain.grad)


# -- replicated tensors that take the layout of what is written to them ------------------------------------------------


def sum_of(a, x):
    a = F.linear(a, 2 * torch.eye(4, dtype=a.dtype))
    same = a
    a += x
    return same, F.layer_norm(a, (4,))


def changed_twice(a, x):
    a = a + 1
    a *= x
    return a.sub_(x, alpha=2).lerp_(x.exp(), 0.3)


def of_other_names(a, x):
    a = a.abs() + 1
    a **= x
    return a


def copied_into(a, x):
    a, b, flags = a * 2, a * 3, a > 0
    a.copy_(x)
    b[x > 0] = 0.0
    flags &= x > 0
    return a, b, flags * x


def through_views(a, x):
    a, b = a * 2, a * 3
    a[:, 1:3] += x[:, :2]
    a[:, 3] = x[:, 0]
    columns = b[:, 1:]
    columns.mul_(x[:, :3]).add_(1)
    return a, b, columns


def of_a_view(a, x):
    a = (a * 2).view(7, 2, 2)
    a += x.view(7, 2, 2)
    return a


def turned(a, x):
    a = (a * 2).t()
    a += x.t()
    return a


def in_lists(a, x):
    a, b = a * 2, a * 3
    torch._foreach_addcmul_([a, b], [x, x], [x.sin(), x])
    return a, b


def compare_replicated(sizes):
    for program in (sum_of, changed_twice, of_other_names, copied_into, through_views, of_a_view, turned, in_lists):
        assert_matches_unsharded(
            program,
            *(whole() + 1, whole()),
            mesh_shape=len(sizes),
            placements=[[Replicate()], [Shard(0)]],
            shard_sizes=[None, {0: sizes}],
        )
    mesh = shared_mesh(len(sizes))
    a, x = shard(whole(), mesh, [Replicate()]), shard(whole(), mesh, [Shard(0)], {0: sizes})
    with count_communication() as counted:
        a += x
    assert a.shard_sizes == {0: sizes} and not counted.collectives and not counted.messages


def test_a_replicated_tensor_takes_the_layout_of_what_is_written():
    run_distributed(compare_replicated, 2, (5, 2))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(0, 7), (4, 0, 3)])
def test_a_replicated_tensor_takes_the_layout_of_empty_shards(sizes):
    run_distributed(compare_replicated, len(sizes), sizes)


@pytest.mark.slow
@on_ranks(4)
def test_a_tensor_that_is_replicated_on_one_axis():
    mesh = shared_mesh((2, 2))
    a = shard(whole(), mesh, [Shard(0), Replicate()], {0: (5, 2)})
    a += shard(whole(), mesh, [Shard(0), Shard(1)], {0: (5, 2), 1: (1, 3)})
    assert a.shard_sizes == {0: (5, 2), 1: (1, 3)} and torch.equal(a.full_tensor(), whole() * 2)


# -- plain tensors that become ShardTensors, see [Note: written tensors] -----------------------------------------------


class Squared(torch.autograd.Function):
    """Of a program's own: autograd gives it the tensor itself, and not by way of torch functions."""

    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def in_turns(x):
    out = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    out[:, 0::2] = x.sin()
    first = Squared.apply(out)
    out = out.clone()
    out[:, 1::2] = x.cos()
    return first.sum() + out.max() + F.linear(out, torch.ones(3, out.shape[1], dtype=x.dtype)).square().sum()


def by_operators(x):
    out = torch.ones(x.shape, dtype=x.dtype)
    same = out
    out.mul_(x).add_(x)
    out[x > 0] = (x * 3)[x > 0]
    return same, torch.cat([out, torch.zeros(2, 4, dtype=x.dtype)])


def by_index(x):
    sums = torch.zeros(3, 4, dtype=x.dtype).index_add_(0, torch.arange(7) % 3, x)
    counts = torch.zeros(3, 4, dtype=x.dtype)
    counts.scatter_add_(0, (torch.arange(28).view(7, 4) % 3), x * x)
    return sums.exp() / counts


def by_views(x):
    out = torch.zeros(x.shape[0], 6, dtype=x.dtype)
    out[:, 1] += x[:, 0]
    out[:, 2:4].add_(x[:, 1:3].exp())
    out[0] = out[0] * 2
    last = out[:, 4]
    last.copy_(x[:, 3])
    last.mul_(x[:, 2])
    pair = torch.ones(2, x.shape[0], 4, dtype=x.dtype)
    for i in range(2):
        pair[i] += x * (i + 1)
    turned = torch.zeros(4, x.shape[0], dtype=x.dtype).t()
    turned.add_(x)
    return Squared.apply(out), pair, last, turned


def of_a_layer(x):
    features = F.linear(torch.eye(7, 4, dtype=x.dtype)[None], 2 * torch.eye(4, dtype=x.dtype).requires_grad_())
    features.mul_(x)
    return features


@pytest.mark.on_device
@pytest.mark.parametrize(("ranks", "sizes"), [(2, (5, 2)), (2, (0, 7)), (3, (4, 0, 3))])
@on_ranks("ranks")
def test_a_plain_tensor_becomes_a_shard_tensor(ranks, sizes):
    for program in (in_turns, by_operators, by_index, by_views, of_a_layer):
        assert_matches_unsharded(program, whole(), mesh_shape=ranks, placements=[Shard(0)], shard_sizes={0: sizes})


@on_ranks(2)
def test_it_stays_the_object_that_the_program_holds():
    v, x = whole(), cut(whole())
    out = torch.zeros(7, 4, dtype=torch.float64)
    names = {"out": out}
    with count_communication() as counted:
        assert out.__setitem__(slice(None), x) is None
    assert not counted.messages and not counted.collectives
    assert names["out"] is out and isinstance(out, ShardTensor) and isinstance(out, torch.Tensor)
    assert out.shard_sizes == {0: (5, 2)} and out.shape == (7, 4) and out.dtype is torch.float64 and len(out) == 7
    assert torch.equal(out.full_tensor(), v) and "ShardTensor(7, 4)" in repr(out)
    assert out.add_(1) is out and torch.equal(out.full_tensor(), v + 1)
    assert torch.equal(copy.deepcopy(out).full_tensor(), v + 1)
    assert not out.requires_grad and out.requires_grad_() is out and out.is_leaf
    (out * 2).sum().backward()
    assert torch.equal(out.grad.full_tensor(), torch.full_like(v, 2))
    with torch.no_grad():
        out.zero_()
    assert float(out.abs().sum()) == 0
    # What is refused, or wrong, leaves the tensor as it was.
    plain = torch.zeros(7, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"must match|shape"):
        plain.add_(cut(torch.ones(7, 5, dtype=torch.float64)))
    assert type(plain) is torch.Tensor and torch.equal(plain, torch.zeros_like(v))
    with torch.inference_mode():
        plain = torch.zeros(7, 4, dtype=torch.float64)
        plain.copy_(x)
        assert torch.equal(plain.full_tensor(), v)
    # What is replicated is written to it as it is.
    plain = torch.zeros(7, 4, dtype=torch.float64)
    plain.add_(cut(v, placement=Replicate()))
    assert type(plain) is torch.Tensor and torch.equal(plain, v)


STATISTICS = {
    "data": lambda p, x: p.data.copy_(-x.mean(0)),
    "entry of data": lambda p, x: p.data.__setitem__(0, x.amax(0)[1]),
    "in place": lambda p, x: p.add_(x.sum(0), alpha=2),
    "slice": lambda p, x: p.__setitem__(slice(1, 3), x.std(0)[1:3]),
    "average": lambda p, x: p.lerp_(x.var(0), 0.1),
    "entry": lambda p, x: p.mul_(x[6, 2]),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@on_ranks(2)
def test_statistics_are_written_to_parameters(requires_grad):
    """Sums over shards are written to parameters, which stay what they are."""
    for name, write in STATISTICS.items():
        p, q = (torch.nn.Parameter(torch.ones(4).double(), requires_grad) for _ in "ab")
        with torch.no_grad():
            write(p, cut(whole()))
            write(q, whole())
        assert type(p) is torch.nn.Parameter and p.requires_grad == requires_grad, name
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=0, msg=name)
    p = torch.nn.Parameter(torch.ones(7, 4).double())
    with torch.no_grad(), pytest.raises(UnsupportedSharding, match=r"written into a plain tensor.*requires grad"):
        p.copy_(cut(whole()))
    p = torch.nn.Parameter(torch.ones(4).double())
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        p.add_(cut(whole()).sum(0))


class Averages(torch.nn.Module):
    """Statistics that a module keeps in buffers, by every way of writing to one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4).double())
        self.register_buffer("square", torch.ones(4).double())
        self.register_buffer("largest", torch.zeros(4).double())
        self.register_buffer("queue", torch.zeros(3, 4).double())
        self.register_buffer("codebook", torch.linspace(-1, 1, 12).double().view(3, 4))
        self.register_buffer("sizes", torch.ones(3).double())
        self.register_buffer("counts", torch.zeros(3).double())
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.square.lerp_(x.square().mean(0), 0.1)
        torch.maximum(self.largest, x.amax(0), out=self.largest)
        self.queue[self.steps % 3] = x[5]
        self.queue[1, 2:] *= x.sum()
        codes = torch.cdist(x, self.codebook).argmin(1)
        one_hot = F.one_hot(codes, 3).to(x.dtype)
        torch._foreach_mul_([self.sizes, self.codebook], 0.9)
        torch._foreach_add_([self.sizes, self.codebook], [one_hot.sum(0), one_hot.t() @ x], alpha=0.1)
        self.codebook.data.copy_(self.codebook / self.sizes[:, None])
        self.counts += torch.bincount(codes, minlength=3)
        self.steps += (x > 9).any() + 1

    def forward(self, x):
        self.update(x)
        return (x - self.mean) / self.square.sqrt() + self.codebook.sum(0) * self.counts[0]


def buffers(sizes):
    module, plain = Averages(), Averages()
    objects = dict(module.named_buffers())
    for step in range(3):
        v = whole() * (step + 1)
        y = module(shard(v.clone(), shared_mesh(len(sizes)), [Shard(0)], {0: sizes}))
        torch.testing.assert_close(y.full_tensor(), plain(v), rtol=1e-10, atol=1e-14)
    for name, buffer in module.named_buffers():
        assert type(buffer) is torch.Tensor and buffer is objects[name], name
        torch.testing.assert_close(buffer, plain.get_buffer(name), rtol=1e-10, atol=1e-14)
    assert type(module(whole())) is torch.Tensor
    with count_communication() as counted:
        module.mean.add_(cut(whole()).mean(0) if len(sizes) == 2 else 0.0)
    return dict(counted.collectives)


def test_buffers_stay_plain_where_every_rank_writes_the_same():
    assert run_distributed(buffers, 2, (5, 2)) == [{"all_reduce": 1}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(0, 7), (4, 0, 3)])
def test_buffers_stay_plain_with_empty_shards(sizes):
    run_distributed(buffers, len(sizes), sizes)


def moving_averages(x):
    """Written values are differentiated through what stays plain."""
    state = torch.ones(4, dtype=x.dtype)
    for rows in x.split(3):
        state.mul_(rows.amax()).add_(rows.mean(0), alpha=0.5)
        state[1] = 2 * state[0] + rows[0, 2]
        torch._foreach_mul_([state], [rows.sum(0)])
    assert type(state) is torch.Tensor
    return state, (x * state).sum(1)


class Scaled(torch.nn.Module):
    """Plain parameters are in the graph of what is written to."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, 4).double())

    def forward(self, x):
        state = self.weight * 3
        state += x.mean(0)
        state.mul_(x.std(0))
        return x * state


@on_ranks(2)
def test_gradients_through_what_stays_plain():
    for program in (moving_averages, Scaled()):
        assert_matches_unsharded(program, whole(), mesh_shape=2, placements=[Shard(0)], shard_sizes={0: (5, 2)})


def operand():
    return cut(whole())


def replicated(**options):
    return cut(torch.zeros(7, 4), placement=Replicate(), **options)


def seen_by_a_local_tensor(x):
    out = replicated()
    held = out.to_local()
    torch.add(x, 1, out=out)
    held.zero_()


def seen_by_another_view(x):
    value = replicated()
    rows, columns = value[2:], value[:, 1:]
    columns *= x[:, 1:]
    rows.zero_()


def to_a_leaf(x):
    with torch.no_grad():
        replicated(requires_grad=True).add_(x)


def to_a_gathered_view(x):
    with allow_gather():
        x.as_strided((3,), (1,)).zero_()


ERRORS = {
    "plain": (
        lambda x: torch.add(x, 1, out=torch.frombuffer(bytearray(112), dtype=torch.float32).view(7, 4)),
        UnsupportedSharding,
        r"copy_.*a ShardTensor cannot be written into a plain tensor.*Remedy",
    ),
    "shape": (
        lambda x: torch.add(x, 1, out=cut(torch.zeros(7), (5, 2))),
        UnsupportedSharding,
        r"add: out= has shape \(7,\), but the result \(7, 4\).*Remedy",
    ),
    "replicated": (
        seen_by_a_local_tensor,
        UnsupportedSharding,
        r"copy_.*would have to be gathered.*\[5, 2\].*Remedy.*local tensor",
    ),
    "other view": (
        seen_by_another_view,
        UnsupportedSharding,
        r"mul_.*would have to be gathered.*\[5, 2\].*Remedy.*no other view",
    ),
    "leaf": (to_a_leaf, UnsupportedSharding, r"add_.*would have to be gathered.*\[5, 2\].*no leaf that requires grad"),
    "data": (
        lambda x: setattr(x, "data", cut(torch.zeros(7), (5, 2))),
        UnsupportedSharding,
        r"data: .*shape \(7, 4\) is assigned data of shape \(7,\).*Remedy",
    ),
    "dtype": (
        lambda x: torch.add(x, 1, out=cut(torch.zeros(7, 4, dtype=torch.int64))),
        RuntimeError,
        "can't be cast to the desired output type",
    ),
    "gradient": (
        lambda x: torch.add(cut(whole(), requires_grad=True), 1, out=x),
        RuntimeError,
        "don't support automatic differentiation",
    ),
    "in-place dtype": (
        lambda x: cut(torch.ones(7, 4, dtype=torch.int64)).cumsum_(0, dtype=torch.float32),
        RuntimeError,
        "dtype",
    ),
    "view": (
        to_a_gathered_view,
        UnsupportedSharding,
        "it would write to a view that is a copy on shards.*Remedy",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_same_on_every_rank(name):
    raises_alike(operand, name, silent=name != "view")  # which is gathered first
