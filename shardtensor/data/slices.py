"""Each rank reads its own slice, :func:`read` one tensor, :class:`SliceDataset` batches of samples; and writes it.

An array is anything with ``shape`` and indexing by integers and slices: ``zarr.Array``, ``h5py.Dataset``,
``netCDF4.Variable``, ``xarray.DataArray``, nibabel's ``ArrayProxy``, ``numpy.memmap``, ``numpy.ndarray``. A rank reads
only its own part, and nothing if its shard is empty.
"""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.data import Dataset

from .._compat import PyTree, tree_leaves, tree_map
from ..dispatch.tensor import ShardTensor, redistribute_to, wrap
from ..layout.intervals import aligned_sizes, boundaries_of
from ..layout.placements import AxisLayout, ShardSizes, rank_at
from ..layout.spec import ShardTensorSpec
from ..ranks.agreement import Table, check_same, gather_over_mesh, is_early, record_over_mesh, usable_mesh
from .layout import Layout, MakeSpec, MeshlessSpec, make_spec


class Array(Protocol):
    """What is read from; ``chunks``, the length of a chunk in each dim, is optional."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, key: Any, /) -> Any: ...


# What is picked from each dim of an array: one entry, or a range of them.
Chosen = Sequence[int | range]
Key = tuple[int | slice, ...]


def read(
    array: Array,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    index: object = (),
    shard_sizes: ShardSizes = None,
    dtype: torch.dtype | None = None,
    fill: float | None = None,
) -> ShardTensor:
    """Read ``array[index]`` as a ShardTensor. Each rank reads only its own shard, without communication.

    Args:
        array: the same on every rank. It has a ``shape``, and can be indexed by integers and slices, also empty ones.
        mesh: default: the mesh of the surrounding ``with mesh:``.
        placements: ``Shard`` or ``Replicate`` per mesh dim, for the dims of the result; default: Replicate everywhere.
        index: integers, slices with positive steps and ``...``, as for the array; default: the complete array.
        shard_sizes: each rank's size, where one mesh dim shards, or ``{mesh_dim or its name: sizes}``; default:
            torch.chunk's sizes. "chunks": as even as possible, with every boundary between two chunks of the array
            (``array.chunks`` of zarr and h5py). So no chunk is read twice.
        dtype: the dtype of the result; default: that of an empty slice of the array, which a reader of packed values
            returns unpacked. Values are converted after they have been unpacked.
        fill: the value of masked points, in the dtype of the result. (netCDF4 masks missing values.)

    Returns:
        A ShardTensor with its own memory, in the byte order of the machine.

    Raises:
        TypeError: an index that is neither integer nor slice; a dtype that torch does not have, such as dates.
        ValueError: placements or sizes that do not fit; "chunks" for an array without chunks, or for a dim that is read
            in part.
        IndexError: an integer out of range, or too many integers.

    Every rank raises these errors. Only the rank that reads a file raises an error of the file, or ValueError where it
    reads masked points without a ``fill``, or with one that the dtype does not have.

    Example::

        t2m = zarr.open("era5.zarr")["t2m"]                                                    # (time, lat, lon)
        x = read(t2m, mesh["domain"], (Shard(0),), index=hour, shard_sizes=(300, 421))    # one hour's (721, 1440)
    """
    mesh = usable_mesh(mesh)
    chosen = _chosen(array.shape, index)
    shape = [len(c) for c in chosen if isinstance(c, range)]
    spec = make_spec(mesh, placements, shard_sizes, shape, dtype or _dtype(array), _chunks(array, chosen))
    local = _load(array, _own(chosen, spec), spec.own_shape, spec.tensor_meta.dtype, dtype is None, fill)
    result: ShardTensor = wrap(local.to(mesh.device_type), spec)
    return result


class PendingWrite:
    """A :func:`write` that may still be under way."""

    def __init__(self, finish: Callable[[], None], mesh: DeviceMesh) -> None:
        self._finish, self._mesh = finish, mesh

    def wait(self) -> None:
        """Return when all ranks have written. Collective over the mesh.

        Raises:
            RuntimeError: another rank could not write, and raises its own error.
        """
        error = None
        try:
            self._finish()
        except Exception as e:
            error = e
        rows = gather_over_mesh([error is not None], self._mesh)
        if error is not None:
            raise error
        if failed := [rank_at(self._mesh, at) for at, row in rows.items() if row[0]]:
            raise RuntimeError(f"ranks {failed} could not write; they raise their own errors")


@torch.no_grad()
def write(array: Any, x: DTensor, *, index: object = (), wait: bool = True) -> PendingWrite | None:
    """Write ``array[index] = x``. Each rank writes its own shard. Collective over the mesh.

    The call returns when all ranks have written; with ``wait=False`` when each rank's shard is on its way to the host's
    memory, from which a thread writes it, one write after the other. A Partial is reduced first, and one of several
    copies is written. Two ranks that write to the same chunk (``array.shards`` or ``array.chunks`` of zarr) would lose
    values. If a boundary of ``x`` lies within a chunk, ``x`` is first redistributed to sizes with boundaries between
    chunks.

    Args:
        array: the same on every rank. Several processes must be able to write to it: ``zarr.Array``, or
            ``numpy.lib.format.open_memmap(path, "r+")`` on one machine, but neither h5py nor netCDF4. xarray would
            keep what is written in the memory of each rank.
        x: a ShardTensor or DTensor of the shape of ``array[index]``; its values are converted to the dtype in which
            :func:`read` reads the array. A netCDF4 variable packs them itself.
        index: integers, slices with positive steps and ``...``, as for :func:`read`; the same on every rank.
        wait: the same on every rank.

    Returns:
        With ``wait=False``, what all ranks call ``wait()`` of, for each write in the same order: it raises the error of
        its own write, and of no other one.

    Raises:
        ValueError: on every rank: another shape; a sharded dim of which only parts of chunks are written; ranks that
            write to different places.
        RuntimeError: another rank could not write, and raises its own error, such as ValueError for values that an
            array of integers cannot hold.

    Example::

        out = zarr.create_array("rollout.zarr", shape=(steps, 721, 1440), chunks=(1, 103, 1440), dtype="float32")
        writing = []
        for step in range(steps):
            x = model(x)                            # (721, 1440), sharded along latitude
            writing.append(write(out, x, index=step, wait=False))   # while the next step is computed
        for each in writing:
            each.wait()                             # raises what this one has raised
    """
    x = x if isinstance(x, ShardTensor) else ShardTensor.from_dtensor(x)
    mesh, chosen = x.device_mesh, _chosen(array.shape, index)
    shape = tuple(len(c) for c in chosen if isinstance(c, range))
    lengths = getattr(array, "shards", None) or getattr(array, "chunks", None)
    chunks = _chunks(array, chosen, lengths)
    place = f"{index} of an array {tuple(array.shape)} in chunks {chunks}"
    if wait or is_early("writes", mesh):
        check_same("places to write to", [place], mesh)
    else:  # the host would wait for the device
        record_over_mesh(f"write to {place}", mesh)
    if shape != tuple(x.shape):
        raise ValueError(f"array[{index}] has shape {shape}, but x has shape {tuple(x.shape)}")
    target = x._spec.for_gradient()
    for d, m in target.sharded_dims().items():
        if lengths and not chunks[d]:
            raise ValueError(f"dim {d} is sharded, but array[{index}] has parts of its chunks; write the complete dim")
        if chunks[d] and any(b % chunks[d] and b < shape[d] for b in boundaries_of(target.sizes_along(m))):
            sizes = aligned_sizes(shape[d], chunks[d], mesh.size(m))
            target = target.with_axes({m: AxisLayout(Shard(d), sizes)})
    x = redistribute_to(x, target)
    first = all(at == 0 for m, at in enumerate(target.coordinate) if m not in target.sharded_dims().values())
    values, ready = _on_host(x.to_local(), copied=not wait)

    def store() -> None:
        dtype = _dtype(array)
        if first and 0 not in target.own_shape:
            ready()
            array[_own(chosen, target)] = _converted(values, dtype).numpy()

    pending = PendingWrite(store if wait else _thread().submit(store).result, mesh)
    if not wait:
        return pending
    pending.wait()
    return None


@cache
def _thread() -> ThreadPoolExecutor:
    """One that writes: two writes may be to the same chunk, which each of them reads first."""
    return ThreadPoolExecutor(1, "shardtensor-write")


def _on_host(local: Tensor, copied: bool) -> tuple[Tensor, Callable[[], object]]:
    """A tensor in the host's memory, and what waits until it has the values. The caller does not wait.

    Args:
        copied: whether it must not change with ``local``.
    """
    if local.device.type == "cpu":
        return local.clone() if copied else local, lambda: None
    host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=True)
    host.copy_(local, non_blocking=True)
    event = torch.Event(local.device)
    event.record()
    return host, event.synchronize


class SliceDataset(Dataset[Any]):
    """A dataset of samples ``array[i]`` for any ``DataLoader``. Each rank reads its own slice of a sample.

    The ranks of the mesh read the same samples in the same order, each with its own ``DataLoader``. :meth:`batches`
    makes ShardTensors of their batches.

    Args:
        arrays: arrays whose dim 0 counts the samples, nested in dicts, lists and tuples; or a function that opens them.
            Every process that reads calls the function once. Use a function if workers are not forked. Use one for h5py
            as well, because worker processes must not share its files.
        mesh: the ranks that share samples; default: the mesh of the surrounding ``with mesh:``.
        placements, shard_sizes: for all arrays, or nested like them, as for :class:`ShardLoader`. Their dims are those
            of the *batch*. Dim 0, the samples, cannot be sharded. "chunks": as in :func:`read`.
        dtype, fill: of the slices, as for :func:`read`.

    Raises:
        ValueError: arrays with different numbers of samples, sharded samples, and as :func:`read`.

    Example::

        dataset = SliceDataset({"x": xs, "y": ys}, mesh["domain"], (Shard(2),), shard_sizes=(300, 421))
        sampler = DistributedSampler(dataset, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank())
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
        for batch in dataset.batches(loader):
            loss_function(model(batch["x"]), batch["y"]).backward()
    """

    def __init__(
        self,
        arrays: PyTree,
        mesh: DeviceMesh | None = None,
        placements: PyTree = None,
        *,
        shard_sizes: PyTree = None,
        dtype: torch.dtype | None = None,
        fill: float | None = None,
    ) -> None:
        self._mesh: DeviceMesh | None = usable_mesh(mesh)  # None in worker processes
        self._dtype, self._fill = dtype, fill
        self._source = arrays
        self._arrays: tuple[int, PyTree] = (0, None)  # the process that opened them, and what it got
        opened = self._opened()
        counts = sorted({array.shape[0] for array in tree_leaves(opened)})
        if len(counts) != 1:
            raise ValueError(f"arrays of {counts} samples; all must have the same number of them")
        self._length: int = counts[0]

        def slices(array: Array, make: MakeSpec) -> _Slices:
            chosen = _chosen(array.shape, ())
            spec = make(array.shape, dtype or _dtype(array), _chunks(array, chosen))
            if 0 in spec.sharded_dims():
                raise ValueError(f"dim 0 counts the samples and cannot be sharded: {spec}")
            return _Slices(_own(chosen, spec)[1:], spec.own_shape[1:], MeshlessSpec.of(spec))

        self._slices = Layout(self._mesh, placements, shard_sizes).map(slices, opened)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> tuple[int, PyTree]:
        """The sample's number, and this rank's slices of it as plain tensors."""
        i = range(self._length)[i]

        def load(array: Array, slices: _Slices) -> Tensor:
            part = slices.part
            return _load(array, (i, *slices.key), slices.shape, part.dtype, self._dtype is None, self._fill)

        return i, tree_map(load, self._opened(), self._slices)

    def batches(self, loader: Iterable[Any]) -> Iterator[PyTree]:
        """ShardTensors, nested like the arrays, from the batches of a ``DataLoader`` over this dataset.

        For each batch, the ranks compare the samples that they have read, with one all-gather of three numbers per mesh
        dim. Use samplers with the same seed.

        Raises:
            ValueError: on every rank: the ranks have read different samples, or different numbers of batches.
            RuntimeError: another rank could not read, and raises its own error.
            TypeError: batches of another dataset, or of another ``collate_fn`` than the default.
        """
        # All ranks gather in each round, whatever has happened on them: this is where an error or the end is noticed.
        assert self._mesh is not None, "only the process that made the dataset makes ShardTensors"
        batches = iter(loader)
        while True:
            error, row, local = None, [_END, 0, 0], None
            try:
                batch = next(batches, None)
                if batch is not None:
                    samples, local = _split(batch)
                    row = [_BATCH, len(samples), zlib.crc32(repr(samples).encode())]
            except Exception as e:
                error, row = e, [_FAILED, 0, 0]
            rows = gather_over_mesh(row, self._mesh)
            if error is not None:
                raise error
            self._compare(rows)
            if local is None:
                return
            count, leaves = row[1], iter(tree_leaves(local))
            yield tree_map(lambda slices, n=count, leaves=leaves: self._assemble(next(leaves), slices, n), self._slices)

    def _compare(self, rows: Table) -> None:
        """Raise where the ranks' rows of :meth:`batches` differ, or where one of them has failed."""
        assert self._mesh is not None
        names = {at: rank_at(self._mesh, at) for at in rows}
        failed = [names[at] for at, row in rows.items() if row[0] == _FAILED]
        if failed:
            raise RuntimeError(f"ranks {failed} could not read a batch; they raise their own errors")
        first = next(iter(rows.values()))
        others = [names[at] for at, row in rows.items() if row != first]
        if others:
            raise ValueError(
                f"ranks {others} have not read the same samples as rank {next(iter(names.values()))}: the ranks that "
                f"share samples ({self._mesh.mesh.tolist()}) need samplers of the same order and length; give them "
                "the same seed, and shard the samples only over other mesh dims"
            )

    def _assemble(self, local: object, slices: _Slices, count: int) -> ShardTensor:
        """The ShardTensor of ``count`` samples of one array, of which ``local`` are this rank's slices."""
        assert self._mesh is not None
        spec = replace(slices.part, shape=(count, *slices.part.shape[1:])).spec(self._mesh)
        if not isinstance(local, Tensor) or local.shape != spec.own_shape:
            raise TypeError(f"the loader has made {type(local).__name__} of a slice of {spec}; leave collate_fn out")
        result: ShardTensor = wrap(local.to(self._mesh.device_type, non_blocking=True), spec)
        return result

    def _opened(self) -> PyTree:
        """The arrays, opened by this process."""
        if self._arrays[0] != os.getpid():
            self._arrays = os.getpid(), self._source() if callable(self._source) else self._source
        return self._arrays[1]

    def __getstate__(self) -> dict[str, Any]:
        # For worker processes. They only read: they need no mesh, which cannot be pickled, and open files themselves.
        return self.__dict__ | {"_mesh": None, "_arrays": (0, None)}


