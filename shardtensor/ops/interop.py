"""Where a ShardTensor meets what is not one: collectives of ``torch.distributed``, NumPy, DLPack, opt_einsum.

``torch.distributed.all_reduce`` is called by training frameworks for losses and metrics. It reduces the values that the
ranks of the group hold, in place, and leaves the layout as it is: a Partial is resolved, reduced over the group, and
made Partial again, so that other views of the memory stay right. A sharded tensor may be reduced over ranks that hold
the same part of other tensors (those along a data axis), not over ranks of its own. So are ``reduce`` and
``broadcast``.

These operators have handlers, not plans: they get a process group, and return the work under way next to the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import wrapt
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .._compat.c10d import group_along
from ..communication.redistribute import redistribute_local, reduced
from ..dispatch.aten_calls import run
from ..dispatch.metrics import REMEDY, warn_of_copies
from ..dispatch.planning import spec_of
from ..dispatch.registry import REFUSED, Refusal, register
from ..dispatch.tensor import ShardTensor
from ..errors import refuse
from ..layout.spec import ShardTensorSpec
from ..ranks.agreement import gather_with_history
from ..ranks.callers import calling_module
from ..ranks.cuda_graphs import check_has_values

_c10d = torch.ops.c10d


def _on_values(name: str, tensors: Sequence[Tensor], group: torch.ScriptObject, call: Callable[..., Any]) -> Any:
    """Call a collective that works in place, on the values that the group's ranks hold."""
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            _check_same_part(name, spec_of(tensor), set(ranks))
    values = [_value(t) for t in tensors]
    work = call(values)
    for tensor, value in zip(tensors, values, strict=True):
        if isinstance(tensor, DTensor) and value is not tensor._local_tensor:
            dist.Work.unbox(work).wait()
            spec = spec_of(tensor)
            tensor._local_tensor.copy_(redistribute_local(value, spec.for_gradient(), spec))
    return work


@register(_c10d.allreduce_.default)
def _all_reduce_values(
    tensors: Sequence[Tensor], process_group: torch.ScriptObject, *options: Any
) -> tuple[Sequence[Tensor], torch.ScriptObject]:
    def call(values: Sequence[Tensor]) -> Any:
        return _c10d.allreduce_.default(values, process_group, *options)[1]

    return tensors, _on_values("all_reduce", tensors, process_group, call)


@register(_c10d.broadcast_.default)
def _broadcast_values(
    tensors: Sequence[Tensor], process_group: torch.ScriptObject, *options: Any
) -> tuple[Sequence[Tensor], torch.ScriptObject]:
    def call(values: Sequence[Tensor]) -> Any:
        return _c10d.broadcast_.default(values, process_group, *options)[1]

    return tensors, _on_values("broadcast", tensors, process_group, call)


@register(_c10d.reduce_.default)
def _reduce_values(
    tensors: Sequence[Tensor], process_group: torch.ScriptObject, reduce_op: torch.ScriptObject, *options: Any
) -> torch.ScriptObject:
    """On all ranks of the group, not only on the one that asks: a ShardTensor has one value on all ranks."""

    def call(values: Sequence[Tensor]) -> Any:
        return _c10d.allreduce_.default(values, process_group, reduce_op, None, *options[2:])[1]

    work: torch.ScriptObject = _on_values("reduce", tensors, process_group, call)
    return work


for _name in ("send", "recv_", "recv_any_source_", "scatter_", "reduce_scatter_"):
    register(getattr(_c10d, _name).default)(
        Refusal(
            f"torch.distributed.{_name.strip('_')}",
            __name__,
            "each rank would send, or get, a value of its own, and a ShardTensor has one value on all ranks",
            "pass a plain tensor: full_tensor(), or to_local() for this rank's part",
        )
    )


REFUSED[torch.ops.c10d.allgather_] = (
    "the ranks have different parts of it, which would count as values of the whole",
    f"gather it by full_tensor(). {REMEDY}",
)


