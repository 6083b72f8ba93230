"""Data, wrappers of models, parametrizations, modes, and tools that look at a program from outside."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from shardtensor import scatter_tensor
from shardtensor.data import ShardLoader, SliceDataset
from shardtensor.parallel import DomainParallel, clip_grad_norm_, parallelize
from workflows.harness import DATA, EMPTY, MESH, TWO, Given, Programs, check, cut
from workflows.models import UNet, classes, classifier, drawn, images, points

PROGRAMS = Programs()


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 2, name: str = "") -> Iterator[tuple[str, Any]]:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield f"{name}loss {step}", loss
        yield f"{name}model {step}", model


def pixels(given: Given) -> tuple[Tensor, Tensor]:
    return given(images(), 2, 3), given(classes(3, 13, 11), 1, 2)


# -- data --------------------------------------------------------------------------------------------------------------


class Pairs(Dataset):
    """Images and labels in nested dicts, with what is no tensor."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "image": {"x": drawn(3, 13, 11, seed=i), "scale": 1.0 + i},
            "label": classes(13, 11, seed=i),
            "name": f"image {i}",
        }


def layouts(given: Given) -> dict[str, Any]:
    """Of the batches of :class:`Pairs` on one mesh dim or two."""
    both = (Shard(2), Shard(3)) if given.layout == MESH else (Shard(2),)
    ids = (Shard(1), Shard(2)) if given.layout == MESH else (Shard(1),)
    whole = (Replicate(),) * len(both)
    return {"image": {"x": both, "scale": whole}, "label": ids, "name": None}


@PROGRAMS.add(always=TWO)
def a_loader_whose_batches_are_scattered(given: Given) -> Iterator[tuple[str, Any]]:
    """torch's loader, shuffled by a seed, with a last batch that is smaller; each tensor is sent by one rank."""
    loader = DataLoader(Pairs(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))
    model = UNet()
    optimizer = SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, batch in enumerate(loader):
            x, y = batch["image"]["x"], batch["label"]
            if given.mesh is not None:
                of = layouts(given)
                x = scatter_tensor(x if given.rank == 0 else None, given.mesh, of["image"]["x"])
                y = scatter_tensor(y if given.rank == 0 else None, given.mesh, of["label"])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x * batch["image"]["scale"].view(-1, 1, 1, 1)), y)
            loss.backward()
            optimizer.step()
            yield f"loss {epoch}, {i}", (loss, batch["name"])
    yield "model", model


@PROGRAMS.add(differs="random numbers")  # of which a loader of shards has its own
def a_loader_of_shards(given: Given) -> Iterator[tuple[str, Any]]:
    """One rank reads: nested dicts, in which strings and numbers go along; two epochs."""
    loader: Any = DataLoader(Pairs(), batch_size=3)
    if given.mesh is not None:
        loader = ShardLoader(loader if given.rank == 0 else None, given.mesh, layouts(given))
    model = UNet()
    optimizer = SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, batch in enumerate(loader):
            optimizer.zero_grad()
            x = batch["image"]["x"] * batch["image"]["scale"].view(-1, 1, 1, 1)
            loss = F.cross_entropy(model(x), batch["label"])
            loss.backward()
            optimizer.step()
            yield f"loss {epoch}, {i}", (loss, list(batch["name"]))
    yield "model", model


@PROGRAMS.add()
def a_data_set_of_slices(given: Given) -> Iterator[tuple[str, Any]]:
    """All ranks read, from an array in a file."""
    model = UNet()  # before a loader draws its seed
    array = np.asarray(drawn(7, 3, 13, 11, seed=5))
    path = given.folder / f"{given.rank}.npy"
    np.save(path, array)
    kept = np.load(path, mmap_mode="r")
    batches: Any
    if given.mesh is None:
        batches = DataLoader(TensorDataset(torch.as_tensor(array)), batch_size=3)
        batches = ({"x": each[0]} for each in batches)
    else:
        placements = (Shard(2), Shard(3)) if given.layout == MESH else (Shard(2),)
        sizes = {m: cut(13 if m == 0 else 11, given.mesh.size(m)) for m in range(given.mesh.ndim)}
        slices = SliceDataset({"x": kept}, given.mesh, placements, shard_sizes=sizes)
        batches = slices.batches(DataLoader(slices, batch_size=3))
    for i, batch in enumerate(batches):
        loss = model(batch["x"]).square().mean()
        loss.backward()
        yield f"loss {i}", loss
    yield "model", model


