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
DOCS = TESTS.parents[1] / "docs"
PAGE, SWEPT = DOCS / "operators.md", DOCS / "operators-tested.md"
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
    table = shardtensor.extend.registered()
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
    "Tensor.apply_": "interop",
    "Tensor.index_fill_": "indexing.index_operators",
    "Tensor.map_": "interop",
    "Tensor.repeat": "shape.repeat",
    "fft.ifft": "fft",
    "fft.ihfft": "fft",
    "nn.functional.adaptive_avg_pool2d": "pooling.adaptive_pool",
    "nn.functional.adaptive_max_pool3d_with_indices": "pooling.adaptive_pool",
    "nn.functional.binary_cross_entropy_with_logits": "loss.elementwise",
    "nn.functional.channel_shuffle": "spatial.pixel_shuffle",
    "nn.functional.embedding_bag": "indexing.embedding",
    "nn.functional.fractional_max_pool3d_with_indices": "pooling.pool",
    "nn.functional.group_norm": "normalization.layer_group_rms",
    "nn.functional.hardsigmoid": "elementwise.pointwise",
    "nn.functional.local_response_norm": "formulas",
    "nn.functional.multi_head_attention_forward": "attention.multihead",
    "nn.functional.nll_loss": "loss.cross_entropy",
    "nn.functional.scaled_dot_product_attention": "attention.sdpa",
    "nn.functional.silu": "elementwise.pointwise",
    "special.chebyshev_polynomial_w": "elementwise.pointwise",
    "torch.baddbmm": "linalg.matmul",
    "torch.channel_shuffle": "spatial.pixel_shuffle",
    "torch.cholesky_inverse": "linalg.decomposition",
    "torch.cholesky_solve": "linalg.decomposition",
    "torch.conv_transpose1d": "convolution.conv",
    "torch.conv_transpose2d": "convolution.conv",
    "torch.cummax": "reduction.scan",
    "torch.cumprod": "reduction.scan",
    "torch.dist": "linalg.norm",
    "torch.flip": "shape.flip",
    "torch.gather": "indexing.index_operators",
    "torch.histogram": "sorting.histogram",
    "torch.isposinf": "elementwise.pointwise",
    "torch.matmul": "linalg.matmul",
    "torch.median": "sorting.sort",
    "torch.reciprocal": "elementwise.pointwise",
    "torch.rrelu_": "elementwise.pointwise",
    "torch.stft": "fft",
    "torch.unsqueeze_copy": "shape.view",
}


def swept() -> dict[str, set[str]]:
    """What the sweep has found: ``{title in docs/operators-tested.md: operators}``, by the names of torch's samples."""
    parts = re.split(r"^### ", SWEPT.read_text(), flags=re.M)[1:]
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


def named(sample: str):
    """The function of a sample of the sweep, whose name may end with that of a variant; None for attributes."""
    home = next((home for home in HOMES if sample.startswith(f"{home}.")), "")
    base = sample.removeprefix(f"{home}.").partition(".")[0]
    places = [HOMES[home]] if home else [*HOMES.values(), torch.ops.aten]
    return next((getattr(place, base) for place in places if callable(getattr(place, base, None))), None)


def test_supports_tells_the_conditions_of_what_the_sweep_has_partly_refused():
    rows = re.findall(r"^\| `([\w.]+)` \| \d+ of \d+ \|", SWEPT.read_text(), flags=re.M)
    answers = {row: shardtensor.supports(function) for row in rows if (function := named(row)) is not None}
    assert len(answers) > len(rows) - 5  # older versions of torch lack some
    assert not [row for row, answer in answers.items() if not answer or not answer.reason]


def test_supports_answers_for_every_operator_of_the_page():
    functions = {row: named(row) for row in swept()["Right in every case"]}
    assert len([row for row, function in functions.items() if function is None]) < 30  # of torch.masked, and T, H
    assert not [row for row, function in functions.items() if function and not shardtensor.supports(function)]


def test_the_page_has_the_conditions():
    page = " ".join(PAGE.read_text().replace("`", "").split())
    assert not [text for text in registry.CONDITIONS.values() if text not in page]


