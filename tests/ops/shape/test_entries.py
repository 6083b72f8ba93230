"""Entries of a sharded dim, ``x[:, :, i]``: computed where they are, and stacked to shards. See [Note: owners]."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.communication.redistribute import redistribute_local
from shardtensor.layout.placements import AxisLayout
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
    simulate_ranks,
)

CUTS = {1: (8,), 2: (5, 3), 3: (5, 0, 3), 4: (1, 4, 1, 2)}


def weights():
    return torch.linspace(-1, 2, 5, dtype=torch.float64)


def stacked(fn, dim=2, order=range(8)):
    return lambda x: torch.stack([fn(x[:, :, i]) for i in order], dim)


# What the function does, and how its result lies on more than one rank.
FUNCTIONS = {
    "entries": (stacked(lambda e: e), Shard(2)),
    "activations": (stacked(torch.nn.functional.gelu), Shard(2)),
    "a chain": (stacked(lambda e: (e.sigmoid() * 2 + 1).log() / 3, dim=1), Shard(1)),
    "with other tensors": (stacked(lambda e: torch.where(weights() > 0, e * weights(), e.exp()), dim=0), Shard(0)),
    "last dim": (stacked(torch.cos, dim=-1), Shard(3)),
    "casts": (stacked(lambda e: e.to(torch.complex128).exp().abs()), Shard(2)),
    "views": (stacked(lambda e: e.sin().transpose(0, 1).unsqueeze(0)), Shard(2)),
    "out of order": (stacked(torch.exp, order=(7, 0, 3, 3, 5)), Shard(2)),
    "two of one rank": (lambda x: x[:, :, 0].exp() * x[:, :, 0].sin(), Partial()),
    "two of different ranks": (lambda x: x[:, :, 0].exp() * x[:, :, 7], Replicate()),
    "sum of different ranks": (lambda x: x[:, :, 0] + x[:, :, 7], Partial()),
    "next to shards": (lambda x: x - x[:, :, 6].exp().unsqueeze(2), Shard(2)),
    "in place": (lambda x: (x[:, :, 7] * 2).mul_(3).add_(1).sigmoid(), Partial()),
    "index_add": (lambda x: x[:, :, 7].exp().index_add(0, torch.tensor([1, 0]), x[:, :, 0]).exp(), Replicate()),
    "index_add_": (lambda x: (x[:, :, 7] * 2).index_add_(0, torch.tensor([1, 0]), x[:, :, 0]).exp(), Partial()),
    "a view, in place": (lambda x: written_view(x[:, :, 7] * 2, x[:, :, 0]).exp(), Partial()),
    "sums": (lambda x: x[:, :, 7].exp().sum(-1).sqrt(), Replicate()),
    "rows": (lambda x: x[:, :, 7].exp().softmax(-1), Replicate()),
    "masks": (lambda x: torch.where(x[:, :, 7] > 0, x[:, :, 7].exp(), 0 * weights()), Partial()),
    "chosen by a mask": (lambda x: x[:, :, 7][x[:, :, 0] > 0], Partial()),
    "written where a mask says": (lambda x: put(x[:, 0], x[:, :, 7].transpose(0, 1)[0] > 0, 3.0), Shard(1)),
}


def written_view(entry, other):
    entry[0].add_(other[1])
    return entry


def put(x, mask, value):
    x = x.transpose(1, 2).clone()
    x[mask] = value
    return x.transpose(1, 2)


def check(name, cut):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 5, dtype=torch.float64)
    function, placement = FUNCTIONS[name]
    y = assert_matches_unsharded(function, x, mesh_shape=len(cut), placements=[Shard(2)], shard_sizes={0: cut})
    return len(cut) == 1 or y.placements == (placement,)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("ranks", CUTS)
def test_functions_of_entries(name, ranks):
    assert all(run_distributed(check, ranks, name, CUTS[ranks]))


@on_ranks(4)
def test_entries_on_meshes_of_two_dims():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64)
    for function in (stacked(torch.exp, order=range(5)), stacked(lambda e: e[:, 1].cos(), dim=0, order=(4, 1, 0))):
        assert_matches_unsharded(
            function, x, mesh_shape=(2, 2), placements=[Shard(0), Shard(2)], shard_sizes={0: (1, 2), 1: (2, 3)}
        )
    corner = lambda x: torch.stack([torch.stack([x[i, :, j].tanh() for i in range(3)]) for j in range(5)], -1)  # noqa: E731
    assert_matches_unsharded(
        corner, x, mesh_shape=(2, 2), placements=[Shard(0), Shard(2)], shard_sizes={0: (1, 2), 1: (5, 0)}
    )
    vector = torch.randn(5, dtype=torch.float64)
    scalars = lambda v: torch.stack([v[i].exp() for i in range(5)])  # noqa: E731
    assert_matches_unsharded(scalars, vector, mesh_shape=(2, 2), placements=[Replicate(), Shard(0)])


def bordered(x, dim=1, tail=lambda y: y.tanh()):
    """Each entry between borders of the two next to it, turned, as the faces of a sphere are padded."""
    faces = [face.squeeze(dim) for face in x.split(1, dim)]
    padded = []
    for i, face in enumerate(faces):
        before, after = faces[i - 1], faces[(i + 3) % len(faces)]
        wide = torch.cat([before.rot90(1, (-2, -1))[..., -1:, :], face, after.roll(1, -1)[..., :1, :]], -2)
        edge = torch.cat([torch.zeros_like(before)[..., :1, :1], after[..., :1], before[..., -1:, -1:]], -2)
        padded.append(torch.cat([wide, edge], -1))
    return tail(torch.stack(padded, dim))


def check_borders(cut):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 3, 4, 4, dtype=torch.float64)
    y = assert_matches_unsharded(bordered, x, mesh_shape=len(cut), placements=[Shard(1)], shard_sizes={0: cut})
    return len(cut) == 1 or (y.placements == (Shard(1),) and tuple(y.shard_sizes[0]) == cut)


@pytest.mark.parametrize("ranks", CUTS)
def test_entries_with_borders_of_others_stay_where_most_of_them_is(ranks):
    assert all(run_distributed(check_borders, ranks, CUTS[ranks]))


@on_ranks(2)
def test_what_is_joined_of_several_ranks():
    torch.manual_seed(0)
    x = torch.randn(3, 8, 5, dtype=torch.float64)
    functions = {
        "an element of the smaller part": lambda x: x * torch.cat([x[:, 0], x[:, 7], x[:, 1]])[4, 1].item(),
        "that part alone, stacked": lambda x: torch.stack([torch.cat([x[:, 0], x[:, 7][:1]])[3:] for _ in "ab"]).exp(),
        "joined again": lambda x: torch.cat([torch.cat([x[:, 0], x[:, 7][:1]]), x[:, 1]]).exp(),
        "written to": lambda x: torch.cat([x[:, 0], x[:, 7]]).add_(1).sigmoid(),
        "written to, then stacked": lambda x: torch.stack([torch.cat([x[:, i], x[:, 7]]).add_(1) for i in (0, 1, 6)]),
        "with more of what is replicated": lambda x: torch.cat([x[:, 0], x[:, 7], torch.ones(9, 5).double()]).exp(),
        "with a sum": lambda x: torch.cat([x[:, 0], x[:, 1] + x[:, 7], x[:, 6]]).exp(),
        "with a shard": lambda x: torch.cat([x[:, 0], x[:, 7], x[0].cos()]).exp(),
        "other dtypes": lambda x: torch.cat([x[:, 0].float(), x[:, 7]]).exp(),
        "nothing": lambda x: torch.cat([x[:, 0][:0], x[:, 7][:0], x[:, 7], x[:, 0].narrow(0, 0, 0)]).exp(),
    }
    for function in functions.values():
        assert_matches_unsharded(function, x, mesh_shape=2, placements=[Shard(1)], shard_sizes={0: (5, 3)})


@on_ranks(4)
def test_borders_on_meshes_of_two_dims():
    x = torch.randn(3, 4, 2, 4, 4, dtype=torch.float64)
    for placements, cuts in (([Shard(0), Shard(1)], {0: (1, 2), 1: (3, 1)}), ([Shard(1), Shard(2)], {0: (1, 3)})):
        assert_matches_unsharded(bordered, x, mesh_shape=(2, 2), placements=placements, shard_sizes=cuts)


def sent_for_borders(tail=lambda y: y):
    x = shard(torch.rand(2, 8, 3, 4, 4).double(), shared_mesh(2), [Shard(1)], {0: (5, 3)}, requires_grad=True)
    with count_communication() as forward:
        y = bordered(x, tail=tail)
    with count_communication() as backward:
        y.backward(torch.ones_like(y))
    return [(dict(count.collectives), count.messages) for count in (forward, backward)]


def test_borders_are_sent_at_once():
    for forward, backward in simulate_ranks(sent_for_borders, 2):
        assert forward == backward == ({"all_to_all": 1}, 1)


def communication():
    x = shard(torch.rand(2, 3, 8, 5).double(), shared_mesh(2), [Shard(2)], {0: (5, 3)}, requires_grad=True)
    with count_communication() as forward:
        y = stacked(lambda e: (e * weights()).relu())(x)
    grad = torch.ones_like(y)
    with count_communication() as backward:
        y.backward(grad)
    with count_communication() as moved:
        stacked(torch.exp, order=(0, 7, 3))(x.detach())
    return [
        (sum(c.collectives.values()) - c.collectives["all_to_all"], c.bytes_sent, c.bytes_received)
        for c in (forward, backward, moved)
    ]


def test_nothing_is_sent_but_what_is_stacked_out_of_order():
    """Of entries 0, 7 and 3 the first rank has two, and gets the first two: it sends entry 3, and gets entry 7."""
    first, second = simulate_ranks(communication, 2)
    entry = 2 * 3 * 5 * 8
    assert first == [(0, 0, 0), (0, 0, 0), (0, entry, entry)]
    assert second == [(0, 0, 0), (0, 0, 0), (0, entry, entry)]


@on_ranks(2)
def test_gradients_of_entries_themselves():
    x = shard(torch.linspace(0, 1, 24).double().view(3, 8), shared_mesh(2), [Shard(1)], {0: (5, 3)}, requires_grad=True)
    entry, seen = x[:, 6], []
    y = entry.exp()
    y.register_hook(lambda grad: seen.append(grad.full_tensor()))
    z = torch.stack([y, x[:, 0]], 1)
    (grad,) = torch.autograd.grad(z.sum().full_tensor(), entry, retain_graph=True)
    entry.retain_grad()
    z.sum().full_tensor().backward()
    assert len(seen) == 2 and torch.equal(seen[1], torch.ones(3).double())
    expected = torch.linspace(0, 1, 24).double().view(3, 8)[:, 6].exp()
    assert all(torch.allclose(g.full_tensor(), expected, rtol=1e-10) for g in (grad, entry.grad))


@on_ranks(2)
def test_second_derivatives():
    def penalty(x):
        y = torch.stack([x[:, i].exp() for i in range(8)], 1)
        (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return (grad * grad).sum()

    whole = torch.linspace(0, 1, 24).double().view(3, 8)
    assert_matches_unsharded(penalty, whole, mesh_shape=2, placements=[Shard(1)], shard_sizes={0: (3, 5)})


# How entries, or parts that are as short, are taken from a sharded dim.
TAKEN = {
    "unbind": lambda x: x.unbind(1),
    "unbind, batch": lambda x: x.t().unbind(),
    "select": lambda x: [x.select(1, i) for i in range(x.shape[1])],
    "int": lambda x: [x[:, i] for i in range(x.shape[1])],
    "split": lambda x: [part.squeeze(1) for part in x.split(1, 1)],
    "chunk": lambda x: x.chunk(5, 1),
    "diagonal": lambda x: [x.diagonal()],
}


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_second_derivatives_of_absolute_values(ranks):
    """The second derivative of an absolute value is zeros without memory, which torch itself adds to others."""
    whole = torch.linspace(-2, 3, 24).double().view(3, 8)
    for name, taken in TAKEN.items():
        found = []
        for x in (whole.clone().requires_grad_(), shard(whole, shared_mesh(ranks), [Shard(1)], {0: CUTS[ranks]})):
            x.requires_grad_()
            total = sum((i + 1) * part.abs().pow(3).sum() for i, part in enumerate(taken(x)))
            (first,) = torch.autograd.grad(total, x, create_graph=True)
            found.append((first, *torch.autograd.grad(first.square().sum(), x)))
        for expected, got in zip(*found):
            torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-10, atol=1e-12, msg=name)


@on_ranks(2)
def test_all_ranks_have_an_entry_on_the_device_that_it_was_moved_to():
    x = shard(torch.rand(3, 8), shared_mesh(2), [Shard(1)], {0: (5, 3)})
    entry = x[:, 6].to("meta")
    assert (entry.device.type, entry._local_tensor.device.type) == ("meta", "meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_half_precision(dtype):
    torch.manual_seed(0)
    x = (torch.randn(3, 8) * 3).to(dtype)
    function = lambda x: torch.stack([(x[:, i] / 3).exp() * 1.1 for i in range(8)], 1)  # noqa: E731
    y = function(shard(x, shared_mesh(2), [Shard(1)], {0: (5, 3)}))
    exact, own = function(x.double()), function(x)
    assert y.dtype == dtype and y._local_tensor.dtype == dtype
    assert bool((y.full_tensor().double() - exact).abs().max() <= 2 * (own.double() - exact).abs().max())


class PerLevel(nn.Module):
    """One scale for each level, as column physics has."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.rand(8, 3, 1, dtype=torch.float64))

    def forward(self, x):
        return torch.stack([nn.functional.silu(x[:, :, i] * scale) for i, scale in enumerate(self.scales)], 2)


