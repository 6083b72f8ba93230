"""What benchmarks print and write, and that the page with their results says what the results say."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.tensor import Shard

from shardtensor.testing import Communication, count_communication, shard, shared_mesh

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # A package of the tests has this name, too, and is imported where these ran before.
    if not getattr(sys.modules.get("networks"), "__file__", str(BENCHMARKS)).startswith(str(BENCHMARKS)):
        monkeypatch.delitem(sys.modules, "networks")

    def load(name):
        if name != "__main__":
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location("benchmarks_main", BENCHMARKS / "__main__.py")
        main = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(main)
        return main

    return load


def figures(report):
    times = {"best": {"two": 0.0012, "one": 2.5}, "median": {"two": 0.0013, "one": 2.75}}
    return [
        report.Figure("first", "small enough", 1.1, bar=1.1, **times),
        report.Figure("first", "too large", 1.11, bar=1.1),
        report.Figure("second", "fast enough", 1.6, bar=1.6, at_least=True),
        report.Figure("second", "too slow", 1.59, bar=1.6, at_least=True),
        report.Figure("second", "no bar", 3.0, "us"),
        report.Figure("second", "not there", None, bar=0.5, note="it is not installed"),
    ]


def test_verdicts_are_next_to_bars(module):
    report = module("report")
    rows = figures(report)
    assert [row.verdict for row in rows] == ["met", "missed", "met", "missed", "", ""]
    lines = [" ".join(line.split()) for line in report.table(rows).splitlines()]
    assert "small enough 1.10x <= 1.10x met two 1.2 ms (1.3 ms), one 2.50 s (2.75 s)" in lines
    assert "too slow 1.59x >= 1.60x missed" in lines
    assert "no bar 3.0 us" in lines
    assert "not there - <= 0.50x it is not installed" in lines
    assert report.table(rows).endswith("2 of 4 bars met")
    assert "| fast enough | 1.60x | >= 1.60x | met |  |" in report.markdown(rows)
    assert "not there" not in report.markdown(rows)


def test_what_is_written_is_read(module, tmp_path):
    report = module("report")
    report.write(tmp_path / "figures.json", figures(report))
    content = json.loads((tmp_path / "figures.json").read_text())
    assert report.read(content) == figures(report)
    assert {"date", "torch", "cpu", "cores"} <= content["about"].keys()


def test_best_and_median(module):
    assert module("report").best_and_median({"a": [3.0, 1.0, 7.0]}) == {"best": {"a": 1.0}, "median": {"a": 3.0}}


@pytest.mark.parametrize("name", ["performance.md", "benchmarks.md"])
def test_the_pages_hold_the_results(module, name):
    main = module("__main__")
    parts, page = main.stored(main.RESULTS), (main.DOCS / name).read_text()
    plots = parts.get("plots", {})
    assert page == main.with_section(page, main.PAGES[name](parts, plots)), "run: python benchmarks --only --write"
    assert all((main.RESULTS / file).is_file() for files in plots.values() for file in files)


def test_a_part_measured_anew_replaces_its_figures_only(module, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    main, report = module("__main__"), module("report")
    about = {"torch": "2", "python": "3", "cpu": "C", "cores": 2, "device": "cpu", "date": "2026-01-01T00:00"}

    def measured(value):
        row = {"group": "g", "name": f"ratio {value}", "value": value}
        return lambda part, quick, device: {"about": about, "figures": [row | {"group": part}], "seconds": 1}

    for value, only in ((1.0, ["host", "scale"]), (2.0, ["scale"])):
        monkeypatch.setattr(main, "run", measured(value))
        assert main.main(["--results", str(tmp_path), "--only", *only]) == 0
    parts = main.stored(tmp_path)
    assert main.figures_of(parts) == [report.Figure("host", "ratio 1.0", 1.0), report.Figure("scale", "ratio 2.0", 2.0)]
    where = "with torch 2 and Python 3 on C, 2 cores"
    ran = "They come from these benchmarks, which ran for 1 s (`host`), 1 s (`scale`)."
    assert main.circumstances(parts) == [f"These figures were measured on 2026-01-01, {where}. {ran}"]
    assert parts["plots"] == {"host": ["host.png"], "scale": ["scale.png"]}
    assert (tmp_path / "host.png").is_file() and (tmp_path / "scale.png").is_file()
    monkeypatch.setattr(main, "run", lambda part, quick, device: None)
    assert main.main(["--results", str(tmp_path), "--only", "scale"]) == 1
    assert main.figures_of(main.stored(tmp_path)) == main.figures_of(parts)


def test_the_model_adds_latencies_and_bytes(module):
    machine = module("machine")
    links = {"all_reduce": machine.Link(0.5, 100.0), "all_to_all": machine.Link(0.25, 10.0)}
    counted = Communication(messages=3, bytes_sent=40, collective_bytes=200)
    counted.collectives.update({"all_to_all": 2, "all_reduce": 3, "all_gather": 1})
    assert machine.communication_time(links, counted) == 2 * 0.25 + 40 / 10 + 4 * 0.5 + 200 / 100


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("ranks", timeout=180)
def test_steps_by_hand_have_our_numbers_and_messages(ranks):
    with mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):
        host, by_hand = importlib.import_module("bench_host"), importlib.import_module("by_hand")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, (network, shape, dim) in host.NETWORKS.items():
        torch.manual_seed(0)
        model, tensors = network().double(), [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
        manual = by_hand.OverRanks(copy.deepcopy(model), rank, ranks)
        sharded = [shard(t, shared_mesh(ranks), [Shard(dim)]) for t in tensors]
        for _ in range(2):  # in first calls, ranks also compare what they pass
            for trained in (model, manual):
                trained.zero_grad()
            with count_communication() as sent:
                loss = host.train(model, *sharded)
            with count_communication() as sent_by_hand:
                of_rank = host.train(manual, *(t.chunk(ranks, dim)[rank] for t in tensors)).detach()
        assert sent_by_hand == sent, name
        dist.all_reduce(of_rank)
        by_name = {"loss": (of_rank / ranks, loss.full_tensor().detach())}
        parameters = zip(model.named_parameters(), manual.parameters(), strict=True)
        by_name |= {label: (q.grad, p.grad) for (label, p), q in parameters}
        buffers = zip(model.named_buffers(), manual.buffers(), strict=True)
        by_name |= {label: (c, b) for (label, b), c in buffers}
        for part, (found, expected) in by_name.items():
            torch.testing.assert_close(
                found, expected, rtol=1e-10, atol=1e-13, msg=lambda text, of=f"{name}, {part}": f"{of}: {text}"
            )


def test_all_collectives_of_the_globe_wait_for_each_other(module):
    messages, networks = module("bench_messages"), module("networks")
    globe = replace(networks.NETWORKS["globe U-Net"], shape=(1, 3, 64, 64))
    found = messages.collectives_of(globe)
    chain = [one.depth for one in found]
    assert len(found) == 61 and set(chain) == set(range(1, 61))
    (beside,) = [one for one in found if chain.count(one.depth) > 1 and one.operator == messages.WEIGHTS]
    assert beside.kind == "all-reduce"
    assert messages.drawing(found) in (ROOT / "docs" / "benchmarks.md").read_text(), "--drawing of bench_messages.py"


def test_what_does_not_wait_is_not_in_a_chain(module):
    messages, networks = module("bench_messages"), module("networks")

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (torch.nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

        def forward(self, x):
            return self.first(x) + self.second(x)  # both fetch their halo of the same input

    found = messages.collectives_of(networks.Network(Twice, (1, 2, 8, 4), 2))
    assert [(one.path, one.kind, one.depth) for one in found] == [
        ("first", "exchange", 1),
        ("second", "exchange", 1),
        ("", "all-reduce", 2),  # of gradients made of both halos
    ]


@pytest.mark.parametrize("name", ["U-Net", "MeshGraphNet"])
def test_an_inner_rank_does_as_much_in_a_larger_world(module, name):
    messages = module("bench_messages")

    def image(ranks):
        return [torch.empty(1, 3, 16 * ranks, 8, device="meta")], [2], [None]

    def unet():
        down = [torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.GroupNorm(2, 4), torch.nn.SiLU()]
        return torch.nn.Sequential(*down, torch.nn.ConvTranspose2d(4, 4, 3, 2, 1, 1), torch.nn.GroupNorm(2, 4))

    case = messages.Growing(unet, image) if name == "U-Net" else messages.mesh(2, 8)
    (small, _), (large, _) = (messages.counted(case, ranks) for ranks in (3, 20))
    assert small.messages == large.messages > 0 and small.flops == large.flops
    assert small.kept <= large.kept <= 1.05 * small.kept and small.sent <= large.sent <= 1.05 * small.sent
    # Among more than 16 ranks two sums take the place of gathering the moments, of each norm.
    assert large.collectives == small.collectives + 2 * (name == "U-Net")


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        *("house", "host", "messages", "overhead", "operators", "networks", "compile", "memory", "graphs"),
        *("scale", "neighbors", "autoencoders"),
    ],
)
def test_each_part_runs(script, tmp_path):
    file = tmp_path / "figures.json"
    rows = {
        "house": "x + 1",
        "messages": "globe U-Net, chains",
        "operators": "conv2d",
        "networks": "Fourier",
        "compile": "ViT",
        "memory": "Fourier",
        "scale": "mean",
        "neighbors": "nearest, partitioned",
        "graphs": "grid",
        "autoencoders": "AutoencoderDC",
    }
    only = rows.get(script, "linear")
    command = [sys.executable, BENCHMARKS / f"bench_{script}.py", "--quick", "--only", only, "--json", file]
    subprocess.run(command, check=True, timeout=300)
    assert any(row["value"] is not None for row in json.loads(file.read_text())["figures"])


# -- the README -------------------------------------------------------------------------------------------------------

# Numbers of its prose that are no results: versions, numbers of ranks, sizes of devices, what its commands take.
VERSIONS = {"0.21.7", "2.0", "2.2.2", "2.3", "2.11", "2.13", "2.15", "3.10", "2026"}
NO_RESULTS = {"1", "2", "3", "4", "8", "10", "24", "64", "80", "200"} | VERSIONS


def numbers(text):
    return set(re.findall(r"\d[\d,.]*\d%?|\d%?", text))


def test_the_readme_holds_the_results_and_no_other_figure(module):
    readme, claims = (ROOT / "README.md").read_text(), module("claims").claims()
    on_one_line = " ".join(readme.split())
    missing = [f"{claim} ({source})" for claim, source in claims if " ".join(claim.split()) not in on_one_line]
    assert not missing, "make claims has others:\n" + "\n".join(missing)
    prose = re.sub(r"^ *```.*?^ *```$|\]\([^)]*\)", "", readme, flags=re.M | re.S)
    assert not numbers(prose) - NO_RESULTS - numbers(" ".join(claim for claim, _ in claims))


@pytest.mark.slow
def test_what_a_rank_holds_is_what_was_counted(module, tmp_path):
    """The network that needs no other package."""
    main, file = module("__main__"), tmp_path / "figures.json"
    command = [sys.executable, BENCHMARKS / "bench_capacity.py", "--quick", "--only", "image", "--json", file]
    subprocess.run(command, check=True, timeout=900)
    stored = {row.name: row.value for row in main.figures_of(main.stored(main.RESULTS))}
    counted = json.loads(file.read_text())["figures"]
    assert len(counted) == 12
    assert {row["name"]: row["value"] for row in counted} == {row["name"]: stored[row["name"]] for row in counted}


def test_networks_are_counted_by_their_package():
    spec = importlib.util.spec_from_file_location("count_of_networks", ROOT / "tests/networks/count.py")
    count = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(count)
    file = "tests/networks/test_{}.py::test_networks_are_exact[{}]"
    tests = [file.format("timm", "vgg"), file.format("monai", "UNet"), file.format("audio", "julius, low pass"), ""]
    tests += [file.format("example_jobs", "2"), file.format("monai_tools", "a"), tests[0].replace("exact", "refused")]
    assert count.counted(tests) == {"timm": 1, "MONAI": 2, "julius": 1}
    counts = json.loads(count.RESULTS.read_text())["networks"]
    assert list(counts.values()) == sorted(counts.values(), reverse=True)


def test_what_the_readme_says_of_a_peer_was_seen():
    content = json.loads((BENCHMARKS / "results/peers.json").read_text())
    rows = {(row["program"], *row["shards"]): row["PhysicsNeMo"] for row in content["rows"]}
    assert {row["shardtensor"] for row in content["rows"]} == {"right"}
    assert rows["convolution, 3 x 3, stride 2", 9, 7] == "another shape"
    assert rows["mean squared error", 12, 4] == "other numbers"
    assert f"ShardTensor {content['about']['physicsnemo']}" in (ROOT / "README.md").read_text()


def test_pictures_are_small():
    for picture in (ROOT / "docs/images").iterdir():
        assert picture.stat().st_size < 200_000, picture.name


def test_charts_and_drawings_are_drawn(tmp_path):
    """What takes no run of a network."""
    pytest.importorskip("matplotlib")
    names = ("memory", "largest", "scaling", "halo-steps", "ring", "fft")
    command = [sys.executable, BENCHMARKS / "figures.py", "--folder", tmp_path, "--only", *names]
    subprocess.run(command, check=True, timeout=300)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(names)
    assert set(names) <= {path.stem for path in (ROOT / "docs/images").iterdir()}
