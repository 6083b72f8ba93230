"""Products of operands that are cut in any way: rings, exchanges, Partials; einsum and what it expresses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding, allow_gather
from shardtensor.ops.common.named_dims import batch_labels
from shardtensor.ops.linalg.einsum import letters
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

WHOLE = [Replicate()]


def data(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def sizes_of(n, ranks, kind):
    """Unequal sizes; with empty shards in front or behind."""
    if kind == "first":
        return (n,) + (0,) * (ranks - 1)
    if kind == "last":
        return (0,) * (ranks - 1) + (n,)
    return tuple(n // ranks + (r < n % ranks) for r in reversed(range(ranks)))


def check(function, operands, ranks):
    """Operands: (shape, sharded dim or None, kind of sizes)."""
    torch.manual_seed(1)
    placements = [WHOLE if dim is None else [Shard(dim)] for _, dim, _ in operands]
    sizes = [None if dim is None else {0: sizes_of(shape[dim], ranks, kind)} for shape, dim, kind in operands]
    tensors = [data(*shape) for shape, _, _ in operands]
    try:
        assert_matches_unsharded(function, *tensors, mesh_shape=ranks, placements=placements, shard_sizes=sizes)
    except AssertionError as error:
        raise AssertionError(f"{operands} on {ranks} ranks") from error


# -- every pair of cuts of a matrix product ---------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_any_two_cuts_of_a_product(ranks):
    kinds = ("even", "first", "last")
    turn = 0
    shapes = [((7, 5), (5, 6)), ((3, 7, 5), (3, 5, 6))] if ranks == 2 else [((7, 5), (5, 6)), ((2, 3, 7, 5), (3, 5, 2))]
    for a, b in shapes:
        for i in range(len(a)):
            for j in range(len(b)):
                turn += 1
                check(torch.matmul, [(a, i, kinds[turn % 3]), (b, j, kinds[turn // 2 % 3])], ranks)


def added(name, **scales):
    return lambda input, a, b: getattr(torch, name)(input, a, b, **scales)


def written(name):
    return lambda input, a, b: getattr(input.clone(), name + "_")(a, b, beta=2, alpha=0.5)


@on_ranks(2)
def test_products_by_name():
    ranks = 2
    for name, input, a, b in [
        ("addmm", (7, 5), (7, 3), (3, 5)),
        ("addmv", (7,), (7, 3), (3,)),
        ("addr", (7, 5), (7,), (5,)),
        ("baddbmm", (2, 7, 5), (2, 7, 3), (2, 3, 5)),
        ("addbmm", (7, 5), (2, 7, 3), (2, 3, 5)),
    ]:
        for d in range(max(map(len, (input, a, b)))):
            at = [d if d < len(s) else None for s in (input, a, b)]
            operands = list(zip((input, a, b), at, ("even", "first", "even")))
            check(added(name), operands, ranks)
            check(added(name, beta=0.5, alpha=2), operands, ranks)
            if at[0] is not None:
                check(written(name), operands, ranks)
    rows = ((7, 3), 0, "even")
    check(torch.mm, [rows, ((3, 5), 1, "last")], ranks)
    check(torch.bmm, [((2, 7, 3), 1, "even"), ((2, 3, 5), 2, "even")], ranks)
    check(torch.mv, [rows, ((3,), 0, "even")], ranks)
    check(torch.outer, [((7,), 0, "even"), ((5,), 0, "last")], ranks)
    check(torch.inner, [rows, ((5, 3), 0, "even")], ranks)
    check(torch.inner, [((7, 3), 1, "even"), ((5, 3), 0, "even")], ranks)
    check(torch.kron, [((7, 3), 0, "even"), ((5, 2), 0, "even")], ranks)
    check(torch.kron, [((7, 3), 1, "even"), ((5,), 0, "even")], ranks)
    check(torch.kron, [((7, 3), None, ""), ((5, 2), 1, "even")], ranks)
    check(lambda a, b: torch.tensordot(a, b, ([1, 0], [0, 2])), [((7, 3, 2), 0, "even"), ((3, 5, 7), 0, "even")], ranks)
    check(lambda a, b: torch.tensordot(a, b, 1), [((7, 3), 0, "even"), ((3, 5), 1, "even")], ranks)
    check(lambda a: torch.linalg.matrix_power(a, 3), [((5, 5), 0, "even")], ranks)
    check(lambda a, b, c: torch.linalg.multi_dot([a, b, c]), [rows, ((3, 5), 1, "even"), ((5, 2), 0, "even")], ranks)
    check(torch.cov, [((5, 7), 0, "even")], ranks)
    check(torch.corrcoef, [((5, 7), 1, "even")], ranks)


# -- einsum -----------------------------------------------------------------------------------------------------------

EQUATIONS = [
    ("ij,jk->ik", (7, 3), (3, 5)),
    ("bij,bjk->bik", (4, 7, 3), (4, 3, 5)),
    ("bij,bjk", (4, 7, 3), (4, 3, 5)),
    ("...ij,jk->...ki", (2, 4, 7, 3), (3, 5)),
    ("ij,ij->", (7, 3), (7, 3)),
    ("i,j->ij", (7,), (5,)),
    ("ij,kj->j", (7, 3), (5, 3)),
    ("ij,i", (7, 3), (7,)),
    ("ii->i", (5, 5)),
    ("ii", (5, 5)),
    ("bii,bi->b", (4, 5, 5), (4, 5)),
    ("ij->ji", (7, 3)),
    ("ij->", (7, 3)),
    ("bi,oij,bj->bo", (7, 3), (5, 3, 2), (7, 2)),
    ("ij,jk,kl->il", (7, 3), (3, 5), (5, 2)),
    ("ij,jk->ik", (7, 3), (1, 5)),
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def drawn(case):
    equation, *shapes = case.draw(st.sampled_from(EQUATIONS))
    cut = st.sampled_from(["even", "first", "last"])
    operands = [(s, case.draw(st.sampled_from([None, *range(len(s))])), case.draw(cut)) for s in shapes]
    if any(dim is not None for _, dim, _ in operands):
        check(lambda *t: torch.einsum(equation, *t), operands, torch.distributed.get_world_size())


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_einsum(ranks):
    drawn()


def test_letters():
    assert letters("b...i, ij", (4, 2)) == (("baci", "ij"), "acbj")
    assert letters("ij,jk", (2, 2)) == (("ij", "jk"), "ik")
    assert letters("...,...->...", (0, 2)) == (("", "ab"), "ab")
    assert batch_labels((5, 1, 3), (2, 3)) == ([(-3, None, -1), (-2, -1)], (-3, -2, -1))


# -- layers -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_layers_with_cut_weights():
    bilinear = nn.Bilinear(3, 2, 4).double()
    for dim, kind in ((0, "even"), (0, "last"), (1, "even")):
        operands = [((7, 3), dim, kind), ((7, 2), dim, kind)]
        placements, sizes = [[Shard(dim)]] * 2, [{0: sizes_of(s[dim], 2, kind)} for s, _, _ in operands]
        tensors = [data(*s) for s, _, _ in operands]
        assert_matches_unsharded(bilinear, *tensors, mesh_shape=2, placements=placements, shard_sizes=sizes)
    # Weights that are cut: by output features, by input features; the input plain, cut alike or otherwise.
    for dim in (0, 1):
        for at in (None, 0, 1, 2):
            check(F.linear, [((2, 7, 4), at, "even"), ((5, 4), dim, "even")], 2)
    check(F.linear, [((2, 7, 4), 1, "first"), ((5, 4), 0, "last"), ((5,), 0, "last")], 2)
    check(F.linear, [((4,), None, ""), ((5, 4), 0, "last"), ((5,), 0, "even")], 2)
    # DTensor weights get DTensor gradients.
    mesh = shared_mesh(2)
    x, weight = data(2, 7, 4), data(6, 4)
    plain = weight.clone().requires_grad_()
    F.linear(x, plain).square().sum().backward()
    distributed = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    y = F.linear(shard(x, mesh, [Shard(1)], {0: (5, 2)}), distributed)
    y.square().sum().backward()
    assert distributed.grad.placements == (Shard(0),)
    torch.testing.assert_close(distributed.grad.full_tensor(), plain.grad, rtol=1e-10, atol=1e-12)


# -- several mesh dims ----------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_mesh_of_two_dims():
    for a, pa, b, pb in [
        ((7, 5), [Shard(0), Replicate()], (5, 6), [Shard(1), Replicate()]),  # a ring on the first
        ((7, 5), [Replicate(), Shard(0)], (5, 6), [Shard(0), Shard(1)]),  # a Partial and a ring
        ((3, 7, 5), [Shard(0), Shard(1)], (3, 5, 6), [Shard(0), Shard(2)]),  # the batch, and a ring
        ((3, 7, 5), [Shard(0), Shard(1)], (5, 6), [Shard(0), Shard(1)]),  # two rings
    ]:
        assert_matches_unsharded(torch.matmul, data(*a), data(*b), mesh_shape=(2, 2), placements=[pa, pb])


# -- what is sent -----------------------------------------------------------------------------------------------------


def communication():
    mesh = shared_mesh(3)
    found = {}

    def count(name, function, *operands):
        tensors = [shard(data(*s), mesh, p, sizes, requires_grad=True) for s, p, sizes in operands]
        with count_communication() as forward:
            y = function(*tensors)
        cotangent = torch.ones_like(y.detach())
        with count_communication() as backward:
            y.backward(cotangent)
        here = [(c.messages, c.bytes_sent, dict(c.collectives)) for c in (forward, backward)]
        found[name] = (*here, tuple(y.placements))

    rows = ((9, 6), [Shard(0)], {0: (5, 1, 3)})
    count("ring", torch.matmul, rows, ((6, 3), [Shard(1)], {0: (1, 1, 1)}))
    count("longer second", torch.matmul, rows, ((6, 12), [Shard(1)], {0: (4, 4, 4)}))
    count("longest second", torch.matmul, rows, ((6, 15), [Shard(1)], {0: (5, 5, 5)}))
    count("batch", torch.matmul, ((3, 9, 6), [Shard(1)], {0: (3, 3, 3)}), ((3, 6, 3), [Shard(0)], {0: (1, 1, 1)}))
    count("aligned", torch.matmul, ((9, 6), [Shard(1)], {0: (1, 2, 3)}), ((6, 3), [Shard(0)], {0: (1, 2, 3)}))
    count("realigned", torch.matmul, ((9, 6), [Shard(1)], {0: (1, 2, 3)}), ((6, 3), [Shard(0)], {0: (2, 2, 2)}))
    count("small result", torch.matmul, ((2, 90), [Shard(0)], {0: (1, 1, 0)}), ((90, 2), [Shard(0)], {0: (30, 30, 30)}))
    count("plain", torch.matmul, rows, ((6, 3), WHOLE, None))
    return found


def test_what_is_sent():
    everybody = run_distributed(communication, 3)
    for rank, found in enumerate(everybody):
        # Two shards of the smaller operand (6 numbers each) pass by; back, the same and their gradients.
        forward, backward, placements = found["ring"]
        assert forward[1] == 2 * 6 * 8
        assert backward[1] == 4 * 6 * 8
        assert placements == (Shard(0),)
        # As scores are read along the keys, what is cut along the queries stays unless there are far more keys.
        assert found["longer second"][2] == (Shard(0),)
        assert found["longest second"][2] == (Shard(1),)
        # An exchange to the batch dim, of the smaller shards or the larger ones' blocks, and none for the other.
        forward, backward, placements = found["batch"]
        assert forward[1] == 2 * 18 * 8
        assert placements == (Shard(0),)
        assert found["aligned"][0] == (0, 0, {})
        assert found["aligned"][1] == (0, 0, {})
        assert found["aligned"][2] == (Partial(),)
        forward, _, placements = found["realigned"]  # of three columns each rank has at most one to give
        assert forward[1] == [0, 1 * 3 * 8, 1 * 3 * 8][rank] or forward[1] <= 9 * 8
        assert placements == (Partial(),)
        # Four numbers, summed: cheaper than to send 180 around, and no larger than a shard.
        forward, _, placements = found["small result"]
        assert forward[1] <= 90 * 8
        assert placements == (Partial(),)
        assert found["plain"][0] == (0, 0, {})


# -- what is computed --------------------------------------------------------------------------------------------------


def attention(x):
    """Of queries and fewer keys, as products: a ring in each, of keys and of values."""
    q, k = x, x[:, ::4]
    scores = torch.einsum("bid,bjd->bij", q, k).softmax(-1)
    return torch.einsum("bij,bjd->bid", scores, k) + scores @ k


def test_the_ranks_share_the_work_of_products_in_both_passes():
    found = shardtensor.explain(attention, torch.empty(2, 64, 24, requires_grad=True), mesh=2, shard=1, backward=True)
    products = [layer for layer in found.layers if layer.whole and sum(layer.whole.flops)]
    assert len(products) == 3 and all(layer.layout == "S(1)[32, 32]" for layer in products)
    assert found.excess.work == 1.0


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_gradients_of_products_around_a_ring(ranks):
    for equation, *operands in [
        ("bid,bjd->bij", ((2, 7, 5), 1, "even"), ((2, 6, 5), 1, "first")),
        ("bij,bjd->bid", ((2, 7, 5), 1, "last"), ((2, 5, 3), 1, "even")),  # the parts' results are summed
        ("bid,bjd->bij", ((1, 7, 5), 1, "even"), ((2, 6, 5), 1, "even")),  # one batch for both
        ("id,jdk->ij", ((7, 5), 0, "even"), ((6, 5, 2), 0, "even")),  # a dim that one operand has alone
        ("id,jd,d->ij", ((7, 5), 0, "even"), ((6, 5), 0, "last"), ((5,), None, "")),
        ("id,jd->ij", ((7, 1), 0, "even"), ((6, 5), 0, "even")),
    ]:
        check(lambda *t: torch.einsum(equation, *t), operands, ranks)  # noqa: B023
    for function in (torch.matmul, lambda a, b: penalized(a, b)):
        check(function, [((7, 5), 0, "even"), ((5, 6), 1, "first")], ranks)
    placements = [[Shard(0)], [Shard(1)]]
    numbers = data(7, 5, dtype=torch.complex128), data(5, 6, dtype=torch.complex128)
    assert_matches_unsharded(torch.matmul, *numbers, mesh_shape=ranks, placements=placements)


def of_few_queries(x, values):
    """As LeViT halves an image: the queries are a quarter of the tokens."""
    scores = torch.einsum("bid,bjd->bij", x[:, ::4], x).softmax(-1)
    return scores, torch.einsum("bij,bjd->bid", scores, values)


CUTS = [(2, (64, 64), (16, 16)), (3, (40, 60, 28), (10, 15, 7))]


@pytest.mark.parametrize(("world", "sizes", "rows"), CUTS)
@on_ranks("world")
def test_rows_that_are_sent_around_are_sharded_again_once_they_are_summed(world, sizes, rows):
    ranks, width = world, 16896  # a sum that takes longer to send than an exchange, between GPUs as well
    layout = {"mesh_shape": ranks, "placements": [Shard(1)], "shard_sizes": {0: sizes}}
    x, values = data(1, 128, 8), data(1, 128, width)
    assert_matches_unsharded(lambda *t: of_few_queries(*t)[1].sin(), x, values, **layout)
    x, values = (shard(t, shared_mesh(ranks), [Shard(1)], {0: sizes}, requires_grad=True) for t in (x, values))
    scores, _ = of_few_queries(x, values)
    assert scores.placements == (Shard(2),)
    scores = scores.detach().requires_grad_()
    rank = scores.device_mesh.get_local_rank()
    with count_communication() as forward:
        y = torch.einsum("bij,bjd->bid", scores, values)
    assert y.placements == (Shard(1),) and y.shard_sizes[0] == rows
    cotangent = torch.ones_like(y.detach())
    with count_communication() as backward:
        y.backward(cotangent)
    # The others' rows of the sum, and the gradients of the own rows to all of them.
    assert (forward.messages, forward.bytes_sent) == (ranks - 1, (32 - rows[rank]) * width * 8)
    assert (backward.messages, backward.bytes_sent) == (ranks - 1, (ranks - 1) * rows[rank] * width * 8)
    little = torch.einsum("bij,bjd->bid", scores, values[..., :5])
    assert little.placements == (Partial(),)


def penalized(a, b):
    """The gradient of a product, which is differentiated again."""
    (grad,) = torch.autograd.grad((a @ b).sin().sum(), a, create_graph=True)
    return grad.square() + (a @ b).sum(1, keepdim=True)


# -- refused -----------------------------------------------------------------------------------------------------------


def fail():
    # Blocks on two mesh dims, whose products need both operands moved at once.
    mesh = shared_mesh((2, 2))
    a, b = (shard(data(4, 6), mesh, [Shard(0), Shard(1)]), shard(data(6, 8), mesh, [Shard(0), Shard(1)]))
    with allow_gather():
        y = a @ b
        assert isinstance(y, ShardTensor)
        torch.testing.assert_close(y.full_tensor(), a.full_tensor() @ b.full_tensor())
    a @ b


def test_blocks_on_two_mesh_dims_are_refused():
    for error in run_expecting_errors(fail, 4):
        with pytest.raises(UnsupportedSharding, match=r"matmul.*mesh dim 1.*of them unsharded.*Replicate\(\)"):
            raise error
