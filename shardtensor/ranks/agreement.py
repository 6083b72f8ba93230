"""What ranks claim about their local tensors, compared: ranks that disagreed would hang later.

Everything a rank claims about its local tensor fits in one row of integers. The rows of all ranks of the mesh are
gathered, one small all-gather per mesh dim, and every rank checks the same table, so either all go on or all raise the
same error. What does not fit a row, such as placements, is compared by a checksum; where these differ, all ranks know
it, and gather the texts, to show them. With ``SHARDTENSOR_DEBUG=1`` this is done even where the caller has given all
sizes.
"""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import hidden_from_program, is_traced, recomputed
from .._compat.c10d import devices_of, group_along, process_group
from ..errors import RanksDiffer
from ..layout.caches import forgets
from ..layout.intervals import chunk_sizes
from ..layout.placements import (
    ShardSizes,
    by_mesh_dim,
    given_mesh,
    given_placements,
    mesh_coordinate,
    normalize_placements,
    rank_at,
)
from ..layout.spec import ShardTensorSpec
from ..layout.strides import as_bytes, stride_like
from .compared_operands import note_copies
from .cuda_graphs import check_not_captured, is_capturing
from .debug_mode import debug_enabled
from .differences import by_rank, check_equal, first_difference
from .history import (
    WIDTH,
    as_text,
    at_comparison,
    difference,
    fingerprint,
    forget_history,
    last_entry,
    last_lines,
    record,
    values_compared,
)
from .integer_rows import alike, gather_rows, gather_table, gather_texts
from .summaries import digest_of_some

MAX_NDIM = 16
# In the same order on every rank, so that a dtype can be sent as its index.
DTYPES: list[torch.dtype] = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)

# Every rank's row of integers, by its coordinate in the mesh.
Table = dict[tuple[int, ...], list[int]]
# Gathers every rank's row, by its global rank.
_Gather = Callable[[Sequence[int]], Mapping[int, list[int]]]


def usable_mesh(mesh: object) -> DeviceMesh:
    """:func:`given_mesh`, checked: ``torch.distributed`` has been initialized, and the mesh holds this rank."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "ShardTensor needs a process group: start with torchrun and call torch.distributed.init_process_group() "
            "or init_device_mesh() first"
        )
    found = given_mesh(mesh)
    mesh_coordinate(found)
    return found


def agree_on_local(
    local: Any, mesh: DeviceMesh | None, placements: Sequence[Placement] | None, shard_sizes: ShardSizes
) -> tuple[Tensor, ShardTensorSpec]:
    """``local`` on the mesh's device, and the spec of the ShardTensor whose shards are the ranks' ``local``; raises
    alike on all ranks where it can.

    With sizes given nothing is compared, so that nothing is communicated: a rank whose local tensor does not fit them
    then raises alone.
    """
    mesh = usable_mesh(mesh)
    placements = given_placements(placements, mesh)
    shard_sizes = by_mesh_dim(shard_sizes, placements, mesh)
    problem = problem_of(local, mesh)
    if not problem and local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    if shard_sizes is None or debug_enabled():
        asked = described(placements, shard_sizes)
        looked_at = is_early("shards", mesh) and not problem
        sample = digest_of_some(local) if looked_at and isinstance(local, Tensor) and not is_traced(local) else 0
        claims = claims_of(local, problem, "placements or shard_sizes", asked, mesh, sample)
        spec = _from_claims(claims, local, mesh, placements, shard_sizes)
        _warn_of_copies(claims, spec)
        _note_replicated(local, spec)
        return local, spec
    if problem:
        raise say(problem, "the local tensor", mesh)
    placements = normalize_placements(placements, mesh, local.ndim)
    shape = list(local.shape)
    sizes = {} if isinstance(shard_sizes, str) else shard_sizes
    for m, p in enumerate(placements):
        if isinstance(p, Shard):
            shape[p.dim] = sum(sizes[m]) if m in sizes else shape[p.dim] * mesh.size(m)
    spec = _checked(local, mesh, placements, shape, shard_sizes)
    record_over_mesh(f"from_local of {spec.in_short}", mesh)
    _note_replicated(local, spec)
    return local, spec


def note_replicated(what: str, tensor: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> None:
    """Have the ranks along ``mesh_dims``, which hold copies of ``tensor``, compare them with the next number that is
    read, in a mesh's first calls."""
    if mesh_dims and is_early("copies", mesh):
        note_copies(f"the replicated tensor of {what}", tensor, mesh, list(mesh_dims))


