"""The sweep over torch's operators: that it sees what it should, and what it says."""

from __future__ import annotations

import time
import types
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

import shardtensor
from operator_sweep import operator_names, sweep
from operator_sweep.cases import shard_sizes
from operator_sweep.drive import Report
from operator_sweep.half import less_exact
from operator_sweep.memory import MEMORY, copied, in_memory, laid_out
from operator_sweep.table import render
from operator_sweep.worker import Case, Options
from shardtensor import UnsupportedSharding
from shardtensor.layout import caches
from shardtensor.layout.spec import ShardTensorSpec

pytestmark = pytest.mark.every_run

aten = torch.ops.aten


def told(report):
    """Enough to find a case again."""
    return "\n".join(f"{c.outcome}: {c.operator} #{c.sample}, {c.cut}: {c.detail}" for c in report.bad())


# -- the sweep itself: broken operators are found out -----------------------------------------------------------------


def broken(handler):
    """An operator that does not do what torch's does; on which a sweep is tried."""
    shardtensor.extend.register(aten.tril.default)(handler)
    return lambda: shardtensor.extend.unregister(aten.tril.default)


def wrong_value():
    return broken(lambda x, diagonal=0: x * 1.001)


def wrong_on_one_rank():
    return broken(lambda x, diagonal=0: x if dist.get_rank() else NotImplemented)


def another_exception():
    def handler(x, diagonal=0):
        raise ZeroDivisionError("division by zero")

    return broken(handler)


def refused_by_one():
    def handler(x, diagonal=0):
        if dist.get_rank():
            raise UnsupportedSharding("tril: only here")
        return NotImplemented

    return broken(handler)


def waiting_for_nobody():
    def handler(x, diagonal=0):
        if dist.get_rank():
            dist.all_reduce(torch.zeros(1))
        raise UnsupportedSharding("tril: the other waits")

    return broken(handler)


def stuck():
    def handler(x, diagonal=0):
        time.sleep(1000)

    return broken(handler)


@pytest.mark.parametrize(
    "setup, outcome",
    [
        (wrong_value, "wrong"),
        (wrong_on_one_rank, "wrong"),
        (another_exception, "foreign"),
        (refused_by_one, "split"),
        pytest.param(waiting_for_nobody, "hang", marks=pytest.mark.slow),
        pytest.param(stuck, "hang", marks=pytest.mark.slow),
    ],
)
def test_broken_operators_are_found_out(setup, outcome):
    report = sweep(["tril"], 2, Options(kind="forward", limit=1, setup=(__name__, setup.__name__)), timeout=30)
    assert report.counted()[outcome] >= 1, told(report)
    assert len(report.cases) == len(swept_well().cases)  # it has gone on behind each


@cache
def swept_well():
    good = sweep(["tril"], 2, Options(kind="forward", limit=1))
    assert not good.bad() and good.counted()["right"]
    return good


def contributions_rounded():
    """Ranks that round what they contribute to sums of half precision."""
    kept = ShardTensorSpec.held_dtype
    ShardTensorSpec.held_dtype = property(lambda spec: spec.tensor_meta.dtype)
    caches.forget()

    def restore():
        ShardTensorSpec.held_dtype = kept
        caches.forget()

    return restore


def test_rounded_contributions_are_found_out():
    for data, outcome in [("samples", "right"), ("cancelling", "wrong")]:
        options = Options("bfloat16", data=data, limit=6, setup=(__name__, contributions_rounded.__name__))
        report = sweep(["matmul"], 2, options)
        assert report.counted()[outcome] >= 1, told(report)
    assert less_exact([torch.tensor([256.0])], [torch.tensor([256.0])], [torch.tensor([256.0])]) is None
    one, exact = torch.tensor([256.0]).bfloat16(), torch.tensor([256.0]).double()
    assert less_exact([one + 2], [one], [exact]) is None  # a unit
    assert "off by 4" in less_exact([one + 4], [one], [exact])
    assert less_exact([one + 4], [one - 2], [exact]) is None  # as one device's
    assert "not finite" in less_exact([one * torch.inf], [one], [exact])


