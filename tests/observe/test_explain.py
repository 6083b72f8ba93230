"""A preview's counts are those of a real run, to the byte, on every rank and in both passes."""

from __future__ import annotations

import copy
import json
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor
from shardtensor.__main__ import main
from shardtensor.layout import caches
from shardtensor.layout.intervals import boundaries_of
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

ROOT = Path(__file__).parents[2]


class ConvNet(nn.Module):
    """Strides, a skip connection, norms over the shards, and a pooled head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, padding=2)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        y = self.up(F.max_pool2d(self.down(x), 3, 1, 1))
        return self.head((x + y[..., : x.shape[2], : x.shape[3]]).mean((2, 3)))


class Transformer(nn.Module):
    """Patches, attention over all of them, an MLP with dropout, and a mean over tokens."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        own = self.norm(tokens)
        tokens = tokens + self.attention(own, own, own, need_weights=False)[0]
        return (tokens + self.mlp(tokens)).mean(1)


def globe():
    sys.path.insert(0, str(ROOT / "examples" / "globe"))
    from model import UNet

    return UNet(width=4, depth=3)


MODELS = {
    "conv": (ConvNet, (2, 3, 33, 20)),
    "transformer": (Transformer, (2, 3, 32, 24)),
    "globe": (globe, (1, 3, 45, 90)),
}
SIZES = {
    "conv": [(17, 16), (0, 33), (20, 1, 12)],
    "transformer": [(8, 24), (12, 8, 12)],
    "globe": [(10, 35), (15, 15, 15)],
}


def made(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), torch.randn(shape)


def count(model, x):
    """What this rank communicates in both passes, with a gradient that costs nothing, in a program that did no more."""
    with count_communication() as forward:
        y = model(x)
    with count_communication() as backward:
        torch.autograd.backward([y], [torch.ones_like(y)])
    return forward, backward


def count_rows(name, sizes):
    caches.forget()
    model, x = made(name)
    return count(model, shard(x, shared_mesh(len(sizes)), [Shard(2)], {0: sizes}))


def both_passes(found):
    return [tuple(found.communication(rank, phase) for phase in ("forward", "backward")) for rank in found.ranks]


PREVIEWED = pytest.mark.on_cpu("explain counts what ranks with CPUs communicate; devices connect their groups, too")


@PREVIEWED
@pytest.mark.parametrize("name, sizes", [(name, sizes) for name in MODELS for sizes in SIZES[name]], ids=str)
def test_counts_are_those_of_a_real_run(name, sizes):
    model, x = made(name)
    found = shardtensor.explain(model, x, mesh=len(sizes), shard=2, shard_sizes={0: sizes}, backward=True)
    assert both_passes(found) == run_distributed(count_rows, len(sizes), name, sizes)
    assert not found.refused and not found.stopped and not found.notes


def count_tiles(name, shape, dims):
    caches.forget()
    model, x = made(name)
    return count(model, shard(x, shared_mesh(shape), [Shard(d) for d in dims]))


@PREVIEWED
def test_counts_on_a_mesh_of_two_dims():
    model, x = made("globe")
    found = shardtensor.explain(model, x, mesh=(2, 2), shard=(2, 3), backward=True)
    assert both_passes(found) == run_distributed(count_tiles, 4, "globe", (2, 2), (2, 3))


def edges_of(side):
    """Of a grid in row order, both ways and along one diagonal one way, in the order of their targets."""
    node = torch.arange(side * side).view(side, side)
    pairs = [(node[:, :-1], node[:, 1:]), (node[:-1], node[1:])]
    ends = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    diagonal = torch.stack([node[:-1, :-1].flatten(), node[1:, 1:].flatten()])
    found = torch.cat([ends, ends.flip(0), diagonal], 1)
    return found[:, found[1].argsort(stable=True)]


