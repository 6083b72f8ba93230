"""Where slices were taken from, so that their gradients get the layout of the tensors that they are gradients of.

[Note: layouts of gradients] The operator that computes a slice's gradient knows the input's shape, but not its shard
sizes; and many shard sizes of the input give the same sizes of the slice. So a slice leaves a record of the layout of
its input. That is a hint: when the gradient arrives in another layout than the slice had, or when two inputs have
slices of one layout, the gradient gets *a* layout, and whoever needs a particular one redistributes.

[Note: records agree] All ranks must find the same, though they make their plans anew at different times. The ranks of
a mesh make the same calls, so what is new is new to all of them. Nothing is dropped: a full record takes nothing more.
The first of several candidates stays the one, and what was found once, or not found, is found so again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ...layout.caches import forgets
from ...layout.spec import ShardTensorSpec

MAX_RECORDED = 32768

# What is looked for: how the part was taken, the source's shape, the part's placements and, if they matter, its sizes.
_Key = tuple[Hashable, ...]


class _Record:
    """What was taken on one mesh. Each question is one look-up, however much has been recorded."""

    def __init__(self) -> None:
        self.sources: dict[_Key, ShardTensorSpec] = {}
        self.answers: dict[_Key, ShardTensorSpec | None] = {}


_records: dict[Hashable, _Record] = {}
forgets(_records.clear)


def _record_of(spec: ShardTensorSpec) -> _Record:
    return _records.setdefault((id(spec.mesh), spec.mesh, spec.coordinate), _Record())


def _keys(how: Hashable, shape: Sequence[int], part: ShardTensorSpec) -> tuple[_Key, _Key]:
    """The key for a part of exactly this layout, and that for any part with its placements."""
    alike = (how, tuple(shape), part.placements)
    return (*alike, part.sizes), alike


def record_source(how: Hashable, source: ShardTensorSpec, part: ShardTensorSpec) -> None:
    """Note that a part, taken as ``how`` says, of a tensor with the spec ``source`` has gradients like ``part``."""
    sources = _record_of(source).sources
    for key in _keys(how, source.shape, part):
        if len(sources) < MAX_RECORDED:
            sources.setdefault(key, source)


def source_of(how: Hashable, shape: Sequence[int], grad: ShardTensorSpec) -> ShardTensorSpec | None:
    """The spec of a tensor of ``shape`` that ``grad`` may be the gradient of a part of; None if none is recorded.

    It is one whose part has the layout of ``grad``, or failing that, the placements.
    """
    record = _record_of(grad)
    exact, alike = _keys(how, shape, grad)
    if exact not in record.answers:
        if len(record.answers) >= MAX_RECORDED:
            return None
        record.answers[exact] = record.sources.get(exact, record.sources.get(alike))
    return record.answers[exact]
