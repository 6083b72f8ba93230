"""Fourier transforms along any dims, sharded or not.

A transform of several dims is one of each dim in turn (of real numbers the last dim comes first, to real numbers last).
Along a dim that is not sharded a rank transforms its shard. A sharded one is resharded: an all-to-all shards the
longest free dim instead, and another one goes back, if there is a free dim with as many elements as there are ranks;
otherwise the shards are sent around a ring.

[Note: chirp] Output ``k`` is the sum over ``j`` of ``x[j] * w ** (j * k)``. What the inputs of one shard contribute to
the outputs of another is such a sum over an interval of ``j`` for an interval of ``k``. With ``2 * j * k == j ** 2 +
k ** 2 - (k - j) ** 2`` it is a convolution with ``w ** (-d ** 2 / 2)``, a chirp, and costs three transforms of the two
intervals' length. So a rank computes its part of the output from its own shard and those that it is sent, and never
holds more than two of them. For that it sends and receives as much as a gather would.

Source: L. Bluestein, A linear filtering approach to the computation of discrete Fourier transform, 1970.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._compat import TensorMeta, untraced
from ..dispatch.tensor import ShardTensor, from_part, redistribute_to
from ..errors import UnsupportedSharding, refuse
from ..layout.geometry import Interval, intervals_of, map_boundaries
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from ..layout.strides import contiguous_stride
from ..operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from .common.alignment import free_dims
from .common.named_dims import Tour, part_by_part


@dataclass(frozen=True, slots=True)
class _Transform:
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


_FFT = _Transform(torch.fft.fft, -1, "forward")
_IFFT = _Transform(torch.fft.ifft, 1, "backward")
_RFFT = _Transform(torch.fft.rfft, -1, "forward", to_half=True)
_IRFFT = _Transform(torch.fft.irfft, 1, "backward", from_half=True)
_HFFT = _Transform(torch.fft.hfft, -1, "forward", from_half=True)
_IHFFT = _Transform(torch.fft.ihfft, 1, "backward", to_half=True)

# name: (the transform of the last dim, that of the others)
_TRANSFORMS = {
    "fft": (_FFT, _FFT),
    "ifft": (_IFFT, _IFFT),
    "rfft": (_RFFT, _FFT),
    "irfft": (_IRFFT, _IFFT),
    "hfft": (_HFFT, _FFT),
    "ihfft": (_IHFFT, _IFFT),
}


_Lengths = int | Sequence[int] | None
_Dims = int | Sequence[int] | None
_Step = Callable[[ShardTensor], ShardTensor]


def _plan(
    call: Arguments,
    name: str,
    function: Callable[..., Tensor],
    transforms: tuple[_Transform, _Transform],
    spec: ShardTensorSpec,
    n: _Lengths,
    dim: _Dims,
    norm: str | None,
) -> Plan:
    """Of ``function(x, n, dim, norm)``; ``n`` and ``dim`` are sequences where it transforms several dims."""
    ndim = len(spec.shape)
    meta = call.returned(function, spec, *_ascending(n, dim, ndim), norm)
    if dim is None:
        dims = list(range(ndim))[-len(n) if n is not None else 0 :]  # type: ignore[arg-type]
    else:
        dims = [d % ndim for d in ([dim] if isinstance(dim, int) else dim)]
    if not set(dims) & set(spec.sharded_dims()):
        out = spec.replace(meta=_meta(meta.shape, _result_dtype(call, function, spec, dim)))
        return LocalPlan(lambda x: _applied(function, x, n, dim, norm), out)
    lengths = [None] * len(dims) if n is None else [n] if isinstance(n, int) else list(n)
    others = [(transforms[1], d, length) for d, length in zip(dims[:-1], lengths[:-1], strict=True)]
    last = (transforms[0], dims[-1], lengths[-1])
    steps: list[_Step] = []
    for transform, d, length in [last, *others] if transforms[0].to_half else [*others, last]:
        step, spec = _plan_along(call, name, transform, spec, d, None if length == -1 else length, norm or "backward")
        steps.append(step)

    def transformed(x: ShardTensor) -> ShardTensor:
        for step in steps:
            x = step(x)
        return x

    return Composed(transformed)


def _ascending(n: _Lengths, dim: _Dims, ndim: int) -> tuple[_Lengths, _Dims]:
    """``n`` and ``dim``, where both are given, in the dims' order: all that torch checks, and 2.11 fails on others."""
    if isinstance(n, (list, tuple)) and isinstance(dim, (list, tuple)) and len(n) == len(dim):
        pairs = sorted(zip(dim, n), key=lambda pair: pair[0] % ndim)
        return tuple(length for _, length in pairs), tuple(d for d, _ in pairs)
    return n, dim


def _result_dtype(call: Arguments, function: Callable[..., Tensor], spec: ShardTensorSpec, dim: _Dims) -> torch.dtype:
    """What the kernel returns, which autocast, where it is on, casts the operand of."""
    with torch.no_grad(), untraced():
        small = torch.ones([2] * len(spec.shape), dtype=spec.tensor_meta.dtype, device=call.device)
        return function(small, None, dim).dtype


