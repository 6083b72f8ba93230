"""Atomic checkpoints: a writer and a reader for ``torch.distributed.checkpoint``, and ``latest``.

>>> from shardtensor.checkpoint import CheckpointReader, CheckpointWriter, latest

All ranks write into ``NAME.incomplete`` next to the checkpoint's folder ``NAME``. When all have written, the
coordinator adds the metadata and the manifest, and renames the folder. Everything is on the disk before the folder is
renamed. So a process, or the machine, may fail at any time: there is a folder ``NAME`` with all files, or none.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._compat.c10d import group_of_async_save
from ..ranks.failures import communicating
from ..ranks.history import calling, counts
from .digests import MANIFEST, DamagedCheckpoint, DigestingFile, Digests, Manifest, open_checked

__all__ = ["CheckpointReader", "CheckpointWriter", "DamagedCheckpoint", "latest"]

# Under this name the digests of a rank's files travel to the coordinator, among the results of what it has written.
_DIGESTS = MetadataIndex(MANIFEST)
_STEP = re.compile(r"(?:.*\D)?(\d+)", re.DOTALL)


class CheckpointWriter(FileSystemWriter):
    """Write a checkpoint with digests of all data. The folder appears when the checkpoint is complete.

    Digests take about a second per 1.2 GB on one CPU core. ``dcp.save(state, checkpoint_id=folder)`` leaves them out:
    such a checkpoint is not atomic, :func:`latest` skips it, and damage is not detected.

    Args:
        path: the folder of the checkpoint, on a file system that all ranks share. Use a new folder for each save, with
            the step at the end of its name (``checkpoints/step-1000``). The folder must be new or empty.
        thread_count, per_thread_copy_ahead, single_file_per_rank, cache_staged_state_dict: as in torch's
            ``FileSystemWriter``.

    Raises:
        CheckpointException: by ``dcp.save``, on all ranks, if one rank fails: the folder holds a checkpoint, a disk is
            full. Earlier checkpoints are unchanged. The next save to the same path removes the incomplete data in
            ``PATH.incomplete``.
        ValueError: ``use_collectives=False``, because no rank would know when all have written. By ``dcp.async_save``:
            a ``process_group`` in which ShardTensors communicate meanwhile.

    Example::

        dcp.save(state, storage_writer=CheckpointWriter(f"checkpoints/step-{step}"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        single_file_per_rank: bool = True,
        cache_staged_state_dict: bool = False,
    ) -> None:
        super().__init__(
            path,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            single_file_per_rank=single_file_per_rank,
            cache_staged_state_dict=cache_staged_state_dict,
        )
        self.fs = self._files = _DigestingFiles()
        self._put(path)

    def _put(self, path: str | os.PathLike[str]) -> None:
        self._folder = Path(path)
        self._incomplete = self._folder.with_name(f"{self._folder.name}.incomplete")
        self.path = self._incomplete  # where the base class writes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._put(checkpoint_id)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        group = group_of_async_save()
        # With an accelerator, the thread's messages go by another backend than those of ShardTensors.
        if group is not None and group.size() > 1 and counts().get(group.group_name):
            if dist.get_backend(group) == "gloo" or not torch.accelerator.is_available():
                raise ValueError(
                    "dcp.async_save communicates in a thread, here in a process group in which ShardTensors "
                    "communicate meanwhile; they would get each other's messages. Make a group for it once, on all "
                    "ranks: group = torch.distributed.new_group(backend='gloo'), and pass process_group=group"
                )
        return super().stage(state_dict)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint's folder."""
        return self._folder

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "CheckpointWriter needs use_collectives=True: a checkpoint is complete when all ranks have written"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # The base class makes the folder here, on all ranks, before the old one has gone.

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._folder.exists() and any(self._folder.iterdir()):
            raise FileExistsError(
                f"{self._folder} exists and is not empty; write each checkpoint to a folder of its own, or remove it"
            )
        if self._incomplete.exists():
            shutil.rmtree(self._incomplete)
        self._incomplete.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._files.forget()
        written = super().write_data(plan, planner)
        results = written.wait()
        if self._files.errors:  # of a thread, which the base class has not noticed
            raise self._files.errors[0]
        results.append(WriteResult(index=_DIGESTS, size_in_bytes=0, storage_data=dict(self._files.written)))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._files.forget()
        super().finish(metadata, [[r for r in of_rank if r.index != _DIGESTS] for of_rank in results])
        files = dict(self._files.written)
        for of_rank in results:
            for result in of_rank:
                if result.index == _DIGESTS:
                    files.update(result.storage_data)
        Manifest.write(self._incomplete, files)
        _sync_folder(self._incomplete)
        self._incomplete.rename(self._folder)
        _sync_folder(self._folder.parent)


class CheckpointReader(FileSystemReader):
    """Read a checkpoint of :class:`CheckpointWriter` with any layout, mesh and number of ranks, and check its digests.

    For a checkpoint without digests, call ``dcp.load(state, checkpoint_id=folder)``.

    Args:
        path: the checkpoint's folder, the same on all ranks.

    Raises:
        CheckpointException: by ``dcp.load``, on all ranks, if one rank reads changed bytes, misses a file, or reads
            another checkpoint. The text names the file, as does the :class:`DamagedCheckpoint` in ``failures``.
            Tensors may be partly loaded: do not use them.

    Metadata and values other than tensors are pickled, as always in ``torch.distributed.checkpoint``. Digests detect
    accidents, not attacks: load only checkpoints whose writer you trust.

    Example::

        dcp.load(state, storage_reader=CheckpointReader("checkpoints/step-1000"))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = self._files = _CheckedFiles()

    # dcp.load looks for an argument "kwargs", and with it would try to read metadata of a single rank after an error.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        try:
            self._files.manifest = Manifest.read(Path(self.path))
            return super().read_metadata(*args, **options)
        except Exception as error:
            # dcp.load of torch 2.11 drops the text of any other exception.
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise CheckpointException("metadata", {rank: (error, StackSummary())}) from error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(super().prepare_local_plan(plan), storage_data=self._files.manifest.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        different = [rank for rank, plan in enumerate(plans) if plan.storage_data != plans[0].storage_data]
        if different:
            raise ValueError(f"ranks {different} read another checkpoint than rank 0, which reads {self.path}")
        return super().prepare_global_plan(plans)


class _DigestingFiles(FileSystem):
    """A file system that remembers the digests of the files that are written to it, by name."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.written: dict[str, Digests] = {}
        self.errors: list[BaseException] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        file = None
        try:
            file = DigestingFile(Path(path))
            with io.BufferedWriter(file) as buffered:
                yield buffered
        except BaseException as error:
            self.errors.append((file and file.failure) or error)
            raise self.errors[-1] from None
        self.written[Path(path).name] = file.digests

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _CheckedFiles(FileSystem):
    """A file system that compares what is read from it with the digests in its manifest."""

    manifest: Manifest

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with open_checked(Path(path), self.manifest.files) as file:
            yield file


def latest(folder: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None) -> Path | None:
    """Return the last complete checkpoint in ``folder``, or None.

    Checkpoints are subfolders whose names end in a number, the step. The last checkpoint has the greatest step. Folders
    that no :class:`CheckpointWriter` has written, or that miss a file or a part of one, are skipped with a warning.
    Changed bytes are detected when they are read.

    If ``torch.distributed`` is initialized, the call is collective over ``process_group`` (default: all ranks). The
    first rank of the group looks for the checkpoint, so all ranks read the same one.

    Raises:
        RuntimeError: the folder cannot be read; on all ranks.

    Example::

        last = latest("checkpoints")
        if last is not None:
            dcp.load(state, storage_reader=CheckpointReader(last))
    """
    group = process_group or dist.group.WORLD if dist.is_initialized() else None
    answer: list[Any] = [None, ""]
    if group is None or group.rank() == 0:
        try:
            answer[0] = _last_complete(Path(folder))
        except OSError as error:
            answer[1] = f"{folder} cannot be read: {error}"
    if group is not None:
        with calling("latest"), communicating(group):
            dist.broadcast_object_list(answer, group=group, group_src=0)
    found: Path | None
    found, problem = answer
    if problem:
        raise RuntimeError(problem)
    return found


def _last_complete(folder: Path) -> Path | None:
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.exists() else []
    steps = [(int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))]
    for _, name in sorted(steps, reverse=True):
        try:
            files = Manifest.read(folder / name).files
            for file in files:
                with open_checked(folder / name / file, files):  # which looks at its size
                    pass
            return folder / name
        except DamagedCheckpoint as error:
            warnings.warn(f"skipped: {error}", stacklevel=3)
    return None


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
