"""``ShardLoader``: one rank reads a batch, every rank gets its shards; the next batch is sent while this one is used.

When a batch is returned, the source has read the next one, and a thread on every rank transfers it. So that no rank
holds more than necessary:

- The source packs and sends one small block after the other, and releases the batch before it reads another.
- A receiver allocates its next shard when the one before the last has been freed. Python's ``for`` keeps the last batch
  until it has got the next one; with the one after that in transit there would be three.

A message for all ranks (``messages.py``) goes before the shards. Where a batch holds a type for the first time, all
ranks tell whether they know it, so that they all raise where one of them does not.

How many batches are in transit follows from the calls alone, which are the same on all ranks. So an iteration may be
left at any time: what is in transit arrives, and is dropped.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import product
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._compat import PyTree, tree_leaves, tree_map
from ..dispatch.scatter import part_at
from ..dispatch.tensor import ShardTensor, wrap
from ..layout.placements import check_in_mesh, check_order, first_rank, rank_at
from ..layout.spec import ShardTensorSpec
from ..layout.strides import as_bytes
from ..ranks.agreement import gather_over_mesh, usable_mesh
from ..ranks.differences import check_equal
from ..ranks.failures import communicating
from ..ranks.groups import new_group, number_of_groups
from ..ranks.history import calling
from ..ranks.integer_rows import gather_rows, gather_texts
from ..ranks.streams import wait_for_streams
from . import messages
from .layout import Layout, MeshlessSpec

# -- copies ------------------------------------------------------------------------------------------------------------

# A rank's shards on their way from the host to an accelerator, which computes meanwhile.


class Copies:
    """Copies from pinned memory on a stream of their own. On the CPU nothing is copied.

    Attributes:
        needed: whether the device is not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.needed = device.type != "cpu"
        self._device = device
        self._stream = torch.Stream(device) if self.needed else None
        self._pinned: list[Tensor] = []  # what the copies under way read

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory of the host to copy from."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.needed)

    def end_last(self) -> None:
        """Return when all copies have been made, and drop the memory that they have read."""
        if self._stream is not None:
            self._stream.synchronize()
            self._pinned.clear()

    def start(self, local: Tensor) -> Tensor:
        """What is in ``local``, a tensor of :meth:`memory`, on the device as soon as :meth:`wait` says so."""
        if self._stream is None:
            return local
        self._pinned.append(local)
        with self._stream:
            return torch.empty_like(local, device=self._device).copy_(local, non_blocking=True)

    def wait(self, copies: Sequence[Tensor]) -> None:
        """Let this thread's stream wait for ``copies``, all of the last ones. The host does not wait."""
        if self._stream is not None:
            wait_for_streams((self._stream,), copies)


# -- loader ------------------------------------------------------------------------------------------------------------

Batch = TypeVar("Batch")

_SMALL = 1 << 20  # bytes; tensors below this, such as a label that a loop keeps, do not delay the next batch
_BLOCK = 1 << 23  # bytes that are packed and sent at once
_FIRST = 1 << 12  # bytes of a message that are sent together with its length

# What a message is about: its first byte.
_BATCH, _PICKLED, _END, _ERROR = b"bpne"

# What the source reads: the loader's state, a message for all ranks, and tensors to shard.
Read = tuple[dict[str, Any] | None, bytes, list[Tensor]]


