"""``flex_attention``: attention whose scores and mask are functions of indices, which are those of the global tensors.

torch's function, eager or compiled, calls one operator with these functions, the tensors that they have captured, and
the blocks of the mask. Here each rank calls that operator on its part, with functions that first add to the indices
where its part begins. Captured tensors are read at indices that the functions choose, so every rank needs all of them.
Where the sequence is sharded, queries stay, and all keys and values are fetched: which of them a rank's queries see is
in the values of the mask's tensors, which graphs do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import wrapt
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn.attention.flex_attention import BlockMask

from ..._compat import TensorMeta, flex_attention_operator
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, from_part, to_part
from ...errors import refuse
from ...layout.dtypes import wide_dtype
from ...layout.intervals import chunk_sizes
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride, dense_stride
from ...operators.declaration import Arguments, Composed, Plan, planned
from ..common.alignment import is_sharded, refuse_gathering
from .layout import layout_of
from .online_softmax import AttentionWork, work_of
from .sdpa import gradient_spec

_BLOCKS = slice(2, 6)  # of a block mask as a tuple: how many blocks are seen in part, and which; the same of full ones
_OF_COLUMNS = 6  # the first of the same by columns of blocks; None where no gradient is wanted


@dataclass(slots=True)
class FlexCall:
    """What the operator is called with besides queries, keys and values. It has no hash, so plans for it are not kept.

    Attributes:
        score_mod: function of a score, its batch, head, query and key, and what it has captured.
        mask: a block mask as a tuple, last the height and width of a block, and the function that says what is seen.
        scale, options: of the scores; of the kernel.
        captured: by the two functions: tensors and numbers.
    """

    score_mod: Callable[..., Tensor]
    mask: tuple[Any, ...]
    scale: float
    options: dict[str, Any]
    captured: tuple[tuple[Any, ...], tuple[Any, ...]]

    def tensors(self) -> list[Tensor]:
        """All that a rank computes with."""
        values = *self.mask[_BLOCKS], *self.captured[0], *self.captured[1]
        return [value for value in values if isinstance(value, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> FlexCall:
        """The call with others in place of :meth:`tensors`."""
        others = iter(tensors)

        def replaced(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(next(others) if isinstance(value, Tensor) else value for value in values)

        mask = *self.mask[: _BLOCKS.start], *replaced(self.mask[_BLOCKS]), *self.mask[_BLOCKS.stop :]
        return replace(self, mask=mask, captured=(replaced(self.captured[0]), replaced(self.captured[1])))

    def of_part(self, query: ShardTensorSpec) -> tuple[FlexCall, int]:
        """The call for this rank's queries, and how many rows come before these.

        A block mask lists for each block of rows the blocks of keys that are not hidden entirely. A rank takes the
        lists of the blocks in which its rows lie. The first block may begin with rows of another rank. These rows are
        computed, with this rank's first query in place of theirs, and dropped.
        """
        (batch, _), (head, _), (row, stop) = (query.own_interval(d) for d in (-4, -3, -2))
        height, width, mask_mod = int(self.mask[-3]), int(self.mask[-2]), self.mask[-1]
        first, last = row // height, -(-stop // height)
        before = row % height if last > first + 1 else 0  # in a single block all rows see the same list
        starts, counts = (batch, head, row - before), self.mask[_BLOCKS.start]
        own = [query.own_interval(d) for d in range(-1 - counts.ndim, -2)]
        index = [slice(*interval) if n > 1 else slice(None) for interval, n in zip(own, counts.shape)]
        index.append(slice(first, last))
        make: Callable[..., BlockMask] = BlockMask.from_kv_blocks
        mask = make(
            *(None if t is None else t[tuple(index)] for t in self.mask[_BLOCKS]),
            BLOCK_SIZE=(height, width),
            mask_mod=_from(mask_mod, 0, starts),
            seq_lengths=(stop - row + before, self.mask[1]),
            compute_q_blocks=self.mask[_OF_COLUMNS] is not None,
        )
        return replace(self, score_mod=_from(self.score_mod, 1, starts), mask=mask.as_tuple()), before

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The result, the log-sum-exp of each row, and its largest score, of local tensors."""
        return flex_attention_operator(q, k, v, self.score_mod, self.mask, self.scale, self.options, *self.captured)


def _from(function: Callable[..., Tensor], at: int, starts: Sequence[int]) -> Callable[..., Tensor]:
    """The function of indices that count from ``starts``; they are its arguments from number ``at`` on."""

    def shifted(*given: Any) -> Tensor:
        indices = [i + start if start else i for i, start in zip(given[at:], starts)]
        return function(*given[:at], *indices, *given[at + len(starts) :])

    return shifted


