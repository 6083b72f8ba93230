"""Parameters that every rank holds whole: their gradients have to be summed over the ranks that share the input.

A plain weight that meets a sharded input gets, on each rank, only the contribution of that rank's shard. The sum over
the domain is done here, in the gradient's own way back, so ``.grad`` is plain and complete and optimizers, DDP and
FSDP see what they see on one device. Whether a gradient may come late is decided in _compat/data_parallel.py.

[Note: rounded contributions] In half precision a rank's contribution is what torch's kernel returns: summed in float32
and rounded, as the contributions of DDP's ranks are. The sum over ranks is in float32. So contributions are converted,
and the sums rounded, a bucket at a time. ``half_precision("exact")`` has operands converted instead, so that kernels
return float32. :meth:`Plan.decide_precision` decides which of the two, once for each plan.

[Note: contributions] The gradient of a DTensor that is Replicate on a mesh dim is always ``Partial()`` there, however
the DTensor was used. If ranks worked on different shards, their gradients are contributions already. If all ranks did
the same work, one keeps the gradient and the others get zeros, and nothing is sent. So gradients of several uses add up
as they are. FSDP2, which sums over the mesh dims that it is given without asking for placements, reduces all of them
rightly in its own communication.

[Note: buckets] A layer's contributions go into a bucket when its backward has computed them, and the bucket is sent
when it is full. A node between weight and layer, which the engine runs when nothing else is ready, takes the sums out.
Between accelerators buckets are larger, and are summed in a process group of their own: communication in one group is
done in the order in which it was started, so a halo would wait for a bucket. Layers may have run on several streams,
and so do their nodes. The thread that sends waits for all streams that have added to the bucket; one that takes sums
waits for the stream that has waited for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import AutogradFunction, FunctionContext, after_backward, alias, backward_pass, cast_each, run_last
from .._compat.c10d import group_along
from ..layout.caches import cached
from ..layout.dtypes import wide_dtype
from ..layout.spec import ShardTensorSpec
from ..ranks.groups import own_group
from ..ranks.history import here
from ..ranks.streams import current_stream, wait_for_streams
from .redistribute import start_sums
from .tracing import is_traced

# From how many bytes on a bucket is sent. A smaller message takes about as long, on the networks that there are.
BUCKET_BYTES = 1 << 20
ACCELERATOR_BUCKET_BYTES = 25 << 20  # between accelerators, whose links are faster


@cached(maxsize=4096)
def contributing(spec: ShardTensorSpec) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """The mesh dims whose ranks each contribute to a parameter's gradient, and how that gradient is placed."""
    mesh_dims = tuple(m for m, p in enumerate(spec.placements) if isinstance(p, Shard) and spec.mesh.size(m) > 1)
    return mesh_dims, tuple(Partial() if m in mesh_dims else Replicate() for m in range(spec.mesh.ndim))


