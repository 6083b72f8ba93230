"""Programs: how they are drawn, listed, cut short, and run on tensors of one kind."""

from __future__ import annotations

import copy
import random
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from .grammar import NothingFits, draw_line

SHAPES = [(4, 6, 5), (2, 3, 8, 6), (7, 5), (6, 6), (1, 9, 4), (5,), (3, 1, 7), (2, 4, 7)]
LENGTHS = [3, 5, 8, 12, 25]
LARGEST = 3000  # entries of a tensor
NAME = re.compile(r"\b[tx]\d+\b")


def rand(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed))


def randint(seed: int, size: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, size, shape, generator=seeded(seed))


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program starts from, and how it is sharded; a plain tensor without placements."""

    shape: tuple[int, ...]
    seed: int
    grad: bool
    placements: tuple[Shard | Replicate, ...] | None
    sizes: dict[int, tuple[int, ...]] | None

    def value(self) -> torch.Tensor:
        return rand(self.seed, self.shape)

    def listed(self) -> str:
        text = f"rand({self.seed}, {self.shape})"
        if self.placements is not None:
            text = f"shard({text}, mesh, {self.placements}" + (f", {self.sizes})" if self.sizes else ")")
        return text + (".requires_grad_()" if self.grad else "")


@dataclass(frozen=True)
class Program:
    """Lines on tensors ``t0``, ``t1``, ... that start from the leaves ``x0``, ``x1``, and a loss of all of them."""

    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    twice: bool = False  # whether the gradients of the loss are differentiated, too

    def listed(self) -> str:
        leaves = [f"x{k} = {leaf.listed()}" for k, leaf in enumerate(self.leaves)]
        loss = "loss(...).backward()" if not self.twice else "penalty(grad(loss(...), create_graph=True)).backward()"
        return "\n".join([*leaves, *self.lines, loss])

    def shorter(self) -> Iterator[Program]:
        """The program without its second half, without each of its lines, without a gradient."""
        if len(self.lines) > 8:
            yield replace(self, lines=self.lines[: len(self.lines) // 2])
        for k in reversed(range(len(self.lines))):
            yield replace(self, lines=tuple(runnable(self.lines[:k] + self.lines[k + 1 :], len(self.leaves))))
        if self.twice:
            yield replace(self, twice=False)
        for k, leaf in enumerate(self.leaves):
            if leaf.grad:
                yield replace(self, leaves=(*self.leaves[:k], replace(leaf, grad=False), *self.leaves[k + 1 :]))


def made_by(line: str) -> list[str]:
    """The names that a line gives to tensors."""
    names = re.match(r"([tx\d, ]+)(, \*_)? = ", line)
    return names[1].split(", ") if names else []


def runnable(lines: tuple[str, ...], leaves: int) -> Iterator[str]:
    """Those lines all of whose tensors are made by a line before them."""
    known = {f"x{k}" for k in range(leaves)}
    for line in lines:
        made = made_by(line)
        if set(NAME.findall(line)) - set(made) <= known:
            known.update(made)
            yield line


class Run:
    """A program's tensors on one device, or on the ranks of a mesh; ``place`` makes the leaves."""

    def __init__(self, program: Program, place: Callable[[Leaf], torch.Tensor]) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: dict[str, Any] = {}
        for k, leaf in enumerate(program.leaves):
            self.tensors[f"x{k}"] = place(leaf).requires_grad_(leaf.grad)
        self.globals: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "copy": copy, "checkpoint": checkpoint}
        self.globals |= {"rand": rand, "randint": randint, "seeded": self.seeded}

    def seeded(self, seed: int, module: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        """A module whose parameters are equal in all runs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.modules.append(module(*args, **kwargs).double())
        return self.modules[-1]

    def knows(self, line: str) -> bool:
        return set(NAME.findall(line)) - set(made_by(line)) <= set(self.tensors)

    def do(self, line: str) -> None:
        exec(line, self.globals, self.tensors)
        self.tensors.pop("_", None)

    def leaves(self) -> dict[str, torch.Tensor]:
        """What gradients arrive at: the leaves, other tensors that were made one, and parameters."""
        parameters = {f"{n} of module {k}": p for k, m in enumerate(self.modules) for n, p in m.named_parameters()}
        found = {name: t for name, t in self.tensors.items() if t.is_leaf and t.requires_grad}
        return found | parameters

    def loss(self) -> torch.Tensor | None:
        """A sum of all tensors that require grad, in which no two entries have the same weight."""
        terms = []
        for name, tensor in self.tensors.items():
            if not tensor.requires_grad:
                continue
            parts = [tensor.real, tensor.imag] if tensor.is_complex() else [tensor]
            terms += [weighted(part, int(name[1:])) for part in parts]
        return sum(terms[1:], terms[0]) if terms else None

    @property
    def made(self) -> int:
        return sum(name[0] == "t" for name in self.tensors)

    def backward(self, twice: bool, retain_graph: bool = False) -> None:
        loss = self.loss()
        if loss is None or not loss.requires_grad:
            return
        if not twice:
            return loss.backward(retain_graph=retain_graph)
        grads = torch.autograd.grad(loss, list(self.leaves().values()), create_graph=True, allow_unused=True)
        terms = [weighted(grad**2, k) for k, grad in enumerate(grads) if grad is not None and grad.requires_grad]
        if terms:
            sum(terms[1:], terms[0]).backward()


def weighted(tensor: torch.Tensor, k: int) -> torch.Tensor:
    weights = torch.arange(1, tensor.numel() + 1, dtype=torch.float64).reshape(tensor.shape)
    return (tensor * (1 + (weights + k).cos() / 2)).sum()


def plain(leaf: Leaf) -> torch.Tensor:
    return leaf.value()


def draw(seed: int, mesh: tuple[int, ...], length: int | None = None) -> Program:
    """The program of a seed. Its lines are those that torch takes on one device, whose gradients it gives.

    Every eighth program may write to what its gradients need.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _drawn(seed, mesh, length)


def _drawn(seed: int, mesh: tuple[int, ...], length: int | None) -> Program:
    rng = random.Random(seed)
    layouts = random.Random(f"{seed} on {mesh}")
    shapes = [rng.choice(SHAPES) for _ in range(2)]
    leaves = tuple(Leaf(s, seed + k, rng.random() < 0.7, *draw_layout(layouts, s, mesh)) for k, s in enumerate(shapes))
    program = Program(leaves, tuple(f"t{k} = x{k} * 1" for k in range(2)))
    run, length = started(program), length or rng.choice(LENGTHS)
    for _ in range(4 * length):
        if len(program.lines) == length + 2:
            break
        if line := line_for(run, rng, differentiable=seed % 8 != 0):
            program = replace(program, lines=(*program.lines, line))
        else:
            run = run if line is None else started(program)
    return replace(program, twice=rng.random() < 0.2 and differentiates(started(program), twice=True))


def draw_layout(rng: random.Random, shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[Any, Any]:
    if rng.random() < 0.1:
        return None, None
    placements: list[Shard | Replicate] = []
    for _ in mesh:
        wanted = Replicate() if rng.random() < 0.25 else Shard(rng.randrange(len(shape)))
        placements.append(Replicate() if wanted in placements else wanted)
    sizes = {}
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard) and rng.random() < 0.6:
            n = shape[placement.dim]
            cuts = [0, *sorted(rng.randrange(n + 1) for _ in range(mesh[dim] - 1)), n]
            sizes[dim] = tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))
    return tuple(placements), sizes or None


