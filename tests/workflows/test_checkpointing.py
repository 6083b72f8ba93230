"""Recomputation, tensors that are saved elsewhere, and training that goes on from files."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from workflows.harness import EMPTY, MESH, TWO, Given, Programs, check
from workflows.models import UNet, classes, classifier, images, tokens, transformer

PROGRAMS = Programs()
aten = torch.ops.aten


def steps(
    model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Iterator[tuple[str, Any]]:
    for step in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(forward(x), y)
        loss.backward()
        yield f"model {step}", model
        optimizer.step()
        yield f"loss {step}", loss


# -- recomputation -----------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Calls each of the layers under a checkpoint."""

    def __init__(self, layers: list[nn.Module], **options: Any) -> None:
        super().__init__()
        self.layers, self.options = nn.ModuleList(layers), options

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options)
        return x


def layers() -> list[nn.Module]:
    """One of each family: convolutions, norms, pooling, resampling, linear layers, attention."""
    return [
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.GELU()),
        nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.MaxPool2d(3, 1, 1)),
        nn.Sequential(nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1), nn.SiLU()),
        Tokens(),
        nn.Conv2d(8, 3, 1),
    ]


class Tokens(nn.Module):
    """A transformer's layer on the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        sequence = x.mean(3).mT
        normed = self.norm(sequence)
        sequence = sequence + self.attention(normed, normed, normed, need_weights=False)[0]
        sequence = sequence + self.mlp(sequence)
        return x + sequence.mT[..., None]


def recomputed(given: Given, **options: Any) -> Iterator[tuple[str, Any]]:
    model = Recomputed(layers(), **options)
    # A reentrant checkpoint needs an input that requires grad.
    x = given(images(), 2, 3).requires_grad_()
    yield from steps(model, model, torch.optim.AdamW(model.parameters(), lr=0.01), x, given(images(2), 2, 3))
    yield "input", x.grad


PROGRAMS.add("checkpoint, not reentrant", always=EMPTY)(partial(recomputed, use_reentrant=False))
PROGRAMS.add("checkpoint, reentrant")(partial(recomputed, use_reentrant=True))
PROGRAMS.add("checkpoint, without random state")(
    partial(recomputed, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
)
PROGRAMS.add("checkpoint, not stopped early")(partial(recomputed, use_reentrant=False, early_stop=False))

MATMULS = [aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default]
NORMS = [aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default]
POINTWISE = {aten.gelu.default, aten.silu.default, aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor}


def save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def save_each_second_matmul(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """With a count of its own for the forward pass and for the recomputation."""
    counts = save_each_second_matmul.counts  # type: ignore[attr-defined]
    if op not in MATMULS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    counts[context.is_recompute] = counts.get(context.is_recompute, 0) + 1
    return CheckpointPolicy.MUST_SAVE if counts[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE


def save_all_but_pointwise(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    pointwise = op in POINTWISE or torch.Tag.pointwise in op.tags
    return CheckpointPolicy.PREFER_RECOMPUTE if pointwise else CheckpointPolicy.MUST_SAVE


def recompute_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def save_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def prefer_to_save_norms(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if op in NORMS else CheckpointPolicy.PREFER_RECOMPUTE


def selective(given: Given, policy: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    def contexts() -> Any:
        save_each_second_matmul.counts = {}  # type: ignore[attr-defined]
        return create_selective_checkpoint_contexts(policy, **options)

    yield from recomputed(given, use_reentrant=False, context_fn=contexts)


POLICIES = {
    "a list of matmuls": MATMULS,
    "a list of norms": NORMS,
    "matmuls": save_matmuls,
    "each second matmul": save_each_second_matmul,
    "all but pointwise": save_all_but_pointwise,
    "none": recompute_all,
    "norms, preferably": prefer_to_save_norms,
}
for _name, _policy in POLICIES.items():
    PROGRAMS.add(f"selective checkpoint, saves {_name}")(partial(selective, policy=_policy))
# Batch norm writes its running statistics, and a view is written to: torch asks for the permission.
PROGRAMS.add("selective checkpoint, saves all")(partial(selective, policy=save_all, allow_cache_entry_mutation=True))


@PROGRAMS.add()
def selective_checkpoint_of_a_transformer(given: Given) -> Iterator[tuple[str, Any]]:
    model = Recomputed(
        list(transformer(2).layers),
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_all_but_pointwise),
    )
    x = given(tokens(), 1, 0)
    yield from steps(model, model, torch.optim.SGD(model.parameters(), lr=0.1), x, given(tokens(2), 1, 0))


@PROGRAMS.add()
def checkpoints_in_checkpoints(given: Given) -> Iterator[tuple[str, Any]]:
    inner = layers()
    model = nn.ModuleList(inner)

    def first(x: Tensor) -> Tensor:
        return checkpoint(inner[1], checkpoint(inner[0], x, use_reentrant=False), use_reentrant=False)

    def forward(x: Tensor) -> Tensor:
        x = checkpoint(first, x, use_reentrant=False)
        return checkpoint(nn.Sequential(*inner[2:]), x, use_reentrant=False)

    yield from steps(
        model, forward, torch.optim.SGD(model.parameters(), lr=0.1), given(images(), 2, 3), given(images(2), 2, 3)
    )


@PROGRAMS.add()
def checkpoint_of_a_sequence(given: Given) -> Iterator[tuple[str, Any]]:
    model = nn.Sequential(*layers())
    for reentrant in (False, True):
        x = given(images(), 2, 3).requires_grad_()
        forward = partial(checkpoint_sequential, model, 3, use_reentrant=reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for name, value in steps(model, forward, optimizer, x, given(images(2), 2, 3)):
            yield f"reentrant {reentrant}, {name}", value
        yield f"reentrant {reentrant}, input", x.grad


@PROGRAMS.add()
def recomputation_in_autocast(given: Given) -> Iterator[tuple[str, Any]]:
    """The recomputation is in the precision of the forward pass, or torch complains."""
    model = Recomputed(layers(), use_reentrant=False)
    x = given(images(), 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        out = model.float()(x.float())
    out.float().square().mean().backward()
    yield "dtypes", (str(out.dtype), [str(p.grad.dtype) for p in model.parameters()])


@PROGRAMS.add()
def arguments_by_name_and_several_results(given: Given) -> Iterator[tuple[str, Any]]:
    model = UNet(out=6)

    def part(x: Tensor, scale: float, *, mask: Tensor, extra: dict[str, Tensor]) -> dict[str, Any]:
        out = model(x * scale + extra["shift"]).masked_fill(mask, 0.0)
        return {"parts": out.chunk(2, 1), "mean": out.mean()}

    x, mask = given(images(), 2, 3).requires_grad_(), given(images(2)[:, :1] > 0.5, 2, 3)
    extra = {"shift": given(images(3), 2, 3).requires_grad_()}
    out = checkpoint(part, x, 0.5, mask=mask, extra=extra, use_reentrant=False)
    (out["parts"][0].square().mean() + out["mean"] * out["parts"][1].std()).backward()
    yield "out", out
    yield "model", model
    yield "inputs", (x.grad, extra["shift"].grad)


@PROGRAMS.add()
def a_reversible_network(given: Given) -> Iterator[tuple[str, Any]]:
    """Which recomputes its inputs from its outputs in a function of the program's."""
    first, second = nn.Conv2d(2, 2, 3, padding=1), nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh())

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                c = a + first(b)
                d = b + second(c)
            ctx.save_for_backward(c.detach(), d.detach())
            return c, d

        @staticmethod
        def backward(ctx: Any, dc: Tensor, dd: Tensor) -> Any:
            c, d = ctx.saved_tensors
            with torch.enable_grad():
                c = c.detach().requires_grad_()
                after = second(c)
                more = torch.autograd.grad(after, (c, *second.parameters()), dd)
                b = (d - after).detach().requires_grad_()
                db = torch.autograd.grad(first(b), (b, *first.parameters()), dc + more[0])
            return dc + more[0], dd + db[0], *db[1:], *more[1:]

    model = nn.ModuleList([first, second])
    x = given(torch.cat([images(), images(2)[:, :1]], 1), 2, 3).requires_grad_()
    c, d = Reversible.apply(*x.chunk(2, 1), *model.parameters())
    (c.square().mean() + (c * d).mean()).backward()
    yield "out", (c, d)
    yield "input", x.grad
    yield "model", model


