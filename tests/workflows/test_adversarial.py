"""Several networks that train each other: adversaries, autoencoders, contrastive learning, teachers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from workflows.harness import EMPTY, MESH, Given, Programs, check
from workflows.models import UNet, classes, classifier, drawn, images

PROGRAMS = Programs()


# -- adversaries -------------------------------------------------------------------------------------------------------


def critic(channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(6, 4, 4, 2, 1), nn.SiLU(), nn.Conv2d(4, 1, 3)
    )


def switched(model: nn.Module, on: bool) -> None:
    for p in model.parameters():
        p.requires_grad_(on)


@PROGRAMS.add(always=EMPTY)
def two_adversaries(given: Given) -> Iterator[tuple[str, Any]]:
    """The noise is plain and of a seed; the discriminator is frozen while the generator learns."""
    generator, discriminator = UNet(), critic()
    ours, theirs = (Adam(m.parameters(), lr=0.01, betas=(0.5, 0.9)) for m in (generator, discriminator))
    real = given(images(), 2, 3)
    for step in range(3):
        noise = given(torch.randn(3, 3, 13, 11), 2, 3)
        fake = generator(noise)
        switched(discriminator, True)
        theirs.zero_grad()
        a, b = discriminator(real), discriminator(fake.detach())
        loss = F.binary_cross_entropy_with_logits(a, torch.ones_like(a) * 0.9)
        loss = loss + F.binary_cross_entropy_with_logits(b, torch.zeros_like(b))
        loss.backward()
        theirs.step()
        switched(discriminator, False)
        ours.zero_grad()
        c = discriminator(fake)
        gain = F.binary_cross_entropy_with_logits(c, torch.ones_like(c))
        gain.backward()
        ours.step()
        yield f"losses {step}", (loss, gain, (a > 0).double().mean().item())
        yield f"generator {step}", generator
        yield f"discriminator {step}", discriminator


@PROGRAMS.add()
def a_critic_with_a_penalty(given: Given) -> Iterator[tuple[str, Any]]:
    """WGAN-GP: the gradient's norm between real and fake, for each sample."""
    generator, discriminator = UNet(norm=False), critic()
    ours, theirs = (Adam(m.parameters(), lr=0.01, betas=(0.0, 0.9)) for m in (generator, discriminator))
    real = given(images(), 2, 3)
    for step in range(3):
        fake = generator(torch.randn(3, 3, 13, 11) + 0 * real)
        epsilon = torch.rand(3, 1, 1, 1)
        between = (epsilon * real + (1 - epsilon) * fake.detach()).requires_grad_()
        out = discriminator(between)
        (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
        penalty = ((slope.flatten(2).norm(dim=(1, 2)) - 1) ** 2).mean()
        loss = discriminator(fake.detach()).mean() - discriminator(real).mean() + 10 * penalty
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        yield f"discriminator {step}", discriminator
        if step % 2 == 0:
            ours.zero_grad()
            (-discriminator(fake).mean()).backward()
            ours.step()
            yield f"generator {step}", generator
        yield f"losses {step}", (loss, penalty)


@PROGRAMS.add()
def regularized_at_real_images(given: Given) -> Iterator[tuple[str, Any]]:
    """R1, lazily, and the length of the path, with a moving average of it; the generator's weights are averaged."""
    generator, discriminator = UNet(norm=False), critic()
    average = copy.deepcopy(generator)
    ours, theirs = (Adam(m.parameters(), lr=0.01) for m in (generator, discriminator))
    real, mean = given(images(), 2, 3), torch.zeros(())
    for step in range(3):
        z = given(torch.randn(3, 3, 13, 11), 2, 3)
        loss = F.softplus(discriminator(generator(z).detach())).mean() + F.softplus(-discriminator(real)).mean()
        if step % 2 == 0:
            x = real.detach().requires_grad_()
            (slope,) = torch.autograd.grad(discriminator(x).sum(), x, create_graph=True)
            loss = loss + 5 * slope.square().sum((1, 2, 3)).mean()
        theirs.zero_grad(set_to_none=True)
        loss.backward()
        theirs.step()
        z = z.detach().requires_grad_()
        fake = generator(z)
        noise = torch.randn(3, 3, 13, 11) / math.sqrt(143)
        (slope,) = torch.autograd.grad((fake * noise).sum(), z, create_graph=True)
        lengths = slope.square().sum(1).mean((1, 2)).sqrt()
        mean = mean.lerp(lengths.detach().mean(), 0.1)
        gain = F.softplus(-discriminator(fake)).mean() + 2 * (lengths - mean).square().mean()
        ours.zero_grad(set_to_none=True)
        gain.backward()
        ours.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), generator.parameters()):
                old.copy_(new.lerp(old, 0.9))
        yield f"losses {step}", (loss, gain, lengths, mean)
        yield f"average {step}", average
        yield f"discriminator {step}", discriminator


