"""torch.compile of unmodified modules and functions on ShardTensors: one device's numbers, or a clear refusal."""

from __future__ import annotations

import copy
import itertools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch._higher_order_ops.effects import has_effects
from torch._inductor.scheduler import Scheduler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.utils.checkpoint import checkpoint

import shardtensor
from shardtensor import ShardTensor
from shardtensor.communication import exchange
from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh

DOUBLE = torch.float64
UNEVEN, EMPTY = (11, 5), (16, 0)


def whole(*shape):
    return torch.randn(shape, dtype=DOUBLE)


def rows(x, sizes, dim=2, **kwargs):
    return shard(x, shared_mesh(len(sizes)), [Shard(dim)], {0: sizes}, **kwargs)


def compiled(function, backend="aot_eager", **kwargs):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, backend=backend, fullgraph=True, **kwargs)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def text_of(function, *args, again=False):
    """What a function, compiled here unless it was before, says against its arguments."""
    try:
        (function if again else compiled(function))(*args)
    except Exception as error:
        return str(error)
    return "nothing was raised"


class Compiled(nn.Module):
    """A module that is compiled for ShardTensors, and is itself for whole tensors."""

    def __init__(self, inner, backend="aot_eager"):
        super().__init__()
        self.inner, self.backend = inner, backend

    def forward(self, *args):
        return (compiled(self.inner, self.backend) if isinstance(args[0], ShardTensor) else self.inner)(*args)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, *args):
        return self.function(*args, *self.parts)


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 3, 3, stride=2, padding=1)
    ).double()


def with_loss(net):
    return Function(lambda x, net: F.mse_loss(net(x), net(x).detach().cos()), net)


