"""Which tests a run takes: tests run by turns, each in one of several parts, and a run of the suite has one part.

The part follows from the commit, so that a run repeats on another machine, and all parts have run after some commits.
A test's part follows from its name. ``--part 3`` chooses a part, ``--part all`` takes all of them; a run that names
files or has ``-k``, and one with ``--device`` or ``--process-group``, takes all that it selects. Whatever the part is,
a run has what is marked ``every_run``, and a test of each module: where none is in the part, they take turns.

``--slice 2/8`` takes the second eighth of what is selected otherwise, to run everything in pieces.
"""

from __future__ import annotations

import subprocess
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

PARTS = 16


def add_options(parser):
    told = f"which part of the tests: 0 to {PARTS - 1}, or all; otherwise the commit decides"
    parser.addoption("--part", choices=[*map(str, range(PARTS)), "all"], help=told)
    parser.addoption("--slice", metavar="I/N", help="the I-th of N pieces of what is selected")


def chosen(config) -> int | None:
    """The part of this run; None for all."""
    given = config.getoption("--part")
    if given is not None:
        return None if given == "all" else int(given)
    whole_suite = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.getoption("keyword")
    usual = config.getoption("device") == "cpu" and not config.getoption("process_group")
    return drawn(config.rootpath) if whole_suite and usual else None


def drawn(root: Path) -> int:
    """The part that the commit has; 0 outside of a clone."""
    call = ["git", "-C", str(root), "rev-list", "--count", "HEAD"]
    found = subprocess.run(call, capture_output=True, text=True, check=False)
    return int(found.stdout or 0) % PARTS


def told(config) -> str:
    """What the header of a run says of it."""
    part = chosen(config)
    if part is None:
        return "parts: all"
    return f"parts: {part} of 0 to {PARTS - 1} (--part {part} repeats this run, --part all has all tests)"


def select(config, items) -> None:
    """Deselect what is not in this run's part, and not in its slice."""
    part, left, kept = chosen(config), [], []
    piece, pieces = map(int, (config.getoption("--slice") or "0/1").split("/"))
    taken = set(items) if part is None else of_part(items, part)
    for item in items:
        # By other digits than the part, so that each part has tests in all slices.
        in_slice = number_of(item.nodeid) // PARTS % pieces == piece % pieces
        (kept if item in taken and in_slice else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def of_part(items, part: int) -> set:
    """The tests of a part."""
    modules = defaultdict(list)
    for item in items:
        modules[item.path].append(item)
    taken = set()
    for tests in modules.values():
        chosen = [t for t in tests if t.get_closest_marker("every_run") or number_of(t.nodeid) % PARTS == part]
        taken.update(chosen or [tests[part % len(tests)]])
    return taken


def number_of(nodeid: str) -> int:
    """A number that is the same in each run; its last digits have nothing to do with the order of tests."""
    return zlib.crc32(nodeid.encode()) >> 8
