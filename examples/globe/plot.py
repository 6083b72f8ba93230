"""The picture at the end: image, truth, prediction and errors, with the borders between the ranks."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from layout import Layout
from matplotlib.colors import ListedColormap

PAPER, INK, BORDER = "#0d1b2a", "#e0e6ed", "#ff9f1c"
LAND_SEA = ListedColormap(["#1b3a5c", "#d9c79a"])
RIGHT_WRONG = ListedColormap(["#16293f", "#ff4d6d"])
MAX_COLUMNS = 1800  # more would not show


def draw(file: str, image: torch.Tensor, land: torch.Tensor, prediction: torch.Tensor, layout: Layout) -> float:
    """Write the PNG and return the fraction of pixels that are classified right."""
    image = image[0].permute(1, 2, 0).cpu().numpy()
    land, prediction = (tensor[0, 0].cpu().numpy() for tensor in (land, prediction))
    wrong = land != prediction
    accuracy = 1 - wrong.mean()

    figure, axes = plt.subplots(2, 2, figsize=(16, 9), facecolor=PAPER, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.suptitle(
        f"Land or sea?   {land.shape[0]} x {land.shape[1]} pixels on {len(layout.boxes())} "
        f"rank{'s' * (len(layout.boxes()) > 1)},   {accuracy:.2%} right",
        color=INK, fontsize=20,
    )  # fmt: skip
    panels = [
        ("Blue Marble", image, {}),
        ("Truth", land, {"cmap": LAND_SEA, "vmin": 0, "vmax": 1}),
        ("Prediction", prediction, {"cmap": LAND_SEA, "vmin": 0, "vmax": 1}),
        (f"Wrong: {wrong.mean():.2%}", wrong, {"cmap": RIGHT_WRONG, "vmin": 0, "vmax": 1}),
    ]
    height, width = land.shape
    stride = -(-width // MAX_COLUMNS)
    for axis, (title, picture, colours) in zip(axes.flat, panels):
        axis.imshow(picture[::stride, ::stride], extent=(0, width, height, 0), interpolation="nearest", **colours)
        axis.set_title(title, color=INK, fontsize=14, loc="left")
        axis.axis("off")
        draw_borders(axis, layout, names=picture is image)
    figure.savefig(file, dpi=130, facecolor=PAPER)
    plt.close(figure)
    return accuracy


def draw_borders(axis: plt.Axes, layout: Layout, names: bool) -> None:
    for row in np.cumsum(layout.rows)[:-1]:
        axis.axhline(row, color=BORDER, linewidth=1.2)
    for column in np.cumsum(layout.columns)[:-1]:
        axis.axvline(column, color=BORDER, linewidth=1.2)
    for rank, (top, bottom, left, right) in enumerate(layout.boxes()) if names else ():
        if bottom > top and right > left:
            text = f"rank {rank}: {bottom - top} x {right - left}"
            axis.annotate(
                text, (left, top), (6, -6), textcoords="offset points", va="top", color=BORDER, fontsize=11,
                bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 2},
            )  # fmt: skip
