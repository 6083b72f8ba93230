"""Domain parallelism composed with DDP, FSDP1, FSDP2 and tensor parallel: the weights of one process.

Every test trains the same small network, whose input is cut unevenly along the domain axis, and compares all weights
with plain PyTorch on the whole batch in one process, in float64. They must also be bitwise equal on all ranks.
"""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardtensor import ShardTensor, UnsupportedSharding, debug
from shardtensor.communication import redistribute
from shardtensor.ops.convolution import halo_conv
from shardtensor.parallel import contribute_gradients, parallelize, synchronize, tensor_parallel
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

needs_spmd = pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="FSDP2 has no dp_mesh_dims yet")
both_ways = pytest.mark.parametrize("spmd", [False, pytest.param(True, marks=needs_spmd)], ids=["plain", "spmd"])
AXES = ("dp", "domain")
HEIGHT = 16
CUTS = {1: (16,), 2: (11, 5), 4: (7, 1, 0, 8)}
BATCH_CUTS = {1: (4,), 2: (3, 1), 4: (2, 0, 1, 1)}


class Network(nn.Module):
    """Weights of a layer on shards, of another after a pooling (every rank does the same work), and used bare."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.step = nn.Parameter(torch.rand(1))
        self.head = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))

    def features(self, x):
        return F.gelu(self.norm(self.first(x)))

    def forward(self, x):
        x = self.second(self.features(x)) * self.scale * F.softplus(self.step)
        return self.head(x.mean((2, 3)))


class Checkpointed(Network):
    def features(self, x):
        return checkpoint(super().features, x, use_reentrant=False)


class Tied(Network):
    """Weights used twice, on shards and on what every rank has whole, and by no operator of DTensor's own."""

    def forward(self, x):
        pooled = self.features(x).mean((2, 3), keepdim=True)
        return self.head((self.second(self.features(x)) * self.scale + self.second(pooled) * self.scale).mean((2, 3)))


@functools.cache
def problem(kind=Network):
    torch.manual_seed(0)
    model = kind().double()
    return model, torch.randn(4, 2, HEIGHT, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.5, **options)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def inputs(mesh, spmd, tensor=False):
    """What this rank holds of the whole batch, and the targets that its loss needs."""
    _, x, y = problem()
    replicated, at = ([Replicate()], mesh["domain", "tp"]) if tensor else ([], mesh["domain"])
    cut = CUTS[mesh["domain"].size()]
    if spmd:
        sizes = {0: BATCH_CUTS[mesh["dp"].size()], 1: cut}
        return shard(x, mesh, [Shard(0), Shard(2), *replicated], sizes), y
    n, i = 4 // mesh["dp"].size(), mesh["dp"].get_local_rank()
    mine = slice(n * i, n * i + n)
    return shard(x[mine], at, [Shard(2), *replicated], {0: cut}), y[mine]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_weights(model):
    if isinstance(model, FullyShardedDataParallel):
        with warnings.catch_warnings(), FullyShardedDataParallel.summon_full_params(model):
            return {n: whole(p).detach().clone() for n, p in model.named_parameters()}
    return {n.removeprefix("module."): whole(p).detach() for n, p in model.named_parameters()}


def train_alone(kind=Network, optimizer=sgd, steps=2, max_norm=None):
    model, x, y = copy.deepcopy(problem(kind)[0]), *problem()[1:]
    opt, norms = optimizer(model), []
    for _ in range(steps):
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        opt.step()
    return dict(model.named_parameters()), norms


def train(model, x, y, optimizer=sgd, steps=2):
    opt = optimizer(model)
    for _ in range(steps):
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()


def check(model, expected, rtol=1e-10):
    """Compare with one process's weights, and bitwise with those of the other ranks."""
    found = {n.replace("_fsdp_wrapped_module.", ""): w for n, w in full_weights(model).items()}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=rtol, atol=rtol / 100, msg=f"{name}: {{}}".format)
    equal_on_all_ranks(torch.cat([found[name].reshape(-1) for name in sorted(found)]))


def equal_on_all_ranks(value):
    each = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(each, value)
    assert all(torch.equal(value, other) for other in each)


# -- what wraps what ---------------------------------------------------------------------------------------------------


def fsdp1(model, mesh, strategy, use_orig_params=True, by_mesh=False):
    where = {"device_mesh": mesh} if mesh.ndim == 2 or by_mesh else {"process_group": mesh.get_group()}
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    return FullyShardedDataParallel(model, **where, device_id=torch.get_default_device(), **options)


def layers_then_all(model, mesh, **options):
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def replicated(model, mesh):
    from torch.distributed._composable.replicate import replicate

    return replicate(model, process_group=mesh["dp"].get_group())


