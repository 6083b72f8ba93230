"""What operators do with their operands: fit them to a result, and make ShardTensors of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...communication.redistribute import redistribute_local
from ...dispatch.planning import AtenCall, Path, meta_of, operands, replicated_spec, spec_of
from ...dispatch.tensor import ShardTensor, promote, redistribute_to, wrap
from ...errors import UnsupportedSharding, refuse
from ...layout.dtypes import wide_dtype
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...ranks.compared_operands import note_operand
from ...ranks.history import here

# What an exchange takes besides its bytes, in bytes: with the loopback network, and between current GPUs.
_EXCHANGE = {"cpu": 1 << 18}
_EXCHANGE_ELSEWHERE = 1 << 22

__all__ = [
    "as_operand",
    "broadcast_shape",
    "cost_of_exchange",
    "fit",
    "fitted_parts",
    "flattening",
    "is_little",
    "is_sharded",
    "local_part",
    "plain_operands",
    "redistributed",
    "reduced_value",
    "refuse_gathering",
    "replicated",
    "same_layout",
    "wide_dtype",
    "with_own_parts",
]


# -- on specs -----------------------------------------------------------------------------------------------------


def cost_of_exchange(device: str) -> int:
    """How many bytes take as long to send as an exchange takes that sends nothing."""
    return _EXCHANGE.get(device, _EXCHANGE_ELSEWHERE)


def is_little(spec: ShardTensorSpec, elements: int) -> bool:
    """Whether a rank may hold so many elements of other ranks in passing: they take no longer than an exchange."""
    return elements * spec.tensor_meta.dtype.itemsize <= cost_of_exchange(spec.mesh.device_type)


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """``torch.broadcast_shapes``, which has no annotations."""
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def fit(spec: ShardTensorSpec, target: ShardTensorSpec) -> ShardTensorSpec:
    """The spec of an operand whose local tensor broadcasts to the shard of a result with spec ``target``."""
    if spec is target:
        return spec
    before = len(target.shape) - len(spec.shape)

    def axis(wanted: AxisLayout) -> AxisLayout:
        p = wanted.placement
        if not isinstance(p, Shard):
            return wanted
        dim = p.dim - before
        if dim >= 0 and spec.shape[dim] == target.shape[p.dim]:
            return AxisLayout(Shard(dim), wanted.sizes)
        return AxisLayout(Replicate())  # broadcast along the sharded dim

    return spec.with_layout([axis(wanted) for wanted in target.layout])


# -- plain operands, below autograd --------------------------------------------------------------------------------


def plain_operands(call: AtenCall) -> dict[Path, ShardTensorSpec]:
    """The specs of a call's plain tensors, which count as replicated."""
    mesh = call.specs[0].mesh
    return {path: replicated_spec(mesh, meta_of(t)) for path, t in operands(call.args, {}, Tensor)}


def with_own_parts(func: Callable[..., Any], parts: Mapping[Path, ShardTensorSpec]) -> Callable[..., Any]:
    """``func``, which gets of plain operands what belongs to this rank where they are laid out as ``parts`` says."""
    narrowings = [(path, d, *spec.interval(m)) for path, spec in parts.items() for d, m in spec.sharded_dims().items()]
    if not narrowings:
        return func

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        local: list[Any] = list(args)
        for (*outer, last), dim, start, stop in narrowings:
            holder = local[outer[0]] if outer else local
            holder[last] = holder[last].narrow(dim, start, stop - start)
        return func(*local, **kwargs)

    return narrowed


def fitted_parts(call: AtenCall, target: ShardTensorSpec) -> dict[Path, ShardTensorSpec]:
    """The specs with which a call's plain tensors broadcast against the shard of a result with spec ``target``."""
    return {path: fit(spec, target) for path, spec in plain_operands(call).items()}


# -- on tensors, below autograd ------------------------------------------------------------------------------------


def reduced_value(x: DTensor) -> tuple[Tensor, ShardTensorSpec]:
    """The local part of a ShardTensor with any Partial reduced, and the spec that it then has."""
    spec = spec_of(x)
    target = spec.for_gradient()
    return redistribute_local(x._local_tensor, spec, target), target


@contextmanager
def flattening(op: str, x: ShardTensor) -> Iterator[None]:
    """Around a reshape that makes one dim of dims of ``x``: every rank has an interval of it then.

    Raises:
        UnsupportedSharding: in the name of ``op``, where that is not possible.
    """
    try:
        yield
    except UnsupportedSharding as error:
        reason = "it has to be flattened, but several of its dims are sharded, or it has fewer elements than ranks"
        raise refuse(op, [x._spec], reason, "redistribute it to shard one dim, or to Replicate()") from error


