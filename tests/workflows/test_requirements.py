"""What users asked of the first ShardTensor, one small test each; the depth is in the other files."""

from __future__ import annotations

import copy
import inspect
import io
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from neighborhood_oracle import Problem, dense_attention
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding, scatter_tensor
from shardtensor.data import ShardLoader, read
from shardtensor.debug import check
from shardtensor.parallel import parallelize, synchronize, tensor_parallel
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

ROOT = Path(__file__).parents[2]
UNEVEN = [(5, 3), (7, 1), (0, 8)]


def numbers(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed))


def rows(tensor, sizes, **kwargs):
    return shard(tensor, shared_mesh(len(sizes)), [Shard(kwargs.pop("dim", 0))], {0: sizes}, **kwargs)


@on_ranks(2)
def test_shards_may_be_uneven_and_empty():
    """A tensor cut 5 + 3, 7 + 1 or 0 + 8 is the same tensor."""
    whole = numbers(8, 3)
    for sizes in UNEVEN:
        x = rows(whole, sizes)
        assert x.to_local().shape == (sizes[dist.get_rank()], 3)
        assert torch.equal(x.full_tensor(), whole)
        for others in UNEVEN:
            assert torch.equal(x.redistribute(shard_sizes={0: others}).full_tensor(), whole)


@on_ranks(2)
def test_shard_sizes_are_a_dict_by_mesh_dim_and_survive_operators():
    """No list of tuples to be interpreted: {mesh dim: sizes}, after any operator."""
    x = rows(numbers(8, 3), (7, 1))
    assert x.shard_sizes == {0: (7, 1)} and isinstance(x.shard_sizes, dict)
    for y in (x + 1, x.t(), x.relu(), x.clone(), x[:, :2]):
        assert y.shard_sizes == {0: (7, 1)}
    assert x._spec.sharding_shapes() == {0: (torch.Size([7, 3]), torch.Size([1, 3]))}


@on_ranks(2)
def test_output_shards_may_differ_from_input_shards():
    """Strided convolution, padding and pooling change the sizes of uneven shards."""
    layout = {"mesh_shape": 2, "placements": [Shard(2)], "shard_sizes": {0: (7, 4)}}
    x = numbers(2, 3, 11, 6)
    torch.manual_seed(0)
    assert_matches_unsharded(nn.Conv2d(3, 2, 3, stride=2, padding=1).double(), x, **layout)
    assert_matches_unsharded(lambda t: F.pad(t, (1, 2, 3, 0)), x, **layout)
    assert_matches_unsharded(lambda t: F.max_pool2d(t, 3, 2), x, **layout)
    assert_matches_unsharded(lambda t: F.avg_pool2d(t, 2, ceil_mode=True), x, **layout)


@on_ranks(2)
def test_convolutions_in_one_two_and_three_dims():
    """Output, input gradient, weight and bias gradients as on one device."""
    torch.manual_seed(0)
    for n, layer in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
        conv = layer(2, 3, 3, padding=1).double()
        assert_matches_unsharded(
            conv, numbers(1, 2, 8, *(4,) * (n - 1)), mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (5, 3)}
        )


@on_ranks(3)
def test_halos_are_worked_out_and_consistent_with_one_device():
    """A stack whose receptive field is wider than a shard, fed with nothing but the tensor.

    No halo size is given anywhere; edges between shards are as right as their middles, in both directions.
    """
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv1d(2, 2, 5, padding=2), nn.Tanh())]
    x = numbers(1, 2, 13)
    sizes = {0: (9, 1, 3)}
    assert_matches_unsharded(nn.Sequential(*layers).double(), x, mesh_shape=3, placements=[Shard(2)], shard_sizes=sizes)