def replicated_by_fsdp2(model, mesh):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(model, mesh=mesh["dp"])


def dtensors_in_fsdp1(model, mesh, use_orig_params):
    """FSDP1 looks for DTensors only where it is given a mesh."""
    return fsdp1(on_domain(model, mesh), mesh["dp"], ShardingStrategy.FULL_SHARD, use_orig_params, by_mesh=True)


def by_hand(hooks=True, **dims):
    """Weights and inputs on the whole mesh, FSDP2 told which axes to reduce over: as docs/train.md shows."""

    def wrap(model, mesh):
        distribute_module(model, mesh)
        if hooks:
            contribute_gradients(model)
        fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        return model

    return wrap


def helped(**options):
    def wrap(model, mesh):
        parallelize(model, mesh, **options)
        return model

    return wrap


def on_domain(model, mesh):
    return distribute_module(model, mesh["domain"])


PLAIN = {
    "DDP over dp": lambda m, mesh: DistributedDataParallel(m, process_group=mesh["dp"].get_group()),
    "DDP over dp's mesh": lambda m, mesh: DistributedDataParallel(m, device_mesh=mesh["dp"]),
    "DDP over all": lambda m, mesh: DistributedDataParallel(m),
    "replicate": replicated,
    "replicate, made of FSDP2": replicated_by_fsdp2,
    "FSDP2 over dp": lambda m, mesh: fully_shard(m, mesh=mesh["dp"]),
    "FSDP2 over dp, not resharded": lambda m, mesh: fully_shard(m, mesh=mesh["dp"], reshard_after_forward=False),
    "FSDP2 over dp, by layers": lambda m, mesh: layers_then_all(m, mesh["dp"]),
    "FSDP2 over dp x domain, replicated and sharded": lambda m, mesh: fully_shard(m, mesh=mesh),
    "FSDP1 over dp": lambda m, mesh: fsdp1(m, mesh["dp"], ShardingStrategy.FULL_SHARD),
    "FSDP1 over dp, flat parameters": lambda m, mesh: fsdp1(m, mesh["dp"], ShardingStrategy.FULL_SHARD, False),
    "FSDP1 over dp, gradients only": lambda m, mesh: fsdp1(m, mesh["dp"], ShardingStrategy.SHARD_GRAD_OP),
    "FSDP1 over all": lambda m, mesh: FullyShardedDataParallel(m, device_id=torch.get_default_device()),
    "FSDP1 hybrid": lambda m, mesh: fsdp1(m, mesh, ShardingStrategy.HYBRID_SHARD),
    "DTensors on domain, FSDP2 over dp": lambda m, mesh: fully_shard(on_domain(m, mesh), mesh=mesh["dp"]),
    "DTensors on domain, FSDP1 over dp": lambda m, mesh: dtensors_in_fsdp1(m, mesh, True),
    "DTensors on domain, FSDP1 over dp, flat parameters": lambda m, mesh: dtensors_in_fsdp1(m, mesh, False),
    "parallelize": helped(),
    "parallelize, units": helped(units=[nn.Conv2d, nn.Sequential], reshard_after_forward=False),
    "parallelize, sharded over all": helped(fsdp=AXES),
    "parallelize, sharded over all, not resharded": helped(fsdp=AXES, reshard_after_forward=False),
    "parallelize, sharded over domain": helped(fsdp=("domain",)),
}
SPMD = {
    "by hand, sharded over dp": by_hand(shard="dp"),
    "by hand, sharded over all": by_hand(shard=AXES),
    "by hand, without hooks": by_hand(hooks=False, shard=AXES),
    "by hand, replicated over dp": by_hand(shard="domain", replicate="dp"),
    "parallelize": helped(spmd=True),
    "parallelize, units": helped(spmd=True, units=[nn.Conv2d]),
    "parallelize, sharded over all": helped(spmd=True, fsdp=AXES),
    "parallelize, sharded over domain": helped(spmd=True, fsdp=("domain",)),
    "parallelize, copies": helped(spmd=True, fsdp=()),
}
QUICK = {
    "DDP over dp",
    "FSDP2 over dp",
    "FSDP2 over dp x domain, replicated and sharded",
    "FSDP1 over dp",
    "DTensors on domain, FSDP2 over dp",
    "by hand, sharded over all",
    "parallelize",
    "parallelize, sharded over all",
}


def wrapped_training(name, spmd, shape=(2, 2), kind=Network):
    mesh = shared_mesh(shape, AXES)
    model = (SPMD if spmd else PLAIN)[name](copy.deepcopy(problem(kind)[0]), mesh)
    train(model, *inputs(mesh, spmd))
    check(model, train_alone(kind)[0])


