"""A ShardTensor stays one: through copies, casts, pickles, views, leaves, optimizers, and next to plain tensors."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardtensor import ShardTensor
from shardtensor.testing import count_communication, run_expecting_errors, shard, shared_mesh

SIZES = {0: (7, 1)}


def whole_tensor(seed=0, shape=(8, 4)):
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed))


def sharded(seed=0, requires_grad=False):
    return shard(whole_tensor(seed), shared_mesh(2), [Shard(0)], SIZES, requires_grad=requires_grad)


def same_kind(value, whole, sizes=SIZES):
    assert type(value) is ShardTensor, type(value)
    assert value.shard_sizes == sizes
    assert value.dtype == whole.dtype
    assert torch.equal(value.full_tensor().detach(), whole)


SURVIVE = {
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "float": lambda x: x.float(),
    "to bf16": lambda x: x.to(torch.bfloat16),
    "to cpu": lambda x: x.to("cpu"),
    "cpu": lambda x: x.cpu(),
    "type": lambda x: x.type(torch.float32),
    "bool": lambda x: x > 0,
    "data": lambda x: x.data,
    "contiguous": lambda x: x.contiguous(),
    "zeros_like": lambda x: torch.zeros_like(x),
    "full_like": lambda x: torch.full_like(x, 2, dtype=torch.float32),
    "ones of its shape": lambda x: x.new_ones(x.shape),
    "view to itself": lambda x: x.view(8, 4),
    "view to more dims": lambda x: x.view(8, 2, 2).flatten(1),
    "transposed twice": lambda x: x.t().t(),
    "arithmetic": lambda x: (2 - x) * x / 3 + x**2,
    "operators": lambda x: -abs(x) % 2 // 1,
    "where": lambda x: torch.where(x > 0, x, -x),
    "conj": lambda x: (x + 1j * x).conj().resolve_conj(),
    "unsqueezed": lambda x: x[None].squeeze(0),
    "function of itself": lambda x: nn.functional.gelu(x),
}


@on_ranks(2)
def test_it_stays_a_shardtensor_with_its_cut():
    x, whole = sharded(), whole_tensor()
    for name, f in SURVIVE.items():
        with count_communication() as counted:
            y = f(x)
        assert counted.messages == 0 and not counted.collectives, name
        try:
            same_kind(y, f(whole))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for name in ("clone", "float", "arithmetic", "where", "view to more dims"):
                same_kind(SURVIVE[name](x), SURVIVE[name](whole))
            assert (x * 2).sum().item() == pytest.approx((whole * 2).sum().item())


@on_ranks(2)
def test_in_place_arithmetic():
    whole, other = whole_tensor(), whole_tensor(1)
    steps = [
        lambda x, y: x.__iadd__(y),
        lambda x, y: x.add_(y, alpha=2),
        lambda x, y: x.mul_(3),
        lambda x, y: x.clamp_(-1, 1),
        lambda x, y: x.copy_(y),
        lambda x, y: x.masked_fill_(y > 0, 2.5),
        lambda x, y: x.zero_(),
        lambda x, y: x.fill_(4),
        lambda x, y: x.abs_(),
        lambda x, y: x[:, 1].mul_(5) is None or x,  # through a view
        lambda x, y: x.view(8, 2, 2).add_(1) is None or x,
    ]
    for i, step in enumerate(steps):
        x, plain = sharded(), whole.clone()
        for y in (shard(other, shared_mesh(2), [Shard(0)], {0: (2, 6)}), other):  # cut otherwise, and plain
            result = step(x, y)
            step(plain, other)
            assert result is x, i
            same_kind(x, plain)
    # With gradients.
    x = sharded(requires_grad=True)
    y = x * 1
    y += x
    y *= 2
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((8, 4), 4.0, dtype=torch.float64))
    z = x * 1
    z[:, 0].mul_(3)  # through a view of what requires grad
    expected = whole.clone()
    expected[:, 0] *= 3
    same_kind(z.detach(), expected)
    x.grad = None
    z.sum().backward()
    expected = torch.ones(8, 4, dtype=torch.float64)
    expected[:, 0] = 3
    assert torch.equal(x.grad.full_tensor(), expected) and x.grad.shard_sizes == x.shard_sizes


@pytest.mark.parametrize("requires_grad", [False, True])
@on_ranks(2)
def test_what_is_written_to_a_flattened_view_arrives_on_every_rank(requires_grad):
    """Of a shard that lies in memory column by column, a flattened view is a copy, unless it has one row."""
    whole, at = whole_tensor(), dist.get_rank()
    local = (whole[:1], whole[1:])[at].t().contiguous().t()
    x = ShardTensor.from_local(local, shared_mesh(2), [Shard(0)], shard_sizes={0: (1, 7)})
    if requires_grad:
        leaf, expected_leaf = x.detach().requires_grad_(), whole.clone().requires_grad_()
        x, whole = leaf * 1, expected_leaf * 1
    else:
        whole = whole.clone()
    for t in (x, whole):
        flat = t.view(-1)
        flat.add_(1)
        flat[2:7].mul_(3)
        flat.view(8, 4).view(-1)[8:].neg_()
    same_kind(x.detach(), whole.detach(), {0: (1, 7)})
    if requires_grad:
        x.square().sum().backward()
        whole.square().sum().backward()
        same_kind(leaf.grad, expected_leaf.grad, {0: (1, 7)})


IN_PLACE_REFUSED = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "resize_": lambda x: x.resize_(2, 2),
    "share_memory_": lambda x: x.share_memory_(),
}


def change_layout(name, placement):
    IN_PLACE_REFUSED[name](shard(whole_tensor(), shared_mesh(2), [placement]))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("name", list(IN_PLACE_REFUSED))
def test_what_would_change_the_layout_in_place_is_refused(name, placement):
    for error in run_expecting_errors(change_layout, 2, name, placement):
        assert isinstance(error, NotImplementedError) and "Remedy" in str(error), repr(error)


@on_ranks(2)
def test_deepcopy():
    x = sharded(requires_grad=True)
    (x * x).sum().backward()
    for original in (x, nn.Parameter(sharded()), sharded()):
        twin = copy.deepcopy(original)
        assert type(twin) is ShardTensor and twin is not original and twin.is_leaf
        assert isinstance(twin, nn.Parameter) == isinstance(original, nn.Parameter)
        assert twin.requires_grad == original.requires_grad
        same_kind(twin.detach(), whole_tensor())
        with torch.no_grad():
            twin.zero_()
        same_kind(original.detach(), whole_tensor())  # it has memory of its own
        if original.grad is not None:
            same_kind(twin.grad, 2 * whole_tensor())
            assert twin.grad is not original.grad
    pair = copy.deepcopy([x, x])
    assert pair[0] is pair[1]
    same_kind(copy.copy(x.detach()), whole_tensor())
    (copy.deepcopy(x) * 3).sum().backward()
    with pytest.raises(RuntimeError, match="only leaf ShardTensors"):
        copy.deepcopy(x * 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(sharded())
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("mask", sharded(1) > 0)

    def forward(self, x):
        return self.linear(x + self.position) * self.mask


@on_ranks(2)
def test_parameters_and_buffers_of_modules():
    torch.manual_seed(0)
    model = Model()
    assert [type(p) for p in model.parameters()] == [ShardTensor, nn.Parameter, nn.Parameter]
    assert isinstance(model.position, nn.Parameter) and model.position.requires_grad
    assert set(model.state_dict()) == {"position", "linear.weight", "linear.bias", "mask"}
    twin = copy.deepcopy(model)
    assert isinstance(twin.position, nn.Parameter)
    model.float()
    same_kind(model.position.detach(), whole_tensor().float())
    model.double()
    model(sharded(2)).sum().backward()
    assert model.position.grad.shard_sizes == SIZES
    assert type(model.linear.weight.grad) is torch.Tensor
    twin.load_state_dict(model.state_dict())
    same_kind(twin.position.detach(), model.position.full_tensor().detach())
    model.requires_grad_(False)
    assert not model.position.requires_grad


@on_ranks(2)
def test_pickle_and_torch_save():
    x = nn.Parameter(sharded())
    y = sharded(requires_grad=True)
    for original in (x, y, sharded()):
        stream = io.BytesIO()
        torch.save({"value": original}, stream)
        stream.seek(0)
        for twin in (pickle.loads(pickle.dumps(original)), torch.load(stream, weights_only=False)["value"]):
            same_kind(twin.detach(), whole_tensor())
            assert twin.requires_grad == original.requires_grad
            assert isinstance(twin, nn.Parameter) == isinstance(original, nn.Parameter)
            if twin.requires_grad:
                twin.redistribute(shard_sizes="even").sum().backward()
                assert twin.grad.shard_sizes == SIZES


@on_ranks(2)
def test_a_leafs_gradient_has_the_leafs_cut_whatever_the_consumers():
    whole = whole_tensor()
    for mark in ("method", "setter", "scatter"):
        x = sharded()
        if mark == "method":
            assert x.requires_grad_() is x
        elif mark == "setter":
            x.requires_grad = True
        else:
            x = x.detach().requires_grad_(True)
        assert x.is_leaf and x.requires_grad
        for consumer in (
            lambda x: x.square().sum(),
            lambda x: x.redistribute(shard_sizes={0: (1, 7)}).square().sum(),
            lambda x: x.redistribute(placements=[Shard(1)]).square().sum(),
            lambda x: x.redistribute(placements=[Replicate()]).square().sum(),
            lambda x: x.full_tensor().square().sum(),
            lambda x: (2 * shard(whole, x.device_mesh, [Shard(0)], {0: (3, 5)}) * x).sum(),
            lambda x: (x.square().mean(0) * 8).sum(),
        ):
            x.grad = None
            consumer(x).backward()
            assert x.grad.placements == x.placements
            same_kind(x.grad, 2 * whole)
        x.requires_grad_(False)
        assert not x.requires_grad and not (x * 2).requires_grad
    x = sharded(requires_grad=True)
    x.requires_grad_(True)  # once more changes nothing
    (x * 2).sum().backward()
    (x.redistribute(shard_sizes="even") * 3).sum().backward()
    same_kind(x.grad, torch.full((8, 4), 5.0, dtype=torch.float64))  # two cuts, added up


@on_ranks(2)
def test_hooks_and_retained_gradients():
    x = sharded(requires_grad=True)
    seen = []
    x.register_hook(lambda g: seen.append(("leaf", type(g), g.shard_sizes)))
    y = x.redistribute(shard_sizes="even") * 2
    y.retain_grad()
    y.register_hook(lambda g: g * 10)
    x.register_post_accumulate_grad_hook(lambda t: seen.append(("after", type(t.grad), t.grad.shard_sizes)))
    y.sum().backward()
    assert seen == [("leaf", ShardTensor, SIZES), ("after", ShardTensor, SIZES)]
    assert type(y.grad) is ShardTensor
    assert torch.equal(x.grad.full_tensor(), torch.full((8, 4), 20.0, dtype=torch.float64))
    z = x * 2
    a, b = torch.autograd.grad((x * z).sum(), (x, z))
    assert a.shape == b.shape == (8, 4)


@on_ranks(2)
def test_repr_says_what_is_where_and_does_not_communicate():
    for x in (
        sharded(),
        sharded(requires_grad=True) * 2,
        shard(whole_tensor(), shared_mesh(2), [Partial()]),
        sharded().sum(),
        nn.Parameter(sharded()),
    ):
        with count_communication() as counted:
            text = repr(x) + str(x) + f"{x}"
        assert "ShardTensor" in text and f"rank ({dist.get_rank()},) holds" in text
        assert counted.messages == 0 and not counted.collectives
    assert "S(0)[7, 1]" in repr(sharded())


@on_ranks(2)
def test_scalars_mean_the_whole_value():
    mesh = shared_mesh(2)
    x = shard(torch.tensor(3.5), mesh, [Replicate()])
    assert x.ndim == 0 and x.item() == 3.5 and float(x * 2) == 7.0 and bool(x > 3) and int(x) == 3
    total = sharded().sum()
    assert total.placements == (Partial(),)
    assert total.item() == pytest.approx(whole_tensor().sum().item(), abs=1e-12)
    assert f"{total.item():.3f}" == f"{whole_tensor().sum().item():.3f}"
    assert bool((sharded() < 100).all())
    with pytest.raises(RuntimeError, match="32 elements cannot be converted"):
        sharded().item()
    assert (len(sharded()), sharded().numel(), tuple(sharded().size()), sharded().dim()) == (8, 32, (8, 4), 2)


@on_ranks(2)
def test_plain_tensors_count_as_whole():
    """A plain tensor counts as whole; its gradient comes back plain and complete."""
    whole, x = whole_tensor(), sharded(requires_grad=True)
    for shape in ((8, 4), (4,), (8, 1), (1, 4), (), (1,)):
        plain = torch.randn(shape, dtype=torch.float64, generator=seeded(5))
        for left in (True, False):
            x.grad = None
            same_kind((x * plain if left else plain * x).detach(), whole * plain)  # without gradient
            trained = plain.clone().requires_grad_()
            y = x * trained if left else trained * x
            (y * 2).sum().backward()
            expected = torch.autograd.grad((whole * (reference := plain.clone().requires_grad_()) * 2).sum(), reference)
            assert type(trained.grad) is torch.Tensor, shape
            torch.testing.assert_close(trained.grad, expected[0], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(x.grad.full_tensor(), (2 * plain).expand(8, 4), rtol=1e-10, atol=1e-12)
    same_kind(torch.maximum(sharded(), torch.tensor(0.0, dtype=torch.float64)), whole.clamp(min=0))
    same_kind(torch.where(whole > 0, sharded(), whole * 2), torch.where(whole > 0, whole, whole * 2))


@on_ranks(2)
def test_dtensors_mix_in_with_gradients_both_ways():
    mesh, whole, other = shared_mesh(2), whole_tensor(), whole_tensor(1)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        d = distribute_tensor(other, mesh, placements).requires_grad_()
        x = shard(whole, mesh, [Shard(1 if placements == [Shard(1)] else 0)], requires_grad=True)
        for y in (x * d, d * x, torch.addcmul(x, d, d), d - x):
            assert type(y) is ShardTensor
            y.sum().backward(retain_graph=True)
        assert type(d.grad) is DTensor and type(x.grad) is ShardTensor
        torch.testing.assert_close(d.grad.full_tensor(), 2 * whole + 2 * other + 1, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(x.grad.full_tensor(), 2 * other + 0 * whole, rtol=1e-10, atol=1e-12)


OPTIMIZERS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "foreach": True}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "foreach": True}),
    ("RMSprop", {"lr": 0.1}),
]


def train(name, options, of):
    sharded_parameter = nn.Parameter(of(whole_tensor()))
    plain = nn.Parameter(whole_tensor(1)[0])
    optimizer = getattr(torch.optim, name)([sharded_parameter, plain], **options)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        ((sharded_parameter - of(whole_tensor(2))) ** 2 * plain).sum().backward()
        norms.append(nn.utils.clip_grad_norm_([sharded_parameter, plain], 0.5))
        optimizer.step()
    return [
        t.detach().full_tensor() if isinstance(t, DTensor) else t.detach() for t in (sharded_parameter, plain, *norms)
    ]


@on_ranks(2)
def test_optimizers_and_gradient_clipping():
    for name, options in OPTIMIZERS:
        expected = train(name, options, lambda t: t.clone())
        for got, value in zip(train(name, options, lambda t: shard(t, shared_mesh(2), [Shard(0)], SIZES)), expected):
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12, msg=f"{name} {options}")
