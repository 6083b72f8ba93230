"""What operators have done to layouts, from which later ones choose theirs.

All ranks must find the same in these records, though they make their plans anew at different times. The ranks of a mesh
make the same calls, so an entry that is new is new to all of them. Nothing is dropped: a full record takes nothing
more. The first of several candidates is kept, and a later search gives what the first one gave, also if that was
nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...layout.caches import forgets
from ...layout.spec import ShardTensorSpec

MAX_RECORDED = 32768

Key = tuple[Hashable, ...]


class _Record:
    """What was noted on one mesh. Each question is one look-up, however much has been noted."""

    def __init__(self) -> None:
        self.noted: dict[Key, Any] = {}
        self.answers: dict[Key, Any] = {}


_records: dict[Hashable, _Record] = {}
forgets(_records.clear)


def _record_of(spec: ShardTensorSpec) -> _Record:
    return _records.setdefault((id(spec.mesh), spec.mesh, spec.coordinate), _Record())


def note(spec: ShardTensorSpec, key: Key, value: Any) -> None:
    """Note something about tensors on the mesh of ``spec``."""
    noted = _record_of(spec).noted
    if len(noted) < MAX_RECORDED:
        noted.setdefault(key, value)


def recall(spec: ShardTensorSpec, key: Key, *others: Key) -> Any:
    """What was noted for ``key``, or failing that, for one of the others; None if nothing was when it was first asked
    for."""
    record = _record_of(spec)
    if key not in record.answers:
        if len(record.answers) >= MAX_RECORDED:
            return None
        record.answers[key] = next((record.noted[k] for k in (key, *others) if k in record.noted), None)
    return record.answers[key]
