"""The part of docs/layout.md that is for several ranks; tests/test_pages.py runs the page in one process."""

from __future__ import annotations

import json

import torch
from pages import Page
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor.testing import run_distributed, shard, shared_mesh


def step_of_page(path):
    model = nn.Conv2d(3, 4, 3, padding=1)
    x = shard(torch.randn(1, 3, 8, 8), shared_mesh(2), [Shard(2)])
    code = next(block.text for block in Page("docs/layout.md").blocks if "def step" in block.text)
    names = {}
    exec("import shardtensor\n" + code, names)
    names["step"](path, model, x)


def test_the_timeline_of_the_page(tmp_path):
    run_distributed(step_of_page, 2, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}