@PROGRAMS.add()
def from_image_to_image(given: Given) -> Iterator[tuple[str, Any]]:
    """Pix2Pix: a patch discriminator of pairs, an L1 loss, a pool of earlier images, hinge losses."""
    generator, discriminator = UNet(), critic(6)
    ours, theirs = (Adam(m.parameters(), lr=0.01) for m in (generator, discriminator))
    x, y = given(images(), 2, 3), given(images(2), 2, 3)
    pool: list[Tensor] = []
    for step in range(3):
        fake = generator(x)
        pool = [*pool[-1:], fake.detach().clone()]
        pairs = torch.cat([torch.cat([x, each], 1) for each in pool])
        loss = F.relu(1 + discriminator(pairs)).mean() + F.relu(1 - discriminator(torch.cat([x, y], 1))).mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        gain = -discriminator(torch.cat([x, fake], 1)).mean() + 10 * F.l1_loss(fake, y)
        ours.zero_grad()
        gain.backward()
        ours.step()
        yield f"losses {step}", (loss, gain)
        yield f"generator {step}", generator
        yield f"discriminator {step}", discriminator


@PROGRAMS.add()
def cycles_of_two_generators(given: Given) -> Iterator[tuple[str, Any]]:
    """CycleGAN: two optimizers of parameters that are chained; spectral norms, instance norms, features matched."""
    a = UNet(norm=False)
    b = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.InstanceNorm2d(6), nn.Conv2d(6, 3, 1))
    discriminators = nn.ModuleList(
        nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)), nn.LeakyReLU(0.1), nn.Conv2d(4, 1, 3)) for _ in "ab"
    )
    ours, theirs = Adam([*a.parameters(), *b.parameters()], lr=0.01), Adam(discriminators.parameters(), lr=0.01)
    x, y = given(images(), 2, 3), given(images(2), 2, 3)
    for step in range(2):
        fy, fx = a(x), b(y)
        cycle = F.l1_loss(b(fy), x) + F.l1_loss(a(fx), y) + 0.5 * (F.l1_loss(a(y), y) + F.l1_loss(b(x), x))
        gain = cycle * 10 + (discriminators[0](fx) - 1).square().mean() + (discriminators[1](fy) - 1).square().mean()
        match = F.l1_loss(discriminators[0][0](fx).mean((2, 3)), discriminators[0][0](x).mean((2, 3)).detach())
        ours.zero_grad()
        (gain + match).backward()
        ours.step()
        theirs.zero_grad()
        loss = sum(
            ((discriminator(real) - 1) ** 2).mean() + discriminator(fake.detach()).square().mean()
            for discriminator, real, fake in ((discriminators[0], x, fx), (discriminators[1], y, fy))
        )
        loss.backward()
        theirs.step()
        yield f"losses {step}", (cycle, gain, match, loss)
        yield f"a {step}", a
        yield f"b {step}", b
        yield f"discriminators {step}", discriminators


