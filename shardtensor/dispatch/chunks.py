"""Which part of the global tensor this rank has: for people, and for ``torch.distributed.checkpoint``.

DTensor answers with the offsets of torch.chunk. Here they come from the sizes, so a checkpoint may be written with one
layout, mesh and world size and read with another. Source: ``torch.distributed.checkpoint.planner``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ..errors import refuse
from ..layout.spec import ShardTensorSpec

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
        raise refuse("checkpoint", spec, "a Partial is no part of the tensor", "redistribute it to Replicate() first")
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


def described(spec: ShardTensorSpec) -> str:
    """The part that this rank has, as one would index it: ``"[:, 300:1350]"``."""
    if spec.partial_mesh_dims():
        return "a contribution"
    held = {d: "{}:{}".format(*spec.interval(m)) for d, m in spec.sharded_dims().items()}
    return f"[{', '.join(held.get(d, ':') for d in range(len(spec.shape)))}]" if held else "all of it"
