"""Runs a program in one process and on ranks, and compares all that it yields, step by step.

A program is a generator that a user would write for one device, with unmodified torch code. It takes its inputs through
``given``, which leaves them plain in one process and shards them on ranks, and yields the name and the value of what
is to be the same: losses, modules (their parameters, buffers and gradients), optimizers, outputs, numbers.

>>> PROGRAMS = Programs()
>>> @PROGRAMS.add()
... def descent(given):
...     model, x = torch.nn.Linear(4, 2), given(torch.randn(13, 4), 0)
...     loss = model(x).square().mean()
...     loss.backward()
...     yield "loss", loss
...     yield "model", model
>>> list(PROGRAMS)
['descent']
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtensor import LocalSizeError, RanksDiffer, ShardTensor, UnsupportedSharding
from shardtensor.testing import run_distributed, shard, shared_mesh

TWO, EMPTY, MESH, DATA = "2 ranks", "3 ranks, one empty", "2 x 2", "dp x domain"
RANKS = {TWO: 2, EMPTY: 3, MESH: 4, DATA: 4}
REFUSALS = (UnsupportedSharding, RanksDiffer, LocalSizeError)


@dataclass(frozen=True)
class Program:
    """A generator function, and what is expected of it.

    Attributes:
        layouts: that it runs on: 2 ranks, 3 of which one has an empty shard, a mesh of 2 x 2, or (``DATA``) one of 2 x
            2 with other samples along the first dim.
        rtol: relative tolerance.
        always: the layout of the regular suite; on the others, or if None on all, it is slow.
        refused: a pattern of the text of the error with which it ends, on all layouts or for each.
        differs: a pattern of names of values that are not to be compared, such as those of other random numbers.
    """

    function: Callable[[Given], Iterator[tuple[str, Any]]]
    layouts: tuple[str, ...] = (TWO, EMPTY, MESH)
    rtol: float = 1e-10
    always: str | None = None
    refused: str | Mapping[str, str] | None = None
    differs: str | None = None

    def refusal(self, layout: str) -> str | None:
        return self.refused.get(layout) if isinstance(self.refused, Mapping) else self.refused


class Programs(dict[str, Program]):
    """The programs of a module, which keeps them as its ``PROGRAMS``."""

    def add(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        def decorator(function: Any) -> Any:
            self[name or function.__name__.replace("_", " ")] = Program(function, **options)
            return function

        return decorator

    def parametrize(self) -> Any:
        """Of a test with the arguments ``name`` and ``layout``."""
        cases = [
            pytest.param(name, layout, marks=() if layout == each.always else pytest.mark.slow)
            for name, each in self.items()
            for layout in each.layouts
        ]
        return pytest.mark.parametrize(("name", "layout"), cases)


class Given:
    """What a program gets from its surroundings.

    Attributes:
        mesh: of the ranks, with the names ``"dp"`` and ``"domain"`` if it has two dims; None in one process.
        folder: for files, empty and the same on all ranks.
    """

    def __init__(self, folder: str, layout: str | None = None) -> None:
        self.folder, self.layout = Path(folder), layout
        self.mesh: DeviceMesh | None = None
        if layout is not None:
            self.mesh = shared_mesh((2, 2), ("dp", "domain")) if RANKS[layout] == 4 else shared_mesh(RANKS[layout])

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def domain(self) -> DeviceMesh | None:
        """The mesh of the inputs."""
        return self.mesh["domain"] if self.mesh is not None and self.layout == DATA else self.mesh

    def __call__(self, tensor: Tensor, *dims: int) -> Any:
        """The tensor, cut along the first of ``dims``, and on a mesh of 2 x 2 along the second of them, too."""
        if self.mesh is None:
            return tensor
        if self.layout == DATA:
            tensor = self.samples(tensor)
        meshed = self.domain
        assert meshed is not None
        placements = [Shard(dim) for dim in dims[: meshed.ndim]] + [Replicate()] * (meshed.ndim - len(dims))
        sizes = {m: cut(tensor.shape[p.dim], meshed.size(m)) for m, p in enumerate(placements) if p.is_shard()}
        return shard(tensor, meshed, placements, sizes)

    def wait(self) -> None:
        """For all ranks, such as until a file is there."""
        if self.mesh is not None:
            dist.barrier()

    def samples(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Those of this rank along ``dp``, of all samples."""
        if self.layout != DATA:
            return tensor
        return tensor.chunk(2, dim)[self.mesh.get_local_rank("dp")]  # type: ignore[union-attr]

    def mean(self, loss: Tensor) -> Tensor:
        """Of the losses of all samples."""
        loss = whole(loss.detach())
        if self.layout == DATA:
            loss = loss.clone()
            dist.all_reduce(loss, group=self.mesh["dp"].get_group())  # type: ignore[index]
            loss /= 2
        return loss