# -- on tensors, above autograd and differentiable ----------------------------------------------------------------


def as_operand(t: Tensor, mesh: DeviceMesh) -> ShardTensor:
    """``t`` as a ShardTensor that is not Partial; a plain tensor counts as replicated."""
    if not isinstance(t, DTensor):
        note_operand(here.operator or "an operator", t, mesh)
        return promote(t, mesh)
    t = ShardTensor.from_dtensor(t)
    return redistribute_to(t, t._spec.for_gradient())


def redistributed(op: str, t: ShardTensor, target: ShardTensorSpec) -> ShardTensor:
    """``t`` with the layout of ``target``, refused where that would gather it."""
    if t._spec.lies_like(target):
        return t
    refuse_gathering(op, [t._spec], [target])
    return redistribute_to(t, target)


def refuse_gathering(op: str, specs: Sequence[ShardTensorSpec], targets: Sequence[ShardTensorSpec]) -> None:
    """UnsupportedSharding where an operand would have to be gathered for its target."""
    for spec, target in zip(specs, targets, strict=True):
        m = spec.gathered_for(target)
        if m is not None:
            raise refuse(
                op,
                [spec, target],
                f"an operand would have to be gathered over mesh dim {m}",
                "shard all operands alike, or redistribute this one to Replicate() yourself",
            )


def local_part(t: ShardTensor, out: ShardTensorSpec) -> Tensor:
    """The local part of an operand. Where it is replicated on ranks that compute different shards of the result
    ``out``, its gradient on each of them is a contribution, a Partial.
    """
    if t._spec.placements == out.placements:
        return t.to_local()
    pairs = zip(t._spec.placements, out.placements, strict=True)
    return t.to_local(grad_placements=[Partial() if q.is_shard() and not p.is_shard() else p for p, q in pairs])


def is_sharded(*tensors: object) -> bool:
    """Whether one of them is a ShardTensor with a sharded dim."""
    return any(isinstance(t, ShardTensor) and bool(t._spec.sharded_dims()) for t in tensors)


def same_layout(t: Tensor, other: Tensor | None) -> Tensor:
    """``t`` sharded as ``other``, whose dims are its first ones; as it is where one of them is not sharded."""
    if not isinstance(t, ShardTensor) or not isinstance(other, ShardTensor):
        return t
    if not is_sharded(t) or not is_sharded(other):
        return t
    return redistribute_to(t, t._spec.with_layout(other._spec.for_gradient().layout))


def replicated(t: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """A plain tensor, equal on every rank and without a gradient, on the mesh of ``spec``."""
    return wrap(t, ShardTensorSpec.make(spec.mesh, spec.replicated().placements, t.shape, t.dtype))


# -- half --------------------------------------------------------------------------------------------------------------

# Contributions of half precision in float32, see [Note: rounded once] in redistribute.py.
#
# torch's kernels sum half precision in float32 and round the sum. What must not be rounded is computed from operands
# that are converted to float32, which changes none of their values.

ROWS = 4096  # that are converted at a time


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, which takes the host a microsecond also where it does nothing."""
    return t if t.dtype == dtype else t.to(dtype)


def is_half(t: Tensor) -> bool:
    """Whether the tensor is one of half precision."""
    return wide_dtype(t.dtype) != t.dtype


def widened(*tensors: Any) -> list[Any]:
    """Tensors of half precision in float32, all else as it is."""
    return [t.to(torch.float32) if isinstance(t, Tensor) and is_half(t) else t for t in tensors]


def product(rows: Tensor, others: Tensor) -> Tensor:
    """``rows.t() @ others`` of two matrices, in float32 where they are of half precision.

    >>> product(torch.ones(3, 2).bfloat16(), torch.ones(3, 4).bfloat16()).dtype
    torch.float32
    """
    if not is_half(rows):
        return torch.mm(rows.t(), others)
    if rows.is_cuda:
        return torch.mm(rows.t(), others, out_dtype=torch.float32)
    total = rows.new_zeros(rows.shape[1], others.shape[1], dtype=torch.float32)
    for i in range(0, len(rows), ROWS):
        some, of_others = (t[i : i + ROWS].to(torch.float32) for t in (rows, others))
        total.addmm_(some.t(), of_others)
    return total
