"""torch_geometric's networks of points on shards: which points are neighbours is found in them, layer by layer.

Without pyg_lib its operators are those of :mod:`networks.pyg_operators`.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import networks.oracle as oracle
from networks.oracle import assert_near
from networks.pyg_operators import provide
from shardtensor import UnsupportedSharding
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

PACKAGE = "torch_geometric.nn"
pytest.importorskip(PACKAGE)

SIZES = {2: (40, 20), 3: (33, 0, 27)}
CLOUDS = (17, 2, 41)


def package() -> Any:
    provide()
    return importlib.import_module(PACKAGE)


def points() -> tuple[Tensor, Tensor]:
    """In three clouds, two of them on several ranks; some of them lie where others do."""
    x = torch.randn(sum(CLOUDS), 3, dtype=torch.float64)
    x[50:55] = x[45:50]
    return x, torch.repeat_interleave(torch.tensor(CLOUDS))


def on_shards(ranks: int, *tensors: Tensor) -> list[Tensor]:
    return [shard(t, shared_mesh(ranks), [Shard(0)], {0: SIZES[ranks]}, t.is_floating_point()) for t in tensors]


# -- operators ---------------------------------------------------------------------------------------------------------


OPERATORS = {
    "knn": lambda g, x, batch: g.knn(x, x, 4, batch, batch),
    "knn_graph": lambda g, x, batch: g.knn_graph(x, 3, batch),
    "knn_graph, loops": lambda g, x, batch: g.knn_graph(x, 3, batch, loop=True, flow="target_to_source"),
    "radius": lambda g, x, batch: g.radius(x, x, 1.0, batch, batch, max_num_neighbors=4),
    "radius_graph": lambda g, x, batch: g.radius_graph(x, 1.0, batch, max_num_neighbors=4),
    "radius_graph, loops": lambda g, x, batch: g.radius_graph(x, 1.0, batch, loop=True, flow="target_to_source"),
    "radius_graph of a lattice": lambda g, x, batch: g.radius_graph(x.round(), 1.0, batch),  # as far as 1, or not
    "fps": lambda g, x, batch: g.fps(x, batch, 0.3, random_start=False),
    "fps, drawn": lambda g, x, batch: g.fps(x, batch, 0.3),
}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks("ranks", timeout=300.0)
def test_operators_find_what_one_process_finds(ranks):
    g = package()
    x, batch = points()
    whole, wide = x.unsqueeze(0).expand(2, -1, -1), 1e4 + x  # of which one has large coordinates
    for name, operator in OPERATORS.items():
        for given in (whole[0], wide):
            for clouds in (None, batch):
                torch.manual_seed(1)
                expected = operator(g, given, clouds)
                ours, *others = on_shards(ranks, given, *([] if clouds is None else [clouds]))
                torch.manual_seed(1)
                found = operator(g, ours, *(others or [None]))
                assert torch.equal(found.full_tensor(), expected), name
                assert found.placements == (Shard(found.ndim - 1),) and not found.requires_grad, name


def sampled() -> None:
    """Of each step of farthest point sampling one row for each cloud travels."""
    g = package()
    x, batch = points()
    ours, clouds = on_shards(2, x, batch)
    with count_communication() as counted:
        found = g.fps(ours, clouds, 0.3, random_start=False, batch_size=3)
    steps = max(-(-3 * n // 10) for n in CLOUDS)
    assert counted.collectives == {"all_reduce": 1, "all_gather": 1 + steps}, counted
    assert counted.messages == 0 and found.shard_sizes == {0: (13, 7)}, (counted, found.shard_sizes)


def test_a_step_of_sampling_sends_a_row_for_each_cloud():
    run_distributed(sampled, 2, timeout=300.0)


REFUSED = {
    "cosine": (lambda g, x: g.knn_graph(x, 3, cosine=True), "divide the points by their lengths and leave cosine out"),
    "coordinates": (
        lambda g, x: g.fps(x.redistribute(placements=[Shard(1)]), ratio=0.5),
        "fps: the coordinates of a point are on several ranks",
    ),
    "clouds": (
        lambda g, x: g.fps(x, torch.zeros(59, dtype=torch.int64)),
        "fps: clouds end at 59, but there are 60 points",
    ),
    "not finite": (lambda g, x: g.fps(x / 0), "fps: coordinates of points or queries are not finite"),
}


def refused(case: str) -> None:
    REFUSED[case][0](package(), on_shards(2, points()[0])[0])


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    for error in run_expecting_errors(refused, 2, case, timeout=300.0):
        assert isinstance(error, (UnsupportedSharding, ValueError)) and REFUSED[case][1] in str(error)


# -- networks ----------------------------------------------------------------------------------------------------------


class DGCNN(nn.Module):
    """As in torch_geometric's examples: each layer's neighbours are those by its own features."""

    def __init__(self, g: Any) -> None:
        super().__init__()
        self.first = g.DynamicEdgeConv(g.MLP([6, 8, 8]), 5, "max")
        self.second = g.DynamicEdgeConv(g.MLP([16, 8]), 4, "mean")
        self.last = g.MLP([16, 8, 4], norm=None)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        first = self.first(x, batch)
        features = torch.cat([first, self.second(first, batch)], 1)
        return self.last(package().global_max_pool(features, batch))


class PointNet(nn.Module):
    """PointNet++ for segmentation, as in torch_geometric's examples: fewer points twice, and back."""

    def __init__(self, g: Any) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            g.PointNetConv(g.MLP(sizes), add_self_loops=False) for sizes in ([6, 8, 8], [11, 8, 8])
        )
        self.whole = g.MLP([11, 16])
        self.up = nn.ModuleList(g.MLP(sizes) for sizes in ([24, 8], [16, 8], [11, 8, 4]))

    def forward(self, pos: Tensor, batch: Tensor) -> Tensor:
        g, levels = package(), [(pos, pos, batch)]
        for conv, ratio, r in zip(self.down, (0.5, 0.3), (1.0, 2.0)):
            x, pos, batch = levels[-1]
            index = g.fps(pos, batch, ratio, random_start=False)
            row, col = g.radius(pos, pos[index], r, batch, batch[index], max_num_neighbors=8)
            sampled = conv((x, x[index]), (pos, pos[index]), torch.stack([col, row]))
            levels.append((sampled, pos[index], batch[index]))
        x, pos, batch = levels[-1]
        x = g.global_max_pool(self.whole(torch.cat([x, pos], 1)), batch)
        pos, batch = pos.new_zeros(len(x), 3), torch.arange(len(x), device=x.device)
        for mlp, (skip, pos_skip, batch_skip) in zip(self.up, reversed(levels)):
            x = g.knn_interpolate(x, pos, pos_skip, batch, batch_skip, k=3)
            x, pos, batch = mlp(torch.cat([x, skip], 1)), pos_skip, batch_skip
        return x


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("network", [DGCNN, PointNet])
@on_ranks("ranks", timeout=300.0)
def test_networks_are_exact(network, ranks):
    torch.manual_seed(0)
    model = network(package()).double()
    twin = copy.deepcopy(model)
    x, batch = points()
    ours, clouds = on_shards(ranks, x, batch)
    theirs = x.clone().requires_grad_()
    result, expected = model(ours, clouds), twin(theirs, batch)
    assert_near(oracle.whole(result), expected, 1e-9)
    result.square().mean().backward()
    expected.square().mean().backward()
    assert_near(oracle.whole(ours.grad), theirs.grad, 1e-9)
    oracle.compare(model, twin, 1e-9)