class Messages(nn.Module):
    """Two layers; the zeros do not say whose rows they are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 5) for _ in range(2))

    def forward(self, x, edges):
        for layer in self.layers:
            sent = layer(torch.cat([x[edges[0]], x.index_select(0, edges[1])], -1)).relu()
            x = sent.new_zeros(x.shape).index_add_(0, edges[1], sent)
        return x


def of_graph(sizes, order):
    torch.manual_seed(0)
    side = 6
    edges = edges_of(side)
    if order is not None:
        edges = order[edges]
        edges = edges[:, edges[1].argsort(stable=True)]
    ends = torch.tensor(sizes).cumsum(0)
    of_edges = tuple(torch.searchsorted(edges[1].contiguous(), ends).diff(prepend=ends.new_zeros(1)).tolist())
    return Messages(), torch.randn(side * side, 5), edges, of_edges


def count_graph(sizes):
    caches.forget()
    model, x, edges, of_edges = of_graph(sizes, None)
    mesh = shared_mesh(len(sizes))
    model_inputs = shard(x, mesh, [Shard(0)], {0: sizes}), shard(edges, mesh, [Shard(1)], {0: of_edges})
    with count_communication() as forward:
        y = model(*model_inputs)
    with count_communication() as backward:
        torch.autograd.backward([y], [torch.ones_like(y)])
    return forward, backward


@PREVIEWED
@pytest.mark.parametrize("sizes", [(18, 18), (6, 12, 18), (20, 0, 16)])
def test_rows_of_a_graph_are_those_of_a_real_run(sizes):
    model, x, edges, of_edges = of_graph(sizes, None)
    options = {"shard": [0, 1], "shard_sizes": [{0: sizes}, {0: of_edges}], "backward": True}
    found = shardtensor.explain(model, x, edges, mesh=len(sizes), **options)
    assert "Which rows an index reads" in found.notes[0] and len(found.notes) == 1
    real = run_distributed(count_graph, len(sizes), sizes)
    for ours, theirs in zip(both_passes(found), real, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.messages, a.bytes_sent, a.sent_to) == (b.messages, b.bytes_sent, b.sent_to)
            assert (a.received_messages, a.bytes_received) == (b.received_messages, b.bytes_received)
    reading = [layer for layer in found.layers if any(share.rows for share in layer.shares.values())]
    assert len(reading) == 2 and "rows read" in str(found)
    bounds = boundaries_of(sizes)
    owner = torch.bucketize(edges, torch.tensor(bounds[1:]), right=True)
    for layer in reading:
        for rank, share in layer.shares.items():
            rows = edges[0][(owner[1] == rank) & (owner[0] != rank)].unique()
            assert (share.rows, share.other_rows) == (len(rows), 36 - sizes[rank])


def test_ranks_that_work_one_after_the_other_are_said_to():
    def note(batch):
        return shardtensor.explain(nn.GRU(4, 5), torch.randn(7, batch, 4), mesh=3, shard=0).notes

    assert len(note(1)) == 1 and "In gru each rank waits for the state" in note(1)[0]
    assert not note(3)


def test_nodes_that_lie_badly_are_said_to():
    sizes = (18, 18)
    model, x, edges, of_edges = of_graph(sizes, torch.randperm(36, generator=torch.Generator().manual_seed(0)))
    options = {"mesh": 2, "shard": [0, 1], "shard_sizes": [{0: sizes}, {0: of_edges}]}
    found = shardtensor.explain(model, x, edges, **options)
    assert any("shardtensor.partition()" in note and "of the 18 rows" in note for note in found.notes)
    part = shardtensor.partition(edge_index=edges, num_nodes=36, ranks=2)
    index, of_edges, _ = part.edges(edges)
    options["shard_sizes"] = [{0: part.sizes}, {0: of_edges}]
    found = shardtensor.explain(model, part.nodes(x), index, **options)
    assert not any("partition()" in note for note in found.notes)
    rows = [max(s.rows for s in layer.shares.values()) for layer in found.layers if layer.operator == "__getitem__"]
    assert max(rows) == max(map(sum, part.reads))


@pytest.mark.parametrize(
    ("shard_sizes", "text"),
    [([{0: (3, 3)}], "shard_sizes has 1 entries for 2 inputs"), ([None, {1: (3, 3)}], "beyond those of (2,)")],
)
def test_sizes_by_input_that_do_not_fit(shard_sizes, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        shardtensor.explain(torch.add, torch.ones(6), torch.ones(6), mesh=2, shard=0, shard_sizes=shard_sizes)


def test_values_give_the_same():
    model, x = made("conv")
    options = {"mesh": 3, "shard": 2, "shard_sizes": {0: (20, 1, 12)}, "backward": True}
    with_values, without = (shardtensor.explain(model, x, values=values, **options) for values in (True, False))
    assert with_values.layers == without.layers


def count_loss(sizes):
    caches.forget()
    model, x = made("conv")
    x = shard(x, shared_mesh(len(sizes)), [Shard(2)], {0: sizes})
    with count_communication() as forward:
        loss = model(x).square().mean()
    with count_communication() as backward:
        loss.backward()
    return forward, backward


@PREVIEWED
def test_a_loss_is_part_of_both_passes():
    model, x = made("conv")
    found = shardtensor.explain(
        model, x, mesh=2, shard=2, shard_sizes={0: (5, 28)}, backward=lambda y: y.square().mean()
    )
    assert both_passes(found) == run_distributed(count_loss, 2, (5, 28))
    assert [layer.path for layer in found.layers if layer.operator == "square"] == ["(loss)"]


def outputs(sizes):
    model, x = made("globe")
    shapes = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, a, y: shapes.append(tuple(y.to_local().shape)))
    model(shard(x, shared_mesh(len(sizes)), [Shard(2)], {0: sizes}))
    return shapes


def test_results_have_the_sizes_of_a_real_run_and_belong_to_their_modules():
    model, x = made("globe")
    sizes = (7, 30, 8)
    found = shardtensor.explain(model, x, mesh=3, shard=2, shard_sizes={0: sizes})
    leaves = {path: type(m).__name__ for path, m in model.named_modules() if path and not list(m.children())}
    layers = [layer for layer in found.layers if layer.path in leaves]
    assert len(layers) == len(leaves) and all(layer.module == leaves[layer.path] for layer in layers)
    shown = [[layer.shares[rank].outputs[0] for layer in layers] for rank in found.ranks]
    assert shown == run_distributed(outputs, 3, sizes)


def saved(sizes):
    """Bytes that autograd keeps of activations, each memory once."""
    model, x = made("globe")
    x = shard(x, shared_mesh(len(sizes)), [Shard(2)], {0: sizes})
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x.to_local())}
    kept, total = [], 0

    def pack(t):
        nonlocal total
        local = t.to_local() if isinstance(t, ShardTensor) else t
        if local.untyped_storage().data_ptr() not in known:
            known.add(local.untyped_storage().data_ptr())
            total += local.untyped_storage().nbytes()
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    assert y.requires_grad
    return total


def test_memory_is_that_of_a_real_run():
    model, x = made("globe")
    found = shardtensor.explain(model, x, mesh=2, shard=2, shard_sizes={0: (10, 35)})
    assert [found.total(rank, "saved_bytes") for rank in found.ranks] == run_distributed(saved, 2, (10, 35))
    assert found.total(1, "saved_bytes") > 2 * found.total(0, "saved_bytes")


def test_messages_belong_to_the_operators_that_send_them():
    """In both passes, and the sums of weights' gradients to none of them."""
    model, x = made("conv")
    found = shardtensor.explain(model, x, mesh=3, shard=2, backward=True)
    middle = {(layer.path, layer.operator): layer.shares[1] for layer in found.layers}
    row = 2 * 3 * 20 * 4  # bytes: a batch of 2, 3 channels, 20 columns
    assert middle["stem", "conv2d"].forward.messages == 2 and middle["stem", "conv2d"].forward.bytes_sent == 2 * 2 * row
    assert middle["stem", "conv2d"].backward.messages == 0  # the input needs no gradient
    assert middle["down", "conv2d"].backward.received_messages == 2  # a stride of 2 reads beyond one end only
    assert middle["", "relu"].messages == 0
    weights = middle["", "gradients of weights"].backward
    assert weights.collectives == {"all_reduce": 1}


