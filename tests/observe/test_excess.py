"""How far ranks are from their part of a model's work and memory, counted next to one process."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardtensor
from shardtensor import ShardTensor
from shardtensor.__main__ import main
from shardtensor.testing import shard, shared_mesh


def convolutions():
    """With a norm that asks a plain tensor for its number of dims, which a ShardTensor tells without a call."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)
    )


class Perceiver(nn.Module):
    """Learned queries, of which every rank has all, over sharded tokens; what follows is repeated on every rank."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(1, 64, 32))
        self.embed = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32))

    def forward(self, x):
        tokens = self.embed(x)
        queries = self.queries.expand(x.shape[0], -1, -1)
        return self.mlp(self.attention(queries, tokens, tokens, need_weights=False)[0])


def explained(model, shape, mesh, dim, **options):
    return shardtensor.explain(model, torch.empty(shape, device="meta"), mesh=mesh, shard=dim, backward=True, **options)


# Shard sizes, and the busiest rank's work: with an empty shard, a convolution evens them, see [Note: nearly nothing].
PARTS = {"even": (None, 1.0), "uneven": ((300, 350, 90, 160), 1.0), "empty": ((300, 350, 0, 250), 225 / 250)}


@pytest.mark.parametrize("name", PARTS)
def test_a_divided_network_has_its_part(name):
    """A halo is sent and not computed twice, so only the row that is kept of it is more than a part."""
    sizes, work = PARTS[name]
    found = explained(convolutions(), (1, 3, 900, 64), 4, 2, shard_sizes=sizes)
    assert found.excess.work == pytest.approx(work, abs=1e-6)
    assert work <= found.excess.kept < 1.02, found.share()
    assert "alike" not in found.share() and found.share().count("\n") == (sizes is not None)


class WithForces(nn.Module):
    """A loss of an energy and of its gradient, which is differentiated again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        energy = self.layers(x).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy.square() + gradient.square().sum()


def test_second_derivatives_of_linear_layers_take_no_more_work_than_on_one_device():
    x = torch.empty(64, 16, device="meta", requires_grad=True)
    found = shardtensor.explain(WithForces(), x, mesh=2, shard=0, backward=True)
    assert found.excess.work == pytest.approx(1.0, abs=1e-6), found.share()


class Stages(nn.Module):
    """A U-Net whose deepest stage has a 16th of the rows."""

    def __init__(self, channels=4):
        super().__init__()
        widths = [channels * 2**i for i in range(5)]
        pairs = list(zip(widths, widths[1:]))
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs])
        self.join = nn.ModuleList([nn.Conv2d(2 * a, a, 3, padding=1) for a, _ in pairs])

    def forward(self, x):
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x).relu()
        for up, join in zip(self.up[::-1], self.join[::-1]):
            x = join(torch.cat([up(x), skips.pop()], 1)).relu()
        return x


