"""The part of ``docs/operators-tested.md`` that a sweep writes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from .drive import Report
from .worker import Case

BEGIN = "<!-- The rest is written by `python -m operator_sweep --write`. -->"
# Operators that need all of a matrix, so that a single sharded one is refused: factorizations, inverses, solvers.
FACTORIZATION = re.compile(
    r"linalg\.(?!cross|diagonal|matrix_power|multi_dot|norm|tensor|vander|vecdot|vector_norm)|cholesky|cond|geqrf|"
    r"householder|inverse|ldl|logdet|lu|matrix_exp|ormqr|pca_lowrank|pinverse|qr|slogdet|svd|triangular_solve"
)
PAGE = Path(__file__).parents[2] / "docs" / "operators-tested.md"


def write(reports: Sequence[tuple[str, Report]], page: Path = PAGE) -> None:
    """Replace what stands behind the marker. ``reports``: (title, cases), the first of which gives the tables."""
    kept = page.read_text().split(BEGIN)[0].rstrip()
    page.write_text(f"{kept}\n\n{BEGIN}\n\n{render(reports)}")


def render(reports: Sequence[tuple[str, Report]]) -> str:
    """Markdown: the counts, and what is right, partly refused and refused."""
    lines = [
        "## Counts",
        "",
        "torch lists its operators with sample inputs. Every sample is sharded along every dim in turn, unevenly and "
        "once with an empty shard. The\nother operands are plain, replicated or sharded alike. Results and gradients "
        "are compared with those of one device.",
        "",
        "| sweep | cases | right | refused | wrong, hanging, or another error | right, without random operators | "
        "right, without factorizations and solvers either |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, report in reports:
        counted, bad = report.counted(), len(report.bad())
        share = report.share_right(lambda case: not case.random)
        others = report.share_right(lambda case: not case.random and not FACTORIZATION.match(case.operator))
        total = sum(counted.values())
        counts = f"{total} | {counted['right']} | {counted['refused']} | {bad}"
        lines.append(f"| {title} | {counts} | {share:.1%} | {others:.1%} |")
    cases = defaultdict(list)
    for case in reports[0][1].cases:
        cases[case.operator].append(case)
    right = sorted(name for name, found in cases.items() if _all(found, "right"))
    random = sorted(name for name in right if all(case.random for case in cases[name]))
    partly = sorted(name for name, found in cases.items() if not _all(found, "right") and not _all(found, "refused"))
    refused = sorted(name for name, found in cases.items() if _all(found, "refused"))
    lines += ["", f"### Right in every case ({len(right) - len(random)} operators)", ""]
    lines += [_names(name for name in right if name not in random)]
    lines += ["", f"### Random: layout, shape and dtype right in every case ({len(random)})", "", _names(random)]
    lines += ["", f"### Right or refused, depending on what is sharded ({len(partly)})", ""]
    lines += ["| operator | right | refused, because |", "|---|---|---|"]
    lines += [f"| `{name}` | {_share(cases[name])} | {_reasons(cases[name])} |" for name in partly]
    lines += ["", f"### Refused in every case ({len(refused)})", "", "| reason | operators |", "|---|---|"]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name in refused:
        by_reason[_reasons(cases[name])].append(name)
    lines += [f"| {reason} | {_names(names)} |" for reason, names in sorted(by_reason.items())]
    return "\n".join(lines) + "\n"


def _all(cases: list[Case], outcome: str) -> bool:
    return all(case.outcome == outcome for case in cases)


def _names(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)  # type: ignore[attr-defined]


def _share(cases: list[Case]) -> str:
    return f"{sum(case.outcome == 'right' for case in cases)} of {len(cases)}"


def _reasons(cases: list[Case]) -> str:
    """The most frequent reason, without the numbers of the case."""
    reasons = Counter(_general(case.detail) for case in cases if case.outcome == "refused")
    return reasons.most_common(1)[0][0] if reasons else ""


def _general(detail: str) -> str:
    """``op: tensor dim 0 of ...`` as ``tensor dim d of ...``."""
    reason = detail.split(": ", 1)[-1]
    reason = re.sub(r"\b(mesh dim|tensor dim|dim|operand) -?\d+", r"\1 d", reason)
    return re.sub(r"\(\d[\d, ]*\)|\[\d[\d, ]*\]", "(...)", reason).replace("|", "\\|")
