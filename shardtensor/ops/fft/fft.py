"""Fourier transforms along any dims, sharded or not.

A transform of several dims is one of each dim in turn (of real numbers the last dim comes first, to real numbers last).
Along a dim that is not sharded a rank transforms what it has. A sharded one is made whole by an all-to-all that shards
the longest free dim instead, and another one back, if there is a free dim with as many elements as there are ranks;
otherwise the shards go round a ring.

[Note: chirp] Output ``k`` is the sum over ``j`` of ``x[j] * w ** (j * k)``. What the inputs of one shard contribute to
the outputs of another is such a sum over an interval of ``j`` for an interval of ``k``. With ``2 * j * k == j ** 2 +
k ** 2 - (k - j) ** 2`` it is a convolution with ``w ** (-d ** 2 / 2)``, a chirp, and costs three transforms of the two
intervals' length (Bluestein's algorithm). So a rank computes its part of the output from its own shard and those that
come by, and never holds more than two of them. For that it sends and receives as much as a gather would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._compat import TensorMeta
from ...errors import UnsupportedSharding
from ...geometry import Interval, intervals_of, map_cuts
from ...registry import register
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ...tensor import ShardTensor, from_part, redistribute_to
from ..common.alignment import torch_judges, whole_rows
from ..common.contraction import Tour, part_by_part


@dataclass(frozen=True, slots=True)
class _Kind:
    """One transform of one dim.

    Attributes:
        function: torch's.
        sign: of the exponent.
        scaled_by: the norm that divides by the length; "ortho" divides by its root, the other one not at all.
        from_half, to_half: whether the input, or the output, is the half of a Hermitian sequence.
    """

    function: Callable[..., Tensor]
    sign: int
    scaled_by: str
    from_half: bool = False
    to_half: bool = False


_FFT = _Kind(torch.fft.fft, -1, "forward")
_IFFT = _Kind(torch.fft.ifft, 1, "backward")
_RFFT = _Kind(torch.fft.rfft, -1, "forward", to_half=True)
_IRFFT = _Kind(torch.fft.irfft, 1, "backward", from_half=True)
_HFFT = _Kind(torch.fft.hfft, -1, "forward", from_half=True)
_IHFFT = _Kind(torch.fft.ihfft, 1, "backward", to_half=True)

# name: (the transform of the last dim, that of the others)
_KINDS = {
    "fft": (_FFT, _FFT),
    "ifft": (_IFFT, _IFFT),
    "rfft": (_RFFT, _FFT),
    "irfft": (_IRFFT, _IFFT),
    "hfft": (_HFFT, _FFT),
    "ihfft": (_IHFFT, _IFFT),
}


def _transformed(name: str, function: Any, kinds: tuple[_Kind, _Kind], x: Any, n: Any, dim: Any, norm: Any) -> Any:
    """``function(x, n, dim, norm)``; ``n`` and ``dim`` are sequences where it transforms several dims."""
    if not isinstance(x, ShardTensor) or x._spec.is_replicate():
        return NotImplemented
    torch_judges(function, x, *_ascending(n, dim, x.ndim), norm)
    x = redistribute_to(x, x._spec.for_gradient())
    if dim is None:
        dims = list(range(x.ndim))[-len(n) if n is not None else 0 :]
    else:
        dims = [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    if not set(dims) & set(x._spec.sharded_dims()):
        y = _applied(function, x.to_local(), n, dim, norm)
        shape = [x.shape[d] if d in x._spec.sharded_dims() else length for d, length in enumerate(y.shape)]
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), y.dtype)
        return from_part(y, x._spec.replace(meta=meta))
    lengths = [None] * len(dims) if n is None else [n] if isinstance(n, int) else list(n)
    steps = [(kinds[1], d, length) for d, length in zip(dims[:-1], lengths[:-1], strict=True)]
    last = (kinds[0], dims[-1], lengths[-1])
    for kind, d, length in [last, *steps] if kinds[0].to_half else [*steps, last]:
        x = _along(name, kind, x, d, None if length == -1 else length, norm or "backward")
    return x


def _ascending(n: Any, dim: Any, ndim: int) -> tuple[Any, Any]:
    """``n`` and ``dim``, where both are given, in the dims' order: all that torch checks, and 2.11 fails on others."""
    if isinstance(n, (list, tuple)) and isinstance(dim, (list, tuple)) and len(n) == len(dim):
        pairs = sorted(zip(dim, n), key=lambda pair: pair[0] % ndim)
        return tuple(length for _, length in pairs), tuple(d for d, _ in pairs)
    return _hashable(n), _hashable(dim)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _along(name: str, kind: _Kind, x: Any, dim: int, n: int | None, norm: str) -> Any:
    """One transform of one dim of a ShardTensor."""
    given = x._spec
    m = given.sharded_dims().get(dim)
    try:
        x = redistribute_to(x, whole_rows(name, given, dim))
    except UnsupportedSharding:
        return _round(kind, x, dim, n, norm)
    y = _applied(kind.function, x.to_local(), n, dim, norm)
    y = from_part(y, _resized(x._spec, dim, y))
    return y if m is None else redistribute_to(y, _resized(given, dim, y))


