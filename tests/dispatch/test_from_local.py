"""from_local, to_local and full_tensor: sizes inferred and given, and gradients through the borders."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.layout.caches import forget
from shardtensor.testing import assert_matches_unsharded, count_communication, shard, shared_mesh


def local_of(n, seed=0):
    return torch.randn(n, 4, dtype=torch.float64, generator=seeded(seed))


@on_ranks(3)
def test_sizes_are_inferred_with_one_small_all_gather():
    mesh = shared_mesh(3)
    rank = dist.get_rank()
    for sizes in ((5, 2, 1), (0, 8, 0), (3, 3, 2)):
        with count_communication() as counted:
            x = ShardTensor.from_local(local_of(sizes[rank]), mesh, [Shard(0)])
        assert (x.shard_sizes, tuple(x.shape)) == ({0: sizes}, (8, 4))
        assert dict(counted.collectives) == {"all_gather": 1} and counted.collective_bytes < 256
    grid = shared_mesh((1, 3))
    x = ShardTensor.from_local(local_of((1, 0, 7)[rank]), grid, [Replicate(), Shard(-2)])
    assert x.shard_sizes == {1: (1, 0, 7)} and x.placements == (Replicate(), Shard(0))


@on_ranks(4)
def test_sizes_are_inferred_on_two_mesh_dims():
    grid = shared_mesh((2, 2))
    i, j = grid.get_coordinate()
    rows, columns = (5, 2), (0, 3)
    whole = torch.arange(21.0).reshape(7, 3)
    local = whole[sum(rows[:i]) :][: rows[i], sum(columns[:j]) :][:, : columns[j]]
    x = ShardTensor.from_local(local, grid, [Shard(0), Shard(1)])
    assert x.shard_sizes == {0: rows, 1: columns}
    assert torch.equal(x.full_tensor(), whole)


@on_ranks(3)
def test_given_sizes_cost_no_communication():
    mesh = shared_mesh(3)
    rank = dist.get_rank()
    with count_communication() as counted:
        x = ShardTensor.from_local(local_of((5, 2, 1)[rank]), mesh, [Shard(0)], shard_sizes={0: (5, 2, 1)})
        y = ShardTensor.from_local(local_of((3, 3, 2)[rank]), mesh, [Shard(0)], shard_sizes={0: (3, 3, 2)})
        even = ShardTensor.from_local(local_of(3), mesh, [Shard(0)], shard_sizes="even")
        ShardTensor.from_local(local_of(3), mesh, shard_sizes={})  # whole everywhere
        local = x.to_local()
    assert counted.messages == 0 and not counted.collectives
    assert (x.shard_sizes, y.shard_sizes) == ({0: (5, 2, 1)}, {0: (3, 3, 2)})
    assert (even.shape[0], even.shard_sizes) == (9, {0: (3, 3, 3)})
    assert torch.equal(local, local_of((5, 2, 1)[rank]))
    assert local.untyped_storage().data_ptr() == x._local_tensor.untyped_storage().data_ptr()


@on_ranks(2)
def test_gradients_return_to_the_local_tensor():
    """The gradient of from_local's argument is this rank's part of the whole gradient, however it arrives."""
    mesh = shared_mesh(2)
    rank = dist.get_rank()
    sizes = (7, 1)
    whole = torch.randn(8, 4, dtype=torch.float64, generator=seeded(0))
    weight = torch.randn(8, 4, dtype=torch.float64, generator=seeded(1))
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    for route in ("full", "recut", "dim", "sum"):
        local = whole[mine].clone().requires_grad_()
        x = ShardTensor.from_local(local, mesh, [Shard(0)])
        if route == "full":
            (x.full_tensor() * weight).sum().backward()
        elif route == "recut":
            y = x.redistribute(shard_sizes={0: (2, 6)})
            (y.to_local() * (weight[:2] if rank == 0 else weight[2:])).sum().backward()
        elif route == "dim":
            y = x.redistribute(placements=[Shard(1)], shard_sizes={0: (1, 3)})
            (y.to_local() * (weight[:, :1] if rank == 0 else weight[:, 1:])).sum().backward()
        else:
            (x * weight).sum().backward()
        assert type(local.grad) is torch.Tensor, route
        torch.testing.assert_close(local.grad, weight[mine], rtol=1e-12, atol=1e-12, msg=route)


@on_ranks(2)
def test_grad_placements_say_how_gradients_lie():
    """Every rank uses its copy for work of its own: the gradients are summands."""
    mesh = shared_mesh(2)
    rank = dist.get_rank()
    whole = torch.arange(8.0, dtype=torch.float64)
    x = shard(whole, mesh, [Shard(0)], {0: (7, 1)}, requires_grad=True)
    (x.full_tensor(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((8,), 3.0, dtype=torch.float64))

    x.grad = None
    (x.full_tensor() * 2).sum().backward()  # alike on every rank
    assert torch.equal(x.grad.full_tensor(), torch.full((8,), 2.0, dtype=torch.float64))

    r = shard(whole, mesh, [Replicate()], requires_grad=True)
    (r.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert torch.equal(r.grad.to_local(), torch.full((8,), 3.0, dtype=torch.float64))

    p = shard(whole, mesh, [Partial()], requires_grad=True)
    (p.full_tensor() * 5).sum().backward()
    assert p.grad.placements == (Replicate(),)
    assert torch.equal(p.grad.to_local(), torch.full((8,), 5.0, dtype=torch.float64))

    with pytest.raises(ValueError, match=r"do not match the shards|only 1 dims"):
        x.to_local(grad_placements=[Shard(1)])


@on_ranks(2)
def test_summands_copies_and_defaults():
    mesh = shared_mesh(2)
    rank = dist.get_rank()
    local = torch.full((3,), float(rank + 1), requires_grad=True)
    x = ShardTensor.from_local(local, mesh, [Partial()])
    assert torch.equal(x.full_tensor(), torch.full((3,), 3.0))
    (x * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(local.grad, torch.tensor([1.0, 2.0, 3.0]))  # of each summand, the derivative of the sum
    assert ShardTensor.from_local(torch.ones(2), mesh).placements == (Replicate(),)
    with mesh:
        assert ShardTensor.from_local(torch.ones(2)).device_mesh == mesh
    # Strides of the whole: channels-last stays so.
    image = torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)
    x = ShardTensor.from_local(image, mesh, [Shard(2)])
    assert x.shape == (1, 2, 6, 4) and x.is_contiguous(memory_format=torch.channels_last)


@on_ranks(2)
def test_dtensors_become_shardtensors():
    """To ShardTensor and back into arithmetic, with gradients on both sides."""
    mesh = shared_mesh(2)
    whole = torch.randn(7, 4, dtype=torch.float64, generator=seeded(0))
    other = torch.randn(7, 4, dtype=torch.float64, generator=seeded(1))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        d = distribute_tensor(whole, mesh, placements).requires_grad_()
        x = ShardTensor.from_dtensor(d)
        assert type(x) is ShardTensor and x.placements == tuple(placements)
        assert ShardTensor.from_dtensor(x) is x
        y = shard(other, mesh, [Shard(0)], {0: (2, 5)}, requires_grad=True)
        for left, right in ((x, y), (y, x)):
            d.grad = y.grad = None
            product = left * right
            assert type(product) is ShardTensor
            product.full_tensor().backward(torch.ones_like(whole), retain_graph=True)
            contributions = tuple(Partial() if p.is_replicate() else p for p in placements)
            assert type(d.grad) is DTensor and d.grad.placements == contributions
            torch.testing.assert_close(d.grad.full_tensor(), other)
            assert type(y.grad) is ShardTensor and y.grad.shard_sizes == y.shard_sizes
            torch.testing.assert_close(y.grad.full_tensor(), whole)


@on_ranks(2)
def test_whole_tensors_have_their_own_strides():
    """What is whole keeps its memory format, so that reshapes copy where a view is not possible; so do gradients."""
    local = torch.arange(12.0).view(3, 4).t().requires_grad_()
    x = ShardTensor.from_local(local, shared_mesh(2), (Replicate(),))
    y = x.reshape(12)
    assert x.stride() == (1, 4) and torch.equal(y.to_local(), local.reshape(12))
    grad = ShardTensor.from_local(torch.ones(3, 4).t(), shared_mesh(2), (Replicate(),))
    (back,) = torch.autograd.grad(x.view(4, 3) * 2, local, grad)
    assert torch.equal(back, torch.full((4, 3), 2.0))


# -- the global tensor in place of a shard -----------------------------------------------------------------------------


def warned_of(make, mesh, placements, **options):
    """How often a warning says that the local tensors are equal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = ShardTensor.from_local(make(mesh), mesh, placements, **options)
    texts = [str(w.message) for w in caught if "have the same local tensor" in str(w.message)]
    assert all(w.filename == __file__ for w in caught)
    for text in texts:
        assert "ShardTensor.from_local(tensor, mesh).redistribute(placements=...)" in text and str(x._spec) in text
    return len(texts)


