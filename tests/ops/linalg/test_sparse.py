"""Products of plain sparse matrices and ShardTensors against the unsharded ones."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from device import asserted
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor._compat import sparse_parts
from shardtensor.communication import row_halos
from shardtensor.ops.linalg.sparse import Pattern, SparseProduct
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

pytestmark = pytest.mark.not_emulated("the emulated device has no sparse tensors")


def matrix(*shape, layout=torch.sparse_coo, dtype=torch.float64, seed=1):
    """A matrix with a third of its entries, the same on every rank."""
    generator = seeded(seed)
    dense = torch.randn(shape, generator=generator, dtype=torch.float64)
    dense = dense * (torch.rand(shape, generator=generator) < 0.3)
    return dense.to(dtype).to_sparse(layout=layout)


def data(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=seeded(2), dtype=torch.float64).to(dtype)


FORMS = {
    "mm": lambda s, x: torch.mm(s, x),
    "spmm": torch.spmm,
    "s.mm": lambda s, x: s.mm(mat2=x),
    "@": lambda s, x: s @ x,
    "matmul": torch.matmul,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda s, x: torch.addmm(x.sum(0), s, x, beta=2, alpha=3),
    "addmm of nothing": lambda s, x: torch.addmm(torch.full((5,), torch.nan, dtype=x.dtype), s, x, beta=0),
}
LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}


@pytest.mark.parametrize(
    ("ranks", "mesh_shape", "placements", "sizes"),
    [
        (1, 1, [Shard(0)], None),
        (2, 2, [Shard(0)], {0: (7, 1)}),
        (2, 2, [Shard(0)], {0: (0, 8)}),
        (2, 2, [Shard(1)], {0: (1, 4)}),
        (2, 2, [Shard(1)], {0: (0, 5)}),
        (2, 2, [Replicate()], None),
        (3, 3, [Shard(0)], {0: (5, 0, 3)}),
        (3, 3, [Shard(1)], {0: (2, 3, 0)}),
        (4, (2, 2), [Shard(0), Shard(1)], {0: (5, 3), 1: (1, 4)}),
        (4, (2, 2), [Shard(1), Shard(0)], {0: (5, 0), 1: (2, 6)}),
        (4, (2, 2), [Replicate(), Shard(0)], {1: (2, 6)}),
    ],
)
@on_ranks("ranks")
def test_products(ranks, mesh_shape, placements, sizes):
    """On a tall and on a wide matrix: along which dim a shard is cheapest depends on that."""
    for tall in (3, 40):
        cases = [(function, torch.sparse_coo) for function in FORMS.values()]
        for function, layout in [*cases, (torch.mm, torch.sparse_csr), (torch.matmul, torch.sparse_csc)]:
            s = matrix(tall, 8, layout=layout)
            assert_matches_unsharded(
                lambda x, function=function, s=s: function(s, x),
                data(8, 5),
                mesh_shape=mesh_shape,
                placements=placements,
                shard_sizes=sizes,
            )


@on_ranks(3)
def test_few_columns():
    """Fewer columns than ranks: no reason to have contributions of the size of the result."""
    for layout in LAYOUTS.values():
        for function, x in ((torch.mm, data(8, 1)), (torch.mv, data(8)), (torch.matmul, data(8))):
            s = matrix(3, 8, layout=layout)
            y = assert_matches_unsharded(
                lambda x, function=function, s=s: function(s, x),
                x,
                mesh_shape=3,
                placements=[Shard(0)],
                shard_sizes={0: (5, 0, 3)},
            )
            assert y.placements == (Shard(0),) and y.shard_sizes == {0: (1, 1, 1)}


@pytest.mark.parametrize(("dim", "sizes"), [(0, (1, 3)), (0, (0, 4)), (1, (5, 2)), (1, (7, 0)), (2, (1, 4))])
@on_ranks(2)
def test_batches(dim, sizes):
    s, x = matrix(4, 6, 7), data(4, 7, 5)
    for function in (torch.bmm, lambda s, x: s.bmm(x)):
        assert_matches_unsharded(
            lambda x, function=function: function(s, x),
            x,
            mesh_shape=2,
            placements=[Shard(dim)],
            shard_sizes={0: sizes},
        )


@on_ranks(2)
def test_messages():
    s = matrix(40, 8)
    mesh = shared_mesh(2)
    columns = shard(data(8, 5), mesh, [Shard(1)], {0: (1, 4)}, requires_grad=True)
    with count_communication() as counted:
        y = s @ columns
        y.sum().backward()
    assert not counted.collectives and not counted.messages
    assert y.placements == (Shard(1),) and y.shard_sizes == {0: (1, 4)}
    rows = shard(data(8, 6), mesh, [Shard(0)], {0: (5, 3)})
    with count_communication() as counted:
        y = s @ rows
    # Ranks compare the indices of a matrix once.
    assert dict(counted.collectives) == {"all_gather": 1, "all_to_all": 1} and y.placements == (Shard(1),)
    partial = shard(data(8, 6), mesh, [Partial()])
    torch.testing.assert_close((s @ partial).full_tensor(), s @ data(8, 6))
    # A product of plain tensors that is added to a ShardTensor.
    added = torch.addmm(shard(data(40, 6), mesh, [Shard(0)], {0: (30, 10)}), s, data(8, 6))
    torch.testing.assert_close(added.full_tensor(), torch.addmm(data(40, 6), s, data(8, 6)))


@on_ranks(2)
def test_second_derivatives():
    s, x = matrix(4, 8), shard(data(8, 5), shared_mesh(2), [Shard(0)], {0: (5, 3)}, requires_grad=True)
    (g,) = torch.autograd.grad((s @ x).pow(3).sum(), x, create_graph=True)
    g.square().sum().backward()
    whole = data(8, 5).requires_grad_()
    (g,) = torch.autograd.grad((s @ whole).pow(3).sum(), whole, create_graph=True)
    g.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_refusals():
    x = shard(data(8, 8), shared_mesh(2), [Shard(0)], {0: (5, 3)})
    s = matrix(8, 8)
    with count_communication() as counted:
        with pytest.raises(UnsupportedSharding, match=r"gradient of a sparse operand.*Remedy: detach it, or shard"):
            torch.mm(matrix(8, 8).requires_grad_(), shard(data(8, 8), shared_mesh(2), [Shard(1)]))
        for call in (
            lambda: x @ s,
            lambda: torch.mm(x, s),
            lambda: s @ torch.stack([x, x]),
            lambda: s.to_dense().to_sparse_bsr((2, 2)) @ x,
            lambda: torch.bmm(torch.stack([s, s]).to_dense().to_sparse_csr(), torch.stack([x, x])),
            lambda: torch.sparse.mm(x, s),
            lambda: torch.sparse.mm(s, x, "mean"),
            lambda: torch.addmm(s, s, x),
        ):
            with pytest.raises(UnsupportedSharding, match=r"layout torch.sparse.*Remedy: make it dense"):
                call()
        for wrong in (matrix(8, 7), matrix(8, 8, dtype=torch.float32)):
            with pytest.raises(RuntimeError):
                wrong @ x
    assert not counted.collectives and not counted.messages


# -- by rows -----------------------------------------------------------------------------------------------------------


FEATURES = 8


def adjacency(side, layout=torch.sparse_coo):
    """A grid's nodes in row order, each with its neighbours, as a matrix with random values."""
    node = torch.arange(side * side).view(side, side)
    neighbours = [(node[:-1], node[1:]), (node[:, :-1], node[:, 1:])]
    pairs = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in neighbours], 1)
    pairs = torch.cat([pairs, pairs.flip(0)], 1)
    values = torch.randn(pairs.shape[1], generator=seeded(3), dtype=torch.float64)
    return torch.sparse_coo_tensor(pairs, values, (side**2, side**2)).coalesce().to_sparse(layout=layout)