def token_block():
    def block(x, norm, mix, out):
        q, k, v = mix(norm(x)).unflatten(-1, (3, 2, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        logits = x + out(y.transpose(1, 2).flatten(2))
        return logits, F.cross_entropy(logits.transpose(1, 2), logits.argmax(-1))

    return Function(block, nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6)).double()


NETWORKS = {  # module, shape, sharded dim, sizes
    "convolutions": (conv_net, (1, 2, 16, 6), 2, UNEVEN),
    "an empty shard": (lambda: with_loss(conv_net()), (1, 2, 16, 6), 2, EMPTY),
    "attention, cross entropy": (token_block, (2, 16, 6), 1, UNEVEN),
    "batch norm, pooling, upsampling": (
        lambda: nn.Sequential(nn.BatchNorm2d(2), nn.MaxPool2d(3, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
        (2, 2, 16, 6),
        2,
        UNEVEN,
    ),
    "channels along the shards": (lambda: nn.LayerNorm(6).double(), (2, 3, 6), 2, (4, 2)),
}
UNTRACED = pytest.mark.on_cpu("with a default device, torch does not trace Tensor.unflatten")
MARKS = {name: pytest.mark.slow for name in NETWORKS}  # compiling takes seconds
MARKS |= {"an empty shard": (), "attention, cross entropy": UNTRACED}


def check_networks(names, backend="aot_eager"):
    for name in names:
        make, shape, dim, sizes = NETWORKS[name]
        module = Compiled(make().double(), backend)
        assert_matches_unsharded(module, whole(*shape), mesh_shape=2, placements=[Shard(dim)], shard_sizes={0: sizes})


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_networks_give_one_devices_numbers(name):
    run_distributed(check_networks, 2, [name], timeout=200)


@on_ranks(2, timeout=100)
def test_dtensor_parameters():
    x, net = whole(1, 2, 16, 6), conv_net()
    reference, given = copy.deepcopy(net), x.clone().requires_grad_()
    expected = reference(given)
    expected.square().mean().backward()
    mine = rows(x, UNEVEN, requires_grad=True)
    net = distribute_module(net, shared_mesh(2))
    loss = compiled(lambda x: net(x).square().mean())(mine)
    loss.backward()
    assert torch.allclose(loss.full_tensor(), expected.square().mean(), rtol=1e-10)
    assert mine.grad.shard_sizes == {0: UNEVEN}
    assert torch.allclose(mine.grad.full_tensor(), given.grad, rtol=1e-10, atol=1e-14)
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-14)


# -- guards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2, timeout=100)
def test_each_cut_has_a_graph_of_its_own_also_where_the_own_shard_is_the_same(dynamic):
    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    mine = compiled(conv, dynamic=dynamic)
    seen = []
    for height, sizes in [(16, (11, 5)), (16, (11, 5)), (16, (5, 11)), (16, (16, 0)), (16, (11, 5)), (17, (11, 6))]:
        x = whole(1, 2, height, 6)
        y = mine(rows(x, sizes))
        assert y.shard_sizes == {0: sizes}
        assert torch.allclose(y.full_tensor(), conv(x), rtol=1e-10)
        seen.append(graphs())
    assert seen == [1, 1, 2, 3, 3, 4]


@on_ranks(2, timeout=100)
def test_a_graph_that_gathers_serves_only_where_gathering_is_allowed():
    x = rows(whole(16, 6000), UNEVEN, dim=0)
    values = compiled(torch.linalg.svdvals)
    outside = [text_of(values, x, again=True)]
    with shardtensor.allow_gather():
        assert torch.allclose(values(x).full_tensor(), torch.linalg.svdvals(x.full_tensor()), rtol=1e-10)
    outside.append(text_of(values, x, again=True))
    assert all("UnsupportedSharding" in text and "svdvals" in text and "Remedy" in text for text in outside)


@on_ranks(2, timeout=100)
def test_a_graph_does_not_outlive_the_handlers_it_was_made_with():
    x, square = rows(whole(1, 1, 8, 3), (5, 3)), torch.square
    mine = compiled(lambda x: square(x))
    results = [mine(x)]
    shardtensor.extend.register(torch.square)(lambda x: x * x * x)
    results.append(mine(x))
    shardtensor.extend.unregister(torch.square)
    results.append(mine(x))
    for y, power in zip(results, (2, 3, 2), strict=True):
        assert torch.allclose(y.full_tensor(), x.full_tensor() ** power, rtol=1e-12)


# -- communication --------------------------------------------------------------------------------------------------


class Transfers:
    """Counts the exchanges that this rank starts."""

    def __enter__(self):
        self.count, self._record = 0, exchange.record

        def record(*args, **kwargs):
            self.count += 1
            return self._record(*args, **kwargs)

        exchange.record = record
        return self

    def __exit__(self, *_):
        exchange.record = self._record


@on_ranks(2, timeout=100)
def test_a_rank_that_has_no_use_for_what_it_receives_takes_part():
    x = whole(1, 2, 16, 6)
    conv = nn.Conv2d(2, 2, (2, 1)).double()  # reads downwards: the last rank gives its first row and gets nothing
    mine = compiled(conv)
    mine(rows(x, UNEVEN))
    given = rows(x, UNEVEN, requires_grad=True)
    with Transfers() as forward:
        y = mine(given)
    with Transfers() as backward:
        y.sum().backward()
    reference = x.clone().requires_grad_()
    conv(reference).sum().backward()
    assert torch.allclose(given.grad.full_tensor(), reference.grad, rtol=1e-10)
    assert (forward.count, backward.count) == (1, 1)


@on_ranks(2, timeout=100)
def test_point_to_point_messages_serve_graphs_too():
    conv, x = nn.Conv2d(2, 3, 3, padding=1).double(), rows(whole(1, 2, 16, 6), UNEVEN)
    mine = compiled(conv)
    results = [mine(x)]
    with shardtensor.set_transport("p2p"):
        results += [mine(x), compiled(conv)(x)]
    sent, send = [], exchange.c10d_messages
    exchange._FEW = 0  # so that "auto" finds few peers anywhere
    exchange.c10d_messages = lambda *args: sent.append(send(*args)) or sent[-1]
    try:
        results.append(compiled(conv)(x))
        assert len(sent) == 1
    finally:
        exchange._FEW, exchange.c10d_messages = 4, send
    for y in results:
        assert torch.equal(y.to_local(), conv(x).to_local())


# -- what else a compiled function may do ------------------------------------------------------------------------------


@on_ranks(2, timeout=200)
def test_inputs_that_are_views():
    x = whole(1, 4, 16, 6)
    for view in (
        lambda x: x.transpose(2, 3),
        lambda x: x[:, 1, 2:14].detach(),
        lambda x: x.transpose(1, 3).reshape(1, 2, 3, 16, 4),
        lambda x: x.permute(0, 2, 3, 1).flatten(2),
    ):
        given, reference = rows(x, UNEVEN, requires_grad=True), x.clone().requires_grad_()
        y = compiled(torch.sin)(view(given))
        assert torch.allclose(y.full_tensor(), view(reference).sin(), rtol=1e-12)
        if y.requires_grad:
            y.sum().backward()
            view(reference).sin().sum().backward()
            assert torch.allclose(given.grad.full_tensor(), reference.grad, rtol=1e-12)
    written = rows(x, UNEVEN)
    compiled(lambda y: y.mul_(2))(written.transpose(1, 3).reshape(1, 2, 3, 16, 4))
    assert torch.equal(written.full_tensor(), x * 2)
    # On the whole tensor this is a view; not so on shards with gaps in memory.
    sizes = (3, 2)
    local = whole(sizes[dist.get_rank()], 4, 3)[..., :2]
    copied = ShardTensor.from_local(local, shared_mesh(2), [Shard(0)], shard_sizes={0: sizes}).view(5, 8)
    double = compiled(lambda y: y.mul_(2))
    assert torch.equal(double(copied.clone()).full_tensor(), copied.full_tensor() * 2)
    refused = text_of(double, copied, again=True)
    assert "represents a view but is a copy" in refused and "Remedy: pass its clone()" in refused
    # A plain tensor that a sharded value was written to is in no graph.
    made = torch.zeros_like(x)
    made[:, :2] = rows(x, UNEVEN)[:, :2]
    refused = text_of(torch.sin, made)
    assert "was a plain tensor until a sharded value was written to it" in refused and "pass its clone()" in refused
    for function, given in ((compiled(torch.sin), made.clone()), (torch.compile(torch.sin, backend="aot_eager"), made)):
        assert torch.equal(function(given).full_tensor(), made.full_tensor().sin())


@on_ranks(2, timeout=200)
def test_moving_reading_writing_and_modes():
    x = whole(1, 2, 16, 6)
    mine = rows(x, UNEVEN)

    def move(x):
        moved = x.redistribute(placements=[Shard(3)]) * 2
        views = x[:, :, 3:13:2], x.transpose(2, 3)
        return moved, x.sum().full_tensor(), x.to_local() * 3, *views, x * x.shard_sizes[0][0]

    moved, total, local, part, turned, scaled = compiled(move)(mine)
    assert moved.placements == (Shard(3),) and torch.equal(moved.full_tensor(), x * 2)
    assert type(total) is torch.Tensor and torch.allclose(total, x.sum())
    assert type(local) is torch.Tensor and torch.equal(local, mine.to_local() * 3)
    assert torch.equal(part.full_tensor(), x[:, :, 3:13:2]) and torch.equal(turned.full_tensor(), x.transpose(2, 3))
    assert torch.equal(scaled.full_tensor(), x * 11)

    def write(x):
        x.mul_(2)
        return x + 1

    written = rows(x, UNEVEN)
    assert torch.equal(compiled(write)(written).full_tensor(), x * 2 + 1) and torch.equal(written.full_tensor(), x * 2)

    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    with torch.inference_mode():
        assert torch.allclose(compiled(conv)(mine).full_tensor(), conv(x), rtol=1e-10)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        half = compiled(conv.float())(rows(x.float(), UNEVEN))
        assert half.dtype == torch.bfloat16
        assert torch.allclose(half.full_tensor().float(), conv(x.float()).float(), atol=0.05)

    conv, given, reference = conv.double(), rows(x, UNEVEN, requires_grad=True), x.clone().requires_grad_()
    y = compiled(conv)(given)
    y.backward(torch.ones_like(y).redistribute(shard_sizes={0: (4, 12)}))  # a gradient that is cut otherwise
    conv(reference).sum().backward()
    assert torch.allclose(given.grad.full_tensor(), reference.grad, rtol=1e-10)

    for n in (3, 12):
        assert torch.equal(compiled(lambda x, n: x[:, :, :n] * n)(mine, n).full_tensor(), x[:, :, :n] * n)


@on_ranks(2, timeout=200)
def test_training_steps_with_the_loss_in_the_graph():
    net, x = conv_net()[:3].append(nn.Conv2d(4, 2, 3, padding=1).double()), whole(1, 2, 16, 6)
    alone = copy.deepcopy(net)
    step = compiled(lambda net, x: F.mse_loss(net(x), x))
    for sizes in (UNEVEN, UNEVEN, (3, 13)):
        losses = []
        for model, data, run in ((net, rows(x, sizes), step), (alone, x, lambda net, x: F.mse_loss(net(x), x))):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            loss = run(model, data)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-12
    assert graphs() == 2
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)


def check_dropout():
    x = rows(torch.ones(4, 1000), (600, 400), dim=1, requires_grad=True)
    dropout = compiled(nn.Dropout(0.5))
    first, second = dropout(x), dropout(x)
    first.sum().backward()
    assert torch.equal(x.grad.full_tensor(), first.full_tensor().detach())  # the same mask
    assert 0.4 < (first.full_tensor() != second.full_tensor()).double().mean() < 0.6
    assert 0.9 < first.full_tensor().mean() < 1.1
    return first.to_local().detach()[:, :400].tolist(), torch.rand(3).tolist()


def test_dropout_draws_for_each_shard_and_leaves_the_ranks_generators_in_step():
    (one, after_one), (other, after_other) = run_distributed(check_dropout, 2, timeout=100)
    assert one != other and after_one == after_other


# -- refusals -------------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=200)
def test_refusals_say_what_to_do():
    x, conv, mesh = rows(whole(1, 2, 16, 6), UNEVEN, requires_grad=True), nn.Conv2d(2, 2, 3).double(), shared_mesh(2)

    def gather(x):
        with shardtensor.allow_gather():
            return x + 1

    assert "make ShardTensors outside" in text_of(lambda t: ShardTensor.from_local(t, mesh, [Replicate()]), whole(3))
    assert "inside of shardtensor.allow_gather()" in text_of(gather, x)
    repeated = text_of(lambda x: checkpoint(conv, x, use_reentrant=False), x)
    assert "checkpoint(torch.compile(block)" in repeated
    assert "torch.compile supports only dropout" in text_of(lambda x: torch.bernoulli(x.detach().sigmoid()), x)
    # as that remedy says
    y = checkpoint(compiled(conv), x, use_reentrant=False)
    y.sum().backward()
    reference = x.full_tensor().detach().requires_grad_()
    conv(reference).sum().backward()
    assert torch.allclose(x.grad.full_tensor(), reference.grad, rtol=1e-10)


@on_ranks(2, timeout=100)
def test_an_index_out_of_range_is_an_error_on_every_rank():
    x = rows(whole(16, 6), UNEVEN, dim=0)
    take = compiled(lambda x, at: x[at] + 1)
    good = torch.tensor([3, 15, 0])
    assert torch.equal(take(x, good).full_tensor(), x.full_tensor()[good] + 1)
    with pytest.raises(RuntimeError, match="out of range for dimension 0 with size 16"):
        take(x, torch.tensor([3, 16, 0]))


@on_ranks(2, timeout=200)
def test_what_reads_values_breaks_the_graph():
    """Operators whose results follow from values: not in one graph, and eager between two of them."""
    x, i = whole(9), (whole(9) * 3).long().abs()
    readers = {
        "unique": (lambda x: torch.unique(x) * 2, i),
        "nonzero": (lambda x: (x > 0).nonzero() * 2, x),
        "masked_select": (lambda x: x[x > 0] * 2, x),
        "bincount": (lambda x: torch.bincount(x) * 2, i),
        "histc": (lambda x: torch.histc(x, 5) * 2, x),
        "item": (lambda x: x * float(x.sum()), x),
        "sort across shards": (lambda x: (x * 2).topk(7)[0] * 2, x),
    }
    for name, (function, whole_x) in readers.items():
        one = rows(whole_x, (7, 2), dim=0)
        assert re.search(f"Data dependent operator.*{name} of a ShardTensor", text_of(function, one), re.DOTALL), name
        torch._dynamo.reset()
        got = torch.compile(function, backend="aot_eager")(one)
        torch.testing.assert_close(got.full_tensor(), function(whole_x), rtol=1e-10, atol=1e-12)


@on_ranks(2, timeout=200)
def test_losses_with_any_reduction():
    x, target = rows(whole(7, 5), (6, 1), dim=0), whole(7, 5)
    losses = {
        "margin_ranking": lambda x, y: F.margin_ranking_loss(x, y, y.sign(), margin=0.3),
        "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y.argmin(1), reduction="sum"),
        "cosine_embedding": lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0].sign()),
        "hinge_embedding": lambda x, y: F.hinge_embedding_loss(x, y.sign(), reduction="sum"),
        "triplet": lambda x, y: F.triplet_margin_loss(x, y, y.flip(1)),
        "multi_margin": lambda x, y: F.multi_margin_loss(x, y.argmax(1), reduction="none"),
        "kl_div": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="sum"),
    }
    for name, function in losses.items():
        got = compiled(function)(x, rows(target, (6, 1), dim=0)).full_tensor()
        expected = function(x.full_tensor(), target)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


