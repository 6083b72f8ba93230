"""From a global tensor to every rank's shard: ``scatter_tensor`` of one rank's, ``distribute_tensor`` of every rank's.

``gather_tensor`` is the way back to one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from .._compat import not_in_graphs
from .._compat.c10d import c10d_messages, group_along, is_eager
from ..layout.intervals import intervals_of
from ..layout.placements import ShardSizes, check_in_mesh, first_rank, given_placements, rank_at
from ..layout.spec import ShardTensorSpec
from ..layout.strides import as_bytes
from ..ranks.agreement import (
    OTHER_META,
    claims_of,
    described,
    note_replicated,
    problem_of,
    record_over_mesh,
    say,
    usable_mesh,
)
from ..ranks.debug_mode import debug_enabled
from ..ranks.failures import communicating
from ..ranks.groups import connect, own_group
from ..ranks.waiting import wait_for
from .tensor import ShardTensor, mark_leaf, redistribute_to, wrap

_TOGETHER = 1 << 23  # bytes; messages of fewer are sent together, and shards of more in parts


@not_in_graphs("make ShardTensors outside of compiled functions, and pass them in")
def scatter_tensor(
    tensor: Tensor | None,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    source: int | None = None,
    shard_sizes: ShardSizes = None,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """Shard a tensor that one rank holds over a mesh. Collective over the mesh.

    First the ranks compare their arguments, with an all-gather of some integers. Then each rank receives its shard in
    one message, or one of more than 8 MiB in four. The source sends one at a time, or small shards of up to 8 MiB
    together. So on its device the source needs memory for its own shard and a quarter of another one, beyond
    ``tensor`` if that is there, too.

    Args:
        tensor: the global tensor on rank ``source``, on any device, such as the CPU for one that no accelerator can
            hold. Ignored on other ranks (pass None).
        mesh: the mesh of the result; may be a sub-mesh without rank 0. Default: that of the surrounding ``with mesh:``.
        placements: ``Shard`` or ``Replicate`` per mesh dim; default: Replicate everywhere.
        source: the *global* rank that has the tensor; default: the first rank of the mesh.
        shard_sizes: each rank's size, where one mesh dim shards; or ``{mesh_dim or its name: sizes}``. Default:
            torch.chunk's sizes, also for mesh dims that are left out.
        global_shape, dtype: of ``tensor``. If every rank passes both, there is no all-gather. The ranks then compare
            arguments only at their first use (with ``SHARDTENSOR_DEBUG=1`` each time).
        requires_grad: make the result a leaf that accumulates gradients.

    Returns:
        A ShardTensor of shape ``global_shape``.

    Raises:
        ValueError: on every rank: arguments that differ between ranks, a source outside the mesh, sizes that do not add
            up, a Partial placement, a tensor on the meta device, or without the given ``global_shape`` and ``dtype``.
        TypeError: the source passes no tensor, a DTensor or a sparse tensor.
        RuntimeError: no process group; an integer tensor with ``requires_grad``.

    Example::

        x = scatter_tensor(image if rank == 0 else None, mesh, (Shard(2),), shard_sizes=(300, 1050))
    """
    mesh = usable_mesh(mesh)
    placements = given_placements(placements, mesh)
    source = first_rank(mesh) if source is None else source
    is_src = dist.get_rank() == source
    problem = _problem(tensor, mesh, global_shape, dtype) if is_src else 0
    if global_shape is None or dtype is None or debug_enabled():
        asked = (
            f"source={source}, {described(placements, shard_sizes)}, "
            f"global_shape={global_shape and tuple(global_shape)}, dtype={dtype}, requires_grad={requires_grad}"
        )
        claims = claims_of(tensor if is_src else None, problem, "arguments of scatter_tensor", asked, mesh)
        _check_arguments(source, mesh, placements)
        claim = next(claim for claim in claims.values() if claim.rank == source)
        if claim.problem:
            raise say(claim.problem, f"scatter_tensor: source rank {source} reports a problem: its tensor", mesh)
        shape, dtype = claim.shape, claim.dtype
        assert dtype is not None
    else:
        _check_arguments(source, mesh, placements)
        shape = tuple(global_shape)
    # What follows is computed from arguments that are equal on all ranks, so it raises on all or none. The source
    # reports its own problem with the shards.
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"only floating point and complex tensors can require gradients, not {dtype}")
    spec = ShardTensorSpec.make(mesh, placements, shape, dtype, shard_sizes=shard_sizes)
    record_over_mesh(f"scatter_tensor from rank {source} of {spec.in_short}", mesh, dtype)
    group = _group_of(mesh)
    with communicating(group):
        given = None if problem else tensor
        local = _send_shards(given, spec, group) if is_src else _receive_shard(spec, source, group)
    if problem:
        raise say(problem, f"scatter_tensor: source rank {source} is this one, and its tensor", mesh)
    if local is None:
        raise ValueError(
            f"scatter_tensor: source rank {source} reports a problem: its tensor is missing, on the meta device, "
            "not dense, or not of the given global_shape and dtype; its own error says which"
        )
    return mark_leaf(wrap(local, spec), requires_grad)


@not_in_graphs("make ShardTensors outside of compiled functions, and pass them in")
def distribute_tensor(
    tensor: Tensor,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    shard_sizes: ShardSizes = None,
    src_data_rank: int | None = 0,
) -> ShardTensor:
    """Shard a global tensor that every rank passes, as ``torch.distributed.tensor.distribute_tensor``, in any sizes.

    Args:
        tensor: the global tensor, on any device; of the same shape and dtype on all ranks.
        mesh, placements, shard_sizes: as for :func:`scatter_tensor`.
        src_data_rank: the rank along every mesh dim whose values are sent, as by :func:`scatter_tensor`. None: each
            rank cuts its shard out of its own values, which must be those of all ranks. Nothing is sent; in a mesh's
            first calls the ranks compare values with the next number that the program reads.

    Returns:
        A ShardTensor of the tensor's shape with memory of its own, a leaf that requires gradients if ``tensor`` does.

    Raises:
        ValueError, TypeError: as :func:`scatter_tensor`.

    Example::

        torch.manual_seed(0)                                      # on every rank
        noise = distribute_tensor(torch.randn(1, 4, 90, 160), mesh, (Shard(2),), src_data_rank=None)
    """
    mesh = usable_mesh(mesh)
    placements = given_placements(placements, mesh)
    if problem := problem_of(tensor, mesh):
        raise say(problem, "distribute_tensor: the tensor", mesh)
    needs = tensor.requires_grad
    if src_data_rank is not None:
        if not 0 <= src_data_rank < min(mesh.shape):
            raise ValueError(
                f"src_data_rank={src_data_rank} is no rank along every dim of the mesh {tuple(mesh.shape)}"
            )
        source = rank_at(mesh, (src_data_rank,) * mesh.ndim)
        given: dict[str, Any] = {"global_shape": tensor.shape, "dtype": tensor.dtype, "shard_sizes": shard_sizes}
        return scatter_tensor(tensor, mesh, placements, source=source, requires_grad=needs, **given)
    _check_placements("distribute_tensor", placements)
    spec = ShardTensorSpec.make(mesh, placements, tensor.shape, tensor.dtype, shard_sizes=shard_sizes)
    record_over_mesh(f"distribute_tensor of {spec.in_short}", mesh)
    note_replicated("distribute_tensor", tensor.detach(), mesh, range(mesh.ndim))
    return mark_leaf(wrap(own_part(tensor, spec), spec), needs)


@torch.no_grad()
def gather_tensor(
    x: DTensor, destination: int | None = None, *, device: torch.device | str | None = None
) -> Tensor | None:
    """Gather the global tensor on one rank, for a file or a picture. Collective over the mesh; not differentiable.

    Each rank sends its shard in one message, or one of more than 8 MiB in four. Only the destination allocates the
    global tensor, unlike with ``full_tensor``. A Partial is reduced first.

    Args:
        x: a ShardTensor or DTensor.
        destination: the *global* rank that gets it; default: the first rank of the mesh.
        device: of the result. With ``"cpu"`` an accelerator needs memory for a quarter of a shard beyond its own.
            Default: that of the mesh.

    Returns:
        On the destination, a plain tensor without gradient. None on all other ranks.

    Raises:
        ValueError: on every rank, if the destination is not in the mesh.

    Example::

        whole = gather_tensor(model(x), device="cpu")
        if whole is not None:
            np.save("result.npy", whole.numpy())
    """
    x = x if isinstance(x, ShardTensor) else ShardTensor.from_dtensor(x)
    mesh = x.device_mesh
    destination = first_rank(mesh) if destination is None else destination
    check_in_mesh("destination", destination, mesh)
    x = redistribute_to(x, x._spec.for_gradient())
    spec, local = x._spec, x.to_local().resolve_conj().resolve_neg().contiguous()
    record_over_mesh(f"gather_tensor to rank {destination} of {spec.in_short}", mesh)
    group = _group_of(mesh)
    to = next(at for at in product(*map(range, mesh.shape)) if rank_at(mesh, at) == destination)
    # Where copies are on several ranks, those send that are the destination's peers.
    sharded = spec.sharded_dims().values()
    peers = list(product(*(range(n) if m in sharded else (to[m],) for m, n in enumerate(mesh.shape))))
    if spec.coordinate != to:
        if spec.coordinate in peers and local.numel():
            with communicating(group):
                for part in _parts(spec, spec.coordinate):
                    _exchange((), [(destination, part.of(local).contiguous())], group)
        return None
    whole = local.new_empty(spec.shape, device=device)
    part_at(whole, spec, to).copy_(local)
    parts = [(at, part) for at in peers if at != to and 0 not in spec.local_shape(at) for part in _parts(spec, at)]
    message = local.new_empty(max((part.elements for _, part in parts), default=0))
    for at, part in parts:
        place = part.of(part_at(whole, spec, at))
        received = message[: part.elements].view(place.shape)
        with communicating(group):
            _exchange([(rank_at(mesh, at), received)], (), group)
        place.copy_(received)
    return whole


def _check_arguments(src: int, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """What every rank can see by itself."""
    check_in_mesh("source", src, mesh)
    _check_placements("scatter_tensor", placements)


def _check_placements(name: str, placements: Sequence[Placement]) -> None:
    if any(isinstance(p, Partial) for p in placements):
        raise ValueError(f"{name} cannot place {tuple(placements)}: only Shard and Replicate")


def _problem(tensor: object, mesh: DeviceMesh, shape: Sequence[int] | None, dtype: torch.dtype | None) -> int:
    """What is wrong with the source's tensor, or 0; it may have been said to be of this shape and dtype."""
    if problem := problem_of(tensor, mesh):
        return problem
    assert isinstance(tensor, Tensor)
    other = (shape is not None and tuple(shape) != tuple(tensor.shape)) or (dtype or tensor.dtype) != tensor.dtype
    return OTHER_META if other else 0


