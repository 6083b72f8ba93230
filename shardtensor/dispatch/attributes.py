"""Attributes and methods of a ShardTensor that are about the tensor itself: its data, whether it requires grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._compat import DisableTorchFunction, counting_writes, is_traced, tracing
from ..errors import refuse
from .copied_views import count_writes, share_writes
from .index_findings import INDICES
from .registry import DECLINED, Refusal, register
from .size_errors import local_size_error
from .tensor import ShardTensor, mark_leaf, promote, redistribute_to, wrap

_DATA: Any = Tensor.data  # the descriptor


@register(Tensor.requires_grad_)
def _requires_grad_(self: ShardTensor, requires_grad: bool = True) -> ShardTensor:
    return mark_leaf(self, requires_grad) if isinstance(self, ShardTensor) else DECLINED


register(Tensor.share_memory_)(
    Refusal("share_memory_", __name__, "a ShardTensor has no storage of its own", "share its to_local()")
)


@register(_DATA.__get__)
def _data(self: Tensor, *_: object) -> Tensor:
    """A tensor with its own version, as in torch. Writes to it still update views that are copies."""
    if type(self) is not ShardTensor:
        return DECLINED
    if self.dtype in INDICES or self.is_inference():  # what is found about indices counts for one version of them
        return self.detach()
    with DisableTorchFunction():
        data = self.data
    share_writes(self, data)
    count_writes()
    return data


@register(torch.detach, Tensor.detach)
def _detach_in_program(self: Tensor) -> Tensor:
    if type(self) is not ShardTensor or self.is_inference() or is_traced(self._local_tensor):
        return DECLINED
    with DisableTorchFunction():
        detached = self.detach()
    share_writes(self, detached)
    return detached


@register(_DATA.__set__)
def _set_data(self: ShardTensor, value: Tensor) -> None:
    """``x.data = value``: x gets the value, in its own layout, and where that is the value's too, its memory."""
    if value.shape != self.shape:
        reason = f"a tensor of shape {tuple(self.shape)} is assigned data of shape {tuple(value.shape)}"
        refused = refuse("data", [self, value], reason, "make a new tensor, whose shards have their own sizes")
        raise local_size_error("data", [self, value], reason) or refused
    value = promote(value.detach(), self.device_mesh)
    spec = value._spec.with_layout(self._spec.layout)
    with torch.no_grad():
        local = redistribute_to(value, spec).to_local()
    if value.dtype != self.dtype:
        with DisableTorchFunction():
            _DATA.__set__(self, wrap(local, spec))
    self._local_tensor, self._spec = local, spec
    self._copied, self._viewed, self._found = (), None, None


@register(Tensor._is_view)
def _is_view(self: ShardTensor) -> bool:
    """torch.compile would build views anew, and cannot where one is a copy or has dims of length 1."""
    return False if tracing() else DECLINED


@register(torch.ops.aten.detach.default)
def _detach(self: Tensor) -> Tensor:
    """The most frequent view: autograd makes it of results that it keeps."""
    if type(self) is not ShardTensor or self._viewed is not None or self._open is not None or self.dtype in INDICES:
        return DECLINED
    return wrap(_detached(self._local_tensor), self._spec)


_detached = counting_writes(Tensor.detach)
