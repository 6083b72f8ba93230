"""Derivatives as a part of the program: equations in losses, solvers, functions of functions, hooks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.optim import LBFGS, SGD, Adam

from workflows.harness import EMPTY, MESH, Given, Programs, check
from workflows.models import UNet, classes, classifier, drawn, images, mlp, points

PROGRAMS = Programs()


def derivative(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


# -- equations ---------------------------------------------------------------------------------------------------------


@PROGRAMS.add(always=EMPTY)
def burgers_by_a_network(given: Given) -> Iterator[tuple[str, Any]]:
    """A PINN: second derivatives of the network at sharded points, boundary and initial values, weights that learn."""
    model, viscosity = mlp(given=2, out=1), nn.Parameter(torch.tensor(-2.0))
    weights = nn.Parameter(torch.zeros(3))
    optimizer = Adam([*model.parameters(), viscosity], lr=0.01)
    ascent = SGD([weights], lr=0.1, maximize=True)
    inside, start, side = given(drawn(29, 2).tanh(), 0), given(drawn(13, 2, seed=2).tanh(), 0), drawn(5, 2, seed=3)
    start = start * torch.tensor([0.0, 1.0])
    for step in range(3):
        xt = inside.detach().requires_grad_()
        u = model(xt)
        du = derivative(u, xt)
        uxx = derivative(du[:, 1:], xt)[:, 1:]
        residual = du[:, :1] + u * du[:, 1:] - viscosity.exp() * uxx
        losses = torch.stack(
            [
                residual.square().mean(),
                F.mse_loss(model(start), -torch.sin(math.pi * start[:, 1:])),
                model(side).square().mean(),
            ]
        )
        optimizer.zero_grad()
        ascent.zero_grad()
        (losses * weights.exp()).sum().backward()
        optimizer.step()
        ascent.step()
        yield f"losses {step}", losses
        yield f"residual {step}", residual
        yield f"parameters {step}", (viscosity, weights)
        yield f"model {step}", model


@PROGRAMS.add(rtol=1e-7)  # LBFGS divides by small differences
def a_wave_by_separate_coordinates(given: Given) -> Iterator[tuple[str, Any]]:
    """Coordinates are separate tensors that require grad; a third derivative; minimized by LBFGS."""
    model = mlp(given=2, out=1)
    x, t = (given(drawn(29, 1, seed=s), 0).requires_grad_() for s in (1, 2))
    optimizer = LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        u = model(torch.cat([x, t], 1))
        ux = derivative(u, x)
        uxxx = derivative(derivative(ux, x), x)
        loss = (derivative(u, t) + 6 * u * ux + uxxx).square().mean() + (u - torch.sin(x)).square().mean()
        loss.backward()
        return loss

    for step in range(2):
        yield f"loss {step}", optimizer.step(closure).item()
        yield f"model {step}", model


@PROGRAMS.add()
def a_flow_without_divergence(given: Given) -> Iterator[tuple[str, Any]]:
    """The loss has differences on a periodic grid, a vorticity, a spectrum, and a projection by Fourier."""
    model, x = UNet(3, 2), given(images(), 2, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    kx, ky = torch.fft.fftfreq(11)[None, :], torch.fft.fftfreq(13)[:, None]
    k2 = (kx**2 + ky**2).clamp(min=1e-9)
    for step in range(2):
        v = model(x)
        dx = (v.roll(-1, 3) - v.roll(1, 3)) / 2
        dy = (v.roll(-1, 2) - v.roll(1, 2)) / 2
        divergence, vorticity = dx[:, 0] + dy[:, 1], dx[:, 1] - dy[:, 0]
        hat = torch.fft.fft2(v)
        along = (kx * hat[:, 0] + ky * hat[:, 1]) / k2
        free = torch.fft.ifft2(torch.stack([hat[:, 0] - kx * along, hat[:, 1] - ky * along], 1)).real
        loss = divergence.square().mean() + (vorticity - x[:, 0]).square().mean() + F.mse_loss(v, free)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"fields {step}", (divergence, vorticity, free)
        yield f"energy {step}", (v**2).sum(1).mean((1, 2))
        yield f"model {step}", model


@PROGRAMS.add()
def heat_by_the_deep_ritz_method(given: Given) -> Iterator[tuple[str, Any]]:
    """Energies and weak forms, with gradients of a hard boundary condition; points by importance."""
    model = mlp(given=2, out=1)
    optimizer = Adam(model.parameters(), lr=0.01)
    pool = given(drawn(41, 2).sigmoid(), 0)
    for step in range(2):
        with torch.no_grad():
            size = model(pool).abs().squeeze(1)
        chosen = pool[size.topk(17).indices].detach().requires_grad_()
        inside = (chosen * (1 - chosen)).prod(1, keepdim=True)
        u = inside * model(chosen)
        energy = 0.5 * derivative(u, chosen).square().sum(1).mean() - (u * torch.sin(chosen[:, :1])).mean()
        optimizer.zero_grad()
        energy.backward()
        optimizer.step()
        yield f"energy {step}", (energy, chosen)
        yield f"model {step}", model


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self, channels: int, modes: tuple[int, int]) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, channels, channels, *modes, dtype=torch.cdouble) / channels)
        self.skip = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        m, n = self.modes
        hat = torch.fft.rfft2(x, norm="forward")
        out = torch.zeros_like(hat)
        out[:, :, :m, :n] = torch.einsum("bixy,ioxy->boxy", hat[:, :, :m, :n], self.weight[0])
        out[:, :, -m:, :n] = torch.einsum("bixy,ioxy->boxy", hat[:, :, -m:, :n], self.weight[1])
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:], norm="forward") + self.skip(x))


@PROGRAMS.add()
def a_fourier_neural_operator(given: Given) -> Iterator[tuple[str, Any]]:
    """Coordinates are appended; trained by relative errors; evaluated on a finer grid."""
    model = nn.Sequential(nn.Conv2d(5, 4, 1), Spectral(4, (3, 3)), Spectral(4, (3, 3)), nn.Conv2d(4, 3, 1))

    def placed(x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        grid = torch.stack(torch.meshgrid(torch.linspace(0, 1, h), torch.linspace(0, 1, w), indexing="ij"))
        return torch.cat([x, grid.expand(len(x), -1, -1, -1)], 1)

    optimizer = Adam(model.parameters(), lr=0.01)
    x, y = given(images(), 2, 3), given(images(2), 2, 3)
    for step in range(2):
        out = model(placed(x))
        loss = ((out - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"model {step}", model
    with torch.no_grad():
        yield "finer", model(placed(F.interpolate(x, size=(21, 17), mode="bilinear", align_corners=True)))


# -- solvers -----------------------------------------------------------------------------------------------------------


@PROGRAMS.add()
def a_neural_equation_by_runge_kutta(given: Given) -> Iterator[tuple[str, Any]]:
    """RK4 through the solver, and by the adjoint equation in a function of the program's."""
    field = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 3, 3, padding=1))

    def step(x: Tensor, h: float) -> Tensor:
        a = field(x)
        b = field(x + h / 2 * a)
        c = field(x + h / 2 * b)
        d = field(x + h * c)
        return x + h / 6 * (a + 2 * b + 2 * c + d)

    x = given(images(), 2, 3).requires_grad_()
    y = x
    for _ in range(3):
        y = step(y, 0.1)
    y.square().mean().backward()
    yield "through", (y, x.grad)
    yield "through, field", field

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            with torch.no_grad():
                for _ in range(4):
                    x = x + 0.1 * field(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx: Any, adjoint: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            sums = [torch.zeros_like(p) for p in field.parameters()]
            for _ in range(4):
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    out = field(x)
                    dx, *dp = torch.autograd.grad(out, (x, *field.parameters()), adjoint)
                x = x.detach() - 0.1 * out.detach()
                adjoint = adjoint + 0.1 * dx
                sums = [s + 0.1 * d for s, d in zip(sums, dp)]
            return adjoint, *sums

    field.zero_grad()
    z = given(images(2), 2, 3).requires_grad_()
    Adjoint.apply(z, *field.parameters()).square().mean().backward()
    yield "adjoint", z.grad
    yield "adjoint, field", field


@PROGRAMS.add()
def steps_whose_size_depends_on_the_error(given: Given) -> Iterator[tuple[str, Any]]:
    """Heun and Euler; a step is accepted by a number that all ranks read."""
    field, x = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), given(images(), 2, 3)
    t, h, taken = 0.0, 0.3, 0
    with torch.no_grad():
        while t < 1 and taken < 12:
            a = torch.tanh(field(x))
            b = torch.tanh(field(x + h * a))
            error = (h / 2 * (b - a)).norm() / math.sqrt(x.numel())
            if error < 0.02:
                x, t = x + h / 2 * (a + b), t + h
            h = min(h * min(2.0, max(0.3, 0.9 * (0.02 / float(error)) ** 0.5)), 1 - t + 1e-12)
            taken += 1
            yield f"step {taken}", (t, h, error.item())
    yield "x", x


