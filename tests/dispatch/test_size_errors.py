"""Plain tensors next to ShardTensors: those of a shard's size are refused on every rank, in words that say so."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from shardtensor import (
    LocalSizeError,
    LostRankError,
    ShardTensor,
    UnsupportedSharding,
    allow_gather,
)
from shardtensor.dispatch.size_errors import writes
from shardtensor.ranks.waiting import observed
from shardtensor.testing import (
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
    simulate_ranks,
)

pytestmark = pytest.mark.every_run


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def where(*shape):
    return torch.ones(shape, dtype=torch.bool)


def zero_indices(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def attention():
    return nn.MultiheadAttention(7, 1, batch_first=True).double()


# What a user writes with x of (2, 8, 7), sharded along dim 1, and n, this rank's part of the 8 rows; name in the text.
N = 8
ELEMENTWISE = {
    "add": lambda x, n: x + ones(2, n, 7),
    "add ": lambda x, n: ones(2, n, 7) + x,
    "add  ": lambda x, n: x + ones(1, n, 1),
    "mul": lambda x, n: x * ones(n, 1).requires_grad_(),
    "where": lambda x, n: torch.where(where(n, 1), x, 0.0),
    "masked_fill": lambda x, n: x.masked_fill(where(2, n, 1), 0.0),
    "masked_fill_": lambda x, n: x.clone().masked_fill_(where(2, n, 1), 0.0),
    "gt": lambda x, n: x > ones(n, 7),
    "__eq__": lambda x, n: x == ones(n, 7),
    "lerp": lambda x, n: torch.lerp(x, x, ones(n, 7)),
    "addcmul": lambda x, n: torch.addcmul(x, x, ones(n, 7)),
    "clamp": lambda x, n: x.clamp(min=ones(n, 7)),
    "_foreach_add": lambda x, n: torch._foreach_add([x], [ones(2, n, 7)]),
    "bernoulli_": lambda x, n: x.clone().bernoulli_(ones(2, n, 7)),
    "bernoulli.Tensor": lambda x, n: torch.ops.aten.bernoulli.Tensor(x, ones(2, n, 7)),
    "allclose": lambda x, n: torch.allclose(x, ones(2, n, 7)),
    "add_": lambda x, n: x.clone().add_(ones(n, 7)),
    "mul_": lambda x, n: x.clone().__imul__(ones(n, 7)),
    "copy_": lambda x, n: x.clone().copy_(ones(2, n, 7)),
    "__setitem__": lambda x, n: x.clone().__setitem__(slice(None), ones(2, n, 7)),
    "data": lambda x, n: setattr(x.clone(), "data", ones(2, n, 7)),
    "grad": lambda x, n: setattr(x.detach().requires_grad_(), "grad", ones(2, n, 7)),
    "backward": lambda x, n: (x.requires_grad_() * 2).backward(ones(2, n, 7)),
}
TARGETS = {
    "add_": lambda x, n: ones(2, n, 7).add_(x),
    "copy_": lambda x, n: ones(2, n, 7).copy_(x),
    "__setitem__": lambda x, n: ones(2, n, 7).__setitem__(slice(None), x),
    "__setitem__ ": lambda x, n: ones(2, n, 7).__setitem__(where(2, n, 7), x),
}
PRODUCTS = {
    "matmul": lambda x, n: x.mT @ ones(n, 4),
    "matmul ": lambda x, n: ones(4, n) @ x,
    "bmm": lambda x, n: torch.bmm(x.mT, ones(2, n, 4)),
    "mv": lambda x, n: torch.mv(x[0].t(), ones(n)),
    "dot": lambda x, n: torch.dot(x[0, :, 0], ones(n)),
    "linear": lambda x, n: F.linear(x.mT, ones(4, n)),
    "einsum": lambda x, n: torch.einsum("bnc,nd->bcd", x, ones(n, 4)),
    "tensordot": lambda x, n: torch.tensordot(x, ones(n, 4), ([1], [0])),
    "addmm": lambda x, n: torch.addmm(ones(n, 4), x[0], ones(7, 4)),
    "baddbmm": lambda x, n: torch.baddbmm(ones(2, n, 4), x, ones(2, 7, 4)),
    "cdist": lambda x, n: torch.cdist(x.mT, ones(2, 4, n)),
    "linalg_solve": lambda x, n: torch.linalg.solve(x.transpose(0, 1)[..., :2], ones(n, 2, 1)),
    "cholesky_solve": lambda x, n: torch.cholesky_solve(ones(n, 2, 1), x.transpose(0, 1)[..., :2]),
    "bilinear": lambda x, n: F.bilinear(x, ones(2, n, 7), ones(2, 7, 7)),
}
JOINS = {
    "cat": lambda x, n: torch.cat([x, ones(2, n, 7)], 2),
    "stack": lambda x, n: torch.stack([x, ones(2, n, 7)]),
    "column_stack": lambda x, n: torch.column_stack([x[0, :, 0], ones(n)]),
}
INDEXING = {
    "__getitem__": lambda x, n: x[where(2, n)],
    "__getitem__ ": lambda x, n: x[:, where(n)],
    "__getitem__  ": lambda x, n: x[zero_indices(2, 1), torch.arange(N), zero_indices(2, n)],
    "index.Tensor": lambda x, n: torch.ops.aten.index.Tensor(x, [None, where(n)]),
    "__setitem__": lambda x, n: x.clone().__setitem__((slice(None), where(n)), 0.0),
    "__setitem__ ": lambda x, n: x.clone().__setitem__((slice(None), torch.arange(N)), ones(2, n, 7)),
    "index_put": lambda x, n: x.index_put((zero_indices(1), torch.arange(N)), ones(n, 7)),
    "masked_select": lambda x, n: x.masked_select(where(n, 1)),
    "masked_scatter": lambda x, n: x.masked_scatter(where(n, 1), ones(2 * N * 7)),
    "index_add": lambda x, n: x.index_add(1, torch.arange(N), ones(2, n, 7)),
    "index_copy": lambda x, n: x.index_copy(1, torch.arange(N), ones(2, n, 7)),
    "scatter": lambda x, n: x.scatter(2, zero_indices(2, N, 7), ones(2, n, 7)),
    "take_along_dim": lambda x, n: torch.take_along_dim(x, zero_indices(2, n, 1), 2),
    "gather": lambda x, n: ones(2, n, 7).gather(2, x.long()),
    "slice_scatter": lambda x, n: torch.slice_scatter(x, ones(2, n, 1), 2, 0, 1),
    "searchsorted": lambda x, n: torch.searchsorted(ones(2, n, 7), x),
    "histogram": lambda x, n: torch.histogram(x, 4, weight=ones(2, n, 7)),
    "histogramdd": lambda x, n: torch.histogramdd(x[..., :2], [2, 2], weight=ones(2, n)),
    "bincount": lambda x, n: torch.bincount(x[0, :, 0].long(), ones(n)),
}
LOSSES = {
    **{
        name: lambda x, n, name=name: getattr(F, name)(x, ones(2, n, 7))
        for name in ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    },
    "kl_div": lambda x, n: F.kl_div(x, ones(2, n, 7), reduction="sum"),
    "gaussian_nll_loss": lambda x, n: F.gaussian_nll_loss(x, ones(2, N, 7), ones(2, n, 7)),
    "cosine_similarity": lambda x, n: F.cosine_similarity(x, ones(2, n, 7), -1),
    "cross_entropy": lambda x, n: F.cross_entropy(x[0], zero_indices(n)),
    "cross_entropy ": lambda x, n: F.cross_entropy(x.mT, zero_indices(2, n)),
    "cross_entropy  ": lambda x, n: F.cross_entropy(x.transpose(0, 1).flatten(0, 1), zero_indices(2 * n)),
    "cross_entropy   ": lambda x, n: F.cross_entropy(x[0].t(), zero_indices(7), weight=ones(n)),
    "nll_loss": lambda x, n: F.nll_loss(x.mT[..., None], zero_indices(2, n, 1)),
    "ctc_loss": lambda x, n: F.ctc_loss(
        x.log_softmax(-1), zero_indices(n, 2) + 1, zero_indices(n) + 2, zero_indices(n) + 1
    ),
    "multi_margin_loss": lambda x, n: F.multi_margin_loss(x[0], zero_indices(n)),
}
NETWORKS = {
    "scaled_dot_product_attention": lambda x, n: F.scaled_dot_product_attention(x, x, x, attn_mask=where(n, n)),
    "scaled_dot_product_attention ": lambda x, n: F.scaled_dot_product_attention(x, x, x, attn_mask=where(2, 1, n)),
    "multi_head_attention_forward": lambda x, n: attention()(x, x, x, key_padding_mask=~where(2, n)),
    "multi_head_attention_forward ": lambda x, n: attention()(x, x, x, attn_mask=ones(n, n)),
    "layer_norm": lambda x, n: F.layer_norm(x.mT, (N,), ones(n)),
    "layer_norm ": lambda x, n: nn.LayerNorm(n).double()(x.mT),
    "rms_norm": lambda x, n: F.rms_norm(x.mT, (n,), ones(n)),
    "batch_norm": lambda x, n: nn.BatchNorm1d(n).double()(x),
    "group_norm": lambda x, n: F.group_norm(x, 1, ones(n), ones(n)),
    "instance_norm": lambda x, n: F.instance_norm(x, weight=ones(n), bias=ones(n)),
    "conv1d": lambda x, n: F.conv1d(x, ones(4, n, 1)),
    "linear": lambda x, n: nn.Linear(n, 4).double()(x.mT),
    "prelu": lambda x, n: F.prelu(x, ones(n)),
    "grid_sample": lambda x, n: F.grid_sample(x.transpose(0, 1)[..., None], ones(n, 2, 2, 2)),
    "max_unpool1d": lambda x, n: F.max_unpool1d(x, zero_indices(2, n, 7), 2),
    "add": lambda x, n: x + nn.Parameter(ones(1, n, 7)),
}
CLASSES = {
    "elementwise": ELEMENTWISE,
    "targets": TARGETS,
    "products": PRODUCTS,
    "joins": JOINS,
    "indexing": INDEXING,
    "losses": LOSSES,
    "networks": NETWORKS,
}


def sharded(sizes):
    x = torch.rand(2, sum(sizes), 7, dtype=torch.float64)
    return shard(x, shared_mesh(len(sizes)), [Shard(1)], {0: sizes})


def texts(kind, sizes):
    """What each call of a class raises on this rank, and what it has sent before that."""
    x, n, found = sharded(sizes), sizes[dist.get_rank()], {}
    for name, call in CLASSES[kind].items():
        with count_communication() as counted:
            try:
                error = call(x.detach(), n)
            except Exception as raised:
                error = raised
        sent = counted.messages + sum(counted.collectives.values())
        found[name] = type(error).__name__, str(error), sent
    assert x.sum().item() > 0  # the ranks still agree
    return found


@pytest.mark.parametrize("sizes", [(5, 3), (4, 4), (3, 0, 5)], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_rank_says_what_is_wrong_before_anything_is_sent(kind, sizes):
    for n, found in zip(sizes, run_distributed(texts, len(sizes), kind, sizes), strict=True):
        for name, (error, text, sent) in found.items():
            assert (error, sent) == ("LocalSizeError", 0), (name, error, text, sent)
            assert text.startswith(f"{name.strip()}: a plain "), text
            assert re.search(rf"this rank's shard has {n} of (8|16) rows \(dim \d\)|has {2 * n} of 16 rows", text), text
            remedy = {"targets": "Remedy: make that tensor from a ShardTensor"}.get(kind, "Remedy: (pass the|make the)")
            assert re.search(remedy, text) and "Plain " in text and "Cause: " in text, text


def one_row(call, sizes):
    x, n = sharded(sizes), sizes[dist.get_rank()]
    with count_communication() as counted:
        try:
            CLASSES[call[0]][call[1]](x, n)
        finally:
            assert not counted.messages and not counted.collectives


@pytest.mark.parametrize("sizes, fits", [((7, 1), 1), ((8, 0), 0)], ids=str)
def test_where_a_shard_is_broadcast_or_is_all_one_rank_sees_nothing(sizes, fits):
    """As the page says; no rank could know of it without a message. A mask is not broadcast."""
    errors = run_expecting_errors(one_row, 2, ("elementwise", "add"), sizes)
    assert errors[fits] is None and isinstance(errors[1 - fits], LocalSizeError)
    if fits:
        errors = run_expecting_errors(one_row, 2, ("indexing", "__getitem__"), sizes)
        assert all(isinstance(error, LocalSizeError) for error in errors)


def other_lengths(case):
    x = sharded((5, 3))
    index = torch.full((5,), 8)
    match case:
        case "of rank 0":
            x * ones(5, 1)
        case "channels":
            x + ones(2, 8, 6)
        case "no shard's":
            x + ones(2, 6, 7)
        case "dtype":
            F.embedding(ones(5), x[0])
        case "out of range":
            x[:, index]
        case "no size":
            torch.add(x, ones(5, 1), alpha="1")
        case "mask of a whole dim":
            x[where(1)]
        case "gathers":
            with allow_gather():
                x + ones(5, 7)
        case "replicated":
            x + ShardTensor.from_local(ones(5, 7), x.device_mesh, [Replicate()])


OTHER = {
    "of rank 0": (LocalSizeError, "the shard of rank 0 of mesh dim 0|this rank's shard has 5 of 8"),
    "channels": (RuntimeError, "^(?!.*Plain tensors are global)"),
    "no shard's": (RuntimeError, "^(?!.*Plain tensors are global)"),
    "dtype": ((RuntimeError, TypeError), "^(?!.*Plain tensors are global)"),
    "out of range": ((IndexError, RuntimeError), "^(?!.*Plain tensors are global)"),
    "no size": (TypeError, "alpha"),
    "mask of a whole dim": (IndexError, r"mask of shape \(1,\) does not fit the dims \(2,\)"),
    "gathers": (LocalSizeError, "Plain tensors are global"),
    "replicated": (LocalSizeError, "Replicated tensors are global"),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_lengths_and_other_mistakes(case):
    kind, text = OTHER[case]
    for error in run_expecting_errors(other_lengths, 2, case):
        assert isinstance(error, kind) and re.search(text, str(error), re.DOTALL), repr(error)
        if kind is not LocalSizeError:
            assert not isinstance(error, LocalSizeError)


def on_a_grid():
    mesh = init_device_mesh("cpu", (2, 2))
    h, w = mesh.get_coordinate()
    local = ones(1, (5, 3)[h], (4, 2)[w])
    x = ShardTensor.from_local(local, mesh, [Shard(1), Shard(2)], shard_sizes={0: (5, 3), 1: (4, 2)})
    found = []
    for plain in (local, local[0, :1]):
        with pytest.raises(LocalSizeError) as raised:
            x * plain
        found.append(str(raised.value))
    return found


def test_on_a_grid_all_sharded_dims_are_named():
    for rank, (both, one) in enumerate(simulate_ranks(on_a_grid, 4)):
        n, m = (5, 3)[rank // 2], (4, 2)[rank % 2]
        assert f"has {n} of 8 rows (dim 1) and this rank's shard has {m} of 6 rows (dim 2)" in both
        assert "from_local(part, mesh, (Shard(1), Shard(2)), shard_sizes={0: (5, 3), 1: (4, 2)})" in both
        assert f"this rank's shard has {m} of 6 rows (dim 2)" in one and "(Replicate(), Shard(1))" in one


def test_the_error_is_what_torch_raises_for_sizes():
    for kind in (RuntimeError, ValueError, IndexError):
        assert issubclass(LocalSizeError, kind)
    assert not issubclass(LocalSizeError, UnsupportedSharding)


# -- the page's rules; tests/test_pages.py compares its mistakes ------------------------------------------------------


@on_ranks(2)
def test_the_pages_rules():
    x = sharded((5, 3)).requires_grad_()
    whole = x.detach().full_tensor().requires_grad_()
    plain, same = (torch.rand(8, 1, dtype=torch.float64, requires_grad=True) for _ in "ab")
    same.data.copy_(plain.data)
    with count_communication() as counted:
        y = x * plain
    assert isinstance(y, ShardTensor) and not counted.messages and not counted.collectives
    y.square().sum().backward()
    (whole * same).square().sum().backward()
    assert type(plain.grad) is torch.Tensor
    torch.testing.assert_close(plain.grad, same.grad)
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    x, whole = x.detach(), whole.detach()
    # Indices and masks are global.
    index, mask = torch.tensor([6, 0, 7]), torch.arange(8) % 3 == 0
    for i in (index, [6, 0, 7], mask):
        assert torch.equal(x[:, i].full_tensor(), whole[:, i])
    # What is written is global; what is written to becomes a ShardTensor, if it is alone.
    written = x.clone()
    written[:, 2:6] = whole[:, :4]
    assert torch.equal(written.full_tensor()[:, 2:6], whole[:, :4])
    for write in (lambda out: out.add_(x), lambda out: torch.add(x, whole, out=out)):
        out = whole.clone()
        write(out)
        assert isinstance(out, ShardTensor) and torch.equal(out.full_tensor(), 2 * whole)
        out = whole.clone()
        flat = out.view(-1)
        with pytest.raises(UnsupportedSharding, match="cannot be written into a plain tensor inside"):
            write(out)
        assert torch.equal(flat, whole.view(-1))
    # Nor does torch's own context for DTensors change anything.
    with implicit_replication(), count_communication() as counted:
        scaled, sums = x * whole, nn.functional.linear(x, whole[0])
    assert not counted.messages and not counted.collectives
    assert torch.equal(scaled.full_tensor(), whole * whole)
    torch.testing.assert_close(sums.full_tensor(), whole @ whole[0].t())
    assert isinstance(torch.zeros_like(x), ShardTensor) and type(torch.zeros(8) + 1) is torch.Tensor
    assert isinstance(x.new_zeros(x.shape), ShardTensor)
    # A buffer.
    norms = [nn.BatchNorm1d(7).double() for _ in "ab"]
    norms[0](x.mT), norms[1](whole.mT)
    torch.testing.assert_close(norms[0].running_mean, norms[1].running_mean)


@on_ranks(2)
def test_what_no_rank_can_see():
    """What the page says that no rank can see."""
    x = sharded((4, 4))
    whole, n = x.full_tensor(), 4
    assert torch.equal(x[:, torch.arange(n)].full_tensor(), whole[:, :n])
    assert torch.cat([x, ones(2, n, 7)], 1).shape == (2, 12, 7)
    assert torch.outer(x[0, :, 0], ones(n)).shape == (8, n)
    assert torch.equal((x[..., :4] + torch.arange(n)).full_tensor(), whole[..., :4] + torch.arange(n))
    x * dist.get_rank()


def breaks(group):
    def afterwards():
        raise LostRankError("rank 0: exchange in conv2d to (1, 4, 10, 6) as (S(2)[7, 3]) was not completed")

    return afterwards


@on_ranks(2)
def test_a_lost_rank_is_not_taken_for_a_wrong_size():
    """A weight has dims as long as a shard, and the text of the error that is raised in the call names lengths."""
    mesh = shared_mesh(2)
    x = shard(torch.randn(1, 4, 10, 6), mesh, [Shard(2)], {0: (7, 3)})
    F.conv2d(x, torch.ones(4, 4, 3, 3), padding=1)
    with observed(breaks), pytest.raises(LostRankError, match="exchange in conv2d"):
        F.conv2d(x, torch.ones(4, 4, 3, 3), padding=1)


# -- which functions write --------------------------------------------------------------------------------------------


def named_so(func):
    """What the name of one of torch's functions tells."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def foo_(plain, x):
    """A program's own function, which writes to nothing."""
    if torch.overrides.has_torch_function((plain, x)):
        return torch.overrides.handle_torch_function(foo_, (plain, x), plain, x)
    return type(plain) is torch.Tensor