def least(side, sizes):
    """How many rows each rank has to send: those that neighbours on other ranks read."""
    rows, columns = adjacency(side).indices()
    ends = torch.tensor(sizes).cumsum(0)
    reader, owner = (torch.searchsorted(ends, t, right=True) for t in (rows, columns))
    sent = torch.stack([reader, columns])[:, reader != owner].unique(dim=1)[1]
    return torch.searchsorted(ends, sent, right=True).bincount(minlength=len(sizes)).tolist()


def check_bytes(ranks, sizes):
    """Bytes and collectives of each step, and how often a matrix is looked at."""
    found = []
    for layout in LAYOUTS.values():
        s = adjacency(24, layout)
        x = shard(data(24**2, FEATURES), shared_mesh(ranks), [Shard(0)], {0: sizes}, requires_grad=True)
        for step in range(3):
            with mock.patch.object(row_halos, "wanted", wraps=row_halos.wanted) as looks:
                with count_communication() as forward:
                    y = s @ x
                assert y.placements == (Shard(0),) and y.shard_sizes == {0: tuple(sizes)}
                with count_communication() as backward:
                    y.square().sum().backward()
            found.append([looks.call_count, forward.bytes_sent, backward.bytes_sent])
            assert forward.collectives.total() == (1 if step else 2)  # ranks compare the indices first
            assert backward.collectives.total() == 1
    return found


