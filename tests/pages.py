"""The pages of the documentation, and how the code in them is run.

Each ``python`` block of a page runs as it is printed, in the page's order, in one namespace per page, on several ranks.
A ``text`` block directly after it shows what rank 0 prints, or the error that it gets; ``...`` in it matches any text.
Comments in a page, which readers do not see, say what else there is to know:

- ``<!-- ranks: 4 -->``: on how many ranks the page's blocks run; 2 by default, 0 for a process without a process group.
- ``<!-- needs: zarr, torch>=2.13 -->`` before a block: it is left out where one of these is not installed.

A ``diff`` block is a program, too: the one that it leads to.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?P<indent> *)```(?P<language>\S*)\s*$")
COMMENT = re.compile(r"<!-- (ranks|needs): (.*?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and text, the line of its first line, and what it needs to be installed."""

    language: str
    text: str
    line: int
    needs: tuple[str, ...] = ()
    follows: bool = False  # directly after another block, with nothing but blank lines between them

    @property
    def can_run(self) -> bool:
        return self.language in ("python", "diff") and all(map(installed, self.needs))

    @property
    def program(self) -> str:
        """What is run of it; of a diff the new lines, and in the place of each old one an empty line."""
        if self.language != "diff":
            return self.text
        return "".join("\n" if line[0] == "-" else line[1:] or "\n" for line in self.text.splitlines(keepends=True))


def installed(requirement: str) -> bool:
    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


@dataclass(frozen=True)
class Page:
    """A Markdown file, by its path from the repository's root."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def ranks(self) -> int:
        return next((int(value) for what, value in COMMENT.findall(self.text) if what == "ranks"), 2)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(fenced(self.text))

    @cached_property
    def programs(self) -> tuple[tuple[Block, str | None], ...]:
        """The blocks that run, each with what it shows."""
        after = (*self.blocks[1:], None)
        return tuple(
            (block, then.text if then and then.follows and then.language == "text" else None)
            for block, then in zip(self.blocks, after)
            if block.can_run
        )

    @cached_property
    def prose(self) -> str:
        """The text outside of blocks."""
        return re.sub(r"^ *```.*?^ *```$", "", self.text, flags=re.M | re.S)


def pages() -> list[Page]:
    """All pages: of docs, of the root, and of the examples."""
    found = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md")]
    return [Page(str(path.relative_to(ROOT))) for path in sorted(found)]


def fenced(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    i, needs, follows = 0, (), False
    while i < len(lines):
        opened = FENCE.match(lines[i])
        if opened is None:
            if comment := COMMENT.match(lines[i]):
                needs = tuple(comment[2].split(", ")) if comment[1] == "needs" else needs
            elif lines[i].strip():
                needs, follows = (), False
            i += 1
            continue
        indent, start = opened["indent"], i + 1
        end = next(j for j in range(start, len(lines)) if lines[j] == f"{indent}```")
        body = "".join(line.removeprefix(indent) + "\n" for line in lines[start:end])
        yield Block(opened["language"], body, start + 1, needs, follows)
        i, needs, follows = end + 1, (), True


# -- running them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What became of a page's blocks on this rank.

    Attributes:
        names: what they defined.
        outcomes: for each block what it printed, and the error that it ended with.
        registered: the handlers that they registered, which are removed again when the page has been run: other tests
            in this process read the table.
    """

    names: dict[str, Any]
    outcomes: tuple[tuple[str, str | None], ...]
    registered: dict[Any, Callable[..., Any]]


_ran: dict[Page, Ran] = {}


def run(page: Page, folder: str | None = None, lines: Sequence[int] | None = None) -> Ran:
    """Run the page's blocks, or those at these lines, once per process, in a folder that all ranks share; by default a
    temporary one."""
    if page not in _ran:
        with tempfile.TemporaryDirectory() as own, started_by_torchrun(page, folder or own):
            _ran[page] = _run(page, lines)
    return _ran[page]


def _run(page: Page, lines: Sequence[int] | None) -> Ran:
    import shardtensor
    from shardtensor.layout import caches

    caches.forget()  # as a new process: what is looked at in a mesh's first calls
    if state := sys.modules.get("accelerate.state"):  # which keeps that of an earlier test's program
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    before = shardtensor.extend.registered()
    module = ModuleType(re.sub(r"\W", "_", page.name))  # classes that a page defines are found by pickle and dataclass
    sys.modules[module.__name__] = module
    try:
        outcomes = tuple(
            outcome(page, block, shown, vars(module))
            for block, shown in page.programs
            if lines is None or block.line in lines
        )
    finally:
        # Not those that the package registers when a library is imported first, nor those of DTensor's strategies.
        found = shardtensor.extend.registered().items() - before.items()
        new = {entry: handler for entry, handler in found if not handler.__module__.startswith("shardtensor.")}
        shardtensor.extend.unregister(*new)
    return Ran(vars(module), outcomes, new)


def outcome(page: Page, block: Block, shown: str | None, names: dict[str, Any]) -> tuple[str, str | None]:
    """What a block prints and raises; errors that the page does not show end the page."""
    code = compile("\n" * (block.line - 1) + block.program, str(page.path), "exec")
    with redirect_stdout(io.StringIO()) as printed:
        try:
            exec(code, names)
        except Exception as error:
            if shown is None:
                raise
            return printed.getvalue(), f"{type(error).__name__}: {error}"
    return printed.getvalue(), None


@contextmanager
def started_by_torchrun(page: Page, folder: str) -> Iterator[None]:
    """Run a block as torchrun would in the page's folder: with its variables, and the page's neighbours importable."""
    here, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    made_on = torch.get_default_device()
    torch.set_default_device(None)  # as in a new process; which device there is, is for the page to find out
    os.environ["TORCHELASTIC_RUN_ID"] = "pages"
    sys.path.insert(0, str(page.path.parent))
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        torch.set_default_device(None if made_on.type == "cpu" else made_on)  # a default of "cpu" is a mode, too
        sys.path[:] = path
        del os.environ["TORCHELASTIC_RUN_ID"]
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == page.path.parent:
                del sys.modules[name]


def shows(shown: str, got: str) -> bool:
    """Whether ``got`` is what the page shows, but for white space and what the page leaves out by ``...``."""
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    return re.fullmatch(r"\s*.*\s*".join(parts), " ".join(got.split()), flags=re.S) is not None