def _meta(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)


def _plan_along(
    call: Arguments, name: str, transform: _Transform, given: ShardTensorSpec, dim: int, n: int | None, norm: str
) -> tuple[_Step, ShardTensorSpec]:
    """One transform of one dim, and the spec of its result."""
    shape = call.returned(transform.function, given, n, dim, norm).shape
    meta = _meta(shape, _result_dtype(call, transform.function, given, dim))
    result = _resized(given, dim, meta)
    try:
        target = free_dims(name, given, dim)
    except UnsupportedSharding:
        return _ring(transform, given, result, dim, n, norm), result
    out = _resized(target, dim, meta)

    def transformed(x: ShardTensor) -> ShardTensor:
        y = _applied(transform.function, redistribute_to(x, target).to_local(), n, dim, norm)
        return redistribute_to(from_part(y, out), result)

    return transformed, result


def _applied(function: Callable[..., Tensor], x: Tensor, *args: object) -> Tensor:
    """``function(x, *args)``, also of an empty shard, which torch's kernels do not take: of a row of zeros then."""
    empty = [d for d, n in enumerate(x.shape) if not n]
    for d in empty:
        x = torch.cat([x, x.new_zeros([1 if i == d else n for i, n in enumerate(x.shape)])], d)
    y = function(x, *args)
    for d in empty:
        y = y.narrow(d, 0, 0)
    return y


