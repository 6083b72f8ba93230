"""Figures on dark paper, and the borders between ranks in them."""

import itertools
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

PAPER, INK, BORDER = "#0d1b2a", "#e0e6ed", "#ff9f1c"
LAND_SEA = ListedColormap(["#1b3a5c", "#d9c79a"])
RIGHT_WRONG = ListedColormap(["#16293f", "#ff4d6d"])


def subplots(rows: int, columns: int, size: tuple[float, float], title: str) -> tuple[Figure, np.ndarray]:
    """A figure of so many panels, (rows, columns) of them; its size is in inches."""
    figure, axes = plt.subplots(rows, columns, figsize=size, facecolor=PAPER, layout="constrained", squeeze=False)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.suptitle(title, color=INK, fontsize=20)
    return figure, axes


def magnitude(error: np.ndarray) -> np.ndarray:
    """The decimal logarithm of errors; nan where there is none, which is not drawn."""
    size = np.abs(error)
    return np.log10(np.where(size > 0, size, np.nan))


def save(figure: Figure, file: str) -> None:
    figure.savefig(file, dpi=130, facecolor=PAPER)
    plt.close(figure)


def draw_borders(axis: Axes, rows: Sequence[int], columns: Sequence[int], names: bool) -> None:
    """Lines between the shards of a picture whose rows and columns are sharded in these sizes, row 0 at the top; with
    names, also which rank holds how much, where the ranks are in the order of rows, then columns."""
    tops, lefts = (list(itertools.accumulate(sizes, initial=0)) for sizes in (rows, columns))
    for row in tops[1:-1]:
        axis.axhline(row, color=BORDER, linewidth=1.2)
    for column in lefts[1:-1]:
        axis.axvline(column, color=BORDER, linewidth=1.2)
    shards = itertools.product(zip(tops, rows), zip(lefts, columns))
    for rank, ((top, height), (left, width)) in enumerate(shards if names else ()):
        if height and width:
            axis.annotate(
                f"rank {rank}: {height} x {width}", (left, top), (6, -6), textcoords="offset points", va="top",
                color=BORDER, fontsize=11, bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 2},
            )  # fmt: skip
