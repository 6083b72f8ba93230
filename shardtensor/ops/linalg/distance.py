"""Distances between points: ``cdist``, ``pdist``.

Points and batch dims may be cut in any way; where both sets of points are, the smaller one goes round a ring. Along the
coordinates of a point nothing is cut: they are exchanged to another dim, if one is free.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...geometry import map_cuts
from ...registry import register
from ...tensor import ShardTensor, from_part, redistribute_to
from ..common.alignment import common_mesh, torch_judges, whole_rows
from ..common.contraction import Form, batch_labels, contract

_BY_PRODUCTS = "use_mm_for_euclid_dist_if_necessary"


@register(torch.cdist)
def _cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = _BY_PRODUCTS) -> Any:
    if common_mesh("cdist", [x1, x2]) is None:
        return NotImplemented
    torch_judges(torch.cdist, x1, x2, p, compute_mode)
    # Whether by products is decided for all points, not for those that a rank has.
    mode = compute_mode or _BY_PRODUCTS
    if mode == _BY_PRODUCTS:
        large = x1.shape[-2] > 25 or x2.shape[-2] > 25
        mode = "use_mm_for_euclid_dist" if large else "donot_use_mm_for_euclid_dist"
    (lead1, lead2), lead = batch_labels(x1.shape[:-2], x2.shape[:-2])
    form = Form(((*lead1, "p", "m"), (*lead2, "r", "m")), (*lead, "p", "r"), whole=frozenset("m"))
    return contract("cdist", lambda a, b: torch.cdist(a, b, p, mode), form, x1, x2)


@register(F.pdist, torch.pdist)
def _pdist(input: Any, p: float = 2) -> Any:
    """The distances above the diagonal, row by row: a rank has those of its rows."""
    if not isinstance(input, ShardTensor) or input._spec.is_replicate():
        return NotImplemented
    torch_judges(F.pdist, input, p)
    input = redistribute_to(input, whole_rows("pdist", input._spec.for_gradient(), 1))
    distances = torch.cdist(input, input, p, "donot_use_mm_for_euclid_dist")
    spec = distances._spec
    n, points = spec.shape[0], torch.arange(spec.shape[0], device=distances.device)
    m = spec.sharded_dims().get(0)
    first, stop = (0, n) if m is None else spec.interval(m)
    values = distances.to_local()[points > points[first:stop, None]]
    sizes = [None if cut is None else map_cuts(cut, lambda c: c * n - c * (c + 1) // 2) for cut in spec.sizes]
    meta = spec.tensor_meta._replace(shape=torch.Size([n * (n - 1) // 2]), stride=(1,))
    return from_part(values, spec.replace(meta=meta, sizes=tuple(sizes)))
