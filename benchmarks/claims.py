"""The figures of the README, each with where it comes from. A test finds each of them in the README.

    python benchmarks/claims.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAMED = 12  # packages of the README's table; the others are counted together
FASTER = ": times as fast as one process"

Claim = tuple[str, str]  # what the README says, and the source


def stored(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def memory() -> Iterator[Claim]:
    """Rows of a table: what each of 1, 2, 4 and 8 ranks holds in a training step."""
    by_case: dict[str, dict[int, float]] = {}
    for row in stored("figures.json")["capacity"]["figures"]:
        if row["group"].startswith("memory of a rank"):
            name = row["name"].rpartition(":")[0]
            by_case.setdefault(name, {})[row["details"]["ranks"]] = row["value"]
    for name, values in by_case.items():
        cells = " | ".join(f"{values[ranks]:.1f}" for ranks in (1, 2, 4, 8))
        kind, _, network = name.partition(", ")
        yield f"| {kind}: {network} | {cells} |", "figures.json, capacity"


def operators() -> Iterator[Claim]:
    """What the sweep over torch's samples gave on 2 and on 3 ranks."""
    page = next(page for page in (ROOT / "docs").glob("*.md") if "| 3 ranks, float32 | " in page.read_text())
    for ranks in (2, 3):
        found = re.search(rf"^\| {ranks} ranks, float32 \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page.read_text(), re.M)
        assert found is not None
        cases, right, refused, wrong = map(int, found.groups())
        of = f"{cases:,} | {right / cases:.1%} | {refused / cases:.1%} | {wrong}"
        yield f"| {ranks} ranks | {of} |", f"docs/{page.name}, written by python -m operator_sweep"


def times() -> Iterator[Claim]:
    """The range over the networks that are timed."""
    rows = {row["name"]: row["value"] for row in stored("figures.json")["networks"]["figures"] if row["value"]}
    for end in ("", ", twice the input"):
        values = [value for name, value in rows.items() if name.endswith(FASTER + end)]
        yield f"{min(values):.2f} to {max(values):.2f} times", f"figures.json, networks{end}"


def networks() -> Iterator[Claim]:
    counts: dict[str, int] = stored("networks.json")["networks"]
    packages = list(counts)
    total = f"{sum(counts.values()):,} networks, losses and tools of {len(counts)} packages"
    yield total, "networks.json"
    for package in packages[:NAMED]:
        yield f"{package} {counts[package]}", "networks.json"
    rest = packages[NAMED:]
    yield f"{len(rest)} others {sum(counts[package] for package in rest)}", "networks.json"


def claims() -> Sequence[Claim]:
    return [*memory(), *operators(), *times(), *networks()]


def main() -> None:
    for claim, source in claims():
        print(f"{claim}\n    {source}")


if __name__ == "__main__":
    main()
