"""``ShardLoader``: one rank reads a batch, every rank gets its shards, the next batch travels while this one is used.

[Note: one batch ahead] When a batch is handed out, the source has read the next one, and a thread on every rank moves
it. So that no rank holds more than it must:

- The source packs and sends one small block after the other, and lets go of the batch before it reads another.
- A receiver makes room for its next shard when the one before the last is gone. Python's ``for`` keeps the last batch
  until it has got the next one; with the one after that on its way there would be three.

How many batches are under way follows from the calls alone, which are the same on all ranks. So an iteration may be
left at any time: what is on its way arrives, and is dropped.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_convert

from .._compat import current_mesh, tree_leaves, tree_map
from ..agreement import check_process_group
from ..dispatch import wrap
from ..scatter import part_at, wire
from ..spec import ShardTensorSpec, check_order, mesh_coordinate
from ..tensor import ShardTensor
from .layout import Layout, Part

__all__ = ["ShardLoader"]

_SMALL = 1 << 20  # bytes; who keeps a label of the last batch does not hold up the next
_BLOCK = 1 << 23  # bytes that are packed and sent at once


class ShardLoader:
    """Iterate over the batches that one rank of the mesh reads, cut into ShardTensors.

    Each group of ranks that shares samples (``mesh["domain"]``) has a source of its own; only that one opens files and
    holds a batch, on the CPU. Every other rank receives its shards, and holds two: the current one and the next, which
    travels while the current one is used. Iterate on all ranks alike; leaving the loop early is fine.

    Args:
        loader: on the source: any iterable of batches, such as a ``DataLoader`` or torchdata's ``StatefulDataLoader``.
            Ignored elsewhere (pass None). Batches are tensors or arrays, nested in dicts, lists and (named) tuples; all
            else in them must be picklable and small: every rank gets a copy.
        mesh: the ranks that share samples; default: the mesh of the surrounding ``with mesh:``.
        placements: ``Shard`` or ``Replicate`` per mesh dim, for all tensors; or nested like the batch, with these at
            the leaves; or a function that makes either from a batch. Default: Replicate. The source's are what counts.
        shard_sizes: ``{mesh_dim: sizes}``, for all tensors, nested or a function likewise; torch.chunk's where left
            out.
        source: position in the mesh (in ``mesh.mesh.flatten()``) of the rank that reads.

    Raises:
        TypeError: the source has passed no loader (on all ranks).
        ValueError: a source outside the mesh.

    What the source's loader raises, and what does not fit in its batches, is raised on every rank of the mesh.

    Collective over the mesh, as is iterating. Numbers that the loader draws from torch's generator in this process do
    not advance that of the program: it would no longer be in step with the other ranks'.

    Example::

        domain = mesh["domain"]
        loader = DataLoader(...) if domain.get_local_rank() == 0 else None
        for batch in ShardLoader(loader, domain, {"image": (Shard(2),), "label": (Replicate(),)},
                                 shard_sizes={0: (300, 1050)}):
            loss_function(model(batch["image"]), batch["label"]).backward()
    """

    def __init__(
        self,
        loader: Iterable[Any] | None,
        mesh: DeviceMesh | None = None,
        placements: Any = None,
        *,
        shard_sizes: Any = None,
        source: int = 0,
    ) -> None:
        check_process_group()
        self.mesh = current_mesh() if mesh is None else mesh
        mesh_coordinate(self.mesh)
        check_order(self.mesh)
        ranks = self.mesh.mesh.flatten().tolist()
        if not 0 <= source < len(ranks):
            raise ValueError(f"source={source} is no position in a mesh of {len(ranks)} ranks")
        self.source: int = ranks[source]
        self.is_source = dist.get_rank() == self.source
        self.loader: Any = loader if self.is_source else None
        self._layout = Layout(self.mesh, placements, shard_sizes)
        self._device = torch.empty(0, device=self.mesh.device_type).device  # with its index, which is a thread's own
        self._random_state = torch.get_rng_state()
        self._state: dict[str, Any] | None = None
        self._transfer: _Transfer | None = None
        self._iteration: object = None
        self._buffer: Tensor | None = None
        # Of its own: its thread must not get between the model's collectives. Data is on the CPU when it is sent.
        self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._length, problem = self._tell(_length(self.loader) if self.is_source else None)
        if problem:
            raise TypeError(f"source rank {self.source} {problem}")

    def __len__(self) -> int:
        """The number of batches, as the source's loader told it to begin with."""
        if self._length is None:
            raise TypeError("the source's loader has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
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
                if kind == "error":
                    error, text = content
                    raise error from RuntimeError(f"on source rank {self.source}:\n{text}")
                if kind == "end":
                    return
                transfer = self._start(batches, last)
                last = _Gate([leaf.to_local() for leaf in tree_leaves(content) if isinstance(leaf, ShardTensor)])
                handed_over = [content]
                del content
                yield handed_over.pop()
        finally:
            transfer.finish()

    def state_dict(self) -> dict[str, Any]:
        """On the source, its loader's state after the batch handed out last, though it has read one more; {} elsewhere.

        Raises:
            AttributeError: on the source, where the loader keeps no state; torchdata's StatefulDataLoader does.
        """
        if not self.is_source:
            return {}
        if self._state is not None:
            return self._state
        with self._own_random_numbers():
            return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on with the batch after those that the state's loader had handed out."""
        if self._transfer is not None:
            self._transfer.finish()
        self._iteration = self._state = None
        if self.is_source:
            self.loader.load_state_dict(state)

    # -- the source reads ---------------------------------------------------------------------------------------------

    def _read(self) -> Iterator[tuple[Any, bytes, list[Tensor]]]:
        """The loader's state, a message for all ranks, and tensors to cut: for each batch, and for the end."""
        try:
            with self._own_random_numbers():
                batches = iter(self.loader)
            more = True
            while more:
                tensors: list[Tensor] = []
                with self._own_random_numbers():
                    batch = next(batches, _END)
                    state = self.loader.state_dict() if hasattr(self.loader, "state_dict") else None
                more = batch is not _END
                message = _pack("batch", self._layout.map(_Collect(tensors), batch)) if more else _pack("end", None)
                del batch
                yield state, message, tensors
                del tensors
        except Exception as error:
            yield None, _pack("error", (_sendable(error), traceback.format_exc())), []

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        theirs = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(theirs)

    # -- all ranks move -----------------------------------------------------------------------------------------------

    def _start(self, batches: Iterator[tuple[Any, bytes, list[Tensor]]] | None, gate: _Gate) -> _Transfer:
        state, message, tensors = (None, b"", []) if batches is None else next(batches)
        self._transfer = _Transfer(lambda: (state, self._move(message, tensors, gate)), gate)
        return self._transfer

    @torch.no_grad()
    def _move(self, message: bytes, tensors: list[Tensor], gate: _Gate) -> tuple[str, Any]:
        kind, content = pickle.loads(self._tell(message))
        if kind == "batch":
            if not self.is_source:
                gate.wait()
            content = tree_map(lambda leaf: self._cut(leaf, tensors) if isinstance(leaf, Part) else leaf, content)
        return kind, content

    def _tell(self, message: Any) -> Any:
        box = [message]
        dist.broadcast_object_list(box, src=self.source, group=self._group)
        return box[0]

    def _cut(self, part: Part, tensors: list[Tensor]) -> Any:
        spec = part.spec(self.mesh)
        if self.is_source:
            local = self._send(tensors.pop(0), spec)
        else:
            pinned = self._device.type != "cpu"
            local = torch.empty(spec.own_shape, dtype=part.dtype, pin_memory=pinned)
            for block in _blocks(local):
                dist.recv(wire(block.view(-1)), self.source, group=self._group)
        return wrap(local.to(self._device), spec)

    def _send(self, whole: Tensor, spec: ShardTensorSpec) -> Tensor:
        """Send each rank its shard; returns this rank's, which keeps no more than itself alive."""
        for at in product(*(range(n) for n in spec.mesh.shape)):
            if at != spec.coordinate:
                for block in _blocks(part_at(whole, spec, at)):
                    dist.send(self._packed(block), int(spec.mesh.mesh[at].item()), group=self._group)
        own = part_at(whole, spec, spec.coordinate)
        if own.shape == whole.shape and _is_packed(own):
            return own
        return torch.empty(own.shape, dtype=own.dtype).copy_(own)

    def _packed(self, block: Tensor) -> Tensor:
        """The bytes of ``block``."""
        if _is_packed(block):
            return wire(block.view(-1))
        # Always the same memory: malloc would keep some of its own for every block and thread.
        if self._buffer is None:
            self._buffer = torch.empty(_BLOCK, dtype=torch.uint8)
        payload = self._buffer[: block.nbytes]
        payload.view(block.dtype).view(block.shape).copy_(block)
        return payload


class _Collect:
    """Puts tensors into a list, and a description of each in its place."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def __call__(self, leaf: Any, cut: Callable[..., ShardTensorSpec]) -> Any:
        leaf = default_convert(leaf)  # arrays become tensors
        if not isinstance(leaf, Tensor):
            return leaf
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
            raise TypeError(f"a batch holds plain dense tensors, not a {type(leaf).__name__} ({leaf.layout})")
        self._tensors.append(leaf.detach())
        return Part.of(cut(leaf.shape, leaf.dtype))


class _Transfer:
    """One batch on its way, in a thread of its own."""

    def __init__(self, move: Callable[[], Any], gate: _Gate) -> None:
        self._gate = gate
        self._outcome: tuple[Any, BaseException | None] = (None, None)
        # A daemon: a program that fails must not wait for a batch that nobody sends.
        self._thread = threading.Thread(target=self._run, args=(move,), name="ShardLoader", daemon=True)
        self._thread.start()

    def _run(self, move: Callable[[], Any]) -> None:
        try:
            self._outcome = move(), None
        except BaseException as error:
            self._outcome = None, error

    def finish(self) -> None:
        """Wait until it is over, and drop what has come."""
        if not sys.is_finalizing():  # then its thread stands still
            self._gate.open()
            self._thread.join()
        self._outcome = (None, None)

    def result(self) -> Any:
        """What has come, which is the caller's now."""
        # The caller has come for more, so what it still has of the last batch it wants to keep.
        self._gate.open()
        self._thread.join()
        (result, error), self._outcome = self._outcome, (None, None)
        if error is not None:
            raise error
        return result


class _Gate:
    """Open when the memory of these tensors is free, or when told to."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._opened = threading.Event()
        storages = [t.untyped_storage() for t in tensors]
        # A storage lives as long as its memory: as any view, or a graph that has saved one.
        self._held = [weakref.ref(s, self._look) for s in storages if s.nbytes() >= _SMALL]
        del storages, tensors
        self._look()

    def _look(self, _: Any = None) -> None:
        if all(ref() is None for ref in self._held):
            self._opened.set()

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        self._opened.wait()


_END = object()


def _length(loader: Any) -> tuple[int | None, str]:
    if not isinstance(loader, Iterable):
        return None, f"must pass a loader of batches, not {loader!r}"
    try:
        return len(loader), ""  # type: ignore[arg-type]
    except TypeError:
        return None, ""


def _blocks(piece: Tensor) -> Iterator[Tensor]:
    """Views of ``piece`` in the order of its elements, each of at most ``_BLOCK`` bytes. They follow from its shape."""
    if piece.nbytes > _BLOCK:
        row = piece.nbytes // len(piece)
        for rows in piece.split(max(1, _BLOCK // row)):
            yield from _blocks(rows if row <= _BLOCK else rows[0])
    elif piece.numel():
        yield piece


def _is_packed(piece: Tensor) -> bool:
    return piece.is_contiguous() and piece.device.type == "cpu" and not (piece.is_conj() or piece.is_neg())


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            raise TypeError(
                "a batch holds a tensor inside an object that is no dict, list or (named) tuple; it would be sent "
                "whole. Put it into one of those, or register the object with torch.utils._pytree"
            )
        return NotImplemented


def _pack(kind: str, content: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump((kind, content))
    return buffer.getvalue()


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(_pack("error", error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
