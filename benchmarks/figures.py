"""The pictures of the README and of docs, which go into docs/images.

    python benchmarks/figures.py                       all of them; runs the examples (about 10 minutes on 2 idle cores)
    python benchmarks/figures.py --only memory halo    some of them

``memory``, ``largest`` and ``scaling`` show what the benchmarks wrote into benchmarks/results; ``halo``, ``ring`` and
``fft`` are drawings. ``globe`` and ``timeline`` run the network of examples/globe. The others are the pictures of the
example jobs of these names.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import drawings
import matplotlib
import torch
from bench_capacity import DEVICES, GROUP, LARGEST, STRONG, WEAK
from networks import NETWORKS, globe
from plots import finish
from report import FASTER, TIMES, Figure, read
from timing import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import scatter_tensor
from shardtensor.testing import shard

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).parent
IMAGES, EXAMPLES = HERE.parent / "docs" / "images", HERE.parent / "examples"
MOST = 200_000  # bytes of a picture
BLUE, ORANGE, GREEN = "#4c78a8", "#f58518", "#54a24b"


# -- from the results --------------------------------------------------------------------------------------------------


def results(part: str) -> list[Figure]:
    return read(json.loads((HERE / "results" / "figures.json").read_text())[part])


def by_case(group: str, **details: Any) -> dict[str, dict[int, Figure]]:
    """The counted rows of a group that have these details, by case and number of ranks."""
    found: dict[str, dict[int, Figure]] = {}
    for row in results("capacity"):
        if row.group == group and details.items() <= row.details.items():
            found.setdefault(row.details["case"], {})[row.details["ranks"]] = row
    return found


def by_ranks(axes: Any, title: str, label: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=9)


def memory(path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7.5, 4), layout="constrained")
    places = ((0, 6), (0, -12), (14, -3))  # of numbers, where lines are close to each other
    for rows, color, place in zip(by_case(GROUP).values(), (BLUE, ORANGE, GREEN), places):
        values = [row.value for row in rows.values()]
        title = rows[1].name.rpartition(":")[0]
        axes.plot(list(rows), values, marker="o", color=color, label=title)
        for ranks, value in zip(rows, values):
            shown = {"textcoords": "offset points", "fontsize": 7, "ha": "center", "color": color}
            axes.annotate(f"{value:.1f}", (ranks, value), place, **shown)
    axes.set_xlim(0.9, 9.5)
    for device in DEVICES:
        axes.axhline(device, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"{device} GB device", (8, device), (0, 3), textcoords="offset points", fontsize=8, ha="right")
    by_ranks(axes, "A training step with AdamW: what each rank holds, counted (temporary memory is not)", "GiB a rank")
    axes.set_yticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
    axes.yaxis.minorticks_off()
    axes.legend(fontsize=7, loc="lower left")
    finish(figure, path)


def largest(path: Path) -> None:
    names = list(by_case(LARGEST))
    figure, panels = pyplot.subplots(1, len(names), figsize=(10, 3.6), layout="constrained")
    for axes, name in zip(panels, names):
        for device, color in zip(DEVICES, (BLUE, ORANGE)):
            rows = by_case(LARGEST, device=device)[name]
            axes.plot(list(rows), [row.value for row in rows.values()], marker="o", color=color, label=f"{device} GB")
            for ranks in (min(rows), max(rows)):
                row, offset = rows[ranks], 8 if device == max(DEVICES) else -13
                shown = {"fontsize": 6, "textcoords": "offset points", "ha": "left" if ranks == 1 else "right"}
                axes.annotate(row.details["size"], (ranks, row.value), (0, offset), **shown)
        by_ranks(axes, name, f"millions of {'voxels' if 'volume' in name else 'pixels'}")
        axes.margins(y=0.2)
        axes.legend(fontsize=7, loc="upper left", title="each device", title_fontsize=7)
    figure.suptitle("The largest input of a training step, counted; a fifth of each device is left", fontsize=9)
    finish(figure, path)


def scaling(path: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(9.5, 4), layout="constrained", sharey=True)
    for axes, group, title in zip(panels, (STRONG, WEAK), ("the same input", "an input that grows with the ranks")):
        for (case, rows), color in zip(by_case(group).items(), (BLUE, ORANGE, GREEN)):
            work = [1 if group == STRONG else ranks for ranks in rows]
            values = [times * row.value for times, row in zip(work, rows.values())]
            axes.plot(list(rows), values, color=color, marker=".", label=f"{case}: modelled, H100s")
        axes.plot([1, 8], [1, 8], color="black", linestyle=":", linewidth=1)
        measured = dict(measured_on_two(group == STRONG))
        axes.plot([2] * len(measured), list(measured.values()), "x", color="black", label="measured, 2 CPU cores")
        by_ranks(axes, f"{title}: dotted is the ideal", "times the work of one rank in the same time")
        axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.yaxis.minorticks_off()
    panels[0].legend(fontsize=7, loc="upper left")
    finish(figure, path)


def measured_on_two(strong: bool) -> Sequence[tuple[str, float]]:
    """Networks, and how many times the work of one process two do: of the same input, or each of half of it."""
    rows = {row.name: row for row in results("networks")}
    if strong:
        return [(name, row.value) for name, row in rows.items() if name.endswith(FASTER) and row.value]
    timed = [(name, row.best) for name, row in rows.items() if name.endswith(TIMES) and row.best]
    return [(name, 2 * best["half"] / best["two"]) for name, best in timed]


# -- from runs ---------------------------------------------------------------------------------------------------------


def on_the_globe(mesh: DeviceMesh, sizes: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Train the U-Net on all ranks in float64; rank 0 gets the image, and the land that all ranks and it alone see."""
    sys.path.insert(0, str(EXAMPLES / "common"))
    import earth

    image = land = None
    if mesh.get_rank() == 0:
        image, land = (each.double() for each in earth.load(sum(sizes)))
        image = earth.normalise(image, torch.float64)
    torch.manual_seed(0)
    model = globe().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, truth = (scatter_tensor(each, mesh, [Shard(2)], shard_sizes=sizes) for each in (image, land))
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(x), truth).backward()
        optimizer.step()
    with torch.no_grad():
        found = {"ranks": model(x).sigmoid().full_tensor()}
        if image is not None:
            found |= {"image": image / 4 + 0.25, "one": model(image).sigmoid()}
    return {name: each[0].movedim(0, -1).clamp(0, 1).numpy() for name, each in found.items()}