@on_ranks(2)
def test_weights_of_entries():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 5, dtype=torch.float64)
    assert_matches_unsharded(PerLevel(), x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (3, 5)})


@on_ranks(3)
def test_owners_and_other_layouts():
    """From and to a Partial with an owner, each the same value."""
    mesh, value = shared_mesh(3), torch.arange(4.0).double()
    whole = ShardTensor.from_local(value.clone(), mesh, [Replicate()])
    x = shard(torch.stack([value] * 8), mesh, [Shard(0)], {0: (5, 0, 3)})
    entry = x[6]
    assert entry._spec.layout[0] == AxisLayout(Partial(), (0, 0, 1)) and entry.shard_sizes == {}
    there = entry._spec
    others = [
        whole._spec,
        *(there.with_axes({0: AxisLayout(Shard(0), cut)}) for cut in ((2, 1, 1), (0, 0, 4), (4, 0, 0))),
        there.with_axes({0: AxisLayout(Partial())}),
        there.with_axes({0: AxisLayout(Partial(), (0, 1, 0))}),
    ]
    for spec in others:
        with count_communication() as sent:
            part = redistribute_local(entry._local_tensor, there, spec)
        free = spec.layout[0] in (AxisLayout(Partial()), AxisLayout(Shard(0), (0, 0, 4)))
        assert free == (not sent.collectives and not sent.messages), spec
        assert torch.equal(redistribute_local(part, spec, whole._spec), value)
        back = redistribute_local(part, spec, there)
        assert torch.equal(back, value if dist.get_rank() == 2 else torch.zeros(4).double()), spec
    assert entry.redistribute(placements=[Partial()]) is entry


def raises(call, x):
    try:
        call(x)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def wrong_stacks():
    x = shard(torch.rand(3, 8), shared_mesh(2), [Shard(1)], {0: (5, 3)})
    calls = (lambda x: torch.stack([x[:, 0], x[:, 6]], 3), lambda x: torch.stack([x[:, 0], x[:2, 6]]))
    return [(raises(call, x), raises(call, torch.rand(3, 8))) for call in calls]


def test_wrong_stacks_raise_what_torch_raises():
    for ours, torchs in simulate_ranks(wrong_stacks, 2)[0]:
        assert ours[0] == torchs[0] and torchs[1].split(",")[0] in ours[1]
