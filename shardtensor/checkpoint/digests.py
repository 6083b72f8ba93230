"""Files with digests: taken of each block while it is written, and compared when it is read.

Each block of 4 MiB has a digest of its own. So a rank that reads part of a file, because it resumes with other shards,
checks that part only. It uses the very bytes that it has checked, in one pass.

The digests of all files of a folder are in one more file, the manifest, whose first line is its own digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = ".manifest"
_BLOCK = 1 << 22
_VERSION = 1


class DamagedCheckpoint(RuntimeError):
    """A file of a checkpoint is missing, truncated or changed. The text names the file.

    Example:
        >>> from shardtensor.checkpoint import DamagedCheckpoint
        >>> issubclass(DamagedCheckpoint, RuntimeError)
        True
    """


@dataclass
class Digests:
    """A file's size in bytes, and the SHA-256 of each of its blocks."""

    size: int = 0
    blocks: list[str] = field(default_factory=list)


class DigestingFile(io.FileIO):
    """A new file that is written from its start to its end; ``digests`` are complete when it has been closed."""

    def __init__(self, path: Path) -> None:
        # Not over another file: a process that was believed dead may still write to the same folder.
        super().__init__(str(path), "x")
        self._block = hashlib.sha256()
        self.digests = Digests()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write at most the rest of a block. Returns how many bytes have been written."""
        rest = _BLOCK - self.digests.size % _BLOCK
        part = memoryview(data).cast("B")[:rest]
        try:
            written = super().write(part)
        except OSError as error:  # with the file's name: torch's archives replace it by an error of their own
            self.failure = OSError(error.errno, error.strerror, self.name)
            raise self.failure from error
        self._block.update(part[:written])
        self.digests.size += written
        if written == rest:
            self._end_block()
        return written

    def _end_block(self) -> None:
        self.digests.blocks.append(self._block.hexdigest())
        self._block = hashlib.sha256()

    def close(self) -> None:
        if not self.closed and self.digests.size % _BLOCK:
            self._end_block()
        super().close()


class _CheckedFile(io.RawIOBase):
    """A file whose blocks are compared with their digests before any byte of them is handed out."""

    def __init__(self, path: Path, digests: Digests) -> None:
        super().__init__()
        self._path, self._digests = path, digests
        self._at = 0
        self._number, self._block = -1, memoryview(b"")
        self.failure: DamagedCheckpoint | None = None
        self._file = _open_or_damaged(path)
        size = os.fstat(self._file.fileno()).st_size
        if size != digests.size:
            self._file.close()
            raise DamagedCheckpoint(f"{path} has {size} bytes, but {digests.size} were written")

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._digests.size:
            return 0
        number, start = divmod(self._at, _BLOCK)
        if number != self._number:
            self._load(number)
        into = memoryview(buffer).cast("B")
        part = self._block[start : start + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _load(self, number: int) -> None:
        self._file.seek(number * _BLOCK)
        data = self._file.read(_BLOCK)
        if hashlib.sha256(data).hexdigest() != self._digests.blocks[number]:
            first = number * _BLOCK
            self.failure = DamagedCheckpoint(
                f"{self._path} is damaged: bytes {first} to {first + len(data)} are not those that were written; "
                "load another checkpoint, or a copy of this one"
            )
            raise self.failure
        self._number, self._block = number, memoryview(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._digests.size}[whence]
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def open_checked(path: Path, files: Mapping[str, Digests]) -> Iterator[io.BufferedIOBase]:
    """Open ``path`` for reading, which checks what is read.

    Args:
        files: the digests, by file name.

    Raises:
        DamagedCheckpoint: the file is missing or has another size; reading raises it where the bytes are others.
    """
    if path.name not in files:
        raise DamagedCheckpoint(f"{path.parent / MANIFEST} has no digest of {path.name}")
    checked = _CheckedFile(path, files[path.name])
    with io.BufferedReader(checked) as file:
        try:
            yield file
        except Exception:
            # torch reads from C++, and on Python 3.13 what is raised in there may come out as a bare SystemError.
            if checked.failure is not None:
                raise checked.failure from None
            raise


@dataclass
class Manifest:
    """The digests of all files of a folder, by name, and the digest of the manifest itself."""

    files: dict[str, Digests]
    digest: str

    @staticmethod
    def write(folder: Path, files: Mapping[str, Digests]) -> None:
        """Write the manifest of ``folder``, to the disk and not only to its cache."""
        content = {"version": _VERSION, "block": _BLOCK, "files": {name: asdict(d) for name, d in files.items()}}
        body = json.dumps(content, sort_keys=True).encode()
        with open(folder / MANIFEST, "xb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of ``folder``.

        Raises:
            DamagedCheckpoint: there is none, or it is damaged, or of a later version of this package.
        """
        path = folder / MANIFEST
        with _open_or_damaged(path) as file:
            digest, _, body = file.read().partition(b"\n")
        if digest != hashlib.sha256(body).hexdigest().encode():
            raise DamagedCheckpoint(f"{path} is damaged: its bytes are not those that were written")
        content = json.loads(body)
        if content["version"] != _VERSION or content["block"] != _BLOCK:
            raise DamagedCheckpoint(f"{path} was written by another version of shardtensor, and cannot be read")
        files = {name: Digests(**digests) for name, digests in content["files"].items()}
        return Manifest(files, digest.decode())


def _open_or_damaged(path: Path) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{path} is missing: {path.parent} is not a complete checkpoint of shardtensor.checkpoint.CheckpointWriter "
            "(dcp.load(state, checkpoint_id=...) reads those of other writers)"
        ) from None
