"""Short-time Fourier transforms against the unsharded ones: values, gradients, messages."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.tensor import Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

CUTS = [(2, 0, (2, 1)), (2, 1, (60, 37)), (2, 1, (0, 97)), (3, 1, (90, 2, 5)), (3, 1, (33, 31, 33))]
OPTIONS = [
    {},
    {"hop_length": 5, "normalized": True, "pad_mode": "constant"},
    {"n_fft": 16, "win_length": 12, "onesided": False},
]


def a_signal():
    return torch.linspace(-3, 5, 3 * 97, dtype=torch.float64).sin().reshape(3, 97)


def a_window():
    return torch.hann_window(12, dtype=torch.float64)


def there_and_back(x, window, n_fft=12, pad_mode="reflect", **options):
    there = torch.stft(x, n_fft, window=window, pad_mode=pad_mode, return_complex=True, **options)
    return torch.view_as_real(there), torch.istft(there, n_fft, window=window, length=x.shape[-1], **options)


@pytest.mark.parametrize("ranks,dim,sizes", CUTS)
@pytest.mark.parametrize("number", range(len(OPTIONS)))
@on_ranks("ranks")
def test_there_and_back(number, ranks, dim, sizes):
    assert_matches_unsharded(
        lambda x, w: there_and_back(x, w, **OPTIONS[number]),
        a_signal(),
        a_window(),
        placements=[[Shard(dim)], None],
        mesh_shape=ranks,
        shard_sizes={0: sizes},
    )


@pytest.mark.parametrize("sizes", [(4, 3), (0, 7), (6, 1)])
@on_ranks(2)
def test_back_from_cut_frequencies_or_frames(sizes):
    window = a_window()
    spectrum = torch.stft(a_signal(), 12, window=window, return_complex=True)
    for dim in (1, 2):
        cut = (sizes[0], spectrum.shape[dim] - sizes[0])
        assert_matches_unsharded(
            lambda x: x.istft(12, window=window),
            spectrum,
            placements=[[Shard(dim)]],
            mesh_shape=2,
            shard_sizes={0: cut},
        )


def traffic():
    x = shard(a_signal()[:1, :96], shared_mesh(2), [Shard(1)], {0: (50, 46)})
    with count_communication() as counted:
        torch.stft(x, 12, hop_length=4, window=a_window(), center=False, return_complex=True)
    return counted.bytes_sent


def test_only_a_halo_travels():
    """Frames of 12 samples, a step of 4 apart: at most 11 samples cross the cut."""
    sent = run_distributed(traffic, 2)
    assert 0 < sum(sent) <= 11 * 8, sent


def silent_window():
    spectrum = shard(
        torch.stft(a_signal(), 12, window=a_window(), return_complex=True), shared_mesh(2), [Shard(2)], {0: (20, 13)}
    )
    torch.istft(spectrum, 12, window=torch.zeros(12, dtype=torch.float64))


def test_a_window_that_adds_up_to_nothing_is_torchs_error_on_every_rank():
    for error in run_expecting_errors(silent_window, 2):
        with pytest.raises(RuntimeError, match="window overlap add"):
            raise error


def aligned():
    x = shard(a_signal(), shared_mesh(2), [Shard(1)], {0: (50, 47)})
    torch.stft(x, 12, window=a_window(), center=False, return_complex=True, align_to_window=True)


@pytest.mark.skipif("align_to_window" not in torch.stft.__code__.co_varnames, reason="this torch has no such argument")
def test_alignment_to_the_window_is_refused():
    for error in run_expecting_errors(aligned, 2):
        with pytest.raises(UnsupportedSharding, match=r"align_to_window.*Remedy: pad the signal"):
            raise error
