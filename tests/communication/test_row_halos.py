"""Which rows ranks ask each other for, without processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtensor.communication.row_halos import wanted
from shardtensor.layout.intervals import boundaries_of, intervals_of


@st.composite
def indices(draw):
    """Shard sizes, and each rank's part of an index."""
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    n = sum(sizes)
    entries = st.lists(st.integers(-n, n - 1), max_size=9) if n else st.just([])
    return sizes, [draw(entries) for _ in sizes]


@settings(deadline=None)
@given(indices())
def test_every_row_is_asked_for_once_and_found(drawn):
    sizes, parts = drawn
    n, ranks = sum(sizes), len(sizes)
    asked = [wanted(torch.tensor(part, dtype=torch.int64), sizes, rank) for rank, part in enumerate(parts)]
    for rank, (found, part) in enumerate(zip(asked, parts)):
        start, stop = intervals_of(sizes)[rank]
        entries = [i % n for i in part]
        assert found.positions.tolist() == sorted({i for i in entries if not start <= i < stop})
        rows = [*range(start, stop), *found.positions.tolist()]
        assert [rows[place] for place in found.places.tolist()] == entries
        # The positions that a rank asks another for are those that the counts say, in one piece.
        counts = found.claim[:ranks].tolist()
        for owner, (a, b) in enumerate(zip(boundaries_of(counts), boundaries_of(counts)[1:])):
            first, last = intervals_of(sizes)[owner]
            assert all(first <= i < last for i in found.positions[a:b].tolist())
        assert found.claim[ranks:].tolist() == [any(i < 0 for i in part), False]


@pytest.mark.parametrize("entry", [-6, 5, 99])
def test_entries_out_of_range_are_noticed(entry):
    assert wanted(torch.tensor([0, entry]), (3, 2), 1).claim[-1] == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_expanded_index_is_looked_at_once(dtype):
    index = torch.tensor([4, 0, 1], dtype=dtype).view(-1, 1).expand(3, 50)
    found = wanted(index, (3, 2), 0)
    assert found.places.dtype == dtype and found.places.shape == (3, 50)
    assert found.places.untyped_storage().nbytes() == 3 * dtype.itemsize
    assert found.places[:, 7].tolist() == [3, 0, 1]
