"""The command line: ``python -m endurance --write`` takes 10,000 steps and writes what grew, and what did not."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from shardtensor.testing import run_distributed

from .steps import Note, train

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "endurance.json"
SECONDS_PER_STEP = 2.0  # a run that takes longer hangs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m endurance", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500, help="steps between two notes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of cuts, slices and data")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} into benchmarks/results")
    options = parser.parse_args()
    arguments = options.steps, options.every, None, options.seed
    ranks = run_distributed(train, options.ranks, *arguments, timeout=options.steps * SECONDS_PER_STEP)
    print(table(ranks))
    if options.write:
        about = {"torch": torch.__version__, "ranks": options.ranks, "steps": options.steps, "seed": options.seed}
        lines = [json.dumps({"rank": rank, **asdict(note)}) for rank, notes in enumerate(ranks) for note in notes]
        RESULTS.write_text(json.dumps(about)[:-1] + ', "notes": [\n' + ",\n".join(lines) + "\n]}\n")


def table(ranks: list[list[Note]]) -> str:
    """Of all ranks the largest figure, in Markdown."""
    lines = [
        "| steps | ms per step | MiB resident | plans | entries of all caches | living tensors | drift |",
        "|---|---|---|---|---|---|---|",
    ]
    for notes in zip(*ranks, strict=True):
        lines.append(
            f"| {notes[0].step:,} | {max(n.seconds for n in notes) * 1e3:.1f} | {max(n.mib for n in notes):.1f} "
            f"| {max(n.caches['shardtensor.dispatch.planning._plans'] for n in notes):,} "
            f"| {max(sum(n.caches.values()) for n in notes):,} "
            f"| {max(n.tensors for n in notes)} | {max(n.drift for n in notes):.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
