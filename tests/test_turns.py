"""The parts of the suite: each test is in one, and a run takes the one that it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import turns

pytestmark = pytest.mark.every_run


class Config(SimpleNamespace):
    def getoption(self, name):
        return self.options.get(name.strip("-"))


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def config(**options):
    left = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    return Config(options=options, hook=hook, left=left, args_source=None, rootpath=Path(turns.__file__).parent)


def item(module, name, *marks):
    marker = lambda m: m if m in marks else None  # noqa: E731
    return Item(path=module, nodeid=f"{module}::{name}", get_closest_marker=marker)


def suite():
    modules = [f"tests/test_{m}.py" for m in "abcdef"]
    return [item(module, f"test_{i}", *["every_run"] * (i % 4 == 0)) for module in modules for i in range(160)]


def taken(**options):
    items, made = suite(), config(**options)
    turns.select(made, items)
    assert len(items) + len(made.left) == len(suite())
    return {i.nodeid for i in items}


def test_parts_have_all_tests_and_each_has_those_of_every_run():
    parts = [taken(part=str(part)) for part in range(turns.PARTS)]
    always = set.intersection(*parts)
    assert set.union(*parts) == taken(part="all") == taken() == {i.nodeid for i in suite()}
    assert {i.nodeid for i in suite() if i.get_closest_marker("every_run")} == always
    by_turns = [part - always for part in parts]
    assert sum(map(len, by_turns)) == len(set.union(*by_turns))  # each in one part
    assert max(map(len, by_turns)) < 2 * min(map(len, by_turns))


def test_each_run_has_a_test_of_each_module_by_turns():
    found = []
    for part in range(turns.PARTS):
        items, made = [item("tests/test_a.py", f"test_{i}") for i in range(3)], config(part=str(part))
        turns.select(made, items)
        found += [items]
    assert all(found) and len({i.nodeid for items in found for i in items}) == 3


def test_slices_have_all_tests_once():
    slices = [taken(part="all", slice=f"{i}/3") for i in (1, 2, 3)]
    assert sum(map(len, slices)) == len(set.union(*slices)) == len(suite())


def test_the_part_follows_from_the_commit():
    part = turns.drawn(Path(turns.__file__).parent)
    assert 0 <= part < turns.PARTS and part == turns.drawn(Path(turns.__file__).parent)
    assert turns.drawn(Path("/")) == 0  # outside of a clone
    assert turns.told(config(part="3")).startswith("parts: 3 of 0 to 15")
    assert turns.told(config(part="all")) == "parts: all"
