"""Potentials of atoms, with forces: the gradient of the energy by the positions, which training differentiates again.

Two molecules in one batch; atoms are sharded by ``shardtensor.partition``, edges like the atoms at which they end.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import networks.oracle as oracle
from networks.oracle import assert_near, built, names, whole
from shardtensor import partition
from shardtensor.neighbors import radius
from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh

CUTOFF, ATOMS, KINDS = 2.5, 40, 3

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Potential:
    """A small one of its kind.

    Attributes:
        package: that it comes from.
        make: the network, from the package.
        energy: of the network and the inputs, those of :func:`molecules`.
    """

    package: str
    make: Callable[[Any], nn.Module]
    energy: Callable[[nn.Module, Inputs], Tensor]


class Graph(nn.Module):
    """In place of a search for neighbours: the edges that are given, and their lengths."""

    edge_index: Tensor

    def forward(self, positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        source, target = self.edge_index
        return self.edge_index, (positions[source] - positions[target]).norm(dim=-1)


def schnet(network: nn.Module, given: Inputs) -> Tensor:
    network.interaction_graph.edge_index = given["edge_index"]
    energy: Tensor = network(given["numbers"], given["positions"], given["batch"])
    return energy


class OfDistances(nn.Module):
    """Messages along edges with vectors, as in PaiNN and EGNN, in torch's functions only."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.out = nn.Embedding(10, 8), nn.Linear(8, 1)
        self.messages = nn.Sequential(nn.Linear(17, 16), nn.SiLU(), nn.Linear(16, 9))

    def forward(self, given: Inputs) -> Tensor:
        source, target = given["edge_index"]
        ways = given["positions"][source] - given["positions"][target]
        x = self.kinds(given["numbers"])
        scale, sent = self.messages(torch.cat([x[source], x[target], ways.norm(dim=-1, keepdim=True)], -1)).split(
            [1, 8], -1
        )
        x = x + sent.new_zeros(x.shape).index_add_(0, target, sent)
        pulled = ways.new_zeros(len(x), 3).index_add_(0, target, scale * ways)
        of_atoms = self.out(x * pulled.square().sum(-1, keepdim=True)).squeeze(-1)
        return of_atoms.new_zeros(2).index_add_(0, given["batch"], of_atoms)


def made_schnet(readout: str) -> Callable[[Any], nn.Module]:
    sizes = dict(hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=10, cutoff=CUTOFF)
    return lambda g: g.SchNet(**sizes, readout=readout, interaction_graph=Graph())


def made_mace(mace: Any) -> nn.Module:
    irreps, block = importlib.import_module("e3nn.o3").Irreps, "RealAgnosticResidualInteractionBlock"
    kinds = {name: mace.interaction_classes[block] for name in ("interaction_cls", "interaction_cls_first")}
    torch.set_default_dtype(torch.float64)  # in which it keeps what it computes when it is made
    try:
        network: nn.Module = mace.ScaleShiftMACE(
            **kinds,
            r_max=CUTOFF,
            num_bessel=4,
            num_polynomial_cutoff=5,
            max_ell=2,
            num_interactions=2,
            num_elements=KINDS,
            hidden_irreps=irreps("4x0e + 4x1o"),
            MLP_irreps=irreps("4x0e"),
            atomic_energies=numpy.arange(-1.0, -1.0 - KINDS, -1.0),
            avg_num_neighbors=8,
            atomic_numbers=list(range(1, KINDS + 1)),
            correlation=2,
            gate=nn.functional.silu,
            atomic_inter_scale=1.0,
            atomic_inter_shift=0.0,
        )
    finally:
        torch.set_default_dtype(torch.float32)
    return network