def _resized(spec: ShardTensorSpec, dim: int, meta: TensorMeta) -> ShardTensorSpec:
    """The spec of a tensor with ``meta``, which differs in the length of ``dim``: its boundaries scale with that."""
    m, old, new = spec.sharded_dims().get(dim), spec.shape[dim], meta.shape[dim]
    if m is not None:
        sizes = map_boundaries(spec.sizes_along(m), lambda boundary: boundary * new // max(1, old))
        spec = spec.with_axes({m: AxisLayout(spec.placements[m], sizes)})
    return spec.replace(meta=meta)


# -- around the ring --------------------------------------------------------------------------------------------------


def _ring(
    transform: _Transform, spec: ShardTensorSpec, out: ShardTensorSpec, dim: int, n: int | None, norm: str
) -> _Step:
    """See [Note: chirp]."""
    m = spec.sharded_dims()[dim]
    length = n or (2 * (spec.shape[dim] - 1) if transform.from_half else spec.shape[dim])
    used = length // 2 + 1 if transform.from_half else length
    scale: float = {transform.scaled_by: 1 / length, "ortho": length**-0.5}.get(norm, 1.0)
    intervals = intervals_of(spec.sizes_along(m))
    mine = out.interval(m)
    tour = Tour(spec.mesh, m, spec.coordinate[m], dim, None, intervals)
    dtype = out.tensor_meta.dtype

    def contribution(owner: int, part: Tensor) -> Tensor:
        start, stop = intervals[owner]
        part = part.narrow(dim, 0, max(0, min(stop, used) - start)).movedim(dim, -1)
        half = _doubled(part, start, length) if transform.from_half else part
        y = _chirp(half, start, mine, transform.sign, length)
        return (y.real if transform.from_half else y).movedim(-1, dim) * scale

    return lambda x: from_part(part_by_part(contribution, tour, x.to_local()).to(dtype), out)


def _doubled(part: Tensor, start: int, length: int) -> Tensor:
    """Half of a Hermitian sequence: what has a mirror image counts twice."""
    j = torch.arange(start, start + part.shape[-1], device=part.device)
    return part * torch.where((j == 0) | (2 * j == length), 1, 2)


def _chirp(part: Tensor, start: int, out: Interval, sign: int, length: int) -> Tensor:
    """The sum over the last dim, whose indices begin at ``start``, of ``part[j] * exp(sign * 2i pi j k / length)`` for
    ``k`` in ``out``.
    """
    inputs, outputs = part.shape[-1], out[1] - out[0]
    # Not in half precision, in which transforms on GPUs take powers of two only: each rank's have other lengths.
    dtype = torch.promote_types(part.dtype, torch.complex64)
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
    sums: Tensor = torch.fft.ifft(spectrum)[..., inputs - 1 :]
    return sums * wave(out[0], outputs)


# -- entry points -----------------------------------------------------------------------------------------------------


def _declare(name: str, dims: _Dims, transforms: tuple[_Transform, _Transform]) -> None:
    function = getattr(torch.fft, name)

    @operator(function, tensors="input")
    def plan_transform(
        call: Arguments,
        input: ShardTensorSpec,
        n: int | None = None,
        s: _Lengths = None,
        dim: _Dims = dims,
        norm: str | None = None,
    ) -> Plan:
        """The length is ``n`` of one dim, ``s`` of several."""
        return _plan(call, name, function, transforms, input, n if s is None else s, dim, norm)


for _name, _pair in _TRANSFORMS.items():
    for _suffix, _dims in {"": -1, "2": (-2, -1), "n": None}.items():
        _declare(_name + _suffix, _dims, _pair)  # type: ignore[arg-type]


# -- stft --------------------------------------------------------------------------------------------------------------

# Short-time Fourier transforms, ``torch.stft`` and ``torch.istft``, of signals sharded along time or not.
#
# The first is windows of the signal, each multiplied by the window and transformed. The inverse is overlap-add: it
# adds the windows, transformed back, where they overlap, which is a transposed convolution with the identity, and
# divides by the sum of the squared windows there. So what is exchanged along time is a halo, as for a convolution.


def _replicate_window(call: Arguments, window: ShardTensorSpec | None) -> None:
    """Have a sharded window gathered: it is as long as a transform, not as the signal."""
    if window is not None and not window.is_replicate():
        replicated = window.replicated()
        call.then_do("window", lambda t: redistribute_to(t, replicated))


def _padded(window: Tensor | None, win_length: int, n_fft: int, like: Tensor) -> Tensor:
    """The window with zeros on both sides up to ``n_fft`` elements; by default of ones."""
    if window is None:
        window = torch.ones(win_length, dtype=like.dtype.to_real(), device=like.device)
    left = (n_fft - win_length) // 2
    return F.pad(window, (left, n_fft - win_length - left)) if win_length < n_fft else window


@operator(torch.stft, Tensor.stft, tensors="input window")
def plan_stft(
    call: Arguments,
    input: ShardTensorSpec,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: ShardTensorSpec | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Composed:
    """Padding, windows, transforms."""
    if align_to_window is not None:
        raise refuse("stft", input, "align_to_window has no distributed form", "pad the signal or the window yourself")
    options = {"center": center, "pad_mode": pad_mode, "normalized": normalized, "onesided": onesided}
    call.returned(torch.stft, input, n_fft, hop_length, win_length, window, **options, return_complex=return_complex)
    _replicate_window(call, window)
    hop = n_fft // 4 if hop_length is None else hop_length
    padded_shape = [1] * (3 - len(input.shape)) + list(input.shape)

    def stft(x: Tensor, window: Tensor | None) -> Tensor:
        window = _padded(window, n_fft if win_length is None else win_length, n_fft, x)
        if center:
            x = F.pad(x.view(padded_shape), [n_fft // 2] * 2, pad_mode).view(*x.shape[:-1], -1)
        frames = x.unfold(-1, n_fft, hop) * window
        halved = not frames.dtype.is_complex and onesided is not False
        transform = torch.fft.rfft if halved else torch.fft.fft
        found = transform(frames, norm="ortho" if normalized else "backward").mT
        return found if return_complex else torch.view_as_real(found)

    return Composed(stft)


@operator(torch.istft, Tensor.istft, tensors="input window")
def plan_istft(
    call: Arguments,
    input: ShardTensorSpec,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: ShardTensorSpec | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Composed:
    """Transforms, overlap-add of the windows, and of the squared ones; whether these vanish is read from the data."""
    # Torch's own errors, which do not depend on how many frames there are.
    few = torch.zeros([*input.shape[-2:-1], 8], dtype=input.tensor_meta.dtype)
    flat = None if window is None else torch.ones(window.shape)
    torch.istft(few, n_fft, hop_length, win_length, flat, True, normalized, onesided, None, return_complex)
    _replicate_window(call, window)
    hop = n_fft // 4 if hop_length is None else hop_length
    halved = input.shape[-2] != n_fft if onesided is None else onesided
    norm = "ortho" if normalized else "backward"
    start = n_fft // 2 if center else 0

    half = halved and not return_complex
    transform = torch.fft.irfft if half else torch.fft.ifft

    def istft(x: Tensor, window: Tensor | None) -> Tensor:
        window = _padded(window, n_fft if win_length is None else win_length, n_fft, x)
        frames = transform(x if x.ndim == 3 else x.unsqueeze(0), n_fft, dim=-2, norm=norm)
        frames = frames if half or return_complex else frames.real
        envelope = window.abs().square().unsqueeze(-1) * torch.ones_like(frames[:1].real)
        signal, total = (_overlapped(t, n_fft, hop) for t in (frames * window.unsqueeze(-1), envelope))
        expected = signal.shape[-1]
        stop = start + length if length is not None else expected - start if center else expected
        signal, total = signal[:, start:stop], total[:, start:stop]
        if float(total.detach().abs().min()) <= 1e-11:
            raise RuntimeError("istft(...) window overlap add min: 1")
        signal = signal / total
        if stop > expected:
            signal = F.pad(signal, (0, stop - expected))
        return signal if x.ndim == 3 else signal.squeeze(0)

    return Composed(istft)


def _overlapped(frames: Tensor, size: int, step: int) -> Tensor:
    """The overlap-add of frames, (batch, size, frames), that start ``step`` apart."""
    if frames.dtype.is_complex:
        return torch.complex(_overlapped(frames.real, size, step), _overlapped(frames.imag, size, step))
    identity = torch.eye(size, dtype=frames.dtype, device=frames.device).unsqueeze(1)
    return F.conv_transpose1d(frames, identity, stride=step).squeeze(1)
