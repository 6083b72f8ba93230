"""All benchmarks, one after the other: a table of figures next to their bars, a JSON file, and plots.

    python benchmarks                        all parts; writes benchmarks/results (about 30 minutes on 2 idle cores)
    python benchmarks --only networks scale  these parts; the others' figures stay as they were
    python benchmarks --quick                a few rounds of everything, to see that it runs; writes nothing
    python benchmarks --only --write         runs nothing; brings the pages in docs up to date with the results

Each part is a script of its own, with further options: ``python benchmarks/bench_networks.py --help``. A missed bar is
no error; a part that fails is, after the others have run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import EXPECTED, FASTER, TIMES, Figure, amount, by_group, markdown, read, seconds, table

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
DOCS = FOLDER.parent / "docs"
MARKS = "<!-- begin: written by python benchmarks --write -->", "<!-- end -->"
PARTS = (
    *("house", "host", "kernels", "half", "messages", "overhead", "operators", "networks", "compile", "memory"),
    *("graphs", "flex", "scale", "neighbors", "autoencoders", "capacity"),
)
ON_DEVICES = ("host", "operators", "networks", "compile")  # the others measure the host and its memory


def run(part: str, quick: bool, device: str) -> dict[str, Any] | None:
    """What the part's script wrote, with how long it took; None if it failed."""
    print(f"== {part}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file, start = Path(folder) / "figures.json", time.perf_counter()
        command = [sys.executable, FOLDER / f"bench_{part}.py", "--json", file, *(["--quick"] if quick else [])]
        command += ["--device", device]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            return None
        content: dict[str, Any] = json.loads(file.read_text())
    return content | {"seconds": round(time.perf_counter() - start)}


def figures_of(parts: dict[str, Any]) -> list[Figure]:
    return [figure for part in PARTS if part in parts for figure in read(parts[part])]


def circumstances(parts: dict[str, Any]) -> list[str]:
    """When and on what each part ran; parts that have this in common share a line."""
    lines: dict[str, list[str]] = {}
    for part in (part for part in PARTS if part in parts):
        a = parts[part]["about"]
        machine = f"{a['cpu']}, {a['cores']} cores" + ("" if a["device"] == "cpu" else f", {a['device']}")
        software = f"torch {a['torch']} and Python {a['python']}"
        line = f"These figures were measured on {a['date'][:10]}, with {software} on {machine}"
        lines.setdefault(line, []).append(f"{parts[part]['seconds']} s (`{part}`)")
    ran = "They come from these benchmarks, which ran for"
    return [f"{line}. {ran} {', '.join(names)}." for line, names in lines.items()]


def section(parts: dict[str, Any], plots: dict[str, list[str]]) -> str:
    """What this command writes into docs/benchmarks.md: all figures, next to their bars."""
    figures = figures_of(parts)
    if not figures:
        return "Not measured yet."
    verdicts = [figure.verdict for figure in figures if figure.verdict]
    ran = "\n".join(f"- {line}" for line in circumstances(parts))
    blocks = [f"{verdicts.count('met')} of {len(verdicts)} bars are met.", ran]
    for group, rows in by_group(figures).items():
        images = [f"![{group}](../benchmarks/results/{file})" for file in plots.get(group, ())]
        blocks.append("\n\n".join([markdown(rows), *images]))
    return "\n\n".join(blocks)


def expectations(parts: dict[str, Any], plots: dict[str, list[str]]) -> str:
    """What it writes into docs/performance.md: what users should expect of whole networks."""
    measured = {part: parts[part] for part in ("networks", "memory") if part in parts}
    rows = {row.name: row for row in figures_of(measured)}
    lines = ["| network | one process | two ranks | times as fast | with twice the input | memory, relative |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, times in rows.items():
        network, found, _ = name.partition(TIMES)
        if found and times.value is not None:
            ratios = (FASTER, f"{FASTER}, twice the input", ": tensors, of one process's")
            values = [amount(rows[network + end].value, "x") if network + end in rows else "" for end in ratios]
            lines.append(f"| {' | '.join([network, *(seconds(times.best[k]) for k in ('one', 'two')), *values])} |")
    if len(lines) == 2:
        return "Not measured yet."
    images = [f"![{EXPECTED}](../benchmarks/results/{file})" for file in plots.get(EXPECTED, ())]
    return "\n\n".join(["\n".join(lines), *images, *circumstances(measured)])


PAGES = {"performance.md": expectations, "benchmarks.md": section}


def with_section(page: str, text: str) -> str:
    """The page with ``text`` between its marks."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def stored(folder: Path) -> dict[str, Any]:
    file = folder / "figures.json"
    parts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return parts


def store(folder: Path, parts: dict[str, Any]) -> None:
    from plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    plots = draw(figures_of(parts), folder)
    content = {**{part: parts[part] for part in PARTS if part in parts}, "plots": plots}
    (folder / "figures.json").write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="these parts; none if none is named")
    said = f"what ranks compute on; with cuda 2 GPUs, and the parts {', '.join(ON_DEVICES)} only"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=said)
    parser.add_argument("--quick", action="store_true", help="a few rounds; the figures mean nothing")
    parser.add_argument("--results", type=Path, help=f"folder for JSON and plots; default: {RESULTS.name}, or none")
    parser.add_argument("--write", action="store_true", help=f"write the results into docs: {', '.join(PAGES)}")
    options = parser.parse_args(arguments)
    if options.device != "cpu":
        options.only = [part for part in options.only if part in ON_DEVICES]
    folder = options.results or (None if options.quick or options.device != "cpu" else RESULTS)
    parts, failed = stored(folder) if folder else {}, []
    for part in options.only:
        content = run(part, options.quick, options.device)
        if content is None:
            failed.append(part)
        else:
            parts[part] = content
    print(table(figures_of(parts)), *circumstances(parts), sep="\n")
    if folder and parts:
        store(folder, parts)
    if options.write:
        done = stored(folder or RESULTS)
        for name, written in PAGES.items():
            page = DOCS / name
            page.write_text(with_section(page.read_text(), written(done, done.get("plots", {}))))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
