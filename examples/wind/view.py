"""The picture at the end: the wind to the east in July, as it is, as it is forecast, and the difference."""

import sys
from pathlib import Path

import numpy as np
import zarr
from fields import MONTHS, SCALE

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
from drawing import INK, draw_borders, save, subplots
from layout import Layout

SHOWN = MONTHS.index("Jul")


def draw(file: str, forecast: np.ndarray, truth: Path, layout: Layout) -> None:
    """Of arrays (month, field, latitude, longitude)."""
    is_, guess = (SCALE * array[SHOWN, 0] for array in (zarr.open_array(truth, mode="r"), forecast))
    figure, axes = subplots(1, 3, (19, 4.2), "Wind to the east in July, m/s")
    panels = [
        ("reanalysis", is_, 50, "RdYlBu_r"),
        (f"forecast, {SHOWN} steps from January", guess, 50, "RdYlBu_r"),
        ("difference", guess - is_, 10, "PuOr"),
    ]
    for axis, (title, values, most, colors) in zip(axes[0], panels):
        shown = axis.imshow(values, cmap=colors, vmin=-most, vmax=most, aspect="auto")
        figure.colorbar(shown, ax=axis, fraction=0.03).ax.tick_params(colors=INK)
        axis.set_title(title, color=INK)
        axis.set_axis_off()
        draw_borders(axis, *layout.sizes.values(), names=axis is axes[0][0])
    save(figure, file)