def _applied(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """``function(x, *args)``, also of an empty shard, which torch's kernels do not take: of a row of zeros then."""
    empty = [d for d, n in enumerate(x.shape) if not n]
    for d in empty:
        x = torch.cat([x, x.new_zeros([1 if i == d else n for i, n in enumerate(x.shape)])], d)
    y = function(x, *args)
    for d in empty:
        y = y.narrow(d, 0, 0)
    return y


def _resized(spec: ShardTensorSpec, dim: int, y: Tensor) -> ShardTensorSpec:
    """``spec`` of a tensor like ``y`` in dtype and in the length of ``dim``, with its cuts where they were."""
    shape = [y.shape[dim] if d == dim else n for d, n in enumerate(spec.shape)]
    like = torch.empty(shape, device="meta")
    sizes, m, old = list(spec.sizes), spec.sharded_dims().get(dim), spec.shape[dim]
    if m is not None:
        sizes[m] = map_cuts(spec.cut(m), lambda c: c * shape[dim] // max(1, old))
    meta = spec.tensor_meta._replace(shape=like.shape, stride=like.stride(), dtype=y.dtype)
    return spec.replace(meta=meta, sizes=tuple(sizes))


# -- around the ring --------------------------------------------------------------------------------------------------


def _round(kind: _Kind, x: Any, dim: int, n: int | None, norm: str) -> Any:
    """See [Note: chirp]."""
    spec = x._spec
    m = spec.sharded_dims()[dim]
    here = torch_judges(kind.function, x, n, dim, norm)
    out = _resized(spec, dim, torch.empty(here.shape, dtype=here.dtype, device="meta"))
    length = n or (2 * (spec.shape[dim] - 1) if kind.from_half else spec.shape[dim])
    used = length // 2 + 1 if kind.from_half else length
    scale = {kind.scaled_by: 1 / length, "ortho": length**-0.5}.get(norm, 1.0)
    intervals = intervals_of(spec.cut(m))
    mine = out.interval(m)

    def contribution(owner: int, part: Tensor) -> Tensor:
        start, stop = intervals[owner]
        part = part.narrow(dim, 0, max(0, min(stop, used) - start)).movedim(dim, -1)
        y = _chirp(part if not kind.from_half else _doubled(part, start, length), start, mine, kind.sign, length)
        return (y.real if kind.from_half else y).movedim(-1, dim) * scale

    tour = Tour(spec.mesh, m, spec.coordinate[m], dim, None, intervals)
    y = part_by_part(contribution, tour, x.to_local())
    return from_part(y.to(here.dtype), out)


def _doubled(part: Tensor, start: int, length: int) -> Tensor:
    """Half of a Hermitian sequence: what has a mirror image counts twice."""
    j = torch.arange(start, start + part.shape[-1], device=part.device)
    return part * torch.where((j == 0) | (2 * j == length), 1, 2)


def _chirp(part: Tensor, start: int, out: Interval, sign: int, length: int) -> Tensor:
    """The sum over the last dim, whose indices begin at ``start``, of ``part[j] * exp(sign * 2i pi j k / length)`` for
    ``k`` in ``out``.
    """
    inputs, outputs = part.shape[-1], out[1] - out[0]
    dtype = part.dtype if part.is_complex() else torch.promote_types(part.dtype, torch.complex64)
    if part.dtype == torch.float64:
        dtype = torch.complex128
    if not part.numel() or not outputs:
        return part.to(dtype).sum(-1, keepdim=True).expand(*part.shape[:-1], outputs)

    def wave(first: int, count: int) -> Tensor:
        """``exp(sign * 1i pi d * d / length)``; the angle modulo a turn in integers, so that it is exact."""
        d = torch.arange(first, first + count, device=part.device)
        angle = (d * d % (2 * length)).double() * (sign * torch.pi / length)
        return torch.polar(torch.ones_like(angle), angle).to(dtype)

    distances = wave(out[0] - (start + inputs - 1), inputs + outputs - 1).conj()
    room = inputs + outputs - 1
    spectrum = torch.fft.fft(part * wave(start, inputs), room) * torch.fft.fft(distances, room)
    # Cyclic with this length: only sums that are not asked for wrap around.
    return torch.fft.ifft(spectrum)[..., inputs - 1 :] * wave(out[0], outputs)


# -- doors ------------------------------------------------------------------------------------------------------------


def _register(name: str, kinds: tuple[_Kind, _Kind]) -> None:
    """The transforms of one, two and any number of dims."""
    one, two, many = (getattr(torch.fft, name + suffix) for suffix in ("", "2", "n"))

    @register(one)
    def transform(input: Any, n: Any = None, dim: int = -1, norm: Any = None, *, out: Any = None) -> Any:
        return NotImplemented if out is not None else _transformed(name, one, kinds, input, n, dim, norm)

    @register(two)
    def transform_two(input: Any, s: Any = None, dim: Any = (-2, -1), norm: Any = None, *, out: Any = None) -> Any:
        return NotImplemented if out is not None else _transformed(name + "2", two, kinds, input, s, dim, norm)

    @register(many)
    def transform_many(input: Any, s: Any = None, dim: Any = None, norm: Any = None, *, out: Any = None) -> Any:
        return NotImplemented if out is not None else _transformed(name + "n", many, kinds, input, s, dim, norm)


for _name, _pair in _KINDS.items():
    _register(_name, _pair)
