"""One batch, of any structure, from one rank to the shards of all."""

from __future__ import annotations

import traceback
import zlib

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_convert

from .._compat import PyTree, tree_leaves, tree_map
from ..dispatch.scatter import scatter_tensor
from ..layout.placements import first_rank
from ..ranks.agreement import is_early, texts_over_mesh
from ..ranks.summaries import digest, some_of
from . import messages
from .layout import Layout, MeshlessSpec


def scatter_batch(batch: PyTree, mesh: DeviceMesh, placements: PyTree, *, shard_sizes: PyTree = None) -> PyTree:
    """Shard the tensors of a batch that the first rank of ``mesh`` holds. Collective over the mesh.

    The structure travels as JSON, and the tensors as by :func:`shardtensor.scatter_tensor`.

    Args:
        batch, placements, shard_sizes: as for :class:`ShardLoader`. Other ranks pass None or the same batch.

    Raises:
        TypeError, ValueError: on all ranks: something in the batch that cannot be sent, layouts that do not fit it,
            types that a rank does not know; ranks that pass different batches. A mesh's first calls compare all
            numbers, later ones some thousand of each tensor: a loader for evaluation may come late.
    """
    source, tensors, told = first_rank(mesh), list[Tensor](), b""
    early = is_early("batches", mesh)
    if dist.get_rank() == source:
        try:
            told = b"b" + messages.encode(messages.describe(batch, Layout(mesh, placements, shard_sizes), tensors))
        except Exception as error:
            told = b"e" + messages.encode_error(error, traceback.format_exc())
    said = f"{'' if batch is None else _digest(batch, early)}:{told.decode()}"
    texts = texts_over_mesh(said, mesh, "scatter of a batch")
    digests = {rank: theirs.partition(":")[0] for rank, theirs in texts.items()}
    text = texts[source].partition(":")[2]
    if others := [rank for rank, digest in digests.items() if digest not in ("", digests[source])]:
        raise ValueError(
            f"ranks {others} have another batch than rank {source}, with which they share samples; theirs would be "
            "lost. Ranks of a domain read the same samples, or only the first one reads. Make the DataLoader with the "
            "sampler of shardtensor.parallel.init, and let no framework split it over all ranks (Accelerate: leave the "
            "loader out of prepare())"
        )
    if text.startswith("e"):
        raised, shown = messages.decode_error(text[1:].encode())
        raise raised from RuntimeError(f"on source rank {source}:\n{shown}")
    types, body = messages.parse(text[1:].encode())
    if types:
        messages.check_known(texts_over_mesh(messages.lacking(types), mesh))
    given = iter(tensors)

    def scatter(leaf: object) -> object:
        if not isinstance(leaf, MeshlessSpec):
            return leaf
        spec = leaf.spec(mesh)
        return scatter_tensor(
            next(given, None),
            mesh,
            spec.placements,
            shard_sizes=spec.shard_sizes,
            global_shape=spec.shape,
            dtype=leaf.dtype,
        )

    return tree_map(scatter, messages.build(body))


def _digest(batch: PyTree, early: bool) -> int:
    """Of the numbers in a batch: early on of all."""
    leaves = map(default_convert, tree_leaves(batch))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return zlib.crc32(repr([(tuple(t.shape), digest(t if early else some_of(t))) for t in tensors]).encode())