@dataclass(frozen=True, slots=True)
class GradientSum:
    """The sum over ranks that the gradients of an operator's parameters still need.

    Attributes:
        mesh, mesh_dims: over which it goes.
        needed: for each tensor of the operator, whether its gradient, if there is any, needs it.
        widens: whether the contributions are in float32 where the tensors are in half precision.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    needed: tuple[bool, ...]
    widens: bool = False

    def complete(self, tensors: Sequence[Any]) -> list[Any]:
        """The operator's tensors with the sum arranged on their gradients' way back."""
        return _through(self.needed, tensors, _summing(self.mesh, self.mesh_dims))

    def defer(self, tensors: Sequence[Any]) -> tuple[list[Any], Contribution]:
        """The same, but the sum is made in a bucket: see [Note: buckets]. The parameters are without values.

        Also returned is what takes those gradients as soon as they are known.
        """
        dtypes: list[torch.dtype | None] = []
        for t in compress(tensors, self.needed):
            dtypes.append(None if t is None else t.dtype)
        contribution = Contribution(self.mesh, self.mesh_dims, dtypes)
        # One of the last in a backward pass, it gives the sums.
        through = _through(self.needed, tensors, contribution.sums, last=True, widens=self.widens)
        return through, contribution

    def defer_of_autograd(self, tensors: Sequence[Any]) -> list[Any]:
        """The same for what autograd differentiates, by a node that takes the gradients."""
        result, contribution = self.defer(tensors)
        return _through(self.needed, result, contribution.add_copies, values=tensors)

    def start(self, grads: Sequence[Tensor | None], *, overwrite: bool = False) -> Callable[[], list[Tensor | None]]:
        """Start it for the parameters' gradients; the function that is returned waits for it and gives all of them.

        Args:
            overwrite: the gradients are new tensors, which nothing else refers to.
        """
        if not self.mesh_dims:
            return lambda: list(grads)
        mine = [g if needed else None for g, needed in zip(grads, self.needed, strict=True)]
        finish = start_sum(mine, self.mesh, self.mesh_dims, overwrite=overwrite)
        return lambda: [g if total is None else total for g, total in zip(grads, finish(), strict=True)]


def deferred(tensor: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Contribution]:
    """The same for a plain tensor next to ShardTensors, whose gradient tells over which mesh dims the sum goes."""
    widens = wide_dtype(tensor.dtype) is not tensor.dtype
    (through,), contribution = GradientSum(mesh, (), (True,), widens).defer([tensor])
    return through, contribution


# What becomes of gradients on their way back.
Back = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


def _through(
    needed: Sequence[bool],
    tensors: Sequence[Any],
    back: Back,
    values: Sequence[Any] | None = None,
    last: bool = False,
    widens: bool = False,
) -> list[Any]:
    """The tensors, of which those that are ``needed`` and get gradients have gone through a node of the graph.

    Args:
        values: theirs in the result, which are those of ``tensors`` otherwise, or none of a node that is ``last``.
        widens: whether the gradients are in float32 where the tensors are in half precision.
    """
    result, chosen = list(tensors if values is None else values), []
    for i, t in enumerate(tensors):
        if needed[i] and t is not None and t.requires_grad:
            chosen.append(i)
    if chosen:
        made = _Node.apply(back, last, widens, list(map(result.__getitem__, chosen)), *map(tensors.__getitem__, chosen))
        for i, t in zip(chosen, made, strict=True):
            result[i] = t
    return result


class _Node(AutogradFunction):
    """Identity with ``back`` for its backward, which is ``last`` among those that are ready."""

    @staticmethod
    def forward(
        ctx: FunctionContext, back: Back, last: bool, widens: bool, values: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.back = back
        if last:
            run_last(ctx)
        made = []
        for t in tensors if last else values:
            dtype = wide_dtype(t.dtype) if widens else t.dtype
            if dtype is not t.dtype:
                # Autograd casts gradients to the dtype of what represents a tensor in the graph: not to a narrow one.
                made.append(t.new_empty((), dtype=dtype).expand(t.shape))
            else:
                # As alias() makes them, for which torch would also note that they are views.
                made.append(t.detach())
        return tuple(made)

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *ctx.back(grads))


def _summing(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Back:
    """The sum over the mesh dims."""
    return lambda grads: start_sum(grads, mesh, mesh_dims)()


def start_sum(
    tensors: Sequence[Tensor | None],
    mesh: DeviceMesh,
    mesh_dims: Sequence[int],
    *,
    overwrite: bool = False,
    apart_on: torch.device | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> Callable[[], list[Tensor | None]]:
    """Each tensor summed over the mesh dims: one all-reduce per mesh dim and dtype for all of them together.

    Half precision is summed in float32, see [Note: rounded contributions].

    The first is under way when this returns; the function that is returned waits, and gives the sums. Which of the
    tensors are None must be the same on every rank; it follows from the graph, which is.

    Args:
        overwrite: the tensors are new ones, which nothing else refers to.
        apart_on: their device, if they go in process groups of their own. See [Note: buckets].
        dtypes: of the sums, those of the tensors by default.
    """

    def start(some: list[Tensor], mesh_dim: int, overwrite: bool) -> Callable[[], list[Tensor]]:
        group, via = group_along(mesh, mesh_dim), None
        if apart_on is not None:
            via = own_group("gradients", dist.get_process_group_ranks(group), [group], apart_on)
        return start_sums(some, group, overwrite=overwrite, via=via)

    by_dtype: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    of_sums: dict[int, torch.dtype] = {}
    rounded = converts = False
    for i, t in enumerate(tensors):
        if t is not None:
            own = t.dtype
            dtype = wide_dtype(own)
            of_sums[i] = own if dtypes is None else dtypes[i]
            rounded = rounded or own is not dtype
            converts = converts or of_sums[i] is not dtype
            members, some = by_dtype.setdefault(dtype, ([], []))
            members.append(i)
            some.append(t)
    under_way = []
    caller = here.operator
    if rounded and not caller:  # so ranks notice where others do not round
        here.operator = "sum of rounded contributions"
    try:
        for dtype, (members, some) in by_dtype.items():
            some = cast_each(some, [dtype] * len(some)) if rounded else some
            under_way.append((members, start(some, mesh_dims[0], overwrite)))
    finally:
        here.operator = caller

    def finish() -> list[Tensor | None]:
        result, enabled = list(tensors), torch.is_grad_enabled()
        for members, pending in under_way:
            totals = pending()
            for m in mesh_dims[1:]:
                totals = start(totals, m, True)()
            if converts:
                totals = cast_each(totals, list(map(of_sums.__getitem__, members)))
            for i, total in zip(members, totals, strict=True):
                t: Any = tensors[i]
                result[i] = _Total.apply(mesh, mesh_dims, t, total) if enabled and t.requires_grad else total
        return result

    return finish


class _Total(AutogradFunction):
    """The sum of all ranks' contributions. Whoever differentiates it does so on every rank alike.

    Its gradient, which is the same on every rank, goes to each rank's own contribution. So the gradient of that is the
    sum over the ranks again.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext, mesh: DeviceMesh, mesh_dims: Sequence[int], contribution: Tensor, total: Tensor
    ) -> Tensor:
        ctx.mesh, ctx.mesh_dims = mesh, mesh_dims
        return alias(total)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[None, None, Tensor, None]:
        if torch.is_grad_enabled():
            (grad,) = _through([True], [grad], _summing(ctx.mesh, ctx.mesh_dims))
        return None, None, grad, None


