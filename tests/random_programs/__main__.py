"""The command line of the random programs; see ``--help``."""

from __future__ import annotations

import argparse

from .compare import Outcome
from .drive import run_programs, told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m random_programs", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mesh", help="2x2: a mesh of two dims, instead of --ranks")
    parser.add_argument("--seeds", default="0:100", help="first:last, the last one left out, or one seed")
    parser.add_argument("--length", type=int, help="lines of a program (default: drawn)")
    parser.add_argument("--compiled", action="store_true", help="each program by torch.compile, as one function")
    parser.add_argument("--also", nargs="*", default=[], metavar="KIND", help="list outcomes of these kinds, too")
    options = parser.parse_args()
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    mesh = tuple(map(int, options.mesh.split("x"))) if options.mesh else (options.ranks,)

    def show(outcome: Outcome) -> None:
        if outcome.bad or outcome.kind in options.also:
            print(told(outcome), flush=True)

    timeout = 600.0 if options.compiled else 120.0
    report = run_programs(seeds, mesh, options.length, compiled=options.compiled, timeout=timeout, progress=show)
    for reason, count in report.reasons().most_common():
        print(f"  refused {count} x: {reason}")
    print(f"{len(seeds)} programs on {mesh}: {report.counted()}")


if __name__ == "__main__":
    main()
