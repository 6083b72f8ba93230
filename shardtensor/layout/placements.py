"""How a tensor lies on a mesh: placements and shard sizes, checked and completed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import current_mesh, is_plain_shard
from .._compat.c10d import explain_what_is_gone
from .caches import cached
from .intervals import chunk_sizes

# One entry per mesh dim: the shard sizes where it shards the tensor, otherwise None.
Sizes = tuple[tuple[int, ...] | None, ...]
# What callers may give: ``{mesh_dim or its name: sizes}``, the sizes themselves where one mesh dim shards, "even" for
# torch.chunk's sizes, or None for the default: the same, or where there are local tensors to infer sizes from, theirs.
ShardSizes = Mapping[Any, Sequence[int]] | tuple[int, ...] | list[int] | str | None


class AxisLayout(NamedTuple):
    """What one mesh dim does to a tensor: the placement, and where that is a Shard, the size of each rank's shard.

    ``spec.layout`` has one per mesh dim. A layout is changed by changing these, so that no placement is left with the
    sizes of another: ``spec.with_axes({0: AxisLayout(Shard(2), (5, 3)), 1: AxisLayout(Replicate())})``.

    [Note: owners] An entry of a sharded dim, ``x[:, 5]``, is on one rank. It is a Partial sum whose other contributions
    are zeros, and its sizes say on which rank it is: ``AxisLayout(Partial(), (0, 1, 0))``. Views and elementwise
    operators leave it there. ``stack`` makes shards of such entries, so ``stack([f(x[:, i]) ...], 1)`` sends nothing.
    What ``cat`` joins of entries of several ranks, such as a face of a sphere and its neighbors' borders, has elements
    of several ranks: ``AxisLayout(Partial(), (90, 10, 0))`` says how many of each, and zeros are everywhere else.
    ``stack`` gives it to the rank that has the most. All other operators treat it as any other Partial, and of their
    results nothing is known.
    """

    placement: Placement
    sizes: tuple[int, ...] | None = None

    @property
    def owner(self) -> int | None:
        """The rank, along the mesh dim, that has all of a Partial sum, if that is known."""
        return self.home if self.sizes is not None and max(self.sizes) == sum(self.sizes) else None

    @property
    def home(self) -> int | None:
        """The rank, along the mesh dim, that has most elements of a Partial sum, if that is known."""
        if self.sizes is None or not isinstance(self.placement, Partial):
            return None
        return self.sizes.index(max(self.sizes))

    def in_short(self) -> str:
        """The placement and its sizes, a checksum of these if they are many."""
        if self.sizes is None:
            return str(self.placement)
        if len(self.sizes) <= 8:
            return f"{self.placement}{list(self.sizes)}"
        return f"{self.placement}[{len(self.sizes)} sizes, checksum {zlib.crc32(repr(self.sizes).encode()):08x}]"


def without_owners(layout: Sequence[AxisLayout]) -> list[AxisLayout]:
    """The same with Partials of which nothing more is known."""
    return [axis if axis.home is None else AxisLayout(axis.placement) for axis in layout]


def given_mesh(mesh: object) -> DeviceMesh:
    """The mesh that a caller has passed, or for None that of the surrounding ``with mesh:``.

    Raises:
        TypeError: something that is no mesh.
        RuntimeError: None, and no mesh surrounds the call.
    """
    if mesh is None:
        return current_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"the mesh must be a DeviceMesh, as init_device_mesh makes one, not {type(mesh).__name__} {mesh!r:.80}"
        )
    return mesh


def mesh_coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's position in ``mesh``; ValueError where the mesh does not hold this rank."""
    at = mesh.get_coordinate()
    if at is None:
        raise ValueError(
            f"this rank ({torch.distributed.get_rank()}) is not in the mesh {mesh.mesh.tolist()}; "
            "create and use ShardTensors only on ranks of their mesh"
        )
    return tuple(at)


def first_rank(mesh: DeviceMesh) -> int:
    """The global rank that is first in ``mesh``."""
    return rank_at(mesh, (0,) * mesh.ndim)


def check_in_mesh(name: str, rank: object, mesh: DeviceMesh) -> None:
    """TypeError or ValueError where ``name``, which a caller has passed, is no global rank of ``mesh``."""
    if not isinstance(rank, SupportsIndex):
        raise TypeError(f"{name} must be a rank, an integer, not {rank!r}")
    if not bool((mesh.mesh == int(rank)).any()):
        raise ValueError(f"{name}={rank} is not in the mesh {mesh.mesh.tolist()}; name a global rank of the mesh")


