"""Metrics of torchmetrics on shards: one process' values, and a warning where a synchronization adds them up."""

from __future__ import annotations

import warnings

import pytest
import torch
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import Shard

from shardtensor.dispatch import metrics
from shardtensor.testing import run_distributed, shard, shared_mesh

torchmetrics = pytest.importorskip("torchmetrics")

CLASSES = {"task": "multiclass", "num_classes": 3}
METRICS = {
    "SumMetric": ({}, "values"),
    "MaxMetric": ({}, "values"),
    "MeanMetric": ({}, "values"),
    "CatMetric": ({}, "values"),
    "MeanSquaredError": ({}, "pairs"),
    "ConfusionMatrix": (CLASSES, "classes"),
    "StatScores": (CLASSES | {"average": "micro"}, "classes"),
    "Accuracy": (CLASSES, "classes"),
    "AUROC": (CLASSES, "classes"),
}


def batches(rows=8):
    """Values, classes' probabilities, and labels."""
    draw = seeded(3)
    for _ in range(2):
        probabilities = torch.randn(rows, 3, generator=draw).softmax(1)
        yield torch.randn(rows, generator=draw), probabilities, torch.randint(0, 3, (rows,), generator=draw)


def computed(name, cut, **options):
    """A metric's value, and the warnings up to it."""
    arguments, kind = METRICS[name]
    metrics._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metric = getattr(torchmetrics, name)(**arguments, **options)
        for values, probabilities, labels in batches():
            given = {"values": (values,), "pairs": (values, values.exp()), "classes": (probabilities, labels)}
            metric.update(*map(cut, given[kind]))
        value = metric.compute()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value, [str(w.message) for w in caught if "a sum counts it" in str(w.message)]


def on_shards(sizes):
    mesh = shared_mesh(len(sizes))
    for name in METRICS:
        value, warned = computed(name, lambda t: shard(t, mesh, [Shard(0)], {0: sizes}), sync_on_compute=False)
        torch.testing.assert_close(value, computed(name, lambda t: t, sync_on_compute=False)[0])
        assert not warned, name


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(5, 3), (5, 0, 3)])
def test_values_without_synchronization(sizes):
    run_distributed(on_shards, len(sizes), sizes)


SUMS = {"SumMetric": "SumMetric", "ConfusionMatrix": "MulticlassConfusionMatrix", "StatScores": "all_gather"}


@on_ranks(2)
def test_a_synchronization_that_counts_ranks_is_warned_of():
    mesh = shared_mesh(2)
    found = {}
    for name in SUMS:
        value, found[name] = computed(name, lambda t: shard(t, mesh, [Shard(0)], {0: (5, 3)}))
        torch.testing.assert_close(value, 2 * computed(name, lambda t: t, sync_on_compute=False)[0])
    for name, by in SUMS.items():
        (text,) = found[name]
        assert by in text and "ranks 0, 1" in text and "counts it 2 times" in text
        assert "sync_on_compute=False" in text and 'process_group=mesh["dp"].get_group()' in text


@pytest.mark.slow
@on_ranks(4)
def test_the_group_of_the_data_axis_adds_the_domains():
    mesh = shared_mesh((2, 2), ("dp", "domain"))
    for name in ("SumMetric", "ConfusionMatrix", "StatScores"):
        cut = lambda t: shard(t, mesh["domain"], [Shard(0)], {0: (8, 0)})  # noqa: E731
        value, warned = computed(name, cut, process_group=mesh["dp"].get_group())
        torch.testing.assert_close(value, 2 * computed(name, lambda t: t, sync_on_compute=False)[0])
        assert not warned, name