def _exchange(
    recvs: Sequence[tuple[int, Tensor]], sends: Sequence[tuple[int, Tensor]], group: dist.ProcessGroup
) -> None:
    """Messages from and to global ranks, and wait for them."""
    from_, to = ([(dist.get_group_rank(group, r), as_bytes(t)) for r, t in some] for some in (recvs, sends))
    for work in c10d_messages(from_, to, group):
        wait_for(work, None, group)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One in which the mesh's ranks are connected. Collective over the mesh.

    No process group has its ranks where it has several dims, but is not the world.
    """
    device = torch.empty(0, device=mesh.device_type).device
    groups = [group_along(mesh, m) for m in range(mesh.ndim)]
    group = groups[0] if mesh.ndim == 1 else dist.group.WORLD
    assert group is not None
    if mesh.size() < group.size() and device.type != "cpu" and not is_eager():
        group = own_group("scatter", mesh.mesh.flatten().sort().values.tolist(), groups, device)
    if mesh.size() == group.size():
        connect(group, device)
    return group


def _send_shards(tensor: Tensor | None, spec: ShardTensorSpec, group: dist.ProcessGroup) -> Tensor | None:
    """Send every other rank its shard, and return this rank's. Without a tensor, send that there is a problem."""
    packed: list[tuple[int, Tensor]] = []
    with torch.no_grad():
        for at in product(*(range(n) for n in spec.mesh.shape)):
            if at == spec.coordinate:
                continue
            parts = _parts(spec, at)
            for part in parts if tensor is not None else parts[:1]:
                packed.append((rank_at(spec.mesh, at), _message(tensor, spec, at, part)))
                if len(parts) > 1 or sum(message.nbytes for _, message in packed) >= _TOGETHER:
                    _exchange((), packed, group)
                    packed.clear()
        _exchange((), packed, group)
        if tensor is None:
            return None
        return own_part(tensor, spec)


