"""What a distributed call reports when it fails."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class RemoteError(Exception):
    """Replaces an exception of a worker that cannot be pickled. Its text starts with the type of that exception."""


class DistributedFailure(AssertionError):
    """At least one rank raised, hung or died. The text holds each failing rank's traceback or stack.

    Attributes:
        errors: the exception of each rank that raised, by rank.
        hung: ranks that did not return in time.
        dead: the exit code of each rank whose process ended, by rank.
    """

    def __init__(
        self,
        text: str,
        errors: Mapping[int, BaseException] | None = None,
        hung: Iterable[int] = (),
        dead: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(text)
        self.errors = dict(errors or {})
        self.hung = tuple(hung)
        self.dead = dict(dead or {})

    def __reduce__(self) -> Any:
        # Without the errors, which may not be picklable; the text has their tracebacks.
        return type(self), (str(self), {}, self.hung, self.dead)


@dataclass
class Outcome:
    """How one rank's part of a call ended, and what it printed in the meantime."""

    kind: str = "running"  # "returned", "raised", "dead" or "running"
    value: object = None  # the pickled result, the description of the exception, or the exit code
    printed: str = ""
    stack: str = ""
    error: BaseException | None = field(default=None, repr=False)

    def exception(self) -> BaseException | None:
        """The exception that this rank raised, with the worker's traceback as ``remote_traceback``."""
        if self.kind != "raised":
            return None
        if self.error is None:
            about = self.value
            assert isinstance(about, dict)
            try:
                self.error = pickle.loads(about["pickled"])
            except Exception:  # not picklable there, or its class cannot be imported here
                self.error = RemoteError(f"{about['type']}: {about['text']}")
            self.error.remote_traceback = about["traceback"]  # type: ignore[union-attr]
        return self.error


def failure(name: str, outcomes: list[Outcome], waited: float) -> DistributedFailure:
    """The exception for ``outcomes``, of which at least one is not a normal return."""
    sections: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.kind == "raised":
            assert isinstance(outcome.value, dict)
            head, body = "raised", outcome.value["traceback"]
        elif outcome.kind == "dead":
            head, body = f"died ({_exit_text(outcome.value)})", outcome.stack
        elif outcome.kind == "running":
            head, body = f"did not return within {waited:.3g} s; it was at", outcome.stack
        else:
            continue
        if outcome.printed.strip():
            body = f"{body.rstrip()}\nprinted:\n{outcome.printed}"
        sections.setdefault((head, body), []).append(rank)

    failing = sum(map(len, sections.values()))
    lines = [f"{failing} of {len(outcomes)} ranks failed in {name}"]
    for (head, body), ranks in sections.items():
        lines += [f"--- {_ranks_text(ranks)} {head}", body.rstrip()]
    returned = [rank for rank, outcome in enumerate(outcomes) if outcome.kind == "returned"]
    if returned:
        lines.append(f"--- {_ranks_text(returned)} returned")
    return DistributedFailure(
        "\n".join(lines),
        {rank: error for rank, outcome in enumerate(outcomes) if (error := outcome.exception())},
        [rank for rank, outcome in enumerate(outcomes) if outcome.kind == "running"],
        {rank: outcome.value for rank, outcome in enumerate(outcomes) if isinstance(outcome.value, int)},
    )


def own_threads(stacks: str) -> str:
    """Remove the irrelevant parts of faulthandler's dump: the thread that listens to the parent, the extension modules.

    >>> print(own_threads('Thread 0x1:\\n  File "_worker.py", line 30 in listen\\n\\nThread 0x2:\\n  File "a.py"\\n'))
    Thread 0x2:
      File "a.py"
    """
    noise = re.compile(r'_worker\.py", line \d+ in listen$|\AExtension modules: ', re.MULTILINE)
    return "\n\n".join(block for block in stacks.split("\n\n") if not noise.search(block)).strip()


def _ranks_text(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _exit_text(code: object) -> str:
    return f"killed by signal {-code}" if isinstance(code, int) and code < 0 else f"exit code {code}"
