"""Lightning with the domain as an axis of its ModelParallelStrategy: the losses, weights and evaluation of one process.

The strategy has no precision "64-true". But it leaves a model alone that is in float64 already.
"""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardtensor import ShardTensor
from shardtensor.parallel import parallelize
from shardtensor.testing import run_distributed, shard

L = pytest.importorskip("lightning")
from lightning.fabric.plugins.environments import ClusterEnvironment  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy  # noqa: E402
from lightning.fabric.utilities import move_data_to_device  # noqa: E402

ROOT = Path(__file__).parents[2]
SIZES = {1: (13,), 2: (9, 4), 4: (2, 6, 0, 5)}
NAMES = {"data": "data_parallel", "domain": "tensor_parallel"}
MAX_NORM = 0.05
on_ranks = functools.partial(run_distributed, timeout=180)  # the first call on a rank imports Lightning


class Pool(ClusterEnvironment):
    """The processes that run_distributed has started."""

    creates_processes_externally = True
    main_address = main_port = property(lambda self: None)
    detect = staticmethod(lambda: False)

    def world_size(self):
        return dist.get_world_size()

    global_rank = local_rank = lambda self: dist.get_rank()

    def node_rank(self):
        return 0

    def set_world_size(self, size):
        pass

    set_global_rank = set_world_size


def helped(model, mesh):
    parallelize(model, mesh, **NAMES, units=[nn.Conv2d])
    return model


def by_hand(model, mesh):
    """As in Fabric's own recipe, with the domain in the place of tensor parallelism; weights are equal already."""
    if mesh["data_parallel"].size() > 1:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def make_fabric(parallelize_fn=helped, data=2, precision="32-true", **options):
    world = dist.get_world_size()
    strategy = ModelParallelStrategy(
        parallelize_fn, data_parallel_size=data, tensor_parallel_size=world // data, **options
    )
    device = torch.get_default_device().type
    fabric = L.Fabric(accelerator=device, devices=world, strategy=strategy, plugins=[Pool()], precision=precision)
    fabric.launch()
    return fabric


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 4, 3, 2, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip

    def forward(self, x):
        self.seen = x
        return super().forward(x)


@functools.cache
def problem():
    torch.manual_seed(0)
    return Network().double(), *(torch.randn(shape, dtype=torch.float64) for shape in ((4, 2, 13, 6), (4, 3)))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(fabric):
    """This domain's part of the batch as a ShardTensor, and its targets."""
    mesh, (_, x, y) = fabric.strategy.device_mesh, problem()
    i, n = mesh["data_parallel"].get_local_rank(), mesh["data_parallel"].size()
    domain = mesh["tensor_parallel"]
    return shard(x.chunk(n)[i], domain, [Shard(2)], {0: SIZES[domain.size()]}), y.chunk(n)[i]


def step(fabric, model, optimizer):
    x, y = batch(fabric)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    fabric.backward(loss)
    norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
    optimizer.step()
    return fabric.all_reduce(loss, reduce_op="mean").item(), norm.item()


def alone(steps):
    model, x, y = copy.deepcopy(problem()[0]), *problem()[1:]
    optimizer, told = adamw(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        told.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()))
        optimizer.step()
    return model, told


def evaluation(model, x, y):
    """The loss, and the mean absolute error, as a plain tensor."""
    out = model(x)
    told = torch.stack([F.mse_loss(out, y), (out - y).abs().mean()])
    return told.full_tensor() if isinstance(told, DTensor) else told


def full(model):
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{name}: {{}}".format)
    return torch.cat([found[name].reshape(-1) for name in sorted(found)]).detach()


def equal_on_all_ranks(results):
    assert all(torch.equal(results[0], other) for other in results[1:])


# -- training ----------------------------------------------------------------------------------------------------------


def training(parallelize_fn, data):
    fabric = make_fabric(parallelize_fn, data)
    model = fabric.setup(copy.deepcopy(problem()[0]))
    optimizer = fabric.setup_optimizers(adamw(model))
    expected, told = alone(5)
    for loss, norm in told:
        found = step(fabric, model, optimizer)
        assert norm > MAX_NORM and found == pytest.approx((loss, norm), rel=1e-10)
    model.eval()
    with torch.no_grad():
        found = fabric.all_reduce(evaluation(model, *batch(fabric)), reduce_op="mean")
        torch.testing.assert_close(found, evaluation(expected, *problem()[1:]), rtol=1e-10, atol=0)
    return close(full(model), expected.state_dict())


@pytest.mark.parametrize("data", [1, 2, 4], ids="{} along the data axis".format)
@pytest.mark.parametrize("parallelize_fn", [helped, by_hand], ids=["parallelize", "by hand"])
def test_training_with_clipping(parallelize_fn, data):
    """setup, backward, clip_gradients (the exact norm), all_reduce (the mean loss), and an evaluation."""
    equal_on_all_ranks(on_ranks(training, 4, parallelize_fn, data))


def accumulation():
    fabric = make_fabric()
    model = fabric.setup(copy.deepcopy(problem()[0]))
    optimizer = fabric.setup_optimizers(adamw(model))
    x, y = batch(fabric)
    for i, last in ((0, False), (1, True)):
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(F.mse_loss(model(x[i : i + 1]), y[i : i + 1]) / 2)
    fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
    optimizer.step()
    return close(full(model), alone(1)[0].state_dict())


def test_gradients_accumulate_without_sync():
    equal_on_all_ranks(on_ranks(accumulation, 4))