def test_a_stage_of_one_row_leaves_the_others_divided():
    """One rank computes it, and the skip connections bring the rows back to all."""
    found = explained(Stages(), (1, 4, 16, 64), 2, 2)
    assert next(layer.layout for layer in found.layers if layer.path == "down.3") == "S(2)[1, 0]"
    assert next(layer.layout for layer in found.layers if layer.path == "join.3") == "S(2)[1, 1]"
    assert found.excess.work < 1.15


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_a_stage_of_fewer_rows_than_ranks_is_exact(ranks):
    torch.manual_seed(0)
    model, x = Stages().double(), torch.randn(2, 4, 16, 32, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    model(whole).square().sum().backward()
    expected = [whole.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    shards = shard(x, shared_mesh(ranks), [Shard(2)], requires_grad=True)
    y = model(shards)
    assert y.shard_sizes == shards.shard_sizes
    y.square().sum().backward()
    found = [shards.grad.full_tensor(), *(p.grad for p in model.parameters())]
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-10, atol=1e-12)


def test_repeated_work_is_named_with_its_source():
    found = explained(Perceiver(), (2, 256, 32), 2, 1)
    one = shardtensor.explain(Perceiver(), torch.empty(2, 256, 32), mesh=1, shard=None, backward=True)
    assert found.excess.work == pytest.approx(max(map(found.flops, (0, 1))) / (one.flops(0) / 2))
    assert found.excess.kept == pytest.approx(found.total(0, "saved_bytes") / (one.total(0, "saved_bytes") / 2))
    shown = found.share()
    assert "mlp: work 2.00, kept memory 2.00" in shown
    assert "mlp.0" not in shown.split("alike")[0]  # it is the same as that of mlp
    assert "is done on every rank alike, from mlp.0 linear on.\n" in shown
    assert "attention multi_head_attention_forward gives R, (64, 2, 32), of\n    (256, 2, 32) S(0)[128, 128]" in shown
    assert "all ranks have all of it. Shard another dim of its operands" in shown
    assert shown in str(found)


class Tokens(nn.Module):
    """Pixels of two images as one sequence: their rows are moved, and moved back."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        tokens = self.mix(x.flatten(2).transpose(1, 2).flatten(0, 1)).sigmoid()
        return x + tokens.unflatten(0, (2, -1)).transpose(1, 2).reshape(x.shape)


class Checkpointed(nn.Sequential):
    reentrant = False

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


BLOCKS = {
    "attention": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), (1, 512, 32), 1),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 5, padding=2)),
        (2, 8, 32, 16),
        2,
    ),
    "moved tokens": (Tokens, (2, 8, 32, 16), 2),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_checkpointed_blocks_keep_their_shards_alone(name, reentrant):
    """Nothing of what a block fetches, moves or joins with its halo; what is repeated, one process repeats, too."""
    block, shape, dim = BLOCKS[name]
    model = Checkpointed(*(block() for _ in range(3)))
    model.reentrant = reentrant
    x = torch.empty(shape, device="meta", requires_grad=True)
    found = shardtensor.explain(model, x, mesh=2, shard=dim, backward=True)
    of_blocks = 2 * x.numel() * x.element_size()  # the first one's is the input
    assert [found.total(rank, "saved_bytes") for rank in (0, 1)] == [of_blocks / 2] * 2
    assert found.excess.kept == 1.0
    # torch stops repeating at what the last operator keeps, and ranks behind it: here a convolution.
    assert found.excess.work == 1.0 or (name, reentrant) == ("convolutions", False)


def test_results_that_a_policy_keeps_are_counted():
    """Those of four convolutions, and the input of the second block."""

    def policy(context, op, *args, **kwargs):
        saved = op == torch.ops.aten.convolution.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block():
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1), nn.SiLU())

    def run(x):
        for each in blocks:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(each, x, use_reentrant=False, context_fn=contexts)
        return x

    blocks = [block(), block()]
    x = torch.empty(1, 4, 32, 16, device="meta", requires_grad=True)
    found = shardtensor.explain(run, x, mesh=2, shard=2, backward=True)
    half = x.numel() * x.element_size() // 2
    assert [found.total(rank, "saved_bytes") for rank in (0, 1)] == [(4 + 1) * half] * 2


def test_operands_that_were_never_sharded_are_named():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 4096)

        def forward(self, x, y):
            return self.small(x) + self.large(y).mean()

    inputs = [torch.empty(2, 64, 8), torch.empty(2, 64, 8)]
    found = shardtensor.explain(Beside(), *inputs, mesh=2, shard=[1, (None,)])
    assert "Its operands are not sharded: (2, 64, 8) R.\n    Shard what they are computed from" in found.share()


class Branching(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) if x.sum() < 1 else x


def test_one_process_is_not_counted_where_values_are_read_or_nothing_is_sharded():
    reading = shardtensor.explain(Branching(3, 3, 3, padding=1), torch.zeros(1, 3, 32, 8), mesh=2, shard=2)
    alone = explained(convolutions(), (1, 3, 32, 8), 1, None)
    on_shards_only = shardtensor.explain(lambda x: x.to_local() * 2, torch.zeros(4, 4), mesh=2, shard=0)
    for found, reason in [
        (reading, "the model reads values of tensors ("),
        (alone, "nothing is sharded"),
        (on_shards_only, "the model raises AttributeError on plain tensors: 'FakeTensor' object has no"),
    ]:
        assert found.excess is None and f"not compared with one process: {reason}" in found.share()


def test_command(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "models_of_test", sys.modules[__name__])
    command = "explain models_of_test:Perceiver --input 2x256x32 --mesh 2 --shard 1 --share"
    assert main(command.split()) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1.0 is a rank's part of the input: work 1.5") and "alike, from mlp.0 linear on" in shown


def mirrored(x, evens):
    """To a multiple of a window, as networks of image restoration do it."""
    x = torch.cat([x, x.flip(2)], 2)[:, :, : x.shape[2] + 4]
    x = x.redistribute(shard_sizes="even") if evens else x
    for _ in range(3):
        x = F.conv2d(x, torch.ones(4, 4, 3, 3), padding=1)
    return x


def test_uneven_shards_that_an_operator_makes_are_named_with_a_remedy():
    x = torch.rand(1, 4, 60, 16)
    found = shardtensor.explain(lambda x: mirrored(x, evens=False), x, mesh=2, shard=2, values=False)
    assert found.excess.work > 1.8
    assert "100% of the work is done with shards of very different sizes.\n" in found.share()
    assert "__getitem__ gives S(2)[60, 4], (1, 4, 64, 16), of\n    (1, 4, 120, 16) S(2)[60, 60]." in found.share()
    assert 'redistribute(shard_sizes="even")' in found.share()

    def advised(x):
        return mirrored(x, evens=isinstance(x, ShardTensor))

    better = shardtensor.explain(advised, x, mesh=2, shard=2, values=False)
    assert better.excess.work == 1.0 and "sizes" not in better.share()
    many = shardtensor.explain(lambda x: mirrored(x, evens=False), x, mesh=12, shard=2, values=False)
    assert "__getitem__ gives S(2)[12 sizes, checksum" in many.share()
    given = shardtensor.explain(lambda x: F.conv2d(x, torch.ones(4, 4, 1, 1)), x, mesh=2, shard=2, shard_sizes=(55, 5))
    assert "sizes" not in given.share()  # as the caller wants it
    assert "The largest part of the input is 1.83 times an even part." in given.share()