@pytest.mark.parametrize("sizes", [(288, 288), (100, 0, 476), (144, 144, 144, 144)])
def test_rows_of_matrices_travel_once(sizes):
    ranks = len(sizes)
    rows_of_ranks = least(24, sizes)
    if ranks == 2:
        assert rows_of_ranks == [24, 24]
    found = run_distributed(check_bytes, ranks, ranks, sizes)
    for rank, steps in enumerate(found):
        for i, (looks, forward, _) in enumerate(steps):
            assert looks == (0 if i % 3 else ranks)  # each looks at the parts of all
            assert forward == rows_of_ranks[rank] * FEATURES * 8
    # What was fetched goes back.
    total = sum(rows_of_ranks) * FEATURES * 8
    assert [sum(steps[i][2] for steps in found) for i in range(9)] == [total] * 9


@on_ranks(2)
def test_no_host_reads_values_after_the_first_step():
    """The first step looks at the matrix, the others at nothing, forward and backward, with gradients of values too."""
    from host_reads import host_reads

    for s in (*(adjacency(8, layout) for layout in LAYOUTS.values()), adjacency(8).requires_grad_()):
        x = shard(data(64, FEATURES), shared_mesh(2), [Shard(0)], {0: (24, 40)}, requires_grad=True)
        found = []
        for _ in range(3):
            with host_reads() as seen:
                (s @ x).square().sum().backward()
            found.append(dict(seen))
        assert found[0] and not found[1] and not found[2], (s.layout, s.requires_grad, found)


def band(n, k, reach=2):
    """Where a matrix of ``n`` rows and ``k`` columns has entries: near its diagonal, none in the second row."""
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(k), indexing="ij")
    near = ((columns * n - rows * k).abs() <= reach * max(n, k)) & (rows != 1)
    return near.nonzero().t()


def made(layout, places, values, shape, repeated=False):
    """A matrix of these values, where entries are given twice if ``repeated``."""
    if layout is torch.sparse_coo:
        if repeated:
            places, values = torch.cat([places, places.flip(1)], 1), torch.cat([values, values.cos()])
        return torch.sparse_coo_tensor(places, values, shape)
    major, minor = (0, 1) if layout is torch.sparse_csr else (1, 0)
    order = (places[major] * max(shape) + places[minor]).argsort()
    starts = torch.searchsorted(places[major][order], torch.arange(shape[major] + 1))
    make = torch.sparse_csr_tensor if layout is torch.sparse_csr else torch.sparse_csc_tensor
    return make(starts, places[minor][order], values[order], shape)


