"""Run the cases of many operators on pools of processes, and add up how they ended."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardtensor.testing import DistributedFailure, run_distributed

from .worker import Case, Options, run_operator

# torch's samples of some operators, such as meshgrid, come in the order of a set: ranks with other hashes of texts
# would be given other arguments.
os.environ.setdefault("PYTHONHASHSEED", "0")

BAD = ("wrong", "foreign", "split", "hang", "format")


@dataclass
class Report:
    """All cases of a sweep."""

    cases: list[Case] = field(default_factory=list)

    def counted(self, keep: Callable[[Case], bool] = lambda case: True) -> Counter[str]:
        """How many cases ended in which way."""
        return Counter(case.outcome for case in self.cases if keep(case))

    def bad(self) -> list[Case]:
        """What is neither right nor refused."""
        return [case for case in self.cases if case.outcome in BAD]

    def share_right(self, keep: Callable[[Case], bool] = lambda case: True) -> float:
        """Right cases among those that ``keep`` accepts."""
        counted = self.counted(keep)
        return counted["right"] / max(1, sum(counted.values()))


def sweep(
    names: Iterable[str],
    ranks: int,
    options: Options,
    timeout: float = 3600.0,
    progress: Callable[[str, Report], None] = lambda name, report: None,
    refused_in: Report | None = None,
) -> Report:
    """Run every case of the operators ``names`` on ``ranks`` processes; hangs and disagreements cost that case only.

    With ``refused_in`` only those cases that were refused there, with the same options but outside ``allow_gather()``:
    what is not refused does not ask whether it may gather.
    ``progress`` is called with each operator's name and cases as soon as they are known.
    """
    report = Report()
    with tempfile.TemporaryDirectory(prefix="operator-sweep-") as folder:
        for name in names:
            if refused_in is not None:
                refused = [c for c in refused_in.cases if c.operator == name and c.outcome == "refused"]
                if not refused:
                    continue
                options = replace(options, only=frozenset((c.sample, c.cut) for c in refused))
            found = _operator(name, ranks, options, folder, timeout)
            progress(name, Report(found))
            report.cases += found
    return report


def _operator(name: str, ranks: int, options: Options, folder: str, timeout: float) -> list[Case]:
    """One operator's cases, up to the tenth that hangs: each of those costs half a minute."""
    cases: list[Case] = []
    skip = 0
    while sum(case.outcome == "hang" for case in cases) < 10:
        for path in Path(folder).iterdir():
            path.unlink()
        started = time.monotonic_ns()
        try:
            found = run_distributed(run_operator, ranks, name, options, folder, skip, started, timeout=timeout)
            return cases + [_told(of_one_case) for of_one_case in zip(*found)]
        except DistributedFailure as failure:
            seen, skip, split = _from_log(Path(folder) / "log-0", skip)
            cases += seen
            if not split:  # the case behind the last one that ended
                skip += 1
                cases.append(Case(name, -1, f"case {skip}", "hang", str(failure)[:2000], False))
    return cases


def _told(of_one_case: Sequence[Case]) -> Case:
    """What a case's ranks say: they agree on how it ended, but not each may know why."""
    return next((case for case in of_one_case if case.detail), of_one_case[0])


def _from_log(path: Path, skip: int) -> tuple[list[Case], int, bool]:
    """The cases that a log holds, the number of the last one, and whether it was a disagreement."""
    cases = []
    for line in path.read_text().splitlines() if path.exists() else []:
        number, name, sample, cut, outcome, detail, random = line.split("\t")
        cases.append(Case(name, int(sample), cut, outcome, detail, random == "True"))
        skip = int(number)
    return cases, skip, bool(cases) and cases[-1].outcome == "split"
