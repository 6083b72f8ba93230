"""Short-time Fourier transforms, ``torch.stft`` and ``torch.istft``, of signals sharded along time or not.

The first is windows of the signal, each multiplied by the window and transformed. The inverse is overlap-add: it adds
the windows, transformed back, where they overlap, which is a transposed convolution with the identity, and divides by
the sum of the squared windows there. So what is exchanged along time is a halo, as for a convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.tensor import redistribute_to
from ...errors import refuse
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator


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
