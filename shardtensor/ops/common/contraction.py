"""Operators whose dims have names, as in einsum: their plans, by the layouts that arrangement.py chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...dispatch.tensor import ShardTensor, from_part, redistribute_to, to_part
from ...layout.spec import ShardTensorSpec
from ...operators.arguments import autocast_dtype, common_mesh
from ...operators.declaration import Arguments, LocalPlan
from .alignment import as_operand, wide_dtype
from .arrangement import Arrangement, Form, Label, Labels, arrange
from .part_by_part import Tour, part_by_part

__all__ = [
    "Arrangement",
    "ContractionPlan",
    "Form",
    "Label",
    "Tour",
    "arrange",
    "batch_labels",
    "contract",
    "part_by_part",
    "plan_contraction",
]


class ContractionPlan(LocalPlan):
    """``function`` of local operands that have an arrangement's targets.

    Where half precision is summed over ranks, in the result or in the gradient of an operand, it runs in float32: see
    [Note: rounded once] in redistribute.py.
    """

    outputs: ShardTensorSpec

    def __init__(self, how: Arrangement, function: Callable[..., Tensor]) -> None:
        shape = [how.lengths.get(label, 1) for label in how.form.out]
        gradients = [how.gradient(i) for i in range(len(how.targets))]
        self.targets = how.targets
        self.cast_to = _dtype_of_autocast(how, function)
        super().__init__(how.local_work(function), how.out(shape, how.targets[0].tensor_meta.dtype), gradients)

    def run(self, tensors: Sequence[Any]) -> ShardTensor:
        # Some operators have arguments behind the operands that may be tensors, but are none in this call.
        operands = tensors[: len(self.targets)]
        dtype = self.cast_to or operands[0].dtype
        computed = torch.float32 if self._rounds_sums(dtype, operands) else self.cast_to
        if computed is None:
            result = self.function(*self.local_tensors(operands))
            return from_part(result, self.outputs.with_dtype(result.dtype))
        parts = [to_part(t, s or t._spec, computed) for t, s in zip(operands, self.gradients or (), strict=True)]
        with torch.autocast(parts[0].device.type, enabled=False):
            result = self.function(*parts)
        return from_part(result, self.outputs.with_dtype(dtype))

    def _rounds_sums(self, dtype: torch.dtype, operands: Sequence[ShardTensor]) -> bool:
        """Whether a result of this dtype, or a gradient, is rounded, and added up over ranks before that."""
        if wide_dtype(dtype) == dtype:
            return False
        graded = zip(operands, self.gradients or (), strict=True)
        summed = any(s is not None and s.partial_mesh_dims() and t.requires_grad for t, s in graded)
        return summed or bool(self.outputs.partial_mesh_dims())

    def run_on(self, tensors: Sequence[ShardTensor]) -> ShardTensor:
        """:meth:`run` for operands that do not have their targets yet."""
        return self.run(list(map(redistribute_to, tensors, self.targets)))


def _dtype_of_autocast(how: Arrangement, function: Callable[..., Tensor]) -> torch.dtype | None:
    """The dtype to which autocast casts the operands; None where it is off."""
    device = how.targets[0].mesh.device_type
    if not torch.is_autocast_enabled(device):
        return None
    whole = how.form.whole
    shapes = [
        [n if label in whole else min(n, 2) for n, label in zip(spec.shape, term, strict=True)]
        for spec, term in zip(how.targets, how.form.terms, strict=True)
    ]
    return autocast_dtype(function, shapes, [spec.tensor_meta.dtype for spec in how.targets], device)


def plan_contraction(
    call: Arguments, name: str, function: Callable[..., Tensor], form: Form, *operands: str
) -> ContractionPlan:
    """The plan of an operator of this form, whose tensors are ``operands``.

    The caller has had torch check their shapes and dtypes.
    """
    how = arrange(name, form, tuple(call.tensors[operand] for operand in operands))
    for operand, target in zip(operands, how.targets, strict=True):
        call.redistribute(operand, target)
    return ContractionPlan(how, function)


def contract(
    name: str, function: Callable[..., Tensor], form: Form, *operands: Tensor, mesh: DeviceMesh | None = None
) -> ShardTensor:
    """``function`` of the operands, ShardTensors and plain tensors, as a ShardTensor. Differentiable.

    The caller has had torch check the operands' shapes and dtypes, and at least one of them is a ShardTensor.
    """
    mesh = mesh or common_mesh(name, operands)
    assert mesh is not None
    tensors = [as_operand(t, mesh) for t in operands]
    how = arrange(name, form, tuple(t._spec for t in tensors))
    return ContractionPlan(how, function).run_on(tensors)


def batch_labels(*shapes: Sequence[int]) -> tuple[list[Labels], Labels]:
    """Labels of dims that are broadcast against each other, and of the result's.

    Example:
        >>> batch_labels((5, 1, 3), (2, 3))
        ([(-3, None, -1), (-2, -1)], (-3, -2, -1))
    """
    ndim = max(map(len, shapes))
    length = {d: max((s[d] for s in shapes if len(s) >= -d), key=lambda n: (n != 1, n)) for d in range(-ndim, 0)}
    terms: list[Labels] = [tuple(d if s[d] == length[d] else None for d in range(-len(s), 0)) for s in shapes]
    return terms, tuple(range(-ndim, 0))