@on_ranks(2)
def test_gradients_of_halos_return_to_the_edges():
    """What the neighbour's outputs contribute to a shard's edge is collected and added."""
    weight = torch.tensor([[[1.0, 10.0, 100.0]]], dtype=torch.float64)
    x = rows(torch.zeros(1, 1, 8, dtype=torch.float64), (5, 3), dim=2, requires_grad=True)
    F.conv1d(x, weight, padding=1).sum().backward()
    # At the edge between the shards every element is read three times, by two ranks.
    expected = torch.full((8,), 111.0, dtype=torch.float64)
    expected[0], expected[7] = 11.0, 110.0
    assert torch.equal(x.grad.full_tensor().flatten(), expected)


@on_ranks(3)
def test_users_choose_between_collectives_and_point_to_point():
    """The same bits either way."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 5, padding=2).double()
    results = []
    for transport in ("all_to_all", "p2p"):
        with shardtensor.set_transport(transport):
            x = rows(numbers(1, 2, 9, 4), (2, 6, 1), dim=2, requires_grad=True)
            y = conv(x)
            y.square().sum().backward()
            results.append((y.to_local().detach(), x.grad.to_local()))
    assert all(map(torch.equal, *results))


@on_ranks(4)
def test_a_data_pipeline_on_one_rank_per_domain_is_enough():
    """Only the source has the tensor; domains of a 2-D mesh load different ones."""
    mesh = shared_mesh((2, 2), ("data", "domain"))["domain"]
    source = dist.get_process_group_ranks(mesh.get_group())[0]
    image = numbers(1, 3, 9, 4, seed=source) if dist.get_rank() == source else None
    x = scatter_tensor(image, mesh, [Shard(2)], shard_sizes={0: (2, 7)}, source=source)
    assert torch.equal(x.full_tensor(), numbers(1, 3, 9, 4, seed=source))


@on_ranks(2)
def test_unbind():
    """q, k and v come out of one sharded tensor."""
    qkv = rows(numbers(7, 3, 4), (5, 2), requires_grad=True)
    q, k, v = qkv.unbind(1)
    assert q.shard_sizes == k.shard_sizes == {0: (5, 2)} and q.shape == (7, 4)
    (q * 1 + k * 2 + v * 3).sum().backward()
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[None, :, None].expand(7, 3, 4)
    assert torch.equal(qkv.grad.full_tensor(), expected)


@on_ranks(2)
def test_a_convolution_is_the_same_by_every_name():
    """nn, functional, torch and aten."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    whole = numbers(1, 2, 8, 4)
    x = rows(whole, (5, 3), dim=2)
    w, b = conv.weight, conv.bias
    for y in (
        conv(x),
        F.conv2d(x, w, b, padding=1),
        torch.conv2d(x, w, b, padding=1),
        torch.ops.aten.convolution.default(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ):
        torch.testing.assert_close(y.full_tensor(), conv(whole), rtol=1e-10, atol=1e-12)


@on_ranks(4)
def test_the_mesh_need_not_be_passed_around():
    """Inside ``with mesh:`` whatever makes ShardTensors takes that one; naming it gives the same."""
    grid = shared_mesh((2, 2), ("data", "domain"))
    whole = numbers(9, 4)
    with grid["domain"] as mesh:
        source = dist.get_process_group_ranks(mesh.get_group())[0]
        mine = whole[:2] if dist.get_rank() == source else whole[2:]
        cut = {"placements": [Shard(0)], "shard_sizes": {0: (2, 7)}}
        made = [
            ShardTensor.from_local(mine, **cut),
            scatter_tensor(whole if dist.get_rank() == source else None, **cut, source=source),
            read(whole.cpu().numpy(), **cut),
            *ShardLoader([whole], **cut),
        ]
    explicit = ShardTensor.from_local(mine, grid["domain"], [Shard(0)], shard_sizes={0: (2, 7)})
    for x in made:
        assert x.device_mesh == explicit.device_mesh and x._spec == explicit._spec
        assert torch.equal((x + explicit).full_tensor(), 2 * whole)


def test_no_device_is_named():
    """Code follows the mesh's device type; none is written down."""
    files = [*(ROOT / "shardtensor").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert len(files) > 20
    for file in files:
        found = re.search(r"[\"']cuda|\.cuda\(", file.read_text())
        assert not found, f"{file}: {found}"


def test_what_is_patched_and_registered_can_be_looked_up():
    """The handlers are listed by one call, the patches by another, and a page says so."""
    handlers = shardtensor.extend.registered()
    for function in (F.conv1d, F.conv2d, F.conv3d):
        function = inspect.unwrap(function)
        assert "convolution" in inspect.getmodule(handlers[function]).__name__
    assert "torch.nn.functional.conv2d" in shardtensor.dispatch.patches.installed()
    pages = [ROOT / "docs" / "how-it-works.md", ROOT / "docs" / "operators.md"]
    assert any("shardtensor.extend.registered()" in page.read_text() for page in pages)


def missing_handler():
    rows(numbers(8, 8), (5, 3)).as_strided((2, 2), (0, 1))


def test_a_missing_handler_raises():
    """Never a silently wrong result: the error names the operator."""
    for error in run_expecting_errors(missing_handler, 2):
        assert isinstance(error, UnsupportedSharding)
        assert "as_strided" in str(error) and "Remedy" in str(error)


class Vanilla(nn.Module):
    """Written for one device, years ago."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.bias = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.gelu(self.norm(self.stem(x)))
        x = x + F.conv2d(x, self.weight, self.bias, stride=1, padding=1)  # a layer of its own
        x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


@on_ranks(2)
def test_model_code_remains_unchanged():
    """A plain nn.Module, with a functional layer of its own and a global mean, gets sharded input; that is all."""
    torch.manual_seed(0)
    model = Vanilla().double()
    assert_matches_unsharded(model, numbers(2, 2, 12, 6), mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (7, 5)})


def test_unsharded_code_is_unaffected():
    """Plain tensors give bitwise the same with the package as without."""
    script = """
import sys, torch
if sys.argv[1] == "with":
    import shardtensor
torch.manual_seed(0)
from torch import nn
model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3))
loss = torch.nn.functional.l1_loss(model(torch.randn(2, 2, 6, 6)), torch.ones(2, 3))
loss.backward()
print([p.grad.double().sum().item().hex() for p in model.parameters()], loss.item().hex())
"""
    printed = [
        subprocess.run([sys.executable, "-c", script, how], check=True, timeout=120, capture_output=True).stdout
        for how in ("with", "without")
    ]
    assert printed[0] == printed[1] and b"0x" in printed[0]


def test_modules_are_saved_and_loaded_after_the_import():
    """What the first patches broke."""
    stream = io.BytesIO()
    model = Vanilla()
    model.function = F.conv2d
    torch.save(model, stream)
    stream.seek(0)
    twin = torch.load(stream, weights_only=False)
    x = torch.randn(1, 2, 4, 4)
    assert torch.equal(twin(x), model(x)) and torch.equal(copy.deepcopy(model)(x), model(x))


@on_ranks(2)
def test_the_registry_is_open_to_users():
    """A function-level mapping inside the class, with a public way in."""
    def scaled(x):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(scaled, (x,), x)
        return x * x.shape[0]

    shardtensor.extend.register(scaled)(lambda x: x * x.shape[0])
    try:
        x = rows(numbers(8, 3), (7, 1))
        assert torch.equal(scaled(x).full_tensor(), x.full_tensor() * 8)
    finally:
        shardtensor.extend.unregister(scaled)


@on_ranks(2)
def test_means_are_weighted_by_the_shards_sizes():
    """Mean, variance, standard deviation and losses on 5 + 3, without gathering the input."""
    layout = {"mesh_shape": 2, "placements": [Shard(0)], "shard_sizes": {0: (5, 3)}}
    x, y = numbers(8, 3), numbers(8, 3, seed=1)
    for f in (torch.mean, torch.var, torch.std, lambda t: t.mean(0), lambda t: t.var(0)):
        assert_matches_unsharded(f, x, **layout)
    assert_matches_unsharded(F.mse_loss, x, y, **layout)
    assert_matches_unsharded(F.cross_entropy, x, y.softmax(1), **layout)
    # A few numbers travel, never the tensor.
    big = rows(numbers(800, 3), (799, 1))
    with count_communication() as counted:
        big.mean().item()
    assert counted.bytes_sent + counted.collective_bytes <= 32
    assert big.mean().placements == (Partial(),)


@on_ranks(2)
def test_full_tensor_is_explicit_and_differentiable():
    """Outputs are resolved by one call, through which gradients flow, uneven or not."""
    x = rows(numbers(8, 3), (7, 1), requires_grad=True)
    whole = x.full_tensor()
    assert type(whole) is torch.Tensor and whole.shape == (8, 3)
    (whole**2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * numbers(8, 3))


@on_ranks(2)
def test_input_gradients_have_the_inputs_sharding():
    """Whatever the consumer redistributes."""
    x = rows(numbers(8, 3), (7, 1), requires_grad=True)
    for consumer in (
        lambda t: t.redistribute(shard_sizes={0: (2, 6)}),
        lambda t: t.redistribute(placements=[Shard(1)]),
        lambda t: t.redistribute(placements=[Replicate()]),
        lambda t: t.t() @ t,
    ):
        x.grad = None
        consumer(x).square().sum().backward()
        assert x.grad.shard_sizes == x.shard_sizes and x.grad.placements == x.placements


@on_ranks(2)
def test_a_plus_b():
    """Aligned, misaligned, and with a plain tensor."""
    a, b = numbers(8, 3), numbers(8, 3, seed=1)
    x = rows(a, (7, 1))
    for other in (rows(b, (7, 1)), rows(b, (2, 6)), b, shard(b, shared_mesh(2), [Partial()])):
        for left, right in ((x, other), (other, x)):
            torch.testing.assert_close((left + right).full_tensor(), a + b)
    with count_communication() as counted:
        x + rows(b, (7, 1))
        x + b
    assert counted.messages == 0 and not counted.collectives


def alone():
    mesh = shared_mesh((1, 2))
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    x = numbers(1, 2, 8, 6)
    assert_matches_unsharded(conv, x, mesh=mesh, placements=[Shard(2), Shard(3)], shard_sizes={0: (8,), 1: (5, 1)})
    assert_matches_unsharded(
        lambda t: t.flip(2, 3), x, mesh=mesh, placements=[Shard(2), Shard(3)], shard_sizes={1: (5, 1)}
    )


def test_a_domain_of_one_rank():
    """Nothing special: convolution and flip on a mesh dim of size 1."""
    run_distributed(alone, 2)


@on_ranks(2)
def test_from_local_with_given_sizes_does_not_communicate():
    """Sizes that are known need not be asked for at every call."""
    local = torch.ones((7, 1)[dist.get_rank()], 3)
    with count_communication() as counted:
        x = ShardTensor.from_local(local, shared_mesh(2), [Shard(0)], shard_sizes={0: (7, 1)})
    assert x.shape == (8, 3)
    assert counted.messages == 0 and not counted.collectives


@on_ranks(2)
def test_requires_grad_is_not_a_no_op():
    """The method and the setter make leaves that collect gradients."""
    x = rows(numbers(8, 3), (7, 1))
    assert not x.requires_grad
    assert x.requires_grad_() is x and x.requires_grad and x.is_leaf
    (x * 2).sum().backward()
    assert x.grad is not None
    y = x.detach()
    assert not y.requires_grad
    y.requires_grad = True
    assert y.is_leaf and (y * 1).requires_grad and not (y * 1).is_leaf


# -- numerics, attention inputs, saving, position embeddings -----------------------------------------------------------

# The largest error against float64 on one device, as a multiple of what one device itself has in that dtype.
NO_WORSE_THAN = 3.0


def precision(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1))
    exact = copy.deepcopy(model).double()
    whole = numbers(1, 2, 16, 8)
    sharded = rows(whole.to(dtype), (11, 5), dim=2)
    with torch.no_grad():
        expected = exact(whole)
        own = (model.to(dtype)(whole.to(dtype)).double() - expected).abs().max()
        ours = (model(sharded).full_tensor().double() - expected).abs().max()
        assert ours <= NO_WORSE_THAN * own
        expected = whole.softmax(2)
        own = (whole.to(dtype).softmax(2).double() - expected).abs().max()
        ours = (sharded.softmax(2).full_tensor().double() - expected).abs().max()
        assert ours <= NO_WORSE_THAN * own
        own = abs(whole.to(dtype).mean().item() - whole.mean().item())
        assert abs(sharded.mean().item() - whole.mean().item()) <= max(NO_WORSE_THAN * own, torch.finfo(dtype).eps)


def test_lower_precision_loses_no_more_than_on_one_device():
    """float32, bfloat16 and float16 against float64: a stated multiple of one device's own error."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        run_distributed(precision, 2, dtype)


