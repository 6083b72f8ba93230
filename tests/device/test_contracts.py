"""The table of what CUDA's kernels demand: each row raises and passes, the page has them, and no kernel is missing.

On the CPU: a contract looks at tensors of any device.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch

import shardtensor
from device import contracts
from shardtensor._compat import decomposes
from shardtensor.ops.spatial.interpolate import MODES

ROOT = Path(shardtensor.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()

# -- rows --------------------------------------------------------------------------------------------------------------


def ones(*shape, dtype=torch.float32, last=False):
    t = torch.ones(shape, dtype=dtype)
    return t.contiguous(memory_format=torch.channels_last) if last else t


half, bf16, double, long = torch.float16, torch.bfloat16, torch.float64, torch.int64
x, c = ones(2, 4, 6, 6), ones(4)
yes, eval_only = [True, True, True], [True, False, False]
batch_norm = (x, c, c, c, c, True, 0.1, 1e-5)
batch_norm_backward = (x, x, c, c, c, c, c, True, 1e-5, yes)
reduce = (x, x, c, c, c, True, True, True)
elemt_backward = (x, x, c, c, c, c, c, ones(2, dtype=torch.int32))
gathered = (x, ones(2, 4), ones(2, 4), c, c, 0.1, 1e-5, ones(2))
group_norm = (x, c, c, 2, 4, 36, 2, 1e-5)
group_norm_backward = (x, x, ones(2, 2), ones(2, 2), c, 2, 4, 36, 2, yes)
layer_norm = (x, [6], ones(6), ones(6), 1e-5)
layer_norm_backward = (x, x, [6], ones(2, 4, 6, 1), ones(2, 4, 6, 1), ones(6), ones(6), yes)
convolution = (x, x, ones(4, 4, 3, 3), [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, yes)
pooled, volume = ones(2, 4, 3, 3), ones(2, 4, 6, 6, 6)
max_pool = (pooled, x, [2, 2], [2, 2], [0, 0], [1, 1], False, pooled.long())
max_pool3 = (ones(2, 4, 3, 3, 3), volume, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, ones(2, 4, 3, 3, 3).long())
avg_pool = (pooled, x, [2, 2], [2, 2], [0, 0], False, True, None)
avg_pool3 = (ones(2, 4, 3, 3, 3), volume, [2] * 3, [2] * 3, [0] * 3, False, True, None)
nearest = (x, [6, 6], [2, 4, 3, 3])
linear = (x, [6, 6], [2, 4, 3, 3], False)
q, q16 = ones(2, 4, 10, 8), ones(2, 4, 10, 8, dtype=half)
rows, padded = ones(2, 4, 10), ones(2, 4, 32)
random = (ones(2), ones(2))
flash_backward = (q16, q16, q16, q16, q16, rows, None, None, 10, 10, 0.0, False, *random)
result = ones(2, 10, 4, 8).transpose(1, 2)
efficient_backward = (result, q, q, q, None, result, padded, *random, 0.0, [True] * 4)
rows_first = ones(2, 10, 4, 8)
efficient_forward = (rows_first, rows_first, rows_first, None, None, None, None, None, 0.0, 2, True)
efficient_rows_backward = (
    *(rows_first,) * 4, None, rows_first, None, None, 10, 10, padded, 0.0, *random, 2, False
)  # fmt: skip
mask, unaligned = ones(2, 4, 10, 16)[..., :10], ones(2, 4, 10, 10)
weights, channels_last = [ones(4, 4, 3, 3)], [ones(4, 4, 3, 3, last=True)]
adam, sgd = (weights, weights, weights, weights, [], [ones()]), (weights, weights, weights)
scaled = ones(3, 5)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns that it has little support
    complex_half = ones(8, 5, dtype=torch.complex32)


def but(args, *changes):
    """The arguments with others at these places, ``(place, value)``."""
    changed = list(args)
    for place, value in changes:
        changed[place] = value
    return tuple(changed)


# Of each row: a call that keeps it, and calls that break it with what is raised.
ROWS = {
    "aten::native_batch_norm": (
        batch_norm,
        (but(batch_norm, (1, c.double())), "Expected weight to have type Float but got Double"),
        (but(batch_norm, (3, None), (4, None), (5, False)), "Expected has_running_mean to be true"),
        (but(batch_norm, (0, ones(2, 0, 6))), "invalid configuration argument"),
        (but(batch_norm, (0, x.long())), "not implemented for 'Long'"),
    ),
    "aten::native_batch_norm_backward": (
        batch_norm_backward,
        (
            but(batch_norm_backward, (5, None), (6, None), (9, [False, True, True])),
            "save_mean should always be defined",
        ),
        (
            but(batch_norm_backward, (5, None), (6, None), (7, False), (9, eval_only)),
            "save_mean should always be defined",
        ),
        (but(batch_norm_backward, (1, ones(2, 4, 6, 6, last=True)), (6, None)), "save_invstd should always be defined"),
        (but(batch_norm_backward, (2, None)), "tensor does not have a device"),
        (but(batch_norm_backward, (5, c.half())), "Expected save_mean to have type Float but got Half"),
        (but(batch_norm_backward, (0, x.half())), "Expected grad_output to have type Float but got Half"),
        (but(batch_norm_backward, (5, None)), "illegal memory access"),
        (but(batch_norm_backward, (5, ones(0)), (9, [False, True, True])), "Expected !train"),
    ),
    "aten::batch_norm_update_stats": (
        (x, None, None, 0.1),
        ((x, c, None, 0.1), "Expected running_mean->defined() == running_var->defined()"),
        ((ones(0, 4, 6), None, None, 0.1), "input tensor must have at least one element"),
    ),
    "aten::batch_norm_stats": (
        (x.half(), 1e-5),
        ((ones(0, 4, 6), 1e-5), "input tensor must have at least one element"),
    ),
    "aten::batch_norm_elemt": (
        (x.half(), c, c, c, c, 1e-5),
        ((x, c, c, c.double(), c, 1e-5), "Expected mean to have type Float but got Double"),
    ),
    "aten::batch_norm_backward_reduce": (
        reduce,
        (but(reduce, (4, None)), "tensor does not have a device"),
        (but(reduce, (3, c.double())), "mean and invstd need to have the same data types"),
    ),
    "aten::batch_norm_backward_elemt": (
        elemt_backward,
        (but(elemt_backward, (7, ones(2))), "expected scalar type Int but found Float"),
        (but(elemt_backward, (4, c.half())), "Expected weight to have type Float but got Half"),
    ),
    "aten::batch_norm_gather_stats_with_counts": (
        gathered,
        (but(gathered, (1, c)), "expected mean to be 2-dimensional"),
        (but(gathered, (7, ones(1))), "expected counts to have at least one element"),
        (but(gathered, (7, ones(2).long())), "Expected counts to have type Float but got Long"),
    ),
    "aten::native_group_norm": (
        group_norm,
        (but(group_norm, (0, ones(2, 4, 6, 6, last=True))), "Expected X.is_contiguous(memory_format) to be true"),
        (but(group_norm, (0, x.bfloat16())), "expected scalar type BFloat16 but found Float"),
    ),
    "aten::native_group_norm_backward": (
        group_norm_backward,
        (but(group_norm_backward, (0, ones(2, 4, 6, 6, last=True))), "reads X and dY as row-major"),
        (but(group_norm_backward, (2, ones(2, 4)[:, ::2])), "Expected mean.is_contiguous() to be true"),
        (but(group_norm_backward, (4, None)), "tensor does not have a device"),
        (but(group_norm_backward, (0, x.half())), "Expected scalar types of X and dY are same."),
    ),
    "aten::native_layer_norm": (
        layer_norm,
        (but(layer_norm, (0, x.bfloat16())), "expected scalar type BFloat16 but found Float"),
    ),
    "aten::native_layer_norm_backward": (
        layer_norm_backward,
        (but(layer_norm_backward, (6, None)), "tensor does not have a device"),
        (but(layer_norm_backward, (3, ones(2, 4, 6, 1, dtype=double))), "expected scalar type Float but found Double"),
        (but(layer_norm_backward, (4, ones(2, 4, 6, 2)[..., :1])), "reads mean and rstd as contiguous"),
    ),
    "aten::convolution_backward": (
        convolution,
        (but(convolution, (2, ones(4, 4, 3, 3, dtype=bf16))), "Input type (Float) and weight type (BFloat16)"),
        (but(convolution, (0, x.half())), "expected scalar type Float but found Half"),
        (but(convolution, (1, x.long()), (2, ones(4, 4, 3, 3).long())), "not supported for Long"),
    ),
    "aten::max_pool2d_with_indices_backward": (
        max_pool,
        (but(max_pool, (0, pooled.half())), "expected scalar type Float but found Half"),
        (but(max_pool, (7, pooled.int())), "expected scalar type Long but found Int"),
    ),
    "aten::max_pool3d_with_indices_backward": (
        max_pool3,
        (but(max_pool3, (1, volume.long())), "not implemented for 'Long'"),
    ),
    "aten::avg_pool2d_backward": (
        avg_pool,
        (but(avg_pool, (0, pooled.half())), "expected scalar type Float but found Half"),
    ),
    "aten::avg_pool3d_backward": (
        avg_pool3,
        (but(avg_pool3, (1, volume.half())), "expected scalar type Half but found Float"),
    ),
    "aten::upsample_nearest2d_backward": (
        nearest,
        (but(nearest, (0, x.long())), "not implemented for 'Long'"),
    ),
    "aten::upsample_bilinear2d_backward": (
        linear,
        (but(linear, (0, x.byte())), "not implemented for 'Byte'"),
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (
        None,
        ((q, q, q), "Could not run 'aten::_scaled_dot_product_flash_attention_for_cpu'"),
    ),
    "aten::_scaled_dot_product_flash_attention": (
        (q16, q16, q16),
        ((q, q, q), "FlashAttention only support fp16 and bf16 data type"),
        ((q16, q16.bfloat16(), q16), "query and key must have the same dtype"),
        ((q16[..., :6], q16[..., :6], q16[..., :6]), "head_size must be a multiple of 8"),
        ((q16.mT, q16.mT, q16.mT), "Input tensor must have contiguous last dimension"),
        ((ones(2, 4, 10, 512, dtype=half),) * 3, "only supports head dimension at most 256"),
    ),
    "aten::_scaled_dot_product_flash_attention_backward": (
        flash_backward,
        (but(flash_backward, (0, q)), "query and dout must have the same dtype"),
        (but(flash_backward, (5, padded)), "reads a contiguous float32 log-sum-exp"),
    ),
    "aten::_scaled_dot_product_efficient_attention": (
        (q, q, q, mask, True),
        ((q.double(), q.double(), q.double(), None, True), "Only fp32, half & bf16 supported"),
        ((q[..., :6].contiguous(),) * 3 + (None, True), "query is not correctly aligned (strideM)"),
        ((q, q, q, unaligned, True), "attn_bias is not correctly aligned (strideM)"),
        ((q, q, q, ones(10, 16)[:, :10], True), "Bias expected in BMHK format"),
        ((q, q[:, :2], q[:, :2], None, True), "Expected query.size(2) == key.size(2) to be true"),
        ((q, q.mT.contiguous().mT, q, None, True), "key: last dimension must be contiguous"),
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": (
        efficient_backward,
        (but(efficient_backward, (6, rows)), "LSE is not correctly aligned (strideH)"),
        (but(efficient_backward, (6, ones(2, 4, 64))), "up to a multiple of 32"),
        (but(efficient_backward, (5, q)), "reads out as contiguous in (batch, rows, heads, size)"),
    ),
    "aten::_efficient_attention_forward": (
        efficient_forward,
        (but(efficient_forward, (9, 3)), "custom_mask_type < NumCustomMaskTypes"),
        (but(efficient_forward, (1, rows_first[:, :, :2])), "Expected query.size(2) == key.size(2) to be true"),
        (but(efficient_forward, (0, rows_first[..., :6].contiguous())), "no kernel found to launch"),
    ),
    "aten::_efficient_attention_backward": (
        efficient_rows_backward,
        (but(efficient_rows_backward, (10, rows)), "LSE is not correctly aligned (strideH)"),
        (but(efficient_rows_backward, (5, rows_first.mT.contiguous().mT)), "reads out as contiguous"),
    ),
    "aten::_softmax_backward_data": (
        (scaled, scaled, 1, half),
        ((scaled, scaled, 1, double), "expected input and grad types to match"),
        ((scaled, scaled.half(), 1, 6), "expected scalar type Float but found Half"),
    ),
    "aten::_fft_r2c": (
        (ones(8, 6, dtype=half), [0], 0, True),
        ((ones(8, 6, dtype=half), [1], 0, True), "sizes are powers of two"),
    ),
    "aten::_fft_c2r": (
        (complex_half, [1], 0, 8),
        ((complex_half, [1], 0, 9), "sizes are powers of two"),
    ),
    "aten::_fused_adam_": (
        adam,
        (
            but(adam, (1, channels_last)),
            "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout",
        ),
        (([ones(2, 6)[:, ::2]],) * 4 + ([], [ones()]), "must have same dtype, device, and layout"),
    ),
    "aten::_fused_sgd_": (
        sgd,
        (but(sgd, (2, channels_last)), "Expected at::native::check_fast_path_restrictions"),
    ),
    "aten::_fused_adagrad_": (
        (weights, weights, weights, [ones()]),
        (
            (weights, [w.half() for w in weights], weights, [ones()]),
            "params, grads, and state_sums must have same dtype",
        ),
    ),
    "aten::histogram.bin_ct": (
        None,
        ((scaled, 4), "Could not run 'aten::histogram.bin_ct'"),
    ),
}


def name_of(row):
    return row.names[0] if row.names[0] in ROWS else next(n for n in row.names if n in ROWS)


@pytest.mark.parametrize("row", contracts.CONTRACTS, ids=lambda row: row.names[0])
def test_a_call_that_keeps_its_contract_passes_and_others_raise(row):
    name = name_of(row)
    kept, *broken = ROWS[name]
    if kept is not None:
        contracts.check(name, kept)
    for args, text in broken:
        with pytest.raises(RuntimeError, match=re.escape(text)):
            contracts.check(name, args)


@pytest.mark.parametrize("name", ["aten::avg_pool3d_backward", "aten::upsample_bilinear2d_backward"])
def test_kernels_that_are_not_deterministic(name):
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            contracts.check(name, ROWS[name][0])
    finally:
        torch.use_deterministic_algorithms(False)
    contracts.check(name, ROWS[name][0])


def test_contracts_are_of_operators_and_name_their_arguments():
    for row in contracts.CONTRACTS:
        found = {name: operator(name) for name in row.names}
        assert set(found) <= contracts.NAMES, row.names
        arguments = {a.name for op in found.values() for a in op._schema.arguments}
        assert set(inspect.signature(row.check).parameters) <= arguments, row.names


def operator(name):
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


# -- the page ----------------------------------------------------------------------------------------------------------


def cells(heading):
    """The rows of the table under a heading of the page, without the head."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names_in(cell):
    """The operators that the page names, without those that this torch does not have yet."""
    named = re.findall("`([^`]*)`", cell)
    return [f"aten::{name}" for name in named if hasattr(torch.ops.aten, name.partition(".")[0])]


