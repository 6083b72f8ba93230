"""Advice follows from previews and the machine: what is faster on it comes first, and what does not pay is said."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardtensor
from shardtensor.__main__ import main
from shardtensor.observe.explain import Machine


def image(*shape):
    return torch.empty(*shape, device="meta")


def test_the_long_dim_is_not_the_one_that_sends_less():
    """Rows of 2048 pixels cost more to send than columns of 512."""
    conv = nn.Conv2d(16, 16, 3, padding=1)
    slow_link = Machine(latency=0.0, bandwidth=1e9)
    found = shardtensor.advise(conv, image(1, 16, 512, 2048), ranks=2, machine=slow_link)
    assert found.best.dims == (3,) and found.best.mesh == (2,)
    assert [choice.dims for choice in found.choices] == [(3,), (2,)]
    assert found.choices[0].bytes_sent * 4 == pytest.approx(found.choices[1].bytes_sent, rel=0.3)
    assert found.pays and 1.2 < found.speedup <= 2


def test_meshes_of_two_dims():
    """Four tiles have shorter boundaries than four bands; but more messages, which count where latency does."""
    conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    options = {"ranks": 4, "backward": False}
    by_bytes = shardtensor.advise(
        conv, image(1, 4, 2048, 2048), machine=Machine(latency=0.0, bandwidth=1e6), **options
    )
    assert by_bytes.best.mesh == (2, 2) and by_bytes.best.dims == (2, 3)
    options = {"ranks": 8, "backward": False}
    by_messages = shardtensor.advise(conv, image(1, 4, 2048, 2048), machine=Machine(latency=1.0), **options)
    assert by_messages.best.mesh == (8,)
    assert {choice.mesh for choice in by_messages.choices} == {(8,), (2, 4), (4, 2)}


def test_meshes_of_three_dims_and_what_is_tried():
    """Eight blocks have smaller surfaces than eight slabs."""
    conv = nn.Conv3d(1, 1, 3, padding=1)
    seen = []
    found = shardtensor.advise(
        *(conv, image(1, 1, 64, 64, 64)),
        ranks=8,
        backward=False,
        machine=Machine(latency=0.0, bandwidth=1e6),
        tried=lambda choice, left: seen.append((choice.mesh, left)),
    )
    assert found.best.mesh == (2, 2, 2) and found.best.dims == (2, 3, 4)
    assert [left for _, left in seen] == list(reversed(range(10)))
    assert {mesh for mesh, _ in seen} == {(8,), (2, 4), (4, 2), (2, 2, 2)}


def test_the_machine_is_named_where_times_are_compared():
    conv, x = nn.Conv2d(16, 16, 3, padding=1), image(1, 16, 512, 2048)
    found = shardtensor.advise(conv, x, ranks=2, machine="a100")
    assert "as fast as one rank (a100)" in found.verdict() and "assumed machine: a100 (19.5 TFLOP/s" in str(found)
    assert found._repr_html_().startswith("<pre>choice")


def test_sizes_are_aligned_to_patches():
    """Shards of 36 rows are 9 patches and a half; aligned ones have no halo at all."""
    found = shardtensor.advise(
        nn.Conv2d(3, 8, 8, stride=8), image(1, 3, 72, 16), ranks=2, dims=[2], backward=False
    )
    assert [choice.sizes[0] for choice in found.choices] == [(32, 40), (36, 36)]
    assert found.choices[0].bytes_sent == 0 < found.choices[1].bytes_sent


def test_it_is_honest_where_it_does_not_pay():
    small = shardtensor.advise(nn.Conv2d(3, 4, 3, padding=1), image(1, 3, 64, 64), ranks=2)
    assert not small.pays and small.speedup < 1
    assert "Not for speed" in small.verdict() or "does not pay" in small.verdict()
    weights = shardtensor.advise(nn.Conv1d(512, 512, 3, padding=1), image(1, 512, 8), ranks=2, dims=[2])
    assert "does not pay here" in str(weights) and "batch" in str(weights)


def heavier_below(x):
    """Causal attention: the later rows have more to do."""
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_memory_is_that_of_the_preview():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, 3, padding=1))
    found = shardtensor.advise(model, image(1, 2, 64, 32), ranks=2, dims=[2])
    preview = shardtensor.explain(model, image(1, 2, 64, 32), mesh=2, shard=2, backward=True)
    held = [4 * preview.weight_bytes + preview.input_bytes[r] + preview.total(r, "saved_bytes") for r in (0, 1)]
    assert found.best.memory == max(held) < found.single.memory
    assert f"A training step with AdamW holds up to {max(held) / 1024:.1f} KiB on a rank" in str(preview)
    # One rank keeps what plain PyTorch keeps: the first result, which silu and the second convolution's gradient need.
    assert found.single.memory == 4 * preview.weight_bytes + 2 * 64 * 32 * 4 + 2 * 4 * 64 * 32 * 4


def refused(x):
    return torch.as_strided(x, x.shape, (*x.stride()[:2], 1, x.shape[2]))


def test_everything_refused():
    found = shardtensor.advise(refused, image(1, 2, 8, 8), ranks=2)
    assert found.best is None and found.speedup == 0 and not found.pays
    assert len(found.refused) == 2 and "Remedy" in str(found) and "Every way to shard is refused" in str(found)


def test_sizes_are_balanced_where_ranks_differ():
    """The second half of the rows sees three times as many keys."""
    x = image(1, 2, 256, 16)
    preview = shardtensor.explain(heavier_below, x, mesh=2, shard=2)
    assert preview.flops(1) == 3 * preview.flops(0)
    machine = Machine(flops=1e9, memory_bandwidth=1e12, latency=0.0, bandwidth=1e12)
    found = shardtensor.advise(heavier_below, x, ranks=2, dims=[2], machine=machine, backward=False)
    even = next(choice for choice in found.choices if choice.sizes[0] == (128, 128))
    assert found.best.sizes[0] == (192, 64) and found.best.seconds < 0.8 * even.seconds


def of_a_dict(batch):
    return batch["image"].sin() + batch["offset"]


def test_an_input_in_a_dict():
    batch = {"image": image(1, 2, 64, 32), "offset": torch.empty(())}
    found = shardtensor.advise(of_a_dict, batch, ranks=2, dims=[2])
    assert found.best.sizes == {0: (32, 32)} and found.best.memory < found.single.memory


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"ranks": 1}, "at least two"),
        ({"ranks": 2, "dims": [2, 4]}, "does not have all of these"),
        ({"ranks": 2, "dims": [None]}, "does not have all of these"),
        ({"ranks": 64}, "long enough"),
        ({"ranks": 2, "machine": "tpu"}, "machine='tpu': give a Machine, or one of h100, a100, cpu"),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        shardtensor.advise(nn.ReLU(), image(1, 2, 8, 8), **arguments)


def make():
    return nn.Conv2d(3, 4, 3, padding=1)


def test_the_command(capsys):
    options = [f"{__name__}:make", "--input", "1x3x64x64", "--ranks", "2", "--dims", "2", "--latency", "1e-9"]
    assert main(["advise", *options]) == 0
    expected = shardtensor.advise(
        make(), image(1, 3, 64, 64), ranks=2, dims=[2], machine=Machine(latency=1e-9), backward=False
    )
    shown = capsys.readouterr()
    assert shown.out.strip() == str(expected).strip()
    assert "left" in shown.err  # its progress