# The largest error of neighborhood attention and its gradients, against float64 on one device; see docs/attention.md.
NEIGHBORHOOD = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def neighborhoods():
    import natten

    attend = {1: natten.na1d, 2: natten.na2d, 3: natten.na3d}
    for n, shape in ((1, (8,)), (2, (8, 6)), (3, (8, 4, 5))):
        for kernel, dilation in ((3, 1), (4, 1), (2, 2)):
            problem = Problem(shape, (kernel,) * n, (1,) * n, (dilation,) * n, (False,) * n)
            whole = [t.requires_grad_() for t in problem.tensors()]
            expected = dense_attention(*whole, **problem.arguments)
            grad = numbers(*expected.shape)
            expected = [expected, *torch.autograd.grad(expected, whole, grad)]
            for dtype, tolerance in NEIGHBORHOOD.items():
                for sizes in UNEVEN:
                    shards = [rows(t.detach().to(dtype), sizes, dim=1, requires_grad=True) for t in whole]
                    y = attend[n](*shards, kernel_size=kernel, dilation=dilation)
                    ours = [y, *torch.autograd.grad(y, shards, rows(grad.to(dtype), sizes, dim=1))]
                    for a, b in zip(expected, ours):
                        assert (b.full_tensor().double() - a).abs().max() <= tolerance * a.abs().max()


