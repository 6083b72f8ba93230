"""The operators of torch_geometric's library pyg_lib that find neighbours and sample points, as its kernels have them.

pyg_lib is in no package index. Where it is not installed, :func:`provide` defines its operators on plain tensors, by
all distances, with the library's schemas; what it gives was compared with what torch_cluster's kernels give.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

import shardtensor.neighbors.geometric

_SCHEMAS = (
    "knn(Tensor x, Tensor y, Tensor? ptr_x=None, Tensor? ptr_y=None, int k=1, bool cosine=False, "
    "int num_workers=1) -> Tensor",
    "radius(Tensor x, Tensor y, Tensor? ptr_x=None, Tensor? ptr_y=None, float r=1.0, int max_num_neighbors=32, "
    "int num_workers=1, bool ignore_same_index=False) -> Tensor",
    "fps(Tensor src, Tensor ptr, float ratio=0.5, bool random_start=True) -> Tensor",
)
_libraries: list[torch.library.Library] = []


def provide() -> None:
    """Define them in this process, and let torch_geometric know, unless they are there."""
    if importlib.util.find_spec("pyg_lib") is not None or _libraries:
        return
    library = torch.library.Library("pyg", "DEF")
    _libraries.append(library)
    for schema, function in zip(_SCHEMAS, (_knn, _radius, _fps), strict=True):
        library.define(schema)
        library.impl(function.__name__[1:], function, "CPU")
    typing = importlib.import_module("torch_geometric.typing")
    typing.WITH_KNN = typing.WITH_RADIUS = typing.WITH_FPS = True
    shardtensor.neighbors.geometric.register_operators("pyg")


def _cloud(n: int, ptr: Tensor | None) -> Tensor:
    return torch.zeros(n) if ptr is None else torch.bucketize(torch.arange(n), ptr, right=True)


def _squares(x: Tensor, y: Tensor, ptr_x: Tensor | None, ptr_y: Tensor | None) -> Tensor:
    """Of ``y`` from ``x``; infinite between clouds."""
    squares = (y.double().unsqueeze(1) - x.double()).square().sum(-1)
    others = _cloud(len(y), ptr_y).unsqueeze(1) != _cloud(len(x), ptr_x)
    return squares.masked_fill(others, torch.inf)


# torch leaves trailing arguments out that are as the schema says.
def _knn(x: Tensor, y: Tensor, ptr_x: Tensor | None = None, ptr_y: Tensor | None = None, k: int = 1) -> Tensor:
    squares, found = _squares(x, y, ptr_x, ptr_y).sort(stable=True)
    rows, places = squares[:, :k].isfinite().nonzero().unbind(1)
    return torch.stack([rows, found[rows, places]])


def _radius(
    x: Tensor,
    y: Tensor,
    ptr_x: Tensor | None = None,
    ptr_y: Tensor | None = None,
    r: float = 1.0,
    max_num_neighbors: int = 32,
    num_workers: int = 1,
    ignore_same_index: bool = False,
) -> Tensor:
    squares = _squares(x, y, ptr_x, ptr_y)
    if ignore_same_index:
        squares.fill_diagonal_(torch.inf)
    squares, found = squares.sort(stable=True)
    rows, places = (squares[:, :max_num_neighbors] < r * r).nonzero().unbind(1)
    return torch.stack([rows, found[rows, places]])


def _fps(src: Tensor, ptr: Tensor, ratio: float = 0.5, random_start: bool = True) -> Tensor:
    counts, result = ptr.diff(), []
    drawn = torch.rand(len(counts), dtype=src.dtype) if random_start else torch.zeros(len(counts))
    for first, count, share in zip(ptr, counts, drawn, strict=False):
        cloud = src[first : first + count]
        place, nearest = int(share * count.float()), torch.full((len(cloud),), torch.inf, dtype=src.dtype)
        for _ in range(int((count.float() * ratio).ceil())):
            result.append(first + place)
            nearest = torch.minimum(nearest, (cloud - cloud[place]).square().sum(1))
            place = nearest.argmax()
    return torch.stack(result)
