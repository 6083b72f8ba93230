"""``visualize``: which rank holds what of a tensor, as text and as a picture. The spec knows it; nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from ..dispatch.planning import spec_of
from ..layout.intervals import Interval, intervals_of
from ..layout.placements import rank_at
from ..layout.spec import ShardTensorSpec

Halos = int | Mapping[int, int]

_WIDTH, _HEIGHT = 64, 24  # of the map, in characters
_LISTED = 64  # parts


def visualize(x: Any, *, halo: Halos = 0, path: str | Path | None = None) -> str:
    """Draw the shards of a tensor, and with ``halo`` the elements beyond them that a rank reads.

    Nothing is sent, because each rank knows all sizes. So one rank may call this function alone.

    Args:
        x: a ShardTensor or its ``ShardTensorSpec``, or a DTensor.
        halo: the number of elements that a rank reads beyond each end of its shard, for every sharded dim, or by tensor
            dim: ``{2: 1, 3: 2}``. There is no halo at the ends of the global tensor.
        path: the file for a picture of the first two sharded dims, as PNG, PDF or SVG by its suffix; needs matplotlib.

    Returns:
        Text: the layout, a map to scale of the first two sharded dims, and a line for each part.

    Raises:
        TypeError: ``x`` is not a DTensor.
        ValueError: a halo for a dim that is not sharded; a picture of a tensor that is not sharded.
        ModuleNotFoundError: matplotlib is not installed.

    Example::

        x = scatter_tensor(image, mesh, (Shard(2),), shard_sizes=(300, 1050))
        if dist.get_rank() == 0:
            print(shardtensor.visualize(x, halo=1, path="shards.png"))
    """
    if isinstance(x, DTensor):
        x = spec_of(x)
    if not isinstance(x, ShardTensorSpec):
        raise TypeError(f"visualize shows ShardTensors, their specs and DTensors, not {type(x).__name__}")
    halos = _by_dim(x, halo)
    parts = _parts(x, halos)
    if path is not None:
        _draw(x, parts, path)
    partial = any(placement.is_partial() for placement in x.placements)
    listed = [_line(part) + (", a contribution from each rank" if partial else "") for part in parts]
    if len(listed) > _LISTED:
        half = _LISTED // 2
        listed[half:-half] = [f"... {len(listed) - 2 * half} more"]
    return Drawing("\n".join([str(x), *_map(x, parts), *listed]))


class Drawing(str):
    """Text that notebooks show as it is, with its line breaks."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


