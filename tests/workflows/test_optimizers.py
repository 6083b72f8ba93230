"""Training loops: every optimizer of torch, schedules, groups, accumulation, clipping, scaling, averages of weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim import swa_utils

from workflows.harness import EMPTY, MESH, TWO, Given, Programs, check
from workflows.models import UNet, classes, classifier, drawn, images, mlp, points, tokens, transformer

PROGRAMS = Programs()


def pixels(given: Given) -> tuple[Tensor, Tensor]:
    """Images and the class of each pixel."""
    return given(images(), 2, 3), given(classes(3, 13, 11), 1, 2)


# -- optimizers --------------------------------------------------------------------------------------------------------


def trained(given: Given, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    model, (x, y) = UNet(), pixels(given)
    optimizer = make(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss.item()
        yield f"model {step}", model
        yield f"optimizer {step}", optimizer


O = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(O.SGD, lr=0.1),
    "SGD, Nesterov": partial(O.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, maximize, dampening": partial(O.SGD, lr=0.01, momentum=0.9, dampening=0.1, maximize=True, foreach=False),
    "SGD, fused": partial(O.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(O.Adam, lr=0.01),
    "Adam, amsgrad, foreach": partial(O.Adam, lr=0.01, amsgrad=True, foreach=True),
    "Adam, capturable rate": partial(O.Adam, lr=torch.tensor(0.01, dtype=torch.float64), foreach=False),
    "Adam, fused": partial(O.Adam, lr=0.01, fused=True),
    "AdamW": partial(O.AdamW, lr=0.01, foreach=False),
    "AdamW, fused": partial(O.AdamW, lr=0.01, amsgrad=True, fused=True),
    "NAdam": partial(O.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": partial(O.RAdam, lr=0.01, foreach=True),
    "Adamax": partial(O.Adamax, lr=0.01),
    "Adadelta": partial(O.Adadelta, lr=0.5),
    "Adagrad": partial(O.Adagrad, lr=0.05, lr_decay=0.1),
    "Adagrad, fused": partial(O.Adagrad, lr=0.05, fused=True),
    "RMSprop": partial(O.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Rprop": partial(O.Rprop, lr=0.01),
    "ASGD": partial(O.ASGD, lr=0.1, t0=1),
    "Adafactor": partial(O.Adafactor, lr=0.05),
}
for _name, _make in OPTIMIZERS.items():
    # An average over all pixels ends in a sum of the ranks' sums: the sign of what is zero is not to decide.
    PROGRAMS.add(_name, always=EMPTY if _name == "AdamW, fused" else None, rtol=1e-8 if _name == "Rprop" else 1e-10)(
        partial(trained, make=_make)
    )


@PROGRAMS.add("Muon and AdamW", rtol=1e-1)  # it orthogonalizes in bfloat16
def muon(given: Given) -> Iterator[tuple[str, Any]]:
    """Matrices by one optimizer, the other parameters by another."""
    model, x = transformer(), given(tokens(), 1, 0)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [O.Muon(matrices, lr=0.02), O.AdamW(others, lr=0.01)]
    for step in range(2):
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield f"loss {step}", loss
        yield f"model {step}", {key: p.detach().double() for key, p in model.named_parameters()}


@PROGRAMS.add("SparseAdam of an embedding", refused="a sparse gradient of the table")
def sparse(given: Given) -> Iterator[tuple[str, Any]]:
    table, head = nn.Embedding(11, 4, sparse=True), nn.Linear(4, 11)
    ids, following = given(classes(3, 13, of=11), 1, 0), given(classes(3, 13, of=11, seed=3), 1, 0)
    rows, dense = O.SparseAdam(table.parameters(), lr=0.1), O.Adam(head.parameters(), lr=0.1)
    for step in range(3):
        rows.zero_grad()
        dense.zero_grad()
        loss = F.cross_entropy(head(table(ids)).movedim(-1, 1), following)
        loss.backward()
        yield f"gradient {step}", table.weight.grad.to_dense()
        rows.step()
        dense.step()
        yield f"loss {step}", loss.item()
        yield f"table {step}", table.weight
        yield f"head {step}", head


def minimized(given: Given, **options: Any) -> Iterator[tuple[str, Any]]:
    model, x = mlp(), given(points(), 0)
    target = torch.sin(x[:, :2])
    optimizer = O.LBFGS(model.parameters(), max_iter=4, history_size=5, **options)
    for step in range(3):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        yield f"loss {step}", loss.item()
        yield f"model {step}", model
        yield f"optimizer {step}", optimizer


# Its history and line search divide by small differences.
PROGRAMS.add("LBFGS", rtol=1e-7)(minimized)
PROGRAMS.add("LBFGS, strong Wolfe", rtol=1e-7)(partial(minimized, line_search_fn="strong_wolfe"))


@PROGRAMS.add()
def closures_of_a_first_order_optimizer(given: Given) -> Iterator[tuple[str, Any]]:
    model, (x, y) = UNet(), pixels(given)
    optimizer = O.AdamW(model.parameters(), lr=0.01)

    def closure() -> float:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    for step in range(3):
        yield f"loss {step}", optimizer.step(closure)
        yield f"model {step}", model


@PROGRAMS.add()
def hyperparameters_by_gradient(given: Given) -> Iterator[tuple[str, Any]]:
    """A learning rate that is learned: the gradient of the loss after a step of a differentiable optimizer."""
    x = given(points(), 0)
    weight = torch.linspace(-1, 1, 3)
    rate = torch.tensor(0.1, requires_grad=True)
    for step in range(2):
        p = weight.clone().requires_grad_()
        (slope,) = torch.autograd.grad((x @ p).sin().square().mean(), p, create_graph=True)
        after = p - rate * slope
        loss = (x @ after).sin().square().mean()
        rate.grad = None
        loss.backward()
        with torch.no_grad():
            rate -= 0.1 * rate.grad
        weight = after.detach()
        yield f"loss {step}", loss
        yield f"rate {step}", rate
        yield f"weight {step}", weight


# -- schedules ---------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 3], 0.5),
    "warm-up, then cosine": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, 3)], [2]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 2), schedules.ExponentialLR(o, 0.9), schedules.PolynomialLR(o, 6)]
    ),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=6),
}


@PROGRAMS.add()
def schedules_of_the_learning_rate(given: Given) -> Iterator[tuple[str, Any]]:
    x, y = given(points(), 0), given(points(2)[:, :2], 0)
    for name, make in SCHEDULES.items():
        model = mlp()
        optimizer = O.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = make(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            yield f"{name} {step}", (loss, schedule.get_last_lr(), optimizer.param_groups[0]["momentum"])
        yield f"{name}, model", model


@PROGRAMS.add(always=TWO)
def reduced_on_a_plateau_and_stopped_early(given: Given) -> Iterator[tuple[str, Any]]:
    """The schedule compares losses, and so does the program: as tensors and as numbers."""
    model, (x, y) = UNet(), pixels(given)
    optimizer = O.SGD(model.parameters(), lr=2.0)
    schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    best, waited, kept = float("inf"), 0, None
    for step in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step(loss.detach())
        if loss < best - 0.05:
            best, waited, kept = loss.item(), 0, copy.deepcopy(model.state_dict())
        else:
            waited += 1
        yield f"step {step}", (loss, optimizer.param_groups[0]["lr"], schedule.num_bad_epochs, best, waited)
        if waited > 2:
            break
    model.load_state_dict(kept)
    yield "model", {key: each for key, each in model.state_dict().items()}


# -- groups, accumulation, clipping ------------------------------------------------------------------------------------


@PROGRAMS.add()
def groups_without_weight_decay(given: Given) -> Iterator[tuple[str, Any]]:
    """Biases and norms without decay, a lower rate for the first layer, one frozen; a group is added later."""
    model, x, y = classifier(), given(images(), 2, 3), classes(3, of=4)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    model[0].requires_grad_(False)
    optimizer = O.AdamW(
        [
            {"params": [p for p in decayed if p.requires_grad], "weight_decay": 0.1},
            {"params": [p for p in others if p.requires_grad], "weight_decay": 0.0, "lr": 0.02},
        ],
        lr=0.01,
    )
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.001})
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"model {step}", model
        yield f"optimizer {step}", optimizer


@PROGRAMS.add()
def rates_that_decay_layer_by_layer(given: Given) -> Iterator[tuple[str, Any]]:
    model, x = transformer(2), given(tokens(), 1, 0)
    groups = [{"params": layer.parameters(), "lr": 0.01 * 0.5**i} for i, layer in enumerate(reversed(model.layers))]
    optimizer = O.AdamW(groups)
    for step in range(2):
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"model {step}", model


@PROGRAMS.add()
def gradients_accumulated(given: Given) -> Iterator[tuple[str, Any]]:
    """Micro-batches of different lengths of a side; a running loss; the last batch of an epoch is incomplete."""
    model = UNet()
    optimizer = O.Adam(model.parameters(), lr=0.01)
    running = torch.zeros(())
    for i in range(5):
        shape = 13 + 2 * (i % 2)
        x, y = given(drawn(2, 3, shape, 11, seed=i), 2, 3), given(classes(2, shape, 11, seed=i), 1, 2)
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        running += loss.item()
        yield f"model {i}", model
        if i % 2 or i == 4:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            yield f"running {i}", running


@PROGRAMS.add()
def gradients_clipped(given: Given) -> Iterator[tuple[str, Any]]:
    """By norm, of several kinds, and by value; also by hand, and adaptively by the norm of each row."""
    model, (x, y) = UNet(), pixels(given)
    optimizer = O.SGD(model.parameters(), lr=0.5)

    def adaptive(parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            rows = p.detach().flatten(1) if p.ndim > 1 else p.detach()[:, None]
            slopes = p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None]
            largest = rows.norm(dim=1).clamp(min=1e-3) * 0.1
            scale = (largest / slopes.norm(dim=1).clamp(min=1e-6)).clamp(max=1.0)
            p.grad.mul_(scale.view(-1, *[1] * (p.ndim - 1)))

    def by_hand(parameters: Iterable[nn.Parameter]) -> Tensor:
        parameters = list(parameters)
        total = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()
        if total > 0.1:
            for p in parameters:
                p.grad.mul_(0.1 / total)
        return total

    ways: list[Callable[[Iterable[nn.Parameter]], Any]] = [
        lambda p: nn.utils.clip_grad_norm_(p, 0.1),
        lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf"), error_if_nonfinite=True),
        lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=1.0, foreach=False),
        lambda p: nn.utils.clip_grad_value_(p, 0.01),
        lambda p: nn.utils.clip_grads_with_norm_(ps := list(p), 0.1, nn.utils.get_total_norm([q.grad for q in ps])),
        adaptive,
        by_hand,
    ]
    for step, clip in enumerate(ways):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield f"norm {step}", clip(model.parameters())
        yield f"gradients {step}", model
        optimizer.step()
        yield f"loss {step}", loss


@PROGRAMS.add()
def clipped_and_stepped_in_hooks_of_backward(given: Given) -> Iterator[tuple[str, Any]]:
    """An optimizer for each parameter, which steps as soon as its gradient is there, and frees it."""
    model, (x, y) = UNet(), pixels(given)
    optimizers = {p: O.AdamW([p], lr=0.01) for p in model.parameters()}

    def step(p: nn.Parameter) -> None:
        nn.utils.clip_grad_norm_([p], 0.1)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield f"loss {i}", loss
        yield f"model {i}", model


@PROGRAMS.add()
def gradients_replaced_by_hooks(given: Given) -> Iterator[tuple[str, Any]]:
    """Hooks of parameters: projected to zero mean, scaled, noise of a seed."""
    model, (x, y) = UNet(), pixels(given)
    noise = torch.Generator().manual_seed(5)
    model.first.weight.register_hook(lambda g: g - g.mean(dim=(1, 2, 3), keepdim=True))
    model.last.weight.register_hook(lambda g: g + 0.01 * torch.randn(g.shape, generator=noise, dtype=g.dtype))
    model.last.bias.register_hook(lambda g: g / (g.norm() + 1e-3))
    optimizer = O.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield f"model {i}", model


@PROGRAMS.add()
def gradients_of_several_tasks(given: Given) -> Iterator[tuple[str, Any]]:
    """PCGrad: a task's gradient loses its part against another's; and weights of losses by their uncertainty."""
    trunk, heads = UNet(out=6), nn.ModuleList([nn.Conv2d(6, 3, 1), nn.Conv2d(6, 1, 1)])
    uncertain = nn.Parameter(torch.zeros(2))
    x, y = pixels(given)
    parameters = list(trunk.parameters())
    optimizer = O.SGD([*parameters, *heads.parameters(), uncertain], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        features = trunk(x)
        losses = torch.stack(
            [F.cross_entropy(heads[0](features), y), F.mse_loss(heads[1](features), x.mean(1, keepdim=True))]
        )
        total = (losses * torch.exp(-uncertain) + uncertain).sum()
        total.backward(retain_graph=True)
        each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        flat = [torch.cat([g.flatten() for g in gs]) for gs in each]
        dot = flat[0] @ flat[1]
        yield f"dot {step}", dot
        if dot < 0:
            flat = [a - dot / b.square().sum() * b for a, b in (flat, flat[::-1])]
        nn.utils.vector_to_parameters(sum(flat), gradients := [torch.zeros_like(p) for p in parameters])
        for p, g in zip(parameters, gradients):
            p.grad = g
        optimizer.step()
        yield f"losses {step}", losses
        yield f"trunk {step}", trunk
        yield f"uncertain {step}", uncertain


# -- half precision ----------------------------------------------------------------------------------------------------


@PROGRAMS.add(rtol=1e-1)
def autocast_to_bfloat16(given: Given) -> Iterator[tuple[str, Any]]:
    model, (x, y) = UNet().float(), pixels(given)
    x = x.float()
    optimizer = O.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
            loss = F.cross_entropy(out, y)
        yield f"dtypes {step}", (str(out.dtype), str(loss.dtype))
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss


@PROGRAMS.add(rtol=1e-4)
def scaled_gradients(given: Given) -> Iterator[tuple[str, Any]]:
    """GradScaler, with an overflow in the second step, which is left out and halves the scale."""
    model, (x, y) = UNet().float(), pixels(given)
    optimizer = O.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.float()), y) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if step != 1:
            yield f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield f"scale {step}", scaler.get_scale()
        yield f"weights {step}", [p for p in model.parameters()]
    yield "state", scaler.state_dict()


@PROGRAMS.add(rtol=1e-1)
def scaled_gradients_of_autocast_to_float16(given: Given) -> Iterator[tuple[str, Any]]:
    model, x = transformer().float(), given(tokens(), 1, 0).float()
    optimizer = O.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), x.flip(1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield f"loss {step}", (loss, scaler.get_scale())


@PROGRAMS.add(rtol=1e-1)
def weights_in_bfloat16_with_masters(given: Given) -> Iterator[tuple[str, Any]]:
    """The forward pass in half precision; the optimizer has float32 copies of the weights."""
    model, x = mlp().bfloat16(), given(points(), 0).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = O.AdamW(masters, lr=0.01)
    for step in range(3):
        loss = F.mse_loss(model(x).float(), x[:, :2].float().sin())
        model.zero_grad()
        loss.backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
        yield f"loss {step}", loss


# -- two steps, slow weights, averages ---------------------------------------------------------------------------------


@PROGRAMS.add()
def sharpness_aware(given: Given) -> Iterator[tuple[str, Any]]:
    """SAM: a step uphill, the gradient there, and a step from where it was."""
    model, (x, y) = UNet(), pixels(given)
    optimizer = O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                moved.append(p.grad * (0.05 / (norm + 1e-12)))
                p.add_(moved[-1])
        optimizer.zero_grad()
        above = F.cross_entropy(model(x), y)
        above.backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moved)
        optimizer.step()
        optimizer.zero_grad()
        yield f"losses {step}", (loss, above, norm)
        yield f"model {step}", model


class Lookahead:
    """Slow weights, which every few steps follow the fast ones."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2, alpha: float = 0.5) -> None:
        self.inner, self.every, self.alpha, self.count = inner, every, alpha, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for group, slow in zip(self.inner.param_groups, self.slow):
                for p, kept in zip(group["params"], slow):
                    kept.lerp_(p.detach(), self.alpha)
                    p.data.copy_(kept)


