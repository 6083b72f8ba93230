"""What torch refuses on models that FSDP2 has sharded, and what to do: the rows of the table in docs/train.md.

Each row is tried: torch's error still comes, and the remedy gives the numbers of one process.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardtensor.parallel import parallelize
from shardtensor.testing import run_distributed, shard, shared_mesh

PAGE = Path(__file__).parents[2] / "docs" / "train.md"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.first(x))).mean((2, 3)))


def network():
    torch.manual_seed(0)
    return Net().double()


def batch():
    torch.manual_seed(1)
    return torch.randn(4, 2, 16, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def mine(mesh):
    (x, y), i = batch(), mesh["dp"].get_local_rank()
    return shard(x[2 * i : 2 * i + 2], mesh["domain"], [Shard(2)], {0: (11, 5)}), y[2 * i : 2 * i + 2]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(model, alone):
    named = dict(model.named_parameters())
    for name, p in alone.named_parameters():
        found = whole(named[name]).detach()
        torch.testing.assert_close(found, p.detach(), rtol=1e-9, atol=1e-11, msg=f"{name}: {{}}".format)


def step(model, x, y, optimizer=None, steps=3):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return optimizer


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# -- what is refused: on a model after parallelize, its input and target -----------------------------------------------


def optimizer_step(make):
    return lambda model, x, y: step(model, x, y, make(model.parameters()), 1)


def lbfgs(parameters, x, y, model, loss_of=lambda loss: loss):
    optimizer = torch.optim.LBFGS(parameters, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss_of(loss)

    optimizer.step(closure)


def after(change):
    """A change of the model after parallelize, and a step."""

    def run(model, x, y):
        change(model)
        step(model, x, y, steps=1)
        named = dict(model.named_parameters())
        assert "head.weight" not in named, "head.weight is a parameter still"

    return run


class Squared(nn.Module):
    def forward(self, weight):
        return weight * weight.abs()


CHANGES = {
    "`parametrize`": lambda m: nn.utils.parametrize.register_parametrization(m.head, "weight", Squared()),
    "`weight_norm`": lambda m: parametrizations.weight_norm(m.first),
    "`spectral_norm`": lambda m: parametrizations.spectral_norm(m.head),
    "`prune`": lambda m: prune.l1_unstructured(m.head, "weight", amount=0.3),
}


def functional_gradient(model, x, y):
    def loss(parameters):
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    torch.func.grad(loss)(dict(model.named_parameters()))


REFUSED = {
    "`Adafactor`": (optimizer_step(torch.optim.Adafactor), "in-place operations that require placement changes"),
    "`Rprop`": (optimizer_step(torch.optim.Rprop), "in-place operations that require placement changes"),
    "`LBFGS`": (lambda m, x, y: lbfgs(m.parameters(), x, y, m), "Cannot flatten unevenly sharded tensor"),
    "`SGD`, `Adagrad` with `fused=True`": (
        optimizer_step(lambda p: torch.optim.SGD(p, lr=0.1, fused=True)),
        "does not have a sharding strategy registered",
    ),
    "`AveragedModel`": (lambda m, x, y: AveragedModel(m), "FSDP does not support deepcopy"),
    "`deepcopy(model)`": (lambda m, x, y: copy.deepcopy(m), "FSDP does not support deepcopy"),
    "`deepcopy(optimizer)`": (lambda m, x, y: copy.deepcopy(step(m, x, y, sgd(m))), "invalid python storage"),
    "`torch.save(model)`": (lambda m, x, y: torch.save(m, io.BytesIO()), "Can't pickle"),
    "`load_state_dict` of plain tensors": (
        lambda m, x, y: m.load_state_dict(network().state_dict()),
        "got mixed torch.Tensor and DTensor",
    ),
    "`parameters_to_vector`": (
        lambda m, x, y: parameters_to_vector(m.parameters()),
        "Cannot flatten unevenly sharded tensor",
    ),
    "`torch.func.grad`": (functional_gradient, "no attribute '_local_tensor'"),
    "`parametrize`": (after(CHANGES["`parametrize`"]), "A parameter of FSDP2 is gathered"),
    "`weight_norm`": (after(CHANGES["`weight_norm`"]), "A parameter of FSDP2 is gathered"),
    "`spectral_norm`": (after(CHANGES["`spectral_norm`"]), "in-place operations that require placement changes"),
    "`prune`": (after(CHANGES["`prune`"]), "Cannot flatten unevenly sharded tensor"),
}


def refused(names):
    mesh = shared_mesh((2, 2), ("dp", "domain"))
    texts = {}
    for name in names:
        model = network()
        parallelize(model, mesh)
        try:
            REFUSED[name][0](model, *mine(mesh))
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return texts


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page has the errors of torch 2.13")
def test_what_torch_refuses():
    for texts in run_distributed(refused, 4, list(REFUSED)):
        for name, (_, text) in REFUSED.items():
            assert text in texts.get(name, "no error"), f"{name}: {texts.get(name)}"


# -- what to do instead: against one process ---------------------------------------------------------------------------


def in_ddp(make):
    """Plain weights in DDP, and an optimizer."""

    def run(mesh):
        model, alone = network(), network()
        parallelize(model, mesh, fsdp=())
        wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
        step(wrapped, *mine(mesh), make(model.parameters()))
        step(alone, *batch(), make(alone.parameters()))
        compare(model, alone)

    return run


def lbfgs_on_the_mean(mesh):
    model, alone = network(), network()
    parallelize(model, mesh, fsdp=())
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])

    def mean(loss):
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        return mean / 2

    lbfgs(model.parameters(), *mine(mesh), wrapped, lambda loss: mean(whole(loss)))
    lbfgs(alone.parameters(), *batch(), alone)
    compare(model, alone)


def not_fused(mesh):
    model, alone = network(), network()
    parallelize(model, mesh)
    step(model, *mine(mesh), torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
    step(alone, *batch(), torch.optim.SGD(alone.parameters(), lr=0.1))
    compare(model, alone)


def averaged_before(mesh):
    model, alone = network(), network()
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (model, alone)]
    for prepared in (model, averages[0]):
        parallelize(prepared, mesh)
    for m, average, (x, y) in ((model, averages[0], mine(mesh)), (alone, averages[1], batch())):
        for _ in range(3):
            step(m, x, y, steps=1)
            average.update_parameters(m)
    compare(model, alone)
    compare(*averages)
    x, _ = mine(mesh)
    i = mesh["dp"].get_local_rank()
    torch.testing.assert_close(whole(averages[0](x)), averages[1](batch()[0])[2 * i : 2 * i + 2], rtol=1e-9, atol=1e-11)


def copied_before(mesh):
    model, alone = network(), network()
    twin = copy.deepcopy(model)
    for prepared in (model, twin):
        parallelize(prepared, mesh)
    step(model, *mine(mesh))
    step(alone, *batch())
    twin.load_state_dict(model.state_dict())
    step(twin, *mine(mesh))
    compare(model, alone)
    step(alone, *batch())
    compare(twin, alone)


def optimizer_by_state(mesh):
    model, alone = network(), network()
    parallelize(model, mesh)
    first = step(model, *mine(mesh), sgd(model))
    second = sgd(model)
    second.load_state_dict(first.state_dict())
    step(model, *mine(mesh), second)
    step(alone, *batch(), sgd(alone), 6)
    compare(model, alone)


def saved_by_state(mesh):
    model, alone = network(), network()
    parallelize(model, mesh)
    step(model, *mine(mesh))
    step(alone, *batch())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    step(model, *mine(mesh))
    model.load_state_dict(torch.load(file, weights_only=True))
    compare(model, alone)


def full_state(mesh):
    model, alone = network(), network()
    parallelize(model, mesh)
    state = {name: 2 * value for name, value in alone.state_dict().items()}
    alone.load_state_dict(state)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    compare(model, alone)


def full_tensors(mesh):
    model, alone = network(), network()
    parallelize(model, mesh)
    vector = parameters_to_vector([p.full_tensor() for p in model.parameters()])
    torch.testing.assert_close(vector, parameters_to_vector(alone.parameters()))


def autograd_gradient(mesh):
    model, alone = network(), network()
    parallelize(model, mesh, fsdp=("domain",), data=None)
    x, y = batch()
    here = shard(x, mesh["domain"], [Shard(2)], {0: (11, 5)})
    found = torch.autograd.grad(F.mse_loss(model(here), y), list(model.parameters()))
    for p, q in zip(found, torch.autograd.grad(F.mse_loss(alone(x), y), list(alone.parameters()))):
        torch.testing.assert_close(whole(p), q, rtol=1e-9, atol=1e-11)


def before(change):
    def run(mesh):
        model, alone = network(), network()
        for m in (model, alone):
            torch.manual_seed(2)
            change(m)
        parallelize(model, mesh)
        step(model, *mine(mesh))
        step(alone, *batch())
        compare(model, alone)

    return run


REMEDIES = {
    "`Adafactor`": in_ddp(torch.optim.Adafactor),
    "`Rprop`": in_ddp(torch.optim.Rprop),
    "`LBFGS`": lbfgs_on_the_mean,
    "`SGD`, `Adagrad` with `fused=True`": not_fused,
    "`AveragedModel`": averaged_before,
    "`deepcopy(model)`": copied_before,
    "`deepcopy(optimizer)`": optimizer_by_state,
    "`torch.save(model)`": saved_by_state,
    "`load_state_dict` of plain tensors": full_state,
    "`parameters_to_vector`": full_tensors,
    "`torch.func.grad`": autograd_gradient,
    **{name: before(change) for name, change in CHANGES.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REMEDIES)
@on_ranks(4)
def test_what_to_do_instead(name):
    REMEDIES[name](shared_mesh((2, 2), ("dp", "domain")))


def test_the_page_lists_what_is_tried():
    page = PAGE.read_text()
    table = page[page.index("| this tool fails |") :].split("\n\n")[0].splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in table] == list(REFUSED) == list(REMEDIES)