def test_neighborhood_attention():
    """natten's functions in one, two and three dims, odd and even windows, dilated, to a stated error per dtype."""
    pytest.importorskip("natten")
    run_distributed(neighborhoods, 2)
    text = (ROOT / "docs" / "attention.md").read_text()
    for dtype, tolerance in NEIGHBORHOOD.items():
        assert f"{str(dtype).removeprefix('torch.')} {tolerance:.0e}".replace("e-0", "e-") in text


@on_ranks(2)
def test_models_save_full_parameters_and_restore_their_sharding():
    """A model whose convolution is plain and whose embedding is sharded.

    The full state dict is that of one device; loading it keeps placements and sizes.
    """
    torch.manual_seed(0)
    mesh = shared_mesh(2)
    plain = nn.ParameterDict({"table": nn.Parameter(numbers(1, 8, 3)), "weight": nn.Parameter(numbers(3, 3))})
    sharded = nn.ParameterDict(
        {"table": nn.Parameter(shard(numbers(1, 8, 3), mesh, [Shard(1)], {0: (5, 3)})), "weight": plain["weight"]}
    )
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert type(full[name]) is torch.Tensor
        torch.testing.assert_close(full[name], value, rtol=0, atol=0)
    # and back into the placements and sizes that the model has
    doubled = {name: 2 * value for name, value in full.items()}
    set_model_state_dict(sharded, doubled, options=StateDictOptions(full_state_dict=True))
    assert sharded["table"].shard_sizes == {0: (5, 3)} and sharded["table"].placements == (Shard(1),)
    torch.testing.assert_close(sharded["table"].full_tensor(), 2 * numbers(1, 8, 3), rtol=0, atol=0)
    # a checkpoint of shards keeps the cut
    kept = io.BytesIO()
    torch.save(sharded.state_dict(), kept)
    kept.seek(0)
    again = torch.load(kept, weights_only=False)["table"]
    assert again.shard_sizes == {0: (5, 3)}
    torch.testing.assert_close(again.full_tensor(), 2 * numbers(1, 8, 3), rtol=0, atol=0)