def names(table):
    return [n for n in table if n != "by hand, without hooks"]  # which this network needs


def cases(table):
    return [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in names(table)]


@pytest.mark.parametrize("name", cases(PLAIN))
def test_plain_weights_in_any_wrapper(name):
    run_distributed(wrapped_training, 4, name, False)


@needs_spmd
@pytest.mark.parametrize("name", cases(SPMD))
def test_dtensor_weights_on_the_whole_mesh(name):
    run_distributed(wrapped_training, 4, name, True)


@pytest.mark.parametrize(
    ("name", "spmd"),
    [
        ("FSDP2 over dp", False),
        ("DTensors on domain, FSDP2 over dp", False),
        pytest.param("by hand, without hooks", True, marks=needs_spmd),
    ],
)
def test_weights_used_on_shards_and_on_what_is_whole(name, spmd):
    run_distributed(wrapped_training, 4, name, spmd, (2, 2), Tied)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=["2x4", "4x2"])
@pytest.mark.parametrize(
    ("name", "spmd"),
    [*((n, False) for n in PLAIN), *(pytest.param(n, True, marks=needs_spmd) for n in names(SPMD))],
)
def test_eight_ranks_some_of_them_without_data(shape, name, spmd):
    run_distributed(wrapped_training, 8, name, spmd, shape)


@pytest.mark.parametrize("shape", [(1, 2), pytest.param((1, 4), marks=pytest.mark.slow)], ids=["1x2", "1x4"])
@both_ways
@on_ranks("shape", timeout=300)
def test_a_data_axis_of_one_rank(spmd, shape):
    taken = [n for n in names(SPMD if spmd else PLAIN) if not n.startswith("DTensors on domain, FSDP1")]
    for name in taken:
        wrapped_training(name, spmd, shape)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FSDP2", "FSDP1"])
@on_ranks(8)
def test_hybrid_sharding_besides_a_domain(kind):
    """Copies over one axis, shards over another, samples cut over a third."""
    mesh = shared_mesh((2, 2, 2), ("copies", "shards", "domain"))
    _, x, y = problem()
    model = copy.deepcopy(problem()[0])
    data = mesh["copies", "shards"]
    wrapped = fully_shard(model, mesh=data) if kind == "FSDP2" else fsdp1(model, data, ShardingStrategy.HYBRID_SHARD)
    i = 2 * mesh["copies"].get_local_rank() + mesh["shards"].get_local_rank()
    train(wrapped, shard(x[i : i + 1], mesh["domain"], [Shard(2)], {0: CUTS[2]}), y[i : i + 1])
    check(wrapped, train_alone()[0])


def dtensors_in(wrapper, shape):
    mesh = shared_mesh(shape, AXES)
    model = copy.deepcopy(problem()[0])
    model = model if "DTensors" in wrapper else on_domain(model, mesh)
    train(PLAIN[wrapper](model, mesh), *inputs(mesh, False), steps=1)


@pytest.mark.parametrize(
    ("wrapper", "shape", "text"),
    [
        ("FSDP1 over dp", (2, 2), ("resize_", "set_")),  # on CPUs and on devices
        ("DTensors on domain, FSDP1 over dp", (1, 2), "got mixed torch.Tensor and DTensor"),
        ("DDP over dp", (2, 2), "c10d.broadcast_"),
    ],
)
def test_wrappers_that_do_not_take_dtensor_weights(wrapper, shape, text):
    """Why docs/train.md says to keep weights plain for them; the errors are torch's own."""
    for error in run_expecting_errors(dtensors_in, shape[0] * shape[1], wrapper, shape):
        texts = (text,) if isinstance(text, str) else text
        assert isinstance(error, Exception) and any(text in str(error) for text in texts), error


@on_ranks(4)
def test_ddp_by_mesh_loses_dtensor_weights():
    """Why docs/train.md says to keep weights plain for DDP: torch's own way of handling them."""
    mesh = shared_mesh((2, 2), AXES)
    model = PLAIN["DDP over dp's mesh"](on_domain(copy.deepcopy(problem()[0]), mesh), mesh)
    model(inputs(mesh, False)[0])
    assert not list(model.parameters())


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@needs_spmd
@pytest.mark.parametrize("name", ["parallelize", "by hand, sharded over all"])
@on_ranks(4)
def test_batch_norm_on_the_whole_mesh_sees_the_whole_batch(name):
    """Running statistics included: plain buffers with parallelize, DTensors by hand."""
    mesh = shared_mesh((2, 2), AXES)
    model, alone = SPMD[name](copy.deepcopy(problem(Normed)[0]), mesh), copy.deepcopy(problem(Normed)[0])
    train(model, *inputs(mesh, True))
    train(alone, *problem()[1:])
    for (key, found), expected in zip(model.named_buffers(), alone.buffers()):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=f"{key}: {{}}".format)
    check(model, dict(alone.named_parameters()))