@PROGRAMS.add(rtol=1e-9)
def attacks_and_training_against_them(given: Given) -> Iterator[tuple[str, Any]]:
    """FGSM, PGD within bounds, and a virtual adversary; gradients of the input by ``x.grad`` and signs."""
    model, y = classifier(), classes(3, of=4)
    optimizer = SGD(model.parameters(), lr=0.1)
    clean = given(images().sigmoid(), 2, 3)
    for step in range(2):
        model.eval()
        x = (clean + 0.05 * (torch.rand(3, 3, 13, 11) - 0.5)).detach()
        for _ in range(2):
            x.requires_grad_()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                x = x + 0.02 * x.grad.tanh()
                x = torch.max(torch.min(x, clean + 0.05), clean - 0.05).clamp(0, 1)
        d = F.normalize(torch.randn(3, 3, 13, 11).flatten(1), dim=1).view(3, 3, 13, 11)
        d = (d + 0 * clean).requires_grad_()
        before = model(clean).detach().log_softmax(1)
        F.kl_div(model(clean + 0.1 * d).log_softmax(1), before, log_target=True, reduction="batchmean").backward()
        virtual = d.grad / d.grad.square().sum((1, 2, 3), keepdim=True).sqrt().clamp(min=1e-12)
        model.train()
        optimizer.zero_grad()
        moved = F.kl_div(model(clean + virtual).log_softmax(1), before, log_target=True, reduction="batchmean")
        loss = F.cross_entropy(model(torch.cat([clean, x])), torch.cat([y, y])) + moved
        loss.backward()
        optimizer.step()
        yield f"attacked {step}", (x, virtual)
        yield f"loss {step}", loss
        yield f"model {step}", model


# -- autoencoders ------------------------------------------------------------------------------------------------------


@PROGRAMS.add(always=MESH)
def a_variational_autoencoder(given: Given) -> Iterator[tuple[str, Any]]:
    """The noise is given, of a seed; a divergence in closed form and by torch.distributions; a growing weight."""
    encoder = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv2d(6, 8, 3, padding=1))
    decoder = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, 1), nn.SiLU(), nn.Conv2d(6, 3, 3, padding=1))
    optimizer = AdamW([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    x = given(images(), 2, 3)
    for step in range(3):
        mean, log = encoder(x).chunk(2, 1)
        z = mean + (0.5 * log).exp() * torch.randn(3, 4, 7, 6)
        out = decoder(z)
        kl = -0.5 * (1 + log - mean**2 - log.exp()).sum((1, 2, 3)).mean()
        normal = torch.distributions.Normal(mean, (0.5 * log).exp())
        same = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum((1, 2, 3)).mean()
        loss = F.mse_loss(out, x, reduction="sum") / 3 + min(1.0, step / 2) * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"losses {step}", (loss, kl, same)
        yield f"out {step}", (z, out)
        yield f"encoder {step}", encoder
        yield f"decoder {step}", decoder


class Codebook(nn.Module):
    """VQ-VAE's, whose codes are moving averages of the vectors nearest to them, in buffers."""

    def __init__(self, codes: int = 7, dim: int = 4) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, dim))
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = z.movedim(1, -1)
        far = flat.square().sum(-1, keepdim=True) - 2 * flat @ self.codes.T + self.codes.square().sum(-1)
        index = far.argmin(-1)
        chosen = F.embedding(index, self.codes).movedim(-1, 1)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(index, len(self.codes)).to(z.dtype)
                self.size.mul_(0.9).add_(one_hot.sum((0, 1, 2)), alpha=0.1)
                self.sums.mul_(0.9).add_(torch.einsum("bhwk,bhwc->kc", one_hot, flat), alpha=0.1)
                smooth = (self.size + 1e-5) / (self.size.sum() + len(self.codes) * 1e-5) * self.size.sum()
                self.codes.copy_(self.sums / smooth[:, None])
        commitment = F.mse_loss(z, chosen.detach())
        return z + (chosen - z).detach(), index, commitment


@PROGRAMS.add()
def a_codebook_of_moving_averages(given: Given) -> Iterator[tuple[str, Any]]:
    encoder, book = nn.Conv2d(3, 4, 3, 2, 1), Codebook()
    decoder = nn.ConvTranspose2d(4, 3, 3, 2, 1)
    model = nn.ModuleList([encoder, book, decoder])
    optimizer = Adam(model.parameters(), lr=0.01)
    x = given(images(), 2, 3)
    for step in range(3):
        z, index, commitment = book(encoder(x))
        loss = F.mse_loss(decoder(z), x) + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        used = torch.stack([(index == i).sum() for i in range(7)]).double()
        share = used / used.sum()
        yield f"losses {step}", (loss, commitment, (-(share * (share + 1e-10).log()).sum()).exp())
        yield f"index {step}", index
        yield f"model {step}", model


