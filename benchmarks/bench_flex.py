"""Bytes of ``flex_attention`` with sharded sequences, next to the fewest possible, on 2, 4 and 8 simulated ranks.

    python benchmarks/bench_flex.py [--only NAME] [--json FILE]

Each rank has an equal part of the tokens. Counted are the bytes of keys and values that all ranks receive in a call,
relative to the keys of other ranks that a rank's queries see, each once. Nothing is sent: the ranks are simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from report import Figure, chosen, finish, parser
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from shardtensor import ShardTensor
from shardtensor._compat import flex_attention_operator
from shardtensor.testing import count_communication, simulate_ranks

GROUP = "flex_attention with a sharded sequence"
TOKENS, FEATURES, WINDOW, BLOCK = 8192, 2, 1024, 128
STARTS = (1700, 3100, 4700, 6000, 7500)  # of documents, besides the first
BAR = 1.2


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < WINDOW)


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    same = i >= j
    for start in STARTS:
        same = same & ((i < start) | (j >= start))
    return same


def received(ranks: int, mask: tuple[Any, ...]) -> int:
    """Bytes that this rank receives in a call."""
    mesh = init_device_mesh("cpu", (ranks,))
    x = ShardTensor.from_local(
        torch.zeros(1, 1, TOKENS // ranks, FEATURES), mesh, (Shard(2),), shard_sizes={0: [TOKENS // ranks] * ranks}
    )
    with count_communication() as counted:
        flex_attention_operator(x, x, x, lambda score, *_: score, mask, 1.0, {}, (), ())
    return counted.bytes_received


def of_bytes(ranks: int, name: str, seen: Callable[..., Tensor]) -> list[Figure]:
    mask = create_block_mask(seen, None, None, TOKENS, TOKENS, "cpu", BLOCK).as_tuple()
    rows = create_mask(seen, 1, 1, TOKENS, TOKENS, "cpu")[0, 0].chunk(ranks)
    elsewhere = [part.any(0).chunk(ranks) for part in rows]
    keys = sum(int(part.sum()) for r, parts in enumerate(elsewhere) for s, part in enumerate(parts) if s != r)
    of_key = 2 * FEATURES * 4
    total, least = sum(simulate_ranks(received, ranks, ranks, mask)), keys * of_key
    note = f"{total / of_key:.0f} keys, at least {keys}, of {TOKENS * (ranks - 1)}"
    return [Figure(GROUP, f"{name}, {ranks} ranks: bytes of the fewest possible", total / least, bar=BAR, note=note)]


def main() -> None:
    made = parser(__doc__)
    options = made.parse_args()
    rows: dict[str, Callable[[], list[Figure]]] = {
        f"{name}, {ranks} ranks": partial(of_bytes, ranks, name, seen)
        for name, seen in (("sliding window", window), ("documents", documents))
        for ranks in (2, 4, 8)
    }
    figures: list[Figure] = []
    for name in chosen(options.only, rows, made.error):
        print(f"counting {name}", file=sys.stderr)
        figures += rows[name]()
    finish(figures, options)


if __name__ == "__main__":
    main()