@PROGRAMS.add(always=MESH)
def shallow_water(given: Given) -> Iterator[tuple[str, Any]]:
    """Semi-implicit steps: differences by slices, a Helmholtz equation solved by Fourier, a network's correction."""
    h, u, v = (given(drawn(2, 13, 11, seed=s) * 0.1, 1, 2).requires_grad_() for s in range(3))
    correction = nn.Conv2d(3, 3, 3, padding=1)
    k = torch.fft.fftfreq(13)[:, None] ** 2 + torch.fft.rfftfreq(11)[None] ** 2
    coriolis = torch.linspace(-1, 1, 13)[:, None]

    def slope(x: Tensor, dim: int) -> Tensor:
        return (x.roll(-1, dim) - x.roll(1, dim)) / 2

    first = (h, u, v)
    for step in range(3):
        inner = torch.zeros_like(h)
        inner[:, 1:-1] = h[:, 2:] - 2 * h[:, 1:-1] + h[:, :-2]
        right = h - 0.1 * (slope(u, 2) + slope(v, 1)) + 0.01 * inner
        h = torch.fft.irfft2(torch.fft.rfft2(right) / (1 + 0.4 * k), s=(13, 11))
        u, v = u + 0.1 * (coriolis * v - slope(h, 2)), v - 0.1 * (coriolis * u + slope(h, 1))
        h, u, v = (a + 0.01 * b for a, b in zip((h, u, v), correction(torch.stack([h, u, v], 1)).unbind(1)))
        yield f"step {step}", (h, u, v, h.mean().item())
    (h**2 + u**2 + v**2).mean().backward()
    yield "gradients", [each.grad for each in first]
    yield "correction", correction