@PROGRAMS.add()
def a_codebook_that_learns(given: Given) -> Iterator[tuple[str, Any]]:
    """By gradients of an embedding; residual levels; and a Gumbel softmax with plain noise."""
    encoder, decoder = nn.Conv2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(4, 3, 3, 2, 1)
    books = nn.ModuleList(nn.Embedding(7, 4) for _ in range(2))
    head = nn.Conv2d(4, 7, 1)
    model = nn.ModuleList([encoder, decoder, books, head])
    optimizer = Adam(model.parameters(), lr=0.01)
    x = given(images(), 2, 3)
    for step in range(3):
        z = encoder(x)
        rest, total, loss = z.movedim(1, -1), 0.0, 0.0
        for book in books:
            index = torch.cdist(rest.flatten(2) if rest.ndim == 3 else rest, book.weight).argmin(-1)
            code = book(index)
            loss = loss + F.mse_loss(code, rest.detach()) + 0.25 * F.mse_loss(rest, code.detach())
            rest, total = rest - code.detach(), total + code
        out = decoder(z + (total.movedim(-1, 1) - z).detach())
        uniform = torch.rand(3, 7, 7, 6).clamp(1e-6, 1 - 1e-6)
        soft = ((head(z) - (-uniform.log()).log()) / 0.7).softmax(1)
        mixed = torch.einsum("bkhw,kc->bchw", soft, books[0].weight)
        loss = loss + F.mse_loss(out, x) + F.mse_loss(decoder(mixed), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"model {step}", model


@PROGRAMS.add()
def a_masked_autoencoder(given: Given) -> Iterator[tuple[str, Any]]:
    """Patches are drawn by plain noise of a seed, kept by ``gather``, and put back by the inverse order."""
    embed, encode, decode = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 8), nn.Linear(8, 12)
    token, places = nn.Parameter(torch.randn(1, 1, 8) * 0.02), nn.Parameter(torch.randn(1, 30, 8) * 0.02)
    parameters = [*embed.parameters(), *encode.parameters(), *decode.parameters(), token, places]
    optimizer = AdamW(parameters, lr=0.01)
    x = given(images()[:, :, :12, :10], 2, 0)
    target = F.unfold(x, 2, stride=2).mT
    for step in range(2):
        order = torch.rand(3, 30).argsort(1)
        back, kept = order.argsort(1), order[:, :9]
        tokens = embed(x).flatten(2).mT + places
        seen = encode(tokens.gather(1, kept[..., None].expand(-1, -1, 8)))
        full = torch.cat([seen, token.expand(3, 21, -1)], 1).gather(1, back[..., None].expand(-1, -1, 8))
        mask = torch.ones(3, 30).scatter_(1, kept, 0.0)
        each = (decode(full + places) - target).square().mean(-1)
        loss = (each * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        yield f"parameters {step}", parameters


# -- contrastive learning ----------------------------------------------------------------------------------------------


def encoder(out: int = 5) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, out),
    )


def followed(slow: nn.Module, fast: nn.Module, decay: float) -> None:
    with torch.no_grad():
        for old, new in zip(slow.parameters(), fast.parameters()):
            old.data = old.data * decay + new.data * (1 - decay)


@PROGRAMS.add()
def noise_contrastive(given: Given) -> Iterator[tuple[str, Any]]:
    """InfoNCE of two views with a temperature that is learned; images cut along rows, and along samples."""
    for dims in ((2, 3), (0,)):
        model, temperature = encoder(), nn.Parameter(torch.tensor(0.0))
        optimizer = Adam([*model.parameters(), temperature], lr=0.01)
        x = given(drawn(8, 3, 13, 11), *dims)
        for step in range(2):
            a, b = (F.normalize(model(view), dim=1) for view in (x, x.flip(3) + 0.1))
            logits = a @ b.T * temperature.exp()
            labels = torch.arange(8)
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            both = torch.cat([a, b])
            similar = (both @ both.T / 0.5).masked_fill(torch.eye(16, dtype=torch.bool), -float("inf"))
            loss = loss + F.cross_entropy(similar, torch.arange(16).roll(8))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                temperature.clamp_(max=math.log(100))
            yield f"{dims} loss {step}", (loss, (logits.argmax(1) == labels).double().mean().item())
            yield f"{dims} model {step}", model