def test_the_model_without_shards():
    model, x = made("conv")
    found = shardtensor.explain(model, x, mesh=1, shard=None, backward=True)
    assert [layer.operator for layer in found.layers if layer.shares[0].saved_bytes][:2] == ["batch_norm", "relu"]
    sharded = shardtensor.explain(model, x, mesh=2, shard=2, backward=True)
    assert found.flops(0) <= sharded.flops(0) + sharded.flops(1) < 1.2 * found.flops(0)
    assert not any(layer.shares[0].messages or layer.shares[0].collectives for layer in found.layers)


class Refuses(nn.Module):
    """as_strided has no distributed form where it takes elements in another order."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.before(x)
        return self.after(torch.as_strided(x, x.shape, (4 * 16 * 8, 16 * 8, 1, 16)))


def refusing():
    x = shard(torch.randn(1, 3, 16, 8), shared_mesh(2), [Shard(2)], {0: (10, 6)})
    Refuses()(x)


def test_a_refusal_is_recorded_and_the_run_goes_on():
    found = shardtensor.explain(
        Refuses(), torch.empty(1, 3, 16, 8), mesh=2, shard=2, shard_sizes={0: (10, 6)}, backward=True
    )
    (refused,) = found.refused
    (error, _) = run_expecting_errors(refusing, 2)
    assert refused.operator == "as_strided" and refused.refused == str(error) and "Remedy" in refused.refused
    after = next(layer for layer in found.layers if layer.path == "after")
    assert after.layout == "S(2)[10, 6]" and after.shares[0].forward.messages == 1
    assert after.shares[0].backward.messages == 1
    assert "REFUSED" in str(found) and refused.refused in str(found)


def test_a_refusal_outside_of_operators_ends_the_run():
    def model(x):
        x.add(1)
        raise shardtensor.UnsupportedSharding("by the model. Remedy: none")

    found = shardtensor.explain(model, torch.empty(4, 4), mesh=2, shard=0)
    assert found.stopped == "by the model. Remedy: none" and "ended early" in str(found)
    assert [layer.operator for layer in found.layers] == ["add"]


def test_a_model_larger_than_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 2**14, 3, padding=1), nn.Conv2d(2**14, 2**16, 3, padding=1))
    found = shardtensor.explain(model, torch.empty(1, 3, 8192, 8192, device="meta"), mesh=64, shard=2)
    assert found.ranks == (0, 32, 63) and "of 64 were run" in found.notes[0]
    assert found.layers[1].shares[32].forward.bytes_sent == 2 * 2**14 * 8192 * 4
    assert found.weight_bytes > 2**35


def test_a_model_that_reads_values_is_run_with_them():
    def model(x):
        return x * 2 if x.to_local().sum() > -1 else x

    x = torch.rand(5, 4)
    found = shardtensor.explain(model, x, mesh=2, shard=0)
    assert "reads values" in found.notes[0]
    assert [layer.operator for layer in found.layers if layer.layout] == ["mul"]
    stopped = shardtensor.explain(lambda x: model(x + 1), x, mesh=2, shard=0, values=False)
    assert "reads values after  add" in stopped.stopped and [layer.operator for layer in stopped.layers] == ["add"]


def last_of_rows(x):
    rows = torch.arange(x.shape[0])
    if isinstance(x, ShardTensor):
        rows = ShardTensor.from_local(rows[: x.to_local().shape[0]], x.device_mesh, [Shard(0)], shard_sizes="even")
    return x * int(rows.max())


def test_values_that_other_ranks_would_have_to_send_are_not_read():
    """Local values are known: they are computed from numbers. Nothing is received, so those of others are not."""
    stopped = shardtensor.explain(last_of_rows, torch.rand(4, 4), mesh=2, shard=0, values=False).stopped
    assert stopped.startswith("the model reads values after") and stopped.endswith("values=False has none")


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.last = nn.LSTM(8, 8, 2), nn.Conv1d(8, 2, 3, padding=1)

    def forward(self, x):
        return self.last(self.memory(x.permute(2, 0, 1))[0].permute(1, 2, 0))


def test_what_a_layers_backward_pass_computes_again_is_that_layers():
    """A recurrent layer's, by a graph of its own."""
    x = torch.rand(1, 8, 64, dtype=torch.float64, requires_grad=True)
    found = shardtensor.explain(Speech().double(), x, mesh=2, shard=2, backward=True)
    memory, last = ([layer for layer in found.layers if layer.operator == name] for name in ("lstm", "conv1d"))
    assert last[0].shares[0].flops == (3072, 6144) and last[0].whole.flops == (6144, 12288)
    forward, backward = memory[0].shares[0].flops
    assert forward == 65536 and backward == 3 * forward  # the forward pass again, and two products for each of its


