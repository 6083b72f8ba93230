"""Attention over sharded sequences against the unsharded one: values, gradients, messages, memory and errors."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor.testing import (
    assert_matches_unsharded,
    run_distributed,
)

WHOLE = [Replicate()]
ROWS = [Shard(-2)]
COLUMNS = [Shard(-1)]


def data(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def cut(n: int, ranks: int, rng: random.Random) -> tuple[int, ...]:
    """Random sizes, zeros among them."""
    at = sorted(rng.randint(0, n) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *at], [*at, n]))


def sdpa(*tensors, **options):
    return F.scaled_dot_product_attention(*tensors, **options)


def masks(length: int, keys: int) -> dict[str, torch.Tensor]:
    """Masks of many shapes; some rows see nothing."""
    seen = torch.rand(length, keys) < 0.7
    seen[:: max(2, length // 3)] = False
    return {
        "bool": seen,
        "float": data(length, keys).masked_fill(~seen, float("-inf")),
        "keys": torch.rand(2, 1, 1, keys) < 0.6,
        "rows": torch.rand(2, 1, length, 1) < 0.6,
        "heads": data(1, 2, length, keys),
        "all": data(2, 2, length, keys),
        "three dims": data(2, length, keys),
    }


def check_grid(world: int, length: int, seed: int, method: str) -> None:
    """Queries and keys cut at random, alike and differently, with every kind of mask."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for keys in (length, rng.choice((1, 7, 33))):
        q, k, v = data(2, 2, length, 4), data(2, 2, keys, 4), data(2, 2, keys, 4)
        rows = {0: cut(length, world, rng)}
        columns = rows if keys == length and rng.random() < 0.5 else {0: cut(keys, world, rng)}
        cases = [(None, None, None), (None, None, "causal")]
        for name, mask in masks(length, keys).items():
            places = [None, WHOLE]
            if mask.shape[-2] > 1:
                places.append(ROWS)
            if mask.shape[-1] > 1:
                places.append(COLUMNS)
            cases.append((mask, rng.choice(places), name))
        for mask, places, name in cases:
            sizes = None if places in (None, WHOLE) else rows if places == ROWS else columns
            tensors = (q, k, v) if mask is None else (q, k, v, mask)
            causal = name == "causal"
            with shardtensor.attention_method(method):
                try:
                    assert_matches_unsharded(
                        lambda *t, causal=causal: sdpa(*t, is_causal=causal),
                        *tensors,
                        mesh_shape=world,
                        placements=[ROWS, ROWS, ROWS, places][: len(tensors)],
                        shard_sizes=[rows, columns, columns, sizes][: len(tensors)],
                    )
                except Exception as error:
                    raise AssertionError(f"{length} x {keys}, mask {name} {places}, {rows} {columns}") from error


@pytest.mark.parametrize("method", ["ring", "heads"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 33, 97])
def test_grid(world, length, method):
    run_distributed(check_grid, world, world, length, 10 * length + world, method)
