"""The search on one process: by trees, by runs and by all distances; boxes, runs, rounds."""

from __future__ import annotations

import pytest
import torch
from seeded import seeded

from shardtensor.neighbors import search
from shardtensor.neighbors.bisection import Boxes, bisected, even_sizes, squared_distances
from shardtensor.neighbors.search import Nearest, Within
from shardtensor.neighbors.traffic import _rounds


@pytest.fixture(params=["trees", "runs"])
def method(request, monkeypatch):
    if request.param == "trees":
        pytest.importorskip("scipy")
        monkeypatch.setattr(search, "_TREE_POINTS", 1)
    else:
        monkeypatch.setattr(search, "_trees", lambda: None)
        monkeypatch.setattr(search, "_RUN", 8)  # so that small clouds have many
    return request.param


def clouds():
    for n, m, d in ((1, 1, 1), (2, 5, 2), (97, 33, 3), (300, 97, 1), (300, 97, 2), (97, 17, 13)):
        x, q = (torch.rand(length, d, dtype=torch.float64, generator=seeded(length)) for length in (n, m))
        yield x, q
        yield (4 * x).round(), (4 * q).round()
        yield torch.zeros_like(x), q
        yield x * 1e-160, q * 1e-160  # squares underflow
        yield x + 1e6, q + 1e6


def all_in_order(x, q):
    squares = squared_distances(q.unsqueeze(1), x)
    order = squares.argsort(dim=1, stable=True)
    return squares.gather(1, order), order


def add_in_parts(found, x, parts):
    """Parts of the points in another order than that of their numbers."""
    numbers = torch.arange(len(x))
    for part in reversed(list(zip(x.tensor_split(parts), numbers.tensor_split(parts)))):
        found.add(*part)


@pytest.mark.on_cpu("it compares with what SciPy finds")
@pytest.mark.parametrize("parts", [1, 3])
def test_the_nearest_are_the_first_in_order(method, parts):
    for x, q in clouds():
        squares, order = all_in_order(x, q)
        for k in {1, min(5, len(x)), len(x)}:
            found = Nearest(q, k)
            add_in_parts(found, x, parts)
            assert torch.equal(found.squares, squares[:, :k]) and torch.equal(found.numbers, order[:, :k])


@pytest.mark.on_cpu("it compares with what SciPy finds")
@pytest.mark.parametrize("parts", [1, 3])
def test_all_within_a_distance_are_found(method, parts):
    for x, q in clouds():
        squares, order = all_in_order(x, q)
        but = order[:, -1]
        for r, most, other in ((0.0, None, None), (0.3, None, None), (1.0, 2, None), (1.0, None, but), (1.0, 2, but)):
            near = squares.sqrt() <= r
            if other is not None:
                near &= order != other.unsqueeze(1)
            if most:
                near &= near.cumsum(1) <= most
            found = Within(q, r, most, other)
            add_in_parts(found, x, parts)
            rows, numbers, exact = found.found()
            assert torch.equal(rows, near.nonzero()[:, 0])
            assert torch.equal(numbers, order[near]) and torch.equal(exact, squares[near])


def test_runs_are_not_compared_where_they_are_far_apart(monkeypatch):
    monkeypatch.setattr(search, "_trees", lambda: None)
    compared = []
    monkeypatch.setattr(
        search,
        "_nearest_of_all",
        lambda q, x, k, of_all=search._nearest_of_all: (compared.append(len(q) * len(x)), of_all(q, x, k))[1],
    )
    x = torch.rand(5000, 2, dtype=torch.float64, generator=seeded(0))
    Nearest(x, 4).add(x, torch.arange(5000))
    assert sum(compared) < 5000 * 5000 / 4


def test_boxes_bound_the_distances_of_what_is_in_them_to_the_last_digit():
    x, y = (torch.rand(200, 3, dtype=torch.float64, generator=seeded(i)) for i in range(2))
    sizes = even_sizes(200, 40)
    boxes, others = Boxes.around(x, sizes), Boxes.around(y, sizes)
    exact = squared_distances(x.view(40, 1, 5, 1, 3), y.view(1, 40, 1, 5, 3)).flatten(2)
    gaps, reaches = (f(boxes.at((slice(None), None)), others) for f in (Boxes.gaps, Boxes.reaches))
    assert (gaps.unsqueeze(2) <= exact).all() and (exact <= reaches.unsqueeze(2)).all()
    point = Boxes.around(x, (1,) * 200)
    assert torch.equal(point.gaps(Boxes.around(y, (1,) * 200)), squared_distances(x, y))
    assert torch.equal(point.gaps(Boxes.around(y[:0], (0,) * 200)), torch.full((200,), torch.inf, dtype=torch.float64))


@pytest.mark.parametrize("sizes", [(97,), (48, 49), (32, 33, 32), (0, 97), (20, 19, 0, 19, 39), (14,) * 6 + (13,)])
def test_runs_have_the_sizes_that_are_asked_for_and_every_point_once(sizes):
    x = torch.rand(97, 2, dtype=torch.float64, generator=seeded(0))
    order = bisected(x, sizes)
    assert torch.equal(order.sort().values, torch.arange(97)) and torch.equal(order, bisected(x, sizes))


def test_runs_of_a_grid_are_blocks():
    x = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
    for run in bisected(x, (16,) * 4).split(16):
        assert (x[run].amax(0) - x[run].amin(0)).tolist() == [3.0, 3.0]


def test_no_round_has_more_than_the_limit():
    counts = [[0, 3, 1, 0], [2, 0, 2, 0], [4, 1, 0, 0], [0, 0, 3, 0]]
    assert list(_rounds(counts, 4)) == [[1, 2], [3]] and list(_rounds(counts, 6)) == [[1, 2, 3]]
    assert list(_rounds([[0, 0], [0, 0]], 4)) == []