@register(torch.ops.c10d.allgather_.default)
def _gather_values(
    outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], process_group: torch.ScriptObject, *_: Any, **__: Any
) -> Any:
    """A program may gather what every rank of a mesh has, also to divide by their number; metrics do not."""
    for tensor in inputs:
        if isinstance(tensor, DTensor) and not spec_of(tensor).sharded_dims():
            warn_of_copies("torch.distributed.all_gather", dist.ProcessGroup.unbox(process_group), tensor.device_mesh)
    return NotImplemented


def _value(tensor: Tensor) -> Tensor:
    """What the ranks reduce: the local tensor itself unless it is a contribution."""
    if not isinstance(tensor, DTensor):
        return tensor
    spec = spec_of(tensor)
    local = tensor._local_tensor
    return redistribute_local(local, spec, spec.for_gradient()) if spec.partial_mesh_dims() else local


def _check_same_part(name: str, spec: ShardTensorSpec, ranks: set[int]) -> None:
    for m, placement in enumerate(spec.placements):
        along = dist.get_process_group_ranks(group_along(spec.mesh, m))
        if isinstance(placement, Shard) and len(ranks.intersection(along)) > 1:
            raise refuse(
                name,
                spec,
                f"the group's ranks hold different shards of it (mesh dim {m})",
                "reduce to a number first (mean, sum), or pass the group of the data axis",
            )


# -- export ------------------------------------------------------------------------------------------------------------

# What would take a ShardTensor's values or memory out of torch.
#
# A ShardTensor has no memory of its own: torch's functions that return its address would return none, and what reads
# there finds anything. So they are refused. What is not sharded, such as a sum of all elements or of each sample, is
# reduced first, as in ``item()``, for which all ranks must take part.
#
# torch's own modules ask for storages and addresses, too: to tell tensors apart, for sizes, and whether there is memory
# at all. They get a storage without memory, whose address is zero.
#
# These functions have handlers, not plans: they refuse, or read data.

_aten = torch.ops.aten

_REMEDY = "take x.full_tensor(), which gathers, or of a sharded tensor this rank's part, x.to_local()"


def _register_export(name: str, remedy: str = _REMEDY) -> None:
    refusal = Refusal(name, __name__, "no rank holds all values", remedy)

    @register(getattr(Tensor, name))
    def _(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, ShardTensor) and (not self._spec.sharded_dims() or self.numel() == 1):
            return getattr(self.full_tensor(), name)(*args, **kwargs)
        return refusal(self, *args, **kwargs)


for _name in ("numpy", "tolist"):
    _register_export(_name)
_register_export(
    "__array__", f"call torch's function instead of NumPy's (torch.mean(x) for numpy.mean(x)), or {_REMEDY}"
)
for _name in ("__dlpack__", "__dlpack_device__"):
    register(getattr(Tensor, _name))(Refusal(_name, __name__, "a ShardTensor has no memory of its own", _REMEDY))
# Modules that compare addresses, and know what zero means; the kernels that others of torch's launch do not.
_COMPARING = tuple(
    map("torch.{}.".format, ("_dynamo", "_functorch", "_subclasses", "autograd", "distributed", "nn", "utils"))
) + ("torch.cuda._sanitizer",)


def _register_memory(name: str, function: Callable[..., Any], allowed: tuple[str, ...]) -> None:
    refusal = Refusal(name, __name__, "a ShardTensor has no memory of its own", _REMEDY)

    @register(function)
    def _(self: Tensor, *args: Any) -> Any:
        return NotImplemented if calling_module().startswith(allowed) else refusal(self)


for _name in ("data_ptr", *(["const_data_ptr"] if hasattr(Tensor, "const_data_ptr") else [])):  # new in 2.13
    _register_memory(_name, getattr(Tensor, _name), _COMPARING)