class Embedded(nn.Module):
    """A parameter with a shape that follows the data."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x + self.table).square()


@on_ranks(2)
def test_sharded_position_embeddings_train():
    """Cut like the data, next to plain weights."""
    torch.manual_seed(0)
    whole, table = numbers(2, 8, 3), numbers(1, 8, 3, seed=1)
    one = Embedded(table.clone()).double()
    many = copy.deepcopy(one)
    many.table = nn.Parameter(shard(table, shared_mesh(2), [Shard(1)], {0: (7, 1)}))
    for model, x in ((one, whole), (many, rows(whole, (7, 1), dim=1))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    assert many.table.shard_sizes == {0: (7, 1)}
    torch.testing.assert_close(many.table.full_tensor(), one.table, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(many.linear.weight, one.linear.weight, rtol=1e-9, atol=1e-12)


# -- Partials, losses, reshapes, DTensors, batches ---------------------------------------------------------------------


def resolved():
    x = rows(numbers(8, 6), (5, 3), requires_grad=True)

    def sent(function):
        with count_communication() as counted:
            result = function()
        return counted.bytes_sent + counted.collective_bytes, sum(counted.collectives.values()), result

    nbytes, collectives, mean = sent(lambda: x.mean(0))
    assert (nbytes, collectives) == (0, 0) and mean.placements == (Partial(),)  # no gathering of the input
    for function in (lambda: mean * 2, lambda: -mean, lambda: mean + mean, lambda: mean.view(2, 3), lambda: mean.sum()):
        nbytes, collectives, result = sent(function)
        assert (nbytes, collectives) == (0, 0) and result.placements == (Partial(),)
    for function in (lambda: mean.exp(), lambda: mean + 1, lambda: mean > 0, lambda: F.linear(mean, numbers(2, 6))):
        nbytes, collectives, result = sent(function)
        if result.placements != (Partial(),):  # a linear layer may leave it
            assert (nbytes, collectives) == (6 * 8, 1)
    nbytes, collectives, result = sent(lambda: x * mean)
    assert (nbytes, collectives) == (6 * 8, 1) and result.placements == (Shard(0),)
    nbytes, collectives, value = sent(lambda: mean.sum().item())
    assert (nbytes, collectives) == (32, 1)  # with what the ranks compare
    assert abs(value - numbers(8, 6).mean(0).sum().item()) < 1e-12


def test_when_a_partial_is_resolved():
    """As the page on how it works tells in its table, counted."""
    run_distributed(resolved, 2)
    assert "## When a Partial is resolved" in (ROOT / "docs" / "how-it-works.md").read_text()


@on_ranks(2)
def test_segmentation_losses():
    """Cross entropy per pixel, on shards of the image, in every reduction, with weights and ignored pixels."""
    torch.manual_seed(0)
    head = nn.Conv2d(2, 4, 1).double()
    target = torch.randint(0, 4, (1, 8, 5), generator=seeded(3))
    target[0, 7, :] = 255
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)
    for sizes in UNEVEN:
        for reduction in ("mean", "sum", "none"):
            for w in (None, weight):
                for label in (target, rows(target, sizes, dim=1)):
                    x = rows(numbers(1, 2, 8, 5), sizes, dim=2, requires_grad=True)
                    plain = numbers(1, 2, 8, 5).requires_grad_()
                    head.zero_grad()
                    loss = F.cross_entropy(head(x), label, w, ignore_index=255, reduction=reduction)
                    loss.sum().backward()
                    grad = head.weight.grad.clone()
                    head.zero_grad()
                    expected = F.cross_entropy(head(plain), target, w, ignore_index=255, reduction=reduction)
                    expected.sum().backward()
                    torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-10, atol=1e-12)
                    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=1e-10, atol=1e-12)
                    torch.testing.assert_close(grad, head.weight.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_reshape_forward_and_backward():
    """Also by keyword."""
    for function in (
        lambda x: x.reshape(2, 8, 2, 3).transpose(2, 3).reshape(2, 8, 6),
        lambda x: x.view(size=(2, 8, 6)) * 2,
        lambda x: torch.reshape(input=x, shape=(2, 8, -1)).flatten(start_dim=2),
        lambda x: x.unflatten(-1, (2, 3)).movedim(1, 2).flatten(0, 0),
    ):
        for sizes in UNEVEN:
            assert_matches_unsharded(
                function, numbers(2, 8, 6), mesh_shape=2, placements=[Shard(1)], shard_sizes={0: sizes}
            )


@on_ranks(2)
def test_gradients_flow_between_dtensors_and_shardtensors():
    """In one expression, to both."""
    from torch.distributed.tensor import distribute_tensor

    mesh = shared_mesh(2)
    a, b = numbers(8, 3), numbers(3, 3, seed=1)
    x = rows(a, (5, 3), requires_grad=True)
    d = distribute_tensor(b, mesh, [Replicate()]).requires_grad_()
    e = distribute_tensor(a, mesh, [Shard(0)]).requires_grad_()
    result = ((x @ d + e) * x).sum()
    assert type(result) is ShardTensor
    result.backward()
    pa, pb, pe = a.clone().requires_grad_(), b.clone().requires_grad_(), a.clone().requires_grad_()
    expected = ((pa @ pb + pe) * pa).sum()
    expected.backward()
    torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-10, atol=1e-12)
    for ours, one in ((x, pa), (d, pb), (e, pe)):
        torch.testing.assert_close(ours.grad.full_tensor(), one.grad, rtol=1e-10, atol=1e-12)
    assert x.grad.shard_sizes == {0: (5, 3)}
    # and through the conversion
    e.grad = None
    ShardTensor.from_dtensor(e).square().sum().backward()
    torch.testing.assert_close(e.grad.full_tensor(), 2 * a, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_batches_of_more_than_one():
    """Linear and convolutional layers on a batch within each domain."""
    torch.manual_seed(0)
    for batch in (1, 2, 3):
        for sizes in UNEVEN:
            options = {"mesh_shape": 2, "shard_sizes": {0: sizes}}
            conv, linear = nn.Conv2d(2, 3, 3, padding=1).double(), nn.Linear(6, 4).double()
            assert_matches_unsharded(conv, numbers(batch, 2, 8, 5), placements=[Shard(2)], **options)
            assert_matches_unsharded(linear, numbers(batch, 8, 6), placements=[Shard(1)], **options)


# -- with other kinds of parallelism -----------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Convolutions, a pooling, and linear layers that every rank of a domain would compute alike."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.ModuleList([nn.Linear(4, 12), nn.Linear(12, 4), nn.Linear(4, 3)])

    def forward(self, x):
        x = self.pool(F.gelu(self.conv(x))).flatten(1)
        return self.fc[2](x + self.fc[1](F.gelu(self.fc[0](x))))


def pooled():
    torch.manual_seed(0)
    return Pooled().double(), numbers(2, 2, 13, 6)


def same_gradients(model, x, whole):
    """Those of one process with the whole batch; with FSDP each rank has the mean over its own half."""
    alone = pooled()[0]
    loss = model(x).square().mean()
    loss.backward()
    alone(whole).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-10, atol=1e-12, msg=f"{name}: {{}}".format)


@on_ranks(2)
def test_the_fc_after_a_pooling_is_parallelized():
    """torch's own plan, over the ranks of the domain: each does half of what all would do alike."""
    model, x = pooled()
    plan = {"fc.0": ColwiseParallel(use_local_output=False), "fc.1": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, shared_mesh(2), plan)
    assert model.fc[0].weight.to_local().shape == (6, 4) and model.fc[1].weight.to_local().shape == (4, 6)
    same_gradients(model, rows(x, (9, 4), dim=2), x)