@dataclass(frozen=True)
class _Shard:
    """What some ranks hold: one, or several on mesh dims that do not shard.

    Attributes:
        held, read: by sharded tensor dim the interval that they hold, and that with its halo.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    held: dict[int, Interval]
    read: dict[int, Interval]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def name(self) -> str:
        return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"


def _by_dim(spec: ShardTensorSpec, halo: Halos) -> dict[int, int]:
    sharded = spec.sharded_dims()
    if isinstance(halo, Mapping):
        given = {d % len(spec.shape): n for d, n in halo.items()}
        if not set(given) <= set(sharded):
            raise ValueError(f"halo={dict(halo)} names dims that are not sharded; sharded are {sorted(sharded)}")
    else:
        given = dict.fromkeys(sharded, halo)
    if not all(isinstance(n, int) and n >= 0 for n in given.values()):
        raise ValueError(f"halo={halo!r}: give a number of elements, or {{dim: number}}; none below 0")
    return given


def _parts(spec: ShardTensorSpec, halos: Mapping[int, int]) -> list[_Shard]:
    """All parts, in the order of their first ranks."""
    sharded = spec.sharded_dims()
    ranks: dict[tuple[int, ...], list[int]] = {}
    for at in product(*map(range, spec.mesh.shape)):
        ranks.setdefault(tuple(at[m] for m in sharded.values()), []).append(rank_at(spec.mesh, at))
    parts = []
    for place, those in ranks.items():
        held = {d: intervals_of(spec.sizes_along(m))[at] for (d, m), at in zip(sharded.items(), place)}
        shape = tuple(b - a for a, b in (held.get(d, (0, n)) for d, n in enumerate(spec.shape)))
        read = held
        if 0 not in shape:  # a rank without elements reads none
            ends = {d: halos.get(d, 0) for d in held}
            read = {d: (max(0, a - ends[d]), min(spec.shape[d], b + ends[d])) for d, (a, b) in held.items()}
        parts.append(_Shard(tuple(those), shape, held, read))
    return parts


def _line(part: _Shard) -> str:
    held = ", ".join(f"dim {d} [{a}:{b}]" for d, (a, b) in part.held.items()) or "all of it"
    text = f"{part.name}: {'x'.join(map(str, part.shape)) or 'one element'}, {held}"
    if part.is_empty:
        return f"{text}, empty"
    beyond = [f"dim {d} [{lo}:{hi}]" for d, (lo, hi) in part.read.items() if (lo, hi) != part.held[d]]
    return f"{text}, reads {', '.join(beyond)}" if beyond else text


# -- the map ----------------------------------------------------------------------------------------------------------


def _map(spec: ShardTensorSpec, parts: Sequence[_Shard]) -> list[str]:
    """Boxes to scale; of one sharded dim its shards next to each other, of two the first downwards."""
    dims = list(spec.sharded_dims())
    if not 1 <= len(dims) <= 2 or 0 in spec.shape:
        return []
    across = dims[-1]
    columns = _boundaries(parts, across, spec.shape[across], _WIDTH)
    rows = {0: 0, 1: 2} if len(dims) == 1 else _boundaries(parts, dims[0], spec.shape[dims[0]], _HEIGHT)
    canvas = [[" "] * (max(columns.values()) + 1) for _ in range(max(rows.values()) + 1)]
    for part in parts:
        if not part.is_empty:
            left, right = (columns[edge] for edge in part.held[across])
            top, bottom = (rows[edge] for edge in (part.held[dims[0]] if len(dims) == 2 else (0, 1)))
            _box(canvas, top, bottom, left, right, str(part.ranks[0]))
    along = f"dim {across} across" + (f", dim {dims[0]} down" if len(dims) == 2 else "")
    return [f"{along}; numbers are ranks", *("".join(line).rstrip() for line in canvas)]


def _boundaries(parts: Sequence[_Shard], dim: int, length: int, size: int) -> dict[int, int]:
    """Where on the map each boundary is: to scale, but with place for a number in between."""
    edges = sorted({edge for part in parts for edge in part.held[dim]} | {0, length})
    least = 4 if size == _WIDTH else 2
    places: dict[int, int] = {}
    for edge in edges:
        place = round(size * edge / length)
        places[edge] = max(place, list(places.values())[-1] + least) if places else place
    return places


def _box(canvas: list[list[str]], top: int, bottom: int, left: int, right: int, name: str) -> None:
    for column in range(left, right + 1):
        for row in (top, bottom):
            canvas[row][column] = "+" if column in (left, right) or canvas[row][column] == "+" else "-"
    for row in range(top + 1, bottom):
        canvas[row][left] = canvas[row][right] = "|"
    start = (left + right + 1 - len(name)) // 2
    for i, letter in enumerate(name):
        if left < start + i < right:
            canvas[(top + bottom) // 2][start + i] = letter


# -- the picture ------------------------------------------------------------------------------------------------------


def _draw(spec: ShardTensorSpec, parts: Sequence[_Shard], path: str | Path) -> None:
    dims = list(spec.sharded_dims())[:2]
    if not dims:
        raise ValueError(f"visualize: no dim of {spec} is sharded, so there is nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("visualize(path=...) draws with matplotlib: pip install matplotlib") from error
    down, across = (dims[0], dims[1]) if len(dims) == 2 else (dims[0], None)
    height = spec.shape[down]
    width = max(height, 1) if across is None else spec.shape[across]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for i, part in enumerate(_drawn(parts, dims)):
        (a, b), (left, right) = part.held[down], part.held[across] if across is not None else (0, width)
        (lo, hi), (start, stop) = part.read[down], part.read[across] if across is not None else (0, width)
        color = f"C{i % 10}"
        axes.add_patch(Rectangle((left, a), right - left, b - a, facecolor=color, alpha=0.35, edgecolor="none"))
        if part.read != part.held:
            axes.add_patch(
                Rectangle(
                    (start, lo), stop - start, hi - lo, fill=False, edgecolor=color, linestyle="--", linewidth=1.5
                )
            )
        shape = "x".join(map(str, part.shape))
        text = f"{part.name}: empty" if part.is_empty else f"{part.name}\n{shape}"
        axes.text((left + right) / 2, (a + b) / 2, text, ha="center", va="center", fontsize=9)
    axes.set(xlim=(0, width), ylim=(height, 0), ylabel=f"dim {down}", title=spec.in_short)
    axes.set_xlabel("all other dims" if across is None else f"dim {across}")
    if across is None:
        axes.set_xticks([])
    figure.savefig(path, dpi=120)


def _drawn(parts: Sequence[_Shard], dims: Sequence[int]) -> list[_Shard]:
    """The parts with those put together that differ in other dims than the ones that are drawn."""
    together: dict[tuple[Interval, ...], _Shard] = {}
    for part in parts:
        # Empty ones may have the interval of none or of another one.
        key = (*(part.held[d] for d in dims), (part.ranks[0], 0) if part.is_empty else (-1, 0))
        before = together.get(key)
        ranks = part.ranks if before is None else before.ranks + part.ranks
        together[key] = _Shard(ranks, part.shape, part.held, part.read)
    return list(together.values())