@torch.no_grad()
def own_part(tensor: Tensor, spec: ShardTensorSpec) -> Tensor:
    """This rank's shard of a global tensor, on the mesh's device: a copy, which does not keep ``tensor`` in memory."""
    mine, theirs = _empty(spec, spec.own_shape), part_at(tensor, spec, spec.coordinate)
    for part in _parts(spec, spec.coordinate):
        part.of(mine).copy_(_ready(part.of(theirs), mine.device), non_blocking=True)
    return mine


def _message(tensor: Tensor | None, spec: ShardTensorSpec, at: Sequence[int], part: _Part) -> Tensor:
    """A part of the shard of the rank at ``at`` of the mesh; zeros where there is no tensor."""
    message = _empty(spec, [part.elements + part.is_first])
    if tensor is not None:
        values = part.of(part_at(tensor, spec, at))
        message[: part.elements].view(values.shape).copy_(_ready(values, message.device), non_blocking=True)
    else:
        message.zero_()
    if part.is_first:
        message[-1:].fill_(tensor is None)
    return message


def _ready(values: Tensor, device: torch.device) -> Tensor:
    """``values``, from where a device copies without the host's waiting: pinned memory, if they are the host's."""
    if values.device.type != "cpu" or device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, device=values.device, pin_memory=True).copy_(values)


