"""Drawings of how ranks work together: a halo, ring attention, a transposed FFT; and a recorded timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from plots import finish

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

COLORS = "#4c78a8", "#f58518", "#54a24b", "#b279a2"  # of ranks
PALE = "#dbe5f0", "#fde5cc", "#d9ecd5", "#ecdfe9"
INK = "#333333"


def panels(count: int, titles: Sequence[str], width: float, height: float) -> tuple[Any, Sequence[Axes]]:
    figure, found = pyplot.subplots(1, count, figsize=(width, height), layout="constrained")
    for axes, title in zip(found, titles):
        axes.set_title(title, fontsize=9, loc="left", color=INK)
        axes.axis("off")
        axes.set_aspect("equal")
    return figure, found


def box(axes: Axes, left: float, top: float, text: str = "", color: str = PALE[0], w: float = 1, h: float = 1) -> None:
    axes.add_patch(pyplot.Rectangle((left, -top - h), w, h, facecolor=color, edgecolor="white", linewidth=1.5))
    axes.text(left + w / 2, -top - h / 2, text, ha="center", va="center", fontsize=8, color=INK)


Place = tuple[float, float]  # from the left, from the top


def arrow(axes: Axes, start: Place, end: Place, color: str = INK, bend: float = 0.0) -> None:
    look = {"arrowstyle": "-|>", "color": color, "linewidth": 1.3, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", (end[0], -end[1]), (start[0], -start[1]), arrowprops=look)


def fit(axes: Axes, left: float, right: float, top: float, bottom: float) -> None:
    axes.set_xlim(left, right)
    axes.set_ylim(-bottom, -top)


def halo(path: Path) -> None:
    """A convolution of 3 rows on shards of 5 and 3 rows."""
    titles = (
        "1. Each rank sends the row at its border",
        "2. Rows that need no other are computed meanwhile",
        "3. The others follow; sizes stay 5 + 3",
    )
    figure, found = panels(3, titles, 10.5, 3.3)
    shards = (range(5), range(5, 8))
    for step, axes in enumerate(found):
        for rank, rows in enumerate(shards):
            left = 4.2 * rank
            name = {"ha": "center", "fontsize": 9, "color": COLORS[rank]}
            axes.text(left + 1, 1.2 - rows[0], f"rank {rank}", **name)
            for row in rows:
                border = row in (4, 5)
                done = step == 2 or (step == 1 and not border)
                box(axes, left, row + rank, f"{row}", COLORS[rank] if done else PALE[rank], w=2)
            halo_row = 5 if rank == 0 else 4
            if step:
                box(axes, left, halo_row + rank, f"{halo_row}", PALE[1 - rank], w=2)
        if step == 0:
            arrow(axes, (2.1, 4.5), (4.1, 5.3), COLORS[0])
            arrow(axes, (4.1, 6.5), (2.1, 5.7), COLORS[1])
        fit(axes, -0.3, 6.6, -1.8, 9.3)
    finish(figure, path)


def ring(path: Path, ranks: int = 4) -> None:
    """Attention: queries stay, keys and values go around."""
    titles = [f"step {step + 1}" for step in range(ranks)]
    figure, found = panels(ranks, titles, 11, 2.5)
    for step, axes in enumerate(found):
        for rank in range(ranks):
            keys = (rank - step) % ranks
            axes.text(-0.3, -rank - 0.5, f"rank {rank}", ha="right", va="center", fontsize=8, color=COLORS[rank])
            box(axes, 0, rank, f"Q{rank}", PALE[rank])
            box(axes, 4.9, rank, f"K{keys} V{keys}", PALE[keys], w=1.6)
            for seen in range(ranks):
                done = (rank - seen) % ranks <= step
                color = COLORS[seen] if done else "#f2f2f2"
                box(axes, 1.3 + 0.8 * seen, rank, "", color, w=0.8)
            if step < ranks - 1:
                to = (rank + 1) % ranks
                arrow(axes, (6.6, rank + 0.5), (6.6, to + 0.5), "#888888", -0.5 if to else 0.35)
        fit(axes, -1.9, 8.3, -0.6, ranks + 0.2)
    figure.suptitle("Ring attention: queries stay, keys and values move on; middle: which scores are done", fontsize=9)
    finish(figure, path)


def fft(path: Path, ranks: int = 4) -> None:
    """A transform over two dims, of which one is sharded: transform, transpose, transform."""
    titles = (
        "1. rows are sharded:\nFFT along each row",
        "2. one all-to-all:\neach rank sends a block to each other",
        "3. columns are sharded:\nFFT along each column",
    )
    figure, found = panels(3, titles, 9.5, 3.4)
    for i in range(ranks):
        for j in range(ranks):
            box(found[0], j, i, "", PALE[i])
            box(found[1], j, i, f"{i} to {j}" if i != j else "", PALE[i] if i == j else PALE[j])
            box(found[2], j, i, "", PALE[j])
        arrow(found[0], (0.2, i + 0.5), (ranks - 0.2, i + 0.5), COLORS[i])
        arrow(found[2], (i + 0.5, 0.2), (i + 0.5, ranks - 0.2), COLORS[i])
        found[0].text(-0.15, -i - 0.5, f"rank {i}", ha="right", va="center", fontsize=8, color=COLORS[i])
        found[2].text(i + 0.5, 0.1, f"rank {i}", ha="center", va="bottom", fontsize=7, color=COLORS[i])
    for axes in found:
        fit(axes, -1.2, ranks + 0.2, -0.6, ranks + 0.1)
    finish(figure, path)


KINDS = {"operator": ("#bcd0e5", 0.8), "communication": ("#f58518", 0.5), "wait": ("#e45756", 0.25)}


def timeline(events: Sequence[dict[str, Any]], path: Path) -> None:
    """A row for each rank: operators, in them communication, and in it waiting for another rank."""
    spans = [event for event in events if event["ph"] == "X"]
    start, end = min(event["ts"] for event in spans), max(event["ts"] + event["dur"] for event in spans)
    percent = 100 / (end - start)  # the times of a step are another matter, see the benchmarks
    ranks = sorted({(event["pid"], event["tid"]) for event in spans})
    figure, axes = pyplot.subplots(figsize=(10, 2.6), layout="constrained")
    for kind, (color, height) in KINDS.items():
        for place, rank in enumerate(ranks):
            of_rank = [event for event in spans if (event["pid"], event["tid"]) == rank and event["cat"] == kind]
            bars = [((event["ts"] - start) * percent, event["dur"] * percent) for event in of_rank]
            axes.broken_barh(bars, (place - height / 2, height), facecolors=color, label="" if place else kind)
    axes.set_yticks(range(len(ranks)), [f"rank {i}" for i in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("% of a training step of the U-Net of examples/globe on two CPU ranks, as recorded", fontsize=8)
    axes.legend(fontsize=7, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.25), frameon=False)
    finish(figure, path)