def picture_of_globe(path: Path, sizes: tuple[int, ...] = (30, 60, 60, 50), steps: int = 40) -> None:
    found = on_ranks(on_the_globe, sizes, steps, ranks=len(sizes))
    image, ranks, one = (found[name] for name in ("image", "ranks", "one"))
    counted = next(iter(by_case(GROUP).values()))
    whole, part = (counted[n] for n in (1, len(sizes)))
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 5.2), layout="constrained")
    difference = abs(ranks - one)
    shown = (
        ("the image, in bands of any height on four ranks", image, {}),
        ("land, as the four ranks see it", ranks, {"cmap": "cividis", "vmin": 0, "vmax": 1}),
        ("land, as one device sees it", one, {"cmap": "cividis", "vmin": 0, "vmax": 1}),
        (f"the difference: at most {difference.max():.0e}", difference, {"cmap": "gray", "vmin": 0, "vmax": 1}),
    )
    for axes, (title, picture, colors) in zip(panels.flat, shown):
        axes.imshow(picture, interpolation="nearest", **colors)
        axes.set_title(title, fontsize=9, loc="left")
        axes.axis("off")
    top = 0
    for rank, height in enumerate(sizes):
        for axes in panels[0] if rank else ():
            axes.axhline(top, color=ORANGE, linewidth=1.5)
        look = {"facecolor": "black", "alpha": 0.6, "edgecolor": "none", "pad": 1.5}
        panels[0, 0].text(4, top + 4, f"rank {rank}: {height} rows", color="white", fontsize=7, va="top", bbox=look)
        top += height
    size = whole.name.rpartition(":")[0].rpartition(", ")[2]
    held = f"{whole.value:.1f} GiB on one device, {part.value:.1f} GiB on each of {len(sizes)}"
    figure.suptitle(f"At {size} pixels with 32 channels, a training step holds {held}", fontsize=10)
    finish(figure, path)
    shrink(path, path)


def record(mesh: DeviceMesh, path: str) -> None:
    network = NETWORKS["globe U-Net"]
    torch.manual_seed(0)
    model, x = network.make(), torch.randn(network.shape)
    x = shard(x, mesh, [Shard(network.dim)])
    for _ in range(3):
        model(x).square().mean().backward()
    with shardtensor.timeline(path):
        model(x).square().mean().backward()


def timeline(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        on_ranks(record, str(file))
        drawings.timeline(json.loads(file.read_text())["traceEvents"], path)


# -- from the example jobs ---------------------------------------------------------------------------------------------

JOBS = {  # ranks, program and arguments
    "brain": [(4, "brain/segment.py --mesh 2x2 --compare --resolution 3 --steps 40")],
    "mesh": [(2, "mesh/land.py --level 6 --resolution 270 --steps 40")],
    "vae": [(2, "vae/decode.py --rounds 1 --steps 80")],
    "wind": [(2, "wind/forecast.py --stop 60 --folder {0}"), (4, "wind/forecast.py --mesh 2x2 --resume --folder {0}")],
}


def job(name: str, path: Path) -> None:
    """The picture of a job, smaller than the job makes it."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / f"{name}.png"
        for ranks, command in JOBS[name]:
            program, *arguments = command.format(folder).split()
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            arguments = [*torchrun, str(EXAMPLES / program), *arguments, "--output", str(picture)]
            subprocess.run(arguments, check=True, timeout=1800)
        shrink(picture, path)


def shrink(picture: Path, path: Path) -> None:
    """Write a picture with fewer pixels and colors, until the file is small."""
    from PIL import Image

    with Image.open(picture) as opened:
        full = opened.convert("RGB")
    for width in (1200, 1000, 850, 700, 550):
        height = round(full.height * width / full.width)
        smaller = full.resize((width, height), Image.Resampling.LANCZOS) if width < full.width else full
        smaller.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < MOST:
            return


# -- the command -------------------------------------------------------------------------------------------------------

FIGURES: dict[str, Callable[[Path], None]] = {
    "memory": memory,
    "largest": largest,
    "scaling": scaling,
    "halo-steps": drawings.halo,
    "ring": drawings.ring,
    "fft": drawings.fft,
    "globe": picture_of_globe,
    "timeline": timeline,
    **{name: lambda path, name=name: job(name, path) for name in JOBS},  # type: ignore[misc]
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--folder", type=Path, default=IMAGES)
    options = parser.parse_args()
    for name in options.only:
        print(f"drawing {name}", file=sys.stderr, flush=True)
        FIGURES[name](options.folder / f"{name}.png")


if __name__ == "__main__":
    main()