# Modules without a test file of their own: {the file that tests them: modules}.
TESTED_WITH = {
    "test_rooms.py": "conditions",
    "attention/test_flex.py": "attention/named_keys",
    "attention/test_sdpa.py": "attention/blockwise attention/kernels attention/online_softmax",
    "common/test_contraction.py": "common/named_dims common/ring linalg/einsum",
    "convolution/test_conv.py": "convolution/halo_conv",
    "elementwise/test_fused_optimizers.py": "elementwise/optimizers",
    "fft/test_fft.py": "fft",
    "indexing/test_gather.py": "indexing/embedding",
    "indexing/test_index_operators.py": "indexing/getitem indexing/index_layout indexing/index_plan",
    "indexing/test_graphs.py": "indexing/block_work",
    "interop/test_export.py": "interop",
    "linalg/test_distance.py": "linalg/cross",
    "neighborhood/test_attention.py": "neighborhood/tiled",
    "loss/test_elementwise.py": "loss/cross_entropy",
    "normalization/test_layer_group_rms.py": "normalization/batch_instance",
    "normalization/test_sharded_norm.py": "normalization/geometry normalization/plans normalization/statistics",
    "normalization/test_norms_on_devices.py": "normalization/kernels",
    "pooling/test_pool.py": "common/stencil pooling/adaptive_pool",
    "recurrent/test_rnn.py": "recurrent",
    "reduction/test_reductions.py": "common/reduce linalg/norm",
    "shape/test_rearranging.py": "shape/diagonal shape/repeat spatial/unfold",
    "shape/test_slice_sources.py": "common/records",
    "shape/test_view.py": "shape/cat shape/flip shape/slice spatial/pixel_shuffle",
    "../dispatch/test_dispatch.py": "elementwise/pointwise",
}


@pytest.mark.parametrize("name", DRAWN)
def test_names_lead_to_their_modules(name):
    assert rooms_of(name) == set(DRAWN[name].split())


def test_every_module_has_a_test_file():
    modules = {str(path.relative_to(OPERATORS).with_suffix("")) for path in OPERATORS.rglob("*.py")}
    modules = {module for module in modules if not module.endswith("__init__")}
    own = {module for module in modules if (TESTS / module).with_name(f"test_{Path(module).name}.py").exists()}
    named = [module for names in TESTED_WITH.values() for module in names.split()]
    assert sorted(modules - own) == sorted(named)
    assert all((TESTS / file).exists() for file in TESTED_WITH)


def test_file_names_are_unique():
    """Worker processes find test functions by the name of their module alone."""
    names = [path.name for path in TESTS.parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


# -- names with a form above autograd and one below --------------------------------------------------------------------

GRADIENT = "the form above runs the one below, and gives it a gradient in the tensor's layout"
ENTRY = "the form above is that of entries of a sharded dim, which are copies: it writes to the tensor, too"
VIEW = "the form below is a view, as autograd has to know; the one above is for sharded dims, and returns a copy"
# Why one form does not serve as both. A name that is not here has one form: below autograd it runs without a graph.
BOTH = {
    **dict.fromkeys(["cummax", "cummin", "embedding", "gather", "index_select", "kthvalue"], GRADIENT),
    **dict.fromkeys(["max", "median", "min", "mode", "nanmedian", "sort", "topk"], GRADIENT),
    **dict.fromkeys(["copy_", "fill_", "floor_divide_", "masked_fill_", "zero_", "__irshift__"], ENTRY),
    **dict.fromkeys(("select", "unfold"), VIEW),
    "detach": "above, the program's detach() shares the record of writes with the tensor; autograd's own does not",
    "index_fill": "only a call knows whether the value requires grad, which the form above is for",
    "index_fill_": "as index_fill",
    "index_put": "by a sharded mask, the gradient of the values depends on data; by indices, torch's formula is local",
    "index_put_": "as index_put",
    "norm": "above is the nuclear norm, below another operator of this name, which torch.pairwise_distance calls",
    "repeat_interleave": "below is the operator that makes indices of counts, which the form above calls",
    "squeeze": "above is the only entry of a sharded dim, by select",
    "stack": "above are entries that ranks own, whose gradients torch's formula would send to other ranks",
    "sum": "below are the gradients of broadcast operands, by the rule of all reductions: a form would take longer",
}


def plain_name(key) -> str:
    return key._schema.name.split("::")[-1] if hasattr(key, "_schema") else key.__name__


def test_few_names_have_a_form_above_autograd_and_one_below():
    def own(table):
        return {plain_name(key) for key, handler in table.items() if handler.__module__.startswith("shardtensor.")}

    def handlers(table):
        return {key: getattr(handler, "func", handler) for key, handler in table.items()}

    below = own(handlers(registry.OPERATORS)) | own(handlers(registry.RULES))
    assert own(handlers(registry.FUNCTIONS)) & below == set(BOTH)