class ShardLoader(Generic[Batch]):
    """Iterate over batches that one rank of the mesh reads, as ShardTensors.

    Each group of ranks that shares samples (``mesh["domain"]``) has its own source. Only the source opens files and
    holds a batch, on the CPU. Every other rank holds two shards: the current one, and the next one, which it receives
    meanwhile. All ranks must iterate alike. The loop may end early.

    Args:
        loader: on the source: any iterable of batches, such as a ``DataLoader`` or torchdata's ``StatefulDataLoader``.
            Ignored on other ranks (pass None). Batches hold tensors or arrays, nested in dicts, lists and (named)
            tuples, or in classes registered with ``torch.utils._pytree``. Every rank gets a copy of None, bool, int,
            float, str and bytes.
        mesh: the ranks that share samples; default: the mesh of the surrounding ``with mesh:``. With a
            mesh ``("dp", "domain")`` and ``(Shard(0), Shard(2))``, one source reads for all ranks.
        placements: ``Shard`` or ``Replicate`` per mesh dim, for all tensors; or nested like the batch; or a function of
            the batch that returns either. Only the placements that the source passes are used. Default: Replicate.
        shard_sizes: each rank's size, where one mesh dim shards, or ``{mesh_dim or its name: sizes}``, for all tensors;
            or nested, or a function. Default: torch.chunk's sizes.
        source: the *global* rank that reads; default: the first rank of the mesh.
        pickled: whether batches may also hold other objects that can be pickled; the same on all ranks. Unpickling
            received data can run any code: every rank trusts the source, and anyone who can send in its place.

    Raises:
        TypeError: on all ranks: the source passes no loader.
        ValueError: on all ranks: a source outside the mesh; ranks that differ in ``pickled``.

    Every rank of the mesh raises the exceptions of the loader, and errors of layouts that do not fit a batch. Built-in
    exceptions keep their type. Others become their nearest built-in base (RuntimeError if that is Exception), with
    their name in the text. A rank waits for a message up to the timeout of the default process group.

    Creating and iterating are collective over the mesh. The loader may draw numbers from torch's generator in this
    process. These do not advance the generator of the program, so the ranks' generators stay in step.

    Example::

        domain = mesh["domain"]
        loader = DataLoader(...) if domain.get_local_rank() == 0 else None
        for batch in ShardLoader(loader, domain, {"image": (Shard(2),), "label": (Replicate(),)},
                                 shard_sizes=(300, 1050)):
            loss_function(model(batch["image"]), batch["label"]).backward()
    """

    def __init__(
        self,
        loader: Iterable[Batch] | None,
        mesh: DeviceMesh | None = None,
        placements: PyTree = None,
        *,
        shard_sizes: PyTree = None,
        source: int | None = None,
        pickled: bool = False,
    ) -> None:
        self.mesh = usable_mesh(mesh)
        check_order(self.mesh)
        ranks = self.mesh.mesh.flatten().tolist()
        self.source: int = first_rank(self.mesh) if source is None else source
        check_in_mesh("source", self.source, self.mesh)
        self.is_source = dist.get_rank() == self.source
        self.loader: Any = loader if self.is_source else None
        self._layout = Layout(self.mesh, placements, shard_sizes)
        # A device with its index, as the current device is one per thread and the transfer runs in another.
        self._copies = Copies(torch.empty(0, device=self.mesh.device_type).device)
        self._random_state = torch.get_rng_state()
        self._state: dict[str, Any] | None = None
        self._transfer: _Transfer | None = None
        self._iteration: object = None
        self._buffer: Tensor | None = None
        # A group of its own: the thread must not interfere with the model's collectives. Data is sent from CPU to CPU.
        assert dist.group.WORLD is not None
        with calling("ShardLoader"), communicating(dist.group.WORLD):
            numbers = gather_over_mesh([number_of_groups()], self.mesh).values()
            number = max(number for [number] in numbers)
            self._group = new_group("loader", ranks, number, torch.device("cpu"))
        rows = gather_rows([pickled], self._group, "cpu")
        check_equal("value of pickled", {rank: str(bool(flag)) for rank, [flag] in rows.items()})
        self._pickled = pickled
        self._known: set[str] = set()  # types that all ranks know
        self._length: int | None
        told = json.dumps(_length(self.loader)).encode() if self.is_source else b""
        self._length, problem = json.loads(self._told(told))
        if problem:
            raise TypeError(f"source rank {self.source} {problem}")

    def __len__(self) -> int:
        """The number of batches that the source's loader had when this one was made."""
        if self._length is None:
            raise TypeError("the source's loader has no length")
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        if self._transfer is not None:
            self._transfer.finish()
        iteration = self._iteration = object()
        batches = self._read() if self.is_source else None
        transfer = self._start(batches, _Gate())
        last = _Gate()
        try:
            while True:
                if self._iteration is not iteration:
                    raise RuntimeError("this iteration has ended: another one has begun, or load_state_dict was called")
                state, (kind, content) = transfer.result()
                self._state = state
                if kind == _ERROR:
                    error, text = content
                    raise error from RuntimeError(f"on source rank {self.source}:\n{text}")
                if kind == _END:
                    return
                shards = [leaf.to_local() for leaf in tree_leaves(content) if isinstance(leaf, ShardTensor)]
                self._copies.wait(shards)
                transfer = self._start(batches, last)
                last = _Gate(shards)
                # Handed over rather than yielded by name: this frame must not keep the batch alive.
                handed_over = [content]
                del content, shards
                yield handed_over.pop()
        finally:
            transfer.finish()

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader after the last returned batch, on the source; {} on other ranks.

        Raises:
            AttributeError: on the source, if the loader has no state. Use torchdata's StatefulDataLoader.
        """
        if not self.is_source:
            return {}
        if self._state is not None:
            return self._state
        with self._own_random_numbers():
            state: dict[str, Any] = self.loader.state_dict()
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration after the last batch that was returned before the state was taken."""
        if self._transfer is not None:
            self._transfer.finish()
        self._iteration = self._state = None
        if self.is_source:
            self.loader.load_state_dict(state)

    # -- the source reads ---------------------------------------------------------------------------------------------

    def _read(self) -> Iterator[Read]:
        """One entry for each batch, and one for the end or for an error."""
        try:
            with self._own_random_numbers():
                batches = iter(self.loader)
            more = True
            while more:
                tensors: list[Tensor] = []
                with self._own_random_numbers():
                    batch = next(batches, _NOTHING)
                    state = self.loader.state_dict() if hasattr(self.loader, "state_dict") else None
                more = batch is not _NOTHING
                message = self._message(batch, tensors) if more else bytes([_END])
                del batch
                yield state, message, tensors
                del tensors
        except Exception as error:
            yield None, bytes([_ERROR]) + messages.encode_error(error, traceback.format_exc()), []

    def _message(self, batch: PyTree, tensors: list[Tensor]) -> bytes:
        """The message for a batch, with a :class:`MeshlessSpec` for each of its tensors, which go to ``tensors``."""
        described = messages.describe(batch, self._layout, tensors, self._pickled)
        if not self._pickled:
            return bytes([_BATCH]) + messages.encode(described)
        buffer = io.BytesIO()
        buffer.write(bytes([_PICKLED]))
        _Pickler(buffer).dump(described)
        return buffer.getvalue()

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Run with the loader's state of torch's generator instead of the program's."""
        theirs = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(theirs)

    # -- all ranks transfer -------------------------------------------------------------------------------------------

    def _start(self, batches: Iterator[Read] | None, gate: _Gate) -> _Transfer:
        """Read the next batch, where this rank does, and start its transfer."""
        state, message, tensors = (None, b"", []) if batches is None else next(batches)
        self._transfer = _Transfer(lambda: (state, self._move(message, tensors, gate)), gate)
        return self._transfer

    @torch.no_grad()
    def _move(self, message: bytes, tensors: list[Tensor], gate: _Gate) -> tuple[int, Any]:
        message = self._told(message)
        kind, content = message[0], message[1:]
        if kind == _END:
            return kind, None
        if kind == _ERROR:
            return kind, messages.decode_error(content)
        described = self._described(kind, content)
        if not self.is_source:
            gate.wait()
        self._copies.end_last()
        with self._sending():
            return kind, tree_map(
                lambda leaf: self._scatter(leaf, tensors) if isinstance(leaf, MeshlessSpec) else leaf, described
            )

    def _described(self, kind: int, content: bytes) -> PyTree:
        """A batch with a :class:`MeshlessSpec` for each tensor.

        Raises:
            TypeError: on all ranks, where one of them does not know a type in it.
        """
        if self._pickled and kind == _PICKLED:
            return pickle.loads(content)
        types, body = messages.parse(content)
        new = [name for name in types if name not in self._known]
        if new:
            found = gather_texts(messages.lacking(new), lambda row: gather_rows(row, self._group, "cpu"))
            messages.check_known(found)
            self._known.update(new)
        return messages.build(body)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """What the transport raises inside the block names the source."""
        with calling(f"a batch of ShardLoader from rank {self.source}"), communicating(self._group):
            yield

    def _told(self, message: bytes) -> bytes:
        """The source's ``message``, on every rank."""
        with self._sending():
            return self._tell(message)

    def _tell(self, message: bytes) -> bytes:
        """The same; a short one in one broadcast."""
        data = len(message).to_bytes(8, "little") + message
        first = bytearray(data[:_FIRST].ljust(_FIRST, b"\0"))
        dist.broadcast(torch.frombuffer(first, dtype=torch.uint8), self.source, group=self._group)
        more = int.from_bytes(first[:8], "little") + 8 - _FIRST
        if more <= 0:
            return bytes(first[8 : _FIRST + more])
        rest = bytearray(data[_FIRST:]) if self.is_source else bytearray(more)
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), self.source, group=self._group)
        return bytes(first[8:] + rest)

    def _scatter(self, part: MeshlessSpec, tensors: list[Tensor]) -> Any:
        """The ShardTensor that ``part`` describes, which on the source is the next of ``tensors``."""
        spec = part.spec(self.mesh)
        if self.is_source:
            local = self._send(tensors.pop(0), spec)
        else:
            local = self._copies.memory(spec.own_shape, part.dtype)
            for block in _blocks(local):
                dist.recv(as_bytes(block), self.source, group=self._group)
        return wrap(self._copies.start(local), spec)

    def _send(self, tensor: Tensor, spec: ShardTensorSpec) -> Tensor:
        """Send each rank its shard of a global tensor; returns this rank's, which keeps no other shard alive."""
        for at in product(*(range(n) for n in spec.mesh.shape)):
            if at != spec.coordinate:
                for block in _blocks(part_at(tensor, spec, at)):
                    dist.send(self._packed(block), rank_at(spec.mesh, at), group=self._group)
        own = part_at(tensor, spec, spec.coordinate)
        # A copy to the device is under way while the dataset reads on, so it reads memory of ours.
        if not self._copies.needed and own.shape == tensor.shape and _is_packed(own):
            return own
        return self._copies.memory(own.shape, own.dtype).copy_(own)

    def _packed(self, block: Tensor) -> Tensor:
        """The bytes of ``block``."""
        if _is_packed(block):
            return as_bytes(block)
        # Always the same buffer: malloc would keep memory of its own for every block and thread.
        if self._buffer is None:
            self._buffer = torch.empty(_BLOCK, dtype=torch.uint8)
        payload = self._buffer[: block.nbytes]
        payload.view(block.dtype).view(block.shape).copy_(block)
        return payload