_END, _BATCH, _FAILED = range(3)  # what has happened on a rank


@dataclass(frozen=True)
class _Slices:
    """What this rank reads of every sample of one array, and the global tensor of a batch, but for its length."""

    key: Key
    shape: tuple[int, ...]
    part: MeshlessSpec


def _split(batch: object) -> tuple[list[int], PyTree]:
    """The numbers of a batch's samples, and its tensors."""
    if not (isinstance(batch, (list, tuple)) and len(batch) == 2 and isinstance(batch[0], Tensor)):
        raise TypeError("not a batch of SliceDataset's samples; give the DataLoader a batch_size, and no collate_fn")
    return batch[0].tolist(), batch[1]


# -- indices ----------------------------------------------------------------------------------------------------------


def _chosen(shape: Sequence[int], index: object) -> list[int | range]:
    """Which entries of each dim of an array ``index`` picks."""
    given = list(index) if isinstance(index, tuple) else [index]
    explicit = [i for i in given if i is not Ellipsis]
    if len(explicit) > len(shape) or len(given) > len(explicit) + 1:
        raise IndexError(f"index {index} for an array of shape {tuple(shape)}")
    at = given.index(Ellipsis) if len(given) > len(explicit) else len(given)
    explicit[at:at] = [slice(None)] * (len(shape) - len(explicit))
    chosen: list[int | range] = []
    for n, i in zip(shape, explicit):
        if not isinstance(i, slice) and not hasattr(i, "__index__"):
            raise TypeError(f"index {index}: only integers, slices and ...; read others one by one")
        entries = range(n)[i if isinstance(i, slice) else operator.index(i)]
        if isinstance(entries, range) and entries.step < 1:
            raise ValueError(f"index {index}: a slice's step must be positive")
        chosen.append(entries)
    return chosen


