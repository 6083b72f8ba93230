"""What would take a ShardTensor's values or memory out of torch.

A ShardTensor has no memory of its own: torch's functions that return its address would return none, and what reads
there finds anything. So they are refused. A 0-dim ShardTensor formats like any tensor: as the number.

These functions have handlers, not plans: they refuse, or read data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._compat.c10d import group_along
from ...communication.redistribute import redistribute_local, reduced
from ...dispatch.registry import Refusal, register
from ...dispatch.tensor import ShardTensor
from ...layout.spec import ShardTensorSpec
from ...ranks.agreement import gather_with_history
from ...ranks.cuda_graphs import check_not_captured

_aten = torch.ops.aten

_REMEDY = "take x.full_tensor(), which gathers, or this rank's shard, x.to_local()"


def _register_export(name: str) -> None:
    refusal = Refusal(name, __name__, "no rank holds all values", _REMEDY)

    @register(getattr(Tensor, name))
    def _(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, ShardTensor) or not self._spec.is_replicate():
            return refusal(self, *args, **kwargs)
        return getattr(self.to_local(), name)(*args, **kwargs)


for _name in ("numpy", "tolist", "__array__"):
    _register_export(_name)
for _name in ("__dlpack__", "__dlpack_device__"):
    register(getattr(Tensor, _name))(Refusal(_name, __name__, "a ShardTensor has no memory of its own", _REMEDY))
for _name in ("apply_", "map_", "map2_"):
    _remedy = "call it on x.to_local(), whose memory is the shard's"
    register(getattr(Tensor, _name))(Refusal(_name, __name__, "a ShardTensor has no memory of its own", _remedy))


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
    check_not_captured("item", x._local_tensor.device)
    differing = [m for m, p in enumerate(spec.placements) if not p.is_replicate() and spec.mesh.size(m) > 1]
    if len(differing) != 1:
        return redistribute_local(x._local_tensor, spec, spec.replicated()).item()
    return _number_of(x._local_tensor, spec, differing[0]).item()


def _number_of(local: Tensor, spec: ShardTensorSpec, m: int) -> Tensor:
    """The number of which mesh dim ``m`` has the parts, or one owner.

    What a program reads it waits for, so the ranks compare their histories on the way, see [Note: history].
    """
    sizes = spec.sizes[m]
    own = local.reshape(-1) if local.numel() else local.new_zeros(1)
    parts = gather_with_history(own, spec.tensor_meta.dtype, group_along(spec.mesh, m))
    if sizes is not None:
        return parts[sizes.index(1)]
    return reduced(parts.unbind(), spec.placements[m].reduce_op).to(spec.tensor_meta.dtype)  # type: ignore[attr-defined]