def test_a_grid_is_checked_without_values():
    """The coordinates of a globe, some of the program and some made on the way, as Aurora checks them."""
    latitudes = torch.linspace(90, -90, 64)

    def model(x):
        rows = latitudes[:, None].expand(64, 96)
        areas = F.avg_pool2d(torch.stack([rows, torch.linspace(0, 360, 96).expand(64, 96)])[None], 2)
        assert (areas[:, 0] <= 90).all() and areas.max().item() < 361
        return F.avg_pool2d(x, 2) * areas.sum(1)

    found = shardtensor.explain(model, torch.rand(1, 3, 64, 96), mesh=2, shard=2, values=False)
    assert not found.stopped and not found.not_compared


def test_deep_copies_of_tensors_have_no_values_either():
    """Of tables that a library keeps, as torch-harmonics does. The memory that they would copy is not there."""
    table = torch.arange(8.0)

    def model(x):
        copied, sharded, grid = copy.deepcopy((table, x.detach(), torch.empty_like(x.sum(2))))
        assert copied is not table
        return x * copied.sum() + sharded * grid.sum()

    found = shardtensor.explain(model, torch.rand(1, 3, 16, 8), mesh=2, shard=2, values=False)
    assert not found.stopped and not found.not_compared
    last = found.layers[-1]
    assert (last.operator, last.layout) == ("add", "S(2)[8, 8]")