for _name in ("untyped_storage", "storage", "storage_offset"):
    _register_memory(_name, getattr(Tensor, _name), ("torch.",))


@register(Tensor.__cuda_array_interface__.__get__)
def _cuda_array_interface(self: Tensor, *_: Any) -> Any:
    """On other devices torch has no such attribute, for which libraries look."""
    if not self.is_cuda:
        return NotImplemented
    raise refuse("__cuda_array_interface__", self, "a ShardTensor has no memory of its own", _REMEDY)


for _name in ("apply_", "map_", "map2_"):
    _remedy = "call it on x.to_local(), whose memory is the shard's"
    register(getattr(Tensor, _name))(Refusal(_name, __name__, "a ShardTensor has no memory of its own", _remedy))


def _register_number(name: str, number: Callable[[Any], Any], dtypes: Callable[[torch.dtype], bool]) -> None:
    """Python's number of one element. ``torch.tensor([loss, accuracy])`` asks for it where torch dispatches nothing."""

    @register(getattr(Tensor, name))
    def _(self: Tensor) -> Any:
        if not isinstance(self, ShardTensor) or self.numel() != 1 or not dtypes(self.dtype):
            return NotImplemented
        return number(run(_aten._local_scalar_dense.default, (self,), {}))


_register_number("__float__", float, lambda dtype: not dtype.is_complex)
_register_number("__complex__", complex, lambda dtype: True)
_register_number("__bool__", bool, lambda dtype: True)
_register_number("__int__", int, lambda dtype: not dtype.is_complex)
_register_number("__index__", int, lambda dtype: not (dtype.is_complex or dtype.is_floating_point))


@register(Tensor.__format__)
def _format(self: Tensor, format_spec: str) -> str:
    """Of a 0-dim tensor the number, as torch has it: ``f"{loss:.3f}"``. All ranks must take part, as in ``item()``."""
    if self.ndim or not format_spec:
        return object.__format__(self, format_spec)
    return format(self.detach().item(), format_spec)


@register(_aten._local_scalar_dense.default)
def item(x: ShardTensor) -> bool | int | float | complex:
    """The number that a tensor of one element holds, on every rank."""
    spec = x._spec
    if spec.shape.numel() != 1:
        raise RuntimeError(f"a tensor with {spec.shape.numel()} elements cannot be converted to a scalar")
    check_has_values("item", x)
    differing = [m for m, p in enumerate(spec.placements) if not p.is_replicate() and spec.mesh.size(m) > 1]
    if len(differing) != 1:
        return redistribute_local(x._local_tensor, spec, spec.replicated()).item()
    return _number_of(x._local_tensor, spec, differing[0]).item()


def _number_of(local: Tensor, spec: ShardTensorSpec, m: int) -> Tensor:
    """The number of which mesh dim ``m`` has the parts, or one owner.

    The program waits for a number that it reads, so the ranks compare their histories with it, see [Note: history].
    """
    axis = spec.layout[m]
    holder = axis.owner if axis.placement.is_partial() else axis.sizes.index(1)  # type: ignore[union-attr]
    own = local.reshape(-1) if local.numel() else local.new_zeros(1)
    parts = gather_with_history(own, group_along(spec.mesh, m), dtype=spec.tensor_meta.dtype).view(-1)
    if holder is not None:
        return parts[holder]
    return reduced(parts.unbind(), spec.placements[m].reduce_op).to(spec.tensor_meta.dtype)  # type: ignore[attr-defined]


# -- opt einsum --------------------------------------------------------------------------------------------------------

# opt_einsum chooses by the module of an array's class which library contracts it. For ShardTensors that is torch.


def _register(contract: ModuleType) -> None:
    original = contract.infer_backend

    @register(getattr(original, "__wrapped__", original))
    def infer_backend(x: Any) -> str:
        return "torch"


wrapt.register_post_import_hook(_register, "opt_einsum.contract")
