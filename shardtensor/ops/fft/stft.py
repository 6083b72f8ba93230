"""Short-time Fourier transforms, ``torch.stft`` and ``torch.istft``, of signals cut along time or not.

The first is windows of the signal, each multiplied by the window and transformed; the inverse adds the transformed back
windows where they overlap, which is a transposed convolution with the identity, and divides by what the squared window
adds up to. So what travels along time is a halo, as for a convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import refuse
from ...registry import register
from ...tensor import ShardTensor, redistribute_to
from ..common.alignment import common_mesh, described

__all__: list[str] = []


def _window(window: Any, win_length: int, n_fft: int, like: Any) -> Any:
    """The window with zeros on both sides up to ``n_fft`` elements, whole on every rank."""
    if window is None:
        window = torch.ones(win_length, dtype=like.dtype.to_real(), device=like.device)
    if isinstance(window, ShardTensor):
        window = redistribute_to(window, window._spec.replicated())
    left = (n_fft - win_length) // 2
    return F.pad(window, (left, n_fft - win_length - left)) if win_length < n_fft else window


@register(torch.stft, Tensor.stft)
def _stft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    **others: Any,
) -> Any:
    if common_mesh("stft", [input] if window is None else [input, window]) is None:
        return NotImplemented
    if others.get("align_to_window") is not None:
        raise refuse("stft", input, "align_to_window has no distributed form", "pad the signal or the window yourself")
    torch.stft(  # torch's own errors
        described(input),
        n_fft,
        hop_length,
        win_length,
        described(window),
        center,
        pad_mode,
        normalized,
        onesided,
        return_complex,
    )
    hop_length = n_fft // 4 if hop_length is None else hop_length
    window = _window(window, n_fft if win_length is None else win_length, n_fft, input)
    if center:
        shape = [1] * (3 - input.ndim) + list(input.shape)
        input = F.pad(input.view(shape), [n_fft // 2] * 2, pad_mode).view(*input.shape[:-1], -1)
    frames = input.unfold(-1, n_fft, hop_length) * window
    halved = not frames.dtype.is_complex and onesided is not False
    transform = torch.fft.rfft if halved else torch.fft.fft
    found = transform(frames, norm="ortho" if normalized else "backward").mT
    return found if return_complex else torch.view_as_real(found)


@register(torch.istft, Tensor.istft)
def _istft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    if common_mesh("istft", [input] if window is None else [input, window]) is None:
        return NotImplemented
    # Torch's own errors, which do not depend on how many frames there are.
    few = torch.zeros([*input.shape[-2:-1], 8], dtype=input.dtype)
    flat = None if window is None else torch.ones(window.shape)
    torch.istft(few, n_fft, hop_length, win_length, flat, True, normalized, onesided, None, return_complex)
    hop_length = n_fft // 4 if hop_length is None else hop_length
    window = _window(window, n_fft if win_length is None else win_length, n_fft, input)
    halved = input.shape[-2] != n_fft if onesided is None else onesided
    frames_of = input if input.ndim == 3 else input.unsqueeze(0)
    norm = "ortho" if normalized else "backward"
    if return_complex:
        frames = torch.fft.ifft(frames_of, n_fft, dim=-2, norm=norm)
    elif not halved:
        frames = torch.fft.ifft(frames_of, n_fft, dim=-2, norm=norm).real
    else:
        frames = torch.fft.irfft(frames_of, n_fft, dim=-2, norm=norm)
    envelope = window.abs().square().unsqueeze(-1) * torch.ones_like(frames[:1].real)
    signal, total = (_overlapped(t, n_fft, hop_length) for t in (frames * window.unsqueeze(-1), envelope))
    start = n_fft // 2 if center else 0
    expected = signal.shape[-1]
    stop = start + length if length is not None else expected - start if center else expected
    signal, total = signal[:, start:stop], total[:, start:stop]
    if float(total.detach().abs().min()) <= 1e-11:
        raise RuntimeError("istft(...) window overlap add min: 1")
    signal = signal / total
    if stop > expected:
        signal = F.pad(signal, (0, stop - expected))
    return signal if input.ndim == 3 else signal.squeeze(0)


def _overlapped(frames: Any, size: int, step: int) -> Any:
    """The sum of frames, (batch, size, frames), that start ``step`` apart."""
    if frames.dtype.is_complex:
        return torch.complex(_overlapped(frames.real, size, step), _overlapped(frames.imag, size, step))
    identity = torch.eye(size, dtype=frames.dtype, device=frames.device).unsqueeze(1)
    return F.conv_transpose1d(frames, identity, stride=step).squeeze(1)