def check_rows(mesh_shape, placements, sizes, n, k, reach):
    """Values and gradients, the matrix's own too, of square, tall and wide matrices; repeated entries and none."""
    places = band(n, k, reach)
    values = torch.randn(places.shape[1], generator=seeded(4), dtype=torch.float64)
    columns = 1 if placements == [Shard(0)] else 4
    kinds = [(layout, False) for layout in LAYOUTS.values()] + [(torch.sparse_coo, True)]
    for layout, repeated in kinds:
        for function in (torch.mm, lambda s, x: torch.addmm(x.sum(0), s, x), lambda s, x: s @ x[:, 0]):
            for graded in (True, False):

                def product(x, v, layout=layout, repeated=repeated, function=function, graded=graded):
                    v = v.to_local() if isinstance(v, ShardTensor) else v
                    return function(made(layout, places, v if graded else v.detach(), (n, k), repeated), x).sin()

                assert_matches_unsharded(
                    product,
                    *(data(k, columns + 3), values),
                    mesh_shape=mesh_shape,
                    placements=[placements, None],
                    shard_sizes=[sizes, None],
                )


@pytest.mark.on_cpu("GPUs have no kernel for these reductions")
@pytest.mark.parametrize(
    ("placements", "sizes", "columns"), [([Shard(0)], {0: (6, 3)}, 1), ([Shard(1)], {0: (1, 2)}, 3)]
)
@on_ranks(2)
def test_reductions(placements, sizes, columns):
    """A mean and extremes over the entries of each row, which one device has for CSR on the CPU."""
    places = band(9, 9, 1)
    s = made(torch.sparse_csr, places, torch.randn(places.shape[1], generator=seeded(4), dtype=torch.float64), (9, 9))
    for reduce in ("sum", "mean", "amax", "amin"):
        assert_matches_unsharded(
            lambda x, reduce=reduce: torch.sparse.mm(s, x, reduce),
            data(9, columns),
            mesh_shape=2,
            placements=placements,
            shard_sizes=sizes,
        )


SHAPES = [(7, 7, 1), (7, 17, 2), (17, 7, 2), (1, 5, 3), (2, 2, -1), (33, 33, 1)]


