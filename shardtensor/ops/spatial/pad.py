"""Padding and cropping: constant, reflect, replicate and circular, at any dims.

The rank at a global end holds the padding of that end: a cut ``c`` moves to ``c + left`` (within the new length), but
0 stays 0 and the other end stays the end. Ranks with empty shards at an end get none of it. What is padded is read from
whoever holds it: for circular padding the ranks at the other end, for reflection perhaps a neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import refuse
from ...geometry import Interval, cuts_of, intersect, intervals_of, length, sizes_of
from ...registry import register
from ...tensor import ShardTensor
from ..common.stencil import borrow_dims, dtype_of_result, finish, on_meta, per_dim, settled

__all__ = ["pad_sizes", "pad_sources"]

# -- geometry ---------------------------------------------------------------------------------------------


def pad_sizes(sizes: Sequence[int], left: int, right: int) -> tuple[int, ...]:
    """Shard sizes after padding (cropping, where negative) the two global ends.

    Example:
        >>> pad_sizes((5, 0, 3), 2, 1), pad_sizes((0, 5, 3), 2, 1), pad_sizes((2, 5, 3), -3, 0)
        ((7, 0, 4), (0, 7, 4), (0, 4, 3))
    """
    n = sum(sizes)
    new = n + left + right
    cuts = [0 if c == 0 else new if c == n else min(max(c + left, 0), new) for c in cuts_of(sizes)]
    # Of an empty dim every cut is both ends; its padding goes to the last rank.
    cuts[-1] = new
    return sizes_of(cuts)


def pad_sources(mode: str, n: int, left: int, right: int) -> tuple[Interval, Interval]:
    """Which interval of a dim of length ``n`` becomes the padding at its start and at its end (reflect: reversed).

    Negative ``left`` and ``right`` crop; what a circle closes over is what cropping leaves.

    Example:
        >>> pad_sources("circular", 7, 2, 1), pad_sources("reflect", 7, 2, 1), pad_sources("replicate", 7, 2, 1)
        (((5, 7), (0, 1)), ((1, 3), (5, 6)), ((0, 1), (6, 7)))
        >>> pad_sources("circular", 7, 2, -1)
        ((4, 6), (0, 0))
    """
    before, after = max(left, 0), max(right, 0)
    if mode == "circular":
        start, stop = max(-left, 0), n - max(-right, 0)
        return (stop - before, stop), (start, start + after)
    if mode == "reflect":
        return (1, 1 + before), (n - 1 - after, n - 1)
    return (0, min(before, 1)), (n - min(after, 1), n)


# -- operators --------------------------------------------------------------------------------------------


def _pad(input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """Handler of ``F.pad``."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    meta = F.pad(on_meta(input), pad, mode=mode, value=value)
    pads = {input.ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    x = settled(input, linear=mode != "constant" or not value)
    spec = x._spec
    sharded = {d: spec.sharded_dims()[d] for d in pads if d in spec.sharded_dims() and any(pads[d])}
    for d in sharded if mode == "circular" else ():
        if max(pads[d]) > spec.shape[d] + min(*pads[d], 0):
            reason = f"padding {pads[d]} crops dim {d} and wraps around what is left more than once"
            raise refuse("pad", x, reason, "crop first, then pad")
    sizes = {d: pad_sizes(spec.cut(m), *pads[d]) for d, m in sharded.items()}

    def pad_locally(local: Tensor, amounts: dict[int, tuple[int, int]]) -> Tensor:
        flat = [amounts.get(input.ndim - 1 - i // 2, (0, 0))[i % 2] for i in range(len(pad))]
        if not any(flat):
            return local
        if mode != "constant" and local.numel() == 0:
            return local.reshape([n + sum(amounts.get(d, (0, 0))) for d, n in enumerate(local.shape)])
        return F.pad(local, flat, mode=mode, value=value)

    dtype = x.dtype
    if mode != "constant":
        dtype = dtype_of_result(x._local_tensor, lambda t: F.pad(t, [0] * len(pad), mode=mode), [1] * input.ndim)
    local = x.to_local()
    amounts = {d: p for d, p in pads.items() if d not in sharded}
    for d, m in sharded.items():
        before, after = pads[d]
        parts = [_parts(out, before, spec.shape[d]) for out in intervals_of(sizes[d])]
        mine = parts[spec.coordinate[m]]
        body = borrow_dims(local, spec, {d: [p[1] for p in parts]})
        if mode == "constant":
            local = body
            amounts[d] = length(mine[0]), length(mine[2])
        else:
            start, end = pad_sources(mode, spec.shape[d], before, after)
            first = _taken(local, d, x, start, [p[0] for p in parts], mode)
            last = _taken(local, d, x, end, [p[2] for p in parts], mode)
            pieces = [t for t in (first, body, last) if t is not None]
            local = torch.cat(pieces, d) if len(pieces) > 1 else body
    return finish(pad_locally(local, amounts).to(dtype), x, meta, sizes)


def _parts(out: Interval, left: int, n: int) -> tuple[Interval, Interval, Interval]:
    """An output interval as what it holds of the padding before, of the input (input indices) and of the padding after.

    The padding is counted from its own start.
    """
    a, b = out[0] - left, out[1] - left
    before = intersect((a + left, b + left), (0, max(left, 0)))
    body = intersect((a, b), (0, n))
    after = intersect((a - n, b - n), (0, b - n))
    return before, body, after


def _taken(
    local: Tensor, dim: int, x: ShardTensor, source: Interval, wanted: Sequence[Interval], mode: str
) -> Tensor | None:
    """This rank's part of the padding at one end; None where no rank has any.

    Args:
        source: the global interval that becomes the padding.
        wanted: per rank, which part of the padding it holds.
    """
    if not any(length(w) for w in wanted):
        return None
    size = source[1] - source[0]
    if mode == "replicate":
        needs = [source if length(w) else (0, 0) for w in wanted]
    elif mode == "reflect":
        needs = [(source[0] + size - b, source[0] + size - a) if b > a else (0, 0) for a, b in wanted]
    else:
        needs = [(source[0] + a, source[0] + b) if b > a else (0, 0) for a, b in wanted]
    piece = borrow_dims(local, x._spec, {dim: needs})
    if mode == "reflect":
        return piece.flip(dim)
    if mode == "replicate":
        here = wanted[x._spec.coordinate[x._spec.sharded_dims()[dim]]]
        return piece.expand(*[length(here) if d == dim else n for d, n in enumerate(piece.shape)])
    return piece


def _pad_with(input: Any, padding: Any, *, mode: str, ndim: int) -> Any:
    """Handler of the functions that pad in one mode."""
    return _pad(input, per_dim(padding, 2 * ndim), mode=mode)


def _constant_pad_nd(input: Any, pad: Sequence[int], value: Any = 0) -> Any:
    return _pad(input, pad, "constant", value)


_nn, _aten = torch._C._nn, torch.ops.aten

register(F.pad, _nn.pad, _aten.pad)(_pad)
register(torch.constant_pad_nd, _aten.constant_pad_nd)(_constant_pad_nd)
for _ndim in (1, 2, 3):
    for _mode, _name in (("reflect", f"reflection_pad{_ndim}d"), ("replicate", f"replication_pad{_ndim}d")):
        register(getattr(_nn, _name), getattr(_aten, _name))(partial(_pad_with, mode=_mode, ndim=_ndim))
