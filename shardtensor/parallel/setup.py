"""What a program does before its model: its device, its mesh with named axes, seeds, samplers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.utils.data import Dataset, DistributedSampler

from .._compat import PyTree, tree_map
from ..data.batches import scatter_batch
from ..ranks.differences import check_equal
from ..ranks.integer_rows import gather_rows
from .prepare import Parallelized, parallelize

AXES = ("dp", "domain", "tp")


def device(type: str | None = None) -> torch.device:
    """The device of this process, which is made the current one.

    On a host with accelerators it is the one that ``LOCAL_RANK`` numbers, as torchrun sets it, or the only one that
    this process sees (Slurm's ``--gpus-per-task=1``); without ``LOCAL_RANK`` it is the current one. Elsewhere it is the
    CPU. Call it before ``init_device_mesh``, which calls ``set_device(LOCAL_RANK)`` also where there is one device.

    Args:
        type: ``"cpu"`` to stay on the CPU, or the type of an accelerator. Default: the accelerator that
            torch finds, otherwise the CPU.

    Raises:
        RuntimeError: this process sees no such accelerator, or fewer than ``LOCAL_RANK`` asks for.

    Example::

        device = shardtensor.parallel.device()
        mesh = init_device_mesh(device.type, (4,), mesh_dim_names=("domain",))
        model = Model().to(device)
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if type == "cpu" or (type is None and found is None):
        return torch.device("cpu")
    if found is None or type not in (None, found.type):
        raise RuntimeError(f"this process sees no device of type {type!r}: torch finds {found or 'no accelerator'}")
    count, local_rank = torch.accelerator.device_count(), os.environ.get("LOCAL_RANK")
    index = 0 if count == 1 else torch.accelerator.current_device_index() if local_rank is None else int(local_rank)
    if index >= count:
        raise RuntimeError(
            f"LOCAL_RANK={local_rank}, but this process sees {count} devices of type {found.type!r}: start at most "
            f"{count} processes on this host, or show each process one device of its own"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)


def init(
    *,
    domain: int | str | None = None,
    tp: int | str | None = None,
    dp: int | str | None = None,
    device_type: str | None = None,
    seed: int | str | None = 0,
) -> Parallel:
    """Set up this process for a mesh of data x domain x tensor parallelism. Collective over all ranks.

    Starts the default process group from the environment, unless the program has done so, makes the device current,
    makes the mesh, and sets torch's seed. ``init(**config)`` takes a dict, such as a part of a YAML file.

    Args:
        domain: ranks that share a sample; default: the environment's ``SHARDTENSOR_DOMAIN``, or the ranks that ``dp``
            and ``tp`` leave.
        tp: ranks that share weights; default: ``SHARDTENSOR_TP``, or 1, where the mesh has no such axis.
        dp: groups of ranks that have different samples; default: ``SHARDTENSOR_DP``, or what the others leave.
        device_type: as for :func:`device`.
        seed: of torch's generators, which add the coordinate along ``dp``: equal in a domain, and different where
            samples, or members of an ensemble, differ. None: no seed is set.

    Raises:
        ValueError: on all ranks: sizes that do not multiply to the number of ranks, or are not the same on all.

    Example::

        parallel = shardtensor.parallel.init(domain=4)        # on 8 ranks: dp = 2
        model = Model().to(parallel.device)
        parallel.parallelize(model, units=[Block])
        for batch in DataLoader(dataset, batch_size=2, sampler=parallel.sampler(dataset)):
            x, y = parallel.scatter(batch, Shard(2))
            loss = loss_function(model(x), y)
            parallel.log(f"loss {loss.item():.3f}")
    """
    where = device(device_type)
    if not dist.is_initialized():
        dist.init_process_group()
    given = {"dp": dp, "domain": domain, "tp": tp}
    asked = {
        name: size if size is not None else os.environ.get(f"SHARDTENSOR_{name.upper()}")
        for name, size in given.items()
    }
    sizes = {name: None if size is None else int(size) for name, size in asked.items()}
    number = None if seed is None else int(seed)
    row = [*(size or 0 for size in sizes.values()), -1 if number is None else number]
    assert dist.group.WORLD is not None
    rows = gather_rows(row, dist.group.WORLD, where)
    check_equal("mesh and the seed", {rank: str(dict(zip((*sizes, "seed"), theirs))) for rank, theirs in rows.items()})
    shape = _complete(sizes, dist.get_world_size())
    names = [name for name in AXES if name != "tp" or shape["tp"] > 1]
    mesh = init_device_mesh(where.type, tuple(shape[name] for name in names), mesh_dim_names=tuple(names))
    if number is not None:
        torch.manual_seed(number + mesh["dp"].get_local_rank())
    return Parallel(mesh, where)


def _complete(sizes: Mapping[str, int | None], ranks: int) -> dict[str, int]:
    """The size of each axis; the first one that is missing gets the ranks that the others leave."""
    given = {name: size for name, size in sizes.items() if size is not None}
    given.setdefault("tp", 1)
    missing = [name for name in ("domain", "dp") if name not in given]
    rest, over = divmod(ranks, math.prod(given.values()) or ranks + 1)
    shape = {"dp": 1, "domain": 1, **given, **dict.fromkeys(missing[:1], rest)}
    if over or min(shape.values()) < 1 or math.prod(shape.values()) != ranks:
        asked = " x ".join(f"{name}={size}" for name, size in given.items())
        raise ValueError(
            f"{ranks} ranks are not a mesh of {asked}; sizes are positive, and multiply to the number of ranks"
        )
    return shape


@dataclass(frozen=True)
class Parallel:
    """A mesh of data x domain x tensor parallelism, and what follows from it; :func:`init` makes one.

    Attributes:
        mesh: of the axes ``("dp", "domain")``, and ``"tp"`` if it has more than one rank.
        device: of this process.
    """

    mesh: DeviceMesh
    device: torch.device

    @property
    def inputs(self) -> DeviceMesh:
        """The mesh for ShardTensors: the domain, with the tensor axis if there is one."""
        names = self.mesh.mesh_dim_names or ()
        return self.mesh[tuple(name for name in names if name != "dp")]

    @property
    def is_first(self) -> bool:
        """Whether this is the mesh's first rank, which writes files and logs."""
        return not any(self.mesh.get_coordinate() or ())

    def sampler(self, dataset: Dataset[Any], *, members: int = 1, **options: Any) -> DistributedSampler[Any]:
        """A sampler by which domains read different samples, and the ranks of one the same.

        Args:
            members: so many consecutive domains read the same samples: the members of an ensemble.
            options: of ``torch.utils.data.DistributedSampler``: ``shuffle``, ``seed``, ``drop_last``. As there, samples
                are repeated where domains would get different numbers of them.

        Raises:
            ValueError: members that do not divide the number of domains.
        """
        dp = self.mesh["dp"]
        if members < 1 or dp.size() % members:
            raise ValueError(f"members={members} do not divide the {dp.size()} domains")
        replicas, mine = dp.size() // members, dp.get_local_rank() // members
        return DistributedSampler(dataset, num_replicas=replicas, rank=mine, **options)

    def scatter(self, batch: PyTree, placements: PyTree, *, shard_sizes: PyTree = None) -> PyTree:
        """Shard a batch over the domain: of its first rank, the tensors in any structure. Collective over the domain.

        Args:
            batch: a tensor or array, or a structure of them, as for :class:`shardtensor.data.ShardLoader`, on any
                device. Ranks other than the domain's first pass None or the same, which is compared: all numbers in the
                first calls, later some thousand of each tensor.
            placements: ``Shard(d)`` or ``Replicate()`` on the domain axis for all tensors, or nested like the batch.
            shard_sizes: each rank's size for all tensors, or nested like the batch; default: torch.chunk's sizes.

        Returns:
            The same structure with ShardTensors on :attr:`inputs`, whose tensors along ``tp`` are equal.

        Raises:
            TypeError, ValueError: on all ranks of the domain: what cannot be sent, layouts that do not fit, ranks that
                pass different batches.

        Example::

            x, y = parallel.scatter((image, label), (Shard(2), Replicate()))
        """
        inputs = self.inputs
        over_tp = [Replicate()] * (inputs.ndim - 1)
        return scatter_batch(batch, inputs, tree_map(lambda p: (p, *over_tp), placements), shard_sizes=shard_sizes)

    def parallelize(
        self,
        model: nn.Module,
        *,
        plan: Mapping[str, str] | None = None,
        units: Sequence[type[nn.Module]] = (),
        **options: Any,
    ) -> Parallelized:
        """:func:`shardtensor.parallel.parallelize` on this mesh; ``plan`` says which layers the tensor axis shards.

        Raises:
            ValueError: a tensor axis without a plan, or a plan without one.
        """
        names = self.mesh.mesh_dim_names or ()
        if ("tp" in names) != (plan is not None):
            raise ValueError(f"the mesh's axes are {names}: a tensor axis needs a plan, and a plan needs tp > 1")
        return parallelize(model, self.mesh, tensor="tp" if plan else None, plan=plan, units=units, **options)

    def log(self, *values: object) -> None:
        """Print on the first rank. Call it on all: the text of a ShardTensor may need their shards."""
        texts = list(map(str, values))
        if self.is_first:
            print(*texts, flush=True)
