"""The exceptions, and the functions that write their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

# Reason and remedy where an operator would write to a tensor that the ranks cannot make a ShardTensor of.
PLAIN_TARGET = (
    "a ShardTensor cannot be written into a plain tensor inside a compiled function, or if the tensor is a leaf that "
    "requires grad, or shares its memory with an array, a view in another shape or a graph of autograd",
    "make that tensor from a ShardTensor (x.new_zeros, torch.zeros_like(x)), in the shape in which it is written to",
)


# What to do where a model is not on the device of the mesh.
MOVE_THE_MODEL = "move it first: model.to(device), where device = shardtensor.parallel.device()"


class UnsupportedSharding(NotImplementedError):
    """An operator has no exact form for these shards. Raised on every rank, before anything is sent.

    The text names the operator, the placements and sizes of its tensors, the reason and the remedy. The class is a
    :class:`NotImplementedError`, which callers may handle already.

    Example:
        >>> import shardtensor
        >>> issubclass(shardtensor.UnsupportedSharding, NotImplementedError)
        True
    """


class LocalSizeError(RuntimeError, ValueError, IndexError):
    """A plain tensor has the size of this rank's shard instead of the size of the global tensor.

    The text names the operator, the sizes and the remedy. It ends with the text of torch's own error, the
    ``__cause__``. The class is a RuntimeError, a ValueError and an IndexError, because functions of torch raise one of
    these for wrong sizes.

    Example:
        >>> import shardtensor
        >>> issubclass(shardtensor.LocalSizeError, ValueError)
        True
    """


class ThreadConflict(RuntimeError):
    """Two threads of this process communicate in one process group. The text names both.

    Both threads raise it: the second before it sends anything, the first when its current communication is complete.
    See :func:`shardtensor.take_turns`.
    """


class RanksDiffer(RuntimeError):
    """The ranks have called different operators, or have different plain values. Raised on all ranks that compare.

    The text names the first difference. All numbers computed since then may be wrong.

    Example:
        >>> import shardtensor
        >>> issubclass(shardtensor.RanksDiffer, RuntimeError)
        True
    """


class LostRankError(RuntimeError):
    """A rank for which this rank waited has died, failed, ended or not answered. The text names both and the operator.

    Raised on the remaining ranks when the transport fails or times out. The error of the transport is the
    ``__cause__``. The process group is unusable afterwards: end the program, and restart from a checkpoint.

    Example:
        >>> import shardtensor
        >>> issubclass(shardtensor.LostRankError, RuntimeError)
        True
    """


def describe(value: object) -> str:
    """One operand as an error shows it: the spec of a DTensor (or the spec itself), the shape of a plain tensor."""
    spec = getattr(value, "_spec", value)
    if hasattr(spec, "placements"):
        return str(spec)
    if hasattr(value, "shape"):
        return f"plain tensor {tuple(value.shape)}"
    return repr(value)


def refuse(op: object, operands: object, reason: str, remedy: str) -> UnsupportedSharding:
    """Build (not raise) the exception for ``op`` on ``operands``, a tensor, a spec or a sequence of them."""
    return UnsupportedSharding(error_text(op, operands, reason, remedy))


def error_text(op: object, operands: object, reason: str, remedy: str) -> str:
    """The text of an exception for ``op`` on ``operands``, as for :func:`refuse`."""
    name = op if isinstance(op, str) else getattr(op, "__name__", None) or str(op)
    items = operands if isinstance(operands, (list, tuple)) else [operands]
    shown = "; ".join(describe(item) for item in items)
    return f"{name}: {reason}. Operands: {shown}. Remedy: {remedy}."


def different_meshes(op: object, operands: Sequence[Any]) -> UnsupportedSharding:
    """The exception for operands on different meshes; the remedy says how to put both on one.

    Args:
        operands: DTensors or specs.
    """
    meshes = [getattr(t, "mesh", None) or t.device_mesh for t in operands]
    if not any(t.shape for t in operands):  # losses, or the norms of gradients
        remedy = (
            "add up plain numbers, loss.full_tensor(), or clip gradients by shardtensor.parallel.clip_grad_norm_, "
            "which takes parameters of several meshes"
        )
        return refuse(op, operands, f"operands live on different meshes ({_shown(meshes)})", remedy)
    # The remedy lists the axes in the order of one mesh of all ranks: neighbours are farthest apart along the first.
    strides = {name: n for mesh in meshes for name, n in zip(mesh.mesh_dim_names or [""], _strides(mesh))}
    names = sorted(strides, key=lambda name: -strides[name])
    shown = ", ".join(repr(name) for name in names)
    remedy = "build all of them on one mesh"
    if len(names) > 1 and all(names):
        remedy += (
            f": on mesh[{shown}] instead of one axis each, with a placement per axis and Replicate() on those over "
            "which a tensor is not sharded. For tensor parallel: an input as (Shard(1), Replicate()) on mesh['domain', "
            "'tp'], and weights by shardtensor.parallel.tensor_parallel(model, mesh['domain', 'tp'], {'up': 'colwise', "
            "'down': 'rowwise'}) instead of parallelize_module(model, mesh['tp'], ...)"
        )
    # FSDP2's are torch's own DTensors.
    if any(p.is_shard() for t in operands if not hasattr(t, "shard_sizes") for p in t.placements):
        remedy += (
            ". A parameter of FSDP2 is gathered for the forward of its unit alone: call the module that holds it, and "
            "make parametrizations before fully_shard"
        )
    return refuse(op, operands, f"operands live on different meshes ({_shown(meshes)})", remedy)


def _shown(meshes: Sequence[DeviceMesh]) -> str:
    return ", ".join(dict.fromkeys(map(_axes, meshes)))


def _axes(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    return "x".join(f"{name}={size}" if name else str(size) for name, size in zip(names, mesh.shape, strict=True))


def _strides(mesh: DeviceMesh) -> list[int]:
    """For each mesh dim, the difference between the ranks of neighbours; 0 where the mesh dim has one rank."""
    ranks = mesh.mesh
    return [int(ranks.narrow(m, 0, 2).diff(dim=m).flatten()[0]) if n > 1 else 0 for m, n in enumerate(ranks.shape)]
