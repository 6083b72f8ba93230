"""The command line of the sweep; see ``--help``."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from dataclasses import replace

from device import on

from .cases import DTYPES, HALF, operator_names
from .drive import Report, sweep
from .half import DATA
from .memory import MEMORY
from .table import write
from .transforms import POLICIES, TRANSFORMS
from .worker import Case, Options


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m operator_sweep", description=__doc__)
    parser.add_argument("operators", nargs="*", default=[""], help="names start with one of these (default: all)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES, *HALF], default=list(DTYPES))
    parser.add_argument("--data", choices=DATA, default=DATA[0], help="of half precision, see half.py")
    parser.add_argument("--autocast", choices=list(HALF), help="inside torch.autocast to this dtype")
    parser.add_argument("--kind", choices=("function", "forward", "in place"), default="function")
    parser.add_argument("--gather", action="store_true", help="inside allow_gather()")
    parser.add_argument("--refused-in", metavar="FILE", help="only the cases that were refused in what --json wrote")
    parser.add_argument("--limit", type=int, default=10**9, help="samples of each operator")
    parser.add_argument("--formats", nargs="*", choices=MEMORY, help="samples in other memory (default: in all)")
    parser.add_argument("--entries", action="store_true", help="the first operands are entries of a sharded dim")
    parser.add_argument("--together", action="store_true", help="all operands are sharded along the same dim")
    parser.add_argument("--transform", choices=TRANSFORMS, help="inside a transform of torch.func")
    parser.add_argument("--checkpoint", choices=POLICIES, help="inside selective checkpointing that keeps this")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th operator from the i-th on, to run in parallel")
    parser.add_argument("--json", help="write all cases to this file")
    parser.add_argument("--write", action="store_true", help="renew docs/operators-tested.md; takes hours")
    parser.add_argument("--tables-of", nargs="+", metavar="TITLE=FILE", help="renew it from what --json wrote earlier")
    parser.add_argument("--refused", action="store_true", help="print the refused cases too, one line a reason")
    parser.add_argument("--device", choices=["cpu", "emulated", "cuda"], default="cpu", help="what ranks compute on")
    options = parser.parse_args()
    if options.tables_of:
        write([(title, load(path)) for title, path in (item.split("=", 1) for item in options.tables_of)])
        return
    index, parts = map(int, options.part.split("/"))
    names = operator_names(tuple(options.operators))[index::parts]
    report, refused_in = Report(), load(options.refused_in) if options.refused_in else None
    formats = [None] if options.formats is None else options.formats or MEMORY
    for ranks, dtype, memory in itertools.product(options.ranks, options.dtypes, formats):
        start = time.monotonic()
        wanted = Options(dtype, options.kind, options.gather, options.limit, memory=memory, data=options.data)
        wanted = replace(wanted, entries=options.entries, together=options.together, autocast=options.autocast)
        wanted = replace(wanted, transform=options.transform, checkpoint=options.checkpoint)
        with on(options.device):
            swept = sweep(names, ranks, wanted, progress=show, refused_in=refused_in)
        report.cases += swept.cases
        seconds = time.monotonic() - start
        title = f"{ranks} ranks, {dtype}" + (f", {memory}" if memory else "")
        print(f"{title}: {dict(swept.counted())}, {seconds:.0f} s", flush=True)
    if options.refused:
        reasons = Counter((c.operator, c.detail) for c in report.cases if c.outcome == "refused")
        for (operator, reason), count in reasons.most_common():
            print(f"  refused {count} x: {operator}: {reason}")
    print(f"{report.share_right(lambda case: not case.random):.1%} of the cases without random numbers are right")
    if options.write:
        ranks, dtypes = " and ".join(map(str, options.ranks)), ", ".join(options.dtypes)
        write([(f"{ranks} ranks, {dtypes}", report)])
    if options.json:
        with open(options.json, "w") as file:
            json.dump([vars(case) for case in report.cases], file)


def show(name: str, report: Report) -> None:
    """What is wrong with an operator, as soon as it is known."""
    for case in report.bad():
        print(f"  {case.outcome}: {name} #{case.sample}, {case.cut}: {case.detail}", flush=True)


def load(path: str) -> Report:
    """What ``--json`` wrote."""
    with open(path) as file:
        return Report([Case(**case) for case in json.load(file)])


if __name__ == "__main__":
    main()