# -- slow: more of everything ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convolutions", "an empty shard", "attention, cross entropy"])
def test_inductor(name):
    run_distributed(check_networks, 2, [name], "inductor", timeout=500)


def attention_layers():
    def layers(x, *parts):
        for norm, q, k, v, out, wide, narrow in zip(*[iter(parts)] * 7, strict=True):
            y = norm(x)
            heads = (part(y).unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v))
            x = x + out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
            x = x + narrow(F.gelu(wide(x)))
        return x

    made = [[nn.LayerNorm(6), *(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 9), nn.Linear(9, 6)] for _ in range(3)]
    return Function(layers, *itertools.chain(*made)).double()


def check_attention_layers(sizes):
    """In backward, keys go around once more and the sums of weights' gradients are under way: what is independent."""
    orders = []
    codegen = Scheduler.codegen

    def record(scheduler, *args):
        operators = [getattr(node.node, "op_overload", None) for node in scheduler.nodes]
        orders.append([str(operator) for operator in operators if operator is not None and has_effects(operator)])
        return codegen(scheduler, *args)

    with mock.patch.object(Scheduler, "codegen", record), shardtensor.attention_method("ring"):
        assert_matches_unsharded(
            Compiled(attention_layers(), "inductor"),
            whole(1, sum(sizes), 6),
            mesh_shape=len(sizes),
            placements=[Shard(1)],
            shard_sizes={0: sizes},
        )
    return orders


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(9, 8), (1, 16), (13, 3, 1)])
def test_inductor_keeps_one_order_of_communication_on_all_ranks(sizes):
    first, *others = run_distributed(check_attention_layers, len(sizes), sizes, timeout=800)
    assert len(first) == 2 and others == [first] * len(others)