# -- training as usual -------------------------------------------------------------------------------------------------


@both_ways
@on_ranks(4)
def test_ten_steps_of_adamw_with_activation_checkpointing(spmd):
    """AdamW divides by the root of squared gradients, which enlarges differences in rounding: 1e-8."""
    mesh = shared_mesh((2, 2), AXES)
    model = copy.deepcopy(problem(Checkpointed)[0])
    parallelize(model, mesh, spmd=spmd, units=[nn.Conv2d])
    train(model, *inputs(mesh, spmd), optimizer=adamw, steps=10)
    check(model, train_alone(optimizer=adamw, steps=10)[0], rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "spmd"),
    [
        ("DDP over dp", False),
        ("FSDP2 over dp", False),
        pytest.param("by hand, sharded over all", True, marks=needs_spmd),
    ],
)
@on_ranks(4)
def test_gradients_are_clipped_by_their_exact_norm(name, spmd):
    mesh = shared_mesh((2, 2), AXES)
    model = (SPMD if spmd else PLAIN)[name](copy.deepcopy(problem()[0]), mesh)
    (x, y), opt = inputs(mesh, spmd), sgd(model)
    expected, norms = train_alone(max_norm=0.05)
    for norm in norms:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, norm, rtol=1e-10, atol=0)
        opt.step()
    check(model, expected)


@pytest.mark.parametrize("how", ["DDP", "FSDP2", pytest.param("spmd", marks=needs_spmd)])
@on_ranks(4)
def test_gradients_accumulate_over_micro_batches(how):
    """Two micro-batches of two (SPMD: one and one); only the second is followed by communication between dp ranks."""
    spmd = how == "spmd"
    mesh = shared_mesh((2, 2), AXES)
    model = copy.deepcopy(problem()[0])
    if how == "DDP":
        model = PLAIN["DDP over dp"](model, mesh)
    else:
        parallelize(model, mesh, spmd=spmd)
    opt, (_, x, y) = sgd(model), problem()
    for _ in range(2):
        opt.zero_grad()
        for step in range(2):
            i, last = mesh["dp"].get_local_rank(), step == 1
            rows = [2 * step, 2 * step + 1] if spmd else [2 * step + i]
            if spmd:
                part = shard(x[rows], mesh, [Shard(0), Shard(2)], {0: (1, 1), 1: CUTS[2]})
            else:
                part = shard(x[rows], mesh["domain"], [Shard(2)], {0: CUTS[2]})
            if how == "DDP" and not last:
                with model.no_sync():
                    (F.mse_loss(model(part), y[rows]) / 2).backward()
                continue
            if how != "DDP":
                model.set_requires_gradient_sync(last)
            (F.mse_loss(model(part), y[rows]) / 2).backward()
        opt.step()
    check(model, train_alone()[0])


@both_ways
@on_ranks(4)
def test_mixed_precision(spmd):
    """bfloat16 in the layers, float32 weights; compared with the same in one process, loosely."""
    mesh = shared_mesh((2, 2), AXES)
    model = copy.deepcopy(problem()[0]).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelize(model, mesh, spmd=spmd, mp_policy=policy)
    x, y = inputs(mesh, spmd)
    out = model(x.float())
    assert out.dtype == torch.bfloat16
    F.mse_loss(out.float(), y.float()).backward()
    alone = copy.deepcopy(problem()[0]).float()
    F.mse_loss(alone(problem()[1].float()), problem()[2].float()).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        assert p.grad.dtype == torch.float32, name
        grad = p.grad.full_tensor()
        assert (grad - q.grad).norm() < 0.05 * q.grad.norm() + 1e-3, name


# -- what is sent ------------------------------------------------------------------------------------------------------


@needs_spmd
@pytest.mark.parametrize(
    ("expected", "options"),
    [
        ({"all_reduce": 2, "reduce_scatter": 1}, {}),  # over the domain, for each layer; FSDP2 over dp
        ({"reduce_scatter": 1, "all_reduce": 1}, {"spmd": True}),  # FSDP2 over dp, then over the domain
        ({"reduce_scatter": 1}, {"spmd": True, "fsdp": AXES}),  # FSDP2 over both at once
    ],
    ids=["plain", "spmd", "spmd, sharded over all"],
)
@on_ranks(4)
def test_reductions_of_weight_gradients(expected, options):
    mesh = shared_mesh((2, 2), AXES)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1)).double()
    parallelize(model, mesh, **options)
    x, _ = inputs(mesh, options.get("spmd", False))
    loss = model(x).square().mean()
    with count_communication() as counts:
        loss.backward()
    # The loss is a number per rank, and no one asks for it. One halo goes back: the input needs no gradient.
    assert counts.collectives == {"all_to_all": 1, **expected}, counts.collectives