def rank_at(mesh: DeviceMesh, at: tuple[int, ...]) -> int:
    """The global rank at a coordinate of ``mesh``."""
    return int(mesh.mesh[at].item())


def check_own_shard(mesh: DeviceMesh) -> None:
    """Check the mesh of a ShardTensor that was loaded from a file. A program without process group may load any.

    Raises:
        ValueError: the shard is that of another rank, or the mesh has ranks that this program does not have.
    """
    if not dist.is_initialized():
        return
    if mesh.mesh.is_meta:
        raise ValueError("a ShardTensor cannot be loaded to the meta device; load it, and call to('meta')")
    theirs, mine, world = rank_at(mesh, mesh_coordinate(mesh)), dist.get_rank(), dist.get_world_size()
    if theirs != mine or int(mesh.mesh.max()) >= world:
        raise ValueError(
            f"this is the shard of rank {theirs} on a mesh of the ranks {mesh.mesh.tolist()}, and it is loaded on rank "
            f"{mine} of {world}: each rank must load the file that it has saved, in a program with the same mesh. "
            "Checkpoints of torch.distributed.checkpoint can be loaded by other ranks, with other layouts"
        )


def first_equal(mesh: DeviceMesh) -> DeviceMesh:
    """The first mesh that was equal to this one and had its process groups: ``mesh["domain"]`` is new each time."""
    if type(mesh) is not DeviceMesh:  # but what torch.compile traces with in place of one
        return mesh
    try:
        groups = mesh.get_all_groups()
    except RuntimeError as error:
        explain_what_is_gone(error)
        raise
    return _first(mesh, tuple(group.group_name for group in groups))


@cached(maxsize=1024)
def _first(mesh: DeviceMesh, groups: tuple[str, ...]) -> DeviceMesh:
    return mesh


@cached(maxsize=256)
def check_order(mesh: DeviceMesh) -> None:
    """ValueError where ranks do not ascend along a mesh dim: process groups sort theirs, and would not match it."""
    ranks = mesh.mesh
    if any(bool((ranks.diff(dim=m) < 0).any()) for m in range(ranks.ndim)):
        raise ValueError(f"the mesh's ranks {ranks.tolist()} do not ascend along each mesh dim; list them in order")


def given_placements(placements: Sequence[Placement] | None, mesh: DeviceMesh) -> Sequence[Placement]:
    """Those of a caller, or for None Replicate on every mesh dim; TypeError for a placement outside a sequence."""
    if isinstance(placements, Placement):
        raise TypeError(f"placements must be a sequence with one entry per mesh dim, e.g. ({placements},)")
    return [Replicate()] * mesh.ndim if placements is None else placements


def normalize_placements(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """Check placements against the mesh and the number of tensor dims, and make shard dims non-negative.

    Raises:
        TypeError: something that is no placement.
        ValueError: their number, a dim that does not exist, or one tensor dim on two mesh dims.
    """
    placements = given_placements(placements, mesh)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{len(placements)} placements {tuple(placements)} for a mesh of {mesh.ndim} dims {tuple(mesh.shape)}; "
            "give one per mesh dim (Replicate() where the tensor is not sharded)"
        )
    result: list[Placement] = []
    taken: dict[int, int] = {}
    for m, p in enumerate(placements):
        if not isinstance(p, Placement):
            raise TypeError(
                f"placement {p!r} of mesh dim {m} is not a Placement; use Shard(dim), Replicate() or Partial()"
            )
        if isinstance(p, Partial) and p.reduce_op not in ("sum", "max", "min", "product"):
            raise ValueError(
                f"Partial({p.reduce_op!r}) on mesh dim {m} is not supported: it is not exact on unequal shards; "
                "divide by the global count and use Partial('sum')"
            )
        if isinstance(p, Partial) and type(p) is not Partial:  # of a norm's powers, or of what a mask selects
            raise ValueError(f"{p} on mesh dim {m} is DTensor's own; redistribute the DTensor first")
        if p.is_shard() or not is_plain_shard(p):
            if not is_plain_shard(p):
                raise ValueError(
                    f"{p} on mesh dim {m}: strided shards are not supported; redistribute the DTensor first"
                )
            dim = p.dim  # type: ignore[attr-defined]
            if not -ndim <= dim < ndim:
                raise ValueError(f"Shard({dim}) on mesh dim {m}: the tensor has only {ndim} dims")
            dim %= ndim
            if dim in taken:
                raise ValueError(
                    f"tensor dim {dim} is sharded on mesh dims {taken[dim]} and {m}; shard it on one mesh dim only "
                    "(flatten the two mesh dims into one, or shard another tensor dim)"
                )
            taken[dim] = m
            p = Shard(dim)
        result.append(p)
    return tuple(result)