def test_what_is_swept():
    names = operator_names()
    assert len(names) > 600 and {"add", "nn.functional.conv2d", "linalg.svd"} <= set(names)
    for length in (0, 1, 2, 5, 10):
        for ranks in (2, 3):
            for empty in (False, True):
                assert sum(shard_sizes(length, ranks, empty)) == length
            assert length == 0 or 0 in shard_sizes(length, ranks, True)
    said = {case.cut for case in sweep(["mul"], 2, Options(limit=8)).cases}
    for cut in ("dim 0, others plain", "dim 1, others replicated", "dim 0 with an empty shard, others alike"):
        assert cut in said


def test_tables_are_made_of_cases():
    cases = [
        Case("add", 0, "dim 0, others plain", "right", "", False),
        Case("mul", 0, "dim 0, others plain", "right", "", False),
        Case("mul", 0, "dim 1, others plain", "refused", "aten.mul: tensor dim 1 of (3, 4) is odd", False),
        Case("svd", 0, "dim 0, others plain", "refused", "aten.svd: no distributed form is known", False),
        Case("rand", 0, "dim 0, others plain", "right", "", True),
    ]
    text = render([("all", Report(cases))])
    assert "| all | 5 | 3 | 2 | 0 | 50.0% |" in text
    assert "### Right in every case (2 operators)" not in text and "### Right in every case (1 operators)" in text
    assert "| `mul` | 1 of 2 | tensor dim d of (...) is odd |" in text
    assert "| no distributed form is known | `svd` |" in text
    assert "(1)\n\n`rand`" in text


# -- what it says about the operators ---------------------------------------------------------------------------------


# (The first sample of every operator, in all cuts, is among the cases of test_every_handler.py.)

# One operator of each way to the shards that a memory format can be lost or misread on.
IN_OTHER_MEMORY = ("nn.functional.avg_pool2d", "nn.functional.batch_norm", "nn.functional.conv2d", "softmax", "flip")


@pytest.mark.parametrize("memory", ["channels last, batch 1", "permuted", "expanded", "sliced"])
def test_samples_in_other_memory(memory):
    report = sweep(IN_OTHER_MEMORY, 2, Options(limit=1, memory=memory))
    assert not [case for case in report.bad() if case.outcome != "format"], told(report)
    assert report.counted()["right"] > 20


def test_samples_lie_in_memory_as_said():
    image = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    strides = {name: laid_out(image, name).stride() for name in MEMORY}
    assert strides["channels last"] == (60, 1, 15, 3) and strides["permuted"] == (1, 2, 6, 24)
    assert strides["expanded"] == (0, 20, 5, 1) and strides["sliced"] == (132, 44, 11, 2)
    for name in MEMORY:
        laid = laid_out(image, name)
        assert torch.equal(laid, image[:1].expand_as(image) if name == "expanded" else image)
        again = copied(laid.requires_grad_())
        assert again.stride() == laid.stride() and again.requires_grad and again.data_ptr() != laid.data_ptr()
    weight, vector = torch.ones(6, 3, 1, 1), torch.ones(3)
    sample = types.SimpleNamespace(input=image, args=(weight, vector), kwargs={})
    for name, shape in (("batch 1", (1, 3, 4, 5)), ("channels 1", (2, 1, 4, 5)), ("rows 1", (2, 3, 1, 5))):
        short = in_memory(sample, f"channels last, {name}")
        assert short.input.shape == shape
        assert short.args[0].shape == ((6, 1, 1, 1) if name == "channels 1" else (6, 3, 1, 1))
    assert in_memory(types.SimpleNamespace(input=vector, args=(), kwargs={}), "channels last") is None


def row_major():
    """An operator that loses its operand's memory format; on which a sweep is tried."""
    op = aten.native_dropout_backward.default
    shardtensor.extend.register(op)(lambda grad, mask, scale: (grad * mask * scale).contiguous())
    return lambda: shardtensor.extend.unregister(op)