def whole_image(mesh):
    return torch.randn(1, 3, 8, 6, generator=seeded(0))


GLOBAL = {
    "image": whole_image,
    "channels last": lambda mesh: whole_image(mesh).to(memory_format=torch.channels_last),
    "bfloat16": lambda mesh: whole_image(mesh).bfloat16(),
    "labels": lambda mesh: (whole_image(mesh) * 9).long(),
    "mask": lambda mesh: whole_image(mesh) > 0,
    "complex": lambda mesh: torch.complex(whole_image(mesh), whole_image(mesh)).conj(),
    "large": lambda mesh: whole_image(mesh).expand(1, 3, 8, 6).repeat(1, 1, 64, 64),
    "needs grad": lambda mesh: whole_image(mesh).requires_grad_(),
}
OWN = {
    "shards": lambda mesh: torch.randn(1, 3, 8, 6) + dist.get_rank(),
    "zeros": lambda mesh: torch.zeros(1, 3, 8, 6),
    "ones": lambda mesh: torch.ones(1, 3, 8, 6, dtype=torch.int64),
    "NaN": lambda mesh: torch.full((1, 3, 8, 6), torch.nan),
    "one number": lambda mesh: torch.full((1, 1, 1, 1), 0.5),
    "nothing": lambda mesh: torch.empty(1, 3, 0, 6),
    "other sizes": lambda mesh: torch.arange(6.0).expand(1, 3, 8 + dist.get_rank(), 6),
}


