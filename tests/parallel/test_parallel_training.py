"""Training with a domain axis as people train: what is sent, clipping, accumulation, precision, whole networks.

The network and the oracle are those of test_parallel.py; there each wrapper's weights are compared.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from test_parallel import (
    AXES,
    CUTS,
    HEAD,
    HEIGHT,
    PLAIN,
    SPMD,
    Embedded,
    adamw,
    both_ways,
    check,
    inputs,
    needs_spmd,
    problem,
    sgd,
    train,
    train_alone,
    whole,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardtensor import UnsupportedSharding
from shardtensor.parallel import clip_grad_norm_, parallelize
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

ROOT = Path(__file__).parents[2]

# -- what is sent ------------------------------------------------------------------------------------------------------

# In backward: over the domain, one sum for each operator with plain weights (two convolutions, group norm with its
# statistics, scale, step), and the halo; then the wrapper's own. Layers after the pooling add nothing.
_DOMAIN = {"all_reduce": 5, "all_to_all": 1}
_STATISTICS = {"all_reduce": 2, "all_to_all": 1}


def _and(base, **more):
    return {name: base.get(name, 0) + more.get(name, 0) for name in {*base, *more}}


SENT = {
    ("DDP over dp", False): _and(_DOMAIN, all_reduce=1),
    ("DDP over all", False): _and(_DOMAIN, all_reduce=1),
    ("replicate", False): _and(_DOMAIN, all_reduce=1),
    ("replicate, made of FSDP2", False): _and(_DOMAIN, all_reduce=1),
    ("FSDP2 over dp", False): _and(_DOMAIN, reduce_scatter=1),
    ("FSDP2 over dp, not resharded", False): _and(_DOMAIN, reduce_scatter=1),
    ("FSDP2 over dp, by layers", False): _and(_DOMAIN, reduce_scatter=3, all_gather=2),
    ("FSDP2 over dp x domain, replicated and sharded", False): _and(_DOMAIN, reduce_scatter=1, all_reduce=1),
    ("FSDP1 over dp", False): _and(_DOMAIN, reduce_scatter=1),
    ("FSDP1 over dp, gradients only", False): _and(_DOMAIN, reduce_scatter=1),
    ("FSDP1 hybrid", False): _and(_DOMAIN, reduce_scatter=1, all_reduce=1),
    ("parallelize, sharded over all", False): _and(_DOMAIN, reduce_scatter=1),
    ("parallelize", True): _and(_STATISTICS, reduce_scatter=1, all_reduce=1),
    ("parallelize, units", True): _and(_STATISTICS, reduce_scatter=3, all_reduce=3, all_gather=2),
    ("parallelize, sharded over all", True): _and(_STATISTICS, reduce_scatter=1),
    ("parallelize, copies", True): _and(_STATISTICS, all_reduce=1),
}


@both_ways
@on_ranks(4)
def test_collectives_of_a_backward_pass(spmd):
    """With DTensor weights on the whole mesh all gradients ride in the wrapper's own reduction, in buckets."""
    mesh = shared_mesh((2, 2), AXES)
    for name in [name for name, of_spmd in SENT if of_spmd == spmd]:
        model = (SPMD if spmd else PLAIN)[name](copy.deepcopy(problem()[0]), mesh)
        x, y = inputs(mesh, spmd)
        for _ in range(2):  # wrappers set themselves up in the first step
            loss = F.mse_loss(model(x), y)
            with count_communication() as counts:
                loss.backward()
        assert counts.collectives == SENT[name, spmd], (name, spmd, counts.collectives)


@pytest.mark.parametrize("reshard", [False, True], ids=["ZeRO-2", "ZeRO-3"])
@on_ranks(4)
def test_zero_2_is_fully_shard_without_resharding(reshard):
    """ZeRO-2 keeps the weights between forward and backward, ZeRO-3 gathers them again."""
    mesh = shared_mesh((2, 2), AXES)
    model = copy.deepcopy(problem()[0])
    parallelize(model, mesh, units=[nn.Conv2d], reshard_after_forward=reshard)
    x, y = inputs(mesh, False)
    F.mse_loss(model(x), y).backward()
    with count_communication() as forward:
        loss = F.mse_loss(model(x), y)
    with count_communication() as backward:
        loss.backward()
    sums = 1  # of the loss's and the pooling's numbers
    assert forward.collectives["all_gather"] == 3 + sums
    assert backward.collectives.get("all_gather", 0) == (3 if reshard else 0)
    assert backward.collectives["reduce_scatter"] == 3


