"""Plots of figures: ratios next to their bars, one file per group, and the host time by the size of the world."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from report import EXPECTED, FASTER, TIMES, Figure, by_group

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
        if any("worlds" in row.details for row in rows):
            drawn.setdefault(group, []).append(f"{name}-lines.png")
            worlds(rows, group, folder / f"{name}-lines.png")
    if any(row.name.endswith(TIMES) for row in figures):
        drawn[EXPECTED] = ["expected.png"]
        expected(figures, folder / "expected.png")
    return drawn


def expected(figures: Sequence[Figure], path: Path) -> None:
    """How many times as fast two ranks are, of each network, also with twice the input."""
    values = {row.name: row.value for row in figures if FASTER in row.name and row.value is not None}
    networks = [row.name.removesuffix(TIMES) for row in figures if row.name.endswith(TIMES)]
    figure, axes = pyplot.subplots(figsize=(8, 1.1 + 0.5 * len(networks)), layout="constrained")
    for offset, end, label, color in (
        (-0.2, "", "the input of the benchmark", "tab:blue"),
        (0.2, ", twice the input", "twice the input", "tab:cyan"),
    ):
        names = [f"{network}{FASTER}{end}" for network in networks]
        places = [place + offset for place, name in enumerate(names) if name in values]
        found = [values[name] for name in names if name in values]
        bar = axes.barh(places, found, height=0.36, color=color, label=label)
        axes.bar_label(bar, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.axvline(2, color="black", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(networks)), networks, fontsize=8)
    axes.set_ylim(len(networks) - 0.4, -0.6)
    axes.set_xlabel("times as fast as one process; dotted: twice, the ideal", fontsize=8)
    figure.legend(fontsize=8, loc="outside upper center", ncols=2)
    finish(figure, path)


def bars(rows: Sequence[Figure], title: str, path: Path) -> None:
    """One horizontal bar per ratio; a black line marks what it is to reach."""
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(rows)), layout="constrained")
    places = range(len(rows))
    axes.barh(places, [row.value or 0 for row in rows], color=[COLORS[row.verdict] for row in rows], height=0.7)
    for place, row in zip(places, rows):
        if row.bar is not None:
            axes.plot([row.bar] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axes.set_yticks(places, [row.name for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    has_bars = any(row.bar is not None for row in rows)
    axes.set_title(f"{title}\nblack: the bar; green: met; red: missed" if has_bars else title, fontsize=9)
    finish(figure, path)


def worlds(rows: Sequence[Figure], title: str, path: Path) -> None:
    """Microseconds of a call by the number of ranks, one line per operator, one panel per number of mesh dims."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.5), sharey=True, layout="constrained")
    operators = list(dict.fromkeys(row.details["operator"] for row in rows if "worlds" in row.details))
    for dims, axes in enumerate(panels, start=1):
        labels: dict[int, str] = {}
        for row in rows:
            times = {label.split()[0]: 1e6 * taken for label, taken in row.details.get("worlds", {}).items()}
            if not times or any(label.count("x") + 1 != dims for label in times):
                continue
            operator = row.details["operator"]
            ranks = {math.prod(map(int, label.split("x"))): label for label in times}
            color = pyplot.colormaps["tab20"](operators.index(operator) % 20)
            axes.plot(list(ranks), list(times.values()), marker=".", color=color, label=operator)
            labels |= ranks
        axes.set(xscale="log", yscale="log", xlabel=f"ranks of a {dims}-D mesh")
        axes.set_xticks(list(labels), list(labels.values()))
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("microseconds a call")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.suptitle(title, fontsize=9)
    finish(figure, path)


def finish(figure: pyplot.Figure, path: Path) -> None:
    figure.savefig(path, dpi=80, metadata={"Software": None})  # no version, so that equal figures make equal files
    pyplot.close(figure)