@pytest.mark.slow
@on_ranks(2, timeout=500)
def test_inductor_with_channels_last():
    net = Compiled(conv_net(), "inductor")
    x = whole(1, 2, 16, 6).contiguous(memory_format=torch.channels_last)
    assert_matches_unsharded(net, x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: UNEVEN})


class Average(nn.Module):
    """A buffer that every rank writes the same to."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4).double()
        self.register_buffer("mean", torch.ones(4, dtype=DOUBLE))

    def forward(self, x):
        y = self.inner(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y - self.mean


@on_ranks(2)
def test_buffers_stay_plain():
    module = Average()
    plain, function, x = copy.deepcopy(module), compiled(module), whole(16, 4)
    for _ in range(2):
        torch.testing.assert_close(function(rows(x, UNEVEN, 0)).full_tensor(), plain(x), rtol=1e-10, atol=0)
    assert type(module.mean) is torch.Tensor and graphs() == 1
    torch.testing.assert_close(module.mean, plain.mean, rtol=1e-10, atol=0)


@pytest.mark.slow
@on_ranks(4, timeout=500)
def test_meshes_of_two_dims():
    module = Compiled(with_loss(conv_net()))
    for placements in ([Shard(2), Shard(3)], [Shard(0), Shard(2)], [Replicate(), Shard(2)]):
        sizes = {m: {0: (1, 2), 2: (9, 3), 3: (2, 5)}[p.dim] for m, p in enumerate(placements) if p.is_shard()}
        assert_matches_unsharded(
            module, whole(3, 2, 12, 7), mesh_shape=(2, 2), placements=placements, shard_sizes=sizes
        )


@pytest.mark.slow
@on_ranks(2, timeout=500)
def test_a_transformer_layer():
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double()
    x = whole(2, 16, 6)
    for backend, sizes in itertools.product(("aot_eager", "eager"), (UNEVEN, EMPTY)):
        assert_matches_unsharded(
            Compiled(layer, backend), x, mesh_shape=2, placements=[Shard(1)], shard_sizes={0: sizes}
        )
    dist.barrier()