def started(program: Program) -> Run:
    run = Run(program, plain)
    for line in program.lines:
        run.do(line)
    return run


def differentiates(run: Run, twice: bool = False) -> bool:
    try:
        run.backward(twice, retain_graph=True)
    except RuntimeError:
        return False
    return True


def line_for(run: Run, rng: random.Random, differentiable: bool) -> str | None:
    """Another line, which the run has done; empty where its tensors may be spoiled, None where they are not."""
    line, kept = "", True
    try:
        line, kept = draw_line(rng, run.tensors)
        if kept and not (line := named(line, eval(line, run.globals, run.tensors), run.made)):
            return None
        run.do(line)
    except (NothingFits, RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError):
        return None if kept else ""
    return line if (kept and "autograd" not in line) or not differentiable or differentiates(run) else ""


def named(line: str, made: object, first: int) -> str:
    """The expression with names for the tensors it makes; empty where there are none, or large ones."""
    tensors = [made] if isinstance(made, torch.Tensor) else list(made)  # type: ignore[call-overload]
    if not tensors or any(t.numel() > LARGEST or t.dtype == torch.float32 for t in tensors):
        return ""
    names = ", ".join(f"t{first + k}" for k in range(min(3, len(tensors))))
    if len(tensors) == 1 and not isinstance(made, torch.Tensor):
        line = f"{line}[0]"
    return f"{names}{', *_' if len(tensors) > 3 else ''} = {line}"


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")