def test_tensors_of_numbers_alone_are_read_without_values():
    """The sizes of the maps of a pyramid, which detectors keep in a tensor."""

    def model(x, written=0):
        maps = [x, F.avg_pool2d(x, 2)]
        sizes = torch.empty((2, 2), dtype=torch.long)
        for level, each in enumerate(maps):
            sizes[level, 0], sizes[level, 1] = each.shape[-2:]
        if written:
            sizes[:1] = x.to_local().long()[:1, 0, 0, :2]
        areas = sizes.prod(1).tolist()
        tokens = torch.cat([each.flatten(2) for each in maps], 2)
        return [part * 2 for part in tokens.split(areas, 2)]

    x = torch.rand(1, 3, 16, 8)
    found = shardtensor.explain(model, x, mesh=2, shard=2, values=False)
    assert not found.stopped and not found.not_compared
    assert [layer.shapes for layer in found.layers if layer.operator == "mul"] == [((1, 3, 128),), ((1, 3, 32),)]
    read = shardtensor.explain(lambda x: model(x, 1), x, mesh=2, shard=2, values=False)
    assert "reads values" in read.stopped


def test_large_worlds_are_sampled():
    conv = nn.Conv1d(2, 2, 3, padding=1)
    sizes = [3] * 12
    sizes[4], sizes[9] = 9, 1
    found = shardtensor.explain(conv, torch.empty(1, 2, sum(sizes)), mesh=12, shard=2, shard_sizes={0: sizes})
    assert found.ranks == (0, 4, 6, 9, 11)
    assert found.notes == ("Only the ranks [0, 4, 6, 9, 11] of 12 were run; the balance is theirs.",)
    everyone = shardtensor.explain(
        conv, torch.empty(1, 2, sum(sizes)), mesh=12, shard=2, shard_sizes={0: sizes}, only=range(12)
    )
    assert len(everyone.ranks) == 12 and not everyone.notes
    assert everyone.layers[0].imbalance == pytest.approx(9 * 12 / sum(sizes), rel=0.2)


def test_the_model_and_its_inputs_stay_as_they_are():
    model, x = made("conv")
    x.requires_grad_()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    shardtensor.explain(model, x, mesh=2, shard=2, backward=True, values=True)
    shardtensor.explain(model, x, mesh=2, shard=2, backward=True)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    assert not model.stem._forward_hooks and not model.stem._forward_pre_hooks
    assert torch.isfinite(model(x)).all()


def two_inputs(x, mask, scale):
    return x * mask * scale