def _receive_shard(spec: ShardTensorSpec, src: int, group: dist.ProcessGroup) -> Tensor | None:
    """This rank's shard, or None where the source has a problem."""
    first, *others = _parts(spec, spec.coordinate)
    message = _empty(spec, [first.elements + 1])
    _exchange([(src, message)], (), group)
    if bool(message[-1] != 0):
        return None
    if not others:
        return message[:-1].view(spec.own_shape)
    shard = _empty(spec, spec.own_shape)
    for part in (first, *others):
        place, received = part.of(shard), message[: part.elements]
        if not part.is_first:
            _exchange([(src, received)], (), group)
        place.copy_(received.view(place.shape))
    return shard


class _Part(NamedTuple):
    """A part of a shard, which is one message: a length along a dim, or all of it.

    The first one has an element more, which says whether the source has a problem: an error must reach every rank, and
    so costs no message of its own.
    """

    elements: int
    is_first: bool
    along: tuple[int, int, int] | None

    def of(self, shard: Tensor) -> Tensor:
        return shard if self.along is None else shard.narrow(*self.along)


def _parts(spec: ShardTensorSpec, at: Sequence[int]) -> list[_Part]:
    """Those of the rank at ``at`` of the mesh: quarters of a large shard along its longest dim."""
    shape = spec.local_shape(at)
    elements = math.prod(shape)
    if elements * spec.tensor_meta.dtype.itemsize <= _TOGETHER:
        return [_Part(elements, True, None)]
    longest = max(range(len(shape)), key=shape.__getitem__)
    n = shape[longest]
    step = -(-n // 4)
    lengths = [(start, min(step, n - start)) for start in range(0, n, step)]
    return [_Part(elements // n * length, start == 0, (longest, start, length)) for start, length in lengths]


def _empty(spec: ShardTensorSpec, shape: Sequence[int]) -> Tensor:
    """Uninitialized memory on the mesh's device."""
    return torch.empty(tuple(shape), dtype=spec.tensor_meta.dtype, device=spec.mesh.device_type)


def part_at(tensor: Tensor, spec: ShardTensorSpec, at: Sequence[int]) -> Tensor:
    """The shard of the global ``tensor`` that belongs to the rank at ``at`` of the mesh, as a view."""
    shard = tensor.detach()
    for d, m in spec.sharded_dims().items():
        start, stop = intervals_of(spec.sizes_along(m))[at[m]]
        shard = shard.narrow(d, start, stop - start)
    return shard
