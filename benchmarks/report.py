"""What benchmarks print and write: figures next to their bars, as a table, as JSON and as Markdown.

A figure is a ratio of two times of one run wherever there is something to compare with, so that it says the same on a
slower machine. Each script makes a list of figures and hands them to :func:`finish`; ``python benchmarks`` collects
the lists of all scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timing import DEVICE, device_type

# Rows of whole networks, after the network's name; users are shown a table and a chart of them.
TIMES, FASTER = ": 2 ranks' time of half the input's", ": times as fast as one process"
EXPECTED = "two ranks, times as fast as one process"


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        group: the table's heading above it.
        name: what was measured.
        value: None where nothing was; ``note`` says why.
        unit: of ``value`` and ``bar``; "x" for a ratio.
        bar: what ``value`` may be at most, or, with ``at_least``, has to be at least.
        best, median: seconds over the rounds, of each kind that was timed.
        note: what else belongs into the row.
        details: further figures, for the JSON file and the plots.
    """

    group: str
    name: str
    value: float | None
    unit: str = "x"
    bar: float | None = None
    at_least: bool = False
    best: dict[str, float] = field(default_factory=dict)
    median: dict[str, float] = field(default_factory=dict)
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """ "met", "missed", or nothing where there is no bar or no value."""
        if self.bar is None or self.value is None:
            return ""
        return "met" if (self.value >= self.bar if self.at_least else self.value <= self.bar) else "missed"


def best_and_median(times: dict[str, list[float]], scale: float = 1.0) -> dict[str, dict[str, float]]:
    """Of each kind's times; the two arguments of a :class:`Figure` that have these names."""
    return {
        "best": {kind: min(values) * scale for kind, values in times.items()},
        "median": {kind: median(values) * scale for kind, values in times.items()},
    }


# -- as text -----------------------------------------------------------------------------------------------------------


def amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}{unit}" if unit == "x" else f"{value:.1f} {unit}"


def seconds(value: float) -> str:
    for factor, digits, unit in ((1e6, 1, "us"), (1e3, 1, "ms")):
        if value * factor < 1000:
            return f"{value * factor:.{digits}f} {unit}"
    return f"{value:.2f} s"


def cells(figure: Figure) -> tuple[str, str, str, str, str]:
    """Name, value, bar, verdict, and everything else."""
    bar = "" if figure.bar is None else f"{'>=' if figure.at_least else '<='} {amount(figure.bar, figure.unit)}"
    middle = {kind: f" ({seconds(figure.median[kind])})" if kind in figure.median else "" for kind in figure.best}
    times = ", ".join(f"{kind} {seconds(value)}{middle[kind]}" for kind, value in figure.best.items())
    return (
        figure.name,
        amount(figure.value, figure.unit),
        bar,
        figure.verdict,
        "; ".join(filter(None, (times, figure.note))),
    )


def by_group(figures: Iterable[Figure]) -> dict[str, list[Figure]]:
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        groups.setdefault(figure.group, []).append(figure)
    return groups


def table(figures: Sequence[Figure]) -> str:
    """For a terminal. Of each time the best is shown, and the median in brackets."""
    width = max((len(figure.name) for figure in figures), default=0)
    lines = []
    for group, rows in by_group(figures).items():
        lines += ["", f"{group}", f"{'':{width}}  {'value':>10} {'bar':>11}         best (median)"]
        for name, value, bar, verdict, rest in map(cells, rows):
            lines.append(f"{name:{width}}  {value:>10} {bar:>11} {verdict:7} {rest}".rstrip())
    verdicts = [figure.verdict for figure in figures if figure.verdict]
    return "\n".join([*lines, "", f"{verdicts.count('met')} of {len(verdicts)} bars met"])


def markdown(figures: Sequence[Figure]) -> str:
    """The same as Markdown tables, one per group, without rows that have no value."""
    blocks = []
    for group, rows in by_group(figure for figure in figures if figure.value is not None).items():
        lines = [f"### {group}", "", "| | value | bar | | best (median) |", "|---|--:|--:|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(figure)) + " |" for figure in rows]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


# -- as JSON -----------------------------------------------------------------------------------------------------------


def processor() -> str:
    """The model's name, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name() -> str:
    kind = device_type()
    return kind if kind == "cpu" else torch.get_device_module(kind).get_device_name()


def about() -> dict[str, Any]:
    """When and on what this runs."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "device": device_name(),
    }


def write(path: Path, figures: Sequence[Figure]) -> None:
    """``figures`` with what is known about the run; :func:`read` takes the file."""
    content = {"about": about(), "figures": [asdict(figure) for figure in figures]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(content: dict[str, Any]) -> list[Figure]:
    """The figures of what :func:`write` wrote."""
    return [Figure(**row) for row in content["figures"]]


# -- the command line of a script --------------------------------------------------------------------------------------


class _OnDevice(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        os.environ[DEVICE] = values


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options that all scripts have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help="rows whose name contains this")
    made.add_argument("--quick", action="store_true", help="a few rounds; the figures mean nothing")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    made.add_argument("--device", choices=("cpu", "cuda"), action=_OnDevice, help="what the ranks compute on")
    return made


def chosen(only: str, names: Iterable[str], fail: Callable[[str], Any]) -> list[str]:
    """The name that is ``only``, or those that contain it."""
    every = list(names)
    found = [name for name in every if name == only] or [name for name in every if only.lower() in name.lower()]
    if not found:
        fail(f"no row's name contains {only!r}")
    return found


def finish(figures: Sequence[Figure], options: argparse.Namespace) -> None:
    """Print the table, and write the file that was asked for. A missed bar is no error."""
    print(table(figures))
    if options.json:
        write(options.json, figures)
