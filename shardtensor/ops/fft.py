"""Fourier transforms along any dims, sharded or not.

Dims that are not sharded are transformed at once, by torch's own kernel. A sharded one has to be all on one rank
before: an all-to-all shards another dim instead.

[Note: transposed] Of several dims, that is another one of them, which has been transformed or will be, and the result
is left sharded along it. A second all-to-all, back, would be undone by what follows: products with filters and slices
of modes go along with any layout, and the inverse transform begins with the dim that is now free. It has to end with
the layout that the first one was given, and knows nothing but its own operand's. So a transform with a negative
exponent goes to the dim that comes next among those transformed, the last one's next being the first, and one with a
positive exponent to the one before. Even shards become even ones, and others keep their proportions, rounded to the
nearest: which is reversible where the new dim is at least as long.

A single dim's transform has no other one: it goes to the longest free dim, and back. Where none is free either that
has as many elements as there are ranks, as in a signal of one dim, it is refused.

[Note: modes] Networks keep few modes. These stay where they are, also if all of one dim's lie on the first rank: to
share them out again would take a message for the modes and one for their product, each way, and sums of weights'
gradients remain; what it would save is a product that takes a small part of the transforms' time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from .._compat import TensorMeta, constant_like
from ..communication.redistribute import redistribute_local
from ..dispatch.tensor import from_part, redistribute_to
from ..errors import refuse
from ..layout.intervals import chunk_sizes, map_boundaries, resized
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from ..layout.strides import contiguous_stride
from ..operators.autocast import autocast_dtype
from ..operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from .common.named_dims import free_dims


@dataclass(frozen=True, slots=True)
class _Transform:
    """One transform of one dim.

    Attributes:
        name: torch's, of one dim; with "n" behind it, of several.
        adjoint: the name of its adjoint, but for the factor.
        sign: of the exponent.
        scaled_by: the norm that divides by the length; "ortho" divides by its root, the other one not at all.
        from_half, to_half: whether the input, or the output, is the half of a Hermitian sequence.
    """

    name: str
    adjoint: str
    sign: int
    scaled_by: str
    from_half: bool = False
    to_half: bool = False


_FFT = _Transform("fft", "ifft", -1, "forward")
_IFFT = _Transform("ifft", "fft", 1, "backward")
_RFFT = _Transform("rfft", "irfft", -1, "forward", to_half=True)
_IRFFT = _Transform("irfft", "rfft", 1, "backward", from_half=True)
_HFFT = _Transform("hfft", "ihfft", -1, "forward", from_half=True)
_IHFFT = _Transform("ihfft", "hfft", 1, "backward", to_half=True)

# name: (the transform of the last dim, that of the others)
_TRANSFORMS = {
    "fft": (_FFT, _FFT),
    "ifft": (_IFFT, _IFFT),
    "rfft": (_RFFT, _FFT),
    "irfft": (_IRFFT, _IFFT),
    "hfft": (_HFFT, _FFT),
    "ihfft": (_IHFFT, _IFFT),
}
_OPPOSITE = {"forward": "backward", "backward": "forward", "ortho": "ortho"}  # the norm with which an adjoint scales


_Lengths = int | Sequence[int] | None
_Dims = int | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class _Along:
    """The transform of a dim of ``given`` elements as a sequence of ``length``, cut or filled up with zeros."""

    transform: _Transform
    dim: int
    given: int
    length: int

    @property
    def used(self) -> int:
        """How many elements the sequence is made of."""
        return self.length // 2 + 1 if self.transform.from_half else self.length

    @property
    def result(self) -> int:
        """How many elements the result has."""
        return self.length // 2 + 1 if self.transform.to_half else self.length


class _Stage(Protocol):
    """A part of the work: of a local tensor, so that autograd can differentiate it (``again``), or without."""

    @property
    def copies(self) -> bool:
        """Whether what it returns is always a new tensor."""

    def run(self, x: Tensor) -> Tensor: ...

    def adjoint(self, grad: Tensor, ours: bool) -> Tensor:
        """Of a gradient that may be written to if it is ``ours``."""

    def again(self, x: Tensor) -> Tensor: ...


# -- the plan ----------------------------------------------------------------------------------------------------------


def _plan(
    call: Arguments,
    name: str,
    function: Callable[..., Tensor],
    spec: ShardTensorSpec,
    n: _Lengths,
    dim: _Dims,
    norm: str | None,
) -> Plan:
    """Of ``function(x, n, dim, norm)``; ``n`` and ``dim`` are sequences where it transforms several dims."""
    ndim = len(spec.shape)
    call.returned(function, spec, *_ascending(n, dim, spec.shape, _TRANSFORMS[name][0].from_half), norm)
    if dim is None:
        dims = list(range(ndim))[-len(n) if n is not None else 0 :]  # type: ignore[arg-type]
    else:
        dims = [d % ndim for d in ([dim] if isinstance(dim, int) else dim)]
    lengths = [None] * len(dims) if n is None else [n] if isinstance(n, int) else list(n)
    half, other = _TRANSFORMS[name]
    transforms = [other] * (len(dims) - 1) + [half]
    along = [_along(t, d, spec.shape[d], length) for t, d, length in zip(transforms, dims, lengths)]
    if not set(dims) & set(spec.sharded_dims()):
        out = spec.replace(meta=_meta(_shape_after(spec, along), _result_dtype(call, function, spec, dim)))
        return LocalPlan(lambda x: _applied(function, x, n, dim, norm), out)
    return _Staged(*_stages(call, along, spec, norm or "backward"))


def _along(transform: _Transform, dim: int, given: int, length: int | None) -> _Along:
    if length is None or length == -1:
        length = 2 * (given - 1) if transform.from_half else given
    return _Along(transform, dim, given, length)


def _ascending(n: _Lengths, dim: _Dims, shape: Sequence[int], from_half: bool) -> tuple[_Lengths, _Dims]:
    """``n`` and ``dim``, where several are given, in ascending order: all that torch checks; 2.11 fails on others."""
    ndim = len(shape)
    if not isinstance(dim, (list, tuple)) or not all(-ndim <= d < ndim for d in dim):
        return n, dim
    if n is None:  # which of the dims is halved follows from their order
        n = [2 * (shape[d] - 1) if from_half and d == dim[-1] else shape[d] for d in dim]
    if not isinstance(n, (list, tuple)) or len(n) != len(dim):
        return n, dim
    pairs = sorted(zip(dim, n), key=lambda pair: pair[0] % ndim)
    return tuple(length for _, length in pairs), tuple(d for d, _ in pairs)


def _result_dtype(call: Arguments, function: Callable[..., Tensor], spec: ShardTensorSpec, dim: _Dims) -> torch.dtype:
    """What the kernel returns, which autocast, where it is on, casts the operand of."""
    shapes, dtypes = [[2] * len(spec.shape)], [spec.tensor_meta.dtype]
    return autocast_dtype(lambda small: function(small, None, dim), shapes, dtypes, call.device)


def _meta(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)


def _shape_after(spec: ShardTensorSpec, along: Sequence[_Along]) -> Sequence[int]:
    shape: Sequence[int] = spec.shape
    for a in along:
        shape = resized(shape, a.dim, a.result)
    return shape


def _carried(sizes: Sequence[int], n: int) -> tuple[int, ...]:
    """Shard sizes of a dim of length ``n`` like those of another dim, or of this one with another length.

    Example:
        >>> _carried((4, 3), 9), _carried((5, 2), 4), _carried((3, 1), 7)
        ((5, 4), (3, 1), (5, 2))
    """
    old = sum(sizes)
    if tuple(sizes) == chunk_sizes(old, len(sizes)):
        return chunk_sizes(n, len(sizes))
    return map_boundaries(sizes, lambda boundary: (2 * boundary * n + old) // (2 * old))


def _resharded(spec: ShardTensorSpec, m: int, dim: int, sizes: Sequence[int]) -> ShardTensorSpec:
    """The spec with ``dim`` sharded on mesh dim ``m``, like a dim that has ``sizes``."""
    return spec.with_axes({m: AxisLayout(Shard(dim), _carried(sizes, spec.shape[dim]))})


def _stages(
    call: Arguments, along: Sequence[_Along], spec: ShardTensorSpec, norm: str
) -> tuple[list[_Stage], ShardTensorSpec]:
    """All that is done, one after the other, and the spec of the result. See [Note: transposed].

    Raises:
        UnsupportedSharding: no other dim can be sharded instead of one that is transformed.
    """
    dims = sorted(a.dim for a in along)
    turn = -along[0].transform.sign
    following = {d: dims[(i + turn) % len(dims)] for i, d in enumerate(dims)}
    stages: list[_Stage] = []
    lent: dict[int, tuple[int, Sequence[int]]] = {}  # mesh dims that shard none of these dims meanwhile, but did
    todo = list(along)

    def move(target: ShardTensorSpec) -> None:
        nonlocal spec
        stages.append(_Move(spec, target))
        spec = target

    while todo:
        sharded = spec.sharded_dims()
        able, local = _able(todo, sharded)
        if local:
            kernel = _Kernel.of(call, local, spec, norm)
            stages.append(kernel)
            spec = spec.replace(meta=kernel.result)
            todo = [a for a in todo if a not in local]
            continue
        pending = [a.dim for a in todo]
        found = [
            (d in pending, d != following[a.dim], -spec.shape[d], a.dim, d)
            for a in able
            for d in dims
            if d not in sharded and spec.shape[d] >= spec.mesh.size(sharded[a.dim])
        ]
        if found:
            *_, dim, free = min(found)
            m = sharded[dim]
            move(_resharded(spec, m, free, spec.sizes_along(m)))
            continue
        # On the fewest ranks: a dim that is too short for these is too short for any others.
        dim = min((a.dim for a in able), key=lambda d: spec.mesh.size(sharded[d]))
        m = sharded[dim]
        target = free_dims(call.name, spec, dim)
        lent[m] = dim, spec.sizes_along(m)
        move(target)
    for m, (dim, sizes) in lent.items():
        choice = [d for d in (following[dim], dim, *dims) if d not in spec.sharded_dims()]
        back = next((d for d in choice if spec.shape[d] >= spec.mesh.size(m)), choice[0])
        move(_resharded(spec, m, back, sizes))
    return stages, spec


def _able(todo: Sequence[_Along], sharded: dict[int, int]) -> tuple[list[_Along], list[_Along]]:
    """Which dims may be transformed next, and those that can at once, because none of them is sharded.

    Of real numbers the last dim comes first, to real numbers it comes last.
    """
    *others, last = todo
    if last.transform.to_half and last.dim in sharded:
        return [last], []
    local = [a for a in todo if a.dim not in sharded]
    if last.transform.from_half and others:
        return others, local if len(local) == len(todo) else [a for a in local if a is not last]
    return list(todo), local


class _Staged(Plan):
    """A linear operator made of others, whose adjoint is theirs in the other order."""

    twice = True
    linear = True

    def __init__(self, stages: Sequence[_Stage], out: ShardTensorSpec) -> None:
        self.stages, self.outputs = stages, out

    def forward(self, *tensors: Any) -> tuple[Tensor, Sequence[Tensor]]:
        x: Tensor = tensors[0]
        for stage in self.stages:
            x = stage.run(x)
        return x, ()

    def backward(self, needed: Sequence[bool], grads: Sequence[Any], *saved: Any) -> Sequence[Tensor | None]:
        (grad,) = grads
        ours = False
        for stage in reversed(self.stages):
            grad = stage.adjoint(grad, ours)
            ours = ours or stage.copies
        return (grad,)

    def again(self, *tensors: Any) -> Tensor:
        x: Tensor = tensors[0]
        for stage in self.stages:
            x = stage.again(x)
        return x


class _Move:
    """From one layout to another, and what arrives lies in memory as torch's kernels transform it, which otherwise copy
    it to such memory: the dim that is put together is the innermost.
    """

    def __init__(self, source: ShardTensorSpec, target: ShardTensorSpec) -> None:
        self.source, self.target = source, target
        moved = [m for m, axis in enumerate(source.layout) if axis != target.layout[m]]
        self.copies = all(source.mesh.size(m) > 1 and target.placements[m].is_shard() for m in moved)
        self._there, self._back = _innermost(source, target), _innermost(target, source)

    def run(self, x: Tensor) -> Tensor:
        dim, *specs = self._there
        return redistribute_local(x.movedim(dim, -1), *specs).movedim(-1, dim)

    def adjoint(self, grad: Tensor, ours: bool) -> Tensor:
        dim, *specs = self._back
        return redistribute_local(grad.movedim(dim, -1), *specs).movedim(-1, dim)

    def again(self, x: Tensor) -> Tensor:
        return redistribute_to(from_part(x, self.source), self.target).to_local()


def _innermost(source: ShardTensorSpec, target: ShardTensorSpec) -> tuple[int, ShardTensorSpec, ShardTensorSpec]:
    """The dim that is sharded in the source alone, and both specs with that dim as the last one."""
    ndim = len(source.shape)
    dim = next((d for d, m in source.sharded_dims().items() if target.sharded_dims().get(d) != m), ndim - 1)

    order = [*(d for d in range(ndim) if d != dim), dim]

    def moved(spec: ShardTensorSpec) -> ShardTensorSpec:
        axes = {m: AxisLayout(Shard(order.index(d)), spec.sizes_along(m)) for d, m in spec.sharded_dims().items()}
        meta = _meta([spec.shape[d] for d in order], spec.tensor_meta.dtype)
        return spec.with_axes(axes).replace(meta=meta)

    return dim, moved(source), moved(target)


# -- along dims that are not sharded -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The transform of dims that are not sharded, in one call of torch's.

    Attributes:
        along: the dims, that of a half last.
        given: the dtype of the operand.
        result: shape and dtype of the global result.
        halves: what the gradient of a half is multiplied with, see :meth:`_halved`.
    """

    along: Sequence[_Along]
    norm: str
    given: torch.dtype
    result: TensorMeta
    halves: Tensor | None
    copies: ClassVar[bool] = True

    @classmethod
    def of(cls, call: Arguments, along: Sequence[_Along], spec: ShardTensorSpec, norm: str) -> _Kernel:
        last, dims = along[-1], [a.dim for a in along]
        function = getattr(torch.fft, last.transform.name + "n")
        meta = _meta(_shape_after(spec, along), _result_dtype(call, function, spec, dims))
        halves = None
        if last.transform.to_half:
            k = torch.arange(last.result, device=call.device)
            alone = (k == 0) | (2 * k == last.length)
            halves = torch.stack([torch.where(alone, 1.0, 0.5), torch.where(alone, 0.0, 0.5)], -1)
            halves = halves.to(meta.dtype.to_real())
        return cls(along, norm, spec.tensor_meta.dtype, meta, halves)

    def run(self, x: Tensor) -> Tensor:
        return _called(self.along[-1].transform.name, x, self.along, self.norm)

    again = run

    def adjoint(self, grad: Tensor, ours: bool) -> Tensor:
        """As torch's own, but that of a transform of real numbers is one to real numbers: torch fills up the half with
        zeros, transforms twice as much, and drops the imaginary part.
        """
        *others, last = along = self.along
        norm = _OPPOSITE[self.norm]
        if last.transform.to_half:
            if others:
                grad, ours = _called(others[0].transform.adjoint, grad, others, norm), True
            grad, along = self._halved(grad, ours), [last]
        found = _called(last.transform.adjoint, grad, along, norm)
        if last.transform.from_half:  # what has a mirror image counts twice
            found.narrow(last.dim, 1, (last.length - 1) // 2).mul_(2)
        for a in self.along:
            if a.used != a.given:
                found = F.pad(found, [0, 0] * (found.ndim - 1 - a.dim) + [0, a.given - a.used])
        if found.is_complex() and not self.given.is_complex:
            found = found.real
        result: Tensor = found.to(self.given)
        return result

    def _halved(self, grad: Tensor, ours: bool) -> Tensor:
        """Half of each number, as its mirror image in the whole sequence adds as much; of what has none, the real part.

        The imaginary part, which has no effect, is made zero: kernels of GPUs rely on it.
        """
        assert self.halves is not None
        shape = [1] * (grad.ndim - 1 - self.along[-1].dim)
        halves = constant_like(self.halves, grad).view(-1, *shape, 2)
        numbers = torch.view_as_real(grad.resolve_conj())
        return torch.view_as_complex(numbers.mul_(halves) if ours else numbers * halves)


def _called(name: str, x: Tensor, along: Sequence[_Along], norm: str) -> Tensor:
    """torch's transform ``name`` of some dims."""
    return _applied(getattr(torch.fft, name + "n"), x, [a.length for a in along], [a.dim for a in along], norm)


def _applied(function: Callable[..., Tensor], x: Tensor, *args: object) -> Tensor:
    """``function(x, *args)``, also of an empty shard, which torch's kernels do not take: of a row of zeros then."""
    empty = [d for d, n in enumerate(x.shape) if not n]
    for d in empty:
        x = torch.cat([x, x.new_zeros([1 if i == d else n for i, n in enumerate(x.shape)])], d)
    y = function(x, *args)
    for d in empty:
        y = y.narrow(d, 0, 0)
    return y


# -- entry points -----------------------------------------------------------------------------------------------------


def _declare(name: str, suffix: str, dims: _Dims) -> None:
    function = getattr(torch.fft, name + suffix)

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
        return _plan(call, name, function, input, n if s is None else s, dim, norm)


for _name in _TRANSFORMS:
    for _suffix, _dims in {"": -1, "2": (-2, -1), "n": None}.items():
        _declare(_name, _suffix, _dims)  # type: ignore[arg-type]


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