Batch = namedtuple("Batch", ["x", "y", "about"])


@dataclass
class Sample:
    x: Tensor
    parts: list[Tensor]


@PROGRAMS.add()
def containers_of_batches(given: Given) -> Iterator[tuple[str, Any]]:
    """Dicts of dicts, named tuples, dataclasses; moved, mapped, split into micro-batches and joined."""
    x, y = pixels(given)
    batch = Batch({"a": x, "b": [x.flip(2), (x * 2,)]}, y, OrderedDict(name="first", weight=0.5))

    def mapped(f: Any, value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, f, value)

    batch = mapped(lambda t: t.to("cpu", non_blocking=True), batch)
    half = mapped(lambda t: t.to(torch.float32) if t.is_floating_point() else t, batch)
    yield "dtypes", [str(t.dtype) for t in torch.utils._pytree.tree_leaves(half) if isinstance(t, Tensor)]
    model = UNet()
    for i in range(3):
        part = mapped(lambda t, i=i: t[i : i + 1], batch)
        loss = F.cross_entropy(model(part.x["a"] + part.x["b"][1][0]), part.y) * part.about["weight"]
        loss.backward()
        yield f"loss {i}", loss
    sample = Sample(x, list(x.split([2, 1])))
    copied = copy.deepcopy(sample)
    copied.x.mul_(0)
    yield "copied", (sample.x, copied.x, torch.cat(sample.parts) - x)
    chunks = [model(c) for c in x.chunk(3)]
    yield "chunks", torch.cat(chunks)
    yield "model", model


@PROGRAMS.add()
def augmentations_on_the_device(given: Given) -> Iterator[tuple[str, Any]]:
    """By numbers of a seed: crops, flips of some samples, affine maps with a plain grid, noise, erasing, blur."""
    x, y = pixels(given)
    model = UNet()
    for step in range(2):
        i, j = int(torch.randint(0, 4, ())), int(torch.randint(0, 3, ()))
        flip = torch.rand(3) < 0.5
        a, b = x[:, :, i : i + 9, j : j + 9], y[:, i : i + 9, j : j + 9]
        a = torch.where(flip.view(-1, 1, 1, 1), a.flip(3), a)
        b = torch.where(flip.view(-1, 1, 1), b.flip(2), b)
        a = a * (1 + 0.1 * torch.randn(3, 1, 1, 1)) + 0.1 * torch.randn(3, 3, 9, 9)
        hole = torch.zeros(9, 9, dtype=torch.bool)
        hole[2:6, 3:5] = True
        a = a.masked_fill(hole, 0.0)
        a = (a - a.mean((2, 3), keepdim=True)) / (a.std((2, 3), keepdim=True) + 1e-6)
        kernel = torch.softmax(torch.randn(5), 0)
        a = F.conv2d(F.pad(a, (2, 2, 0, 0), mode="reflect"), kernel.view(1, 1, 1, 5).expand(3, 1, 1, 5), groups=3)
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        yield f"image {step}", (a, b)
        yield f"loss {step}", loss
    yield "model", model


# -- wrappers ----------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Without statistics of the batch, which are those of each rank's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


def wrapped(given: Given, wrap: Any, clip: Any = nn.utils.clip_grad_norm_) -> Iterator[tuple[str, Any]]:
    """The mean over samples of all ranks is that of one process."""
    model = Small()
    used = wrap(model, given) if given.mesh is not None else model
    optimizer = AdamW(used.parameters(), lr=0.01)
    x, y = given(drawn(4, 3, 13, 11), 2), given(classes(4, 13, 11), 1)
    for step in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(used(x), y)
        loss.backward()
        norm = (clip if given.mesh is not None else nn.utils.clip_grad_norm_)(used.parameters(), 0.5)
        optimizer.step()
        yield f"step {step}", (given.mean(loss), norm)
        yield f"model {step}", model