def normalize_sizes(
    shard_sizes: ShardSizes, placements: Sequence[Placement], shape: Sequence[int], mesh: DeviceMesh
) -> Sizes:
    """Complete ``{mesh_dim: sizes}`` to one entry per mesh dim, and check it against the global shape.

    Raises:
        TypeError: something that is no mapping of sizes, or sizes that are no integers.
        ValueError: sizes of the wrong number, sum or sign, or of a mesh dim that does not shard or does not exist.
    """
    asked = by_mesh_dim(shard_sizes, placements, mesh)
    given = {} if asked is None or isinstance(asked, str) else dict(asked)
    result: list[tuple[int, ...] | None] = []
    for m, p in enumerate(placements):
        entry = given.pop(m, None)
        if not isinstance(p, Shard):
            if entry is not None:
                raise ValueError(f"shard_sizes names mesh dim {m}, whose placement is {p}: only Shard has sizes")
            result.append(None)
            continue
        total, ranks = shape[p.dim], mesh.size(m)
        sizes = chunk_sizes(total, ranks) if entry is None else as_integers(entry)
        if len(sizes) != ranks:
            raise ValueError(f"{len(sizes)} shard sizes {sizes} for mesh dim {m}, which has {ranks} ranks")
        if min(sizes) < 0:
            raise ValueError(f"negative shard size in {sizes} (mesh dim {m})")
        if sum(sizes) != total:
            raise ValueError(
                f"shard sizes {sizes} of mesh dim {m} add up to {sum(sizes)}, but tensor dim {p.dim} has size {total}"
            )
        result.append(sizes)
    if given:
        raise ValueError(f"shard_sizes names mesh dims {sorted(given)}, but the mesh has only {mesh.ndim}")
    return tuple(result)


def by_mesh_dim(
    shard_sizes: ShardSizes, placements: Sequence[Placement], mesh: DeviceMesh
) -> dict[int, tuple[int, ...]] | str | None:
    """Sizes that a caller has given, by the numbers of mesh dims from 0 on; "even" and None as they are.

    Raises:
        TypeError: something else, or sizes that are no integers.
        ValueError: a name that no mesh dim has, another text than "even", or sizes alone where not one mesh dim shards.
    """
    if shard_sizes is None:
        return None
    if isinstance(shard_sizes, str):
        if shard_sizes != "even":
            raise ValueError(f"shard_sizes={shard_sizes!r}: sizes, a dict {{mesh_dim: sizes}}, None or 'even'")
        return "even"
    if isinstance(shard_sizes, (tuple, list)):
        alone = as_integers(shard_sizes)
        sharding = [m for m, p in enumerate(placements) if isinstance(p, Shard)]
        if len(sharding) != 1:
            raise ValueError(
                f"shard_sizes={alone} and placements {tuple(placements)}: sizes alone need one mesh dim that shards; "
                "name the mesh dims, as in shard_sizes={0: (5, 3)} or {'domain': (5, 3)}"
            )
        return {sharding[0]: alone}
    if not isinstance(shard_sizes, Mapping):
        raise TypeError(f"shard_sizes must be sizes, a dict {{mesh_dim: sizes}}, None or 'even', not {shard_sizes!r}")
    return {mesh_dim_of(key, mesh): as_integers(sizes) for key, sizes in shard_sizes.items()}


def mesh_dim_of(key: int | str, mesh: DeviceMesh) -> int:
    """The number of a mesh dim, given by a number, also from the end, or by its name; one beyond the mesh as it is."""
    if isinstance(key, str):
        names = mesh.mesh_dim_names or ()
        if key not in names:
            raise ValueError(f"the mesh has no axis {key!r}; its axes are called {names or 'nothing'}")
        return names.index(key)
    return key + mesh.ndim if key < 0 else key


def are_integers(sizes: Sequence[int]) -> bool:
    """Whether these are Python's integers and nothing else, such as the symbolic ones of torch.compile."""
    return set(map(type, sizes)) <= {int}


def as_integers(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes as Python's integers: the same tuple where it is one already, by which specs recognize it.

    Raises:
        TypeError: a size that is no integer.
    """
    if type(sizes) is tuple and are_integers(sizes):
        return sizes
    try:
        return tuple(index(n) for n in sizes)
    except TypeError:
        raise TypeError(f"shard sizes must be integers, not {tuple(sizes)}") from None
