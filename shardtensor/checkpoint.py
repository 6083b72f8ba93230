"""What ``torch.distributed.checkpoint`` asks a ShardTensor: which part of the whole this rank has.

DTensor answers with the offsets of torch.chunk. Here they come from the sizes, so a checkpoint may be written with one
cut, mesh and world size and read with another. Source: the protocol of ``torch.distributed.checkpoint.planner``.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import refuse
from .spec import ShardTensorSpec

__all__ = ["chunks", "write_items"]


def _own_part(spec: ShardTensorSpec) -> tuple[torch.Size, torch.Size] | None:
    """Offset and shape of this rank's part; None where it has none, so that no two ranks name the same offset."""
    if spec.partial_mesh_dims():
        raise refuse("checkpoint", spec, "a Partial is no part of the tensor", "redistribute it to Replicate() first")
    shape = torch.Size(spec.own_shape)
    if not shape.numel() and spec.shape.numel():
        return None
    starts = {d: spec.interval(m)[0] for d, m in spec.sharded_dims().items()}
    return torch.Size([starts.get(d, 0) for d in range(len(shape))]), shape


def chunks(tensor: Any) -> list[Any]:
    """This rank's part as a list of at most one ``ChunkStorageMetadata``.

    Raises:
        UnsupportedSharding: the tensor is Partial.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    part = _own_part(tensor._spec)
    return [] if part is None else [ChunkStorageMetadata(offsets=part[0], sizes=part[1])]


def write_items(name: str, tensor: Any) -> list[Any]:
    """What this rank writes of the tensor called ``name``: at most one ``WriteItem``; replicas are told apart later.

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
        for chunk in chunks(tensor)
    ]