def ddp(model: nn.Module, given: Given, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, process_group=given.mesh["dp"].get_group(), **options)


def sharded(model: nn.Module, given: Given) -> nn.Module:
    for layer in (model.first, model.last, model):
        fully_shard(layer, mesh=given.mesh["dp"])
    return model


def parallelized(model: nn.Module, given: Given) -> nn.Module:
    parallelize(model, given.mesh)
    return model


PROGRAMS.add("DDP on dp and domain", layouts=(DATA,), always=DATA)(partial(wrapped, wrap=ddp))
PROGRAMS.add("DDP, gradients as views of buckets", layouts=(DATA,))(
    partial(wrapped, wrap=partial(ddp, gradient_as_bucket_view=True, bucket_cap_mb=0.001))
)
PROGRAMS.add("DDP, a static graph", layouts=(DATA,))(partial(wrapped, wrap=partial(ddp, static_graph=True)))
PROGRAMS.add("fully_shard on dp and domain", layouts=(DATA,))(partial(wrapped, wrap=sharded))
PROGRAMS.add("parallelize", layouts=(DATA,))(partial(wrapped, wrap=parallelized, clip=clip_grad_norm_))


@PROGRAMS.add(layouts=(DATA,))
def accumulation_without_synchronization(given: Given) -> Iterator[tuple[str, Any]]:
    """DDP's no_sync for the first of two micro-batches."""
    model = Small()
    used = ddp(model, given) if given.mesh is not None else model
    optimizer = SGD(used.parameters(), lr=0.1)
    data = [(given(drawn(4, 3, 13, 11, seed=s), 2), given(classes(4, 13, 11, seed=s), 1)) for s in range(4)]
    for step in range(2):
        for i, (x, y) in enumerate(data[2 * step : 2 * step + 2]):
            if given.mesh is not None and i == 0:
                with used.no_sync():
                    (F.cross_entropy(used(x), y) / 2).backward()
            else:
                (F.cross_entropy(used(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield f"weights {step}", [p for p in model.parameters()]


@PROGRAMS.add()
def a_pipeline_that_knows_of_no_shards(given: Given) -> Iterator[tuple[str, Any]]:
    """DomainParallel: plain tensors in and out, in training and in evaluation."""
    model = nn.ModuleDict({"encoder": UNet(out=6), "head": nn.Conv2d(6, 3, 1)})
    if given.mesh is not None:
        inputs = (Shard(2), Shard(3)) if given.layout == MESH else Shard(2)
        outputs = (Replicate(), Replicate()) if given.layout == MESH else Replicate()
        parallelize_module(model["encoder"], given.mesh, DomainParallel(inputs=inputs, outputs=outputs))
    optimizer = SGD(model.parameters(), lr=0.1)
    x, y = images().requires_grad_(), classes(3, 13, 11)
    for step in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model["head"](model["encoder"](x)), y)
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"input {step}", x.grad
        yield f"model {step}", model
    model.eval()
    with torch.no_grad():
        out = model["encoder"](x)
    yield "out", (type(out).__name__, out)


@PROGRAMS.add()
def a_compiled_step(given: Given) -> Iterator[tuple[str, Any]]:
    """By the backend that makes graphs and runs them as they are."""
    torch._dynamo.reset()
    model, (x, y) = Small(), pixels(given)
    compiled = torch.compile(model, backend="aot_eager")
    yield from trained(compiled, x, y)
    torch._dynamo.reset()


# -- parametrizations --------------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return (w + w.flip(-1)) / 2


class Low(nn.Module):
    """LoRA: a product of two thin matrices is added."""

    def __init__(self, w: Tensor, rank: int = 2) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, w[0].numel()) * 0.1)
        self.b = nn.Parameter(torch.zeros(len(w), rank))

    def forward(self, w: Tensor) -> Tensor:
        return w + (self.b @ self.a).view_as(w)