class Momentum(nn.Module):
    """MoCo: a slow encoder, and a queue of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(5, 12), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            followed(self.key, self.query, 0.9)
            k = F.normalize(self.key(b), dim=1)
        near = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        logits = torch.cat([near, q @ self.queue.clone().detach()], 1) / 0.2
        at = int(self.pointer)
        with torch.no_grad():
            self.queue[:, at : at + len(k)] = k.T
        self.pointer[0] = (at + len(k)) % 12
        return logits, torch.zeros(len(k), dtype=torch.long)


@PROGRAMS.add()
def a_queue_of_keys(given: Given) -> Iterator[tuple[str, Any]]:
    model = Momentum()
    optimizer = SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    x = given(images(), 2, 3)
    for step in range(5):
        logits, labels = model(x, x.flip(2) * 0.9)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss
        # On a mesh of two dims the keys are sharded along the samples, and so is the queue after they are written.
        yield f"model {step}", model.state_dict()


@PROGRAMS.add()
def without_negatives(given: Given) -> Iterator[tuple[str, Any]]:
    """BYOL: a predictor follows a slow target; SimSiam, VICReg and Barlow Twins on the same features."""
    online, predictor = encoder(), nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = AdamW([*online.parameters(), *predictor.parameters()], lr=0.01)
    x = given(drawn(6, 3, 13, 11), 2, 3)
    for step in range(2):
        views = x, x.flip(3) + 0.1 * torch.randn(6, 3, 13, 11)
        za, zb = (online(v) for v in views)
        with torch.no_grad():
            ta, tb = (target(v) for v in views)
        byol = 2 - F.cosine_similarity(predictor(za), tb).mean() - F.cosine_similarity(predictor(zb), ta).mean()
        siam = -F.cosine_similarity(predictor(za), zb.detach()).mean()
        spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (za, zb))
        cov = torch.cov(za.T)
        na, nb = ((z - z.mean(0)) / z.std(0) for z in (za, zb))
        cross = (na.T @ nb / 6 - torch.eye(5)).square()
        barlow = cross.diagonal().sum() + 0.01 * (cross.sum() - cross.diagonal().sum())
        loss = byol + siam + F.mse_loss(za, zb) + spread + 0.04 * cov.fill_diagonal_(0).square().sum() + 0.1 * barlow
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        followed(target, online, 0.95)
        yield f"losses {step}", (byol, siam, spread, barlow)
        yield f"online {step}", online
        yield f"target {step}", target


class Center(nn.Module):
    """DINO's loss, with its moving center."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student: list[Tensor], teacher: list[Tensor]) -> Tensor:
        targets = [((t - self.center) / 0.04).softmax(-1).detach() for t in teacher]
        pairs = [(i, j) for i in range(len(teacher)) for j in range(len(student)) if i != j]
        loss = sum((-targets[i] * (student[j] / 0.1).log_softmax(-1)).sum(-1).mean() for i, j in pairs) / len(pairs)
        mean = torch.cat(teacher).mean(0, keepdim=True)
        self.center = self.center * 0.9 + mean.detach() * 0.1
        return loss


@PROGRAMS.add()
def a_moving_center(given: Given) -> Iterator[tuple[str, Any]]:
    """Crops of several sizes; the buffer is replaced rather than written to; the last layer waits."""
    student, loss_function = encoder(), Center(5)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = AdamW(student.parameters(), lr=0.01)
    x = given(images(), 2, 3)
    for step in range(3):
        crops = [x, x.flip(3), x[:, :, 2:10, 1:9], F.interpolate(x, size=(8, 8), mode="bicubic")]
        loss = loss_function([student(c) for c in crops], [teacher(c) for c in crops[:2]])
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for p in student[-1].parameters():
                p.grad = None
        optimizer.step()
        followed(teacher, student, 0.9)
        yield f"loss {step}", loss
        yield f"center {step}", loss_function.center
        yield f"student {step}", student
        yield f"teacher {step}", teacher


