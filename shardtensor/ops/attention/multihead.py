"""``nn.MultiheadAttention`` and what is made of it: the transformer layers.

torch's function merges batch, heads and sequence into one dim and back, which only some shardings survive. Here they
stay apart: (batch, heads, sequence, features). These steps serve whatever torch's function takes. Usual self-attention
is one plan on local tensors, with a gradient of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from ..._compat import TensorMeta, unflatten
from ...dispatch.registry import register
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.declaration import Arguments, Composed, Plan, planned
from ..common.alignment import cast
from ..linalg.matmul import gradients_of_weights
from .kernels import DTYPES
from .sdpa import AttentionOptions, AttentionPlan, plan_attention

_PARAMETERS = (
    "in_proj_weight in_proj_bias bias_k bias_v out_proj_weight out_proj_bias key_padding_mask attn_mask "
    "q_proj_weight k_proj_weight v_proj_weight static_k static_v"
)
_TENSORS = ("query", "key", "value", *_PARAMETERS.split())  # in the order of torch's arguments
# What a usual call has not; its mask says no more than ``is_causal``.
_UNUSUAL = ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v")
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@register(F.multi_head_attention_forward)
def multi_head_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """torch's function on ShardTensors; which of its tensors are the same one is not in a plan's key."""
    other_key, other_value = None if key is query else key, None if value is key else value
    result = _attention(query, other_key, other_value, *args, **kwargs)
    return (result, None) if isinstance(result, Tensor) else result


def _plan(call: Arguments, *args: Any) -> Plan:
    """The plan for torch's arguments. ``key`` None: the query; ``value`` None: the key."""
    given = dict(zip(_SIGNATURE.parameters, args, strict=True))
    query: ShardTensorSpec = given["query"]
    key = given["key"] or query
    value = given["value"] or key
    call.returned(F.multi_head_attention_forward, **given | {"key": key, "value": value, "dropout_p": 0.0})
    options = {name: a for name, a in given.items() if name not in _TENSORS}
    options["dropout_p"] = given["dropout_p"] if given["training"] else 0.0
    attention = None
    if not any(isinstance(given[name], ShardTensorSpec) for name in _TENSORS[3:]) and _is_usual(given):
        attention = _local_attention(call, query, options)
    if attention is None:
        return Composed(partial(_of_tensors, options, None))
    shape = (*query.shape[:2], given["out_proj_weight"].shape[0])
    dtype = call.autocast() or query.tensor_meta.dtype
    out = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
    return MultiheadPlan(attention, options, given, query.replace(meta=out))


def _is_usual(given: Mapping[str, Any]) -> bool:
    """Self-attention of packed weights; none are returned, and nothing but ``is_causal`` hides or adds keys."""
    masked = given["attn_mask"] is not None and not given["is_causal"]
    unusual = masked or given["need_weights"] or given["add_zero_attn"] or len(given["query"].shape) != 3
    unusual = unusual or given["use_separate_proj_weight"]
    return not unusual and all(given[name] is None for name in ("key", "value", *_UNUSUAL))


_plan.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[inspect.Parameter("call", inspect.Parameter.POSITIONAL_OR_KEYWORD), *_SIGNATURE.parameters.values()]
)
_attention = planned(
    "multi_head_attention_forward",
    tensors="query key value",
    partial="query key value",
    parameters=_PARAMETERS,
    sharded=_PARAMETERS,
)(_plan)


def _local_attention(call: Arguments, query: ShardTensorSpec, options: Mapping[str, Any]) -> AttentionPlan | None:
    """The plan of the attention by heads, if it is one step and the projections are local.

    So these are where the query is sharded along batch or sequence; their weights' gradients are sums.
    """
    dtype, held = call.autocast(), query.tensor_meta.dtype
    if 2 in query.sharded_dims() or query.partial_mesh_dims() or held not in DTYPES:
        return None
    if dtype is not None and held == torch.float64:
        return None
    q = _spec_by_heads(query, query.shape[2], options["num_heads"], dtype)
    causal = 0 if options["is_causal"] else None
    plan = plan_attention(q, q, q, None, causal, AttentionOptions(options["dropout_p"], None, False))
    layout = plan.work.layout
    lies = all(q.lies_like(target) for target in layout.targets[:3])
    return plan if plan.is_one_step() and lies and set(q.sharded_dims().values()) == set(layout.split) else None


