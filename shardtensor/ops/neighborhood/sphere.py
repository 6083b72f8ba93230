"""Neighborhood attention on the sphere: torch-harmonics' operators, its reference in PyTorch and its kernels.

Each point of the output grid attends to the points of the input grid within an angle. Which these are is in a plain
sparse matrix, ``col_idx`` and ``row_off``, of one output longitude: the others' are shifted. So longitudes stay whole,
and a rank that owns some output latitudes needs the input latitudes that these reach: they are fetched, and the
package's own operator runs on them, with its part of the matrix.

The latitudes that each rank needs are read from the matrix, which every rank has, so nothing is sent to find them. They
are kept with the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import wrapt
from torch import Tensor
from torch.distributed.tensor import Shard

from ..._compat import TensorMeta
from ...communication.halo import Fetch
from ...communication.tracing import goes_into_graph
from ...dispatch.index_findings import found
from ...errors import refuse
from ...layout.intervals import Interval, chunk_sizes, intervals_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ..common.named_dims import free_dims

_LATITUDES, _LONGITUDES, _CHANNELS = 1, 2, 3  # behind the batch
_MATRIX = "quad_weights col_idx row_off seg seg_off"
_TRANSPOSES = {"permute_to_nhwc": (0, 2, 3, 1), "permute_to_nchw": (0, 3, 1, 2)}
_NAME = "neighborhood attention on the sphere"


def plan_sphere_attention(
    call: Arguments,
    kw: ShardTensorSpec,
    vw: ShardTensorSpec,
    qw: ShardTensorSpec,
    quad_weights: TensorMeta,
    col_idx: TensorMeta,
    row_off: TensorMeta,
    seg: TensorMeta,
    seg_off: TensorMeta,
    nh: int,
    nlon_in: int,
    nlat_out: int,
    nlon_out: int,
) -> Plan:
    """Queries stay where they are, with whole longitudes and channels; keys and values are fetched side by side."""
    op = getattr(torch.ops.attention_kernels, call.name.split(".")[0])
    queries = call.redistribute("qw", free_dims(_NAME, _sharded_somewhere([qw, kw, vw]), _LONGITUDES, _CHANNELS))
    keys = call.redistribute("kw", _like(kw, queries))
    call.redistribute("vw", vw.with_layout(keys.layout))
    out = _with_channels(queries, vw.shape[_CHANNELS])
    mesh_dim = queries.sharded_dims().get(_LATITUDES)
    rows = None if mesh_dim is None else intervals_of(queries.sizes_along(mesh_dim))
    channels = kw.shape[_CHANNELS], vw.shape[_CHANNELS]
    both, own_rows = _with_channels(keys, sum(channels)), queries.own_shape[_LATITUDES]

    def run(k: Tensor, v: Tensor, q: Tensor, weights: Tensor, *sparse: Tensor) -> Tensor:
        if rows is not None:
            if goes_into_graph(sparse[0]):
                reason = "which latitudes it reads is in the values of a tensor, which a graph does not have"
                raise refuse(_NAME, [qw, kw, vw], reason, "compile it without fullgraph=True")
            key = both, rows, nlon_in, nlon_out
            reach = found(sparse[0], key, lambda: _Reach(rows, both, sparse, nlon_in, nlon_out))
            k, v = (t.contiguous() for t in reach.fetch(torch.cat([k, v], -1)).split_with_sizes(channels, -1))
            weights, sparse = weights[slice(*reach.latitudes)], reach.sparse
        if 0 in q.shape:
            nothing = torch.cat([t.reshape(-1)[:0] for t in (k, v, q)]).sum()  # all take part in the backward pass
            return q.new_zeros(out.own_shape) + nothing
        result: Tensor = op(k, v, q, weights, *sparse, nh, nlon_in, own_rows, nlon_out)
        return result

    return LocalPlan(run, out)


def _with_channels(spec: ShardTensorSpec, channels: int) -> ShardTensorSpec:
    shape = torch.Size((*spec.shape[:_CHANNELS], channels))
    return spec.replace(meta=spec.tensor_meta._replace(shape=shape, stride=contiguous_stride(shape)))


def _sharded_somewhere(specs: Sequence[ShardTensorSpec]) -> ShardTensorSpec:
    """The queries' layout, where these are whole that of keys or values, along the batch, or evenly along latitudes."""
    queries = specs[0]
    for m in range(queries.mesh.ndim):
        taken, others = queries.placements, [spec.layout[m] for spec in specs if isinstance(spec.placements[m], Shard)]
        if others and not isinstance(taken[m], Shard):
            even = chunk_sizes(queries.shape[_LATITUDES], queries.mesh.size(m))
            axes = [axis for axis in others if axis.placement == Shard(0)] + [AxisLayout(Shard(_LATITUDES), even)]
            queries = queries.with_axes({m: axes[0]} if axes[0].placement not in taken else {})
    return queries


