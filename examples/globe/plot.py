"""The picture at the end: image, truth, prediction and errors, with the borders between the ranks."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
from drawing import INK, LAND_SEA, RIGHT_WRONG, draw_borders, save, subplots
from layout import Layout

MAX_COLUMNS = 1800  # more would not show


def draw(file: str, image: torch.Tensor, land: torch.Tensor, prediction: torch.Tensor, layout: Layout) -> float:
    """Write the PNG and return the fraction of pixels that are classified right."""
    image = image[0].permute(1, 2, 0).cpu().numpy()
    land, prediction = (tensor[0, 0].cpu().numpy() for tensor in (land, prediction))
    wrong = land != prediction
    accuracy = 1 - wrong.mean()

    ranks = len(layout.boxes())
    figure, axes = subplots(
        2, 2, (16, 9),
        f"Land or sea?   {land.shape[0]} x {land.shape[1]} pixels on {ranks} rank{'s' * (ranks > 1)},   "
        f"{accuracy:.2%} right",
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
        draw_borders(axis, *layout.sizes.values(), names=picture is image)
    save(figure, file)
    return accuracy
