"""What the modules of networks that run a few programs of each of several packages share.

The name of each program begins with that of the package that it needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from networks.oracle import Network


def load(name: str) -> Any:
    return importlib.import_module(name)


class Program(nn.Module):
    """A function of an input and of modules, which it may differentiate, train or hook."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts)


def of(
    function: Callable[..., Any],
    shape: tuple[int, ...],
    dim: int,
    *parts: Callable[[], nn.Module],
    **options: Any,
) -> Network:
    """A program around modules that ``parts`` make. What it sums up over ranks is much next to so small an input."""
    options = {"reduced": 30.0, **options}
    return Network(lambda _: Program(function, *(make() for make in parts)), shape, dim, **options)


def layer(make: Callable[[], nn.Module], shape: tuple[int, ...], dim: int, **options: Any) -> Network:
    return Network(lambda _: make(), shape, dim, **{"reduced": 8.0, **options})


def of_ids(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dim: int, vocabulary: int = 10, **options: Any
) -> Network:
    """A network of token ids. These are integers, so what it sums up is much next to them."""
    options = {"reduced": 30.0, "draw": partial(torch.randint, 0, vocabulary), **options}
    return Network(lambda _: make(), shape, dim, **options)


@contextmanager
def drawn_whole() -> Iterator[None]:
    """What a program draws by ``torch.rand_like`` and ``torch.randn_like`` is one device's numbers. A sharded tensor's
    are others."""
    kept = torch.rand_like, torch.randn_like

    def like(draw: Callable[..., Tensor]) -> Any:
        return lambda x, **options: draw(x.shape, dtype=options.get("dtype", x.dtype))

    torch.rand_like, torch.randn_like = like(torch.rand), like(torch.randn)
    try:
        yield
    finally:
        torch.rand_like, torch.randn_like = kept
