"""Who holds which part of the map: sizes from the command line, checked."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """A mesh of (latitude,) or (latitude, longitude), and how many rows and columns each of its positions holds."""

    mesh: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shard_sizes(self) -> dict[int, tuple[int, ...]]:
        return dict(enumerate((self.rows, self.columns)[: len(self.mesh)]))

    def boxes(self) -> list[tuple[int, int, int, int]]:
        """(first row, end row, first column, end column) of every rank, in the mesh's order."""
        rows, columns = (
            list(itertools.pairwise(itertools.accumulate(sizes, initial=0))) for sizes in (self.rows, self.columns)
        )
        return [(*band, *stripe) for band in rows for stripe in columns]


def make_layout(
    height: int, world_size: int, mesh: str | None, rows: str | None, columns: str | None, uneven: bool = False
) -> Layout:
    """The layout that `--mesh`, `--rank-sizes` and `--rank-sizes-lon` ask for; ValueError says what does not fit. What
    they do not name is even, or uneven on request."""
    shape = _integers(mesh, "x", "--mesh") if mesh else (world_size,)
    if len(shape) > 2 or min(shape) < 1:
        raise ValueError(f"--mesh {mesh}: expected 4 or 2x2, that is latitude x longitude")
    ranks = shape[0] * (shape[1] if len(shape) == 2 else 1)
    if ranks != world_size:
        raise ValueError(f"--mesh {mesh} has {ranks} positions, but there are {world_size} ranks")
    if columns and len(shape) == 1:
        raise ValueError("--rank-sizes-lon needs a mesh with longitude, such as --mesh 2x2")
    return Layout(
        mesh=shape,
        rows=_sizes(rows, height, shape[0], uneven, "--rank-sizes", "rows"),
        columns=_sizes(columns, 2 * height, shape[1] if len(shape) == 2 else 1, uneven, "--rank-sizes-lon", "columns"),
    )


def _sizes(text: str | None, total: int, parts: int, uneven: bool, option: str, what: str) -> tuple[int, ...]:
    if text is None:
        # In the proportions 2 : 7 : 12 : ..., or 1 : 1 : 1 : ...
        return _proportional(total, range(2, 5 * parts, 5) if uneven else [1] * parts)
    sizes = _integers(text, "+", option)
    if len(sizes) != parts:
        raise ValueError(f"{option} {text} names {len(sizes)} sizes, but the mesh has {parts} there")
    if sum(sizes) != total:
        raise ValueError(f"{option} {text} adds up to {sum(sizes)} {what}, but the map has {total}")
    return sizes


def _proportional(total: int, weights: Iterable[int]) -> tuple[int, ...]:
    sums = list(itertools.accumulate(weights, initial=0))
    cuts = [round(total * weight / sums[-1]) for weight in sums]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def _integers(text: str, separator: str, option: str) -> tuple[int, ...]:
    parts = text.split(separator)
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text}: expected whole numbers with {separator!r} between them")
    return tuple(map(int, parts))