@on_ranks(2)
def test_a_global_tensor_in_place_of_a_shard_is_a_warning_on_every_rank():
    mesh = shared_mesh(2)
    forget()
    for name, make in GLOBAL.items():
        assert warned_of(make, mesh, (Shard(2),)) == 1, name
    for name, make in OWN.items():
        assert warned_of(make, mesh, (Shard(2),)) == 0, name
    forget()
    # With sizes nothing is compared, and copies are right where nothing is sharded.
    assert not warned_of(whole_image, mesh, (Shard(2),), shard_sizes={0: (8, 8)})
    assert not warned_of(whole_image, mesh, (Replicate(),)) and not warned_of(whole_image, mesh, (Partial(),))
    assert not warned_of(whole_image, shared_mesh((2, 1)), (Replicate(), Shard(2)))
    with count_communication() as counted:
        assert sum(warned_of(whole_image, mesh, (Shard(2),)) for _ in range(30)) == 14  # of the first 16 calls
    assert dict(counted.collectives) == {"all_gather": 30}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDTENSOR_DEBUG", "1")
        assert warned_of(whole_image, mesh, (Shard(2),), shard_sizes="even") == 1


@on_ranks(4)
def test_copies_along_one_of_two_mesh_dims():
    grid = shared_mesh((2, 2))
    forget()
    assert warned_of(whole_image, grid, (Shard(0), Shard(2))) == 2
    assert warned_of(lambda mesh: whole_image(mesh) + grid.get_coordinate()[0], grid, (Shard(0), Shard(2))) == 1
    assert warned_of(lambda mesh: whole_image(mesh) + grid.get_coordinate()[1], grid, (Replicate(), Shard(2))) == 0
    # One of four has its own shard.
    assert warned_of(lambda mesh: whole_image(mesh) + (dist.get_rank() == 3), grid, (Shard(0), Shard(2))) == 0


# -- torch's own from_local -------------------------------------------------------------------------------------------


def mapped(x, placements):
    return local_map(lambda t: {"a": t.sin() * t, "b": 2 * t}, (placements, placements), redistribute_inputs=True)(x)


def prepared(x, placements):
    """A module that gets local tensors, and whose local results become DTensors."""
    module = nn.Sequential(nn.Tanh(), nn.Identity())
    if isinstance(x, ShardTensor):
        styles = {
            "0": PrepareModuleInput(input_layouts=placements, desired_input_layouts=placements, use_local_output=True),
            "1": PrepareModuleOutput(
                output_layouts=placements, desired_output_layouts=placements, use_local_output=False
            ),
        }
        parallelize_module(module, x.device_mesh, styles)
    return module(x)


def converted(x, placements):
    return DTensor.from_local(x.to_local() * 3, x.device_mesh, placements) if isinstance(x, ShardTensor) else 3 * x