def cut(length: int, ranks: int) -> tuple[int, ...]:
    """About 5 + 3 of 8, with an empty shard in between."""
    first = math.ceil(length * 5 / 8)
    return (first, *[0] * (ranks - 2), length - first)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# -- records -----------------------------------------------------------------------------------------------------------


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in a value, with their names."""
    if isinstance(value, nn.Module):
        for key, each in value.state_dict().items():
            if isinstance(each, ShardTensor) and not isinstance(each, nn.Parameter):
                raise AssertionError(f"{name}.{key} has become a {each}")
            yield f"{name}.{key}", each
        for key, parameter in value.named_parameters():
            yield f"{name}.{key}.grad", parameter.grad
    elif isinstance(value, torch.optim.Optimizer):
        yield from leaves(name, value.state_dict())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(f"{name}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from leaves(f"{name}.{i}", each)
    else:
        yield name, value


@dataclass
class Record:
    """What a program has yielded: the values, whether each was plain, and the texts of warnings."""

    values: list[tuple[str, Any]]
    plain: list[bool]
    warned: set[str]


@contextmanager
def set_up() -> Iterator[list[warnings.WarningMessage]]:
    """The same seeds and dtype for each run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    kept, warned_always = torch.get_default_dtype(), torch.is_warn_always_enabled()
    torch.set_default_dtype(torch.float64)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        torch.set_default_dtype(kept)
        torch.set_warn_always(warned_always)


def recorded(program: Program, given: Given) -> Record:
    """Run the program."""
    values, plain = [], []
    with set_up() as caught:
        for name, value in program.function(given):
            for key, each in leaves(name, value):
                plain.append(not isinstance(each, DTensor))
                each = torch.as_tensor(each) if isinstance(each, np.ndarray) else each
                values.append((key, whole(each.detach()).clone() if isinstance(each, Tensor) else each))
        values.append(("the state of the random numbers", digest(torch.get_rng_state())))
        plain.append(True)
    return Record(values, plain, {str(each.message).partition("\n")[0] for each in caught})


def digest(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()[:16]


@functools.cache
def in_one_process(module: str, name: str) -> Record:
    program = importlib.import_module(module).PROGRAMS[name]
    with tempfile.TemporaryDirectory() as folder:
        return recorded(program, Given(folder))


def different(value: Any, expected: Any, rtol: float) -> str | None:
    """What is different, in words."""
    if isinstance(expected, Tensor) and isinstance(value, Tensor):
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return f"{tuple(value.shape)} {value.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
        if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
            return None if torch.equal(value, expected) else f"{value} instead of {expected}"
        finite = expected[expected.isfinite()].abs()
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        if torch.allclose(value, expected, rtol=rtol, atol=rtol * scale / 100, equal_nan=True):
            return None
        return f"off by {float((value - expected).abs().max()):.3g}, of {scale:.3g}"
    if isinstance(expected, float) and isinstance(value, float):
        near = math.isclose(value, expected, rel_tol=rtol, abs_tol=rtol / 100) or (
            value != value and expected != expected
        )
        return None if near else f"{value} instead of {expected}"
    if type(value) is type(expected) and not isinstance(expected, Tensor) and value == expected:
        return None
    return f"{value!r} instead of {expected!r}"


# -- comparison --------------------------------------------------------------------------------------------------------


def on_rank(module: str, name: str, layout: str, expected: Record, folder: str) -> list[tuple[str, str]]:
    """Compare the program on this rank with one process, and return digests of its plain values."""
    program = importlib.import_module(module).PROGRAMS[name]
    given = Given(folder, layout)
    if (refusal := program.refusal(layout)) is not None:
        with pytest.raises(REFUSALS, match=refusal) as refused:
            recorded(program, given)
        assert "Remedy: " in str(refused.value)
        return []
    actual = recorded(program, given)
    keys, names = [key for key, _ in actual.values], [key for key, _ in expected.values]
    assert keys == names, f"yields {sorted(set(keys) ^ set(names))} in one of both only"
    problems = []
    for (key, value), (_, reference) in zip(actual.values, expected.values):
        if program.differs is not None and re.search(program.differs, key):
            continue
        if (difference := different(value, reference, program.rtol)) is not None:
            problems.append(f"{key}: {difference}")
    problems += [f"warns: {text}" for text in sorted(actual.warned - expected.warned)]
    assert not problems, f"{len(problems)} of {len(actual.values)}:\n" + "\n".join(problems[:12])
    return [(key, digest(value)) for (key, value), plain in zip(actual.values, actual.plain) if plain]


def check(module: str, name: str, layout: str, folder: Path) -> None:
    """The program ``name`` of a module does on the ranks of ``layout`` what it does in one process."""
    expected = in_one_process(module, name)
    seen = run_distributed(on_rank, RANKS[layout], module, name, layout, expected, str(folder), timeout=120)
    if layout == DATA:
        return  # the plain values of other samples are others
    for rank, others in enumerate(seen):
        assert others == seen[0], f"rank {rank} has other plain values: {set(others) ^ set(seen[0])}"
