"""The code of docs/explain.md runs as it stands, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import json
import re
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor.testing import run_distributed, shard, shared_mesh

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"
BLOCKS = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", flags=re.S)


@cache
def run_page():
    """What the blocks define, and for each with an output what it prints and should print."""
    names, printed = {"__name__": "page"}, []
    for code, expected in BLOCKS.findall(PAGE.read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(PAGE), "exec"), names)
        printed.append((out.getvalue(), expected))
    return names, printed


def test_blocks_print_what_the_page_says():
    _, printed = run_page()
    assert len(printed) == 6
    for found, expected in printed:
        assert found == expected


def step_of_page(path):
    model = nn.Conv2d(3, 4, 3, padding=1)
    x = shard(torch.randn(1, 3, 8, 8), shared_mesh(2), [Shard(2)])
    code = next(code for code, _ in BLOCKS.findall(PAGE.read_text()) if "def step" in code)
    names = {}
    exec("import shardtensor\n" + code, names)
    names["step"](path, model, x)


def test_the_timeline_of_the_page(tmp_path):
    run_distributed(step_of_page, 2, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}