@PROGRAMS.add(rtol=1e-9, refused={MESH: "does not stay a dim of the result"})
def a_fixed_point(given: Given) -> Iterator[tuple[str, Any]]:
    """An implicit layer: iterated without a graph, and its gradient iterated in a hook; Anderson's mixing."""
    layer = nn.Conv2d(3, 3, 3, padding=1)
    with torch.no_grad():
        layer.weight *= 0.3
    x = given(images(), 2, 3).requires_grad_()

    def f(z: Tensor) -> Tensor:
        return torch.tanh(layer(z) + x)

    with torch.no_grad():
        z, count = torch.zeros(3, 3, 13, 11), 0
        history: list[tuple[Tensor, Tensor]] = []
        while True:
            after = f(z)
            count += 1
            history = [*history[-2:], (z, after - z)]
            if (after - z).norm() / after.norm() < 1e-12 or count == 40:
                break
            if len(history) == 3 and count % 2:
                residuals = torch.stack([r.flatten() for _, r in history])
                weights = torch.linalg.solve(residuals @ residuals.T + 1e-12 * torch.eye(3), torch.ones(3))
                weights = weights / weights.sum()
                after = sum(w * (each + r) for w, (each, r) in zip(weights, history))
            z = after
    z = f(z)
    free = z.detach().requires_grad_()
    again = f(free)

    def solved(g: Tensor) -> Tensor:
        y = g
        for _ in range(30):
            y = torch.autograd.grad(again, free, y, retain_graph=True)[0] + g
        return y

    z.register_hook(solved)
    z.square().mean().backward()
    yield "z", z
    yield "gradient", x.grad
    yield "layer", layer