@register(flex_attention_operator)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, ...]:
    """torch's operator on ShardTensors; plain operands count as replicated."""
    captured = tuple(score_mod_other_buffers), tuple(mask_mod_other_buffers)
    call = FlexCall(score_mod, block_mask, scale, kernel_options, captured)
    if key.shape[0] != query.shape[0]:
        key, value = (t.expand(query.shape[0], *t.shape[1:]) for t in (key, value))
    result: tuple[Tensor, ...] = _planned(query, key, value, call.tensors(), call)
    return result


@planned("flex_attention", tensors="query key value others")
def _planned(
    call: Arguments,
    query: ShardTensorSpec,
    key: ShardTensorSpec,
    value: ShardTensorSpec,
    others: Sequence[ShardTensorSpec],
    flex: FlexCall,
) -> Plan:
    if not key.shape[-2]:
        raise call.refuse("there are no keys", "leave the call out")
    if any(spec.sharded_dims() for spec in others):
        reason = (
            "a tensor of its mask, or one that score_mod or mask_mod has captured, is sharded: any index may be read"
        )
        raise call.refuse(reason, "redistribute it to Replicate() before the call")
    for name, spec in list(call.tensors.items()):
        call.cast(call.autocast() if spec.tensor_meta.dtype != torch.float64 else None, name)
    query, key, value = call.tensors.values()
    layout = layout_of(query, key, value, None, None, "fetch")
    m = layout.mesh_dim
    if m is not None and layout.fetched is None:  # queries that all ranks have: each computes some
        rows = AxisLayout(Shard(len(query.shape) - 2), chunk_sizes(query.shape[-2], query.mesh.size(m)))
        layout = layout_of(query.with_axes({m: rows}), key, value, None, None, "fetch")
    targets = layout.targets[:3]
    refuse_gathering(call.name, list(call.tensors.values()), targets)
    call.tensors.update(zip(call.tensors, targets))
    return Composed(partial(_attend, flex, work_of(layout, None, flex.scale)))


def _attend(
    flex: FlexCall,
    work: AttentionWork,
    query: ShardTensor,
    key: ShardTensor,
    value: ShardTensor,
    others: Sequence[ShardTensor],
) -> tuple[Tensor, ...]:
    """Result, log-sum-exp and largest scores, sharded as the queries."""
    given = [query, key, value, *others]
    q, k, v, *tensors = (to_part(t, gradient_spec(t._spec, work.layout) or t._spec) for t in given)
    k, v = work.split(work.held(k, v))
    spec, out = query._spec, (*query.shape[:-1], value.shape[-1])
    if 0 in q.shape[:-1]:
        results = _of_none(q, v, [k, v, *tensors])
    else:
        call, before = flex.with_tensors(tensors), 0
        if spec.sharded_dims():
            call, before = call.of_part(spec)
        if before:
            q = torch.cat([q[..., :1, :].expand(-1, -1, before, -1), q], -2)
        results = [t[:, :, before:] for t in call(q, k, v)]
    shapes = [out, out[:-1], out[:-1]]
    strides = [dense_stride(out, spec.tensor_meta.stride), *map(contiguous_stride, shapes[1:])]
    metas = [TensorMeta(torch.Size(n), stride, t.dtype) for n, stride, t in zip(shapes, strides, results, strict=True)]
    return tuple(from_part(t, spec.with_layout(work.layout.out, meta)) for t, meta in zip(results, metas, strict=True))


def _of_none(q: Tensor, v: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """The results of no queries. They depend on all tensors: what others fetched of this rank has gradients."""
    nothing = sum((t.flatten()[:0].sum() for t in (q, *others) if t.is_floating_point()), start=q.new_zeros(()))
    rows = q.new_zeros(q.shape[:-1], dtype=wide_dtype(q.dtype))
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    return [t + nothing.to(t.dtype) for t in (out, rows, rows)]


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """What ``varlen_attn`` calls: refused on shards, as its kernel knows no parts of documents."""
    if not is_sharded(query, key, value):
        return DECLINED
    reason = "its kernel takes whole documents, and tokens of one may be on several ranks"
    remedy = "call flex_attention with a block mask of documents, as docs/attention.md shows"
    raise refuse("varlen_attn", [query, key, value], reason, remedy)


# The module defines the operator, and imports the compiler: it is left to the program.
wrapt.register_post_import_hook(
    lambda _: register(torch.ops.torch_attn._varlen_attn)(_varlen_attention), "torch.nn.attention.varlen"
)
