"""Neighborhood attention as natten documents it, by a dense mask, in any dtype; and random problems for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest import mock

import torch
from seeded import seeded
from torch import nn

from shardtensor import ShardTensor


@dataclass(frozen=True)
class Problem:
    """One call: the spatial shape, and natten's arguments per dim."""

    shape: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    is_causal: tuple[bool, ...]
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 3
    head_dim_v: int = 3
    batch: int = 1
    additional: int = 0
    scale: float | None = None

    @property
    def arguments(self):
        return {name: getattr(self, name) for name in ("kernel_size", "stride", "dilation", "is_causal", "scale")}

    def tensors(self, dtype=torch.float64, seed=0):
        """query, key, value, and the additional keys and values if there are any."""
        generator = seeded(seed)
        kinds = [(self.heads, self.head_dim), (self.heads_kv, self.head_dim), (self.heads_kv, self.head_dim_v)]
        shapes = [(self.batch, *self.shape, *kind) for kind in kinds]
        if self.additional:
            shapes += [(self.batch, self.additional, *kind) for kind in kinds[1:]]
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def visible(size, kernel, stride, dilation, causal):
    """``(size, size)``, True where a query (row) attends to a key (column) of one dim.

    Dilation: only every ``dilation``-th index takes part, counted from the query. Stride: of ``stride`` neighbours one
    leads, the middle one (the later of two; the last one if causal), and all have its window. The window is the run
    of ``kernel`` neighbours around the leader that is as centred as the ends allow (one more before it if even);
    if causal, what is not later than the query of the ``kernel`` last ones up to the leader.
    """
    mask = torch.zeros(size, size, dtype=torch.bool)
    for query in range(size):
        members = [i for i in range(size) if (i - query) % dilation == 0]
        place = members.index(query)
        cohort = range(place - place % stride, place - place % stride + stride)
        leader = min(cohort[-1] if causal else cohort[stride // 2], len(members) - 1)
        if causal:
            seen = [i for i in range(len(members)) if leader - kernel < i <= place]
        else:
            runs = [range(a, a + kernel) for a in range(len(members) - kernel + 1)]
            seen = min(runs, key=lambda run: abs(run[kernel // 2] - leader))
        mask[query, [members[i] for i in seen]] = True
    return mask


def dense_attention(
    query,
    key,
    value,
    additional_keys=None,
    additional_values=None,
    *,
    kernel_size,
    stride,
    dilation,
    is_causal,
    scale=None,
    return_lse=False,
):
    """The same by the full matrix of scores; differentiable."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for per_dim in zip(query.shape[1:-2], kernel_size, stride, dilation, is_causal):
        mask = torch.kron(mask.int(), visible(*per_dim).int()).bool()
    q, k, v = (t.flatten(1, -3) for t in (query, key, value))
    if additional_keys is not None:
        k, v = torch.cat([k, additional_keys], 1), torch.cat([v, additional_values], 1)
        mask = torch.cat([mask, torch.ones(len(mask), additional_keys.shape[1], dtype=torch.bool)], 1)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~mask[:, None].to(scores.device), -math.inf)
    out = torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v).reshape(*query.shape[:-1], v.shape[-1])
    return (out, scores.logsumexp(-1).reshape(query.shape[:-1])) if return_lse else out


class Dense(nn.Module):
    """A model with natten's modules, which call ``dense_attention`` for plain tensors where they would call natten."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        if isinstance(x, ShardTensor):
            return self.model(x)
        from natten import modules

        with mock.patch.object(modules, "neighborhood_attention_generic", dense_attention):
            return self.model(x)


def random_problem(rng, n=None, **fixed):
    """A problem that natten accepts, drawn with a ``random.Random``."""
    n = n or rng.choice((1, 1, 2, 2, 3))
    shape = tuple(rng.randint(2, {1: 17, 2: 9, 3: 5}[n]) for _ in range(n))
    kernel = tuple(rng.randint(2, min(x, 7)) for x in shape)
    drawn = {
        "shape": shape,
        "kernel_size": kernel,
        "stride": tuple(rng.choice((1, rng.randint(1, k))) for k in kernel),
        "dilation": tuple(rng.choice((1, rng.randint(1, x // k))) for x, k in zip(shape, kernel)),
        "is_causal": tuple(rng.random() < 0.3 for _ in shape),
        "heads": 2,
        "heads_kv": rng.choice((2, 2, 1)),
        "head_dim_v": rng.choice((3, 3, 2)),
        "batch": rng.choice((1, 1, 2)),
        "additional": rng.choice((0, 0, 3)),
        "scale": rng.choice((None, 0.3)),
    }
    return Problem(**(drawn | fixed))
