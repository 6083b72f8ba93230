"""The call of an operator as the function that makes its plan sees it: specs, torch's checks, what is done first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._compat import TensorMeta, untraced
from ..dispatch.planning import converted, meta_of, replicated_spec, spec_of, without_data
from ..dispatch.tensor import ShardTensor, promote, redistribute_to
from ..errors import UnsupportedSharding, different_meshes, refuse
from ..layout.spec import ShardTensorSpec

# How a plan's function sees a tensor: a ShardTensor by its spec, a plain one by shape, strides and dtype.
Operand = ShardTensorSpec | TensorMeta


@dataclass(slots=True)
class Arguments:
    """A call as the function that makes its plan sees it.

    Attributes:
        name: of the operator, for errors.
        mesh: of its ShardTensors.
        device: of its tensors.
        tensors: ``{argument: spec}`` of the tensors that are ShardTensors when the plan runs.
        lists: the same for arguments that are lists of tensors.
        then: the layout that the result is redistributed to after the plan has run; None leaves it as it is.
        steps: what is done with arguments before the plan runs, in this order.
        casts: the dtypes that :meth:`cast` gives arguments.
    """

    name: str
    mesh: DeviceMesh
    device: torch.device
    tensors: dict[str, ShardTensorSpec] = field(default_factory=dict)
    lists: dict[str, list[ShardTensorSpec]] = field(default_factory=dict)
    then: ShardTensorSpec | None = None
    steps: dict[str, list[Callable[[Any], Any]]] = field(default_factory=dict)
    casts: dict[str, torch.dtype] = field(default_factory=dict)

    def refuse(self, reason: str, remedy: str) -> UnsupportedSharding:
        """The exception for this call, to be raised."""
        specs = [*self.tensors.values(), *(spec for specs in self.lists.values() for spec in specs)]
        return refuse(self.name, specs, reason, remedy)

    def redistribute(self, argument: str, target: ShardTensorSpec) -> ShardTensorSpec:
        """Have an operand redistributed before the plan runs; returns ``target``.

        Raises:
            UnsupportedSharding: a sharded dim would have to be gathered.
        """
        source = self.tensors[argument]
        m = source.gathered_for(target)
        if m is not None:
            raise self.refuse(
                f"{argument} would have to be gathered over mesh dim {m}",
                "shard all operands alike, or redistribute this one to Replicate() yourself",
            )
        self.tensors[argument] = target
        return target

    def returned(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function of torch returns for the global tensors: tensors without data, of its shapes and dtypes.

        Args:
            args, kwargs: its arguments, with specs (or :class:`TensorMeta`) for tensors.

        Raises:
            Exception: torch's own, for the global sizes, and so on every rank alike.
        """
        # Autocast would cast, but does not act on meta tensors.
        casts = self.autocast() is not None

        def described(a: Any) -> Any:
            meta = a.tensor_meta if isinstance(a, ShardTensorSpec) else a
            if isinstance(meta, TensorMeta):
                dtype = torch.float32 if casts and meta.dtype.is_floating_point else meta.dtype
                return without_data(meta._replace(dtype=dtype))
            return a

        with torch.no_grad(), untraced():
            args, kwargs = converted(described, args, kwargs)
            return function(*args, **kwargs)

    def autocast(self) -> torch.dtype | None:
        """The dtype to which autocast casts the operands of matrix products; None where it is off."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def autocast_dtype(self, function: Callable[..., Tensor], *operands: Operand) -> torch.dtype:
        """The dtype of the operands that autocast, which is on, has ``function`` compute with; see below."""
        metas = [t.tensor_meta if isinstance(t, ShardTensorSpec) else t for t in operands]
        shapes = [[min(n, 2) for n in t.shape] for t in metas]
        return autocast_dtype(function, shapes, [t.dtype for t in metas], self.device)

    def without_autocast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, called where autocast is off."""
        kind = self.device.type
        if self.autocast() is None:
            return function

        def call(*args: Any) -> Any:
            with torch.autocast(kind, enabled=False):
                return function(*args)

        return call

    def cast(self, dtype: torch.dtype | None, *arguments: str) -> None:
        """Have operands cast before the plan runs, differentiably; None leaves them as they are."""
        for argument in arguments if dtype is not None else ():
            self.casts[argument] = dtype  # type: ignore[assignment]
            self.then_do(argument, lambda t: t.to(dtype))
            if argument in self.tensors:
                self.tensors[argument] = self.tensors[argument].with_dtype(dtype)  # type: ignore[arg-type]

    def prepare(self, argument: str, value: Any, partial: bool) -> Any:
        """Have an operand, or a list of them, made ShardTensors; returns the specs that they then have."""
        mesh = self.mesh
        if isinstance(value, (list, tuple)):
            self.then_do(argument, lambda tensors: [_prepared(t, mesh, partial) for t in tensors])
            self.lists[argument] = [prepared_spec(t, mesh, partial) for t in value]
            return list(self.lists[argument])
        if not isinstance(value, ShardTensor):
            self.then_do(argument, lambda t: promote(t, mesh))
        self.tensors[argument] = prepared_spec(value, mesh, partial)
        return self.tensors[argument]

    def then_do(self, argument: str, step: Callable[[Any], Any]) -> None:
        """Add a step by which a tensor is prepared before the plan runs. It is run on what the others returned."""
        self.steps.setdefault(argument, []).append(step)

    def prepare_locally(self, argument: str, step: Callable[[Any], Tensor]) -> None:
        """Have a tensor made plain by ``step`` before the plan runs, which then has to see to its gradient's layout."""
        self.then_do(argument, step)
        self.tensors.pop(argument, None)


def autocast_dtype(
    function: Callable[..., Tensor],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
) -> torch.dtype:
    """The dtype of the operands that autocast, which is on, has ``function`` compute with: that of its result.

    Which functions it casts differs by device, version, and even by whether a dim has length 1, as it may on one rank
    only. So torch is asked, with operands of these shapes; those of the smallest of the same kind will do.
    """
    with torch.no_grad(), untraced():
        ones = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return function(*ones).dtype


def common_mesh(name: str, operands: Sequence[Tensor]) -> DeviceMesh | None:
    """The mesh of the ShardTensors or DTensors among some operands; None if there are none."""
    distributed = [t for t in operands if isinstance(t, DTensor)]
    if distributed and any(t.device_mesh != distributed[0].device_mesh for t in distributed):
        raise different_meshes(name, distributed)
    return distributed[0].device_mesh if distributed else None


def prepared_spec(t: Any, mesh: DeviceMesh, partial: bool) -> Any:
    """The spec that a tensor has when the plan runs, before the plan redistributes it."""
    if t is None:
        return None
    if isinstance(t, DTensor):
        return spec_of(t) if partial else spec_of(t).for_gradient()
    return replicated_spec(mesh, meta_of(t))


def _prepared(t: Any, mesh: DeviceMesh, partial: bool) -> Any:
    """A tensor of a list with the spec that :func:`prepared_spec` gives."""
    if t is None:
        return None
    t = promote(t, mesh)
    return t if partial else redistribute_to(t, t._spec.for_gradient())