def test_lost_memory_formats_are_found_out():
    wanted = Options(kind="forward", memory="channels last", setup=(__name__, row_major.__name__))
    assert sweep(["native_dropout_backward"], 2, wanted).counted()["format"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORY)
def test_every_operator_in_other_memory(memory):
    report = sweep(operator_names(), 2, Options(limit=1, memory=memory))
    assert not [case for case in report.bad() if case.outcome != "format"], told(report)


# Elementwise, linear and not, views, sums, weights, writes to contributions, and operators without a rule.
OF_ENTRIES = """
    add mul where clamp transpose reshape sum softmax nn.functional.conv2d nn.functional.nll_loss index_add index_put
    masked_select linalg.solve stack
"""


@pytest.mark.parametrize("kind", ["function", "in place"])
def test_operators_on_entries_of_sharded_dims(kind):
    report = sweep(OF_ENTRIES.split(), 2, Options(kind=kind, limit=2, entries=True))
    assert not report.bad(), told(report)
    assert report.counted()["right"] > {"function": 80, "in place": 30}[kind]
    assert kind == "in place" or not report.counted()["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "in place"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operator_on_entries_of_sharded_dims(ranks, kind):
    report = sweep(operator_names(), ranks, Options(kind=kind, entries=True))
    assert not report.bad(), told(report)
    assert report.share_right(lambda case: not case.random) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "in place"])
def test_operands_that_are_all_sharded_along_one_dim(kind):
    """Indices, weights and matrices, too."""
    report = sweep(operator_names(), 2, Options(kind=kind, limit=2, together=True))
    assert not report.bad(), told(report)
    assert report.counted()["right"] > {"function": 400, "in place": 50}[kind]


SUMMING = """
    trace var cumsum matmul addmm einsum nn.functional.linear nn.functional.conv2d nn.functional.conv_transpose1d
    nn.functional.layer_norm nn.functional.batch_norm nn.functional.mse_loss
    native_layer_norm native_group_norm native_batch_norm nn.functional.embedding_bag
"""


@pytest.mark.parametrize(
    "dtype, data, ranks",
    [("bfloat16", "cancelling", 2), pytest.param("float16", "offset", 3, marks=pytest.mark.slow)],
)
def test_half_precision_is_as_exact_as_on_one_device(dtype, data, ranks, device_of_ranks):
    """Sums over ranks of numbers that cancel; with gradients."""
    known = set(operator_names())  # torch 2.11 has no samples of native_group_norm
    if device_of_ranks != "cpu":  # on few numbers, others than the CPU's, torch's rounding in between happens to cancel
        known.discard("native_group_norm")
    report = sweep([name for name in SUMMING.split() if name in known], ranks, Options(dtype, data=data, limit=2))
    assert not report.bad(), told(report)
    assert report.counted()["right"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "in place"])
@pytest.mark.parametrize("dtype", ["float", "int", "bool"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_samples(ranks, dtype, kind):
    report = sweep(operator_names(), ranks, Options(dtype, kind))
    assert not report.bad(), told(report)


@pytest.mark.slow
def test_most_of_it_is_right():
    report = sweep(operator_names(), 2, Options(limit=4))
    assert not report.bad(), told(report)
    assert report.share_right(lambda case: not case.random) > 0.9
    report = sweep(operator_names(), 2, Options(limit=4, gather=True))
    assert not report.bad(), told(report)
    assert report.share_right(lambda case: not case.random) > 0.97


KINDS = [
    Options(),
    Options("int"),
    Options("bfloat16"),
    Options(autocast="bfloat16"),
    Options(kind="in place"),
]


@pytest.mark.parametrize(
    "options",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind == Options("bfloat16"))) for kind in KINDS],
    ids=["float", "int", "bfloat16", "autocast", "in place"],
)
def test_operators_on_a_gpu(options, emulated):
    """The first sample of every twentieth operator; ``python -m operator_sweep --device emulated`` takes all."""
    report = sweep(operator_names()[5::20], 2, replace(options, limit=1))
    assert not report.bad(), told(report)
    assert report.counted()["right"] > 10
