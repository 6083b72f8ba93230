"""Shared by the tests of convolution, pooling, padding and resampling: many cases in one call of a pool."""

from __future__ import annotations

import random
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from halves import is_in
from seeded import seeded
from torch.distributed.tensor import Replicate, Shard

from shardtensor.layout import caches
from shardtensor.ops.convolution import conv
from shardtensor.testing import assert_matches_unsharded

# How many times as tall as what is computed once more a shard has to be.
WAYS = {"at once": 1 << 62, "in two": 0, "by owners": 1 << 62}
# Numbers of ranks and ways: one of each way is in every run.
OFTEN = ((2, "at once"), (3, "in two"), (4, "by owners"))
_RARELY = [(n, way) for n in (1, 2, 3, 4) for way in WAYS if (n, way) not in OFTEN]
IN_WAYS = [*OFTEN, *(pytest.param(*each, marks=pytest.mark.slow) for each in _RARELY)]


@contextmanager
def computing(way):
    """Choose how convolutions compute the gradient of what they read, where all ways are right: see SplitGradient, and
    OwnersGradient, which is that of half precision.
    """
    if way not in WAYS:
        yield
        return
    owners_compute = conv.owners_compute if way != "by owners" else lambda dtype: True
    split = mock.patch.object(conv, "worth_splitting", lambda device: (WAYS[way], 0))
    with split, mock.patch.object(conv, "owners_compute", owners_compute):
        caches.forget()
        yield
    caches.forget()


def squared_gradient(function):
    """What tests second derivatives: a function of the gradient of another one."""

    def penalty(x):
        (grad,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        return grad.square().sum()

    return penalty


def data(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def cut(rng, n, ranks):
    """Random sizes, often with empty shards."""
    cuts = sorted(rng.choice((0, n, rng.randint(0, n), rng.randint(0, n))) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n]))


def check_cases(cases, mesh_shape, rounds=1, half=None, **kwargs):
    """Every case, ``(label, function, input shape, spatial dims)``, on random cuts; tells all failures at once.

    On a 2-D mesh two spatial dims are cut (or batch and space), else one. With ``half``, 0 or 1, half of the cases.
    """
    shape_of_mesh = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    failures = []
    for round in range(rounds):
        for i, (label, fn, shape, dims) in enumerate(cases):
            if half is not None and not is_in(i, half):
                continue
            rng = random.Random(f"{i} {round} {mesh_shape}")
            cuttable = list(dims)
            if len(shape_of_mesh) > len(cuttable) or rng.random() < 0.2:
                cuttable = [0, *cuttable]
            chosen = rng.sample(cuttable, len(shape_of_mesh))
            sizes = {m: cut(rng, shape[d], shape_of_mesh[m]) for m, d in enumerate(chosen)}
            placements = [Shard(d) for d in chosen]
            if len(chosen) > 1 and rng.random() < 0.1:
                placements[1] = Replicate()
                del sizes[1]
            try:
                assert_matches_unsharded(
                    fn, data(*shape, seed=i), mesh_shape=mesh_shape, placements=placements, shard_sizes=sizes, **kwargs
                )
            except AssertionError as error:
                failures.append(f"{label} of {shape} as {placements} {sizes}: {error}")
    assert not failures, f"{len(failures)} of {rounds * len(cases)} cases: " + "\n".join(failures[:10])
