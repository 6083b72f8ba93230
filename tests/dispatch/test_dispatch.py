"""Aten operators on shards: rules against one device, refusals, gathering, plans, and handlers of users."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding, context
from shardtensor.dispatch import planning
from shardtensor.layout import caches
from shardtensor.observe._compat import init_fake_process_group
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

aten = torch.ops.aten


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=seeded(seed))


def floors(x, y):
    scalars = aten.floor_divide.Scalar(x, 0.5) + aten.floor_divide_.Scalar(x.clone(), 0.5)
    return x // y + x // 0.5 + scalars + x.clone().floor_divide_(y)


# -- every rule, on unequal shards ----------------------------------------------------------------------------------

# Name -> (function, shapes of its arguments, placements, sizes by mesh dim). Worlds of three ranks.
CASES = {
    # pointwise
    "arithmetic": (lambda x, y: (x + 2 * y) / (1 + y * y) - x.exp(), [(7, 3), (7, 3)]),
    "broadcast": (lambda x, y: x * y - y, [(7, 3), (7, 1)]),
    "activations": (lambda x: F.silu(x) + F.gelu(x) + F.leaky_relu(x) + F.softplus(x) + F.elu(x), [(7, 3)]),
    "more activations": (lambda x: F.hardswish(x) + F.mish(x) + F.hardtanh(x) + F.logsigmoid(x), [(7, 3)]),
    "shrinking": (lambda x: F.hardshrink(x) + F.softshrink(x) + F.hardsigmoid(x) + F.celu(x), [(7, 3)]),
    "slopes": (lambda x: F.prelu(x, torch.tensor([0.1], dtype=x.dtype)), [(7, 3)]),
    "activations in place": (
        lambda x: (
            F.hardswish(x * 1, inplace=True) * F.mish(x * 1, inplace=True) * F.leaky_relu(x * 1, inplace=True)
            + aten.log_sigmoid_backward(x.detach(), x.detach(), torch.exp(-x.detach().abs()))
        ),
        [(7, 3)],
    ),
    "forward mode": (lambda x: x[:, :2] * aten.glu_jvp(F.glu(x.detach(), 1), x.detach(), x.detach(), 1), [(7, 4)]),
    "filled": (
        lambda x: (
            (x * 1).fill_(2.0) + (x * 1).fill_(x.sum()) + aten.fill(x, 3.0) + aten.fill(x, x.sum()),
            (x * 1).zero_() + (x * 1).masked_fill_(x > 0, 1.0) * (x * 1).masked_fill_(x > 0, x.sum()),
        ),
        [(7, 3)],
    ),
    "copied": (
        lambda x: (
            aten.alias_copy(x)
            + aten.copy(x.detach(), x.detach() * 2)
            + torch.zeros_like(x).copy_(x)
            + torch.rsub(x, x * x)
            + torch.rsub(x, 2)
        ),
        [(7, 3)],
    ),
    "floor": (
        lambda x: x * floors(x.detach(), x.detach().abs() + 1),
        [(7, 3)],
    ),
    "clamp": (lambda x: x.clamp(-0.5, 0.5) + x.floor() * x.frac(), [(7, 3)]),
    "compare": (lambda x, y: torch.where(x > y, x, y) * (x != y), [(7, 3), (7, 3)]),
    "complex": (lambda x: (x * (1 + 2j)).conj().abs(), [(7,)]),
    "parts": (lambda x, y: torch.complex(x, y).abs() + torch.polar(x.abs(), y).real, [(7,), (7,)]),
    "pairs": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), [(7, 2)]),
    "cast": (lambda x: x.float().double() + x.bool(), [(7, 3)]),
    "like": (lambda x: torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 3) + x, [(7, 3)]),
    "new": (lambda x: x.new_zeros(x.shape) + x.new_ones(x.shape) + x.new_full(x.shape, 2.0) + x, [(7, 3)]),
    "new of another shape": (lambda x: x * x.new_full((3,), 2.0), [(7, 3)]),
    "masked": (lambda x: x.masked_fill(x > 0, 1.5) * x.masked_fill(x < 0, torch.tensor(2.0).double()), [(7, 3)]),
    "in place": (lambda x: (x * x).add_(1).mul_(x).clamp_(max=2).sub_(x, alpha=3), [(7, 3)]),
    # reductions
    "sum": (lambda x: (x.sum(), x.sum(0), x.sum((0, 1), keepdim=True), x.sum(-1)), [(7, 3)]),
    "mean": (lambda x: (x.mean(), x.mean(0), x.mean((0, 2), keepdim=True), x.mean(1)), [(7, 3, 2)]),
    "moments": (lambda x: (x.var(), x.std(0), x.var(1, keepdim=True), x.var((0, 1), correction=0)), [(7, 3)]),
    "moments and means": (lambda x: (*torch.var_mean(x, 0), *torch.std_mean(x)), [(7, 3)]),
    "extremes": (lambda x: (x.amax(), x.amin(0), x.max(), x.min(), x.amax(1)), [(7, 3)]),
    "product": (lambda x: (x.prod(1), x.prod(1, keepdim=True)), [(7, 3)]),
    "counts": (
        lambda x: (x.nansum(0), x.count_nonzero(), x.count_nonzero((0, 1)), x.detach().histc(5, -2, 2)),
        [(7, 3)],
    ),
    "dot": (lambda x, y: torch.dot(x, y) * torch.vdot(y, x), [(7,), (7,)]),
    "norms": (lambda x: (x.norm(), torch.linalg.vector_norm(x, 3, 0), torch.linalg.vector_norm(x, 1)), [(7, 3)]),
    "more norms": (lambda x: torch.stack([torch.linalg.vector_norm(x, p) for p in (float("inf"), -1, 0)]), [(7, 3)]),
    "along": (lambda x: (x.softmax(1), x.log_softmax(-1), x.cumsum(1), x.cumprod(1), x.logsumexp(1)), [(7, 3)]),
    "trace": (torch.trace, [(7, 8)]),  # torch 2.11 has a wrong gradient where rows are more than columns
    "matrices": (lambda x: (torch.linalg.pinv(x), torch.linalg.matrix_norm(x, 2), torch.fft.rfft2(x)), [(7, 3, 3)]),
    "sum of sums": (lambda x: (x.sum(0) + x.mean(0)) * 2 - x.amax(0), [(7, 3)]),
    # views
    "view": (lambda x: x.view(7, 2, 3).reshape(7, 6).view(42), [(7, 6)]),
    "permute": (lambda x: x.permute(2, 0, 1) * x.transpose(0, 2).transpose(1, 2), [(7, 3, 2)]),
    "t": (lambda x: x.t() + x.mT, [(7, 3)]),
    "squeeze": (lambda x: x.unsqueeze(0).squeeze(0).squeeze() + x[None, ..., None].squeeze((0, 3)), [(7, 3)]),
    "expand": (lambda x: x.unsqueeze(1).expand(7, 4, 3) * 2, [(7, 3)]),
    "select": (lambda x: x[:, 1] * x.select(1, -1), [(7, 3)]),
    "slice": (lambda x: x[:, 1:3] * x[:, :2] + x[:][:, ::2][:, :2], [(7, 3)]),
    "split": (lambda x: x.split(2, 1)[0] * x.split([1, 2], -1)[1] + x.chunk(3, 1)[2], [(7, 3)]),
    "unbind": (lambda x: x.unbind(1)[0] * x.unbind(-1)[2], [(7, 3)]),
    "cat": (lambda x, y: torch.cat([x, y * 2], 1), [(7, 3), (7, 2)]),
    "stack": (lambda x, y: torch.stack([x, y], 1) + torch.stack([y, x], -2), [(7, 3), (7, 3)]),
    "flip": (lambda x: x.flip(0) * x.flip(1) + x.flip(0, 1), [(7, 3)]),
    "detach": (lambda x: x.detach() * x, [(7, 3)]),
    "tensor_split": (lambda x: x.tensor_split(2, 1)[1] * 2, [(7, 3)]),
}
LAYOUTS = {
    "uneven": ([Shard(0)], {0: (5, 1, 1)}),
    "empty": ([Shard(0)], {0: (0, 7, 0)}),
    "partial": ([Partial()], None),
    "whole": ([Replicate()], None),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@on_ranks(3, timeout=120)
def test_operators_match_one_device(layout):
    """All cases in one layout; what is refused is returned, with the reason."""
    placements, sizes = LAYOUTS[layout]
    refused = []
    for name, (function, shapes) in CASES.items():
        tensors = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
        try:
            assert_matches_unsharded(function, *tensors, mesh_shape=3, placements=placements, shard_sizes=sizes)
        except UnsupportedSharding as error:
            refused.append((name, str(error)))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert refused == []


@on_ranks(4, timeout=120)
def test_operands_with_different_cuts():
    """Operands with different cuts, also on two mesh dims, and 1-D with 2-D operands."""
    double = lambda x, y: (x * y + y, torch.maximum(x, y))  # noqa: E731
    x, y = numbers(6, 5), numbers(6, 5, seed=1)
    cuts = [
        ([Shard(0), Shard(1)], {0: (5, 1), 1: (0, 5)}),
        ([Shard(0), Replicate()], {0: (2, 4)}),
        ([Shard(0), Partial()], {0: (3, 3)}),
        ([Partial(), Partial()], None),
        ([Replicate(), Shard(1)], {1: (4, 1)}),
    ]
    for a, a_sizes in cuts:
        for b, b_sizes in cuts:
            try:
                assert_matches_unsharded(
                    double, x, y, mesh_shape=(2, 2), placements=[a, b], shard_sizes=[a_sizes, b_sizes]
                )
            except UnsupportedSharding as error:
                assert "would have to be gathered" in str(error), (a, b)
                assert a != b
    row = numbers(5, seed=2)
    assert_matches_unsharded(
        lambda x, r: x * r + r,
        x,
        row,
        mesh_shape=(2, 2),
        placements=[[Shard(0), Shard(1)], [Replicate(), Shard(0)]],
        shard_sizes=[{0: (5, 1), 1: (1, 4)}, {1: (3, 2)}],
    )


@on_ranks(2)
def test_no_operand_is_gathered_where_both_have_a_dim_in_common():
    """Scores cut along the keys, and a bias of theirs cut along the queries: the scores are exchanged to that cut."""
    x, y = numbers(2, 5, 7), numbers(5, 1, seed=1)
    for mesh_shape, a, b, sizes in (
        (2, [Shard(2)], [Shard(0)], [{0: (3, 4)}, {0: (5, 0)}]),
        (2, [Shard(1)], [Shard(0)], [{0: (2, 3)}, {0: (4, 1)}]),
        ((1, 2), [Shard(0), Shard(2)], [Replicate(), Shard(0)], [{1: (6, 1)}, {1: (2, 3)}]),
    ):
        arguments = {"mesh_shape": mesh_shape, "placements": [a, b], "shard_sizes": sizes}
        assert_matches_unsharded(lambda x, y: x * y + y, x, y, **arguments)
        assert_matches_unsharded(lambda x, y: y - x * y, x, y, **arguments)
    mesh = shared_mesh(2)
    scores, bias = shard(x, mesh, [Shard(2)], {0: (3, 4)}), shard(y, mesh, [Shard(0)], {0: (4, 1)})
    with count_communication() as counted:
        total = scores + bias
    assert total.placements == (Shard(1),) and total.shard_sizes == {0: (4, 1)}
    here = mesh.get_local_rank()
    assert not counted.collectives["all_gather"]
    assert counted.bytes_sent == 2 * (1, 4)[here] * (3, 4)[here] * 8  # the other rank's rows of the columns here
    written = scores.clone()
    with count_communication() as counted:
        written.add_(bias)  # which cannot change its layout: the bias is gathered
    assert counted.bytes_sent == (4, 1)[here] * 8 and torch.equal(written.full_tensor(), x + y)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_an_operand_smaller_than_a_share_of_the_result_is_gathered(ranks):
    """Every point with every other one: one of the operands is gathered, the result is sharded."""
    points = numbers(7, 3)
    sizes = {2: (5, 2), 3: (4, 0, 3)}[ranks]

    def distances(x):
        return (x[:, None] - x[None]).square().sum(-1) * torch.where(x[:, None] > x, x[:, None], x).sum(-1)

    assert_matches_unsharded(distances, points, mesh_shape=ranks, placements=[Shard(0)], shard_sizes={0: sizes})
    x = shard(points, shared_mesh(ranks), [Shard(0)], {0: sizes})
    with count_communication() as counted:
        pairs = x[:, None] - x[None]
    assert pairs.shard_sizes == {0: sizes} and pairs.placements == (Shard(0),)
    here = shared_mesh(ranks).get_local_rank()
    assert counted.bytes_sent == sizes[here] * 3 * 8 * (ranks - 1)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert (x[:, None].bfloat16() * x[None]).dtype == torch.float64
    if ranks == 3:
        few = shard(points[:2], shared_mesh(3), [Shard(0)], {0: (1, 0, 1)})
        with pytest.raises(UnsupportedSharding, match="operand 1 would have to be gathered"):
            few[:, None] - few[None]


@on_ranks(2)
def test_when_a_partial_is_resolved():
    """As the table of docs/how-it-works.md tells, counted."""
    x = shard(numbers(8, 6), shared_mesh(2), [Shard(0)], {0: (5, 3)}, requires_grad=True)

    def sent(function):
        with count_communication() as counted:
            result = function()
        return (counted.bytes_sent + counted.collective_bytes, sum(counted.collectives.values())), result

    traffic, mean = sent(lambda: x.mean(0))
    assert traffic == (0, 0) and mean.placements == (Partial(),)  # no gathering of the input
    for function in (lambda: mean * 2, lambda: -mean, lambda: mean + mean, lambda: mean.view(2, 3), lambda: mean.sum()):
        traffic, result = sent(function)
        assert traffic == (0, 0) and result.placements == (Partial(),)
    for function in (lambda: mean.exp(), lambda: mean + 1, lambda: mean > 0, lambda: F.linear(mean, numbers(2, 6))):
        traffic, result = sent(function)
        if result.placements != (Partial(),):  # a linear layer may leave it
            assert traffic == (6 * 8, 1)
    traffic, result = sent(lambda: x * mean)
    assert traffic == (6 * 8, 1) and result.placements == (Shard(0),)
    traffic, value = sent(lambda: mean.sum().item())
    assert traffic == (32, 1)  # with what the ranks compare
    assert abs(value - numbers(8, 6).mean(0).sum().item()) < 1e-12


@on_ranks(2)
def test_assertions_on_the_global_value():
    x = shard(numbers(8, 3), shared_mesh(2), [Shard(0)], {0: (5, 3)})
    torch._assert_async((x < 99).all())
    torch._assert_async((x < 99).all(), "not raised")
    torch._assert_async((x < 99)[7:, 2])
    with pytest.raises(RuntimeError, match="all are to be negative"):
        torch._assert_async((x < 0).all(), "all are to be negative")
    with pytest.raises(UnsupportedSharding, match=r"_assert_async.*gathered"):
        torch._assert_async(x < 99)


LISTS = {
    "add_": lambda a, b: torch._foreach_add_(a, b, alpha=2),
    "add": lambda a, b: torch._foreach_add(a, b),
    "sub, mul": lambda a, b: torch._foreach_mul(torch._foreach_sub(a, b), 3.0),
    "mul_ by numbers": lambda a, b: torch._foreach_mul_(a, [2.0, 3.0, 4.0, 5.0]),
    "copy_": lambda a, b: torch._foreach_copy_(a, b),
    "addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, b, 2.0),
    "clamp_": lambda a, b: torch._foreach_clamp_min_(a, 0.5),
    "pow": lambda a, b: torch._foreach_pow(a, 2.0),
    "max, maximum": lambda a, b: [*torch._foreach_max(a), *torch._foreach_maximum(a, b)],
    "zero_": lambda a, b: torch._foreach_zero_(a),
    "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(b)),
}


@on_ranks(2)
def test_lists_of_any_layouts():
    mesh = shared_mesh(2)
    values, others = [numbers(6, 5, seed=i) for i in range(4)], [numbers(6, 5, seed=i + 4) for i in range(4)]
    layouts = [([Partial()], None), ([Shard(0)], {0: (5, 1)}), ([Shard(0)], {0: (5, 1)}), ([Replicate()], None)]
    for name, function in LISTS.items():
        first = [shard(v, mesh, *layout) for v, layout in zip(values, layouts)]
        second = [shard(others[0], mesh, *layouts[1]), shard(others[1], mesh, [Shard(1)], {0: (2, 3)}), *others[2:]]
        expected = [v.clone() for v in values]
        found, wanted = function(first, second), function(expected, others)
        for a, b in zip([*first, *(found or [])], [*expected, *(wanted or [])]):
            whole = a.full_tensor() if isinstance(a, ShardTensor) else a
            assert torch.allclose(whole, b), name
        assert [t.placements for t in first] == [tuple(placements) for placements, _ in layouts]
    with pytest.raises(UnsupportedSharding, match="lists' tensors have different layouts"):
        torch._foreach_maximum(first, 0.5)


SPARSE = {
    "x @": (lambda s, x: x @ s, "coo"),
    "addmm of": (lambda s, x: torch.addmm(s, x, x), "csr"),
    "*": (lambda s, x: s * x, "coo"),
    "* sparse": (lambda s, x: x * s, "coo"),
    "in a list": (lambda s, x: torch.cat([x, s]), "coo"),
}


@pytest.mark.parametrize(
    ("placement", "sizes"), [(Shard(1), {0: (3, 2)}), (Replicate(), None)], ids=["sharded", "replicated"]
)
@on_ranks(2)
def test_sparse_operands_are_refused(placement, sizes):
    dense = numbers(5, 5)
    x = shard(dense, shared_mesh(2), [placement], sizes)
    for name, (function, layout) in SPARSE.items():
        sparse = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
        text = r"layout torch.sparse.*Remedy: make it dense"
        with count_communication() as counted, pytest.raises(UnsupportedSharding, match=text):
            print(name, function(sparse, x))
        assert not counted.collectives, name


@on_ranks(2)
def test_sparse_results_without_strides_are_refused():
    x = shard(numbers(5, 5), shared_mesh(2), [Replicate()])
    for make in (lambda: x.to_sparse_csr(), lambda: x.to_sparse_csc()):
        with pytest.raises(UnsupportedSharding, match=r"a ShardTensor cannot have the layout torch\.sparse_cs"):
            make()


# -- refusals -------------------------------------------------------------------------------------------------------


def foreign():
    return torch.frombuffer(bytearray(128), dtype=torch.float32).view(8, 4)


def large(x):
    return x.repeat(1, 60000)


REFUSED = {
    "svd": (lambda x: torch.linalg.svd(large(x)), "dim 0 of operand 0 must be unsharded"),
    "qr": (lambda x: torch.linalg.qr(large(x)), "no free dim has at least"),
    "inverse": (lambda x: torch.linalg.pinv(large(x)), "Remedy"),
    "out, plain": (lambda x: torch.add(x, 1, out=foreign()), "cannot be written into a plain tensor"),
    "in place, plain": (lambda x: foreign().mul_(x), "cannot be written into a plain tensor"),
    "strides": (lambda x: x.as_strided((2, 2), (1, 4)), "as_strided.default: no distributed form is known"),
}
# Operands whose layout is not that of the tensor above.
OTHER_OPERANDS = {"out, plain": "plain tensor (8, 4)"}


def refuse(name):
    x = shard(numbers(8, 4, dtype=torch.float32), shared_mesh(2), [Shard(0)], {0: (7, 1)})
    with count_communication() as counted:
        try:
            REFUSED[name][0](x)
        finally:
            assert counted.messages == 0 and not counted.collectives


@pytest.mark.parametrize("name", list(REFUSED))
def test_refusals_name_operator_layout_and_remedy_on_every_rank(name):
    for error in run_expecting_errors(refuse, 2, name):
        assert isinstance(error, UnsupportedSharding), repr(error)
        for part in (REFUSED[name][1], "S(0)[7, 1]", "Remedy: "):
            assert part in str(error)


@on_ranks(2)
def test_torchs_own_errors_come_on_every_rank():
    x = shard(numbers(8, 4), shared_mesh(2), [Shard(0)], {0: (7, 1)}, requires_grad=True)
    for f in (lambda x: x.sum(2), lambda x: x.mean(-3), lambda x: x.amax(2), lambda x: x.transpose(0, 2)):
        for y in (x, x.detach()):
            with pytest.raises(IndexError, match="Dimension out of range"):
                f(y)
    for y in (x, x.detach()):
        with pytest.raises(RuntimeError, match=r"appears multiple times|duplicate value"):
            y.sum((0, 0))
        with pytest.raises(RuntimeError, match=r"broadcast|size of tensor a"):
            y + y[:, :3]


@on_ranks(2)
def test_views_that_are_copies_do_not_go_out_of_date():
    """What represents a view shows what is written to the viewed tensor, or is refused."""
    whole = numbers(8, 4)
    x = shard(whole, shared_mesh(2), [Shard(0)], {0: (7, 1)})
    row = x[2]
    assert torch.equal(row.full_tensor(), whole[2])
    x.add_(1)
    with pytest.raises(UnsupportedSharding, match="the viewed tensor has been written to since"):
        row.to_local()  # which one rank may call alone
    assert torch.equal((row * 2).full_tensor(), 2 * (whole[2] + 1)) and torch.equal(x[2].full_tensor(), whole[2] + 1)
    # What has moved to other ranks is taken again, once after each write.
    frames, turned = x.unfold(0, 3, 2), x.reshape(4, 8)
    for _ in range(2):
        x[3:5] *= 2
        now = x.full_tensor()
        for view, expected in ((frames, now.unfold(0, 3, 2)), (turned, now.reshape(4, 8)), (row, now[2])):
            assert torch.equal((view * 1).full_tensor(), expected)
            with count_communication() as counted:
                view * 1
            assert counted.messages == 0 and not counted.collectives
    # A graph that has saved what was taken again says so, as with a view on one device.
    leaf = shard(whole, shared_mesh(2), [Shard(0)], {0: (7, 1)}).requires_grad_()
    base = leaf * 1
    saved = base[2]
    product = saved * saved
    with torch.no_grad():
        base.detach()[2:3] += 1
        saved * 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    parts = x.reshape(4, 8).split(4, 1)
    with shardtensor.allow_gather():
        gathered = x.as_strided((2, 2), (1, 4))
    x.add_(1)
    assert torch.equal(parts[1].full_tensor(), x.full_tensor().reshape(4, 8)[:, 4:])
    for read in (gathered.full_tensor, gathered.sum, lambda: gathered * 2):
        with pytest.raises(UnsupportedSharding, match="the viewed tensor has been written to since"):
            read()
    # A shard with other strides than its neighbour's is copied by a reshape where the other is not.
    local = x.to_local().t().contiguous().t()
    y = ShardTensor.from_local(local, shared_mesh(2), [Shard(0)], shard_sizes={0: (7, 1)})
    flat, now = y.view(32), y.full_tensor()
    y.mul_(2)
    assert torch.equal(flat.full_tensor(), 2 * now.flatten())
    flat.sub_(1)
    y[0] = 7
    assert torch.equal(flat.full_tensor(), y.full_tensor().flatten())
    # An entry that is written through stays up to date.
    entry, now = x[1], x[1].full_tensor()
    entry *= 3
    assert torch.equal(entry.full_tensor(), 3 * now) and torch.equal(x[1].full_tensor(), entry.full_tensor())


# -- gathering ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_gathering_has_to_be_allowed_and_gives_the_right_answer():
    whole = numbers(8, 4)
    x = shard(whole, shared_mesh(2), [Shard(0)], {0: (7, 1)})
    for f in (
        lambda x: torch.linalg.svdvals(large(x)),
        lambda x: torch.linalg.qr(large(x)).Q,
        lambda x: x.as_strided((2, 2), (1, 4)),
    ):
        with pytest.raises(UnsupportedSharding):
            f(x)
        with shardtensor.allow_gather(), count_communication() as counted:
            y = f(x)
        assert counted.messages + sum(counted.collectives.values()) > 0
        assert type(y) is ShardTensor
        torch.testing.assert_close(y.full_tensor(), f(whole), rtol=1e-10, atol=1e-12)
        if y.shape == x.shape:
            assert y.shard_sizes == x.shard_sizes  # cut again like the operand
        with pytest.raises(UnsupportedSharding):  # what was allowed once is not remembered
            f(x)
    with shardtensor.allow_gather():
        with shardtensor.allow_gather():
            pass
        x.as_strided((2, 2), (1, 4))  # still allowed
        with pytest.raises(UnsupportedSharding, match="cannot be sparse"):
            x.to_sparse()
        with pytest.raises(UnsupportedSharding, match="a view that is a copy on shards"):
            x.as_strided((2, 2), (1, 4)).add_(1)  # would not reach x
        trained = x.detach().requires_grad_()
        torch.linalg.svdvals(trained).square().sum().backward()
    plain = whole.clone().requires_grad_()
    torch.linalg.svdvals(plain).square().sum().backward()
    assert trained.grad.shard_sizes == {0: (7, 1)}
    torch.testing.assert_close(trained.grad.full_tensor(), plain.grad, rtol=1e-10, atol=1e-12)
    with pytest.raises(ZeroDivisionError), shardtensor.allow_gather():
        raise ZeroDivisionError
    assert not context.gather_allowed()


# -- plans and registered handlers -----------------------------------------------------------------------------------


def cached():
    x = shard(numbers(8, 4), shared_mesh(2), [Shard(0)], {0: (7, 1)})
    caches.forget()
    x * 2
    first = len(planning._plans)
    x * 3.0
    x * 2
    y = x.redistribute(shard_sizes="even")
    assert (x * 2).shard_sizes == {0: (7, 1)} and (y * 2).shard_sizes == {0: (4, 4)}
    # 1, 1.0 and True are equal and hash alike, but promote differently.
    i = shard(torch.arange(8), shared_mesh(2), [Shard(0)], {0: (7, 1)})
    assert [(i * factor).dtype for factor in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
    return first


def test_plans_tell_cuts_and_argument_types_apart():
    assert run_distributed(cached, 2)[0] >= 1


@on_ranks(2)
def test_a_plan_holds_for_one_default_dtype():
    i = shard(torch.arange(8), shared_mesh(2), [Shard(0)], {0: (7, 1)})
    before = torch.get_default_dtype()
    seen = []
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            y = i / 2
            seen.append((y.dtype, y.to_local().dtype))
    finally:
        torch.set_default_dtype(before)
    assert seen == [(torch.float32,) * 2, (torch.float64,) * 2]


def forgetful():
    """Rank 0 forgets all plans but two, rank 1 none."""
    keeps = 2 if dist.get_rank() == 0 else 10**6
    caches.forget()
    before, planning.MAX_PLANS = planning.MAX_PLANS, keeps
    torch.manual_seed(0)
    whole = torch.randn(12, 4, dtype=torch.float64)
    counts = []
    try:
        for _ in range(2):
            # Slices of differently cut tensors are cut alike: whose gradient is whose is a matter of memory.
            for sizes in ((5, 7), (6, 6), (8, 4)):
                x = shard(whole, shared_mesh(2), [Shard(0)], {0: sizes}, requires_grad=True)
                plain = whole.clone().requires_grad_()
                with count_communication() as counted:
                    for t in (x, plain):
                        y = t[6:10] * t[:4].roll(1, 0) + t.t()[:, 8:].t()
                        (y.square().mean(0) * t[2]).sum().backward()
                counts.append((counted.messages, counted.collectives))
                assert x.grad.shard_sizes == {0: sizes}
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
        assert len(planning._plans) <= keeps
    finally:
        planning.MAX_PLANS = before
    assert counts[:3] == counts[3:]
    return len(planning._plans)


def test_a_rank_may_forget_plans_by_itself():
    kept = run_distributed(forgetful, 2)
    assert kept[0] == 2 and kept[1] > 20


def half(x):
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(half, (x,), x)
    return x / 2


@on_ranks(2)
def test_users_register_operators_of_their_own():
    x = shard(numbers(8, 4), shared_mesh(2), [Shard(0)], {0: (7, 1)})
    calls = []

    @shardtensor.extend.register(half)
    def _(x):
        calls.append("half")
        return x * 0.5

    @shardtensor.extend.register(aten.as_strided.default)
    def _(x, *args):
        calls.append("as_strided")
        return NotImplemented

    try:
        torch.testing.assert_close(half(x).full_tensor(), x.full_tensor() / 2)
        with pytest.raises(UnsupportedSharding):
            x.as_strided((2, 2), (1, 4))
        assert calls == ["half", "as_strided"]
        assert {half, aten.as_strided.default} <= set(shardtensor.extend.registered())
        with pytest.raises(ValueError, match="has a handler already"):
            shardtensor.extend.register(half)
        with pytest.raises(TypeError, match="neither a function"):
            shardtensor.extend.register("half")
    finally:
        shardtensor.extend.unregister(half, aten.as_strided.default)
    with pytest.raises(KeyError):
        shardtensor.extend.unregister(half)
    shardtensor.extend.registered().clear()  # a copy
    assert torch.sum in shardtensor.extend.registered()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3), padding=1),
        lambda x: F.group_norm(x, 2),
        lambda x: F.cross_entropy(x.flatten(2), torch.zeros(1, 256, dtype=torch.long)),
        lambda x: F.scaled_dot_product_attention(*[x.redistribute(placements=[Shard(2), Replicate()])] * 3),
        lambda x: x.redistribute(placements=[Shard(2), Replicate()]),
    ],
    ids=["convolution", "norm", "loss", "attention", "redistribute"],
)
def test_nothing_is_remembered_of_a_world_that_has_ended(function):
    """Meshes of both worlds are equal, but their process groups have other names."""
    for earlier_groups in (3, 0):
        init_fake_process_group(3, 4)
        try:
            for _ in range(earlier_groups):
                dist.new_group([0, 1])
            mesh = init_device_mesh("cpu", (2, 2))
            sizes = {0: (8, 8), 1: (8, 8)}
            x = ShardTensor.from_local(torch.randn(1, 4, 8, 8), mesh, [Shard(2), Shard(3)], shard_sizes=sizes)
            function(x.requires_grad_()).sum().backward()
        finally:
            dist.destroy_process_group()
