"""Where operators live: torch's names lead to their modules, and modules to their tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import shardtensor
from shardtensor.dispatch import registry

HOMES = {
    "torch": torch,
    "nn.functional": F,
    "linalg": torch.linalg,
    "fft": torch.fft,
    "special": torch.special,
    "Tensor": torch.Tensor,
}
TESTS = Path(__file__).parent
OPERATORS = Path(shardtensor.ops.__file__).parent


def room(handler) -> str:
    """The module of a handler or rule under ``shardtensor.ops``."""
    handler = getattr(handler, "func", handler)  # of a partial
    where = handler.where if isinstance(handler, registry.Refusal) else handler.__module__
    return where.removeprefix("shardtensor.ops.")


def rule_of(op):
    return registry.rule_of(op)


def rooms_of(name: str) -> set[str]:
    """The modules that serve a name of torch's, as a function or an operator; none if torch composes it of others."""
    home, _, base = name.rpartition(".")
    table = shardtensor.registered()
    handlers = [table.get(getattr(HOMES[home], base))]
    for packet in (base, f"{home.replace('.', '_')}_{base}"):
        packet = getattr(torch.ops.aten, packet, None)
        for overload in packet.overloads() if packet else ():
            op = getattr(packet, overload)
            handlers += [table.get(op), rule_of(op)]
    return {room(handler) for handler in handlers if handler is not None}


# Drawn once at random: two names of every family, and others from all.
DRAWN = {
    "Tensor.addmm_": "linalg.matmul",
    "Tensor.apply_": "interop.export",
    "Tensor.index_fill_": "indexing.index_operators",
    "Tensor.map_": "interop.export",
    "Tensor.repeat": "shape.repeat",
    "fft.ifft": "fft.fft",
    "fft.ihfft": "fft.fft",
    "nn.functional.adaptive_avg_pool2d": "pooling.adaptive_pool",
    "nn.functional.adaptive_max_pool3d_with_indices": "pooling.adaptive_pool",
    "nn.functional.binary_cross_entropy_with_logits": "loss.elementwise",
    "nn.functional.channel_shuffle": "spatial.pixel_shuffle",
    "nn.functional.embedding_bag": "indexing.embedding",
    "nn.functional.fractional_max_pool3d_with_indices": "pooling.fractional_max_pool",
    "nn.functional.group_norm": "normalization.layer_group_rms",
    "nn.functional.hardsigmoid": "elementwise.pointwise",
    "nn.functional.local_response_norm": "normalization.layer_group_rms",
    "nn.functional.multi_head_attention_forward": "attention.multihead",
    "nn.functional.nll_loss": "loss.cross_entropy",
    "nn.functional.scaled_dot_product_attention": "attention.sdpa",
    "nn.functional.silu": "elementwise.pointwise",
    "special.chebyshev_polynomial_w": "elementwise.pointwise",
    "torch.baddbmm": "linalg.matmul",
    "torch.channel_shuffle": "spatial.pixel_shuffle",
    "torch.cholesky_inverse": "linalg.decomposition",
    "torch.cholesky_solve": "linalg.decomposition",
    "torch.conv_transpose1d": "convolution.conv_transpose",
    "torch.conv_transpose2d": "convolution.conv_transpose",
    "torch.cummax": "reduction.scan",
    "torch.cumprod": "reduction.scan",
    "torch.dist": "linalg.norm",
    "torch.flip": "shape.flip",
    "torch.gather": "indexing.gather indexing.index_operators",
    "torch.histogram": "sorting.histogram",
    "torch.isposinf": "elementwise.pointwise",
    "torch.matmul": "linalg.matmul",
    "torch.median": "sorting.quantile sorting.sort",
    "torch.reciprocal": "elementwise.pointwise",
    "torch.rrelu_": "elementwise.activations",
    "torch.stft": "fft.stft",
    "torch.unsqueeze_copy": "shape.view_copy",
}


def swept() -> dict[str, set[str]]:
    """What the sweep has found: ``{title in docs/operators.md: operators}``, by the names of torch's samples."""
    page = (TESTS.parent.parent / "docs" / "operators.md").read_text()
    parts = re.split(r"^### ", page, flags=re.M)[1:]
    names = {part.split(" (")[0].split(",")[0]: set(re.findall(r"`([\w.]+)`", part)) for part in parts}
    assert {"Right in every case", "Right or refused", "Refused in every case"} <= names.keys()
    return names


