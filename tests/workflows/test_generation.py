"""Inference: diffusion, roll-outs, sliding windows, decoding, augmentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workflows.harness import EMPTY, MESH, Given, Programs, check
from workflows.models import UNet, classes, drawn, images, tokens, transformer

PROGRAMS = Programs()
STEPS = 6


# -- diffusion ---------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """A small network of an image, a time and a class; the class 4 is none."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.labels = UNet(norm=False), nn.Embedding(5, 6)
        self.time = nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 6))

    def forward(self, x: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        angles = t[:, None] * torch.exp(torch.arange(4) * -math.log(100.0) / 4)
        e = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        if label is not None:
            e = e + self.labels(label)
        scale, shift = e.chunk(2, 1)
        return self.net(x * (1 + scale[..., None, None]) + shift[..., None, None])


class Schedule:
    """Of the variances."""

    def __init__(self) -> None:
        self.betas = torch.linspace(0.02, 0.3, STEPS)
        self.alphas = 1 - self.betas
        self.bars = self.alphas.cumprod(0)

    def noised(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        bar = self.bars[t].view(-1, 1, 1, 1)
        return bar.sqrt() * x + (1 - bar).sqrt() * noise


@PROGRAMS.add()
def training_of_a_diffusion_model(given: Given) -> Iterator[tuple[str, Any]]:
    """Plain noise of a seed, times of each sample, labels that are dropped, weights by signal to noise; an average."""
    model, schedule = Denoiser(), Schedule()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = given(images(), 2, 3)
    for step in range(3):
        t, noise = torch.randint(0, STEPS, (3,)), torch.randn(3, 3, 13, 11)
        label = torch.where(torch.rand(3) < 0.3, 4, classes(3, of=4))
        out = model(schedule.noised(x, t, noise), t.double(), label)
        ratio = schedule.bars[t] / (1 - schedule.bars[t])
        each = F.mse_loss(out, noise, reduction="none").mean((1, 2, 3))
        loss = (each * ratio.clamp(max=5.0) / ratio).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
        yield f"loss {step}", loss
        yield f"model {step}", model
        yield f"average {step}", average


@PROGRAMS.add(always=MESH)
@torch.no_grad()
def sampling_by_ddpm(given: Given) -> Iterator[tuple[str, Any]]:
    """The noise of each step is plain, and equal on all ranks as their seeds are."""
    model, schedule = Denoiser().eval(), Schedule()
    x = given(torch.randn(2, 3, 13, 11), 2, 3)
    for t in reversed(range(STEPS)):
        noise = model(x, torch.full((2,), float(t)))
        mean = (x - schedule.betas[t] / (1 - schedule.bars[t]).sqrt() * noise) / schedule.alphas[t].sqrt()
        x = mean + schedule.betas[t].sqrt() * torch.randn(x.shape) if t else mean
        yield f"x {t}", x


@PROGRAMS.add()
@torch.inference_mode()
def sampling_by_ddim_with_guidance(given: Given) -> Iterator[tuple[str, Any]]:
    """With and without the label in one batch, a dynamic threshold by a quantile, and a mask that is filled in."""
    model, schedule = Denoiser().eval(), Schedule()
    x, known = given(torch.randn(2, 3, 13, 11), 2, 3), given(images(3)[:2].tanh(), 2, 3)
    mask = given((images(4)[:2, :1] > 0.5).double(), 2, 3)
    label = torch.tensor([1, 3, 4, 4])
    for t in reversed(range(0, STEPS, 2)):
        with_label, without = model(torch.cat([x, x]), torch.full((4,), float(t)), label).chunk(2)
        noise = without + 3.0 * (with_label - without)
        guessed = (x - (1 - schedule.bars[t]).sqrt() * noise) / schedule.bars[t].sqrt()
        limit = torch.quantile(guessed.abs().flatten(1), 0.9, dim=1).clamp(min=1.0).view(-1, 1, 1, 1)
        guessed = guessed.clamp(-limit, limit) / limit
        guessed = mask * known + (1 - mask) * guessed
        before = schedule.bars[t - 2] if t >= 2 else torch.ones(())
        x = before.sqrt() * guessed + (1 - before).sqrt() * noise
        yield f"x {t}", (x, limit)
    yield "image", ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


@PROGRAMS.add()
def sampling_with_guidance_by_a_gradient(given: Given) -> Iterator[tuple[str, Any]]:
    """Each step is moved by the gradient of how far the image is from a measurement."""
    model, schedule = Denoiser().eval(), Schedule()
    measured = given(F.avg_pool2d(images(3)[:2], 2), 2, 3)
    x = given(torch.randn(2, 3, 13, 11), 2, 3)
    for t in reversed(range(STEPS - 3, STEPS)):
        x = x.detach().requires_grad_()
        noise = model(x, torch.full((2,), float(t)))
        guessed = (x - (1 - schedule.bars[t]).sqrt() * noise) / schedule.bars[t].sqrt()
        far = (F.avg_pool2d(guessed, 2) - measured).square().flatten(1).sum(1).sqrt()
        (slope,) = torch.autograd.grad(far.sum(), x)
        with torch.no_grad():
            x = schedule.bars[t - 1].sqrt() * guessed + (1 - schedule.bars[t - 1]).sqrt() * noise - 0.5 * slope
        yield f"step {t}", (x, far)


@PROGRAMS.add()
@torch.no_grad()
def sampling_of_a_flow(given: Given) -> Iterator[tuple[str, Any]]:
    """Heun's method with steps of Karras; and Langevin steps at each level."""
    model = Denoiser().eval()
    levels = torch.linspace(2.0**0.3, 0.05**0.3, 5) ** (1 / 0.3)
    x = given(torch.randn(2, 3, 13, 11), 2, 3) * levels[0]

    def slope(x: Tensor, level: Tensor) -> Tensor:
        scaled = 1 / (level**2 + 1).sqrt()
        return (x - scaled * model(x * scaled, level.log().expand(2))) / level

    for i, (level, following) in enumerate(zip(levels, [*levels[1:], torch.zeros(())])):
        first = slope(x, level)
        moved = x + (following - level) * first
        if following > 0:
            moved = x + (following - level) * (first + slope(moved, following)) / 2
            moved = moved + 0.01 * torch.randn_like(torch.empty(2, 3, 13, 11)) * following
        x = moved
        yield f"x {i}", x


@PROGRAMS.add()
@torch.no_grad()
def a_latent_diffusion_with_a_tiled_decoder(given: Given) -> Iterator[tuple[str, Any]]:
    """Latents are sampled and decoded, whole and in tiles that are blended."""
    encoder, decoder = nn.Conv2d(3, 4, 4, stride=4), nn.ConvTranspose2d(4, 3, 4, stride=4)
    image = given(drawn(1, 3, 52, 44), 2, 3)
    latents = encoder(image)
    for _ in range(2):
        latents = latents + 0.1 * torch.randn(1, 4, 13, 11)
    yield "whole", decoder(latents)
    rows = []
    for i in range(0, 13, 5):
        tile = decoder(latents[:, :, i : i + 7])
        if rows:
            ramp = torch.linspace(0, 1, 8).view(1, 1, -1, 1)
            above = rows[-1][:, :, 20:28]
            tile[:, :, :8] = above * (1 - ramp[:, :, : above.shape[2]]) + tile[:, :, :8] * ramp
        rows.append(tile)
    yield "tiled", torch.cat([tile[:, :, :20] for tile in rows], 2)[:, :, :52]


# -- roll-outs ---------------------------------------------------------------------------------------------------------


class Step(nn.Module):
    """A weather model: from two states and a forcing to the next state; longitudes are periodic."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 3, 1)
        self.register_buffer("mask", drawn(13, 11, seed=9) > 0)

    def forward(self, before: Tensor, now: Tensor, forcing: Tensor) -> Tensor:
        x = torch.cat([before, now, forcing, self.mask.expand(len(now), 1, -1, -1).to(now.dtype)], 1)
        x = F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1))
        return now + 0.1 * self.out(torch.tanh(self.inner(x)))


def sun(step: int) -> Tensor:
    hours = torch.linspace(0, 2 * math.pi, 11) + step
    return torch.cos(hours).expand(1, 1, 13, 11).clamp(min=0.0)


@PROGRAMS.add()
def a_forecast(given: Given) -> Iterator[tuple[str, Any]]:
    """Roll-out of an ensemble with perturbations of a seed; states are kept, written to a buffer, averaged."""
    model = Step().eval()
    states = [given(images(1), 2, 3), given(images(2), 2, 3)]
    kept = torch.zeros(5, 3, 3, 13, 11)
    weights = torch.cos(torch.linspace(-1.4, 1.4, 13))[:, None]
    with torch.inference_mode():
        for step in range(5):
            following = model(states[-2], states[-1], sun(step).expand(3, -1, -1, -1))
            following = following + 0.01 * torch.randn(3, 3, 13, 11)
            states.append(following)
            kept[step] = following
            mean = (following.mean(0) * weights).mean((-2, -1))
            yield f"step {step}", (following, mean, following.std(0).amax().item())
    yield "all", torch.stack(states[2:], 1)
    yield "kept", kept


@PROGRAMS.add(always=EMPTY)
def training_over_a_roll_out(given: Given) -> Iterator[tuple[str, Any]]:
    """The loss of several steps; a curriculum of their number; pushed forward without gradients; checkpoints."""
    model = Step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    truth = [given(images(seed), 2, 3) for seed in range(6)]
    for epoch in range(3):
        before, now = truth[0], truth[1]
        losses = []
        for step in range(epoch + 2):
            if step == 0 and epoch == 2:
                with torch.no_grad():
                    following = model(before, now, sun(step).expand(3, -1, -1, -1))
            else:
                following = torch.utils.checkpoint.checkpoint(
                    model, before, now, sun(step).expand(3, -1, -1, -1), use_reentrant=False
                )
                losses.append(F.mse_loss(following, truth[step + 2]))
            before, now = now, following
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"losses {epoch}", (loss, [each.item() for each in losses])
        yield f"model {epoch}", model


@PROGRAMS.add()
def assimilation(given: Given) -> Iterator[tuple[str, Any]]:
    """4D-Var: the initial state is what is optimized, to fit observations at points and a background."""
    model = Step().requires_grad_(False)
    background = given(images(1), 2, 3)
    state = background.clone().requires_grad_()
    places, observed = (torch.tensor([1, 5, 11]), torch.tensor([0, 7, 9])), drawn(3, 3, 3, seed=4)
    optimizer = torch.optim.SGD([state], lr=1.0)
    for step in range(3):
        before, now, misfit = state, state, 0.0
        for i in range(2):
            before, now = now, model(before, now, sun(i).expand(3, -1, -1, -1))
            misfit = misfit + (now[:, :, places[0], places[1]] - observed).square().mean()
        loss = misfit + 0.1 * (state - background).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"step {step}", (loss, state)


@PROGRAMS.add()
@torch.no_grad()
def a_recurrent_roll_out(given: Given) -> Iterator[tuple[str, Any]]:
    """ConvLSTM: a state that starts as zeros of the image's size."""
    gates, out = nn.Conv2d(3 + 4, 16, 3, padding=1), nn.Conv2d(4, 3, 1)
    x = given(images(), 2, 3)
    h = c = x.new_zeros(3, 4, 13, 11)
    for step in range(4):
        i, f, o, g = gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        x = x + out(h)
        yield f"step {step}", (x, c)


# -- inference ---------------------------------------------------------------------------------------------------------


@PROGRAMS.add()
@torch.no_grad()
def sliding_windows(given: Given) -> Iterator[tuple[str, Any]]:
    """Overlapping windows, weighted, summed into a plain buffer; some cross the boundary of the shards."""
    model, x = UNet(norm=False).eval(), given(drawn(1, 3, 21, 17), 2, 3)
    size, stride = 9, 6
    profile = torch.hann_window(size + 2, periodic=False)[1:-1]
    weight = profile[:, None] * profile
    total, count = torch.zeros(1, 3, 21, 17), torch.zeros(1, 1, 21, 17)
    for i in range(0, 21 - size + 1, stride):
        for j in range(0, 17 - size + 1, stride - 2):
            total[:, :, i : i + size, j : j + size] += model(x[:, :, i : i + size, j : j + size]) * weight
            count[:, :, i : i + size, j : j + size] += weight
    yield "result", total / count


@PROGRAMS.add()
@torch.no_grad()
def patches_by_unfold_and_fold(given: Given) -> Iterator[tuple[str, Any]]:
    model, x = nn.Sequential(nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 48)), given(drawn(2, 3, 20, 16), 2, 3)
    patches = F.unfold(x, 4, stride=4).mT
    out = F.fold(model(patches).mT, (20, 16), 4, stride=4)
    yield "patches", out
    overlapping = F.unfold(x, 4, stride=2, padding=1)
    norm = F.fold(F.unfold(torch.ones(1, 1, 20, 16), 4, stride=2, padding=1), (20, 16), 4, stride=2, padding=1)
    yield "overlapping", F.fold(overlapping * 0.5, (20, 16), 4, stride=2, padding=1) / norm


@PROGRAMS.add()
@torch.no_grad()
def augmentation_at_test_time(given: Given) -> Iterator[tuple[str, Any]]:
    """Flips and rotations, undone; sizes; the mean of probabilities, their entropy, and a vote."""
    model, x = UNet().eval(), given(images(), 2, 3)
    views: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (lambda t: t, lambda t: t),
        (lambda t: t.flip(2), lambda t: t.flip(2)),
        (lambda t: t.flip(2, 3), lambda t: t.flip(2, 3)),
        (lambda t: t.roll((2, -1), (2, 3)), lambda t: t.roll((-2, 1), (2, 3))),
        (lambda t: t.rot90(1, (2, 3)), lambda t: t.rot90(-1, (2, 3))),
        (
            lambda t: F.interpolate(t, size=(17, 15), mode="bilinear"),
            lambda t: F.interpolate(t, size=(13, 11), mode="bilinear"),
        ),
    ]
    each = torch.stack([undo(model(do(x)).softmax(1)) for do, undo in views])
    mean = each.mean(0)
    yield "mean", mean
    yield "entropy", -(mean * mean.log()).sum(1)
    yield "vote", each.argmax(2).mode(0).values
    yield "agreement", (each.argmax(2) == mean.argmax(1)).double().mean().item()