def sequence_parallel(x, placements):
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.Linear(4, 3)).double()
    if isinstance(x, ShardTensor):
        styles = {
            "0": SequenceParallel(sequence_dim=0, use_local_output=True),
            "1": ColwiseParallel(input_layouts=placements[0]),
            "2": RowwiseParallel(output_layouts=placements[0], use_local_output=False),
        }
        parallelize_module(module, x.device_mesh, styles)
    return module(x)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2,), [(6, 2)]),
        pytest.param((3,), [(7, 0, 1)], marks=pytest.mark.slow),
        pytest.param((2, 2), [(0, 8), (1, 2)], marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_ranks("shape")
def test_what_torch_makes_of_local_results_has_their_sizes(shape, sizes):
    placements = [Shard(m) for m in range(len(sizes))]
    functions = [mapped, converted, prepared, sequence_parallel] if len(shape) == 1 else [mapped, converted]
    for f in functions:
        assert_matches_unsharded(
            lambda x, f=f: f(x, placements),
            torch.randn(8, 3, generator=seeded(0)).double(),
            mesh_shape=shape,
            placements=placements,
            shard_sizes=dict(enumerate(sizes)),
        )


@on_ranks(4)
def test_sizes_of_local_results_are_compared_along_uneven_axes_only():
    """Sizes are compared along an axis along which a tensor is sharded unevenly, whatever mesh it is of."""
    mesh = shared_mesh((2, 2), ("dp", "domain"))
    rows = torch.ones(2, 3)
    forget()

    def made(t, mesh, *placements, **options):
        with count_communication() as counted:
            y = DTensor.from_local(t, mesh, placements, **options)
        return type(y), tuple(y.shape), counted.collectives.total() + counted.messages

    assert made(rows, mesh["domain"], Shard(0)) == (DTensor, (4, 3), 0)
    x = shard(torch.ones(7, 3), mesh, [Replicate(), Shard(0)], {1: (6, 1)})
    assert made(x.to_local(), mesh["domain"], Shard(-2)) == (ShardTensor, (7, 3), 1)
    assert made(x.to_local(), mesh, Partial(), Shard(0)) == (ShardTensor, (7, 3), 1)
    assert made(rows, mesh["domain"], Shard(0)) == (DTensor, (4, 3), 1)
    assert made(rows, mesh["domain"], Replicate()) == (DTensor, (2, 3), 0)
    assert made(rows, mesh["dp"], Shard(0)) == (DTensor, (4, 3), 0)
    rank = mesh["domain"].get_local_rank()
    torchs = {"shape": torch.Size((7, 3)), "stride": (3, 1)}
    assert made(torch.ones((4, 3)[rank], 3), mesh["domain"], Shard(0), **torchs) == (DTensor, (7, 3), 0)
    with pytest.raises(ValueError, match=r"size . in dim 0, but .* \(7, 3\) has shards of sizes \(4, 3\).*shard_sizes"):
        made(x.to_local(), mesh["domain"], Shard(0), **torchs)
    with pytest.raises(UnsupportedSharding, match=r"sizes \{0: \(6, 1\)\}.*leave out grad_placements"):
        made(x.to_local(), mesh["domain"], Shard(0), grad_placements=[Shard(0)])


@pytest.mark.slow
@on_ranks(2)
def test_local_results_in_compiled_functions():
    mesh = shared_mesh(2)
    whole = torch.arange(16.0).view(8, 2)
    x = shard(whole, mesh, [Shard(0)], {0: (6, 2)})
    function = torch.compile(lambda t: DTensor.from_local(t.sin(), mesh, [Shard(0)]) + 1, backend="aot_eager")
    assert torch.equal(function(x.to_local()).full_tensor(), whole.sin() + 1)


@on_ranks(3)
def test_placements_remember_the_sizes_of_a_shape():
    mesh = shared_mesh(3)
    x = shard(torch.arange(24.0).reshape(8, 3), mesh, [Shard(0)], {0: (5, 0, 3)})
    placements = pickle.loads(pickle.dumps(x.placements))
    assert placements == (Shard(0),)
    with count_communication() as counted:
        y = DTensor.from_local(x.to_local() * 2, mesh, placements, shape=x.shape, stride=x.stride())
    assert not counted.collectives and isinstance(y, ShardTensor) and torch.equal(y.full_tensor(), x.full_tensor() * 2)
    fewer = [x.to_local()[:2], x.to_local(), x.to_local()[:1]][mesh.get_local_rank()]
    z = DTensor.from_local(fewer, mesh, x.placements)
    assert z.shard_sizes == {0: (2, 0, 1)}  # of other sizes, which are asked for


@pytest.mark.on_device
@on_ranks(2)
def test_tensors_of_the_host_come_to_the_meshs_device():
    mesh = shared_mesh(2)
    local = torch.full((5 - 2 * mesh.get_local_rank(), 3), 2.0, device="cpu", requires_grad=True)
    for x in (
        ShardTensor.from_local(local, mesh, [Shard(0)]),
        ShardTensor.from_local(local, mesh, [Shard(0)], shard_sizes={0: (5, 3)}),
    ):
        assert x.device.type == mesh.device_type and x.shard_sizes == {0: (5, 3)}
        x.square().sum().backward()
    assert local.grad.device.type == "cpu" and torch.equal(local.grad, torch.full_like(local, 8.0))
    loud = ShardTensor.from_local(torch.ones(3, device="cpu"), mesh, [Replicate()])
    assert loud.device.type == mesh.device_type and float(loud.sum()) == 3


@on_ranks(2)
def test_a_dtensor_comes_to_its_mesh(emulated):
    mesh = shared_mesh(2)
    weight = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    x = ShardTensor.from_dtensor(weight.cpu())
    assert x.device.type == x.to_local().device.type == mesh.device_type
    assert torch.equal(x.full_tensor().cpu(), torch.arange(6.0, device="cpu"))
