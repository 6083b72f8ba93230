"""Who holds which part of an image or a volume: sizes from the command line, checked."""

import argparse
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Interval = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A mesh, and the dims that its axes shard, one after the other.

    Attributes:
        mesh: its shape; at most as long as there are dims.
        sizes: of the shards, by the dim's name. Dims beyond the mesh have one shard.
    """

    mesh: tuple[int, ...]
    sizes: Mapping[str, tuple[int, ...]]

    @property
    def shard_sizes(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(range(len(self.mesh)), self.sizes.values()))

    def boxes(self) -> list[tuple[Interval, ...]]:
        """The intervals that every rank holds, one per dim, in the mesh's order."""
        intervals = (itertools.pairwise(itertools.accumulate(sizes, initial=0)) for sizes in self.sizes.values())
        return list(itertools.product(*intervals))


def add_options(parser: argparse.ArgumentParser, dims: Sequence[str]) -> None:
    """The options that :func:`make_layout` takes, for dims of these names."""
    named = " x ".join(dims)
    parser.add_argument("--mesh", metavar="AxB", help=f"ranks along {named}, such as 2x2; default: {dims[0]} only")
    parser.add_argument("--sizes", metavar="A+B,C+D", help=f"of the shards along {', '.join(dims)}; default: even")
    parser.add_argument("--uneven", action="store_true", help="sizes in the proportions 2 : 7 : 12 : ... if none given")


def make_layout(
    dims: Mapping[str, int], ranks: int, mesh: str | None, sizes: Sequence[str | None] = (), uneven: bool = False
) -> Layout:
    """The layout that the command line asks for; ValueError says what does not fit.

    Args:
        dims: names and lengths of the dims that may be sharded.
        ranks: how many there are.
        mesh: ranks along the first dims, such as "2x2"; None: all of them along the first.
        sizes: of the shards, such as ["300+375"], for the first dims. Those that are left out or None are even.
        uneven: those are uneven instead, in the proportions 2 : 7 : 12 : ...

    >>> make_layout({"rows": 675, "columns": 1350}, 4, "2x2", ["300+375"]).sizes
    {'rows': (300, 375), 'columns': (675, 675)}
    """
    shape = _integers(mesh, "x") if mesh else (ranks,)
    if len(shape) > len(dims) or min(shape) < 1:
        raise ValueError(f"mesh {mesh}: expected up to {len(dims)} numbers of ranks, for {' x '.join(dims)}")
    if math.prod(shape) != ranks:
        raise ValueError(f"mesh {mesh} has {math.prod(shape)} positions, but there are {ranks} ranks")
    given = [*sizes, *[None] * len(dims)]
    surplus = [text for text in given[len(shape) :] if text is not None]
    if surplus:
        raise ValueError(f"sizes {', '.join(surplus)} are for dims that a mesh of {len(shape)} axes does not shard")
    parts = [*shape, *[1] * (len(dims) - len(shape))]
    return Layout(shape, {d: _sizes(text, dims[d], n, uneven, d) for d, text, n in zip(dims, given, parts)})


def _sizes(text: str | None, total: int, parts: int, uneven: bool, dim: str) -> tuple[int, ...]:
    if text is None:
        return _proportional(total, range(2, 5 * parts, 5) if uneven else [1] * parts)
    sizes = _integers(text, "+")
    if len(sizes) != parts:
        raise ValueError(f"sizes {text}: {len(sizes)} of them, but the mesh has {parts} ranks along the {dim}")
    if sum(sizes) != total:
        raise ValueError(f"sizes {text} add up to {sum(sizes)}, but there are {total} {dim}")
    return sizes


def _proportional(total: int, weights: Iterable[int]) -> tuple[int, ...]:
    sums = list(itertools.accumulate(weights, initial=0))
    boundaries = [round(total * weight / sums[-1]) for weight in sums]
    return tuple(stop - start for start, stop in itertools.pairwise(boundaries))


def _integers(text: str, separator: str) -> tuple[int, ...]:
    parts = text.split(separator)
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text}: expected numbers with {separator!r} between them")
    return tuple(map(int, parts))