@PROGRAMS.add()
def lookahead(given: Given) -> Iterator[tuple[str, Any]]:
    model, (x, y) = UNet(), pixels(given)
    optimizer = Lookahead(O.RAdam(model.parameters(), lr=0.05))
    for step in range(5):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"model {step}", model


class Lion(torch.optim.Optimizer):
    """A program's own optimizer."""

    def __init__(self, parameters: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                update = mean * first + p.grad * (1 - first)
                p.add_(update.tanh(), alpha=-group["lr"])
                mean.mul_(second).add_(p.grad, alpha=1 - second)


@PROGRAMS.add()
def an_optimizer_of_the_program(given: Given) -> Iterator[tuple[str, Any]]:
    yield from trained(given, partial(Lion, lr=0.01))


def batches(given: Given) -> list[tuple[Tensor, Tensor]]:
    return [(given(images(seed), 2, 3), given(classes(3, 13, 11, seed=seed), 1, 2)) for seed in range(3)]


def averaged(given: Given, **options: Any) -> Iterator[tuple[str, Any]]:
    """An average of the weights, whose batch norms are updated at the end, and which is evaluated."""
    model, data = UNet(), batches(given)
    average = swa_utils.AveragedModel(model, **options)
    optimizer = O.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(data * 2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        yield f"model {step}", model
        yield f"average {step}", average
    if not options.get("use_buffers"):
        swa_utils.update_bn(data, average)
        yield "after update_bn", average
    average.eval()
    with torch.no_grad():
        yield "evaluated", [average(x) for x, _ in data]


PROGRAMS.add("AveragedModel and update_bn", always=EMPTY)(averaged)
PROGRAMS.add("AveragedModel, exponential, with buffers")(
    partial(averaged, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
)
PROGRAMS.add("AveragedModel, a function of the program")(
    partial(averaged, avg_fn=lambda old, new, count: old + (new - old) / (count + 1))
)


@PROGRAMS.add("SWALR")
def swa(given: Given) -> Iterator[tuple[str, Any]]:
    model, data = UNet(), batches(given)
    average = swa_utils.AveragedModel(model)
    optimizer = O.SGD(model.parameters(), lr=0.2, momentum=0.9)
    cosine = schedules.CosineAnnealingLR(optimizer, 4)
    flat = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for epoch in range(4):
        for x, y in data[:2]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if epoch >= 2:
            average.update_parameters(model)
            flat.step()
        else:
            cosine.step()
        yield f"rate {epoch}", optimizer.param_groups[0]["lr"]
        yield f"model {epoch}", model
    swa_utils.update_bn(iter(data), average)
    yield "average", average


@PROGRAMS.add(always=MESH)
def moving_average_by_hand(given: Given) -> Iterator[tuple[str, Any]]:
    """With a warm-up of the decay, copies of the buffers, and the average in the model's place during evaluation."""
    model, data = UNet(), batches(given)
    average = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = O.AdamW(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        decay = min(0.99, (1 + step) / (10 + step))
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters()):
                old.mul_(decay).add_(new, alpha=1 - decay)
            for old, new in zip(average.buffers(), model.buffers()):
                old.copy_(new)
        yield f"average {step}", average
        kept = {key: each.clone() for key, each in model.state_dict().items()}
        model.load_state_dict(average.state_dict())
        model.eval()
        with torch.no_grad():
            yield f"evaluated {step}", F.cross_entropy(model(x), y)
        model.load_state_dict(kept)
        model.train()
    yield "model", model


@PROGRAMS.add()
def exponential_averages_as_parametrized_state(given: Given) -> Iterator[tuple[str, Any]]:
    """By ``_foreach_lerp_`` and by vectors of all parameters."""
    model, data = UNet(), batches(given)
    lists = [p.detach().clone() for p in model.parameters()]
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = O.Adam(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        torch._foreach_lerp_(lists, [p.detach() for p in model.parameters()], 0.2)
        vector.lerp_(nn.utils.parameters_to_vector(model.parameters()).detach(), 0.2)
        yield f"averages {step}", (lists, vector)


@PROGRAMS.add()
def a_search_for_the_learning_rate(given: Given) -> Iterator[tuple[str, Any]]:
    """The range test: the rate grows until the loss does; then the model is what it was."""
    model, (x, y) = UNet(), pixels(given)
    kept = copy.deepcopy(model.state_dict())
    optimizer = O.SGD(model.parameters(), lr=1e-3)
    smooth, best = 0.0, float("inf")
    for step in itertools.count():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        smooth = 0.5 * smooth + 0.5 * float(loss)
        corrected = smooth / (1 - 0.5 ** (step + 1))
        best = min(best, corrected)
        yield f"step {step}", (corrected, best)
        if corrected > 2 * best or step == 9:
            break
        for group in optimizer.param_groups:
            group["lr"] *= 3
    model.load_state_dict(kept)
    yield "restored", F.cross_entropy(model(x), y)


@PROGRAMS.parametrize()
def test_programs(name, layout, tmp_path):
    check(__name__, name, layout, tmp_path)