def test_inputs_are_sharded_where_they_have_the_dims():
    x, mask, scale = torch.empty(2, 9, 4), torch.empty(9, 4), torch.empty(4)
    found = shardtensor.explain(two_inputs, x, mask, scale, mesh=2, shard=[1, 0, None])
    assert found.inputs == (
        "(2, 9, 4) float32, dim 1 as [5, 4]",
        "(9, 4) float32, dim 0 as [5, 4]",
        "(4,) float32, plain",
    )
    assert found.layers[-1].shares[0].outputs == ((2, 5, 4),) and not found.communication(0).messages
    assert found.input_bytes == {0: (40 + 20 + 4) * 4, 1: (32 + 16 + 4) * 4}


class Writes(nn.Module):
    def forward(self, x):
        y = torch.zeros(x.shape)
        y[:] = x
        return y


def test_a_plain_tensor_that_is_written_to():
    found = shardtensor.explain(Writes(), torch.empty(6, 4), mesh=2, shard=0)
    assert not found.refused and found.layers[-1].operator == "__setitem__"


def by_rank(x):
    return x + 1 if x.to_local().shape[0] == 5 else x.sin()


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"mesh": 2, "shard": 3}, ValueError, "none of the inputs"),
        ({"mesh": (2, 2), "shard": 0}, ValueError, "each dim of the mesh"),
        ({"mesh": 0, "shard": 0}, ValueError, "mesh=0"),
        ({"mesh": 2, "shard": "0"}, TypeError, "tensor dim"),
        ({"mesh": 2, "shard": 0, "shard_sizes": {0: (4, 4)}}, ValueError, "add up to 9"),
        ({"mesh": 2, "shard": 0, "shard_sizes": {1: (5, 4)}}, ValueError, "mesh dims beyond"),
        ({"mesh": 2, "shard": 0, "only": [2]}, ValueError, "0 to 1"),
        ({"mesh": 2, "shard": [0, 0]}, ValueError, "2 entries"),
        ({"mesh": 2, "shard": None}, ValueError, "one rank, without shards"),
        ({"mesh": 2, "shard": 0}, RuntimeError, "same operators: call 0 is add in the model on rank 0, sin"),
    ],
)
def test_errors_say_what_to_do(options, error, text):
    with pytest.raises(error, match=text):
        shardtensor.explain(by_rank, torch.empty(9, 4), **options)


def of_a_dict(batch):
    return batch["image"].sin() * batch["scale"], batch["masks"][0].neg()


def test_tensors_in_dicts_and_lists_are_inputs():
    batch = {"image": torch.empty(9, 4), "scale": torch.empty(()), "masks": [torch.empty(9)]}
    found = shardtensor.explain(of_a_dict, batch, mesh=2, shard=0, shard_sizes={0: (6, 3)})
    assert found.inputs == (
        "(9, 4) float32, dim 0 as [6, 3]",
        "() float32, plain",
        "(9,) float32, dim 0 as [6, 3]",
    )
    assert [layer.shares[1].outputs for layer in found.layers] == [((3, 4),), ((3, 4),), ((3,),)]
    assert found.input_bytes[0] == 4 * (6 * 4 + 1 + 6)


def test_json_has_all_of_it():
    model, x = made("conv")
    found = shardtensor.explain(model, x, mesh=2, shard=2, backward=True)
    loaded = json.loads(json.dumps(found.to_dict()))
    assert [layer["operator"] for layer in loaded["layers"]] == [layer.operator for layer in found.layers]
    assert loaded["totals"]["1"]["forward"]["bytes_sent"] == found.communication(1).bytes_sent
    assert loaded["layers"][0]["shares"]["0"]["outputs"] == [[2, 8, 17, 20]]


def test_the_command_prints_a_table_and_writes_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    options = ["--input", "1x3x33x20", "--mesh", "2", "--shard", "2", "--sizes", "20+13", "--backward"]
    assert main(["explain", f"{__name__}:ConvNet", *options, "--html", str(page)]) == 0
    found = shardtensor.explain(
        ConvNet(), torch.empty(1, 3, 33, 20), mesh=2, shard=2, shard_sizes={0: (20, 13)}, backward=True
    )
    assert capsys.readouterr().out.strip() == str(found).strip()
    assert page.read_text() == found.to_html()


