"""Recurrent layers and cells against the unsharded ones: values, states, gradients, messages."""

from __future__ import annotations

import math

import pytest
import torch
from on_ranks import on_ranks
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
# The batch is too short: the state travels along the sequence.
RELAYED = [
    ((1, 7, 4), 2, (1,), {0: (1, 6)}),
    ((2, 7, 4), 3, (1,), {0: (3, 0, 4)}),
    ((1, 7, 4), 3, (1,), {0: (0, 7, 0)}),
    ((1, 7, 4), 2, (2,), {0: (1, 3)}),
    ((3, 7, 4), (2, 2), (0, 1), {0: (3, 0), 1: (5, 2)}),
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


@pytest.mark.parametrize("shape,mesh_shape,dims,sizes", RELAYED)
def test_layers_along_the_sequence(shape, mesh_shape, dims, sizes):
    ranks = math.prod(mesh_shape) if isinstance(mesh_shape, tuple) else mesh_shape
    for kind, batch_first, options in (
        ("lstm", True, {}),
        ("gru", False, {"num_layers": 2, "bidirectional": True, "bias": False}),
        ("tanh", True, {"num_layers": 3}),
        ("relu", False, {"bidirectional": True}),
    ):
        run_distributed(check, ranks, kind, batch_first, options, shape, mesh_shape, dims, sizes)


def check_projections(batch, every, **options):
    net = flat(layer("lstm", batch_first=True, proj_size=3, **options))
    cells = len(net.net.all_weights)
    x, h, c = (torch.randn(n, dtype=torch.float64) for n in ((batch, 7, 4), (cells, batch, 3), (cells, batch, 6)))

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, h, c):
            return self.net(x, (h, c))

    for placements in every:
        assert_matches_unsharded(Given(), x, h, c, placements=placements, mesh_shape=2, shard_sizes={})


def test_projections_and_given_states():
    every = ([[Shard(1)], None, None], [[Shard(0)], [Shard(1)], [Shard(1)]], [None, [Shard(1)], None])
    run_distributed(check_projections, 2, 5, every)
    relayed = ([[Shard(1)], None, None],)
    run_distributed(check_projections, 3, 1, relayed, num_layers=2, bidirectional=True)


def sharded_state():
    x, state = torch.randn(7, 1, 4, dtype=torch.float64), torch.randn(1, 1, 6, dtype=torch.float64)
    layer("gru")(*(shard(t, shared_mesh(2), [Shard(d)]) for t, d in ((x, 0), (state, 2))))


def twice():
    x = shard(torch.randn(1, 7, 4, dtype=torch.float64), shared_mesh(2), [Shard(1)]).requires_grad_()
    out = layer("lstm", batch_first=True)(x)[0]
    torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum().backward()


def test_what_is_refused_on_every_rank():
    state = r"gru: dim 2 of operand 1 must be unsharded.*no free dim.*Remedy: redistribute it to Replicate"
    for function, text in ((sharded_state, state), (twice, "gradient of lstm.*cannot be differentiated twice")):
        for error in run_expecting_errors(function, 2):
            with pytest.raises(UnsupportedSharding, match=text):
                raise error


def check_half_precision():
    """Every rank, also one without a part of the sequence, has the dtypes that autocast gives on one device."""
    net = flat(layer("lstm", batch_first=True, num_layers=2, bidirectional=True)).float()
    x = torch.randn(1, 7, 4)
    sharded = shard(x, shared_mesh(3), [Shard(1)], {0: (4, 0, 3)})
    with torch.autocast(x.device.type, torch.bfloat16):
        expected, found = net(x), net(sharded)
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        assert {t.dtype for t in found} <= {torch.bfloat16, torch.float16}  # which cuDNN takes whatever is asked for
        for ours, one in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), one, rtol=0.02, atol=0.01)
    sum(t.float().pow(2).sum() for t in found).backward()
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    sum(t.float().pow(2).sum() for t in expected).backward()
    for ours, p in zip(grads, net.parameters(), strict=True):
        assert (ours - p.grad).norm() < 0.05 * p.grad.norm()


def test_half_precision():
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 6)(torch.ones(1, 1, 4))
    except RuntimeError as error:
        pytest.skip(f"torch has no bfloat16 LSTM on this processor: {error}")
    run_distributed(check_half_precision, 3)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(2)
def test_cells(cell, dim):
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


def relayed():
    mesh = shared_mesh(3)
    x = shard(torch.randn(1, 7, 4, dtype=torch.float64), mesh, [Shard(1)], {0: (3, 2, 2)})
    for net, steps in (
        (layer("lstm", batch_first=True, num_layers=2), 3),  # both layers at once, and one part behind
        (layer("lstm", batch_first=True, bidirectional=True), 2),  # both directions at once
    ):
        with count_communication() as forward:
            out = net(x.requires_grad_())[0]
        neighbours = [r for r in (mesh.get_local_rank() - 1, mesh.get_local_rank() + 1) if 0 <= r < 3]
        to = [r for r in neighbours if net.bidirectional or r > mesh.get_local_rank()]
        states = 2 if net.num_layers == 2 else 1
        assert dict(forward.collectives) == {"all_to_all": steps}, forward
        assert dict(forward.sent_to) == dict.fromkeys(to, states * 2 * 6 * 8), forward
        with count_communication() as backward:
            x_grad = torch.autograd.grad(out.sum(), x)[0]
        assert dict(backward.collectives) == {"all_to_all": steps}, backward
        assert x_grad.shard_sizes == {0: (3, 2, 2)}


def test_what_travels():
    """Nothing where the batch is cut; one exchange there and one back where the sequence is; or else the states."""
    run_distributed(messages, 2)
    run_distributed(relayed, 3)


@on_ranks(2)
def test_dropout_between_layers():
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


def packed():
    x = shard(torch.ones(6, 4, dtype=torch.float64), shared_mesh(2), [Shard(0)])
    net = layer("gru")
    net(nn.utils.rnn.PackedSequence(x, torch.tensor([2, 2, 2], device="cpu")))


def test_packed_sequences_are_refused_on_every_rank():
    for error in run_expecting_errors(packed, 2):
        with pytest.raises(UnsupportedSharding, match=r"gru: .*packed sequence.*Remedy: pass the padded sequences"):
            raise error
