"""Losses that are written by hand, and what an evaluation adds up: metrics, histograms, averages in buffers."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workflows.harness import EMPTY, MESH, TWO, Given, Programs, check
from workflows.models import UNet, classes, classifier, drawn, images, mlp, transformer

PROGRAMS = Programs()
# Pixels of an image that is cut along both sides are in no order that ranks could keep.
FLATTENED = {MESH: r"several of its dims are sharded|does not stay a dim of the result"}


def batches(given: Given, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Images and the class of each pixel; the last batch is smaller."""
    sizes = [3] * (count - 1) + [2]
    return [(given(images(seed)[:n], 2, 3), given(classes(n, 13, 11, seed=seed), 1, 2)) for seed, n in enumerate(sizes)]


# -- metrics -----------------------------------------------------------------------------------------------------------


@PROGRAMS.add(always=TWO, refused=FLATTENED)
def confusion_matrix_and_intersection_over_union(given: Given) -> Iterator[tuple[str, Any]]:
    """By ``bincount`` into a plain matrix, over an evaluation."""
    model = UNet().eval()
    matrix = torch.zeros(3, 3, dtype=torch.long)
    for step, (x, y) in enumerate(batches(given)):
        with torch.no_grad():
            predicted = model(x).argmax(1)
        kept = y != 2
        flat = y[kept] * 3 + predicted[kept]
        matrix += torch.bincount(flat, minlength=9).reshape(3, 3)
        yield f"matrix {step}", matrix
    hits = matrix.diag()
    union = matrix.sum(0) + matrix.sum(1) - hits
    yield "IoU", [(h / u).item() for h, u in zip(hits, union)]
    yield "mean", np.nanmean(np.asarray([float(h / u) for h, u in zip(hits, union)]))
    yield "accuracy", hits.sum().item() / matrix.sum().item()


@PROGRAMS.add()
def confusion_matrix_by_one_hot(given: Given) -> Iterator[tuple[str, Any]]:
    """A product of one-hot classes; also by ``index_put_`` with pairs, and by loops over classes."""
    model = UNet().eval()
    total = torch.zeros(3, 3)
    for step, (x, y) in enumerate(batches(given)):
        with torch.inference_mode():
            predicted = model(x).argmax(1)
            ours, theirs = F.one_hot(predicted, 3).double(), F.one_hot(y, 3).double()
            matrix = torch.einsum("bhwi,bhwj->ij", theirs, ours)
            loops = [[((y == i) & (predicted == j)).sum().item() for j in range(3)] for i in range(3)]
            counted = torch.zeros(3, 3).index_put_((y, predicted), torch.ones(()), accumulate=True)
        total = total + matrix
        yield f"step {step}", (matrix, loops, counted)
    yield "total", total


class AverageMeter:
    """As in torch's examples."""

    def __init__(self) -> None:
        self.value = self.sum = self.count = self.average = 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.value = value
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[Tensor]:
    """As in torch's examples."""
    with torch.no_grad():
        _, predicted = output.topk(max(topk), 1, True, True)
        predicted = predicted.t()
        correct = predicted.eq(target.view(1, -1).expand_as(predicted))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