def test_torchs_functions_write_as_their_names_say():
    functions = {f for found in torch.overrides.get_overridable_functions().values() for f in found}
    others = {f.__name__ for f in functions if named_so(f) != writes(f)}
    assert others == {"__int__", "__index__", "__invert__", "share_memory_"} and len(functions) > 1000


def test_operators_write_as_their_schemas_say():
    aten = torch.ops.aten
    assert all(map(writes, (aten.add_.Tensor, aten.add_, aten._foreach_add_.List, aten.copy_.default, aten.set_)))
    others = aten.add.Tensor, aten.add.out, aten.sort, aten.retain_grad.default, aten.native_batch_norm.default, foo_
    assert not any(map(writes, others)), "the first argument of none"


@on_ranks(2)
def test_operators_that_write():
    """``aten.add_.Tensor`` and a program's own function, as torch hands them over."""
    x = shard(torch.arange(8.0), shared_mesh(2), [Shard(0)], {0: (5, 3)})
    plain = torch.ones(8)
    written = torch.ops.aten.add_.Tensor(plain, x)
    total = torch.ones(())
    torch.ops.aten.add_.Tensor(total, x.sum())
    parameter = nn.Parameter(torch.ones(8))
    with pytest.raises(UnsupportedSharding, match="add_"), torch.no_grad():
        torch.ops.aten.add_.Tensor(parameter, x)
    assert foo_(torch.ones(8), x)
    same, whole, total = written is plain, plain.full_tensor(), total
    assert same and torch.equal(whole, torch.arange(8.0) + 1) and total.item() == 29
