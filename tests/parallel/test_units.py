"""Networks with parameters of several dtypes in FSDP2: which unit has which of them, and the weights of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from shardtensor.parallel import parallelize
from shardtensor.parallel.units import _units
from shardtensor.testing import run_distributed, run_expecting_errors, shard, shared_mesh

AXES = ("dp", "domain")
needs_spmd = pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="FSDP2 has no dp_mesh_dims yet")


class Spectral(nn.Module):
    """Complex weights of low frequencies, and real ones, in one module."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, 3, dtype=torch.complex128) / width)
        self.bias = nn.Parameter(torch.randn(width, 1))

    def forward(self, x):
        modes = torch.einsum("bix,iox->box", torch.fft.rfft(x)[..., :3], self.weight)
        return torch.fft.irfft(F.pad(modes, (0, x.shape[-1] // 2 - 2)), n=x.shape[-1]) + self.bias


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv1d(2, 4, 1), nn.Conv1d(4, 2, 3, padding=1)
        self.blocks = nn.ModuleList([Spectral(4), Spectral(4)])

    def forward(self, x):
        x = self.up(x)
        for block in self.blocks:
            x = F.gelu(block(x)) + x
        return self.down(x)


class Scaled(Operator):
    """The model itself holds a parameter of the dtype that fewer elements have."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 1))
        self.complex = nn.ParameterList([torch.randn(4, 9, dtype=torch.complex128)])

    def forward(self, x):
        return super().forward(x) + self.scale[:2]


class NormsInDouble(nn.Module):
    """Half of the precision but in norms, and frozen weights of further dtypes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6))
        self.layers[1].double()
        self.register_parameter("scale", nn.Parameter(torch.rand(6).double(), requires_grad=False))
        quantized = torch.tensor([[1, -2, 3, 4, 5, 6]], dtype=torch.int8)
        self.register_parameter("quantized", nn.Parameter(quantized, requires_grad=False))

    def forward(self, x):
        x = self.layers[1](self.layers[0](x).double()).float()
        return (self.layers[2:](x) * self.scale.float()) + self.quantized.float()


def network(kind):
    torch.manual_seed(0)
    model = kind()
    return model if kind is NormsInDouble else model._apply(lambda t: t if t.is_complex() else t.double())


def named_units(model, *classes):
    names = {module: name for name, module in model.named_modules()}
    parameters = {parameter: name for name, parameter in model.named_parameters()}
    return {names[m]: [parameters[p] for p in mine] for m, mine in _units(model, classes, ()).items()}


def test_which_parameters_are_in_which_unit():
    assert named_units(network(Operator)) == {
        "": ["up.weight", "up.bias", "down.weight", "down.bias", "blocks.0.bias", "blocks.1.bias"],
        "blocks.0": ["blocks.0.weight"],
        "blocks.1": ["blocks.1.weight"],
    }
    assert named_units(network(Operator), Spectral) == named_units(network(Operator))
    model = network(Operator)
    model.shift = nn.Parameter(torch.rand(2, 1, dtype=torch.complex128))  # in no inner module
    assert named_units(model)[""] == ["shift", "blocks.0.weight", "blocks.1.weight"]
    assert named_units(model)["blocks.0"] == ["blocks.0.bias"]
    assert named_units(network(NormsInDouble))["layers.1"] == ["layers.1.weight", "layers.1.bias"]
    model = network(Operator)
    model.down.weight = model.up.weight  # in both modules: in the unit around them
    assert named_units(model, nn.Conv1d) == {
        "": ["up.weight", "blocks.0.bias", "blocks.1.bias"],
        "up": ["up.bias"],
        "down": ["down.bias"],
        "blocks.0": ["blocks.0.weight"],
        "blocks.1": ["blocks.1.weight"],
    }


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(kind, **options):
    """Some steps of AdamW with clipped gradients, against one process on the whole batch."""
    mesh = shared_mesh((2, 2), AXES)
    model, alone = network(kind), network(kind)
    if kind is NormsInDouble:
        x, dims, cuts = torch.randn(4, 9, 6), (1, 2), (8, 1)
    else:
        x, dims, cuts = torch.randn(4, 2, 16, dtype=torch.float64), (2, 1), (11, 5)
    y = torch.randn_like(x)
    spmd, mine = options.get("spmd", False), slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
    done = parallelize(model, mesh, **options)
    if spmd:
        local, target = shard(x, mesh, [Shard(0), Shard(dims[0])], {0: (3, 1), 1: cuts}), y
    else:
        local, target = shard(x[mine], mesh["domain"], [Shard(dims[0])], {0: cuts}), y[mine]
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, alone)]
    for _ in range(3):
        losses = [F.mse_loss(model(local), target), F.mse_loss(alone(x), y)]
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
        norms = [whole(nn.utils.clip_grad_norm_(one.parameters(), 0.1)) for one in (model, alone)]
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if kind is NormsInDouble else {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(*norms, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
    for (name, p), (_, q) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, **tolerance, msg=f"{name}: {{}}".format)
    return str(done)


def test_complex_and_real_parameters():
    first, *_ = run_distributed(trained, 4, Operator)
    units = "float64: the model; complex128: blocks.0, blocks.1"
    assert f"\nFSDP2's units have one dtype each: {units}\n" in first, first


OTHERS = {
    "over all": (Operator, {"units": [Spectral], "fsdp": AXES, "reshard_after_forward": True}),
    "copies and shards": (Operator, {"fsdp": ("domain",)}),
    "policy": (Operator, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
    "spmd": (Operator, {"spmd": True}),
    "norms": (NormsInDouble, {}),
    "norms, over all": (NormsInDouble, {"fsdp": AXES, "units": [nn.LayerNorm]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_spmd) if n == "spmd" else n for n in OTHERS])
def test_parameters_of_several_dtypes(name):
    kind, options = OTHERS[name]
    run_distributed(trained, 4, kind, **options)


def cannot():
    parallelize(network(Scaled), shared_mesh((2, 2), AXES))


def test_a_module_that_holds_several_dtypes_itself_is_refused():
    for error in run_expecting_errors(cannot, 4):
        assert isinstance(error, ValueError) and str(error) == (
            "Scaled has parameters of several dtypes that are in no inner module with a forward: scale (float64), "
            "complex.0 (complex128). Those of a unit of FSDP2 have one dtype. Put the parameters of one dtype into a "
            "module of their own that is called; hold complex ones as real (torch.view_as_real, and "
            "torch.view_as_complex in forward); or pass fsdp=() and wrap the model in DistributedDataParallel"
        )