@PROGRAMS.add()
def conjugate_gradients(given: Given) -> Iterator[tuple[str, Any]]:
    """Of a sharded image: deconvolution; products with Hessians by double backward, as of a trust region."""
    kernel = torch.tensor([[1.0, 2, 1], [2, 8, 2], [1, 2, 1]]).view(1, 1, 3, 3) / 20
    b = given(images()[:, :1], 2, 3)

    def a(x: Tensor) -> Tensor:
        return F.conv_transpose2d(F.conv2d(x, kernel, padding=1), kernel, padding=1) + 0.1 * x

    x = torch.zeros_like(b)
    r = b - a(x)
    p, rr = r.clone(), (r * r).sum()
    for step in range(6):
        ap = a(p)
        alpha = rr / (p * ap).sum()
        x, r = x + alpha * p, r - alpha * ap
        new = torch.linalg.vecdot(r, r).sum()
        p, rr = r + new / rr * p, new
        yield f"step {step}", (x, rr.sqrt().item())
    model, data = mlp(), given(points(), 0)
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(F.mse_loss(model(data), data[:, :2].sin()), parameters, create_graph=True)
    flat = torch.cat([s.flatten() for s in slopes])
    direction = torch.linspace(-1, 1, flat.numel())
    product = torch.autograd.grad(flat @ direction, parameters)
    yield "Hessian", product


# -- functions of functions --------------------------------------------------------------------------------------------


@PROGRAMS.add()
def learning_to_learn(given: Given) -> Iterator[tuple[str, Any]]:
    """MAML: inner steps by torch.func.grad of a functional call, outer ones by an optimizer."""
    model = mlp(given=3, out=2)
    optimizer = Adam(model.parameters(), lr=0.01)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    for step in range(2):
        optimizer.zero_grad()
        total = torch.zeros(())
        for task in range(2):
            x, query = given(points(task), 0), given(points(task + 5), 0)
            parameters = dict(model.named_parameters())
            for _ in range(2):
                slopes = grad(loss)(parameters, x, x[:, :2].sin() * task)
                parameters = {k: p - 0.1 * slopes[k] for k, p in parameters.items()}
            total = total + loss(parameters, query, query[:, :2].sin() * task)
        total.backward()
        optimizer.step()
        yield f"loss {step}", total
        yield f"model {step}", model