@PROGRAMS.add(always=EMPTY)
def parametrized_weights(given: Given) -> Iterator[tuple[str, Any]]:
    """Of the program's, weight norm, spectral norm, orthogonal; cached; made permanent at the end."""
    model, (x, y) = Small(), pixels(given)
    parametrize.register_parametrization(model.first, "weight", Symmetric())
    parametrizations.weight_norm(model.last)
    yield from trained(model, x, y)
    with parametrize.cached():
        F.cross_entropy(model(x) + model(x.flip(2)), y).backward()
    yield "cached", model
    parametrize.remove_parametrizations(model.first, "weight")
    parametrize.remove_parametrizations(model.last, "weight")
    yield from trained(model, x, y, name="permanent, ")
    other = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 6, 3, padding=1)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Conv2d(6, 3, 1), orthogonal_map="matrix_exp"),
    )
    yield from trained(other, x, y, name="other, ")


@PROGRAMS.add()
def norms_of_weights_by_hooks(given: Given) -> Iterator[tuple[str, Any]]:
    """The older functions, which compute the weight in a hook before each call."""
    model, (x, y) = Small(), pixels(given)
    nn.utils.weight_norm(model.first)
    nn.utils.spectral_norm(model.last)
    yield from trained(model, x, y)
    nn.utils.remove_weight_norm(model.first)
    nn.utils.remove_spectral_norm(model.last)
    model.eval()
    yield "removed", model(x)


@PROGRAMS.add()
def pruned(given: Given) -> Iterator[tuple[str, Any]]:
    """Without some of the weights, by their size, in rows and in all layers; trained further; made permanent."""
    model, (x, y) = UNet(norm=False), pixels(given)
    yield from trained(model, x, y, name="before, ")
    prune.l1_unstructured(model.first, "weight", 0.3)
    prune.ln_structured(model.down, "weight", 0.25, n=2, dim=0)
    prune.global_unstructured([(model.up, "weight"), (model.last, "weight")], prune.L1Unstructured, amount=0.2)
    yield from trained(model, x, y, name="pruned, ")
    for layer in (model.first, model.down, model.up, model.last):
        prune.remove(layer, "weight")
    yield "zeros", [(p == 0).double().mean().item() for p in model.parameters()]
    yield from trained(model, x, y, name="after, ")


@PROGRAMS.add()
def adapters_of_low_rank(given: Given) -> Iterator[tuple[str, Any]]:
    """Only they learn; then they are merged, and saved alone."""
    model, (x, y) = Small(), pixels(given)
    model.requires_grad_(False)
    for layer in (model.first, model.last):
        parametrize.register_parametrization(layer, "weight", Low(layer.weight))
    for name, p in model.named_parameters():
        p.requires_grad_(".0." in name)
    yield from trained(model, x, y, 3)
    small = {k: v for k, v in model.state_dict().items() if ".0." in k}
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    yield "kept", torch.load(file)
    out = model(x)
    for layer in (model.first, model.last):
        parametrize.remove_parametrizations(layer, "weight")
    yield "merged", (model(x) - out).abs().max()


@PROGRAMS.add()
def tied_weights(given: Given) -> Iterator[tuple[str, Any]]:
    """A weight in several layers, transposed in one; parameters in dicts; a weight made by a network."""
    first, maker = nn.Linear(3, 8), nn.Linear(2, 24)
    extra = nn.ParameterDict({"scale": nn.Parameter(torch.ones(8)), "shift": nn.Parameter(torch.zeros(8))})
    model = nn.ModuleList([first, maker, extra])
    optimizer = AdamW(model.parameters(), lr=0.01)
    x, code = given(points(), 0), drawn(2)
    for step in range(2):
        h = torch.tanh(first(x) * extra["scale"] + extra["shift"])
        back = F.linear(h, first.weight.T)
        made = F.linear(h, maker(code).view(3, 8))
        again = torch.tanh(first(back))
        loss = F.mse_loss(back, x) + F.mse_loss(made, x.sin()) + again.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"model {step}", model


# -- freezing, copies, modes -------------------------------------------------------------------------------------------