# -- clipping, accumulation, precision ---------------------------------------------------------------------------------


def clipped(wrapper, clip, axes, spmd, tensor=False):
    mesh = shared_mesh((2,) * len(axes), axes)
    model = (PLAIN | WITH_TENSOR_AXIS)[wrapper](copy.deepcopy(problem()[0]), mesh)
    (x, y), opt = inputs(mesh, spmd, tensor), sgd(model)
    expected, norms = train_alone(max_norm=0.05)
    for norm in norms:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        found = whole(clip(model, 0.05))
        assert norm > 0.05
        torch.testing.assert_close(found, norm, rtol=1e-10, atol=0)
        opt.step()
    check(model, expected)


def by_torch(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def by_helper(model, max_norm):
    return clip_grad_norm_(model.parameters(), max_norm)


def three_axes(model, mesh):
    parallelize(model, mesh, tensor="tp", plan=HEAD)
    return model


def three_axes_spmd(model, mesh):
    parallelize(model, mesh, tensor="tp", plan=HEAD, spmd=True)
    return model


THREE = ("dp", "domain", "tp")
WITH_TENSOR_AXIS = {"three axes": three_axes, "three axes, spmd": three_axes_spmd}


@on_ranks(4)
def test_fsdp1_clips_by_the_exact_norm():
    """In float32, as FSDP1 computes norms in no other dtype."""
    mesh = shared_mesh((2, 2), AXES)
    model, (x, y) = PLAIN["FSDP1 over dp"](copy.deepcopy(problem()[0]).float(), mesh), inputs(mesh, False)
    (expected, (norm,)), opt = train_alone(steps=1, max_norm=0.05), sgd(model)
    F.mse_loss(model(x.float()), y.float()).backward()
    torch.testing.assert_close(model.clip_grad_norm_(0.05).double(), norm, rtol=1e-5, atol=0)
    opt.step()
    check(model, {name: weight.float() for name, weight in expected.items()}, rtol=1e-5)


def test_the_helper_clips_as_torch_does():
    """Where all gradients lie on one mesh, or are plain."""
    for name in ("FSDP2 over dp", "DDP over dp"):
        run_distributed(clipped, 4, name, by_helper, AXES, False)


@pytest.mark.slow
def test_clipping_where_some_weights_are_cut_over_a_tensor_axis():
    """Their norms lie on two meshes, which only the helper adds up; with SPMD there is one."""
    run_distributed(clipped, 8, "three axes", by_helper, THREE, False, True)
    for error in run_expecting_errors(clipped, 8, "three axes", by_torch, THREE, False, True):
        assert isinstance(error, RuntimeError) and "same mesh" in str(error)


@pytest.mark.slow
@needs_spmd
def test_clipping_where_all_weights_lie_on_three_axes():
    run_distributed(clipped, 8, "three axes, spmd", by_torch, THREE, True, True)


def accumulated(name):
    """Two micro-batches of two; only the second is followed by communication between data-parallel ranks."""
    mesh = shared_mesh((2, 2), AXES)
    model, (_, x, y) = PLAIN[name](copy.deepcopy(problem()[0]), mesh), problem()
    opt = sgd(model)
    for _ in range(2):
        opt.zero_grad()
        for step in range(2):
            rows = [2 * step + mesh["dp"].get_local_rank()]
            part = shard(x[rows], mesh["domain"], [Shard(2)], {0: CUTS[2]})
            if step == 0:
                with model.no_sync(), count_communication() as counts:
                    (F.mse_loss(model(part), y[rows]) / 2).backward()
                assert not counts.collectives.get("reduce_scatter")
            else:
                (F.mse_loss(model(part), y[rows]) / 2).backward()
        opt.step()
    check(model, train_alone()[0])


def test_fsdp1_accumulates_without_sync():
    run_distributed(accumulated, 4, "FSDP1 over dp")


@pytest.mark.parametrize("how", ["FSDP1", "autocast in DDP"])
@on_ranks(4)
def test_mixed_precision(how):
    """bfloat16 in the layers, float32 weights and gradients: within what bfloat16 can tell of float32."""
    mesh = shared_mesh((2, 2), AXES)
    model, (x, y) = copy.deepcopy(problem()[0]).float(), inputs(mesh, False)
    x, y = x.float(), y.float()
    if how == "FSDP1":
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"device_id": torch.get_default_device(), "mixed_precision": policy, "use_orig_params": True}
        wrapped = FullyShardedDataParallel(model, mesh["dp"].get_group(), **options)
        out = wrapped(x)
    else:
        wrapped = PLAIN["DDP over dp"](model, mesh)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            out = wrapped(x)
    assert out.dtype == torch.bfloat16
    F.mse_loss(out.float(), y).backward()
    alone = copy.deepcopy(problem()[0]).float()
    F.mse_loss(alone(problem()[1].float()), problem()[2].float()).backward()
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True) if how == "FSDP1" else torch.no_grad():
        for (name, p), q in zip(wrapped.named_parameters(), alone.parameters()):
            assert p.grad.dtype == torch.float32, name
            assert (p.grad - q.grad).norm() < 0.05 * q.grad.norm() + 2e-3, name


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["SGD", "AdamW"])
@on_ranks(2)
def test_dtensor_weights_in_no_wrapper(optimizer, foreach):
    """Gradients of DTensor weights are contributions; an optimizer adds them up when it reads them."""
    mesh = shared_mesh(2)
    model = distribute_module(copy.deepcopy(problem()[0]), mesh)
    x = shard(problem()[1], mesh, [Shard(2)], {0: CUTS[2]})
    train(model, x, problem()[2], functools.partial(optimizer, foreach=foreach))
    check(model, train_alone(optimizer=optimizer)[0], rtol=1e-10 if optimizer is sgd else 1e-8)