@PROGRAMS.add()
@torch.no_grad()
def uncertainty_by_members(given: Given) -> Iterator[tuple[str, Any]]:
    """An ensemble of networks by ``torch.func.stack_module_state`` and ``vmap``, and by a loop."""
    models = [nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = given(images(), 2, 3)

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    out = torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    yield "mapped", out
    yield "looped", torch.stack([model(x) for model in models])
    yield "spread", (out.std(0), out.var(0).mean().item())


# -- sequences ---------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Causal attention over a long context, which may be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8), nn.Embedding(40, 8)
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return (x + self.out(y)) @ self.table.weight.T


@PROGRAMS.add()
@torch.no_grad()
def greedy_decoding(given: Given) -> Iterator[tuple[str, Any]]:
    """The prompt is sharded along the sequence; each new token is appended, and read as a number."""
    model, ids = Decoder().eval(), given(classes(2, 13, of=11), 1)
    for step in range(4):
        logits = model(ids)[:, -1]
        following = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], 1)
        yield f"step {step}", (logits, following.flatten().tolist(), int(following[0, 0]))
    yield "ids", ids


@PROGRAMS.add()
@torch.no_grad()
def decoding_with_a_cache_of_the_prompt(given: Given) -> Iterator[tuple[str, Any]]:
    """Keys and values of the prompt stay where they are; those of new tokens are plain. Sampled by a seed."""
    model, ids = Decoder().eval(), given(classes(2, 13, of=11), 1, 0)
    x = model.table(ids) + model.places(torch.arange(13))
    _, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in model.qkv(model.norm(x)).chunk(3, -1))
    token = torch.full((2, 1), 3)
    for step in range(3):
        y = model.table(token) + model.places.weight[13 + step]
        q, nk, nv = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in model.qkv(model.norm(y)).chunk(3, -1))
        k, v = torch.cat([k, nk], 2), torch.cat([v, nv], 2)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        logits = ((y + model.out(out)) @ model.table.weight.T)[:, -1] / 0.8
        best = logits.topk(5).values[:, -1:]
        chances = logits.masked_fill(logits < best, -float("inf")).softmax(-1)
        uniform = torch.rand(2, 1)
        token = (chances.cumsum(-1) < uniform).sum(-1, keepdim=True)
        yield f"step {step}", (chances, token)


