"""Which part of the global tensor this rank has: for people, and for ``torch.distributed.checkpoint``.

DTensor answers with the offsets of torch.chunk. Here they come from the sizes, so a checkpoint may be written with one
layout, mesh and world size and read with another. Source: ``torch.distributed.checkpoint.planner``.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ..errors import refuse
from ..layout.spec import ShardTensorSpec

_ENDS = 8  # so many shard sizes are shown of the first ranks of a mesh dim, and of the last

if TYPE_CHECKING:  # importing them takes long, and most programs save no checkpoint
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


def of_rank(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """This rank's part as a list of at most one ``ChunkStorageMetadata``.

    A rank whose shard is empty has no part: its offset would be that of the next rank's shard. A global tensor without
    elements is written by every rank, as replicas are, so that the checkpoint has an entry for it.

    Raises:
        UnsupportedSharding: the tensor is Partial.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    spec = tensor._spec
    assert isinstance(spec, ShardTensorSpec)
    if spec.partial_mesh_dims():
        raise refuse("checkpoint", spec, "a Partial has no shards to write", "redistribute it to Replicate() first")
    shape = torch.Size(spec.own_shape)
    if not shape.numel() and spec.shape.numel():
        return []
    starts = {d: spec.interval(m)[0] for d, m in spec.sharded_dims().items()}
    return [ChunkStorageMetadata(offsets=torch.Size([starts.get(d, 0) for d in range(len(shape))]), sizes=shape)]


def write_items(name: str, tensor: DTensor) -> list[WriteItem]:
    """What this rank writes of the tensor called ``name``: at most one ``WriteItem``.

    Every replica returns one; the planner drops all but one of those with the same offset.

    Raises:
        UnsupportedSharding: the tensor is Partial.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(tensor.to_local()),
                size=tensor.shape,
            ),
        )
        for chunk in of_rank(tensor)
    ]


def part_in_words(spec: ShardTensorSpec) -> str:
    """The part that this rank has, as one would index it: ``"[:, 300:1350]"``."""
    if spec.partial_mesh_dims():
        return "a contribution"
    held = {d: "{}:{}".format(*spec.interval(m)) for d, m in spec.sharded_dims().items()}
    return f"[{', '.join(held.get(d, ':') for d in range(len(spec.shape)))}]" if held else "all of it"


def as_html(spec: ShardTensorSpec) -> str:
    """Shape, dtype and mesh, and a row for each mesh dim: its placement and shard sizes, this rank's in bold."""
    mesh, dtype = spec.mesh, str(spec.tensor_meta.dtype).removeprefix("torch.")
    rows = []
    for m, (placement, sizes) in enumerate(spec.layout):
        name = f" {mesh.mesh_dim_names[m]!r}" if mesh.mesh_dim_names else ""
        cells = [f"mesh dim {m}{name}", repr(placement), *(sizes if placement.is_shard() and sizes else ())]
        cells = [escape(str(cell)) for cell in cells]
        if len(cells) > 2:
            own = 2 + spec.coordinate[m]
            cells[own] = f"<b>{cells[own]}</b>"
        if len(cells) > 2 * _ENDS + 2:
            cells[_ENDS + 2 : -_ENDS] = ["..."]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    title = f"ShardTensor {tuple(spec.shape)} {dtype} on mesh {tuple(mesh.shape)} of {mesh.device_type}"
    caption = escape(f"{title}, rank {spec.coordinate} holds {part_in_words(spec)}")
    return f"<table><caption>{caption}</caption>{''.join(rows)}</table>"