def _spec_by_heads(spec: ShardTensorSpec, features: int, heads: int, dtype: torch.dtype | None) -> ShardTensorSpec:
    """(sequence, batch, features) once it is projected and is (batch, heads, sequence, features of a head)."""
    dims = {0: 2, 1: 0}
    axes = [AxisLayout(Shard(dims[p.dim]), n) if isinstance(p, Shard) else AxisLayout(p) for p, n in spec.layout]
    shape = (spec.shape[1], heads, spec.shape[0], features // heads)
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype or spec.tensor_meta.dtype)
    return spec.with_layout(axes, meta)


class MultiheadPlan(Plan):
    """Self-attention: projections, attention by heads and the output's projection, all on local tensors.

    Args:
        attention: of the projected tensors, ``(batch, heads, sequence, features)``.
        options: torch's arguments that are no tensors.
        given: all of them.
        outputs: the result's spec.
    """

    saves = (0, _TENSORS.index("in_proj_weight"), _TENSORS.index("out_proj_weight"))
    twice = True
    outputs: ShardTensorSpec

    def __init__(
        self, attention: AttentionPlan, options: Mapping[str, Any], given: Mapping[str, Any], outputs: ShardTensorSpec
    ) -> None:
        self.attention, self.options, self.outputs = attention, options, outputs
        self.biases = given["in_proj_bias"], given["out_proj_bias"]
        self.packed = 3, options["num_heads"], outputs.shape[-1] // options["num_heads"]

    def wide_for_free(self, device: str) -> bool:
        """As of linear layers."""
        return getattr(torch, device, None) is torch.cuda

    def again(self, *tensors: Any) -> Tensor:
        return _of_tensors(self.options, self.attention.attend, *tensors)[0]

    def forward(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``(sequence, batch, features)`` of this rank's queries."""
        query, _, _, in_weight, in_bias, _, _, out_weight, out_bias, *_ = tensors
        projected = F.linear(query, in_weight, in_bias).view(*query.shape[:2], *self.packed)
        q, k, v = projected.permute(2, 1, 3, 0, 4).unbind()
        attended, kept = self.attention.forward(q, k, v, None)
        return F.linear(_merged(attended), out_weight, out_bias), (q, k, v, *kept)

    def backward(self, needed: Sequence[bool], grads: Sequence[Tensor | None], *saved: Any) -> Sequence[Tensor | None]:
        """The sum of all weights' gradients travels while the query's is computed."""
        found: list[Tensor | None] = [None] * len(needed)
        if grads[0] is None:
            return found
        query, in_weight, out_weight, q, k, v, *kept = saved
        grad, attended = grads[0].flatten(0, 1), kept[0]
        merged, (in_bias, out_bias) = _merged(attended).flatten(0, 1), self.biases
        found[7:9] = gradients_of_weights(needed[7:9], grad, merged, out_weight, out_bias, self.widens)
        of_attended = torch.mm(grad, cast(out_weight, grad.dtype)).view(*query.shape[:2], *q.shape[1::2])
        given = q, k, v, None, *kept
        of_each: Sequence[Any] = self.attention.backward(
            (True, True, True, False), [of_attended.permute(1, 2, 0, 3)], *given
        )
        packed = torch.stack([g.permute(2, 0, 1, 3) for g in of_each[:3]], 2).view(grad.shape[0], in_weight.shape[0])
        found[3:5] = gradients_of_weights(needed[3:5], packed, query.flatten(0, 1), in_weight, in_bias, self.widens)
        finish = None if self.total is None else self.total.start(found, overwrite=True)
        of_query = torch.mm(packed, cast(in_weight, packed.dtype)).view(query.shape) if needed[0] else None
        found = found if finish is None else finish()
        found[0] = None if of_query is None else cast(of_query, query.dtype)
        return found


# -- the steps, on ShardTensors or on local tensors -------------------------------------------------------------------


def _of_tensors(
    options: Mapping[str, Any], attend: Callable[..., Tensor] | None, *tensors: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The output and the weights, None if they are not asked for. torch has checked the arguments.

    Args:
        options: torch's arguments that are no tensors.
        attend: the attention of queries, keys and values by heads where nothing masks them; None: torch's.
        tensors: the others, in the order of ``_TENSORS``.
    """
    given: Mapping[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
    q, k, v = _project(given, options["use_separate_proj_weight"])
    padding = given["key_padding_mask"]
    batched = q.ndim == 3
    if not batched:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        padding = None if padding is None else padding.unsqueeze(0)
    heads, batch = options["num_heads"], q.shape[1]
    bias_k, bias_v, static_k, static_v = (given[name] for name in ("bias_k", "bias_v", "static_k", "static_v"))
    extra = 0
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.repeat(1, batch, 1)]), torch.cat([v, bias_v.repeat(1, batch, 1)])
        extra += 1
    q = _by_heads(q, heads)
    k = _by_heads(k, heads) if static_k is None else static_k.unflatten(0, (batch, heads))
    v = _by_heads(v, heads) if static_v is None else static_v.unflatten(0, (batch, heads))
    if options["add_zero_attn"]:
        zero = torch.zeros((batch, heads, 1, q.shape[-1]), dtype=k.dtype, device=k.device)
        k, v = torch.cat([k, zero], dim=2), torch.cat([v, zero], dim=2)
        extra += 1
    if attend is not None:
        attended, shares = attend(q, k, v), None
    elif options["is_causal"] and padding is None and not options["need_weights"]:
        attended, shares = _attend(options, True, q, k, v, None)  # is_causal says as much as the mask
    else:
        mask = _mask(given["attn_mask"], padding, batch, heads, extra, q.dtype)
        attended, shares = _attend(options, False, q, k, v, mask)
    out = F.linear(_merged(attended), given["out_proj_weight"], given["out_proj_bias"])
    if batched:
        return out, shares
    return out.squeeze(1), None if shares is None else shares.squeeze(0)


def _attend(
    options: Mapping[str, Any], is_causal: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The attended values, and the weights (of all heads, or their average) if they are asked for."""
    dropout_p = options["dropout_p"]
    if not options["need_weights"]:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal), None
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    # torch adds the mask in the product, whose dtype autocast decides.
    shares = torch.softmax(scores if mask is None else scores + mask.to(scores.dtype), dim=-1)
    shares = F.dropout(shares, dropout_p) if dropout_p > 0 else shares
    return shares @ v, shares.mean(dim=1) if options["average_attn_weights"] else shares


def _project(given: Mapping[str, Any], separate: bool) -> Sequence[Tensor]:
    """Queries, keys and values; in one product where they come from the same tensor."""
    query, key, value = given["query"], given["key"], given["value"]
    weight, bias = given["in_proj_weight"], given["in_proj_bias"]
    if key is None and value is None and not separate:
        return F.linear(query, weight, bias).chunk(3, dim=-1)
    if value is None and not separate:
        sizes = [query.shape[-1], 2 * query.shape[-1]]
        of_query, of_others = weight.split(sizes)
        query_bias, others_bias = (None, None) if bias is None else bias.split(sizes)
        return F.linear(query, of_query, query_bias), *F.linear(key, of_others, others_bias).chunk(2, dim=-1)
    key = query if key is None else key
    inputs = query, key, key if value is None else value
    weights = [given[f"{name}_proj_weight"] for name in "qkv"] if separate else weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(t, w, b) for t, w, b in zip(inputs, weights, biases, strict=True)]


def _by_heads(t: Tensor, heads: int) -> Tensor:
    """(sequence, batch, features) as (batch, heads, sequence, features of a head)."""
    return unflatten(t, -1, (heads, -1)).permute(1, 2, 0, 3)


def _merged(attended: Tensor) -> Tensor:
    """(batch, heads, sequence, features of a head) as (sequence, batch, features)."""
    return attended.permute(2, 0, 1, 3).flatten(2)


def _mask(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, extra: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to the scores; ``extra`` keys at the end are seen by everybody."""
    both = None
    if attn_mask is not None:
        both = attn_mask if attn_mask.ndim == 2 else unflatten(attn_mask, 0, (batch, heads))
        both = _additive(F.pad(both, (0, extra)) if extra else both, dtype)
    if padding is not None:
        padding = _additive(F.pad(padding, (0, extra)) if extra else padding, dtype)[:, None, None]
        both = padding if both is None else both + padding
    return both


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's modules mask out where a bool mask is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


@register(torch.ops.aten._nested_tensor_from_mask_left_aligned.default)
def _not_nested(tensor: Any, mask: Any) -> bool:
    """``nn.TransformerEncoder`` asks whether it may drop the padding. No: shards would become ragged."""
    return False
