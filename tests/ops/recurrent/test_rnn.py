"""Recurrent layers and cells against the unsharded ones: values, states, gradients, messages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


def layer(kind, **options):
    torch.manual_seed(0)
    if kind in ("tanh", "relu"):
        options["nonlinearity"] = kind
    return LAYERS[kind](4, 6, dtype=torch.float64, **options)


def flat(net):
    """The output and all states, as a tuple."""

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, *args):
            out, state = self.net(*args)
            return (out, *state) if isinstance(state, tuple) else (out, state)

    return Flat()


# (shape as batch first, mesh shape, dims cut over each mesh dim, sizes)
CUTS = [
    ((5, 7, 4), 2, (0,), {0: (4, 1)}),
    ((5, 7, 4), 2, (1,), {0: (2, 5)}),
    ((5, 7, 4), 2, (2,), {0: (1, 3)}),
    ((5, 7, 4), 3, (1,), {0: (0, 7, 0)}),
    ((5, 7, 4), 3, (0,), {0: (3, 0, 2)}),
    ((5, 7, 4), (2, 2), (None, 1), {1: (6, 1)}),
    ((2, 1, 4), 2, (1,), {0: (1, 0)}),
]


def check(kind, batch_first, options, shape, mesh_shape, dims, sizes):
    x = torch.randn(shape, dtype=torch.float64)
    if not batch_first:
        x = x.transpose(0, 1).contiguous()
        dims = [{0: 1, 1: 0}.get(d, d) for d in dims]
    assert_matches_unsharded(
        flat(layer(kind, batch_first=batch_first, **options)),
        x,
        placements=[[Replicate() if d is None else Shard(d) for d in dims]],
        mesh_shape=mesh_shape,
        shard_sizes=sizes,
    )


@pytest.mark.parametrize("shape,mesh_shape,dims,sizes", CUTS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, shape, mesh_shape, dims, sizes):
    for batch_first, options in ((True, {}), (False, {"num_layers": 2, "bidirectional": True, "bias": False})):
        ranks = math.prod(mesh_shape) if isinstance(mesh_shape, tuple) else mesh_shape
        run_distributed(check, ranks, kind, batch_first, options, shape, mesh_shape, dims, sizes)


def check_projections():
    net = flat(layer("lstm", batch_first=True, proj_size=3))
    x, h, c = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 7, 4), (1, 5, 3), (1, 5, 6)))

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, h, c):
            return self.net(x, (h, c))

    for placements in ([[Shard(1)], None, None], [[Shard(0)], [Shard(1)], [Shard(1)]], [None, [Shard(1)], None]):
        assert_matches_unsharded(Given(), x, h, c, placements=placements, mesh_shape=2, shard_sizes={})


def test_projections_and_given_states():
    run_distributed(check_projections, 2)


def unbatched():
    layer("gru")(shard(torch.randn(7, 4, dtype=torch.float64), shared_mesh(2), [Shard(0)]))


def cut_twice():
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    layer("lstm", batch_first=True)(shard(x, shared_mesh((2, 2)), [Shard(0), Shard(1)]))


def test_without_a_free_batch_it_is_refused_on_every_rank():
    for function, ranks in ((unbatched, 2), (cut_twice, 4)):
        for error in run_expecting_errors(function, ranks):
            text = r"unsharded, which mesh dim . shards.*no other dim.*Remedy: .*another dim"
            with pytest.raises(UnsupportedSharding, match=text):
                raise error


def check_cell(cell, dim):
    torch.manual_seed(0)
    net = cell(4, 6, dtype=torch.float64)

    class TwoSteps(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            state = self.net(x)
            return self.net(x * 2, state)

    x = torch.randn(5, 4, dtype=torch.float64)
    sizes = {0: (1, x.shape[dim] - 1)}
    assert_matches_unsharded(TwoSteps(), x, placements=[[Shard(dim)]], mesh_shape=2, shard_sizes=sizes)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("dim", [0, 1])
def test_cells(cell, dim):
    run_distributed(check_cell, 2, cell, dim)


def messages():
    net, mesh = layer("lstm", batch_first=True), shared_mesh(2)
    x = torch.randn(4, 6, 4, dtype=torch.float64)
    with torch.no_grad():
        batch, sequence = (shard(x, mesh, [Shard(d)], sizes) for d, sizes in ((0, {0: (3, 1)}), (1, {0: (4, 2)})))
        with count_communication() as none:
            net(batch)
        with count_communication() as two:
            out = net(sequence)[0]
    assert not none.collectives, none
    assert dict(two.collectives) == {"all_to_all": 2}, two
    assert out.to_local().shape[1] == sequence.to_local().shape[1]


def test_what_travels():
    """Nothing where the batch is cut; one exchange there and one back where the sequence is."""
    run_distributed(messages, 2)


def dropped():
    torch.manual_seed(0)
    net = layer("lstm", batch_first=True, num_layers=2, dropout=0.5)
    x = shard(torch.ones(2, 6, 4, dtype=torch.float64), shared_mesh(2), [Shard(1)], {0: (4, 2)})
    torch.manual_seed(1)
    first = net(x)[0].full_tensor()
    torch.manual_seed(1)
    assert torch.equal(first, net(x)[0].full_tensor())
    assert not torch.allclose(first[0], first[1])  # equal sequences on different ranks, dropped differently
    assert not torch.equal(first, net(x)[0].full_tensor())
    net.eval()
    whole = net(x.full_tensor())[0]
    torch.testing.assert_close(net(x)[0].full_tensor(), whole, rtol=1e-10, atol=1e-12)


def test_dropout_between_layers():
    run_distributed(dropped, 2)


def packed():
    x = shard(torch.ones(6, 4, dtype=torch.float64), shared_mesh(2), [Shard(0)])
    net = layer("gru")
    net(nn.utils.rnn.PackedSequence(x, torch.tensor([2, 2, 2], device="cpu")))


def test_packed_sequences_are_refused_on_every_rank():
    for error in run_expecting_errors(packed, 2):
        with pytest.raises(UnsupportedSharding, match=r"gru: .*packed sequence.*Remedy: pass the padded sequences"):
            raise error