def recorded(events, name, function):
    def call(*args, **kwargs):
        events.append(name(*args) if callable(name) else name)
        return function(*args, **kwargs)

    return call


class Work:
    def __init__(self, events, work):
        self.wait = recorded(events, "sum done", work.wait)


def convolutions_kernel(*arguments):
    need_x, need_w, _ = arguments[-1]
    return "both" if need_x and need_w else "input's gradient" if need_x else "weight's gradient"


def product(a, b):
    return "input's gradient" if b.shape == (4, 6) else "weight's gradient"


@pytest.mark.parametrize("kind", ["convolution", "linear"])
@on_ranks(2)
def test_weight_gradients_are_summed_while_the_inputs_is_computed(kind):
    """Of the reduction and the kernels, in one backward pass."""
    mesh, events = shared_mesh(2), []
    layer = (nn.Conv2d(2, 4, 3, padding=1) if kind == "convolution" else nn.Linear(6, 4)).double()
    for parameter in layer.parameters():  # so that each layer sums for itself
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    x = shard(problem()[1], mesh, [Shard(2)], {0: CUTS[2]}, requires_grad=True)
    y = layer(x).square().sum()
    with pytest.MonkeyPatch.context() as patch:
        reduce = recorded(events, "sum started", redistribute.c10d_all_reduce_coalesced)
        patch.setattr(redistribute, "c10d_all_reduce_coalesced", lambda *args: Work(events, reduce(*args)))
        kernel = recorded(events, convolutions_kernel, halo_conv.convolution_backward)
        patch.setattr(halo_conv, "convolution_backward", kernel)
        patch.setattr(torch, "mm", recorded(events, product, torch.mm))
        y.backward()
    assert events == ["weight's gradient", "sum started", "input's gradient", "sum done"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["float64", "complex128"])
@on_ranks(2)
def test_second_derivatives_of_linear_layers(dtype):
    """Of squared gradients of input, weight and bias, which go through the sum twice."""
    torch.manual_seed(0)
    whole = torch.randn(2, HEIGHT, 6, dtype=dtype)
    weight, bias = torch.randn(5, 6, dtype=dtype), torch.randn(5, dtype=dtype)

    def twice(x):
        operands = [x, weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = F.linear(*operands)
        loss = (y * y * y.conj()).real.sum()
        penalty = sum((g * g.conj()).real.sum() for g in torch.autograd.grad(loss, operands, create_graph=True))
        grads = torch.autograd.grad(penalty, operands)
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]

    cut = shard(whole, shared_mesh(2), [Shard(1)], {0: CUTS[2]}, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # autograd warns of collectives that it cannot differentiate
        found = twice(cut)
    for ours, expected in zip(found, twice(whole.requires_grad_())):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())


# -- equal weights -----------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("flags", torch.rand(5) > 0.5)


def different_seeds():
    mesh = shared_mesh((2, 2), AXES)
    torch.manual_seed(dist.get_rank())
    model = Buffered()
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked += dist.get_rank()
    for axis in ("dp", "domain"):
        with pytest.raises(RuntimeError, match=r"conv.weight is .*: conv.bias; flags; norm.running_mean; norm.num_b"):
            debug.check(model, mesh=mesh[axis])
    first = torch.tensor([p.double().sum() for p in model.state_dict().values()])
    synchronize(model, mesh["domain"])
    debug.check(model, mesh=mesh["domain"])
    with pytest.raises(RuntimeError, match=r"for weights shardtensor.parallel.synchronize\(model, mesh\)"):
        debug.check(model, mesh=mesh["dp"])
    here = torch.tensor([p.double().sum() for p in model.state_dict().values()])
    assert torch.equal(here, first) == (mesh["domain"].get_local_rank() == 0)
    synchronize(model, mesh)
    debug.check(model, mesh=mesh)
    with torch.no_grad():
        model.norm.running_var[1] += dist.get_rank() == 3
    with pytest.raises(RuntimeError, match=r": norm.running_var is \(3,\) with the digest \w+ on rank 1, .* on rank 3"):
        debug.check(model, mesh=mesh)


SENT = (torch.int16, torch.uint16, torch.uint32, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn)