@PROGRAMS.add()
def accuracy_of_the_best_few(given: Given) -> Iterator[tuple[str, Any]]:
    """With images cut along rows, and along samples, as are the classes."""
    model = classifier(7)
    first, third, losses = AverageMeter(), AverageMeter(), AverageMeter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        dims = (0,) if step % 2 else (2, 3)
        x, y = drawn(8, 3, 13, 11, seed=step), classes(8, of=7, seed=step)
        x, y = given(x, *dims), given(y, 0) if step % 2 else y
        output = model(x)
        loss = F.cross_entropy(output, y)
        best = accuracy(output, y, (1, 3))
        losses.update(loss.item(), x.size(0))
        first.update(best[0].item(), x.size(0))
        third.update(best[1].item(), x.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"step {step}", [vars(meter) for meter in (first, third, losses)]


@PROGRAMS.add()
def accuracy_of_each_pixel_while_training(given: Given) -> Iterator[tuple[str, Any]]:
    """Running counts as numbers, as plain tensors, in a dict and in a queue."""
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right, seen, history = 0, 0, defaultdict(list)
    total, recent = torch.zeros(()), deque(maxlen=2)
    for step, (x, y) in enumerate(batches(given)):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        right += (out.argmax(1) == y).sum().item()
        seen += y.numel()
        total += loss.detach() * len(x)
        recent.append(loss.detach())
        history["loss"].append(float(loss))
        history["confidence"].append(out.softmax(1).amax(1).mean().item())
        yield f"step {step}", (right / seen, total, sum(recent) / len(recent), f"{loss:.6f}", dict(history))
    yield "mean", (np.mean(history["loss"]), torch.stack(list(recent)).mean())


@PROGRAMS.add()
def peak_signal_to_noise(given: Given) -> Iterator[tuple[str, Any]]:
    model = UNet()
    noisy, clean = given(images().sigmoid(), 2, 3), given(images(2).sigmoid(), 2, 3)
    with torch.no_grad():
        restored = model(noisy).clamp(0, 1)
    for name, image in (("noisy", noisy), ("restored", restored)):
        error = F.mse_loss(image, clean)
        each = (image - clean).square().flatten(1).mean(1)
        yield name, (10 * math.log10(1 / error.item()), -10 * torch.log10(error), (-10 * torch.log10(each)).mean())
    yield "range", (restored.min().item(), restored.max().item(), torch.aminmax(noisy))


def gaussian(size: int = 5, sigma: float = 1.5) -> Tensor:
    x = torch.arange(size, dtype=torch.get_default_dtype()) - size // 2
    weights = torch.exp(-(x**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    return weights[:, None] * weights


@PROGRAMS.add()
def structural_similarity(given: Given) -> Iterator[tuple[str, Any]]:
    """A metric, and a loss that trains, on two scales."""
    window = gaussian().expand(3, 1, 5, 5)

    def ssim(a: Tensor, b: Tensor) -> Tensor:
        def blurred(x: Tensor) -> Tensor:
            return F.conv2d(x, window, groups=3)

        ma, mb = blurred(a), blurred(b)
        va, vb, cov = blurred(a * a) - ma**2, blurred(b * b) - mb**2, blurred(a * b) - ma * mb
        similar = ((2 * ma * mb + 1e-4) * (2 * cov + 9e-4)) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
        return similar.mean((1, 2, 3))

    model = UNet()
    x, y = given(images().sigmoid(), 2, 3), given(images(2).sigmoid(), 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        out = model(x).sigmoid()
        one, two = ssim(out, y), ssim(F.avg_pool2d(out, 2), F.avg_pool2d(y, 2))
        loss = 1 - (one * two.clamp(min=1e-3) ** 0.5).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"step {step}", (one, two, loss)
        yield f"model {step}", model


@PROGRAMS.add(always=EMPTY, refused=FLATTENED)
def calibration(given: Given) -> Iterator[tuple[str, Any]]:
    """Histograms of the confidence, their expected error, and a temperature that is fitted by LBFGS."""
    model, temperature = UNet().eval(), nn.Parameter(torch.ones(()))
    edges = torch.linspace(0, 1, 11)
    count, hits, sums = torch.zeros(10), torch.zeros(10), torch.zeros(10)
    logits, labels = [], []
    for x, y in batches(given):
        with torch.no_grad():
            out = model(x)
        confidence, predicted = out.softmax(1).max(1)
        place = torch.bucketize(confidence, edges[1:-1]).flatten()
        right = (predicted == y).flatten()
        count += torch.bincount(place, minlength=10)
        hits.index_add_(0, place, right.double())
        sums.scatter_add_(0, place, confidence.flatten())
        logits.append(out)
        labels.append(y)
        yield "histogram", torch.histc(confidence, 10, 0.0, 1.0)
    yield "counts", (count, hits, sums)
    rate = (hits - sums).abs() / count.clamp(min=1)
    yield "error", (rate * count / count.sum()).sum().item()
    out, target = torch.cat(logits), torch.cat(labels)
    optimizer = torch.optim.LBFGS([temperature], lr=0.1, max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(out / temperature, target)
        loss.backward()
        return loss

    optimizer.step(closure)
    yield "temperature", temperature


@PROGRAMS.add()
def precision_and_recall_at_thresholds(given: Given) -> Iterator[tuple[str, Any]]:
    """Counts for each threshold, the area under the curve, and the best threshold."""
    model = UNet(out=1).eval()
    thresholds = torch.linspace(0.3, 0.7, 9)
    hit, false, missed = torch.zeros(9), torch.zeros(9), torch.zeros(9)
    for x, y in batches(given):
        with torch.no_grad():
            p = model(x).sigmoid().squeeze(1)
        positive = y > 0
        over = p[..., None] >= thresholds
        hit += (over & positive[..., None]).sum((0, 1, 2))
        false += (over & ~positive[..., None]).flatten(0, 2).sum(0)
        missed += torch.stack([((p < t) & positive).sum() for t in thresholds])
    precision, recall = hit / (hit + false).clamp(min=1), hit / (hit + missed)
    score = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
    best = score.argmax()
    yield "curves", (precision, recall)
    yield "area", torch.trapezoid(precision, recall)
    yield "best", (int(best), thresholds[best].item(), score.max())


@PROGRAMS.add()
def area_under_the_curve_by_ranks(given: Given) -> Iterator[tuple[str, Any]]:
    """Sorted scores, their cumulative sums, and quantiles."""
    score, positive = given(drawn(37), 0), given(classes(37, of=2) > 0, 0)
    order = score.argsort(descending=True)
    sorted_ = positive[order].double()
    tpr, fpr = sorted_.cumsum(0) / sorted_.sum(), (1 - sorted_).cumsum(0) / (1 - sorted_).sum()
    yield "area", torch.trapezoid(tpr, fpr)
    yield "average precision", (sorted_ * (sorted_.cumsum(0) / torch.arange(1, 38))).sum() / sorted_.sum()
    yield "quantiles", torch.quantile(score, torch.tensor([0.1, 0.5, 0.9]))
    yield "median", (score.median().values if isinstance(score.median(), tuple) else score.median())


@PROGRAMS.add(refused=FLATTENED)
def scores_of_an_ensemble(given: Given) -> Iterator[tuple[str, Any]]:
    """Continuous ranked probability, spread, skill weighted by latitude, rank histograms, the energy score."""
    members, truth = given(drawn(5, 2, 13, 11), 2, 3), given(drawn(2, 13, 11, seed=2), 1, 2)
    latitudes = torch.linspace(-75, 75, 13)
    weights = torch.cos(torch.deg2rad(latitudes))[:, None]
    weights = weights / weights.mean()
    error = (members - truth).abs().mean(0)
    pairs = (members[:, None] - members[None]).abs().mean((0, 1))
    crps = error - pairs / 2
    ordered = members.sort(0).values
    gaps = (2 * torch.arange(1, 6) - 6).view(5, 1, 1, 1)
    fair = error - (ordered * gaps).sum(0) / (5 * 4)
    yield "CRPS", ((crps * weights).mean((-2, -1)), (fair * weights).mean())
    mean = members.mean(0)
    skill = (((mean - truth) ** 2) * weights).mean((-2, -1)).sqrt()
    spread = (members.var(0) * weights).mean((-2, -1)).sqrt()
    yield "spread and skill", (spread, skill, (spread / skill).tolist())
    ranks = (members < truth).sum(0)
    yield "ranks", torch.bincount(ranks.flatten(), minlength=6)
    climate = truth.mean((-2, -1), keepdim=True)
    a, b = mean - climate, truth - climate
    correlation = (weights * a * b).sum() / ((weights * a * a).sum() * (weights * b * b).sum()).sqrt()
    yield "anomaly correlation", correlation.item()
    norms = (members - truth).flatten(1).norm(dim=1)
    yield "energy score", norms.mean() - torch.cdist(members.flatten(1), members.flatten(1)).mean() / 2


@PROGRAMS.add()
def metrics_in_numpy(given: Given) -> Iterator[tuple[str, Any]]:
    """Results of reductions become arrays and numbers."""
    model = UNet().eval()
    rows = []
    for x, y in batches(given):
        with torch.no_grad():
            out = model(x)
        each = F.cross_entropy(out, y, reduction="none").mean((1, 2))
        rows.append([float(each.mean()), each.max().item(), *out.mean((0, 2, 3)).tolist()])
    table = np.asarray(rows)
    yield "table", table
    yield "mean", (table.mean(0), np.round(table.std(), 9))


@PROGRAMS.add()
def norms_of_gradients_and_activations(given: Given) -> Iterator[tuple[str, Any]]:
    """What a logger writes at each step: of weights, gradients, activations, and shares of dead units."""
    model, (x, y) = UNet(), batches(given)[0]
    seen: dict[str, tuple[Any, ...]] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            o = out.detach()
            seen[name] = (o.mean().item(), o.std().item(), (o > 0).double().mean().item(), o.norm().item())

        return hook

    handles = [m.register_forward_hook(look(name)) for name, m in model.named_modules() if name]
    F.cross_entropy(model(x), y).backward()
    for handle in handles:
        handle.remove()
    yield "activations", seen
    yield "gradients", {n: (p.grad.norm().item(), p.grad.abs().max().item()) for n, p in model.named_parameters()}
    yield "histograms", {n: torch.histogram(p.grad.flatten(), 5).hist for n, p in model.named_parameters()}


# -- losses ------------------------------------------------------------------------------------------------------------


@PROGRAMS.add(refused=FLATTENED)
def losses_of_segmentation(given: Given) -> Iterator[tuple[str, Any]]:
    """Dice, focal, Tversky, of the boundary, of Lovasz by a sort, weighted by counts, of the hardest pixels."""
    model, (x, y) = UNet(), batches(given)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        out = model(x)
        p, log = out.softmax(1), out.log_softmax(1)
        target = F.one_hot(y, 3).movedim(-1, 1).to(p.dtype)
        dims = (0, 2, 3)
        both = (p * target).sum(dims)
        dice = 1 - ((2 * both + 1) / (p.sum(dims) + target.sum(dims) + 1)).mean()
        tversky = 1 - (both / (both + 0.3 * (p * (1 - target)).sum(dims) + 0.7 * ((1 - p) * target).sum(dims))).mean()
        own = log.gather(1, y[:, None]).squeeze(1)
        focal = (-((1 - own.exp()) ** 2) * own).mean()
        counts = torch.bincount(y.flatten(), minlength=3).double()
        weighted = F.cross_entropy(out, y, weight=counts.sum() / (3 * counts), ignore_index=2)
        edges = F.max_pool2d(target, 3, 1, 1) - (-F.max_pool2d(-target, 3, 1, 1))
        boundary = (edges * (p - target).abs()).sum() / edges.sum().clamp(min=1)
        each = F.cross_entropy(out, y, reduction="none").flatten()
        hardest = each.topk(each.numel() // 4).values.mean()
        errors, order = (target[:, 1] - p[:, 1]).abs().flatten().sort(descending=True)
        truth = target[:, 1].flatten()[order]
        union = truth.sum() + (1 - truth).cumsum(0)
        jaccard = 1 - (truth.sum() - truth.cumsum(0)) / union
        lovasz = (errors * torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])).sum()
        losses = torch.stack([dice, tversky, focal, weighted, boundary, hardest, lovasz])
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        yield f"losses {step}", losses
        yield f"model {step}", model


@PROGRAMS.add(refused=FLATTENED)
def losses_of_regression(given: Given) -> Iterator[tuple[str, Any]]:
    """Of spectra, of gradients, of total variation, with missing values, of quantiles, of a predicted variance."""
    model, x = UNet(out=4), given(images(), 2, 3)
    y = given(torch.where(images(3)[:, :1] > 1, float("nan"), images(2)[:, :1]), 2, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        out = model(x)
        known = torch.isfinite(y)
        filled = torch.nan_to_num(y)
        masked = ((out[:, :1] - filled) ** 2 * known).sum() / known.sum()
        picked = (out[:, :1][known] - y[known]).abs().mean()
        spectrum = torch.fft.rfft2(out[:, :1], norm="ortho").abs() - torch.fft.rfft2(filled, norm="ortho").abs()
        slopes = [(out.diff(dim=d) - filled.diff(dim=d)).abs().mean() for d in (2, 3)]
        quantiles = torch.tensor([0.1, 0.5, 0.9]).view(1, 3, 1, 1)
        error = filled - out[:, 1:]
        pinball = torch.maximum(quantiles * error, (quantiles - 1) * error).mean()
        likely = F.gaussian_nll_loss(out[:, :1], filled, out[:, 1:2].exp())
        loss = masked + picked + spectrum.square().mean() + sum(slopes) + pinball + likely
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"parts {step}", (masked, picked, slopes, pinball, likely)
        yield f"model {step}", model


@PROGRAMS.add()
def a_perceptual_loss(given: Given) -> Iterator[tuple[str, Any]]:
    """Features of a frozen network, and their Gram matrices."""
    model, frozen = UNet(), classifier().eval().requires_grad_(False)
    x, style = given(images(), 2, 3), images(2)

    def features(x: Tensor) -> list[Tensor]:
        found = []
        for layer in frozen[:5]:
            x = layer(x)
            found.append(x)
        return found[2::2]

    def gram(x: Tensor) -> Tensor:
        flat = x.flatten(2)
        return flat @ flat.mT / flat.shape[-1]

    with torch.no_grad():
        grams = [gram(f) for f in features(style)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        out = features(model(x))
        content = sum(F.l1_loss(a, b.detach()) for a, b in zip(out, features(x)))
        styled = sum(F.mse_loss(gram(a), b) for a, b in zip(out, grams))
        optimizer.zero_grad()
        (content + styled).backward()
        optimizer.step()
        yield f"losses {step}", (content, styled)
        yield f"model {step}", model
        yield f"frozen {step}", frozen


@PROGRAMS.add(refused=FLATTENED)
def losses_of_a_language_model(given: Given) -> Iterator[tuple[str, Any]]:
    """Shifted tokens, some ignored, with a z-loss; the perplexity of an evaluation."""
    table, model = nn.Embedding(11, 8), transformer()
    parameters = [*table.parameters(), *model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    ids = classes(3, 14, of=11)
    ids[0, 9:] = -100
    inputs, following = given(ids[:, :-1].clamp(min=0), 1, 0), given(ids[:, 1:].contiguous(), 1, 0)
    mask = nn.Transformer.generate_square_subsequent_mask(13)
    total, count = 0.0, 0
    for step in range(2):
        logits = model(table(inputs), mask=mask, is_causal=True) @ table.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=-100)
        z = logits.logsumexp(-1)[following != -100].square().mean()
        optimizer.zero_grad()
        (loss + 1e-2 * z).backward()
        optimizer.step()
        valid = (following != -100).sum().item()
        total += loss.item() * valid
        count += valid
        yield f"losses {step}", (loss, z)
        yield f"weights {step}", parameters
    yield "perplexity", math.exp(total / count)


# -- averages in buffers -----------------------------------------------------------------------------------------------


class Normalizer(nn.Module):
    """Moving averages of channels in buffers, written by hand, in the ways in which people do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))
        self.register_buffer("low", torch.full((channels,), float("inf")))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
                self.var.lerp_(x.var((0, 2, 3)), 0.1)
                self.low.copy_(torch.minimum(self.low, x.amin((0, 2, 3))))
                self.count += x.numel() / x.shape[1]
                self.steps += 1
        return (x - self.mean[:, None, None]) / (self.var[:, None, None] + 1e-5).sqrt()


@PROGRAMS.add()
def averages_in_buffers(given: Given) -> Iterator[tuple[str, Any]]:
    """Buffers stay plain, so one rank can save them, and a plain image is normalized to a plain one."""
    model = nn.Sequential(Normalizer(3), UNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(given)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"model {step}", model
    model.eval()
    with torch.no_grad():
        out = model(images(7))
    yield "plain", (type(out).__name__, out)


@PROGRAMS.add()
def statistics_of_a_data_set(given: Given) -> Iterator[tuple[str, Any]]:
    """Welford's sums over batches, extremes, and a histogram, into plain tensors."""
    count, mean, second = torch.zeros(()), torch.zeros(3), torch.zeros(3)
    least, most, histogram = torch.full((3,), float("inf")), torch.full((3,), -float("inf")), torch.zeros(6)
    for step, (x, _) in enumerate(batches(given)):
        n = x.numel() // 3
        here = x.mean((0, 2, 3))
        delta = here - mean
        total = count + n
        second = second + ((x - here[:, None, None]) ** 2).sum((0, 2, 3)) + delta**2 * count * n / total
        mean, count = mean + delta * n / total, total
        least, most = torch.minimum(least, x.amin((0, 2, 3))), torch.maximum(most, x.amax((0, 2, 3)))
        histogram += torch.histc(x, 6, -3, 3)
        yield f"step {step}", (count, mean, (second / (count - 1)).sqrt(), least, most, histogram)


@PROGRAMS.add()
def returns_normalized_by_running_statistics(given: Given) -> Iterator[tuple[str, Any]]:
    """Of reinforcement learning: advantages over a sharded batch of trajectories, a clipped ratio, an entropy."""
    policy, value = mlp(given=3, out=4), mlp(given=3, out=1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=0.01)
    states, actions, rewards = given(drawn(13, 9, 3), 0), given(classes(13, 9, of=4), 0), given(drawn(13, 9), 0)
    with torch.no_grad():
        old = F.log_softmax(policy(states), -1).gather(-1, actions[..., None]).squeeze(-1)
        v = value(states).squeeze(-1)
        advantage, last = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
        for t in reversed(range(9)):
            following = v[:, t + 1] if t < 8 else torch.zeros_like(last)
            last = rewards[:, t] + 0.99 * following - v[:, t] + 0.99 * 0.95 * last
            advantage[:, t] = last
        returns = advantage + v
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    yield "advantage", advantage
    for step in range(2):
        chances = torch.distributions.Categorical(logits=policy(states))
        ratio = (chances.log_prob(actions) - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = -gain + 0.5 * F.mse_loss(value(states).squeeze(-1), returns) - 0.01 * chances.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        yield f"loss {step}", loss
        yield f"policy {step}", policy
        yield f"value {step}", value


@PROGRAMS.parametrize()
def test_programs(name, layout, tmp_path):
    check(__name__, name, layout, tmp_path)
