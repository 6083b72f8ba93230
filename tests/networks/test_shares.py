"""The table of how much of the work of networks two ranks share."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from networks import shares
from networks.oracle import Network
from networks.shares import Row, counted, listed, section


class Fixed(nn.Module):
    """Takes images of one size only, and ends with a layer over all of their pixels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        convolutions = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 3, 2, 1)
        self.layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4 * size * size, 8))

    def forward(self, x):
        return self.layers(x)


def pools(_):
    first, second, last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 1, 1)
    return nn.Sequential(first, nn.AvgPool2d(8), second, last)


def test_shards_are_lengthened_until_no_map_is_short():
    row = counted("pools", Network(pools, (1, 3, 32, 8)), torch)
    assert row.shape == (1, 3, 128, 8)  # of which the convolution behind the pool has 16 rows, 8 on each rank
    assert row.work == 1.0 and 1.0 <= row.kept < 1.1 and not row.why


def test_a_network_that_takes_one_size_is_counted_at_that():
    row = counted("fixed", Network(lambda _: Fixed(8), (1, 3, 16, 16)), torch)
    assert row.shape == (1, 3, 16, 16) and row.work == 1.0


class Latents(nn.Module):
    """Few plain rows, on which every rank does the same, and layers for an input of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(8, 4))
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x)) + self.last(self.rows).sum()


def test_what_is_above_the_bars_is_counted_at_larger_sizes():
    row = counted("latents", Network(lambda _: Latents(), (1, 8, 4), 1), torch)
    assert row.shape == (1, 64, 4) and 1.0 <= row.work < 1.1 and not row.why
    network = Network(lambda _: Latents(), (1, 8, 4), 1, lambda network, x: x + network(network.rows))
    row = counted("alike", network, torch)
    assert row.work == 2.0 and row.why.count("on every rank alike")


def test_networks_above_the_bars_are_few_and_have_reasons():
    high = {row.name for rows in shares.stored().values() for row in rows if shares.is_high(row.work, row.kept)}
    assert high == shares.REASONS.keys() and len(high) <= 15


def test_a_network_is_counted_at_the_size_at_which_it_is_used(monkeypatch, tmp_path):
    small = Network(pools, (1, 3, 128, 8), at_use={"shape": (1, 3, 256, 8), "make": lambda _: pools(_)[:3]})
    module = SimpleNamespace(NETWORKS={"small": small})
    monkeypatch.setattr(shares, "RESULTS", tmp_path / "shares.json")
    monkeypatch.setattr(shares.importlib, "import_module", {"networks.test_here": module, "torch": torch}.get)
    (row,) = shares.rows_of("test_here")
    assert row.shape == (1, 3, 256, 8) and row.why == "too few products for a network"


def test_rows_that_are_there_stay_and_no_network_ends_the_command_twice(monkeypatch, tmp_path):
    networks = {name: Network(pools, (1, 3, 128, 8)) for name in ("first", "second", "third")}
    module = SimpleNamespace(NETWORKS=networks)
    monkeypatch.setattr(shares, "RESULTS", tmp_path / "shares.json")
    monkeypatch.setattr(shares.importlib, "import_module", {"networks.test_here": module, "torch": torch}.get)
    first = Row("here first", (1, 1), 0, 1.05, 1.0)
    shares.store({"test_here": [first]})
    monkeypatch.setattr(shares, "counted", lambda name, *_: sys.exit(1))  # as a process that dies
    with pytest.raises(SystemExit):
        shares.rows_of("test_here", missing=True)
    assert [(row.name, row.why) for row in shares.stored()["test_here"]] == [
        ("here first", ""),
        ("here second", "the process ended"),
    ]
    monkeypatch.setattr(shares, "counted", lambda name, *_: Row(name, (1, 3), 1, 1.0, 1.0))
    found = shares.rows_of("test_here", missing=True)
    assert [(row.name, row.work) for row in found] == [("here first", 1.05), ("here second", None), ("here third", 1.0)]


def test_what_cannot_be_counted_says_why():
    def reads(network, x):
        return network(x) if x.sum() > 0 else x

    row = counted("reads", Network(pools, (1, 3, 32, 8), call=reads), torch)
    assert row.work is None and row.why
    assert counted("relu", Network(lambda _: nn.ReLU(), (1, 3, 32, 8)), torch).why == "too few products for a network"


def test_the_section_names_what_is_above_the_bars():
    repeated = "50% of the work is done on every rank alike, from mlp.0 linear on."
    rows = [Row(f"plain {k}", (1, 8), 1, 1.0 + k / 100, 1.0) for k in range(8)]
    rows += [Row("high", (1, 8), 1, 1.5, None, repeated), Row("left out", (1, 8), 1, None, None, "no products")]
    text = section({"of a module": rows})
    assert "| work | 9 | 8 | 1.04 | 1.50 | 1.50 |" in text
    assert "| kept for backward | 8 | 8 | 1.00 | 1.00 | 1.00 |" in text
    assert "| high | 1x8, 1 | 1.50 |  | `mlp.0 linear`, 50% of the work |" in text and "left out" not in text


def test_all_modules_that_list_networks_are_found():
    assert {"test_monai", "test_transformers", "test_timm"} <= set(listed()) and "test_shares" not in listed()
