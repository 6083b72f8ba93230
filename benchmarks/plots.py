"""Plots of figures: ratios beside their bars, one file per group, and the host time by the size of the world."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from report import Figure, by_group

matplotlib.use("Agg")
from matplotlib import pyplot

COLORS = {"met": "tab:green", "missed": "tab:red", "": "tab:gray"}


def draw(figures: Sequence[Figure], folder: Path) -> dict[str, list[str]]:
    """The names of the files in ``folder``, by group."""
    drawn: dict[str, list[str]] = {}
    for group, rows in by_group(figures).items():
        name = "-".join(re.findall(r"[a-z0-9]+", group.lower()))
        ratios = [row for row in rows if row.unit == "x" and row.value is not None]
        if ratios:
            drawn[group] = [f"{name}.png"]
            bars(ratios, group, folder / f"{name}.png")
        lines = {row.name.split(",")[0]: row.details["worlds"] for row in rows if "worlds" in row.details}
        if lines:
            drawn[group].append(f"{name}-lines.png")
            worlds(rows, group, folder / f"{name}-lines.png")
    return drawn


def bars(rows: Sequence[Figure], title: str, path: Path) -> None:
    """One horizontal bar per ratio; a black line marks what it is to reach."""
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(rows)), layout="constrained")
    places = range(len(rows))
    axes.barh(places, [row.value or 0 for row in rows], color=[COLORS[row.verdict] for row in rows], height=0.7)
    for place, row in zip(places, rows):
        if row.bar is not None:
            axes.plot([row.bar] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axes.set_yticks(places, [row.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(f"{title}\nblack: the bar; green: met; red: missed", fontsize=9)
    finish(figure, path)


def worlds(rows: Sequence[Figure], title: str, path: Path) -> None:
    """Microseconds of a call by the number of ranks, one line per operator, one panel per number of mesh dims."""
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4.5), sharey=True, layout="constrained")
    for dims, axes in enumerate(panels, start=1):
        for row in rows:
            times = {label.split()[0]: us for label, us in row.details.get("worlds", {}).items()}
            if times and all(label.count("x") + 1 == dims for label in times):
                ranks = [_product(label) for label in times]
                axes.plot(ranks, list(times.values()), marker=".", linewidth=1, label=row.name.split(", ")[0])
        axes.set(xscale="log", yscale="log", xlabel=f"ranks, {dims}-D mesh")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("microseconds a call")
    panels[0].legend(fontsize=6, ncols=2)
    figure.suptitle(title, fontsize=9)
    finish(figure, path)


def _product(label: str) -> int:
    result = 1
    for factor in label.split("x"):
        result *= int(factor)
    return result


def finish(figure: pyplot.Figure, path: Path) -> None:
    figure.savefig(path, dpi=80, metadata={"Software": None})  # no version, so that equal figures make equal files
    pyplot.close(figure)