@pytest.mark.parametrize("name", DRAWN)
def test_supports_agrees_with_the_sweep(name):
    home, _, base = name.rpartition(".")
    answer, found = shardtensor.supports(getattr(HOMES[home], base)), swept()
    sample = base.rstrip("_") if home in ("torch", "Tensor") else name
    if sample in found["Refused in every case"] or base in ("apply_", "map_"):  # which torch has no samples of
        assert answer.how == "refused" and answer.reason
    else:
        assert answer and (answer.how == "decomposed" or answer.where.removeprefix("shardtensor.ops.") in DRAWN[name])
    if answer.how == "refused":
        assert sample not in found["Right in every case"] | found["Right or refused"]


def test_what_the_sweep_has_always_refused_is_not_supported():
    for name in ("_chunk_cat", "as_strided", "as_strided_copy", "as_strided_scatter", "hash_tensor"):
        assert name in swept()["Refused in every case"]
        assert shardtensor.supports(getattr(torch.ops.aten, name)).how == "refused", name


# Modules without a test file of their own: {the file that tests them: modules}.
TESTED_WITH = {
    "attention/test_sdpa.py": "attention/blockwise attention/flex attention/layout attention/online_softmax",
    "common/test_contraction.py": "common/arrangement common/part_by_part common/ring linalg/einsum",
    "common/test_distributed_sort.py": "sorting/quantile",
    "convolution/test_conv.py": "convolution/geometry convolution/halo_conv",
    "elementwise/test_random.py": "elementwise/dropout",
    "elementwise/test_softmax.py": "reduction/logsumexp",
    "indexing/test_gather.py": "indexing/combinations indexing/embedding indexing/take sorting/searchsorted",
    "indexing/test_index_operators.py": "indexing/getitem indexing/index_layout indexing/index_plan",
    "linalg/test_distance.py": "linalg/cross",
    "linalg/test_matmul.py": "linalg/linear",
    "loss/test_elementwise.py": "loss/base loss/cross_entropy",
    "neighborhood/test_attention.py": "neighborhood/natten_kernels neighborhood/tiled neighborhood/window",
    "normalization/test_channels_last.py": "normalization/columns",
    "normalization/test_layer_group_rms.py": "normalization/batch_instance normalization/geometry "
    "normalization/local_norm normalization/norm",
    "normalization/test_sharded_norm.py": "normalization/channel_norm normalization/statistics",
    "pooling/test_pool.py": "common/stencil pooling/adaptive_pool",
    "pooling/test_unpool.py": "pooling/fractional_max_pool",
    "reduction/test_extremum.py": "common/pick",
    "reduction/test_reductions.py": "common/reduce linalg/norm reduction/var",
    "shape/test_rearranging.py": "shape/diagonal shape/repeat shape/view_copy spatial/unfold",
    "shape/test_view.py": "shape/blocks shape/cat shape/flip shape/slice spatial/pixel_shuffle",
    "spatial/test_interpolate.py": "spatial/resample spatial/taps",
    "../test_dispatch.py": "common/alignment elementwise/foreach elementwise/pointwise",
    "../test_every_handler.py": "elementwise/comparison",
}


@pytest.mark.parametrize("name", DRAWN)
def test_names_lead_to_their_modules(name):
    assert rooms_of(name) == set(DRAWN[name].split())


def test_every_module_has_a_test_file():
    modules = {str(path.relative_to(OPERATORS).with_suffix("")) for path in OPERATORS.glob("*/*.py")}
    modules = {module for module in modules if not module.endswith("__init__")}
    own = {module for module in modules if (TESTS / module).with_name(f"test_{Path(module).name}.py").exists()}
    named = [module for names in TESTED_WITH.values() for module in names.split()]
    assert sorted(modules - own) == sorted(named)
    assert all((TESTS / file).exists() for file in TESTED_WITH)


def test_file_names_are_unique():
    """Worker processes find test functions by the name of their module alone."""
    names = [path.name for path in TESTS.parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
