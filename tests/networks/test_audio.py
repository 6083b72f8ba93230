"""Networks and filters of sound: demucs, julius and encodec. The name of each begins with that of its package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from networks import torchvision_set_up  # noqa: F401  # before a package imports torchvision
from networks.oracle import Network, all_exact, text
from networks.programs import layer, load, of

PACKAGE = "torch"


def import_encodec() -> None:
    """It imports torchaudio, for files, which are not read here."""
    absent = importlib.util.find_spec("torchaudio") is None
    if absent:
        sys.modules["torchaudio"] = ModuleType("torchaudio")
    try:
        importlib.import_module("encodec")
    except ImportError:
        return  # its tests are skipped
    finally:
        if absent:
            del sys.modules["torchaudio"]


import_encodec()
WAVE, CODES = (1, 2, 4001), (1, 8, 50)


def spectrum_and_back(x: Tensor) -> Tensor:
    spec = load("demucs.spec")
    wave: Tensor = spec.ispectro(spec.spectro(x, 256), 64, length=4001)
    return wave


def julius(name: str, *arguments: Any, **options: Any) -> Network:
    return layer(lambda: getattr(load("julius"), name)(*arguments, **options), WAVE, 2)


def seanet(name: str, **options: Any) -> nn.Module:
    layers: nn.Module = getattr(load("encodec.modules"), name)(channels=1, dimension=8, n_filters=4, **options)
    return layers


NETWORKS = {
    "demucs, HDemucs": layer(
        lambda: load("demucs.hdemucs").HDemucs(
            ["a", "b"], channels=4, nfft=256, depth=3, growth=2, norm_starts=9, dconv_attn=9, dconv_lstm=9
        ),
        (1, 2, 4096),
        2,
    ),
    "demucs, HTDemucs": layer(
        lambda: load("demucs.htdemucs").HTDemucs(
            ["a", "b"],
            channels=8,
            nfft=256,
            depth=2,
            growth=2,
            t_layers=1,
            t_heads=2,
            segment=0.1,
            samplerate=20480,
            bottom_channels=0,
        ),
        (1, 2, 2048),
        2,
    ),
    "demucs, transformer": layer(
        lambda: load("demucs.transformer").CrossTransformerEncoder(dim=16, num_heads=2, num_layers=2, hidden_scale=2.0),
        (1, 16, 8, 12),
        3,
        call=lambda network, x: network(x, text(1, 16, 31)),
    ),
    "demucs, spectrum and back": of(spectrum_and_back, WAVE, 2),
    "julius, low pass": julius("LowPassFilter", 0.1),
    "julius, high pass, FFT": julius("HighPassFilter", 0.1, fft=True),
    "julius, band pass": julius("BandPassFilter", 0.1, 0.2),
    "julius, FFTConv1d": julius("FFTConv1d", 2, 3, 129, padding=64),
    "julius, fewer samples": julius("ResampleFrac", 3, 2),
    "julius, bands without FFT": of(
        lambda x: load("julius").SplitBands(100, n_bands=4, fft=False)(x), WAVE, 2, default=torch.float64
    ),
    "encodec, encoder": layer(lambda: seanet("SEANetEncoder", ratios=[2, 2], lstm=1), (1, 1, 400), 2),
    "encodec, causal encoder": layer(
        lambda: seanet("SEANetEncoder", ratios=[4, 2], lstm=0, causal=True, norm="none"), (1, 1, 400), 2
    ),
    "encodec, decoder": layer(lambda: seanet("SEANetDecoder", ratios=[2, 2], lstm=2), CODES, 2),
    "encodec, quantizer": layer(
        lambda: load("encodec.quantization").ResidualVectorQuantizer(dimension=8, n_q=2, bins=5),
        CODES,
        2,
        call=lambda network, x: network.vq(x)[0],
        reduced=30.0,
    ),
    "encodec, streaming transformer": layer(
        lambda: load("encodec.modules").StreamingTransformerEncoder(16, num_heads=2, num_layers=1, past_context=8),
        (1, 21, 16),
        1,
        call=lambda network, x: network(x)[0],
    ),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("julius, FFTConv1d",), of_packages=True)
