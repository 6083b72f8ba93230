"""Distances between points: ``cdist``, ``pdist``.

Points and batch dims may be sharded in any way; where both sets of points are, the smaller one is sent around a ring.
Along the coordinates of a point nothing is sharded: they are resharded to another dim, if one is free.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.planning import meta_of
from ...dispatch.tensor import ShardTensor, from_part
from ...layout.geometry import map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, LocalPlan, operator
from ..common.alignment import free_dims
from ..common.contraction import ContractionPlan, Form, batch_labels, plan_contraction

_BY_PRODUCTS = "use_mm_for_euclid_dist_if_necessary"


@operator(torch.cdist, tensors="x1 x2")
def plan_cdist(
    call: Arguments, x1: ShardTensorSpec, x2: ShardTensorSpec, p: float = 2.0, compute_mode: str | None = _BY_PRODUCTS
) -> ContractionPlan:
    """A contraction over the coordinates, of which a sum of powers is only one kind."""
    call.returned(torch.cdist, x1, x2, p, compute_mode)
    # Whether by products is decided for all points, not for those that a rank has.
    mode = compute_mode or _BY_PRODUCTS
    if mode == _BY_PRODUCTS:
        large = x1.shape[-2] > 25 or x2.shape[-2] > 25
        mode = "use_mm_for_euclid_dist" if large else "donot_use_mm_for_euclid_dist"
    (lead1, lead2), lead = batch_labels(x1.shape[:-2], x2.shape[:-2])
    form = Form(((*lead1, "p", "m"), (*lead2, "r", "m")), (*lead, "p", "r"), whole=frozenset("m"))

    def local(a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b, p, mode)

    return plan_contraction(call, "cdist", local, form, "x1", "x2")


@operator(F.pdist, torch.pdist, tensors="input")
def plan_pdist(call: Arguments, input: ShardTensorSpec, p: float = 2) -> Composed | LocalPlan:
    """The distances above the diagonal, row by row: a rank has those of its rows."""
    meta = call.returned(F.pdist, input, p)
    if input.is_replicate():
        return LocalPlan(lambda x: F.pdist(x, p), input.replace(meta=meta_of(meta)))
    call.redistribute("input", free_dims("pdist", input, 1))
    n = input.shape[0]
    count = n * (n - 1) // 2

    def above_diagonal(axis: AxisLayout) -> AxisLayout:
        sizes = None if axis.sizes is None else map_boundaries(axis.sizes, lambda c: c * n - c * (c + 1) // 2)
        return axis._replace(sizes=sizes)

    def distances(x: ShardTensor) -> ShardTensor:
        square = torch.cdist(x, x, p, "donot_use_mm_for_euclid_dist")
        assert isinstance(square, ShardTensor)
        spec = square._spec
        m = spec.sharded_dims().get(0)
        first, stop = (0, n) if m is None else spec.interval(m)
        points = torch.arange(n, device=square.device)
        values = square.to_local()[points > points[first:stop, None]]
        meta = spec.tensor_meta._replace(shape=torch.Size([count]), stride=(1,))
        return from_part(values, spec.with_layout([above_diagonal(axis) for axis in spec.layout], meta))

    return Composed(distances)