# -- gradients of gradients --------------------------------------------------------------------------------------------


def penalized(model, x, y):
    """Steps with a penalty on the gradient by the input, until which FSDP2 has to keep the weights."""
    opt = sgd(model)
    for _ in range(2):
        opt.zero_grad()
        x = x.detach().requires_grad_()
        out = model(x)
        if isinstance(model, FSDPModule):
            model.set_reshard_after_backward(False)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        if isinstance(model, FSDPModule):
            model.set_reshard_after_backward(True)
        (F.mse_loss(out, y) + slope.square().mean()).backward()
        opt.step()


def penalty(names, spmd):
    mesh = shared_mesh((2, 2), AXES)
    alone, x, y = problem()
    alone = copy.deepcopy(alone)
    penalized(alone, x, y)
    for name in names:
        model = (SPMD if spmd else PLAIN)[name](copy.deepcopy(problem()[0]), mesh)
        penalized(model, *inputs(mesh, spmd))
        check(model, dict(alone.named_parameters()))


@both_ways
@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "all"])
def test_gradient_penalties(spmd, several):
    table = SPMD if spmd else PLAIN
    fit = [n for n in table if "FSDP1" not in n and n != "by hand, without hooks"]
    names = fit if several else [n for n in fit if n in ("FSDP2 over dp", "parallelize, sharded over all")]
    run_distributed(penalty, 4, names, spmd)


# -- tensor parallel ---------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A transformer's MLP block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "FSDP2"])
@on_ranks(4)
def test_sequence_parallelism_over_the_domain(wrapped):
    """torch's own plan for sequence parallelism, the tokens' axis being the domain.

    An uneven cut of the tokens; the plan gathers them for the layers that it cuts.
    """
    torch.manual_seed(0)
    mesh = shared_mesh((2, 2), AXES)
    model = Residual().double()
    alone, x = copy.deepcopy(model), torch.randn(4, HEIGHT, 6, dtype=torch.float64)
    plan = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh["domain"], plan)
    mine = x
    if wrapped:
        fully_shard(model, mesh=mesh["dp"])
        mine = x.chunk(2)[mesh["dp"].get_local_rank()]
    out = model(shard(mine, mesh["domain"], [Shard(1)], {0: CUTS[2]}))
    assert out.placements == (Shard(1),)
    out.square().mean().backward()
    alone(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-10, atol=1e-12, msg=f"{name}: {{}}".format)
    torch.testing.assert_close(out.full_tensor(), alone(mine), rtol=1e-10, atol=1e-12)


def uneven_parameter(helped):
    mesh = shared_mesh((2, 2), AXES)
    model = copy.deepcopy(problem(Embedded)[0])
    model.position = nn.Parameter(shard(model.position.detach(), mesh["domain"], [Shard(1)], {0: CUTS[2]}))
    parallelize(model, mesh) if helped else fully_shard(model, mesh=mesh["dp"])


@pytest.mark.parametrize("helped", [False, True], ids=["by hand", "parallelize"])
def test_parameters_cut_unevenly_are_refused_by_fsdp2(helped):
    """It would make DTensors of them, and forget the sizes."""
    for error in run_expecting_errors(uneven_parameter, 4, helped):
        assert isinstance(error, UnsupportedSharding) and "S(1)[11, 5]" in str(error)
        assert "FSDP2 cannot keep the sizes" in str(error) and "shard_sizes='even'" in str(error)