def _note_replicated(local: Tensor, spec: ShardTensorSpec) -> None:
    note_replicated("from_local", local, spec.mesh, [m for m, p in enumerate(spec.placements) if p.is_replicate()])


def is_early(what: str, mesh: DeviceMesh) -> bool:
    """Whether this call is one of a mesh's first, or all are to be looked at."""
    _calls[mesh, what] += 1
    return _calls[mesh, what] <= _FIRST or debug_enabled()


def record_over_mesh(text: str, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Note a call that all ranks of the mesh make alike; what they were told in it is compared with the next number.

    Args:
        dtype: of what it communicates, if it does: then it is compared when it is called first.
    """
    for m in range(mesh.ndim):
        if mesh.size(m) > 1:
            record(group_along(mesh, m).group_name, text, dtype)


def _checked(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], sizes: ShardSizes
) -> ShardTensorSpec:
    """The spec with these properties, checked against this rank's local tensor."""
    spec = ShardTensorSpec.make(
        mesh, placements, shape, local.dtype, shard_sizes=sizes, stride=stride_like(local, shape)
    )
    for d, (have, expected) in enumerate(zip(local.shape, spec.local_shape(), strict=True)):
        if have != expected:
            m = spec.sharded_dims()[d]
            raise ValueError(
                f"the local tensor has shape {tuple(local.shape)}, but shard_sizes {spec.sizes[m]} of mesh dim {m} say "
                f"that rank {spec.coordinate[m]} along it holds {expected} in tensor dim {d}; pass the true sizes, or "
                "shard_sizes=None to infer them"
            )
    return spec


# -- what a rank claims ------------------------------------------------------------------------------------

_PROBLEMS: dict[int, tuple[type[Exception], str]] = {
    (NOT_A_TENSOR := 1): (TypeError, "must be a torch.Tensor"),
    (IS_DTENSOR := 2): (TypeError, "is a DTensor already; use ShardTensor.from_dtensor, or pass its to_local()"),
    (NO_VALUES := 3): (ValueError, "is on the meta device, so it has no values for the mesh's device {device!r}"),
    (TOO_MANY_DIMS := 4): (ValueError, "has more than {dims} dims, which is not supported"),
    (NOT_STRIDED := 5): (TypeError, "is sparse, nested or quantized; pass a dense tensor, such as its to_dense()"),
    (OTHER_META := 6): (ValueError, "is not of the given global_shape and dtype"),
}


def problem_of(tensor: object, mesh: DeviceMesh) -> int:
    """What is wrong with a plain tensor by itself, or 0."""
    if not isinstance(tensor, Tensor):
        return NOT_A_TENSOR
    if isinstance(tensor, DTensor):
        return IS_DTENSOR
    if tensor.is_meta and mesh.device_type != "meta":
        return NO_VALUES
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return NOT_STRIDED
    return TOO_MANY_DIMS if tensor.ndim > MAX_NDIM else 0


def say(problem: int, which: str, mesh: DeviceMesh) -> Exception:
    """The error for a problem of ``which`` tensor."""
    kind, text = _PROBLEMS[problem]
    return kind(f"{which} {text.format(device=mesh.device_type, dims=MAX_NDIM)}")


def described(placements: object, shard_sizes: object) -> str:
    """What a rank has been asked for, in the same words wherever it is the same."""
    if isinstance(shard_sizes, Mapping):
        shard_sizes = {m: tuple(sizes) for m, sizes in sorted(shard_sizes.items())}
    if isinstance(placements, Sequence):
        placements = tuple(placements)
    return f"placements={placements}, shard_sizes={shard_sizes}"


class Claim(NamedTuple):
    """What a rank says about its tensor; with a problem, or without a tensor, nothing of dtype and shape.

    Attributes:
        sample: a digest of some of its values; 0: of none, or they are all the same.
    """

    rank: int
    problem: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    sample: int


def claims_of(
    tensor: object, problem: int, what: str, asked: str, mesh: DeviceMesh, sample: int = 0
) -> dict[tuple[int, ...], Claim]:
    """Every rank's claim, by mesh coordinate. Collective over the mesh.

    Args:
        tensor: this rank's, or None.
        what, asked: what all ranks have to be asked for alike, and what this rank was.
        sample: see :class:`Claim`.

    Raises:
        ValueError: on all ranks, where they were asked for different things; the text shows these.
    """
    dtype, shape = -1, torch.Size()
    if isinstance(tensor, Tensor) and not problem:
        dtype, shape = DTYPES.index(tensor.dtype), tensor.shape
    # A problem or 0, a digest, an index of DTYPES, the number of dims, and their sizes padded to MAX_NDIM.
    row = [problem, sample, dtype, len(shape), *shape, *[-1] * (MAX_NDIM - len(shape))]
    return {
        at: Claim(rank_at(mesh, at), problem, DTYPES[dtype] if dtype >= 0 else None, tuple(shape[:ndim]), sample)
        for at, (problem, sample, dtype, ndim, *shape) in check_same(what, [asked], mesh, row).items()
    }


def check_same(what: str, lines: Sequence[str], mesh: DeviceMesh, row: Sequence[int] = ()) -> Table:
    """Check that ranks of the mesh have the same lines of text; gives what :func:`gather_over_mesh` does of ``row``.

    Raises:
        ValueError: on all ranks, with the first line that differs.
    """
    text = "\n".join(lines)
    table = gather_over_mesh([zlib.crc32(text.encode()), *row], mesh)
    if len({checksum for checksum, *_ in table.values()}) > 1:
        told = {rank: dict(enumerate(each.split("\n"))) for rank, each in texts_over_mesh(text, mesh).items()}
        if found := first_difference(told):
            check_equal(what, found[1])
    return {at: theirs for at, (_, *theirs) in table.items()}


def gather_over_mesh(row: Sequence[int], mesh: DeviceMesh, what: str = "comparison of ranks") -> Table:
    """Every rank's ``row`` of integers (equally long everywhere), by mesh coordinate.

    With it travels what the ranks have communicated so far, see [Note: history].

    Args:
        what: what it is called there.

    Raises:
        RanksDiffer: on all ranks, where they have not communicated the same.
    """
    groups = [group_along(mesh, m).group_name for m in range(mesh.ndim)]
    for name in groups:
        record(name, what, torch.int64, len(row), compares=True)
    fingerprints = [number for name in groups for number in fingerprint(name)]
    table = _gather_rows([*row, *fingerprints], mesh)
    for m, name in enumerate(groups):
        lines: dict[tuple[int, ...], dict[int, list[int]]] = {}  # of ranks along mesh dim m
        for at, theirs in table.items():
            lines.setdefault(at[:m] + at[m + 1 :], {})[rank_at(mesh, at)] = theirs[len(row) + WIDTH * m :][:WIDTH]
        for line in lines.values():
            _check_histories(line, name, partial(_rows_by_rank, mesh=mesh))
        values_compared(name)
    return {at: theirs[: len(row)] for at, theirs in table.items()}


def compare_histories(what: str, mesh: DeviceMesh) -> None:
    """RanksDiffer on all ranks of the mesh, where they have not communicated the same before this call."""
    gather_over_mesh((), mesh, what)


@recomputed()
def gather_with_history(
    values: Tensor,
    group: dist.ProcessGroup,
    what: str = "item",
    dtype: torch.dtype | None = None,
    others: bool = True,
) -> Tensor:
    """Every rank's ``values``, of the same shape everywhere, flat in the rows of one tensor, on their device. With them
    travels what :func:`gather_over_mesh` compares.

    Args:
        what: it is called there.
        dtype: it has there; default: that of ``values``. A number may be held in another one.
        others: compare the values of other tensors, too, that were noted before; a caller that compares ``values``
            itself says better what differs.

    Raises:
        RanksDiffer: on all ranks of the group, where they have not communicated the same.
    """
    device, name, size = values.device, group.group_name, values.nbytes
    record(name, what, dtype or values.dtype, values.numel(), compares=True)
    # Two integers at least: a complex number of double precision takes so many, and one message fits what others send.
    words = max(2, -(-size // 8))
    row = torch.tensor([0] * words + [*fingerprint(name, others)], device=device)
    row[:words].view(torch.uint8)[:size].copy_(as_bytes(values))
    table = gather_table(row, group)
    fingerprints = zip(dist.get_process_group_ranks(group), table[:, words:].tolist(), strict=True)
    _check_histories(dict(fingerprints), name, partial(gather_rows, group=group, device=device))
    if others:
        values_compared(name)
    rows = table[:, :words].contiguous().view(torch.uint8)[:, :size]
    return rows.contiguous().view(values.dtype).view(len(rows), -1)


def _check_histories(fingerprints: Mapping[int, Sequence[int]], group: str, gather: _Gather) -> None:
    """RanksDiffer on all ranks, which pass all fingerprints of one group, where these ranks differ.

    Args:
        gather: called by all of them or by none, to show in what they differ.
    """
    if len(set(map(tuple, fingerprints.values()))) > 1:
        texts = gather_texts(as_text(group), gather)
        if said := difference({rank: texts[rank] for rank in fingerprints}):
            forget_history()
            raise RanksDiffer(said)


def _compare(name: str, values: bool) -> None:
    """See [Note: first communication] in history.py."""
    group = process_group(name) if dist.is_initialized() else None
    devices, debugs = [] if group is None else devices_of(group), debug_enabled()
    if group is None or not devices or group.size() == 1 or (is_capturing(devices[0]) and not debugs):
        return
    for device in devices if debugs else ():
        check_not_captured("a comparison of ranks", device, remedy="unset SHARDTENSOR_DEBUG")
    device = devices[0]
    gather, lines = partial(gather_rows, group=group, device=device), last_lines(name) if debugs else []
    with hidden_from_program():
        mine: tuple[int, ...] = fingerprint(name, values)
        if debugs:
            mine = (*mine, zlib.crc32(repr(lines).encode()))
        if debugs or device.type != "cpu" or not alike(mine, group):
            rows = gather(mine)
            _check_histories({rank: theirs[:WIDTH] for rank, theirs in rows.items()}, name, gather)
            if debugs and len({checksum for *_, checksum in rows.values()}) > 1:
                texts = gather_texts("\n".join([last_entry(name), *lines]), gather)
                begun = by_rank(_lines_that_differ(texts))
                warnings.warn(
                    f"ranks start the same communication from different lines of code: {begun}. If these lines do not "
                    "do the same, numbers are mixed up",
                    stacklevel=2,
                )
    if values:
        values_compared(name)


def _lines_that_differ(texts: Mapping[int, str]) -> dict[int, str]:
    """What ranks have begun, and the innermost of the lines that led to it which is not the same on all ranks.

    Args:
        texts: of each rank, what it has begun, then these lines.
    """
    told = {rank: text.split("\n") for rank, text in texts.items()}
    shortest = min(map(len, told.values()))
    differing = (i for i in range(1, shortest) if len({each[i] for each in told.values()}) > 1)
    i = next(differing, shortest)
    return {rank: f"{each[0]}, at {(*each[i:], 'no line of yours')[0]}" for rank, each in told.items()}


at_comparison.append(_compare)


def _gather_rows(row: Sequence[int], mesh: DeviceMesh) -> Table:
    rows: Table = {(): list(row)}
    for m in reversed(range(mesh.ndim)):
        flat = [number for theirs in rows.values() for number in theirs]
        if mesh.size(m) == 1:
            gathered = [flat]
        else:
            gathered = list(gather_rows(flat, group_along(mesh, m), mesh.device_type).values())
        starts = {at: i * len(row) for i, at in enumerate(rows)}
        rows = {(k, *at): part[i : i + len(row)] for k, part in enumerate(gathered) for at, i in starts.items()}
    return rows


def texts_over_mesh(text: str, mesh: DeviceMesh, what: str = "comparison of texts") -> dict[int, str]:
    """Every rank's ``text``, by global rank. Collective over the mesh; compares as :func:`gather_over_mesh`."""

    def lengths(row: Sequence[int]) -> dict[int, list[int]]:
        # As long as what item() sends: a rank that reads a number instead learns of it, and does not wait for the rest.
        rows = gather_over_mesh([*row, 0], mesh, what)
        return {rank_at(mesh, at): theirs[:1] for at, theirs in rows.items()}

    return gather_texts(text, partial(_rows_by_rank, mesh=mesh), lengths)


def _rows_by_rank(row: Sequence[int], mesh: DeviceMesh) -> dict[int, list[int]]:
    return {rank_at(mesh, at): theirs for at, theirs in _gather_rows(row, mesh).items()}


# -- what all claims say -----------------------------------------------------------------------


def _from_claims(
    claims: Mapping[tuple[int, ...], Claim],
    local: object,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shard_sizes: ShardSizes,
) -> ShardTensorSpec:
    for claim in claims.values():
        if claim.problem:
            raise say(claim.problem, f"rank {claim.rank}: the local tensor", mesh)
    assert isinstance(local, Tensor)
    check_equal("dtype", {claim.rank: str(claim.dtype) for claim in claims.values()})
    check_equal("number of dims", {claim.rank: str(len(claim.shape)) for claim in claims.values()})
    placements = normalize_placements(placements, mesh, local.ndim)
    sharded = {p.dim: m for m, p in enumerate(placements) if isinstance(p, Shard)}
    shape = list(local.shape)
    inferred: dict[int, tuple[int, ...]] = {}
    for d in range(local.ndim):
        m = sharded.get(d)
        if m is None:
            sizes = {claim.rank: str(claim.shape[d]) for claim in claims.values()}
            check_equal(f"size of tensor dim {d}, which is not sharded", sizes)
        else:
            inferred[m] = _sizes_along(claims, mesh, m, d)
            shape[d] = sum(inferred[m])
    said = shard_sizes if isinstance(shard_sizes, Mapping) else {}
    if isinstance(shard_sizes, str):
        said = {m: chunk_sizes(sum(sizes), len(sizes)) for m, sizes in inferred.items()}
    for m, given in said.items():
        if given != inferred.get(m):
            raise ValueError(
                f"shard_sizes {given} of mesh dim {m} do not match the local tensors, which have sizes "
                f"{inferred.get(m)} there; pass the true sizes, or shard_sizes=None to infer them"
            )
    return _checked(local, mesh, placements, shape, inferred)


# Of a mesh's first calls values are looked at; all ranks count the same.
_FIRST = 16
_calls: Counter[tuple[DeviceMesh, str]] = Counter()
forgets(_calls.clear)


def _warn_of_copies(claims: Mapping[tuple[int, ...], Claim], spec: ShardTensorSpec) -> None:
    """Warn where all ranks along a mesh dim that shards have the same values: probably those of the global tensor."""
    for d, m in spec.sharded_dims().items():
        values: dict[tuple[int, ...], set[tuple[int, tuple[int, ...]]]] = {}
        for at, claim in claims.items():
            values.setdefault(at[:m] + at[m + 1 :], set()).add((claim.sample, claim.shape))
        n = spec.mesh.size(m)
        if n > 1 and all(len(line) == 1 and next(iter(line))[0] for line in values.values()):
            warnings.warn(
                f"from_local: the {n} ranks along mesh dim {m} have the same local tensor, so the result, {spec}, has "
                f"the same {claims[spec.coordinate].shape[d]} rows {n} times along dim {d}. from_local takes this "
                "rank's shard. If every rank has the global tensor, shard it by ShardTensor.from_local(tensor, mesh)"
                ".redistribute(placements=...), which sends nothing, or pass one rank's to scatter_tensor. If the "
                "shards are equal on purpose, pass shard_sizes, and nothing is compared",
                stacklevel=4,
            )


def _sizes_along(claims: Mapping[tuple[int, ...], Claim], mesh: DeviceMesh, m: int, d: int) -> tuple[int, ...]:
    """The shard sizes of tensor dim ``d`` on mesh dim ``m``, on which ranks that share a position must agree."""
    sizes: list[int] = []
    for k in range(mesh.size(m)):
        along = {claim.rank: claim.shape[d] for at, claim in claims.items() if at[m] == k}
        if len(set(along.values())) > 1:
            raise ValueError(
                f"ranks {list(along)} share position {k} of mesh dim {m}, but their shards of tensor dim {d} have "
                f"sizes {list(along.values())}; they must be equal"
            )
        sizes.append(next(iter(along.values())))
    return tuple(sizes)