@PROGRAMS.add()
@torch.no_grad()
def masked_decoding_of_an_image(given: Given) -> Iterator[tuple[str, Any]]:
    """MaskGIT: the surest tokens of a sharded sequence are kept in each step."""
    table, model, head = nn.Embedding(8, 8), transformer().eval(), nn.Linear(8, 7)
    ids = given(torch.full((2, 13), 7), 1, 0)
    for step in range(4):
        chances = head(model(table(ids))).softmax(-1)
        best, found = chances.max(-1)
        best = torch.where(ids == 7, best, float("inf"))
        left = 13 - int(13 * (step + 1) / 4)
        threshold = best.sort(-1).values[:, left : left + 1] if left < 13 else best.amax(-1, keepdim=True)
        ids = torch.where((ids == 7) & (best >= threshold), found, ids)
        yield f"ids {step}", ids


@PROGRAMS.add()
@torch.no_grad()
def embeddings_and_their_neighbours(given: Given) -> Iterator[tuple[str, Any]]:
    """A sharded gallery, plain queries: cosine similarity, the best few, and a vote weighted by it."""
    model = transformer().eval()
    gallery = F.normalize(model(given(drawn(29, 5, 8), 0)).mean(1), dim=-1)
    labels = given(classes(29, of=4), 0)
    queries = F.normalize(model(tokens()).mean(1), dim=-1)
    similar, index = (queries @ gallery.T).topk(5, dim=1)
    votes = torch.zeros(3, 4).scatter_add(1, labels[index], (similar / 0.1).exp())
    yield "found", (similar, index)
    yield "votes", (votes, votes.argmax(1))


@PROGRAMS.parametrize()
def test_programs(name, layout, tmp_path):
    check(__name__, name, layout, tmp_path)