@PROGRAMS.add()
def learning_to_learn_by_autograd(given: Given) -> Iterator[tuple[str, Any]]:
    """The inner steps by torch.autograd.grad with a graph, rates that learn, Reptile for the last layer."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    rates = nn.ParameterList([nn.Parameter(torch.tensor(0.1)) for _ in net.parameters()])
    optimizer = SGD([*net.parameters(), *rates], lr=0.1)
    x, y = given(images(), 2, 3), given(classes(3, 13, 11), 1, 2)
    for step in range(2):
        weights = dict(net.named_parameters())
        for _ in range(2):
            out = functional_call(net, weights, (x,))
            slopes = torch.autograd.grad(F.cross_entropy(out, y), list(weights.values()), create_graph=True)
            weights = {k: w - r * s for (k, w), r, s in zip(weights.items(), rates, slopes)}
        loss = F.cross_entropy(functional_call(net, weights, (x.flip(3),)), y.flip(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            net[2].weight.lerp_(weights["2.weight"], 0.1)
        yield f"loss {step}", loss
        yield f"net {step}", net
        yield f"rates {step}", list(rates)


@PROGRAMS.add()
def derivatives_of_each_point(given: Given) -> Iterator[tuple[str, Any]]:
    """Jacobians and Hessians of a network at sharded points, and products with them."""
    model, x = mlp(), given(points(), 0)
    parameters = {k: p.detach() for k, p in model.named_parameters()}

    def f(point: Tensor) -> Tensor:
        return functional_call(model, parameters, (point,))

    yield "Jacobians", vmap(jacrev(f))(x)
    yield "Laplacians", vmap(lambda p: torch.einsum("iaa->i", hessian(f)(p)))(x)
    yield "along", jvp(f, (x,), (torch.ones(29, 3),))
    out, back = vjp(f, x)
    yield "back", back(out)[0]


@PROGRAMS.add()
def gradients_of_each_sample(given: Given) -> Iterator[tuple[str, Any]]:
    """Private training: clipped for each sample, with noise of a seed; and a Fisher matrix's diagonal."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = given(points(), 0), given(classes(29, of=2), 0)

    def loss(parameters: dict[str, Tensor], point: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (point[None],)), label[None])

    for step in range(2):
        parameters = {k: p.detach() for k, p in model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        scale = (0.5 / (norms + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                mean = torch.einsum("n,n...->...", scale, each[name]) / len(scale)
                p -= 0.5 * (mean + 0.01 * torch.randn(p.shape))
        yield f"norms {step}", norms
        yield f"Fisher {step}", {k: g.square().mean(0) for k, g in each.items()}
        yield f"model {step}", model


# -- functions and hooks of the program --------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity within bounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x.clamp(-1, 1) * levels) / levels

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1), None


class Scaled(torch.autograd.Function):
    """A linear layer by hand, with a gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.einsum("bchw,oc->bohw", x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return torch.einsum("bohw,oc->bchw", g, weight), torch.einsum("bohw,bchw->oc", g, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.factor * g, None


@PROGRAMS.add()
def functions_of_the_program(given: Given) -> Iterator[tuple[str, Any]]:
    """Quantization with straight gradients, a layer by hand, a reversed gradient for a domain's adversary."""
    first, weight, domain = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 2)
    optimizer = SGD([*first.parameters(), weight, *domain.parameters()], lr=0.1)
    x, y, kind = given(images(), 2, 3), given(classes(3, 13, 11), 1, 2), classes(3, of=2)
    for step in range(2):
        features = Straight.apply(first(x), 8)
        out = Scaled.apply(features, weight)
        other = domain(Reversed.apply(features, 0.5).mean((2, 3)))
        loss = F.cross_entropy(out, y) + F.cross_entropy(other, kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"parameters {step}", [[p, p.grad] for p in (*first.parameters(), weight, *domain.parameters())]


@PROGRAMS.add()
def maps_of_what_a_class_is_seen_by(given: Given) -> Iterator[tuple[str, Any]]:
    """Grad-CAM by hooks, saliency, SmoothGrad, integrated gradients, guided backpropagation, occlusion."""
    model = classifier().eval()
    x = given(images(), 2, 3).requires_grad_()
    kept: dict[str, Tensor] = {}

    def forward(module: nn.Module, args: Any, out: Tensor) -> None:
        kept["activation"] = out
        out.register_hook(lambda g: kept.__setitem__("tensor", g))

    handles = [
        model[3].register_forward_hook(forward),
        model[3].register_full_backward_hook(lambda m, gi, go: kept.__setitem__("module", go[0])),
    ]
    score = model(x)[torch.arange(3), [0, 1, 2]].sum()
    score.backward()
    for handle in handles:
        handle.remove()
    yield "hooks agree", (kept["tensor"] - kept["module"]).abs().max().item()
    weights = kept["tensor"].mean((2, 3), keepdim=True)
    cam = F.relu((weights * kept["activation"].detach()).sum(1, keepdim=True))
    cam = F.interpolate(cam, size=(13, 11), mode="bilinear")
    yield "CAM", cam / cam.amax((2, 3), keepdim=True).clamp(min=1e-12)
    yield "saliency", x.grad.abs().amax(1)
    smooth, path = 0.0, 0.0
    for i in range(3):
        for kind in ("smooth", "path"):
            moved = x.detach() + 0.1 * torch.randn(3, 3, 13, 11) if kind == "smooth" else x.detach() * (i + 0.5) / 3
            moved = moved.requires_grad_()
            (g,) = torch.autograd.grad(model(moved)[:, 1].sum(), moved)
            smooth, path = (smooth + g, path) if kind == "smooth" else (smooth, path + g)
    yield "smooth", smooth / 3
    yield "integrated", path / 3 * x.detach()
    guided = model[2].register_full_backward_hook(lambda m, gi, go: (F.relu(gi[0]),))
    (g,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    guided.remove()
    yield "guided", g
    with torch.no_grad():
        base, rows = model(x)[:, 1], []
        for i in range(0, 13, 4):
            hidden = x.clone()
            hidden[:, :, i : i + 4, 3:7] = 0
            rows.append(base - model(hidden)[:, 1])
    yield "occlusion", torch.stack(rows)


@PROGRAMS.add()
def features_by_hooks(given: Given) -> Iterator[tuple[str, Any]]:
    """Extracted and changed by hooks before and after layers, with keyword arguments, by hooks of all modules."""
    model, x = UNet(), given(images(), 2, 3)
    kept, order = {}, []
    hooks = [
        model.norm.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)),
        model.inner.register_forward_hook(lambda m, args, out: out + args[0].mean((2, 3), keepdim=True)),
        model.up.register_forward_hook(lambda m, args, kw, out: kept.__setitem__("up", out), with_kwargs=True),
        model.down.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)),
        nn.modules.module.register_module_forward_hook(lambda m, args, out: order.append(type(m).__name__)),
        nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: order.append(type(m).__name__)),
    ]
    try:
        loss = model(x).square().mean() + kept["up"].std()
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    yield "loss", loss
    yield "order", order
    yield "model", model
    yield "again", model(x)