def _own(chosen: Chosen, spec: ShardTensorSpec) -> Key:
    """The index of this rank's part of what is chosen."""
    intervals = {d: spec.interval(m) for d, m in spec.sharded_dims().items()}
    key: list[int | slice] = []
    dim = 0  # of the result: a single entry has none
    for entries in chosen:
        if isinstance(entries, range):
            start, stop = intervals.get(dim, (0, len(entries)))
            entries = entries[start:stop]
            key.append(slice(entries.start, entries.stop, entries.step))
            dim += 1
        else:
            key.append(entries)
    return tuple(key)


def _chunks(array: Array, chosen: Chosen, lengths: Sequence[int] | None = None) -> list[int]:
    """The length of a chunk in each dim of what is chosen; 0 where that is not all of a dim of a chunked array.

    Args:
        lengths: of what counts as a chunk; default: the array's own.
    """
    lengths = lengths or getattr(array, "chunks", None) or [0] * len(chosen)
    return [
        length if entries == range(n) and isinstance(length, int) else 0  # dask has a tuple of lengths
        for n, length, entries in zip(array.shape, lengths, chosen)
        if isinstance(entries, range)
    ]


# -- numpy to torch ---------------------------------------------------------------------------------------------------


def _dtype(array: Array) -> torch.dtype:
    """The dtype in which an array is read: that of an empty slice, which reads no chunk.

    It may differ from the array's ``dtype``, which is that of the stored values: netCDF4 and nibabel unpack integers to
    floating point.
    """
    return _tensor(array[(slice(0, 0),) * len(array.shape)]).dtype


