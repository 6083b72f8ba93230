"""How much of the work of the networks of these modules two ranks share: ``python -m networks.shares``, in ``tests``.

Every network is previewed on two ranks, and those above the bars at larger sizes, too. Of each: how much the busiest
rank computes and keeps for the backward pass, divided by its part of what one process does (``excess`` of
``shardtensor.explain``).
Programs with fewer than three products are left out: measures of images, an operation behind a convolution.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import shardtensor
from networks.oracle import Called, Network, built, default_dtype, seed

FOLDER = Path(__file__).parents[2]
RESULTS = FOLDER / "benchmarks" / "results" / "shares.json"
PAGE = FOLDER / "docs" / "performance.md"
MARKS = "<!-- begin: written by make shares -->", "<!-- end: shares -->"
ENOUGH = 8  # rows of each shard, of the coarsest map
PRODUCTS = 3  # of a network, at least
LONGEST = 256  # times the size in the tests
STEP = 8  # times the last size, of what is above the bars
BARS = {"work": 1.15, "kept": 1.2}
SECONDS = 120  # of this process's own time, for each preview
# Why a network is above the bars at any size, and what its user can do about it.
REASONS = {
    "kornia TFeat in rows": "Patches have 32 rows, and most rows are halos. Shard the batch of patches: 1.00.",
    "kornia spatial transformer": "Every rank computes the complete grid of `grid_sample`. Shard the batch: 1.14.",
    "lightly WMSELoss": "Every rank whitens all of the few features. In a larger network, this work is small.",
    "monai SegResNetVAE": "Every rank decodes the complete latent vector. Shard the batch: 1.00.",
    "monai VarAutoEncoder": "Every rank decodes the complete latent vector. Shard the batch: 1.00.",
    "sequences mambapy, both directions, sequential": "Every rank scans all tokens, one by one. "
    "Use the network's parallel scan: 1.04.",
    "sequences siren_pytorch, latent": "The network makes plain coordinates, so every rank computes the image. "
    "Shard the coordinates.",
    "torch_geometric HGTConv": "A slice of stacked nodes leaves one node type to one rank. "
    "Redistribute this slice, as `--share` says.",
    "transformers Mamba": "Without Mamba's CUDA kernels, every rank scans all tokens, one by one. Install the kernels.",
}


@dataclass(frozen=True)
class Row:
    """One network.

    Attributes:
        name: the module of tests and the network's name there.
        shape, dim: of the input, which is cut in halves along ``dim``.
        work, kept: as in :class:`Excess`; None where they are not counted.
        why: of a count above the bars, where repeated work begins; or why nothing is counted.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    work: float | None = None
    kept: float | None = None
    why: str = ""


def listed() -> list[str]:
    """The modules that list networks."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    return [file.stem for file in files if re.search(r"^NETWORKS\b", file.read_text(), re.MULTILINE)]


def rows_of(module: str, only: str = "", missing: bool = False) -> list[Row]:
    """Of the networks of a module whose name contains ``only``; all other rows are as stored.

    ``missing``: only those that have no row, or one above the bars. Rows are stored one by one, each with an excuse in
    place of its counts first: a network with which the process dies is left out of the next call with ``missing``.
    """
    try:
        tests = importlib.import_module(f"networks.{module}")
        package = importlib.import_module(getattr(tests, "PACKAGE", "torch"))
    except pytest.skip.Exception as skipped:
        return [Row(module, (), 0, why=str(skipped))]
    before = {row.name: row for row in stored().get(module, ())}
    result = {}
    for key, given in tests.NETWORKS.items():
        name = f"{module.removeprefix('test_')} {key}"
        network = tests.previewed(given) if hasattr(tests, "previewed") else given
        if isinstance(network, Network):
            network = replace(network, **network.at_use)
        if not isinstance(network, Network) or only.lower() not in f"{module} {key}".lower():
            continue
        known = before.get(name)
        if missing and known is not None and not is_high(known.work, known.kept):
            result[name] = known
            continue
        if not only:
            excuse = Row(name, network.shape, network.dim, why="the process ended")
            store({**stored(), module: [*result.values(), excuse, *_after(before, result, name)]})
        row = result[name] = counted(name, network, package)
        print(row.name, row.shape, row.work, row.kept, row.why.splitlines()[:1], flush=True)
    return list(result.values())


def _after(before: dict[str, Row], result: dict[str, Row], name: str) -> list[Row]:
    return [row for each, row in before.items() if each not in result and each != name]


def counted(name: str, network: Network, package: Any) -> Row:
    """At the size in the tests, or at a larger one, at which no shard of a map is short.

    What is above the bars there is counted at larger sizes, too, and the least count is the network's. The sharded dim
    grows, then this and those behind it, then the batch: some networks take one size of images, and any batch.
    """
    row, shortest = count(name, network, package, network.shape)
    for dims in dict.fromkeys(((network.dim,), tuple(range(network.dim, len(network.shape))), (0,))):
        shape = row.shape
        while row.work is not None and (is_high(row.work, row.kept) or (shortest < ENOUGH and dims != (0,))):
            times = -(-ENOUGH // max(1, shortest)) if shortest < ENOUGH else STEP
            shape = tuple(size * max(2, times) if dim in dims else size for dim, size in enumerate(shape))
            if any(size > LONGEST * least for size, least in zip(shape, network.shape)):
                break
            larger, short = count(name, network, package, shape)
            if larger.work is None:
                break
            if shortest < ENOUGH or worst(larger) < worst(row):
                row, shortest = larger, short
    return row


def count(name: str, network: Network, package: Any, shape: tuple[int, ...]) -> tuple[Row, int]:
    """The counts at one size, and the shortest shard of a map there."""
    row = Row(name, network.shape, network.dim)
    try:
        with limited(SECONDS):
            found = preview(network, package, shape)
    except (Exception, pytest.skip.Exception, TooLong) as error:  # it takes no other size, or reads values
        return replace(row, why=f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]), ENOUGH
    if found.refused or found.stopped or found.excess is None:
        reason = found.stopped or next((layer.refused for layer in found.refused), "it has nothing to compare with")
        return replace(row, why=reason.splitlines()[0]), ENOUGH
    if sum(bool(layer.whole and sum(layer.whole.flops)) for layer in found.layers) < PRODUCTS:
        return replace(row, why="too few products for a network"), ENOUGH
    work, kept = (round(each, 2) for each in found.excess)
    kept = kept if found.differentiated else None
    why = found.share() if is_high(work, kept) else ""
    return Row(name, tuple(shape), network.dim, work, kept, why), least(found)


def worst(row: Row) -> float:
    return max(row.work or 0, row.kept or 0)


def preview(network: Network, package: Any, shape: Sequence[int]) -> shardtensor.Explanation:
    with default_dtype(network.default):
        model = Called(network, built(network.make, package, network.dtype, network.norms_train, network.train))
        like = network.draw(network.shape)
        dtype = network.dtype if like.is_floating_point() else like.dtype
        graded = dtype.is_floating_point and network.backward
        x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=graded)
        seed()
        options = {"mesh": 2, "shard": network.dim, "backward": network.backward}
        return shardtensor.explain(model, x, **options, values=network.values)


def least(found: shardtensor.Explanation) -> int:
    """The shortest shard of a convolution's or a pool's result."""
    sizes = [
        int(size)
        for layer in found.layers
        if "conv" in layer.operator or "pool" in layer.operator
        for each in re.findall(r"S\(\d+\)\[([\d, ]+)\]", layer.layout)
        for size in each.split(",")
    ]
    return min(sizes, default=ENOUGH)


def is_high(work: float | None, kept: float | None) -> bool:
    return (work or 0) > BARS["work"] or (kept or 0) > BARS["kept"]


class TooLong(BaseException):
    """Not for a preview to catch."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise :class:`TooLong` after so many seconds of computing, however busy the machine is."""

    def late(*_: Any) -> None:
        raise TooLong(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- results -----------------------------------------------------------------------------------------------------------


def stored() -> dict[str, list[Row]]:
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {module: [Row(**row) for row in rows] for module, rows in content.items()}


def store(results: dict[str, list[Row]]) -> None:
    modules = []
    for module in sorted(results):
        rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in results[module])
        modules.append(f" {json.dumps(module)}: [\n{rows}\n ]")
    RESULTS.write_text("{\n" + ",\n".join(modules) + "\n}\n")