def test_the_page_has_the_rows():
    shown = [(tuple(names_in(names)), demands, source) for names, demands, source, *_ in cells("With demands")]
    assert shown == [(row.names, row.demands, f"`{row.source}`") for row in contracts.CONTRACTS]


def test_the_page_says_where_kernels_are_called():
    found = kernels()
    for names, _, _, where, met in cells("With demands"):
        paths = re.findall("`(ops/[^`]*)`", where)
        callers = {path for name in names_in(names) for path in found.get(name.partition(".")[0], ())}
        assert all(any(c.startswith(path) for c in callers) for path in paths), (names, callers)
        assert bool(paths) == bool(callers) and met, (names, callers)


def test_every_kernel_that_the_package_calls_is_on_the_page():
    demanding = {name.partition(".")[0] for name in contracts.NAMES}
    plain = [name for _, names in cells("Without demands") for name in names_in(names)]
    assert len(set(plain)) == len(plain) and not set(plain) & demanding
    assert set(kernels()) - demanding == set(plain)


# What f-strings name, by file: the template, and what it stands for.
FILLED = {
    "ops/elementwise/optimizers.py": {"{_name}_": [f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")]},
    "ops/pooling/pool.py": {
        "max_pool{n}d_with_indices_backward": [f"max_pool{n}d_with_indices_backward" for n in (2, 3)],
        "avg_pool{n}d_backward": [f"avg_pool{n}d_backward" for n in (2, 3)],
    },
    "ops/spatial/interpolate.py": {"{name}_backward": [f"{name}_backward" for name in MODES]},
    "ops/shape/view.py": {"{_name}_copy": []},  # copies of views, which do not call it
}


@functools.cache
def kernels():
    """The operators below autograd that the package's source names, and the files that do, ``{aten::name: paths}``.

    Not those that are elementwise, views, or composed of others by torch.
    """
    found, demanding = {}, {name.removeprefix("aten::").partition(".")[0] for name in contracts.NAMES}
    for path in sorted(ROOT.rglob("*.py")):
        tree, file = ast.parse(path.read_text()), path.relative_to(ROOT).as_posix()
        for name in named(tree, FILLED.get(file, {})):
            if (
                not name.startswith("__")
                and hasattr(torch.ops.aten, name)
                and (name in demanding or not is_simple(name))
            ):
                found.setdefault(f"aten::{name}", set()).add(file)
    return found


def named(tree, filled):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and declares(node)]
    declared = {id(part) for call in calls for a in call.args for part in ast.walk(a)}
    for node in ast.walk(tree):
        path = attribute_path(node) if isinstance(node, ast.Attribute) else []
        for root in (["torch", "ops", "aten"], ["_aten"]):
            rest = path[len(root) :] if path[: len(root)] == root else []
            if len(rest) == 2 or (len(rest) == 1 and rest[0].startswith("_") and id(node) not in declared):
                yield rest[0]
        if len(path) == 2 and path[0] == "torch" and path[1].startswith(("_", "native_", "batch_norm_")):
            yield path[1]
        if isinstance(node, ast.Call) and id(node) not in declared and is_getattr(node):
            yield from filled[template(node.args[1])]
        if isinstance(node, ast.Constant) and f"aten::{node.value}" in contracts.NAMES and id(node) not in declared:
            yield node.value


def is_simple(name):
    packet = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]
    # Some are TorchScript's alone.
    dispatched = [op for op in overloads if torch._C._dispatch_has_kernel(op.name())]
    return all(torch.Tag.pointwise in op.tags or op.is_view or decomposes(op) for op in dispatched)


def template(text):
    return "".join(v.value if isinstance(v, ast.Constant) else f"{{{ast.unparse(v.value)}}}" for v in text.values)


def declares(call):
    return isinstance(call.func, ast.Name) and call.func.id in ("operator", "register", "_spells")


def is_getattr(call):
    """Whether it is of an operator by an f-string."""
    is_named = isinstance(call.func, ast.Name) and call.func.id == "getattr" and isinstance(call.args[1], ast.JoinedStr)
    return is_named and attribute_path(call.args[0]) in (["torch", "ops", "aten"], ["_aten"])


def attribute_path(node):
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []
