"""Many programs, in processes that are replaced where one hangs."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field

from shardtensor.testing import run_distributed
from shardtensor.testing.failures import DistributedFailure

from .compare import KINDS, Outcome, Setup, compared, outcomes
from .compiled import compared_compiled
from .program import draw, indented

TOGETHER = 25  # programs of one call


@dataclass
class Report:
    """What has come of programs."""

    outcomes: list[Outcome] = field(default_factory=list)

    def counted(self) -> dict[str, int]:
        counts = Counter(outcome.kind for outcome in self.outcomes)
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    def bad(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.bad]

    def reasons(self) -> Counter[str]:
        """Why lines were refused."""
        reasons = [reason.split(": ", 1)[1] for outcome in self.outcomes for reason in outcome.refused]
        return Counter(reason.split(". Operands: ")[0] for reason in reasons)

    def told(self) -> str:
        return "\n".join(map(told, self.bad()))


def told(outcome: Outcome) -> str:
    return f"{outcome.kind}: seed {outcome.seed}: {outcome.detail}\n{indented(outcome.program)}"


def where(failure: str) -> str:
    """Where each rank was, and what others have found until then."""
    lines, left = [], 0
    for line in failure.split("\n"):
        left = 6 if line.startswith(("---", "Outcome(")) else left - 1
        if left > 0 and "/site-packages/" not in line:
            lines.append(line)
    return "\n".join(lines)


def run_programs(
    seeds: Iterable[int],
    mesh: tuple[int, ...],
    length: int | None = None,
    *,
    setup: Setup | None = None,
    compiled: bool = False,
    timeout: float = 120.0,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """The programs of the seeds on a mesh, or each compiled as one function. They hang where they take longer than
    ``timeout`` seconds, together, or half of it, alone."""
    report, left = Report(), list(seeds)
    compare = compared_compiled if compiled else compared
    while left:
        some, left = left[:TOGETHER], left[TOGETHER:]
        programs = {seed: draw(seed, mesh, length) for seed in some}
        try:
            with redirect_stdout(io.StringIO()):
                found = run_distributed(outcomes, math.prod(mesh), programs, mesh, compare, setup, timeout=timeout)[0]
        except DistributedFailure as failure:
            if len(some) > 1:  # which one is it?
                for seed in some:
                    again = run_programs(
                        [seed], mesh, length, setup=setup, compiled=compiled, timeout=timeout / 2, progress=progress
                    )
                    report.outcomes += again.outcomes
                continue
            found = [Outcome(some[0], "hang", where(str(failure)), program=programs[some[0]].listed())]
        for outcome in found:
            progress(outcome)
        report.outcomes += found
    return report