def _load(array: Array, key: Key, shape: Sequence[int], dtype: torch.dtype, exact: bool, fill: float | None) -> Tensor:
    """``array[key]``, which has ``shape``, as a tensor with memory of its own.

    Args:
        exact: whether ``dtype`` is that of the array, and not one to convert to.
        fill: the value of masked points.
    """
    if 0 in shape:
        return torch.empty(*shape, dtype=dtype)
    import numpy as np

    piece = np.asanyarray(array[key])
    tensor, mask = _tensor(piece), np.ma.getmask(piece)
    # A single masked value, which is always float64, is all mask.
    if exact and tensor.dtype != dtype and not np.all(mask):
        raise TypeError(f"array[{key}] is {tensor.dtype}, but an empty slice of the array is {dtype}; pass dtype=")
    tensor = tensor.to(dtype)
    if np.any(mask):
        if fill is None:
            raise ValueError(
                f"{np.sum(mask)} of {piece.size} points of array[{key}] are masked, and have no value; pass fill=, the "
                "value to put there"
            )
        value = _converted(_tensor(fill), dtype)
        kernel = _SIGNED.get(dtype, dtype)
        tensor = torch.where(_tensor(mask), value.view(kernel), tensor.view(kernel)).view(dtype)
    return tensor


# Before 2.13 torch.where has no kernel for these.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _tensor(piece: Any) -> Tensor:
    """A tensor of what an array has returned. What is masked in it has any value."""
    import numpy as np

    piece = np.asarray(piece)
    # A copy only where the piece is a view, read-only or of another byte order: files are mapped, arrays may change.
    native = np.require(piece, piece.dtype.newbyteorder("="), ["C", "W", "O"])
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise TypeError(
            f"torch has no dtype for NumPy's {native.dtype}; read numbers, for dates such as hours (xarray's "
            "decode_times=False)"
        ) from None


def _converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in another dtype.

    Raises:
        ValueError: the dtype has no fractions, signs, imaginary parts or range to hold them.
    """
    converted = values.to(dtype)
    rounds = (dtype.is_floating_point or dtype.is_complex) and torch.can_cast(values.dtype, dtype)
    if not rounds and values.dtype != dtype and not torch.equal(converted.to(values.dtype), values):
        at = converted.to(values.dtype) != values
        raise ValueError(f"{values[at][0].item()} is no value of {dtype}; convert it first, or choose another dtype")
    return converted