def _like(spec: ShardTensorSpec, queries: ShardTensorSpec) -> ShardTensorSpec:
    """The layout of keys or values: as the queries', with their own latitudes where they have such."""
    axes = []
    for m, wanted in enumerate(queries.layout):
        if wanted.placement == Shard(_LATITUDES):
            even = chunk_sizes(spec.shape[_LATITUDES], spec.mesh.size(m))
            wanted = spec.layout[m] if spec.placements[m] == wanted.placement else wanted._replace(sizes=even)
        axes.append(wanted)
    return spec.with_layout(axes)


class _Reach:
    """What a rank needs for its output latitudes.

    Attributes:
        latitudes: the interval of the input's.
        fetch: what fetches these.
        sparse: its part of the matrix: columns, offsets of rows; and the same as arcs of longitudes.
    """

    def __init__(
        self,
        rows: Sequence[Interval],
        spec: ShardTensorSpec,
        sparse: Sequence[Tensor],
        nlon_in: int,
        nlon_out: int,
    ) -> None:
        col_idx, row_off, seg, seg_off = (t.detach().cpu() for t in sparse)
        # Rows of the matrix are output latitudes, and its columns input ones; when the output is finer, vice versa.
        self.by_output = nlon_in % nlon_out == 0
        longitudes = nlon_in if self.by_output else nlon_out
        entries = _rows_of(row_off), col_idx // longitudes
        outputs, inputs = entries if self.by_output else entries[::-1]
        needs = [_extent(inputs[(outputs >= a) & (outputs < b)]) for a, b in rows]
        rank = spec.coordinate[spec.sharded_dims()[_LATITUDES]]
        self.fetch, self.latitudes = Fetch.of(spec, {_LATITUDES: needs}), needs[rank]
        device, part = sparse[0].device, (rows[rank], needs[rank])
        indices = self._part(col_idx, row_off, col_idx // longitudes, part)
        segments = self._part(seg, seg_off, seg[:, 0].long(), part)
        first = part[1][0] if self.by_output else part[0][0]
        indices[0].sub_(first * longitudes)
        segments[0][:, 0].sub_(first)
        self.sparse = tuple(t.to(device) for t in (*indices, *segments))

    def _part(
        self, entries: Tensor, offsets: Tensor, columns: Tensor, part: tuple[Interval, Interval]
    ) -> tuple[Tensor, Tensor]:
        """The entries between output and input latitudes of this rank, and the offsets of their rows."""
        own_rows, own_columns = part if self.by_output else part[::-1]
        rows = _rows_of(offsets)
        kept = (rows >= own_rows[0]) & (rows < own_rows[1])
        kept &= (columns >= own_columns[0]) & (columns < own_columns[1])
        counts = torch.bincount(rows[kept] - own_rows[0], minlength=own_rows[1] - own_rows[0])
        new = torch.zeros(len(counts) + 1, dtype=offsets.dtype)
        new[1:] = counts.cumsum(0)
        return entries[kept], new


def _rows_of(offsets: Tensor) -> Tensor:
    """The row of each entry."""
    return torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff().long())


def _extent(places: Tensor) -> Interval:
    return (int(places.min()), int(places.max()) + 1) if len(places) else (0, 0)


# -- registration ------------------------------------------------------------------------------------------------------


def _register(_: object) -> None:
    ops = torch.ops.attention_kernels
    names = "_neighborhood_s2_attention_torch", "_neighborhood_s2_attention_optimized"
    for packet in (getattr(ops, name) for name in names if hasattr(ops, name)):
        # Older releases have other layouts, and no arcs.
        if "seg" in {a.name for a in packet.default._schema.arguments}:
            operator(packet, tensors="kw vw qw", parameters=_MATRIX)(plan_sphere_attention)
    for name, dims in _TRANSPOSES.items():
        if hasattr(ops, name):
            operator(getattr(ops, name), tensors="x")(partial(_plan_transpose, dims))


def _plan_transpose(dims: tuple[int, ...], call: Arguments, x: ShardTensorSpec) -> Plan:
    return Composed(lambda x: x.permute(dims).contiguous())


wrapt.register_post_import_hook(_register, "torch_harmonics.attention.attention")