@on_ranks(2)
def test_synchronize_buffers_of_every_dtype():
    """Backends send few dtypes, and none of them tensors in any order of memory."""
    mesh = shared_mesh(2)
    torch.manual_seed(dist.get_rank())
    model, twin = nn.Module(), nn.Module()
    for i, dtype in enumerate(SENT):
        made = (torch.rand(3, 5) * 9).to(dtype)
        model.register_buffer(f"buffer{i}", made)
        twin.register_buffer(f"buffer{i}", made.clone())
    model.register_buffer("number", torch.tensor(dist.get_rank(), dtype=torch.int16))
    model.register_buffer("conjugate", torch.randn(4, dtype=torch.complex64).conj())
    model.register_buffer("image", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    model.register_buffer("part", torch.randn(4, 6)[:, ::2])
    model.register_buffer("nothing", torch.empty(0, 3, dtype=torch.int16))
    with pytest.raises(RuntimeError, match=r"buffer0 is .* 9 more: buffer1; .*; number; conjugate; \.\.\."):
        debug.check(model, mesh=mesh)
    held = [(t.stride(), t.data_ptr()) for t in model.buffers()]
    synchronize(model, mesh)
    debug.check(model, mesh=mesh)
    assert [(t.stride(), t.data_ptr()) for t in model.buffers()] == held
    if dist.get_rank() == 0:
        for name, t in twin.named_buffers():
            assert torch.equal(t.view(torch.uint8), model.get_buffer(name).view(torch.uint8))


def one_rank_decides():
    mesh = shared_mesh((2, 2), AXES)
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 2)
    mine = model.weight.detach().clone()
    synchronize(model, mesh, source=2)
    debug.check(model, mesh=mesh)
    assert torch.equal(mine, model.weight) == (dist.get_rank() == 2)
    with pytest.raises(ValueError, match=r"source=5 is not in the mesh \[\d, \d\]; name a global rank of the mesh"):
        synchronize(model, mesh["dp"], source=5)


def different_models(what):
    mesh, last = shared_mesh(3), dist.get_rank() == 2
    layers = [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]
    if last and what == "number":
        layers.append(nn.Linear(2, 2))
    if last and what == "order":
        layers.reverse()
    model = nn.Sequential(*layers)
    if last and what == "dtype":
        model[1].double()
    if last and what == "shape":
        model[1] = nn.Linear(3, 2, bias=False)
    if last and what == "device":
        model[1].to("meta")
    if what == "source":
        synchronize(model, mesh, source=1 if last else 0)
    with pytest.raises(ValueError, match="do not agree on the values"):
        debug.check(model, mesh=mesh)
    with pytest.raises(ValueError, match="do not agree on the model's parameters and buffers"):
        synchronize(model, mesh)
    synchronize(model, mesh)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("number", "nothing on ranks 0, 1, 2.weight ((2, 2), torch.float32, cpu) on rank 2"),
        ("order", "0.bias ((2,), torch.float32, cpu) on ranks 0, 1, 1.weight ((2, 2), torch.float32, cpu) on"),
        ("dtype", "1.weight ((2, 2), torch.float32, cpu) on ranks 0, 1, 1.weight ((2, 2), torch.float64, cpu) on"),
        ("shape", "1.weight ((2, 2), torch.float32, cpu) on ranks 0, 1, 1.weight ((2, 3), torch.float32, cpu) on"),
        ("device", "1.weight ((2, 2), torch.float32, cpu) on ranks 0, 1, 1.weight ((2, 2), torch.float32, meta) on"),
        ("source", "source=0 on ranks 0, 1, source=1 on rank 2"),
    ],
)
def test_models_that_differ_are_shown_before_weights_are_sent(what, text, device_of_ranks):
    text = text if device_of_ranks == "cpu" else text.replace("cpu", "cuda")
    for error in run_expecting_errors(different_models, 3, what):
        assert isinstance(error, ValueError) and text in str(error), error


def test_synchronize_and_check():
    run_distributed(one_rank_decides, 4)
    run_distributed(different_seeds, 4)


@on_ranks(4)
def test_synchronize_after_wrapping():
    """Shards of FSDP2 differ along dp, rightly, and must be equal along domain."""
    mesh = shared_mesh((2, 2), AXES)
    torch.manual_seed(dist.get_rank())
    model = fully_shard(Network(), mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"first.weight"):
        debug.check(model, mesh=mesh["domain"])
    synchronize(model, mesh)
    debug.check(model, mesh=mesh)
    whole = [p.full_tensor() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"0.weight is on the meta device"):
        synchronize(nn.Sequential(nn.Linear(2, 2, device="meta")), mesh)
    equal_on_all_ranks(torch.cat([w.reshape(-1) for w in whole]).detach())