def casts(precision):
    fabric = make_fabric(precision=precision)
    model = fabric.setup(copy.deepcopy(problem()[0]).float())
    x, y = (t.float() for t in batch(fabric))
    for moved in (fabric.to_device(x), *move_data_to_device([x], fabric.device)):
        assert type(moved) is ShardTensor and moved.shard_sizes == x.shard_sizes
    out = model(x)
    seen = model.module.seen
    assert type(seen) is ShardTensor and seen.dtype == torch.bfloat16 and seen.shard_sizes == x.shard_sizes
    assert type(out) is ShardTensor and out.dtype == torch.float32
    fabric.backward(F.mse_loss(out, y))
    one, whole, targets = copy.deepcopy(problem()[0]), *problem()[1:]
    F.mse_loss(one(whole), targets).backward()
    for (name, p), q in zip(model.module.named_parameters(), one.parameters()):
        grad = p.grad.full_tensor().double()
        assert (grad - q.grad).norm() < 0.05 * q.grad.norm() + 2e-3, name


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_inputs_and_outputs_stay_shardtensors_in_every_precision(precision):
    """Gradients within what bfloat16 can tell of those in float32."""
    on_ranks(casts, 4, precision)


# -- saving and loading ------------------------------------------------------------------------------------------------


def save_halfway(path, distributed):
    fabric = make_fabric(save_distributed_checkpoint=distributed)
    model = fabric.setup(copy.deepcopy(problem()[0]))
    optimizer = fabric.setup_optimizers(adamw(model))
    for _ in range(2):
        step(fabric, model, optimizer)
    fabric.save(path, {"model": model, "optimizer": optimizer, "steps": 2})


def resume(path, data, distributed):
    fabric = make_fabric(data=data, save_distributed_checkpoint=distributed)
    torch.manual_seed(100 + dist.get_rank())
    model = fabric.setup(Network().double())
    optimizer = fabric.setup_optimizers(adamw(model))
    assert fabric.load(path, {"model": model, "optimizer": optimizer}) == {"steps": 2}
    for _ in range(2):
        step(fabric, model, optimizer)
    return close(full(model), alone(4)[0].state_dict())


@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "one file"])
def test_training_goes_on_from_a_checkpoint_with_another_mesh(tmp_path, distributed):
    """Written by 2 x 2 ranks, read by the same and by 1 x 4; a single file also by plain PyTorch."""
    path = str(tmp_path / "checkpoint")
    on_ranks(save_halfway, 4, path, distributed)
    for data in (2, 1):
        equal_on_all_ranks(on_ranks(resume, 4, path, data, distributed))
    if not distributed:
        found = torch.load(path, weights_only=True)
        model = Network().double()
        model.load_state_dict(found["model"])
        close(model.state_dict(), alone(2)[0].state_dict())


@pytest.mark.slow
def test_training_goes_on_with_fewer_ranks(tmp_path):
    path = str(tmp_path / "checkpoint")
    on_ranks(save_halfway, 4, path, True)
    equal_on_all_ranks(on_ranks(resume, 2, path, 1, True))


# -- the Trainer -------------------------------------------------------------------------------------------------------


class Trained(L.LightningModule):
    """As docs/lightning.md shows. A batch is what each rank makes of the problem's."""

    def __init__(self):
        super().__init__()
        self.net, self.losses = None, []

    def configure_model(self):
        if self.net is None:
            self.net = copy.deepcopy(problem()[0])
            parallelize(self.net, self.device_mesh, **NAMES, units=[nn.Conv2d])

    def training_step(self, _, batch_idx):
        x, y = batch(self.trainer)
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss.detach().full_tensor(), sync_dist=True)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().full_tensor(), reduce_op="mean").item())
        return loss

    def validation_step(self, _, batch_idx):
        loss, error = evaluation(self.net, *batch(self.trainer))
        self.log_dict({"val_loss": loss, "val_error": error}, sync_dist=True)

    def configure_optimizers(self):
        return adamw(self)


def trainer_fits(folder):
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    trainer = L.Trainer(
        accelerator=torch.get_default_device().type, devices=4, strategy=strategy,
        plugins=[Pool()], max_epochs=1, gradient_clip_val=MAX_NORM, default_root_dir=folder,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Trained()
    trainer.fit(model, torch.utils.data.DataLoader(range(10)))  # five for each of the two
    expected, told = alone(5)
    assert model.losses == pytest.approx([loss for loss, _ in told], rel=1e-10)
    assert trainer.callback_metrics["loss"].item() == pytest.approx(told[-1][0], rel=1e-10)
    (found,) = trainer.validate(model, torch.utils.data.DataLoader(range(4)), verbose=False)
    with torch.no_grad():
        loss, error = evaluation(expected, *problem()[1:]).tolist()
    assert found == pytest.approx({"val_loss": loss, "val_error": error}, rel=1e-10)
    return close(full(model.net), expected.state_dict())


def test_the_trainer_fits_with_clipping_and_validates(tmp_path):
    equal_on_all_ranks(on_ranks(trainer_fits, 4, str(tmp_path)))


# -- the example -------------------------------------------------------------------------------------------------------


def run_example(ranks, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, ROOT / "examples" / "fabric_domain.py", "--accelerator", "cpu", "--check", *options],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert result.returncode == 0 and "PASS: largest" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_the_example_passes_its_check():
    run_example(4, "--steps", "4")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_example_in_bfloat16(precision):
    run_example(4, "--precision", precision)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="FSDP2 has no dp_mesh_dims yet")
def test_the_example_in_three_dims():
    run_example(8, "--three-d")
