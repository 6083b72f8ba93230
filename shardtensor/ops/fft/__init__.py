"""Fourier transforms and spectrograms."""

from . import fft, stft  # noqa: F401