def mace(network: nn.Module, given: Inputs) -> Tensor:
    source = given["edge_index"][0]
    nothing = torch.zeros_like(given["positions"][source].detach())
    data = {
        **given,
        "node_attrs": nn.functional.one_hot(given["numbers"] % KINDS, KINDS).double(),
        "shifts": nothing,
        "unit_shifts": nothing,
        "cell": torch.zeros(6, 3, dtype=torch.float64),
        "head": torch.zeros(2, dtype=torch.int64),
        "ptr": torch.tensor([0, ATOMS // 2, ATOMS]),
    }
    energy: Tensor = network(data, training=True, compute_force=False)["energy"]
    return energy


POTENTIALS = {
    "of distances": Potential("torch", lambda _: OfDistances(), lambda network, given: network(given)),
    "SchNet": Potential("torch_geometric.nn", made_schnet("add"), schnet),
    "MACE": Potential("mace.modules", made_mace, mace),
    "SchNet, mean": Potential("torch_geometric.nn", made_schnet("mean"), schnet),
}


def molecules(ranks: int) -> tuple[dict[str, tuple[Tensor, int, tuple[int, ...]]], Any]:
    """Two of them: inputs, each with the dim and the sizes in which it is sharded; and the partition of the atoms."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.rand(ATOMS, 3, generator=generator, dtype=torch.float64) * 4
    batch = torch.arange(ATOMS) * 2 // ATOMS
    _, edges = radius(positions, positions, CUTOFF)
    edges = edges[:, (edges[0] != edges[1]) & (batch[edges[0]] == batch[edges[1]])]
    found = partition(positions=positions, edge_index=edges, ranks=ranks)
    edge_index, sizes, _ = found.edges(edges)
    of_atoms = {
        "positions": positions,
        "numbers": torch.randint(1, 9, (ATOMS,), generator=generator),
        "batch": batch,
        "target": torch.randn(ATOMS, 3, generator=generator, dtype=torch.float64),
    }
    parts = {name: (found.nodes(value), 0, found.sizes) for name, value in of_atoms.items()}
    return parts | {"edge_index": (edge_index, 1, sizes)}, found


def trained(energy: Callable[[nn.Module, Inputs], Tensor], network: nn.Module, given: Inputs) -> tuple[Tensor, Tensor]:
    """Energies and forces, and the gradients of a loss of both."""
    energies = energy(network, given)
    (gradient,) = torch.autograd.grad(energies.sum(), given["positions"], create_graph=True)
    loss = energies.square().sum() + (given["target"] + gradient).square().sum()
    loss.backward()
    return energies, -gradient


def check(name: str, ranks: int) -> None:
    potential, mesh = POTENTIALS[name], shared_mesh(ranks)
    network = built(potential.make, importlib.import_module(potential.package))
    twin = copy.deepcopy(network)
    parts, _ = molecules(ranks)

    def leaf(key: str, value: Tensor) -> Tensor:
        return value.requires_grad_() if key == "positions" else value

    plain = {key: leaf(key, value.clone()) for key, (value, _, _) in parts.items()}
    ours = {
        key: leaf(key, shard(value, mesh, [Shard(dim)], {0: sizes})) for key, (value, dim, sizes) in parts.items()
    }
    expected = trained(potential.energy, twin, plain)
    with count_communication() as counted:
        found = trained(potential.energy, network, ours)
    for what, a, b in zip(("energies", "forces"), found, expected, strict=True):
        assert_near(whole(a), b, 1e-9, name=what)
    assert_near(whole(ours["positions"].grad), plain["positions"].grad, 1e-9, name="gradient by positions")
    oracle.compare(network, twin, 1e-9)
    assert found[1].shard_sizes == ours["positions"].shard_sizes
    # Of the ranks' contributions energies and gradients of weights are summed, and nothing that atoms have.
    weights = sum(p.nbytes for p in network.parameters())
    assert counted.collective_bytes < 4 * weights, counted


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", names(POTENTIALS, always=("of distances",)))
def test_energies_forces_and_training_on_both(name, ranks):
    pytest.importorskip(POTENTIALS[name].package)
    run_distributed(check, ranks, name, ranks, timeout=300.0)
