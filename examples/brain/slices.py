"""The picture at the end: three planes through the brain, the truth, the prediction, the errors, and the shards."""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
from drawing import BORDER, INK, PAPER, RIGHT_WRONG, draw_borders, magnitude, save, subplots
from layout import Layout

COLOURS = ListedColormap([PAPER, "#5b8db8", "#f4f1de"])  # of the tissues


def panel(plane: int) -> tuple[int, int]:
    """The dims that run down and to the right in the picture of a plane: the front is at the right, the top up."""
    rows, columns = [(2, 1), (2, 0), (1, 0)][plane]
    return rows, columns


def upright(volume: np.ndarray, plane: int, index: int) -> np.ndarray:
    """One plane of a volume (X, Y, Z) as a picture, the last index of its vertical dim in row 0."""
    rows, columns = panel(plane)
    kept = [dim for dim in range(3) if dim != plane]
    return volume.take(index, axis=plane).transpose(kept.index(rows), kept.index(columns))[::-1]


def borders(layout: Layout, plane: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the shards down and to the right in the picture of a plane."""
    sizes = list(layout.sizes.values())
    rows, columns = panel(plane)
    return sizes[rows][::-1], sizes[columns]


def draw(
    file: str,
    image: Tensor,
    truth: Tensor,
    prediction: Tensor,
    errors: Tensor | None,
    layout: Layout,
    dice: Mapping[str, float],
) -> None:
    """Write the PNG of the first of some volumes (N, 1, X, Y, Z); with the errors beside one process where given."""
    image, truth, prediction = (each[0, 0].cpu().numpy() for each in (image, truth, prediction))
    image = np.where(image != 0, image, image.min())  # black outside
    ranks = len(layout.boxes())
    scores = ", ".join(f"{tissue} {value:.3f}" for tissue, value in dice.items())
    title = f"Tissues of a brain on {ranks} rank{'s' * (ranks > 1)}, Dice: {scores}"
    figure, axes = subplots(3, 4 if errors is None else 5, (17 if errors is None else 21, 13), title)
    tissues = {"cmap": COLOURS, "vmin": 0, "vmax": 2}
    for plane, (name, row) in enumerate(zip(layout.sizes, axes)):
        index = image.shape[plane] * 9 // 20  # next to the gap between the hemispheres
        pictures = [
            (f"T1, {name[:-1]} {index}", image, {"cmap": "gray"}),
            ("Truth", truth, tissues),
            ("Prediction", prediction, tissues),
            ("Wrong", prediction != truth, {"cmap": RIGHT_WRONG, "vmin": 0, "vmax": 1}),
        ]
        if errors is not None:
            digits = magnitude(errors[0, 0].cpu().numpy())
            pictures.append(("log10 of the difference from one process", digits, {"cmap": "magma"}))
        for axis, (title, volume, colours) in zip(row, pictures):
            picture = upright(volume, plane, index)
            height, width = picture.shape
            shown = axis.imshow(picture, extent=(0, width, height, 0), interpolation="nearest", **colours)
            axis.set_title(title, color=INK, fontsize=13, loc="left")
            axis.axis("off")
            draw_borders(axis, *borders(layout, plane), names=False)
        if errors is not None:
            figure.colorbar(shown, ax=row[-1], shrink=0.8).ax.tick_params(colors=INK)
    colours = {tissue: COLOURS(i) for i, tissue in enumerate(dice, 1)} | {"wrong": RIGHT_WRONG(1)}
    patches = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    patches.append(Line2D([], [], color=BORDER, label="border between ranks"))
    looks = {"labelcolor": INK, "fontsize": 14, "frameon": False}
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), **looks)
    save(figure, file)