@pytest.mark.parametrize(("n", "k", "reach"), SHAPES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_products_by_rows(ranks, n, k, reach):
    if ranks == 4:
        run_distributed(check_rows, 4, (2, 2), [Shard(1), Shard(0)], {1: (k - 1, 1)}, n, k, reach, timeout=200)
    else:
        sizes = (k - 1, 1) + (0,) * (ranks - 2) if ranks == 2 else (k - 1, 0, 1)
        run_distributed(check_rows, ranks, ranks, [Shard(0)], {0: sizes}, n, k, reach, timeout=200)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_of_a_pattern(dtype):
    """Twice: of values and rows, where an entry is given twice and a row and a column are empty."""
    rows_of, columns = torch.tensor([0, 0, 0, 2, 3]), torch.tensor([1, 1, 4, 0, 1])
    pattern = Pattern.of(rows_of, columns, (4, 5))
    values, x = (torch.randn(n, dtype=dtype, generator=seeded(5)).requires_grad_() for n in (5, (5, 2)))
    dense = torch.zeros(4, 5, dtype=dtype).index_put((rows_of, columns), values.detach(), accumulate=True)

    def product(values, x):
        return SparseProduct.apply(values, x, pattern)

    torch.testing.assert_close(product(values, x), dense @ x)
    assert torch.autograd.gradcheck(product, (values, x)) and torch.autograd.gradgradcheck(product, (values, x))


@on_ranks(2)
def test_second_derivatives_by_rows():
    places, sizes = band(9, 9, 1), {0: (6, 3)}

    def first(x, v):
        product = torch.sparse_coo_tensor(places, v, (9, 9)) @ x
        return torch.autograd.grad(product.pow(3).sum(), x, create_graph=True)[0]

    values = torch.randn(places.shape[1], generator=seeded(4), dtype=torch.float64)
    assert_matches_unsharded(
        first,
        *(data(9, 3), values),
        mesh_shape=2,
        placements=[[Shard(0)], None],
        shard_sizes=[sizes, None],
    )


def check_changes():
    """How often this rank looks at a matrix whose values or indices change."""
    mesh, found = shared_mesh(2), {}
    for layout in (torch.sparse_csr, torch.sparse_coo):
        places, x = band(9, 9, 1), shard(data(9, 3), mesh, [Shard(0)], {0: (6, 3)})
        values = torch.randn(places.shape[1], generator=seeded(4), dtype=torch.float64)
        s = made(layout, places, values, (9, 9))

        def look(label, s=s, x=x, layout=layout):
            with mock.patch.object(row_halos, "wanted", wraps=row_halos.wanted) as looks:
                got = s @ x
            torch.testing.assert_close(got.full_tensor(), s.to_dense() @ data(9, 3))
            found[label, layout] = looks.call_count

        look("first")
        look("again")
        look("requires grad", x=x.clone().requires_grad_())
        with torch.no_grad():
            look("without grad")
        _, own = sparse_parts(s)
        own.mul_(2)
        look("values")
        look("values, again")
        (_, minor), _ = sparse_parts(s)
        minor[0] = 7
        look("indices")
        look("indices, again")
        look("a view made anew", s=s.t().t())
        with mock.patch.dict("os.environ", SHARDTENSOR_DEBUG="1"):
            look("debug")
        look("another layout", x=shard(data(9, 3), mesh, [Shard(0)], {0: (4, 5)}))
    return found


def test_what_is_kept_of_a_matrix_follows_its_version():
    anew = {"first", "values", "indices", "a view made anew", "debug", "another layout"}
    for found in run_distributed(check_changes, 2):
        assert {label for (label, _), count in found.items() if count} == anew


def check_hidden_change(change):
    x = shard(data(9, 3), shared_mesh(2), [Shard(0)], {0: (6, 3)})
    places = band(9, 9, 1)
    starts, columns = torch.searchsorted(places[0].contiguous(), torch.arange(10)), places[1].clone()
    if change == "out of range":
        columns[0] = 9
    if change == "negative":
        columns[-1] = -1
    s = torch.sparse_csr_tensor(starts, columns, torch.ones(len(columns), dtype=torch.float64), (9, 9))
    with count_communication() as counted:
        try:
            s @ x
            if change == "indices":
                columns.copy_(columns.flip(0))
            elif change == "starts":
                starts[1:9] += 1
            s @ x
        finally:
            assert counted.collectives.total() == (1 if change in ("out of range", "negative") else 2)


@pytest.mark.parametrize("change", ["indices", "starts", "out of range", "negative"])
def test_wrong_indices_raise(change, device_of_ranks):
    error, text = RuntimeError, asserted(device_of_ranks, "raises no version.*Remedy: make a new one")
    if change in ("out of range", "negative"):
        error, text = IndexError, r"out of range for its shape \(9, 9\)"
    for raised in run_expecting_errors(check_hidden_change, 2, change):
        with pytest.raises(error, match=text):
            raise raised


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_half_precision_by_rows(dtype):
    """Errors against float64, ours and one device's, and what is sent: rows in their own dtype."""
    s, sizes = adjacency(12), (100, 44)
    x, sent, errors = data(144, 4).to(dtype), [], []
    for layout in LAYOUTS.values():
        ours = shard(x, shared_mesh(2), [Shard(0)], {0: sizes}, requires_grad=True)
        one = x.clone().requires_grad_()
        with count_communication() as counted:
            y = s.to_sparse(layout=layout).to(dtype) @ ours
        sent.append(counted.bytes_sent)
        assert y.dtype == y.to_local().dtype == dtype
        y.sum().backward()
        expected = s.to(dtype) @ one
        expected.sum().backward()
        truth = s.to(dtype).to_dense().double()
        for got, theirs, true in (
            (y.full_tensor(), expected, truth @ x.double()),
            (ours.grad.full_tensor(), one.grad, truth.sum(0)[:, None].expand(144, 4)),
        ):
            errors.append([float((t.double() - true).abs().max()) for t in (got, theirs)])
    rank = dist.get_rank()
    assert sent == [least(12, (100, 44))[rank] * 4 * 2] * 3
    assert all(ours <= 2 * theirs for ours, theirs in errors)


@on_ranks(2)
def test_other_dtypes():
    """Integers are multiplied as before; autocast gives half precision."""
    mesh = shared_mesh(2)
    s, x = adjacency(4), data(16, 3)
    whole = (s * 10).long() @ (x * 10).long()
    got = (s * 10).long() @ shard((x * 10).long(), mesh, [Shard(0)])
    assert torch.equal(got.full_tensor(), whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = s.float() @ shard(x.float(), mesh, [Shard(0)])
    assert got.dtype == torch.bfloat16 and got.placements == (Shard(0),)
    torch.testing.assert_close(got.full_tensor(), (s @ x).bfloat16(), rtol=0.05, atol=0.1)
    complex_ = s.to(torch.complex128) * (1 + 2j)
    got = complex_ @ shard(x.to(torch.complex128), mesh, [Shard(0)])
    torch.testing.assert_close(got.full_tensor(), complex_ @ x.to(torch.complex128))


def check_compiled():
    s, x = adjacency(4, torch.sparse_csr), shard(data(16, 3), shared_mesh(2), [Shard(0)], requires_grad=True)
    try:
        got = torch.compile(lambda x: (s @ x).sin(), backend="aot_eager")(x)
    except Exception as error:
        return type(error).__name__ + str(error)[:1500]
    torch.testing.assert_close(got.full_tensor(), (s @ data(16, 3)).sin())
    got.sum().backward()
    return "right"


def test_compiled():
    assert run_distributed(check_compiled, 2) == ["right"] * 2


@on_ranks(2)
def test_matrices_of_sharded_edges_are_refused():
    mesh, places = shared_mesh(2), band(9, 9, 1)
    edges, values = (
        shard(t, mesh, [Shard(t.ndim - 1)]) for t in (places, torch.ones(places.shape[1], dtype=torch.float64))
    )
    whole = torch.ones(places.shape[1], dtype=torch.float64)
    for make in (
        lambda: torch.sparse_coo_tensor(edges, values, (9, 9)),
        lambda: torch.sparse_coo_tensor(edges, whole, (9, 9)),
        lambda: torch.sparse_coo_tensor(places, values, (9, 9)),
        lambda: torch.sparse_csr_tensor(torch.arange(10), edges[1], values, (9, 9)),
    ):
        text = r"no rank has all.*Remedy: make it of plain tensors"
        with count_communication() as counted, pytest.raises(UnsupportedSharding, match=text):
            make()
        assert not counted.collectives


@on_ranks(2)
def test_matrices_of_replicated_edges_are_plain():
    """A matrix of what every rank holds whole is plain, and values keep their history."""
    mesh, places = shared_mesh(2), band(9, 9, 1)
    values, starts = data(places.shape[1]), torch.searchsorted(places[0].contiguous(), torch.arange(10))

    def whole(t):
        return shard(t, mesh, [Replicate()])

    for label, make in {
        "coo": lambda v, whole: torch.sparse_coo_tensor(whole(places), v, (9, 9)),
        "csr": lambda v, whole: torch.sparse_csr_tensor(whole(starts), whole(places[1]), v, (9, 9)),
        "csc": lambda v, whole: torch.sparse_csc_tensor(whole(starts), whole(places[1]), v, (9, 9)),
    }.items():
        theirs, x = values.clone().requires_grad_(), data(9, 3).requires_grad_()
        (make(theirs * 2, lambda t: t) @ x).pow(2).sum().backward()
        ours = whole(values).requires_grad_()
        rows = shard(data(9, 3), mesh, [Shard(0)], {0: (6, 3)}, requires_grad=True)
        s = make(ours * 2, whole)
        assert type(s) is torch.Tensor
        (s @ rows).pow(2).sum().backward()
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=label)
        torch.testing.assert_close(rows.grad.full_tensor(), x.grad, msg=label)
    sums = shard(values, mesh, [Partial()])
    with pytest.raises(UnsupportedSharding, match="no rank has all"):
        torch.sparse_coo_tensor(places, sums, (9, 9))
