"""Random programs of tensor operations give on shards what they give on one device; see ``random_programs``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardtensor
from random_programs import draw, run_programs

aten = torch.ops.aten
MESHES = [(2,), (3,), (2, 2)]


def share_right(report):
    return report.counted().get("right", 0) / len(report.outcomes)


MORE_SEEDS = [((2,), range(83, 98)), ((2, 2), range(80, 90))]
SLOW = [pytest.param(*values, marks=pytest.mark.slow) for values in MORE_SEEDS]


@pytest.mark.parametrize("mesh, seeds", [((2,), range(38, 83)), ((2, 2), range(60, 80)), *SLOW])
def test_programs_give_what_one_device_gives(mesh, seeds):
    report = run_programs(seeds, mesh, 8)
    assert not report.bad(), report.told()
    assert share_right(report) >= 0.6, report.counted()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_many_programs_give_what_one_device_gives(mesh):
    report = run_programs(range(1000, 2000), mesh)
    assert not report.bad(), report.told()
    assert share_right(report) >= 0.6, report.counted()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_compiled_programs_give_what_one_device_gives(mesh):
    report = run_programs(range(200, 260), mesh, 6, compiled=True, timeout=600)
    assert not report.bad(), report.told()
    assert share_right(report) >= 0.6, report.counted()


# -- defects are found out --------------------------------------------------------------------------------------------


def planted(handler):
    shardtensor.extend.register(aten.sin.default)(handler)
    return lambda: shardtensor.extend.unregister(aten.sin.default)


def wrong_value():
    return planted(lambda x: x.cos())


def another_exception():
    def handler(x):
        raise ZeroDivisionError("division by zero")

    return planted(handler)


def wrong_on_one_rank():
    return planted(lambda x: x * (2 + dist.get_rank()))


@pytest.mark.parametrize("plant, kind",
    [(wrong_value, "wrong value"), (wrong_on_one_rank, "wrong value"), (another_exception, "foreign")],
)
def test_defects_are_found_out(plant, kind):
    """And all lines that have nothing to do with them are left out."""
    programs = {seed: draw(seed, (2,), 6) for seed in range(100)}
    on_shards = {seed: p for seed, p in programs.items() if all(leaf.placements for leaf in p.leaves)}
    seeds = [seed for seed, p in on_shards.items() if any(line.endswith(".sin()") for line in p.lines)]
    report = run_programs(seeds[:3], (2,), 6, setup=plant)
    assert {outcome.kind for outcome in report.outcomes} == {kind}, report.told()
    for outcome in report.bad():
        assert ".sin()" in outcome.program and outcome.program.count("\n") <= 5, outcome.program


@pytest.mark.slow
def test_defects_of_compiled_programs_are_found_out():
    programs = {seed: draw(seed, (2,), 3) for seed in range(100)}
    seed = next(seed for seed, p in programs.items() if any(line.endswith(".sin()") for line in p.lines))
    report = run_programs([seed], (2,), 3, setup=wrong_value, compiled=True, timeout=300)
    assert [outcome.kind for outcome in report.outcomes] == ["wrong value"], report.told()