# -- weights that are cut ----------------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """A position embedding as large as the sample."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(2, HEIGHT, 1))
        self.net = Network()

    def forward(self, x):
        return self.net(x + self.position)


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "FSDP2"])
@on_ranks(4)
def test_position_embeddings_may_be_cut_along_the_domain(wrapped):
    mesh = shared_mesh((2, 2), AXES)
    model, x, y = copy.deepcopy(problem(Embedded)[0]), *problem()[1:]
    model.position = nn.Parameter(distribute_tensor(model.position.detach(), mesh["domain"], [Shard(1)]))
    if wrapped:
        fully_shard(model, mesh=mesh["dp"])
        train(model, *inputs(mesh, False))
    else:
        # torch updates no list with plain weights and DTensors in it, which is its default on GPUs.
        sgd_one_by_one = functools.partial(sgd, foreach=False)
        train(model, shard(x, mesh["domain"], [Shard(2)], {0: CUTS[2]}), y, sgd_one_by_one)
        assert model.position.placements == (Shard(1),)
    check(model, train_alone(Embedded)[0])


HEAD = {"head.0": "colwise", "head.2": "rowwise"}


@on_ranks(4)
def test_layers_after_a_pooling_can_be_cut_over_the_domain():
    """All ranks of a domain would do the same after the pooling; cut, each does its part."""
    mesh = shared_mesh((2, 2), AXES)
    model = copy.deepcopy(problem()[0])
    plan = {"head.0": ColwiseParallel(use_local_output=False), "head.2": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh["domain"], plan)
    fully_shard(model, mesh=mesh["dp"])
    train(model, *inputs(mesh, False))
    check(model, train_alone()[0])


@on_ranks(4)
def test_tensor_parallel_inside_a_domain():
    """Both layers cut: all that is sent is the sum of the second one's results, when its bias is added."""
    mesh = shared_mesh((2, 2), ("domain", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)).double()
    whole, x = copy.deepcopy(model), torch.randn(2, HEIGHT, 6, dtype=torch.float64)
    assert tensor_parallel(model, mesh, {"1": "colwise", "3": "rowwise"}) == {"1": "colwise", "3": "rowwise"}
    sharded = shard(x, mesh, [Shard(1), Replicate()], {0: CUTS[2]}, requires_grad=True)
    with count_communication() as counts:
        hidden = model[:3](sharded)
        y = model[3](hidden)
    assert hidden.placements == (Shard(1), Shard(2)) and y.placements == (Shard(1), Replicate())
    assert counts.collectives == {"all_reduce": 1} and counts.collective_bytes == y.to_local().nbytes
    (y + sharded).square().mean().backward()
    x.requires_grad_()
    (whole(x) + x).square().mean().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), x.grad, rtol=1e-10, atol=1e-12)
    for p, q in zip(model.parameters(), whole.parameters()):
        grad = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-10, atol=1e-12)