# -- teachers ----------------------------------------------------------------------------------------------------------


@PROGRAMS.add()
def a_mean_teacher(given: Given) -> Iterator[tuple[str, Any]]:
    """Labels for some pixels, pseudo-labels above a threshold for others, consistency, CutMix by a plain box."""
    student = UNet()
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.detach_()
    optimizer = SGD(student.parameters(), lr=0.1)
    x, other, y = given(images(), 2, 3), given(images(2), 2, 3), given(classes(3, 13, 11), 1, 2)
    box = torch.zeros(1, 1, 13, 11)
    box[..., 3:10, 2:7] = 1
    for step in range(3):
        with torch.no_grad():
            chances = teacher(torch.cat([x, other])).softmax(1)
            best, pseudo = chances.chunk(2)[1].max(1)
        mixed = x * (1 - box) + other * box
        target = torch.where(box[:, 0] > 0, pseudo, y)
        out = student(torch.cat([x, mixed]))
        first, second = out.chunk(2)
        supervised = F.cross_entropy(first, y)
        sure = ((best > 0.4) | (box[:, 0] == 0)).double()
        unsupervised = (F.cross_entropy(second, target, reduction="none") * sure).sum() / sure.sum()
        consistent = F.mse_loss(first.softmax(1), chances[:3])
        loss = supervised + unsupervised + consistent
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        followed(teacher, student, 0.9)
        yield f"losses {step}", (supervised, unsupervised, consistent, sure.mean().item())
        yield f"student {step}", student
        yield f"teacher {step}", teacher


@PROGRAMS.add()
def distillation(given: Given) -> Iterator[tuple[str, Any]]:
    """Soft targets, features through hooks and an adapter, attention maps, relations between samples."""
    teacher, student, adapter = classifier().eval(), classifier(), nn.Conv2d(6, 6, 1)
    seen: dict[str, Tensor] = {}
    teacher[2].register_forward_hook(lambda m, i, o: seen.__setitem__("teacher", o))
    student[2].register_forward_hook(lambda m, i, o: seen.__setitem__("student", o))
    optimizer = AdamW([*student.parameters(), *adapter.parameters()], lr=0.01)
    x, y = given(images(), 2, 3), classes(3, of=4)
    for step in range(2):
        with torch.no_grad():
            soft = teacher(x)
        out = student(x)
        kd = F.kl_div((out / 4).log_softmax(1), (soft / 4).softmax(1), reduction="batchmean") * 16
        features = F.mse_loss(adapter(seen["student"]), seen["teacher"])
        maps = [
            F.normalize(f.square().mean(1).flatten(1), dim=1)
            for f in (seen["student"][:, :, 0], seen["teacher"][:, :, 0])
        ]
        ours, theirs = (f.mean((2, 3)) for f in (seen["student"], seen["teacher"]))
        relations = F.smooth_l1_loss(torch.cdist(ours, ours), torch.cdist(theirs, theirs))
        loss = F.cross_entropy(out, y) + kd + features + F.mse_loss(*maps) + relations
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"losses {step}", (kd, features, relations, loss)
        yield f"student {step}", student
        yield f"teacher {step}", teacher


@PROGRAMS.add()
def mixtures_of_samples(given: Given) -> Iterator[tuple[str, Any]]:
    """MixUp, CutMix and label smoothing, by a permutation of the samples and numbers of a seed."""
    model, y = classifier(), F.one_hot(classes(3, of=4), 4).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    x = given(images(), 2, 3)
    for step in range(3):
        part, order = float(torch.distributions.Beta(0.4, 0.4).sample()), torch.randperm(3)
        if step % 2:
            mixed = x.clone()
            mixed[:, :, 4:11, 1:6] = x[order, :, 4:11, 1:6]
            part = 1 - 35 / 143
        else:
            mixed = part * x + (1 - part) * x[order]
        loss = F.cross_entropy(model(mixed), part * y + (1 - part) * y[order], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"mixed {step}", mixed
        yield f"loss {step}", loss
        yield f"model {step}", model


@PROGRAMS.parametrize()
def test_programs(name, layout, tmp_path):
    check(__name__, name, layout, tmp_path)