@PROGRAMS.add()
def gradients_of_intermediate_results(given: Given) -> Iterator[tuple[str, Any]]:
    """Retained, by inputs=, edges of the graph, hooks that wait for several, and a graph that is kept."""
    model, x = UNet(), given(images(), 2, 3)
    seen: list[Any] = []
    skip = model.norm(model.first(x))
    skip.retain_grad()
    deep = model.inner(model.down(skip))

    def see(grads: Any) -> None:
        seen.append([g if g is None else g.norm().item() for g in grads])

    torch.autograd.graph.register_multi_grad_hook((skip, deep), see)
    out = model.last(torch.cat([skip, model.up(deep)], 1))
    out.mean().backward(retain_graph=True)
    yield "skip", skip.grad
    out.square().mean().backward(inputs=[model.last.weight, model.last.bias], retain_graph=True)
    yield "last", model.last
    yield "seen", seen
    edge = torch.autograd.graph.get_gradient_edge(deep)
    yield "edge", torch.autograd.grad(out.sum(), [edge])[0]
    unused = nn.Parameter(torch.zeros(3))
    yield "unused", torch.autograd.grad(model(x).mean(), [unused, model.up.bias], allow_unused=True)


@PROGRAMS.parametrize()
def test_programs(name, layout, tmp_path):
    check(__name__, name, layout, tmp_path)