@on_ranks(4)
def test_many_linear_layers_are_handled_by_one_plan():
    """By patterns of their names; a layer whose input comes cut in another way than it wants gets it right."""
    mesh = shared_mesh((2, 2), ("domain", "tp"))
    model, x = pooled()
    done = tensor_parallel(model, mesh, {"fc.[01]": "colwise", "fc.2": "rowwise"})
    assert done == {"fc.0": "colwise", "fc.1": "colwise", "fc.2": "rowwise"}
    same_gradients(model, shard(x, mesh, [Shard(2), Replicate()], {0: (9, 4)}), x)


@on_ranks(4)
def test_weights_are_left_to_fsdp():
    """FSDP2 over the data axis and over both, and FSDP1: they need know nothing of the domain."""
    mesh = shared_mesh((2, 2), ("data", "domain"))
    i = mesh["data"].get_local_rank()
    for wrap in (
        lambda m: fully_shard(m, mesh=mesh["data"]),
        lambda m: fully_shard(m, mesh=mesh),
        lambda m: FullyShardedDataParallel(m, device_mesh=mesh["data"], device_id=torch.get_default_device()),
    ):
        model, x = pooled()
        optimizer = torch.optim.SGD((wrapped := wrap(model)).parameters(), lr=1.0)
        wrapped(shard(x[i : i + 1], mesh["domain"], [Shard(2)], {0: (9, 4)})).square().mean().backward()
        optimizer.step()
        alone, _ = pooled()
        alone(x).square().mean().backward()
        summon = isinstance(wrapped, FullyShardedDataParallel)
        with FullyShardedDataParallel.summon_full_params(wrapped) if summon else nullcontext():
            for p, q in zip(wrapped.parameters(), alone.parameters()):
                p = p.full_tensor() if isinstance(p, DTensor) else p
                torch.testing.assert_close(p, (q - q.grad).view_as(p), rtol=1e-10, atol=1e-12)