def spread(values: list[float]) -> str:
    """Cells of a table: how many there are and are at most 1.1, the median, the ninetieth percentile and the worst."""
    values = sorted(values)
    few = sum(value <= 1.1 for value in values)
    ninetieth = values[max(0, -(-9 * len(values) // 10) - 1)]
    return f"{len(values)} | {few} | {median(values):.2f} | {ninetieth:.2f} | {values[-1]:.2f}"


def section(results: dict[str, list[Row]]) -> str:
    """What the page says of all networks that are counted."""
    rows = [row for module in sorted(results) for row in results[module]]
    work, kept = ([each for row in rows if (each := getattr(row, what)) is not None] for what in BARS)
    if not work or not kept:
        return "Not counted yet."
    lines = [
        "| of two ranks | networks | at most 1.1 | median | ninetieth percentile | worst |",
        "|---|--:|--:|--:|--:|--:|",
        f"| work | {spread(work)} |",
        f"| kept for backward | {spread(kept)} |",
        "",
        f"This table lists the networks with more than {BARS['work']} for work or more than {BARS['kept']} for memory.",
        "The column *from* names the operator from which every rank does the same work, or the module that is furthest",
        "from its part. A number in the last column is the larger ratio after the change:",
        "",
        "| network | input, sharded dim | work | kept | from | why |",
        "|---|---|--:|--:|---|---|",
    ]
    for row in sorted(rows, key=lambda row: -worst(row)):
        if is_high(row.work, row.kept):
            counts = " | ".join("" if each is None else f"{each:.2f}" for each in (row.work, row.kept))
            cells = row.name, f"{'x'.join(map(str, row.shape))}, {row.dim}", counts, reason(row.why)
            lines.append(f"| {' | '.join(cells)} | {REASONS.get(row.name, '')} |")
    return "\n".join(lines)


def reason(share: str) -> str:
    """The operator from which every rank does the same, or the module furthest from its part."""
    if found := re.search(r"(\d+%) of the work is done on every rank alike, from (.*) on\.", share):
        return f"`{found[2]}`, {found[1]} of the work"
    modules = re.findall(r"^    (\S+): work ([\d.]+), kept memory ([\d.]+)$", share, re.MULTILINE)
    return f"`{max(modules, key=lambda each: max(map(float, each[1:])))[0]}`" if modules else "everywhere a little"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="only these, such as timm; the others' rows stay")
    parser.add_argument("--only", default="", help="networks whose name contains this; writes nothing")
    parser.add_argument("--missing", action="store_true", help="networks without a row, or above the bars; others stay")
    parser.add_argument("--page", action="store_true", help="counts nothing, and writes docs/performance.md anew")
    options = parser.parse_args()
    chosen = [module for module in listed() if module.removeprefix("test_") in options.modules or not options.modules]
    for module in () if options.page else chosen:
        rows = rows_of(module, options.only, options.missing)
        if not options.only and rows:
            store({**stored(), module: rows})
    print(section(stored()))
    if not options.only:
        page = PAGE.read_text()
        before, rest = page.split(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{section(stored())}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