def test_the_page_names_what_is_not_installed(monkeypatch):
    model, x = made("conv")
    found = shardtensor.explain(model, x, mesh=2, shard=2)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=r"jinja2: pip install shardtensor\[html\]"):
        found.to_html()


def test_the_command_fails_where_something_is_refused(capsys):
    options = ["--input", "1x3x16x8", "--mesh", "2", "--shard", "2", "--meta", "--json"]
    assert main(["explain", f"{__name__}:Refuses", *options]) == 1
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [bool(layer["refused"]) for layer in layers] == [False, True, False]


def reads_values():
    return nn.Sequential(nn.Conv2d(3, 4, 3), Reading())


class Reading(nn.Module):
    def forward(self, x):
        return 2 * x if x.sum().item() > 0 else x


def returns_nothing():
    pass


READY = nn.Conv2d(3, 4, 3)


@pytest.mark.parametrize(
    "model, options, text",
    [
        ("nowhere:net", "", "no module 'nowhere' in this folder"),
        ("nothing", "", "module:function"),
        (f"{__name__}:nothing", "", "has no 'nothing'"),
        (f"{__name__}:json", "", "of type module"),
        (f"{__name__}:returns_nothing", "", "returns a value of type NoneType"),
        (f"{__name__}:READY", "--input 1,3,33,20", "lengths with x between them"),
        (f"{__name__}:READY", "--dtype float99", "no dtype 'float99'"),
        (f"{__name__}:READY", "--dtype float32 --dtype float64 --dtype int32", "3 dtypes for 1 inputs"),
        (f"{__name__}:READY", "--mesh 0", "all at least 1"),
        (f"{__name__}:READY", "--mesh 2x2", "one tensor dim for each dim of the mesh (2, 2)"),
        (f"{__name__}:READY", "--shard 5", "none of the inputs"),
        (f"{__name__}:READY", "--shard 2 --shard plain", "shard has 2 entries for 1 inputs"),
        (f"{__name__}:READY", "--sizes 9+8", "2 sizes that add up to 33"),
        (f"{__name__}:READY", "--only 7", "the ranks of the mesh"),
        (f"{__name__}:READY", f"--html {Path(__file__).parent}", "--html: "),
        (f"{__name__}:reads_values", "--meta", "reads values of tensors (item of a ShardTensor)"),
    ],
)
def test_arguments_of_the_command_that_do_not_fit(model, options, text, capsys):
    shard = [] if "--shard" in options else ["--shard", "2"]
    with pytest.raises(SystemExit) as ended:
        main(["explain", model, "--input", "1x3x33x20", "--mesh", "2", *shard, *options.split()])
    assert ended.value.code == 2 and text in capsys.readouterr().err


def conditioning():
    return lambda image, prompt: image + prompt.mean()


def test_the_command_shards_inputs_apart(capsys):
    inputs = ["--input", "1x3x8x6", "--input", "4x6", "--shard", "3", "--shard", "plain"]
    assert main(["explain", f"{__name__}:conditioning", *inputs, "--mesh", "2"]) == 0
    shown = capsys.readouterr().out
    assert "input (1, 3, 8, 6) float32, dim 3 as [3, 3]" in shown and "input (4, 6) float32, plain" in shown


def test_the_command_takes_a_model_that_is_made_already(capsys):
    assert main(["explain", f"{__name__}:READY", "--input", "1x3x33x20", "--mesh", "2", "--shard", "2"]) == 0
    assert "conv2d" in capsys.readouterr().out


def test_in_a_thread_that_has_made_no_graph():
    """autograd numbers the nodes of each thread; the lowest numbers are for those that run last."""
    found = []

    def preview():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
        x = torch.empty(1, 3, 17, 9, device="meta")
        found.append(shardtensor.explain(model, x, mesh=2, shard=2, backward=True))

    for _ in range(2):
        thread = threading.Thread(target=preview)
        thread.start()
        thread.join()
    assert [layer.operator for layer in found[0].layers] == ["conv2d", "conv2d", "gradients of weights"]
    assert str(found[0]) == str(found[1])
