"""The picture at the end: the mesh with its ranks and their halos, a border of it from near, prediction and errors."""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap
from sphere import Graph, rows_read

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
from drawing import BORDER, INK, LAND_SEA, RIGHT_WRONG, save, subplots

RANKS = ListedColormap(["#3a6ea5", "#6aa84f", "#8e7cc3", "#45818e", "#a64d79", "#7f6000", "#666666", "#38761d"])
NEAR = 0.06  # half the width of what is seen from near, in radii of the sphere


def ranks_of(graph: Graph) -> np.ndarray:
    """The rank of each node."""
    return np.repeat(np.arange(len(graph.nodes.sizes)), graph.nodes.sizes)


def halo_of(graph: Graph) -> np.ndarray:
    """Whether a node is read by another rank in a layer on the mesh."""
    read = np.zeros(len(graph.positions), bool)
    for rank in range(len(graph.nodes.sizes)):
        read[rows_read(graph.process, graph.nodes, rank).numpy()] = True
    return read


def facing(positions: np.ndarray, towards: np.ndarray) -> np.ndarray:
    """Positions seen from far away in a direction, (n, 3): to the right, up, and towards the eye."""
    right = np.cross([0.0, 0.0, 1.0], towards)
    if np.linalg.norm(right) < 1e-6:
        right = np.array([0.0, 1.0, 0.0])
    right = right / np.linalg.norm(right)
    return positions @ np.stack([right, np.cross(towards, right), towards], 1)


def draw(file: str, graph: Graph, land: torch.Tensor, prediction: torch.Tensor, height: int) -> float:
    """Write the PNG and return the fraction of pixels that are right; both maps are in the order of the grid."""
    land, prediction = (tensor.view(height, 2 * height).cpu().numpy() for tensor in (land, prediction))
    wrong = land != prediction
    accuracy = 1 - wrong.mean()
    ranks, halo, positions = ranks_of(graph), halo_of(graph), graph.positions.numpy()
    count = len(graph.nodes.sizes)
    towards = positions[halo].mean(0) if halo.any() else np.array([1.0, 0.0, 0.0])
    # Borders may lie around the whole sphere: then look at the node of the halo that is nearest to the equator.
    if halo.any():
        towards = positions[halo][np.abs(positions[halo][:, 2]).argmin()]
    seen = facing(positions, towards / np.linalg.norm(towards))

    figure, axes = subplots(
        2, 2, (16, 12),
        f"Land or sea on a mesh?   {len(positions)} nodes and {land.size} pixels on {count} rank{'s' * (count > 1)},   "
        f"{accuracy:.2%} right",
    )  # fmt: skip
    front = seen[:, 2] > 0
    axis = axes[0, 0]
    axis.scatter(*seen[front & ~halo, :2].T, c=ranks[front & ~halo], cmap=RANKS, vmin=0, vmax=7, s=1.6, linewidths=0)
    axis.scatter(*seen[front & halo, :2].T, c=BORDER, s=3.0, linewidths=0)
    axis.set_aspect("equal")
    sizes = ", ".join(map(str, graph.nodes.sizes))
    axis.set_title(f"Nodes of each rank ({sizes}), and read by another one", color=INK, fontsize=14, loc="left")

    axis = axes[0, 1]
    faces = graph.faces.numpy()
    near = (np.abs(seen[faces, :2]).max(2) < NEAR).any(1) & (seen[faces, 2] > 0).all(1)
    corners = seen[faces[near]][:, :, :2]
    same = np.where((ranks[faces[near]] == ranks[faces[near]][:, :1]).all(1), ranks[faces[near]][:, 0], -1)
    colours = [INK if r < 0 else RANKS(int(r) % RANKS.N) for r in same]
    axis.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="#0d1b2a", linewidths=0.5, alpha=0.55))
    for chosen, size, colour in ((front & ~halo, 10, None), (front & halo, 22, BORDER)):
        chosen = chosen & (np.abs(seen[:, :2]).max(1) < NEAR)
        given = {"c": colour} if colour else {"c": ranks[chosen], "cmap": RANKS, "vmin": 0, "vmax": 7}
        axis.scatter(*seen[chosen, :2].T, s=size, linewidths=0, zorder=2, **given)
    axis.set(xlim=(-NEAR, NEAR), ylim=(-NEAR, NEAR), aspect="equal")
    axis.set_title(f"Its halo from near: {int(halo.sum())} nodes in all", color=INK, fontsize=14, loc="left")

    for axis, title, values, colours in (
        (axes[1, 0], "Prediction", prediction, LAND_SEA),
        (axes[1, 1], f"Wrong: {wrong.mean():.2%}", wrong, RIGHT_WRONG),
    ):
        axis.imshow(values, interpolation="nearest", cmap=colours, vmin=0, vmax=1)
        axis.set_title(title, color=INK, fontsize=14, loc="left")
    for axis in axes.flat:
        axis.axis("off")
    save(figure, file)
    return accuracy
