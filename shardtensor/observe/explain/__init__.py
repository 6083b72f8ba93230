"""Look before you train: what a model would do on the ranks of a mesh, worked out in one process without a cluster.

``explain`` runs the model once as each rank, on tensors without values, with the code of a real run. So its counts are
those of a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..machines import MACHINES, Machine
from .advice import Advice, Choice, advise
from .report import Explanation, Layer, Share
from .run import GivenSizes, UnfitArguments, explained, prepared, sample_of

__all__ = [
    "MACHINES",
    "Advice",
    "Choice",
    "Explanation",
    "Layer",
    "Machine",
    "Share",
    "UnfitArguments",
    "advise",
    "explain",
]


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    mesh: int | Sequence[int],
    shard: Any,
    shard_sizes: GivenSizes | list[GivenSizes] = None,
    backward: bool | Callable[[Any], Tensor] = False,
    only: Sequence[int] | None = None,
    values: bool | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Explanation:
    """Preview a model on the ranks of a mesh, layer by layer, in one process and with little memory.

    For every operator and every rank, the preview has the shape of the result, messages and bytes, the memory kept for
    the backward pass, and floating-point operations. It lists refusals with their remedy. The model runs once as each
    rank, on tensors without values. Communication is counted and not sent. A refused operator is replaced by a result
    of the right shape, and the run continues.

    If process groups exist, one rank may call this function alone: the model then runs in a forked copy of the process,
    on the CPU. torch refuses a backward pass in the copy after one on a GPU. Call this function before, or without
    ``backward``.

    The model is copied, and does not change. It may be on the meta device, and larger than memory. If it reads values
    (``x.item()``, ``if x.sum() > 0``), it runs with values instead, which takes the memory of one rank.

    Args:
        model: a module, or a function of the inputs.
        inputs: its arguments as on one device. Tensors may be on the meta device, because their values are not used.
            Tensors that have the dims to be sharded are sharded, also in dicts, lists and tuples. Others stay plain.
        mesh: the number of ranks, or the shape of the mesh.
        shard: the tensor dim to shard, or one for each mesh dim (None: replicated), or a list with an entry for each
            input (None: plain). None with a mesh of 1 runs the model without shards, for comparison.
        shard_sizes: ``(size on rank 0, ...)`` where one mesh dim shards, or ``{mesh_dim: sizes}``, for all sharded
            inputs; or a list with an entry for each input. Default: torch.chunk's sizes.
        backward: whether to run a backward pass. A function computes the loss from the model's result. Otherwise each
            result gets a gradient in its own layout, which needs no communication.
        only: the ranks to run. Default: all of up to 8 ranks. In larger worlds, the first, the middle and the last
            rank, and those with the largest and the smallest shard.
        values: whether tensors have values. Default: only if the model needs them.
        kwargs: keyword arguments of the model; tensors among them stay plain.

    Raises:
        RuntimeError: ranks would not call the same operators; or a process group runs, and the model needs values that
            are on a device.
        ValueError, TypeError: no tensor has the dims to be sharded; sizes, ranks or dims that do not fit.

    Example:
        >>> import torch, shardtensor
        >>> model = torch.nn.Conv2d(3, 8, 3, padding=1)
        >>> found = shardtensor.explain(model, torch.empty(1, 3, 1350, 2700, device="meta"), mesh=4, shard=2)
        >>> found.communication(1).messages, found.communication(1).bytes_sent  # two rows of 2700 pixels, 3 channels
        (2, 64800)
        >>> found.layers[0].shares[3].outputs
        ((1, 8, 336, 2700),)
    """
    job = prepared(model, inputs, kwargs or {}, mesh, shard, shard_sizes, backward)
    if only is not None:
        only = sorted(set(only))
        if not only or not all(0 <= rank < job.world_size for rank in only):
            raise UnfitArguments(f"only={only}: give some of 0 to {job.world_size - 1}, the ranks of the mesh")
    return explained(job, sample_of(job) if only is None else tuple(only), values)