@PROGRAMS.add()
def frozen_and_thawed(given: Given) -> Iterator[tuple[str, Any]]:
    """A head first, then all; batch norms that stay in evaluation; gradients that are None."""
    model, x, y = classifier(), given(images(), 2, 3), classes(3, of=4)
    for p in model[:-1].parameters():
        p.requires_grad = False
    model.train()
    model[1].eval()
    yield from trained(model, x, y, name="head, ")
    yield "none", [name for name, p in model.named_parameters() if p.grad is None]
    for p in model.parameters():
        p.requires_grad = True
    model[1].momentum = 0.5
    model.train()
    yield from trained(model, x, y, name="all, ")


@PROGRAMS.add()
def training_and_evaluation_in_turns(given: Given) -> Iterator[tuple[str, Any]]:
    """No grad, inference mode, set_grad_enabled, decorators; numbers of two sizes of images."""
    model, (x, y) = UNet(), pixels(given)
    other = given(drawn(2, 3, 21, 17), 2, 3)
    optimizer = AdamW(model.parameters(), lr=0.01)

    @torch.no_grad()
    def evaluated(image: Tensor) -> Tensor:
        model.eval()
        out = model(image)
        model.train()
        return out

    for epoch in range(2):
        for phase in ("train", "val"):
            model.train(phase == "train")
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                out = model(x)
                loss = F.cross_entropy(out, y)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            yield f"{phase} {epoch}", (loss, out.requires_grad, out.argmax(1))
        yield f"other {epoch}", evaluated(other)
        with torch.inference_mode():
            model.eval()
            out = model(other)
            out += 1
            yield f"inference {epoch}", (out, out.is_inference(), model(x).mean().item())
        yield f"model {epoch}", model


@PROGRAMS.add()
def copies_of_models_and_of_inputs(given: Given) -> Iterator[tuple[str, Any]]:
    """Deep copies in the middle of training, by state, by pickling; clones and detached views of shards."""
    model, (x, y) = UNet(), pixels(given)
    yield from trained(model, x, y)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    yield from trained(model, x, y, name="further, ")
    yield "teacher", teacher(x)
    yield from trained(loaded, x, y, name="loaded, ")
    kept, view, other = x.clone(), x.detach(), copy.deepcopy(x)
    x.mul_(2)
    yield "inputs", (x, kept, view, other)
    yield "same", (torch.equal(kept, other), torch.allclose(view, kept * 2), bool((x == view).all()))


@PROGRAMS.add(rtol=1e-1)
def a_model_in_half_precision(given: Given) -> Iterator[tuple[str, Any]]:
    """bfloat16 and float16 of weights, of autocast with parts left out, and float64 around float32."""
    for dtype in (torch.bfloat16, torch.float16):
        model, (x, y) = Small().to(dtype), pixels(given)
        out = model(x.to(dtype))
        F.cross_entropy(out.float(), y).backward()
        yield f"{dtype}", (str(out.dtype), out.float().mean(), model.first.weight.grad.float().norm())
        model = Small().float()
        with torch.autocast("cpu", dtype):
            h = model.first(x.float())
            with torch.autocast("cpu", enabled=False):
                n = model.norm(h.float())
            out = model.last(n)
            dtypes = [str(t.dtype) for t in (h, n, out, out @ out.mT, out.softmax(1), out.sum())]
        F.cross_entropy(out.float(), y).backward()
        yield f"autocast to {dtype}", (dtypes, out.float().std(), str(model.first.weight.grad.dtype))


