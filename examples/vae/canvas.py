"""The picture at the end: what was decoded, with the borders between the ranks, and how far it is from one process."""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
from drawing import INK, draw_borders, magnitude, save, subplots
from layout import Layout


def pixels(picture: Tensor) -> np.ndarray:
    """(H, W, C) of an image (1, C, H, W), or of the middle frame of a video (1, C, T, H, W)."""
    frame = picture[0, :, picture.shape[2] // 2] if picture.ndim == 5 else picture[0]
    return frame.permute(1, 2, 0).double().cpu().numpy()


def stretched(picture: np.ndarray) -> np.ndarray:
    """Random weights give pale pictures: each colour's values from its smallest to its largest as 0 to 1."""
    low, high = picture.min(axis=(0, 1)), picture.max(axis=(0, 1))
    return (picture - low) / np.where(high > low, high - low, 1)


def draw(file: str, results: Mapping[str, tuple[Tensor | None, Tensor, Tensor]], layout: Layout) -> None:
    """Write the PNG: a row for each job, of what was encoded, if anything, and of one process's result and the ranks'.
    The layout is the code's."""
    ranks = len(layout.boxes())
    figure, axes = subplots(len(results), 4, (22, 6 * len(results) + 1), "Decoded by one process and by several ranks")
    for (job, (given, expected, found)), row in zip(results.items(), axes):
        one, several = pixels(expected), pixels(found)
        look = stretched if given is None else lambda picture: picture.clip(0, 1)
        panels = {
            f"{job}, one process": look(one),
            f"{job}, {ranks} ranks": look(several),
            "log10 of the difference": magnitude(np.abs(several - one).max(axis=-1)),
        }
        if given is not None:
            panels = {"encoded": pixels(given), **panels}
        for axis in row:
            axis.axis("off")
        height, width = one.shape[:2]
        for axis, (title, picture) in zip(row[-len(panels) :], panels.items()):
            shown = axis.imshow(picture, extent=(0, width, height, 0), interpolation="nearest", cmap="magma")
            axis.set_title(title, color=INK, fontsize=14, loc="left")
        rows, columns = (
            tuple(size * length // sum(sizes) for size in sizes)
            for length, sizes in zip((height, width), layout.sizes.values())
        )
        for axis in row[-2:]:
            draw_borders(axis, rows, columns, names=axis is row[-2])
        figure.colorbar(shown, ax=row[-1], shrink=0.8).ax.tick_params(colors=INK)
    save(figure, file)