def natural_spelling(how):
    mesh = shared_mesh((2, 2), ("domain", "tp"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).double()
    x = shard(torch.rand(2, HEIGHT, 6, dtype=torch.float64), mesh["domain"], [Shard(1)], {0: CUTS[2]})
    if how == "layer":
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model(x)
    elif how == "convolution":
        weight = distribute_tensor(torch.rand(3, 2, 1, 1, dtype=torch.float64), mesh["tp"], [Replicate()])
        F.conv2d(x[None], weight)
    else:
        bias = distribute_tensor(torch.rand(6, dtype=torch.float64), mesh["tp"], [Replicate()])
        _ = x + bias if how == "aten" else bias + x


@pytest.mark.parametrize("how", ["layer", "convolution", "aten", "aten, reversed"])
def test_a_plan_on_another_axis_than_the_input_says_what_to_write(how):
    for error in run_expecting_errors(natural_spelling, 4, how):
        assert isinstance(error, UnsupportedSharding), error
        text = str(error)
        shown = "tp=2, domain=2" if "reversed" in how else "domain=2, tp=2"
        assert f"operands live on different meshes ({shown})" in text
        assert "on mesh['domain', 'tp'] instead of one axis each" in text
        assert "shardtensor.parallel.tensor_parallel(model, mesh['domain', 'tp'], {'up': 'colwise'" in text


@on_ranks(4)
def test_layers_are_chosen_by_patterns_of_their_names():
    """A layer whose input comes cut in another way than it wants gets it right."""
    mesh = shared_mesh((2, 2), ("domain", "tp"))
    model, x, y = copy.deepcopy(problem()[0]), *problem()[1:]
    assert tensor_parallel(model, mesh, {"head.[02]": "colwise"}) == {"head.0": "colwise", "head.2": "colwise"}
    train(model, shard(x, mesh, [Shard(2), Replicate()], {0: CUTS[2]}), y, functools.partial(sgd, foreach=False))
    check(model, train_alone()[0])


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 1), (2, 1, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
@both_ways
@on_ranks("shape")
def test_data_domain_and_tensor_parallel_on_one_mesh(shape, spmd):
    mesh = shared_mesh(shape, ("dp", "domain", "tp"))
    model = copy.deepcopy(problem()[0])
    done = parallelize(model, mesh, tensor="tp", plan=HEAD, spmd=spmd)
    assert done.inputs.mesh_dim_names == (("dp", "domain", "tp") if spmd else ("domain", "tp"))
    train(model, *inputs(mesh, spmd, tensor=True))
    check(model, train_alone()[0])


# -- the helper --------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_parallelize_tells_what_it_did():
    mesh = shared_mesh((2, 2), AXES)
    torch.manual_seed(dist.get_rank())
    model = Network()
    with mesh:
        done = parallelize(model)  # the surrounding mesh
    debug.check(model, mesh=mesh)
    assert str(done).splitlines() == [
        "weights and buffers: rank 0's on all ranks of dp=2 x domain=2",
        "FSDP2: weights, gradients and optimizer state sharded over 'dp', copies over 'domain'",
        "inputs: ShardTensors on mesh['domain'], (Shard(d)); along 'dp' each rank has a batch of its own, all of one "
        "size, and its mean loss",
    ]
    assert done.inputs == mesh["domain"]
    with mesh["domain"]:  # inputs need not name it either
        x = ShardTensor.from_local(torch.rand(2, 2, CUTS[2][mesh["domain"].get_local_rank()], 6), None, [Shard(2)])
    assert model(x).shape == (2, 3)
    only = parallelize(Network(), mesh, fsdp=())
    assert "data parallel: left to you, e.g. DistributedDataParallel(model, device_mesh=mesh['dp'])" in only.steps
    alone = parallelize(Network(), mesh["domain"])
    assert alone.steps[1:] == ("inputs: ShardTensors on mesh['domain'], (Shard(d))",)
    everything = parallelize(Network(), mesh["domain"], fsdp=("domain",))
    assert everything.steps[1].endswith("sharded over 'domain', copies over no axis")


def bad(case):
    mesh = shared_mesh((2, 2), AXES)
    model = Network()
    {
        "axis": lambda: parallelize(model, mesh, domain="space"),
        "unnamed": lambda: parallelize(model, shared_mesh((2, 2))),
        "plan": lambda: parallelize(model, mesh, tensor="dp", data=None),
        "shard": lambda: parallelize(model, mesh, fsdp=("tp",)),
        "order": lambda: parallelize(model, mesh, data="domain", domain="dp"),
        "tensor": lambda: parallelize(
            model, mesh, data=None, domain="dp", tensor="domain", plan=HEAD, fsdp=("dp",)
        ),
        "pattern": lambda: tensor_parallel(model, mesh, {"tail.*": "colwise"}, tensor="domain"),
        "how": lambda: tensor_parallel(model, mesh, {"head.0": "diagonal"}, tensor="domain"),
        "layer": lambda: tensor_parallel(model, mesh, {"first": "colwise"}, tensor="domain"),
    }[case]()


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("axis", ValueError, "the mesh has no axis 'space', only ('dp', 'domain')"),
        ("unnamed", ValueError, "the mesh has no axis 'domain', only ()"),
        ("plan", ValueError, "tensor parallel needs both"),
        ("shard", ValueError, "the mesh has no axis 'tp'"),
        ("order", ValueError, "order them data, domain, tensor"),
        ("tensor", ValueError, "use spmd=True, or leave fsdp out"),
        ("pattern", ValueError, "no module of Network is called 'tail.*'"),
        ("how", ValueError, "'diagonal'; choose one of ('colwise', 'rowwise')"),
        ("layer", TypeError, "first is a Conv2d; only nn.Linear can be sharded"),
    ],
)
def test_errors(case, kind, text):
    for error in run_expecting_errors(bad, 4, case):
        assert isinstance(error, kind) and text in str(error), error


@pytest.mark.skipif(hasattr(fsdp, "DataParallelMeshDims"), reason="for torch before 2.13")
def test_spmd_needs_a_newer_torch():
    for error in run_expecting_errors(wrapped_training, 4, "parallelize", True):
        assert isinstance(error, ValueError) and "spmd=True needs FSDP2's dp_mesh_dims" in str(error), error
