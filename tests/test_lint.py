"""Rules of the code's structure that linters do not know, checked on the syntax tree of every module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import shardtensor

pytestmark = pytest.mark.every_run

ROOT = Path(shardtensor.__file__).parent
REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = {
    ".".join(("shardtensor", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
# Every private torch API is touched here, and nowhere else.
COMPAT = {
    "shardtensor._compat",
    "shardtensor._compat.c10d",
    "shardtensor._compat.data_parallel",
    "shardtensor._compat.functorch",
    "shardtensor._compat.replaced",
    "shardtensor.observe._compat",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports(name: str, tree: ast.AST):
    """``(module, names)`` of a module's imports, absolute; names are None for ``import module``."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])]), [alias.name for alias in node.names]


def attribute_path(node: ast.expr) -> list[str]:
    """``["torch", "_C", "_nn"]`` for ``torch._C._nn``; empty for anything that does not start at a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def test_private_torch_api_is_touched_in_one_module():
    found = []
    for name, tree in TREES.items():
        if name in COMPAT:
            continue
        for module, names in imports(name, tree):
            parts = module.split(".")
            if parts[0] == "torch" and any(map(is_private, [*parts, *(names or ())])):
                found.append(f"{name}: {module} {names or ''}")
        for node in ast.walk(tree):
            path = attribute_path(node) if isinstance(node, ast.Attribute) else []
            # Private operators of torch.ops are what torch's own functions call, by their schema.
            if path[:1] == ["torch"] and path[1:2] != ["ops"] and any(map(is_private, path)):
                found.append(f"{name}:{node.lineno}: {'.'.join(path)}")
    assert not found, "\n".join(sorted(set(found)))


def test_no_module_imports_private_names_of_another():
    found = []
    for name, tree in TREES.items():
        for module, names in imports(name, tree):
            private = [n for n in names or () if is_private(n) and f"{module}.{n}" not in MODULES]
            if module.startswith("shardtensor") and private:
                found.append(f"{name}: {private} of {module}")
    assert not found, "\n".join(found)


def test_no_module_sets_an_attribute_of_another():
    """What is filled in from outside cannot be found by reading the module that has it."""
    found = []
    for name, tree in TREES.items():
        package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
        bound = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                base += [node.module] if node.module else []
                modules = [alias for alias in node.names if ".".join([*base, alias.name]) in MODULES]
                bound |= {alias.asname or alias.name for alias in modules}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                path = attribute_path(target) if isinstance(target, ast.Attribute) else []
                if len(path) == 2 and path[0] in bound:
                    found.append(f"{name}:{node.lineno}: {'.'.join(path)}")
    assert not found, "\n".join(found)


def test_modules_import_each_other_in_no_circle():
    """Neither inside of functions, nor for type checkers alone: who reads one module needs those that it imports."""
    edges: dict[str, set[str]] = {}
    for name, tree in TREES.items():
        edges[name] = set()
        for module, names in imports(name, tree):
            for target in {module, *(f"{module}.{n}" for n in names or ())}:
                # A package's __init__ imports its modules; that a module's import runs it is no dependency of its own.
                if target in MODULES and target != name and not name.startswith(f"{target}."):
                    edges[name].add(target)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            pytest.fail("a circle of imports: " + " -> ".join([*path[path.index(name) :], name]))
        if name not in done:
            for target in sorted(edges[name]):
                if MODULES[target].name != "__init__.py" or name == "shardtensor":
                    visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_packages_import_from_those_above_them_in_the_table_of_contents():
    contents = re.findall(r"^\| `(\w+)/?` \|", (REPOSITORY / "docs/design.md").read_text(), re.MULTILINE)
    top = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(contents) == sorted(top - {"__init__"}) and len(contents) <= 18
    found = []
    for name, tree in TREES.items():
        for module, names in imports(name, tree):
            for target in (module, *(f"{module}.{n}" for n in names or ())):
                if target in MODULES and target != "shardtensor" and name != "shardtensor":
                    place, other = (contents.index(m.split(".")[1]) for m in (name, target))
                    if other > place:
                        found.append(f"{name} imports {target}")
    assert not found, "\n".join(sorted(set(found)))


def test_notes_are_few_and_the_design_names_each():
    """A note's name in brackets begins the paragraph that explains it; anywhere else it refers to that paragraph."""
    begins = re.compile(r'(?:\n *#?\n *(?:# )?|""")\[Note: ([^\]]+)\]')
    notes = [name for path in MODULES.values() for name in begins.findall(path.read_text())]
    assert len(notes) == len(set(notes)) <= 60
    pages = {*(REPOSITORY / "docs").glob("*.md"), *REPOSITORY.glob("*.md")}
    files = {*MODULES.values(), *(REPOSITORY / "tests").rglob("*.py"), *pages} - {Path(__file__).resolve()}
    named = {}
    for path in files:
        on_one_line = " ".join(path.read_text().replace("#", " ").split())
        named[path] = set(re.findall(r"\[Note: ([^\]]+)\]", on_one_line)) - {"...", "name"}
    unknown = {f"{path.name}: {name}" for path, names in named.items() for name in names - set(notes)}
    assert not unknown, f"no paragraph of the package begins with these notes: {unknown}"
    assert not set(notes) - named[REPOSITORY / "docs/design.md"], "the design has a place for each mechanism"


@pytest.mark.parametrize("name", MODULES)
def test_size(name):
    """Functions fit on a screen."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            start = node.body[0]
            documented = isinstance(start, ast.Expr) and isinstance(start.value, ast.Constant)
            length = node.end_lineno - (start.end_lineno if documented else node.lineno)
            assert length <= 60, f"{node.name} has {length} lines"


NAMED = sorted(
    {
        found
        for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))
        for found in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text())
    }
)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_test_that_the_docs_name_exists(file, name):
    tree = ast.parse((REPOSITORY / file).read_text())
    assert not name or name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_device_is_named():
    """Code follows the mesh's device type."""
    for path in (*MODULES.values(), *(REPOSITORY / "examples").rglob("*.py")):
        assert not re.search(r"[\"']cuda|\.cuda\(", path.read_text()), path