# -- saved tensors -----------------------------------------------------------------------------------------------------


def offloaded(given: Given, hooks: Any) -> Iterator[tuple[str, Any]]:
    model = nn.Sequential(*layers())

    def forward(x: Tensor) -> Tensor:
        with hooks():
            return model(x)

    x = given(images(), 2, 3).requires_grad_()
    yield from steps(model, forward, torch.optim.AdamW(model.parameters(), lr=0.01), x, given(images(2), 2, 3))
    yield "input", x.grad


@contextmanager
def numbered() -> Iterator[None]:
    """Keeps tensors in a list of its own."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> int:
        kept.append(x.detach().clone())
        return len(kept) - 1

    with saved_tensors_hooks(pack, kept.__getitem__):
        yield


@contextmanager
def in_files() -> Iterator[None]:
    """Keeps large tensors as bytes."""

    def pack(x: Tensor) -> Any:
        if x.numel() < 50:
            return x
        file = io.BytesIO()
        torch.save(x, file)
        return file.getvalue()

    def unpack(kept: Any) -> Tensor:
        return torch.load(io.BytesIO(kept), weights_only=False) if isinstance(kept, bytes) else kept

    with saved_tensors_hooks(pack, unpack):
        yield


PROGRAMS.add("save_on_cpu")(partial(offloaded, hooks=save_on_cpu))
PROGRAMS.add("saved_tensors_hooks, a list", always=TWO)(partial(offloaded, hooks=numbered))
PROGRAMS.add("saved_tensors_hooks, bytes")(partial(offloaded, hooks=in_files))


@PROGRAMS.add(always=EMPTY)
def saved_tensors_that_are_written_to(given: Given) -> Iterator[tuple[str, Any]]:
    """The backward pass has the values from before."""
    model, x = nn.Sequential(*layers()), given(images(), 2, 3).requires_grad_()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        squares = x.square()
        y = model(squares)
        z = (y * squares).sin()
        squares.mul_(2)
        y.add_(1.0)
        z.mean().backward()
    yield "model", model
    yield "written", (squares, y, x.grad)


@PROGRAMS.add(rtol=1e-1, differs="grad")
def saved_in_half_precision(given: Given) -> Iterator[tuple[str, Any]]:
    """Activations are compressed, so that gradients are inexact."""

    def pack(x: Tensor) -> Any:
        return (x.bfloat16(), x.dtype) if x.is_floating_point() else (x, x.dtype)

    model, (x, y) = UNet(), (given(images(), 2, 3), given(images(2), 2, 3))

    def forward(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, lambda kept: kept[0].to(kept[1])):
            return model(x)

    yield from steps(model, forward, torch.optim.SGD(model.parameters(), lr=0.01), x, y)


@PROGRAMS.add()
def activations_offloaded_and_recomputed(given: Given) -> Iterator[tuple[str, Any]]:
    """What a checkpoint keeps, its input, is offloaded."""
    model = Recomputed(layers(), use_reentrant=False)

    def forward(x: Tensor) -> Tensor:
        with save_on_cpu():
            return model(x)

    yield from steps(
        model, forward, torch.optim.SGD(model.parameters(), lr=0.1), given(images(), 2, 3), given(images(2), 2, 3)
    )


# -- files -------------------------------------------------------------------------------------------------------------


class Run:
    """A model with batch norm, its optimizer and its schedule."""

    def __init__(self) -> None:
        self.model = UNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 6)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])


@PROGRAMS.add(always=MESH)
def resumed_from_a_file_of_one_rank(given: Given) -> Iterator[tuple[str, Any]]:
    """One rank saves, and one process can read the file: it has plain tensors only."""
    x, y = given(images(), 2, 3), given(classes(3, 13, 11), 1, 2)
    run, path = Run(), given.folder / "last.pt"
    for step in range(2):
        yield f"loss {step}", run.step(x, y)
    if given.rank == 0:
        torch.save(run.state_dict(), path)
    given.wait()
    expected = run.step(x, y)
    torch.manual_seed(5)
    run = Run()
    run.load_state_dict(torch.load(path))
    yield "the same step", (expected, run.step(x, y))
    yield "model", run.model
    yield "optimizer", run.optimizer


@PROGRAMS.add()
def the_best_of_several(given: Given) -> Iterator[tuple[str, Any]]:
    """Kept in memory by deep copies of state dicts, and in files for each rank; rolled back after a loss of NaN."""
    x, y = given(images(), 2, 3), given(classes(3, 13, 11), 1, 2)
    run = Run()
    best, kept = float("inf"), None
    for step in range(4):
        loss = run.step(x * float("nan") if step == 2 else x, y)
        if not torch.isfinite(loss):
            run.load_state_dict(kept)
        elif loss < best:
            best, kept = loss.item(), copy.deepcopy(run.state_dict())
        yield f"step {step}", (loss, best)
    yield "model", run.model


@PROGRAMS.add()
def a_state_that_is_part_sharded(given: Given) -> Iterator[tuple[str, Any]]:
    """Outputs saved next to the weights, by each rank its own file."""
    x, y = given(images(), 2, 3), given(classes(3, 13, 11), 1, 2)
    run = Run()
    run.step(x, y)
    path = given.folder / f"rank {given.rank}.pt"
    with torch.no_grad():
        torch.save({"model": run.model.state_dict(), "out": run.model.eval()(x), "x": x}, path)
    found = torch.load(path, weights_only=False)
    other = Run()
    other.model.load_state_dict(found["model"])
    with torch.no_grad():
        yield "same", (other.model.eval()(found["x"]) - found["out"]).abs().max()
    yield "out", found["out"]


@PROGRAMS.add()
def resumed_by_distributed_checkpoint(given: Given) -> Iterator[tuple[str, Any]]:
    """Weights, the optimizer, and a sharded state, by ``torch.distributed.checkpoint``."""
    x, y = given(images(), 2, 3), given(classes(3, 13, 11), 1, 2)
    run = Run()
    for step in range(2):
        yield f"loss {step}", run.step(x, y)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "x": x, "step": 2}, checkpoint_id=given.folder / "step 2")
    expected = run.step(x, y)
    run = Run()
    run.schedule.step()
    run.schedule.step()
    model, optimizer = get_state_dict(run.model, run.optimizer)
    found = {"model": model, "optimizer": optimizer, "x": torch.zeros_like(x), "step": 0}
    dcp.load(found, checkpoint_id=given.folder / "step 2")
    set_state_dict(run.model, run.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    yield "read", (found["x"], found["step"])
    yield "the same step", (expected, run.step(found["x"], y))
    yield "model", run.model


@PROGRAMS.add()
def a_part_of_a_checkpoint(given: Given) -> Iterator[tuple[str, Any]]:
    """A backbone under another head: keys renamed, filtered by their shapes, not strict, and assigned."""
    old, new = classifier(4), classifier(7)
    x, y = given(images(), 2, 3), classes(3, of=7)
    old(x).square().mean().backward()
    state = {f"module.{key}": value for key, value in old.state_dict().items()}
    state = {key.removeprefix("module."): value for key, value in state.items()}
    fits = {key: value for key, value in state.items() if new.state_dict()[key].shape == value.shape}
    missing, unexpected = new.load_state_dict(fits, strict=False, assign=True)
    yield "keys", (missing, unexpected)
    F.cross_entropy(new(x), y).backward()
    yield "old", old
    yield "new", new


@PROGRAMS.parametrize()
def test_programs(name, layout, tmp_path):
    check(__name__, name, layout, tmp_path)