@PROGRAMS.add()
def tensors_that_are_written_to(given: Given) -> Iterator[tuple[str, Any]]:
    """In-place layers, slices, masks, ``out=``, ``swap`` of parts, and versions that autograd checks."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 1), nn.SiLU(inplace=True)
    )
    x, _ = pixels(given)
    out = model(x)
    out[:, :, 4:9] *= 2
    out[:, 1, :, 2] = 0
    out[out > 1] = 1
    out[..., 1:].sub_(0.1 * torch.ones(13, 10))
    out.clamp_(-0.5, 0.9).mean().backward()
    yield "out", out
    yield "model", model
    total = torch.zeros_like(x)
    torch.add(x, 1.0, out=total)
    total.index_fill_(3, torch.tensor([1, 5]), 3.0).index_add_(1, torch.tensor([0, 2]), x[:, :2])
    yield "total", total
    y = x.exp()
    z = y * y
    y.add_(1)
    try:
        z.sum().backward() if z.requires_grad else x.requires_grad_()
        message = "none"
    except RuntimeError as error:
        message = str(error)[:60]
    yield "message", message


# -- tools -------------------------------------------------------------------------------------------------------------


@PROGRAMS.add(layouts=(TWO, MESH))  # what a rank with an empty shard counts has no kinds
def operations_are_counted(given: Given) -> Iterator[tuple[str, Any]]:
    """FlopCounterMode: in the first step of a size what it counts later. Halos add to what one device counts."""
    model, x = UNet(), given(drawn(2, 3, 17, 13), 2, 3)
    seen = []
    for step in range(3):
        with FlopCounterMode(display=False) as counted:
            model(x).square().mean().backward()
        seen.append(counted.get_flop_counts()["Global"])
        yield f"kinds {step}", sorted(map(str, seen[-1]))
    yield "equal", [each == seen[-1] for each in seen]
    yield "model", model


@PROGRAMS.add()
def anomalies_are_looked_for(given: Given) -> Iterator[tuple[str, Any]]:
    """Anomaly mode in training, and the error that it raises of a NaN."""
    model, (x, y) = Small(), pixels(given)
    with torch.autograd.set_detect_anomaly(True):
        yield from trained(model, x, y)
    w = torch.zeros(1, requires_grad=True)
    try:
        with torch.autograd.detect_anomaly():
            ((x * 0) / (w * x * 0)).sum().backward()
        message = "none"
    except RuntimeError as error:
        message = "returned nan values" in str(error)
    yield "message", message


@PROGRAMS.add()
def a_program_is_profiled(given: Given) -> Iterator[tuple[str, Any]]:
    """With a schedule, shapes and ranges of the program's; results are as without."""
    model, (x, y) = UNet(), pixels(given)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
        on_trace_ready=lambda p: seen.append("forward" in {e.key for e in p.key_averages()}),
        record_shapes=True,
    ) as profile:
        for step in range(4):
            with torch.profiler.record_function("forward"):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profile.step()
            yield f"loss {step}", loss
    yield "seen", seen
    yield "model", model


@PROGRAMS.add()
def deterministic_algorithms(given: Given) -> Iterator[tuple[str, Any]]:
    """Asked for in all of torch, and with errors for what has none; memory is filled."""
    model, (x, y) = UNet(), pixels(given)
    torch.use_deterministic_algorithms(True)
    try:
        yield from trained(model, x, y)
        yield "asked for", torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@PROGRAMS.add()
def summaries_of_a_model(given: Given) -> Iterator[tuple[str, Any]]:
    """What a summary asks for by hooks: shapes, sizes, dtypes, numbers of parameters; representations."""
    model, x = UNet(), given(images(), 2, 3)
    rows: list[Any] = []

    def look(module: nn.Module, args: Any, out: Tensor) -> None:
        rows.append((type(module).__name__, tuple(out.shape), out.dim(), str(out.dtype), out.numel(), len(out)))

    handles = [m.register_forward_hook(look) for m in model.modules()]
    model(x)
    for handle in handles:
        handle.remove()
    yield "rows", rows
    yield "about", (x.size(2), x.ndim, x.element_size() * x.nelement(), x.is_contiguous(), x.stride(), str(x.device))


@PROGRAMS.add()
def a_model_on_meta_that_is_filled(given: Given) -> Iterator[tuple[str, Any]]:
    """Made without memory, then initialized by hand; and skip_init."""
    with torch.device("meta"):
        model = Small()
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    nn.init.orthogonal_(model.last.weight)
    model.extra = nn.utils.skip_init(nn.Linear, 11, 11, bias=False)
    nn.init.kaiming_uniform_(model.extra.weight)
    yield from trained(model, *pixels(given))


@PROGRAMS.parametrize()
def test_programs(name, layout, tmp_path):
    check(__name__, name, layout, tmp_path)
