"""The documentation: its code runs as printed, and what it refers to exists."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from pages import ROOT, Page, fenced, pages, run, shows

from shardtensor.testing import run_distributed

PAGES = pages()
MAKEFILE = (ROOT / "Makefile").read_text()
OURS = r"(?:docs|examples|tests|benchmarks|shardtensor)/[\w./-]*\w|[A-Z]+\.md|Makefile|constraints\.txt|pyproject\.toml"


def run_on_this_rank(page: Page, folder: str, lines=None):
    return run(page, folder, lines).outcomes


RUN_APART = """
import json, sys
import device.emulated
import test_pages
outcomes = test_pages.run_on_this_rank(test_pages.Page(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
json.dump(outcomes, open("outcomes.json", "w"))
"""


def run_apart(page: Page, folder: Path, lines: list[int]):
    """In a process of its own: the emulated device is there before torch is imported."""
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT)))
    command = [sys.executable, "-c", RUN_APART, page.name, str(folder), json.dumps(lines)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "outcomes.json").read_text())


# Pages whose programs run in every run, on both devices; those of the others run by turns.
FIRST_HOUR = ("README.md", "docs/quickstart.md")
# What the emulated device cannot run, by a word in the program, and why; nothing else may be here.
NOT_EMULATED = {
    "torch.compile(": "torch.compile needs Triton",
    "to_sparse_csr()": "the emulated device has no sparse kernels",
}


def cannot_run(block, device):
    """Why a program does not run on a device, or None."""
    return next((why for word, why in NOT_EMULATED.items() if device == "emulated" and word in block.text), None)


def pytest_generate_tests(metafunc):
    """Each page on the CPU and on the emulated device; or with ``--device`` on that one."""
    if metafunc.function is not test_code_runs_as_printed:
        return
    cases, chosen = [], metafunc.config.getoption("--device")
    for page in PAGES:
        for device in ("cpu", "emulated") if chosen == "cpu" else (chosen,):
            marks = [pytest.mark.every_run] if page.name in FIRST_HOUR else []
            if page.programs:
                cases.append(pytest.param(page, device, marks=marks, id=f"{page}-{device}"))
    metafunc.parametrize("page, device_of_ranks", cases, indirect=["device_of_ranks"])


def test_code_runs_as_printed(page, device_of_ranks, tmp_path):
    left_out = {block: why for block, _ in page.programs if (why := cannot_run(block, device_of_ranks))}
    for block, why in left_out.items():
        print(f"not on the {device_of_ranks} device: {page}:{block.line}: {why}")
    programs = [program for program in page.programs if program[0] not in left_out]
    if not programs:
        pytest.skip("; ".join(left_out.values()))
    lines = [block.line for block, _ in programs]
    if page.ranks:
        first, *others = run_distributed(run_on_this_rank, page.ranks, page, str(tmp_path), lines, timeout=300)
    elif device_of_ranks == "emulated":
        first, others = run_apart(page, tmp_path, lines), []
    else:
        first, others = run_on_this_rank(page, str(tmp_path)), []
    for i, (block, shown) in enumerate(programs):
        printed, error = first[i]
        where = f"{page}:{block.line}"
        if shown is not None:
            assert shows(shown, error or printed), f"{where} gets\n{error or printed}"
        # The others raise the same kind of error, of their own numbers.
        kinds = {outcomes[i][1] and outcomes[i][1].partition(":")[0] for outcomes in (first, *others)}
        assert len(kinds) == 1, f"{where}: {kinds}"


STARTED = [("README.md", 1), ("docs/quickstart.md", 1), pytest.param("docs/tutorial.md", 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("name, times", STARTED)
def test_programs_by_torchrun(name, times, tmp_path):
    """As a reader runs them, and runs them again: the blocks in a file, torchrun, and what the page shows."""
    page = Page(name)
    program = [block.program for block in page.blocks if block.language in ("python", "diff")]
    shown = [block.text for block in page.blocks if block.language == "text"]
    (command,) = (line for block in page.blocks for line in block.text.splitlines() if line.startswith("torchrun "))
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    (tmp_path / torchrun[-1]).write_text("\n".join(program))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(times):
        done = subprocess.run(torchrun, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert shows("".join(shown), done.stdout)


@pytest.mark.on_cpu("the notebook says that it runs on CPUs")
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capfd):
    """Its cells in their order; of the commands that notebooks have, it uses these two."""
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text())["cells"]
    names, written = {}, {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        first, _, rest = source.partition("\n")
        if first.startswith("%%writefile "):
            written[first.split()[1]] = rest
            Path(first.split()[1]).write_text(rest)
        elif first.startswith("!torchrun "):
            subprocess.run([sys.executable, "-m", "torch.distributed.run", *first.split()[1:]], check=True, timeout=180)
        else:
            exec(source, names)
    (program,) = (block for block in Page("docs/quickstart.md").blocks if block.language == "python")
    assert written == {"quickstart.py": program.text.rstrip("\n")}
    shown = capfd.readouterr().out
    assert "0 conv2d" in shown and "loss and gradients are those of one process" in shown
    assert names["found"]._repr_html_().startswith("<iframe")


def test_blocks_are_told_apart():
    text = "a\n\n<!-- needs: zarr -->\n```python\nx = 1\n```\n\n```text\n1\n```\nb\n\n  ```text\n  2\n  ```\n"
    first, second, third = fenced(text)
    assert (first.language, first.text, first.line, first.needs) == ("python", "x = 1\n", 5, ("zarr",))
    assert (second.text, second.follows, third.text, third.follows) == ("1\n", True, "2\n", False)
    assert shows("a ...\n c", "a b\n\nc") and not shows("a c", "a b c") and not shows("a ...", "b a")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.startswith(("docs/", "README"))], ids=str)
def test_code_fits_the_sites_column(page):
    """Of 80 columns. Tables that a program prints may be wider: their columns are aligned by several spaces."""
    wide = [
        f"{page}:{block.line + i}"
        for block in page.blocks
        if block.language != "{eval-rst}"
        for i, line in enumerate(block.text.splitlines())
        if len(line) > 80 and not (block.language == "text" and re.search(r"\S {2,}\S|-{40}", line))
    ]
    assert not wide, wide


# -- what pages refer to ----------------------------------------------------------------------------------------------


@cache
def anchors(page: Page) -> set[str]:
    """The anchors of a page's headings, as forges and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", page.prose, flags=re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.prose):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(Page(str(path.relative_to(ROOT)))), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_and_targets_that_are_named_exist(page):
    code = re.findall(r"`([^`\n]+)`", page.prose) + [b.text for b in page.blocks if b.language in ("", "bash")]
    for text in code:
        for file in re.findall(rf"(?<![\w./*-])(?:{OURS})(?![\w*<{{])", text):
            made = file.startswith("docs/_build")
            assert made or (ROOT / file).exists() or (page.path.parent / file).exists(), f"{page}: {file}"
        for target in re.findall(r"(?:^|[`;&|] *)make ([a-z][\w-]*)", text, flags=re.M):
            assert re.search(rf"^{re.escape(target)}:", MAKEFILE, flags=re.M), f"{page}: make {target}"


def contents(page: Page) -> dict[str, list[str]]:
    """The pages that this one lists in its tables of contents, by their captions."""
    found = {}
    for block in page.blocks:
        if block.language == "{toctree}":
            caption = re.search(r"^:caption: (.*)$", block.text, flags=re.M)
            found[caption[1] if caption else ""] = re.findall(r"^[\w-]+$", block.text, flags=re.M)
    return found


def test_each_page_is_in_the_sites_contents():
    docs = [page for page in PAGES if page.name.startswith("docs/")]
    listed = [name for page in docs for names in contents(page).values() for name in names]
    assert sorted([*listed, "index"]) == sorted(page.path.stem for page in docs)


def test_pages_for_users_are_short():
    """Together, without code, tables that programs write, and the texts of pictures; those for contributors apart."""
    written = re.compile(r"<!-- begin: written.*?<!-- end.*?-->|<!-- The rest is written.*|!\[[^]]*\]", flags=re.S)
    parts = contents(Page("docs/index.md"))
    names = [name for part, names in parts.items() if part != "For contributors" for name in names]
    words = {name: len(written.sub("", Page(f"docs/{name}.md").prose).split()) for name in names}
    assert sum(words.values()) <= 25_000, words


def names_defined(file: Path) -> set[str]:
    """What a module defines: ``function``, ``CONSTANT``, ``Class``, ``Class.method``; also what it sets on a class."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {ast.unparse(target) for target in getattr(node, "targets", [getattr(node, "target", None)])}
    return names


def test_the_tour_of_the_code_names_what_there_is():
    page = Page("docs/reading-the-code.md")
    files = re.findall(r"\]\(\.\./(shardtensor/[\w/]+\.py)\)", page.prose)
    ours = set().union(*(names_defined(ROOT / file) for file in files))
    of_torch = {"x", "weight", "bias", "DTensor", "F.conv2d", "autograd.Function", "aten.add.Tensor"}
    of_torch.add("__torch_dispatch__")
    named = {name for name in re.findall(r"`([^`\n]+)`", page.prose) if re.fullmatch(r"[\w.]+", name)}
    assert len(files) > 15 and len(named - of_torch) > 25
    assert not named - of_torch - ours


MODULES = ("extend", "parallel", "data", "checkpoint", "neighbors", "debug", "testing")
PUBLIC = ["shardtensor", *(f"shardtensor.{name}" for name in MODULES)]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_all_public_names(module):
    text = Page(f"docs/reference-{module.rpartition('.')[2]}.md").text
    documented = set(re.findall(rf"^\.\. auto(?!module)\w+:: {re.escape(module)}\.(\w+)$", text, flags=re.M))
    listed = re.search(rf"^\.\. automodule:: {re.escape(module)}\n   :members:(.*)$", text, flags=re.M)
    names = set(importlib.import_module(module).__all__)
    if listed and not listed[1]:
        documented |= names
    elif listed:
        documented |= set(listed[1].replace(",", " ").split())
    assert documented == names
    for name in names:
        assert (getattr(importlib.import_module(module), name).__doc__ or "").strip(), name