def three_axes(shape):
    mesh = shared_mesh(shape, ("dp", "domain", "tp"))
    model, x = pooled()
    done = parallelize(model, mesh, tensor="tp", plan={"fc.0": "colwise", "fc.1": "rowwise"})
    mine = x.chunk(shape[0])[mesh["dp"].get_local_rank()]
    sizes = {0: (9, 4)} if shape[1] == 2 else None
    same_gradients(model, shard(mine, done.inputs, [Shard(2), Replicate()], sizes), x)


def test_data_domain_and_tensor_parallel_on_one_mesh():
    """Two ranks along each two of the axes; along all three at once in test_parallel.py, which takes eight."""
    for shape in ((1, 2, 2), (2, 2, 1), (2, 1, 2)):
        run_distributed(three_axes, 4, shape)


def equal_weights():
    mesh = shared_mesh((2, 2), ("data", "domain"))
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    model[1].running_mean.normal_()
    fully_shard(model, mesh=mesh["data"])  # which leaves ranks of a domain with weights of their own
    with pytest.raises(RuntimeError, match=r"0\.weight.*1\.running_mean"):
        check(model, mesh=mesh["domain"])
    synchronize(model, mesh["domain"])
    check(model, mesh=mesh["domain"])
    return [p.full_tensor().detach() for p in model.parameters()]


def test_weights_and_buffers_are_made_equal_along_the_domain():
    """Neither DDP nor FSDP does it; whatever the seeds, and differences are named."""
    results = run_distributed(equal_weights, 4)
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[2], results[3]))


@pytest.mark.slow
def test_the_example_with_fsdp_passes_its_check():
    """A program with FSDP2 and a domain, told of in the docs; random pixels in place of the globe's data."""
    example = ROOT / "examples" / "fsdp_domain.py"
    assert example.name in (ROOT / "docs" / "parallel.md").read_text()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(example)]
    options = ["--check", "--noise", "--resolution", "37", "--steps", "4", "--width", "4", "--dtype", "float64"]
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0 and "PASS: largest" in result.stdout, result.stdout + result.stderr