def without_rows(kind):
    """The last of four ranks gets none of nine rows; without FSDP2 that is as good as any."""
    if kind == "plan":
        mesh = shared_mesh((1, 1, 4), ("dp", "domain", "tp"))
        parallelize(nn.Sequential(nn.Linear(9, 9)), mesh, tensor="tp", plan={"0": "colwise"})
    mesh = shared_mesh((1, 4), AXES)
    model = nn.Linear(2, 3)
    model.position = nn.Parameter(distribute_tensor(torch.rand(9), mesh["domain"], [Shard(0)]))
    parallelize(model, mesh)


@pytest.mark.parametrize(("kind", "name"), [("plan", "0.weight (9, 9)"), ("parameter", "position (9,)")])
def test_empty_shards_of_parameters_are_refused_with_fsdp2(kind, name):
    """FSDP2 would raise on the rank that has one, and let the others wait."""
    for error in run_expecting_errors(without_rows, 4, kind):
        assert isinstance(error, ValueError), error
        assert f"{name} is sharded (3, 3, 3, 0) on mesh dim" in str(error) and "over fewer ranks" in str(error)


@on_ranks(4)
def test_empty_shards_of_weights_without_fsdp2():
    mesh = shared_mesh((1, 4), ("domain", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)).double()
    alone, x = copy.deepcopy(model), torch.randn(2, HEIGHT, 6, dtype=torch.float64)
    parallelize(model, mesh, tensor="tp", plan={"0": "colwise", "2": "rowwise"})
    strides = []
    for p in model.parameters():
        p.register_hook(lambda gradient, p=p: strides.append((gradient.stride(), p.stride())))
    model(shard(x, mesh, [Shard(1), Replicate()])).square().mean().backward()
    assert all(one == other for one, other in strides), strides  # or autograd would copy it, on the ranks without rows
    alone(x).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-10, atol=1e-12)


# -- a whole network ---------------------------------------------------------------------------------------------------


@functools.cache
def globe():
    """The network of examples/globe, and a batch of odd sizes."""
    spec = importlib.util.spec_from_file_location("globe_model", ROOT / "examples" / "globe" / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["globe_model"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.UNet(width=4, depth=3).double()
    return module, model, torch.randn(2, 3, 37, 22, dtype=torch.float64), torch.rand(2, 1, 37, 22).double().round()


ROWS = {2: (23, 14), 4: (3, 17, 0, 17)}


def learn(model, x, y, steps):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ten_steps_on_the_globe(shape, spmd, shard_over):
    mesh = shared_mesh(shape, AXES)
    module, model, x, y = globe()
    model, alone = copy.deepcopy(model), copy.deepcopy(model)
    parallelize(model, mesh, units=[module.ConvNormAct], spmd=spmd, fsdp=shard_over)
    at, n, i = mesh["domain"], shape[0], mesh["dp"].get_local_rank()
    if spmd:
        sizes = {0: (1,) * n, 1: ROWS[shape[1]]}
        mine = [shard(t, mesh, [Shard(0), Shard(2)], sizes) for t in (x, y)]
    else:
        mine = [shard(t.chunk(n)[i], at, [Shard(2)], {0: ROWS[shape[1]]}) for t in (x, y)]
    learn(model, *mine, steps=10)
    learn(alone, x, y, steps=10)
    check(model, dict(alone.named_parameters()), rtol=1e-7)


@pytest.mark.parametrize(
    ("shape", "spmd", "shard_over"),
    [
        ((2, 2), False, ("dp",)),
        pytest.param((2, 2), True, AXES, marks=[needs_spmd, pytest.mark.slow]),
        pytest.param((2, 2), False, AXES, marks=pytest.mark.slow),
        pytest.param((2, 4), False, ("dp",), marks=pytest.mark.slow),
        pytest.param((2, 4), True, AXES, marks=[needs_spmd, pytest.mark.slow]),
    ],
    ids=["2x2", "2x2 spmd", "2x2 sharded over all", "2x4", "2x4 spmd"],
)
def test_ten_steps_of_adamw_on_the_globe_network(shape, spmd, shard_over):
    """The weights of one process, to 1e-7: AdamW enlarges rounding where a gradient is nearly zero."""
    ranks = shape[0] * shape[1]
    run_distributed(ten_steps_on_the_globe, ranks, shape, spmd, shard_over, timeout=300)