class _Transfer:
    """The transfer of one batch, in a thread of its own."""

    def __init__(self, move: Callable[[], Any], gate: _Gate) -> None:
        self._gate = gate
        self._outcome: tuple[Any, BaseException | None] = (None, None)
        # A daemon: a program that fails must not wait for a batch that no rank sends.
        self._thread = threading.Thread(target=self._run, args=(move,), name="ShardLoader", daemon=True)
        self._thread.start()

    def _run(self, move: Callable[[], Any]) -> None:
        try:
            self._outcome = move(), None
        except BaseException as error:
            self._outcome = None, error

    def finish(self) -> None:
        """Wait until it is over, and drop the batch."""
        if not sys.is_finalizing():  # then the thread does not run any more
            self._gate.set()
            self._thread.join()
        self._outcome = (None, None)

    def result(self) -> Any:
        """Wait for the batch, and return the only reference to it."""
        # The caller asks for the next batch, so it means to keep what it still holds of the last one.
        self._gate.set()
        self._thread.join()
        (result, error), self._outcome = self._outcome, (None, None)
        if error is not None:
            raise error
        return result


class _Gate(threading.Event):
    """An event: the memory of these tensors has been freed, or somebody has called :meth:`set`."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        storages = [t.untyped_storage() for t in tensors]
        # A storage lives as long as its memory is in use: by any view, or by a graph that has saved one.
        self._held = [weakref.ref(s, self._check) for s in storages if s.nbytes() >= _SMALL]
        del storages, tensors
        self._check()

    def _check(self, _: object = None) -> None:
        if all(ref() is None for ref in self._held):
            self.set()


_NOTHING = object()


def _length(loader: object) -> tuple[int | None, str]:
    """A loader's length, if it has one, and what is wrong with the loader."""
    if not isinstance(loader, Iterable):
        return None, f"must pass a loader of batches, not {loader!r}"
    try:
        return len(loader) if isinstance(loader, Sized) else None, ""
    except TypeError:  # a DataLoader of a dataset without a length
        return None, ""


def _blocks(piece: Tensor) -> Iterator[Tensor]:
    """Views of ``piece`` in the order of its elements, each of at most ``_BLOCK`` bytes.

    They follow from its shape and dtype, so sender and receiver have the same ones.
    """
    if piece.nbytes > _BLOCK:
        row = piece.nbytes // len(piece)
        for rows in piece.split(max(1, _BLOCK // row)):  # type: ignore[no-untyped-call]
            yield from _blocks(rows if row <= _BLOCK else rows[0])
    elif piece.numel():
        yield piece


def _is_packed(piece: Tensor) -> bool:
    return piece.is_contiguous() and piece.device.type == "cpu" and not (piece.is_conj() or piece.is_neg())


class _Pickler(pickle.Pickler):
    """A pickler that refuses tensors: those of a batch have been collected before, so this one was not found."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Tensor):
            raise TypeError(
                "a batch holds a tensor inside an object that is not a dict, list or (named) tuple; it would be sent "
                "unsharded. Put it into one of those, or register the object with torch.utils._pytree"
            )
        return NotImplemented
