"""``flex_attention``: attention whose scores and mask are functions of indices, which are those of the global tensors.

torch's function, eager or compiled, calls one operator with these functions, the tensors that they have captured, and
the blocks of the mask. Here each rank calls that operator on its part, with functions that first add to the indices
where its part begins. Captured tensors are read at indices that the functions choose, so every rank needs all of them.
Where the sequence is sharded, queries stay, and the keys and values are fetched that the mask names for them, see
named_keys.py. Which these are is in the values of the mask's tensors, which graphs do not know: there, and without a
mask, all are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import wrapt
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn.attention.flex_attention import BlockMask, create_mask

from ..._compat import (
    AutogradFunction,
    TensorMeta,
    flex_attention_backward_operator,
    flex_attention_gradient,
    flex_attention_operator,
)
from ...communication.tracing import materialized
from ...dispatch.gradients import not_twice
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, from_part, to_part
from ...errors import refuse
from ...layout.dtypes import wide_dtype
from ...layout.intervals import Interval, chunk_sizes, length
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride, dense_stride
from ...operators.autocast import without_autocast
from ...operators.declaration import Arguments, Composed, Plan, planned
from ..common.alignment import cast, is_sharded, refuse_gathering
from .layout import layout_of
from .named_keys import Lists, NamedKeys, named_keys
from .online_softmax import AttentionWork, work_of
from .sdpa import gradient_spec

_BLOCKS = slice(2, 6)  # of a block mask as a tuple: how many blocks are seen in part, and which; the same of full ones
_AT_A_TIME = 1 << 22  # numbers of a mask, to take little memory
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
        """All that a rank computes with, first what ``score_mod`` has captured."""
        values = *self.captured[0], *self.mask[_BLOCKS], *self.captured[1]
        return [value for value in values if isinstance(value, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> FlexCall:
        """The call with others in place of :meth:`tensors`."""
        others = iter(tensors)

        def replaced(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(next(others) if isinstance(value, Tensor) else value for value in values)

        of_scores, of_blocks = replaced(self.captured[0]), replaced(self.mask[_BLOCKS])
        mask = *self.mask[: _BLOCKS.start], *of_blocks, *self.mask[_BLOCKS.stop :]
        return replace(self, mask=mask, captured=(of_scores, replaced(self.captured[1])))

    def lists(self) -> Lists:
        """How many blocks each block of rows sees in part, and which; the same of full ones."""
        counts, indices, *full = (getattr(t, "_local_tensor", t) for t in self.mask[_BLOCKS])
        return counts, indices, full[0], full[1]

    def shown(self, query: ShardTensorSpec, n: int) -> Tensor:
        """Which of ``n`` keys this rank's queries see, as the mask's function says: ``(batch, heads, keys)``."""
        mask_mod, captured = self.mask[-1], [getattr(t, "_local_tensor", t) for t in self.captured[1]]
        (batch, _), (head, _), (row, stop) = (query.own_interval(d) for d in (-4, -3, -2))
        batches, heads, *_ = query.own_shape
        height = max(1, _AT_A_TIME // (batches * heads * n))
        shown = torch.zeros((batches, heads, n), dtype=torch.bool, device=self.lists()[0].device)
        for first in range(row, stop, height):

            def seen(b: Any, h: Any, i: Any, j: Any, first: int = first) -> Tensor:
                return _from(mask_mod, 0, (batch, head, first))(b, h, i, j, *captured)

            shown |= create_mask(seen, batches, heads, min(stop - first, height), n, shown.device).any(-2)
        return shown

    def of_part(self, query: ShardTensorSpec, keys: Interval | None = None) -> tuple[FlexCall, int]:
        """The call for this rank's queries and these keys (None: all), and how many rows come before the queries.

        A block mask lists for each block of rows the blocks of keys that are not hidden entirely. A rank takes the
        lists of the blocks in which its rows lie. The first block may begin with rows of another rank. These rows are
        computed, with this rank's first query in place of theirs, and dropped.
        """
        (batch, _), (head, _), (row, stop) = (query.own_interval(d) for d in (-4, -3, -2))
        height, width, mask_mod = int(self.mask[-3]), int(self.mask[-2]), self.mask[-1]
        first, last = row // height, -(-stop // height)
        before = row % height if last > first + 1 else 0  # in a single block all rows see the same list
        first_key, n = (0, self.mask[1]) if keys is None else (keys[0], length(keys))
        starts, counts = (batch, head, row - before, first_key), self.mask[_BLOCKS.start]
        leads = [query.own_interval(d) for d in range(-1 - counts.ndim, -2)]
        index = [slice(*interval) if n > 1 else slice(None) for interval, n in zip(leads, counts.shape)]
        index.append(slice(first, last))
        own = [None if t is None else t[tuple(index)] for t in self.mask[_BLOCKS]]
        if keys is not None:
            blocks = -(-n // width)
            own[1::2] = [None if t is None else t[..., :blocks] - first_key // width for t in own[1::2]]
        make: Callable[..., BlockMask] = BlockMask.from_kv_blocks
        mask = make(
            *own,
            BLOCK_SIZE=(height, width),
            mask_mod=_from(mask_mod, 0, starts),
            seq_lengths=(stop - row + before, n),
            compute_q_blocks=self.mask[_OF_COLUMNS] is not None,
        )
        return replace(self, score_mod=_from(self.score_mod, 1, starts), mask=mask.as_tuple()), before

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The result, the log-sum-exp of each row, and its largest score, of local tensors.

        In graphs for CPUs, torch's kernel reads a view from where its base begins, or cannot be made of it: no view is
        passed there.
        """
        q, k, v, *tensors = materialized([q, k, v, *self.tensors()])
        call = self.with_tensors(tensors)
        return flex_attention_operator(q, k, v, call.score_mod, call.mask, call.scale, call.options, *call.captured)

    def gradient(self, q: Tensor) -> Any:
        """What :meth:`backward` differentiates the scores of these queries by.

        Raises:
            RuntimeError: the mask has no lists for the gradient, in torch's words.
        """
        if self.mask[_OF_COLUMNS + 1] is None:
            raise RuntimeError(
                "BlockMask q_indices is None. Backward pass requires q_indices to be computed. Please create the "
                "BlockMask with compute_q_blocks=True"
            )
        return flex_attention_gradient(self.score_mod, q, self.captured[0])

    def backward(self, of_scores: Any, *tensors: Tensor | None) -> list[Any]:
        """Gradients of q, k, v, and of the tensors that ``score_mod`` has captured.

        Args:
            of_scores: what :meth:`gradient` has returned.
            tensors: q, k, v, the result, the log-sum-exp, and the gradients of these two.
        """
        functions, others = (self.score_mod, of_scores), (self.mask, self.scale, self.options)
        operator: Callable[..., Any] = flex_attention_backward_operator
        *grads, of_captured = operator(*tensors, *functions, *others, *self.captured)
        return [*grads, *(g for g, t in zip(of_captured, self.captured[0], strict=True) if isinstance(t, Tensor))]


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
    spec, out = query._spec, (*query.shape[:-1], value.shape[-1])
    given = [query, key, value, *others]
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    m, keys = work.layout.mesh_dim, None
    if work.layout.fetched is not None and m is not None:  # on all ranks alike
        block = int(flex.mask[-3]), int(flex.mask[-2])
        shown = partial(flex.shown, spec, key.shape[-2])
        keys = named_keys("flex_attention", flex.lists(), block, spec, key._spec, m, shown)
    q, k, v, *tensors = (to_part(t, gradient_spec(t._spec, work.layout) or t._spec) for t in given)
    call, before = flex.with_tensors(tensors), 0
    interval = None if keys is None else keys.interval
    none = 0 in q.shape[:-1] or (interval is not None and not length(interval))
    if spec.sharded_dims() and not none:
        call, before = call.of_part(spec, interval)
    part = _Part(work, keys, call, before, none, call.gradient(q) if differentiates else None)
    results = _Attended.apply(part, q, k, v, *call.tensors())
    shapes = [out, out[:-1], out[:-1]]
    strides = [dense_stride(out, spec.tensor_meta.stride), *map(contiguous_stride, shapes[1:])]
    metas = [TensorMeta(torch.Size(n), stride, t.dtype) for n, stride, t in zip(shapes, strides, results, strict=True)]
    return tuple(from_part(t, spec.with_layout(work.layout.out, meta)) for t, meta in zip(results, metas, strict=True))


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of a call.

    Attributes:
        work: which keys come from where.
        keys: those that are fetched as the mask names them; None where all are, or none.
        call: for this rank's queries and keys.
        before: how many rows come before the queries.
        is_empty: whether there are no queries here, or no keys that these see.
        of_scores: what the scores are differentiated by; None without gradients.
    """

    work: AttentionWork
    keys: NamedKeys | None
    call: FlexCall
    before: int
    is_empty: bool
    of_scores: Any

    def held(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """The keys and values to compute with. Collective where they are fetched."""
        if self.keys is None:
            return self.work.split(self.work.held(k, v))
        return self.keys.fetch(torch.cat((k, v), -1)).split_with_sizes([k.shape[-1], v.shape[-1]], -1)

    def returned(self, grads: Sequence[Tensor], own: int) -> Sequence[Tensor]:
        """The gradients of this rank's ``own`` keys and values, out of the ranks' gradients of what they held."""
        if self.keys is None and self.work.fetch is None:
            return grads
        both = torch.cat(list(grads), -1)
        sums = self.work.returned([both])[0] if self.keys is None else self.keys.give_back(both, own)
        return sums.split_with_sizes([g.shape[-1] for g in grads], -1)

    def gradients(
        self, tensors: Sequence[Tensor], q: Tensor, held: Sequence[Tensor], results: Any, of_results: Any
    ) -> list[Any]:
        """Gradients of queries, of what is held, and of the tensors that ``score_mod`` has captured."""
        call, before = self.call.with_tensors(tensors), self.before
        if self.is_empty:
            return [torch.zeros_like(t) for t in (q, *held, *call.captured[0]) if isinstance(t, Tensor)]
        of_out, of_sums = of_results
        of_out = None if of_out is None else F.pad(of_out, (0, 0, before, 0))
        of_sums = None if of_sums is None else F.pad(of_sums, (before, 0))
        of_q, *found = call.backward(self.of_scores, self.rows(q), *held, *results, of_out, of_sums)
        return [of_q[:, :, before:], *found]

    def rows(self, q: Tensor) -> Tensor:
        """Queries, and before them as many times the first one as there are rows before."""
        return torch.cat([q[..., :1, :].expand(-1, -1, self.before, -1), q], -2) if self.before else q


class _Attended(AutogradFunction):
    """Local queries against the keys that they need: result, log-sum-exp and largest scores.

    Between the passes a rank keeps its shard, and of what it has fetched what other attention keeps, too.
    """

    apply: ClassVar[Callable[..., tuple[Tensor, ...]]]

    @staticmethod
    def forward(ctx: Any, part: _Part, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.part, ctx.others = part, len(tensors)
        with without_autocast(q.device.type):
            held = part.held(k, v)
            if part.is_empty:
                rows = q.new_full(q.shape[:-1], -math.inf, dtype=wide_dtype(q.dtype))
                results: Sequence[Tensor] = q.new_zeros((*q.shape[:-1], v.shape[-1])), rows, rows.clone()
            else:
                results = part.call.with_tensors(tensors)(part.rows(q), *held)
        kept = held if part.work.keeps else ()
        ctx.save_for_backward(q, k, v, *results[:2], *tensors, *kept)
        results = [t[:, :, part.before :] if part.before else t for t in results]
        ctx.mark_non_differentiable(results[2])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, of_out: Tensor | None, of_sums: Tensor | None, _: Any) -> Any:
        q, k, v, out, sums, *saved = ctx.saved_tensors
        part, needed, tensors = ctx.part, ctx.needs_input_grad[1:], saved[: ctx.others]
        with torch.no_grad(), without_autocast(q.device.type):
            held = saved[ctx.others :] or part.held(k, v)
            of_q, of_k, of_v, *found = part.gradients(tensors, q, held, (out, sums), (of_out, of_sums))
            if needed[1] or needed[2]:
                of_k, of_v = part.returned((of_k, of_v), k.shape[-2])
        given = q, k, v, *tensors
        grads = [of_q, of_k, of_v, *found, *[None] * (len(tensors) - len(found))]
        grads = [cast(g, t.dtype) if n else None for g, t, n in zip(grads, given, needed, strict=True)]
        return None, *(
            not_twice("flex_attention", grads, (of_out, of_sums, *given)) if torch.is_grad_enabled() else grads
        )


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
