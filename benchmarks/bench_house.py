"""The way of a call through the package, and how the package is laid out: counts, next to bars.

    python benchmarks/bench_house.py [--only NAME] [--chain NAME] [--json FILE]

Counted is a call whose plan is cached, on rank 0 of two, on the fake process group: every frame of the package that
Python enters (``sys.setprofile``), the files that they are in, and how often one follows that is in another file. The
tensors and calls are those of the part "host". ``--chain`` prints the frames of rows in their order, each below the
frame of the package that entered it.

A second table counts those of the frames that lie in ``dispatch`` and ``operators``: what a call passes on its way to
an operator's own code.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import bench_host
import torch
import torch.distributed as dist
from report import Figure, chosen, finish, parser
from timing import Run, take_device
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtensor

PACKAGE = Path(shardtensor.__file__).parent
CALLS, LAYOUT = "frames of the package in a cached call", "the package"
HALLWAY = ("dispatch", "operators")
WAY, WAY_BAR = f"of these, in {' and '.join(HALLWAY)}", 10


@dataclass(frozen=True)
class Row:
    """A call, of tensors that require grad, to count the frames of.

    Attributes:
        make: makes what is counted; of a backward pass a pair, what is run before and what is counted with its result.
        bar: how many frames at most.
    """

    name: str
    make: Callable[[bench_host.Place], Any]
    bar: int


def passes(
    name: str, function: Callable[..., Tensor], shapes: list[tuple[int, ...]], forward: int, backward: int
) -> list[Row]:
    """Both passes of a function of an image and of weights of these shapes, all of which require grad."""

    def tensors(place: bench_host.Place) -> list[Tensor]:
        return [place(bench_host.IMAGE, 2, requires_grad=True), *bench_host.weights(*shapes, requires_grad=True)]

    def make_forward(place: bench_host.Place) -> Run:
        inputs = tensors(place)
        return lambda: function(*inputs)

    def make_backward(place: bench_host.Place) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
        inputs, seed = tensors(place), place(bench_host.IMAGE, 2)
        return lambda: function(*inputs), lambda y: torch.autograd.grad(y, inputs, seed)

    return [
        Row(f"{name}, forward", make_forward, forward),
        Row(f"{name}, backward", make_backward, backward),
    ]


def of_image(function: Callable[[Tensor], Any]) -> Callable[[bench_host.Place], Run]:
    return lambda place: bench_host.of_image(function, place, requires_grad=True)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(x, weight, bias, padding=1)


def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.group_norm(x, 2, weight, bias)


ROWS = (
    *passes("conv2d 3x3", convolved, [(8, 8, 3, 3), (8,)], 28, 50),
    *passes("group norm", normalized, [(8,), (8,)], 28, 42),
    Row("x + 1", of_image(lambda x: x + 1), 6),
    Row("x.sum()", of_image(lambda x: x.sum()), 12),
    Row("x[:, :, 5], of the sharded dim", of_image(lambda x: x[:, :, 5]), 26),
    Row("interpolate, bilinear x 2", of_image(bench_host.upsampled), 24),
)


@dataclass(frozen=True)
class Entered:
    """A frame of the package: the file from the package's folder on, its line, the function, and how deep it lies."""

    file: str
    line: int
    function: str
    depth: int


def frames(run: Run) -> list[Entered]:
    """The frames of the package that a call enters, in their order, in whatever thread."""
    found: list[Entered] = []

    def file_of(frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (file := file_of(frame)) is not None:
            depth, outer = 0, frame.f_back
            while outer is not None:
                depth, outer = depth + (file_of(outer) is not None), outer.f_back
            found.append(Entered(file, frame.f_code.co_firstlineno, frame.f_code.co_name, depth))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def counted(row: Row, place: bench_host.Place) -> list[Entered]:
    made = row.make(place)
    first, then = made if isinstance(made, tuple) else ((lambda: None), (lambda _: made()))
    for _ in range(5):  # plans and what is looked at in the first calls only
        then(first())
    result = first()
    return frames(lambda: then(result))


def figures(row: Row, place: bench_host.Place) -> tuple[Figure, Figure]:
    """All frames of a call, and those of them on its way to an operator's own code."""
    files = [entered.file for entered in counted(row, place)]
    switches = sum(one != other for one, other in zip(files, files[1:]))
    way = sum(Path(file).parts[0] in HALLWAY for file in files)
    note = f"{way} in {' and '.join(HALLWAY)}; {len(set(files))} files, {switches} switches between them"
    return (
        Figure(CALLS, row.name, len(files), "frames", bar=row.bar, note=note),
        Figure(WAY, row.name, way, "frames", bar=WAY_BAR),
    )


def layout() -> list[Figure]:
    """How large the package is, and what lies at its top."""
    modules = list(PACKAGE.rglob("*.py"))
    lines = sum(len(module.read_text().splitlines()) for module in modules)
    top = [p for p in PACKAGE.iterdir() if (p / "__init__.py").exists() or (p.suffix == ".py" and p.stem[:2] != "__")]
    return [
        Figure(LAYOUT, "lines", lines, "lines", note=f"{len(modules)} modules"),
        Figure(LAYOUT, "modules and packages at the top", len(top), "", bar=18),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--chain", help="print the frames of these rows instead, chosen as by --only", metavar="NAME")
    options = made.parse_args()
    warnings.simplefilter("ignore")
    take_device(0)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    place, by_name = bench_host.placers()["sharded"], {row.name: row for row in ROWS}
    if options.chain is None:
        names = [name for name in by_name if options.only.lower() in name.lower()]
        found = [f for kind in zip(*(figures(by_name[name], place) for name in names)) for f in kind]
        found += [f for f in layout() if options.only.lower() in f.name.lower()]
        finish(found, options)
        return
    for name in chosen(options.chain, by_name, made.error):
        print(f"== {name}")
        for entered in counted(by_name[name], place):
            print(f"{'  ' * entered.depth}{entered.function}  {entered.file}:{entered.line}")


if __name__ == "__main__":
    main()