# -- buckets ----------------------------------------------------------------------------------------------------------


class _Bucket:
    """Contributions to gradients, which are summed together."""

    __slots__ = ("_device", "_dtypes", "_mesh", "_streams", "_tensors", "finish", "mesh_dims", "room")

    def __init__(self, mesh: DeviceMesh, mesh_dims: Sequence[int], like: Tensor) -> None:
        self._mesh, self.mesh_dims = mesh, mesh_dims
        self._device = _device_of(like)
        self._streams: set[torch.Stream] = set()  # on which something was done with them so far
        self.room = BUCKET_BYTES if like.is_cpu else ACCELERATOR_BUCKET_BYTES  # bytes; it is to be sent without any
        self._tensors: list[Tensor | None] = []
        self._dtypes: list[torch.dtype] = []  # of their sums
        self.finish: Callable[[], list[Tensor | None]] | None = None  # waits for the sums, while they are on their way

    def add(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> range:
        """Where among the sums those of ``tensors`` will be, in these dtypes."""
        if self._device is not None:
            self._note_stream(self._device)
        first = len(self._tensors)
        self._tensors += tensors
        self._dtypes += dtypes
        self.room -= sum(map(attrgetter("nbytes"), tensors))
        return range(first, len(self._tensors))

    def send(self) -> None:
        if self._streams:
            wait_for_streams(self._streams, self._tensors)
        options: dict[str, Any] = {"overwrite": True, "apart_on": self._device, "dtypes": self._dtypes}
        self.finish = start_sum(self._tensors, self._mesh, self.mesh_dims, **options)

    def wait(self) -> None:
        """For the sums; those over further mesh dims are sent here."""
        if self.finish is not None:
            self._tensors, self.finish = self.finish(), None
            if self._device is not None:
                self._note_stream(self._device)

    def take(self, places: range) -> list[Tensor | None]:
        """The sums, which are forgotten here: autograd keeps gradients that nothing else refers to without a copy."""
        self.wait()
        found = self._tensors[places.start : places.stop]
        for i in places:
            self._tensors[i] = None
        if self._streams:
            wait_for_streams(self._streams, found)
        return found

    def _note_stream(self, device: torch.device) -> None:
        stream = current_stream(device)
        if stream is not None:
            self._streams.add(stream)


def _device_of(tensor: Tensor) -> torch.device | None:
    """The accelerator that it is on; None if it is on the CPU or has no data."""
    return None if tensor.is_cpu or is_traced(tensor) else tensor.device


class _Pass(NamedTuple):
    """The buckets of one backward pass: those being filled, one for each way to sum, and those on their way."""

    filling: dict[tuple[DeviceMesh, tuple[int, ...]], _Bucket]
    sent: list[_Bucket]


# The backward passes under way, by torch's numbers of them.
_passes: dict[int, _Pass] = {}


def _begin(number: int) -> _Pass:
    while len(_passes) >= 16:  # those that ended in an error; so many are hardly within each other
        del _passes[next(iter(_passes))]
    after_backward(partial(_end, number))
    return _passes.setdefault(number, _Pass({}, []))


def _end(number: int) -> None:
    """Gradients that nobody has asked for may still be on their way."""
    for bucket in _passes.pop(number).sent:
        if bucket.finish is not None:
            bucket.finish()


class Contribution:
    """The gradients of one call's parameters: how they get into a bucket and, summed, out of it."""

    __slots__ = ("_bucket", "_dtypes", "_mesh", "_mesh_dims", "_number", "_places")

    def __init__(self, mesh: DeviceMesh, mesh_dims: tuple[int, ...], dtypes: Sequence[torch.dtype | None]) -> None:
        self._mesh, self._mesh_dims, self._number, self._dtypes = mesh, mesh_dims, -1, dtypes
        self._bucket: _Bucket | None = None

    def add(self, grads: Iterable[Tensor | None], dtypes: Sequence[torch.dtype | None] | None = None) -> None:
        """Add what this rank has of them: new tensors, which the operator's backward returns as well.

        Args:
            dtypes: of the parameters, where not all of them are among ``grads``.
        """
        number, some, of_sums = backward_pass(), [], []
        for grad, dtype in zip(grads, self._dtypes if dtypes is None else dtypes, strict=True):
            if grad is not None and dtype is not None:
                some.append(grad)
                of_sums.append(dtype)
        if not some or number < 0:
            return
        filling, sent = _passes.get(number) or _begin(number)
        key = self._mesh, self._mesh_dims
        bucket = filling.get(key)
        if bucket is None:
            bucket = filling[key] = _Bucket(*key, some[0])
        self._number, self._bucket, self._places = number, bucket, bucket.add(some, of_sums)
        if bucket.room <= 0:
            bucket.send()
            sent.append(filling.pop(key))

    def add_along(self, mesh_dims: tuple[int, ...], grad: Tensor) -> Tensor:
        """What this rank has of the gradient of one tensor, in a tensor of its own, if it has a part of it along these.

        Which mesh dims these are follows from the layout of the gradient, so it is known in the backward pass only.
        """
        self._mesh_dims = mesh_dims
        own = grad.to(wide_dtype(grad.dtype), copy=True, memory_format=torch.contiguous_format)
        self.add([own])
        return own

    def add_copies(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients of local work that autograd differentiates, which are added."""
        if torch.is_grad_enabled():
            self.note_summed()
            return start_sum(grads, self._mesh, self._mesh_dims)()
        row_major = torch.contiguous_format
        own = [g if g is None else g.to(wide_dtype(g.dtype), copy=True, memory_format=row_major) for g in grads]
        self.add(own, [None if g is None else g.dtype for g in grads])
        return own

    def note_summed(self) -> None:
        """These gradients are sums already, as in all graphs of gradients.

        Nodes that are last communicate in the same order on all ranks only if each sends all that there is.
        """
        self._number, self._bucket = backward_pass(), None

    def sums(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The sums of the gradients that :meth:`add` was given; ``grads`` where these are sums."""
        bucket, self._bucket = self._bucket, None
        if bucket is None and self._number == backward_pass():
            return grads
        under_way = None if bucket is None or self._number != backward_pass() else _passes.get(self._number)
        if bucket is None or under_way is None:
            return start_sum(grads, self._mesh, self._mesh_dims)()
        filling, sent = under_way
        while filling:  # all that is left, and not only this bucket: one message after the other, on all ranks alike
            first = filling.pop(next(iter(filling)))
            first.send()
            sent.append(first)
        for one in sent:  # the engine's order among nodes that are last is not the same on all ranks
            if len(one.mesh_dims) > 1:
                one.wait()
        found = bucket.take(self._places)
        for i, grad in enumerate(grads):
            if grad is None:
                found.insert(i, None)
        return found
